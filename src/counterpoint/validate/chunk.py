"""Whole traces laid out for the rules: the columns of `graph`, and look-ups that rules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np

from counterpoint.graph import EDGE_CODE, KIND_CODE, Columns, columns
from counterpoint.groups import Bools, Ints
from counterpoint.schema import AnyEvent, Event, Finding, Source, Trace

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Chunk:
    """Whole traces, as objects and as columns; what every rule is a function of.

    `traces` are the traces; `table` their columns, where a *row* is an event and an *edge* one of
    its causes; `events` the event of each row; `first` (traces,) the seq each trace starts at.
    """

    traces: tuple[Trace, ...]
    table: Columns
    events: tuple[AnyEvent, ...]
    first: Ints

    @classmethod
    def of_traces(cls, traces: Sequence[Trace]) -> Chunk:
        """Lay `traces` out. Linear in events and edges."""
        return cls(
            traces=tuple(traces),
            table=columns(traces),
            events=tuple(chain.from_iterable(trace.events for trace in traces)),
            first=np.array([trace.first for trace in traces], dtype=np.int64),
        )

    def rows(self, *kinds: str) -> Ints:
        """Rows of these kinds, ascending; without an argument, all rows."""
        if not kinds:
            return np.arange(len(self.events))
        return np.flatnonzero(self.among(*kinds))

    def each(self, cls: type[E]) -> Iterator[tuple[int, int, E]]:
        """Row, index of the trace, and event of every event of one class, in order."""
        rows = self.rows(str(cls.__struct_config__.tag))
        for row, trace in zip(rows.tolist(), self.table.trace[rows].tolist(), strict=True):
            yield row, trace, cast(E, self.events[row])

    def among(self, *kinds: str) -> Bools:
        """(rows,) whether the event is of one of these kinds."""
        wanted = np.zeros(len(KIND_CODE), dtype=bool)
        wanted[[KIND_CODE[kind] for kind in kinds]] = True
        chosen: Bools = wanted[self.table.kind]
        return chosen

    def edges(self, kind: str) -> Bools:
        """(edges,) whether the edge is of this kind and its cause is an event of the trace."""
        here: Bools = (self.table.edge == EDGE_CODE[kind]) & (self.table.cause >= 0)
        return here

    def per_row(self, of_trace: Sequence[bool]) -> Bools:
        """Spread a fact about each trace over its rows."""
        spread: Bools = np.array(of_trace, dtype=bool)[self.table.trace]
        return spread

    @cached_property
    def in_fork(self) -> Bools:
        """(rows,) whether the event belongs to a fork, whose prefix lies in another trace."""
        return self.per_row([trace.header.fork is not None for trace in self.traces])

    def in_parent(self, rows: Ints, seqs: Ints) -> Bools:
        """Whether `seqs`, as named by the events at `rows`, lie in the parent of a fork."""
        return self.in_fork[rows] & (seqs >= 0) & (seqs < self.first[self.table.trace[rows]])

    @cached_property
    def _places(self) -> tuple[Ints, Ints, Ints]:
        """The distinct seqs, and for each (trace, seq) in ascending order its key and its row."""
        distinct, rank = np.unique(self.table.seq, return_inverse=True)
        key = self.table.trace * len(distinct) + rank
        order = np.argsort(key, kind="stable")
        return distinct, key[order], order

    def at(self, rows: Ints, seqs: Ints) -> Ints:
        """Row that holds each of `seqs` in the trace of `rows`, or −1; the first of duplicates."""
        distinct, keys, order = self._places
        if not len(distinct) or not len(rows):
            return np.full(len(rows), -1, dtype=np.int64)
        rank = np.minimum(np.searchsorted(distinct, seqs), len(distinct) - 1)
        key = self.table.trace[rows] * len(distinct) + rank
        place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        return np.where((distinct[rank] == seqs) & (keys[place] == key), order[place], -1)

    def named(self, rows: Ints, field: str) -> tuple[Ints, Ints]:
        """The seqs that a field of the events at `rows` holds, as pairs (row, seq).

        The field may hold nothing, one seq, several, or sources.
        """
        held = [_seqs(getattr(self.events[row], field)) for row in rows.tolist()]
        flat = np.array([seq for seqs in held for seq in seqs], dtype=np.int64)
        return np.repeat(rows, np.array([len(seqs) for seqs in held], dtype=np.int64)), flat

    @cached_property
    def answers(self) -> tuple[Ints, Ints, Ints]:
        """What results answer, by `call` or by an `answers` edge, each pair once.

        Row of the result, seq of the call, row of the call or −1.
        """
        rows, seqs = self.named(self.rows("tool_result"), "call")
        edge = (self.table.edge == EDGE_CODE["answers"]) & self.among("tool_result")[
            self.table.effect
        ]
        found = {*zip(rows.tolist(), seqs.tolist(), strict=True)}
        linked = self.table.effect[edge].tolist(), self.table.cause_seq[edge].tolist()
        found.update(zip(*linked, strict=True))
        both = np.array(sorted(found), dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1], self.at(both[:, 0], both[:, 1])

    @cached_property
    def owner(self) -> Ints:
        """(rows,) code of the pair (trace, agent)."""
        return self.owners(self.table.trace, self.table.agent)

    def owners(self, trace: Ints, agent: Ints) -> Ints:
        """Codes of pairs (trace, agent code); an agent code may be −1, for one without events."""
        return trace * (len(self.table.agents) + 1) + agent + 1

    def latest(self, rows: Ints, among: Ints) -> Ints:
        """The last of the rows `among` by the same agent before each of `rows`, or −1."""
        return before(self.owner[rows], rows, self.owner[among], among)

    def finding(self, rule: str, row: int, message: str, field: str | None = None) -> Finding:
        """A finding about the event at `row`."""
        index = int(self.table.trace[row])
        trace, place = self.traces[index], int(row - self.table.start[index])
        return Finding(
            rule=rule,
            message=message,
            file=trace.file,
            line=int(trace.lines[place]) if place < len(trace.lines) else None,
            trace_id=trace.trace_id,
            seq=self.events[row].seq,
            field=field,
        )


def about(rule: str, trace: Trace, message: str, field: str | None = None) -> Finding:
    """A finding about a trace as a whole."""
    return Finding(
        rule=rule, message=message, file=trace.file, trace_id=trace.trace_id, field=field
    )


def short(text: str) -> str:
    """A name from a trace, quoted for a sentence: control characters escaped, length bounded."""
    quoted = repr(text[:80])
    return quoted if len(quoted) <= 60 else quoted[:57] + "…"


def before(owner: Ints, rows: Ints, among_owner: Ints, among: Ints) -> Ints:
    """For each (owner, row) the last row of `among` with that owner that stands before it, or −1.

    All four are integer arrays; `among` is ascending.
    """
    if not len(among) or not len(rows):
        return np.full(len(rows), -1, dtype=np.int64)
    width = int(max(rows.max(), among.max())) + 1
    key = among_owner * width + among
    order = np.argsort(key)
    place = np.searchsorted(key[order], owner * width + rows) - 1
    hit = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (among_owner[hit] == owner), among[hit], -1)


def _seqs(value: Any) -> tuple[int, ...]:
    """The seqs that a field holds: none, one, several, or those of sources."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple([v.seq if type(v) is Source else v for v in value])
