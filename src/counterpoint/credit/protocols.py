"""What measured credit asks of whoever can run a world again, and the account of what it costs.

Credit does not know games or harnesses. It asks a `Replay`; games and the harness are one as they
are, `Adapted` makes one of three methods of a user's own, and an `Account` around any of them
remembers every branch and keeps to a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
# What it will cost, and what it did


class Account:
    """A replay that runs nothing twice and spends no more than its budget.

    It remembers every branch by (place, intervention, seed, number), so methods that share an
    account share their branches. Before anything is run it is priced from the record; what the
    budget does not cover is left NaN, and the credit says so.

    Args:
        replay: what runs.
        steps: the table of the record: what is left of a run prices a branch of it.
        budget: the most that may be spent. A branch that turns out longer than the record can
            exceed it by that much.

    Attributes:
        spent: what was spent so far.
        priced: what everything that was asked for and not remembered was priced at.
        left_out: branches that the budget did not cover.
    """

    def __init__(self, replay: Replay, steps: Steps, budget: Budget | None = None) -> None:
        unknown = set(budget or ()) - set(_CURRENCIES)
        if unknown:
            raise Refused(f"a budget is in {', '.join(_CURRENCIES)}, not {', '.join(unknown)}")
        self._replay = replay
        self._prices = Prices(steps)
        self._budget = {name: (budget or {}).get(name, np.inf) for name in _CURRENCIES}
        self._held: dict[tuple[Any, ...], Branches] = {}
        self.spent = Spent()
        self.priced = Spent()
        self.left_out = 0

    def menu(self, places: Ints) -> Menu:
        """As the replay."""
        return self._replay.menu(places)

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
        """As the replay, from memory where it can."""

        def run(which: Ints, first: int, count: int) -> Branches:
            return self._replay.branch(
                places[which], action[which], count, start=first, each=each, seed=seed,
                downstream=downstream,
            )  # fmt: skip

        keys = [
            ("branch", *place, act, each, seed, downstream)
            for place, act in zip(places.tolist(), action.tolist(), strict=True)
        ]
        price = self._prices.of_branch(places, action, downstream) * each
        return self._answered(keys, price, run, start, n)

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
        """As the replay, from memory where it can."""

        def run(which: Ints, first: int, count: int) -> Branches:
            return self._replay.absent(
                runs[which], agents, present[which], count, absence=absence, start=first,
                seed=seed, downstream=downstream,
            )  # fmt: skip

        gone = [frozenset(np.flatnonzero(~row).tolist()) for row in present]
        keys = [
            ("absent", run_, frozenset(agents[i] for i in out), absence, seed, downstream)
            for run_, out in zip(runs.tolist(), gone, strict=True)
        ]
        return self._answered(keys, self._prices.of_run(runs, downstream), run, start, n)

    def _answered(
        self,
        keys: list[tuple[Any, ...]],
        price: Floats,
        run: Callable[[Ints, int, int], Branches],
        start: int,
        n: int,
    ) -> Branches:
        """The branches of every key, after running those that are not remembered."""
        before, end = self.spent, start + n
        for have, which in self._missing(keys, end):
            self._run(keys, price * (end - have), run, which, have, end)
        out = [self._held.get(key) for key in keys]
        width = range(start, end)
        return Branches(
            values=_column(out, "values", width, np.nan),
            spent=Spent(*(getattr(self.spent, c) - getattr(before, c) for c in _CURRENCIES)),
            leaves=_column(out, "leaves", width, 0).astype(np.int64),
            drawn=_column(out, "drawn", width, -1).astype(np.int64),
            critic=_column(out, "critic", width, np.nan),
            exact=all(found is None or found.exact for found in out),
        )

    def _missing(self, keys: list[tuple[Any, ...]], end: int) -> list[tuple[int, Ints]]:
        """Keys that have fewer than `end` branches, each once, by how many they have."""
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        short: dict[int, list[int]] = {}
        for key, row in first.items():
            have = self._held[key].values.shape[1] if key in self._held else 0
            if have < end:
                short.setdefault(have, []).append(row)
        return [(have, np.sort(np.array(which))) for have, which in sorted(short.items())]

    def _run(
        self,
        keys: list[tuple[Any, ...]],
        price: Floats,
        run: Callable[[Ints, int, int], Branches],
        which: Ints,
        have: int,
        end: int,
    ) -> None:
        """Run what the budget covers, in order; remember it."""
        self.priced += _spent(price[which].sum(axis=0))
        while len(which):
            covered = np.cumsum(price[which], axis=0) <= self._left()
            size = int(np.argmin(np.append(covered.all(axis=1), False)))
            if not size:
                self.left_out += len(which) * (end - have)
                return
            found = run(which[:size], have, end - have)
            self.spent += found.spent
            for place, row in enumerate(which[:size].tolist()):
                self._keep(keys[row], found, place)
            which = which[size:]

    def _keep(self, key: tuple[Any, ...], found: Branches, place: int) -> None:
        old = self._held.get(key)

        def joined(name: str) -> Any:
            new = getattr(found, name)[place : place + 1]
            return new if old is None else np.concatenate([getattr(old, name), new], axis=1)

        arrays = {name: joined(name) for name in _ARRAYS}
        exact = found.exact and (old is None or old.exact)
        self._held[key] = Branches(**arrays, spent=Spent(), exact=exact)

    def _left(self) -> Floats:
        return np.array([self._budget[c] - getattr(self.spent, c) for c in _CURRENCIES])


_CURRENCIES = ("env_calls", "forward_passes", "tokens")
_ARRAYS = ("values", "leaves", "drawn", "critic")


def _column(found: list[Branches | None], name: str, width: range, missing: float) -> Floats:
    """(keys, len(width)) of one array of remembered branches."""
    out = np.full((len(found), len(width)), missing, dtype=np.float64)
    for row, branches in enumerate(found):
        if branches is not None:
            held = getattr(branches, name)[0, width.start : width.stop]
            out[row, : len(held)] = held
    return out


def _spent(amounts: Floats) -> Spent:
    return Spent(*(round(amount) for amount in amounts.tolist()))


class Prices:
    """What one branch costs if it is as long as the record: (places, 3), as `Spent` has it.

    Each turn that is left counts as one call of the environment, a forward pass, and its tokens.
    """

    def __init__(self, steps: Steps) -> None:
        order = steps.order
        key = places(steps, order)
        run = key[:, 0]
        one, tokens = np.ones(len(order)), steps.n_tokens[order].astype(np.float64)
        turns = np.column_stack([one, one, tokens])
        total = np.cumsum(turns[::-1], axis=0)[::-1]
        last = np.append(run[1:] != run[:-1], True) if len(order) else np.zeros(0, dtype=bool)
        after = np.append(total[1:], np.zeros((1, 3)), axis=0)
        ends = np.flatnonzero(last)
        rest = total - after[ends][np.searchsorted(ends, np.arange(len(order)))]
        self._from = dict(zip(map(tuple, key.tolist()), rest, strict=True))
        self._own = dict(zip(map(tuple, key.tolist()), turns, strict=True))
        self._whole: dict[int, Floats] = {}
        for number, left in zip(run.tolist(), rest, strict=True):
            self._whole.setdefault(number, left)

    def of_branch(self, places_: Ints, action: Ints, downstream: Downstream) -> Floats:
        """One branch at each place: the turns that are left, less its own act if that is given."""
        listed = list(map(tuple, places_.tolist()))
        rest = np.array([self._from[place] for place in listed]).reshape(-1, 3)
        own = np.array([self._own[place] for place in listed]).reshape(-1, 3)
        policy = np.array([0.0, 1.0, 1.0])
        drawn = (action == RESAMPLE)[:, None]
        if downstream == "frozen":
            rest = rest * [1, 0, 0] + own * policy
        price: Floats = rest - np.where(drawn, 0, own) * policy
        return price

    def of_run(self, runs: Ints, downstream: Downstream) -> Floats:
        """One run from the start."""
        whole = np.array([self._whole[run] for run in runs.tolist()]).reshape(-1, 3)
        price: Floats = whole * ([1, 0, 0] if downstream == "frozen" else [1, 1, 1])
        return price


def price(method: Callable[..., Any], steps: Steps, replay: Replay, **options: Any) -> Spent:
    """What a measured method would cost, without running a branch.

    The method is run against an account without money: what it asks for is priced by how long the
    recorded runs go on from there. What it would ask for after seeing outcomes is not in it.

    Args:
        method: such as `c3`, taking `steps` and `replay`.
        steps: the table.
        replay: asked for menus only.
        **options: of the method.
    """
    account = Account(replay, steps, dict.fromkeys(_CURRENCIES, 0))
    method(steps, replay=account, **options)
    return account.priced


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
    "Account",
    "Adapted",
    "Branches",
    "Budget",
    "Harness",
    "Menu",
    "Prices",
    "Replay",
    "Spent",
    "mean_of",
    "needed",
    "places",
    "price",
    "seed_of",
]
