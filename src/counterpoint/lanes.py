"""A run for reading: one row of facts per run, or its events in time with agents as lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from counterpoint.graph import TraceGraph
from counterpoint.schema import (
    Act,
    AgentReturn,
    Aggregate,
    AnyEvent,
    CreditEntry,
    Custom,
    Delegate,
    Deliver,
    Despawn,
    Event,
    Intervene,
    Message,
    Observe,
    Reward,
    Safety,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Trace,
    Write,
)
from counterpoint.world import World

_MARKS: dict[str, str] = {
    "observe": "○",
    "act": "●",
    "tool_call": "▷",
    "tool_result": "◁",
    "spawn": "+",
    "despawn": "×",
    "stop": "■",
    "reward": "★",
    "safety": "!",
    "intervene": "✎",
}


def summary(trace: Trace, entries: Iterable[CreditEntry] = ()) -> dict[str, Any]:
    """One row of facts about a run; a figure that no event carries is None.

    `entries` are lines of a credit file; `credited_units` counts those that name this trace by id
    and digest and hold a value. `linear`, `branch_points`, `joins` and `critical_path` (how many
    events lie on it) are what `TraceGraph` makes of the run.
    """
    events = trace.events
    rewards: dict[str, float | None] = {}
    for event in events:
        if isinstance(event, Reward):
            held = rewards.setdefault(event.channel, None)
            if event.amount is not None:
                rewards[event.channel] = (held or 0.0) + event.amount
    credited = [e for e in entries if e.trace_id == trace.trace_id and e.value is not None]
    digest = trace.digest if credited else ""
    graph = TraceGraph(trace)
    return {
        "trace": trace.trace_id,
        "task": trace.header.task_id,
        "group": trace.header.group_id,
        "topology": trace.header.topology,
        "linear": graph.is_linear(),
        "branch_points": len(graph.fan_outs()),
        "joins": len(graph.joins()),
        "critical_path": len(graph.critical_path().seqs),
        "roles": sorted(set(roles(trace).values())),
        "spawns": _count(trace, "spawn"),
        "events": len(events),
        "messages": _count(trace, "message"),
        "tool_calls": _count(trace, "tool_call"),
        "tokens": _sum(n for e in events for n in (e.tokens_in, e.tokens_out)),
        "wall_clock_s": _duration(events),
        "cost_usd": _sum(e.cost_usd for e in events),
        "reward_channels": rewards,
        "credited_units": sum(e.digest == digest for e in credited),
        "untrusted_inputs": sum(
            e.trust == "untrusted" and isinstance(e, ToolResult | Message | Observe | AgentReturn)
            for e in events
        ),
        "human_interventions": _count(trace, "intervene"),
        "outcome": trace.outcome,
        "finished": trace.seal is not None,
    }


def roles(trace: Trace) -> dict[str, str]:
    """Role of every agent that acts or is spawned, in order of appearance."""
    found = {agent.id: agent.role for agent in trace.header.agents}
    for event in trace.events:
        if isinstance(event, Spawn):
            found[event.child] = event.child_role or event.child
        elif isinstance(event, Act):
            found.setdefault(event.agent, event.agent)
    return found


def _count(trace: Trace, kind: str) -> int:
    return sum(event.kind == kind for event in trace.events)


def _sum(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return math.fsum(known) if known else None


def _duration(events: Iterable[Event]) -> float | None:
    clocks = [t for e in events for t in (e.t_start, e.t_end) if t is not None]
    return max(clocks) - min(clocks) if clocks else None


# ---------------------------------------------------------------------------------------------
# Lanes


def lanes(trace: Trace) -> Iterator[str]:
    """Lines of the run: a heading with the agents, then one line per event.

    Each agent has a lane; a mark stands in the lane of who acts, and an arrow runs to the lanes of
    those who are addressed. The text is the event's own, unescaped: whoever prints it must escape.
    """
    place = _places(trace)
    yield f"trace {trace.trace_id}  task {trace.header.task_id}  outcome {trace.outcome}"
    for number, agent in enumerate(place):
        yield " " * 6 + "│  " * number + f"┌ {agent} ({roles(trace).get(agent, agent)})"
    for event in trace.events:
        yield f"{event.seq:>5} {_drawn(event, place)} {event.kind:<12} {describe(trace, event)}"


def _places(trace: Trace) -> dict[str, int]:
    found: dict[str, int] = {agent: n for n, agent in enumerate(roles(trace))}
    for event in trace.events:
        for agent in (event.agent, *receivers(event)):
            found.setdefault(agent, len(found))
    return found


def receivers(event: Event) -> tuple[str, ...]:
    """Agents that an event addresses."""
    if isinstance(event, Message | Delegate | AgentReturn):
        return event.to
    if isinstance(event, Spawn | Despawn):
        return (event.child,)
    return ()


def _drawn(event: Event, place: dict[str, int]) -> str:
    cells = ["│  "] * len(place)
    here = place[event.agent]
    cells[here] = _MARKS.get(event.kind, "●") + "  "
    for there in sorted({place[agent] for agent in receivers(event)} - {here}):
        low, high = min(here, there), max(here, there)
        for lane in range(low, high):
            cells[lane] = cells[lane][0].replace("│", "─") + "──"
        cells[there] = ("▶" if there > here else "◀") + cells[there][1:]
    return "".join(cells)


def describe(trace: Trace, event: AnyEvent) -> str:
    """What an event says, in one line of its own words."""
    to = receivers(event)
    says = _SAYS.get(type(event))
    said = says(event) if says else trace.content(event)
    return " ".join(
        str(part)
        for part in (f"→ {', '.join(to)}:" if to else None, said)
        if part not in (None, "")
    )


def known(trace: Trace, world: World) -> Iterator[str]:
    """What every agent has before its eyes in `world`, the fold of `trace`: a line per event.

    An event that the trace does not hold (one of a fork's parent) has a number and no words.
    """
    events = {event.seq: event for event in reversed(trace.events)}
    for name, agent in world.agents.items():
        for seq in agent.context:
            event = events.get(seq)
            words = event and f", {event.kind} by {event.agent}: {describe(trace, event)}"
            yield f"{name} knows {seq}{words or ', which is not in this trace'}"


def _reward(event: Reward) -> str:
    amount = "not scored" if event.amount is None else f"{event.amount:g}"
    target = event.target
    about = target and (target.agent or target.role or target.seq)
    return f"{amount} on {event.channel}" + (f" for {about}" if about is not None else "")


def _observe(event: Observe) -> str:
    shown = ", ".join(str(source.seq) for source in event.sources)
    said = event.content
    return (f"saw {shown}" if shown else "") + (f" {said}" if said is not None else "")


_SAYS: dict[type[Event], Callable[[Any], Any]] = {
    Act: lambda e: e.text,
    Observe: _observe,
    Spawn: lambda e: e.context,
    Despawn: lambda e: e.status,
    Deliver: lambda e: f"event {e.message}",
    ToolCall: lambda e: f"{e.tool} {e.arguments}",
    ToolResult: lambda e: e.error or e.content,
    Write: lambda e: f"{e.artefact} version {e.version}",
    Aggregate: lambda e: f"{len(e.inputs)} inputs {e.content or ''}",
    Stop: lambda e: f"{e.reason} {e.answer if e.answer is not None else ''}",
    Reward: lambda e: _reward(cast(Reward, e)),
    Intervene: lambda e: e.do,
    Safety: lambda e: f"{e.effect} {e.rule}",
    Custom: lambda e: e.name,
}
