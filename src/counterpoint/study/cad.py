"""When is credit from observed runs good enough? CAD-GRPO beside COSAC, C3 and the rest, on games
whose credit is known exactly: cost, bias and variance, cell by cell.

A cell is one game with its dials, a proxy of each agent's work, and a number of groups and
rollouts; all methods get the same plays of it. Each finished cell is a file of its own, so that a
study that was stopped goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from counterpoint.credit import (
    c3,
    cad_grpo,
    coma,
    cosac,
    dr_mas,
    fusion,
    gigpo,
    grpo,
    rloo,
    shapley,
)
from counterpoint.games import Game, Plays, deal, judged, play
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.save import folder, whole_file
from counterpoint.scoring import Measure, Metered, over_batches
from counterpoint.spelling import CANONICAL, Refused
from counterpoint.study.asked import Progress
from counterpoint.targets import load_target

BATCHES = {False: 6, True: 3}
"""Independent batches of each cell, in full and quick."""

SEEDS = {False: 1, True: 3}
"""Draws of all the games of a cell; each of its groups plays a game of its own in any case."""

MATCHED = ("rloo", "cad_upstream", "cad_equal", "cosac")
"""Methods that are compared at equal calls as well, with as many more rollouts as those pay for."""

AS_THEY_ARE = ("c3_4", "fusion")
"""Methods whose own cost is what equal calls are: what C3 takes for four siblings."""

VERSION = 1
"""Counted up whenever cells, methods or figures change, so that no study mixes two of them."""

GATED = 4
"""Batches in which the gate is asked for its figures."""


class Cell(NamedTuple):
    """What is played: a game of the table with its dials, a proxy, and how much of it.

    K agents act `turns` times each, in turn; `dep` is how much later ones react, `noise` that of
    the outcome, `error` that of the proxy in its own standard deviations; G rollouts a group.
    """

    game: str
    K: int
    dep: float = 0.0
    topology: str = "dense"
    turns: int = 1
    noise: float = 0.0
    proxy: str = "own"
    error: float = 0.0
    G: int = 8
    groups: int = 16
    seed: int = 0

    @property
    def name(self) -> str:
        """What its file is called."""
        return "-".join(str(part) for part in self)


_DIALS = {
    "T6": ("agents", "noise"),
    "T10": ("noise",),
    "T13": ("agents", "dep", "topology", "noise"),
}
"""Dials of the games that do not have (agents, dep, noise)."""


def _grid() -> Iterator[Cell]:
    """Every cell of the full study, of one seed."""
    for game, deps in (("T1", (0.0,)), ("T2", (1.0,)), ("T17", (0.0, 1.0))):
        yield from (Cell(game, K, dep) for dep in deps for K in (2, 4, 6))
    for game in ("T3", "T4", "T5"):
        yield from (Cell(game, K, dep, proxy="success") for dep in (0.0, 1.0) for K in (2, 4))
    yield from (Cell("T6", K, proxy="success") for K in (2, 4))
    yield from (Cell("T8", 3, 1.0), Cell("T10", 2, proxy="success"))
    yield from (Cell("T9", 4, proxy=proxy) for proxy in ("self_report", "call_count", "padding"))
    yield from (Cell("T15", 4, 1.0, noise=noise) for noise in (0.5, 1.0, 2.0))
    yield from (Cell(game, 4, 1.0, proxy="mediated") for game in ("T2", "T3"))
    yield from (Cell("T2", 4, dep, error=e) for dep in (0.0, 1.0) for e in (0.5, 1.0, 2.0))
    yield from (Cell("T2", 4, 1.0, G=G) for G in (4, 16))
    yield from (Cell("T2", 4, 1.0, groups=groups) for groups in (2, 4, 64))
    yield from (Cell("T2", 2, 1.0, turns=turns) for turns in (2, 4))
    for topology in ("chain", "star", "tree", "dense"):
        yield from (Cell("T13", K, 1.0, topology, groups=8) for K in (4, 8, 12))
    yield Cell("T13", 16, 1.0, "chain", groups=2)


def cells(quick: bool) -> list[Cell]:
    """The cells of the study; the quick one has a few kinds of them."""
    grid = list(_grid())
    if quick:
        first = {cell.game: cell for cell in reversed(grid) if cell.K == 4}
        kinds = ("T1", "T2", "T3", "T5", "T9", "T13", "T17")
        grid = [first[game]._replace(groups=6) for game in kinds]
    return [cell._replace(seed=seed) for cell in grid for seed in range(SEEDS[quick])]


def game_of(cell: Cell) -> Game:
    """The game of a cell, one context for each group."""
    dials = {"agents": cell.K * cell.turns, "dep": cell.dep, "noise": cell.noise}
    dials["topology"] = cell.topology  # type: ignore[assignment]
    known = _DIALS.get(cell.game, ("agents", "dep", "noise"))
    game = deal(cell.game, contexts=cell.groups, seed=cell.seed, **{n: dials[n] for n in known})
    return game if cell.turns == 1 else replace(game, agent=game.agent % cell.K)


# ---------------------------------------------------------------------------------------------
# What is compared


def _observed(
    plays: Plays, replay: Metered, *, method: Callable[..., Credit], **own: Any
) -> Credit:
    return method(plays.steps, **own)


def _measured(
    plays: Plays, replay: Metered, *, method: Callable[..., Credit], **own: Any
) -> Credit:
    return method(plays.steps, replay=replay, **own)


def _foreseen(plays: Plays, replay: Metered) -> Credit:
    return cosac(
        plays.steps,
        policy=replay,
        ridge=0.01,
        continuations=8,
        expectation="enumerate",
        intercept="centred",
        fit_scope="group",
    )


MEASURES: dict[str, Measure] = {
    "grpo": partial(_observed, method=grpo, normalize_std=False),
    "rloo": partial(_observed, method=rloo),
    "dr_mas": partial(_observed, method=dr_mas),
    "gigpo": partial(_observed, method=gigpo),
    "cad_upstream": partial(_observed, method=cad_grpo),
    "cad_shared": partial(_observed, method=cad_grpo, advantage="shared"),
    "cad_equal": partial(_observed, method=cad_grpo, advantage="equal"),
    "cad_drop": partial(_observed, method=cad_grpo, advantage="drop"),
    "cad_upstream_gated": partial(_observed, method=cad_grpo, gate=True),
    "cad_equal_gated": partial(_observed, method=cad_grpo, advantage="equal", gate=True),
    "cosac": _foreseen,
    "c3_2": partial(_measured, method=c3, alternatives=2),
    "c3_4": partial(_measured, method=c3),
    "c3_16": partial(_measured, method=c3, alternatives=16, own=4),
    "coma": partial(_measured, method=coma),
    "shapley": partial(_measured, method=shapley),
    "aipw": partial(_measured, method=fusion, correction="always", order=1),
    "fusion": partial(_measured, method=fusion),
}
"""Name in the tables → the method with its options."""

OWN = "own"
"""Name in the tables of a method of the user's."""


