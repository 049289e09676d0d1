"""The reference table: methods against exact credit, as a throw-away prototype found them."""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.study.reference import COLUMNS, REFERENCE, reference, reference_table

FIGURES = ("grpo", "cosac", "c3_4", "c3_16", "cad_equal", "cad_upstream", "coma", "shapley")
PUBLISHED = {
    "K=2 additive": dict(
        zip(FIGURES, (0.69, 0.96, 0.73, 0.91, 0.87, 0.77, 0.96, 0.68), strict=True)
    ),
    "K=2 AND": dict(zip(FIGURES, (0.67, 0.73, 0.68, 0.88, 0.77, 0.72, 0.81, 0.66), strict=True)),
    "K=4 additive": dict(
        zip(FIGURES, (0.47, 0.86, 0.58, 0.81, 0.79, 0.58, 0.93, 0.66), strict=True)
    ),
    "K=4 AND": dict(zip(FIGURES, (0.49, 0.37, 0.50, 0.78, 0.53, 0.50, 0.58, 0.50), strict=True)),
    "K=4 XOR": dict(zip(FIGURES, (0.47, 0.29, 0.46, 0.74, 0.46, 0.47, 0.58, 0.31), strict=True)),
}
"""One seed of another program, rounded to two digits."""


@pytest.mark.soak
def test_the_reference_figures_are_met_within_sampling_error():
    """Each lies within three standard deviations of one seed, and its rounding, of our mean; but
    for COSAC in the additive team of four, where ours is better: its continuations of two acts at
    one history share their draws.
    """
    for row in reference_table(range(8)):
        for column, figure in PUBLISHED[row["game"]].items():
            if (row["game"], column) == ("K=4 additive", "cosac"):
                assert figure < row[column] < figure + 0.06
                continue
            assert abs(row[column] - figure) < 3 * row[f"{column}_±"] + 0.005, (row["game"], column)


@pytest.mark.slow
def test_the_reference_study_runs_and_orders_the_methods(tmp_path):
    """Two seeds: every figure within .08 of its reference, C3 with sixteen siblings above C3 with
    four, above GRPO but for noise, and draws that are shared better than draws that are not.
    """
    found = reference(tmp_path, quick=True)
    assert [row["game"] for row in found.rows] == list(REFERENCE)
    for row in found.rows:
        assert set(row) == {"game", *COLUMNS, *(f"{name}_±" for name in COLUMNS)}
        off = [abs(row[column] - figure) for column, figure in PUBLISHED[row["game"]].items()]
        assert np.max(off) < 0.08
        assert row["c3_16_paired"] > row["c3_16"] > row["c3_4"] > row["grpo"] - 0.02
    assert "Pearson correlation with seqau" in found.html
