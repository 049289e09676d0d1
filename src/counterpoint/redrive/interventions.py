"""What can be done to a run at one of its events: a table, and one function per way of doing it.

Two levels, which answer two questions. `channel`: the act stays and its effect is blocked or
altered on the way; who acted believes that it was done. `decision`: another act stands in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import UNSET

from counterpoint.harness import next_event
from counterpoint.harness.run import made
from counterpoint.policies.grammar import parse
from counterpoint.redrive.follow import Led, by_hand
from counterpoint.redrive.standing import asked_at
from counterpoint.schema import (
    KINDS,
    Act,
    AnyEvent,
    Cause,
    Delegate,
    Effect,
    Intervene,
    Item,
    Reward,
    Stop,
    Trace,
)
from counterpoint.spelling import Payload, Refused, freeze
from counterpoint.vocabulary import TRUST

Level: TypeAlias = Literal["channel", "decision"]
NOTHING = "none"
"""The turn of an agent that does nothing."""

MAIL = ("message", "delegate", "agent_return")
SAYS: dict[str, str] = {
    **dict.fromkeys((*MAIL, "tool_result", "write"), "content_raw"),
    "spawn": "context_raw",
    "stop": "answer_raw",
}
"""Kinds whose words can be altered on their way, and the field that holds them."""


class Change(NamedTuple):
    """One thing to be done to one event of a run.

    `events` are the whole run's; `level` is None where nothing is changed.
    """

    do: str
    event: AnyEvent
    content: Any
    level: Level | None
    events: tuple[AnyEvent, ...]


class Way(NamedTuple):
    """One row of the table.

    `at` maps each level to the kinds of event that it can be done to, the default level first;
    `content` says what it takes: a sentence if it must be given, None if there is none to give.
    """

    at: dict[Level | None, Sequence[str]]
    content: str | None
    put: Callable[[Led, Change], None]


# ---------------------------------------------------------------------------------------------
# What is put in


def _nothing(led: Led, change: Change) -> None:
    """The run goes on from here."""


def _kept(led: Led, change: Change) -> None:
    """The event as it was."""
    _follow(led, change, change.event.seq + 1)


def _muted(led: Led, change: Change) -> None:
    """The event as it was, and then word that it reaches nobody."""
    _kept(led, change)
    seq = change.event.seq
    link = Cause(seq=seq, kind="guards")
    _noted(led, change, made(led, Intervene, "harness", [link], do=change.do, target=seq))


def _altered(led: Led, change: Change) -> None:
    """The event with other words, or for other receivers."""
    if change.level == "decision":
        _acted(led, change)
        return
    _follow(led, change, change.event.seq)
    if change.do == "redirect":
        fields: dict[str, Any] = {"to": _receivers(led, change)}
    else:
        fields = {SAYS[change.event.kind]: freeze(change.content)}
        fields |= {"error": None, "bytes": None} if change.event.kind == "tool_result" else {}
        fields |= {"span": None} if isinstance(change.event, Effect) else {}
    mark = _marked(led, change)
    event = msgspec.structs.replace(change.event, trace_id=mark.trace_id, **fields)
    led.emit(_given(led, event, mark))


def _acted(led: Led, change: Change) -> None:
    """The act with another text, from which the harness takes what it does."""
    act = act_of(change)
    _follow(led, change, act.seq)
    text, items = _turn(change, act)
    mark = _marked(led, change, replaces=act.seq)
    led.given.event = msgspec.structs.replace(
        act, text_raw=freeze(text), items=items, token_ids=None, logprobs=None, mask=None,
        value=None, policy_version=None, trainable=False,
    )  # fmt: skip
    event = next_event(led)
    led.emit(_given(led, msgspec.structs.replace(cast(Act, event), tokens_out=None), mark))


def _stopped(led: Led, change: Change) -> None:
    """The end of the run in place of the event."""
    _follow(led, change, change.event.seq)
    mark = _marked(led, change)
    answer: Payload = UNSET if change.content is None else freeze(change.content)
    stop = made(led, Stop, "harness", (), reason="intervened", answer_raw=answer)
    led.emit(_given(led, stop, mark))


def _follow(led: Led, change: Change, seq: int) -> None:
    """Go along the record up to event `seq`, which stays out."""
    found = led.follow(Trace(led.header, change.events[:seq]))
    if found is not None:
        raise Refused(f"event {found[0]} cannot be re-driven: {found[1]}")


def _marked(led: Led, change: Change, replaces: int | None = None) -> AnyEvent:
    """Word of what is done to the event that comes next."""
    return _noted(
        led,
        change,
        made(
            led,
            Intervene,
            "harness",
            (),
            do=change.do,
            target=len(led.events) + 1,
            replaces=change.event.seq if replaces is None else replaces,
            content_raw=UNSET if change.content is None else freeze(change.content),
        ),
    )


def _noted(led: Led, change: Change, mark: AnyEvent) -> AnyEvent:
    """An edit is a human's, who keeps the label; everything else is the experimenter's."""
    if change.do == "edit":
        mark = msgspec.structs.replace(mark, agent="human", trust="human")
    return led.emit(mark)


def _given(led: Led, event: AnyEvent, mark: AnyEvent) -> AnyEvent:
    """The event that nobody computed, bound to the word that put it there."""
    return msgspec.structs.replace(
        event,
        seq=len(led.events),
        causes=(*event.causes, Cause(seq=mark.seq, kind="forks")),
        trust=min(event.trust, mark.trust, key=TRUST.index),
    )


# ---------------------------------------------------------------------------------------------
# What another act says


def act_of(change: Change) -> Act:
    """The act that an event is, or that brought it about."""
    event = change.event
    if isinstance(event, Act):
        return event
    seq = next(cause.seq for cause in event.causes if cause.kind == "authorizes")
    return cast(Act, change.events[seq])


def _turn(change: Change, act: Act) -> tuple[str, tuple[Item, ...]]:
    """The text of the turn that stands in the act's place, and its items."""
    text, event = act.text or "", change.event
    own = tuple(item for item in act.items if not item.verb.startswith("no_"))
    if isinstance(event, Act):
        text = NOTHING if change.do == "remove" else _spoken(change.content)
        return text, parse(text)
    index = cast(int, cast(Effect, event).item)
    item = act.items[index]
    if item.span is None:  # an endpoint's item, whose text is prose
        own = tuple(_without(own, index, change))
        return text, own or parse(NOTHING)
    if change.do in ("replace", "edit"):
        body = item.body or (item.span[1], item.span[1])
        colon = "" if item.body or item.verb == "call" else ": "
        text = text[: body[0]] + colon + _line(change.content) + text[body[1] :]
    else:
        text = text[: item.span[0]] + text[item.span[1] :].removeprefix("\n")
    return (text, parse(text)) if parse(text) else (NOTHING, parse(NOTHING))


