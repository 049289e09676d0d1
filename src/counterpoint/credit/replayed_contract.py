"""What every replay promises, as a check that runs on a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import numpy as np

from counterpoint import groups
from counterpoint.branches import KEEP, RESAMPLE, Branches
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.replayed import due
from counterpoint.groups import Floats, Ints
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

_FAR = 5.0
"""Standard errors between what branches and the record say that no honest replay shows."""

_ROUNDING = 1e-9


class CheckedReplay(NamedTuple):
    """A contract kept: how many things each clause examined. 0 says that nothing was there."""

    rows: int
    clauses: dict[str, int]

    def __str__(self) -> str:
        examined = " · ".join(f"{clause} {n}" for clause, n in self.clauses.items())
        return f"the replay of {self.rows} turns keeps its contract: {examined}"


class _Case(NamedTuple):
    replay: Replay
    steps: Steps
    rows: Ints
    at: Ints
    n: int
    seed: int


def check_replay(
    replay: Replay | Harness, steps: Steps, *, n: int = 16, seed: int = 0
) -> CheckedReplay:
    """Run recorded runs again in ways that have a known answer; refuse at the first that is wrong.

    menu         probabilities sum to 1, and what was taken is an entry
    again        the same question has the same answer: asked twice, in another order, or in parts
    seeds        another seed is other draws (unless nothing is drawn at all)
    parent       branches of an untouched run are distributed as the recorded runs are: whole runs
                 drawn anew, and last acts kept (each within five standard errors)
    frozen       an act kept, with all that followed, gives the recorded outcome
    present      with all agents present a run is the recorded one
    impossible   an entry that no menu has gives NaN, not an error and not an outcome
    spent        cost is counted, and more branches do not cost less

    Args:
        replay: what is checked.
        steps: the record that it replays; ten rollouts or more, or `parent` sees nothing.
        n: branches of each row.
        seed: of all draws.

    Returns:
        How many things each clause examined: `print(check_replay(mine, steps))`. A clause that the
        replay refuses (`frozen`, `present`) counts 0.

    Raises:
        Refused: a clause is broken; the sentence names it and the place. An error inside the replay
            itself is not caught.
    """
    rows = due(steps, n=n)
    if not len(rows):
        raise Refused("these steps have no trainable, scored row, so there is nothing to replay")
    case = _Case(needed(replay, "check_replay"), steps, rows, places(steps, rows), n, seed)
    return CheckedReplay(len(rows), {name: clause(case) for name, clause in _CLAUSES.items()})


def _broken(clause: str, what: str) -> NoReturn:
    raise Refused(f"the replay breaks its contract, clause {clause}: {what}")


def _branch(case: _Case, which: Ints, action: int, n: int, start: int = 0, seed: int = 0) -> Floats:
    at = case.at[which]
    found = case.replay.branch(at, np.full(len(at), action), n, start=start, seed=case.seed + seed)
    _shaped(found, (len(at), n))
    return found.values


def _shaped(found: Branches, shape: tuple[int, int]) -> None:
    if found.values.shape != shape:
        _broken("again", f"{shape} outcomes were asked for, {found.values.shape} came back")


def _menu(case: _Case) -> int:
    menu = case.replay.menu(case.at)
    for place, (size, taken, probs) in enumerate(
        zip(menu.size, menu.taken, menu.probs, strict=True)
    ):
        where = f"place {case.at[place].tolist()}"
        if not -1 <= taken < max(size, 1) or (size == 0 and taken >= 0):
            _broken("menu", f"{where} took entry {taken} of {size}")
        if size and not np.isnan(probs).any() and abs(probs[:size].sum() - 1) > 1e-6:
            _broken("menu", f"the probabilities at {where} sum to {probs[:size].sum():g}")
    return int((menu.size > 0).sum())


def _again(case: _Case) -> int:
    every = np.arange(len(case.at))
    first = _branch(case, every, RESAMPLE, 2)
    parts = [_branch(case, every, RESAMPLE, 1, start=number) for number in range(2)]
    for how, other in (
        ("asked twice", _branch(case, every, RESAMPLE, 2)),
        ("asked in another order", _branch(case, every[::-1], RESAMPLE, 2)[::-1]),
        ("asked one by one", np.concatenate(parts, axis=1)),
    ):
        differs = ~np.isclose(first, other, rtol=0, atol=_ROUNDING, equal_nan=True)
        if differs.any():
            place = case.at[np.argmax(differs.any(axis=1))].tolist()
            _broken("again", f"{how}, the branches of place {place} have other outcomes")
    return 3 * first.size


def _seeds(case: _Case) -> int:
    every = np.arange(len(case.at))
    values = _branch(case, every, RESAMPLE, case.n)
    if np.nanmax(np.ptp(values, axis=1), initial=0.0) <= _ROUNDING:
        return 0
    if np.array_equal(values, _branch(case, every, RESAMPLE, case.n, seed=1), equal_nan=True):
        _broken("seeds", "two seeds gave the same outcomes throughout, although branches differ")
    return values.size


def _parent(case: _Case) -> int:
    order = case.rows[np.lexsort((case.steps.step[case.rows], case.steps.rollout[case.rows]))]
    last = np.append(~groups.same_as_next(case.steps.rollout[order])[:-1], True)
    first = np.append(True, last[:-1])
    for what, chosen, action in (
        ("runs drawn anew from their first turn", order[first], RESAMPLE),
        ("runs whose last act was kept", order[last], KEEP),
    ):
        which = np.searchsorted(case.rows, chosen)
        off = case.steps.outcome[chosen] - mean_of(_branch(case, which, action, case.n))
        off = off[~np.isnan(off)]
        if len(off) < 10:
            return 0
        error = max(float(off.std(ddof=1)) / len(off) ** 0.5, _ROUNDING)
        if abs(off.mean()) > _FAR * error:
            _broken(
                "parent",
                f"{what} earn {-off.mean():+.3g} more than the record on average, "
                f"{abs(off.mean()) / error:.0f} standard errors",
            )
    return 2 * len(off)


def _frozen(case: _Case) -> int:
    kept = np.full(len(case.at), KEEP)
    try:
        found = case.replay.branch(case.at, kept, 1, seed=case.seed, downstream="frozen")
    except Refused:
        return 0
    return _recorded("frozen", case, case.rows, found.values[:, 0])


def _present(case: _Case) -> int:
    agents = case.steps.names["agent"]
    first = case.rows[np.unique(case.steps.rollout[case.rows], return_index=True)[1]]
    there = np.ones((len(first), len(agents)), dtype=bool)
    runs = places(case.steps, first)[:, 0]
    try:
        found = case.replay.absent(runs, agents, there, 1, seed=case.seed)
    except Refused:
        return 0
    return _recorded("present", case, first, found.values[:, 0])


def _recorded(clause: str, case: _Case, rows: Ints, values: Floats) -> int:
    wrong = ~np.isclose(values, case.steps.outcome[rows], rtol=0, atol=_ROUNDING)
    if wrong.any():
        row = int(rows[np.argmax(wrong)])
        got = values[np.argmax(wrong)]
        _broken(clause, f"row {row} gives {got:g}, and the record {case.steps.outcome[row]:g}")
    return len(rows)


def _impossible(case: _Case) -> int:
    values = _branch(case, np.arange(len(case.at)), 1 << 30, 1)
    if not np.isnan(values).all():
        _broken("impossible", "an entry that no menu has gave an outcome; it must give NaN")
    return len(values)


def _spent(case: _Case) -> int:
    drawn = np.full(len(case.at), RESAMPLE)
    costs = [case.replay.branch(case.at, drawn, n, seed=case.seed).spent for n in (1, 2)]
    for name, (once, twice) in _by_currency(costs[0], costs[1]):
        if not 0 <= once <= twice:
            _broken("spent", f"one branch of each cost {once} {name}, two cost {twice}")
    if not any(vars(costs[0]).values()):
        _broken("spent", "branches were run, and nothing was spent")
    return 2 * len(case.at)


def _by_currency(once: object, twice: object) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, amount in vars(once).items():
        yield name, (amount, getattr(twice, name))


_CLAUSES: dict[str, Callable[[_Case], int]] = {
    "menu": _menu,
    "again": _again,
    "seeds": _seeds,
    "parent": _parent,
    "frozen": _frozen,
    "present": _present,
    "impossible": _impossible,
    "spent": _spent,
}
