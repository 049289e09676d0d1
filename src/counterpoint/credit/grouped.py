"""Group-relative methods: a rollout is compared with the other rollouts of its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps, Weight

Singleton = Literal["zero", "raw", "error"]


def grpo(
    steps: Steps,
    *,
    normalize_std: bool | Literal["batch"] = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    weight: Weight = "rollout",
    unbias: bool = False,
) -> Credit:
    """Group-relative advantage: how much better a rollout did than its group.

    Estimates `outcome`: Q(h, a) − V(h₀), the same number for every turn of the rollout.

        A_i = (R_i − mean(R)) / (std(R) + eps)

    Source: DeepSeekMath (arXiv:2402.03300, §4.1.2); without the standard deviation it is Dr.GRPO
    (arXiv:2503.20783).

    Args:
        steps: rows with `group`, `rollout`, `outcome`, `mask`.
        normalize_std: True divides by the group's standard deviation, "batch" by that of all
            rollouts, False by nothing.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what a group of one scored rollout gets: 0, its raw outcome, or an error.
        sigma_floor: a group whose standard deviation is at or below this has no signal: credit 0.
        weight: "rollout" counts every rollout once, "step" once per trainable row.
        unbias: multiply by n/(n − 1), which makes the expectation of the mean-only form the policy
            gradient.

    Returns:
        Credit per turn with parts outcome, mean, std, n. Rows that are masked, and rollouts whose
        outcome is missing, are never credited (NaN). No spread: 0, and the group is counted in
        `groups_without_signal`. Empty steps give empty credit.

    Raises:
        Refused: an option out of range; a group of one with singleton="error".

    Differs from verl, which still counts masked rollouts and gives a group of one its raw outcome.
    """
    check_spread(normalize_std, ddof, eps, sigma_floor, batch=True)
    spread = Spread(normalize_std, ddof, eps, sigma_floor)
    return standing(steps, steps.outcome, spread, singleton, weight, unbias)


def rloo(steps: Steps, *, singleton: Singleton = "zero", sigma_floor: float = 1e-6) -> Credit:
    """Leave-one-out advantage: how much better a rollout did than the mean of the others.

    Estimates `outcome`: Q(h, a) − V(h₀), the same number for every turn of the rollout. The
    baseline knows nothing of the rollout itself, so the expectation is the policy gradient.

        A_i = R_i − mean_{j ≠ i}(R_j) = n/(n − 1) · (R_i − mean(R))

    Source: Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740, eq. 6).

    Args:
        steps: rows with `group`, `rollout`, `outcome`, `mask`.
        singleton: what a group of one scored rollout gets: 0, its raw outcome, or an error.
        sigma_floor: a group whose standard deviation is at or below this has no signal: credit 0.

    Returns:
        Credit per turn with parts outcome, baseline (the mean of the others), n (how many rollouts
        are scored in the group). Masked rows and unscored rollouts are never credited (NaN). No
        spread: 0, and the group is counted. Where the agents of a rollout have outcomes of their
        own, each counts, and all those of the own rollout are left out. Empty steps give empty
        credit.

    Raises:
        Refused: an option out of range; a group of one with singleton="error".

    Differs from verl, whose loop returns the raw outcome of a group of one and whose vectorised
    form 0.
    """
    check_spread(False, 1, 0.0, sigma_floor)
    R, spread = steps.outcome, Spread(False, 1, 0.0, sigma_floor)
    credit = standing(steps, R, spread, singleton, "rollout", unbias=True)
    values = credit.values
    if steps.cell is not steps.rollout:  # n counts agents: the others are not n − 1
        baseline, others = others_mean(steps, R)
        values = (R - baseline) * (credit.parts["std"] > sigma_floor) + 0.0
        lone(steps, R, values, others == 0, singleton)
    parts = {"outcome": R, "baseline": lambda: others_mean(steps, R)[0]}
    return Credit(
        only_trainable(steps, values),
        estimand="outcome",
        parts=Parts(parts, {"n": lambda: credit.parts["n"]}),
        diagnostics=credit.diagnostics,
    )


def others_mean(steps: Steps, x: Floats, weight: Weight = "rollout") -> tuple[Floats, Floats]:
    """Mean of `x` over the group's other rollouts, and how many samples that is; (rows,) both.

    0 where there are none. `x` is read where `steps.picked` looks.
    """
    rows = steps.picked(x, weight)
    group, rollout, held = steps.group[rows], steps.rollout[rows], x[rows]
    total = groups.total(group, held, steps.n_groups).take(steps.group)
    size = groups.count(group, steps.n_groups).take(steps.group)
    total -= groups.total(rollout, held, steps.n_rollouts).take(steps.rollout)
    size -= groups.count(rollout, steps.n_rollouts).take(steps.rollout)
    return np.divide(total, size, out=np.zeros(len(steps)), where=size > 0), size


# ---------------------------------------------------------------------------------------------
# Comparing


class Spread(NamedTuple):
    """The options of a standard deviation: whether it divides, and how it is taken."""

    normalize_std: bool | Literal["batch"]
    ddof: int
    eps: float
    sigma_floor: float


class Compared(NamedTuple):
    """Values against the mean of their cell: an advantage per row, and what is said of each cell.

    `about` names what each row's cell has: mean, std, n.
    """

    advantage: Floats
    about: Mapping[str, Callable[[], Floats]]
    alive: Bools
    size: Floats


def spread_over(codes: Ints, of: Mapping[str, Floats]) -> dict[str, Callable[[], Floats]]:
    """Parts that rows share by code, spread over the rows when they are read."""

    def spread(values: Floats) -> Callable[[], Floats]:
        return lambda: values.take(codes)

    return {name: spread(values) for name, values in of.items()}


def standing(
    steps: Steps,
    x: Floats,
    spread: Spread,
    singleton: Singleton,
    weight: Weight,
    unbias: bool = False,
) -> Credit:
    """`grpo` of `x`, shape (rows,), which is the outcome or, with penalties, differs from it on
    some rows. Counting rollouts, the statistics are those of the outcome; counting rows, of `x`.
    """
    counted = x if weight == "step" else steps.outcome
    mean, sigma, n = steps.moments(counted, spread.ddof, weight)
    alive = sigma > spread.sigma_floor
    by_batch = spread.normalize_std == "batch"
    scale = _scale(batch_std(steps, spread.ddof, weight) if by_batch else sigma, alive, spread)
    if unbias:
        scale *= np.divide(n, n - 1, out=np.ones_like(n), where=n > 1)
    advantage = _scaled(x, steps.group, mean, scale)
    scored = n if weight == "rollout" else steps.moments(steps.outcome)[2]
    lone(steps, x, advantage, single(steps.group, scored), singleton)
    return Credit(
        only_trainable(steps, advantage),
        estimand="outcome",
        parts=Parts({"outcome": x}, spread_over(steps.group, {"mean": mean, "std": sigma, "n": n})),
        diagnostics=group_diagnostics(steps, alive, scored),
    )


def compared(x: Floats, cell: Ints, picked: Ints | None, spread: Spread) -> Compared:
    """Compare each of `x` (rows,) with the mean of its cell, taken over the rows `picked`.

    A cell without spread gives 0; a missing `x` gives NaN. `picked` None is all rows.
    """
    n = int(cell.max(initial=-1)) + 1
    of = (cell, x) if picked is None else (cell[picked], x[picked])
    mean, sigma, size = groups.moments(*of, n, spread.ddof)
    alive = sigma > spread.sigma_floor
    advantage = _scaled(x, cell, mean, _scale(sigma, alive, spread))
    about = spread_over(cell, {"mean": mean, "std": sigma, "n": size})
    return Compared(advantage, about, alive, size)


def _scale(sigma: Floats | float, alive: Bools, spread: Spread) -> Floats:
    """What a cell's deviations are multiplied by: 1 / (σ + eps), or 1; 0 without signal."""
    return scaling(sigma, alive, spread.eps) if spread.normalize_std else alive.astype(np.float64)


