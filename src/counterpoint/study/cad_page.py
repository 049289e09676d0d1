"""The study of CAD-GRPO from its cells to a folder: a table, what the gate is worth, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.report import Page, Section, figure, page
from counterpoint.save import whole_file
from counterpoint.spelling import CANONICAL, Refused
from counterpoint.study.asked import Progress, silent
from counterpoint.study.cad import (
    AS_THEY_ARE,
    BATCHES,
    MATCHED,
    MEASURES,
    OWN,
    SEEDS,
    Found,
    cells,
    run_cells,
)
from counterpoint.study.cad_envs import environments
from counterpoint.study.cad_gate import FORMS, judged_gate
from counterpoint.study.cad_regions import aim, use_this_when

LINES = ("rloo", "cad_equal", "cosac", "c3_4", "coma", "fusion")
"""Methods that the decay curves show."""


def cad(
    out: Path, quick: bool = False, progress: Progress = silent, own: str | None = None
) -> Page:
    """CAD-GRPO, COSAC, C3, fusion and the rest against exact credit: cost, bias and variance.

    Writes cells.parquet and gate.json into `out`, beside a file for each finished cell, from which
    a study that was stopped goes on. A method of yours, `own` as `file.py:function`, takes part
    under that name and gets the proxies that cad_grpo gets.

    Raises:
        Refused: `out` holds a study with other settings; no PyArrow.
    """
    found = list(run_cells(out, quick, progress, own))
    rows = [row for each in found for row in each.rows]
    write_table(out / "cells.parquet", rows)
    gate = judged_gate(found)
    with whole_file(out / "gate.json", force=True) as file:
        file.write(CANONICAL.encode(gate))
    played = environments(quick)
    sections = [*_about(found, quick), *_winners(found), *_curves(rows), *_gates(gate)]
    sections.append(_played(played))
    return Page(page("When is credit from observed runs good enough?", sections), summary(rows))


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as Parquet. Raises Refused without PyArrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refused("Parquet needs PyArrow: pip install 'counterpoint[data]'") from None
    with whole_file(path, force=True) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per method, at its own cost: medians over the cells, errors in units of RLOO's."""
    base = {_cell(row): row for row in rows if row["method"] == "rloo" and row["calls"] is None}
    out = []
    for name in (*MEASURES, OWN):
        own = [row for row in rows if row["method"] == name and row["calls"] is None]
        if own:
            ratio = [_ratio(row["mse"], base[_cell(row)]["mse"]) for row in own]
            out.append(
                {
                    "method": name,
                    "estimand": own[0]["estimand"],
                    "cells": len(own),
                    "pearson": _median(row["pearson"] for row in own),
                    "mse ÷ rloo's": float(np.exp(np.mean(np.log(ratio)))),
                    "bias² ÷ mse": _median(_share(row) for row in own),
                    "gradient_error": _median(row["gradient_error"] for row in own),
                    "calls ÷ rloo's": _median(
                        row["env_calls"] / base[_cell(row)]["env_calls"] for row in own
                    ),
                }
            )
    return out


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("game", "K", "dep", "topology", "turns", "noise", "proxy", "error", "G", "groups")
    return (*(row[name] for name in names), row["seed"])


def _ratio(x: float, y: float) -> float:
    return max(x, 1e-6) / max(y, 1e-6)


def _share(row: dict[str, Any]) -> float:
    return float(np.clip(row["bias2"] / max(row["mse"], 1e-12), 0, 1))


def _median(values: Any) -> float:
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.median(known)) if known else float("nan")


# ---------------------------------------------------------------------------------------------
# Sections


def _about(found: Sequence[Found], quick: bool) -> list[Section]:
    rows = [row for each in found for row in each.rows]
    refused = sorted({f"{name}: {why}" for each in found for name, why in each.refused.items()})
    return [
        Section(
            "Cost, bias and variance",
            f"{len(found)} cells ({len(cells(quick)) // SEEDS[quick]} kinds, seeds: "
            f"{SEEDS[quick]}), in which each group plays a draw of the game of its own; "
            f"{BATCHES[quick]} independent batches of each cell; every method gets the same plays. "
            "Errors are against exact seqau: what an act was worth to the team, given all that had "
            "happened. Medians over cells; mse is the geometric mean of the ratio to RLOO's. "
            f"CAD-GRPO is a reconstruction. {' '.join(f'Refused: {r}.' for r in refused)}",
            summary(rows),
            _frontier(summary(rows)),
            "Error against cost. Left and low is good: cheap and near the exact credit.",
        )
    ]


