"""Returns: what came after a turn, discounted, and REINFORCE on top of it.

The clock of the discount is the trainable turn: masked rows carry no credit and take no factor γ.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from counterpoint import groups
from counterpoint.credit.grouped import (
    Singleton,
    group_diagnostics,
    lone,
    only_trainable,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps, Weight

MaskedReward = Literal["previous", "drop", "error"]
Baseline = Literal["none", "constant", "group", "leave_one_out", "critic"]

_CHUNK = 32768


def reinforce(
    steps: Steps,
    *,
    gamma: float = 1.0,
    baseline: Baseline = "none",
    constant: float = 0.0,
    masked_reward: MaskedReward = "previous",
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    weight: Weight = "rollout",
) -> Credit:
    """REINFORCE: the return that followed a turn, minus a baseline.

    Estimates `outcome`: Q(h, a) − V(h₀), or Q(h, a) itself without a baseline; with a critic whose
    values are true, `seqau`: Q(h, a) − V(h).

        G_t = Σ_{τ ≥ t} γ^(τ−t) r_τ,    A_t = G_t − b

    The sum runs over all later rewards of the rollout, whoever received them. A terminal reward
    with γ = 1 gives every turn of the rollout the same number.

    Source: Williams 1992 (Machine Learning 8, §5); leave-one-out: Kool et al. 2019.

    Args:
        steps: rows with `rollout`, `step`, `reward`, `mask`; `step_return`, where it is given, is
            the return as it stands and γ has no part in it; `value` for the critic.
        gamma: factor per trainable turn, 0 to 1.
        baseline: "none"; "constant"; "group": mean return of the group's rollouts from their first
            trainable turn; "leave_one_out": the same over the other rollouts, which leaves the
            expectation a policy gradient; "critic": the row's own `value`.
        constant: the baseline where `baseline` is "constant".
        masked_reward: where a reward on a masked row goes: to the previous trainable turn of its
            rollout, nowhere, or an error.
        singleton: what the rollout of a group of one gets where the baseline is the group's: 0, its
            raw return, or an error.
        sigma_floor: a group whose outcomes spread at or below this counts as without signal.
        weight: whether the group's baseline counts each rollout once ("rollout") or each trainable
            turn ("step").

    Returns:
        Credit per turn with parts G and baseline. Masked rows and rollouts without any scored
        reward are never credited (NaN). Groups without spread are counted, and credited: this
        method compares turns of a rollout too. Empty steps give empty credit.

    Raises:
        Refused: an option out of range; a reward on a masked row with no trainable row before it; a
            trainable row without a value under "critic"; a group of one with singleton="error".

    Differs from verl's REINFORCE++, which starts the return anew after a masked position.
    """
    if baseline not in ("none", "constant", "group", "leave_one_out", "critic"):
        raise Refused(
            f"baseline is {baseline!r}; it is none, constant, group, leave_one_out or critic"
        )
    G = returns(steps, gamma, masked_reward)
    if baseline in ("group", "leave_one_out"):
        b = _group_baseline(steps, G, weight, leave_out=baseline == "leave_one_out")
    elif baseline == "critic":
        b = values_given(steps)
    else:
        b = np.full(len(steps), constant if baseline == "constant" else 0.0)
    _, sigma, scored = steps.moments(steps.outcome)
    advantage = G - b
    about = group_diagnostics(steps, sigma > sigma_floor, scored)
    if baseline in ("group", "leave_one_out"):
        lone(steps, G, advantage, scored, singleton)
    else:
        about["effective_sample_size"] = int(scored.sum())
    return Credit(
        only_trainable(steps, advantage),
        estimand="seqau" if baseline == "critic" else "outcome",
        identified="assumption:true_value" if baseline == "critic" else "heuristic",
        parts={"G": G, "baseline": b},
        diagnostics=about,
    )


def _group_baseline(steps: Steps, G: Floats, weight: Weight, leave_out: bool) -> Floats:
    """Mean return of the group, with or without the row's own cell; 0 where nothing is left."""
    rows = steps.picked(G, weight)
    n = steps.n_groups
    summed = groups.total(steps.group[rows], G[rows], n).take(steps.group)
    size = groups.count(steps.group[rows], n).take(steps.group)
    if leave_out:
        cells = int(steps.cell.max(initial=-1)) + 1
        summed = summed - groups.total(steps.cell[rows], G[rows], cells).take(steps.cell)
        size = size - groups.count(steps.cell[rows], cells).take(steps.cell)
    return np.divide(summed, size, out=np.zeros(len(steps)), where=size > 0)


