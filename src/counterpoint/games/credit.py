"""What every act of a play was truly worth, by enumeration, for each estimand that methods name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.coalitions import shapley_values
from counterpoint.games.game import Game, action_values, per_anchor, values, visits
from counterpoint.games.plays import Plays
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused

NULL = 0
"""The act of an agent that does nothing."""

MOST_HISTORIES = 50_000_000
"""How many histories one call walks through; about ten seconds."""

_BLOCK = 1 << 17
"""Histories that are walked at once, so that memory stays small however many there are."""


class Downstream(NamedTuple):
    """What agents do once something has changed: absent ones, and those who see the change."""

    absent: int
    answers: bool


FROZEN = Downstream(NULL, answers=False)
REPLAYED = Downstream(NULL, answers=True)
RESAMPLED = Downstream(-1, answers=False)


def truth(plays: Plays, estimand: str = "seqau") -> Credit:
    """The exact credit of every row, for an estimand that methods name.

        seqau              Q(h, a) − V(h)
        outcome            E[R | the rollout so far, a] − V(h₀)
        anchor             Q(o, a) − V(o), over the states that look like o, as often as visited
        coma               R − Σ_a' π(a' | h) R(a', all others as they were)
        removal:frozen     R − R(null act, all others as they were)
        removal:replayed   R − E[R(null act)], whoever then sees something else answers again
        removal:anew       R − Q(h, null act): all that comes later is drawn anew
        shapley:…          mean over all orders of the agents of v(S ∪ i) − v(S)
          frozen           v(S): agents outside S take the null act, all others act as they did
          replayed         the same, but whoever sees something else than it did answers again
          resampled        agents outside S follow their policy, all others act as they did
        first_error        R − max_a' R(a', all others as they were) at the first act of a failed
                           play that, changed alone, makes it succeed, 0 on its other acts; NaN on
                           plays that succeeded
        x+y                the sum of the two, e.g. outcome+anchor

    R is the undiscounted return; its noise is part of none of them. Rows of nature are NaN, and
    what nature did is kept like an agent's act. An agent that sees what it saw, at the turn at
    which it saw it, acts as it did: a replay draws with the same stream, so that an act which
    nobody notices changes nobody's. Σ over a play of seqau (γ = 1) is R − V(h₀), of
    shapley:resampled too unless nature moved, of the other two Shapley values R − R(all null).

    Sources: Sutton et al. (1999) for Q − V, in a team the aristocrat utility of Wolpert and Tumer
    (Advances in Complex Systems 4, 2001) taken in sequence; Foerster et al. (2018,
    arXiv:1705.08926) for coma; Shapley (1953); Zhang et al. (2025, arXiv:2505.00212, §3) for the
    first error.

    Raises:
        Refused: another estimand; a change after which acts cannot be kept as they were, since the
            play grows longer or turns change hands; Shapley values of plays in which an agent acts
            twice, or that take too many histories; first errors where outcomes are not 0 and 1.
    """
    names = estimand.split("+")
    for name in names:
        if name not in TRUTHS:
            raise Refused(f"there is no exact {estimand!r} of a game, only {', '.join(TRUTHS)}")
    found = np.sum([TRUTHS[name](plays) for name in names], axis=0)
    return Credit(
        np.where(plays.steps.mask, found, np.nan),
        estimand=estimand,
        identified="randomised",
        diagnostics={"effective_sample_size": plays.steps.n_rollouts},
    )


def _seqau(plays: Plays) -> Floats:
    gain: Floats = action_values(plays.game)[plays.state, plays.action]
    return gain - values(plays.game)[plays.state]


def _outcome(plays: Plays) -> Floats:
    plain, steps = _undiscounted(plays.game), plays.steps
    before = np.cumsum(steps.reward) - steps.reward
    past = before - before[steps.step == 0][steps.rollout]
    whole: Floats = past + action_values(plain)[plays.state, plays.action]
    return whole - values(plain)[plain.start][steps.task]


def _anchor(plays: Plays) -> Floats:
    game = plays.game
    often = visits(game, 1.0)[:, None]
    gain = per_anchor(game, often * (action_values(game) - values(game)[:, None]))
    seen = per_anchor(game, often)
    mean: Floats = np.divide(gain, seen, out=np.zeros_like(gain), where=seen > 0)
    return mean[game.anchor[plays.state], plays.action]


def _undiscounted(game: Game) -> Game:
    return replace(game, gamma=1.0)


# ---------------------------------------------------------------------------------------------
# One act changed


def _coma(plays: Plays) -> Floats:
    game = plays.game
    changed = _changed(plays, np.arange(game.policy.shape[1]), FROZEN)
    mean: Floats = np.sum(game.probability[plays.state] * changed, axis=1)
    return _onward(plays) - mean


def _removal(plays: Plays, downstream: Downstream) -> Floats:
    return _onward(plays) - _changed(plays, np.array([NULL]), downstream)[:, 0]


def _removal_anew(plays: Plays) -> Floats:
    instead: Floats = action_values(_undiscounted(plays.game))[plays.state, NULL]
    return _onward(plays) - instead


def _first_error(plays: Plays) -> Floats:
    steps, onward = plays.steps, _onward(plays)
    outcome = onward[steps.step == 0]
    if not np.isin(outcome, (0.0, 1.0)).all():
        raise Refused(
            "a first error makes a play fail, and the outcomes of this game are not 0 and 1"
        )
    best = _changed(plays, np.arange(plays.game.policy.shape[1]), FROZEN).max(axis=1)
    row, lost = np.arange(len(steps)), steps.mask & (best > onward)
    first = np.full(steps.n_rollouts, len(steps))
    np.minimum.at(first, steps.rollout[lost], row[lost])
    blamed = np.where(row == first[steps.rollout], onward - best, 0.0)
    return np.where(outcome[steps.rollout] == 1.0, np.nan, blamed)


def _onward(plays: Plays) -> Floats:
    """(rows,) what is paid from each row on, without noise."""
    paid, rollout = plays.game.reward[plays.state, plays.action], plays.steps.rollout
    before = np.cumsum(paid) - paid
    begun: Floats = before[plays.steps.step == 0]
    return (groups.total(rollout, paid, len(begun)) + begun)[rollout] - before


def _changed(plays: Plays, acts: Ints, downstream: Downstream) -> Floats:
    """(rows, acts) expected pay from each row on, were its act another one; NaN for nature's."""
    game = plays.game
    trained = np.flatnonzero(plays.steps.mask)
    row, act = np.repeat(trained, len(acts)), np.tile(acts, len(trained))
    here, everybody = plays.state[row], np.full(len(row), (1 << game.agents) - 1)
    then = _walk(plays, row + 1, row, game.next[here, act], everybody, downstream)
    paid = np.full((len(plays.state), len(acts)), np.nan)
    paid[trained] = (game.reward[here, act] + then).reshape(-1, len(acts))
    return paid


