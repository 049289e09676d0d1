"""Traces written as episodes of the library verifiers (its v1 records), with advantages.

An episode has one trace for the team, so that links can join the turns of different agents: each
agent's turns are a path of the graph, and whose node it is stands in the trace's `info`. A turn
whose prompt does not go on from what the agent had seen begins a path of its own. Tokens and
log-probabilities are those that were stored; a turn's credit goes to each token that it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from counterpoint.formats.intake import Tally
from counterpoint.formats.verifiers import LINKS, OURS
from counterpoint.schema import (
    Act,
    AgentReturn,
    AnyEvent,
    CreditEntry,
    Delegate,
    Event,
    Message,
    Observe,
    Reward,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Trace,
    counts_as_outcome,
)

Values: TypeAlias = Mapping[tuple[str, int], float]
"""(digest of the trace, seq of the act) → its credit."""

LINKS_OUT: dict[type[Event], str] = {
    Message: "agent_message",
    Delegate: "subagent_call",
    Spawn: "subagent_call",
    AgentReturn: "subagent_return",
}
"""What an agent is shown of another → type of the link between their turns; else our kind."""

_BACK = {edge: theirs for theirs, edge in LINKS.items()}


def values_of(entries: Iterable[CreditEntry], tally: Tally) -> Values:
    """The credit of turns; a line about anything else has no node and is counted as dropped."""
    out: dict[tuple[str, int], float] = {}
    for entry in entries:
        if entry.unit != "turn" or entry.target.seq is None:
            tally.dropped[f"credit per {entry.unit}"] += 1
        elif entry.value is not None:
            out[entry.digest, entry.target.seq] = entry.value
    return out


def lines(trace: Trace, tally: Tally, credit: Values | None = None) -> Iterator[bytes]:
    """The trace as one line of JSON; what is left out is counted in `tally.dropped`."""
    yield json.dumps(episode(trace, tally, credit or {})).encode()


def episode(trace: Trace, tally: Tally, credit: Values) -> dict[str, Any]:
    """The trace as an object that verifiers' `WireEpisode` takes."""
    header = trace.header
    data = {"id": header.task_id, "prompt": None}
    task = {"type": "TaskData", "data": data, "key": header.task_id}
    made = _trace(trace, tally, credit)
    return {
        "id": header.rollout_id or trace.trace_id,
        "env": {"id": header.env.id if header.env else ""},
        "task": task,
        "group": None if header.group_id is None else {"id": header.group_id},
        "ok": trace.seal is not None,
        "traces": [{**made, "task": task}],
    }


class _Notes(msgspec.Struct):
    """What an import of this format left in the header's `meta`, by seq."""

    system: list[int] = []
    links: dict[int, list[tuple[int, str]]] = {}
    advantages: dict[int, list[float]] = {}


def _notes(trace: Trace) -> _Notes:
    env, meta = trace.header.env, trace.header.meta
    if env is None or env.id != "imported:verifiers":
        return _Notes()
    try:
        return msgspec.convert(meta, _Notes, str_keys=True)
    except msgspec.ValidationError:  # it is free text of the file, and may hold anything
        return _Notes()


