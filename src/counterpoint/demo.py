"""The demo: four methods against exact credit, on real runs that other people recorded, and a team
that learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from counterpoint.credit import estimate, score
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.games import deal, gradient, play, truth
from counterpoint.groups import Floats
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.redrive import credits_of, replay
from counterpoint.report import (
    MEANING,
    SIGNALS,
    Section,
    busiest,
    method_rows,
    page,
    scatter_figure,
    turns_figure,
)
from counterpoint.schema import Finding, Trace
from counterpoint.steps import Steps
from counterpoint.study.two_agent_page import curves
from counterpoint.study.two_agent_run import Cell, scaled, trained
from counterpoint.study.two_agent_stats import outcomes
from counterpoint.validate import validate
from counterpoint.world import fold

ENV, TASKS, RUNS = "research-v0", 16, 16
"""The environment that is played, how many tasks, and how many runs of each."""

GAMES: tuple[str, ...] = ("T2", "T11")
"""A team in which later agents react, and a loop in which states come back."""

GROUPS, ROLLOUTS, SEED = 150, 8, 0

LEARNERS: tuple[str, ...] = ("single_agent", "naive_grpo", "cad_equal")
"""Arms of the study `two-agent` that learn here."""

LEARNING, PATH, SEEDS = 0.5, 6.0, 3
"""Share of the study's budget, how far the table may move, and how many runs of each."""

Panels = list[tuple[str, Floats, Floats]]
"""Title, exact credit and estimate of each scatter plot in a row."""

_LOGS = (
    ("tau-bench airline", "openai_chat", "tau_bench"),
    ("Who&When", "who_and_when", "who_and_when"),
)


class Demo(NamedTuple):
    """The page, the figures of `summary.json`, and the table of real runs."""

    html: str
    summary: dict[str, Any]
    real: list[dict[str, Any]]


def run(out: Path, say: Callable[[str], None] = print) -> Demo:
    """Run the whole demo; `say` hears one sentence per part. Seeds are fixed.

    The runs that are played are recorded into the folder `out`.
    """
    traces, steps, exact = _played(out, say)
    scores, known = _against_exact(steps, exact)
    sections, table, real = [known], list[dict[str, Any]](), 0
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
        real += len(log)
        traces += log
        table += rows
        sections.append(section)
    learning, section = _learned(say)
    sections.insert(1, section)
    nonzero = [row["nonzero_runs"] for row in table if row["method"] == "grpo"]
    dead = [row["groups_without_signal"] for row in table if row["method"] == "grpo"]
    summary = {
        "traces": len(traces),
        "events": sum(len(trace) for trace in traces),
        "real": {
            "traces": real,
            "nonzero": sum(nonzero),
            "groups_without_signal": sum(dead),
        },
        "methods": scores,
        "learning": learning,
    }
    return Demo(page("Counterpoint: who earned the reward", sections), summary, table)


def _excerpt(folder: str, format_: str, findings: list[Finding]) -> Iterator[Trace]:
    with as_file(files("counterpoint").joinpath("excerpts", folder)) as place:
        yield from read(place, format_, findings=findings)


def _credited(name: str, traces: list[Trace]) -> tuple[list[dict[str, Any]], Section]:
    """Credit one log by the four methods: rows for the terminal, a section for the page."""
    steps = Steps.from_traces(traces)
    results = {method: estimate(method, steps, **options) for method, options in SIGNALS.items()}
    rows = []
    for row, credit in zip(method_rows(results), results.values(), strict=True):
        earning = np.unique(steps.rollout[np.nan_to_num(credit.values) != 0])
        rows.append({"runs of": name, **row, "nonzero_runs": len(earning)})
    text = (
        f"{len(traces)} runs, {len(steps)} turns. {MEANING} A group without signal is a task whose "
        "runs all ended alike, or of which there is only one run."
    )
    if not any(row["nonzero_runs"] for row in rows):
        return rows, Section(f"Real runs: {name}", text + " Here no group has a signal.", rows)
    rollout = busiest(steps, results)
    figure = turns_figure(steps, results, rollout)
    caption = f"Credit of every turn of trace {steps.names['rollout'][rollout]}."
    return rows, Section(f"Real runs: {name}", text, rows, figure, caption)


