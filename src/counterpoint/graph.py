"""The room of time, as arrays: whole traces become flat columns, and one trace becomes a graph.

A cause is always an earlier event, so the order of the file is a topological order: a prefix is a
slice, and whatever flows along edges (descent, taint, the critical path) is one forward sweep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.schema import (
    KINDS,
    Act,
    AnyEvent,
    Delegate,
    Deliver,
    Event,
    Message,
    Observe,
    Trace,
)
from counterpoint.spelling import Refused
from counterpoint.vocabulary import EDGES, RESERVED, TRUST

KIND_CODE: dict[str, int] = {kind: code for code, kind in enumerate(KINDS)}
EDGE_CODE: dict[str, int] = {kind: code for code, kind in enumerate(EDGES)}
TRUST_CODE: dict[str, int] = {label: code for code, label in enumerate(TRUST)}


class Columns(NamedTuple):
    """Events of whole traces as arrays. A *row* is an event; an *edge* is one of its causes.

    Rows of one trace are contiguous and in the order of its file. `cause` is the row of an edge's
    earlier event, or −1 where the trace holds no event of that `seq`.
    """

    traces: tuple[Trace, ...]
    start: Ints
    """(traces + 1,) first row of each trace, and the number of rows at the end."""
    trace: Ints
    """(rows,) index into `traces`."""
    seq: Ints
    """(rows,) the event's seq."""
    kind: Ints
    """(rows,) code of the kind (`KIND_CODE`)."""
    agent: Ints
    """(rows,) code of the agent's id (`agents`)."""
    agents: tuple[str, ...]
    trust: Ints
    """(rows,) code of the label (`TRUST_CODE`), ascending in trust."""
    t_start: Floats
    t_end: Floats
    """(rows,) seconds; NaN where absent."""
    effect: Ints
    """(edges,) row of the later event."""
    cause: Ints
    """(edges,) row of the earlier event, or −1."""
    cause_seq: Ints
    """(edges,) seq of the earlier event, as written."""
    edge: Ints
    """(edges,) code of the edge kind (`EDGE_CODE`)."""
    order: Bools
    """(edges,) whether the edge was inferred from order alone (`inferred:order`)."""


def columns(traces: Sequence[Trace]) -> Columns:
    """Lay the events of whole traces out as arrays. Linear in events and edges."""
    sizes = [len(trace.events) for trace in traces]
    start = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    n = int(start[-1])
    events = [event for trace in traces for event in trace.events]
    causes = [cause for event in events for cause in event.causes]
    codes: dict[str, int] = {}
    code = codes.setdefault

    def whole(values: Iterator[int], size: int) -> Ints:
        return np.fromiter(values, np.int64, size)

    seq = whole((e.seq for e in events), n)
    trace = np.repeat(np.arange(len(traces)), sizes)
    effect = np.repeat(np.arange(n), whole((len(e.causes) for e in events), n))
    cause_seq = whole((c.seq for c in causes), len(causes))
    return Columns(
        traces=tuple(traces),
        start=start,
        trace=trace,
        seq=seq,
        kind=whole((KIND_CODE[e.kind] for e in events), n),
        agent=whole((code(e.agent, len(codes)) for e in events), n),
        agents=tuple(codes),
        trust=whole((TRUST_CODE[e.trust] for e in events), n),
        t_start=_clock((e.t_start for e in events), n),
        t_end=_clock((e.t_end for e in events), n),
        effect=effect,
        cause=_row_of(seq, trace, start, trace[effect], cause_seq),
        cause_seq=cause_seq,
        edge=whole((EDGE_CODE[c.kind] for c in causes), len(causes)),
        order=np.fromiter((c.basis == "inferred:order" for c in causes), np.bool_, len(causes)),
    )


def _clock(times: Iterator[float | None], n: int) -> Floats:
    return np.fromiter((np.nan if t is None else t for t in times), np.float64, n)