def _scaled(x: Floats, cell: Ints, mean: Floats, scale: Floats) -> Floats:
    """(x − mean) · scale, with the mean and scale of each row's cell; a scale of 0 gives 0."""
    out = mean.take(cell)
    np.subtract(x, out, out=out)
    out *= scale.take(cell)
    out += 0.0  # 0, not −0
    return out


def n_rollouts(steps: Steps, rows: Ints) -> int:
    """How many rollouts these rows belong to."""
    return int(np.count_nonzero(np.bincount(steps.rollout[rows], minlength=1)))


def check_spread(
    normalize_std: Any, ddof: int, eps: float, sigma_floor: float, batch: bool = False
) -> None:
    """Refuse options of a standard deviation that are out of range."""
    if not isinstance(normalize_std, bool) and not (batch and normalize_std == "batch"):
        known = "True, False or 'batch'" if batch else "True or False"
        raise Refused(f"normalize_std is {normalize_std!r}; it is {known}")
    if ddof not in (0, 1):
        raise Refused(f"ddof is {ddof!r}; it is 0 or 1")
    if not (0 <= eps < np.inf and 0 <= sigma_floor < np.inf):
        raise Refused(f"eps ({eps!r}) and sigma_floor ({sigma_floor!r}) are numbers from 0 up")


def scaling(spread: Floats | float, alive: Bools, eps: float) -> Floats:
    """1 / (spread + eps) where a group has signal, 0 where it has none."""
    out = np.zeros(len(alive))
    np.divide(1.0, spread + eps, out=out, where=alive)
    return out


