"""A game run again from any act of its plays: branches by the million, for measured credit.

`Rerun` is a `credit.protocols.Replay`, and all that `credit.asking` asks of policies, as it stands,
without knowing it. Every draw is a hash of
whose it is (seed, run, step of the place, number of the branch) and of the turn it decides, so that
a branch is the same whatever is asked beside it, and two arms of one number share their draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from counterpoint.branches import (
    KEEP,
    NULL,
    RESAMPLE,
    Absence,
    Branches,
    Downstream,
    Foreseen,
    Menu,
    Retold,
    Spent,
)
from counterpoint.games.game import action_values
from counterpoint.games.hindsight import hindsight
from counterpoint.games.plays import Plays
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused

Words: TypeAlias = npt.NDArray[np.uint64]

_PRESENT, _DEFAULT, _REDRAWN = 0, 1, 2
_ACT, _ERROR = 1 << 40, 1 << 41
_MOST_TURNS = 2_000


class _Walk(NamedTuple):
    """Runs under way; all arrays are (walks,).

    Attributes:
        state: where each stands, −1 if it has ended.
        earned: what it has earned so far.
        run: the run of the record that it leaves.
        step: how many turns it has taken.
        key: whose draws it takes.
        changed: whether it has left the record.
    """

    state: Ints
    earned: Floats
    run: Ints
    step: Ints
    key: Words
    changed: Bools


class Rerun:
    """Runs plays of a game again under its own policy.

    Outcomes are undiscounted, as `Steps.outcome` is. The critic of a branch is the exact Q of its
    act, what was earned before included. A turn costs one call of the environment, and one forward
    pass if the policy draws it; games have no tokens.

    Args:
        plays: what is run again; `steps.rollout` and `steps.step` name the places.
        null: what doing nothing is: (actions of the agents,) one entry for each agent code.
        does: for a decision such as "spawn", (agents, actions) whether an agent's entry takes it.

    Raises:
        Refused: a default that is no entry, arrays of another shape.
    """

    def __init__(
        self,
        plays: Plays,
        *,
        null: Sequence[int] | int = 0,
        does: Mapping[str, npt.ArrayLike] | None = None,
    ) -> None:
        game, steps = plays.game, plays.steps
        agents, actions = int(game.agent.max()) + 1, game.policy.shape[1]
        self._game, self._state, self._action = game, plays.state, plays.action
        self._run, self._step = steps.rollout, steps.step
        self._code = {name: code for code, name in enumerate(steps.names["agent"])}
        self._null = np.broadcast_to(np.asarray(null, dtype=np.int64), (agents,))
        if self._null.min() < 0 or self._null.max() >= actions:
            raise Refused(f"doing nothing is entry {null}; the game has {actions} actions")
        self._does = {verb: np.asarray(mask, dtype=bool) for verb, mask in (does or {}).items()}
        for verb, mask in self._does.items():
            if mask.shape != (agents, actions):
                raise Refused(f"does[{verb!r}] has shape {mask.shape}, not ({agents}, {actions})")
        self._below = np.cumsum(game.probability, axis=1)[:, :-1]
        self._length = np.bincount(steps.rollout, minlength=steps.n_rollouts)
        self._begin = np.cumsum(self._length) - self._length
        paid = game.reward[plays.state, plays.action]
        self._past = _summed(paid, self._begin, self._length)
        self._own_error = (steps.outcome - self._past - paid)[self._begin + self._length - 1]
        self._after = action_values(replace(game, gamma=1.0))

    def menu(self, places: Ints) -> Menu:
        """All actions of the game, with the policy's probabilities."""
        row = self._rows(places)
        state, agent = self._state[row], self._game.agent[self._state[row]]
        probs = self._game.probability[state]
        return Menu(
            size=np.full(len(row), probs.shape[1]),
            probs=probs,
            taken=self._action[row],
            null=self._null[agent],
            does={verb: mask[agent] for verb, mask in self._does.items()},
        )

    def branch(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        start: int = 0,
        each: int = 1,
        seed: int = 0,
        downstream: Downstream = "anew",
    ) -> Branches:
        """As `credit.protocols.Replay.branch`."""
        row = np.repeat(self._rows(places), n * each)
        wanted, leaf = np.repeat(action, n * each), np.tile(np.arange(each), len(places) * n)
        number = np.tile(np.repeat(np.arange(start, start + n), each), len(places))
        run, step, state = self._run[row], self._step[row], self._state[row]
        own = _mixed(seed, run, step, number)
        drawn = wanted == RESAMPLE
        act = np.where(drawn, self._draw(state, _mixed(own, _ACT)), self._entry(wanted, row))
        possible = (act >= 0) & (act < self._game.policy.shape[1])
        act = np.where(possible, act, 0)
        walk = _Walk(
            state=np.where(possible, self._game.next[state, act], -1),
            earned=self._past[row] + self._game.reward[state, act],
            run=run,
            step=step + 1,
            key=_mixed(own, leaf),
            changed=np.ones(len(row), dtype=bool),
        )
        values, turns, passes = self._walked(walk, downstream, np.zeros(len(self._null), np.int64))
        values = np.where(possible, values, np.nan).reshape(len(places), n, each)
        made = Spent(int(possible.sum()) // each, int((possible & drawn).sum()) // each)
        critic = np.where(possible, self._past[row] + self._after[state, act], np.nan)
        first = slice(None, None, each)
        return Branches(
            values=_mean(values),
            spent=made + Spent(turns, passes),
            leaves=(~np.isnan(values)).sum(axis=2),
            drawn=np.where(possible, act, -1)[first].reshape(len(places), n),
            critic=critic[first].reshape(len(places), n),
            exact=True,
        )

    def absent(
        self,
        runs: Ints,
        agents: Sequence[Any],
        present: Bools,
        n: int,
        *,
        absence: Absence = "null",
        start: int = 0,
        seed: int = 0,
        downstream: Downstream = "replay",
    ) -> Branches:
        """As `credit.protocols.Replay.absent`; every coalition meets the same draws."""
        gone = np.zeros((len(runs), len(self._null)), dtype=bool)
        for column, name in enumerate(agents):
            gone[:, self._code[name]] = ~present[:, column]
        run = np.repeat(runs, n)
        number = np.tile(np.arange(start, start + n), len(runs))
        walk = _Walk(
            state=self._state[self._begin[run]],
            earned=np.zeros(len(run)),
            run=run,
            step=np.zeros(len(run), dtype=np.int64),
            key=_mixed(seed, run, -1, number),
            changed=np.zeros(len(run), dtype=bool),
        )
        kind = np.where(gone, _DEFAULT if absence == "null" else _REDRAWN, _PRESENT)
        values, turns, passes = self._walked(walk, downstream, np.repeat(kind, n, axis=0))
        return Branches.of(values.reshape(len(runs), n), Spent(turns, passes), exact=True)

    def foresee(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        agents: Sequence[Any],
        seed: int = 0,
    ) -> Foreseen:
        """As `credit.asking.Foresight.foresee`.

        Draws belong to the state: an act of a state has one set of continuations, whichever run
        asks for it, and two acts of a state share their draws.
        """
        row = self._rows(places)
        asked = np.column_stack([self._state[row], self._entry(action, row)])
        asked, back = np.unique(asked, axis=0, return_inverse=True)
        state, entry = np.repeat(asked, n, axis=0).T
        key = _mixed(seed, state, np.tile(np.arange(n), len(asked)))
        drawn = entry == RESAMPLE
        act = np.where(drawn, self._draw(state, _mixed(key, _ACT)), entry)
        states, acts = self._onward(state, act, key, np.zeros(len(key), dtype=np.int64))
        shape = (len(asked), n, states.shape[1])
        passes = int((states >= 0).sum()) - int((~drawn).sum())
        return Foreseen(
            agent=self._among(agents, states).reshape(shape),
            label=acts.reshape(shape),
            of=back.reshape(-1),
            spent=Spent(forward_passes=passes),
        )

    def retell(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        agents: Sequence[Any],
        start: int = 0,
        seed: int = 0,
    ) -> Retold:
        """As `credit.protocols.Retelling.retell`: the walk is led again, by the same draws."""
        row = np.repeat(self._rows(places), n)
        step, state = self._step[row], self._state[row]
        number = np.tile(np.arange(start, start + n), len(places))
        own = _mixed(seed, self._run[row], step, number)
        wanted = np.repeat(action, n)
        drawn = self._draw(state, _mixed(own, _ACT))
        act = np.where(wanted == RESAMPLE, drawn, self._entry(wanted, row))
        leaf = np.zeros(len(row), dtype=np.int64)
        states, acts = self._onward(state, act, _mixed(own, leaf), step)
        shape = (len(places), n, states.shape[1])
        probs = np.where((states >= 0)[:, :, None], self._game.probability[states], np.nan)
        agent = self._among(agents, states).reshape(shape)
        return Retold(agent, acts.reshape(shape), probs.reshape(*shape, -1))

    def hindsight(self, places: Ints, outcome: Floats) -> Floats:
        """As `credit.asking.Hindsight`, exactly: log π(a | h, R) by Bayes' rule."""
        row = self._rows(places)
        left = outcome - self._past[row]
        return hindsight(self._game, self._state[row], self._action[row], left)

    # -- walking -----------------------------------------------------------------------------------

    def _walked(self, walk: _Walk, downstream: Downstream, kind: Ints) -> tuple[Floats, int, int]:
        """Outcome of every walk, turns taken off the record, and acts that a policy drew there.

        `kind` (walks, agents) or (agents,) says what each agent does. An act of the record that is
        due when the record has ended makes the outcome NaN.
        """
        kind = np.broadcast_to(kind, (len(walk.state), len(self._null)))
        values, error = walk.earned.copy(), self._own_error[walk.run]
        if downstream == "anew":  # otherwise what nature did is kept, as the other acts are
            error = np.where(walk.changed, self._error(walk.key), error)
        values[walk.state < 0] += error[walk.state < 0]
        live, turns, passes = np.flatnonzero(walk.state >= 0), 0, 0
        state, step, changed = walk.state.copy(), walk.step.copy(), walk.changed.copy()
        for _ in range(_MOST_TURNS):
            if not len(live):
                return values, turns, passes
            here, run = state[live], walk.run[live]
            recorded, row = self._recorded(run, step[live])
            agent = self._game.agent[here]
            does = kind[live, agent]
            kept = {
                "anew": ~changed[live],
                "replay": (recorded >= 0) & self._alike(here, self._state[row]),
                "frozen": np.ones(len(live), dtype=bool),
            }[downstream]
            drawn = (does == _REDRAWN) | ((does == _PRESENT) & ~kept)
            act = np.where(does == _DEFAULT, self._null[agent], recorded)
            draw = self._draw(here[drawn], _mixed(walk.key[live[drawn]], step[live[drawn]]))
            act[drawn] = draw
            changed[live] |= act != recorded
            turns += int(changed[live].sum())
            passes += int((drawn & changed[live]).sum())
            lost = act < 0
            values[live[lost]] = np.nan
            values[live] += self._game.reward[here, act]
            state[live] = np.where(lost, -1, self._game.next[here, act])
            step[live] += 1
            done = live[state[live] < 0]
            values[done] += error[done]
            live = live[state[live] >= 0]
        values[live] = np.nan  # whoever is absent kept the others from ever ending
        return values, turns, passes

    def _onward(self, state: Ints, act: Ints, key: Words, step: Ints) -> tuple[Ints, Ints]:
        """(walks, turns) where each stands and what is done there from an act on, −1 after the end.

        `step` (walks,) is the number of the first turn, by which the draws of later ones are named.
        """
        turns: list[tuple[Ints, Ints]] = []
        state, act = state.copy(), act.copy()
        live = np.arange(len(state))
        while len(live) and len(turns) < _MOST_TURNS:
            states, acts = np.full((2, len(state)), -1)
            states[live], acts[live] = state[live], act[live]
            turns.append((states, acts))
            state[live] = self._game.next[state[live], act[live]]
            live = live[state[live] >= 0]
            act[live] = self._draw(state[live], _mixed(key[live], step[live] + len(turns)))
        if not turns:
            return np.full((len(state), 0), -1), np.full((len(state), 0), -1)
        wheres, actions = (np.column_stack(column) for column in zip(*turns, strict=True))
        return wheres, actions

    def _among(self, agents: Sequence[Any], states: Ints) -> Ints:
        """Who acts in each state, by place in a list of names; −1 for none of them."""
        held = np.full(len(self._null) + 1, -1)  # the last one is of turns after the end
        for place, name in enumerate(agents):
            if name in self._code:
                held[self._code[name]] = place
        return held[np.where(states < 0, -1, self._game.agent[states])]

    def _rows(self, places: Ints) -> Ints:
        run, step = places[:, 0], places[:, 1]
        known = (run >= 0) & (run < len(self._length))
        known &= (step >= 0) & (step < self._length[np.where(known, run, 0)])
        if not known.all():
            run, step = places[np.argmin(known)].tolist()
            raise Refused(f"these plays have no step {step} in a run {run}")
        rows: Ints = self._begin[run] + step
        return rows

    def _recorded(self, run: Ints, step: Ints) -> tuple[Ints, Ints]:
        """The act of the record at a step, −1 when it has ended, and its row."""
        ended = step >= self._length[run]
        row = np.where(ended, self._begin[run], self._begin[run] + step)
        return np.where(ended, -1, self._action[row]), row

    def _alike(self, state: Ints, then: Ints) -> Bools:
        """Whether the same agent acts in both states, and sees the same."""
        game = self._game
        alike: Bools = game.anchor[state] == game.anchor[then]
        alike &= game.agent[state] == game.agent[then]
        return alike

    def _entry(self, wanted: Ints, row: Ints) -> Ints:
        """The entry that an intervention means; −1 for one that is unknown."""
        null = self._null[self._game.agent[self._state[row]]]
        return np.select([wanted == KEEP, wanted == NULL], [self._action[row], null], wanted)

    def _draw(self, state: Ints, words: Words) -> Ints:
        """An action of the policy for each state."""
        act: Ints = np.sum(_uniform(words)[:, None] >= self._below[state], axis=1)
        return act

    def _error(self, key: Words) -> Floats:
        """Normal errors on the outcome (Box and Muller, 1958)."""
        if not self._game.noise:
            return np.zeros(len(key))
        radius = np.sqrt(-2 * np.log1p(-_uniform(_mixed(key, _ERROR))))
        error: Floats = radius * np.cos(2 * np.pi * _uniform(_mixed(key, _ERROR + 1)))
        return self._game.noise * error


def _summed(paid: Floats, begin: Ints, length: Ints) -> Floats:
    """(rows,) what each run had earned before the row, added up in the order of a play."""
    past = np.zeros(len(paid))
    for step in range(1, int(length.max(initial=0))):
        row = begin[length > step] + step
        past[row] = past[row - 1] + paid[row - 1]
    return past


def _mixed(*parts: int | Ints | Words) -> Words:
    """A word of 64 bits for each tuple of whole numbers (SplitMix64; Steele et al., 2014)."""
    word = np.zeros(1, dtype=np.uint64)
    for part in parts:
        word = word ^ np.atleast_1d(np.asarray(part)).astype(np.uint64)
        word = word + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return word


def _uniform(words: Words) -> Floats:
    """Numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mean(values: Floats) -> Floats:
    """Mean over the last axis of what is there; NaN where nothing is."""
    there = ~np.isnan(values)
    count, out = there.sum(axis=-1), np.full(values.shape[:-1], np.nan)
    np.divide(np.where(there, values, 0.0).sum(axis=-1), count, out=out, where=count > 0)
    return out
