"""The rule about trust: what an untrusted event may have reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from counterpoint.graph import TRUST_CODE
from counterpoint.groups import Bools, Ints
from counterpoint.schema import AnyEvent, Finding, Intervene, Reward, Safety
from counterpoint.validate.chunk import Chunk
from counterpoint.vocabulary import EXECUTED, TRUST


def untainted(chunk: Chunk) -> Iterator[Finding]:
    """V10: nothing labelled trusted or human descends from something untrusted.

    Taint runs forward along every edge but inferred `order`, from each event labelled untrusted,
    and only a `safety: declassified` event ends it. Two labels may stand above their causes: a
    human's own text (`intervene` labelled human) and an executed check (`reward`). They are no
    findings themselves, and so they must not hide what lies behind them: taint runs on through
    them. Any other event that claims more than its causes allow is a finding and taint stops there,
    so that one wrong label is one finding and not one for each event after it. In a fork the labels
    of the parent's events are not known here and count as unknown.
    """
    table = chunk.table
    claims = table.trust >= TRUST_CODE["human"]
    excused = _where(chunk, claims & chunk.among("intervene", "reward"), keeps_label)
    clears = _where(chunk, chunk.among("safety"), declassifies)
    judged = claims & ~excused & ~clears
    origin = _origins(chunk, ~clears & ~judged, judged)
    for row in np.flatnonzero((origin >= 0) & judged).tolist():
        source = chunk.events[origin[row]].seq
        message = f"labelled {TRUST[table.trust[row]]}, but it descends from {source}, untrusted"
        yield chunk.finding("V10", row, message, "trust")


def keeps_label(event: AnyEvent) -> bool:
    """Whether an event keeps its own label whatever its causes are (format, section Trust)."""
    if isinstance(event, Reward):
        return event.verifiable in EXECUTED
    return isinstance(event, Intervene) and event.trust == "human"


def declassifies(event: AnyEvent) -> bool:
    """Whether a checker has let the content behind it pass."""
    return isinstance(event, Safety) and event.effect == "declassified"


def _where(chunk: Chunk, rows: Bools, holds: Callable[[AnyEvent], bool]) -> Bools:
    out = rows.copy()
    out[rows] = [holds(chunk.events[row]) for row in np.flatnonzero(rows).tolist()]
    return out


def _origins(chunk: Chunk, passes: Bools, asked: Bools) -> Ints:
    """For each row an untrusted row that it descends from (itself if it is untrusted), or −1.

    One sweep in file order over the edges of those traces in which a label could be wrong.
    """
    table = chunk.table
    untrusted = table.trust == TRUST_CODE["untrusted"]
    origin = np.where(untrusted, chunk.rows(), -1)
    open_traces = np.zeros(len(chunk.traces), dtype=bool)
    open_traces[table.trace[asked]] = True
    doubtful = np.zeros(len(chunk.traces), dtype=bool)
    doubtful[table.trace[untrusted]] = True
    live = (table.cause >= 0) & (table.cause < table.effect) & ~table.order
    live &= passes[table.cause] & (open_traces & doubtful)[table.trace[table.effect]]
    found: list[int] = origin.tolist()
    for effect, cause in zip(table.effect[live].tolist(), table.cause[live].tolist(), strict=True):
        if found[effect] < 0:
            found[effect] = found[cause]
    return np.array(found, dtype=np.int64)