def _frontier(rows: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        ax = axes[0, 0]
        for at, row in enumerate(rows):
            look = {"marker": "os^Dv"[at % 5], "color": f"C{at % 10}", "linestyle": ""}
            ax.plot(row["calls ÷ rloo's"], row["mse ÷ rloo's"], label=row["method"], **look)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("calls of the environment, in those of the rollouts")
        ax.set_ylabel("mean squared error, in that of RLOO")
        ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return figure(1, 1, draw, height=4.2)


def _winners(found: Sequence[Found]) -> list[Section]:
    told = aim(found)
    losses = ", ".join(told["losses"]) or "none"
    half, kept = (f"{told[n]:.0%}" if told[n] is not None else "none" for n in ("half", "kept"))
    return [
        Section(
            "Use this when",
            "At equal calls, those that C3 with four siblings takes. Share of the cells of a "
            "region in which each has the least mean squared error, among "
            f"{', '.join(MATCHED + AS_THEY_ARE)}; CAD is the better of its two forms. Expected was "
            "written down before the first run.",
            use_this_when(found),
        ),
        Section(
            "Fusion against the best of the others",
            f"Of {told['cells']} cells its error is at most half of the best other one's in "
            f"{half}; of the rest it is within 10 % of it in {kept}. Lost cells: {losses}.",
        ),
    ]


def _curves(rows: Sequence[dict[str, Any]]) -> list[Section]:
    own = [row for row in rows if row["calls"] is None]
    panels = {
        f"T13, {name}": ([r for r in own if r["game"] == "T13" and r["topology"] == name], "K")
        for name in ("chain", "star", "tree", "dense")
    }
    plain = [r for r in own if r["game"] == "T2" and r["proxy"] == "own" and not r["error"]]
    usual = [r for r in plain if (r["G"], r["groups"]) == (8, 16)]
    panels["T2, agents"] = ([r for r in usual if r["turns"] == 1], "K")
    panels["T2, turns of two agents"] = ([r for r in usual if r["K"] == 2], "turns")
    panels["T2, rollouts in a group"] = (
        [r for r in plain if r["groups"] == 16 and r["K"] == 4],
        "G",
    )
    panels["T2, groups"] = ([r for r in plain if r["G"] == 8 and r["K"] == 4], "groups")
    panels = {
        title: (held, by) for title, (held, by) in panels.items() if len({r[by] for r in held}) > 1
    }
    if not panels:
        return []
    svg = figure(-(-len(panels) // 2), 2, lambda axes: _lines(axes, panels), height=2.4)
    text = "Correlation with exact seqau, at each method's own cost, mean over draws of the game."
    return [Section("How quality decays", text, svg=svg, caption="One line per method.")]


def _lines(axes: Any, panels: dict[str, tuple[list[dict[str, Any]], str]]) -> None:
    flat = axes.reshape(-1)
    for ax in flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (title, (held, by)) in zip(flat, panels.items(), strict=False):
        for name in LINES:
            points: dict[float, list[float]] = {}
            for row in held:
                if row["method"] == name and row["pearson"] is not None:
                    points.setdefault(row[by], []).append(row["pearson"])
            x = sorted(points)
            ax.plot(x, [float(np.mean(points[at])) for at in x], "o-", markersize=3, label=name)
        ax.set_title(title, fontsize=9)
        ax.set_ylim(-0.1, 1.05)
    flat[0].legend(fontsize=7, frameon=False)


def _gates(gate: dict[str, Any]) -> list[Section]:
    rows = []
    for figure_ in gate["auc"][FORMS[0]]:
        row: dict[str, Any] = {"figure": figure_}
        for form in FORMS:
            row[f"{form}: auc"] = gate["auc"][form][figure_]
            row[f"{form}: told right"] = gate["thresholds"][form][figure_]["test"]
        rows.append(row)
    wins = ", ".join(f"{form} in {share:.0%}" for form, share in gate["wins"].items())
    return [
        Section(
            "Does the gate work?",
            "The question for each form of CAD-GRPO: does it beat RLOO on this cell, that is, does "
            f"it correlate better with seqau on the same rollouts? It does: {wins}. AUC is how "
            "often a cell in which it does has the higher figure than one in which it does not; "
            f".5 is chance. Thresholds come from {gate['cells_train']} cells; AUC, and the share "
            f"told right by the threshold, from {gate['cells_test']} cells of other kinds.",
            rows,
        )
    ]


def _played(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Environments",
        "The same question where a harness runs text worlds, whose exact credit is listed run by "
        "run: correlation and mean squared error to seqau, ± half a 95 % interval over batches.",
        rows,
    )
