"""OpenAI chat messages with tool calls, of one agent or several (the public runs of tau-bench).

A run is an object with `messages` (or `traj`) and optionally `task_id`, `trial`, `reward`, `model`;
or a bare list of messages. system → what the next observation says; user → a message (nobody's
act: whether a person or a simulation spoke, the log does not say); assistant → an observation and
an act, its calls, or else a message to the others; tool → the result of the call that it answers.

Left out on purpose: no `stop` event, since no field of the log says that or why a run ended.
Results are untrusted, everything else unknown. `name` tells several agents apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from counterpoint.formats import intake as take
from counterpoint.formats.chat import Chat, Said, agent_id, anchors, roles_of
from counterpoint.formats.intake import Intake, Rejected, Tally, add, caused
from counterpoint.schema import Item, PolicyRef, ToolCall, ToolResult, Trace
from counterpoint.spelling import PLAIN, Payload, Refused, freeze, thaw

ABOUT = "OpenAI messages with tool calls, of one or several agents (tau-bench's public runs)"

AGENT, USER = "assistant", "user"
"""Ids of an agent and a user whose messages carry no name."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Role in a message → how it is read; the second names of system and tool are other years' APIs."""

_KEYS = {"role", "name", "content", "tool_calls", "function_call", "tool_call_id", "id"}


class Call(NamedTuple):
    """One tool call of an assistant message."""

    id: str | None
    tool: str
    arguments: Payload


class Entry(NamedTuple):
    """One message that can be kept."""

    role: str
    name: str | None
    content: Payload
    text: str | None
    calls: tuple[Call, ...]
    answers: str | None
    id: str | None


# ---------------------------------------------------------------------------------------------
# Reading messages


def runs(data: Any) -> Iterable[Any]:
    """The runs in a document: one run, a list of runs, or a bare list of messages."""
    if not isinstance(data, list):
        return [data]
    objects = [x for x in data if isinstance(x, dict)]
    bare = any("role" in x for x in objects) and not any(map(_messages_key, objects))
    return [data] if bare else data


def _messages_key(run: dict[str, Any]) -> str | None:
    return next((key for key in ("traj", "messages") if key in run), None)


def _entry(message: Any, place: str, tally: Tally) -> Entry:
    raw = take.object_at(message, place)
    given = raw.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise Rejected(f"{place}.role", f"is {_short(given)}; it is one of {', '.join(ROLES)}")
    text = _text(raw.get("content"), f"{place}.content", tally) if role == "assistant" else None
    content = raw.get("content") if role != "assistant" else text
    tally.dropped.update(take.clean(key) for key in raw.keys() - _KEYS)
    return Entry(
        role=role,
        name=take.name_at(raw.get("name"), f"{place}.name"),
        content=take.payload_at(content, f"{place}.content"),
        text=text,
        calls=tuple(_calls(raw, place, tally)) if role == "assistant" else (),
        answers=take.name_at(raw.get("tool_call_id"), f"{place}.tool_call_id"),
        id=take.name_at(raw.get("id"), f"{place}.id"),
    )


def _text(content: Any, place: str, tally: Tally) -> str | None:
    """An assistant's words: a text, or the text parts of a list of parts."""
    if content is None or isinstance(content, str):
        return content
    parts = [take.object_at(p, f"{place}[{i}]") for i, p in enumerate(take.list_at(content, place))]
    texts = [p["text"] for p in parts if isinstance(p.get("text"), str)]
    if len(texts) < len(parts):
        tally.dropped["content part without text"] += len(parts) - len(texts)
    return "".join(texts)


def _calls(raw: dict[str, Any], place: str, tally: Tally) -> Iterator[Call]:
    listed = take.list_at(raw.get("tool_calls"), f"{place}.tool_calls")
    for i, given in enumerate(listed):
        where = f"{place}.tool_calls[{i}]"
        call = take.object_at(given, where)
        yield _call(take.name_at(call.get("id"), f"{where}.id"), call.get("function"), where)
        extra = call.keys() - {"id", "function", "type"}
        tally.dropped.update(f"tool_calls.{take.clean(key)}" for key in extra)
    if raw.get("function_call") is not None:
        yield _call(None, raw["function_call"], f"{place}.function_call")


def _call(id: str | None, function: Any, place: str) -> Call:
    named = take.object_at(function, f"{place}.function")
    tool = take.name_at(named.get("name"), f"{place}.function.name")
    if tool is None:
        raise Rejected(f"{place}.function.name", "is missing, so there is no tool to call")
    return Call(id, tool, arguments_of(named.get("arguments"), f"{place}.function.arguments"))


def arguments_of(given: Any, place: str) -> Payload:
    """Arguments as a value; a text that is no sound JSON is kept as the text that it is."""
    if isinstance(given, str):
        try:
            return freeze(PLAIN.decode(given))
        except (msgspec.DecodeError, Refused, RecursionError, UnicodeError):
            pass
    return take.payload_at(given, place)


def _short(value: Any) -> str:
    return ascii(value)[:40] if isinstance(value, str) else take.kind_of(value)


def _merged(entries: list[Entry]) -> list[tuple[int, Entry]]:
    """One turn per message id: parallel calls logged as call, result, call, result are one act."""
    first: dict[tuple[str | None, str], int] = {}
    out: dict[int, Entry] = {}
    for i, entry in enumerate(entries):
        at = first.setdefault((entry.name, entry.id), i) if entry.id and entry.role == AGENT else i
        out[i] = entry
        if at != i:
            del out[i]
            held = out[at]
            words = [w for w in dict.fromkeys((held.text, entry.text)) if w]
            text = "\n".join(words) if words else held.text
            out[at] = held._replace(text=text, content=freeze(text), calls=held.calls + entry.calls)
    return list(out.items())


