"""Claims about durability: what was acknowledged is in the file, whatever happened then."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint import append
from counterpoint.recorder import Recorder, TraceRecorder
from counterpoint.schema import Event, Finding, Trace
from counterpoint.store import read_file

pytestmark = pytest.mark.slow


def recovered(path: Path) -> tuple[list[Trace], list[Finding]]:
    """What a reader finds: traces without a gap, sealed ones whole, and what is unreadable."""
    findings: list[Finding] = []
    traces = list(read_file(path, findings))
    for trace in traces:
        assert [event.seq for event in trace] == list(range(len(trace)))
        if trace.seal is not None:
            assert (trace.seal.events, trace.seal.digest) == (len(trace), trace.digest)
    return traces, findings


def turns(t: TraceRecorder) -> Iterator[Callable[[], Event]]:
    """A run, one call at a time; an act with a mailbox writes two events at once."""
    yield lambda: t.act("a", "go")
    for i in range(14):
        yield lambda i=i: t.message("a", "b", f"message {i} " + "é" * 20)
        yield lambda: t.act("b", "answer")
        yield lambda: t.tool_result(t.tool_call("b", "search"), {"found": None})
    yield lambda: t.reward(1)


# ---------------------------------------------------------------------------------------------
# P7: the disk refuses


class Disk:
    """`os` as the recorder sees it, with one fault at the n-th write or sync."""

    def __init__(self, at: int, fault: str) -> None:
        self.at, self.fault, self.calls = at, fault, 0
        self.hit: str | None = None
        self.full = False

    def shim(self) -> SimpleNamespace:
        own = {"write": self.write, "fdatasync": self.fdatasync}
        return SimpleNamespace(**{**vars(os), **own})

    def write(self, file: int, data: bytes) -> int:
        self.calls += 1
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.calls != self.at:
            return os.write(file, data)
        self.hit = "write"
        if self.fault in FAULTS:
            raise OSError(FAULTS[self.fault], os.strerror(FAULTS[self.fault]))
        size = {"half": len(data) // 2, "no newline": len(data) - 1, "one byte": 1}
        self.full = self.fault.endswith("then full")
        return os.write(file, data[: max(1, size[self.fault.removesuffix(" then full")])])

    def fdatasync(self, file: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.hit = "sync"
            raise OSError(errno.EIO, os.strerror(errno.EIO))


Run = Callable[[TraceRecorder], Iterator[Callable[[], Event]]]
FAULTS = {"full": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR}
SHORT = ["half", "no newline", "one byte"]
SHORT_THEN_FULL = [f"{name} then full" for name in SHORT]


def recorded_on(path: Path, sync: Any, again: bool, run: Run) -> tuple[dict[int, Event], int]:
    """Record a run on a bad disk: what was acknowledged, and how many errors the caller saw.

    What fails is tried once more, or (but for header and seal) given up if not `again`.
    """
    acknowledged: dict[int, Event] = {}
    errors = 0
    rec = Recorder(path, sync=sync)
    try:
        t = rec.trace("t")
    except OSError:
        errors, t = 1, rec.trace("t")
    for call in run(t):
        try:
            event = call()
        except OSError:
            errors += 1
            if not again:
                continue
            event = call()
        acknowledged[event.seq] = event
    for end in (t.end, rec.close):
        try:
            end()
        except OSError:
            errors += 1
            if (
                end == rec.close or not t._closed
            ):  # a seal that is in the file is not asked for again
                end()
    return acknowledged, errors


def faulted(path: Path, at: int, fault: str, sync: Any, monkeypatch: Any, run: Run) -> bool:
    """One fault at one call: all that was acknowledged is there. Whether that call was reached."""
    disk = Disk(at, fault)
    monkeypatch.setattr(append, "os", disk.shim())
    acknowledged, errors = recorded_on(path, sync, at % 2 == 0, run)
    monkeypatch.setattr(append, "os", os)
    traces, findings = recovered(path)
    path.unlink()
    (trace,) = [t for t in traces if t.seal]
    for seq, event in acknowledged.items():
        assert trace[seq] == event
    torn = disk.hit == "write" and fault in ("half then full", "one byte then full")
    assert errors == (disk.hit == "sync" or torn or (disk.hit == "write" and fault in FAULTS))
    assert len(findings) == torn
    return disk.hit is not None


@pytest.mark.parametrize(("sync", "calls"), [("write", 60), ("disk", 60), ("trace", 1)])
@pytest.mark.parametrize("fault", [*FAULTS, *SHORT, *SHORT_THEN_FULL])
def test_a_fault_of_the_disk_is_an_error_and_loses_nothing(
    tmp_path, monkeypatch, fault, sync, calls
):
    """At each of the first calls: the caller is told, all else is there, seq stays dense (P7)."""
    for at in range(1, calls + 1):
        assert faulted(tmp_path / "t.jsonl", at, fault, sync, monkeypatch, turns)


@pytest.mark.soak
@pytest.mark.parametrize("sync", ["write", "disk"])
@pytest.mark.parametrize("fault", ["EIO", "half", "half then full", "no newline then full"])
def test_a_fault_at_each_of_500_calls(tmp_path, monkeypatch, fault, sync):
    """The same at full size (P7), in a run that is long enough."""
    for at in range(1, 501):
        assert faulted(tmp_path / "t.jsonl", at, fault, sync, monkeypatch, long_run)


def long_run(t: TraceRecorder) -> Iterator[Callable[[], Event]]:
    yield lambda: t.act("a", "go")
    for i in range(250):
        yield lambda i=i: t.message("a", "b", f"message {i}")
        yield lambda: t.act("b", "answer")
    yield lambda: t.reward(1)


def test_a_failed_sync_is_an_error_and_the_events_are_in_the_file(tmp_path, monkeypatch):
    """With sync "disk" the error of fdatasync reaches the caller, and later appends work."""
    path = tmp_path / "t.jsonl"
    with Recorder(path, sync="disk") as rec:
        t = rec.trace("t")
        for i in range(63):
            t.custom("a", "x.y", i)
        disk = Disk(1, "EIO")
        monkeypatch.setattr(append, "os", disk.shim())
        with pytest.raises(OSError, match="Input/output error"):
            t.custom("a", "x.y", 63)
        t.custom("a", "x.y", 63)
        t.end()
        monkeypatch.setattr(append, "os", os)
    ((trace,), findings) = recovered(path)
    assert [e.data for e in trace] == list(range(64))
    assert findings == []


@pytest.mark.slow
def test_a_real_limit_on_the_file_s_size_is_survived(tmp_path):
    """The kernel itself cuts a write short and refuses the rest; with room again, all goes on."""
    path = tmp_path / "t.jsonl"
    code = (
        "import resource, signal, sys\n"
        "from counterpoint.recorder import Recorder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "rec = Recorder(sys.argv[1]); t = rec.trace('t'); refused = 0\n"
        "for size in range(2000, 60000, 777):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))\n"
        "    try:\n"
        "        while True: t.act('a', 'x' * 90)\n"
        "    except OSError as error: refused += error.errno == 27\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\n"
        "t.end(); rec.close(); print(refused, t.header.trace_id)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    refused, trace_id = done.stdout.decode().split()
    ((trace,), findings) = recovered(path)
    assert int(refused) == len(range(2000, 60000, 777))
    assert trace.trace_id == trace_id
    assert trace.seal.digest == trace.digest
    assert 20 < len(findings) <= int(refused)
    assert {f.rule for f in findings} == {"V01"}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] != 0


# ---------------------------------------------------------------------------------------------
# P1: the process is killed


def record_for_ever(folder: Path, sync: Any, pipe: int, seed: int) -> None:
    """Record traces of all sorts of events; after each call returned, say so through the pipe."""
    draw = random.Random(seed)
    rec = Recorder(folder, sync=sync)
    os.write(pipe, f"{rec.path.name}\n".encode())
    while True:
        with rec.trace("t") as t:
            for _ in range(draw.randrange(200)):
                match draw.randrange(4):
                    case 0:
                        event: Event = t.act(draw.choice("ab"), "x" * draw.randrange(500))
                    case 1:
                        event = t.message("a", ["a", "b"], "y" * draw.randrange(5000))
                    case 2:
                        event = t.tool_result(t.tool_call("b", "f"), {"n": draw.random()})
                    case _:
                        event = t.act("a", "z" * draw.choice([10, 200_000]))
                os.write(pipe, f"{t.header.trace_id} {event.seq}\n".encode())


def started(folder: Path, sync: Any, seed: int) -> tuple[int, int]:
    """A recording child: its pid and the pipe of what it was told."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(out)
            record_for_ever(folder, sync, into, seed)
        finally:
            os._exit(1)
    os.close(into)
    return child, out


