"""Traces written in the JSON Schema of the orchestration-trace survey (arXiv:2605.02801).

What the schema has no word for (observe, deliver, write, custom) is left out and counted, and the
paths through it become direct edges. stop and delegate become `orchestrator_decision` with a
further key `decision`; contents become `content_ref` digests; rewards are summed by channel. What
came in from this format goes out as it was, in its order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from msgspec import UNSET

from counterpoint.formats.intake import Tally
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
    Observe,
    Reward,
    Safety,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Trace,
)
from counterpoint.spelling import Refused, digest_of, freeze, thaw
from counterpoint.vocabulary import EdgeKind

FOREIGN_KIND = "mas_rl_v1."
"""Prefix of the name of a custom event that holds an event of this format as it was."""

TOP = (
    "trace_id",
    "task_id",
    "system",
    "topology",
    "events",
    "edges",
    "rewards",
    "costs",
    "metrics",
)
"""The top-level keys; the schema forbids any other."""

EDGES_OUT: dict[EdgeKind, str] = {
    "precedes": "temporal",
    "derives": "causal",
    "spawns": "spawn",
    "delivers": "message",
    "delegates": "message",
    "authorizes": "tool_dependency",
    "answers": "return",
    "returns": "return",
    "aggregates": "aggregate",
    "guards": "safety_flow",
    "consumes": "causal",
    "forks": "causal",
    "rewards": "causal",
}
"""Edge kind → type there; what an observation took from a message is `message`."""

KINDS_OUT: dict[type[Event], tuple[str, str | None]] = {
    Act: ("orchestrator_decision", "text_raw"),
    Delegate: ("orchestrator_decision", "content_raw"),
    Stop: ("orchestrator_decision", "answer_raw"),
    Spawn: ("spawn", "context_raw"),
    Despawn: ("despawn", None),
    Message: ("message", "content_raw"),
    ToolCall: ("tool_call", "arguments_raw"),
    ToolResult: ("tool_result", "content_raw"),
    AgentReturn: ("return", "content_raw"),
    Aggregate: ("aggregate", "content_raw"),
    Intervene: ("human_intervention", "content_raw"),
    Safety: ("safety_event", None),
}
"""Event kind → type there, and the payload that its `content_ref` stands for."""

_TYPES = {theirs for theirs, _ in KINDS_OUT.values()}
_TRUSTED = {"trusted": True, "human": True, "untrusted": False}
_TEXTS = ("role", "from", "to", "tool", "content_ref")


def lines(trace: Trace, tally: Tally) -> Iterator[bytes]:
    """The trace as one line of JSON; what is left out is counted in `tally.dropped`."""
    yield json.dumps(document(trace, tally)).encode()


def document(trace: Trace, tally: Tally) -> dict[str, Any]:
    """The trace as an object that satisfies the survey's schema.

    Raises:
        Refused: no event has a word in that schema, or the run came with top-level keys that it
            forbids.
    """
    notes = _notes(trace)
    if extra := _object(notes.get("extra")):
        raise Refused(
            f"trace {trace.trace_id} came with top-level keys that mas_rl_v1 forbids: "
            f"{', '.join(sorted(extra))}; take them out of `extra` in the header's meta"
        )
    kept = [event for event in trace.events if _has_word(event)]
    if not kept:
        raise Refused(f"trace {trace.trace_id} holds no event that mas_rl_v1 has a word for")
    left = [e.kind for e in trace.events if not _has_word(e) and not isinstance(e, Reward)]
    tally.dropped.update(left)
    ids = _ids(kept, notes)
    out: dict[str, Any] = {
        "trace_id": _text(notes.get("trace_id")) or trace.trace_id or "unknown",
        "task_id": trace.header.task_id or "unknown",
        "events": _events(trace, kept, ids, notes),
        "edges": list(_edges(trace, kept, ids, tally)),
        "rewards": _rewards(trace, tally),
        "costs": _costs(trace, _numbers(notes.get("costs"))),
    }
    if trace.header.topology != "unknown":
        out["topology"] = trace.header.topology
    if _text(notes.get("system")):
        out["system"] = notes["system"]
    if "metrics" in notes:
        out["metrics"] = _numbers(notes["metrics"])
    return out


def said(event: AnyEvent) -> dict[str, Any]:
    """What an event's own fields say in the words of the schema."""
    if isinstance(event, Custom):
        return {**_object(event.data), "type": event.name.removeprefix(FOREIGN_KIND)}
    theirs, payload = KINDS_OUT[type(event)]
    out: dict[str, Any] = {"type": theirs, "agent": event.agent}
    if event.source_id is not None:
        out["id"] = event.source_id
    if isinstance(event, Delegate | Stop):
        out["decision"] = event.kind
    if isinstance(event, Spawn | Despawn):
        out["to"] = event.child
    elif to := getattr(event, "to", ()):
        out["to"] = to[0] if len(to) == 1 else ",".join(to)
    if isinstance(event, ToolCall):
        out["tool"] = event.tool
    if event.trust in _TRUSTED:
        out["trusted"] = _TRUSTED[event.trust]
    raw = UNSET if payload is None else getattr(event, payload)
    if raw is not UNSET:
        held = thaw(raw)
        alone = isinstance(held, dict) and held.keys() == {"content_ref"}
        out["content_ref"] = held["content_ref"] if alone else _ref(bytes(raw))
    return out


