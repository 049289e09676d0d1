"""Rules about order: positions, causes, the end of a run, clocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from counterpoint.groups import Bools, Ints
from counterpoint.schema import KINDS, Effect, Finding, Observe
from counterpoint.validate.chunk import Chunk

EFFECTS = tuple(kind for kind, cls in KINDS.items() if issubclass(cls, Effect))
"""Kinds that an act brings about."""

REQUIRED = (
    (("observe",), "precedes", ("observe",), ("observe", "act")),
    (("observe",), "precedes", ("act",), ("observe", "act")),
    (("act",), "derives", ("observe",), ("observe", "act")),
    (EFFECTS, "authorizes", ("act",), ("act",)),
)
"""Edges between events of one agent: kinds of the effect, the edge, kinds of the cause, and the
kinds of which the agent's last event before must be one of the cause's for the edge to be due."""

NAMED = (
    ("observe", "sources", "consumes"),
    ("deliver", "message", "delivers"),
    ("tool_result", "call", "answers"),
    ("aggregate", "inputs", "aggregates"),
)
"""Edges to an event that a field names: kind of the effect, its field, the edge."""

DAY = 86_400.0
YEAR_1990 = 631_152_000.0
"""1 January 1990 in seconds of Unix time."""


def dense(chunk: Chunk) -> Iterator[Finding]:
    """V03: `seq` counts from 0 (in a fork from `fork.seq`) without gap, duplicate or step back."""
    table = chunk.table
    previous = np.concatenate([[-1], table.seq[:-1]]) if len(table.seq) else table.seq.copy()
    opening = table.start[:-1][np.diff(table.start) > 0]
    previous[opening] = chunk.first[table.trace[opening]] - 1
    openings = set(opening.tolist())
    home = chunk.at(chunk.rows(), table.seq)
    for row in np.flatnonzero(table.seq - previous != 1).tolist():
        seq, last = int(table.seq[row]), int(previous[row])
        if home[row] != row:
            message = f"seq {seq} stands twice in this trace"
        elif row in openings:
            message = f"the first seq is {seq}, not {last + 1}"
        elif seq > last:
            message = f"seq {seq} follows {last}: {seq - last - 1} missing"
        else:
            message = f"seq {seq} follows {last}: out of order"
        yield chunk.finding("V03", row, message, "seq")


def roots(chunk: Chunk) -> Bools:
    """(rows,) events that have no cause though another event stands before them."""
    bare = np.ones(len(chunk.events), dtype=bool)
    bare[chunk.table.effect] = False
    begins = chunk.table.start[:-1][(np.diff(chunk.table.start) > 0) & (chunk.first == 0)]
    bare[begins] = False
    return bare


def caused(chunk: Chunk) -> Iterator[Finding]:
    """V04: every cause exists and is earlier; in traces that we wrote, every event but the first
    has one. In a fork, causes below `fork.seq` lie in the parent and are not looked for.
    """
    table = chunk.table
    for row in np.flatnonzero(roots(chunk) & chunk.per_row([t.header.ours for t in chunk.traces])):
        yield chunk.finding("V04", int(row), "the event has no cause", "causes")
    missing = (table.cause < 0) & ~chunk.in_parent(table.effect, table.cause_seq)
    late = (table.cause >= 0) & (table.cause_seq >= table.seq[table.effect])
    for edge in np.flatnonzero(missing | late).tolist():
        cause = int(table.cause_seq[edge])
        fault = "is not in this trace" if missing[edge] else "is not earlier"
        yield chunk.finding("V04", int(table.effect[edge]), f"its cause {cause} {fault}", "causes")


def extra_roots(chunk: Chunk) -> int:
    """Events without a cause, beyond the first, in traces that others wrote."""
    return int((roots(chunk) & ~chunk.per_row([t.header.ours for t in chunk.traces])).sum())


def causes_in_parent(chunk: Chunk) -> int:
    """Edges that point from a fork into its parent, and so are not followed."""
    table = chunk.table
    return int(((table.cause < 0) & chunk.in_parent(table.effect, table.cause_seq)).sum())


def required_edges_missing(chunk: Chunk) -> int:
    """Edges that the format requires and the log, which has both events, does not hold."""
    table, absent = chunk.table, 0
    kept = [row for row, _, observe in chunk.each(Observe) if observe.context != "reset"]
    appended = np.array(kept, dtype=np.int64)
    for effects, edge, causes, latest_of in REQUIRED:
        rows = appended if effects == ("observe",) else chunk.rows(*effects)
        latest = chunk.latest(rows, chunk.rows(*latest_of))
        due = rows[(latest >= 0) & chunk.among(*causes)[latest]]
        there = chunk.edges(edge)
        cause, effect = table.cause[there], table.effect[there]
        fits = chunk.among(*causes)[cause] & (chunk.owner[cause] == chunk.owner[effect])
        held = np.zeros(len(chunk.events), dtype=bool)
        held[effect[fits]] = True
        absent += int((~held[due]).sum())
    return absent + sum(_unlinked(chunk, *named) for named in NAMED)


def _unlinked(chunk: Chunk, kind: str, field: str, edge: str) -> int:
    """References by `field` that no edge of kind `edge` repeats."""
    rows, seqs = chunk.named(chunk.rows(kind), field)
    named = chunk.at(rows, seqs)
    there, width = chunk.edges(edge), len(chunk.events)
    due = (rows * width + named)[named >= 0]
    linked = chunk.table.effect[there] * width + chunk.table.cause[there]
    return len({*due.tolist()} - {*linked.tolist()})


def ended(chunk: Chunk) -> Iterator[Finding]:
    """V13: after the run's stop come only rewards (the reader reports lines after the seal)."""
    stops = chunk.rows("stop")
    end = np.full(len(chunk.traces), len(chunk.events), dtype=np.int64)
    np.minimum.at(end, chunk.table.trace[stops], stops)
    after = (chunk.rows() > end[chunk.table.trace]) & ~chunk.among("reward")
    for row in np.flatnonzero(after).tolist():
        stop = chunk.events[end[chunk.table.trace[row]]].seq
        message = f"a {chunk.events[row].kind} after the run's stop at {stop}"
        yield chunk.finding("V13", row, message, "type")


def clocks(chunk: Chunk) -> Iterator[Finding]:
    """W01: an event ends before it starts, or starts before a cause of it; by a wall clock also a
    time before 1990 or a pause of over a day. Clocks are data, so these are warnings.
    """
    table = chunk.table
    yield from _clock(chunk, table.t_end < table.t_start, "ends before it starts", "t_end")
    held = np.flatnonzero(table.cause >= 0)
    effect, cause = table.effect[held], table.cause[held]
    early = np.unique(effect[table.t_start[effect] < table.t_start[cause]])
    yield from _clock(chunk, early, "starts before one of its causes")
    wall = chunk.per_row([trace.header.started is not None for trace in chunk.traces])
    ancient = wall & (table.t_start < YEAR_1990)
    yield from _clock(chunk, ancient, "starts before 1990 by a wall clock")
    timed = np.flatnonzero(wall & ~np.isnan(table.t_start))
    with np.errstate(invalid="ignore"):  # two infinite times have no distance
        pause = np.diff(table.t_start[timed]) > DAY
    same = np.diff(table.trace[timed]) == 0
    yield from _clock(chunk, timed[1:][pause & same], "starts over a day after the event before it")


def _clock(chunk: Chunk, odd: Bools | Ints, says: str, field: str = "t_start") -> Iterator[Finding]:
    for row in (np.flatnonzero(odd) if odd.dtype == bool else odd).tolist():
        yield chunk.finding("W01", row, f"the event {says}", field)
