"""Episodes and traces of the library verifiers (its v1 records), read into traces.

An episode holds one trace for each of its agents, a trace a graph of messages: `parent` is the
message before, `semantic_parents` are typed links from other turns. A sampled node becomes an
observation of what stands between it and its agent's last turn, and an act with the tokens of its
whole path; other nodes become a message (user), a result (tool), or what the observation says.
Links become edges between acts. A reward is an amount of the team (score × weight) by its name as
source, a metric an amount on a channel of its own. Advantages are no part of a run: they are kept
in the header's `meta`, by act.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from counterpoint.formats import intake as take
from counterpoint.formats.chat import Said, agent_id, anchors
from counterpoint.formats.intake import Intake, Rejected, Tally, add, caused
from counterpoint.formats.openai_chat import Call, arguments_of
from counterpoint.schema import (
    Act,
    AnyEvent,
    Cause,
    Item,
    Message,
    Observe,
    Source,
    Target,
    ToolCall,
    ToolResult,
    Trace,
)
from counterpoint.spelling import Payload, freeze, thaw
from counterpoint.vocabulary import RESERVED, EdgeKind

ABOUT = "episodes and traces of the library verifiers (its v1 records)"

OURS = "counterpoint"
"""Key in a trace's `info` under which an export keeps who each node's agent and speaker are."""

LINKS: dict[str, EdgeKind] = {
    "continuation": "precedes",
    "agent_message": "delivers",
    "subagent_call": "delegates",
    "subagent_return": "returns",
}
"""Type of a link → edge between two acts; any other is `derives`, its type kept in `meta`."""

MAX_PATH = 1 << 24
"""Most tokens and messages of all turns' paths: every act holds all that its model was fed."""

_NODE = {"parent", "semantic_parents", "message", "sampled", "token_ids", "mask", "logprobs"}
_NODE |= {"advantages", "timestamp"}
_OWN = {"nodes", "rewards", "metrics", "agent", "task"}


class Node(NamedTuple):
    """One message of the graph that can be kept."""

    parent: int | None
    links: tuple[tuple[int, str], ...]
    role: str
    content: Payload
    calls: tuple[Call, ...]
    answers: str | None
    sampled: bool
    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...] | None


# ---------------------------------------------------------------------------------------------
# Reading nodes


def _node(given: Any, place: str, tally: Tally) -> Node:
    raw = take.object_at(given, place)
    message = take.object_at(raw.get("message"), f"{place}.message")
    role = message.get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise Rejected(f"{place}.message.role", "is none of system, user, assistant, tool")
    ids = tuple(map(int, _numbers(raw, "token_ids", place, whole=True)))
    mask = take.list_at(raw.get("mask"), f"{place}.mask")
    if len(mask) != len(ids) or not all(isinstance(on, bool) for on in mask):
        raise Rejected(f"{place}.mask", "is not one true or false for each of token_ids")
    logprobs = _numbers(raw, "logprobs", place)
    advantages = None if raw.get("advantages") is None else _numbers(raw, "advantages", place)
    for name, values in (("logprobs", logprobs), ("advantages", advantages)):
        if values and len(values) != sum(mask):
            raise Rejected(f"{place}.{name}", "is not one number for each sampled token")
    tally.dropped.update(take.clean(key) for key in raw.keys() - _NODE if raw[key])
    return Node(
        parent=_parent(raw.get("parent"), f"{place}.parent"),
        links=tuple(_links(raw.get("semantic_parents"), f"{place}.semantic_parents")),
        role=role,
        content=take.payload_at(_words(message.get("content")), f"{place}.message.content"),
        calls=tuple(_calls(message.get("tool_calls"), f"{place}.message.tool_calls")),
        answers=take.name_at(message.get("tool_call_id"), f"{place}.message.tool_call_id"),
        sampled=raw.get("sampled") is True and role == "assistant",
        ids=ids,
        mask=tuple(mask),
        logprobs=logprobs,
        advantages=advantages,
    )


def _numbers(
    raw: dict[str, Any], key: str, place: str, *, whole: bool = False
) -> tuple[float, ...]:
    """A list of numbers, whole ones below 2⁶³ if so wanted."""
    values = take.list_at(raw.get(key), f"{place}.{key}")
    for i, value in enumerate(values):
        number = take.number_at(value, f"{place}.{key}[{i}]")
        if number is None or (whole and not (isinstance(value, int) and 0 <= value < 1 << 63)):
            raise Rejected(f"{place}.{key}[{i}]", "is no such number")
    return tuple(values)


