"""What every importer stands on: typed access to hostile values, events in order, and a tally.

A *run* is one trajectory of a foreign log as parsed JSON; a *record* is one entry of it (a
message, an event). A record that cannot be kept raises `Rejected`, becomes one finding, and the
rest goes on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from msgspec import UNSET

from counterpoint.schema import (
    FORMAT,
    AgentRef,
    AnyEvent,
    Cause,
    EnvRef,
    Event,
    Finding,
    Header,
    Reward,
    Seal,
    Trace,
)
from counterpoint.spelling import SIDE, Payload, Refused, digest_of, freeze
from counterpoint.vocabulary import EdgeKind

Anchor: TypeAlias = Literal["last_message", "last_tool", "history"]
T = TypeVar("T")
E = TypeVar("E", bound=Event)

MAX_PAYLOAD = 16 << 20
"""Most bytes of one content; a line of ours may have four times that."""

UNREAD: Final = object()
"""Stands in a list for an element that could not be parsed and was reported where it was read."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class Rejected(Refused):
    """A record or a field that cannot be kept: which field, and why."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} {reason}")
        self.place = place


@dataclass
class Tally:
    """What an import read, made and left out.

    `records` are entries of the log (messages, events), `edges_inferred` counts by rule, `dropped`
    by field; `extra_roots` are events after a trace's first that the log gives no cause.
    """

    traces: int = 0
    records: int = 0
    events: int = 0
    edges_recorded: int = 0
    edges_inferred: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    extra_roots: int = 0

    def add(self, trace: Trace) -> None:
        """Count a finished trace's events, edges and roots."""
        self.traces += 1
        self.events += len(trace.events)
        bases = Counter(cause.basis for event in trace.events for cause in event.causes)
        self.edges_recorded += bases.pop("recorded", 0)
        self.edges_inferred.update({b.removeprefix("inferred:"): n for b, n in bases.items()})
        self.extra_roots += sum(not event.causes for event in trace.events[1:])


@dataclass(frozen=True)
class Intake:
    """Where one run comes from, and where its importer reports."""

    format: str
    file: str
    line: int | None
    run: int
    trace_id: str
    anchor: Anchor
    findings: list[Finding]
    tally: Tally

    def report(self, rule: str, message: str, place: str | None, seq: int | None = None) -> None:
        """Add a finding about this run; `place` is the path of the field in the run."""
        self.findings.append(
            Finding(
                rule=rule,
                message=printable(f"run {self.run}: {message}"),
                file=self.file,
                line=self.line,
                trace_id=self.trace_id,
                seq=seq,
                field=None if place is None else printable(place),
            )
        )

    def kept(
        self, records: Sequence[Any], place: str, parse: Callable[[Any, str, Tally], T]
    ) -> list[tuple[int, T]]:
        """Parse every entry of a list, as (position, result); the rejected ones are reported."""
        out = []
        for i, record in enumerate(records):
            if record is UNREAD:
                continue
            try:
                out.append((i, parse(record, f"{place}[{i}]", self.tally)))
            except Rejected as fault:
                self.report("V02", str(fault), fault.place)
        return out

    def optional(self, read: Callable[[Any, str], T], run: Any, key: str) -> T | None:
        """Read a field of the run; a value that cannot be kept is reported and gives None."""
        try:
            return read(run.get(key), key)
        except Rejected as fault:
            self.report("V02", str(fault), fault.place)
            return None

    def notes(self, values: Mapping[str, Any]) -> Payload:
        """Freeze free notes about the run key by key, so that one bad value costs only itself."""
        kept = {
            key: value
            for key, value in values.items()
            if self.optional(payload_at, values, key) not in (None, UNSET)
        }
        return self.optional(payload_at, {"meta": kept or None}, "meta") or UNSET


# ---------------------------------------------------------------------------------------------
# Typed access


def clean(text: str) -> str:
    """A text that UTF-8 can spell: lone surrogates are written out as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """A text that may go to a terminal: what is no printable character becomes its escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    return _NAMES.get(type(value), type(value).__name__)


def object_at(value: Any, place: str) -> dict[str, Any]:
    """The value, which must be an object."""
    if not isinstance(value, dict):
        raise Rejected(place, f"is {kind_of(value)}, not an object")
    return value


