"""HiPER: a critic of two levels, one for subgoals and one for the turns that pursue them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from counterpoint.credit.critic import Chain, chain_of, following
from counterpoint.credit.grouped import group_diagnostics
from counterpoint.credit.returns import (
    MaskedReward,
    check_fraction,
    on_rows,
    scan,
    values_given,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Level = Literal["low", "high", "switch"]
Form = Literal["paper", "code"]


def hiper(
    steps: Steps,
    *,
    level: Level = "low",
    form: Form = "paper",
    gamma: float = 0.95,
    lam_turn: float = 0.95,
    lam_seg: float = 0.95,
    masked_reward: MaskedReward = "previous",
    sigma_floor: float = 1e-6,
) -> Credit:
    """Hierarchical advantage: GAE inside each segment, and GAE from segment to segment.

    With true values it estimates `seqau`, Q(h, a) − V(h): of the turn (low), or of the choice of a
    subgoal (high). A segment is the turns that pursue one subgoal; d is its number of turns.

        low     δ_t = r_t + γV' − V_low(t),  A_t = δ_t + γ λ_turn A_{t+1} inside the segment;
                V' is V_low of the next turn, V_high after the segment's last, 0 after the end
        high    δ_k = Σ_{j<d} γ^j r + γ^d V_high(next segment) − V_high(k),
                A_k = δ_k + γ^d λ_seg A_{k+1}, on the first turn of segment k
        switch  paper: V_high(t) − V_low(t), what choosing anew is worth beyond going on
                code: Σ of the rest of the segment's rewards + γ^j V_high(next segment) − V_term(t)

    Source: HiPER (arXiv:2602.16165, §4) and its released code; the golden vectors cover low and
    high.

    Args:
        steps: rows with `rollout`, `step`, `reward`, `mask`, `segment_start`, and `value_high` on
            the first turn of each segment (on every turn for the paper's switch). `value` is V_low
            for the level low, V_low under the subgoal so far for the paper's switch, V_term for the
            code's; the level high reads none.
        level: which of the three is returned.
        form: "paper" or "code", for the level "switch" alone.
        gamma: factor per trainable turn, 0 to 1.
        lam_turn: λ inside a segment, 0 to 1.
        lam_seg: λ from segment to segment, 0 to 1; it is not raised to d.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".
        sigma_floor: a group whose outcomes spread at or below this counts as without signal.

    Returns:
        Credit per turn, with parts delta, value (V of the level), next_value (what is
        bootstrapped), return (A + V) for low and high; segment_return, value, value_high for
        switch. High credits first turns of segments alone, the paper's switch all but a rollout's
        first turn; the others are NaN. Masked rows and unscored rollouts are never credited. The
        first trainable turn begins a segment; a start on a masked row is that of the next trainable
        one. `effective_sample_size` counts scored rollouts, `segments` their segments. Empty steps
        give empty credit.

    Raises:
        Refused: an option out of range; a column missing, or without a value where one is needed.

    Differs from the code in float64, and in never going on after the last turn.
    """
    check_fraction(gamma=gamma, lam_turn=lam_turn, lam_seg=lam_seg)
    if level not in ("low", "high", "switch"):
        raise Refused(f"level is {level!r}; it is 'low', 'high' or 'switch'")
    if form not in ("paper", "code"):
        raise Refused(f"form is {form!r}; it is 'paper' or 'code'")
    two = _two_levels(steps, chain_of(steps, gamma, "team", masked_reward), level, form)
    if level == "low":
        values, parts = _low(two, lam_turn)
    elif level == "high":
        values, parts = _high(two, gamma, lam_seg)
    else:
        values, parts = _switch(two, form)
    _, sigma, scored = steps.moments(steps.outcome)
    about = group_diagnostics(steps, sigma > sigma_floor, scored, int(scored.sum()), compares=False)
    choice = level == "switch" and form == "paper"
    return Credit(
        on_rows(steps, two.chain.rows, values),
        estimand="switch" if choice else "seqau",
        identified="assumption:true_value",
        parts={name: on_rows(steps, two.chain.rows, part) for name, part in parts.items()},
        diagnostics={**about, "segments": int(np.count_nonzero(two.begins))},
    )


class _Levels(NamedTuple):
    """The chain of trainable turns with what both levels read; arrays of one entry per turn.

    `begins` says where a segment starts, `ends` where one ends, `opens` where a rollout starts;
    `onward` is the discounted rest of the segment, and V_high of the next one after it.
    """

    chain: Chain
    begins: Bools
    ends: Bools
    opens: Bools
    value: Floats
    high: Floats
    onward: Floats


def _two_levels(steps: Steps, chain: Chain, level: Level, form: Form) -> _Levels:
    columns = {"high": ("value_high",)}.get(level, ("value", "value_high"))
    started = steps.need("segment_start", *columns)[steps.order]
    segment = np.empty(len(steps), dtype=np.int64)
    segment[steps.order] = np.cumsum(started)
    number = segment[chain.rows]
    opens = np.ones(len(number), dtype=bool)
    opens[1:] = chain.last[:-1]
    begins = opens.copy()
    begins[1:] |= number[1:] != number[:-1]
    ends = np.append(begins[1:], True)[: len(begins)]
    first = np.zeros(len(steps), dtype=bool)
    first[chain.rows[begins]] = True
    every = level == "switch" and form == "paper"
    high = values_given(steps, None if every else first, "value_high")[chain.rows]
    needed = level != "high"
    value = values_given(steps)[chain.rows] if needed else np.zeros(len(number))
    boot = np.where(ends, chain.decay * following(high, chain), 0.0)
    onward = scan(chain.reward + boot, np.where(ends, 0.0, chain.decay))
    return _Levels(chain, begins, ends, opens, value, high, onward)


def _low(two: _Levels, lam_turn: float) -> tuple[Floats, dict[str, Floats]]:
    chain, V = two.chain, two.value
    after = np.where(two.ends, following(two.high, chain), following(V, chain))
    delta = chain.reward + chain.decay * after - V
    A = scan(delta, np.where(two.ends, 0.0, lam_turn * chain.decay))
    return A, {"delta": delta, "value": V, "next_value": after, "return": A + V}


def _high(two: _Levels, gamma: float, lam_seg: float) -> tuple[Floats, dict[str, Floats]]:
    at = np.flatnonzero(two.begins)
    V = two.high[at]
    delta = two.onward[at] - V
    last = np.append(two.opens[at][1:], True)[: len(at)]
    after = np.where(last, 0.0, np.append(V[1:], 0.0)[: len(at)])
    turns = np.diff(at, append=len(two.begins))
    A = scan(delta, np.where(last, 0.0, lam_seg * gamma**turns))
    named = {"delta": delta, "value": V, "next_value": after, "return": A + V}
    return _on(two, at, A), {name: _on(two, at, part) for name, part in named.items()}


def _switch(two: _Levels, form: Form) -> tuple[Floats, dict[str, Floats]]:
    gain = two.onward - two.value
    if form == "paper":
        gain = np.where(two.opens, np.nan, two.high - two.value)
    parts = {"segment_return": two.onward, "value": two.value, "value_high": two.high}
    return gain, parts


def _on(two: _Levels, at: Ints, x: Floats) -> Floats:
    out = np.full(len(two.begins), np.nan)
    out[at] = x
    return out
