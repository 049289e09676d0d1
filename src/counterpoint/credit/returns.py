"""Returns: what came after a turn, discounted, and REINFORCE and REINFORCE++ on top of it.

The clock of the discount is the trainable turn, or the environment's step: masked rows carry no
credit and take no factor γ.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from counterpoint import groups
from counterpoint.credit.causal import causal_returns
from counterpoint.credit.grouped import (
    Singleton,
    check_spread,
    group_diagnostics,
    lone,
    only_trainable,
    others_mean,
    single,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps, Weight

MaskedReward = Literal["previous", "drop", "error"]
Baseline = Literal["none", "constant", "group", "leave_one_out", "critic"]
Clock = Literal["event", "env_step"]

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
    causal: bool = False,
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
        causal: sum only rewards that descend from the turn, each once however many paths lead to
            it, its own included. Less noise; unbiased as long as what descends from a turn does not
            hang on what the turn chose: that a message was not sent, no edge records.

    Returns:
        Credit per turn with parts G and baseline. Masked rows and rollouts without any scored
        reward are never credited (NaN). Groups without spread are counted, and credited: this
        method compares turns of a rollout too. Empty steps give empty credit.

    Raises:
        Refused: an option out of range; a reward on a masked row with no trainable row before it; a
            trainable row without a value under "critic"; a group of one with singleton="error";
            `causal` without `descends`, or with `step_return`.

    Differs from verl's REINFORCE++, which starts the return anew after a masked position.
    """
    if baseline not in ("none", "constant", "group", "leave_one_out", "critic"):
        raise Refused(
            f"baseline is {baseline!r}; it is none, constant, group, leave_one_out or critic"
        )
    G = returns(steps, gamma, masked_reward)
    if causal:
        G = only_scored(steps, causal_returns(steps, gamma, masked_reward != "drop"))
    _, sigma, scored = steps.moments(steps.outcome)
    compares = baseline in ("group", "leave_one_out")
    sample = None if compares else int(scored.sum())
    about = group_diagnostics(steps, sigma > sigma_floor, scored, sample, compares)
    alone = single(steps.group, scored)
    if baseline == "group":
        b = steps.mean(G, weight)
    elif baseline == "leave_one_out":
        b, others = others_mean(steps, G, weight)
        alone = others == 0
    elif baseline == "critic":
        b = values_given(steps)
    else:
        b = np.full(len(steps), constant if baseline == "constant" else 0.0)
    advantage = G - b
    if compares:
        lone(steps, G, advantage, alone, singleton)
    return Credit(
        only_trainable(steps, advantage),
        estimand="seqau" if baseline == "critic" and not causal else "outcome",
        identified=_assumed(baseline, causal),
        parts={"G": G, "baseline": b},
        diagnostics=about,
    )


def _assumed(baseline: Baseline, causal: bool) -> str:
    if causal:
        return "assumption:descent"
    return "assumption:true_value" if baseline == "critic" else "heuristic"


def reinforce_pp(
    steps: Steps,
    *,
    gamma: float = 1.0,
    baseline: Literal["group"] | None = None,
    masked_reward: MaskedReward = "previous",
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
) -> Credit:
    """REINFORCE++: the return that followed a turn, against all turns of the batch.

    Estimates `outcome`, on the scale of the batch: the mean of all credited turns is 0 and their
    variance 1. Tasks that are easy and tasks that are hard share one baseline.

        A_t = (x_t − mean x) / √(var x + 1e-8),    x_t = G_t, or R − mean(R) with the group baseline

    Mean and variance (with n − 1) run over every credited turn of the batch.

    Source: Hu 2025 (arXiv:2501.03262, §3; the group baseline is its REINFORCE++-baseline).

    Args:
        steps: rows with `rollout`, `step`, `reward`, `mask`; with the group baseline `group` and
            `outcome`.
        gamma: factor per trainable turn in G, 0 to 1; no part of the form with the group baseline.
        baseline: None, or "group": x is the outcome minus the mean of the group's rollouts.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".
        singleton: what x is in a group of one scored rollout under "group": 0, its raw outcome, or
            an error.
        sigma_floor: if x spreads at or below this over the batch, nothing tells turns apart:
            credit 0.

    Returns:
        Credit per turn with parts G (or outcome and mean), x, batch_mean, batch_std. Masked rows
        and unscored rollouts are never credited (NaN). A group without spread is counted, and can
        still stand above or below the batch. `effective_sample_size` counts scored rollouts.
        Nothing to credit gives no credit.

    Raises:
        Refused: one single turn to credit, which nothing can be compared with; an option out of
            range; a reward on a masked row with no trainable row before it.

    Differs from verl, which starts the return anew after a masked position.
    """
    if baseline not in (None, "group"):
        raise Refused(f"baseline is {baseline!r}; it is None or 'group'")
    check_spread(False, 1, 0.0, sigma_floor)
    check_fraction(gamma=gamma)
    mean, sigma, scored = steps.moments(steps.outcome)
    parts: dict[str, Floats]
    if baseline == "group":
        parts = {"outcome": steps.outcome, "mean": mean.take(steps.group)}
        x = only_trainable(steps, steps.outcome - parts["mean"])
        lone(steps, steps.outcome, x, single(steps.group, scored), singleton)
    else:
        x = returns(steps, gamma, masked_reward)
        parts = {"G": x}
    known, values = ~np.isnan(x), x.copy()
    values[known], centre, deviation = whitened(x[known], sigma_floor)
    batch = {"batch_mean": np.full(len(x), centre), "batch_std": np.full(len(x), deviation)}
    alive, sample = sigma > sigma_floor, int(scored.sum())
    about = group_diagnostics(steps, alive, scored, sample, compares=baseline == "group")
    return Credit(values, estimand="outcome", parts={**parts, "x": x, **batch}, diagnostics=about)


