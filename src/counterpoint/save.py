"""The door outwards for whole files: all of it appears under its name, or nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from counterpoint.append import AppendOnly
from counterpoint.schema import Line, Trace, encode
from counterpoint.spelling import Refused


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
    if Path(path).suffix == ".gz":
        raise Refused(f"{path} would be compressed, which is not done here; gzip it after")
    if append and Path(path).exists():
        spelled = [encode(line) + b"\n" for line in lines]
        store = AppendOnly(Path(path), "write")
        try:
            store.append("", spelled, sealed=True)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror or error}") from None
        finally:
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
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise Refused(f"{path} is a link or a device and is never replaced; name a file")
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


def folder(path: str | Path) -> Path:
    """The folder of that name, made if there is none. Raises Refused if it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"the folder {path} cannot be made: {error.strerror or error}") from None
    return Path(path)
