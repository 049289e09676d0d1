"""Regression within groups against pyfixest and DuckDB: a million rollouts, sixteen proxies.

Both peers are given the same rows, and the coefficients are compared before anything is timed.
"""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyfixest

from benchmarks.coalitions import alternately
from counterpoint.credit.regression import ridge, sums, within

PROXIES, SIZE = 16, 8
GOALS = {"pyfixest": 20.0, "DuckDB": 5.0}
NAMES = [f"q{i}" for i in range(PROXIES)]

Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds of CPU time."""
    data = drawn(1_000_000)
    frame = pd.DataFrame(data[0], columns=NAMES).assign(R=data[1], g=data[2])
    base = duckdb.connect()
    base.execute("SET threads = 1")
    base.execute("CREATE TABLE d AS SELECT * FROM frame")
    peers = {"pyfixest": lambda: by_pyfixest(frame), "DuckDB": lambda: by_duckdb(base)}
    for peer in peers.values():
        np.testing.assert_allclose(ours(data), peer(), atol=1e-10)
    taken = alternately(lambda: ours(data), *peers.values())
    small = drawn(100_000)
    tenth, whole = alternately(lambda: ours(small), lambda: ours(data))
    against = [
        {
            "job": f"regression within groups, 1e6 × {PROXIES}",
            "ours": taken[0],
            "peer": peer,
            "peer_name": name,
            "ratio": peer / taken[0],
            "goal": GOALS[name],
        }
        for name, peer in zip(peers, taken[1:], strict=True)
    ]
    growth = {
        "job": "the same, growth exponent from 1e5 rows",
        "ours": float(np.log10(whole / tenth)),
    }
    return [*against, growth]


def drawn(n: int) -> Data:
    """Proxies, outcomes and groups of SIZE rollouts."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(n // SIZE), SIZE)
    q = rng.normal(size=(n, PROXIES))
    outcome = q @ rng.normal(size=PROXIES) + rng.normal(size=n // SIZE)[group] + rng.normal(size=n)
    return q, outcome, group


def ours(data: Data) -> np.ndarray:
    """Within transform, sums, and least squares (λ 0, as the peers know no other)."""
    q, outcome, group = data
    n = int(group[-1]) + 1
    held = sums(within(group, q, n), within(group, outcome, n), q, np.zeros(len(q), np.int64), 1)
    return ridge(held.over(np.ones(1)), 0.0)


def by_pyfixest(frame: pd.DataFrame) -> np.ndarray:
    """`feols` with a fixed effect for every group."""
    return np.asarray(pyfixest.feols(f"R ~ {' + '.join(NAMES)} | g", frame).coef())


def by_duckdb(base: duckdb.DuckDBPyConnection) -> np.ndarray:
    """Means by group, then all products of what is left, in SQL."""
    columns = [*NAMES, "R"]
    means = ", ".join(f"avg({c}) AS {c}" for c in columns)
    less = ", ".join(f"d.{c} - m.{c} AS {c}" for c in columns)
    pairs = [(i, j) for i in range(len(columns)) for j in range(i, len(columns))]
    products = ", ".join(f"sum({columns[i]} * {columns[j]})" for i, j in pairs)
    found = base.execute(
        f"WITH m AS (SELECT g, {means} FROM d GROUP BY g), "
        f"z AS (SELECT {less} FROM d JOIN m USING (g)) SELECT {products} FROM z"
    ).fetchone()
    S = np.zeros((len(columns), len(columns)))
    for (i, j), value in zip(pairs, found, strict=True):
        S[i, j] = S[j, i] = value
    return np.linalg.solve(S[:PROXIES, :PROXIES], S[:PROXIES, PROXIES])
