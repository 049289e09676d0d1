"""The door outwards: an append-only file with one owner, and whole files written at once."""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from counterpoint.schema import Line, Trace, encode
from counterpoint.spelling import Refused

Sync = Literal["trace", "write", "disk"]

_LINES_PER_DISK_SYNC = 64


class AppendOnly:
    """A file that this process alone appends to, by one `os.write` per call.

    In an existing folder it makes a new file with a name of its own. If the file ends in a torn
    line, the first append ends that line; the piece stays, as one unreadable line.

    Raises:
        Refused: another process or object owns the file, or it cannot be written.
    """

    def __init__(self, path: Path, sync: Sync) -> None:
        if sync not in ("trace", "write", "disk"):
            raise Refused(f"sync is {sync!r}; it is 'trace', 'write' or 'disk'")
        self.path = path / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl" if path.is_dir() else path
        self.sync = sync
        self._lock = threading.Lock()
        self._unsynced = 0
        self._file = _own(self.path)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def append(self, lines: bytes, sealed: bool) -> None:
        """Write whole lines, or raise OSError and leave what was written before intact.

        With sync "disk" they are forced to the disk every 64 calls, and when `sealed`.
        """
        with self._lock:
            if self._file < 0:
                raise Refused(f"the recorder of {self.path} is closed")
            data = b"\n" + lines if self._torn else lines
            while os.write(self._file, data) < len(data):
                self._torn = True  # a short write: end the torn line, then write it whole
                data = b"\n" + lines
            self._torn = False
            if self.sync == "disk":
                self._unsynced += 1
                if sealed or self._unsynced >= _LINES_PER_DISK_SYNC:
                    os.fdatasync(self._file)
                    self._unsynced = 0

    def close(self) -> None:
        """Force what is pending to the disk if that was asked for, and give the file back."""
        with self._lock:
            if self._file >= 0:
                if self.sync == "disk":
                    os.fdatasync(self._file)
                os.close(self._file)
                self._file = -1


def _own(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise Refused(
            f"another recorder owns {path}; give each its own file in one folder"
        ) from None
    return file


def trace_lines(trace: Trace) -> Iterator[Line]:
    """The lines of a trace in their order: header, events, and the seal if there is one."""
    yield trace.header
    yield from trace.events
    if trace.seal is not None:
        yield trace.seal


def save(
    path: str | Path, lines: Iterable[Line], *, append: bool = False, force: bool = False
) -> None:
    """Write lines to a file, all of them or none.

    An existing file is refused unless `append` (the lines are added at its end) or `force` (it is
    replaced when everything is written).
    """
    if append and Path(path).exists():
        spelled = b"".join(encode(line) + b"\n" for line in lines)
        store = AppendOnly(Path(path), "trace")
        store.append(spelled, sealed=True)
        store.close()
        return
    with whole_file(path, force=force or append) as file:
        for line in lines:
            file.write(encode(line) + b"\n")


@contextmanager
def whole_file(path: str | Path, *, force: bool = False) -> Iterator[IO[bytes]]:
    """Open a draft that takes its name only when the block ends well; until then nothing changes.

    Raises:
        Refused: the file exists and `force` is not set, or its folder cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise Refused(f"{path} is a folder; name a file in it")
    if path.exists() and not force:
        raise Refused(f"{path} exists; choose another name, or say --force to replace it")
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.draft")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
