"""A turn of the stage: five events with digest, what writing them down takes, and two workers.

The toy room gives each agent a menu of two; a calls and tells b, b is delivered the message and
calls: five events a turn (observe, act, tool_call, tool_result, and message or deliver).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from counterpoint.envs import Env, tool
from counterpoint.harness import rollout
from counterpoint.policies import Observation
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.schema import Trace
from counterpoint.streams import Draws

TURNS = 200
REPEATS = 9
CONFIG = {"limits": {"turns": TURNS, "calls": 10 * TURNS}}


class Toy(Env):
    """Nothing to find out, everything to record."""

    id = "toy-v0"
    roles = {"a": ["look", "message"], "b": ["look"]}  # noqa: RUF012

    def agents(self) -> list[str]:
        return ["a", "b"]

    def observe(self, agent: str) -> str:
        return "look again"

    def legal(self, agent: str) -> dict[str, str]:
        tell = "\nmessage b: hi" if agent == "a" else ""
        return {str(at): f'call look {{"at": {at}}}{tell}' for at in (1, 2)}

    @tool
    def look(self, at: int) -> str:
        return "a room"


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds."""
    env, policy = Toy(), Softmax()
    (trace,) = rollout(env, policy, groups=1, rollouts=1, config=CONFIG)
    assert len(trace.of("act")) == TURNS
    assert abs(len(trace) / TURNS - 5) < 0.02
    played, bare, written = _medians(
        lambda: rollout(env, policy, groups=1, rollouts=1, config=CONFIG),
        lambda: _bare(env, policy),
        lambda: _written(trace),
    )
    one, two = _medians(*(_shared(env, policy, n) for n in (1, 2)), clock=time.perf_counter)
    job = "harness turn of 5 events, with digest"
    return [
        _row(f"{job} (goal 40 µs on a fast core)", played / TURNS),
        _row(f"{job}, against the same loop without a trace", played / TURNS, bare / TURNS, "bare"),
        _row(
            "encode, digest and write of a turn, as a part of it",
            written / TURNS,
            (played + written) / TURNS,
            "whole turn, recorded",
            goal=2.5,
        ),
        _row("runs by two workers, wall clock", two, one, "one worker", goal=1.7),
    ]


def _row(
    job: str, ours: float, peer: float | None = None, name: str = "", goal: float | None = None
) -> dict[str, Any]:
    ratio = None if peer is None else peer / ours
    return {
        "job": job, "ours": ours, "peer": peer, "peer_name": name, "ratio": ratio, "goal": goal
    }  # fmt: skip


def _bare(env: Toy, policy: Softmax) -> None:
    """The same choices and calls, with nobody watching."""
    for turn in range(TURNS):
        agent = env.agents()[turn % 2]
        shown = env.observe(agent)
        observation = Observation(agent, agent, (), shown, turn, list)
        policy(observation, env.legal(agent), Draws("0", "policy", agent, turn))
        env.look(1)


def _written(trace: Trace) -> None:
    """Encode, digest and write, one line at a time, as they happen; the type check is left out."""
    with TemporaryDirectory() as folder, Recorder(Path(folder) / "r.jsonl") as recorder:
        log = recorder.open(trace.header)
        for event in trace.events:
            log.emit(event)
        log.end()


def _shared(env: Toy, policy: Softmax, workers: int) -> Callable[[], list[Trace]]:
    return lambda: rollout(env, policy, groups=1, rollouts=40, config=CONFIG, workers=workers)


def _medians(
    *sides: Callable[[], Any], clock: Callable[[], float] = time.process_time
) -> list[float]:
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for taken, run in zip(times, sides, strict=True):
            began = clock()
            run()
            taken.append(clock() - began)
    return [median(taken) for taken in times]