@dataclass
class _Graph:
    """The graph so far: nodes, whose they are, and where each agent stands."""

    trace: Trace
    tally: Tally
    credit: Values
    notes: _Notes
    nodes: list[dict[str, Any]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    speakers: list[str | None] = field(default_factory=list)
    untrained: list[int] = field(default_factory=list)
    tip: dict[str, int | None] = field(default_factory=dict)
    paths: dict[str, dict[tuple[int, ...], int]] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    shown: dict[str, list[tuple[dict[str, Any], str | None]]] = field(default_factory=dict)
    links: dict[str, dict[tuple[int, str], None]] = field(default_factory=dict)


def _trace(trace: Trace, tally: Tally, credit: Values) -> dict[str, Any]:
    by_seq = {event.seq: event for event in trace.events}
    calls = _calls(trace)
    graph = _Graph(trace, tally, credit, _notes(trace))
    shown = {s.seq for e in trace.events if isinstance(e, Observe) for s in e.sources}
    for event in trace.events:
        if isinstance(event, Observe):
            _observe(graph, event, by_seq)
        elif isinstance(event, Act):
            _act(graph, event, calls.get(event.seq, []))
        elif not isinstance(event, Reward | ToolCall | Stop) and event.seq not in shown:
            tally.dropped[event.kind] += 1
    roles = {agent.id: agent.role for agent in trace.header.agents}
    ours = {"agents": graph.agents, "speakers": graph.speakers, "roles": roles}
    stop = next(iter(trace.of("stop")), None)
    return {
        "version": 1,
        "id": trace.trace_id,
        "verifiers": {"version": "counterpoint"},
        "agent": {"config": {}, "name": "team", "trainable": True},
        "nodes": graph.nodes,
        "calls": [],
        **_scores(trace, tally),
        "info": {OURS: {**ours, "untrained": graph.untrained}},
        "is_completed": trace.seal is not None,
        "ok": trace.seal is not None,
        "stop_condition": stop.reason if isinstance(stop, Stop) else None,
        "timing": {"start": 0.0},
    }


def _calls(trace: Trace) -> dict[int, list[ToolCall]]:
    """The calls of each act, by its seq."""
    out: dict[int, list[ToolCall]] = {}
    for call in trace.of("tool_call"):
        by = next((c.seq for c in call.causes if c.kind == "authorizes"), None)
        if by is not None and isinstance(call, ToolCall):
            out.setdefault(by, []).append(call)
    return out


def _observe(graph: _Graph, event: Observe, by_seq: dict[int, AnyEvent]) -> None:
    """Messages that the agent's next turn follows on, and links from the turns that sent them."""
    new = graph.shown.setdefault(event.agent, [])
    links = graph.links.setdefault(event.agent, {})
    if event.content_raw is not UNSET:
        role = "system" if event.seq in graph.notes.system else "user"
        new.append(({"role": role, "content": _spelled(event.content)}, "env"))
    for source in event.sources:
        shown = by_seq.get(source.seq)
        if shown is None:
            graph.tally.dropped["source outside the trace"] += 1
            continue
        content = _spelled(graph.trace.content(shown))
        if isinstance(shown, ToolResult):
            call = by_seq.get(shown.call) if shown.call is not None else None
            asked = call if isinstance(call, ToolCall) else None
            message = {
                "role": "tool",
                "tool_call_id": f"e{shown.seq}" if asked is None else _id(asked),
                "content": content,
                "name": None if asked is None else asked.tool,
            }
            new.append((message, None))
            continue
        new.append(({"role": "user", "content": content}, shown.agent))
        by = next((c.seq for c in shown.causes if c.kind in ("authorizes", "derives")), None)
        sent = graph.at.get(shown.seq if isinstance(shown, Act) else -1 if by is None else by)
        if sent is not None and graph.agents[sent] != event.agent:
            links[sent, LINKS_OUT.get(type(shown), shown.kind)] = None


def _act(graph: _Graph, act: Act, calls: list[ToolCall]) -> None:
    """The agent's new messages, and the node of its turn."""
    agent, ids, mask = act.agent, act.token_ids or (), act.mask
    whole = mask is not None and len(mask) == len(ids)
    before = _before(graph, agent, ids) if whole else ()
    for cause in act.causes:
        theirs, sent = _BACK.get(cause.kind), graph.at.get(cause.seq)
        if theirs and sent is not None and sent != graph.tip.get(agent):
            graph.links.setdefault(agent, {})[sent, theirs] = None
    for seq, kind in graph.notes.links.get(act.seq, ()):
        if seq in graph.at:
            graph.links.setdefault(agent, {})[graph.at[seq], kind] = None
    for new, speaker in graph.shown.pop(agent, []):
        _add(graph, agent, {"message": new}, speaker)
    own = ids[len(before) :] if whole else ids
    wrote = mask[len(before) :] if whole and mask is not None else (True,) * len(ids)
    message: dict[str, Any] = {"role": "assistant", "content": act.text}
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    node: dict[str, Any] = {
        "semantic_parents": [{"node": n, "type": t} for n, t in graph.links.pop(agent, {})],
        "message": message,
        "sampled": True,
        "token_ids": list(own),
        "mask": list(wrote),
    }
    if act.logprobs and len(act.logprobs) == len(ids):
        late = act.logprobs[len(ids) - len(own) :]
        node["logprobs"] = [p for p, on in zip(late, wrote, strict=True) if on]
    value = graph.credit.get((graph.trace.digest, act.seq))
    held = graph.notes.advantages.get(act.seq)
    if value is not None:
        node["advantages"] = [value] * sum(wrote)
    elif held is not None and len(held) == sum(wrote):
        node["advantages"] = held
    if not act.trainable:
        graph.untrained.append(len(graph.nodes))
    graph.at[act.seq] = _add(graph, agent, node, None)
    if whole:
        graph.paths.setdefault(agent, {})[ids] = graph.at[act.seq]


def _before(graph: _Graph, agent: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The latest of the agent's paths that the prompt goes on from, where its next node goes."""
    for held, tip in reversed(graph.paths.get(agent, {}).items()):
        if ids[: len(held)] == held:
            graph.tip[agent] = tip
            return held
    if graph.paths.get(agent):
        graph.tip[agent] = None
    return ()


def _add(graph: _Graph, agent: str, node: dict[str, Any], speaker: str | None) -> int:
    """Put a node at the end of the agent's path; its index."""
    head = {"parent": graph.tip.get(agent), "sampled": False, "timestamp": 0.0}
    bare: dict[str, Any] = {"semantic_parents": [], "token_ids": [], "mask": [], "logprobs": []}
    graph.nodes.append({**head, **bare, **node})
    graph.agents.append(agent)
    graph.speakers.append(speaker)
    graph.tip[agent] = made = len(graph.nodes) - 1
    return made


def _id(call: ToolCall) -> str:
    return call.source_id or f"e{call.seq}"


def _call(call: ToolCall) -> dict[str, Any]:
    held = call.arguments
    words = held if isinstance(held, str) else json.dumps(held)
    return {"id": _id(call), "type": "function", "name": call.tool, "arguments": words}


def _spelled(content: Any) -> str:
    """A content as a text."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def _scores(trace: Trace, tally: Tally) -> dict[str, Any]:
    """Amounts of the outcome as rewards by their source, all others as metrics by their channel."""
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float | None] = {}
    for event in trace.events:
        if not isinstance(event, Reward):
            continue
        if event.target is not None:
            tally.dropped["reward.target"] += 1
        outcome = counts_as_outcome(event)
        held, name = (rewards, event.source or "team") if outcome else (metrics, event.channel)
        known = held.get(name)
        held[name] = known if event.amount is None else (known or 0.0) + event.amount
    scored = {n: None if v is None else {"score": v, "weight": 1.0} for n, v in rewards.items()}
    return {"rewards": scored, "metrics": metrics}
