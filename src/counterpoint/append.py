"""The pen: an append-only file with one owner, and the lines of one trace on their way into it.

Nothing is ever cut or rewritten. A line that was torn by a crash or a full disk stays as one
unreadable line; the next append starts on a new one.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from counterpoint.schema import (
    Act,
    AgentReturn,
    Cause,
    Delegate,
    Event,
    Header,
    Line,
    Message,
    Observe,
    Reward,
    Seal,
    Spawn,
    ToolCall,
    ToolResult,
    chain,
    encode,
    header_digest,
)
from counterpoint.spelling import (
    CANONICAL,
    MAX_LINE,
    SIDE,
    Payload,
    Refused,
    digest_of,
    freeze,
    side_folder,
)
from counterpoint.vocabulary import EdgeKind

E = TypeVar("E", bound=Event)
Sync = Literal["trace", "write", "disk"]

_READ = msgspec.json.Decoder(Line).decode
Cited: TypeAlias = Event | int
"""An earlier event, or its `seq`."""
Causes: TypeAlias = Iterable[Cited]
Ids: TypeAlias = str | Sequence[str]
"""One agent's id, or several."""
Links: TypeAlias = tuple[Cause, ...]

SIDE_FILE_OVER = 1 << 20
"""Bytes of content above which it goes to a side file."""


_ESCAPED = 6
"""Bytes of the longest spelling of a character."""

_EVENTS_PER_DISK_SYNC = 64
_ORDER = "inferred:order"
_INTERRUPTED = "was interrupted within a write, so its end is not known"


class AppendOnly:
    """A file that this process alone appends to, by one `os.write` per call.

    In an existing folder it makes a new file with a name of its own. With sync "trace" the lines
    of a trace wait in memory until its seal; with "disk" they are forced to the disk after at most
    64 of them and at the seal.

    Raises:
        Refused: another process or object owns the file, or it cannot be written.
    """

    def __init__(self, path: Path, sync: Sync) -> None:
        if sync not in ("trace", "write", "disk"):
            raise Refused(f"sync is {sync!r}; it is 'trace', 'write' or 'disk'")
        if path.suffix == ".gz":
            raise Refused(f"{path} would be compressed, which cannot be appended to; gzip it after")
        self.path = path / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl" if path.is_dir() else path
        self.sync = sync
        self.lock = threading.RLock()
        self._held: dict[str, list[bytes]] = {}
        self._unsynced = 0
        self._unsure = True  # whether the file ends in a newline
        self._file = _own(self.path)
        _OWNED.add(self)
        if sync == "disk":
            _force_folder(self.path.parent)

    def append(self, trace_id: str, lines: list[bytes], sealed: bool = False) -> None:
        """Keep whole lines of a trace; each is taken off the list once it is kept.

        Several threads take turns by holding `lock`.

        Raises:
            OSError: the disk refused. What is still on the list is not in the file and may be
                given again; all that was kept before is intact.
            Refused: the file was closed.
        """
        if self._file < 0:
            raise Refused(f"the recorder of {self.path} is closed, or is a parent process's")
        if self.sync != "trace":
            self._write(lines)
        elif sealed:
            self._write_with_held(trace_id, lines)
        else:
            self._held.setdefault(trace_id, []).extend(lines)
            lines.clear()
        if sealed and self.sync == "disk":
            self._force()

    def release(self, trace_id: str) -> None:
        """Write what waits of a trace that will have no seal."""
        with self.lock:
            if self._file >= 0:
                self._write_with_held(trace_id, [])

    def close(self) -> None:
        """Write what waits, force it to the disk if that was asked for, and give the file back."""
        with self.lock:
            if self._file < 0:
                return
            try:
                for trace_id in list(self._held):
                    self._write_with_held(trace_id, [])
                if self.sync == "disk":
                    self._force()
            finally:
                self.disown()

    def disown(self) -> None:
        """Close the descriptor; whatever is appended from now on is refused."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write_with_held(self, trace_id: str, lines: list[bytes]) -> None:
        """Write the waiting lines and then these; upon an error what is not in the file waits."""
        given, block = len(lines), [*self._held.pop(trace_id, []), *lines]
        try:
            self._write(block)
        except OSError:
            self._held[trace_id] = block[: max(0, len(block) - given)]
            lines[:] = block[len(self._held[trace_id]) :]
            raise
        lines.clear()

    def _write(self, lines: list[bytes]) -> None:
        if self.sync == "disk":
            self._make_room(len(lines))
        if self._unsure and _torn(self._file):
            os.write(self._file, b"\n")
        self._unsure, data, done = True, b"".join(lines), 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:
            # A line that lacks only its newline is in the file: the next write will end it
            del lines[: data[: done + 1].count(b"\n")]
            if lines:
                raise
        else:
            self._unsure = False
            lines.clear()

    def _make_room(self, lines: int) -> None:
        """Force the disk before more lines are at stake than were promised."""
        if self._unsynced + lines > _EVENTS_PER_DISK_SYNC:
            self._force()
        self._unsynced += lines

    def _force(self) -> None:
        os.fdatasync(self._file)
        self._unsynced = 0


def aside(folder: Path, data: bytes) -> dict[str, Any]:
    """Put content into a file of its own, named by its digest, and return what stands for it."""
    name = digest_of(data).hex()
    folder.mkdir(exist_ok=True)
    if not (folder / name).exists():
        draft = folder / f"{name}.{uuid.uuid4().hex}.draft"
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name)
        _force_folder(folder)
    return {"$file": name, "bytes": len(data)}


def _own(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if not isinstance(error, BlockingIOError):
            raise Refused(f"{path} cannot be locked: {error.strerror}") from None
        raise Refused(
            f"another recorder owns {path}; close it, or give each its own file in one folder"
        ) from None
    return file


def _torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _force_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_OWNED: weakref.WeakSet[AppendOnly] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the files are its parent's, and a child that lives on lets them go."""
    for store in list(_OWNED):
        store.lock = threading.RLock()
        store.disown()