def killed(children: list[tuple[int, int]], after: float) -> list[list[str]]:
    """Kill -9 each child at a moment of its own; the lines that each had been told."""
    said = [b""] * len(children)
    end = time.monotonic() + after
    while (left := end - time.monotonic()) > 0 or not all(said):
        for pipe in select.select([pipe for _, pipe in children], [], [], max(0.0, left))[0]:
            at = [p for _, p in children].index(pipe)
            said[at] += os.read(pipe, 1 << 16)
    for at, (child, pipe) in enumerate(children):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(pipe, 1 << 16):
            said[at] += data
        os.close(pipe)
    return [[line.decode() for line in text.split(b"\n")[:-1]] for text in said]


def kill(folder: Path, rounds: int, sync: Any, seed: int) -> int:
    """Two recorders in one folder, killed `rounds` times each; how many events were checked."""
    draw = random.Random(seed)
    acknowledged: dict[str, dict[str, int]] = {}
    for _ in range(rounds):
        children = [started(folder, sync, draw.randrange(1 << 30)) for _ in range(2)]
        for name, *events in killed(children, draw.random() * 0.08):
            last = acknowledged.setdefault(name, {})
            for event in events:
                trace_id, seq = event.split()
                last[trace_id] = max(last.get(trace_id, 0), int(seq))
    assert len(acknowledged) == 2 * rounds == len(list(folder.glob("*.jsonl")))
    for name, last in acknowledged.items():
        traces, findings = recovered(folder / name)
        assert all("incomplete last line" in f.message for f in findings)
        assert len(findings) <= 1
        length = {t.trace_id: len(t) for t in traces}
        sealed = {t.trace_id for t in traces if t.seal}
        assert len(length) - len(sealed) <= 1
        assert all(t.seal.digest == t.digest for t in traces if t.seal)
        for trace_id, seq in last.items():
            if sync != "trace" or trace_id in sealed:
                assert length[trace_id] > seq, (name, trace_id)
        with Recorder(folder / name) as rec, rec.trace("t") as t:
            t.act("a", "the next recorder goes on")
        assert len(recovered(folder / name)[0]) == len(traces) + 1
    return sum(sum(last.values()) for last in acknowledged.values())


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "rounds"), [("write", 20), ("disk", 5), ("trace", 5)])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path, sync, rounds):
    """40 kills, two recorders in one folder: every acknowledged event is in the file (P1)."""
    assert kill(tmp_path, rounds, sync, seed=rounds) > 50


