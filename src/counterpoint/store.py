"""The door inwards: bytes of a file become records, and records become traces.

`records` reads line by line and reports every line that cannot be read (rules V01 and V02);
`assemble` gathers lines into traces and hands each one out as soon as its seal is seen, so memory
grows with the traces that are open, not with the file.
"""

from __future__ import annotations

import difflib
import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, Raw, Struct

from counterpoint.schema import (
    KINDS,
    LINES,
    Act,
    AnyEvent,
    CreditEntry,
    Event,
    Finding,
    Header,
    LateReward,
    Line,
    Seal,
    Trace,
    decode,
    encode,
)
from counterpoint.spelling import CANONICAL, MAX_DEPTH, PLAIN, Refused, digest_of, escape_surrogates

MAX_LINE = 64 << 20
"""Longest line in bytes; longer content belongs in a side file."""

_CHUNK = 1 << 20
_SIDE = b'{"$file":'
_WITH_PAYLOAD: list[type[Struct]] = [*KINDS.values(), CreditEntry]
_PAYLOADS: dict[type[Struct], str | None] = {
    cls: next((f for f in cls.__struct_fields__ if f.endswith("_raw")), None)
    for cls in _WITH_PAYLOAD
}


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
    not parse is called incomplete: it may still be being written. Raises Refused if `path` is no
    readable file.
    """
    found = [] if findings is None else findings
    path, name = Path(path), str(path)
    number, offset = 0, 0
    for piece, ended in _pieces(path, found):
        lines = piece.split(b"\n")
        if ended:
            lines.pop()
        for raw in lines:
            number += 1
            try:
                record = decode(raw)
                if encode(record) != raw or not _sound(record):
                    record = _respell(raw)
            except (Fault, msgspec.MsgspecError, RecursionError, UnicodeError):
                line = raw.strip(b"\r \t").removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")
                if not line:
                    offset += len(raw) + 1
                    continue
                try:
                    record = _respell(line)
                except Fault as fault:
                    found.append(_finding(fault, raw, name, number, offset, ended))
                    offset += len(raw) + 1
                    continue
            yield Record(number, record)
            offset += len(raw) + 1


def _pieces(path: Path, findings: list[Finding]) -> Iterator[tuple[bytes, bool]]:
    """Whole lines in pieces of about a mebibyte; the flag is False for a last line with no end."""
    try:
        with _open(path) as file:
            rest = b""
            while chunk := _chunk(file, path, findings):
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield rest + chunk[:cut], True
                    rest = chunk[cut:]
                else:
                    rest += chunk
                if len(rest) > MAX_LINE:
                    raise Refused(f"{path} holds a line longer than {MAX_LINE} bytes")
            if rest:
                yield rest, False
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[bytes]:
    file = path.open("rb")
    if file.read(2) == b"\x1f\x8b":
        file.close()
        return cast(IO[bytes], gzip.open(path, "rb"))
    file.seek(0)
    return file


def _chunk(file: IO[bytes], path: Path, findings: list[Finding]) -> bytes:
    try:
        return file.read(_CHUNK)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"the gzip stream is damaged or cut short: {error}"
        findings.append(Finding(rule="V01", message=message, file=str(path)))
        return b""


def _sound(record: Line) -> bool:
    """Whether the payload decodes and is spelled canonically; the typed decoder skips payloads."""
    name = _PAYLOADS.get(type(record))
    if name is not None:
        raw = getattr(record, name)
        if raw is not UNSET and not _sound_payload(raw):
            return False
    if type(record) is Act:
        for item in record.items:
            if item.content_raw is not UNSET and not _sound_payload(item.content_raw):
                return False
    elif type(record) is Header:
        return all(
            raw is UNSET or _sound_payload(raw) for raw in (record.meta_raw, record.config_raw)
        )
    return True


_LONG_INTEGER = re.compile(rb"\d{19}")
"""Where an integer of over 64 bits may stand, which the fast decoder lets through."""


def _sound_payload(raw: Raw) -> bool:
    text = bytes(raw)
    if text[:1] != b'"' and _LONG_INTEGER.search(text):
        return False
    return CANONICAL.encode(PLAIN.decode(text)) == text and (
        text.count(b"[") + text.count(b"{") <= MAX_DEPTH
    )


# ---------------------------------------------------------------------------------------------
# The slow path: a line in another spelling, or one with a fault to be named


def _respell(line: bytes) -> Line:
    """Read a line that is not spelled canonically, or raise the Fault that says why not."""
    value = _strict_json(line)
    if not isinstance(value, dict):
        raise Fault("V01", f"a line holds one JSON object, this one holds a {type(value).__name__}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in LINES:
        close = difflib.get_close_matches(str(kind), LINES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise Fault("V02", f"`type` is {_short(kind)}, which is no kind of line{hint}", "type")
    known = LINES[kind].__struct_encode_fields__
    for key in value:
        if key != "type" and key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Fault("V02", f"{kind} has no field {_short(key)}{hint}", key)
    try:
        return decode(CANONICAL.encode(escape_surrogates(value)))
    except msgspec.MsgspecError as error:
        message, _, path = str(error).partition(" - at `$.")
        place = path.rstrip("`") or None
        raise Fault("V02", f"{place or kind}: {message[:1].lower()}{message[1:]}", place) from None
    except OverflowError:
        raise Fault("V01", "an integer needs more than 64 bits") from None


def _strict_json(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise Fault("V01", f"byte {line[error.start]:#04x} at {error.start} is not UTF-8") from None
    if _nesting(text) > MAX_DEPTH:
        raise Fault("V01", f"nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_int64,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as error:
        raise Fault("V01", f"not JSON: {error.msg.lower()} at character {error.pos}") from None


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?')


def _nesting(text: str) -> int:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return 0
    deepest = level = 0
    for character in _QUOTED.sub("", text):
        if character in "[{":
            level += 1
            deepest = max(deepest, level)
        elif character in "]}":
            level -= 1
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Fault("V01", f"the key {_short(twice)} stands twice in one object", twice)
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


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _finding(fault: Fault, raw: bytes, file: str, number: int, offset: int, ended: bool) -> Finding:
    message = fault.message
    if fault.rule == "V01":
        message = f"{message} (line starts at byte {offset})"
    if not ended:
        message = f"incomplete last line, it may still be being written: {message}"
    trace_id, seq = _identify(raw)
    return Finding(
        rule=fault.rule,
        message=message,
        file=file,
        line=number,
        trace_id=trace_id,
        seq=seq,
        field=fault.field,
    )


_TRACE_ID = re.compile(rb'"trace_id":\s?"([^"\\]{1,200})"')
_SEQ = re.compile(rb'"seq":\s?(\d{1,18})')


def _identify(raw: bytes) -> tuple[str | None, int | None]:
    """Best guess of which event an unreadable line was."""
    trace_id, seq = _TRACE_ID.search(raw), _SEQ.search(raw)
    return (
        trace_id.group(1).decode(errors="replace") if trace_id else None,
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

    A line of a trace that has no header is dropped with one finding for the whole trace; a line
    after a trace's seal breaks V13; a side file that is missing or altered breaks V02. Late
    rewards and credit lines are not part of a trace and are passed over (see `side_records`).
    """
    found = [] if findings is None else findings
    file = str(path)
    open_traces: dict[str, _Open] = {}
    headless: set[str] = set()
    sealed: set[str] = set()
    for number, value in records(path, found):
        if isinstance(value, Event):
            held = open_traces.get(value.trace_id)
            if held is not None:
                held.events.append(value)
                held.lines.append(number)
                name = _PAYLOADS[type(value)]
                if name is not None:
                    _check_side_file(Path(path), value, getattr(value, name), number, found)
            elif value.trace_id in sealed:
                found.append(_after_seal(file, number, value.trace_id, value.seq))
            elif value.trace_id not in headless:
                headless.add(value.trace_id)
                message = "no readable header opens this trace; its lines are left out"
                found.append(
                    Finding(
                        rule="V02", message=message, file=file, line=number, trace_id=value.trace_id
                    )
                )
        elif isinstance(value, Header):
            if value.trace_id in sealed:
                found.append(_after_seal(file, number, value.trace_id, None))
            elif value.trace_id in open_traces:
                message = "a second header for this trace; the first is kept"
                found.append(
                    Finding(
                        rule="V02", message=message, file=file, line=number, trace_id=value.trace_id
                    )
                )
            else:
                open_traces[value.trace_id] = _Open(value)
        elif isinstance(value, Seal):
            if value.trace_id in open_traces:
                sealed.add(value.trace_id)
                yield open_traces.pop(value.trace_id).close(file, value)
            elif value.trace_id in sealed:
                found.append(_after_seal(file, number, value.trace_id, None))
    for held in open_traces.values():
        yield held.close(file, None)