# ---------------------------------------------------------------------------------------------
# Laying out events


class _Open(NamedTuple):
    """A call that waits for its result."""

    seq: int
    agent: str
    tool: str


@dataclass
class _Log:
    """One run being laid out. Open calls lie on stacks, the next to be answered on top."""

    chat: Chat
    by_id: dict[str | None, list[_Open]] = field(default_factory=dict)
    latest: list[_Open] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    told: list[Payload] = field(default_factory=list)
    environment: int | None = None
    actor: str = AGENT

    def said(self) -> Payload:
        """What system messages said since the last observation."""
        told, self.told = [thaw(raw) for raw in self.told], []
        return freeze(told[0] if len(told) == 1 else told or None)


def _system(log: _Log, entry: Entry, anchor: str) -> None:
    log.told.append(entry.content)


def _user(log: _Log, entry: Entry, anchor: str) -> None:
    name = entry.name or USER
    log.chat.speak(name, log.chat.others(name), entry.content)


def _assistant(log: _Log, entry: Entry, anchor: str) -> None:
    agent = log.actor = agent_id(entry.name or AGENT)
    to = log.chat.others(agent) or (USER,)
    span = (0, len(entry.text or ""))
    items = [Item(verb="call", name=(call.tool,)) for call in entry.calls]
    if not items:
        items = [Item(verb="message", name=to, span=span) if entry.text else Item(verb="none")]
    observed = log.chat.observe(agent, anchor, log.said())
    act = log.chat.act(agent, observed, entry.content, items, source_id=entry.id)
    if items[0].verb == "message":
        log.chat.send(act, 0, to, span, "unknown")
        return
    log.chat.show(act, agent)
    log.latest = [_called(log, act, i, call) for i, call in enumerate(entry.calls)][::-1]
    for call, opened in zip(entry.calls[::-1], log.latest, strict=True):
        log.by_id.setdefault(call.id, []).append(opened)


def _called(log: _Log, act: int, item: int, call: Call) -> _Open:
    agent = log.chat.events[act].agent
    seq = add(
        log.chat.events,
        ToolCall,
        log.chat.intake,
        agent,
        causes=caused("authorizes", [act]),
        source_id=call.id,
        item=item,
        tool=call.tool,
        arguments_raw=call.arguments,
        call_index=item,
    )
    return _Open(seq, agent, call.tool)


def _tool(log: _Log, entry: Entry, anchor: str) -> None:
    chat, call, rule = log.chat, *_answered(log, entry)
    causes = () if call is None else caused("answers", [call.seq], rule)
    if log.environment is not None:
        causes += caused("derives", [log.environment], "environment")
    log.environment = add(
        chat.events,
        ToolResult,
        chat.intake,
        log.actor if call is None else call.agent,
        causes=causes,
        trust="untrusted",
        call=None if call is None else call.seq,
        content_raw=entry.content,
    )
    chat.show(log.environment)


def _answered(log: _Log, entry: Entry) -> tuple[_Open | None, str | None]:
    """The call that a result answers, and the rule if the log does not name it.

    By id: the first unanswered of the latest turn that used the id, since ids are used again. By
    position, where the id is missing or unknown: the first unanswered of the latest turn, if the
    tool's name does not contradict.
    """
    named = log.by_id.get(entry.answers, []) if entry.answers else []
    for stack, rule in ((named, None), (log.latest, "position")):
        while stack and stack[-1].seq in log.answered:
            stack.pop()
        if stack and (stack is named or entry.name in (None, stack[-1].tool)):
            log.answered.add(stack[-1].seq)
            return stack.pop(), rule
    return None, None


_LAY: dict[str, Callable[[_Log, Entry, str], None]] = {
    "system": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
}


def to_trace(run: Any, intake: Intake) -> Trace:
    """Turn one run into a trace. Raises Rejected if it holds no messages at all."""
    about = {"messages": run} if isinstance(run, list) else take.object_at(run, "run")
    key = _messages_key(about)
    if key is None:
        raise Rejected("run", "has neither `messages` nor `traj`")
    raw = take.list_at(about[key], key)
    intake.tally.records += len(raw)
    entries = [entry for _, entry in intake.kept(raw, key, _entry)]
    turns = _merged(entries)
    participants = {_participant(e): e.role for _, e in turns if e.role in (AGENT, USER)}
    log = _Log(Chat(intake, tuple(participants)))
    keys = list(anchors(intake.anchor, [Said(e.role, e.name, e.content) for e in entries]))
    for i, entry in turns:
        _LAY[entry.role](log, entry, keys[i])
    if log.told:
        log.chat.observe(log.actor, None, log.said())
    if "reward" in about:
        amount = intake.optional(take.number_at, about, "reward")
        causes = take.everything(log.chat.events)
        take.score(log.chat.events, intake, causes, amount, source="reward", verifiable="executed")
    return take.finish(
        log.chat.events, intake, roles_of(participants), **_header(about, key, intake)
    )


def _participant(entry: Entry) -> str:
    return agent_id(entry.name or AGENT) if entry.role == AGENT else entry.name or USER


def _header(about: dict[str, Any], key: str, intake: Intake) -> dict[str, Any]:
    """Header fields: runs of one task by one model are a group, its trials are the rollouts."""
    task = intake.optional(take.name_at, about, "task_id")
    model = intake.optional(take.name_at, about, "model")
    used = {key, "task_id", "trial", "model", "reward"}
    return {
        "meta": intake.notes({k: v for k, v in about.items() if k not in used}),
        "task_id": task,
        "group_id": task if task is None or model is None else f"{task}@{model}",
        "rollout_id": intake.optional(take.name_at, about, "trial"),
        "policies": {} if model is None else {AGENT: PolicyRef(target=f"endpoint:{model}")},
    }
