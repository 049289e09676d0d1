"""The games: how each is built, and the one table that command line, docs and tests read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from counterpoint.games.game import Game
from counterpoint.groups import Floats, Ints
from counterpoint.spelling import Refused

MOST_PREFIXES = 200_000
_FIRST = np.zeros(1, dtype=np.int64)


def chain(outcome: Floats, logits: Floats, noise: float = 0.0) -> Game:
    """K agents act once each, in order; the outcome depends on what all of them did.

    The states are the prefixes (a₁ … a_i), numbered level by level, so that prefix h is followed by
    A·h + 1 + a, and the complete histories come last in the order of `outcome`.

    Args:
        outcome: (A,) * K, R(a₁, …, a_K), paid after the last act.
        logits: (K, A) if an agent sees nothing of the others, (prefixes, A) if it sees them all.
        noise: standard deviation of the error on the outcome.

    Raises:
        Refused: more than 200,000 prefixes, agents with unequal numbers of actions, fewer than two
            actions, or logits of another shape.
    """
    agents = outcome.ndim
    actions = max(outcome.shape, default=0)
    if actions < 2 or min(outcome.shape) < actions:
        raise Refused(
            f"an outcome of shape {outcome.shape}; every agent needs the same two or more actions"
        )
    states = _prefixes(agents, actions)
    if logits.shape not in ((agents, actions), (states, actions)):
        raise Refused(
            f"logits of shape {logits.shape} where ({agents}, {actions}) or "
            f"({states}, {actions}) is needed"
        )
    agent = _level(agents, actions)
    child = actions * np.arange(states)[:, None] + 1 + np.arange(actions)
    last = child >= states
    return Game(
        policy=_softmax(logits),
        anchor=agent if len(logits) == agents else np.arange(states),
        agent=agent,
        reward=np.where(last, outcome.reshape(-1)[np.maximum(child - states, 0)], 0.0),
        next=np.where(last, -1, child),
        start=_FIRST,
        noise=noise,
    )


def _prefixes(agents: int, actions: int) -> int:
    """How many incomplete histories there are; the complete ones count against the limit too."""
    states = int(sum(actions**i for i in range(agents)))
    if states + actions**agents > MOST_PREFIXES:
        raise Refused(
            f"{agents} agents with {actions} actions have {states + actions**agents} prefixes; "
            f"at most {MOST_PREFIXES} are enumerated, so take fewer agents or actions"
        )
    return states


def _level(agents: int, actions: int) -> Ints:
    """(prefixes,) how many agents have acted, which is who acts next."""
    return np.repeat(np.arange(agents), actions ** np.arange(agents))


def _softmax(logits: Floats) -> Floats:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: Floats = odds / odds.sum(axis=1, keepdims=True)
    return share


# ---------------------------------------------------------------------------------------------
# One function per kind of game: a source of random terms, and dials


def bandit(rng: np.random.Generator, *, actions: int = 3, noise: float = 0.0) -> Game:
    """T0: one agent acts once, R(a) ~ N(0, 1): the k-armed bandit of Sutton and Barto, ch. 2.

    ∂J/∂θ(a) = π(a)·(R(a) − V). The expectation of an estimator can be written down by hand here.
    """
    _prefixes(1, actions)
    return chain(rng.normal(size=actions), rng.normal(size=(1, actions)), noise)


def additive(
    rng: np.random.Generator,
    *,
    agents: int = 4,
    actions: int = 3,
    dep: float = 0.0,
    noise: float = 0.0,
) -> Game:
    """T1 (dep 0) and T2 (dep 1): R = Σ_i f_i(a_i), f_i ~ N(0, 1), f_i(0) = 0 for the null act.

        π_i(a | h) ∝ exp(own_i(a) + dep·react_h(a)),  own, react ~ N(0, 1)

    With dep 0 the agents see nothing and seqau = f_i(a_i) − E f_i. With dep > 0 they see the
    prefix, and an act also earns what it makes later agents do. Source: the additive team of
    difference rewards (Wolpert and Tumer, Advances in Complex Systems 4, 2001), in sequence.
    """
    states = _prefixes(agents, actions)
    part = rng.normal(size=(agents, actions))
    part[:, 0] = 0.0
    logits = rng.normal(size=(agents, actions))
    if dep:
        react = rng.normal(size=(states, actions))
        logits = logits[_level(agents, actions)] + dep * react
    return chain(reduce(np.add.outer, part), logits, noise)


def loop(
    rng: np.random.Generator,
    *,
    nodes: int = 4,
    gamma: float = 0.9,
    cost: float = 0.05,
    noise: float = 0.0,
) -> Game:
    """T11: one agent walks the nodes 0 … N−1; act 0 goes on, act 1 goes back one node.

    Every move costs `cost`, going on from the last node pays 1 and ends. Q(s, a) = r + γ V(s').
    Nodes are met several times in one rollout and by many rollouts, which is what the step groups
    of GiGPO live on (arXiv:2505.10978, §4).
    """
    here = np.arange(nodes)
    reward = np.full((nodes, 2), -cost)
    reward[-1, 0] += 1.0
    return Game(
        policy=_softmax(np.array([0.5, 0.0]) + rng.normal(scale=0.5, size=(nodes, 2))),
        anchor=here,
        agent=np.zeros(nodes, dtype=np.int64),
        reward=reward,
        next=np.stack([np.append(here[1:], -1), np.maximum(here - 1, 0)], axis=1),
        start=_FIRST,
        gamma=gamma,
        noise=noise,
    )


def stopping(
    rng: np.random.Generator,
    *,
    turns: int = 4,
    pay: float = -0.2,
    spread: float = 1.0,
    noise: float = 0.0,
) -> Game:
    """T16: one agent stops (act 0) or goes on (act 1); every turn pays `pay`, or costs it.

        V*(t) = pay + max(prize_t, V*(t + 1)),  prize ~ spread·N(0, 1)

    Stopping at turn t pays prize_t; going on after the last turn ends the game without a prize.
    How many turns there are is the policy's decision, so a reward that is centred per turn index
    loses what the decision was worth. Source: optimal stopping with a finite horizon (Chow, Robbins
    and Siegmund, 1971, Great Expectations, ch. 3).
    """
    here = np.arange(turns)
    reward = np.full((turns, 2), pay)
    reward[:, 0] += spread * rng.normal(size=turns)
    return Game(
        policy=_softmax(rng.normal(scale=0.5, size=(turns, 2))),
        anchor=here,
        agent=np.zeros(turns, dtype=np.int64),
        reward=reward,
        next=np.stack([np.full(turns, -1), np.append(here[1:], -1)], axis=1),
        start=_FIRST,
        noise=noise,
    )


# ---------------------------------------------------------------------------------------------
# The table


class Row(NamedTuple):
    """One game of the table: how to build it, what it is, what it tells apart."""

    factory: Callable[..., Game]
    about: str
    separates: str


GAMES: dict[str, Row] = {
    "T0": Row(
        bandit,
        "one-agent bandit",
        "REINFORCE unbiased; mean-only GRPO (G−1)/G of the gradient; with std not proportional",
    ),
    "T1": Row(
        additive,
        "K agents, additive outcome, nobody reacts",
        "an agent's own part against the team's return",
    ),
    "T2": Row(
        partial(additive, dep=1.0),
        "K agents, additive outcome, later agents react",
        "credit for what an act makes later agents do",
    ),
    "T11": Row(
        loop,
        "loop graph with two actions",
        "step credit against Q − V where states are met again and rewards discounted",
    ),
    "T16": Row(
        stopping,
        "one agent goes on or stops, each turn costs or pays",
        "rewards centred per turn index are biased when stopping is an act",
    ),
}


def deal(name: str, *, contexts: int = 1, seed: int = 0, **dials: float) -> Game:
    """Build a game of the table, with its random terms drawn anew for every context.

    Args:
        name: a key of `GAMES`.
        contexts: how many draws stand side by side, each with states and a policy of its own; a
            group of rollouts plays one of them.
        seed: of the draws; context c is the same whatever `contexts` is.
        **dials: keyword arguments of the game's function, e.g. agents=2.

    Raises:
        Refused: no such game or dial, contexts below 1, or what the game refuses.
    """
    if name not in GAMES:
        raise Refused(f"there is no game {name!r}; the games are {', '.join(GAMES)}")
    factory = GAMES[name].factory
    known = {p.name: p.default for p in list(inspect.signature(factory).parameters.values())[1:]}
    for dial, value in dials.items():
        if dial not in known:
            raise Refused(f"game {name} has no dial {dial!r}; it has {', '.join(known)}")
        if isinstance(known[dial], int) and not (isinstance(value, int) and value >= 1):
            raise Refused(f"dial {dial} of game {name} is {value!r}; it is a whole number from 1")
        if not np.isfinite(value):
            raise Refused(f"dial {dial} of game {name} is {value!r}; it is a finite number")
    if contexts < 1:
        raise Refused(f"{contexts} contexts of game {name}; there must be one at least")
    rngs = [np.random.default_rng([seed, context]) for context in range(contexts)]
    return _side_by_side([factory(rng, **dials) for rng in rngs])


def _side_by_side(games: Sequence[Game]) -> Game:
    """One game of which each of `games`, equal in size and dials, is a context."""
    states, anchors = len(games[0].reward), len(games[0].policy)
    numbered = list(enumerate(games))
    return replace(
        games[0],
        policy=np.concatenate([game.policy for game in games]),
        anchor=np.concatenate([game.anchor + i * anchors for i, game in numbered]),
        agent=np.concatenate([game.agent for game in games]),
        reward=np.concatenate([game.reward for game in games]),
        next=np.concatenate(
            [np.where(game.next < 0, -1, game.next + i * states) for i, game in numbered]
        ),
        start=np.arange(len(games)) * states,
    )