def list_at(value: Any, place: str) -> list[Any]:
    """The value, which must be a list; null counts as empty."""
    if not isinstance(value, list | None):
        raise Rejected(place, f"is {kind_of(value)}, not a list")
    return value or []


def name_at(value: Any, place: str) -> str | None:
    """A name or id: a text or a whole number, null or empty gives None."""
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise Rejected(place, f"is {kind_of(value)}, not a name")
    return clean(str(value)) or None if value is not None else None


def number_at(value: Any, place: str) -> float | None:
    """A finite number; null gives None."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise Rejected(place, f"is {kind_of(value)}, not a number")
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Rejected(place, "is not a finite number")
    return number


def payload_at(value: Any, place: str) -> Payload:
    """Any value that JSON can spell and a line can hold, frozen; null gives UNSET."""
    try:
        raw = freeze(value)
    except Refused as fault:
        raise Rejected(place, f"cannot be kept: {fault}") from None
    text = b"" if raw is UNSET else bytes(raw)
    if len(text) > MAX_PAYLOAD:
        raise Rejected(place, f"holds more than {MAX_PAYLOAD} bytes")
    if text.startswith(SIDE):
        raise Rejected(place, "is spelled like a reference to one of our side files")
    return raw


def one_or_many(data: Any) -> list[Any]:
    """The runs in a document that holds one run, or a list of them."""
    return data if isinstance(data, list) else [data]


# ---------------------------------------------------------------------------------------------
# Events in order


def add(events: list[AnyEvent], kind: type[E], intake: Intake, agent: str, **fields: Any) -> int:
    """Append an event of a kind and return its `seq`."""
    seq = len(events)
    made = kind(trace_id=intake.trace_id, seq=seq, agent=agent, **fields)
    events.append(cast(AnyEvent, made))
    return seq


def caused(kind: EdgeKind, seqs: Iterable[int], rule: str | None = None) -> tuple[Cause, ...]:
    """Edges of one kind from several events, recorded or inferred by `rule`."""
    basis = "recorded" if rule is None else f"inferred:{rule}"
    return tuple(Cause(seq=seq, kind=kind, basis=basis) for seq in seqs)


def everything(events: Sequence[AnyEvent]) -> tuple[Cause, ...]:
    """Causes of a reward of the whole run: every event, through those that end a path."""
    inner = {cause.seq for event in events for cause in event.causes}
    return caused("rewards", [e.seq for e in events if e.seq not in inner], "outcome")


def score(
    events: list[AnyEvent],
    intake: Intake,
    causes: tuple[Cause, ...],
    amount: float | None,
    **fields: Any,
) -> None:
    """Append a reward that the log gives to the run; without an amount it was not scored."""
    add(events, Reward, intake, "env", causes=causes, amount=amount, **fields)


def finish(
    events: list[AnyEvent], intake: Intake, roles: Mapping[str, str], meta: Payload, **fields: Any
) -> Trace:
    """Close a trace with header and seal; `roles` maps the agents alive at the start to roles."""
    header = Header(
        trace_id=intake.trace_id,
        writer="counterpoint",
        meta_raw=meta,
        counterpoint=FORMAT,
        env=EnvRef(id=f"imported:{intake.format}"),
        agents=tuple(AgentRef(id=agent, role=role) for agent, role in roles.items()),
        **fields,
    )
    digest = Trace(header, tuple(events)).digest
    kinds = dict(Counter(event.kind for event in events))
    seal = Seal(trace_id=intake.trace_id, events=len(events), kinds=kinds, digest=digest)
    return Trace(header, tuple(events), seal, intake.file)


def trace_id_of(format: str, run: Any, seen: Counter[str]) -> str:
    """An id that the same run always gets; a second equal run of one import gets a suffix."""
    spelled = json.dumps(run, sort_keys=True, default=lambda _: None)
    trace_id = digest_of(f"{format}\n{spelled}".encode()).hex()
    seen[trace_id] += 1
    return trace_id if seen[trace_id] == 1 else f"{trace_id}-{seen[trace_id]}"