def _ref(content: bytes) -> str:
    return f"blake2b:{digest_of(content).hex()}"


def _has_word(event: AnyEvent) -> bool:
    if isinstance(event, Custom):
        return event.name.removeprefix(FOREIGN_KIND) in _TYPES
    return type(event) in KINDS_OUT


# ---------------------------------------------------------------------------------------------
# Notes that an import left in the header; like all of a file, they may hold anything


def _notes(trace: Trace) -> dict[str, Any]:
    env = trace.header.env
    ours = env is None or env.id != "imported:mas_rl_v1"
    return {} if ours else _object(trace.header.meta)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> dict[str, Any]:
    return {key: number for key, number in _object(value).items() if _is_number(number)}


def _at(values: Any, seq: int) -> Any:
    return values[seq] if isinstance(values, list) and 0 <= seq < len(values) else None


# ---------------------------------------------------------------------------------------------
# Parts of the document


def _ids(kept: Iterable[AnyEvent], notes: dict[str, Any]) -> dict[int, str]:
    """An id for every event, none twice: the log's own where there is one."""
    ids: dict[int, str] = {}
    used: set[str] = set()
    for event in kept:
        name = (event.source_id if notes else None) or f"e{event.seq}"
        while name in used:
            name += f"#{event.seq}"
        used.add(name)
        ids[event.seq] = name
    return ids


def _events(
    trace: Trace, kept: list[AnyEvent], ids: dict[int, str], notes: dict[str, Any]
) -> list[dict[str, Any]]:
    roles = {agent.id: agent.role for agent in trace.header.agents}
    placed = []
    for event in kept:
        rest = _at(notes.get("rest"), event.seq)
        if isinstance(event, Spawn):
            roles[event.child] = event.child_role or event.child
        more = rest if isinstance(rest, dict) else _more(trace, event, roles)
        own = said(event)
        out = _valid({**own, **more, "id": ids[event.seq], "type": own["type"]}, event)
        index = _at(notes.get("source_index"), event.seq)
        placed.append((index if isinstance(index, int) else event.seq, event.seq, out))
    return [out for _, _, out in sorted(placed, key=lambda place: place[:2])]


def _valid(out: dict[str, Any], event: AnyEvent) -> dict[str, Any]:
    """The event with what the schema requires, and without what it would refuse."""
    typed = dict.fromkeys(_TEXTS, str) | {"trusted": bool}
    kept = {k: v for k, v in out.items() if isinstance(v, typed.get(k, object))}
    kept["agent"] = _text(out.get("agent")) or event.agent or "unknown"
    if not (_is_number(t := out.get("t")) and 0 <= t < math.inf):
        kept["t"] = event.seq
    return kept


