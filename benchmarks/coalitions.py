"""Shapley values from a table of coalitions against shap and shapiq, and how far enumeration goes.

The peers are what a user would otherwise run; they read the same table of 2ⁿ values, and the
numbers are compared before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import shap
import shapiq

from counterpoint.coalitions import shapley_values
from counterpoint.games import deal, play, truth, values

PLAYERS = 16
REPEATS = 5
GOALS = {"shap": 100.0, "shapiq": 1000.0}


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds of CPU time."""
    return [*exact_against_peers(), *absolute()]


def exact_against_peers() -> list[dict[str, Any]]:
    worth = np.random.default_rng(0).normal(size=2**PLAYERS)
    bits = 1 << np.arange(PLAYERS)

    def looked_up(present: np.ndarray) -> np.ndarray:
        return worth[present.astype(np.int64) @ bits]

    explainer = shap.explainers.Exact(looked_up, np.zeros((1, PLAYERS)))
    everybody = np.ones((1, PLAYERS))

    def by_shap() -> np.ndarray:
        return explainer(everybody, max_evals=2**PLAYERS + 1).values[0]

    def by_shapiq() -> np.ndarray:
        found = shapiq.ExactComputer(looked_up, n_players=PLAYERS)("SV", order=1)
        return np.array([found[(player,)] for player in range(PLAYERS)])

    def ours() -> np.ndarray:
        return shapley_values(worth, PLAYERS)

    peers = {"shap": by_shap, "shapiq": by_shapiq}
    for peer in peers.values():
        np.testing.assert_allclose(ours(), peer(), atol=1e-9)
    taken = alternately(ours, *peers.values())
    return [
        {
            "job": f"exact Shapley from a value table, {PLAYERS} players",
            "ours": taken[0],
            "peer": peer,
            "peer_name": name,
            "ratio": peer / taken[0],
            "goal": GOALS[name],
        }
        for name, peer in zip(peers, taken[1:], strict=True)
    ]


def absolute() -> list[dict[str, Any]]:
    """Figures without a peer: printed, never asserted."""
    rng = np.random.default_rng(0)
    twenty, many = rng.normal(size=2**20), rng.normal(size=(100_000, 8))
    deep, wide = deal("T13", agents=16, topology="dense"), deal("T13", actions=58, agents=3)
    plays = play(deal("T2", contexts=150), groups=150, rollouts=8)
    jobs: dict[str, Callable[[], Any]] = {
        "exact Shapley from a value table, 20 players": lambda: shapley_values(twenty, 20),
        "exact Shapley, 100,000 games of three players": lambda: shapley_values(many, 3),
        "exact values, 131,071 prefixes (16 agents)": lambda: values(deep),
        "exact values, 198,535 prefixes (58 actions)": lambda: values(wide),
        **{
            f"exact {estimand} of 1,200 plays of T2": lambda estimand=estimand: truth(
                plays, estimand
            )
            for estimand in ("coma", "removal:replayed", "shapley:frozen", "shapley:replayed")
        },
    }
    return [{"job": job, "ours": alternately(run)[0]} for job, run in jobs.items()]


def alternately(*runs: Callable[[], Any]) -> list[float]:
    """Median CPU seconds of each, run by turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for own, run in zip(taken, runs, strict=True):
            began = time.process_time()
            run()
            own.append(time.process_time() - began)
    return [statistics.median(own) for own in taken]
