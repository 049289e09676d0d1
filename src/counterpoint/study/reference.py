"""How near methods come to the exact credit of five games."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from counterpoint.credit import c3, cad_grpo, coma, cosac, grpo, score, shapley
from counterpoint.credit.cad import Advantage
from counterpoint.games import Plays, deal, play, proxies, truth
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.quality import from_rows
from counterpoint.report import Page, Section, page
from counterpoint.steps import Steps
from counterpoint.study.asked import Progress, silent

REFERENCE: dict[str, tuple[str, int]] = {
    "K=2 additive": ("T2", 2),
    "K=2 AND": ("T3", 2),
    "K=4 additive": ("T2", 4),
    "K=4 AND": ("T3", 4),
    "K=4 XOR": ("T5", 4),
}
"""Games of K agents with three acts each, whose policies differ by what was done before and by
nothing else (dep 1, spread 0): name and size."""

GROUP = 8
"""Rollouts in a group."""

CONTEXTS = 150
"""Draws of a game that stand side by side in the reference table."""

_Measure: TypeAlias = Callable[[Plays, Rerun], Credit]

COLUMNS: dict[str, _Measure] = {
    "grpo": lambda plays, rerun: grpo(plays.steps, normalize_std=False),
    "cosac": lambda plays, rerun: _cosac(plays, rerun),
    "c3_4": lambda plays, rerun: c3(plays.steps, replay=rerun),
    "c3_16": lambda plays, rerun: _sixteen(plays, rerun, paired=False),
    "c3_16_paired": lambda plays, rerun: _sixteen(plays, rerun, paired=True),
    "cad_equal": lambda plays, rerun: _cad(plays, "equal"),
    "cad_upstream": lambda plays, rerun: _cad(plays, "upstream"),
    "coma": lambda plays, rerun: coma(plays.steps, replay=rerun),
    "shapley": lambda plays, rerun: shapley(plays.steps, replay=rerun),
}
"""Column of the reference table → the method and its options. `c3_4` has four siblings of one
continuation, `c3_16` sixteen, and four continuations of the act itself, with draws of their own or
`paired` with those of the siblings. `cosac` has λ .01 and eight continuations; what CAD is given
as quality is what `judged` says."""


def _cosac(plays: Plays, rerun: Rerun) -> Credit:
    return cosac(
        plays.steps,
        policy=rerun,
        ridge=0.01,
        continuations=8,
        expectation="enumerate",
        intercept="centred",
        fit_scope="group",
    )


def _cad(plays: Plays, advantage: Advantage) -> Credit:
    return cad_grpo(judged(plays), advantage=advantage, ridge=1e-3)


def judged(plays: Plays) -> Steps:
    """The steps with the best q that one may hope for: what the act adds to a sum, or whether the
    agent succeeded. It descends from the act and, since everybody saw them, from all before it.
    """
    steps, agents = plays.steps, plays.steps.names["agent"]
    success = bool(np.isin(steps.outcome, (0.0, 1.0)).all())
    own = (plays.action == 1).astype(np.float64) if success else proxies(plays, "own")
    seen = [agents[: agent + 1] for agent in range(len(agents))]
    quality = from_rows(
        own,
        steps.rollout,
        steps.agent,
        agents,
        verifiable=["executed"] * len(steps),
        depends=[seen[agent] for agent in steps.agent.tolist()],
    )
    return replace(steps, quality=quality)


def _sixteen(plays: Plays, rerun: Rerun, *, paired: bool) -> Credit:
    return c3(plays.steps, replay=rerun, alternatives=16, own=4, paired=paired)


def reference_table(seeds: Sequence[int], progress: Progress = silent) -> list[dict[str, Any]]:
    """Pearson correlation with exact seqau, by game and method: mean over seeds and, under a name
    that ends in ±, the standard deviation of one seed.

    A seed is 150 draws of the game with a group of 8 rollouts each.
    """
    rows = []
    for label, (name, agents) in progress(REFERENCE.items(), "games"):
        row: dict[str, Any] = {"game": label}
        found = np.array([_correlations(name, agents, seed) for seed in seeds])
        for column, values in zip(COLUMNS, found.T, strict=True):
            row[column] = float(values.mean())
            row[f"{column}_±"] = float(values.std(ddof=1)) if len(seeds) > 1 else np.nan
        rows.append(row)
    return rows


def _correlations(name: str, agents: int, seed: int) -> list[float]:
    game = deal(name, contexts=CONTEXTS, seed=seed, agents=agents, actions=3, dep=1.0, spread=0.0)
    plays = play(game, groups=CONTEXTS, rollouts=GROUP, seed=seed)
    rerun, exact = Rerun(plays), truth(plays, "seqau")
    return [score(measure(plays, rerun), exact).pearson for measure in COLUMNS.values()]


def reference(out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """The reference table: methods against exact credit on five games."""
    seeds = range(2 if quick else 8)
    rows = reference_table(seeds, progress)
    section = Section(
        "How near methods come to exact credit",
        f"Pearson correlation with seqau, exact by enumeration; {CONTEXTS} draws of each game, "
        f"{GROUP} rollouts each, mean of {len(seeds)} seeds; ± is the standard deviation of one. "
        "GRPO broadcasts the outcome, about 1/√K. COSAC fits a sum to each group, and falls below "
        "GRPO where the outcome is none. CAD knows of every agent what its act adds, or whether it "
        "succeeded: `equal` ranks acts, `upstream` is the unbiased gradient. C3 draws four "
        "siblings (c3_4), or sixteen and four continuations of the act itself (c3_16), better if "
        "these share the siblings' draws (c3_16_paired). COMA and Shapley are exact for their own "
        "estimands, with later acts frozen, and still not seqau.",
        rows,
    )
    return Page(page("Reference figures", [section]), rows)
