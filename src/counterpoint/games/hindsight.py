"""What the agents of a game had chosen, had they known how the play would end."""

from __future__ import annotations

import numpy as np

from counterpoint.games.game import Game
from counterpoint.groups import Floats, Ints
from counterpoint.spelling import Refused

MOST_TURNS = 10_000_000
"""How many turns of continuations one call walks through; a few seconds."""

_SAME = 1e-9
"""Outcomes closer than this are one outcome: sums of the same rewards differ by rounding."""


def hindsight(game: Game, state: Ints, action: Ints, left: Floats) -> Floats:
    """(rows,) log π(a | h, R), by enumeration.

        π(a | h, R) = π(a | h) P(R | h, a) / Σ_b π(b | h) P(R | h, b)

    P is a probability, or a density where the game has noise. Source: Bayes' rule; hindsight credit
    assignment (Harutyunyan et al. 2019, arXiv:1912.02503, §3).

    Args:
        game: whose policy acts; its discount is no part of R.
        state: (rows,) h.
        action: (rows,) a.
        left: (rows,) what is paid from h on in the outcome that is known.

    Raises:
        Refused: an outcome that cannot be reached from h; over 10,000,000 turns of continuations to
            walk through, as in a game that meets a state again.
    """
    actions = game.policy.shape[1]
    asked, back = np.unique(np.column_stack([state, left]), axis=0, return_inverse=True)
    here = np.repeat(asked[:, 0].astype(np.int64), actions)
    act = np.tile(np.arange(actions), len(asked))
    worth = _chance(game, here, act, np.repeat(asked[:, 1], actions))
    joint = (game.probability[here, act] * worth).reshape(-1, actions)
    total = joint.sum(axis=1, keepdims=True)
    if not total.all():
        raise Refused("an outcome is asked about that cannot be reached from where it is asked")
    given: Floats = np.log((joint / total)[back.reshape(-1), action])
    return given


def _chance(game: Game, state: Ints, act: Ints, left: Floats) -> Floats:
    """(walks,) how likely just `left` is paid, were `act` done in `state`."""
    found, walked = np.zeros(len(state)), 0
    walk, chance = np.arange(len(state)), np.ones(len(state))
    while len(walk):
        walked += len(walk)
        if walked > MOST_TURNS:
            raise Refused(
                f"hindsight in this game takes over {MOST_TURNS} turns of continuations; take "
                "fewer plays, agents or actions, and a game that meets no state twice"
            )
        left = left - game.reward[state, act]
        state = game.next[state, act]
        over, on = np.flatnonzero(state < 0), np.flatnonzero(state >= 0)
        np.add.at(found, walk[over], chance[over] * _fits(game, left[over]))
        source, act = np.nonzero(game.probability[state[on]])
        chance = chance[on[source]] * game.probability[state[on[source]], act]
        walk, left, state = walk[on[source]], left[on[source]], state[on[source]]
    return found


def _fits(game: Game, off: Floats) -> Floats:
    """How likely the noise makes up for what is off, up to a factor."""
    if game.noise:
        return np.exp(-0.5 * (off / game.noise) ** 2)
    return (np.abs(off) < _SAME).astype(np.float64)
