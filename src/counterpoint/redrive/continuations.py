"""Finding an event by what it is, and two continuations compared: where they part, and for what."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from counterpoint.redrive.standing import history
from counterpoint.schema import KINDS, Act, AnyEvent, Event, Intervene, Trace
from counterpoint.spelling import Refused

_PLACES = {"first": 0, "last": -1}
_APART = frozenset(
    {*Event.__struct_fields__, "sources", "kept", "message", "call", "inputs", "reads", "target"}
    | {"span", "content_raw", "items", "token_ids", "logprobs", "mask", "policy_version", "value"}
)
"""Fields that say nothing by themselves: places in the run, times, how a policy came to its text.
Content is compared as what it says, wherever it is written.
"""


class Difference(NamedTuple):
    """Where two continuations part.

    Attributes:
        first, second: seq of the event in each; None where that run has ended before, both None
            where they say the same to the end.
        what: both events in words.
        outcomes: of both runs; None where nothing was scored.
    """

    first: int | None
    second: int | None
    what: str
    outcomes: tuple[float | None, float | None]

    @property
    def gain(self) -> float | None:
        """Outcome of the second less that of the first; None where one is not scored."""
        before, after = self.outcomes
        return None if before is None or after is None else after - before

    def __str__(self) -> str:
        gain = "" if self.gain is None else f"; outcome {self.outcomes[0]:g} → {self.outcomes[1]:g}"
        return f"{self.what}{gain}"


def diff(first: Trace, second: Trace) -> Difference:
    """The first event at which two runs say or do something else, and what came of it.

    Interventions are passed over, and so is what only shifts with them: seqs, times, causes. Two
    forks that leave one run at one event are compared from there; others from their beginning.

    Raises:
        Refused: one is a fork that leaves elsewhere, and its parent is not at hand.
    """
    ours, theirs = _from_where_they_part(first, second)
    outcomes = first.outcome, second.outcome
    for mine, other in zip_longest(_played(ours), _played(theirs)):
        if mine is None or other is None or _says(ours, mine) != _says(theirs, other):
            seqs = [None if event is None else event.seq for event in (mine, other)]
            what = f"{_named(ours, mine)} / {_named(theirs, other)}"
            return Difference(seqs[0], seqs[1], what, outcomes)
    return Difference(None, None, "they say the same", outcomes)


def _from_where_they_part(first: Trace, second: Trace) -> tuple[Trace, Trace]:
    left = [trace.header.fork for trace in (first, second)]
    places = [fork and (fork.trace_id, fork.seq, fork.digest) for fork in left]
    return (first, second) if places[0] == places[1] else (_whole(first), _whole(second))


def _whole(trace: Trace) -> Trace:
    header = msgspec.structs.replace(trace.header, fork=None)
    return Trace(header, history(trace))


def _played(trace: Trace) -> list[AnyEvent]:
    return [event for event in trace.events if not isinstance(event, Intervene)]


def _says(trace: Trace, event: AnyEvent) -> dict[str, Any]:
    """What of an event does not depend on where it stands."""
    own = (name for name in event.__struct_fields__ if name not in _APART)
    said = {name: getattr(event, name) for name in own}
    verbs = [(item.verb, item.name) for item in event.items] if isinstance(event, Act) else None
    return {
        **said,
        "kind": event.kind,
        "agent": event.agent,
        "verbs": verbs,
        "content": trace.content(event),
    }


def _named(trace: Trace, event: AnyEvent | None) -> str:
    if event is None:
        return "the end"
    said = event.text if isinstance(event, Act) else trace.content(event)
    words = "" if said is None else f" {said!a:.60}"
    return f"event {event.seq}, {event.kind} of {ascii(event.agent)[1:-1]:.60}{words}"


def at_of(trace: Trace, place: str) -> int:
    """The seq that a place names: a number, or `first:KIND` and `last:KIND`, as `first:message`.

    Raises:
        Refused: it is neither, or the trace has no event of that kind (those it has are named).
    """
    if place.isdecimal():
        return int(place)
    which, colon, kind = place.partition(":")
    if not colon or which not in _PLACES or kind not in KINDS:
        raise Refused(
            f"{place!a:.60} names no event: say a seq, first:KIND or last:KIND, where a kind is "
            f"one of {', '.join(KINDS)}"
        )
    found = trace.of(kind)
    if not found:
        there = ", ".join(dict.fromkeys(event.kind for event in trace.events))
        raise Refused(f"trace {trace.trace_id} has no {kind}; it has {there or 'no events'}")
    return found[_PLACES[which]].seq
