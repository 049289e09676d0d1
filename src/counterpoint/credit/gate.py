"""Whether a regression on proxies may be believed: figures about it, and a decision with reasons.

Everything is measured on the shares c_i and never on advantages, which contain the outcome itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.design import Design, by_owner
from counterpoint.credit.regression import (
    Sums,
    correlations,
    cross_fitted,
    fold_of,
    resampled,
    ridge,
    sums,
    varies,
    within,
)
from counterpoint.credit.tails import f_tail, t_critical
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import digest_of
from counterpoint.steps import Steps
from counterpoint.vocabulary import EXECUTED

_BINS, _FOLDS, _DRAWS = 60, 5, 200


class Gate(NamedTuple):
    """Thresholds for believing β.

    Attributes:
        r2: what the lower end of the cross-fitted R² has to exceed.
        level: of that interval.
        stable: share of bootstraps in which β keeps its sign, weighed by what the player explains.
        residual: largest share of the residual in all that is handed out, Σ|e| / (Σ|e| + Σ|c_i|).
        leak: a |correlation| of q with R above it means that q contains R.
        interaction, p: pairwise products that explain more than this share of R, with such a p,
            mean that no sum of shares can be right.
        checks: ways of checking a proxy that are accepted.
    """

    r2: float = 0.0
    level: float = 0.95
    stable: float = 0.8
    residual: float = 0.7
    leak: float = 0.99
    interaction: float = 0.5
    p: float = 0.01
    checks: tuple[str, ...] = EXECUTED


class Verdict(NamedTuple):
    """The decision, why, what to use instead, and the figures that it rests on."""

    accepted: bool
    reasons: tuple[str, ...]
    recommended: str
    figures: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """As a dictionary, for the diagnostics of a credit."""
        return {
            "accepted": self.accepted,
            "reasons": list(self.reasons),
            "recommended": self.recommended,
            **self.figures,
        }


def diagnose(
    steps: Steps, held: Design, cells: Bools, gate: Gate, penalty: float | None, seed: int
) -> Verdict:
    """Examine a regression on some cells, whole tasks of them.

    Args:
        steps: whose labels key folds and draws.
        held: the regression problem.
        cells: (cells,) which take part.
        gate: thresholds.
        penalty: λ, or None to validate it.
        seed: of folds, bootstrap and placebo.

    Returns:
        A verdict whose figures are: r2 and r2_crossed with its interval r2_low, r2_high (by group,
        linearised); residual_share; condition of the correlations and vif of the proxies; stable
        by player, and stable_weighted; halves, the correlation and sign agreement of β on two
        halves of the tasks, and the largest z of their difference; additivity, F, p and gain of
        pairwise products; placebo_r2, cross-fitted, with q dealt to other rollouts of the group;
        leakage, the correlation of q and R by player. NaN where a figure cannot be had. Fewer than
        two tasks are refused.
    """
    X, y, group, task = held.X[cells], held.y[cells], held.group[cells], held.task[cells]
    tasks = len(np.unique(task))
    if tasks < 2 or not float(y @ y):
        why = f"{tasks} tasks to judge by" if tasks < 2 else "no outcome differs from its group's"
        return Verdict(False, (f"{why}, so nothing says that β holds",), "rloo", {"tasks": tasks})
    bins = fold_of(task, steps.names["task"], seed, _BINS)
    parts = sums(X, y, held.raw[cells], bins, _BINS)
    folds = cross_fitted(parts, min(_FOLDS, tasks), penalty)
    beta = np.array([fold.beta for fold in folds])[bins % len(folds)]
    c = by_owner(held, X * beta)
    e = y - c.sum(axis=1)
    lam = float(np.median([fold.penalty for fold in folds]))
    figures: dict[str, Any] = {"tasks": tasks, "ridge": lam}
    figures |= _fit_of(parts, y, e, c, group, gate.level, lam)
    figures |= _shape_of(parts, held)
    figures |= _stability(parts, held, c, lam, seed)
    figures["additivity"] = _additivity(X, y, group, held)
    figures["placebo_r2"] = _placebo(steps, held, cells, bins, len(folds), penalty, seed)
    figures["leakage"] = leakage(X, y, held)
    reasons = tuple(_reasons(figures, held, gate))
    return Verdict(not reasons, reasons, _instead(figures, reasons, gate), figures)


# ---------------------------------------------------------------------------------------------
# Figures


def _fit_of(
    parts: Sums, y: Floats, e: Floats, c: Floats, group: Ints, level: float, lam: float
) -> dict[str, float]:
    """R² in-sample and cross-fitted, and the residual's share.

    The interval takes groups as draws: R² is a ratio of two sums over groups, and its error that
    of the linearised ratio, u_g = Σ e² − (1 − R²) Σ R̃² (Cochran 1977, §2.11).
    """
    whole = parts.over(np.ones(len(parts.y)))
    fitted = ridge(whole, lam)
    inside = 2 * fitted @ whole.b - fitted @ whole.S @ fitted
    total = float(y @ y)
    crossed = 1.0 - float(e @ e) / total
    code = groups.pair(np.zeros_like(group), group)
    n = int(code.max()) + 1
    u = groups.total(code, e * e - (1 - crossed) * y * y, n)
    half = t_critical(level, n - 1) * float(np.sqrt(u @ u * n / max(n - 1, 1))) / total
    left, given = float(np.abs(e).sum()), float(np.abs(c).sum())
    return {
        "r2": float(inside) / total,
        "r2_crossed": crossed,
        "r2_low": crossed - half,
        "r2_high": crossed + half,
        "residual_share": left / (left + given) if left + given else float("nan"),
    }


def _shape_of(parts: Sums, held: Design) -> dict[str, Any]:
    whole = parts.over(np.ones(len(parts.y)))
    C, alive = correlations(whole), np.flatnonzero(varies(whole))
    condition = float(np.linalg.cond(C)) if len(C) else float("nan")
    sound = len(C) > 0 and condition < 1e12
    vif = np.diagonal(np.linalg.inv(C)) if sound else np.full(len(C), np.inf)
    named = zip(alive.tolist(), vif.tolist(), strict=True)
    players = {_name(held, at): v for at, v in named if at < len(held.proxies)}
    return {"condition": condition, "vif": players}


def _stability(parts: Sums, held: Design, c: Floats, lam: float, seed: int) -> dict[str, Any]:
    """How often β keeps its sign when tasks are drawn again, and between two halves of them."""
    filled = np.flatnonzero(parts.y > 0)
    blocks = Sums(*(part[filled] for part in parts))
    whole = blocks.over(np.ones(len(filled)))
    players = np.flatnonzero(varies(whole)[: len(held.proxies)])
    beta = ridge(whole, lam)[players]
    drawn = resampled(blocks, lam, seed, _DRAWS)[:, players]
    keeps = np.mean(np.sign(drawn) == np.sign(beta), axis=0)
    weight = np.einsum("ij,ij->j", c, c)[players]
    halves = np.array([np.arange(len(filled)) % 2 == half for half in (0, 1)], dtype=np.float64)
    one, two = ridge(blocks.over(halves), lam)[:, players]
    deviation = drawn.std(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.abs(one - two) / (2 * deviation)  # each half has twice the variance of the whole
    return {
        "stable": {
            _name(held, at): float(k) for at, k in zip(players.tolist(), keeps, strict=True)
        },
        "stable_weighted": float(keeps @ weight / weight.sum()) if weight.sum() else 0.0,
        "halves": {
            "correlation": _correlation(one, two),
            "sign_agreement": float(np.mean(np.sign(one) == np.sign(two)))
            if len(players)
            else float("nan"),
            "z": float(np.nanmax(z)) if np.isfinite(z).any() else float("nan"),
        },
    }


def _correlation(x: Floats, y: Floats) -> float:
    if len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _additivity(X: Floats, y: Floats, group: Ints, held: Design) -> dict[str, float]:
    """F test of all pairwise products q̃_i q̃_j beside the proxies, and the R² that they add."""
    players = [at for at in range(len(held.proxies)) if X[:, at].any()]
    pairs = [X[:, i] * X[:, j] for i in players for j in players if i < j]
    nothing = {"F": float("nan"), "p": float("nan"), "gain": 0.0}
    if not pairs:
        return nothing
    W = np.concatenate([X, within(group, np.stack(pairs, axis=1), int(group.max()) + 1)], axis=1)
    (small, fewer), (large, more) = _left(X, y), _left(W, y)
    df = len(y) - len(np.unique(group)) - more
    if df < 1 or more == fewer:
        return nothing
    F = ((small - large) / (more - fewer)) / (large / df) if large > 0 else float("inf")
    p = f_tail(F, more - fewer, df) if np.isfinite(F) else 0.0
    return {"F": float(F), "p": p, "gain": (small - large) / float(y @ y)}


def _left(X: Floats, y: Floats) -> tuple[float, int]:
    """Sum of squares that least squares leave, and the rank."""
    held = sums(X, y, X, np.zeros(len(y), dtype=np.int64), 1).over(np.ones(1))
    e = y - X @ ridge(held, 0.0)
    left, rank = float(e @ e), np.linalg.matrix_rank(correlations(held), tol=1e-9, hermitian=True)
    return (left if left > 1e-20 * float(y @ y) else 0.0), int(rank)


def _placebo(
    steps: Steps,
    held: Design,
    cells: Bools,
    bins: Ints,
    folds: int,
    penalty: float | None,
    seed: int,
) -> float:
    """Cross-fitted R² where every rollout has the proxies of another one of its group."""
    rows = np.flatnonzero(cells)
    swapped = held.X[rows][_dealt(steps, held, rows, seed)]
    y = held.y[rows]
    found = cross_fitted(sums(swapped, y, held.raw[rows], bins, _BINS), folds, penalty)
    beta = np.array([fold.beta for fold in found])[bins % folds]
    e = y - np.einsum("ij,ij->i", swapped, beta)
    return 1.0 - float(e @ e) / float(y @ y)


def _dealt(steps: Steps, held: Design, rows: Ints, seed: int) -> Ints:
    """For each of `rows` the place of the next one in its group, in the order of a hash of (seed,
    rollout), so that the order of rows has no say.
    """
    first = np.zeros(len(held.y), dtype=np.int64)
    on = np.flatnonzero(held.cell >= 0)
    first[held.cell[on]] = steps.rollout[on]
    names = steps.names["rollout"]
    keys = [
        digest_of(f"{seed}\x1f{names[r]}".encode(errors="replace")) for r in first[rows].tolist()
    ]
    rank = np.empty(len(rows), dtype=np.int64)
    rank[sorted(range(len(rows)), key=keys.__getitem__)] = np.arange(len(rows))
    order = np.lexsort((rank, held.group[rows]))
    group = held.group[rows][order]
    begins = np.flatnonzero(np.append(True, group[1:] != group[:-1]))
    after = np.arange(1, len(rows) + 1)
    after[np.append(begins[1:], len(rows)) - 1] = begins
    out = np.empty(len(rows), dtype=np.int64)
    out[order] = order[after]
    return out


def leakage(X: Floats, y: Floats, held: Design) -> dict[str, float]:
    """Correlation of each player's q with the outcome, within groups; none without spread."""
    size = np.sqrt(np.einsum("ij,ij->j", X, X) * (y @ y))[: len(held.proxies)]
    return {_name(held, at): float(X[:, at] @ y / size[at]) for at in np.flatnonzero(size).tolist()}


