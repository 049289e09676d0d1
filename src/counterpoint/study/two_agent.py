"""Two agents, one budget: a strong single agent, naive GRPO, CAD-GRPO and the rest, over seeds.

Each finished training run is a file of its own, so that a study that was stopped goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from counterpoint.report import Page, page
from counterpoint.save import folder, save, trace_lines, whole_file
from counterpoint.spelling import CANONICAL, Refused
from counterpoint.study.asked import Progress, silent
from counterpoint.study.cad import settle
from counterpoint.study.two_agent_page import sections, verdict
from counterpoint.study.two_agent_run import ARMS, BUDGET, HEADLINE, PROBES, Cell, scaled, trained
from counterpoint.study.two_agent_stats import (
    Budget,
    Runs,
    against_exact,
    best_path,
    outcomes,
    regressions,
)
from counterpoint.study.two_agent_watch import Row

PATHS = (6.0, 24.0, 96.0)
"""How far the table may move in a run, in logits; arms are compared at the first."""

WATCHED = 1
"""Seeds whose credit is held against the exact one: listing every run of a task takes longer than
training does."""

TUNED_ON = 1000
"""First of the seeds that step lengths are chosen on."""


class Size(NamedTuple):
    """How much is run: seeds, seeds for step lengths, share of the budget, and which arms."""

    seeds: int
    tuning: int
    scale: float
    methods: tuple[str, ...]


SIZES: dict[bool, Size] = {
    False: Size(10, 1, 0.5, tuple(ARMS)),
    True: Size(3, 0, 0.5, tuple(HEADLINE)),
}
"""In full and quick."""


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    digests: dict[str, str]
    rows: list[dict[str, Any]]


class _Job(NamedTuple):
    out: str
    cell: Cell
    scale: float
    probes: int


def two_agent(out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """Train two agents by every arm, on equal budgets, and say what credit was worth.

    Writes runs.jsonl, summary.json and the last runs of each arm (traces/) into `out`, beside a
    file for each training run, from which a study that was stopped goes on.

    Raises:
        Refused: `out` holds a study with other settings, a file that is no run, or runs whose
            harness, prompts, tools or settings differ, which cannot be compared.
    """
    size = SIZES[quick]
    budget = partial(scaled, scale=size.scale)
    about = {"arms": {m: ARMS[m]._asdict() for m in size.methods}, "paths": PATHS}
    spent = {env: vars(budget(env)) for env in BUDGET}
    settle(out / "settings.json", {"study": "two-agent", **size._asdict(), **about, "most": spent})
    jobs = [
        _Job(str(out), cell, size.scale, PROBES if cell.seed < WATCHED else 0)
        for cell in _main(size)
    ]
    seeds = range(TUNED_ON, TUNED_ON + size.tuning)
    tuning = [Cell(e, m, p, s) for e in BUDGET for m in HEADLINE for p in PATHS for s in seeds]
    jobs += [_Job(str(out), cell, size.scale, 0) for cell in tuning]
    runs = _finished(out, jobs, progress)
    best = _best(runs, seeds, size, budget) if size.tuning else []
    jobs += [_Job(str(out), cell, size.scale, 0) for cell in best if cell not in runs]
    runs = _finished(out, jobs, progress)
    held, tuned = ({cell: runs[cell] for cell in cells} for cells in (_main(size), best))
    return _written(out, runs, held, tuned, budget)


def _main(size: Size) -> list[Cell]:
    return [
        Cell(env, name, PATHS[0], seed)
        for env in BUDGET
        for name in size.methods
        for seed in range(min(size.seeds, ARMS[name].seeds))
    ]


def _best(runs: Runs, seeds: Sequence[int], size: Size, budget: Budget) -> list[Cell]:
    """The headline arms, each at its own step length."""
    paths = {(e, m): best_path(runs, e, m, seeds, budget(e)) for e in BUDGET for m in HEADLINE}
    return [Cell(e, m, path, seed) for (e, m), path in paths.items() for seed in range(size.seeds)]


def _written(out: Path, runs: Runs, held: Runs, tuned: Runs, budget: Budget) -> Page:
    """The files of a finished study, and its page."""
    with whole_file(out / "runs.jsonl", force=True) as file:
        file.writelines(CANONICAL.encode(row) + b"\n" for rows in runs.values() for row in rows)
    table = [row for env in BUDGET for row in outcomes(held, env, budget(env))]
    said = {
        "verdict": [line for env in BUDGET for line in verdict(held, env, budget(env))],
        "outcomes": table,
        "tuned": [row for env in BUDGET for row in outcomes(tuned, env, budget(env))],
        "credit": [row for env in BUDGET for row in against_exact(held, env)],
        "regressions": [row for env in BUDGET for row in regressions(held, env)],
    }
    with whole_file(out / "summary.json", force=True) as file:
        file.write(CANONICAL.encode(said))
    html = page("Two agents: what credit is worth", sections(held, tuned, budget))
    return Page(html, [row for row in table if row["method"] in HEADLINE])


def comparable(found: Mapping[Cell, Mapping[str, str]]) -> None:
    """Refuse runs that were not played alike.

    Tools and settings are the same for everybody; the environment and its prompts also say who
    plays, and are the same for all pairs, and for all single agents.

    Args:
        found: the digests of each run, as `trained` gives them.

    Raises:
        Refused: two runs differ; the sentence names both, and in what.
    """
    first: dict[tuple[str, str, str], tuple[str, Cell]] = {}
    for cell, digests in found.items():
        for name, digest in digests.items():
            team = ARMS[cell.method].team if name in ("env", "prompt") else ""
            known, other = first.setdefault((cell.env, name, team), (digest, cell))
            if known != digest:
                raise Refused(
                    f"{_name(cell)} was played with another {name} ({digest}) than {_name(other)} "
                    f"({known}), so the two cannot be compared; run both again in another folder"
                )


# ---------------------------------------------------------------------------------------------
# Files


def _finished(out: Path, wanted: list[_Job], progress: Progress) -> dict[Cell, list[Row]]:
    """All runs: those that are there from their files, the others on all processors."""
    folder(out / "runs")
    missing = [job for job in wanted if not _file(job).exists()]
    for _ in progress(_parallel(missing), "seeds"):
        pass
    found = {job.cell: _read(_file(job)) for job in wanted}
    comparable({cell: stored.digests for cell, stored in found.items()})
    return {cell: stored.rows for cell, stored in found.items()}


def _parallel(jobs: list[_Job]) -> Iterator[None]:
    """Run all; those of a seed in one process, since their tasks are the same and listed once."""

    def by(job: _Job) -> tuple[str, int]:
        return job.cell.env, job.cell.seed

    seeds = [list(alike) for _, alike in groupby(sorted(jobs, key=by), key=by)]
    workers = min(len(os.sched_getaffinity(0)), len(seeds))
    if workers < 2:
        yield from map(_finish, seeds)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(_finish, seeds)


def _finish(jobs: list[_Job]) -> None:
    """Train, and write each run, whole or not at all; of the first seed its last traces too."""
    for job in jobs:
        made = trained(job.cell, job.scale, job.probes)
        if job.probes and job.cell.seed == 0:
            name = f"{job.cell.env}-{job.cell.method}.jsonl"
            lines = (line for trace in made.traces for line in trace_lines(trace))
            save(folder(Path(job.out) / "traces") / name, lines, force=True)
        with whole_file(_file(job), force=True) as file:
            file.write(CANONICAL.encode(_Stored(made.digests, made.rows)))


def _name(cell: Cell) -> str:
    return "-".join(map(str, cell))


def _file(job: _Job) -> Path:
    return Path(job.out) / "runs" / f"{_name(job.cell)}.json"


def _read(path: Path) -> _Stored:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise Refused(
            f"{path} holds no finished run ({error}); delete it to run it again"
        ) from None
