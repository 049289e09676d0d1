"""What an environment promises, put to the test: `check_env` names the clause that fails.

An environment is believed in two places: when a run is re-driven (its hidden state must come back
from its seed and the recorded effects), and when credit asks what a reward depends on (what it
computes must depend on nothing but what the graph says). Each clause tests one of those by playing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from counterpoint.envs import Env
from counterpoint.harness import Run, next_event, rollout, team_of
from counterpoint.harness.effects import answer
from counterpoint.policies import Policy
from counterpoint.policies.grammar import parse
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive.edits import broken, edges, edited_runs, narrow, selected
from counterpoint.redrive.follow import Led, Team, call_of, difference
from counterpoint.schema import (
    Observe,
    Spawn,
    ToolResult,
    Trace,
)
from counterpoint.world import INERT, World

RUNS = 2
"""Runs of each task: two, so that one reset must not remember the other."""


class Checked(NamedTuple):
    """A contract kept: how many things each clause examined. 0 says that nothing was there."""

    env: str
    traces: int
    events: int
    clauses: dict[str, int]

    def __str__(self) -> str:
        examined = " · ".join(f"{clause} {n}" for clause, n in self.clauses.items())
        return (
            f"{self.env} keeps its contract in {self.traces} runs, {self.events} events: {examined}"
        )


def check_env(env: Env, policies: Team | None = None, *, tasks: int = 3, seed: int = 0) -> Checked:
    """Play an environment, and refuse it with the clause that it breaks.

    versioned      its id ends in a version
    menus          each entry parses under the grammar, and its role may do it
    deterministic  the same header gives the same bytes, whatever was played in between
    redrive        reset and the recorded acts bring the environment back to every event
    snapshot       restored at any event, the run goes on as recorded; one serves twice
                   (of long runs: at evenly spaced events)
    pure           a pure tool changes nothing, and reads only what the reset fixed
    edges          what is computed for an agent does not move when an act is edited from which
                   no edge leads there
    narrow         no more does a reward that names its causes

    Args:
        env: the environment; it is played, so its state is lost.
        policies: who plays, a policy per role or one for all; by default uniform tables, which
            need menus.
        tasks: how many tasks, from `seed`; two runs of each. More tasks see more.
        seed: of everything.

    Returns:
        How many things each clause examined: `print(check_env(Doors()))`.

    Raises:
        Refused: a clause is broken; the sentence names it, the event and what was seen.
    """
    team = team_of(env, Softmax() if policies is None else policies)
    if not re.fullmatch(r".*\S-v\d+", env.id):
        broken(env, "versioned", "its id ends in no version; call it NAME-v0")
    traces = rollout(env, team, groups=tasks, rollouts=RUNS, seed=seed)
    clauses = {clause: check(env, team, traces) for clause, check in _CLAUSES.items()}
    edits = list(edited_runs(env, team, traces))
    clauses["edges"] = sum(edges(env, *edit) for edit in edits)
    clauses["narrow"] = sum(narrow(env, *edit) for edit in edits)
    return Checked(env.id, len(traces), sum(map(len, traces)), clauses)


# ---------------------------------------------------------------------------------------------
# Clauses over the recorded runs: each returns how many things it examined


def _menus(env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]) -> int:
    """The menu entries."""
    examined = 0
    for trace in traces:
        roles = _roles(trace)
        for event in trace.events:
            for label, text in (event.legal or ()) if isinstance(event, Observe) else ():
                if what := _unplayable(text, env.roles[roles[event.agent]]):
                    where = f"event {event.seq} offers {event.agent} {label!r}"
                    broken(env, "menus", f"{where}, but {what}")
                examined += 1
    return examined


def _unplayable(text: str, allowed: Sequence[str]) -> str | None:
    items = parse(text)
    if not items:
        return f"{text!r} holds nothing that the grammar knows"
    for item in items:
        name = item.name[0] if item.verb == "call" else item.verb
        if name not in allowed and item.verb not in INERT:
            return f"its role may not {name}"
    return None


def _roles(trace: Trace) -> dict[str, str]:
    agents = World(trace.header).agents
    roles = {name: agent.role for name, agent in agents.items()}
    spawns = [event for event in trace.events if isinstance(event, Spawn)]
    spawned = {event.child: event.child_role or event.child for event in spawns}
    return {**roles, **spawned}


def _deterministic(env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]) -> int:
    """The runs, played again in another order."""
    for trace in reversed(traces):
        env.reset(trace.header.task_seed or 0)
        run = Run(trace.header, env, team)
        for event in trace.events:
            again = next_event(run)
            if what := difference(event, again):
                broken(env, "deterministic", f"played again, event {event.seq} differs: {what}")
            run.emit(event)
    return len(traces)


def _redrive(env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]) -> int:
    """The events that came back from the recorded acts."""
    for trace in traces:
        found = Led(trace.header, env).follow(trace)
        if found is not None:
            broken(env, "redrive", f"from the recorded acts, event {found[0]} differs: {found[1]}")
    return sum(map(len, traces))


def _snapshot(env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]) -> int:
    """The places at which the environment was restored, from the last to the first."""
    states = {(n, t): state for n, trace in enumerate(traces) for t, state in _states(env, trace)}
    places = selected(list(states), [len(traces[n]) - t for n, t in states])
    # the first is restored once more at the end
    for n, t in (*reversed(places), *places[:1]):
        led = Led(traces[n].header, env)
        env.restore(states[n, t])
        for event in traces[n].events[:t]:
            led.emit(event)
        found = led.follow(traces[n])
        if found is not None:
            what = f"restored before event {t}, event {found[0]} differs: {found[1]}"
            broken(env, "snapshot", what)
    return len(places)


def _states(env: Env, trace: Trace) -> Iterator[tuple[int, Any]]:
    """Snapshots before each event of a run."""
    led = Led(trace.header, env)
    for t, event in enumerate(trace.events):
        yield t, env.snapshot()
        led.differs(event)
        led.emit(event)


def _pure(env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]) -> int:
    """The results of pure tools."""
    return sum(_reads_little(env, trace) + _writes_nothing(env, trace) for trace in traces)


def _reads_little(env: Env, trace: Trace) -> int:
    """Each pure result, computed once more by an environment that was only reset."""
    led = Led(trace.header, env)
    fresh = env.snapshot()
    examined = 0
    for event in trace.events:
        if isinstance(event, ToolResult) and _is_pure(led, event):
            here = env.snapshot()
            env.restore(fresh)
            env.bind(World(trace.header), ())
            again = answer(led, call_of(led, event))
            env.restore(here)
            if what := difference(event, again):
                tool = call_of(led, event).tool
                broken(
                    env,
                    "pure",
                    f"{tool} read what the run had changed by event {event.seq}: {what}",
                )
            examined += 1
        led.differs(event)
        led.emit(event)
    return examined


def _writes_nothing(env: Env, trace: Trace) -> int:
    """The run once more, without running its pure tools: nothing may be missed."""
    led = Led(trace.header, env)
    skipped: list[str] = []
    for event in trace.events:
        if isinstance(event, ToolResult) and _is_pure(led, event):
            skipped.append(call_of(led, event).tool)
        elif (what := led.differs(event)) and skipped:
            broken(env, "pure", f"without {skipped[-1]} running, event {event.seq} differs: {what}")
        led.emit(event)
    return len(skipped)


def _is_pure(run: Run, result: ToolResult) -> bool:
    spec = run.specs.get(call_of(run, result).tool)
    return spec is not None and spec.pure and call_of(run, result).verdict != "deny"


_CLAUSES: dict[str, Callable[[Env, Mapping[str, Policy], Sequence[Trace]], int]] = {
    "menus": _menus,
    "deterministic": _deterministic,
    "redrive": _redrive,
    "snapshot": _snapshot,
    "pure": _pure,
}
