"""Group-relative methods: a rollout is compared with the other rollouts of its group."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from counterpoint.groups import Bools, Floats
from counterpoint.ledger import Credit
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
    mean, sigma, n = steps.moments(steps.outcome, ddof, weight)
    alive = sigma > sigma_floor
    spread = batch_std(steps, ddof, weight) if normalize_std == "batch" else sigma
    scale = scaling(spread, alive, eps) if normalize_std else alive.astype(np.float64)
    if unbias:
        scale *= np.divide(n, n - 1, out=np.ones_like(n), where=n > 1)
    baseline = mean.take(steps.group)
    advantage = steps.outcome - baseline
    advantage *= scale.take(steps.group)
    advantage += 0.0  # a dead group gets 0, not −0
    scored = n if weight == "rollout" else steps.moments(steps.outcome)[2]
    lone(steps, steps.outcome, advantage, scored, singleton)
    return Credit(
        only_trainable(steps, advantage),
        estimand="outcome",
        parts={
            "outcome": steps.outcome,
            "mean": baseline,
            "std": sigma.take(steps.group),
            "n": n.take(steps.group),
        },
        diagnostics=group_diagnostics(steps, alive, scored),
    )


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


def lone(
    steps: Steps, raw: Floats, advantage: Floats, scored: Floats, singleton: Singleton
) -> None:
    """Write the convention for groups of one scored rollout into `advantage`.

    `scored` (n_groups,) counts a group's scored rollouts; `raw` (rows,) is what "raw" gives back.
    """
    if singleton not in ("zero", "raw", "error"):
        raise Refused(f"singleton is {singleton!r}; it is 'zero', 'raw' or 'error'")
    if not np.any(scored == 1):
        return
    alone = (scored == 1).take(steps.group) & ~np.isnan(steps.outcome) & steps.mask
    if singleton == "error" and alone.any():
        row = int(np.argmax(alone))
        raise Refused(
            f"group {steps.label('group', row)!r} has one scored rollout; "
            "give it more, or set singleton to 'zero' or 'raw'"
        )
    advantage[alone] = raw[alone] if singleton == "raw" else 0.0


def group_diagnostics(steps: Steps, alive: Bools, scored: Floats) -> dict[str, Any]:
    """Sample sizes of a comparison within groups.

    `alive` (n_groups,) says which have spread, `scored` (n_groups,) counts their scored rollouts;
    `effective_sample_size` is the number of scored rollouts in groups with spread.
    """
    return {
        "effective_sample_size": int(scored[alive].sum()),
        "groups": int(np.count_nonzero(scored)),
        "groups_without_signal": int(np.count_nonzero(~alive & (scored > 0))),
        "singletons": int(np.count_nonzero(scored == 1)),
        "unscored": len(steps.head) - int(scored.sum()),
        **{name: value for name, value in steps.counts.items() if value},
    }
