"""The account of a replay: what branches will cost, what they did, and which are held already."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from counterpoint.branches import RESAMPLE, Absence, Branches, Downstream, Menu, Spent
from counterpoint.branchfile import Key
from counterpoint.credit.protocols import Budget, Replay, places
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

AT_ONCE = 64
"""Places that are asked for together where branches are kept elsewhere, so that few are lost if the
process ends.
"""


class Held(Protocol):
    """Where branches are remembered: a dictionary, or a file (`branchfile.BranchFile`)."""

    def get(self, key: Key, /) -> Branches | None:
        """The branches of a question, if there are any."""

    def __setitem__(self, key: Key, found: Branches, /) -> None:
        """Keep them."""


class Account:
    """A replay that runs nothing twice and spends no more than its budget.

    It remembers branches by (place, intervention, first number, seed), so methods that share an
    account share their branches. Before anything is run it is priced from the record; what the
    budget does not cover is left NaN, and the credit says so.

    Args:
        replay: what runs.
        steps: the table of the record: what is left of a run prices a branch of it.
        budget: the most that may be spent. A branch that turns out longer than the record can
            exceed it by that much.
        held: where branches are remembered; by default in memory. What it holds already is not run.
        named: what a run is known by there, from its number; by default that number.

    Attributes:
        spent: what was spent so far.
        priced: what everything that was asked for and not remembered was priced at.
        left_out: branches that the budget did not cover.
    """

    def __init__(
        self,
        replay: Replay,
        steps: Steps,
        budget: Budget | None = None,
        *,
        held: Held | None = None,
        named: Callable[[int], Hashable] = int,
    ) -> None:
        check_budget(budget or {})
        self._replay = replay
        self._prices = Prices(steps)
        self._budget = {name: (budget or {}).get(name, np.inf) for name in _CURRENCIES}
        self._held: Held = {} if held is None else held
        self._at_once = None if held is None else AT_ONCE
        self._named = named
        self.spent = Spent()
        self.priced = Spent()
        self.left_out = 0

    def menu(self, places: Ints) -> Menu:
        """As the replay."""
        return self._replay.menu(places)

    @property
    def retell(self) -> Any:
        """As the replay, which leads its branches again; None where it cannot."""
        return getattr(self._replay, "retell", None)

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
                places[which], action[which], count, start=start + first, each=each, seed=seed,
                downstream=downstream,
            )  # fmt: skip

        keys: list[Key] = [
            ("branch", self._named(run_), seq, act, start, each, seed, downstream)
            for (run_, seq), act in zip(places.tolist(), action.tolist(), strict=True)
        ]
        price = self._prices.of_branch(places, action, downstream) * each
        return self._answered(keys, price, run, n)

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
                runs[which], agents, present[which], count, absence=absence, start=start + first,
                seed=seed, downstream=downstream,
            )  # fmt: skip

        gone = [frozenset(np.flatnonzero(~row).tolist()) for row in present]
        keys: list[Key] = [
            (
                "absent",
                self._named(run_),
                frozenset(agents[i] for i in out),
                absence,
                seed,
                downstream,
            )
            for run_, out in zip(runs.tolist(), gone, strict=True)
        ]
        return self._answered(keys, self._prices.of_run(runs, downstream), run, n)

    def _answered(
        self,
        keys: list[Key],
        price: Floats,
        run: Callable[[Ints, int, int], Branches],
        n: int,
    ) -> Branches:
        """The branches of every key, after running those that are not remembered."""
        before = self.spent
        for have, which in self._missing(keys, n):
            self._run(keys, price * (n - have), run, which, have, n)
        out = [self._held.get(key) for key in keys]
        return Branches(
            values=_column(out, "values", n, np.nan),
            spent=self.spent - before,
            leaves=_column(out, "leaves", n, 0).astype(np.int64),
            drawn=_column(out, "drawn", n, -1).astype(np.int64),
            critic=_column(out, "critic", n, np.nan),
            exact=all(found is None or found.exact for found in out),
        )

    def _missing(self, keys: list[Key], end: int) -> list[tuple[int, Ints]]:
        """Keys that have fewer than `end` branches, each once, by how many they have."""
        first = {key: row for row, key in reversed(list(enumerate(keys)))}
        short: dict[int, list[int]] = {}
        for key, row in first.items():
            known = self._held.get(key)
            have = 0 if known is None else known.values.shape[1]
            if have < end:
                short.setdefault(have, []).append(row)
        return [(have, np.sort(np.array(which))) for have, which in sorted(short.items())]

    def _run(
        self,
        keys: list[Key],
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
            size = min(size, self._at_once or size)
            found = run(which[:size], have, end - have)
            self.spent += found.spent
            for place, row in enumerate(which[:size].tolist()):
                self._keep(keys[row], found, place)
            which = which[size:]

    def _keep(self, key: Key, found: Branches, place: int) -> None:
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


def _column(found: list[Branches | None], name: str, n: int, missing: float) -> Floats:
    """(keys, n) of one array of remembered branches."""
    out = np.full((len(found), n), missing, dtype=np.float64)
    for row, branches in enumerate(found):
        if branches is not None:
            held = getattr(branches, name)[0, :n]
            out[row, : len(held)] = held
    return out


def _spent(amounts: Floats) -> Spent:
    return Spent(*(round(amount) for amount in amounts.tolist()))


def check_budget(budget: Budget) -> None:
    """Refuse a budget in what is not counted, or of less than nothing."""
    for name, amount in budget.items():
        if name not in _CURRENCIES:
            raise Refused(f"a budget is in {', '.join(_CURRENCIES)}, not {name}")
        if amount < 0:
            raise Refused(f"a budget of {amount} {name} is less than nothing")


def covered(budget: Budget, spent: Spent, each: Spent, most: int) -> int:
    """How many branches of one price a budget still pays for, up to `most`."""
    left: dict[str, int] = {name: amount - getattr(spent, name) for name, amount in budget.items()}
    if min(left.values(), default=0) < 0:
        return 0
    prices: dict[str, int] = {name: getattr(each, name) for name in left}
    return min([most, *(left[name] // price for name, price in prices.items() if price)])


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