def _name(held: Design, at: int) -> str:
    return str(held.proxies[at].player)


# ---------------------------------------------------------------------------------------------
# The decision


def _reasons(figures: dict[str, Any], held: Design, gate: Gate) -> Iterator[str]:
    """Why not to believe β; none is a yes."""
    for player, r in figures["leakage"].items():
        if abs(r) > gate.leak:
            yield f"leakage: the quality of {player} all but contains the outcome (r {r:.3f})"
    for proxy in held.proxies:
        if proxy.channel is not None and proxy.check not in gate.checks:
            yield (
                f"unverifiable: the quality of {proxy.player} ({proxy.channel}) is of the kind "
                f"{proxy.check}, which its agent can raise at will or nobody has checked"
            )
    if not figures["r2_low"] > gate.r2:
        yield (
            f"no fit: on tasks that it was not fitted on, β explains {figures['r2_crossed']:.3f} "
            f"of the outcome, at least {figures['r2_low']:.3f}"
        )
    if figures["stable_weighted"] < gate.stable:
        yield f"unstable: β keeps its sign in {figures['stable_weighted']:.0%} of the bootstraps"
    if not figures["residual_share"] <= gate.residual:
        yield f"residual: it is {figures['residual_share']:.0%} of what would be handed out"
    found = figures["additivity"]
    if found["p"] < gate.p and found["gain"] > gate.interaction:
        yield (
            f"interaction: pairs of agents explain {found['gain']:.2f} of the outcome beyond what "
            "they explain one by one"
        )


def _instead(figures: dict[str, Any], reasons: tuple[str, ...], gate: Gate) -> str:
    if not reasons:
        return "cad_grpo"
    found = figures["additivity"]
    if found["p"] < gate.p and found["gain"] > gate.interaction:
        return "a measured method such as c3, which pays for branches; else rloo"
    if any(reason.startswith(("leakage", "unverifiable")) for reason in reasons):
        return "rloo, or cad_grpo with other channels"
    return "rloo"
