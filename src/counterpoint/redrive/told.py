"""What was done in branches, turn by turn, for credit that learns from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from counterpoint.branches import Retold
from counterpoint.groups import Floats, Ints
from counterpoint.policies import Menu, Observation, Output, Policy, described

Question: TypeAlias = tuple[int, ...]
"""A branch: run, seq, action, number, seed."""


class Turn(NamedTuple):
    """Who acted, the entries of the menu and what was said, and what the policy gives each entry;
    that is only worked out for those who ask.
    """

    agent: str
    texts: tuple[str, ...]
    text: str | None
    probs: Callable[[], Floats | None]


class Told:
    """The turns of the branches that were asked for last, and a number for every text of a menu."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._turns: dict[Question, list[Turn]] = {}
        self._now: list[Turn] = []

    def labels(self, texts: Sequence[str]) -> list[int]:
        """The number of each text, the same wherever it is offered."""
        return [self._number.setdefault(text, len(self._number)) for text in texts]

    def forget(self) -> None:
        """Before another question is asked."""
        self._turns.clear()

    def begin(self, question: Question, *first: Turn) -> None:
        """What is heard from here on are the turns of this branch, after those that are known."""
        self._now = self._turns[question] = list(first)

    def hear(
        self, observation: Observation, legal: Menu, said: str | Output, policy: Policy
    ) -> None:
        """A policy has spoken."""
        probs = described(policy, "probs")

        def given() -> Floats | None:
            return probs(observation, legal) if probs is not None and legal else None

        text = said.text if isinstance(said, Output) else said
        self._now.append(Turn(observation.agent, tuple((legal or {}).values()), text, given))

    def retold(self, questions: Sequence[Sequence[Question]], agents: Sequence[Any]) -> Retold:
        """As `credit.protocols.Retelling.retell`; −1 throughout for what was not asked for last."""
        place = {str(name): at for at, name in enumerate(agents)}
        runs = [[self._turns.get(each, []) for each in row] for row in questions]
        for said in (each for row in runs for run in row for each in run):
            self.labels(said.texts)
        longest = max((len(run) for row in runs for run in row), default=0)
        shape = (len(runs), len(runs[0]) if runs else 0, max(longest, 1))
        agent, label = np.full((2, *shape), -1)
        probs = np.full((*shape, max(len(self._number), 1)), np.nan)
        for at in np.ndindex(shape[:2]):
            for turn, each in enumerate(runs[at[0]][at[1]]):
                spelled = self.labels(each.texts)
                agent[*at, turn] = place.get(each.agent, -1)
                if each.text in each.texts:
                    label[*at, turn] = spelled[each.texts.index(each.text)]
                probs[*at, turn] = _by_label(each.probs(), np.array(spelled), probs.shape[3])
        return Retold(agent, label, probs)


def _by_label(given: Floats | None, spelled: Ints, labels: int) -> Floats:
    """(labels,) the probabilities of a menu's entries, NaN where nobody gives any."""
    if given is None:
        return np.full(labels, np.nan)
    return np.bincount(spelled, np.asarray(given), labels).astype(np.float64)