def _without(items: tuple[Item, ...], index: int, change: Change) -> list[Item]:
    """The items with one of them altered, or taken out."""
    kept = list(items)
    if change.do in ("replace", "edit"):
        kept[index] = msgspec.structs.replace(
            kept[index], body=None, content_raw=freeze(change.content)
        )
    else:
        del kept[index]
    return kept


def _spoken(content: Any) -> str:
    if not isinstance(content, str):
        raise Refused(f"an act is replaced by the text of a whole turn, not {content!r:.60}")
    return content


def _line(content: Any) -> str:
    if not isinstance(content, str) or "\n" in content:
        raise Refused(f"an item's payload is one line of text, not {content!r:.60}")
    return content


def _receivers(led: Led, change: Change) -> tuple[str, ...]:
    """Whoever gets it instead: agents alive, none of whom hands work to itself."""
    given = change.content
    names = (given,) if isinstance(given, str) else tuple(given)
    alive = [name for name, agent in led.world.agents.items() if agent.alive]
    if isinstance(change.event, Delegate):
        alive = [name for name in alive if name != change.event.agent]
    if not names or any(name not in alive for name in names):
        raise Refused(
            f"event {change.event.seq} cannot be redirected to {', '.join(map(str, names)) or '?'}"
            f"; there are {', '.join(alive)}"
        )
    return tuple(dict.fromkeys(names))


