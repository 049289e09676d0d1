"""What an item of an act does: one function per verb, after permission was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec import UNSET, Raw

from counterpoint.harness.prompt import observation_of, said_by
from counterpoint.harness.run import READ, Run, environment, made
from counterpoint.policies.grammar import arguments_of
from counterpoint.schema import (
    Act,
    AgentReturn,
    Aggregate,
    AnyEvent,
    Cause,
    Delegate,
    Despawn,
    Event,
    Intervene,
    Item,
    Message,
    Observe,
    Read,
    Safety,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Write,
)
from counterpoint.spelling import Payload, freeze
from counterpoint.tools import Answer, Verdict, call, spec_of, verdict
from counterpoint.vocabulary import Trust

Effect = Callable[[Run, Act, int, Item], AnyEvent]


def effect(run: Run, index: int) -> AnyEvent:
    """The event that the item `index` of the current act brings about, or what stands in its place.

    A denied item is a `safety` event, a denied call a call that will get an error for its result.
    Where a rule says `ask`, a human's answer comes first, as an event; nobody there refuses. Over
    the limit of calls the run stops.
    """
    act = cast(Act, run.events[cast(int, run.world.control.act)])
    item = act.items[index]
    if not run.world.agents[act.agent].alive:
        return blocked(run, act, "despawned")
    if item.verb == "call" and run.world.control.calls >= run.limits["calls"]:
        return made(run, Stop, "harness", (), reason="budget", truncated=True)
    may, rule = permission(run, act, item)
    if may == "ask":
        answered = run.world.control.consent
        if answered is None:
            return _asked(run, act, item)
        may = "allow" if cast(Intervene, run.events[answered]).do == "consent" else "deny"
    if item.verb == "call":
        return _call(run, act, index, item, may, rule)
    if may == "deny":
        return blocked(run, act, rule)
    return _EFFECTS[item.verb](run, act, index, item)


def permission(run: Run, act: Act, item: Item) -> tuple[Verdict, str]:
    """Whether the item may take effect, and by which rule.

    A tool whose schema is not the one in the header is denied, whatever the rules say.
    """
    role = run.role(act.agent)
    name = item.name[0] if item.verb == "call" else item.verb
    if item.verb == "call" and (fault := _unpinned(run, name)):
        return "deny", fault
    return verdict(run.rules, run.env.roles.get(role, ()), role, name, act.trust)


def _unpinned(run: Run, name: str) -> str | None:
    spec = spec_of(run.env, name)
    if spec is None:
        return None if name == READ and READ not in run.header.tools else "unknown tool"
    return None if run.header.tools.get(name) == spec.digest else "tool changed"


def _asked(run: Run, act: Act, item: Item) -> AnyEvent:
    seen = next(run.events[c.seq] for c in act.causes if c.kind == "derives")
    shown = observation_of(run, cast(Observe, seen))
    says = run.human is not None and run.human(shown._replace(turn=shown.turn - 1), item)
    link = Cause(seq=act.seq, kind="guards")
    do = "consent" if says else "refuse"
    return made(run, Intervene, "human", [link], do=do, target=act.seq, trust="human")


def blocked(run: Run, act: Act, rule: str) -> AnyEvent:
    """A `safety` event in place of the current item's effect."""
    links = [Cause(seq=act.seq, kind="guards"), *_answered(run)]
    return made(run, Safety, "harness", links, rule=rule, effect="blocked", target=act.seq)


def _answered(run: Run) -> list[Cause]:
    """The edge from a human's answer for the current item, if one was asked for."""
    seq = run.world.control.consent
    return [] if seq is None else [Cause(seq=seq, kind="guards")]


# ---------------------------------------------------------------------------------------------
# Verbs


def _put(
    run: Run, kind: type[Event], act: Act, index: int, links: list[Cause], **fields: Any
) -> AnyEvent:
    own = Cause(seq=act.seq, kind="authorizes")
    return made(run, kind, act.agent, [own, *_answered(run), *links], item=index, **fields)


def _said(item: Item) -> dict[str, Any]:
    """Content by reference to the act's text, or the payload that came with the item."""
    if item.body is not None:
        return {"span": item.body}
    return {"content_raw": item.content_raw}


def _payload(run: Run, act: Act, item: Item) -> Payload:
    if item.body is None:
        return item.content_raw
    return freeze(run.text_of(act)[item.body[0] : item.body[1]])


def _known(run: Run, names: tuple[str, ...]) -> bool:
    agents = run.world.agents
    return bool(names) and all(name in agents and agents[name].alive for name in names)


def _each(item: Item) -> tuple[str, ...]:
    """Its names, each once."""
    return tuple(dict.fromkeys(item.name))


