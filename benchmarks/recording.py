"""Recording one event against an OpenTelemetry span, and durable appends against SQLite.

Our event is checked, digested and (but for sync "trace") written before the call returns; the span
is the bare one of the SDK, with no processor and no exporter behind it. The appends are lines of
equal bytes, 64 to a batch, each batch forced to the disk: WAL with synchronous=FULL in SQLite.
"""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from counterpoint.append import AppendOnly, Sync
from counterpoint.recorder import Recorder

EVENTS = 1000
REPEATS = 15
BATCHES = 100
TEXT = "The capital of Peru is Lima. " * 10
LINE = b'{"type":"message","content":"' + b"x" * 460 + b'"}\n'


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds an event."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        traced, written, span = _medians(
            EVENTS, lambda: _recorded(folder, "trace"), lambda: _recorded(folder, "write"), _spans
        )
        sides = (lambda: _appended(folder), lambda: _inserted(folder))
        cpu = _medians(BATCHES * 64, *sides)
        wall = _medians(BATCHES * 64, *sides, clock=time.perf_counter)
    return [
        _row("record an event, sync=trace (goal 4 µs)", traced, span, "OpenTelemetry span", 5.0),
        _row("record an event, sync=write (goal 6 µs)", written, span, "OpenTelemetry span", 3.5),
        _row("durable append, batches of 64, CPU", *cpu, "SQLite WAL", 5.0),
        _row("durable append, batches of 64, wall clock", *wall, "SQLite WAL", 1.5),
    ]


def _recorded(folder: Path, sync: Sync) -> Iterator[None]:
    path = folder / f"{uuid.uuid4().hex}.jsonl"
    with Recorder(path, sync=sync) as recorder, recorder.trace("t") as trace:
        trace.act("a", TEXT)
        yield
        for _ in range(EVENTS):
            trace.message("a", "b", TEXT)
        yield


def _spans() -> Iterator[None]:
    provider = TracerProvider(shutdown_on_exit=False)
    tracer = provider.get_tracer("counterpoint")
    with tracer.start_as_current_span("run"):
        yield
        for _ in range(EVENTS):
            own = {"agent": "a", "to": "b", "content": TEXT}
            with tracer.start_as_current_span("message", attributes=own):
                pass
        yield


def _appended(folder: Path) -> Iterator[None]:
    store = AppendOnly(folder / f"{uuid.uuid4().hex}.jsonl", "disk")
    yield
    for _ in range(BATCHES):
        store.append("t", [LINE] * 64, sealed=True)
    yield
    store.close()


def _inserted(folder: Path) -> Iterator[None]:
    table = sqlite3.connect(folder / f"{uuid.uuid4().hex}.db")
    table.execute("PRAGMA journal_mode=WAL")
    table.execute("PRAGMA synchronous=FULL")
    table.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, line BLOB)")
    yield
    for _ in range(BATCHES):
        table.executemany("INSERT INTO events (line) VALUES (?)", [(LINE,)] * 64)
        table.commit()
    yield
    table.close()


def _medians(
    events: int,
    *sides: Callable[[], Iterator[None]],
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """Seconds an event between the two stops of each side, all sides alternately."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for taken, side in zip(times, sides, strict=True):
            run = side()
            next(run)
            began = clock()
            next(run)
            taken.append((clock() - began) / events)
            next(run, None)
    return [median(taken) for taken in times]


def _row(job: str, ours: float, peer: float, name: str, goal: float) -> dict[str, Any]:
    return {
        "job": job,
        "ours": ours,
        "peer": peer,
        "peer_name": name,
        "ratio": peer / ours,
        "goal": goal,
    }
