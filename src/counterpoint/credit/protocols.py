"""What measured credit asks of whoever can run a world again.

Credit does not know games or harnesses. It asks a `Replay`; games and the harness are one as they
are, `Adapted` makes one of three methods of a user's own, and an `Account` (`credit.account`)
around any of them remembers every branch and keeps to a budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from counterpoint.branches import (
    KEEP,
    NULL,
    RESAMPLE,
    Absence,
    Branches,
    Downstream,
    Menu,
    Retold,
    Spent,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.streams import Draws

Budget: TypeAlias = Mapping[str, int]
"""The most that may be spent, by the names of `Spent`; a name that is left out has no limit."""


@runtime_checkable
class Replay(Protocol):
    """Runs recorded runs again, with one thing changed.

    A place is where in which run somebody acted: (run, event), the rows of `Steps.event`, or the
    rollout and the step where steps have no events (`places`). All draws of a branch belong to
    (seed, place, number): asked again it is the same, whatever was asked before or beside it, and
    branches of one number in two arms share their draws as far as they can. An outcome is that of
    the whole run, undiscounted, as in `Steps.outcome`.
    """

    def menu(self, places: Ints) -> Menu:
        """What could be chosen at (places, 2); costs nothing to speak of."""

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
        """Go back to before the act, put another in its place, go on to the end.

        Args:
            places: (places, 2); one may occur several times.
            action: (places,) an entry of the menu, or RESAMPLE, KEEP or NULL.
            n: branches of each place, which have the numbers start … start + n − 1.
            start: number of the first.
            each: continuations of each branch, from the same act.
            seed: of all draws.
            downstream: what later acts are.

        Returns:
            (places, n) outcomes; NaN where a branch cannot be run: no such entry, no default, or a
            frozen act that is no longer possible.
        """

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
        """Run whole runs with some agents absent: every act of theirs gives way.

        A run is as recorded up to the first act that changes; with everybody present it is the
        record.

        Args:
            runs: (r,) numbers of runs; one may occur several times.
            agents: (a,) names of the agents, as in `Steps.names["agent"]`.
            present: (r, a) who takes part; an agent that is not named does.
            n: branches of each run, numbered as in `branch`.
            absence: what an absent agent does instead.
            start: number of the first branch.
            seed: of all draws.
            downstream: what the others do after something has changed.
        """


class Retelling(Protocol):
    """A replay that also tells what was done in its branches, as a game's `Rerun` can."""

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
        """The turns of the branches that `branch` gives for the same question, `each` being 1 and
        `downstream` "anew"; costs nothing. `agents` are names, as in `Steps.names["agent"]`.
        """


def places(steps: Steps, rows: Ints) -> Ints:
    """(len(rows), 2) where rows of the table stand: (trace, seq), or (rollout, step)."""
    if steps.event is not None:
        return steps.event[rows]
    return np.column_stack([steps.rollout[rows], steps.step[rows]])


def needed(replay: Replay | Harness | None, name: str) -> Replay:
    """The replay, made of a harness where that is given; Refused where there is none."""
    if replay is None:
        raise Refused(
            f"{name} needs replay=, something that can run these runs again: a game "
            "(games.replaying), the harness that recorded them (redrive), or a harness of yours in "
            "three methods (credit.protocols); an imported log cannot be run again"
        )
    if isinstance(replay, Replay):
        return replay
    if isinstance(replay, Harness):
        return Adapted(replay)
    raise Refused(
        f"{name}: replay is {type(replay).__name__}, which has neither menu, branch and absent nor "
        "restore, put and go_on (credit.protocols)"
    )


# ---------------------------------------------------------------------------------------------
# Three methods of a user's own


@runtime_checkable
class Harness(Protocol):
    """A user's world in three methods; `menu(state) -> (probs, taken, null)` may be a fourth.

    An action is an entry of the menu, or −1 to draw the act anew, −2 to keep it, −3 for the
    default. A seed belongs to a branch; what draws must draw from it alone.
    """

    def restore(self, run: int, event: int) -> Any:
        """The state just before the act at this place of a recorded run."""

    def put(self, state: Any, action: int, seed: int) -> Any:
        """The state after an act; None if there is no such act."""

    def go_on(self, state: Any, seed: int) -> tuple[float, Sequence[int]]:
        """Play on to the end under the policies: the outcome of the whole run, and what the branch
        cost in environment calls, forward passes and tokens.
        """


class Adapted:
    """Makes a `Replay` of three methods: restore a prefix, put an act in, go on.

    Without a menu only what needs none can be asked. What a harness raises comes through with its
    traceback.
    """

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    def menu(self, places: Ints) -> Menu:
        """The menus that the harness tells, or empty ones."""
        tell = getattr(self._harness, "menu", None)
        told = [
            ((), -1, -1) if tell is None else tell(self._harness.restore(run, event))
            for run, event in places.tolist()
        ]
        width = max((len(probs) for probs, _, _ in told), default=0)
        probs = np.zeros((len(told), width))
        for row, (own, _, _) in enumerate(told):
            probs[row, : len(own)] = own
        size, taken, null = (
            np.array([pick(each) for each in told], dtype=np.int64)
            for pick in (lambda m: len(m[0]), lambda m: m[1], lambda m: m[2])
        )
        return Menu(size, probs, taken, null)

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
        """One branch after another."""
        if downstream != "anew":
            raise Refused(
                f"go_on draws later acts anew, and {downstream!r} asks for acts of the record: "
                "give your replay a method branch of its own (credit.protocols.Replay)"
            )
        values, spent = np.full((len(places), n, each), np.nan), Spent()
        for row, number, leaf in np.ndindex(values.shape):
            run, event = places[row].tolist()
            names = (seed, run, event, start + number)
            begun = self._harness.restore(run, event)
            state = self._harness.put(begun, int(action[row]), seed_of(*names))
            if state is None:
                continue  # it cannot be run, which is not the same as no effect
            values[row, number, leaf], cost = self._harness.go_on(state, seed_of(*names, leaf))
            spent += Spent(*cost)
        leaves = (~np.isnan(values)).sum(axis=2)
        return Branches.of(mean_of(values), spent, leaves=leaves)

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
        """Refused: three methods cannot take an agent out of a whole run."""
        raise Refused(
            "restore, put and go_on change one act of a run; to leave an agent out of all of it, "
            "give your replay a method absent (credit.protocols.Replay)"
        )


def seed_of(*names: int) -> int:
    """A seed of 31 bits that belongs to these numbers, in whatever order branches are run."""
    owner = " ".join(map(str, names))
    return Draws("branch", "policy", owner, 0).integer(1 << 31)


def mean_of(values: Floats) -> Floats:
    """Mean over the last axis of what is there; NaN where nothing is."""
    there = ~np.isnan(values)
    count = there.sum(axis=-1)
    out = np.full(count.shape, np.nan)
    np.divide(np.where(there, values, 0.0).sum(axis=-1), count, out=out, where=count > 0)
    return out


__all__ = [
    "KEEP",
    "NULL",
    "RESAMPLE",
    "Absence",
    "Adapted",
    "Branches",
    "Budget",
    "Harness",
    "Menu",
    "Replay",
    "Spent",
    "mean_of",
    "needed",
    "places",
    "seed_of",
]
