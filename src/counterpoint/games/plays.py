"""Plays of a game as Steps, sampled or listed, and the gradient that credit of them gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np

from counterpoint import groups as grouped
from counterpoint.games.game import Game, values
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

MOST_LISTED = 200_000

_Path: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Plays:
    """Plays of a game: the table that methods read, and what the truth is looked up by.

    Attributes:
        game: what was played.
        steps: one row per act, sorted by rollout and step. `task` is the context, `anchor` what the
            agent saw, `value` the exact V(h), `logprob` log π(a | o), `state_digest` the state,
            `mask` False where nature moved.
        state: (rows,) the state before the act.
        action: (rows,) the act.
    """

    game: Game
    steps: Steps
    state: Ints
    action: Ints


def play(game: Game, *, groups: int, rollouts: int, seed: int = 0) -> Plays:
    """Sample plays under the game's own policy, all of them turn by turn.

    Args:
        game: what to play.
        groups: number of groups; group g plays context g modulo their number.
        rollouts: plays in each group.
        seed: of all draws; the same seed gives the same plays.

    Raises:
        Refused: groups or rollouts below 1.
    """
    if groups < 1 or rollouts < 1:
        raise Refused(f"{groups} groups of {rollouts} rollouts; there must be one of each at least")
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(groups), rollouts)
    below = np.cumsum(game.policy, axis=1)[:, :-1]
    live, state = np.arange(len(group)), game.start[group % len(game.start)]
    length = np.zeros(len(group), dtype=np.int64)
    turns: list[tuple[Ints, Ints, Ints]] = []
    while len(live):
        draw = rng.random(len(live))
        action = np.sum(draw[:, None] >= below[game.anchor[state]], axis=1)
        turns.append((live, state, action))
        length[live] += 1
        state = game.next[state, action]
        live, state = live[state >= 0], state[state >= 0]
    begin = np.cumsum(length) - length
    states, actions = np.empty((2, int(length.sum())), dtype=np.int64)
    for turn, (rollout, state, action) in enumerate(turns):
        states[begin[rollout] + turn] = state
        actions[begin[rollout] + turn] = action
    error = rng.normal(scale=game.noise, size=len(group))
    return _plays(game, group, length, states, actions, error)


def every(game: Game, rollouts: int) -> tuple[Plays, Floats]:
    """All groups of `rollouts` plays that can happen, and the probability of each group.

    Returns:
        The plays, and (groups,) probabilities that sum to 1; a context has 1/contexts of them.

    Raises:
        Refused: rollouts below 1, a game with noise, one in which a play can meet a state twice, or
            more than 200,000 plays to list.
    """
    if rollouts < 1:
        raise Refused(f"groups of {rollouts} rollouts; there must be one at least")
    if game.noise:
        raise Refused("a game with noise has endlessly many plays; set its noise to 0")
    paths = [list(_paths(game, int(start))) for start in game.start]
    listed = rollouts * sum(len(own) ** rollouts for own in paths)
    if listed > MOST_LISTED:
        raise Refused(
            f"groups of {rollouts} rollouts of this game take {listed} plays, and at most "
            f"{MOST_LISTED} are listed; take fewer rollouts, agents or actions"
        )
    members = [group for own in paths for group in product(own, repeat=rollouts)]
    chance = np.array([[p for _, p in group] for group in members]).prod(axis=1)
    flat = [path for group in members for path, _ in group]
    rows = np.array([row for path in flat for row in path])
    length = np.array([len(path) for path in flat])
    group = np.repeat(np.arange(len(members)), rollouts)
    plays = _plays(game, group, length, rows[:, 0], rows[:, 1], np.zeros(len(flat)))
    return plays, chance / len(game.start)


def _paths(game: Game, start: int) -> Iterator[tuple[_Path, float]]:
    """Every play that can happen from a state as its (state, action) pairs, with its chance."""
    begun: list[tuple[_Path, int, float]] = [((), start, 1.0)]
    while begun:
        path, state, chance = begun.pop()
        if len(path) >= len(game.reward):
            raise Refused("a play of this game can meet a state twice, so plays cannot be listed")
        for action, share in enumerate(game.policy[game.anchor[state]].tolist()):
            longer, after = (*path, (state, action)), int(game.next[state, action])
            if not share:
                continue
            if after < 0:
                yield longer, chance * share
            else:
                begun.append((longer, after, chance * share))


def _plays(
    game: Game, group: Ints, length: Ints, state: Ints, action: Ints, error: Floats
) -> Plays:
    """The table of plays; `group`, `length` and `error` are per rollout, the rest per row.

    The columns are made as they stand, not through `Steps.from_columns`: the codes are the labels,
    and looking four million of them up would take longer than playing.
    """
    n, end = len(group), np.cumsum(length)
    rollout = np.repeat(np.arange(n), length)
    step = np.arange(len(state)) - (end - length)[rollout]
    reward = game.reward[state, action]
    reward[end - 1] += error
    # Contexts lie one after the other, so the first state of a play tells which one it is in.
    task = np.searchsorted(game.start, state[end - length])
    yes, one = np.ones(len(state), dtype=bool), np.ones(len(state), dtype=np.int64)
    steps = Steps(
        group=group[rollout],
        task=task[rollout],
        rollout=rollout,
        step=step,
        agent=game.agent[state],
        role=game.agent[state],
        reward=reward,
        outcome=grouped.total(rollout, reward, n)[rollout],
        mask=game.trainable[state],
        n_tokens=one,
        valid=yes,
        env_step=step,
        anchor=game.anchor[state],
        value=values(game)[state],
        logprob=np.log(game.policy[game.anchor[state], action]),
        state_digest=state,
        names=_names(game, groups=int(group[-1]) + 1, rollouts=n),
    )
    return Plays(game, steps, state, action)


def _names(game: Game, groups: int, rollouts: int) -> dict[str, tuple[object, ...]]:
    agents = tuple(range(int(game.agent.max()) + 1))
    return {
        "group": tuple(range(groups)),
        "task": tuple(range(len(game.start))),
        "rollout": tuple(range(rollouts)),
        "agent": agents,
        "role": agents,
        "anchor": tuple(map(str, range(len(game.policy)))),
        "state_digest": tuple(map(str, range(len(game.reward)))),
    }


# ---------------------------------------------------------------------------------------------
# Gradients


def gradient(plays: Plays, advantage: Floats) -> Floats:
    """(anchors, actions) the step a trainer would take: Σ over rows of A ∇log π ÷ rollouts.

    ∇_θ(o, ·) log π(a | o) = e_a − π(· | o) for a softmax table (Williams, 1992). It is linear in
    the advantage, and `policy_gradient` is what it should be on average.

    Args:
        plays: rows that were credited.
        advantage: (rows,); NaN, never credited, moves nothing, and masked rows do not either.
    """
    policy, seen = plays.game.policy, plays.game.anchor[plays.state]
    push = np.where(plays.steps.mask, np.nan_to_num(advantage, nan=0.0), 0.0)
    anchors, actions = policy.shape
    taken = grouped.total(seen * actions + plays.action, push, policy.size)
    spread = grouped.total(seen, push, anchors)[:, None] * policy
    return (taken.reshape(policy.shape) - spread) / plays.steps.n_rollouts


def expected_gradient(game: Game, method: Callable[[Steps], Credit], rollouts: int) -> Floats:
    """(anchors, actions) exact expectation of `gradient` under a method, by listing all plays.

        E[Σ A ∇log π ÷ rollouts] = Σ over groups of rollouts, P(group) · gradient(group)

    Args:
        game: one without noise and loops.
        method: Steps → Credit, comparing within groups only, since all groups stand in one table.
        rollouts: size of a group.

    Raises:
        Refused: what `every` refuses.
    """
    plays, chance = every(game, rollouts)
    weight = chance[plays.steps.group] * len(chance)
    return gradient(plays, method(plays.steps).values * weight)