def side_records(path: str | Path, findings: list[Finding] | None = None) -> Iterator[Any]:
    """Yield the late rewards and credit entries of a file beside a trace."""
    for _, value in records(path, findings):
        if isinstance(value, LateReward | CreditEntry):
            yield value


def _after_seal(file: str, line: int, trace_id: str, seq: int | None) -> Finding:
    message = "a line of this trace stands after its seal; it is left out"
    return Finding(rule="V13", message=message, file=file, line=line, trace_id=trace_id, seq=seq)


# ---------------------------------------------------------------------------------------------
# Side files: content over a mebibyte, stored by digest


def side_folder(path: Path) -> Path:
    """The folder that holds a trace file's large contents."""
    return path.with_name(path.name.removesuffix(".gz") + ".files")


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


def _check_side_file(
    path: Path, event: Event, raw: Any, line: int, findings: list[Finding]
) -> None:
    if raw is UNSET or bytes(raw[:9] if isinstance(raw, bytes) else memoryview(raw)[:9]) != _SIDE:
        return
    try:
        side_content(path, PLAIN.decode(raw))
    except Refused as refusal:
        findings.append(
            Finding(
                rule="V02",
                message=str(refusal),
                file=str(path),
                line=line,
                trace_id=event.trace_id,
                seq=event.seq,
                field="content",
            )
        )
