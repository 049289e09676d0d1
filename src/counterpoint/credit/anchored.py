"""Group-in-group: the rollout against its group, and the turn against turns from the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from counterpoint.credit.anchors import (
    KEY,
    Order,
    anchor_groups,
    check_key,
    key_cost,
    sample_sizes,
    similar_anchors,
)
from counterpoint.credit.grouped import Singleton, Spread, check_spread, compared, standing
from counterpoint.credit.returns import Clock, MaskedReward, returns
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps, Weight


def gigpo(
    steps: Steps,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    weight: Weight = "rollout",
    key: Sequence[str] = KEY,
    similarity: float | None = None,
    order: Order = "sorted",
    autojunk: bool = True,
    masked_reward: MaskedReward = "previous",
    step_unit: Clock = "event",
    invalid_penalty: float = 0.0,
) -> Credit:
    """Group-in-group advantage: the rollout's against its group, plus the turn's at its anchor.

    Estimates `outcome+anchor`: Q(h, a) − V(h₀), the same for the whole rollout, plus
    Q(o, a) − V(o), where o is what was observed before the action (the anchor).

        A = A_E + w · A_S
        A_E = (R − mean R) / (std R + eps)        over the rollouts of the group
        A_S = (G_t − mean G) / (std G + eps)      over the turns of the group at the same anchor

    Source: GiGPO (arXiv:2505.10978, eq. 3–8).

    Args:
        steps: rows with `group`, `rollout`, `outcome`, `anchor`, `mask`, and `reward` or, already
            discounted and then used as it stands, `step_return`.
        gamma: factor per step in G, 0 to 1. A_E compares undiscounted outcomes.
        step_weight: w, a number from 0 up.
        normalize_std: divide both parts by their standard deviations (`mean_std_norm` of the public
            code), or neither (`mean_norm`).
        ddof: 1 divides squared deviations by n − 1, 0 by n.
        eps: added to a standard deviation.
        sigma_floor: a group or anchor that spreads at or below this has no signal: 0 in that part.
        singleton: what A_E is in a group of one scored rollout: 0, its raw outcome, or an error.
        weight: whether A_E counts each rollout once ("rollout") or each turn ("step").
        key: what must agree for two turns of a group to be compared, of anchor, agent, role, task
            state_digest and menu (what the agent was permitted to choose from).
        similarity: put anchors together whose difflib ratio is at least this, in (0, 1]; by default
            only equal ones.
        order: in which order anchors found clusters: "sorted" by code point, which does not depend
            on the order of rows, or "as_given", which reproduces the public code.
        autojunk: difflib's own shortcut, on in the public code: in texts of 200 characters or more
            it ignores those that are frequent, which can turn a ratio of .93 into .15.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".
        step_unit: what takes a factor γ in G: each trainable turn ("event"), or each step of the
            environment ("env_step"), whose turns share one return.
        invalid_penalty: a number from 0 up, taken off the outcome and the return of each turn that
            is not `valid`, and of no other.

    Returns:
        Credit per turn with parts episode (A_E), step (A_S), anchor_size, step_return, outcome,
        mean, std, n (of the group), step_mean and step_std (of the anchor). A turn that is alone at
        its anchor, or has none, gets A_S = 0; without any repeated anchor the credit is that of
        `grpo`. Returning to a state in one rollout counts as a repeat. No spread: 0 in that part.
        Masked rows and unscored rollouts are never credited and count nowhere.
        `effective_sample_size` counts rollouts in groups with spread, `effective_sample_size_step`
        anchor groups with two different rollouts or more; `key_cost` how many turns would have a
        partner without that part of the key; `aliased_anchors` the share of repeated anchors
        behind which different states were, where `state_digest` is given.

    Raises:
        Refused: an option out of range; no anchors; digests where texts are compared; whatever
            `reinforce` refuses about rewards and `grpo` about groups.

    Differs from verl-agent, which counts each turn once in A_E (`weight="step"`) and puts similar
    anchors together by order of rows.
    """
    check_spread(normalize_std, ddof, eps, sigma_floor)
    for option, given in {"step_weight": step_weight, "invalid_penalty": invalid_penalty}.items():
        if not 0 <= given < np.inf:
            raise Refused(f"{option} is {given!r}; it is a number from 0 up")
    spread = Spread(normalize_std, ddof, eps, sigma_floor)
    anchor: Ints = steps.need("anchor")
    outcome, G = steps.outcome, returns(steps, gamma, masked_reward, step_unit)
    if invalid_penalty:
        fine = np.where(steps.valid, 0.0, invalid_penalty)
        outcome, G = outcome - fine, G - fine
    episode = standing(steps, outcome, spread, singleton, weight)
    if similarity is not None:
        anchor = similar_anchors(steps, key, similarity, order, autojunk)
    nested = anchor_groups(steps, key, anchor)
    counted = (anchor >= 0) & ~np.isnan(G)
    step, about = _at_anchor(G, counted, nested[-1], spread)
    return Credit(
        episode.values + step_weight * step,
        estimand="outcome+anchor",
        parts=Parts(
            {"episode": episode.values, "step": step, "step_return": G}, about, episode.parts
        ),
        diagnostics={
            **episode.diagnostics,
            **sample_sizes(steps, counted, nested),
            "key_cost": key_cost(steps, counted, nested, check_key(key)),
        },
    )


def _at_anchor(
    G: Floats, counted: Bools, cell: Ints, spread: Spread
) -> tuple[Floats, dict[str, Callable[[], Floats]]]:
    """A_S of every row, and the size, mean and spread of its anchor group."""
    every = counted.all()
    found = compared(G, cell, None if every else np.flatnonzero(counted), spread)
    if not every:
        found.advantage[~counted & ~np.isnan(G)] = 0.0
    return found.advantage, {
        "anchor_size": lambda: np.where(counted, found.about["n"](), 0.0),
        "step_mean": found.about["mean"],
        "step_std": found.about["std"],
    }
