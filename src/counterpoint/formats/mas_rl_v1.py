"""The JSON Schema of the orchestration-trace survey (arXiv:2605.02801), read into traces.

A run is an object with `events`, `edges`, `rewards`, `costs`. Events are sorted by their edges,
then by position; edges that would close a cycle are cut and reported; where each event stood is
kept as `source_index` in the header's `meta`, with costs, metrics, system and whatever an event
says that has no field here. `t` is an order and no clock. An event that lacks what its kind needs,
or of a kind outside the schema, becomes `custom`. Each top-level reward becomes a reward event
whose channel is its key. An orchestrator's decision is an act without a text.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from msgspec import UNSET

from counterpoint.formats import intake as take
from counterpoint.formats.intake import Intake, Rejected, Tally, add
from counterpoint.formats.mas_rl_v1_out import FOREIGN_KIND, TOP, said
from counterpoint.schema import (
    Act,
    AgentReturn,
    Aggregate,
    AnyEvent,
    Cause,
    Custom,
    Delegate,
    Despawn,
    Event,
    Intervene,
    Message,
    Safety,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Trace,
)
from counterpoint.spelling import Payload, freeze
from counterpoint.vocabulary import RESERVED, EdgeKind, Family, Topology, Trust

ABOUT = "the JSON Schema of the orchestration-trace survey (arXiv:2605.02801)"

MAX_CHANNELS = 64
"""Most reward channels of one run: each depends on every event that ends a path."""

EDGES_IN: dict[str, EdgeKind] = {
    "temporal": "precedes",
    "causal": "derives",
    "spawn": "spawns",
    "message": "delivers",
    "tool_dependency": "authorizes",
    "return": "returns",
    "aggregate": "aggregates",
    "safety_flow": "guards",
}
"""Edge type there → edge kind here; a return into a tool_result is `answers`."""

FAMILIES: dict[str, Family] = {
    "team": "R1",
    "agent": "R2",
    "role": "R3",
    "process": "R4",
    "tool": "R5",
}
"""Reward channel → family. Others are R8: in particular orchestration is not R7, which counts as a
cost of the outcome, and the log does not say that it is one."""

_TRUST: dict[bool | None, Trust] = {True: "trusted", False: "untrusted", None: "unknown"}


# ---------------------------------------------------------------------------------------------
# In


class Foreign(NamedTuple):
    """One event of the log that can be kept; `raw` is all that it said."""

    id: str
    type: str
    agent: str
    role: str | None
    to: str | None
    tool: str | None
    trust: Trust
    content: Payload
    raw: dict[str, Any]


class Link(NamedTuple):
    """One edge of the log between positions in the list of kept events."""

    source: int
    target: int
    type: str


def _event(given: Any, place: str, tally: Tally) -> Foreign:
    raw = take.object_at(given, place)
    names = {key: take.name_at(raw.get(key), f"{place}.{key}") for key in _NAMED}
    for key in ("id", "type", "agent"):
        if names[key] is None:
            raise Rejected(f"{place}.{key}", "is missing")
    trusted = raw.get("trusted")
    if not isinstance(trusted, bool | None):
        raise Rejected(f"{place}.trusted", f"is {take.kind_of(trusted)}, not true or false")
    take.payload_at(raw, place)
    ref = names.pop("content_ref")
    content = UNSET if ref is None else freeze({"content_ref": ref})
    return Foreign(**names, trust=_TRUST[trusted], content=content, raw=raw)  # type: ignore[arg-type]


_NAMED = ("id", "type", "agent", "role", "to", "tool", "content_ref")


def _links(given: Any, ids: dict[str, int], intake: Intake) -> list[Link]:
    def link(raw: Any, place: str, tally: Tally) -> Link:
        edge = take.object_at(raw, place)
        ends = []
        for key in ("src", "dst"):
            name = take.name_at(edge.get(key), f"{place}.{key}")
            if name not in ids:
                raise Rejected(f"{place}.{key}", f"names no event: {ascii(name)[:60]}")
            ends.append(ids[name])
        kind = edge.get("type")
        if not isinstance(kind, str) or kind not in EDGES_IN:
            raise Rejected(f"{place}.type", f"is {ascii(kind)[:40]}, which is no edge type")
        tally.dropped.update(f"edges.{take.clean(k)}" for k in edge.keys() - {"src", "dst", "type"})
        return Link(ends[0], ends[1], kind)

    return [made for _, made in intake.kept(take.list_at(given, "edges"), "edges", link)]


def to_trace(run: Any, intake: Intake) -> Trace:
    """Turn one run into a trace. Raises Rejected if it has no list of events."""
    about = take.object_at(run, "run")
    if "events" not in about:
        raise Rejected("run", "has no `events`")
    listed = take.list_at(about["events"], "events")
    intake.tally.records += len(listed)
    kept = intake.kept(listed, "events", _event)
    foreign = [event for _, event in kept]
    ids: dict[str, int] = {}
    for position, event in enumerate(foreign):
        ids.setdefault(event.id, position)
    links = _acyclic(len(foreign), _links(about.get("edges"), ids, intake), foreign, intake)
    order = _sorted(len(foreign), links)
    events = _laid_out(foreign, links, order, intake)
    _rewards(about.get("rewards"), events, intake)
    return take.finish(
        events,
        intake,
        _roles(foreign, events),
        meta=_notes(
            about, [kept[p][0] for p in order], [foreign[p] for p in order], events, intake
        ),
        task_id=intake.optional(take.name_at, about, "task_id"),
        topology=_topology(about.get("topology"), intake),
    )


def _topology(given: Any, intake: Intake) -> str:
    if given is None or given in get_args(Topology):
        return given or "unknown"
    intake.report("V02", f"topology is {ascii(given)[:40]}, which is none", "topology")
    return "unknown"


def _acyclic(n: int, links: list[Link], foreign: Sequence[Foreign], intake: Intake) -> list[Link]:
    """Leave out the edges that close a cycle, found by one depth-first pass in file order."""
    follows: list[list[int]] = [[] for _ in range(n)]
    for i, link in enumerate(links):
        follows[link.source].append(i)
    state, cut = [0] * n, set()
    for root in range(n):
        stack = [] if state[root] else [(root, iter(follows[root]))]
        while stack:
            node, rest = stack[-1]
            state[node] = 1
            for i in rest:
                target = links[i].target
                if state[target] == 0:
                    stack.append((target, iter(follows[target])))
                    break
                if state[target] == 1:
                    cut.add(i)
            else:
                state[node] = 2
                stack.pop()
    for i in sorted(cut):
        first, last = foreign[links[i].target].id, foreign[links[i].source].id
        message = f"the edge from {last} back to {first} closes a cycle and is left out"
        intake.report("V04", message, "edges")
    return [link for i, link in enumerate(links) if i not in cut]


def _sorted(n: int, links: list[Link]) -> list[int]:
    """Positions such that every edge goes forward, otherwise as in the file."""
    waits = [0] * n
    follows: list[list[int]] = [[] for _ in range(n)]
    for link in links:
        waits[link.target] += 1
        follows[link.source].append(link.target)
    ready = [position for position in range(n) if not waits[position]]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for target in follows[order[-1]]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, target)
    return order


def _laid_out(
    foreign: Sequence[Foreign], links: list[Link], order: list[int], intake: Intake
) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    seqs = {position: seq for seq, position in enumerate(order)}
    into: dict[int, list[tuple[str, int]]] = {}
    for link in links:
        into.setdefault(link.target, []).append((link.type, seqs[link.source]))
    for position in order:
        event, edges = foreign[position], into.get(position, [])
        kind, fields = _own(event, edges)
        agent = event.agent
        if kind is ToolResult:
            asked = [s for t, s in edges if t == "return" and isinstance(events[s], ToolCall)]
            if asked:
                agent, fields["call"] = events[asked[0]].agent, asked[0]
        add(
            events,
            kind,
            intake,
            agent,
            source_id=event.id,
            causes=tuple(Cause(seq=s, kind=_edge_in(t, kind)) for t, s in edges),
            trust=event.trust,
            **fields,
        )
    return events


def _edge_in(theirs: str, into: type[Event]) -> EdgeKind:
    return "answers" if theirs == "return" and into is ToolResult else EDGES_IN[theirs]


def _own(event: Foreign, edges: list[tuple[str, int]]) -> tuple[type[Event], dict[str, Any]]:
    """The kind here and its fields; `custom` where the event lacks what the kind needs."""
    to = () if event.to is None else (event.to,)
    match event.type:
        case "orchestrator_decision" if event.raw.get("decision") == "stop":
            return Stop, {}
        case "orchestrator_decision" if event.raw.get("decision") == "delegate":
            return Delegate, {"to": to, "content_raw": event.content}
        case "orchestrator_decision":
            return Act, {"trainable": True}
        case "spawn" if event.to is not None:
            made = {"child": event.to, "child_role": event.role, "context_raw": event.content}
            return Spawn, made
        case "despawn" if event.to is not None:
            return Despawn, {"child": event.to}
        case "message":
            return Message, {"to": to, "content_raw": event.content}
        case "tool_call" if event.tool is not None:
            return ToolCall, {"tool": event.tool, "arguments_raw": event.content}
        case "tool_result":
            return ToolResult, {"content_raw": event.content}
        case "return":
            return AgentReturn, {"to": to, "content_raw": event.content}
        case "aggregate":
            inputs = tuple(seq for kind, seq in edges if kind == "aggregate")
            return Aggregate, {"inputs": inputs, "content_raw": event.content}
        case "human_intervention":
            return Intervene, {"do": "edit", "content_raw": event.content}
        case "safety_event":
            target = next((seq for kind, seq in edges if kind == "safety_flow"), None)
            return Safety, {"rule": "unnamed", "effect": "flagged", "target": target}
    return Custom, {"name": f"{FOREIGN_KIND}{event.type}", "data_raw": freeze(event.raw)}


def _rewards(given: Any, events: list[AnyEvent], intake: Intake) -> None:
    """One reward event a channel."""
    rewards = intake.optional(take.object_at, {"rewards": given or {}}, "rewards") or {}
    if len(rewards) > MAX_CHANNELS:
        message = f"{len(rewards)} reward channels are more than {MAX_CHANNELS}; all are left out"
        intake.report("V02", message, "rewards")
        return
    causes = take.everything(events)
    for key in rewards:
        try:
            amount = take.number_at(rewards[key], f"rewards.{take.clean(key)}")
        except Rejected as fault:
            intake.report("V02", str(fault), fault.place)
            continue
        said = {"channel": take.clean(key), "family": _family(key), "source": "rewards"}
        take.score(events, intake, causes, amount, **said)


def _family(channel: str) -> str:
    """The family that a channel's name says; the schema's keys are layers of credit or families."""
    return channel if channel in get_args(Family) else FAMILIES.get(channel, "R8")


def _roles(foreign: Sequence[Foreign], events: Sequence[AnyEvent]) -> dict[str, str]:
    """Agents that no event spawns, with the first role that the log gives them."""
    said = {e.agent: e.role for e in reversed(foreign) if e.role is not None and e.type != "spawn"}
    born = {e.child for e in events if isinstance(e, Spawn)}
    alive = dict.fromkeys(
        e.agent for e in events if e.source_id is not None and e.agent not in born
    )
    return {agent: said.get(agent, agent) for agent in alive if agent not in RESERVED}


def _notes(
    about: dict[str, Any],
    index: list[int],
    foreign: Sequence[Foreign],
    events: Sequence[AnyEvent],
    intake: Intake,
) -> Payload:
    """What export needs to give the run back: top-level fields, places, what events said more."""
    rest = []
    for event, given in zip(events, foreign, strict=False):  # the events go on with rewards
        known = said(event)
        rest.append({k: v for k, v in given.raw.items() if k not in known or known[k] != v})
    top: dict[str, Any] = {
        k: about[k] for k in ("trace_id", "system", "costs", "metrics") if k in about
    }
    extra = {k: v for k, v in about.items() if k not in TOP}
    return intake.notes({**top, "extra": extra or None, "source_index": index, "rest": rest})
