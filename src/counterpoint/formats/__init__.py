"""Logs in and out: a format is two functions, and everything about files lives here, once.

`runs(data)` finds the runs in a parsed document, `to_trace(run, intake)` turns one into a trace; a
format that can be written has `lines(trace, tally)` as well. To add a format, write those and add a
row to the tables below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_args

from counterpoint.formats import intake as take
from counterpoint.formats import (
    mas_rl_v1,
    mas_rl_v1_out,
    openai_chat,
    verifiers,
    verifiers_out,
    who_and_when,
)
from counterpoint.formats.intake import UNREAD, Anchor, Intake, Rejected, Tally, trace_id_of
from counterpoint.formats.load import FOREIGN, OURS, documents, files
from counterpoint.save import trace_lines
from counterpoint.schema import CreditEntry, Finding, Trace, encode
from counterpoint.spelling import Refused
from counterpoint.store import read_file

__all__ = ["FORMATS", "Format", "Tally", "export", "read"]

Writer: TypeAlias = Callable[[Trace, Tally], Iterable[bytes]]


class Reader(NamedTuple):
    """How a foreign format is read: the runs in one parsed document, and one run as a trace.

    `to_trace` raises Rejected for a run that is none at all.
    """

    about: str
    runs: Callable[[Any], Iterable[Any]]
    to_trace: Callable[[Any, Intake], Trace]


class Format(NamedTuple):
    """One row of the list of formats."""

    about: str
    reads: bool
    writes: bool


def _own_lines(trace: Trace, tally: Tally) -> Iterator[bytes]:
    return map(encode, trace_lines(trace))


_READERS = {
    "openai_chat": Reader(openai_chat.ABOUT, openai_chat.runs, openai_chat.to_trace),
    "who_and_when": Reader(who_and_when.ABOUT, take.one_or_many, who_and_when.to_trace),
    "mas_rl_v1": Reader(mas_rl_v1.ABOUT, take.one_or_many, mas_rl_v1.to_trace),
    "verifiers": Reader(verifiers.ABOUT, take.one_or_many, verifiers.to_trace),
}
_WRITERS: dict[str, Writer] = {
    "counterpoint": _own_lines,
    "mas_rl_v1": mas_rl_v1_out.lines,
    "verifiers": verifiers_out.lines,
}

FORMATS: dict[str, Format] = {
    "counterpoint": Format("our own JSON Lines of typed events", reads=True, writes=True),
    **{
        name: Format(reader.about, reads=True, writes=name in _WRITERS)
        for name, reader in _READERS.items()
    },
}
"""Format → what it is, and whether it can be read and written."""


def read(
    path: str | Path,
    format: str | None = None,
    *,
    anchor: Anchor = "last_message",
    findings: list[Finding] | None = None,
    tally: Tally | None = None,
) -> Iterator[Trace]:
    """Read traces from a file, a folder or a glob, ours or foreign, one after another.

    A folder's files come in the order of the numbers in their names. A run gets the same id
    whenever it is imported; a second equal run of one call gets a suffix.

    Args:
        path: a file (plain or gzip), a folder, or a glob pattern.
        format: a name in `FORMATS`; None means our own.
        anchor: of foreign chats: what the key of an act digests, the `last_message` before it, the
            `last_tool` message before it, or the `history`.
        findings: receives what could not be read; everything else is kept.
        tally: receives what was read, made and left out.

    Raises:
        Refused: an unknown format or anchor, a path that is no readable file.
    """
    if format is not None and format not in FORMATS:
        raise Refused(f"there is no format {format!r} to read; there are {', '.join(FORMATS)}")
    if anchor not in get_args(Anchor):
        raise Refused(f"anchor is {anchor!r}; it is one of {', '.join(get_args(Anchor))}")
    found = [] if findings is None else findings
    counted = Tally() if tally is None else tally
    if format is None or format not in _READERS:
        return _ours(files(path, OURS), found, counted)
    return _foreign(format, files(path, FOREIGN), anchor, found, counted)


def _ours(paths: list[Path], findings: list[Finding], tally: Tally) -> Iterator[Trace]:
    for path in paths:
        for trace in read_file(path, findings):
            tally.records += len(trace.events)
            tally.add(trace)
            yield trace


def _foreign(
    format: str, paths: list[Path], anchor: Anchor, findings: list[Finding], tally: Tally
) -> Iterator[Trace]:
    reader, seen = _READERS[format], Counter[str]()
    for path in paths:
        number = -1
        for document in documents(path, findings):
            for run in reader.runs(document.data):
                number += 1
                if run is UNREAD:
                    continue
                trace_id = trace_id_of(format, run, seen)
                where = (str(path), document.line, number)
                intake = Intake(format, *where, trace_id, anchor, findings, tally)
                try:
                    trace = reader.to_trace(run, intake)
                except Rejected as fault:
                    intake.report("V02", str(fault), fault.place)
                    continue
                tally.add(trace)
                yield trace
        if number < 0:
            message = f"no run of format {format} is in this file"
            findings.append(Finding(rule="V02", message=message, file=str(path)))


def export(
    format: str,
    traces: Iterable[Trace],
    *,
    tally: Tally | None = None,
    credit: Iterable[CreditEntry] = (),
) -> Iterator[bytes]:
    """Write traces in a format, as lines that end in a newline.

    `mas_rl_v1` gives one document a line: for one trace that is a JSON file, for
    several it is JSON Lines.
    What the format cannot hold is counted in `tally.dropped`. Of the formats, `verifiers` has a
    place for the `credit` of turns, from a credit file.

    Raises:
        Refused: a format that cannot be written, credit in one that has no place for it, a trace
            that it cannot hold at all.
    """
    if format not in _WRITERS:
        raise Refused(f"there is no format {format!r} to write; there are {', '.join(_WRITERS)}")
    counted, given = Tally() if tally is None else tally, list(credit)
    writer = _WRITERS[format]
    if given and format != "verifiers":
        raise Refused(f"{format} has no place for credit; verifiers has, and trainers' rows have")
    if given:
        writer = partial(verifiers_out.lines, credit=verifiers_out.values_of(given, counted))
    return _lines(writer, traces, counted)


def _lines(writer: Writer, traces: Iterable[Trace], tally: Tally) -> Iterator[bytes]:
    for trace in traces:
        for line in writer(trace, tally):
            yield line + b"\n"
        tally.traces += 1