# ---------------------------------------------------------------------------------------------
# Agents absent


def _shapley(plays: Plays, downstream: Downstream) -> Floats:
    """(rows,) the Shapley value of the agent that acts in the row, in the game v of its play."""
    return _by_row(plays, shapley_values(_worth(plays, downstream), plays.game.agents))


def alone(plays: Plays) -> Floats:
    """(rows,) v(i) − v(∅): R if only the agent of the row acts as it did, less R(all null)."""
    worth = _worth(plays, FROZEN, np.append(0, 1 << np.arange(plays.game.agents)))
    return _by_row(plays, worth[:, 1:] - worth[:, :1])


def _worth(plays: Plays, downstream: Downstream, coalitions: Ints | None = None) -> Floats:
    """(rollouts, coalitions) v(S) of each play: what it is expected to pay without the agents
    outside S; of all 2ᴷ sets if none are named, as bits.
    """
    game, steps, agents = plays.game, plays.steps, plays.game.agents
    turns = np.bincount((steps.rollout * agents + game.agent[plays.state])[steps.mask])
    if turns.max() > 1:
        raise Refused(
            "an agent acts twice in a play of this game; coalitions are of agents that act once"
        )
    size = 1 << min(agents, 62) if coalitions is None else len(coalitions)
    _affordable(steps.n_rollouts * size)
    first = np.repeat(np.flatnonzero(steps.step == 0), size)
    sets = np.arange(size) if coalitions is None else coalitions
    present = np.tile(sets, steps.n_rollouts)
    return _walk(plays, first, first, plays.state[first], present, downstream).reshape(-1, size)