def _row_of(seq: Ints, trace: Ints, start: Ints, of: Ints, wanted: npt.NDArray[np.int64]) -> Ints:
    """Row that holds `wanted` seq in trace `of`, or −1; the first of duplicates."""
    if not len(seq) or not len(wanted):
        return np.full(len(wanted), -1, dtype=np.int64)
    first = seq[np.minimum(start[:-1], len(seq) - 1)]
    guess = start[of] + wanted - first[of]
    inside = (guess >= start[of]) & (guess < start[of + 1])
    guess = np.where(inside, guess, 0)
    hit = inside & (seq[guess] == wanted)
    dense = seq - first[trace] == np.arange(len(seq)) - start[trace]
    if dense.all():
        return np.where(hit, guess, -1)
    place = {key: row for row, key in reversed(list(enumerate(zip(trace, seq, strict=True))))}
    return np.array([place.get(key, -1) for key in zip(of, wanted, strict=True)], dtype=np.int64)


# ---------------------------------------------------------------------------------------------
# One trace as a graph

OPENS = ("spawn", "delegate", "message", "tool_call")
"""Kinds of effect that start a line of work."""

_ROWS = ("trace", "seq", "kind", "agent", "trust", "t_start", "t_end")
_EDGES = ("effect", "cause", "cause_seq", "edge", "order")

CARRIES = ("consumes", "aggregates", "derives")
"""Kinds of edge along which content comes in."""


class Edge(NamedTuple):
    """One edge, by seq."""

    cause: int
    effect: int
    kind: str


class Path(NamedTuple):
    """A path through a trace: its events in order, its length, and what the length counts."""

    seqs: Ints
    length: float
    unit: Literal["seconds", "events"]


