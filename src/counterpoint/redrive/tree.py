"""Exact credit of many runs of one task: the tree of what may happen is listed once.

Rollouts of a group share task, environment and policies, so they walk the same tree. Each of its
prefixes is named by what acts and results said on the way, and holds its V(G≤t).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import UnsetType

from counterpoint.envs import Env
from counterpoint.redrive.exact import (
    PREFIXES,
    ActValue,
    Listed,
    all_listed,
    branches,
)
from counterpoint.redrive.follow import Team, env_for, team_for
from counterpoint.schema import Act, AnyEvent, Target, ToolResult, Trace
from counterpoint.spelling import Payload, Refused

Path = tuple[bytes | str, ...]
"""What was decided so far: the text of every act, the content or error of every result."""


def credits_of(
    traces: Iterable[Trace], env: Env | None = None, policies: Team | None = None
) -> list[list[ActValue]]:
    """Exact Q, V and seqau of each act of each run, in order, as `credit_of` gives for one.

    Args:
        traces: recorded runs; those of one group cost little more than one of them.
        env: as in `replay`.
        policies: as in `replay`.

    Raises:
        Refused: as `credit_of`; or a run went a way that its policies cannot go.
    """
    trees: dict[object, dict[Path, float]] = {}
    found = []
    for trace in traces:
        header = trace.header
        key = (header.group_id, header.task_seed, _bytes(header.config_raw))
        if key not in trees:
            trees[key] = _grown(trace, env_for(header, env), policies)
        found.append(_looked_up(trace, trees[key]))
    return found


def _grown(trace: Trace, env: Env, policies: Team | None) -> dict[Path, float]:
    """V at every prefix of the task, by its path."""
    team = all_listed(team_for(trace.header, env, policies))
    env.reset(trace.header.task_seed or 0)
    values: dict[Path, float] = {}

    def value(run: Listed, path: Path) -> float:
        """V where `run` stands, which is moved; a way without a choice is one prefix."""
        passed = [path]
        while run.world.stopped is None and len(ahead := branches(run)) == 1:
            run.emit(ahead[0].event)
            passed.append(path := _next(path, ahead[0].event))
        if len(values) > PREFIXES:
            raise Refused(f"V cannot be listed, it needs fork: more than {PREFIXES} prefixes")
        if run.world.stopped is not None:
            values.update(dict.fromkeys(passed, total := _earned(run)))
            return total
        here = run.env.snapshot()
        total = 0.0
        for chance, event, state in ahead:
            run.env.restore(here if state is None else state)
            child = run.after((*run.events, event))
            total += chance * value(child, _next(path, event))
        values.update(dict.fromkeys(passed, total))
        return total

    value(Listed(trace.header, env, team, ()), ())
    return values


def _earned(run: Listed) -> float:
    """The outcome of a run that has stopped, from what the environment pays."""
    counted = [
        paid.amount
        for paid in run.amounts()
        if paid.amount is not None
        and (paid.channel == "team" or paid.family == "R7")
        and (paid.target is None or (isinstance(paid.target, Target) and not paid.target.agent))
    ]
    if not counted:
        raise Refused(f"a run of {run.env.id} ends unscored, so V has no value to expect")
    return math.fsum(counted)


def _next(path: Path, event: AnyEvent) -> Path:
    if isinstance(event, Act):
        return (*path, event.text or "")
    if isinstance(event, ToolResult):
        return (*path, event.error or _bytes(event.content_raw))
    return path


def _bytes(raw: Payload) -> bytes:
    return b"" if isinstance(raw, UnsetType) else bytes(raw)


def _looked_up(trace: Trace, values: dict[Path, float]) -> list[ActValue]:
    found = []
    path: Path = ()
    for event in trace.events:
        before, path = path, _next(path, event)
        if path not in values:
            raise Refused(
                f"trace {trace.trace_id}, event {event.seq}: its policies cannot go this way"
            )
        if isinstance(event, Act):
            found.append(ActValue(event.seq, event.agent, values[before], values[path]))
    return found