def batch_std(steps: Steps, ddof: int, weight: Weight) -> float:
    """Standard deviation of the outcome over all scored rollouts; 0 for one or none."""
    x = steps.outcome[steps.picked(steps.outcome, weight)]
    return float(x.std(ddof=ddof)) if len(x) > ddof else 0.0


def only_trainable(steps: Steps, advantage: Floats) -> Floats:
    """Write NaN, never credited, on masked rows, in place."""
    if not steps.mask.all():
        advantage[~steps.mask] = np.nan
    return advantage


def single(codes: Ints, size: Floats) -> Bools:
    """Whether each row's group, of `size` (groups,), has one member to compare."""
    alone = size == 1
    return alone.take(codes) if alone.any() else np.zeros(len(codes), dtype=bool)


def lone(steps: Steps, raw: Floats, advantage: Floats, alone: Bools, singleton: Singleton) -> None:
    """Write the convention for what has nothing to be compared with into `advantage`.

    `alone` (rows,) says which rows those are; `raw` (rows,) is what "raw" gives back.
    """
    if singleton not in ("zero", "raw", "error"):
        raise Refused(f"singleton is {singleton!r}; it is 'zero', 'raw' or 'error'")
    if not alone.any():
        return
    alone = alone & ~np.isnan(raw) & steps.mask
    if singleton == "error" and alone.any():
        row = int(np.argmax(alone))
        raise Refused(
            f"row {row}: group {steps.label('group', row)!r} has one scored rollout "
            "to compare it with, itself; give it more, or set singleton to 'zero' or 'raw'"
        )
    advantage[alone] = raw[alone] if singleton == "raw" else 0.0


# ---------------------------------------------------------------------------------------------
# What is said beside the numbers


def group_diagnostics(
    steps: Steps,
    alive: Bools,
    scored: Floats,
    sample: int | None = None,
    compares: bool = True,
) -> dict[str, Any]:
    """Sample sizes of a comparison within groups, and advice where the table looks mistaken.

    `alive` (groups,) says which have spread, `scored` (groups,) counts what was compared in each.
    `effective_sample_size` is `sample` or else the number of those in groups with spread. Without
    `compares` groups are only reported, and a group for every rollout is no mistake.
    """
    unscored = steps.unscored
    said: dict[str, Any] = {
        "effective_sample_size": int(scored[alive].sum()) if sample is None else sample,
        "groups": int(np.count_nonzero(scored)),
        "groups_without_signal": int(np.count_nonzero(~alive & (scored > 0))),
        "singletons": int(np.count_nonzero(scored == 1)),
        "unscored": int(np.isnan(steps.outcome[steps.head]).sum()) if len(unscored) else 0,
        **{name: value for name, value in steps.counts.items() if value},
    }
    if copied := rewards_copied(steps):
        said["reward_copied"] = copied
    if advice := _advice(steps, said, compares):
        said["advice"] = advice
    return said


def rewards_copied(steps: Steps) -> int:
    """How many rollouts carry one and the same reward, not 0, on every of two turns or more.

    0 if any rollout that was rewarded tells its turns apart: then the reward is one per turn.
    """
    if steps.n_rollouts == len(steps):
        return 0
    rollout, reward = steps.rollout, steps.reward
    if not steps.in_order:
        rollout, reward = rollout[steps.order], reward[steps.order]
    begins = np.ones(len(steps), dtype=bool)
    np.not_equal(rollout[1:], rollout[:-1], out=begins[1:])
    first = np.flatnonzero(begins)
    second = first[~begins[np.minimum(first + 1, len(steps) - 1)]] + 1
    if not reward[first].any() or np.any(reward[second] != reward[second - 1]):
        return 0  # the cheap answers: nothing at the start, or two turns told apart
    same = reward[1:] == reward[:-1]
    same |= begins[1:]
    alike = np.logical_and.reduceat(np.append(True, same), first)
    long = np.diff(first, append=len(steps)) > 1
    paid = np.add.reduceat(np.abs(reward), first) > 0
    return int(np.count_nonzero(long & paid)) if alike[long & paid].all() else 0


def _advice(steps: Steps, said: dict[str, Any], compares: bool) -> tuple[str, ...]:
    """What a person should look at, in sentences."""
    found = []
    if len(steps) and not steps.mask.any():
        found.append("column mask is false on every row, so nothing is credited")
    if compares and 1 < said["groups"] == said["singletons"]:
        found.append(
            "every group holds one rollout, so nothing is compared; let column group be the task, "
            "not the trajectory"
        )
    if "reward_copied" in said:
        found.append(
            "column reward says the same on every turn of a rollout; if that is its final reward "
            "copied, give it once, as column outcome"
        )
    return tuple(found)