def _message(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    if not _known(run, item.name):
        return blocked(run, act, "no such agent")
    return _put(run, Message, act, index, [], to=_each(item), **_said(item))


def _delegate(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    if not _known(run, item.name) or act.agent in item.name:
        return blocked(run, act, "no such agent")
    return _put(run, Delegate, act, index, [], to=_each(item), waits=True, **_said(item))


def _spawn(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    role = item.name[0]
    if role not in run.env.roles:
        return blocked(run, act, "no such role")
    if run.alive() >= run.limits["agents"]:
        return blocked(run, act, "limit of agents")
    child = f"{act.agent}.{_births_before(run, act, index)}"
    context = _payload(run, act, item)
    return _put(run, Spawn, act, index, [], child=child, child_role=role, context_raw=context)


def _births_before(run: Run, act: Act, index: int) -> int:
    """How many times the spawner had spawned, or declined to, before this item."""
    later = sum(item.verb in ("spawn", "no_spawn") for item in act.items[index:])
    return run.world.agents[act.agent].births - later


def _despawn(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    if not _known(run, item.name[:1]):
        return blocked(run, act, "no such agent")
    return _put(run, Despawn, act, index, [], child=item.name[0])


def _return(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    owed = [s for s, owing in run.world.open_delegations.items() if act.agent in owing]
    if not owed:
        return blocked(run, act, "no open delegation")
    links = [Cause(seq=seq, kind="returns") for seq in owed]
    to = tuple(dict.fromkeys(run.events[seq].agent for seq in owed))
    return _put(run, AgentReturn, act, index, links, to=to, **_said(item))


def _aggregate(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    """Combines what was shown to the agent since it last aggregated."""
    kinds = (AgentReturn, ToolResult, Message)
    fresh = run.world.agents[act.agent].fresh
    inputs = tuple(seq for seq in fresh if isinstance(run.events[seq], kinds))
    links = [Cause(seq=seq, kind="aggregates") for seq in inputs]
    rule = item.name[0] if item.name else None
    return _put(run, Aggregate, act, index, links, inputs=inputs, rule=rule, **_said(item))


def _stop(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    answer = _payload(run, act, item)
    return _put(run, Stop, act, index, [], reason="answered", answer_raw=answer)


def _write(run: Run, act: Act, index: int, item: Item) -> AnyEvent:
    """One writer: a write based on anything but the latest version is refused."""
    name = item.name[0]
    version, latest = run.world.artefacts.get(name, (0, None))
    if latest is not None and run.versions.get((act.agent, name)) != version:
        return blocked(run, act, "one writer: stale read")
    reads = () if latest is None else (Read(artefact=name, version=version),)
    links = [] if latest is None else [Cause(seq=latest, kind="derives")]
    return _put(
        run,
        Write,
        act,
        index,
        links,
        artefact=name,
        version=version + 1,
        base_version=version,
        reads=reads,
        **_said(item),
    )


_EFFECTS: dict[str, Effect] = {
    "message": _message,
    "delegate": _delegate,
    "spawn": _spawn,
    "despawn": _despawn,
    "return": _return,
    "aggregate": _aggregate,
    "stop": _stop,
    "write": _write,
}


# ---------------------------------------------------------------------------------------------
# Calls


def _call(run: Run, act: Act, index: int, item: Item, may: Verdict, rule: str) -> AnyEvent:
    arguments = item.content_raw
    if item.body is not None:
        given = arguments_of(run.text_of(act)[item.body[0] : item.body[1]])
        arguments = UNSET if given is None else given
    number = sum(other.verb == "call" for other in act.items[:index])
    return _put(
        run,
        ToolCall,
        act,
        index,
        [],
        tool=item.name[0],
        arguments_raw=arguments,
        call_index=number,
        verdict=may,
        rule=rule,
    )


def answer(run: Run, called: ToolCall) -> AnyEvent:
    """The result of an open call: the tool is run here, unless the call was denied."""
    links = [Cause(seq=called.seq, kind="answers")]
    own: Trust = "trusted"
    if called.verdict == "deny":
        given = Answer(UNSET, f"denied: {called.rule}", 0)
    elif run.is_read(called):
        given, link = _read(run, called)
        links += link
    else:
        given, own = _ran(run, called), "untrusted"
        links += [] if run.specs[called.tool].pure else environment(run)
    return made(
        run,
        ToolResult,
        called.agent,
        links,
        own,
        call=called.seq,
        content_raw=given.content,
        error=given.error,
        bytes=given.size or None,
    )


def _ran(run: Run, called: ToolCall) -> Answer:
    spec, draws = run.specs[called.tool], None
    if spec.draws:
        k = run.world.agents[called.agent].results
        draws = run.draws("tool", called.agent, k, called.seq)
    return call(run.env, spec, called.arguments or {}, draws, run.limits["item_bytes"])


def _read(run: Run, called: ToolCall) -> tuple[Answer, list[Cause]]:
    """The built-in tool: an artefact with its version, as trusted as the write that made it."""
    name = str((called.arguments or {}).get("artefact"))
    if name not in run.world.artefacts:
        return Answer(UNSET, f"there is no artefact {name!a:.80}", 0), []
    version, seq = run.world.artefacts[name]
    content = {"artefact": name, "version": version, "content": said_by(run, run.events[seq])}
    raw = freeze(content)
    return Answer(raw, None, len(bytes(cast(Raw, raw)))), [Cause(seq=seq, kind="derives")]
