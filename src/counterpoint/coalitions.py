"""Shapley values: what each player of a game v(S) earns, exactly or from sampled orders.

A coalition is an integer, bit i set where player i is in it, and a game is what every coalition is
worth: a table of 2ⁿ values in that order, or a function from an array of coalitions to their
values. A function is asked once for the distinct coalitions that an estimate needs, since each may
be a run of a whole team. What an absent player does is for whoever builds v to say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import comb
from typing import TypeAlias

import numpy as np

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused

Worth: TypeAlias = Floats | Callable[[Ints], Floats]
"""v(S): (2ⁿ,) values, or a function from (coalitions,) integers to (coalitions,) values."""


_FEW = 8
"""Up to so many players one product with a table of weights beats the fold, whose last slices hold
a number or two: 100,000 games of three players take a fifth of the time."""


# ---------------------------------------------------------------------------------------------
# Exactly


def shapley_values(v: Floats, n: int) -> Floats:
    """Shapley value of every player, for one game or many at once, in O(2ⁿ) a game.

        φ_i = Σ_{S∋i} (α + β)(S) − Σ_S β(S)
        α(S) = (|S|−1)!(n−|S|)!/n!·v(S), 0 for ∅;  β(S) = |S|!(n−|S|−1)!/n!·v(S), 0 for all players

    The sums over the coalitions with i are taken for all i by halving: the upper half of the table
    holds the last player, and the two halves added are the table of a game without it.
    Source: Shapley (1953), A value for n-person games. Σ φ = v(N) − v(∅).

    Args:
        v: (..., 2ⁿ) what the coalitions are worth, v[S] for the integer S; games along the leading
            axes. NaN makes every value of its game NaN.
        n: number of players, 1 or more.

    Returns:
        (..., n) float64.

    Raises:
        Refused: n below 1, or a last axis that is not 2ⁿ long.
    """
    worth = np.asarray(v, dtype=np.float64)
    if n < 1 or worth.shape[-1:] != (2**n,):
        raise Refused(
            f"a game of {n} players has one value for each of its {2 ** max(n, 0)} coalitions; "
            f"the table has shape {worth.shape}"
        )
    share, without = _shares(n)
    if n <= _FEW:
        small: Floats = worth @ (_members(n) * share[:, None] - without[:, None])
        return small
    half, values = worth * share, np.empty((*worth.shape[:-1], n))
    for player in reversed(range(n)):
        low, high = half[..., : 1 << player], half[..., 1 << player :]
        values[..., player] = high.sum(axis=-1)
        low += high
        half = low
    values -= (worth @ without)[..., None]
    return values


def sizes(n: int) -> Ints:
    """(2ⁿ,) how many players each coalition has."""
    count = np.zeros(1 << n, dtype=np.int64)
    for player in range(n):
        np.add(count[: 1 << player], 1, out=count[1 << player : 2 << player])
    return count


def _members(n: int) -> Ints:
    """(2ⁿ, n) 1 where the player is in the coalition."""
    return np.arange(1 << n)[:, None] >> np.arange(n) & 1


@lru_cache(maxsize=2)
def _shares(n: int) -> tuple[Floats, Floats]:
    """(2ⁿ,) what v(S) counts for its members, (α + β)/v, and against everybody, β/v.

    They are the same for all games of n players, and making them takes as long as the fold.
    """
    joined = np.array([0.0, *(1 / (n * comb(n - 1, size)) for size in range(n))])
    left = np.append(joined[1:], 0.0)
    of = sizes(n)
    return (joined + left)[of], left[of]


def ordered_shapley(v: Worth, before: Bools) -> Floats:
    """Shapley value where some players can only join after others, exactly.

        φ_i = Σ_S e(S)·ē(S ∪ i)/e(N)·(v(S ∪ i) − v(S))

    over the coalitions S that hold everybody who must come before its members and before i; e(S)
    counts the orders in which S can assemble, ē(S) those in which the rest can follow. It is the
    mean of the marginals over all linear extensions. Source: Faigle and Kern (1992), The Shapley
    value for cooperative games under precedence constraints. Costs n·2ⁿ.

    Args:
        v: the game; a function is asked for coalitions that can occur only.
        before: (n, n) before[i, j] if player i joins before player j; indirect ones need not be
            set. All False gives `shapley_values`, a chain the marginals of its one order.

    Raises:
        Refused: `before` has a cycle or is not square, or v does not fit.
    """
    first = _predecessors(before)
    n = len(first)
    up, down = _assembled(first), _followed(first)
    possible = np.flatnonzero(up > 0)
    worth = np.zeros(2**n)
    worth[possible] = _asked(v, possible, n)
    values = np.empty(n)
    for player in range(n):
        here = possible[_may_join(possible, player, first)]
        joined = here | 1 << player
        values[player] = up[here] * down[joined] / down[0] @ (worth[joined] - worth[here])
    return values


def _predecessors(before: Bools) -> Ints:
    """(n,) the coalition that must be there before each player joins."""
    n = len(before)
    if n < 1 or before.shape != (n, n):
        raise Refused(f"an order of shape {before.shape}; it has one row and column per player")
    first: Ints = (before.astype(np.int64) << np.arange(n)[:, None]).sum(axis=0)
    gone = 0
    while gone != (1 << n) - 1:
        free = [i for i in range(n) if not gone >> i & 1 and not int(first[i]) & ~gone]
        if not free:
            raise Refused("the order has a cycle: some players must each come before the other")
        gone |= sum(1 << i for i in free)
    return first


def _may_join(coalition: Ints, player: int, first: Ints) -> Bools:
    """Whether the player is not in a coalition yet, and everybody it waits for is."""
    may: Bools = (coalition >> player & 1 == 0) & (first[player] & ~coalition == 0)
    return may


def _assembled(first: Ints) -> Floats:
    """(2ⁿ,) in how many orders each coalition can come together; 0 if in none."""
    n, ways = len(first), np.zeros(1 << len(first))
    ways[0] = 1.0
    of = sizes(n)
    for size in range(n):
        here = np.flatnonzero((of == size) & (ways > 0))
        for player in range(n):
            source = here[_may_join(here, player, first)]
            ways[source | 1 << player] += ways[source]
    return ways


def _followed(first: Ints) -> Floats:
    """(2ⁿ,) in how many orders the other players can join each coalition."""
    n, ways = len(first), np.zeros(1 << len(first))
    ways[-1] = 1.0
    of = sizes(n)
    for size in reversed(range(n)):
        here = np.flatnonzero(of == size)
        for player in range(n):
            source = here[_may_join(here, player, first)]
            ways[source] += ways[source | 1 << player]
    return ways


# ---------------------------------------------------------------------------------------------
# By sampled orders


def permutations(n: int, samples: int, rng: np.random.Generator, antithetic: bool = False) -> Ints:
    """(samples, n) orders of the players, uniform over all n!.

    Args:
        n: number of players.
        samples: how many orders.
        rng: source of the draws.
        antithetic: every second order is the reverse of the one before it, so that a player is
            early as often as late. The mean of one pair is then exact for games of pairwise
            interactions. Source: Mitchell et al. (2022), Sampling permutations for Shapley value
            estimation, §4.2.

    Raises:
        Refused: n or samples below 1, or an odd number of antithetic samples.
    """
    if n < 1 or samples < 1:
        raise Refused(f"{samples} orders of {n} players; there must be one of each at least")
    if antithetic and samples % 2:
        raise Refused(f"antithetic orders come in pairs, and {samples} is odd")
    drawn = np.tile(np.arange(n), (samples // (1 + antithetic), 1))
    drawn = rng.permuted(drawn, axis=1)
    if not antithetic:
        return drawn
    return np.stack([drawn, drawn[:, ::-1]], axis=1).reshape(samples, n)


def linear_extensions(before: Bools, samples: int, rng: np.random.Generator) -> Ints:
    """(samples, n) orders of the players that respect `before`, uniform over all that do.

    The next player is drawn in proportion to the number of orders that can follow it, which costs
    n·2ⁿ to count.

    Args:
        before: (n, n) as in `ordered_shapley`.
        samples: how many orders.
        rng: source of the draws.

    Raises:
        Refused: `before` has a cycle or is not square, or samples below 1.
    """
    first = _predecessors(before)
    n, ways = len(first), _followed(first)
    if samples < 1:
        raise Refused(f"{samples} orders; there must be one at least")
    gone, orders = np.zeros(samples, dtype=np.int64), np.empty((samples, n), dtype=np.int64)
    for place in range(n):
        follow = np.stack(
            [np.where(_may_join(gone, i, first), ways[gone | 1 << i], 0.0) for i in range(n)],
            axis=1,
        )
        share = np.cumsum(follow, axis=1)
        draw = rng.random(samples) * share[:, -1]
        orders[:, place] = np.sum(draw[:, None] >= share, axis=1)
        gone |= 1 << orders[:, place]
    return orders


def marginals(v: Worth, orders: Ints) -> Floats:
    """What each player adds when it joins those before it in an order.

        Δ_i = v(before i ∪ i) − v(before i)

    The mean over orders is the Shapley value (Castro, Gómez and Tejada, 2009), and every single row
    sums to v(N) − v(∅).

    Args:
        v: the game.
        orders: (samples, n) player numbers, each row an order of all of them.

    Returns:
        (samples, n), column i is player i.

    Raises:
        Refused: rows that are no orders, or v does not fit.
    """
    samples, n = orders.shape
    if not np.array_equal(np.sort(orders, axis=1), np.tile(np.arange(n), (samples, 1))):
        raise Refused(f"a row of the orders does not name each of the {n} players once")
    coalitions = np.zeros((samples, n + 1), dtype=np.int64)
    np.cumsum(1 << orders, axis=1, out=coalitions[:, 1:])
    added = np.diff(_asked(v, coalitions, n), axis=1)
    values = np.empty((samples, n))
    np.put_along_axis(values, orders, added, axis=1)
    return values


def _asked(v: Worth, coalitions: Ints, n: int) -> Floats:
    """What the coalitions are worth, shaped like them; a function is asked for each one once."""
    if callable(v):
        distinct, place = np.unique(coalitions, return_inverse=True)
        found = np.asarray(v(distinct), dtype=np.float64)
        if found.shape != distinct.shape:
            raise Refused(
                f"v gave values of shape {found.shape} for {len(distinct)} coalitions; "
                "it gives one value for each"
            )
        return found[place.reshape(coalitions.shape)]
    if np.shape(v) != (2**n,):
        raise Refused(f"a game of {n} players has {2**n} coalitions, the table has {np.shape(v)}")
    return np.asarray(v, dtype=np.float64)[coalitions]


# ---------------------------------------------------------------------------------------------
# By regression


def every_coalition(n: int) -> tuple[Ints, Floats]:
    """All coalitions but the empty and the full one, with the weights of the Shapley kernel.

    w(S) = (n − 1)/(C(n, |S|)·|S|·(n − |S|))
    """
    of = sizes(n)
    inside = np.arange(1, max(2**n - 1, 1))
    weight = [(n - 1) / (comb(n, s) * s * (n - s)) for s in range(1, n)]
    return inside, np.array([0.0, *weight])[of[inside]]


def paired_coalitions(n: int, pairs: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Coalitions drawn by the Shapley kernel, each with its complement; all have weight 1.

    Complements cancel the interactions of even order in the error. Source: Covert and Lee (2021),
    Improving KernelSHAP, §4.

    Args:
        n: number of players, 2 or more.
        pairs: how many coalitions are drawn, beside their complements.
        rng: source of the draws.

    Raises:
        Refused: n below 2 or pairs below 1.
    """
    if n < 2 or pairs < 1:
        raise Refused(f"{pairs} pairs of coalitions of {n} players; 1 and 2 are the least")
    size = np.arange(1, n)
    chance = 1 / (size * (n - size))
    drawn = rng.choice(size, size=pairs, p=chance / chance.sum())
    order = rng.permuted(np.tile(np.arange(n), (pairs, 1)), axis=1)
    one: Ints = np.where(np.arange(n) < drawn[:, None], 1 << order, 0).sum(axis=1)
    both = np.concatenate([one, (1 << n) - 1 - one])
    return both, np.ones(len(both))