class TraceGraph:
    """The events of one trace and the edges between them.

    The graph is acyclic by construction: an edge whose cause is missing, or does not stand earlier
    in the file, is left out and counted in `dangling`. In a fork, causes below `header.fork.seq`
    are events of the parent; they are left out too and counted in `outside`. Where a `seq` stands
    twice, it means the first event that bears it. Every question takes finite time on any input.

    Sets of events are returned as ascending arrays of distinct seqs. A question about a seq that
    the trace does not hold is Refused.
    """

    def __init__(self, trace: Trace, table: Columns | None = None) -> None:
        """`table` is `columns([trace])`, for callers that have it."""
        self.trace = trace
        self.table = columns([trace]) if table is None else table
        self._built: dict[tuple[str, bool], Links] = {}

    def __len__(self) -> int:
        return len(self.table.seq)

    @cached_property
    def kept(self) -> Bools:
        """(edges,) whether an edge of the table is one of the graph: its cause is here, earlier."""
        return (self.table.cause >= 0) & (self.table.cause < self.table.effect)

    @cached_property
    def outside(self) -> int:
        """Edges that point into the parent of a fork."""
        if self.trace.header.fork is None:
            return 0
        return int((~self.kept & (self.table.cause_seq < self.trace.first)).sum())

    @property
    def dangling(self) -> int:
        """Edges left out because their cause is missing or not earlier."""
        return int((~self.kept).sum()) - self.outside

    def edges(self) -> list[Edge]:
        """All edges of the graph, in the order of the file."""
        table, kept, names = self.table, self.kept, tuple(EDGE_CODE)
        cause = table.seq[table.cause[kept]].tolist()
        effect = table.seq[table.effect[kept]].tolist()
        kinds = [names[code] for code in table.edge[kept].tolist()]
        return list(map(Edge, cause, effect, kinds))

    def prefix(self, t: int) -> TraceGraph:
        """The graph of `trace[:t]`. A slice: nothing is computed anew."""
        trace = self.trace[:t]
        return TraceGraph(trace, _cut(self.table, trace))

    def topological_order(self) -> Ints:
        """Seqs of all events, each after all its causes: the order of the file, since edges that
        would contradict it are not part of the graph.
        """
        return self.table.seq

    def ancestors(self, seq: int, *, descent: bool = False) -> Ints:
        """Seqs of the events that lead to `seq`, itself left out.

        With `descent` (what a return may be credited to): edges inferred from order alone do not
        count, and every earlier act that holds a `no_stop` item does, since the run would have
        ended there. What a reward paid after the stop names as its causes was there by the last of
        them: for it, only the acts before that one count so.
        """
        row = self._row(seq)
        declined = self._declined_stops if descent else np.empty(0, dtype=np.int64)
        roots = np.append(declined[declined < self._until[row]], row)
        reached = _reached(self._backward(descent), row, roots)
        reached[row] = False
        return self._ascending(self.table.seq[: row + 1][reached])

    def behind(self, seq: int) -> tuple[str, ...]:
        """The agents whose events `seq` descends from, in order of appearance.

        Along all edges except those inferred from order, and through every earlier act that could
        have stopped the run and did not (`ancestors` with descent). What an agent was shown is not
        its doing: observations and deliveries do not count.

        Raises:
            Refused: the trace has no such event.
        """
        events = (self.trace[ancestor] for ancestor in self.ancestors(seq, descent=True).tolist())
        acted = (e.agent for e in events if not isinstance(e, Observe | Deliver))
        return tuple(dict.fromkeys(agent for agent in acted if agent not in RESERVED))

    def descendants(self, seq: int, *, descent: bool = False) -> Ints:
        """Seqs of the events that `seq` leads to, itself left out; `descent` as in `ancestors`."""
        row = self._row(seq)
        mirrored = len(self) - 1 - row
        reached = _reached(self._forward(descent), mirrored, np.array([mirrored]))[::-1]
        if descent:
            declined = self._declined_stops[self._declined_stops >= row] - row
            for first in declined[reached[declined]][:1]:
                reached |= self._until[row:] > row + first
        reached[0] = False
        return self._ascending(self.table.seq[row:][reached])

    def critical_path(self) -> Path:
        """The longest path: by Σ (t_end − t_start) over its events, or by their number.

        Seconds are used if any event took time; an event without both clocks, or with an end before
        its start, then counts 0. Otherwise every event counts 1. Among paths of equal length the
        later causes win. A trace without events gives an empty path of length 0.
        """
        if not len(self):
            return Path(np.empty(0, dtype=np.int64), 0.0, "events")
        took = np.maximum(np.nan_to_num(self.table.t_end - self.table.t_start, posinf=0.0), 0.0)
        timed = bool(took.any())
        weight = took if timed else np.ones(len(self))
        rows = _longest(weight, self.table.effect[self.kept], self.table.cause[self.kept])
        return Path(
            self.table.seq[rows], float(weight[rows].sum()), "seconds" if timed else "events"
        )

    def fan_outs(self) -> Ints:
        """Seqs of branch points: events from which two or more lines of work start directly.

        A spawn and a tool call start one line each, a message or a delegation one per receiver;
        `precedes` edges start nothing.
        """
        table, kept = self.table, self.kept & (self.table.edge != EDGE_CODE["precedes"])
        width = np.isin(table.kind, [KIND_CODE[kind] for kind in OPENS]).astype(np.int64)
        for row in np.flatnonzero(width).tolist():
            event = self.trace.events[row]
            if isinstance(event, Message | Delegate):
                width[row] = len(event.to)
        cause, effect = _distinct(table.cause[kept], table.effect[kept], len(self))
        started = np.bincount(cause, weights=width[effect], minlength=len(self))
        return np.unique(table.seq[started >= 2])

    def joins(self) -> Ints:
        """Seqs of events where the work of several agents comes together: their causes along
        `consumes`, `aggregates` and `derives` edges were made by two or more agents.

        A delivery counts as made by the sender. Reading one message is a hand-over, not a join.
        """
        table = self.table
        author = table.agent.copy()
        sent = self.kept & (table.edge == EDGE_CODE["delivers"])
        author[table.effect[sent]] = table.agent[table.cause[sent]]
        inflow = self.kept & np.isin(table.edge, [EDGE_CODE[kind] for kind in CARRIES])
        effect, _ = _distinct(table.effect[inflow], author[table.cause[inflow]], len(table.agents))
        return np.unique(table.seq[np.bincount(effect, minlength=len(self)) >= 2])

    def is_linear(self) -> bool:
        """Whether the trace is an old-style trajectory (s₀, a₀, s₁, …): rewards aside, each event
        follows directly on the one before it, so that no two could have happened side by side.

        Edges inferred from order count: a log that says no more than an order is linear.
        """
        steps = self.table.kind != KIND_CODE["reward"]
        place = np.cumsum(steps) - 1
        cause, effect = self.table.cause[self.kept], self.table.effect[self.kept]
        next_to = steps[cause] & steps[effect] & (place[effect] - place[cause] == 1)
        return len(np.unique(effect[next_to])) == max(int(steps.sum()) - 1, 0)

    def _row(self, seq: int) -> int:
        rows = np.flatnonzero(self.table.seq == seq)
        if not len(rows):
            raise Refused(f"trace {self.trace.trace_id} has no event {seq}")
        return int(rows[0])

    def _ascending(self, seqs: Ints) -> Ints:
        return seqs if self._in_order else np.unique(seqs)

    @cached_property
    def _in_order(self) -> bool:
        return bool((self.table.seq[1:] > self.table.seq[:-1]).all())

    def _backward(self, descent: bool) -> Links:
        """Effect → causes; for descent without the edges that were inferred from order."""
        key = ("backward", descent)
        if key not in self._built:
            kept = self.kept & ~self.table.order if descent else self.kept
            self._built[key] = _links(self.table.effect[kept], self.table.cause[kept], len(self))
        return self._built[key]

    def _forward(self, descent: bool) -> Links:
        """Cause → effects, with rows numbered from the end, so that edges lead down here too."""
        key = ("forward", descent)
        if key not in self._built:
            self._built[key] = _mirrored(self._backward(descent))
        return self._built[key]

    @cached_property
    def _declined_stops(self) -> Ints:
        """Rows of the acts that could have ended the run and did not."""
        events = self.trace.events
        acts = np.flatnonzero(self.table.kind == KIND_CODE["act"]).tolist()
        return np.array([row for row in acts if _declines_stop(events[row])], dtype=np.int64)

    @cached_property
    def _until(self) -> Ints:
        """(rows,) each event hangs on whether the run went on before this row: before its own; a
        reward paid after the stop, before the last of its causes.
        """
        table, rows = self.table, np.arange(len(self))
        kept = self.kept & ~table.order
        last = np.full(len(self), -1)
        np.maximum.at(last, table.effect[kept], table.cause[kept])
        stopped = np.cumsum(table.kind == KIND_CODE["stop"]) > 0
        paid = (table.kind == KIND_CODE["reward"]) & stopped & (last >= 0)
        until: Ints = np.where(paid, last, rows)
        return until


