"""Branches against playing from the start: a late fork costs its suffix, and workers share them.

A run of 200 turns, 1,000 events, in the toy room of `benchmarks.harness`, resampled at half, 90 %
and at 99 % of it in batches that drive the prefix once. What a batch takes before its first branch
is told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import CONFIG, Toy, _medians, _row
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import fork
from counterpoint.schema import Act, Trace

FEW, MANY = 1, 21


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds."""
    env, policy = Toy(), Softmax()
    (trace,) = rollout(env, policy, groups=1, rollouts=1, config=CONFIG)
    played = lambda: rollout(env, policy, groups=1, rollouts=1, config=CONFIG)  # noqa: E731
    found = []
    for share, goal in ((0.5, None), (0.9, 8.0), (0.99, 40.0)):
        at = _act(trace, share)
        few, many, whole = _medians(_forked(trace, at, FEW), _forked(trace, at, MANY), played)
        each, job = (many - few) / (MANY - FEW), f"a branch at {share:.0%} of a run"
        found.append(_row(job, each, whole, "a run from the start", goal))
    found.append(_row("the first branch of a batch, at 99 %", few, whole, "a run from the start"))
    at = _act(trace, 0.5)
    one, two = _medians(
        *(_forked(trace, at, 40, workers) for workers in (1, 2)), clock=time.perf_counter
    )
    found.append(_row("branches by two workers, wall clock", two, one, "one worker", 1.7))
    return found


def _act(trace: Trace, share: float) -> int:
    """The act nearest to a share of the run."""
    wanted = share * len(trace)
    return min((e.seq for e in trace.events if isinstance(e, Act)), key=lambda s: abs(s - wanted))


def _forked(trace: Trace, at: int, n: int, workers: int = 1) -> Callable[[], Any]:
    return lambda: fork(trace, at, "resample", n=n, workers=workers)


if __name__ == "__main__":
    for line in rows():
        print(line)
