"""Runs side by side, so that a policy that can answer many at once is asked once for all of them.

Whatever their number, each run has the events that it has by itself: its draws are named by the
run and not by the order of calls, and its environment is a copy of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from counterpoint.envs import Env
from counterpoint.harness.run import Run
from counterpoint.harness.stage import Asked, asked, next_event
from counterpoint.policies import Policy, described
from counterpoint.schema import Header
from counterpoint.spelling import Refused

TOGETHER = 256
"""Runs in progress at once."""


def answers_many(team: Mapping[str, Policy]) -> bool:
    """Whether some policy can answer several runs at once."""
    return any(described(policy, "many") is not None for policy in team.values())


def copies(env: Env) -> Iterator[Env] | None:
    """Copies of an environment, without end; None if it cannot be copied (it holds a lock, say)."""
    try:
        snapshot = env.snapshot()
    except TypeError:
        return None
    return (_copy(env, snapshot) for _ in repeat(None))


def _copy(env: Env, snapshot: Any) -> Env:
    own = copy.copy(env)
    own.restore(snapshot)
    return own


def abreast(
    envs: Iterable[Env], team: Mapping[str, Policy], headers: Sequence[Header]
) -> list[Run]:
    """Play a run for each header, all of them side by side, each in an environment of its own.

    Raises:
        Refused: a policy that gives more or fewer turns than it was asked for; what else a run of
            its own would raise, with a note that says in which run.
    """
    runs = []
    for header, env in zip(headers, envs, strict=False):
        env.reset(header.task_seed or 0)
        runs.append(Run(header, env, team))
    going: Sequence[Run] = runs
    while going:
        waiting: dict[int, list[tuple[Run, Asked]]] = {}
        for run in going:
            if (ask := _on(run)) is not None:
                waiting.setdefault(id(ask.policy), []).append((run, ask))
        for asks in waiting.values():
            _answer(asks)
        going = [run for asks in waiting.values() for run, _ in asks]
    return runs


@contextmanager
def whereabouts(run: Run) -> Iterator[None]:
    """Whatever is raised in this block bears a note of the event and the run."""
    try:
        yield
    except Exception as error:
        where = f"event {len(run.events)} of trace {run.header.trace_id} ({run.header.task_id}"
        error.add_note(f"at {where}, rollout {run.header.rollout_id})")
        raise


def _on(run: Run) -> Asked | None:
    """Play until a policy is due that answers many; None when the run has ended."""
    with whereabouts(run):
        while True:
            ask = asked(run)
            if ask is not None and described(ask.policy, "many") is not None:
                return ask
            event = next_event(run)
            if event is None:
                return None
            run.emit(event)


def _answer(asks: Sequence[tuple[Run, Asked]]) -> None:
    """Ask one policy once, and play its turn in every run that waits for it."""
    policy: Any = asks[0][1].policy
    each = [ask for _, ask in asks]
    given = policy.many(
        [a.observation for a in each], [a.legal for a in each], [a.draws for a in each]
    )
    if len(given) != len(asks):
        raise Refused(
            f"many of the policy of {each[0].observation.role} gave {len(given)} turns where "
            f"{len(asks)} were asked for"
        )
    for (run, _), answer in zip(asks, given, strict=True):
        with whereabouts(run):
            event = next_event(run, answer)
            if event is not None:
                run.emit(event)