def _more(trace: Trace, event: AnyEvent, roles: dict[str, str]) -> dict[str, Any]:
    """What an event of ours says beyond its own fields."""
    role = event.child_role if isinstance(event, Spawn) else roles.get(event.agent)
    out = {} if role is None else {"role": role}
    if isinstance(event, Message | AgentReturn):
        out["from"] = event.agent
    if getattr(event, "span", None) is not None and (words := trace.content(event)) is not None:
        out["content_ref"] = _ref(bytes(freeze(words)))  # type: ignore[arg-type]
    return out


def _edges(
    trace: Trace, kept: list[AnyEvent], ids: dict[int, str], tally: Tally
) -> Iterator[dict[str, str]]:
    by_seq = {event.seq: event for event in trace.events}
    for event in kept:
        direct = [cause for cause in event.causes if cause.seq in ids]
        around = [cause for cause in event.causes if cause.seq not in ids]
        tally.dropped.update("cause outside the trace" for c in around if c.seq not in by_seq)
        through = dict.fromkeys(
            (ids[cause.seq], _edge(cause, by_seq)) for cause in _nearest(around, by_seq, ids)
        )
        for source, kind in [*((ids[c.seq], _edge(c, by_seq)) for c in direct), *through]:
            yield {"src": source, "dst": ids[event.seq], "type": kind}


def _edge(cause: Cause, by_seq: dict[int, AnyEvent]) -> str:
    told = cause.kind == "consumes" and isinstance(by_seq[cause.seq], Message | Delegate)
    return "message" if told else EDGES_OUT[cause.kind]


def _nearest(
    causes: list[Cause], by_seq: dict[int, AnyEvent], ids: dict[int, str]
) -> Iterator[Cause]:
    """The nearest causes that are written, behind those that are not."""
    stack, seen = list(reversed(causes)), set()
    while stack:
        cause = stack.pop()
        if cause.seq in ids:
            yield cause
        elif cause.seq in by_seq and cause.seq not in seen:
            seen.add(cause.seq)
            stack += reversed(_hops(by_seq[cause.seq], by_seq, ids))


def _hops(event: AnyEvent, by_seq: dict[int, AnyEvent], ids: dict[int, str]) -> list[Cause]:
    """Causes of an unwritten event; an agent's earlier observation is reached by its act."""
    lived = [c for c in event.causes if c.kind == "precedes"]
    if not any(c.seq in ids for c in lived):
        return list(event.causes)
    seen = [c for c in lived if isinstance(by_seq.get(c.seq), Observe)]
    return [c for c in event.causes if c not in seen]


def _rewards(trace: Trace, tally: Tally) -> dict[str, float]:
    amounts: dict[str, list[float]] = {}
    for event in trace.events:
        if not isinstance(event, Reward):
            continue
        if event.amount is None:
            tally.dropped["reward without an amount"] += 1
            continue
        if event.target is not None:
            tally.dropped["reward.target"] += 1
        amounts.setdefault(event.channel, []).append(event.amount)
    try:
        return {channel: math.fsum(held) for channel, held in amounts.items()}
    except OverflowError:
        raise Refused(f"the rewards of trace {trace.trace_id} add up to no finite number") from None


def _costs(trace: Trace, given: dict[str, Any]) -> dict[str, float]:
    """What the log said its run cost, and what the schema requires beside it."""
    starts = [e.t_start for e in trace.events if e.t_start is not None]
    ends = [e.t_end for e in trace.events if e.t_end is not None] or starts
    ours: dict[str, float] = {
        "tokens": sum((e.tokens_in or 0) + (e.tokens_out or 0) for e in trace.events),
        "wall_clock_s": max(0.0, max(ends) - min(starts)) if starts else 0.0,
        "tool_calls": len(trace.of("tool_call")),
        "messages": len(trace.of("message")),
    }
    said = {key: cost for key, cost in given.items() if cost >= 0 or key not in ours}
    return {**({} if {"tokens", "wall_clock_s"} <= said.keys() else ours), **said}
