"""A policy for tables that no game played, for the tests of methods that ask one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from counterpoint.branches import KEEP, RESAMPLE, Foreseen, Menu, Spent
from counterpoint.credit import estimate
from counterpoint.credit.protocols import places
from counterpoint.ledger import Credit
from counterpoint.steps import Steps


class TwoEntries:
    """Two entries everywhere, each with ½; the record took the first and the second in turns.

    After any act the first agent of the list acts once more, and takes them in turns too. Knowing
    the outcome, later turns look less likely.
    """

    def __init__(self, steps: Steps) -> None:
        at = places(steps, np.arange(len(steps))).tolist()
        self._agent = {tuple(place): agent for place, agent in zip(at, steps.agent, strict=True)}

    def menu(self, places) -> Menu:
        taken = places[:, 1] % 2
        n = len(taken)
        return Menu(np.full(n, 2), np.full((n, 2), 0.5), taken, np.zeros(n, dtype=np.int64))

    def foresee(self, places, action, n, *, agents, seed=0) -> Foreseen:
        number = np.broadcast_to(np.arange(n), (len(places), n))
        own = np.where(action == KEEP, places[:, 1] % 2, action)[:, None]
        own = np.where((action == RESAMPLE)[:, None], (number + 1) % 2, own)
        who = np.array([self._agent[tuple(place)] for place in places.tolist()], dtype=np.int64)
        who = np.broadcast_to(who[:, None], number.shape)
        agent = np.stack([who, np.zeros_like(number)], axis=2)
        label = np.stack([own, number % 2], axis=2)
        return Foreseen(agent, label, np.arange(len(places)), Spent(0, len(places) * n))

    def hindsight(self, places, outcome):
        return -(1.0 + places[:, 1]) * (1 + 0.1 * np.abs(outcome)) / 10


NEEDED = {"cosac": {"ridge": 0.1, "continuations": 2}}
"""Options that a method cannot do without."""


def asking(name: str) -> Callable[[Steps], Credit]:
    """A method that asks a policy, with this one to ask."""

    def method(steps: Steps) -> Credit:
        return estimate(name, steps, policy=TwoEntries(steps), **NEEDED.get(name, {}))

    return method
