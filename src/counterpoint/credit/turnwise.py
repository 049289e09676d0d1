"""Methods that compare turns of a group with one another, whatever state they were taken in.

Such a baseline depends on when other rollouts stopped. Where stopping is an act of the policy it
biases the gradient; the tests show by how much.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from counterpoint import groups
from counterpoint.credit.grouped import (
    Singleton,
    Spread,
    check_spread,
    compared,
    group_diagnostics,
    lone,
    n_rollouts,
    single,
)
from counterpoint.credit.returns import (
    MaskedReward,
    on_rows,
    returns,
    rewards,
    scan,
)
from counterpoint.groups import Floats
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

ProcessOrder = Literal["normalize_then_sum", "sum_then_normalize"]


def grpo_process(
    steps: Steps,
    *,
    order: ProcessOrder = "normalize_then_sum",
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    masked_reward: MaskedReward = "previous",
) -> Credit:
    """GRPO with process supervision: every reward of the group is pooled, and credit sums onward.

    Estimates `outcome`: Q(h, a) − V(h₀), where the number of turns is not the policy's choice.

        normalize_then_sum    A_t = Σ_{τ ≥ t} (r_τ − mean r) / (std r + eps)
        sum_then_normalize    A_t = (G_t − mean G) / (std G + eps),    G_t = Σ_{τ ≥ t} r_τ

    Mean and standard deviation run over all trainable turns of the group's scored rollouts.

    Source: DeepSeekMath (arXiv:2402.03300, §4.1.3) for the first; the second is the reverse order.

    Args:
        steps: rows with `group`, `rollout`, `step`, `reward`, `mask`; a turn without a reward
            counts as a reward of 0.
        order: which comes first.
        normalize_std: divide by the standard deviation, or by nothing.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what the turns of a group of one scored rollout get: 0, their sums G, or an
            error.
        sigma_floor: a group whose rewards (or sums) spread at or below this has no signal: 0.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".

    Returns:
        Credit per turn with parts G, x (what is compared: r or G), normalized, mean, std, n (of x
        in the group). Masked rows and unscored rollouts are never credited (NaN) and count nowhere.
        `effective_sample_size` counts rollouts in groups with spread. Empty steps give empty
        credit.

    Raises:
        Refused: an option out of range; a group of one with singleton="error"; a reward on a masked
            row with no trainable row before it.

    Biased where the policy decides when to stop: with a reward of 1 for every turn both rollouts
    of 1 and of 3 turns get 0 in the first order.
    """
    if order not in ("normalize_then_sum", "sum_then_normalize"):
        raise Refused(f"order is {order!r}; it is 'normalize_then_sum' or 'sum_then_normalize'")
    check_spread(normalize_std, ddof, eps, sigma_floor)
    spread = Spread(normalize_std, ddof, eps, sigma_floor)
    G = returns(steps, 1.0, masked_reward)
    first_sum = order == "sum_then_normalize"
    x = G if first_sum else on_rows(steps, steps.trainable, rewards(steps, masked_reward))
    rows = np.flatnonzero(~np.isnan(x))
    found = compared(x, steps.group, rows, spread)
    values = found.advantage.copy() if first_sum else _onward(steps, found.advantage)
    _, _, scored = steps.moments(steps.outcome)
    lone(steps, G, values, single(steps.group, scored), singleton)
    live = rows[found.alive[steps.group[rows]]]
    return Credit(
        values,
        estimand="outcome",
        parts=Parts({"G": G, "x": x, "normalized": found.advantage}, found.about),
        diagnostics=group_diagnostics(steps, found.alive, scored, n_rollouts(steps, live)),
    )


def _onward(steps: Steps, x: Floats) -> Floats:
    """Sum of `x` from each trainable row to the end of its rollout."""
    each = np.nan_to_num(x[steps.trainable])
    return on_rows(steps, steps.trainable, scan(each, steps.goes_on.astype(np.float64)))


def magrpo(
    steps: Steps,
    *,
    gamma: float = 0.9,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    masked_reward: MaskedReward = "previous",
) -> Credit:
    """Multi-agent group-relative advantage: the return from a joint turn against its turn's mean.

    Estimates `outcome`: Q(h, a) − V(h₀), discounted, where the number of turns is not the policy's
    choice; all agents of a joint turn get the same number.

        G_t = r_t + γ · mean over the children of t (G),    A_t = G_t − mean_{rollouts at t}(G)

    A joint turn is a step of the environment: its rows share their rewards. Rollouts are no tree:
    the one child of a turn is the rollout's next turn. For a tree of branches give G as
    `step_return`, with each set of siblings as a group.

    Source: MAGRPO (arXiv:2508.04652, eq. 1 and 2), as its code has it: no standard deviation.

    Args:
        steps: rows with `group`, `rollout`, `env_step`, `reward`, `mask`.
        gamma: factor per joint turn, 0 to 1.
        singleton: what a turn gets that no other rollout reached: 0, its return, or an error.
        sigma_floor: turns whose returns spread at or below this have no signal: 0.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".

    Returns:
        Credit per turn with parts G, mean, std, n (rollouts that reached this turn). Masked rows
        and unscored rollouts are never credited (NaN) and count nowhere. `groups` and its kin count
        (group, environment step); `effective_sample_size` rollouts with a turn that has spread.

    Raises:
        Refused: an option out of range; `env_step` that falls within a rollout; a reward on a
            masked row with no trainable row before it.

    Biased where the policy decides when to stop, because the mean at a turn is over those who got
    there: a turn that n rollouts reached shrinks by (n − 1)/n, to nothing where nobody else did.
    """
    check_spread(False, 1, 0.0, sigma_floor)
    G = returns(steps, gamma, masked_reward, "env_step")
    turn = groups.pair(steps.group, steps.env_step)
    known = np.flatnonzero(~np.isnan(G))
    once = groups.first_of(groups.pair(steps.rollout, steps.env_step), known)
    found = compared(G, turn, once, Spread(False, 1, 0.0, sigma_floor))
    lone(steps, G, found.advantage, single(turn, found.size), singleton)
    live = known[found.alive[turn[known]]]
    return Credit(
        found.advantage,
        estimand="outcome",
        parts=Parts({"G": G}, found.about),
        diagnostics=group_diagnostics(steps, found.alive, found.size, n_rollouts(steps, live)),
    )
