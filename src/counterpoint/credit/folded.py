"""FoldGRPO: the outcome, with penalties for turns that misused a branch or the main context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from counterpoint.credit.grouped import (
    Singleton,
    check_spread,
    group_diagnostics,
    lone,
    only_trainable,
    scaling,
    single,
    spread_over,
)
from counterpoint.groups import Floats
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


def fold_grpo(
    steps: Steps,
    *,
    form: Literal["paper", "code"] = "paper",
    process: Sequence[float] | Floats | None = None,
    unit_sigma: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
) -> Credit:
    """GRPO whose turns are told apart by a process reward: penalties for how context was used.

    Estimates `outcome`: Q(h, a) − V(h₀), with the process reward of the turn on top.

        paper    A_t = (clip(R + Q_t, 0, 1) − mean R) / (std R + eps)
        code     A_t = (R − mean R) / (std R + eps), but where a turn is flagged the least such
                 advantage of its group (−1 if that is 0 or more), or the largest (+1 if 0 or less)

    Source: FoldGRPO (arXiv:2510.11967, §3.3) and its released code.

    Args:
        steps: rows with `group`, `rollout`, `outcome` (0 to 1), `mask`, `valid`.
        form: "paper" or "code".
        process: (rows,) the process reward Q of every turn. The paper has −1 for a turn of the main
            agent once its context is half full, −.2 for a turn of a branch that left its task, −1
            for a failed call, else 0. The code reads its sign: below 0 is flagged as bad, above as
            good. By default −1 where a turn is not `valid`, else 0.
        unit_sigma: take 1 for the standard deviation of a group without spread, so that Q tells its
            turns apart; by default such a group gets 0. Form "paper" only.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what a group of one scored rollout gets: 0, its raw outcome, or an error.
        sigma_floor: a group whose standard deviation is at or below this has no signal.

    Returns:
        Credit per turn with parts outcome, process, mean, std, n. Masked rows and unscored rollouts
        are never credited (NaN) and count nowhere. In the paper's form a penalty does nothing to a
        rollout with outcome 0, and outcomes outside 0 to 1 are clipped and counted in
        `outcomes_clipped`. `flagged` counts turns with a process reward. Empty steps give empty
        credit.

    Raises:
        Refused: an option out of range; process rewards of another length, or not finite; a group
            of one with singleton="error".

    Differs between paper and code: the code also lifts turns, and flags count in failures too.
    """
    if form not in ("paper", "code"):
        raise Refused(f"form is {form!r}; it is 'paper' or 'code'")
    if unit_sigma and form == "code":
        raise Refused("unit_sigma goes with form='paper' only")
    check_spread(True, ddof, eps, sigma_floor)
    R, Q = steps.outcome, _process(steps, process)
    mean, sigma, n = steps.moments(R, ddof)
    alive = sigma > sigma_floor
    scale, centre = scaling(sigma, alive, eps), mean.take(steps.group)
    if unit_sigma:  # what is left of Q in a group of equals, exactly 0 where Q is 0
        scale[~alive] = 1.0
        centre = np.where(alive.take(steps.group), centre, np.clip(R, 0.0, 1.0))
    values = (R if form == "code" else np.clip(R + Q, 0.0, 1.0)) - centre
    values *= scale.take(steps.group)
    values += 0.0  # a dead group gets 0, not −0
    lone(steps, R, values, single(steps.group, n), singleton)
    values = only_trainable(steps, values)
    if form == "code":
        values = _replaced(steps, values, Q)
    known = ~np.isnan(values)
    said = {"flagged": Q != 0, "outcomes_clipped": (form == "paper") & ((R < 0) | (R > 1))}
    return Credit(
        values,
        estimand="outcome",
        parts=Parts(
            {"outcome": R, "process": Q},
            spread_over(steps.group, {"mean": mean, "std": sigma, "n": n}),
        ),
        diagnostics={
            **group_diagnostics(steps, alive, n),
            **{name: int(np.count_nonzero(rows & known)) for name, rows in said.items()},
        },
    )


def _process(steps: Steps, process: Sequence[float] | Floats | None) -> Floats:
    """The process reward of every row, as it is given or from `valid`."""
    if process is None:
        return np.where(steps.valid, 0.0, -1.0)
    try:
        Q = np.array(process, dtype=np.float64)
    except (TypeError, ValueError):
        raise Refused("process holds something that is not a number") from None
    if Q.shape != (len(steps),):
        raise Refused(f"process has shape {Q.shape} where ({len(steps)},) is needed")
    if not np.isfinite(Q).all():
        row = int(np.argmin(np.isfinite(Q)))
        raise Refused(f"process, row {row}: {Q[row]:g} is not finite; a turn without one has 0")
    return Q


def _replaced(steps: Steps, values: Floats, Q: Floats) -> Floats:
    """The group's least advantage on turns flagged as bad, its largest on those flagged as good."""
    known = np.flatnonzero(~np.isnan(values))
    low, high = np.full(steps.n_groups, np.inf), np.full(steps.n_groups, -np.inf)
    np.minimum.at(low, steps.group[known], values[known])
    np.maximum.at(high, steps.group[known], values[known])
    bad = np.where(low >= 0, -1.0, low).take(steps.group)
    good = np.where(high <= 0, 1.0, high).take(steps.group)
    flagged: Floats = np.where(Q < 0, bad, np.where(Q > 0, good, values))
    return np.where(np.isnan(values), np.nan, flagged)