def kernel_shap(v: Worth, n: int, drawn: tuple[Ints, Floats]) -> Floats:
    """Shapley values by weighted least squares over coalitions (KernelSHAP).

        min_φ Σ_S w(S)·(v(S) − v(∅) − Σ_{i∈S} φ_i)²  subject to  Σ φ = v(N) − v(∅)

    Exact with `every_coalition`; with `paired_coalitions` an estimate, consistent in their number.
    Source: Lundberg and Lee (2017), arXiv:1705.07874, theorem 2; Covert and Lee (2021).

    Args:
        v: the game.
        n: number of players, 1 to 62.
        drawn: (coalitions, weights), each of shape (m,).

    Returns:
        (n,)

    Raises:
        Refused: the coalitions do not determine the values, or v does not fit.
    """
    coalitions, weight = drawn
    ends = _asked(v, np.concatenate([[0, (1 << n) - 1], coalitions]), n)
    gain = ends[2:] - ends[0]
    member = (coalitions[:, None] >> np.arange(n) & 1).astype(np.float64)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = member.T @ (weight[:, None] * member)
    system[n, n] = 0.0
    if np.linalg.matrix_rank(system) <= n:
        raise Refused(
            f"{len(coalitions)} coalitions do not determine the values of {n} players; draw more"
        )
    right = np.append(member.T @ (weight * gain), ends[1] - ends[0])
    values: Floats = np.linalg.solve(system, right)[:n]
    return values
