"""Methods over independent batches of one game: bias, variance, gradient and cost of each.

One batch says how far off an estimate was; many say whether it is off on average. All methods get
the same plays and the same truth, or, at matched cost, as many plays as one budget pays for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from counterpoint import groups
from counterpoint.branches import Branches, Foreseen, Menu, Spent
from counterpoint.credit import Account, Agreement, score
from counterpoint.credit.correlation import percentiles
from counterpoint.games import Game, Plays, gradient, play, policy_gradient, truth
from counterpoint.games.game import visits
from counterpoint.games.replaying import Rerun
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

DRAWS = 1000
"""How often batches are drawn again for an interval."""

_AVERAGED = (
    "pearson", "spearman", "kendall", "sign_accuracy", "coverage", "false_alarms", "best_scale",
    "mse_scaled", "second_moment", "culprit", "conservation_error",
)  # fmt: skip
"""Figures of `score` that are averaged over the batches."""


class Scored(NamedTuple):
    """One method over independent batches of one game.

    Attributes:
        batches: how many.
        groups, rollouts: what the method played in each batch: groups, and rollouts of a group.
        estimand, truth: what it says that it estimates, and what it is judged by.
        credited: share of the decisions that it credits. The others count as 0, as a trainer takes
            them.
        bias2: mean over decisions of the squared mean error of their cell (state, act), free of
            sampling noise: unbiased, so that it can come out a little below 0.
        variance: mean over decisions of the variance of the error in their cell; mse − bias2.
        mse: mean over decisions of the squared error.
        pearson … conservation_error: as in `credit.Agreement`, averaged over the batches in which
            they are defined.
        gradient_error: |E g − g*| ÷ |g*|, free of sampling noise: g is the step that the credit of
            a batch gives, g* the exact policy gradient.
        gradient_cosine: of E g and g*, likewise; NaN where E g cannot be told from 0.
        gradient_scale: E g · g* ÷ |g*|², the multiple of g* in E g.
        gradient_noise: √tr Var g ÷ |g*|, of one batch.
        env_calls, forward_passes, tokens: spent in a batch, its rollouts included.
        left_out: branches in a batch that the budget did not cover.
        intervals: name → 95 % interval, by drawing batches again.
    """

    batches: int
    groups: int
    rollouts: int
    estimand: str
    truth: str
    credited: float
    bias2: float
    variance: float
    mse: float
    pearson: float
    spearman: float
    kendall: float
    sign_accuracy: float
    coverage: float
    false_alarms: float
    best_scale: float
    mse_scaled: float
    second_moment: float
    culprit: float
    conservation_error: float
    gradient_error: float
    gradient_cosine: float
    gradient_scale: float
    gradient_noise: float
    env_calls: float
    forward_passes: float
    tokens: float
    left_out: float
    intervals: Mapping[str, tuple[float, float]]


class Metered:
    """The plays of a batch run again, with draws of the batch's own, and a meter.

    Args:
        rerun: the plays of the batch.
        steps: their table, by which branches are priced.
        seed: added to that of whoever asks: without it two batches would share the draws of their
            branches, and so would not be independent.
        calls: the most calls of the environment that may be spent; None for no limit.

    Attributes:
        spent: what was spent so far.
    """

    def __init__(self, rerun: Rerun, steps: Steps, seed: int, calls: int | None = None) -> None:
        self._rerun, self._seed = rerun, seed
        self._account = None if calls is None else Account(rerun, steps, {"env_calls": calls})
        self.spent = Spent()

    @property
    def asked(self) -> bool:
        """Whether branches were asked for, paid or not; only known with a limit."""
        return self._account is not None and self._account.priced.env_calls > 0

    @property
    def left_out(self) -> int:
        """Branches that the limit did not cover."""
        return 0 if self._account is None else self._account.left_out

    def menu(self, places: Ints) -> Menu:
        """As `credit.protocols.Replay.menu`."""
        return self._rerun.menu(places)

    def branch(self, places: Ints, action: Ints, n: int, **named: Any) -> Branches:
        """As `credit.protocols.Replay.branch`."""
        return self._billed(
            (self._account or self._rerun).branch(places, action, n, **self._own(named))
        )

    def absent(self, runs: Ints, agents: Any, present: Any, n: int, **named: Any) -> Branches:
        """As `credit.protocols.Replay.absent`."""
        runner = self._account or self._rerun
        return self._billed(runner.absent(runs, agents, present, n, **self._own(named)))

    def foresee(self, places: Ints, action: Ints, n: int, **named: Any) -> Foreseen:
        """As `credit.asking.Foresight.foresee`."""
        found = self._rerun.foresee(places, action, n, **self._own(named))
        self.spent += found.spent
        return found

    def hindsight(self, places: Ints, outcome: Floats) -> Floats:
        """As `credit.asking.Hindsight`; a forward pass each."""
        self.spent += Spent(forward_passes=len(places))
        return self._rerun.hindsight(places, outcome)

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        return {**named, "seed": named.get("seed", 0) + self._seed}

    def _billed(self, found: Branches) -> Branches:
        self.spent += found.spent
        return found


Measure: TypeAlias = Callable[[Plays, Metered], Credit]
"""A method with its options: what it makes of the plays of a batch, and of running them again."""


def over_batches(
    game: Game,
    measures: Mapping[str, Measure],
    *,
    batches: int,
    rollouts: int,
    seed: int = 0,
    estimand: str = "seqau",
    calls: int | None = None,
) -> dict[str, Scored]:
    """Judge methods by what they give over independent batches of a game.

    A batch plays each context of the game once as a group of `rollouts`. With e the error of a row,
    c its cell (state, act), N the rows that a batch has on average and n_c those of a cell, both
    exact, S_bc = Σ e over the rows of c in batch b:

        mse       = mean over b of Σ e² ÷ N
        bias²     = Σ_c Σ_{b ≠ b'} S_bc S_b'c ÷ (N n_c B(B − 1))
        variance  = mse − bias²

    A square of one batch holds its noise; a product of two does not, so that bias² is unbiased. The
    error and the cosine of the gradient are made of such products as well. In intervals, too, no
    batch meets itself; where there is no bias they are about √3 too wide. A bias in cells so rare
    that hardly two batches meet them shows late: take more batches, or a policy that is more even.

    Source: U-statistics (Hoeffding, 1948); Efron and Tibshirani (1993), ch. 6 and 13.

    Args:
        game: from `games.deal`, whose contexts are the groups.
        measures: name → a function of (plays, what runs them again), such as
            `lambda plays, replay: c3(plays.steps, replay=replay)`.
        batches: B, 2 or more; draws of plays and of branches are a batch's own.
        rollouts: in each group.
        seed: of all draws.
        estimand: which exact credit; one that every decision has.
        calls: the budget of a batch in calls of the environment. A turn is a call, whether it is
            played or re-played in a branch. A method that runs nothing again gets as many rollouts
            as the budget pays for; the others get `rollouts`, and branches for the rest.

    Returns:
        Name → `Scored`. What is undefined in all batches is NaN.

    Raises:
        Refused: fewer than 2 batches; an estimand that some decisions do not have; a budget that
            does not pay for the rollouts.
    """
    if batches < 2:
        raise Refused(f"{batches} batches; bias and variance are told apart by 2 at least")
    seeds = np.random.SeedSequence(seed).generate_state(2 * batches, np.uint64) >> np.uint64(2)
    pairs = seeds.reshape(batches, 2).tolist()
    sizes = {
        name: _rollouts(game, measure, rollouts, calls, pairs[0])
        for name, measure in measures.items()
    }
    found: dict[str, list[_Seen]] = {name: [] for name in measures}
    for own in pairs:
        played = {size: _Batch.of(game, size, own, estimand) for size in set(sizes.values())}
        for name, measure in measures.items():
            found[name].append(_seen(measure, played[sizes[name]], own[1], calls))
    return {name: _scored(game, seen, sizes[name], seed) for name, seen in found.items()}


def _rollouts(
    game: Game, measure: Measure, rollouts: int, calls: int | None, seeds: list[int]
) -> int:
    """How many rollouts a group of a method gets. What it asks for without money tells its kind."""
    if calls is None:
        return rollouts
    each = len(game.start) * float(visits(game, 1.0).sum())
    if calls < rollouts * each:
        raise Refused(
            f"a budget of {calls} calls does not pay for {len(game.start)} groups of {rollouts} "
            f"rollouts, which take {rollouts * each:.6g} turns"
        )
    plays = play(game, groups=len(game.start), rollouts=rollouts, seed=seeds[0])
    meter = Metered(Rerun(plays), plays.steps, seeds[1], 0)
    measure(plays, meter)
    return rollouts if meter.asked else int(calls / each + 1e-9)


# ---------------------------------------------------------------------------------------------
# One batch


class _Batch(NamedTuple):
    plays: Plays
    rerun: Rerun
    exact: Credit

    @staticmethod
    def of(game: Game, rollouts: int, seeds: list[int], estimand: str) -> _Batch:
        plays = play(game, groups=len(game.start), rollouts=rollouts, seed=seeds[0])
        exact = truth(plays, estimand)
        if np.isnan(exact.values[plays.steps.mask]).any():
            raise Refused(
                f"{estimand} is not defined for every decision, so its errors have no mean over "
                "decisions; take another estimand"
            )
        return _Batch(plays, Rerun(plays), exact)


class _Seen(NamedTuple):
    """What one method gave in one batch: errors by cell, its gradient, and what is averaged."""

    cell: Ints
    error: Floats
    square: float
    gradient: Floats
    credited: float
    agreement: Agreement
    spent: Spent
    left_out: int


def _seen(measure: Measure, batch: _Batch, seed: int, calls: int | None) -> _Seen:
    plays, steps = batch.plays, batch.plays.steps
    left = None if calls is None else max(0, calls - len(steps))
    meter = Metered(batch.rerun, steps, seed, left)
    credit = measure(plays, meter)
    values = np.where(steps.mask, np.nan_to_num(credit.values, nan=0.0), np.nan)
    error = (values - batch.exact.values)[steps.mask]
    cell = (plays.state * plays.game.policy.shape[1] + plays.action)[steps.mask]
    cells, place = np.unique(cell, return_inverse=True)
    agreement = score(
        Credit(values, credit.unit, credit.estimand, credit.identified),
        batch.exact,
        rollout=steps.rollout,
    )
    return _Seen(
        cell=cells,
        error=groups.total(place.reshape(-1), error, len(cells)),
        square=float(error @ error),
        gradient=gradient(plays, values).reshape(-1),
        credited=float(credit.credited[steps.mask].mean()),
        agreement=agreement,
        spent=meter.spent + Spent(len(steps), len(steps)),
        left_out=meter.left_out,
    )


# ---------------------------------------------------------------------------------------------
# All batches


class _Again(NamedTuple):
    """How often each batch is drawn: once each in the first row, then by chance; (draws, B)."""

    times: Floats

    def mean(self, x: Floats) -> Floats:
        """(draws,) mean of (B,), over the batches in which it is defined."""
        known = ~np.isnan(x)
        return _over(self.times @ np.where(known, x, 0.0), self.times @ known)

    def products(self, gram: Floats) -> Floats:
        """(draws,) mean over pairs of two batches of (B, B) products; no batch meets itself."""
        total = np.einsum("db,db->d", self.times @ gram, self.times) - self.times**2 @ np.diag(gram)
        return _over(total, self.times.sum(axis=1) ** 2 - np.sum(self.times**2, axis=1))


def _over(x: Floats, y: Floats) -> Floats:
    """The quotient, NaN where the divisor is not above 0."""
    out = np.full(len(x), np.nan)
    np.divide(x, y, out=out, where=y > 0)
    return out


def _scored(game: Game, seen: list[_Seen], rollouts: int, seed: int) -> Scored:
    batches = len(seen)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(batches, np.full(batches, 1 / batches), size=DRAWS)
    again = _Again(np.concatenate([np.ones((1, batches)), drawn]))
    figures = _errors(game, seen, rollouts, again) | _gradients(game, seen, again)
    figures |= {
        name: again.mean(np.array([getattr(each.agreement, name) for each in seen], dtype=float))
        for name in _AVERAGED
    }
    spent = np.mean([list(vars(each.spent).values()) for each in seen], axis=0).tolist()
    return Scored(
        batches=batches,
        groups=len(game.start),
        rollouts=rollouts,
        estimand=seen[0].agreement.estimand,
        truth=seen[0].agreement.truth,
        credited=float(np.mean([each.credited for each in seen])),
        **{name: float(draws[0]) for name, draws in figures.items()},
        **dict(zip(vars(Spent()), spent, strict=True)),
        left_out=float(np.mean([each.left_out for each in seen])),
        intervals={name: percentiles(draws[1:]) for name, draws in figures.items()},
    )


def _errors(game: Game, seen: list[_Seen], rollouts: int, again: _Again) -> dict[str, Floats]:
    """(draws,) of bias², variance and MSE."""
    often = visits(game, 1.0)[:, None] * game.probability * len(game.start) * rollouts
    rows = float(often[game.trainable].sum())
    cells, place = np.unique(np.concatenate([each.cell for each in seen]), return_inverse=True)
    batch = np.repeat(np.arange(len(seen)), [len(each.cell) for each in seen])
    total = np.zeros((len(seen), len(cells)))
    total[batch, place.reshape(-1)] = np.concatenate([each.error for each in seen])
    total /= np.sqrt(rows * often.reshape(-1)[cells])
    mse = again.mean(np.array([each.square for each in seen]) / rows)
    bias2 = again.products(total @ total.T)
    return {"bias2": bias2, "variance": mse - bias2, "mse": mse}


def _gradients(game: Game, seen: list[_Seen], again: _Again) -> dict[str, Floats]:
    """(draws,) of the error, cosine, scale and noise of the gradient, all over |g*|."""
    exact = policy_gradient(game).reshape(-1)
    size = float(np.linalg.norm(exact)) or np.nan
    g = np.stack([each.gradient for each in seen]) / size
    off, along = g - exact / size, g @ (exact / size)
    scale, length = again.mean(along), np.sqrt(np.maximum(again.products(g @ g.T), 0.0))
    error2, square = again.products(off @ off.T), again.mean(np.sum(off**2, axis=1))
    return {
        "gradient_error": np.sqrt(np.maximum(error2, 0.0)),
        "gradient_cosine": np.clip(_over(scale, length), -1, 1),
        "gradient_scale": scale,
        "gradient_noise": np.sqrt(np.maximum(square - error2, 0.0)),
    }
