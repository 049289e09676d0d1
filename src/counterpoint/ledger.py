"""What comes back: the credit of every row, what it means, and the file that keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from counterpoint import groups
from counterpoint.groups import Bools, Floats
from counterpoint.spelling import Refused
from counterpoint.units import Units


class Parts(Mapping[str, npt.NDArray[Any]]):
    """Intermediates by name; what is given as a function is worked out when it is first read.

    Spreading a mean over a million rows takes as long as the credit itself, and few read it. The
    functions look at the steps that they were made from, which nobody changes in place.
    """

    def __init__(self, *sources: Mapping[str, Any]) -> None:
        self._made: dict[str, Any] = {}
        for source in sources:
            self._made |= source._made if isinstance(source, Parts) else source

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        part = self._made[name]
        if callable(part):
            part = self._made[name] = part()
        made: npt.NDArray[Any] = part
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # functions cannot be copied to another process


@dataclass(frozen=True, eq=False)
class Credit:
    """What each row earned, and what that number means.

    Attributes:
        values: (rows,) float64; NaN was never credited, which is not 0.
        unit: what carries the credit (`vocabulary.UNITS`).
        estimand: the quantity that is estimated, by its name on the methods page.
        identified: `randomised`, `overlap`, `assumption:NAME`, `heuristic` or `not`.
        parts: every intermediate under its formula's name, each of shape (rows,); `Parts` works
            them out when they are read.
        diagnostics: sample sizes and counts, `effective_sample_size` always among them; `advice`,
            where it is there, holds sentences about what looks mistaken in the rows.
    """

    values: Floats
    unit: str = "turn"
    estimand: str = "unstated"
    identified: str = "heuristic"
    parts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        object.__setattr__(self, "values", values)
        if values.ndim != 1:
            raise Refused(f"credit has {values.ndim} dimensions where one value per row is needed")
        kinds = ("randomised", "overlap", "heuristic", "not")
        if self.identified not in kinds and not self.identified.startswith("assumption:"):
            raise Refused(f"identified is {self.identified!r}, not {kinds} or assumption:NAME")
        for name, part in () if isinstance(self.parts, Parts) else self.parts.items():
            if len(part) != len(values):
                raise Refused(f"part {name} has {len(part)} rows, the credit has {len(values)}")

    def __len__(self) -> int:
        return len(self.values)

    def __str__(self) -> str:
        plural = {"agent": "agents", "team": "teams"}.get(self.unit, f"{self.unit}s")
        head = f"{len(self)} {plural} · estimand {self.estimand} · {self.identified}"
        shown = {
            "effective sample" if k == "effective_sample_size" else k: v
            for k, v in self.diagnostics.items()
            if isinstance(v, int | float) and (v or k in _ALWAYS_SHOWN)
        }
        advice = self.diagnostics.get("advice", ())
        return " · ".join([head, *(f"{k} {v:.6g}" for k, v in shown.items()), *advice])

    @property
    def credited(self) -> Bools:
        """(rows,) whether the row was credited at all."""
        return ~np.isnan(self.values)

    def tokens(self, mask: npt.ArrayLike) -> Floats:
        """Spread each row's credit over its tokens.

        Args:
            mask: (rows, tokens), 1 where the token is trainable.

        Returns:
            (rows, tokens) float64: the row's credit where the mask is set, 0 elsewhere and on rows
            that were never credited.

        Raises:
            Refused: the mask has another number of rows, is not two-dimensional, or holds something
                that is neither true nor false.
        """
        on = np.asarray(mask)
        if on.ndim != 2 or len(on) != len(self):
            raise Refused(f"the mask has shape {on.shape} where ({len(self)}, tokens) is needed")
        if on.dtype.kind != "b" and not (fits := (on == 0) | (on == 1)).all():
            row, place = (int(i) for i in np.argwhere(~fits)[0])
            raise Refused(
                f"mask, row {row}, token {place}: {on[row, place]:g} is neither true nor false"
            )
        return np.where(on.astype(bool), np.nan_to_num(self.values, nan=0.0)[:, None], 0.0)

    def at(self, units: Units, how: Literal["mean", "sum"] = "mean") -> Credit:
        """Carry the credit of turns to units of another kind.

        A part of a turn (token, message, tool call, decision) gets the turn's number as it stands:
        a uniform broadcast, which says nothing about how the parts differ. An agent, a role or the
        team gets the mean or the sum of its credited turns.

        Args:
            units: from `Steps.units`, of the same steps.
            how: what turns taken together get; parts of a turn are not asked.

        Returns:
            Credit per unit. Parts of a turn keep the parts of its number; turns taken together have
            the part `n`, how many credited turns went in, and NaN where there is none. The
            diagnostic `carried` says which of broadcast, mean and sum it was.

        Raises:
            Refused: units of other steps; `how` is neither mean nor sum.
        """
        if units.rows != len(self):
            raise Refused(f"units of {units.rows} turns cannot carry a credit of {len(self)}")
        if how not in ("mean", "sum"):
            raise Refused(f"how is {how!r}; it is 'mean' or 'sum'")
        if units.of is None:
            values, carried = self.values[units.row], "broadcast"
            parts = {name: part[units.row] for name, part in self.parts.items()}
        else:
            on, carried = self.credited, how
            n = groups.count(units.of[on], len(units))
            total = groups.total(units.of[on], self.values[on], len(units))
            share = np.maximum(n, 1) if how == "mean" else 1.0
            values, parts = np.where(n > 0, total / share, np.nan), {"n": n}
        about = {**self.diagnostics, "carried": carried}
        return Credit(values, units.kind, self.estimand, self.identified, parts, about)

    def why(self, row: int | None = None) -> str:
        """One line with every part of the number of a row, or unit; by default of the largest."""
        if row is None:
            if not self.credited.any():
                return "no row was credited"
            row = int(np.nanargmax(np.abs(self.values)))
        parts = ", ".join(f"{name} {_plain(part[row])}" for name, part in self.parts.items())
        unit = "row" if self.unit == "turn" else self.unit
        return (
            f"{unit} {row}: {_plain(self.values[row])} ({self.estimand}) from {parts or 'no parts'}"
        )


_ALWAYS_SHOWN = ("effective_sample_size", "groups", "groups_without_signal")


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)
