"""How well one credit agrees with another, with everything that the figure leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Floats
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused

_ZERO_TRUTH = 1e-9
_ZERO_ESTIMATE = 1e-12
_CONSTANT = 1e-12


class Agreement(NamedTuple):
    """Figures of an estimate against a truth, over the units that both credit.

    Attributes:
        n: units that both credit.
        pearson, spearman: correlation of the values, and of their ranks (ties share a rank).
        sign_accuracy: share of equal signs among the `decided`.
        coverage: share of `decided` among the `nonzero`.
        false_alarms: share with a non-zero estimate among the `zero`.
        gradient_cosine: cosine of the two policy gradients; NaN without `gradient`.
        nonzero, zero: units whose truth is above, or not above, 1e-9 in size.
        decided: of the non-zero, those whose estimate is above 1e-12 in size.
        undefined: how many of pearson and spearman are NaN because a side is constant.
        estimand, truth: what the two sides estimate.
        effective_sample_size, truth_sample_size: of either side, None where it does not say.
    """

    n: int
    pearson: float
    spearman: float
    sign_accuracy: float
    coverage: float
    false_alarms: float
    gradient_cosine: float
    nonzero: int
    zero: int
    decided: int
    undefined: int
    estimand: str
    truth: str
    effective_sample_size: float | None
    truth_sample_size: float | None

    def __str__(self) -> str:
        cosine = self.gradient_cosine
        shown = [
            f"{self.estimand} against {self.truth}",
            f"{self.n} units",
            f"pearson {self.pearson:.3f}",
            f"spearman {self.spearman:.3f}",
            f"sign accuracy {self.sign_accuracy:.3f} ({self.decided} of {self.nonzero} decided)",
            f"coverage {self.coverage:.3f}",
            f"false alarms {self.false_alarms:.3f} (of {self.zero})",
            *([] if np.isnan(cosine) else [f"gradient cosine {cosine:.3f}"]),
            f"effective sample {_said(self.effective_sample_size)} "
            f"against {_said(self.truth_sample_size)}",
        ]
        return " · ".join(shown)


def score(
    estimate: Credit,
    truth: Credit,
    *,
    gradient: Callable[[Floats], npt.ArrayLike] | None = None,
) -> Agreement:
    """Compare an estimate with a truth, or with any other credit of the same units.

    The two may estimate different things; the result names both.

    Args:
        estimate: credit of some rows.
        truth: credit of the same rows in the same order. Units that either side never credited
            (NaN) are left out.
        gradient: turns an advantage per row, shape (rows,), into a policy gradient of any shape,
            such as Σ A ∇log π; credit alone does not know the policy. Rows left out get 0.

    Returns:
        An `Agreement`. An empty denominator gives NaN, and its count says so. A correlation with a
        constant side, or of fewer than two units, is NaN and counted in `undefined`, never 0. A
        gradient of length 0 gives a cosine of NaN.

    Raises:
        Refused: sides of different lengths or units.
    """
    if len(estimate) != len(truth):
        raise Refused(f"the estimate has {len(estimate)} rows, the truth {len(truth)}")
    if estimate.unit != truth.unit:
        raise Refused(f"the estimate is per {estimate.unit}, the truth per {truth.unit}")
    both = estimate.credited & truth.credited
    x, y = estimate.values[both], truth.values[both]
    nonzero, answered = np.abs(y) > _ZERO_TRUTH, np.abs(x) > _ZERO_ESTIMATE
    decided = nonzero & answered
    pearson, spearman = _correlation(x, y), _correlation(_ranks(x), _ranks(y))
    return Agreement(
        n=len(x),
        pearson=pearson,
        spearman=spearman,
        sign_accuracy=_share(np.sign(x[decided]) == np.sign(y[decided])),
        coverage=_share(answered[nonzero]),
        false_alarms=_share(answered[~nonzero]),
        gradient_cosine=float("nan")
        if gradient is None
        else _cosine(
            gradient(np.where(both, estimate.values, 0.0)),
            gradient(np.where(both, truth.values, 0.0)),
        ),
        nonzero=int(np.count_nonzero(nonzero)),
        zero=int(np.count_nonzero(~nonzero)),
        decided=int(np.count_nonzero(decided)),
        undefined=int(np.isnan(pearson)) + int(np.isnan(spearman)),
        estimand=estimate.estimand,
        truth=truth.estimand,
        effective_sample_size=estimate.diagnostics.get("effective_sample_size"),
        truth_sample_size=truth.diagnostics.get("effective_sample_size"),
    )


def _share(hits: npt.NDArray[np.bool_]) -> float:
    return float(hits.mean()) if len(hits) else float("nan")


def _correlation(x: Floats, y: Floats) -> float:
    """Pearson's r; NaN where a side is constant up to rounding."""
    for side in (x, y):
        if len(side) < 2 or np.ptp(side) <= _CONSTANT * np.abs(side).max():
            return float("nan")
    return _cosine(x - x.mean(), y - y.mean())


def _cosine(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    a, b = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.clip(a @ b / lengths, -1, 1)) if lengths else float("nan")


def _ranks(x: Floats) -> Floats:
    """Ranks from 1 up; equal values share the mean of theirs."""
    _, place, size = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(size) - (size - 1) / 2)[place]


def _said(value: Any) -> str:
    return "unsaid" if value is None else f"{value:.6g}"
