"""HCAPO: the outcome of the run, moved towards turns that look likely once it is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from counterpoint import groups
from counterpoint.branches import Spent
from counterpoint.credit.asking import Hindsight
from counterpoint.credit.grouped import Singleton, Spread, check_spread, compared, grpo
from counterpoint.credit.protocols import places
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


def hcapo(
    steps: Steps,
    *,
    policy: Hindsight | None = None,
    step_weight: float = 1.0,
    temperature: float = 5.0,
    clip_low: float = 0.8,
    clip_high: float = 1.2,
    gamma: float = 0.95,
    smoothing: float = 0.0,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
) -> Credit:
    """Hindsight credit: the run against its group, plus how likely each turn looks once the end is
    known, beside the other turns of the run.

    Estimates `outcome+hindsight`, which is no quantity that a game defines: in hindsight credit
    assignment (Harutyunyan et al. 2019) the ratio is π(a | h, R) / π(a | h), and here the mean over
    the run stands for π(a | h), so a turn that was likely anyway is paid like one that mattered.

        π_h(t) = exp(mean log-probability of the turn's tokens, given the outcome / temperature)
        ρ_t = clip(π_h(t) / mean of π_h over the run, clip_low, clip_high)
        Q_t = ρ_t γ^(T − t) R
        A_t = A_grpo + ω (Q_t − mean(Q)) / (std(Q) + eps)         over the turns of the group

    T − t counts the trainable turns that follow. On a success (R > 0) a negative second term is 0.
    On a failure (R = 0) Q is 0 whatever the turn was, so all turns of all failures of a group get
    one number: what failed is not told apart.

    Source: HCAPO (arXiv:2603.08754, §4). What `smoothing` mixes with is our reading.

    Args:
        steps: rows with `group`, `rollout`, `outcome`, `mask`, `n_tokens`.
        policy: (places, outcome) → mean log-probability of each turn's output, with the outcome in
            the prompt (`credit.asking.Hindsight`), or something with a method `hindsight` that does
            it. Only turns of runs whose outcome is not 0 are asked about.
        step_weight: ω, of the second term.
        temperature: divides log-probabilities; high ones make turns look alike.
        clip_low: lower bound of the ratio ρ.
        clip_high: upper bound of it.
        gamma: discount per trainable turn.
        smoothing: α: ρ_t becomes (1 − α) ρ_t + α ρ_(t+1), the last turn keeps its own. The paper
            names .5; 0 is off.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviations.
        singleton: what the first term of a group of one is: 0, its raw outcome, or an error.
        sigma_floor: outcomes, or Q, that spread at or below this have no signal: 0.

    Returns:
        Credit per turn with parts episode (A_grpo), step (the second term, without ω), hindsight
        (π_h), ratio (ρ), q (Q), mean and std of Q, n (turns compared). Masked rows and unscored
        rollouts are never credited (NaN); hindsight and ratio are NaN where nobody was asked.
        `failures` counts runs with outcome 0, `clipped` is the share of ratios that were clipped.
        Empty steps give empty credit.

    Raises:
        Refused: no policy; answers that are no log-probabilities, one for each turn; an option out
            of range; a group of one with singleton="error".
    """
    check_spread(True, ddof, eps, sigma_floor)
    _check(temperature, clip_low, clip_high, gamma, smoothing, step_weight)
    due = steps.order[(steps.mask & ~np.isnan(steps.outcome))[steps.order]]
    asked = due[steps.outcome[due] != 0]
    run = steps.rollout[asked]
    hindsight = np.exp(_asked(policy, steps, asked) / temperature)
    raw = hindsight / groups.mean(run, hindsight, steps.n_rollouts)[run]
    ratio = _smoothed(np.clip(raw, clip_low, clip_high), run, smoothing)
    q = _spread(steps, due, np.zeros(len(due)))
    q[asked] = ratio * gamma ** _after(run) * steps.outcome[asked]
    step = compared(q, steps.group, due, Spread(True, ddof, eps, sigma_floor))
    kept = np.where(steps.outcome > 0, np.maximum(step.advantage, 0.0), step.advantage)
    episode = grpo(steps, ddof=ddof, eps=eps, singleton=singleton, sigma_floor=sigma_floor)
    parts = {
        "episode": episode.values,
        "step": kept,
        "hindsight": _spread(steps, asked, hindsight),
        "ratio": _spread(steps, asked, ratio),
        "q": q,
        **{name: part() for name, part in step.about.items()},
    }
    about = {
        **episode.diagnostics,
        **vars(Spent(forward_passes=len(asked), tokens=int(steps.n_tokens[asked].sum()))),
        "failures": len(np.unique(steps.rollout[due[steps.outcome[due] == 0]])),
        "clipped": float(np.mean((raw < clip_low) | (raw > clip_high))) if len(raw) else 0.0,
    }
    values = episode.values + step_weight * kept
    return Credit(values, estimand="outcome+hindsight", parts=parts, diagnostics=about)


def _check(
    temperature: float, low: float, high: float, gamma: float, smoothing: float, weight: float
) -> None:
    if not 0 < temperature < np.inf:
        raise Refused(f"temperature is {temperature!r}; it is a number above 0")
    if not 0 <= low <= 1 <= high < np.inf:
        raise Refused(f"clip_low ({low!r}) and clip_high ({high!r}) are numbers below and above 1")
    if not (0 <= gamma <= 1 and 0 <= smoothing <= 1):
        raise Refused(f"gamma ({gamma!r}) and smoothing ({smoothing!r}) are shares, 0 to 1")
    if not np.isfinite(weight):
        raise Refused(f"step_weight is {weight!r}; it is a number")


def _asked(policy: Any, steps: Steps, rows: Ints) -> Floats:
    """(rows,) what the policy says of each turn, given the outcome."""
    score = getattr(policy, "hindsight", policy)
    if not callable(score):
        raise Refused(
            "hcapo needs policy=, a function (places, outcome) → mean log-probability of each "
            "turn's output with the outcome in the prompt (credit.asking.Hindsight)"
        )
    if not len(rows):
        return np.zeros(0)
    told = np.asarray(score(places(steps, rows), steps.outcome[rows]), dtype=np.float64)
    if told.shape != (len(rows),):
        raise Refused(f"policy answers with shape {told.shape} where ({len(rows)},) was asked")
    wrong = ~(np.isfinite(told) & (told <= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise Refused(f"row {rows[at]}: policy says {told[at]:g}, which is no log-probability")
    return told


def _smoothed(ratio: Floats, run: Ints, share: float) -> Floats:
    """Each ratio mixed with that of the run's next turn."""
    following = np.roll(ratio, -1)
    return np.where(groups.same_as_next(run), (1 - share) * ratio + share * following, ratio)


def _after(run: Ints) -> Ints:
    """How many rows of the same run follow each; runs stand together."""
    size = np.bincount(run, minlength=1)
    end = np.cumsum(size)
    return end[run] - 1 - np.arange(len(run))


def _spread(steps: Steps, rows: Ints, part: Floats) -> Floats:
    out = np.full(len(steps), np.nan)
    out[rows] = part
    return out
