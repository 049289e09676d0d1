"""Methods that go back to an act, put another in its place or keep it, and play on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

import numpy as np

from counterpoint import groups
from counterpoint.branches import KEEP, NULL, RESAMPLE, Branches, Downstream
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
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.returns import whitened
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Variant = Literal["reward_only", "value_only", "value_assisted"]

_APART = 1 << 31
"""Between the seeds of draws that are not to be shared."""

REMOVALS: dict[str, str] = {"replay": "removal:replayed", "frozen": "removal:frozen"}
ARISTOCRATS: dict[str, str] = {"frozen": "coma", "replay": "coma:replayed", "anew": "seqau"}
"""What is estimated, by what later acts are."""


def loo(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    downstream: Downstream = "replay",
    n: int = 4,
    seed: int = 0,
) -> Credit:
    """Difference reward: what the run would have lost without this act.

    Estimates `removal:replayed`, or `removal:frozen`: R − R(act := null).

        A = R − mean over n branches of R(null act, then `downstream`)

    Replayed it is a policy gradient, since Q(h, null) is a baseline that the act has no part in;
    frozen it is none where later agents react. Either pays twice for what two acts do together, so
    that its values need not sum to anything.

    Source: Wolpert and Tumer (Advances in Complex Systems 4, 2001); leave-one-out.

    Args:
        steps: rows with `outcome`, `mask`.
        replay: what runs them again; it declares the default act.
        downstream: "replay" lets whoever sees the difference answer anew, "frozen" repeats all
            later acts of the record (one branch is then enough), "anew" draws all of them.
        n: branches of each row.
        seed: of all draws.

    Returns:
        Credit per turn with parts outcome, null (mean outcome without the act), stderr (of that
        mean, NaN for one branch), n (branches that could be run). Masked rows, unscored rollouts
        and rows of which no branch could be run are never credited (NaN); the last are counted.
        Diagnostics say what was spent. Empty steps give empty credit.

    Raises:
        Refused: no replay, n below 1.
    """
    runner, rows = needed(replay, "loo"), due(steps, n=n)
    found = runner.branch(
        places(steps, rows), np.full(len(rows), NULL), n, seed=seed, downstream=downstream
    )
    null = mean_of(found.values)
    parts = {"outcome": steps.outcome[rows], "null": null, **precision(found.values)}
    estimand = {**REMOVALS, "anew": "removal:anew"}[downstream]
    return measured(steps, rows, steps.outcome[rows] - null, estimand, parts, [found])


def coma(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    alternatives: int | None = None,
    downstream: Downstream = "frozen",
    n: int = 1,
    seed: int = 0,
) -> Credit:
    """Aristocrat utility: the outcome against what the policy gets on average, all else as it was.

    Estimates `coma`: R − Σ_a' π(a' | h) R(a', all others as they were). Its mean over the agent's
    own policy is exactly 0 for whatever the others did, and all the same it is no policy gradient
    where a later agent reads the act. With downstream="anew" it is: `seqau`.

        A = R − Σ_a' π(a' | h)·mean over n branches of R(a')       R itself for the entry taken
        A = R − mean of R(a'_j), a'_j ~ π                          with `alternatives`

    Source: Foerster et al. (2018, arXiv:1705.08926); Wolpert and Tumer (2001).

    Args:
        steps: rows with `outcome`, `mask`.
        replay: what runs them again; without `alternatives` it gives menus with probabilities.
        alternatives: how many acts are drawn instead of going through the menu.
        downstream: "frozen" repeats the later acts of the record, "replay" lets whoever sees the
            difference answer anew, "anew" draws them.
        n: branches of each entry of the menu.
        seed: of all draws.

    Returns:
        Credit per turn with parts outcome, baseline, n (branches that could be run). Rows that
        cannot be credited are NaN, as in `loo`. Empty steps give empty credit.

    Raises:
        Refused: no replay; n or alternatives below 1; a row without a menu or probabilities, where
            alternatives is not given.
    """
    runner, rows = needed(replay, "coma"), due(steps, n=n, alternatives=alternatives)
    at, own = places(steps, rows), steps.outcome[rows]
    if alternatives is not None:
        drawn = np.full(len(rows), RESAMPLE)
        found = runner.branch(at, drawn, alternatives, seed=seed, downstream=downstream)
        baseline, count = mean_of(found.values), (found.leaves > 0).sum(axis=1)
    else:
        menu = runner.menu(at)
        _with_policy(steps, rows, menu.size, menu.probs)
        entries = np.arange(menu.probs.shape[1])
        asked = (menu.probs > 0) & (entries != menu.taken[:, None])
        row, entry = np.nonzero(asked)
        found = runner.branch(at[row], entry, n, seed=seed, downstream=downstream)
        worth = np.where(entries == menu.taken[:, None], own[:, None], 0.0)
        worth[row, entry] = mean_of(found.values)
        baseline = np.sum(menu.probs * worth, axis=1)
        count = groups.total(row, (found.leaves > 0).sum(axis=1) * 1.0, len(rows))
    parts = {"outcome": own, "baseline": baseline, "n": count}
    return measured(steps, rows, own - baseline, ARISTOCRATS[downstream], parts, [found])


def c3(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    alternatives: int = 4,
    continuations: int = 1,
    own: int = 0,
    variant: Variant = "reward_only",
    alpha: float = 1.0,
    paired: bool = True,
    whiten: bool = False,
    seed: int = 0,
) -> Credit:
    """Contextual counterfactual credit: the act against others drawn at the same history.

    Estimates `seqau`: E[A | h, a] = Q(h, a) − V(h), and Σ A over siblings of one size is 0.

        A = value − leave-one-out mean of its siblings' values, weighted by their continuations

    The value of a node is the mean outcome below it.

    Source: C3 (arXiv:2603.06859).

    Args:
        steps: rows with `outcome`, `mask`; `value` where a variant asks a critic.
        replay: what runs them again.
        alternatives: siblings that are drawn at each row.
        continuations: how often each sibling is played to the end.
        own: continuations of the act itself; 0 takes the outcome that the run had.
        variant: "reward_only" as above; "value_only" puts a critic's value after the act in place
            of outcomes; "value_assisted" keeps the own outcome and takes the share `alpha` of the
            baseline from the critic. The public code's default is the last.
        alpha: that share, 0 to 1.
        paired: whether continuations of the act share their draws with those of its siblings, which
            cancels what both meet; the mean is the same without.
        whiten: afterwards, zero mean and unit variance over the credited rows.
        seed: of all draws.

    Returns:
        Credit per turn with parts own (value of the act), baseline, stderr (of the siblings' mean,
        NaN for one), n (siblings that could be run). Rows that cannot be credited are NaN, as in
        `loo`. Empty steps give empty credit.

    Raises:
        Refused: no replay; a number below 1 (own below 0); alpha outside 0 … 1; a variant that
            needs a critic where replay or `value` gives none.
    """
    rows = due(steps, alternatives=alternatives, continuations=continuations, own=own + 1)
    runner, at = needed(replay, "c3"), places(steps, rows)
    _check_variant(variant, alpha)
    drawn = np.full(len(rows), RESAMPLE)
    found = [runner.branch(at, drawn, alternatives, each=continuations, seed=seed)]
    node, leaves = steps.outcome[rows][:, None], np.ones((len(rows), 1), dtype=np.int64)
    if own:
        apart = 0 if paired else _APART
        kept = runner.branch(at, np.full(len(rows), KEEP), own, seed=seed + apart)
        node, leaves = mean_of(kept.values)[:, None], kept.leaves.sum(axis=1)[:, None]
        found.append(kept)
    node = np.concatenate([node, found[0].values], axis=1)
    leaves = np.concatenate([leaves, found[0].leaves], axis=1)
    baseline = leave_one_out(node, leaves)[:, 0]
    if variant != "reward_only":
        node, baseline = _with_critic(steps, rows, node, baseline, found[0], variant, alpha)
    advantage = node[:, 0] - baseline
    if whiten:
        there = ~np.isnan(advantage)
        advantage[there] = whitened(advantage[there])[0]
    parts = {"own": node[:, 0], "baseline": baseline, **precision(node[:, 1:])}
    return measured(steps, rows, advantage, "seqau", parts, found)


def leave_one_out(node: Floats, leaves: Ints) -> Floats:
    """(rows, n) mean value of each node's siblings, weighted by how often they were continued.

    NaN where all siblings are missing. With equal weights node − leave_one_out sums to 0.

    Args:
        node: (rows, n) value of each node, NaN if it was not run.
        leaves: (rows, n) continuations behind it.
    """
    weight = np.where(np.isnan(node), 0.0, leaves)
    total = weight * np.where(np.isnan(node), 0.0, node)
    rest = weight.sum(axis=1, keepdims=True) - weight
    out = np.full(node.shape, np.nan)
    np.divide(total.sum(axis=1, keepdims=True) - total, rest, out=out, where=rest > 0)
    return out


def at_grpo(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    candidates: int = 4,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    sigma_floor: float = 1e-6,
    seed: int = 0,
) -> Credit:
    """GRPO over candidates of one agent at one turn: the act against others in the same state.

    Estimates `seqau`, shrunk by (K − 1)/K, and on a scale of its own in every state if it is
    divided by the standard deviation.

        A = (R − mean) / (std + eps)        over K candidates, of which the act is one

    Source: AT-GRPO (arXiv:2510.11062, §4). There the best candidate is executed, so `best` names
    it; and a candidate is rewarded at once by a mixture of team and local reward, where here it is
    played to the end.

    Args:
        steps: rows with `outcome`, `mask`.
        replay: what runs them again.
        candidates: K, the act included.
        normalize_std: whether to divide by the standard deviation of the candidates.
        ddof: 1 divides the squared deviations by K − 1, 0 by K.
        eps: added to the standard deviation.
        sigma_floor: candidates whose outcomes spread at or below this have no signal: 0.
        seed: of all draws.

    Returns:
        Credit per turn with parts outcome, mean, std, n (candidates that could be run), best (entry
        of the best of them, −1 for the act itself or if unknown). Rows that cannot be credited are
        NaN, as in `loo`.

    Raises:
        Refused: no replay, fewer than 2 candidates, an option out of range.
    """
    check_spread(normalize_std, ddof, eps, sigma_floor)
    runner, rows = needed(replay, "at_grpo"), due(steps, candidates=candidates - 1)
    drawn = np.full(len(rows), RESAMPLE)
    found = runner.branch(places(steps, rows), drawn, candidates - 1, seed=seed)
    node = np.concatenate([steps.outcome[rows][:, None], found.values], axis=1)
    cell, there = np.repeat(np.arange(len(rows)), candidates), ~np.isnan(node).reshape(-1)
    spread = Spread(normalize_std, ddof, eps, sigma_floor)
    result = compared(node.reshape(-1), cell, np.flatnonzero(there), spread)
    best = np.argmax(np.where(np.isnan(node), -np.inf, node), axis=1)
    entry = np.column_stack([np.full(len(rows), -1), found.drawn])
    first = slice(None, None, candidates)
    advantage = np.where((found.leaves > 0).any(axis=1), result.advantage[first], np.nan)
    parts = {
        "outcome": node[:, 0],
        **{name: result.about[name]()[first] for name in ("mean", "std", "n")},
        "best": entry[np.arange(len(rows)), best].astype(np.float64),
    }
    return measured(steps, rows, advantage, "seqau", parts, [found])


def treemem(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    length_penalty: float | None = None,
    continuations: int = 4,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    seed: int = 0,
) -> Credit:
    """Tree-backed credit: the mean of all that grew out of an act, against the group at that depth.

    Estimates `outcome`: Q(h, a), standardised over the rollouts of the group, a path of each tree.
    It compares acts that were made in different contexts, so a good state is credited to the act.

        v = mean outcome of the own run and m continuations − λ·tokens of the turn
        A = (v − mean v) / (std v + eps)        over the turns of (group, step)

    Source: TreeMem (arXiv:2605.04811). λ is not published, and neither is whether depths are
    compared apart; here they are.

    Args:
        steps: rows with `group`, `step`, `outcome`, `mask`, `n_tokens`.
        replay: what runs them again.
        length_penalty: λ, in units of outcome per token; it has no default.
        continuations: m, of each act.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what the only turn of its group and step gets: 0, its raw value, or an error.
        sigma_floor: values that spread at or below this have no signal: 0.
        seed: of all draws.

    Returns:
        Credit per turn with parts node (v), mean, std, n (turns compared). Rows that cannot be
        credited are NaN, as in `loo`. Diagnostics count (group, step) as groups.

    Raises:
        Refused: no replay, no length_penalty, continuations below 1, an option out of range.
    """
    check_spread(True, ddof, eps, sigma_floor)
    if length_penalty is None or not np.isfinite(length_penalty):
        raise Refused(
            "treemem needs length_penalty (on the command line --set length_penalty=0.01), which "
            "its paper does not publish; 0 is none"
        )
    runner, rows = needed(replay, "treemem"), due(steps, continuations=continuations)
    kept = np.full(len(rows), KEEP)
    found = runner.branch(places(steps, rows), kept, continuations, seed=seed)
    below = np.concatenate([steps.outcome[rows][:, None], found.values], axis=1)
    node = np.full(len(steps), np.nan)
    grown = np.where((found.leaves > 0).any(axis=1), mean_of(below), np.nan)
    node[rows] = grown - length_penalty * steps.n_tokens[rows]
    cell = groups.pair(steps.group, steps.step)
    picked = rows[~np.isnan(node[rows])]
    result = compared(node, cell, picked, Spread(True, ddof, eps, sigma_floor))
    lone(steps, node, result.advantage, single(cell, result.size), singleton)
    about = {name: result.about[name]()[rows] for name in ("mean", "std", "n")}
    parts = {"node": node[rows], **about}
    return measured(steps, rows, result.advantage[rows], "outcome", parts, [found])


# ---------------------------------------------------------------------------------------------
# What they share


def due(steps: Steps, **numbers: int | None) -> Ints:
    """Rows that are to be credited, after refusing numbers of branches below 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise Refused(f"{name} is too low: a measured credit takes one branch at least")
    return np.flatnonzero(steps.mask & ~np.isnan(steps.outcome))


def measured(
    steps: Steps,
    rows: Ints,
    advantage: Floats,
    estimand: str,
    parts: Mapping[str, Floats],
    found: Sequence[Branches],
    **said: Any,
) -> Credit:
    """Credit of some rows from branches; `identified` says whether the replay was shown exact.

    Args:
        steps: the table.
        rows: which rows were measured.
        advantage: (len(rows),) their credit.
        estimand: what it estimates.
        parts: (len(rows),) each.
        found: the branches behind it.
        **said: further diagnostics.
    """
    values = np.full(len(steps), np.nan)
    values[rows] = advantage
    spread = {name: np.full(len(steps), np.nan) for name in parts}
    for name, part in parts.items():
        spread[name][rows] = part
    credited = rows[~np.isnan(advantage)]
    _, sigma, scored = steps.moments(steps.outcome)
    about = group_diagnostics(
        steps, sigma > 0, scored, sample=n_rollouts(steps, credited), compares=False
    )
    if found:
        about |= vars(reduce(add, (branches.spent for branches in found))) | {
            "branches": int(sum((branches.leaves > 0).sum() for branches in found)),
            "not_run": int(sum((branches.leaves == 0).sum() for branches in found)),
        }
    about |= said
    if left := len(rows) - len(credited):
        note = f"{left} of {len(rows)} turns are not credited: their branches could not be run"
        about["advice"] = (*about.get("advice", ()), note)
    exact = all(branches.exact for branches in found)
    identified = "randomised" if exact else "assumption:replay"
    return Credit(values, "turn", estimand, identified, spread, about)


def precision(values: Floats) -> dict[str, Floats]:
    """Standard error of the mean of (rows, n) branches, and how many of them could be run."""
    there = ~np.isnan(values)
    n = there.sum(axis=1).astype(np.float64)
    off = np.where(there, values - mean_of(values)[:, None], 0.0)
    out = np.full(len(n), np.nan)
    np.divide((off**2).sum(axis=1), n * (n - 1), out=out, where=n > 1)
    return {"stderr": np.sqrt(out), "n": n}


def _with_policy(steps: Steps, rows: Ints, size: Ints, probs: Floats) -> None:
    """Refuse a row whose policy cannot be taken the mean over."""
    blind = (size == 0) | np.isnan(probs).any(axis=1)
    if blind.any():
        row = int(rows[np.argmax(blind)])
        raise Refused(
            f"row {row}: the replay gives no menu with probabilities there, so there is no mean "
            "over the policy; say alternatives=8 to draw acts instead"
        )


def _check_variant(variant: str, alpha: float) -> None:
    if variant not in ("reward_only", "value_only", "value_assisted"):
        raise Refused(
            f"variant is {variant!r}; it is 'reward_only', 'value_only' or 'value_assisted'"
        )
    if not 0 <= alpha <= 1:
        raise Refused(f"alpha is {alpha!r}; it is a share, 0 to 1")


def _with_critic(
    steps: Steps,
    rows: Ints,
    node: Floats,
    baseline: Floats,
    found: Branches,
    variant: str,
    alpha: float,
) -> tuple[Floats, Floats]:
    """Nodes and baselines where a critic speaks for the siblings, and perhaps for the act."""
    critic = np.column_stack([after(steps)[rows], found.critic])
    if np.isnan(critic[~np.isnan(node)]).any():
        raise Refused(f"variant {variant!r} needs a critic, and this replay gives no value of acts")
    siblings = leave_one_out(critic, np.ones(critic.shape, dtype=np.int64))[:, 0]
    if variant == "value_only":
        return critic, siblings
    return node, (1 - alpha) * baseline + alpha * siblings


def after(steps: Steps) -> Floats:
    """(rows,) what the critic expects of the run once the row's act is done; at the end, its
    outcome. The `value` of a row is the expected return from there, so the past is added.
    """
    worth = before(steps)
    order, out = steps.order, steps.outcome.copy()
    goes_on = groups.same_as_next(steps.rollout[order])
    out[order[goes_on]] = worth[order[np.flatnonzero(goes_on) + 1]]
    return out


def before(steps: Steps) -> Floats:
    """(rows,) what the critic expects of the run before the row's act: the past and `value`."""
    value, order = steps.need("value"), steps.order
    paid = np.cumsum(steps.reward[order]) - steps.reward[order]
    begins = np.append(True, steps.rollout[order][1:] != steps.rollout[order][:-1])
    past = np.empty(len(steps))
    start = np.maximum.accumulate(np.where(begins[: len(order)], np.arange(len(order)), 0))
    past[order] = paid - paid[start]
    total: Floats = past + value
    return total