def _played(out: Path, say: Callable[[str], None]) -> tuple[list[Trace], Steps, Credit]:
    """Record runs of the environment, check and replay the file, and list its exact credit."""
    path = out / f"{ENV}.jsonl"
    team, env = Softmax(), make(ENV)
    with Recorder(path, sync="trace") as recorder:
        rollout(env, team, groups=TASKS, rollouts=RUNS, seed=SEED, recorder=recorder)
    found: list[Finding] = []
    traces = list(read(path, findings=found))
    report = validate(traces, found)
    again = replay(traces, policies=team)
    say(
        f"{ENV}: {report.traces} runs recorded, {report.events} events, "
        f"{len(report.findings)} findings, {again.identical} replayed byte for byte"
    )
    exact = [value.seqau for run in credits_of(traces, env, team) for value in run]
    known = Credit(np.array(exact), estimand="seqau", identified="randomised")
    return traces, Steps.from_traces(traces), known


def _compared(
    env: str, steps: Steps, exact: Credit, to_gradient: Callable[[Floats], Floats] | None
) -> tuple[list[dict[str, Any]], Panels]:
    """Every method against the exact credit of the same turns: rows and scatter plots."""
    rows, panels = [], []
    for method, options in SIGNALS.items():
        credit = estimate(method, steps, **options)
        agreement = score(credit, exact, gradient=to_gradient)
        rows.append(
            {
                "env": env,
                "method": method,
                "estimand": credit.estimand,
                "truth": exact.estimand,
                "n": agreement.n,
                "effective_sample_size": credit.diagnostics["effective_sample_size"],
                "pearson": agreement.pearson,
                "spearman": agreement.spearman,
                "sign_accuracy": agreement.sign_accuracy,
                "coverage": agreement.coverage,
                "false_alarms": agreement.false_alarms,
            }
        )
        panels.append((f"{env} {method}", exact.values, credit.values))
    return rows, panels


def _against_exact(steps: Steps, exact: Credit) -> tuple[list[dict[str, Any]], Section]:
    scores, panels = _compared(ENV, steps, exact, None)
    grid = [panels]
    for name in GAMES:
        game = deal(name, contexts=GROUPS, seed=SEED)
        plays = play(game, groups=GROUPS, rollouts=ROLLOUTS, seed=SEED)
        more, panels = _compared(name, plays.steps, truth(plays), partial(gradient, plays))
        scores += more
        grid.append(panels)
    section = Section(
        "Credit that is known exactly",
        f"{ENV} is played by a coordinator and a researcher who choose at random: {TASKS} tasks of "
        f"{RUNS} runs. T2 is a game of four agents in which later ones react, T11 a loop in which "
        f"states come back: {GROUPS} groups of {ROLLOUTS} rollouts each. Seed {SEED}. The truth is "
        "the sequential aristocrat utility Q(h, a) − V(h): how much better the team does in "
        "expectation because of this act, by listing everything that could have happened. A method "
        "with another estimand is not wrong where it differs.",
        scores,
        scatter_figure(grid),
        "Each point is one act: exact credit across, the method's credit up.",
    )
    return scores, section


def _learned(say: Callable[[str], None]) -> tuple[list[dict[str, Any]], Section]:
    """A team from chance on: three ways to learn on one budget."""
    cells = [Cell(ENV, arm, PATH, seed) for arm in LEARNERS for seed in range(SEEDS)]
    runs = {cell: trained(cell, LEARNING, 0).rows for cell in cells}
    budget = partial(scaled, scale=LEARNING)
    rows = outcomes(runs, ENV, budget(ENV))
    say(
        f"{ENV}: {len(runs)} runs of training; "
        + ", ".join(f"{r['method']} {r['final']}" for r in rows)
    )
    text = (
        f"A table of logits learns {ENV} from chance: one agent with all tools, the pair where "
        "everybody gets the team's reward (naive GRPO), and the pair credited by CAD-GRPO with its "
        f"gate. Each has {budget(ENV).env_calls} calls, {budget(ENV).tokens} tokens and the same "
        f"pace, {SEEDS} seeds; success is exact. `counterpoint study two-agent` has ten seeds, "
        "controls, and the other methods."
    )
    caption = "Mean over seeds, and its 95 % interval by bootstrap."
    return rows, Section("A team that learns", text, rows, curves(runs, LEARNERS, budget), caption)
