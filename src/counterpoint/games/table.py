"""The table of games that command line, docs and tests read, and the games of one walker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from counterpoint.games.chains import FIRST, TOPOLOGIES, softmax
from counterpoint.games.game import Game
from counterpoint.games.teams import (
    FORMS,
    RULES,
    additive,
    bandit,
    cooperative,
    dummy,
    gate,
    interrupted,
    logic,
    mediated,
    pairwise,
    relay,
)
from counterpoint.spelling import Refused


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
        policy=softmax(np.array([0.5, 0.0]) + rng.normal(scale=0.5, size=(nodes, 2))),
        anchor=here,
        agent=np.zeros(nodes, dtype=np.int64),
        reward=reward,
        next=np.stack([np.append(here[1:], -1), np.maximum(here - 1, 0)], axis=1),
        start=FIRST,
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
        policy=softmax(rng.normal(scale=0.5, size=(turns, 2))),
        anchor=here,
        agent=np.zeros(turns, dtype=np.int64),
        reward=reward,
        next=np.stack([np.full(turns, -1), np.append(here[1:], -1)], axis=1),
        start=FIRST,
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
    "T3": Row(
        logic,
        "AND: the team succeeds if all of its agents do",
        "an agent that had succeeded from the one that failed first; GRPO blames all",
    ),
    "T4": Row(
        partial(logic, rule="or"),
        "OR: one success is enough",
        "removal, which is 0 for two that both succeeded, from Shapley, which gives each ½",
    ),
    "T5": Row(
        partial(logic, rule="xor"),
        "XOR: an odd number of successes",
        "additive models, whose residual share tends to 1",
    ),
    "T6": Row(
        gate,
        "one agent spawns the others, at a cost, or does not",
        "spawn effects that a log identifies; hidden=.3 adds .3 unless its propensities are used",
    ),
    "T7": Row(
        cooperative,
        "glove, airport and majority games: who joins",
        "Shapley values, which stand in textbooks",
    ),
    "T8": Row(
        dummy,
        "an additive team with an agent that changes nothing",
        "credit that is 0 for the dummy; GRPO and Dr.MAS pay it",
    ),
    "T9": Row(
        partial(additive, dep=0.0),
        "an additive team beside proxies: self-report, call count, padding",
        "proxies that say what an act was worth from those that say nothing",
    ),
    "T10": Row(
        mediated,
        "a confounder that one agent sees, and a mediator",
        "regression coefficients from the effect of doing",
    ),
    "T11": Row(
        loop,
        "loop graph with two actions",
        "step credit against Q − V where states are met again and rewards discounted",
    ),
    "T12": Row(
        relay,
        "one injected decisive error, repaired later with a known chance",
        "where the first error is from where things look bad",
    ),
    "T13": Row(
        partial(additive, actions=2, dep=1.0, topology="chain"),
        "2 to 16 agents, additive outcome; chain, star, tree or dense",
        "how credit decays with the number of agents and with who sees whom",
    ),
    "T14": Row(
        interrupted,
        "an additive team whose plays have masked rows and differ in length",
        "credit that changes with rows that nobody trains",
    ),
    "T15": Row(
        partial(additive, dep=1.0, noise=1.0),
        "T2 with an error of standard deviation 1 on the outcome",
        "cost, bias and variance of estimates",
    ),
    "T16": Row(
        stopping,
        "one agent goes on or stops, each turn costs or pays",
        "rewards centred per turn index are biased when stopping is an act",
    ),
    "T17": Row(
        pairwise,
        "interactions of two agents and no more",
        "antithetic orders, exact after one pair; additive models, which fail",
    ),
}


NAMED: dict[str, Collection[str]] = {"topology": TOPOLOGIES, "rule": RULES, "form": FORMS}
"""Dials that are set by a name → the names."""


def deal(name: str, *, contexts: int = 1, seed: int = 0, **dials: float | str) -> Game:
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
        _check(f"dial {dial} of game {name} is {value!r}", value, known[dial], NAMED.get(dial))
    if contexts < 1:
        raise Refused(f"{contexts} contexts of game {name}; there must be one at least")
    rngs = [np.random.default_rng([seed, context]) for context in range(contexts)]
    return _side_by_side([factory(rng, **dials) for rng in rngs])


def _check(
    said: str, value: float | str, default: float | str, names: Collection[str] | None
) -> None:
    """Refuse a value that the dial cannot take."""
    if names is not None:
        if value not in names:
            raise Refused(f"{said}; it is one of {', '.join(names)}")
    elif isinstance(value, str) or not np.isfinite(value):
        raise Refused(f"{said}; it is a finite number")
    elif isinstance(default, int) and not (isinstance(value, int) and value >= 1):
        raise Refused(f"{said}; it is a whole number from 1")


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
        start=np.concatenate([game.start + i * states for i, game in numbered]),
        nature=np.concatenate([game.nature + i * states for i, game in numbered]),
    )