# ---------------------------------------------------------------------------------------------
# The table

_ANYWHERE: Sequence[str] = tuple(KINDS)
_EFFECTS = tuple(kind for kind, cls in KINDS.items() if issubclass(cls, Effect))
_REPLACED: dict[Level | None, Sequence[str]] = {
    "channel": tuple(SAYS),
    "decision": ("act", *_EFFECTS),
}

WAYS: dict[str, Way] = {
    "resample": Way({None: _ANYWHERE}, None, _nothing),
    "keep": Way({None: _ANYWHERE}, None, _kept),
    "replace": Way(_REPLACED, "what it says instead", _altered),
    "edit": Way(_REPLACED, "what it says instead", _altered),
    "remove": Way({"decision": ("act", *_EFFECTS)}, None, _acted),
    "no_spawn": Way({"decision": ("spawn",)}, None, _acted),
    "mute": Way({"channel": MAIL}, None, _muted),
    "redirect": Way({"channel": ("message", "delegate")}, "ids of receivers", _altered),
    "stop_now": Way({"decision": _ANYWHERE}, "", _stopped),
}
"""Name → what it can be done to, what it takes, and how it is done."""


def planned(
    trace: Trace, events: tuple[AnyEvent, ...], seq: int, do: str, content: Any, level: Level | None
) -> Change:
    """A change that can be made to a run.

    Raises:
        Refused: no such intervention or level, an event that it cannot be done to (the nearest one
            that it can is named), content that is missing or not wanted.
    """
    way = WAYS.get(do)
    if way is None:
        raise Refused(f"there is no intervention {do!r:.40}; there are {', '.join(WAYS)}")
    if level is not None and level not in way.at:
        levels = ", ".join(filter(None, way.at)) or "none, since it changes nothing"
        raise Refused(f"{do} has no level {level!r:.40}; it has {levels}")
    if content is not None and way.content is None:
        raise Refused(f"{do} takes no content; replace does")
    if content is None and way.content:
        raise Refused(f"{do} needs content: {way.content}")
    event = events[seq]
    found = _level_at(events, event, way, level)
    if not found:
        raise Refused(_nearest(trace, events, event, do, way, level))
    return Change(do, event, content, found[0], events)


def _level_at(
    events: tuple[AnyEvent, ...], event: AnyEvent, way: Way, level: Level | None
) -> list[Level | None]:
    """The levels at which it can be done to an event, the default first; none if it cannot."""
    if by_hand(event) or (
        way.put is not _kept and way.put is not _nothing and _over(events, event)
    ):
        return []
    levels = list(way.at) if level is None else [level]
    return [each for each in levels if event.kind in way.at[each]]


def _over(events: tuple[AnyEvent, ...], event: AnyEvent) -> bool:
    """Whether the run had stopped before the event."""
    return isinstance(event, Reward) and any(isinstance(e, Stop) for e in events[: event.seq])


def _nearest(
    trace: Trace,
    events: tuple[AnyEvent, ...],
    event: AnyEvent,
    do: str,
    way: Way,
    level: Level | None,
) -> str:
    can = [e for e in events[trace.first :] if _level_at(events, e, way, level)]
    near = min(can, key=lambda e: (abs(e.seq - event.seq), e.seq), default=None)
    there = "this run has no event that can"
    if near is not None:
        there = f"the nearest event that can is {near.seq}, {_named(near)}"
    named = f"{do} at level {level}" if level else do
    hand = ", which was put there by hand" if by_hand(event) else ""
    return f"{named} cannot be done to event {event.seq}, {_named(event)}{hand}; {there}"


def _named(event: AnyEvent) -> str:
    return f"{event.kind} of {ascii(event.agent)[1:-1]:.60}"


def begins(change: Change, streams: str) -> int:
    """Where a fork's own events begin: at the event, or at the act that is replaced for it.

    An act is drawn with the key in force at its observation, a result with the key at its call, so
    a fork that draws one anew begins there.
    """
    decided = change.level == "decision" and change.do != "stop_now"
    seq = act_of(change).seq if decided else change.event.seq
    anew = change.do == "resample" and streams == "branch"
    return asked_at(change.events, seq) if anew else seq