def whitened(x: Floats, sigma_floor: float = 0.0) -> tuple[Floats, float, float]:
    """Zero mean and unit variance over numbers, with that mean and √(variance + 1e-8).

    No spread above `sigma_floor` gives 0, no numbers none. Raises Refused for one single number.
    """
    if len(x) == 1:
        raise Refused("whitening needs two credited turns or more, here is one")
    if not len(x):
        return x, np.nan, np.nan
    centre = float(x.mean())
    off = x - centre
    variance = float(off @ off) / (len(x) - 1)
    deviation = float(np.sqrt(variance + 1e-8))
    off *= 1 / deviation if variance > sigma_floor**2 else 0.0
    return off, centre, deviation


def returns(
    steps: Steps,
    gamma: float,
    masked_reward: MaskedReward = "previous",
    clock: Clock = "event",
) -> Floats:
    """Discounted return of every trainable row of a scored rollout, NaN elsewhere, shape (rows,).

    The clock "event" takes a factor γ per trainable row; "env_step" takes one per step of the
    environment, whose rows share one return. `step_return` is used as it stands where it is given.
    Raises Refused as `reinforce` does, and where `env_step` falls within a rollout.
    """
    check_fraction(gamma=gamma)
    if clock not in ("event", "env_step"):
        raise Refused(f"step_unit is {clock!r}; it is 'event' or 'env_step'")
    if steps.step_return is not None:
        return only_scored(steps, np.where(steps.mask, steps.step_return, np.nan))
    reward = rewards(steps, masked_reward)
    decay = np.where(steps.goes_on, gamma, 0.0)
    if clock == "event":
        later = scan(reward, decay)
    else:
        same = _same_env_step(steps)
        last = ~same
        tick: Ints = np.cumsum(last) - last
        n = int(np.count_nonzero(last))
        later = np.take(scan(groups.total(tick, reward, n), decay[last]), tick)
    return on_rows(steps, steps.trainable, later)


def _same_env_step(steps: Steps) -> Bools:
    """Whether each of `steps.trainable` is followed by a row of the same environment step."""
    at = steps.env_step[steps.trainable]
    same = steps.goes_on.copy()
    falls = same[:-1] & (at[1:] < at[:-1])
    if falls.any():
        row = int(steps.trainable[1:][np.argmax(falls)])
        raise Refused(
            f"column env_step, row {row}: it falls to {steps.env_step[row]} within rollout "
            f"{steps.label('rollout', row)!r}; steps of the environment do not run back"
        )
    same[:-1] &= at[1:] == at[:-1]
    return same


def on_rows(steps: Steps, rows: Ints, x: Floats) -> Floats:
    """Spread values of some rows over the table, NaN elsewhere and where nothing was scored."""
    if rows is steps.trainable and steps.in_order and len(rows) == len(steps):
        return only_scored(steps, x)
    out = np.full(len(steps), np.nan)
    out[rows] = x
    return only_scored(steps, out)


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


def scan(x: Floats, decay: Floats, factor: float = 1.0) -> Floats:
    """Solve A_i = x_i + factor · decay_i · A_{i+1}; a decay of 0 ends a rollout.

    Doubles its reach with every pass, so a rollout of T turns takes log₂ T passes; goes through the
    rows from the end in chunks that stay in the cache.
    """
    out = x.copy()
    for stop in range(len(x), 0, -_CHUNK):
        start = max(0, stop - _CHUNK)
        a, c = out[start:stop], decay[start:stop] * factor
        if stop < len(x):
            a[-1] += c[-1] * out[stop]
        c[-1] = 0.0
        s = 1
        while c.max() > 0:
            a[:-s] += c[:-s] * a[s:]
            c[:-s] *= c[s:]
            s *= 2
    return out


def values_given(steps: Steps, where: Bools | None = None, column: str = "value") -> Floats:
    """A column of values. Refused where a trainable row of a scored rollout has none.

    `where` (rows,) says which rows need one; by default all.
    """
    value: Floats = steps.need(column)
    missing = np.isnan(value)
    if missing.any():
        missing &= steps.mask & in_scored_rollout(steps)
        if where is not None:
            missing &= where
    if missing.any():
        raise Refused(
            f"row {int(np.argmax(missing))} is trainable and has no value; give one in column "
            f"{column}, mask the row, or let gae fit values='mc'"
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
