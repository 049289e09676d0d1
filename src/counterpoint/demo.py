"""The demo: real runs credited by four methods, and the methods against exact credit on games."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import numpy as np

from counterpoint.credit import estimate, score
from counterpoint.formats import read
from counterpoint.games import Plays, deal, play, truth
from counterpoint.groups import Floats
from counterpoint.report import (
    Section,
    busiest,
    method_rows,
    page,
    scatter_figure,
    turns_figure,
)
from counterpoint.schema import Finding, Trace
from counterpoint.steps import Steps
from counterpoint.validate import validate
from counterpoint.world import fold

METHODS: dict[str, dict[str, Any]] = {
    "reinforce": {"baseline": "leave_one_out"},
    "gae": {"values": "mc"},
    "grpo": {},
    "gigpo": {},
}
"""The four signals, and the options that differ from their defaults."""

ENVS: tuple[str, ...] = ("T2", "T11")
"""A team in which later agents react, and a loop in which states come back."""

GROUPS, ROLLOUTS, SEED = 150, 8, 0

_LOGS = (
    ("tau-bench airline", "openai_chat", "tau_bench"),
    ("Who&When", "who_and_when", "who_and_when"),
)


class Demo(NamedTuple):
    """The page, the figures of `summary.json`, and the table of real runs."""

    html: str
    summary: dict[str, Any]
    real: list[dict[str, Any]]


def run(say: Callable[[str], None] = print) -> Demo:
    """Run the whole demo; `say` hears one sentence per part. Seeds are fixed."""
    traces, sections, table = [], [], []
    for name, format_, folder in _LOGS:
        found: list[Finding] = []
        log = list(_excerpt(folder, format_, found))
        report = validate(log, found)
        agents = sum(len(fold(trace).agents) for trace in log)
        say(
            f"{name}: {report.traces} runs of {agents} agents, {report.events} events, "
            f"{len(report.findings)} findings"
        )
        rows, section = _credited(name, log)
        traces += log
        table += rows
        sections.append(section)
    scores, games = _against_exact()
    nonzero = [row["nonzero_runs"] for row in table if row["method"] == "grpo"]
    dead = [row["groups_without_signal"] for row in table if row["method"] == "grpo"]
    summary = {
        "traces": len(traces),
        "events": sum(len(trace) for trace in traces),
        "real": {
            "traces": len(traces),
            "nonzero": sum(nonzero),
            "groups_without_signal": sum(dead),
        },
        "methods": scores,
    }
    return Demo(page("Counterpoint: who earned the reward", [*sections, games]), summary, table)


def _excerpt(folder: str, format_: str, findings: list[Finding]) -> Iterator[Trace]:
    with as_file(files("counterpoint").joinpath("excerpts", folder)) as place:
        yield from read(place, format_, findings=findings)


def _credited(name: str, traces: list[Trace]) -> tuple[list[dict[str, Any]], Section]:
    """Credit one log by the four methods: rows for the terminal, a section for the page."""
    steps = Steps.from_traces(traces)
    results = {method: estimate(method, steps, **options) for method, options in METHODS.items()}
    rows = []
    for row, credit in zip(method_rows(results), results.values(), strict=True):
        earning = np.unique(steps.rollout[np.nan_to_num(credit.values) != 0])
        rows.append({"runs of": name, **row, "nonzero_runs": len(earning)})
    text = (
        f"{len(traces)} runs, {len(steps)} turns. Effective sample size is the number of rollouts "
        "that can teach a method anything; a group without signal is a task whose runs all ended "
        "alike, or of which there is only one run."
    )
    if not any(row["nonzero_runs"] for row in rows):
        return rows, Section(f"Real runs: {name}", text + " Here no group has a signal.", rows)
    rollout = busiest(steps, results)
    figure = turns_figure(steps, results, rollout)
    caption = f"Credit of every turn of trace {steps.names['rollout'][rollout]}."
    return rows, Section(f"Real runs: {name}", text, rows, figure, caption)


def _against_exact() -> tuple[list[dict[str, Any]], Section]:
    scores: list[dict[str, Any]] = []
    panels: list[list[tuple[str, Floats, Floats]]] = []
    for env in ENVS:
        plays: Plays = play(
            deal(env, contexts=GROUPS, seed=SEED), groups=GROUPS, rollouts=ROLLOUTS, seed=SEED
        )
        exact = truth(plays, "seqau")
        panels.append([])
        for method, options in METHODS.items():
            credit = estimate(method, plays.steps, **options)
            agreement = score(credit, exact)
            scores.append(
                {
                    "env": env,
                    "method": method,
                    "estimand": credit.estimand,
                    "n": agreement.n,
                    "effective_sample_size": credit.diagnostics["effective_sample_size"],
                    "pearson": agreement.pearson,
                    "spearman": agreement.spearman,
                    "sign_accuracy": agreement.sign_accuracy,
                    "coverage": agreement.coverage,
                    "false_alarms": agreement.false_alarms,
                }
            )
            panels[-1].append((f"{env} {method}", exact.values, credit.values))
    section = Section(
        "Games whose credit is known exactly",
        f"{GROUPS} groups of {ROLLOUTS} rollouts each, seed {SEED}. The truth is the sequential "
        "aristocrat utility Q(h, a) − V(h): how much better the team does in expectation because "
        "of this act. A method with another estimand is not wrong where it differs.",
        scores,
        scatter_figure(panels),
        "Each point is one act: exact credit across, the method's credit up.",
    )
    return scores, section