def depends(trace: Trace, reward: Event | int) -> tuple[str, ...]:
    """The agents whose events a reward descends from, in order of appearance; of several
    questions about one trace, `TraceGraph.behind` builds the graph once.

    Raises:
        Refused: the trace has no such event.
    """
    return TraceGraph(trace).behind(reward if isinstance(reward, int) else reward.seq)


class Links(NamedTuple):
    """Edges by the row they leave: r leads to the rows `to[start[r]:start[r + 1]]`, all below r."""

    start: Ints
    to: Ints


def _links(leave: Ints, to: Ints, rows: int) -> Links:
    """`leave` is ascending."""
    return Links(np.searchsorted(leave, np.arange(rows + 1)), np.ascontiguousarray(to))


def _mirrored(links: Links) -> Links:
    rows = len(links.start) - 1
    leave = rows - 1 - links.to
    order = np.argsort(leave, kind="stable")
    to = rows - 1 - np.repeat(np.arange(rows), np.diff(links.start))
    return _links(leave[order], to[order], rows)


PEELS = 128
"""Layers of dead ends that are taken off at once each, before the rest is swept edge by edge."""


def _reached(links: Links, row: int, roots: Ints) -> Bools:
    """(row + 1,) which rows up to `row` the `roots` among them lead to, themselves included.

    In a trace nearly everything leads to what comes later, so the dead ends are looked for instead:
    rows that nothing leads to are taken off, layer by layer. Where dead ends are deep (an agent
    whose work is never read) a sweep down the rows decides about what is left.
    """
    start, to = links.start, links.to[: links.start[row + 1]]
    support = np.bincount(to, minlength=row + 1)
    support[roots] += 1
    layer = np.flatnonzero(support == 0)
    for _ in range(PEELS):
        if not len(layer):
            return support > 0
        lost = to[_ranges(start[layer], start[layer + 1])]
        np.subtract.at(support, lost, 1)
        layer = np.unique(lost[support[lost] == 0])
    return _swept(links, row, roots)


