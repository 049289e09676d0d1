"""Edited runs: one act is replaced, all others are said again, and the rest may not move.

A graph claims what each event stands on. If an act is edited, whatever does not stand on it has to
stay as it was; what moves all the same shows an edge that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from counterpoint.envs import Env
from counterpoint.graph import TraceGraph
from counterpoint.harness import next_event
from counterpoint.policies import Policy
from counterpoint.policies.grammar import parse
from counterpoint.redrive.follow import Led
from counterpoint.schema import (
    Act,
    AnyEvent,
    Observe,
    Reward,
    ToolResult,
    Trace,
)
from counterpoint.spelling import Refused, freeze

WORK = 20_000
"""Events that one clause may compute; of what would take more, an even selection is examined."""

T = TypeVar("T")
Name = tuple[str, str, int]
"""An event by agent, kind, and the how-manieth of those: a name that holds in another run too."""


def broken(env: Env, clause: str, what: str) -> NoReturn:
    """Refuse an environment, naming the clause of its contract that it breaks."""
    raise Refused(f"{env.id} breaks its contract, clause {clause}: {what}")


def selected(things: Sequence[T], costs: Sequence[int]) -> Sequence[T]:
    """All things, or evenly spaced ones so that their costs come to about `WORK`."""
    return things[:: max(1, math.ceil(sum(costs) / WORK))]


def edited_runs(
    env: Env, team: Mapping[str, Policy], traces: Sequence[Trace]
) -> Iterator[tuple[Trace, Act, Trace]]:
    """(run, one of its acts, the run with another text in that act's place)."""
    possible = [
        (trace, act, text)
        for trace in traces
        for act in trace.of("act")
        if isinstance(act, Act)
        for text in _alternatives(trace, act)
    ]
    for trace, act, text in selected(possible, [len(trace) for trace, _, _ in possible]):
        yield trace, act, _with_text(env, team, trace, act, text)


def _alternatives(trace: Trace, act: Act) -> list[str]:
    """What else the agent could have said there; where it had no menu, to do nothing."""
    seen = next(trace[cause.seq] for cause in act.causes if cause.kind == "derives")
    assert isinstance(seen, Observe)
    texts = ["none"] if seen.legal is None else [text for _, text in seen.legal]
    return [text for text in dict.fromkeys(texts) if text != act.text]


def _with_text(env: Env, team: Mapping[str, Policy], trace: Trace, act: Act, text: str) -> Trace:
    """The run with `text` for the act; each agent says again what it said, and plays on after."""
    led = Led(trace.header, env)
    led.follow(trace[: act.seq])
    plain = Act(trace_id=act.trace_id, seq=act.seq, agent=act.agent, text_raw=freeze(text),
                items=parse(text))  # fmt: skip
    said: dict[str, list[Act]] = {}
    for each in trace.of("act"):
        assert isinstance(each, Act)
        said.setdefault(each.agent, []).append(plain if each.seq == act.seq else each)
    saying = led.policies
    while True:
        led.policies = saying
        asked = led.world.control.observe
        if asked is not None:
            agent = led.events[asked].agent
            count = led.world.agents[agent].acts
            own = said.get(agent, [])
            led.given.event = own[count] if count < len(own) else None
            led.policies = saying if count < len(own) else team
        event = next_event(led)
        if event is None:
            return led.trace()
        led.emit(event)


def edges(env: Env, trace: Trace, act: Act, edited: Trace) -> int:
    """Compare what stands on the same events in both runs, none of them the edited act."""
    names, others = _names(trace), _names(edited)
    partner = {name: edited[seq] for seq, name in others.items()}
    held: set[Name] = set()
    examined = 0
    for event in trace.events:
        name = names[event.seq]
        twin = partner.get(name)
        if twin is None or event.seq == act.seq:
            continue
        causes = _stands_on(event, names)
        if causes != _stands_on(twin, others) or not causes <= held:
            continue
        held.add(name)
        if what := _moved(event, twin):
            broken(
                env,
                "edges",
                f"editing what {act.agent} did at event {act.seq} moved {what} of event {event.seq}"
                f", the {event.kind} of {event.agent}, which does not descend from it",
            )
        examined += isinstance(event, Observe | ToolResult)
    return examined


def _names(trace: Trace) -> dict[int, Name]:
    """Names for events that hold in another run too: agent, kind, and the how-manieth."""
    counts: dict[tuple[str, str], int] = {}
    names = {}
    for event in trace.events:
        key = (event.agent, event.kind)
        names[event.seq] = (*key, counts.setdefault(key, 0))
        counts[key] += 1
    return names


def _stands_on(event: AnyEvent, names: dict[int, Name]) -> set[Name]:
    return {names[cause.seq] for cause in event.causes if cause.basis != "inferred:order"}


def _moved(event: AnyEvent, twin: AnyEvent) -> str | None:
    """The first thing that the environment computed differently."""
    computed: tuple[str, ...] = ()
    if isinstance(event, Observe):
        computed = ("content_raw", "legal", "anchor")
    elif isinstance(event, ToolResult):
        computed = ("content_raw", "error")
    return next((n for n in computed if getattr(event, n) != getattr(twin, n)), None)


def narrow(env: Env, trace: Trace, act: Act, edited: Trace) -> int:
    """Compare the rewards that name their causes, and do not descend from the act."""
    after = _paid(edited)
    examined = 0
    for key, reward in _paid(trace).items():
        if any(cause.basis == "inferred:run" for cause in reward.causes):
            continue
        if act.seq in TraceGraph(trace).ancestors(reward.seq, descent=True):
            continue
        examined += 1
        now = after[key].amount if key in after else None
        if now != reward.amount:
            broken(
                env,
                "narrow",
                f"its reward at event {reward.seq} (channel {reward.channel!r}) names causes, but "
                f"editing what {act.agent} did at event {act.seq}, which is none of them and leads "
                f"to none, moved it from {reward.amount} to {now}; name more causes, or leave them "
                "out, which means the whole run",
            )
    return examined


def _paid(trace: Trace) -> dict[Any, Reward]:
    """The rewards of a run by channel, target, and the how-manieth of that kind."""
    found: dict[Any, Reward] = {}
    for event in trace.events:
        if isinstance(event, Reward):
            key = (event.channel, event.target)
            found[(*key, sum(known[:2] == key for known in found))] = event
    return found