def returns(steps: Steps, gamma: float, masked_reward: MaskedReward = "previous") -> Floats:
    """Discounted return of every trainable row of a scored rollout, NaN elsewhere, shape (rows,).

    `step_return` is used as it stands where it is given. Raises Refused as `reinforce` does.
    """
    check_fraction(gamma=gamma)
    if steps.step_return is not None:
        G = np.where(steps.mask, steps.step_return, np.nan)
    else:
        later = scan(rewards(steps, masked_reward), np.where(steps.goes_on, gamma, 0.0))
        G = on_rows(steps, steps.trainable, later)
    return only_scored(steps, G)


def on_rows(steps: Steps, rows: Ints, x: Floats) -> Floats:
    """Spread values of some rows over the table, NaN elsewhere."""
    if rows is steps.trainable and steps.in_order and len(rows) == len(steps):
        return x
    out = np.full(len(steps), np.nan)
    out[rows] = x
    return out


def only_scored(steps: Steps, x: Floats) -> Floats:
    """Write NaN, in place, where nothing was scored."""
    x[steps.unscored] = np.nan
    return x


def rewards(steps: Steps, masked_reward: MaskedReward = "previous") -> Floats:
    """Reward of each of `steps.trainable`, with those of masked rows where they belong."""
    if masked_reward not in ("previous", "drop", "error"):
        raise Refused(f"masked_reward is {masked_reward!r}; it is 'previous', 'drop' or 'error'")
    if not steps.reward.any() and np.any(steps.outcome[~np.isnan(steps.outcome)]):
        raise Refused(
            "these steps have outcomes per agent but no reward, so a return cannot be told; "
            "give the column reward"
        )
    rows = steps.trainable
    if masked_reward == "drop" or not np.any(steps.reward[~steps.mask]):
        return steps.reward.take(rows)
    order = steps.order
    on, reward, rollout = steps.mask[order], steps.reward[order], steps.rollout[order]
    has_turns = np.bincount(steps.rollout[rows], minlength=steps.n_rollouts) > 0
    place = np.cumsum(on) - 1
    before = np.append(rows, 0)[np.minimum(place, len(rows))]
    homeless = (place < 0) | (steps.rollout[before] != rollout)
    stray = ~on & (reward != 0) & has_turns[rollout]
    wrong = stray if masked_reward == "error" else stray & homeless
    if wrong.any():
        row = int(order[np.argmax(wrong)])
        where = "" if masked_reward == "error" else " with no trainable row before it"
        raise Refused(
            f"row {row} of rollout {steps.label('rollout', row)!r}: a reward on a masked row{where}"
            "; set masked_reward to 'drop', or give the reward to a trainable row"
        )
    kept = ~homeless
    return groups.total(place[kept], reward[kept], len(rows))


def scan(x: Floats, decay: Floats) -> Floats:
    """Solve A_i = x_i + decay_i · A_{i+1}; a decay of 0 ends a rollout.

    Doubles its reach with every pass, so a rollout of T turns takes log₂ T passes; goes through the
    rows from the end in chunks that stay in the cache.
    """
    out, reach = x.copy(), decay.copy()
    for stop in range(len(x), 0, -_CHUNK):
        start = max(0, stop - _CHUNK)
        a, c = out[start:stop], reach[start:stop]
        if stop < len(x):
            a[-1] += c[-1] * out[stop]
        c[-1] = 0.0
        s = 1
        while c.max() > 0:
            a[:-s] += c[:-s] * a[s:]
            c[:-s] *= c[s:]
            s *= 2
    return out


def values_given(steps: Steps) -> Floats:
    """The column value. Refused where a trainable row of a scored rollout has none."""
    value: Floats = steps.need("value")
    missing = np.isnan(value)
    if missing.any():
        missing &= steps.mask & in_scored_rollout(steps)
    if missing.any():
        raise Refused(
            f"row {int(np.argmax(missing))} is trainable and has no value; give one, mask the row, "
            "or let gae fit values='mc'"
        )
    return value


def in_scored_rollout(steps: Steps) -> Bools:
    """Whether anything was scored in the row's rollout, shape (rows,)."""
    scored = np.zeros(steps.n_rollouts, dtype=bool)
    scored[steps.rollout[~np.isnan(steps.outcome)]] = True
    return scored.take(steps.rollout)


def check_fraction(**options: float) -> None:
    """Refuse an option that does not lie between 0 and 1."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise Refused(f"{name} is {value!r}; it lies between 0 and 1")
