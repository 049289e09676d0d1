"""Rules about what passes between agents and tools: calls, mail, delegations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from counterpoint.groups import Bools, Ints
from counterpoint.schema import Delegate, Despawn, Finding, ToolCall
from counterpoint.validate.chunk import Chunk, short

MAIL = ("message", "delegate", "agent_return")
"""Kinds that reach a mailbox."""


def answered(chunk: Chunk) -> Iterator[Finding]:
    """V06: each tool_result answers exactly one call, by `call` or by an `answers` edge, and no
    call is answered twice. In a trace without any call, results are only counted.
    """
    rows, seqs, calls = chunk.answers
    good = (calls >= 0) & chunk.among("tool_call")[calls] & (calls < rows)
    for at in np.flatnonzero(~good & ~chunk.in_parent(rows, seqs)).tolist():
        fault = _unfit(chunk, int(rows[at]), int(calls[at]))
        yield chunk.finding("V06", int(rows[at]), f"it answers {seqs[at]}, which {fault}", "call")
    results = chunk.rows("tool_result")
    answers = np.bincount(rows, minlength=len(chunk.events))[results]
    for row in results[answers > 1].tolist():
        yield chunk.finding("V06", row, "it answers more than one call", "call")
    for row in results[(answers == 0) & _has_calls(chunk)[results]].tolist():
        yield chunk.finding("V06", row, "it answers no call", "call")
    again = calls >= 0
    again[np.unique(calls, return_index=True)[1]] = False
    for at in np.flatnonzero(again).tolist():
        message = f"call {seqs[at]} is answered a second time"
        yield chunk.finding("V06", int(rows[at]), message, "call")


def _unfit(chunk: Chunk, row: int, cause: int) -> str:
    """Why the event at `cause` (−1: none) cannot be what the one at `row` refers to."""
    if cause < 0:
        return "is not in this trace"
    return "comes later" if cause >= row else f"is a {chunk.events[cause].kind}"


def _has_calls(chunk: Chunk) -> Bools:
    """(rows,) whether the event's trace holds a call (or may, in the parent of a fork)."""
    calls = np.zeros(len(chunk.traces), dtype=bool)
    calls[chunk.table.trace[chunk.rows("tool_call")]] = True
    return calls[chunk.table.trace]


def unanswered_calls(chunk: Chunk) -> int:
    """Calls that no result answers."""
    answered_rows = chunk.answers[2]
    answered = np.zeros(len(chunk.events), dtype=bool)
    answered[answered_rows[answered_rows >= 0]] = True
    return int((chunk.among("tool_call") & ~answered).sum())


def results_without_calls(chunk: Chunk) -> int:
    """Results in traces that record no calls at all, and that name none."""
    results = chunk.rows("tool_result")
    nameless = ~np.isin(results, chunk.answers[0])
    return int((nameless & ~_has_calls(chunk)[results]).sum())


def repeated_sources(chunk: Chunk) -> Iterator[Finding]:
    """W03: two calls of one trace bear the same source id, which therefore cannot be a key."""
    seen: dict[tuple[int, str], int] = {}
    for row, trace, call in chunk.each(ToolCall):
        if call.source_id is not None:
            first = seen.setdefault((trace, call.source_id), row)
            if first != row:
                seq = chunk.events[first].seq
                message = f"the source id {short(call.source_id)} is that of call {seq} too"
                yield chunk.finding("W03", row, message, "source_id")


def delivered(chunk: Chunk) -> Iterator[Finding]:
    """V07: mail is delivered after it was sent and consumed after it was delivered.

    Where delivery is implicit a message may be consumed as soon as it is sent, unless the trace
    holds a `deliver` for it. What an observation shows must exist and be earlier, whatever it is.
    """
    found = (column.tolist() for column in _here(chunk, chunk.rows("deliver"), "message"))
    arrived: dict[tuple[int, int], int] = {}
    for row, seq, mail in zip(*found, strict=True):
        arrived.setdefault((mail, int(chunk.table.agent[row])), row)
        if mail < 0 or mail >= row or chunk.events[mail].kind not in MAIL:
            fault = f"it delivers {seq}, which {_unfit(chunk, row, mail)}"
            yield chunk.finding("V07", row, fault, "message")
    yield from _consumed(chunk, arrived)


