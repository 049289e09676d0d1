"""CAD-GRPO: the outcome shared out by a regression on proxies of each agent's own work.

A reconstruction. The method's own definition is not public; the choices are options here, and a
function of the user's own takes its place wherever a method is named (`file.py:function`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint.credit.design import By, Design, by_owner, design
from counterpoint.credit.gate import Gate, Verdict, diagnose, leakage
from counterpoint.credit.grouped import Singleton, group_diagnostics, lone, single
from counterpoint.credit.regression import (
    Errors,
    Fold,
    correlations,
    cross_fitted,
    fold_of,
    inference,
    sums,
)
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Advantage = Literal["upstream", "shared", "equal", "drop"]

_COLLINEAR = 1e10
"""Condition of the correlations from which proxies count as combinations of each other."""

_ROUNDING = 1e-12

_BINS = 60
"""Tasks are dealt into about this many bins, whose sums are all that folds and λ need."""


def cad_grpo(
    steps: Steps,
    *,
    advantage: Advantage = "upstream",
    by: By = "agent",
    channels: Sequence[str] | None = None,
    checked_only: bool = False,
    ridge: float | None = None,
    folds: int = 2,
    gate: bool | Gate = False,
    errors: Errors = "hc3",
    singleton: Singleton = "zero",
    seed: int = 0,
) -> Credit:
    """Regression on proxies: each agent is compared by what its own quality q is worth to the team.

    A reconstruction of CAD-GRPO, whose definition is not public. Estimates `outcome`:
    Q(h, a) − V(h₀), with what others did before and beside it taken out as far as q explains it.

        R̃, q̃ = R, q minus the mean of the group
        β̂ = (Σ q̃q̃ᵀ + λN·D)⁻¹ Σ q̃R̃,  D = diag(mean q̃²),  on the tasks of other folds
        c_i = β̂_i q̃_i,  e = R̃ − Σ c_i
        upstream: A_i = R̃ − Σ_{j ∈ N(i)} c_j,  N(i) = {j ≠ i: q_j does not descend from i}
        shared: A_i = c_i + e    equal: A_i = c_i + e/n    drop: A_i = c_i

    each times G/(G − 1), with G the scored rollouts of the group. Σ c_i + e = R̃ exactly, before
    that factor. Source: this reconstruction (docs/methods/cad_grpo.md); within transform Frisch and
    Waugh 1933, ridge Hoerl and Kennard 1970, cross-fitting Chernozhukov et al. 2018.

    `upstream` is an unbiased policy gradient for every β that was not fitted on the group, whatever
    q says, as long as `depends` of the quality leaves nothing out. `shared` is so only where no q
    descends from another agent; `equal` and `drop` need besides that what an act is worth is
    linear in q.

    Args:
        steps: rows with `group`, `task`, `rollout`, `outcome`, `mask`, `agent` and `quality`.
        advantage: which of the four forms.
        by: whether q and β are per agent or per role (the mean of its agents' q in a rollout).
        channels: which channel of an agent is its q, the first of these that it has; by default the
            one that was checked best.
        checked_only: use only what was executed, looked up or compared with an artefact.
        ridge: λ, a number from 0 up; by default cross-validated on the tasks that β is fitted on.
        folds: tasks are dealt into so many, and β comes from the other ones; 1 fits β on the very
            rollouts that it credits, which is biased and said to be.
        gate: whether β is used only where the tasks of the other folds say that it may be believed
            (`Gate` holds the thresholds); elsewhere the credit is that of `rloo`.
        errors: of β in `diagnostics`: hc1, hc3, cr1 (by group) or bootstrap (by group).
        singleton: what a group of one scored rollout gets: 0, its raw outcome, or an error.
        seed: of the folds and of what the gate draws.

    Returns:
        Credit per turn with parts outcome, mean, q, beta, share (c_i), residual (e), others (what
        was taken off R̃) and depends (how many other players' q descend from the turn's player).
        Masked rows and unscored rollouts are never credited (NaN). A player without any q, or whose
        q does not vary within groups, has β 0 and stands in `not_estimated`. A q that is missing
        counts 0 beside a column that says whether it is there; `missing` counts those of players
        that acted. Of fewer than two tasks no β is fitted, and the credit is that of `rloo`. A
        group whose outcomes are all equal is counted, and not zeroed: which groups those are
        depends on the acts, so zeroing shares there would bias the gradient. Where a player with a
        share has no turn in a rollout, shares do not add up over the turns: `unclaimed` is the mean
        size of what nobody got. `coefficients` are of the whole batch, for the reader; what was
        used is in the part beta. `advice` says in sentences what looks mistaken.

    Raises:
        Refused: no quality; `upstream` where the quality does not say what it depends on; agents
            of one rollout with outcomes of their own; an option out of range; a group of one with
            singleton="error".
    """
    if advantage not in ("upstream", "shared", "equal", "drop"):
        raise Refused(f"advantage is {advantage!r}; it is 'upstream', 'shared', 'equal' or 'drop'")
    if errors not in ("hc1", "hc3", "cr1", "bootstrap"):
        raise Refused(f"errors is {errors!r}; it is 'hc1', 'hc3', 'cr1' or 'bootstrap'")
    if ridge is not None and not 0 <= ridge < np.inf:
        raise Refused(f"ridge is {ridge!r}; it is a number from 0 up, or left out")
    if not 1 <= folds <= _BINS:
        raise Refused(f"folds is {folds!r}; it is a whole number from 1 to {_BINS}")
    held = design(steps, by, channels, checked_only)
    if advantage == "upstream" and held.depends is None:
        raise Refused(
            "upstream needs the column depends, whose acts each quality descends from; give "
            "depends= to from_columns, or take another advantage"
        )
    fitted = _fit(steps, held, folds, ridge, seed, _gate(gate))
    c = _shares(held, fitted)
    e = held.y - c.sum(axis=1)
    return _credit(steps, held, fitted, c, e, advantage, singleton, errors, seed)


def _gate(gate: bool | Gate) -> Gate | None:
    return gate if isinstance(gate, Gate) else Gate() if gate else None


class Fitted(NamedTuple):
    """β by fold, the fold of each cell, and what the gate said to each fold and to all tasks."""

    folds: list[Fold]
    fold: Ints
    tasks: int
    verdicts: list[Verdict]
    whole: Verdict | None


def _fit(
    steps: Steps, held: Design, folds: int, penalty: float | None, seed: int, gate: Gate | None
) -> Fitted:
    count = folds * max(1, _BINS // folds)
    bins = fold_of(held.task, steps.names["task"], seed, count)
    found = cross_fitted(sums(held.X, held.y, held.raw, bins, count), folds, penalty)
    fold, tasks = bins % folds, len(np.unique(held.task))
    if gate is None:
        return Fitted(found, fold, tasks, [], None)
    every = np.ones(len(fold), dtype=bool)
    verdicts = [
        diagnose(steps, held, every if folds == 1 else fold != own, gate, penalty, seed)
        for own in range(folds)
    ]
    used = [
        each if verdict.accepted else each._replace(beta=np.zeros_like(each.beta))
        for each, verdict in zip(found, verdicts, strict=True)
    ]
    return Fitted(used, fold, tasks, verdicts, diagnose(steps, held, every, gate, penalty, seed))


def _shares(held: Design, fitted: Fitted) -> Floats:
    """(cells, players) c_i, with the share of a player's presence in it."""
    beta = np.array([fold.beta for fold in fitted.folds])[fitted.fold]
    return by_owner(held, held.X * beta)


def _credit(
    steps: Steps,
    held: Design,
    fitted: Fitted,
    c: Floats,
    e: Floats,
    advantage: Advantage,
    singleton: Singleton,
    errors: Errors,
    seed: int,
) -> Credit:
    mean, sigma, size = steps.moments(steps.outcome)
    on = held.cell >= 0
    at = (held.cell[on], held.player[on])
    by_player = _advantages(held, c, e, advantage)
    factor = np.divide(size, size - 1, out=np.ones_like(size), where=size > 1)
    values = np.full(len(steps), np.nan)
    values[on] = by_player[at] * factor[steps.group[on]]
    lone(steps, steps.outcome, values, single(steps.group, size), singleton)
    values[~steps.mask] = np.nan

    def spread(table: Floats) -> Floats:
        out = np.full(len(steps), np.nan)
        out[on] = table[at] if table.ndim == 2 else table[at[0]]
        return out

    said = group_diagnostics(steps, sigma > 0, size)
    said |= _said(steps, held, fitted, c, e, advantage)
    said["coefficients"] = _coefficients(steps, held, fitted, errors, seed)
    advice = (*said.get("advice", ()), *_advice(steps, held, fitted, said))
    beta = np.array([fold.beta[: held.q.shape[1]] for fold in fitted.folds])
    parts = {
        "outcome": steps.outcome,
        "mean": lambda: mean.take(steps.group),
        "q": lambda: spread(held.q),
        "beta": lambda: spread(beta[fitted.fold]),
        "share": lambda: spread(c),
        "residual": lambda: spread(e),
        "others": lambda: spread(held.y[:, None] - by_player),
        "depends": lambda: _moved(held)[held.player],
    }
    return Credit(
        values,
        estimand="outcome",
        parts=Parts(parts),
        diagnostics={**said, **({"advice": advice} if advice else {})},
    )


def _advantages(held: Design, c: Floats, e: Floats, advantage: Advantage) -> Floats:
    """(cells, players) before the factor G/(G − 1)."""
    if advantage == "upstream":
        assert held.depends is not None
        free = ~held.depends
        np.fill_diagonal(free, False)
        return np.asarray(held.y[:, None] - c @ free)
    if advantage == "equal":
        return np.asarray(c + e[:, None] / np.maximum(held.acts.sum(axis=1, keepdims=True), 1))
    return np.asarray(c + e[:, None]) if advantage == "shared" else c


def _moved(held: Design) -> Floats:
    """(players,) how many others' q descend from each; NaN where nobody says."""
    if held.depends is None:
        return np.full(held.q.shape[1], np.nan)
    others = held.depends.sum(axis=0) - np.diagonal(held.depends)
    return np.asarray(others, dtype=np.float64)


# ---------------------------------------------------------------------------------------------
# What is said beside the numbers


def _said(
    steps: Steps, held: Design, fitted: Fitted, c: Floats, e: Floats, advantage: Advantage
) -> dict[str, Any]:
    total = float(held.y @ held.y)
    lost = np.abs(np.where(held.acts, 0.0, c).sum(axis=1))
    said: dict[str, Any] = {
        "reconstruction": True,
        "unbiased": len(fitted.folds) > 1 and _unbiased(held, advantage),
        "r2": 1.0 - float(e @ e) / total if total else float("nan"),
        "tasks": fitted.tasks,
        "unclaimed": float(lost.mean()) if len(lost) else 0.0,
        "ridge": [fold.penalty for fold in fitted.folds],
        "proxies": [proxy._asdict() for proxy in held.proxies],
        "not_estimated": _not_estimated(held, fitted),
        "missing": {str(p.player): p.missing for p in held.proxies if p.missing},
    }
    if fitted.whole is not None:
        folds = [verdict.plain() for verdict in fitted.verdicts]
        said["gate"] = {**fitted.whole.plain(), "folds": folds}
    return said


def _unbiased(held: Design, advantage: Advantage) -> bool:
    """Whether theory says so of cross-fitted credit, whatever q says."""
    if advantage == "upstream":
        return True
    return advantage == "shared" and held.depends is not None and not _moved(held).any()


def _not_estimated(held: Design, fitted: Fitted) -> list[str]:
    """Players whose q no fold could use."""
    varies = np.any([fold.varies[: held.q.shape[1]] for fold in fitted.folds], axis=0)
    return [str(p.player) for p, alive in zip(held.proxies, varies, strict=True) if not alive]


def _coefficients(
    steps: Steps, held: Design, fitted: Fitted, errors: Errors, seed: int
) -> dict[str, dict[str, float]]:
    """β of the whole batch with standard errors and 95 % intervals, by player."""
    varies = np.any([fold.varies for fold in fitted.folds], axis=0)
    penalty = float(np.mean([fold.penalty for fold in fitted.folds]))
    found = inference(
        np.where(varies, held.X, 0.0),
        held.y,
        held.group,
        steps.n_groups,
        errors=errors,
        penalty=penalty,
        seed=seed,
    )
    columns = zip(held.proxies, found.beta, found.stderr, found.low, found.high, strict=False)
    names = ("beta", "stderr", "low", "high")
    return {
        str(p.player): dict(zip(names, map(float, numbers), strict=True)) for p, *numbers in columns
    }


def _advice(steps: Steps, held: Design, fitted: Fitted, said: dict[str, Any]) -> Iterator[str]:
    """What a person should look at, in sentences."""
    idle, missing = said["not_estimated"], said["missing"]
    if not len(held.y):
        yield "no rollout is both scored and trainable, so nothing is shared out"
    elif fitted.tasks < 2 and len(fitted.folds) > 1:
        yield (
            "there are fewer than two tasks, so no β can be fitted on other ones: the credit is "
            "that of rloo"
        )
    elif idle:
        yield f"no β for {', '.join(idle)}: its quality is missing, or does not vary within groups"
    if len(fitted.folds) == 1:
        yield "β was fitted on the rollouts that it credits, which biases the gradient"
    if missing:
        counts = ", ".join(f"{player} ({n} rollouts)" for player, n in missing.items())
        yield f"quality is missing although the agent acted: {counts}"
    yield from _shape(held)
    if said["unclaimed"] > _ROUNDING:
        yield "some shares belong to players without a turn, so shares do not add up to the outcome"
    if unsure := steps.counts.get("quality_from_unsure_edges"):
        yield (
            f"edges of {unsure} traces are missing or guessed, so their quality is taken to depend "
            "on everybody"
        )
    if fitted.whole is not None:
        yield from (f"gate: {reason}" for reason in fitted.whole.reasons)


def _shape(held: Design) -> Iterator[str]:
    """Faults of the regression as a whole: too few rows, collinear or leaking proxies."""
    there = len(np.unique(held.group))
    spread = np.einsum("ij,ij->j", held.X, held.X)
    players = int(np.count_nonzero(spread[: held.q.shape[1]]))
    if 0 < there < players:
        yield f"there are fewer groups ({there}) than players with a quality ({players})"
    if 0 < len(held.y) - there <= players:
        yield (
            f"{len(held.y)} rollouts in {there} groups cannot tell {players} players apart; β is "
            "what λ leaves of it"
        )
    one = sums(held.X, held.y, held.raw, np.zeros(len(held.y), dtype=np.int64), 1)
    C = correlations(one.over(np.ones(1)))
    if len(C) and np.linalg.cond(C) > _COLLINEAR:
        yield "the qualities are collinear: how they share their part among them is arbitrary"
    for player, r in leakage(held.X, held.y, held).items():
        if abs(r) > Gate().leak:
            yield f"the quality of {player} all but contains the outcome"
