"""The door inwards: bytes of a file become records, and records become traces.

`records` reads whole pieces at once where every line is spelled as we spell it, else line by line,
and reports every line that cannot be read (rules V01 and V02); `read_file` gathers lines into
traces and hands each one out as soon as its seal is seen, so memory grows with the traces that are
open, not with the file.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw

from counterpoint.schema import (
    LINES,
    Act,
    AnyEvent,
    CreditEntry,
    Event,
    Finding,
    Header,
    LateReward,
    Line,
    Part,
    Seal,
    Trace,
    decode,
    encode,
)
from counterpoint.spelling import (
    CANONICAL,
    MAX_DEPTH,
    MAX_LINE,
    PLAIN,
    SIDE,
    Refused,
    canonical,
    deeper,
    digest_of,
    escape_surrogates,
    side_folder,
)

_CHUNK = 1 << 18
_BOM = b"\xef\xbb\xbf"
_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
PAYLOADS = {
    cls: tuple(name for name in cls.__struct_fields__ if name.endswith("_raw"))
    for cls in LINES.values()
}
"""The fields of each kind of line that hold payloads."""


class Record(NamedTuple):
    """One readable line: its number from 1, and what it says."""

    line: int
    value: Line


class Fault(Exception):
    """Why a line cannot be read: the rule it breaks, the field if one is to blame, a sentence."""

    def __init__(self, rule: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.rule, self.message, self.field = rule, message, field


def records(path: str | Path, findings: list[Finding] | None = None) -> Iterator[Record]:
    """Read one file (plain or gzip) record by record; lines that cannot be read go to `findings`.

    A byte-order mark, CRLF and blank lines are accepted. A last line without a newline that does
    not parse is called incomplete: it may still be being written. A side file that is missing or
    altered is a finding too, and its event is read. Raises Refused if `path` is no readable file.
    """
    for numbered in _numbered(Path(path), [] if findings is None else findings):
        yield from map(Record._make, numbered)


def payloads(lines: Iterable[Line]) -> list[Raw]:
    """Every payload that some lines hold, those of an act's items included."""
    found = [getattr(line, name) for line in lines for name in PAYLOADS[type(line)]]
    found += [item.content_raw for line in lines if type(line) is Act for item in line.items]
    return [raw for raw in found if raw is not UNSET]


def _numbered(path: Path, found: list[Finding]) -> Iterator[Iterable[tuple[int, Line]]]:
    """The readable lines of one piece after the other, with their numbers."""
    for piece in _pieces(path, found):
        lines = _all_at_once(piece)
        yield _one_by_one(piece, path, found) if lines is None else zip(count(piece.line), lines)


def _all_at_once(piece: _Piece) -> list[Line] | None:
    """The lines of a piece, or None if it holds one that must be looked at by itself."""
    if not piece.ended or len(piece.data) > MAX_LINE or SIDE in piece.data:
        return None
    try:
        lines = _LINES.decode_lines(piece.data)
        same = CANONICAL.encode_lines(lines) == piece.data
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    # The typed decoder skips payloads without looking
    return lines if same and canonical(payloads(lines)) else None


def _one_by_one(piece: _Piece, path: Path, found: list[Finding]) -> Iterator[tuple[int, Line]]:
    offset = piece.offset
    for number, raw in enumerate(piece.data.removesuffix(b"\n").split(b"\n"), piece.line):
        text = raw.removeprefix(_BOM if number == 1 else b"").strip(b" \t\r")
        try:
            if text:
                line = _readable(text)
                if SIDE in text:
                    found += _side_findings(path, number, line)
                yield number, line
        except Fault as fault:
            found.append(_finding(fault, raw, path, number, offset, piece.ended))
        offset += len(raw) + 1


def _readable(text: bytes) -> Line:
    """One line, or the Fault that says why not."""
    if len(text) > MAX_LINE:
        raise _too_long(len(text))
    try:
        line = decode(text)
        if encode(line) == text and canonical(payloads([line])):
            return line
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        pass
    return _respell(text)


# ---------------------------------------------------------------------------------------------
# Bytes become pieces of whole lines


class _Piece(NamedTuple):
    """Whole lines: number and byte offset of the first; `ended` is False for a line with no end."""

    data: bytes
    line: int
    offset: int
    ended: bool = True


