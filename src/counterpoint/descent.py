"""Which rewards descend from which turn: what a causal return sums.

Descent runs along causes, and one missing edge turns a return of 1 into 0 without a warning. So a
trace is asked first whether its edges are all there, and refused if they are guessed or absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from counterpoint.graph import TraceGraph
from counterpoint.groups import Floats, Ints
from counterpoint.schema import (
    Act,
    Aggregate,
    AnyEvent,
    Deliver,
    Effect,
    LateReward,
    Observe,
    Reward,
    Spawn,
    ToolResult,
    Trace,
    Write,
)
from counterpoint.spelling import Refused

WHOLE_RUN = "inferred:run"
"""Basis of the edges into a reward that depends on everything the run did."""

CERTAIN: frozenset[str] = frozenset(
    {"recorded", "inferred:environment", "inferred:turn", WHOLE_RUN}
)
"""Bases that may be relied on where our Recorder wrote the trace: what they add errs towards too
much. Rules that fill in what was not recorded (order, mailbox, history) may leave an edge out."""


class Descent(NamedTuple):
    """Pairs of a turn and a reward that descends from it, each once however many paths there are.

    All are of shape (pairs,): `row` the turn, `place` the row that the reward falls on, `amount`
    the reward.
    """

    row: Ints
    place: Ints
    amount: Floats


class Paid(NamedTuple):
    """A reward of the outcome: the turn of its trace that it falls on, and where it came from."""

    place: int
    amount: float
    reward: Reward | LateReward


def joined(found: Sequence[Descent]) -> Descent:
    """Several tables of pairs as one."""
    if not found:
        nothing = np.empty(0, dtype=np.int64)
        return Descent(nothing, nothing, np.empty(0))
    row, place, amount = (np.concatenate(column) for column in zip(*found, strict=True))
    return Descent(row, place, amount)


def descends(trace: Trace, acts: Sequence[int], paid: Sequence[Paid], first: int) -> Descent:
    """The pairs of one trace, by `TraceGraph`'s descent; a sweep over its edges for each reward.

    A reward of the whole run, and one that came after the seal, descend from every act before
    them; a reward that targets an act descends from it, whatever the edges say.

    Args:
        trace: the trace.
        acts: (turns,) seq of each turn's act, ascending.
        paid: its rewards; amounts of 0 make no pair.
        first: row of its first turn in the table.

    Raises:
        Refused: an edge that descent needs is missing or guessed; the sentence names event and
            trace, and what to record instead.
    """
    if fault := gap(trace):
        raise Refused(
            f"trace {trace.trace_id}{fault}, so what descends from a turn is not known; "
            "record it, or take the return over all later rewards (causal=False)"
        )
    graph, seqs = TraceGraph(trace), np.asarray(acts, dtype=np.int64)
    found = []
    for place, amount, reward in paid:
        if amount:
            turns = np.flatnonzero(_leads(graph, seqs, reward)) + first
            falls = np.full(len(turns), place + first, dtype=np.int64)
            found.append(Descent(turns, falls, np.full(len(turns), amount)))
    return joined(found)


def _leads(graph: TraceGraph, seqs: Ints, reward: Reward | LateReward) -> Any:
    """(turns,) whether the reward descends from the turn."""
    target = reward.target.seq if reward.target else None
    if isinstance(reward, LateReward):
        return np.ones(len(seqs), dtype=bool)
    if any(cause.basis == WHOLE_RUN for cause in reward.causes):
        return seqs < reward.seq
    return np.isin(seqs, graph.ancestors(reward.seq, descent=True)) | (seqs == target)


def given_pairs(values: Sequence[Any], reward: Floats, rollout: Ints, step: Ints) -> Descent:
    """The pairs of a column: for each row, the rows whose reward descends from it.

    A row's own reward always does.

    Raises:
        Refused: a row that does not exist, is of another rollout, or came before.
    """
    pairs = sorted({pair for row, line in enumerate(values) for pair in _line(row, line)})
    of, place = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    outside = (place < 0) | (place >= len(reward))
    wrong = outside.copy()
    inside = ~outside
    wrong[inside] = rollout[of[inside]] != rollout[place[inside]]
    wrong[inside] |= step[of[inside]] > step[place[inside]]
    if wrong.any():
        at = int(np.argmax(wrong))
        raise Refused(
            f"column descends, row {of[at]}: row {place[at]} is no row from there on in its rollout"
        )
    return Descent(of, place, reward[place])


def _line(row: int, line: Any) -> Iterator[tuple[int, int]]:
    yield row, row
    try:
        yield from ((row, int(place)) for place in line)
    except (TypeError, ValueError):
        raise Refused(
            f"column descends, row {row}: {line!r:.60} is no list of row numbers"
        ) from None


# ---------------------------------------------------------------------------------------------
# Whether all edges are there


@dataclass
class _Seen:
    """What came before an event, as far as it says which edges are due."""

    here: set[int] = field(default_factory=set)
    turn: dict[str, int] = field(default_factory=dict)
    """The last observe or act of an agent, or the spawn that brought it to life."""
    act: dict[str, int] = field(default_factory=dict)
    writes: dict[tuple[str, int], int] = field(default_factory=dict)
    result: int | None = None


def gap(trace: Trace) -> str | None:
    """What makes the edges of a trace unfit for descent, as the end of a sentence; None if nothing.

    A run that our harness played has every edge by construction, as long as its seal shows that
    nothing was changed since. In any other trace each event needs a cause that is recorded, or
    supplied by a rule that errs towards too much, and the edges that the format requires: a turn
    on the agent's life and on all that it read, an effect on its act, a result on its call and on
    the last result before it, since the environment is shared.
    """
    config = trace.header.config
    if isinstance(config, dict) and "harness" in config:
        sealed = trace.seal is not None and trace.seal.digest == trace.digest
        return None if sealed else " was played, but is unsealed or was changed since"
    bases = CERTAIN if trace.header.ours else frozenset({"recorded"})
    seen = _Seen()
    for number, event in enumerate(trace.events):
        fault = _unsure(trace, event, number, bases, seen) or _missing(event, seen)
        if fault:
            return f", event {event.seq} ({event.kind}): {fault}"
        _note(event, seen)
    return None


def _unsure(
    trace: Trace, event: AnyEvent, number: int, bases: frozenset[str], seen: _Seen
) -> str | None:
    """An event without a cause, a cause that is not there, or one that was only inferred."""
    if not event.causes and number:
        return "it has no cause"
    for cause in event.causes:
        if cause.basis not in bases:
            rule = cause.basis.removeprefix("inferred:")
            return f"its edge from event {cause.seq} was inferred by the rule {rule!r}"
        if cause.seq >= trace.first and cause.seq not in seen.here:
            return f"its cause {cause.seq} is no earlier event"
    return None


def _missing(event: AnyEvent, seen: _Seen) -> str | None:
    """An edge that is required and not there."""
    held = {cause.seq for cause in event.causes}
    for seq in _due(event, seen):
        if seq not in held:
            return f"it has no edge from event {seq}, which it follows from"
    if seen.result is None or not _computed(event):
        return None
    shared = seen.result in held or any(c.basis == "inferred:environment" for c in event.causes)
    if not shared:
        return f"it has no edge from result {seen.result}, which may have changed the environment"
    return None


def _due(event: AnyEvent, seen: _Seen) -> Iterator[int]:
    """Events that must be among the causes."""
    if isinstance(event, Observe):
        yield from (source.seq for source in event.sources)
    reset = isinstance(event, Observe) and event.context == "reset"
    if isinstance(event, Observe | Act) and event.agent in seen.turn and not reset:
        yield seen.turn[event.agent]
    if isinstance(event, Effect) and event.agent in seen.act:
        yield seen.act[event.agent]
    if isinstance(event, Deliver):
        yield event.message
    if isinstance(event, ToolResult) and event.call is not None:
        yield event.call
    if isinstance(event, Aggregate):
        yield from event.inputs
    if isinstance(event, Write):
        read = ((r.artefact, r.version) for r in event.reads)
        yield from (seen.writes[key] for key in read if key in seen.writes)


def _computed(event: AnyEvent) -> bool:
    """Whether the environment computed it."""
    if isinstance(event, Observe):
        return event.content_raw is not UNSET or event.legal is not None
    return isinstance(event, ToolResult)


def _note(event: AnyEvent, seen: _Seen) -> None:
    seen.here.add(event.seq)
    if isinstance(event, Observe | Act):
        seen.turn[event.agent] = event.seq
    if isinstance(event, Act):
        seen.act[event.agent] = event.seq
    elif isinstance(event, Spawn):
        seen.turn.setdefault(event.child, event.seq)
    elif isinstance(event, ToolResult):
        seen.result = event.seq
    elif isinstance(event, Write):
        seen.writes[event.artefact, event.version] = event.seq
