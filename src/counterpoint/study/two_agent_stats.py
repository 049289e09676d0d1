"""What the runs of the two-agent experiment say: statistics over seeds, and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from counterpoint.branches import Spent
from counterpoint.groups import Floats
from counterpoint.study.two_agent_run import ARMS, HEADLINE, Cell
from counterpoint.study.two_agent_watch import FIGURES, Row

Runs: TypeAlias = Mapping[Cell, Sequence[Row]]
"""The curve of every run."""

Budget: TypeAlias = Callable[[str], Spent]
"""What a run in an environment may spend."""

Estimate: TypeAlias = tuple[float, float, float]
"""A figure, and the two ends of its 95 % interval."""

DRAWS = 2000
"""Of the bootstrap."""

STAGES = ("start", "1/3", "2/3")
"""Of the budget, where credit is held against the exact one."""


# ---------------------------------------------------------------------------------------------
# Statistics


def interval(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean over runs with a 95 % interval of percentiles: runs are drawn again (Efron 1979).

    One run gives an interval of no width, none NaN.
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return (np.nan, np.nan, np.nan)
    again = np.random.default_rng(seed).integers(len(x), size=(DRAWS, len(x)))
    return _estimate(float(x.mean()), x[again].mean(axis=1))


def improvement(x: Sequence[float], y: Sequence[float], seed: int = 0) -> Estimate:
    """P(X > Y) + ½ P(X = Y) over all pairs of a run of x and one of y; ½ says no difference.

    The interval is of percentiles, runs of either side drawn again. Source: probability of
    improvement, Agarwal et al. 2021 (arXiv:2108.13264, section 4.3).
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(n, size=(DRAWS, n)) for n in wins.shape)
    again = wins[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2))
    return _estimate(float(wins.mean()), again)


def _estimate(value: float, again: Floats) -> Estimate:
    low, high = np.quantile(again, (0.025, 0.975)).tolist()
    return value, low, high


def at_mark(rows: Sequence[Row], axis: str, most: int) -> Row:
    """The row at which a run had spent a budget, as nearly as its updates go."""
    return min(rows, key=lambda row: abs(row[axis] - most))


def over_budget(rows: Sequence[Row], most: int) -> float:
    """Success averaged over calls while they are spent, from the first to the last of the budget.

    What a policy does counts as long as it is the policy: Σ success · calls until the next update.
    """
    calls = np.array([min(row["env_calls"], most) for row in rows] + [most])
    return float(np.diff(calls) @ np.array([row["success"] for row in rows])) / most


def best_path(runs: Runs, env: str, method: str, seeds: Sequence[int], most: Spent) -> float:
    """The step length at which an arm has most success over its budget, on the tuning seeds."""
    found: dict[float, list[float]] = {}
    for cell, rows in runs.items():
        if (cell.env, cell.method) == (env, method) and cell.seed in seeds:
            found.setdefault(cell.path, []).append(over_budget(rows, most.env_calls))
    return max(sorted(found), key=lambda path: float(np.mean(found[path])))


# ---------------------------------------------------------------------------------------------
# Tables


def of(runs: Runs, env: str, method: str) -> list[Sequence[Row]]:
    """The curves of an arm, in the order of their seeds."""
    return [rows for cell, rows in sorted(runs.items()) if (cell.env, cell.method) == (env, method)]


def finals(runs: Runs, env: str, method: str, axis: str, most: Spent) -> list[float]:
    """Success of each run of an arm once it had spent its calls, or its tokens."""
    return [at_mark(rows, axis, getattr(most, axis))["success"] for rows in of(runs, env, method)]


def outcomes(runs: Runs, env: str, most: Spent) -> list[Row]:
    """One row per arm: success with intervals, against naive GRPO, and what it cost."""
    naive = finals(runs, env, "naive_grpo", "env_calls", most)
    table = []
    for method in (name for name in ARMS if of(runs, env, name)):
        curves, final = of(runs, env, method), finals(runs, env, method, "env_calls", most)
        marks = [at_mark(rows, "env_calls", most.env_calls) for rows in curves]
        later = [at_mark(rows, "tokens", most.tokens) for rows in curves]
        table.append(
            {
                "env": env,
                "method": method,
                "seeds": len(curves),
                "final": _spelled(interval(final)),
                "final at equal tokens": _spelled(interval([row["success"] for row in later])),
                "over the budget": _spelled(
                    interval([over_budget(rows, most.env_calls) for rows in curves])
                ),
                "P(better than naive)": None
                if method == "naive_grpo"
                else _spelled(improvement(final, naive)),
                "env_calls": _mean(marks, "env_calls"),
                "tokens": _mean(later, "tokens"),
                "rollouts": _mean(marks, "rollouts"),
                "updates": _mean(marks, "step"),
            }
        )
    return table


def _spelled(found: Estimate) -> str:
    value, low, high = (f"{each:.3f}".replace("0.", ".", 1) for each in found)
    return f"{value} [{low}, {high}]"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(known)) if known else None


def against_exact(runs: Runs, env: str) -> list[Row]:
    """Credit beside the exact one, by arm and stage: means over seeds."""
    table = []
    for method in (name for name in ARMS if of(runs, env, name)):
        probes = [
            [row for row in rows if "credit_pearson" in row] for rows in of(runs, env, method)
        ]
        for at, stage in enumerate(STAGES):
            held = [rows[at] for rows in probes if len(rows) > at]
            row = {"env": env, "method": method, "at": stage}
            table.append({**row, **{name: _mean(held, f"credit_{name}") for name in FIGURES}})
    return table


def regressions(runs: Runs, env: str) -> list[Row]:
    """How β behaves in training: one row per form of CAD-GRPO and agent."""
    table = []
    for method in (name for name in ARMS if ARMS[name].method == "cad_grpo"):
        rows = [row for curve in of(runs, env, method) for row in curve if row.get("beta")]
        for agent in dict.fromkeys(name for row in rows for name in row["beta"]):
            beta = np.array([b for row in rows if (b := row["beta"].get(agent)) is not None])
            if len(beta):
                table.append(
                    {
                        "env": env,
                        "method": method,
                        "agent": agent,
                        "β": float(beta.mean()),
                        "sd over updates": float(beta.std()),
                        "above 0": float((beta > 0).mean()),
                        "gate accepts": _mean(rows, "gate"),
                        "residual_share": _mean(rows, "residual_share"),
                    }
                )
    return table


def qualities(runs: Runs, env: str) -> list[Row]:
    """What each quality of an agent says of what the agent was worth, in runs of naive GRPO."""
    probes = [
        [row["quality"] for row in rows if "quality" in row] for rows in of(runs, env, "naive_grpo")
    ]
    names = dict.fromkeys(name for run in probes for said in run for name in said)
    table = []
    for name in names:
        row: Row = {"env": env, "quality": name}
        for at, stage in enumerate(STAGES):
            row[stage] = _mean([run[at] for run in probes if len(run) > at], name)
        table.append(row)
    return table


def collapse(runs: Runs, env: str) -> list[Row]:
    """Whether agents fail together, and how varied their runs are, in thirds of the calls."""
    table = []
    for method in (name for name in HEADLINE if of(runs, env, name)):
        rows = [row for curve in of(runs, env, method) for row in curve if row["step"]]
        most = max(row["env_calls"] for row in rows)
        for third in range(3):
            held = [row for row in rows if third <= 3 * (row["env_calls"] - 1) / most < third + 1]
            names = ("failing_together", "entropy", "distinct")
            row = {"env": env, "method": method, "third": third + 1}
            table.append({**row, **{name: _mean(held, name) for name in names}})
    return table