def _swept(links: Links, row: int, roots: Ints) -> Bools:
    marks = [False] * (row + 1)
    for root in roots.tolist():
        marks[root] = True
    size = np.diff(links.start[: row + 2])
    leave = np.repeat(np.arange(row + 1), size)[::-1].tolist()
    for r, below in zip(leave, links.to[: len(leave)][::-1].tolist(), strict=True):
        if marks[r]:
            marks[below] = True
    return np.array(marks, dtype=np.bool_)


def _longest(weight: Floats, effect: Ints, cause: Ints) -> Ints:
    """Rows of the path of largest weight.

    A row whose only cause is the row before it continues a run; a run is one sum, so that only the
    edges into the heads of runs are swept one by one.
    """
    alone = (np.bincount(effect, minlength=len(weight))[effect] == 1) & (cause == effect - 1)
    heads = np.ones(len(weight), dtype=np.bool_)
    heads[effect[alone]] = False
    head, run = np.flatnonzero(heads), np.cumsum(heads) - 1
    since = np.cumsum(weight)
    since -= since[head][run]
    e, c = effect[~alone], cause[~alone]
    # of two causes in one run the later one has the longer path
    best = np.ones(len(e), dtype=np.bool_)
    best[:-1] = (e[:-1] != e[1:]) | (run[c[:-1]] != run[c[1:]]) | (c[:-1] > c[1:])
    e, c = e[best], c[best]
    into, out_of, step = run[e].tolist(), run[c].tolist(), (since[c] + weight[e]).tolist()
    length, before = weight[head].tolist(), [-1] * len(head)
    for edge, (to, of, more) in enumerate(zip(into, out_of, step, strict=True)):
        through = length[of] + more
        if through >= length[to]:
            length[to] = through
            before[to] = edge
    last = int(np.argmax(np.array(length)[run] + since))
    runs, edges = [int(run[last])], []
    while (edge := before[runs[-1]]) >= 0:
        runs.append(out_of[edge])
        edges.append(edge)
    ends = np.append(c[edges[::-1]], last) if edges else np.array([last])
    return _ranges(head[runs[::-1]], ends + 1)


def _ranges(begin: Ints, end: Ints) -> Ints:
    """All of begin[0] … end[0] − 1, then begin[1] … end[1] − 1, and so on."""
    size = end - begin
    done = np.cumsum(size)
    ranges: Ints = np.arange(done[-1]) + np.repeat(begin - done + size, size)
    return ranges


def _declines_stop(event: AnyEvent) -> bool:
    return isinstance(event, Act) and any(item.verb == "no_stop" for item in event.items)


def _cut(table: Columns, trace: Trace) -> Columns:
    """The columns of a prefix of the one trace in `table`, as views."""
    rows = len(trace)
    edges = int(np.searchsorted(table.effect, rows))
    return table._replace(
        traces=(trace,),
        start=np.array([0, rows]),
        **{name: getattr(table, name)[:rows] for name in _ROWS},
        **{name: getattr(table, name)[:edges] for name in _EDGES},
    )


def _distinct(first: Ints, second: Ints, n: int) -> tuple[Ints, Ints]:
    """The distinct pairs of `first` and `second`, where `second` < n."""
    key = np.unique(first * max(n, 1) + second)
    return key // max(n, 1), key % max(n, 1)