def _pieces(path: Path, found: list[Finding]) -> Iterator[_Piece]:
    """Cut a file into pieces of whole lines; a line over the limit is reported and left out."""
    line, offset, over, rest = 1, 0, 0, bytearray()
    for chunk in _chunks(path, found):
        if over:
            tail, newline, chunk = chunk.partition(b"\n")
            over += len(tail)
            if not newline:
                continue
            found.append(_finding(_too_long(over), b"", path, line, offset, ended=True))
            line, offset, over = line + 1, offset + over + 1, 0
        cut = chunk.rfind(b"\n") + 1
        if cut:
            data = b"".join((rest, memoryview(chunk)[:cut]))
            yield _Piece(data, line, offset)
            line, offset = line + data.count(b"\n"), offset + len(data)
            rest = bytearray()
        rest += memoryview(chunk)[cut:]
        if len(rest) > MAX_LINE:
            over, rest = len(rest), bytearray()
    if over:
        found.append(_finding(_too_long(over), b"", path, line, offset, ended=False))
    elif rest:
        yield _Piece(bytes(rest), line, offset, ended=False)


def _chunks(path: Path, found: list[Finding]) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            while chunk := file.read1(_CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"the gzip stream is damaged or cut short: {error}"
        found.append(Finding(rule="V01", message=message, file=str(path)))
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    file = path.open("rb")
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    file.close()
    return gzip.open(path, "rb")


# ---------------------------------------------------------------------------------------------
# The slow path: a line in another spelling, or one with a fault to be named


def _respell(text: bytes) -> Line:
    """Read a line that is not spelled canonically, or raise the Fault that says why not."""
    value = _strict_json(text)
    if not isinstance(value, dict):
        raise Fault("V01", f"a line holds one JSON object, this one holds a {type(value).__name__}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in LINES:
        hint = _nearest(str(kind), tuple(LINES))
        raise Fault("V02", f"`type` is {_short(kind)}, which is no kind of line{hint}", "type")
    known = ("type", *LINES[kind].__struct_encode_fields__)
    for key in value:
        if key not in known:
            message = f"{kind} has no field {_short(key)}{_nearest(key, tuple(known))}"
            raise Fault("V02", message, _short(key)[1:-1])
    try:
        return decode(CANONICAL.encode(escape_surrogates(value)))
    except msgspec.MsgspecError as error:
        raise _type_fault(kind, str(error)) from None
    except Refused as refusal:
        raise Fault("V01", str(refusal)) from None


def _type_fault(kind: str, error: str) -> Fault:
    """Name the field in a sentence of the decoder: where it looked, or what it missed there."""
    message, _, place = error.partition(" - at `$")
    place = place.strip(".`")
    hint = ""
    if missing := re.search(r"required field `(\w+)`", message):
        place = f"{place}.{missing[1]}".strip(".")
    elif unknown := re.search(r"unknown field `(.*)`", message):
        names = [n for part in Part.__subclasses__() for n in part.__struct_encode_fields__]
        hint = _nearest(unknown[1], tuple(names))
    plain = message[:1].lower() + ascii(message[1:])[1:-1]
    return Fault("V02", f"{place or kind}: {plain[:200]}{hint}", place or None)


@lru_cache(maxsize=1024)  # a file of one fault a million times asks one question
def _nearest(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name[:60], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _strict_json(text: bytes) -> Any:
    deep = Fault("V01", f"nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_int64,
            parse_float=_finite_float,
        )
    except UnicodeDecodeError as error:
        raise Fault("V01", f"byte {text[error.start]:#04x} at {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Fault("V01", f"not JSON: {error.msg.lower()} at character {error.pos}") from None
    except RecursionError:
        raise deep from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and deeper(text, MAX_DEPTH):
        raise deep
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in out if keys.count(key) > 1)
        raise Fault(
            "V01", f"the key {_short(twice)} stands twice in one object", _short(twice)[1:-1]
        )
    return out


def _no_constant(name: str) -> Any:
    raise Fault("V01", f"{name} is no JSON number")


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (value := int(digits)) < 1 << 64:
        raise Fault("V01", f"the integer {digits[:24]} needs more than 64 bits")
    return value


def _finite_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise Fault("V01", f"the number {digits[:24]} is not finite")
    return value


def _too_long(size: int) -> Fault:
    return Fault(
        "V01", f"{size} bytes on one line, over {MAX_LINE}: long content goes to side files"
    )


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


def _finding(
    fault: Fault, raw: bytes, path: Path, number: int, offset: int, ended: bool
) -> Finding:
    message = fault.message
    if fault.rule == "V01":
        message = f"{message} (line starts at byte {offset})"
    if not ended:
        message = f"incomplete last line, it may still be being written: {message}"
    trace_id, seq = _identify(raw)
    return Finding(
        rule=fault.rule,
        message=message,
        file=str(path),
        line=number,
        trace_id=trace_id,
        seq=seq,
        field=fault.field,
    )


_TRACE_ID = re.compile(rb'"trace_id":\s?"([ !#-\[\]-~]{1,200})"')
_SEQ = re.compile(rb'"seq":\s?(\d{1,18})')


def _identify(raw: bytes) -> tuple[str | None, int | None]:
    """Best guess of which event an unreadable line was."""
    trace_id, seq = _TRACE_ID.search(raw), _SEQ.search(raw)
    return (
        trace_id.group(1).decode() if trace_id else None,
        int(seq.group(1)) if seq else None,
    )


# ---------------------------------------------------------------------------------------------
# Lines become traces


class _Open:
    """A trace whose seal has not been seen."""

    __slots__ = ("events", "header", "lines")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.events: list[AnyEvent] = []
        self.lines = array("q")

    def close(self, file: str, seal: Seal | None) -> Trace:
        return Trace(self.header, tuple(self.events), seal, file, self.lines)


def read_file(path: str | Path, findings: list[Finding] | None = None) -> Iterator[Trace]:
    """Yield the traces of one file of ours, each when its seal is read, the unsealed ones last.

    Lines of a trace that has no header are dropped with one finding for the whole trace; a line
    after a trace's seal breaks V13. Late rewards and credit lines are not part of a trace and are
    passed over (see `side_records`). What `records` finds is found here too.
    """
    found = [] if findings is None else findings
    file = str(path)
    open_traces: dict[str, _Open] = {}
    closed: dict[str, str] = {}
    for number, value in chain.from_iterable(_numbered(Path(path), found)):
        if isinstance(value, Event):
            held = open_traces.get(value.trace_id)
            if held is not None:
                held.events.append(value)
                held.lines.append(number)
                continue
        elif isinstance(value, Header):
            if value.trace_id not in open_traces and closed.get(value.trace_id) != "sealed":
                open_traces[value.trace_id] = _Open(value)
                continue
        elif isinstance(value, Seal):
            held = open_traces.pop(value.trace_id, None)
            if held is not None:
                closed[value.trace_id] = "sealed"
                yield held.close(file, value)
                continue
        else:
            continue
        found += _stray(value, file, number, closed)
    for held in open_traces.values():
        yield held.close(file, None)


def _stray(
    value: Header | AnyEvent | Seal, file: str, line: int, closed: dict[str, str]
) -> list[Finding]:
    """A line that belongs to no open trace: after the seal, a second header, or without one."""
    state = closed.get(value.trace_id)
    if state == "sealed":
        rule, message = "V13", "a line of this trace stands after its seal; it is left out"
    elif isinstance(value, Header):
        rule, message = "V02", "a second header for this trace; the first is kept"
    elif state is None:
        closed[value.trace_id] = "headless"
        rule, message = "V02", "no readable header opens this trace; its lines are left out"
    else:
        return []
    seq = value.seq if state and isinstance(value, Event) else None
    trace_id = value.trace_id
    return [Finding(rule=rule, message=message, file=file, line=line, trace_id=trace_id, seq=seq)]


def side_records(path: str | Path) -> Iterator[LateReward | CreditEntry]:
    """Yield the late rewards and credit entries of a file beside a trace."""
    for _, value in records(path):
        if isinstance(value, LateReward | CreditEntry):
            yield value


# ---------------------------------------------------------------------------------------------
# Side files: content over a mebibyte, stored by digest


def side_content(path: str | Path, reference: dict[str, Any]) -> Any:
    """Load the content that ``{"$file": digest, "bytes": n}`` stands for, from beside `path`.

    Raises Refused if the side file is missing or its bytes do not have that digest.
    """
    digest = str(reference.get("$file"))
    if not re.fullmatch(r"[0-9a-f]{32}", digest):
        raise Refused(f"{_short(digest)} is no digest of a side file")
    place = side_folder(Path(path)) / digest
    try:
        data = place.read_bytes()
    except OSError as error:
        raise Refused(f"the side file {place} cannot be read: {error.strerror}") from None
    if digest_of(data).hex() != digest:
        raise Refused(f"the side file {place} does not hold the bytes that its name promises")
    return PLAIN.decode(data)


def _side_findings(path: Path, number: int, line: Line) -> Iterator[Finding]:
    for raw in payloads([line]):
        if not bytes(raw).startswith(SIDE):
            continue
        try:
            side_content(path, PLAIN.decode(raw))
        except Refused as refusal:
            yield Finding(
                rule="V02",
                message=str(refusal),
                file=str(path),
                line=number,
                trace_id=line.trace_id,
                seq=getattr(line, "seq", None),
                field="content",
            )
