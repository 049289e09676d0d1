"""What the five decisions of orchestration were worth: spawn, delegate, message, aggregate, stop.

    τ(h) = E[R | h, do(take it)] − E[R | h, do(decline it)]

Measured at every single decision by branches, or on average over those of a log, if the log can
tell; else refused (`identify`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from counterpoint import groups
from counterpoint.branches import KEEP, NULL, Branches, Menu
from counterpoint.credit.identify import (
    Decisions,
    Propensity,
    Unidentified,
    decisions,
    identified,
)
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.replayed import due, precision
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.streams import Draws

Estimator: TypeAlias = Literal["ips", "snips", "dr"]

_NORMAL = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def spawn(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    estimator: Estimator = "ips",
    propensity: Propensity = "logged",
    seed: int = 0,
) -> Credit:
    """What spawning an agent was worth; see `effect`.

    Args:
        steps: from traces.
        replay: what runs them again; without it the log has to do.
        n: pairs of branches of each decision.
        estimator: "ips", "snips" or "dr", for logs.
        propensity: "logged", "estimated" or a number, for logs.
        seed: of all draws.
    """
    return effect(steps, "spawn", replay, n, estimator, propensity, seed)


def delegate(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    estimator: Estimator = "ips",
    propensity: Propensity = "logged",
    seed: int = 0,
) -> Credit:
    """What handing work over was worth; see `effect`.

    Args:
        steps: from traces.
        replay: what runs them again; without it the log has to do.
        n: pairs of branches of each decision.
        estimator: "ips", "snips" or "dr", for logs.
        propensity: "logged", "estimated" or a number, for logs.
        seed: of all draws.
    """
    return effect(steps, "delegate", replay, n, estimator, propensity, seed)


def communicate(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    estimator: Estimator = "ips",
    propensity: Propensity = "logged",
    seed: int = 0,
) -> Credit:
    """What sending a message was worth (the verb `message`); see `effect`.

    Args:
        steps: from traces.
        replay: what runs them again; without it the log has to do.
        n: pairs of branches of each decision.
        estimator: "ips", "snips" or "dr", for logs.
        propensity: "logged", "estimated" or a number, for logs.
        seed: of all draws.
    """
    return effect(steps, "message", replay, n, estimator, propensity, seed)


def aggregate(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    estimator: Estimator = "ips",
    propensity: Propensity = "logged",
    seed: int = 0,
) -> Credit:
    """What combining results was worth; see `effect`.

    Args:
        steps: from traces.
        replay: what runs them again; without it the log has to do.
        n: pairs of branches of each decision.
        estimator: "ips", "snips" or "dr", for logs.
        propensity: "logged", "estimated" or a number, for logs.
        seed: of all draws.
    """
    return effect(steps, "aggregate", replay, n, estimator, propensity, seed)


def stop(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    n: int = 8,
    estimator: Estimator = "ips",
    propensity: Propensity = "logged",
    seed: int = 0,
) -> Credit:
    """What stopping was worth, against going on; see `effect`.

    Args:
        steps: from traces.
        replay: what runs them again; without it the log has to do.
        n: pairs of branches of each decision.
        estimator: "ips", "snips" or "dr", for logs.
        propensity: "logged", "estimated" or a number, for logs.
        seed: of all draws.
    """
    return effect(steps, "stop", replay, n, estimator, propensity, seed)


def effect(
    steps: Steps,
    verb: str,
    replay: Replay | Harness | None,
    n: int,
    estimator: Estimator,
    propensity: Propensity,
    seed: int,
) -> Credit:
    """The effect of a decision, by branches at each one, or on average from a log.

    With a replay, estimates `effect` τ(h) = E[R | h, do(take)] − E[R | h, do(decline)], as the mean
    of n differences between branches of one number, which share their draws. An arm is the policy
    given that its act takes (declines) the decision, over the menu; uniform over the entries if it
    never does. Where there is no menu, the act is kept against the default act, so that a decision
    which was declined cannot be measured.

    Without one, estimates `effect:average` over the decisions of the log, the same for each:

        ips    mean of s·R/e − (1 − s)·R/(1 − e)
        snips  Σ s·R/e ÷ Σ s/e  −  Σ (1 − s)·R/(1 − e) ÷ Σ (1 − s)/(1 − e)
        dr     mean of m₁ − m₀ + s·(R − m₁)/e − (1 − s)·(R − m₀)/(1 − e)

    s is 1 where it was taken, e the probability of that, m the mean outcome of an arm over the
    other tasks. Later decisions are the policy's.

    Source: Horvitz and Thompson (1952); Hájek (1971); Robins, Rotnitzky and Zhao (1994).

    Args:
        steps: from traces; its decisions are units of the credit.
        verb: spawn, delegate, message, aggregate or stop.
        replay: what runs them again, or None.
        n: pairs of branches of each decision, 2 or more.
        estimator: of the average, from a log.
        propensity: as in `identify`.
        seed: of all draws.

    Returns:
        Credit per decision (`steps.units("decision")`), NaN on decisions of other verbs, on masked
        turns, and where an arm could not be run. Parts: taken, stderr, low, high (95 %) and n; from
        a log also propensity and term (what the decision adds to the average). Diagnostics:
        average, average_stderr (decisions of one rollout vary together), taken, declined, and the
        effective samples and least probability of `identify`, or what was spent.

    Raises:
        Unidentified: there is no replay and the log cannot tell; it says why and what would help.
        Refused: n below 2, another estimator, "dr" with one task.
    """
    due(steps, n=n - 1)
    if estimator not in _ESTIMATORS:
        raise Refused(f"estimator is {estimator!r}; it is one of {', '.join(_ESTIMATORS)}")
    made = decisions(steps, verb, propensity)
    found = identified(steps, made, verb, replay, propensity)
    if found.kind == "not":
        raise Unidentified(found)
    said: dict[str, Any] = {"taken": found.taken, "declined": found.declined}
    if replay is not None:
        return _by_branches(steps, made, verb, needed(replay, verb), n, seed, said)
    said |= {
        "effective_taken": found.effective_taken,
        "effective_declined": found.effective_declined,
        "least_propensity": found.least,
        "effective_sample_size": min(found.effective_taken, found.effective_declined),
    }
    return _from_log(steps, made, found.kind, estimator, said)


# ---------------------------------------------------------------------------------------------
# By branches


def _by_branches(
    steps: Steps,
    made: Decisions,
    verb: str,
    runner: Replay,
    n: int,
    seed: int,
    said: dict[str, Any],
) -> Credit:
    at = places(steps, made.row)
    arms = _arms(runner.menu(at), verb, made.taken)
    pairs = [
        [_branched(runner, at, weight, kept, number, seed) for number in range(n)]
        for weight, kept in arms
    ]
    took, left = (np.column_stack([found.values[:, 0] for found in arm]) for arm in pairs)
    gain = took - left
    tau, about = mean_of(gain), precision(gain)
    reach = quantile(about["n"] - 1) * about["stderr"]
    ran = [found for arm in pairs for found in arm]
    exact = all(found.exact for found in ran)
    spent = sum((found.spent for found in ran[1:]), ran[0].spent)
    said |= {
        "effective_sample_size": len(np.unique(steps.rollout[made.row[~np.isnan(tau)]])),
        **_average(steps, made, tau),
        **vars(spent),
        "branches": int(sum((found.leaves > 0).sum() for found in ran)),
        "not_run": int(sum((found.leaves == 0).sum() for found in ran)),
    }
    ends: dict[str, Floats] = {"low": tau - reach, "high": tau + reach}
    parts = {"taken": made.taken.astype(np.float64), **about, **ends}
    kind = "randomised" if exact else "assumption:replay"
    return _per_unit(steps, made, tau, "effect", kind, parts, said)


def _arms(menu: Menu, verb: str, taken: Bools) -> list[tuple[Floats, Ints]]:
    """For taking and for declining: (decisions, A) chances of the entries, all 0 if no menu says
    which of them take it, and the act to put in then.
    """
    there = np.arange(menu.probs.shape[1]) < menu.size[:, None]
    there &= verb in menu.does
    does = menu.does.get(verb, there)
    arms = []
    for mask, kept in ((there & does, KEEP), (there & ~does, NULL)):
        weight = np.where(mask, np.nan_to_num(menu.probs), 0.0)
        never = ~(weight > 0).any(axis=1)
        weight[never] = mask[never]
        arms.append((weight, np.where(taken & ~there.any(axis=1), kept, _IMPOSSIBLE)))
    return arms


_IMPOSSIBLE = 1 << 30
"""An entry that no menu has, so that the branch cannot be run."""


def _branched(
    runner: Replay, at: Ints, weight: Floats, kept: Ints, number: int, seed: int
) -> Branches:
    """Branches of one number, each with an entry drawn by its weight."""
    edges = np.cumsum(weight, axis=1)
    total = edges[:, -1] if weight.shape[1] else np.zeros(len(at))
    draw = [Draws(str(seed), "schedule", repr(place), number).random() for place in at.tolist()]
    entry = np.sum((np.array(draw) * total)[:, None] >= edges, axis=1)
    action = np.where(total > 0, np.minimum(entry, weight.shape[1] - 1), kept)
    return runner.branch(at, action, 1, start=number, seed=seed)


def quantile(degrees: Floats) -> Floats:
    """The 97.5 % point of Student's t; NaN below one degree of freedom.

    By Cornish and Fisher's expansion in 1/degrees, good to a part in a thousand from five degrees
    on, and exact for one and two.
    """
    z, v = _NORMAL, np.where(degrees >= 1, degrees, np.nan)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    expanded = sum((term / v**power for power, term in enumerate(terms)), np.zeros(len(v)))
    point: Floats = np.select([v == 1, v == 2], [12.706204736432095, 4.302652729911275], expanded)
    return point


# ---------------------------------------------------------------------------------------------
# From a log


def _from_log(
    steps: Steps, made: Decisions, kind: str, estimator: Estimator, said: dict[str, Any]
) -> Credit:
    made = made.at(~np.isnan(made.outcome))
    term = _ESTIMATORS[estimator](steps, made)
    tau = np.full(len(term), term.mean())
    average = _average(steps, made, term)
    stderr = np.full(len(term), average["average_stderr"])
    clusters = len(np.unique(steps.rollout[made.row]))
    reach = quantile(np.full(len(term), clusters - 1.0)) * stderr
    parts = {
        "taken": made.taken * 1.0,
        "stderr": stderr,
        "n": np.full(len(term), float(len(term))),
        "low": tau - reach,
        "high": tau + reach,
        "propensity": made.chance,
        "term": term,
    }
    return _per_unit(steps, made, tau, "effect:average", kind, parts, said | average)


def _weights(made: Decisions) -> tuple[Floats, Floats]:
    """S/e and (1 − s)/(1 − e)."""
    return made.taken / made.chance, ~made.taken / (1 - made.chance)


def _ips(steps: Steps, made: Decisions) -> Floats:
    took, left = _weights(made)
    return (took - left) * made.outcome


def _snips(steps: Steps, made: Decisions) -> Floats:
    """Terms whose mean is the estimate, and whose spread that of its linearisation."""
    took, left = _weights(made)
    mean = [float(w @ made.outcome / w.sum()) for w in (took, left)]
    pull = took * (made.outcome - mean[0]) / took.mean()
    pull -= left * (made.outcome - mean[1]) / left.mean()
    terms: Floats = mean[0] - mean[1] + pull
    return terms


def _dr(steps: Steps, made: Decisions) -> Floats:
    took, left = _weights(made)
    task = steps.task[made.row]
    if len(np.unique(task)) < 2:
        raise Refused(
            "dr fits the outcome on other tasks, and all decisions are of one; say estimator='ips'"
        )
    fitted = [_others(task, made.outcome, arm) for arm in (made.taken, ~made.taken)]
    gain = fitted[0] - fitted[1]
    return gain + took * (made.outcome - fitted[0]) - left * (made.outcome - fitted[1])


def _others(task: Ints, outcome: Floats, arm: Bools) -> Floats:
    """(decisions,) mean outcome of the arm in the other tasks; 0 if it does not occur there."""
    n = int(task.max()) + 1
    total, count = groups.total(task[arm], outcome[arm], n), groups.count(task[arm], n)
    rest, size = (total.sum() - total)[task], (count.sum() - count)[task]
    out = np.zeros(len(task))
    np.divide(rest, size, out=out, where=size > 0)
    return out


_ESTIMATORS = {"ips": _ips, "snips": _snips, "dr": _dr}


# ---------------------------------------------------------------------------------------------
# Both


def _average(steps: Steps, made: Decisions, x: Floats) -> dict[str, float]:
    """Mean over decisions, with a standard error that lets those of one rollout vary together."""
    there = ~np.isnan(x)
    n = int(there.sum())
    if not n:
        return {"average": float("nan"), "average_stderr": float("nan")}
    mean = float(x[there].mean())
    rollout = np.unique(steps.rollout[made.row[there]], return_inverse=True)[1]
    clusters = int(rollout.max()) + 1
    off = groups.total(rollout, x[there] - mean, clusters)
    square = float(off @ off) * clusters / (clusters - 1) if clusters > 1 else float("nan")
    return {"average": mean, "average_stderr": float(np.sqrt(square)) / n}


def _per_unit(
    steps: Steps,
    made: Decisions,
    tau: Floats,
    estimand: str,
    kind: str,
    parts: dict[str, Floats],
    said: dict[str, Any],
) -> Credit:
    """Credit of all decisions of the table, NaN on those of other verbs."""
    size = len(steps.units("decision"))

    def spread(x: Floats) -> Floats:
        out = np.full(size, np.nan)
        out[made.unit] = x
        return out

    every = {name: spread(part) for name, part in parts.items()}
    return Credit(spread(tau), "decision", estimand, kind, every, said)
