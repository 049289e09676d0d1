"""Runs shared among processes: each writes its traces to a file of its own, in canonical lines,
and the first of them, which is this one, reads them back in their order.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exception_only
from typing import IO, NamedTuple, TypeAlias, cast

import msgspec

from counterpoint.save import trace_lines
from counterpoint.schema import AnyEvent, Header, Line, Seal, Trace, encode
from counterpoint.spelling import Refused

Job: TypeAlias = tuple[int, int]
"""(group, rollout) of one run."""

Played = Callable[[Job], Trace]

_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_SIZE = 8
"""Bytes of a size; so few are written and read in one piece."""


class _Worker(NamedTuple):
    """A process beside this one; `ticks` gives the size of each trace that stands in `file`."""

    number: int
    pid: int
    ticks: int
    file: IO[bytes]


class Ended(Refused):
    """A worker was ended from outside, or by what it played."""


def spread(
    jobs: Sequence[Job], workers: int, played: Played, notes: list[str] | None = None
) -> Iterator[Trace]:
    """The traces of the jobs in their order, whoever played them.

    Workers take turns (`_turns`); worker 0 is this process. Where a worker
    failed, its job is played here again, so that what went wrong is seen with its own traceback.
    With `notes` a worker that was ended is replaced once by another one that takes its jobs over
    from the one it was at; a job at which a second one ends too is left out. Both are noted.

    Raises:
        Refused: a worker died, or failed at what does not fail here; it names worker and run.
    """
    turns = _turns(len(jobs), workers)

    def left(turn: int, since: int) -> list[Job]:
        return [job for job, who in zip(jobs[since:], turns[since:], strict=True) if who == turn]

    with TemporaryDirectory() as folder:
        others: list[_Worker] = []
        try:
            for number in range(1, min(workers, len(jobs))):
                path = Path(folder) / f"{number}.jsonl"
                others.append(_started(number, path, left(number, 0), played))
            for index, (job, turn) in enumerate(zip(jobs, turns, strict=True)):
                if turn == 0:
                    yield played(job)
                    continue
                for since, then in ((0, "another took over"), (1, "that one is left out")):
                    try:
                        yield _taken(others[turn - 1], job, played)
                        break
                    except Ended as ended:
                        if notes is None:
                            raise
                        notes.append(f"{ended}; {then}")
                    path = Path(folder) / f"{turn}-{index}-{since}.jsonl"
                    dead = others[turn - 1]
                    others[turn - 1] = _started(turn, path, left(turn, index + since), played)
                    _ended(dead)
        finally:
            for worker in others:
                _ended(worker)


def _turns(jobs: int, workers: int) -> list[int]:
    """Who plays each job: one after another, but this process, which also reads what the others
    wrote, sits every fourth round out.
    """
    rounds = ([0] * (number % 4 != 3) + [*range(1, workers)] for number in range(jobs))
    return [turn for each in rounds for turn in each][:jobs] if workers > 1 else [0] * jobs


def _started(number: int, path: Path, jobs: Sequence[Job], played: Played) -> _Worker:
    sys.stdout.flush()
    sys.stderr.flush()
    path.touch()
    ticks, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(_work(path, tell, jobs, played))
    os.close(tell)
    return _Worker(number, pid, ticks, path.open("rb"))


def _work(path: Path, tell: int, jobs: Sequence[Job], played: Played) -> int:
    """What another process does, from its first job to its exit status."""
    try:
        with path.open("wb") as file:
            for job in jobs:
                lines = b"".join(encode(line) + b"\n" for line in trace_lines(played(job)))
                file.write(lines)
                file.flush()
                os.write(tell, len(lines).to_bytes(_SIZE))
        sys.stdout.flush()
    except BaseException as error:  # this process may not go on as if it were its parent
        with suppress(OSError):
            _fault(path).write_text("".join(format_exception_only(error)), errors="replace")
        return 1
    return 0


def _fault(path: Path) -> Path:
    return path.with_suffix(".txt")


def _taken(worker: _Worker, job: Job, played: Played) -> Trace:
    if size := os.read(worker.ticks, _SIZE):
        return _read_back(worker.file.read(int.from_bytes(size)))
    died = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    who, run = f"worker {worker.number}", f"group {job[0]}, rollout {job[1]}"
    if died is not None and died.si_code != os.CLD_EXITED:
        name = signal.Signals(died.si_status).name
        raise Ended(f"{who} was ended by {name} while it played {run}")
    played(job)
    fault = _fault(Path(worker.file.name))
    said = fault.read_text().strip() if fault.exists() else "no words"
    raise Refused(f"{who} failed at {run}, which does not fail in this process: {said}")


def _ended(worker: _Worker) -> None:
    os.kill(
        worker.pid, signal.SIGKILL
    )  # one that has ended still bears its id until it is waited for
    os.waitpid(worker.pid, 0)
    os.close(worker.ticks)
    worker.file.close()


def _read_back(lines: bytes) -> Trace:
    header, *events, seal = _LINES.decode_lines(lines)
    seal = cast(Seal, seal)
    trace = Trace(cast(Header, header), tuple(cast("list[AnyEvent]", events)), seal)
    vars(trace)["digest"] = seal.digest  # the cached property, which would compute it again
    return trace