def _consumed(chunk: Chunk, arrived: dict[tuple[int, int], int]) -> Iterator[Finding]:
    table = chunk.table
    explicit = [trace.header.delivery == "explicit" for trace in chunk.traces]
    rows, seqs, sources = _here(chunk, chunk.rows("observe"), "sources")
    amiss = (sources < 0) | (sources >= rows)
    asked = amiss | (chunk.among(*MAIL)[sources] & (table.agent[sources] != table.agent[rows]))
    for at in np.flatnonzero(asked).tolist():
        row, source = int(rows[at]), int(sources[at])
        came = arrived.get((source, int(table.agent[row])))
        if amiss[at]:
            fault = _unfit(chunk, row, source)
        elif came is None and explicit[table.trace[row]]:
            fault = "was never delivered to this agent"
        elif came is not None and came > row:
            fault = f"is delivered later, at {chunk.events[came].seq}"
        else:
            continue
        yield chunk.finding("V07", row, f"it shows {seqs[at]}, which {fault}", "sources")


def _here(chunk: Chunk, rows: Ints, field: str) -> tuple[Ints, Ints, Ints]:
    """What a field names, without what lies in the parent of a fork: row, seq, its row or −1."""
    rows, seqs = chunk.named(rows, field)
    here = ~chunk.in_parent(rows, seqs)
    rows, seqs = rows[here], seqs[here]
    return rows, seqs, chunk.at(rows, seqs)


def returned(chunk: Chunk) -> Iterator[Finding]:
    """V08: a return answers a delegation that was made to its agent, and each only once.

    Delegations without a return or a despawn are counted in `missing_returns`, not invented.
    """
    seen: set[tuple[int, str]] = set()
    for row, cause in _return_edges(chunk):
        event, work = chunk.events[row], chunk.events[cause]
        if isinstance(work, Delegate) and event.agent not in work.to:
            message = (
                f"{short(event.agent)} answers delegation {work.seq}, which was not made to it"
            )
            yield chunk.finding("V08", row, message, "causes")
        elif (cause, event.agent) in seen:
            message = f"{short(event.agent)} answers delegation {work.seq} a second time"
            yield chunk.finding("V08", row, message, "causes")
        seen.add((cause, event.agent))


def missing_returns(chunk: Chunk) -> int:
    """Delegations, one for each receiver, that neither a return nor a despawn closes.

    A return closes the delegation that it names by a `returns` edge, else the oldest open one made
    to its agent; a despawn closes all that are open for the child.
    """
    named = defaultdict(list)
    for row, cause in _return_edges(chunk):
        named[row].append(cause)
    waiting: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)
    rows = chunk.rows("delegate", "agent_return", "despawn")
    for row, trace in zip(rows.tolist(), chunk.table.trace[rows].tolist(), strict=True):
        event = chunk.events[row]
        if isinstance(event, Delegate):
            for agent in event.to:
                waiting[trace, agent][row] = None
        elif isinstance(event, Despawn):
            waiting.pop((trace, event.child), None)
        else:
            work = waiting[trace, event.agent]
            for closed in named.get(row) or list(work)[:1]:
                work.pop(closed, None)
    return sum(len(work) for work in waiting.values())


def _return_edges(chunk: Chunk) -> list[tuple[int, int]]:
    """Edges from a delegation to the return that answers it: rows of the return and the cause."""
    table = chunk.table
    edge = chunk.edges("returns") & chunk.among("agent_return")[table.effect]
    edge &= chunk.among("delegate")[table.cause]
    return list(zip(table.effect[edge].tolist(), table.cause[edge].tolist(), strict=True))
