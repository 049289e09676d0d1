"""What a fork gives: branches with their outcomes, what they cost, and how two arms differ."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from counterpoint.branches import Spent
from counterpoint.groups import Floats
from counterpoint.redrive.interventions import Level
from counterpoint.schema import Trace
from counterpoint.spelling import Refused

WIDTH = 1.959963984540054
"""Standard errors on each side of a 95 % interval of a normal mean."""


@dataclass(frozen=True, eq=False)
class Branches:
    """Continuations of one run from one event, all of one arm.

    Attributes:
        parent: the run that they leave.
        seq: the event that something was done to; each trace's own events begin where its header
            says, at `fork.seq`.
        do, level: what was done, and whether on the channel or in the decision (None: nothing).
        n: branches asked for; fewer were played if `notes` says so.
        traces: the branches that were played, sealed suffixes with a group of their own.
        spent: what playing took, the prefix's calls of the environment once.
        cached: branches that were already there and not played again.
        changed: what was another environment or policy than the record's (`allow_changed`).
        notes: what went wrong on the way, in words.
    """

    parent: Trace
    seq: int
    do: str
    level: Level | None
    n: int
    traces: tuple[Trace, ...]
    spent: Spent
    cached: int = 0
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> Floats:
        """(traces,) their outcomes; NaN where nothing was scored."""
        outcomes = [trace.outcome for trace in self.traces]
        return np.array([math.nan if x is None else x for x in outcomes], dtype=np.float64)

    @property
    def mean(self) -> float:
        """Mean of the scored outcomes; NaN if there are none."""
        return _mean(self.values)[0]

    @property
    def stderr(self) -> float:
        """Standard error of the mean, s/√n with Bessel's s; NaN for fewer than two."""
        return _mean(self.values)[1]

    @property
    def ci(self) -> tuple[float, float]:
        """95 % interval of the mean, normal: mean ± 1.96 standard errors."""
        return self.mean - WIDTH * self.stderr, self.mean + WIDTH * self.stderr

    def counts(self) -> dict[float | None, int]:
        """How many branches ended with each outcome, from the best; None is not scored."""
        found = Counter(trace.outcome for trace in self.traces)
        scored = sorted((x for x in found if x is not None), reverse=True)
        order: list[float | None] = [*scored, *([None] if None in found else [])]
        return {outcome: found[outcome] for outcome in order}

    def minus(self, other: Branches) -> Contrast:
        """Mean and standard error of the difference to another arm, branch by branch.

        Branches of one number share their draws as far as they can, so the difference varies less
        than the arms do when they are correlated; the standard error is that of the differences and
        is right whether they are or not. Pairs of which one is missing or not scored are left out.

        Raises:
            Refused: the arms leave different runs, or no number is in both.
        """
        if self.parent.trace_id != other.parent.trace_id:
            raise Refused(
                f"these arms leave trace {self.parent.trace_id} and trace {other.parent.trace_id}; "
                "only branches of one run are paired"
            )
        ours, theirs = self._by_number(), other._by_number()
        both = [number for number in ours if number in theirs]
        if not both:
            raise Refused("these arms have no scored branch of one number, so nothing is paired")
        first = np.array([ours[number] for number in both])
        second = np.array([theirs[number] for number in both])
        return Contrast(*_mean(first - second), _correlation(first, second), len(both))

    def _by_number(self) -> dict[int, float]:
        """Scored outcomes by the number of the branch."""
        return {
            trace.header.fork.branch: trace.outcome
            for trace in self.traces
            if trace.header.fork is not None and trace.outcome is not None
        }

    def __str__(self) -> str:
        level = f" ({self.level})" if self.level else ""
        own = self.parent.outcome
        lines = [
            f"{len(self.traces)} branches of trace {self.parent.trace_id} at event {self.seq}, "
            f"{self.do}{level}: outcome {self.mean:.3g} ± {self.stderr:.2g}, "
            f"of the run {'not scored' if own is None else f'{own:.3g}'}; {self.spent}"
        ]
        lines += [f"under another {what} than the record's" for what in self.changed]
        return "\n".join([*lines, *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "parent": self.parent.trace_id,
            "seq": self.seq,
            "do": self.do,
            "level": self.level,
            "n": self.n,
            "branches": [{"trace_id": t.trace_id, "outcome": t.outcome} for t in self.traces],
            "outcome_parent": self.parent.outcome,
            "mean": self.mean,
            "stderr": self.stderr,
            "ci": list(self.ci),
            "spent": vars(self.spent),
            "cached": self.cached,
            "changed": list(self.changed),
            "notes": list(self.notes),
        }


class Contrast(tuple[float, float]):
    """(mean, standard error) of a paired difference; `"%.2f ± %.2f" % contrast` prints it.

    Attributes:
        correlation: of the arms' outcomes over the pairs; NaN where one of them does not vary.
        pairs: how many there are.
    """

    correlation: float
    pairs: int

    def __new__(cls, mean: float, stderr: float, correlation: float, pairs: int) -> Contrast:
        """Put together the two numbers and what belongs to them."""
        made = super().__new__(cls, (mean, stderr))
        made.correlation, made.pairs = correlation, pairs
        return made

    def __str__(self) -> str:
        return (
            f"{self[0]:+.3g} ± {self[1]:.2g} over {self.pairs} pairs, "
            f"correlation of the arms {self.correlation:.2f}"
        )


def _mean(values: Floats) -> tuple[float, float]:
    """Mean and standard error of what is there."""
    scored = values[~np.isnan(values)]
    if not len(scored):
        return math.nan, math.nan
    if len(scored) == 1 or scored.min() == scored.max():  # no rounding where nothing varies
        return float(scored[0]), math.nan if len(scored) == 1 else 0.0
    return float(scored.mean()), float(scored.std(ddof=1)) / math.sqrt(len(scored))


def _correlation(first: Floats, second: Floats) -> float:
    if len(first) < 2 or not first.std() or not second.std():
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])
