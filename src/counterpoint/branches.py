"""What comes back from running a world again: menus, outcomes of branches, and what they cost.

Plain arrays that games, the harness and a user's own world hand to credit (`credit.protocols`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Bools, Floats, Ints

RESAMPLE = -1
"""The act is drawn anew from the policy."""
KEEP = -2
"""The act stays as it was recorded, and what follows is drawn anew."""
NULL = -3
"""The act gives way to the declared default: doing nothing, or what the world calls that."""

Downstream: TypeAlias = Literal["anew", "replay", "frozen"]
"""What later acts are once something has changed. `anew`: drawn from the policies, all of them, so
that the mean is an expected outcome. `replay`: whoever sees what it saw in the record does what it
did, the others draw; what nobody notices changes nobody. `frozen`: all are those of the record."""

Absence: TypeAlias = Literal["null", "resample"]
"""What an absent agent does: the declared default, or a fresh draw from its policy."""


@dataclass(frozen=True)
class Spent:
    """What running cost: calls of the environment, forward passes of policies, tokens written."""

    env_calls: int = 0
    forward_passes: int = 0
    tokens: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.env_calls + other.env_calls,
            self.forward_passes + other.forward_passes,
            self.tokens + other.tokens,
        )

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.env_calls - other.env_calls,
            self.forward_passes - other.forward_passes,
            self.tokens - other.tokens,
        )

    def __str__(self) -> str:
        calls = f"{self.env_calls} environment calls, {self.forward_passes} forward passes"
        return f"{calls}, {self.tokens} tokens" if self.tokens else calls


class Menu(NamedTuple):
    """What could be chosen at places where somebody acted; A is the longest menu among them.

    Attributes:
        size: (places,) number of entries, 0 where nothing was prescribed.
        probs: (places, A) the policy's probability of each entry, 0 beyond the menu; NaN where the
            policy gives none.
        taken: (places,) the entry that was taken, −1 if it was none of them.
        null: (places,) the declared default entry, −1 where none is declared.
        does: for each of the five decisions, (places, A) whether the entry takes it; a decision
            that no entry takes may be left out.
        label: (places, A) a number from 0 for what the entry says, the same wherever it is offered,
            −1 beyond the menu; None where an entry of one number always says the same.
    """

    size: Ints
    probs: Floats
    taken: Ints
    null: Ints
    does: Mapping[str, Bools] = {}
    label: Ints | None = None


class Foreseen(NamedTuple):
    """Acts that policies would choose from some places on, without outcomes; T is the longest run
    of turns among them, the act at the place itself included.

    Attributes:
        agent: (sets, n, T) who acts in each turn, by its place in the list of agents that was
            asked for; −1 after the end, and for an agent that is not in the list.
        label: (sets, n, T) what it says, as `Menu.label` numbers it, or the entry of the menu where
            that is None; −1 after the end, and for what no menu offers.
        of: (places,) which set is a place's; places with one history and one act may share theirs.
        spent: what it cost.
    """

    agent: Ints
    label: Ints
    of: Ints
    spent: Spent


class Retold(NamedTuple):
    """The turns that branches took, the act at the place itself first; T is the longest of them.

    Attributes:
        agent: (places, n, T) as in `Foreseen`.
        label: (places, n, T) as in `Foreseen`.
        probs: (places, n, T, labels) the policy's probability of each label; NaN where it gives
            none, and after the end.
    """

    agent: Ints
    label: Ints
    probs: Floats


@dataclass(frozen=True, eq=False)
class Branches:
    """Outcomes of branches, which are numbered at every place; `Branches.of` fills in defaults.

    Attributes:
        values: (places, n) outcome of the run that each branch ends in, a mean where it was
            continued several times; NaN where a branch could not be run, which is not the same as
            no effect.
        spent: what it cost.
        leaves: (places, n) continuations behind each value, 0 where it is NaN.
        drawn: (places, n) the entry of the menu that was taken, −1 if none or unknown.
        critic: (places, n) a critic's estimate of the outcome, just after the act; NaN if nobody
            gives one.
        exact: whether it was shown that the world is deterministic given its draws, the history
            complete, and the policy that of the record. Otherwise this is taken on trust.
    """

    values: Floats
    spent: Spent
    leaves: Ints
    drawn: Ints
    critic: Floats
    exact: bool

    @staticmethod
    def of(
        values: npt.ArrayLike,
        spent: Spent,
        *,
        leaves: Ints | None = None,
        drawn: Ints | None = None,
        critic: Floats | None = None,
        exact: bool = False,
    ) -> Branches:
        """Branches of which little is known: one continuation each, no menu, no critic."""
        found = np.asarray(values, dtype=np.float64)
        if leaves is None:
            leaves = (~np.isnan(found)).astype(np.int64)
        if drawn is None:
            drawn = np.full(found.shape, -1, dtype=np.int64)
        if critic is None:
            critic = np.full(found.shape, np.nan)
        return Branches(found, spent, leaves, drawn, critic, exact)
