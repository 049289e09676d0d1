"""Files, folders and globs become parsed JSON; whatever cannot be parsed becomes a finding.

A document is a JSON file (plain or gzip), or one line of a JSON Lines file. Foreign logs are read
leniently where nothing is lost by it: a byte-order mark, a byte that is not UTF-8 (kept as a lone
surrogate, and reported), a list cut short (what was complete is kept).
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from counterpoint.formats.intake import UNREAD
from counterpoint.schema import Finding
from counterpoint.spelling import Refused

MAX_BYTES = 1 << 30
"""Most bytes that one foreign file may hold after decompression; it is parsed as a whole."""

FOREIGN = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
OURS = (".jsonl", ".jsonl.gz")

_CHUNK = 1 << 20
_DIGITS = re.compile(r"([0-9]+)")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{},]', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_BAD_BYTE = re.compile("[\udc80-\udcff]")


class Document(NamedTuple):
    """One parsed JSON value, and the line it stands on in a JSON Lines file."""

    line: int | None
    data: Any


def files(path: str | Path, endings: tuple[str, ...]) -> list[Path]:
    """The files that `path` means: itself, a folder's files with these endings, or a glob's.

    Numbers in names order by value (2.json before 10.json). Raises Refused if there are none.
    """
    place = Path(path)
    if place.is_dir():
        found = [p for p in place.iterdir() if p.name.endswith(endings) and p.is_file()]
        if not found:
            raise Refused(f"the folder {place} holds no file ending in {', '.join(endings)}")
    elif place.exists() or not glob.has_magic(str(path)):
        return [place]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        found = [p for p in found if p.is_file()]
        if not found:
            raise Refused(f"no file matches {path}")
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[str | int]:
    parts = _DIGITS.split(str(path))
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def documents(path: Path, findings: list[Finding]) -> Iterator[Document]:
    """Parse one file: a JSON document, or JSON Lines if it is called so or goes on after an object.

    Raises Refused if `path` is no readable file or larger than `MAX_BYTES`.
    """
    text = _text(path, findings)
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl") or (text.lstrip()[:1] == "{" and _goes_on(text)):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield from _document(line, number, str(path), findings)
    else:
        yield from _document(text, None, str(path), findings)


def _text(path: Path, findings: list[Finding]) -> str:
    data = _bytes(path, findings).removeprefix(b"\xef\xbb\xbf")
    text = data.decode("utf-8", "surrogateescape")
    bad = _BAD_BYTE.search(text)
    if bad:
        line = text.count("\n", 0, bad.start()) + 1
        count = len(_BAD_BYTE.findall(text))
        byte = ord(bad.group()) - 0xDC00
        message = f"{count} bytes are not UTF-8, the first is {byte:#04x}; kept as lone surrogates"
        findings.append(Finding(rule="V01", message=message, file=str(path), line=line))
    return text


def _bytes(path: Path, findings: list[Finding]) -> bytes:
    data = bytearray()
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if zipped else raw
            while chunk := file.read1(_CHUNK):  # read() would lose what precedes a cut
                data += chunk
                if len(data) > MAX_BYTES:
                    raise Refused(f"{path} holds more than {MAX_BYTES} bytes; split it into files")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"the gzip stream is damaged or cut short: {error}"
        findings.append(Finding(rule="V01", message=message, file=str(path)))
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from None
    return bytes(data)


# ---------------------------------------------------------------------------------------------
# JSON, element by element


def _whole(digits: str) -> int | float:
    """An integer; one too long to be any 64-bit number is not even converted."""
    return int(digits) if len(digits) < 400 else float("inf")


class _Parser:
    """Parses values out of one text and reports on them."""

    def __init__(self, text: str, line: int | None, file: str, findings: list[Finding]) -> None:
        self.text, self.line, self.file, self.findings = text, line, file, findings
        self._decoder = json.JSONDecoder(parse_int=_whole, object_pairs_hook=self._pairs)

    @cached_property
    def _newlines(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.text)]

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            self.report(f"the key {ascii(twice)[:60]} stands twice in one object; the last is kept")
        return out

    def report(self, message: str, at: int | None = None) -> None:
        line = self.line
        if line is None and at is not None:
            line = bisect(self._newlines, at) + 1
        self.findings.append(Finding(rule="V01", message=message, file=self.file, line=line))

    def value(self, at: int) -> tuple[Any, int]:
        """The value that starts at a character, and where it ends; UNREAD if it is no JSON."""
        try:
            return self._decoder.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            self.report(f"not JSON: {error.msg.lower()} at character {error.pos}", error.pos)
        except RecursionError:
            self.report(f"the value at character {at} is nested too deep", at)
        return UNREAD, _skipped(self.text, at)

    def document(self) -> Any:
        start = _after_space(self.text, 0)
        if self.text[start : start + 1] != "[":
            data, end = self.value(start)
        else:
            data, end = self._list(start)
        if data is not UNREAD and _after_space(self.text, end) < len(self.text):
            self.report(f"text after the end of the document at character {end} is left out", end)
        return data

    def _list(self, at: int) -> tuple[list[Any], int]:
        """The elements of a list one by one, so that a broken one costs only itself."""
        out: list[Any] = []
        at = _after_space(self.text, at + 1)
        if self.text[at : at + 1] == "]":
            return out, at + 1
        while at < len(self.text):
            value, end = self.value(at)
            out.append(value)
            end = _after_space(self.text, end)
            follows = self.text[end : end + 1]
            if follows == "]":
                return out, end + 1
            if follows != ",":
                break
            at = _after_space(self.text, end + 1)
        self.report(f"the list is cut short after {len(out)} elements", len(self.text))
        return out, len(self.text)


def _document(
    text: str, line: int | None, file: str, findings: list[Finding]
) -> Iterator[Document]:
    if not text.strip():
        findings.append(Finding(rule="V01", message="the file is empty", file=file, line=line))
        return
    data = _Parser(text, line, file, findings).document()
    if data is not UNREAD:
        yield Document(line, data)


def _goes_on(text: str) -> bool:
    """Whether something follows an object that ends on its first line: then it is JSON Lines."""
    start = _after_space(text, 0)
    ended = _skipped(text, start)
    return "\n" not in text[start:ended] and _after_space(text, ended) < len(text)


def _after_space(text: str, at: int) -> int:
    return cast(re.Match[str], _SPACE.match(text, at)).end()


def _skipped(text: str, at: int) -> int:
    """Where the value at `at` ends by its brackets alone, or by the comma after a bare word."""
    level = 0
    for token in _TOKEN.finditer(text, at):
        mark = token.group()
        if mark in "]}," and level == 0:
            return token.start()
        level += (mark in "[{") - (mark in "]}")
        if level == 0:
            return token.end()
    return len(text)
