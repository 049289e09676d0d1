"""What can carry credit, as arrays: the parts of turns, the turns, and turns taken together.

The eight kinds of `vocabulary.UNITS`. A decision, a message, a tool call and a token are parts of
one turn, a row of `Steps`; an agent, a role and the team are all rows of a rollout that share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.groups import Floats, Ints
from counterpoint.schema import (
    Act,
    Aggregate,
    Delegate,
    Effect,
    Message,
    Spawn,
    Stop,
    ToolCall,
    Trace,
)
from counterpoint.spelling import Refused
from counterpoint.tokens import stored
from counterpoint.vocabulary import DECISIONS, UNITS

PARTS: tuple[str, ...] = ("token", "message", "tool_call", "decision")
"""Kinds that are parts of a turn, which only traces can tell."""

TOGETHER: tuple[str, ...] = ("agent", "role", "team")
"""Kinds that are several turns of a rollout."""

_VERBS = frozenset((*DECISIONS, *(f"no_{verb}" for verb in DECISIONS)))


@dataclass(frozen=True, eq=False)
class Units:
    """The units of one kind in a table of turns, as arrays of shape (units,).

    Attributes:
        kind: which of `vocabulary.UNITS`.
        rows: how many turns the table has.
        row: the turn that the unit is part of; of several turns, the first in the table.
        seq: the event that is the unit: an act, a message, a call; −1 where there is none.
        item: index in the act's items, −1 where there is none.
        start, end: its span in the characters of the turn's text, −1 where unknown; of tokens, in
            the turn's tokens.
        label: code of what it is: a decision's verb, a call's tool, the agent, the role.
        receiver: code of the ids that it goes to, a tuple; −1 where there are none.
        logprob: log-probability of taking or declining the decision, NaN where nobody said.
        of: (rows,) the unit that each turn belongs to, where a unit is several turns; else None.
        names: the texts behind `label` and `receiver`.
    """

    kind: str
    rows: int
    row: Ints
    seq: Ints
    item: Ints
    start: Ints
    end: Ints
    label: Ints
    receiver: Ints
    logprob: Floats
    of: Ints | None = None
    names: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row)

    def name(self, column: str, unit: int) -> Any:
        """The text behind a code of `label` or `receiver`, None where there is none."""
        code = int(getattr(self, column)[unit])
        return None if code < 0 else self.names[column][code]


class Part(NamedTuple):
    """One part of a turn on its way into the arrays; columns as in `Units`."""

    row: int
    seq: int
    item: int
    start: int
    end: int
    label: str | None
    receiver: tuple[str, ...] | None
    logprob: float


# ---------------------------------------------------------------------------------------------
# Parts of turns, from traces


def parts_of(trace: Trace, row: int) -> Iterator[tuple[str, Part]]:
    """The parts of a trace's turns, each with its kind; `row` is the row of its first act.

    A part belongs to the act that authorises it, else to the last act of its agent; what somebody
    sends who never acts, such as a simulated user, is no part of a turn. The decisions of an act
    are its items; where a log has none, the effects that are decisions stand for them. Tokens come
    in runs: one part from `start` to `end`.
    """
    latest: dict[str, Act] = {}
    home: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Act):
            latest[event.agent], home[event.seq] = event, row
            yield from _decisions(event, row)
            yield from _tokens(event, row)
            row += 1
        elif isinstance(event, Effect) and event.agent in latest:
            last = latest[event.agent]
            by = next((c.seq for c in event.causes if c.kind == "authorizes"), last.seq)
            yield from _effect(event, home.get(by, home[last.seq]), bool(last.items))


def _decisions(act: Act, row: int) -> Iterator[tuple[str, Part]]:
    for index, item in enumerate(act.items):
        if item.verb in _VERBS:
            chance = np.nan if item.logprob is None else item.logprob
            start, end = item.span or (-1, -1)
            receiver = item.name or None
            yield (
                "decision",
                Part(row, act.seq, index, start, end, item.verb, receiver, chance),
            )


def _tokens(act: Act, row: int) -> Iterator[tuple[str, Part]]:
    """Runs of tokens that the policy wrote, each within one item."""
    held = stored(act)
    size = len(held) if held else act.tokens_out or 0
    owner = [-1] * size
    for index, item in enumerate(act.items):
        if item.tokens is not None:
            begin, stop = max(item.tokens[0], 0), min(item.tokens[1], size)
            owner[begin:stop] = [index] * max(stop - begin, 0)
    if not act.mask and len(set(owner)) < 2:
        runs = [(owner[0], 0, size)] if size else []
    else:
        written = act.mask or [True] * size
        places = groupby(range(size), key=lambda at: (written[at], owner[at]))
        found = [(key, list(run)) for key, run in places]
        runs = [(index, run[0], run[-1] + 1) for (kept, index), run in found if kept]
    for index, begin, stop in runs:
        yield "token", Part(row, act.seq, index, begin, stop, None, None, np.nan)


def _effect(event: Effect, row: int, parsed: bool) -> Iterator[tuple[str, Part]]:
    item = -1 if event.item is None else event.item
    start, end = event.span or (-1, -1)
    receiver = event.to if isinstance(event, Message | Delegate) else None
    if isinstance(event, ToolCall):
        yield "tool_call", Part(row, event.seq, item, start, end, event.tool, None, np.nan)
    if isinstance(event, Message):
        yield "message", Part(row, event.seq, item, start, end, event.channel, receiver, np.nan)
    if not parsed and isinstance(event, Spawn | Delegate | Message | Aggregate | Stop):
        yield "decision", Part(row, event.seq, item, start, end, event.kind, receiver, np.nan)


def packed(kind: str, rows: int, parts: Iterable[Part]) -> Units:
    """Parts of one kind as arrays."""
    listed = list(parts)
    columns = list(zip(*listed, strict=True)) if listed else [()] * len(Part._fields)
    held = dict(zip(Part._fields, columns, strict=True))
    label, labels = _coded(held["label"])
    receiver, receivers = _coded(held["receiver"])

    def whole(name: str) -> Ints:
        return np.array(held[name], dtype=np.int64)

    return Units(
        kind=kind,
        rows=rows,
        row=whole("row"),
        seq=whole("seq"),
        item=whole("item"),
        start=whole("start"),
        end=whole("end"),
        label=label,
        receiver=receiver,
        logprob=np.array(held["logprob"], dtype=np.float64),
        names={"label": labels, "receiver": receivers},
    )


def _coded(values: tuple[Any, ...]) -> tuple[Ints, tuple[Any, ...]]:
    """Codes of labels, −1 for None."""
    texts = tuple(dict.fromkeys(value for value in values if value is not None))
    number = {None: -1, **{text: code for code, text in enumerate(texts)}}
    return np.fromiter(map(number.__getitem__, values), np.int64, len(values)), texts


# ---------------------------------------------------------------------------------------------
# Asking for a kind


def units_of(
    kind: str,
    parts: Mapping[str, Units],
    event: Ints | None,
    rollout: Ints,
    labels: Ints | None,
    names: tuple[Any, ...],
) -> Units:
    """The units of a kind, as `Steps.units` gives them.

    Args:
        kind: one of `vocabulary.UNITS`.
        parts: what `packed` made of the traces, by kind; tokens as runs.
        event: (rows, 2) index of the trace and seq of each turn's act, if there are traces.
        rollout: (rows,) which rollout a turn belongs to.
        labels: (rows,) codes of its agent or role; None for the team.
        names: the texts behind them.

    Raises:
        Refused: no such kind; a part of a turn, where there are no traces to know it from.
    """
    if kind not in UNITS:
        raise Refused(f"there is no unit {kind!r}; the units are {', '.join(UNITS)}")
    rows = len(rollout)
    if kind == "turn":
        return _bare(kind, rows, np.arange(rows), event)
    if kind in TOGETHER:
        of = rollout if labels is None else groups.pair(rollout, labels)
        first = groups.first_of(of, np.arange(rows))
        found = _bare(kind, rows, first, None)
        label = found.label if labels is None else labels[first]
        return replace(found, of=of, label=label, names={"label": names})
    if kind not in parts:
        raise Refused(
            f"columns do not tell which {kind}s a turn has; make the steps by from_traces"
        )
    return _single(parts[kind]) if kind == "token" else parts[kind]


def _bare(kind: str, rows: int, row: Ints, event: Ints | None) -> Units:
    none = np.full(len(row), -1, dtype=np.int64)
    seq = none if event is None else event[row, 1]
    nan = np.full(len(row), np.nan)
    return Units(kind, rows, row, seq, none, none, none, none, none, nan)


def _single(runs: Units) -> Units:
    """Every token of the runs as a unit of its own."""
    size = runs.end - runs.start
    of = np.repeat(np.arange(len(runs)), size)
    place = np.arange(len(of)) - (np.cumsum(size) - size)[of] + runs.start[of]
    none, nan = np.full(len(of), -1, dtype=np.int64), np.full(len(of), np.nan)
    row, seq, item = runs.row[of], runs.seq[of], runs.item[of]
    return Units("token", runs.rows, row, seq, item, place, place + 1, none, none, nan)
