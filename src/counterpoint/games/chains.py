"""Teams that act once each, in order: the tree of their histories, and who sees whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from counterpoint.games.game import Game
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused

MOST_PREFIXES = 200_000
FIRST = np.zeros(1, dtype=np.int64)

TOPOLOGIES: dict[str, Callable[[int, int], bool]] = {
    "chain": lambda i, j: j == i - 1,
    "star": lambda i, j: j == 0,
    "tree": lambda i, j: j == (i - 1) // 2,
    "dense": lambda i, j: True,
}
"""Whether agent i sees what the earlier agent j did: the one before it, the first one, its parent
in a binary tree, everybody."""


def chain(outcome: Floats, logits: Floats, noise: float = 0.0, anchor: Ints | None = None) -> Game:
    """K agents act once each, in order; the outcome depends on what all of them did.

    The states are the prefixes (a₁ … a_i), numbered level by level, so that prefix h is followed by
    A·h + 1 + a, and the complete histories come last in the order of `outcome`.

    Args:
        outcome: (A,) * K, R(a₁, …, a_K), paid after the last act.
        logits: (anchors, A); without `anchor` (K, A) if an agent sees nothing of the others,
            (prefixes, A) if it sees them all.
        noise: standard deviation of the error on the outcome.
        anchor: (prefixes,) what the acting agent sees of each prefix, as `sight` numbers it.

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
    states = prefixes(agents, actions)
    agent = level(agents, actions)
    if anchor is None:
        anchor = agent if len(logits) == agents else np.arange(states)
    if logits.shape != (int(anchor.max()) + 1, actions):
        raise Refused(
            f"logits of shape {logits.shape} where ({agents}, {actions}), ({states}, {actions}) or "
            "a row for each anchor is needed"
        )
    child = actions * np.arange(states)[:, None] + 1 + np.arange(actions)
    last = child >= states
    return Game(
        policy=softmax(logits),
        anchor=anchor,
        agent=agent,
        reward=np.where(last, outcome.reshape(-1)[np.maximum(child - states, 0)], 0.0),
        next=np.where(last, -1, child),
        start=FIRST,
        noise=noise,
    )


def prefixes(agents: int, actions: int) -> int:
    """How many incomplete histories there are; the complete ones count against the limit too.

    Raises:
        Refused: more than 200,000 of both.
    """
    states = int(sum(actions**i for i in range(agents)))
    if states + actions**agents > MOST_PREFIXES:
        raise Refused(
            f"{agents} agents with {actions} actions have {states + actions**agents} prefixes; "
            f"at most {MOST_PREFIXES} are enumerated, so take fewer agents or actions"
        )
    return states


def level(agents: int, actions: int) -> Ints:
    """(prefixes,) how many agents have acted, which is who acts next."""
    return np.repeat(np.arange(agents), actions ** np.arange(agents))


def sees(agents: int, topology: str) -> Bools:
    """(agents, agents) whether agent i sees what agent j did, for a name of `TOPOLOGIES`."""
    rule = TOPOLOGIES[topology]
    return np.array([[j < i and rule(i, j) for j in range(agents)] for i in range(agents)])


def sight(seen: Bools, actions: int) -> Ints:
    """(prefixes,) the anchor of each prefix: prefixes that differ in unseen acts only share one.

    Anchors are numbered agent by agent, within an agent by the acts it sees, the first of them
    foremost; an agent that sees everybody has an anchor for every prefix, in their order.

    Args:
        seen: (agents, agents) as `sees` gives it.
        actions: of every agent.
    """
    found, begin = [], 0
    for agent in range(len(seen)):
        history, code = np.arange(actions**agent), np.zeros(actions**agent, dtype=np.int64)
        others = np.flatnonzero(seen[agent, :agent])
        for other in others.tolist():
            code = code * actions + history // actions ** (agent - 1 - other) % actions
        found.append(begin + code)
        begin += actions ** len(others)
    return np.concatenate(found)


def reacting(
    rng: np.random.Generator, seen: Bools, actions: int, dep: float, spread: float = 1.0
) -> tuple[Floats, Ints]:
    """Logits of agents that react to what they see, and the anchors that they belong to.

        π_i(a | o) ∝ exp(spread·own_i(a) + dep·react_o(a)),  own, react ~ N(0, 1)

    With dep 0 agents see nothing, so that each has one anchor.
    """
    agents = len(seen)
    own = spread * rng.normal(size=(agents, actions))
    who = level(agents, actions)
    if not dep:
        return own, who
    anchor = sight(seen, actions)
    first = np.unique(anchor, return_index=True)[1]
    return own[who[first]] + dep * rng.normal(size=(len(first), actions)), anchor


def led_by_nature(game: Game) -> Game:
    """The chain with its first turn taken by nature, which is no agent; the others move up."""
    agents = int(game.agent.max())
    return replace(game, nature=FIRST, agent=np.where(game.agent == 0, agents, game.agent - 1))


def log(policy: Floats) -> Floats:
    """Logits of a policy that may rule acts out."""
    return np.log(policy, out=np.full(policy.shape, -np.inf), where=policy > 0)


def softmax(logits: Floats) -> Floats:
    """(anchors, actions) probabilities; a logit of −∞ gives 0."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: Floats = odds / odds.sum(axis=1, keepdims=True)
    return share