def _by_row(plays: Plays, by_agent: Floats) -> Floats:
    """(rows,) of (rollouts, agents); nature, which has the number after the last agent's, 0."""
    every_turn = np.pad(by_agent, ((0, 0), (0, 1)))
    return every_turn[plays.steps.rollout, plays.game.agent[plays.state]]


def _affordable(histories: int) -> None:
    if histories > MOST_HISTORIES:
        raise Refused(
            f"exact credit of these plays takes over {MOST_HISTORIES} histories; take fewer plays, "
            "agents or actions, or sample"
        )


# ---------------------------------------------------------------------------------------------
# The walk


def _walk(
    plays: Plays, row: Ints, of: Ints, state: Ints, present: Ints, downstream: Downstream
) -> Floats:
    """(walks,) expected pay from a state on, when a play goes on otherwise than it did.

    Args:
        plays: what happened.
        row: (walks,) the row whose turn it is; past the end of its play if that had no such turn.
        of: (walks,) a row of the play that is walked anew.
        state: (walks,) where the walk is, −1 at the end.
        present: (walks,) the agents, as bits, that are not absent.
        downstream: what agents do.
    """
    game, rollout = plays.game, plays.steps.rollout
    end = np.searchsorted(rollout, rollout[of], side="right")
    earned, histories = np.zeros(len(state)), 0
    begun = np.flatnonzero(state >= 0)
    todo = [(begun, np.ones(len(begun)), row[begun], state[begun])]
    while todo:
        walk, chance, at, here = todo.pop()
        if len(walk) > _BLOCK:
            halves = [np.array_split(part, 2) for part in (walk, chance, at, here)]
            todo += zip(*halves, strict=True)
            continue
        histories += len(walk)
        _affordable(histories)
        act = _acts(plays, at, at < end[walk], here, present[walk], downstream)
        # An agent that answers splits the walk into one for each act of its policy.
        share = np.where(act[:, None] < 0, game.probability[here], 1.0)
        split = np.where(act[:, None] < 0, share > 0, np.arange(share.shape[1]) == act[:, None])
        source, act = np.nonzero(split)
        walk, here, chance = walk[source], here[source], chance[source] * share[source, act]
        np.add.at(earned, walk, chance * game.reward[here, act])
        here = game.next[here, act]
        live = here >= 0
        if live.any():
            todo.append((walk[live], chance[live], at[source][live] + 1, here[live]))
    return earned


def _acts(
    plays: Plays, row: Ints, real: Bools, state: Ints, present: Ints, downstream: Downstream
) -> Ints:
    """(walks,) what the agent whose turn it is does; −1 if it answers by its policy."""
    game = plays.game
    then = plays.state[np.minimum(row, len(plays.state) - 1)]
    who = game.agent[state]
    there = (present >> who & 1 == 1) | ~game.trainable[state]
    kept = there & real & (who == game.agent[then])
    if downstream.answers:
        kept &= game.anchor[state] == game.anchor[then]
    elif np.any(there & ~kept):
        raise Refused(
            "after the change a play of this game grows longer, or turns change hands, so that "
            "acts cannot be kept as they were"
        )
    did = np.where(kept, plays.action[np.minimum(row, len(plays.state) - 1)], -1)
    return np.where(there, did, downstream.absent)


TRUTHS: dict[str, Callable[[Plays], Floats]] = {
    "seqau": _seqau,
    "outcome": _outcome,
    "anchor": _anchor,
    "coma": _coma,
    "removal:frozen": partial(_removal, downstream=FROZEN),
    "removal:replayed": partial(_removal, downstream=REPLAYED),
    "removal:anew": _removal_anew,
    "shapley:frozen": partial(_shapley, downstream=FROZEN),
    "shapley:replayed": partial(_shapley, downstream=REPLAYED),
    "shapley:resampled": partial(_shapley, downstream=RESAMPLED),
    "first_error": _first_error,
}
"""Estimand → its exact value on every row."""
