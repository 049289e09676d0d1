"""Games in fractions, one play after the other and one order after the other: slow and plain."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import permutations as all_orders

import numpy as np

from counterpoint.games import Plays, every
from counterpoint.steps import Steps


class Reference:
    """A game in fractions: its floats as they are, its policies made to sum to 1 exactly."""

    def __init__(self, game):
        self.game = game
        self.next = game.next.tolist()
        self.reward = [[Fraction(r) for r in row] for row in game.reward.tolist()]
        odds = [[Fraction(p) for p in row] for row in game.policy.tolist()]
        self.policy = [[p / sum(row) for p in row] for row in odds]
        self.agent, self.anchor = game.agent.tolist(), game.anchor.tolist()
        self.nature = set(game.nature.tolist())
        self.value = cache(self._value)

    def _value(self, state) -> Fraction:
        return sum(self.policy[self.anchor[state]][a] * q for a, q in enumerate(self.q(state)))

    def q(self, state) -> list[Fraction]:
        after = [Fraction(0) if s < 0 else self.value(s) for s in self.next[state]]
        return [r + v for r, v in zip(self.reward[state], after, strict=True)]

    def paid(self, path) -> Fraction:
        return sum((self.reward[s][a] for s, a in path), Fraction(0))

    def expected(self, path, turn, state, absent=(), null=True, answers=False) -> Fraction:
        """E of what is still paid from `state` on, at a turn of a play that has changed.

        Absent agents take act 0, or follow their policy; the others do what the play says, unless
        `answers` is set and they see something else than they saw.
        """
        if state < 0:
            return Fraction(0)
        here = self.anchor[state]
        gone = self.agent[state] in absent and state not in self.nature
        same = turn < len(path) and self.anchor[path[turn][0]] == here
        if gone and null:
            chances = {0: Fraction(1)}
        elif gone or (answers and not same):
            chances = dict(enumerate(self.policy[here]))
        else:
            chances = {path[turn][1]: Fraction(1)}
        return sum(
            p * (self.reward[state][a] + self.after(path, turn, state, a, absent, null, answers))
            for a, p in chances.items()
            if p
        )

    def after(self, path, turn, state, act, absent=(), null=True, answers=False) -> Fraction:
        return self.expected(path, turn + 1, self.next[state][act], absent, null, answers)

    def changed(self, path, turn, act, answers) -> Fraction:
        """R of the play if one act had been another one."""
        state = path[turn][0]
        now = self.reward[state][act] + self.after(path, turn, state, act, answers=answers)
        return self.paid(path[:turn]) + now

    def coma(self, path, turn) -> Fraction:
        policy = self.policy[self.anchor[path[turn][0]]]
        mean = sum(p * self.changed(path, turn, a, False) for a, p in enumerate(policy))
        return self.paid(path) - mean

    def removal(self, path, turn, answers) -> Fraction:
        return self.paid(path) - self.changed(path, turn, 0, answers)

    def shapley(self, path, null, answers) -> dict[int, Fraction]:
        """Agent → the mean of what it adds over all orders of the agents."""
        agents = range(self.game.agents)
        start = path[0][0]

        @cache
        def worth(present):
            absent = frozenset(agents) - present
            return self.expected(path, 0, start, absent, null, answers)

        earned = dict.fromkeys(agents, Fraction(0))
        orders = list(all_orders(agents))
        for order in orders:
            for i, agent in enumerate(order):
                before = frozenset(order[:i])
                earned[agent] += worth(before | {agent}) - worth(before)
        whole = worth(frozenset(agents)) - worth(frozenset())
        assert sum(earned.values()) == whole * len(orders)
        return {agent: sum_ / len(orders) for agent, sum_ in earned.items()}


def paths(plays: Plays):
    """(rollout's rows, its (state, action) pairs) one play after the other."""
    rows = np.arange(len(plays.steps))
    ends = np.flatnonzero(plays.steps.step == 0)[1:]
    for own in np.split(rows, ends):
        pairs = zip(plays.state[own].tolist(), plays.action[own].tolist(), strict=True)
        yield own, list(pairs)


def one_play(game, acts) -> Plays:
    """The play of a chain in which the agents do `acts`."""
    plays, _ = every(game, 1)
    for rows, path in paths(plays):
        if [a for _, a in path] == list(acts):
            steps = plays.steps
            only = Steps.from_columns(
                rollout=[0] * len(rows), step=steps.step[rows], reward=steps.reward[rows]
            )
            return Plays(game, only, plays.state[rows], plays.action[rows])
    raise AssertionError(acts)
