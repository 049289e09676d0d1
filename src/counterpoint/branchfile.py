"""The branch file: outcomes of branches that were played, so that none is played twice.

One line for every question that was asked of a run (where, what was done, with which seed), named
by the digest of all that decides the answer. Each line bears its own digest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from counterpoint.append import AppendOnly
from counterpoint.branches import Branches, Spent
from counterpoint.groups import Floats
from counterpoint.spelling import CANONICAL, Refused, digest_of

Key: TypeAlias = tuple[Hashable, ...]
"""A question: its kind, the run, and whatever else decides the branches."""


class _Line(msgspec.Struct, kw_only=True, tag_field="type", tag="branches"):
    """Branches 0, 1, … of one question; None where one could not be run."""

    of: str
    values: list[float | None]
    leaves: list[int]
    drawn: list[int]
    critic: list[float | None]
    exact: bool
    digest: str = ""


_READ = msgspec.json.Decoder(_Line)


class BranchFile:
    """Remembers branches, and writes down at once each that is new.

    Args:
        path: a file, which is made when there is something to write; or a folder, in which every
            process writes a file of its own.

    Raises:
        Refused: a line is not what was written, or the file cannot be read or written; the sentence
            names file and line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = {line.of: _branches(line) for line in _lines(path)}
        self._store: AppendOnly | None = None

    def get(self, key: Key, /) -> Branches | None:
        """The branches of a question, if there are any."""
        return self._held.get(_named(key))

    def __setitem__(self, key: Key, found: Branches, /) -> None:
        """Keep the branches of a question, of which those known before are the first."""
        name = _named(key)
        self._held[name] = found
        if self._store is None:
            self._store = AppendOnly(self._path, "write")
        line = _line(name, found)
        line.digest = _digest(line)
        try:
            self._store.append("", [CANONICAL.encode(line) + b"\n"])
        except OSError as error:
            raise Refused(f"{self._path} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Give the file back."""
        if self._store is not None:
            self._store.close()


def _named(key: Key) -> str:
    parts = [sorted(part) if isinstance(part, frozenset) else part for part in key]
    return digest_of(CANONICAL.encode(parts)).hex()


def _lines(path: Path) -> Iterator[_Line]:
    """The lines of a file or of all files of a folder, a later one in place of an earlier."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.exists() else []
    for file in files:
        try:
            spelled = file.read_bytes().splitlines()
        except OSError as error:
            raise Refused(f"{file} cannot be read: {error.strerror or error}") from None
        for number, text in enumerate(spelled, 1):
            yield _read(text, f"{file}:{number}")


def _read(text: bytes, where: str) -> _Line:
    try:
        line = _READ.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        line = None
    if line is None or line.digest != _digest(line) or len({*map(len, _columns(line))}) != 1:
        raise Refused(
            f"{where} is no line of branches, or is torn or changed; take it out, and its branches "
            "are played again"
        )
    return line


def _columns(line: _Line) -> tuple[list[float | None] | list[int], ...]:
    return line.values, line.leaves, line.drawn, line.critic


def _digest(line: _Line) -> str:
    return digest_of(CANONICAL.encode(msgspec.structs.replace(line, digest=""))).hex()


def _line(name: str, found: Branches) -> _Line:
    return _Line(
        of=name,
        values=_spelled(found.values),
        leaves=found.leaves[0].tolist(),
        drawn=found.drawn[0].tolist(),
        critic=_spelled(found.critic),
        exact=found.exact,
    )


def _spelled(row: Floats) -> list[float | None]:
    return [None if np.isnan(value) else value for value in row[0].tolist()]


def _branches(line: _Line) -> Branches:
    return Branches.of(
        np.array([line.values], dtype=np.float64),
        Spent(),
        leaves=np.array([line.leaves], dtype=np.int64),
        drawn=np.array([line.drawn], dtype=np.int64),
        critic=np.array([line.critic], dtype=np.float64),
        exact=line.exact,
    )
