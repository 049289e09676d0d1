"""The room of time, as arrays: whole traces become flat columns, and one trace becomes a graph.

A cause is always an earlier event, so the order of the file is a topological order: a prefix is a
slice, and whatever flows along edges (descent, taint, the critical path) is one forward sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.schema import EDGES, KINDS, TRUST, Trace

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
    codes: dict[str, int] = {}
    code = codes.setdefault
    sizes = [len(trace.events) for trace in traces]
    start = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    rows = [
        (e.seq, KIND_CODE[e.kind], code(e.agent, len(codes)), TRUST_CODE[e.trust], len(e.causes))
        for trace in traces
        for e in trace.events
    ]
    clocks = [(e.t_start, e.t_end) for trace in traces for e in trace.events]
    links = [
        (c.seq, EDGE_CODE[c.kind], c.basis == "inferred:order")
        for trace in traces
        for e in trace.events
        for c in e.causes
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    clock = np.array(clocks, dtype=np.float64).reshape(-1, 2)
    link = np.array(links, dtype=np.int64).reshape(-1, 3)
    effect = np.repeat(np.arange(len(table)), table[:, 4])
    trace = np.repeat(np.arange(len(traces)), sizes)
    return Columns(
        traces=tuple(traces),
        start=start,
        trace=trace,
        seq=table[:, 0],
        kind=table[:, 1],
        agent=table[:, 2],
        agents=tuple(codes),
        trust=table[:, 3],
        t_start=clock[:, 0],
        t_end=clock[:, 1],
        effect=effect,
        cause=_row_of(table[:, 0], trace, start, trace[effect], link[:, 0]),
        cause_seq=link[:, 0],
        edge=link[:, 1],
        order=link[:, 2].astype(bool),
    )


def _row_of(
    seq: Ints, trace: Ints, start: Ints, of: Ints, wanted: npt.NDArray[np.int64]
) -> Ints:
    """Row that holds `wanted` seq in trace `of`, or −1; the first of duplicates."""
    if not len(seq) or not len(wanted):
        return np.full(len(wanted), -1, dtype=np.int64)
    first = seq[np.minimum(start[:-1], len(seq) - 1)]
    guess = start[of] + wanted - first[of]
    inside = (guess >= start[of]) & (guess < start[of + 1])
    guess = np.where(inside, guess, 0)
    hit = inside & (seq[guess] == wanted)
    dense = seq - first[trace] == np.arange(len(seq)) - start[trace]
    if hit.all() or dense.all():
        return np.where(hit, guess, -1)
    place = {key: row for row, key in reversed(list(enumerate(zip(trace, seq, strict=True))))}
    return np.array([place.get(key, -1) for key in zip(of, wanted, strict=True)], dtype=np.int64)