def _with_proxy(measure: Measure, cell: Cell) -> Measure:
    def judge(plays: Plays, replay: Metered) -> Credit:
        return measure(judged(plays, cell.proxy, error=cell.error, seed=cell.seed), replay)

    return judge if cell.proxy else measure


# ---------------------------------------------------------------------------------------------
# One cell


class Found(NamedTuple):
    """What a cell gave: a row for each method, and what the gate says of the proxy."""

    rows: list[dict[str, Any]]
    gate: dict[str, Any]
    refused: dict[str, str]


def run_cell(cell: Cell, batches: int, own: str | None = None) -> Found:
    """All methods on one cell, each at its own cost, and some at equal calls.

    `own` is a method of the user's, `file.py:function`, which reads the proxies as cad_grpo does.
    """
    game = game_of(cell)
    more = {} if own is None else {OWN: partial(_observed, method=load_target(own))}
    measures = {
        name: _with_proxy(measure, cell) if name.startswith("cad") or name == OWN else measure
        for name, measure in (MEASURES | more).items()
    }
    able, refused = _able(game, measures, cell)
    rows = _rows(cell, game, able, batches, None)
    calls = next((round(row["env_calls"] * 1.02) for row in rows if row["method"] == "c3_4"), None)
    if calls is not None:
        some = {name: able[name] for name in MATCHED if name in able}
        rows += [{**row, "calls": calls} for row in rows if row["method"] in AS_THEY_ARE]
        rows += _rows(cell, game, some, batches, calls)
    return Found(rows, _gate(cell, game), refused)


def _able(
    game: Game, measures: dict[str, Measure], cell: Cell
) -> tuple[dict[str, Measure], dict[str, str]]:
    """Methods that take these plays, and what the others say."""
    plays = play(game, groups=cell.groups, rollouts=2, seed=cell.seed)
    able, refused = {}, {}
    for name, measure in measures.items():
        try:
            measure(plays, Metered(Rerun(plays), plays.steps, cell.seed))
            able[name] = measure
        except Refused as refusal:
            refused[name] = str(refusal)
    return able, refused


