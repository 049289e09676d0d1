"""The study of CAD-GRPO: cells, what wins where, and whether the gate tells."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet
import pytest

from counterpoint.spelling import Refused
from counterpoint.study import cad, cad_page, study
from counterpoint.study.cad import Cell, Found, cells, game_of, run_cell, run_cells
from counterpoint.study.cad_gate import area, judged_gate
from counterpoint.study.cad_regions import REGIONS, aim, region_of, use_this_when

TINY = Cell("T2", 2, 1.0, G=4, groups=3)
SPEC = (
    "game", "K", "topology", "dep", "G", "groups", "method", "estimand", "n", "pearson",
    "gradient_cosine", "bias2", "variance", "mse", "env_calls", "forward_passes", "tokens",
    "ci_low", "ci_high",
)  # fmt: skip


def made(cell: Cell, gate: float = 1.0, calls: int | None = 9, **mse: float) -> Found:
    """A finished cell with given errors; its correlations fall as its errors rise."""
    rows = [
        {**cell._asdict(), "method": name, "calls": calls, "mse": value, "pearson": 1 - value}
        for name, value in mse.items()
    ]
    return Found(rows, {"accepted": gate}, {})


# ---------------------------------------------------------------------------------------------
# Cells


def test_every_game_and_dial_of_the_question_is_there():
    """The games, team sizes 2 to 16, four topologies, lengths, group sizes, proxies."""
    grid = cells(quick=False)
    games = {"T1", "T2", "T3", "T4", "T5", "T6", "T8", "T9", "T10", "T13", "T15", "T17"}
    assert {cell.game for cell in grid} == games
    assert {2, 4, 8, 16} <= {cell.K for cell in grid}
    assert {"chain", "star", "tree", "dense"} == {cell.topology for cell in grid}
    assert {"own", "success", "mediated", "self_report", "call_count", "padding"} == {
        cell.proxy for cell in grid
    }
    for name in ("turns", "G", "groups", "error", "noise", "dep"):
        assert len({getattr(cell, name) for cell in grid}) >= 2
    assert len({cell.name for cell in grid}) == len(grid)


def test_the_quick_study_has_three_draws_and_eight_methods_at_least():
    """What the command promises of --quick."""
    assert len({cell.seed for cell in cells(quick=True)}) >= 3
    assert len(cad.MEASURES) >= 8


def test_turns_make_runs_longer_and_not_the_team():
    """Two agents that act twice each: four acts, by turns."""
    game = game_of(Cell("T2", 2, 1.0, turns=2))
    assert game.agents == 2
    depth, state = [], int(game.start[0])
    while state >= 0:
        depth.append(int(game.agent[state]))
        state = int(game.next[state, 0])
    assert depth == [0, 1, 0, 1]


@pytest.mark.slow
def test_a_cell_gives_a_row_for_each_method_and_more_at_equal_calls():
    """All columns, at the cost of the rollouts for what observes, and within two percent at equal
    calls for everybody.
    """
    found = run_cell(TINY, 2)
    own = {row["method"]: row for row in found.rows if row["calls"] is None}
    assert set(own) | set(found.refused) == set(cad.MEASURES)
    assert set(SPEC) <= set(own["rloo"])
    assert own["rloo"]["env_calls"] == own["cad_equal"]["env_calls"] == 2 * 4 * 3
    equal = [row for row in found.rows if row["calls"] is not None]
    assert {row["method"] for row in equal} == {*cad.MATCHED, *cad.AS_THEY_ARE}
    for row in equal:
        assert row["env_calls"] <= row["calls"]
    assert own["rloo"]["mse"] == pytest.approx(own["rloo"]["bias2"] + own["rloo"]["variance"])


@pytest.mark.slow
def test_a_method_of_ones_own_takes_part_and_reads_the_proxies(tmp_path):
    """A function that hands out β·q̃ by another road than cad_grpo's gets a row like any other."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from counterpoint import Credit\n"
        "def mine(steps):\n"
        "    q = np.zeros((steps.n_rollouts, len(steps.names['agent'])))\n"
        "    q[steps.quality.rollout, steps.quality.agent] = steps.quality.value\n"
        "    value = q[steps.rollout, steps.agent]\n"
        "    return Credit(value - steps.mean(value), estimand='outcome')\n"
    )
    found = run_cell(TINY, 2, f"{tmp_path / 'mine.py'}:mine")
    (row,) = [row for row in found.rows if row["method"] == "own"]
    assert np.isfinite(row["mse"])
    with pytest.raises(Refused, match="takes no method of yours"):
        study("reference", tmp_path, own="mine.py:mine")


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on(tmp_path, monkeypatch):
    """Finished cells are read, not run again; a torn file is named; other settings are refused."""
    monkeypatch.setattr(cad, "cells", lambda quick: [TINY, TINY._replace(seed=1)])
    monkeypatch.setattr(cad.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setitem(cad.BATCHES, True, 2)
    first = list(run_cells(tmp_path, True, lambda items, label: items))
    ran: list[object] = []
    monkeypatch.setattr(cad, "run_cell", lambda *job: ran.append(job))
    again = list(run_cells(tmp_path, True, lambda items, label: items))
    assert not ran
    assert json.dumps(first[0].rows) == json.dumps(again[0].rows)
    file = tmp_path / "cells" / f"{TINY.name}.json"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(Refused, match="no finished cell"):
        list(run_cells(tmp_path, True, lambda items, label: items))
    with pytest.raises(Refused, match="other settings"):
        list(run_cells(tmp_path, False, lambda items, label: items))


@pytest.mark.slow
def test_the_folder_holds_the_table_the_gate_and_the_page(tmp_path, monkeypatch):
    """cells.parquet with the promised columns, gate.json with its four entries, and a figure."""
    some = [Cell("T2", 2, 1.0, G=4, groups=3), Cell("T9", 2, proxy="padding", G=4, groups=3)]
    monkeypatch.setattr(cad, "cells", lambda quick: some)
    monkeypatch.setattr(cad.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(cad_page, "environments", lambda quick: [])
    monkeypatch.setitem(cad.BATCHES, True, 2)
    page = cad_page.cad(tmp_path, quick=True)
    table = pyarrow.parquet.read_table(tmp_path / "cells.parquet")
    assert set(SPEC) <= set(table.column_names)
    gate = json.loads((tmp_path / "gate.json").read_bytes())
    assert {"auc", "thresholds", "cells_train", "cells_test"} <= set(gate)
    assert "<svg" in page.html
    assert "reconstruction" in page.html
    assert {row["method"] for row in page.rows} <= set(cad.MEASURES)


@pytest.mark.soak
def test_the_quick_study_runs(tmp_path):
    """`study cad --quick`, whole."""
    page = cad_page.cad(tmp_path, quick=True)
    assert len(page.rows) >= 8


# ---------------------------------------------------------------------------------------------
# Who wins where


def test_every_cell_has_one_region():
    """And every region has cells, so that no expectation stands unasked."""
    held = [region_of(cell) for cell in cells(quick=False)]
    assert set(held) == set(REGIONS)


def test_who_wins_where_by_hand():
    """Of two cells cad wins one (by its better form) and cosac the other."""
    one = made(Cell("T1", 2), cad_upstream=9.0, cad_equal=1.0, cosac=2.0, c3_4=3.0, fusion=4.0)
    two = made(Cell("T1", 4), cad_upstream=9.0, cad_equal=5.0, cosac=2.0, c3_4=3.0, fusion=4.0)
    (row,) = use_this_when([one, two])
    assert row["region"] == "sums, nobody reacts"
    assert (row["cells"], row["cad"], row["cosac"], row["fusion"]) == (2, 0.5, 0.5, 0.0)
    assert row["expected"] == "cad"


def test_the_aim_of_fusion_by_hand():
    """Four cells: half of the best (yes), .9 of it (kept), 1.1 of it (kept), twice it (lost)."""
    found = [
        made(Cell("T1", 2, seed=at), cad_equal=1.0, cosac=2.0, c3_4=3.0, fusion=ratio)
        for at, ratio in enumerate((0.5, 0.9, 1.1, 2.0))
    ]
    told = aim(found)
    assert (told["cells"], told["half"]) == (4, 0.25)
    assert told["kept"] == pytest.approx(2 / 3)
    assert told["losses"] == [Cell("T1", 2, seed=3).name]


# ---------------------------------------------------------------------------------------------
# Whether the gate tells


def test_the_area_is_the_share_of_pairs_in_order():
    """Against counting pairs one by one, ties as halves; one kind alone has no area."""
    rng = np.random.default_rng(0)
    score, won = rng.integers(0, 4, 40).astype(float), rng.random(40) < 0.4
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in score[won] for b in score[~won]]
    assert area(score, won) == pytest.approx(np.mean(pairs))
    assert area(score, np.ones(40, dtype=bool)) is None


def test_a_gate_that_knows_has_area_one_and_its_cut_holds_on_other_kinds():
    """Figures 0 and 1 that say who wins: area 1, and everything told right on the second half."""
    found = []
    for K in range(2, 10):
        good = K % 3 != 0
        mse = {
            f"cad_{form}": 0.1 if good else 0.9 for form in ("upstream", "shared", "equal", "drop")
        }
        found.append(made(Cell("T1", K), gate=float(good), calls=None, rloo=0.5, **mse))
    told = judged_gate(found)
    assert told["auc"]["upstream"]["accepted"] == 1.0
    assert told["thresholds"]["equal"]["accepted"] == {"cut": 1.0, "train": 1.0, "test": 1.0}
    assert told["cells_train"] + told["cells_test"] == 8
    assert told["wins"]["drop"] == 5 / 8