os.register_at_fork(after_in_child=_leave_to_parent)


class TraceLog:
    """One trace on its way into a file: its events are checked, numbered, spelled and digested.

    An event counts as written once the file keeps its line; only then does `seq` advance. What is
    written is remembered as far as it supplies the causes that a caller leaves out.
    """

    def __init__(self, store: AppendOnly, header: Header) -> None:
        line, self.header = _spell(header)
        self._store = store
        self._lock = store.lock
        self._id = self.header.trace_id
        self._timed = self.header.started is not None
        self._digest = header_digest(self.header)
        self._first = self.header.fork.seq if self.header.fork else 0
        self._next = self._first
        self._kinds: Counter[str] = Counter()
        self._totals: dict[str, float] = {"tokens_in": 0, "tokens_out": 0, "cost_usd": 0.0}
        self._closed: str | None = None
        self._turns: dict[str, tuple[int, int]] = {}
        self._born: dict[str, int] = {}
        self._inbox: dict[str, list[int]] = {}
        self._calls: dict[int, str] = {}
        self._leaves: dict[int, None] = {}
        self._environment: int | None = None
        with self._lock:
            store.append(self._id, [line])

    def end(self) -> Seal:
        """Write the seal: nothing follows it.

        Raises:
            Refused: the trace has its seal already.
            OSError: the disk refused; you may try again.
        """
        with self._lock:
            if self._closed:
                raise Refused(f"trace {self._id} {self._closed}; open another trace")
            totals = {name: total for name, total in self._totals.items() if total}
            seal = Seal(
                trace_id=self._id,
                events=self._next - self._first,
                kinds=dict(self._kinds),
                digest=self._digest.hex(),
                **cast(Any, totals),
            )
            lines = [encode(seal) + b"\n"]
            try:
                self._closed = _INTERRUPTED
                self._store.append(self._id, lines, sealed=True)
            except (OSError, Refused):
                self._closed = "has its seal" if not lines else None
                raise
            self._closed = "has its seal"
            return seal

    def _event(self, event: E, links: Links) -> E:
        """Write an event with these causes."""
        with self._lock:
            return self._put(self._stamped(event, links))

    def _effect(self, event: E, links: Links) -> E:
        """Write something that an act brought about: it is authorised by the agent's last act."""
        with self._lock:
            act = self._last(event.agent)[1]
            own = () if act < 0 else (Cause(seq=act, kind="authorizes"),)
            return self._put(self._stamped(event, own + links))

    def _stamped(self, event: E, links: Links, after: int = 0) -> E:
        """The event as it stands in the trace; without a cause it follows the one before it."""
        seq = self._next + after
        if not links and seq > self._first:
            links = (Cause(seq=seq - 1, kind="precedes", basis=_ORDER),)
        return replace(
            event,
            trace_id=self._id,
            t_start=time.time() if self._timed else None,
            seq=seq,
            causes=links,
        )

    def _last(self, agent: str) -> tuple[int, int]:
        """An agent's last observation and act, −1 for none."""
        try:
            return self._turns.get(agent, (-1, -1))
        except TypeError:
            name = type(agent).__name__
            raise Refused(f"an agent is named by a string, not by a {name}") from None

    def _life(self, agent: str, acts: bool) -> Links:
        """What an agent's next turn follows: its last observation and act, else its birth.

        If it acts on an observation that was not acted on yet, the act derives from it.
        """
        seen, acted = self._last(agent)
        links = []
        if seen >= 0:
            links.append(Cause(seq=seen, kind="derives" if acts and seen > acted else "precedes"))
        if acted >= 0:
            links.append(Cause(seq=acted, kind="precedes"))
        if not links and agent in self._born:
            links.append(Cause(seq=self._born[agent], kind="spawns"))
        return tuple(links)

    def _links(self, kind: EdgeKind, causes: Causes, basis: str = "recorded") -> Links:
        if not causes:
            return ()
        try:
            return tuple([Cause(seq=self._seq(c), kind=kind, basis=basis) for c in causes])
        except TypeError:
            raise Refused("causes are a list of events; write [event] for one of them") from None

    def _seq(self, cited: Cited) -> int:
        here = self._id
        if isinstance(cited, Event) and (cited.trace_id == here or self.header.fork):
            cited = cited.seq
        if isinstance(cited, int) and 0 <= cited < self._next:
            return cited
        what = cited if isinstance(cited, int) else f"this {type(cited).__name__}"
        raise Refused(f"a cause is an earlier event of trace {here} or its seq, not {what}")

    def _payload(self, value: Any) -> Payload:
        """Freeze a value; over a mebibyte it goes to a side file and a reference stands for it.

        So does content that looks like such a reference, lest it be taken for one.
        """
        raw = freeze(value)
        if type(value) is str and len(value) * _ESCAPED < SIDE_FILE_OVER:
            return raw
        if raw is UNSET or (len(data := bytes(raw)) <= SIDE_FILE_OVER and data[:9] != SIDE):
            return raw
        return freeze(aside(side_folder(self._store.path), data))

    def _put(self, event: E, *, before: Event | None = None) -> E:
        """Write an event, or none if one could not be read back; return it as it will be read."""
        if self._closed:
            raise Refused(f"trace {self._id} {self._closed}; open another trace")
        ready = [_spell(event)] if before is None else [_spell(before), _spell(event)]
        lines = [line for line, _ in ready]
        self._closed = _INTERRUPTED
        failure: Exception | None = None
        try:
            self._store.append(self._id, lines)
        except (OSError, Refused) as error:
            failure = error
        for line, read in ready[: len(ready) - len(lines)]:
            self._note(line, read)
        self._closed = None
        if failure is not None:
            raise failure
        put: E = ready[-1][1]
        return put

    def _note(self, line: bytes, event: Event) -> None:
        """Take in an event that is written."""
        self._next = event.seq + 1
        self._digest = chain(self._digest, line[:-1])
        self._kinds[event.kind] += 1
        if event.tokens_in or event.tokens_out or event.cost_usd:
            for name in self._totals:
                self._totals[name] += getattr(event, name) or 0
        if type(event) is not Reward:
            for cause in event.causes:
                if cause.basis != _ORDER:  # mere order is no descent, and hides no end of the run
                    self._leaves.pop(cause.seq, None)
            self._leaves[event.seq] = None
        if remember := _MEMORY.get(type(event)):
            remember(self, event)

    def _observes(self, event: Observe) -> None:
        self._turns[event.agent] = (event.seq, self._last(event.agent)[1])
        self._inbox.pop(event.agent, None)

    def _acts(self, event: Act) -> None:
        self._turns[event.agent] = (self._last(event.agent)[0], event.seq)
        self._inbox.pop(event.agent, None)

    def _spawns(self, event: Spawn) -> None:
        self._born[event.child] = event.seq
        if event.context_raw is not UNSET:
            self._inbox.setdefault(event.child, []).append(event.seq)

    def _sends(self, event: Message | Delegate | AgentReturn) -> None:
        for receiver in event.to:
            self._inbox.setdefault(receiver, []).append(event.seq)

    def _calls_tool(self, event: ToolCall) -> None:
        self._calls[event.seq] = event.agent

    def _answers(self, event: ToolResult) -> None:
        caller = self._calls.pop(cast(int, event.call), event.agent)
        self._inbox.setdefault(caller, []).append(event.seq)
        self._environment = event.seq