def _rows(
    cell: Cell, game: Game, measures: dict[str, Measure], batches: int, calls: int | None
) -> list[dict[str, Any]]:
    found = over_batches(
        game, measures, batches=batches, rollouts=cell.G, seed=cell.seed, calls=calls
    )
    rows = []
    for name, scored in found.items():
        low, high = scored.intervals["mse"]
        rows.append(
            {
                **cell._asdict(),
                "method": name,
                "estimand": scored.estimand,
                "calls": calls,
                "n": scored.batches,
                **{figure: getattr(scored, figure) for figure in FIGURES},
                "ci_low": low,
                "ci_high": high,
            }
        )
    return rows


FIGURES = (
    "credited", "pearson", "spearman", "kendall", "sign_accuracy", "coverage", "false_alarms",
    "culprit", "conservation_error", "bias2", "variance", "mse", "second_moment", "gradient_error",
    "gradient_cosine", "gradient_scale", "gradient_noise", "rollouts", "env_calls",
    "forward_passes", "tokens", "left_out",
)  # fmt: skip
"""Figures of `scoring.Scored` that the table of cells has as columns."""


def _gate(cell: Cell, game: Game) -> dict[str, Any]:
    """What the gate says of the proxy, averaged over a few batches; NaN is left out."""
    seen: dict[str, list[float]] = {}
    for batch in range(GATED):
        plays = play(game, groups=cell.groups, rollouts=cell.G, seed=1000 + batch)
        steps = judged(plays, cell.proxy, error=cell.error, seed=1000 + batch).steps
        for name, value in figures_of(cad_grpo(steps, gate=True).diagnostics["gate"]).items():
            seen.setdefault(name, []).append(value)
    known = {name: [v for v in values if np.isfinite(v)] for name, values in seen.items()}
    return {name: float(np.mean(values)) if values else None for name, values in known.items()}


def figures_of(gate: dict[str, Any]) -> dict[str, float]:
    """The gate's decision and its figures as single numbers, all of them higher where β is better
    to be believed.
    """
    nothing = float("nan")
    extra = gate.get("additivity", {})
    return {
        "accepted": float(gate["accepted"]),
        "r2_crossed": gate.get("r2_crossed", nothing),
        "r2_low": gate.get("r2_low", nothing),
        "explained_share": 1.0 - gate.get("residual_share", nothing),
        "stable": gate.get("stable_weighted", nothing),
        "halves": gate.get("halves", {}).get("correlation", nothing),
        "additive": -extra.get("gain", nothing),
        "well_conditioned": -float(np.log(gate.get("condition", nothing))),
        "no_leak": -max(map(abs, gate.get("leakage", {}).values()), default=nothing),
        "over_placebo": gate.get("r2_crossed", nothing) - gate.get("placebo_r2", nothing),
    }


# ---------------------------------------------------------------------------------------------
# All cells


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[dict[str, Any]]
    gate: dict[str, float | None]
    refused: dict[str, str]


def run_cells(
    out: Path, quick: bool, progress: Progress, own: str | None = None
) -> Iterator[Found]:
    """Every cell, those that are finished from their files, the others on all processors.

    Raises:
        Refused: the folder holds a study with other settings, or a file that is no cell.
    """
    wanted = cells(quick)
    settings = {"study": "cad", "quick": quick, "batches": BATCHES[quick], "version": VERSION}
    settle(out / "settings.json", settings | ({} if own is None else {OWN: own}))
    held = folder(out / "cells")
    missing = [cell for cell in wanted if not _file(held, cell).exists()]
    jobs = [_Job(str(held), cell, BATCHES[quick], own) for cell in missing]
    for _ in progress(_parallel(jobs), "cells"):
        pass
    return (_read(_file(held, cell)) for cell in wanted)


class _Job(NamedTuple):
    held: str
    cell: Cell
    batches: int
    own: str | None


def _parallel(jobs: list[_Job]) -> Iterator[None]:
    workers = min(len(os.sched_getaffinity(0)), len(jobs))
    if workers < 2:
        yield from map(_finish, jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from pool.map(_finish, jobs)


def _finish(job: _Job) -> None:
    """Run a cell and write its file, whole or not at all."""
    found = run_cell(job.cell, job.batches, job.own)
    with whole_file(_file(Path(job.held), job.cell), force=True) as file:
        file.write(CANONICAL.encode(_Stored(*found)))


def _file(held: Path, cell: Cell) -> Path:
    return held / f"{cell.name}.json"


def _read(path: Path) -> Found:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise Refused(
            f"{path} holds no finished cell ({error}); delete it to run it again"
        ) from None
    return Found(stored.rows, stored.gate, stored.refused)


def settle(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a study into its folder, or find them there.

    Raises:
        Refused: the folder was begun with other settings.
    """
    spelled = CANONICAL.encode(settings)
    if not path.exists():
        with whole_file(path) as file:
            file.write(spelled)
    elif path.read_bytes() != spelled:
        raise Refused(f"{path.parent} was begun with other settings; choose another folder")
