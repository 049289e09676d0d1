"""Whether our own 95 % intervals hold what is known exactly 95 times in 100."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np

from counterpoint import groups
from counterpoint.credit import rloo, score, spawn
from counterpoint.credit.orchestration import Estimator
from counterpoint.envs import make
from counterpoint.games import (
    Game,
    Plays,
    action_values,
    deal,
    every,
    gradient,
    play,
    policy_gradient,
    truth,
)
from counterpoint.games.game import visits
from counterpoint.games.replaying import Rerun
from counterpoint.groups import Bools, Floats
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import ActValue, credit_of, fork
from counterpoint.redrive.branches import WIDTH
from counterpoint.schema import Act, Trace
from counterpoint.scoring import over_batches
from counterpoint.steps import Steps
from counterpoint.study.diffusion import listed_correlation
from counterpoint.units import Part, packed

LEVEL = 0.95
"""How often an interval should hold the exact value."""


def coverage(simulations: int, seed: int = 0) -> list[dict[str, Any]]:
    """Share of intervals that hold the exact value, for each kind of interval.

    `±` is half a 95 % interval of the share itself, if it is what it should be; `verdict` is
    "too narrow" or "too wide" where the share lies more than three standard errors off.
    """
    rows = []
    found: dict[str, list[Bools]] = {}
    for simulate in SIMULATED:
        for number in range(simulations):
            for name, inside in simulate(seed + number).items():
                found.setdefault(name, []).append(inside)
    for name, each in found.items():
        held = np.concatenate(each)
        share, error = float(held.mean()), float(np.sqrt(LEVEL * (1 - LEVEL) / len(held)))
        off = (share - LEVEL) / error
        verdict = "too narrow" if off < -3 else "too wide" if off > 3 else "as it says"
        rows.append(
            {
                "interval": name,
                "intervals": len(held),
                "hold the exact value": share,
                "±": 1.96 * error,
                "verdict": verdict,
            }
        )
    return rows


def _within(exact: Any, low: Any, high: Any) -> Bools:
    return np.atleast_1d((np.asarray(low) <= exact) & (exact <= np.asarray(high)))


# ---------------------------------------------------------------------------------------------
# Forks


@cache
def _run() -> tuple[Trace, Act, ActValue]:
    """The longest of eight runs of ledger-v0, its first act, and what that is worth exactly."""
    env = make("ledger-v0")
    trace = max(rollout(env, Softmax(), groups=1, rollouts=8), key=len)
    return trace, cast(Act, trace.of("act")[0]), credit_of(trace, env)[0]


def _forked(seed: int) -> dict[str, Bools]:
    """Q of an act, by keeping it; Q − V, by drawing it anew as well."""
    (trace, act, exact), n = _run(), 16
    kept, anew = (fork(trace, act, do, n=n, seed=seed) for do in ("keep", "resample"))
    gain, error = kept.minus(anew)
    return {
        f"fork: mean of {n} branches": _within(exact.q, *kept.ci),
        f"fork: difference of two arms of {n}": _within(
            exact.seqau, gain - WIDTH * error, gain + WIDTH * error
        ),
    }


# ---------------------------------------------------------------------------------------------
# Effects of a decision


def _gates(seed: int, contexts: int, rollouts: int) -> tuple[Plays, Steps, Floats]:
    """Plays of T6 with agent 0's decision to spawn as units, and its exact effect in each."""
    game = deal("T6", agents=3, contexts=contexts)
    plays = play(game, groups=contexts, rollouts=rollouts, seed=seed)
    steps, q = plays.steps, action_values(game)[plays.state]
    rows, logprob = np.flatnonzero(steps.agent == 0), steps.need("logprob")
    verbs = [("no_spawn", "spawn")[act] for act in plays.action[rows].tolist()]
    parts = [
        Part(row, int(steps.step[row]), 0, -1, -1, verb, None, float(logprob[row]))
        for row, verb in zip(rows.tolist(), verbs, strict=True)
    ]
    decided = replace(steps, parts={"decision": packed("decision", len(steps), parts)})
    return plays, decided, q[rows, 1] - q[rows, 0]


def _branched(seed: int) -> dict[str, Bools]:
    """Effects of single decisions, by pairs of branches."""
    plays, steps, exact = _gates(seed, contexts=5, rollouts=1)
    rerun = Rerun(plays, does={"spawn": [[False, True], [False, False], [False, False]]})
    found = {n: spawn(steps, replay=rerun, n=n, seed=seed).parts for n in (8, 64)}
    return {
        f"spawn: {n} pairs of branches": _within(exact, parts["low"], parts["high"])
        for n, parts in found.items()
    }


def _logged(seed: int) -> dict[str, Bools]:
    """The average effect, from a log of 200 runs."""
    _, steps, exact = _gates(seed, contexts=4, rollouts=50)
    estimators: tuple[Estimator, ...] = ("ips", "snips", "dr")
    found = {name: spawn(steps, estimator=name).parts for name in estimators}
    return {
        f"spawn from a log: {name}": _within(exact.mean(), parts["low"][:1], parts["high"][:1])
        for name, parts in found.items()
    }


# ---------------------------------------------------------------------------------------------
# Scores


def _outcome(plays: Plays, again: Any = None) -> Credit:
    return rloo(plays.steps)


@cache
def _listed() -> tuple[Game, dict[str, float]]:
    """A game, and what RLOO in groups of two has on it exactly, by listing all of them: its
    correlation with seqau, bias², MSE, and how much of the gradient it holds.
    """
    game = deal("T2", agents=2, actions=2, dep=0.5, spread=0.3)  # no state is rare
    plays, chance = every(game, 2)
    credit = _outcome(plays).values
    weight: Floats = chance[plays.steps.group]
    error = credit - truth(plays).values
    often = (2 * visits(game, 1.0)[:, None] * game.probability).reshape(-1)
    cell = plays.state * game.policy.shape[1] + plays.action
    total = groups.total(cell, weight * error, len(often))
    g, exact = gradient(plays, credit * weight * len(chance)), policy_gradient(game)
    return game, {
        "pearson": listed_correlation(plays, chance / 2, credit),
        "bias2": float(np.sum(total**2 / often) / often.sum()),
        "mse": float(weight @ error**2 / often.sum()),
        "gradient_scale": float(np.sum(g * exact) / np.sum(exact**2)),
    }


def _correlated(seed: int) -> dict[str, Bools]:
    """Pearson of one batch of 40 groups of two."""
    game, exact = _listed()
    plays = play(game, groups=40, rollouts=2, seed=seed)
    group = plays.steps.group
    found = score(_outcome(plays), truth(plays), group=group, bootstrap=80, seed=seed).intervals
    return {"score: pearson over 40 groups": _within(exact["pearson"], *found["pearson"])}


def _scored(seed: int) -> dict[str, Bools]:
    """Figures of 25 batches of two runs."""
    game, exact = _listed()
    found = over_batches(game, {"": _outcome}, batches=25, rollouts=2, seed=seed)[""].intervals
    return {
        f"over 25 batches: {name.replace('_', ' ')}": _within(exact[name], *found[name])
        for name in ("bias2", "mse", "gradient_scale")
    }


SIMULATED: tuple[Callable[[int], dict[str, Bools]], ...] = (
    _forked,
    _branched,
    _logged,
    _correlated,
    _scored,
)
"""Seed → kind of interval → whether those of one simulation hold the exact value."""