_MEMORY: dict[type[Event], Callable[[TraceLog, Any], None]] = {
    Observe: TraceLog._observes,
    Act: TraceLog._acts,
    Spawn: TraceLog._spawns,
    Message: TraceLog._sends,
    Delegate: TraceLog._sends,
    AgentReturn: TraceLog._sends,
    ToolCall: TraceLog._calls_tool,
    ToolResult: TraceLog._answers,
}
"""What is remembered of an event, by kind."""


def _spell(record: Any) -> tuple[bytes, Any]:
    """A record's line, and what a reader will find in it: the same, or it is refused."""
    try:
        meant = CANONICAL.encode(record)
        read: Any = _READ(meant)
        line = CANONICAL.encode(read)  # a whole number given for a float is a float now
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise _refused(record, str(error)) from None
    # NaN and infinity are spelled as null, which reads back as "not given"
    if line != meant and line.count(b"null") != meant.count(b"null"):
        raise _refused(record, "it holds NaN or infinity")
    if len(line) > MAX_LINE:
        raise _refused(record, f"it takes {len(line)} bytes, over the {MAX_LINE} of a line")
    for cause in getattr(read, "causes", ()):
        if not 0 <= cause.seq < read.seq:
            raise _refused(record, f"event {cause.seq} is its cause and not earlier")
    return line + b"\n", read


def _refused(record: Any, why: str) -> Refused:
    kind, seq = record.__struct_config__.tag, getattr(record, "seq", None)
    which = f"this {kind}" if seq is None else f"this {kind}, event {seq},"
    return Refused(f"{which} cannot be recorded: {why}")


def ids(to: Ids) -> Any:
    """A tuple of ids from one id or several."""
    return (to,) if isinstance(to, str) else as_tuple(to)


def as_tuple(values: Any) -> Any:
    """A tuple from any sequence or array; what is none is left for the type check to refuse."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return tuple(listed)
    except TypeError:
        return values