def _parent(given: Any, place: str) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        raise Rejected(place, f"is {take.kind_of(given)}, not the index of a node")
    return given


def _links(given: Any, place: str) -> Iterable[tuple[int, str]]:
    for i, link in enumerate(take.list_at(given, place)):
        held = take.object_at(link, f"{place}[{i}]")
        node = _parent(held.get("node"), f"{place}[{i}].node")
        kind = take.name_at(held.get("type"), f"{place}[{i}].type")
        if node is None or kind is None:
            raise Rejected(f"{place}[{i}]", "names no node and type")
        yield node, kind


def _words(content: Any) -> Any:
    """A content of text parts alone as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    texts = [text for text in parts if isinstance(text, str)]
    return "\n".join(texts) if texts and len(texts) == len(content) else content


def _calls(given: Any, place: str) -> Iterable[Call]:
    for i, raw in enumerate(take.list_at(given, place)):
        where = f"{place}[{i}]"
        call = take.object_at(raw, where)
        tool = take.name_at(call.get("name"), f"{where}.name")
        if tool is None:
            raise Rejected(f"{where}.name", "is missing, so there is no tool to call")
        name = take.name_at(call.get("id"), f"{where}.id")
        yield Call(name, tool, arguments_of(call.get("arguments"), f"{where}.arguments"))


# ---------------------------------------------------------------------------------------------
# Laying out events


@dataclass
class _Log:
    """One run being laid out; agents' lives go on from one of its traces to the next."""

    intake: Intake
    events: list[AnyEvent] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    life: dict[str, int] = field(default_factory=dict)
    acted: dict[str, int] = field(default_factory=dict)
    spent: int = 0
    system: list[int] = field(default_factory=list)
    links: dict[str, list[list[Any]]] = field(default_factory=dict)
    advantages: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class _Graph:
    """One trace of the run: its nodes by position, and what became of them."""

    log: _Log
    nodes: dict[int, Node]
    agents: dict[int, str]
    speakers: dict[int, str]
    untrained: frozenset[int]
    seqs: dict[int, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def path(self, at: int) -> list[int]:
        """Positions from a root to the node."""
        out, node = [at], self.nodes[at]
        while node.parent is not None:
            if node.parent >= out[-1] or node.parent not in self.nodes:
                raise Rejected(f"nodes[{out[-1]}].parent", "is no earlier node that can be kept")
            out.append(node.parent)
            node = self.nodes[node.parent]
        return out[::-1]


def _input(graph: _Graph, at: int) -> None:
    """A message of the user, or of another agent, or a tool's result."""
    log, node, agent = graph.log, graph.nodes[at], graph.agents[at]
    speaker = graph.speakers.get(at, "user")
    if node.role == "user" and speaker not in RESERVED:
        causes = caused("authorizes", [log.acted[speaker]]) if speaker in log.acted else ()
        fields = {"causes": causes, "to": (agent,), "content_raw": node.content}
        graph.seqs[at] = add(log.events, Message, log.intake, speaker, **fields)
    elif node.role == "tool":
        call = graph.calls.get(node.answers or "")
        graph.seqs[at] = add(
            log.events,
            ToolResult,
            log.intake,
            agent,
            causes=() if call is None else caused("answers", [call]),
            trust="untrusted",
            call=call,
            content_raw=node.content,
        )


def _turn(graph: _Graph, at: int, path: list[int]) -> None:
    """An observation of what is new on the path, the act, and its calls."""
    log, node, agent = graph.log, graph.nodes[at], graph.agents[at]
    new: list[int] = []
    for before in path[-2::-1]:
        if graph.nodes[before].sampled and graph.agents[before] == agent:
            break
        new.insert(0, before)
    shown = [graph.seqs[n] for n in new if n in graph.seqs]
    said = [thaw(graph.nodes[n].content) for n in new if n not in graph.seqs]
    *_, key = anchors(log.intake.anchor, [_said(graph, n) for n in path])
    lived = [log.life[agent]] if agent in log.life else []
    observed = add(
        log.events,
        Observe,
        log.intake,
        agent,
        causes=caused("precedes", lived) + caused("consumes", shown),
        sources=tuple(Source(seq=seq) for seq in shown),
        content_raw=freeze(said[0] if len(said) == 1 else said or None),
        anchor=key,
    )
    if said and all(graph.nodes[n].role == "system" for n in new if n not in graph.seqs):
        log.system.append(observed)
    items = [Item(verb="call", name=(call.tool,)) for call in node.calls] or [Item(verb="none")]
    seq = add(
        log.events,
        Act,
        log.intake,
        agent,
        causes=caused("derives", [observed]) + _linked(graph, at, len(log.events)),
        text_raw=node.content,
        items=tuple(items),
        trainable=at not in graph.untrained,
        **_tokens(graph, at, path),
    )
    graph.seqs[at] = log.life[agent] = log.acted[agent] = seq
    if node.advantages is not None:
        log.advantages[str(seq)] = list(node.advantages)
    for index, call in enumerate(node.calls):
        fields = {"item": index, "call_index": index, "source_id": call.id, "tool": call.tool}
        causes = caused("authorizes", [seq])
        made = add(log.events, ToolCall, log.intake, agent, causes=causes,
                   arguments_raw=call.arguments, **fields)  # fmt: skip
        if call.id is not None:
            graph.calls[call.id] = made


def _said(graph: _Graph, at: int) -> Said:
    node = graph.nodes[at]
    return Said(node.role, graph.agents[at] if node.sampled else None, node.content)


def _linked(graph: _Graph, at: int, seq: int) -> tuple[Cause, ...]:
    """Edges from the acts that the node's links name; one that is no earlier turn is left out."""
    out, kept = [], []
    for node, kind in graph.nodes[at].links:
        if node not in graph.seqs or not graph.nodes[node].sampled:
            graph.log.intake.tally.dropped["semantic_parents to no earlier turn"] += 1
            continue
        out.append(Cause(seq=graph.seqs[node], kind=LINKS.get(kind, "derives")))
        kept += [[graph.seqs[node], kind]] if kind not in LINKS else []
    if kept:
        graph.log.links[str(seq)] = kept
    return tuple(out)


def _tokens(graph: _Graph, at: int, path: list[int]) -> dict[str, Any]:
    """The tokens of the whole path, of which the policy wrote in this turn those of the node."""
    own, before = graph.nodes[at], [graph.nodes[n] for n in path[:-1]]
    fed = tuple(i for node in before for i in node.ids)
    graph.log.spent += len(path) + len(fed) + len(own.ids)
    if graph.log.spent > MAX_PATH:
        raise Rejected("nodes", f"have paths of more than {MAX_PATH} tokens and messages in all")
    if not fed and not own.ids:
        return {}
    found: dict[str, Any] = {
        "token_ids": fed + own.ids,
        "mask": (False,) * len(fed) + own.mask,
        "tokens_in": len(fed) + len(own.ids) - sum(own.mask),
        "tokens_out": sum(own.mask),
    }
    if own.logprobs or not any(own.mask):
        each = iter(own.logprobs)
        spread = tuple(min(float(next(each)), 0.0) if on else 0.0 for on in own.mask)
        found["logprobs"] = (0.0,) * len(fed) + spread
    return found


def to_trace(run: Any, intake: Intake) -> Trace:
    """Turn an episode, or a lone trace, into a trace. Raises Rejected if it holds no nodes."""
    about = take.object_at(run, "run")
    given = take.list_at(about["traces"], "traces") if "traces" in about else [about]
    traces = [take.object_at(raw, f"traces[{i}]") for i, raw in enumerate(given)]
    if not any("nodes" in raw for raw in traces):
        raise Rejected("run", "has no trace with `nodes`")
    log = _Log(intake)
    names: list[str] = []
    for i, raw in enumerate(traces):
        names.append(_lay(log, raw, f"traces[{i}]"))
    causes = take.everything(log.events)
    for name, raw in zip(names, traces, strict=True):
        _score(log, raw, causes, name if len(traces) > 1 else None)
    task = about.get("task") or (traces[0].get("task") if traces else None)
    held = task if isinstance(task, dict) else {}
    group = about.get("group")
    return take.finish(
        log.events,
        intake,
        log.roles,
        meta=_notes(log, about, traces),
        task_id=intake.optional(take.name_at, held, "key"),
        group_id=intake.optional(take.name_at, group, "id") if isinstance(group, dict) else None,
        rollout_id=intake.optional(take.name_at, about, "id"),
    )


def _lay(log: _Log, raw: dict[str, Any], place: str) -> str:
    """Lay out one trace of the run; the name of its agent."""
    info = raw.get("info")
    ours = info.get(OURS) if isinstance(info, dict) else None
    told = ours if isinstance(ours, dict) else {}
    agent = raw.get("agent")
    named = agent.get("name") if isinstance(agent, dict) else None
    role = take.name_at(named, f"{place}.agent.name") or "agent"
    name = _free(agent_id(role), log.roles)
    listed = take.list_at(raw.get("nodes"), f"{place}.nodes")
    log.intake.tally.records += len(listed)
    nodes = dict(log.intake.kept(listed, f"{place}.nodes", _node))
    born = _born(nodes, name)
    agents = {at: agent_id(_at(told.get("agents"), at) or born[at]) for at in nodes}
    speakers = {at: said for at in nodes if (said := _at(told.get("speakers"), at))}
    trains = not (isinstance(agent, dict) and agent.get("trainable") is False)
    never = told.get("untrained") if trains else list(nodes)
    listed = never if isinstance(never, list) else []
    untrained = frozenset(n for n in listed if isinstance(n, int))
    graph = _Graph(log, nodes, agents, speakers, untrained)
    given = told.get("roles")
    roles = given if isinstance(given, dict) else {}
    for own in dict.fromkeys(agents[at] for at, node in nodes.items() if node.sampled):
        if own not in RESERVED:
            log.roles[own] = _at([roles.get(own)], 0) or (role if own == name else own)
    for at in sorted(nodes):
        try:
            path = graph.path(at)
            _turn(graph, at, path) if nodes[at].sampled else _input(graph, at)
        except Rejected as fault:
            if fault.place == "nodes":
                raise
            log.intake.report("V02", str(fault), f"{place}.{fault.place}")
    return name


def _born(nodes: dict[int, Node], name: str) -> dict[int, str]:
    """Whose each node is: of a sub-agent, where a call links to the first turn after a root."""
    root: dict[int, int] = {}
    called: dict[int, str] = {}
    turned: set[int] = set()
    for at in sorted(nodes):
        node = nodes[at]
        own = root[at] = at if node.parent is None else root.get(node.parent, at)
        if node.sampled and own not in turned:
            turned.add(own)
            if any(kind == "subagent_call" for _, kind in node.links):
                called[own] = f"{name}/{len(called) + 1}"
    return {at: called.get(own, name) for at, own in root.items()}


def _free(name: str, taken: dict[str, str]) -> str:
    """The name, or with a number if several traces of an episode bear it."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free


def _at(names: Any, at: int) -> str | None:
    """The name that an export of ours gave a node."""
    held = names[at] if isinstance(names, list) and at < len(names) else None
    return take.clean(held) if isinstance(held, str) and held else None


def _score(log: _Log, raw: dict[str, Any], causes: tuple[Cause, ...], agent: str | None) -> None:
    """The rewards and metrics of one trace; of its agent, where the episode has several."""
    target = None if agent is None else Target(agent=agent)
    for name, given in _named(log, raw, "rewards"):
        held = given if isinstance(given, dict) else {"score": given}
        score = log.intake.optional(take.number_at, held, "score")
        weight = log.intake.optional(take.number_at, held, "weight")
        amount = None if score is None else score * (1.0 if weight is None else weight)
        if amount is not None and not math.isfinite(amount):
            raise Rejected("rewards", "hold a score × weight that is no finite number")
        take.score(log.events, log.intake, causes, amount, source=name, target=target)
    for name, given in _named(log, raw, "metrics"):
        amount = log.intake.optional(take.number_at, {"metric": given}, "metric")
        channel = f"metric:{name}" if name == "team" else name
        more = {"channel": channel, "target": target, "family": "R4"}
        take.score(log.events, log.intake, causes, amount, **more)


def _named(log: _Log, raw: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    found = log.intake.optional(take.object_at, {key: raw.get(key) or {}}, key) or {}
    return [(take.clean(name) or key, value) for name, value in found.items()]


def _notes(log: _Log, about: dict[str, Any], traces: list[dict[str, Any]]) -> Payload:
    """What else the run said, and what is no part of a run."""
    rest = [{k: v for k, v in raw.items() if k not in _OWN} for raw in traces]
    alone = "traces" not in about
    notes: dict[str, Any] = {} if alone else {k: v for k, v in about.items() if k != "traces"}
    notes |= {"traces": rest, "task": about.get("task") or traces[0].get("task")}
    notes |= {"agents": [raw.get("agent") for raw in traces]}
    notes |= {"system": log.system, "links": log.links, "advantages": log.advantages}
    return log.intake.notes({key: value for key, value in notes.items() if value})