@pytest.mark.soak
@pytest.mark.parametrize(("sync", "rounds"), [("write", 150), ("disk", 50)])
def test_300_kills_lose_nothing_that_was_acknowledged(tmp_path, sync, rounds):
    """The same at full size (P1)."""
    assert kill(tmp_path, rounds, sync, seed=rounds) > 1000


# ---------------------------------------------------------------------------------------------
# P2: the power goes


def power_cut(folder: Path, draw: random.Random, number: int, monkeypatch: Any) -> None:
    """What was not forced to the disk is dropped, zeroed or kept at random, then read."""
    log: list[bytes | None] = []

    def write(file: int, data: bytes) -> int:
        log.append(data)
        return os.write(file, data)

    def fdatasync(file: int) -> None:
        log.append(None)

    shim = SimpleNamespace(**{**vars(os), "write": write, "fdatasync": fdatasync})
    monkeypatch.setattr(append, "os", shim)
    path = folder / f"{number}.jsonl"
    acknowledged = 0
    with Recorder(path, sync="disk") as rec, rec.trace("t") as t:
        for i in range(150):
            t.act("a", f"turn {i}")
    monkeypatch.setattr(append, "os", os)
    cut = draw.randrange(1, len(log))
    before = log[:cut]
    synced = max((i for i, entry in enumerate(before) if entry is None), default=0)
    disk = b"".join(entry for entry in before[:synced] if entry)
    kept = disk.count(b"\n")
    loose = [entry for entry in before[synced:] if entry]
    acknowledged = kept + len(loose)
    for entry in loose:
        disk += draw.choice([entry, entry, bytes(len(entry))])
    floor = sum(len(entry) for entry in before[:synced] if entry)
    disk = disk[: draw.randrange(floor, len(disk) + 1)]
    path.write_bytes(disk)
    assert acknowledged - kept <= 64
    findings: list[Finding] = []
    traces = list(read_file(path, findings))
    if kept:
        events = [event.seq for event in traces[0]]
        assert events[: kept - 1] == list(range(min(kept - 1, 150)))
    with Recorder(path, sync="disk") as rec, rec.trace("t") as t:
        t.act("a")
    assert any(trace.seal and len(trace) == 1 for trace in read_file(path))


@pytest.mark.parametrize("cuts", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_a_power_cut_costs_at_most_64_events(tmp_path, monkeypatch, cuts):
    """Unsynced writes are lost or zeroed at random: what was synced is there (P2)."""
    draw = random.Random(cuts)
    for number in range(cuts):
        power_cut(tmp_path, draw, number, monkeypatch)


def test_a_new_name_is_forced_to_the_disk_too(tmp_path, monkeypatch):
    """With sync "disk" a power cut does not take the file's name; likewise a side file's."""
    forced: list[str] = []

    def fsync(file: int) -> None:
        forced.append(os.readlink(f"/proc/self/fd/{file}"))
        os.fsync(file)

    monkeypatch.setattr(append, "os", SimpleNamespace(**{**vars(os), "fsync": fsync}))
    with Recorder(tmp_path / "t.jsonl", sync="disk") as rec, rec.trace("t") as t:
        assert forced == [str(tmp_path)]
        t.act("a", "x" * (1 << 20))
    assert str(tmp_path / "t.jsonl.files") in forced
