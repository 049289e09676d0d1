"""Group-relative methods: a rollout is compared with the other rollouts of its group."""

from __future__ import annotations

from typing import Literal

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
    if normalize_std not in (True, False, "batch"):
        raise Refused(f"normalize_std is {normalize_std!r}; it is True, False or 'batch'")
    baseline, n = steps.mean(steps.outcome, weight), steps.count(steps.outcome, weight)
    sigma = steps.std(steps.outcome, ddof, weight)
    advantage = steps.outcome - baseline
    dead = sigma <= sigma_floor
    if normalize_std:
        spread = batch_std(steps, ddof, weight) if normalize_std == "batch" else sigma
        advantage = advantage / (spread + eps)
    if unbias:
        advantage = advantage * np.divide(n, n - 1, out=np.ones_like(n), where=n > 1)
    advantage = np.where(dead, 0.0, advantage)
    advantage = lone(steps, advantage, n, singleton)
    return Credit(
        np.where(steps.mask, advantage, np.nan),
        estimand="outcome",
        parts={"outcome": steps.outcome, "mean": baseline, "std": sigma, "n": n},
        diagnostics=group_diagnostics(steps, sigma > sigma_floor, n),
    )


def batch_std(steps: Steps, ddof: int, weight: Weight) -> float:
    """Standard deviation of the outcome over all scored rollouts; 0 for one or none."""
    x = steps.outcome[steps.picked(steps.outcome, weight)]
    return float(x.std(ddof=ddof)) if len(x) > ddof else 0.0


def lone(steps: Steps, advantage: Floats, n: Floats, singleton: Singleton) -> Floats:
    """Apply the convention for groups of one scored rollout."""
    alone = (n == 1) & steps.mask & ~np.isnan(steps.outcome)
    if singleton == "error" and alone.any():
        row = int(np.argmax(alone))
        raise Refused(
            f"group {steps.label('group', row)!r} has one scored rollout; "
            "give it more, or set singleton to 'zero' or 'raw'"
        )
    if singleton not in ("zero", "raw", "error"):
        raise Refused(f"singleton is {singleton!r}; it is 'zero', 'raw' or 'error'")
    return np.where(alone, steps.outcome if singleton == "raw" else 0.0, advantage)


def group_diagnostics(steps: Steps, alive: Bools, n: Floats) -> dict[str, float]:
    """Sample sizes of a comparison within groups.

    `effective_sample_size` is the number of scored rollouts in groups with spread.
    """
    rows = steps.picked(steps.outcome)
    per_group = np.zeros(steps.n_groups)
    per_group[steps.group[rows]] = n[rows]
    spread = np.zeros(steps.n_groups, dtype=bool)
    spread[steps.group[rows]] = alive[rows]
    cells = len(steps.head)
    return {
        "effective_sample_size": int(per_group[spread].sum()),
        "groups": int(np.count_nonzero(per_group)),
        "groups_without_signal": int(np.count_nonzero(~spread & (per_group > 0))),
        "singletons": int(np.count_nonzero(per_group == 1)),
        "unscored": cells - len(rows),
        **{name: value for name, value in steps.counts.items() if value},
    }
