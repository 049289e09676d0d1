"""What every credit method promises, as a check that runs on any function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from counterpoint.groups import Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.vocabulary import UNITS

_CLOSE = 1e-9

Run = Callable[[Steps], Credit]


def check_credit_method(method: Run, reference: Run | None = None) -> None:
    """Run a credit method on small hard cases and refuse it at the first broken promise.

    The promises: it returns Credit with one float64 value per row; it names its estimand, a known
    unit and its effective sample size; it changes nothing in the steps; masked rows and rollouts
    that nothing scored get NaN, every other row a finite number; rollouts that are alike in
    everything get the same credit, so that a group without spread tells them nothing apart; the
    same steps give the same credit again, in whatever order the rows stand; empty steps give empty
    credit. Steps with one single row to credit may be refused: nothing can be compared there.

    Args:
        method: a function from Steps to Credit, run with its defaults. The cases carry every column
            that `Steps.from_columns` takes.
        reference: a slow and obvious version; where given, values agree to 1e-9.

    Raises:
        Refused: naming the promise and the case. An error inside the method itself is not caught.
    """
    for case, steps in _cases():
        before = _columns(steps)
        credit = _run(method, case, steps)
        if credit is None:
            continue
        for promise, kept in _promises(method, steps, before, credit):
            if not kept:
                raise Refused(f"case {case!r}: {promise}")
        if reference is not None and not _same(credit.values, reference(steps).values):
            raise Refused(f"case {case!r}: the values differ from the reference by over {_CLOSE}")


def _run(method: Run, case: str, steps: Steps) -> Credit | None:
    """Its credit, or None where it refuses a case in which it may."""
    try:
        credit = method(steps)
    except Refused as error:
        if case == "one row":
            return None
        raise Refused(f"case {case!r}: it must give credit, but refuses: {error}") from error
    if not isinstance(credit, Credit):
        raise Refused(f"case {case!r}: it returns {type(credit).__name__}, not Credit")
    return credit


def _promises(
    method: Run, steps: Steps, before: dict[str, Any], credit: Credit
) -> Iterator[tuple[str, bool]]:
    """Every promise in words, and whether it is kept; asked one after another."""
    values, n = credit.values, len(steps)
    yield f"{len(values)} values for {n} rows", len(values) == n
    odd = [name for name, part in credit.parts.items() if len(part) != n]
    yield f"the part {', '.join(odd)} has not one entry per row", not odd
    yield "the estimand is not stated", credit.estimand not in ("", "unstated")
    yield f"the unit is {credit.unit!r}, none of {', '.join(UNITS)}", credit.unit in UNITS
    said = credit.diagnostics.get("effective_sample_size")
    yield "diagnostics lack effective_sample_size", isinstance(said, int | float)
    due = steps.mask & ~np.isnan(steps.outcome)
    yield "a masked row is credited; it must be NaN", not credit.credited[~steps.mask].any()
    scored = ~np.isnan(steps.outcome)
    yield "an unscored rollout is credited; it must be NaN", not credit.credited[~scored].any()
    yield "a scored, trainable row has no finite credit", bool(np.isfinite(values[due]).all())
    yield "it changes the steps in place", _equal(before, _columns(steps))
    again = method(steps).values
    yield "the same steps give other values when asked again", _same(values, again)
    for name, order in _orders(n):
        moved = method(_take(steps, order)).values
        yield f"with rows {name} a row's credit changes", _same(values[order], moved)
    twin = _twins(steps)
    yield "rollouts that are alike in everything differ in credit", _same(values, values[twin])


def _same(one: Any, other: Any) -> bool:
    return np.shape(one) == np.shape(other) and bool(
        np.allclose(one, other, rtol=0, atol=_CLOSE, equal_nan=True)
    )


def _columns(steps: Steps) -> dict[str, Any]:
    held = {field.name: getattr(steps, field.name) for field in fields(steps)}
    return {k: v.copy() for k, v in held.items() if isinstance(v, np.ndarray)}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(a, other[k], equal_nan=a.dtype.kind == "f") for k, a in one.items())


def _take(steps: Steps, order: Ints) -> Steps:
    """The same table with its rows in another order."""
    moved = {name: column[order] for name, column in _columns(steps).items()}
    return Steps(**moved, names=steps.names, counts=steps.counts, quality=steps.quality)


def _orders(n: int) -> Iterator[tuple[str, Ints]]:
    yield "reversed", np.arange(n)[::-1]
    yield "shuffled", np.random.default_rng(0).permutation(n)


def _twins(steps: Steps) -> Ints:
    """For each row, a row of a rollout of its group whose rows are all alike in every column."""
    columns = _columns(steps)
    apart = {"rollout", "event"}
    kept = [columns[name] for name in columns if name not in apart]
    lines = [tuple(np.asarray(c[i]).tobytes() for c in kept) for i in range(len(steps))]
    rows_of: dict[int, list[int]] = {}
    for row in steps.order.tolist():
        rows_of.setdefault(int(steps.rollout[row]), []).append(row)
    twin = np.arange(len(steps))
    first: dict[Any, list[int]] = {}
    for rows in rows_of.values():
        twin[rows] = first.setdefault(tuple(lines[row] for row in rows), rows)
    return twin


# ---------------------------------------------------------------------------------------------
# The cases


def _cases() -> Iterator[tuple[str, Steps]]:
    yield "two groups", _steps()
    yield "masked rows", _steps(mask=_but(2, 4, 7))
    yield "a masked rollout", _steps(mask=_but(3, 4, 5))
    yield "all masked", _steps(mask=[False] * _ROWS)
    yield "an unscored rollout", _steps(reward=_rewards(unscored=1))
    yield "nothing scored", _steps(reward=[None] * _ROWS)
    yield "a dead group", _steps(reward=_rewards(alike=True), **_alike())
    yield "a group of one", _steps(group=["a"] * 9 + ["b"] * 4 + ["c"] * 5)
    yield "one row", _one_row()
    yield "no rows", Steps.from_columns(rollout=[], reward=[], **{name: [] for name in _EXTRA})


_LENGTHS = (3, 3, 3, 4, 2, 3)
"""Turns of the rollouts: three in group a, three in group b."""
_ROWS = sum(_LENGTHS)
_EXTRA = (
    *("anchor", "value", "value_high", "segment_start"),
    *("logprob", "logprob_new", "state_digest", "time", "quality", "depends"),
)


def _steps(**changed: Any) -> Steps:
    row = np.arange(_ROWS)
    rollout = np.repeat(np.arange(len(_LENGTHS)), _LENGTHS)
    turn = np.concatenate([np.arange(length) for length in _LENGTHS])
    columns: dict[str, Any] = {
        "group": np.where(rollout < 3, "a", "b"),
        "rollout": rollout,
        "step": turn,
        "agent": np.where(turn % 2, "worker", "planner"),
        "reward": _rewards(),
        "anchor": [f"s{(r * 7) % 3}" for r in row],
        "value": np.sin(row),
        "value_high": np.cos(row),
        "segment_start": row % 2,
        "logprob": -0.1 - row / 10,
        "logprob_new": -0.1 - (row % 4) / 5,
        "state_digest": [f"d{(r * 5) % 4}" for r in row],
        "time": turn / 2,
        "quality": np.where(turn % 2, rollout % 3, rollout % 2),
        "depends": [["worker" if t % 2 else "planner"] for t in turn],
    }
    return Steps.from_columns(**columns | changed)


def _but(*masked: int) -> list[bool]:
    return [row not in masked for row in range(_ROWS)]


def _rewards(unscored: int | None = None, alike: bool = False) -> list[float | None]:
    """A reward now and then and one at the end; `alike` gives 0.1 three times in group a."""
    out: list[float | None] = []
    for number, length in enumerate(_LENGTHS):
        middle = 0.0 if alike and number < 3 else 0.25 * (number % 3)
        final = 0.1 if alike and number < 3 else float(number % 2)
        rewards = [middle] * (length - 1) + [final]
        out += [None] * length if number == unscored else rewards
    return out


def _alike() -> dict[str, Any]:
    """Columns in which the three rollouts of group a are the same, turn by turn."""
    turn = np.concatenate([np.arange(length) for length in _LENGTHS])
    return {
        "anchor": [f"s{t}" for t in turn],
        "value": turn / 3,
        "value_high": turn / 4,
        "segment_start": turn % 2,
        "logprob": -0.5 - turn / 10,
        "logprob_new": -0.4 - turn / 10,
        "state_digest": [f"d{t}" for t in turn],
        "quality": turn % 2,
    }


def _one_row() -> Steps:
    given = {
        "value": [0.5],
        "value_high": [0.5],
        "segment_start": [1],
        "logprob": [-0.5],
        "logprob_new": [-0.4],
        "time": [0.0],
        "quality": [0.5],
        "depends": [[0]],
    }
    return Steps.from_columns(
        rollout=["r"], reward=[1.0], anchor=["s"], state_digest=["d"], **given
    )
