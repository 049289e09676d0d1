"""How well one credit agrees with another, with everything that the figure leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint import groups
from counterpoint.credit.correlation import CORRELATIONS, cosine, intervals
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused

_ZERO_TRUTH = 1e-9
_ZERO_ESTIMATE = 1e-12


class Agreement(NamedTuple):
    """Figures of an estimate against a truth, over the units that both credit.

    Attributes:
        n: units that both credit.
        pearson, spearman: correlation of the values, and of their ranks (ties share a rank).
        kendall: τ-b, pairs in the same order less pairs in opposite order, corrected for ties.
        sign_accuracy: share of equal signs among the `decided`.
        coverage: share of `decided` among the `nonzero`.
        false_alarms: share with a non-zero estimate among the `zero`.
        mse: mean square of estimate − truth.
        best_scale: the factor c that brings the estimate nearest, Σ xy ÷ Σ x².
        mse_scaled: mean square of c · estimate − truth, which no step size can mend.
        second_moment: E[A²], the mean square of the estimate.
        culprit: share of rollouts in which the estimate names the act that did most harm; NaN
            without `rollout`.
        conservation_error: the largest difference, over rollouts, between the sum of the estimate
            and the sum of the truth; NaN without `rollout`.
        gradient_cosine: cosine of the two policy gradients; NaN without `gradient`.
        gradient_error: |g − g*| ÷ |g*|, where g* is that of the truth; NaN without.
        gradient_scale: g · g* ÷ |g*|², the multiple of g* that is in g; NaN without.
        nonzero, zero: units whose truth is above, or not above, 1e-9 in size.
        decided: of the non-zero, those whose estimate is above 1e-12 in size.
        culprits: rollouts in which some act did harm.
        undefined: how many of the three correlations are NaN because a side is constant.
        estimand, truth: what the two sides estimate.
        effective_sample_size, truth_sample_size: of either side, None where it does not say.
        intervals: 95 % interval of each correlation by name; empty without `bootstrap`.
    """

    n: int
    pearson: float
    spearman: float
    kendall: float
    sign_accuracy: float
    coverage: float
    false_alarms: float
    mse: float
    best_scale: float
    mse_scaled: float
    second_moment: float
    culprit: float
    conservation_error: float
    gradient_cosine: float
    gradient_error: float
    gradient_scale: float
    nonzero: int
    zero: int
    decided: int
    culprits: int
    undefined: int
    estimand: str
    truth: str
    effective_sample_size: float | None
    truth_sample_size: float | None
    intervals: Mapping[str, tuple[float, float]]

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
    rollout: Ints | None = None,
    group: Ints | None = None,
    bootstrap: int = 0,
    seed: int = 0,
) -> Agreement:
    """Compare an estimate with a truth, or with any other credit of the same units.

    The two may estimate different things; the result names both.

    The culprit of a rollout is the unit with the lowest credit by the truth, if that is below 0:
    what did most harm, whether or not it was made good later. Rollouts in which nothing did harm do
    not count. Units that tie are all culprits; where the estimate ties, it gets the chance that one
    of them, picked blindly, is a culprit, so that a credit that tells no units apart gets what
    guessing would.

    Args:
        estimate: credit of some rows.
        truth: credit of the same rows in the same order. Units that either side never credited
            (NaN) are left out.
        gradient: turns an advantage per row, shape (rows,), into a policy gradient of any shape,
            such as Σ A ∇log π; credit alone does not know the policy. Rows left out get 0.
        rollout: (rows,) code of the rollout of each row, from 0.
        group: (rows,) code of the group of each row, from 0; by default the rollout.
        bootstrap: how often groups are drawn again for `intervals`; 0 gives none.
        seed: of these draws.

    Returns:
        An `Agreement`. An empty denominator gives NaN, and its count says so. A correlation with a
        constant side, or of fewer than two units, is NaN and counted in `undefined`, never 0. A
        gradient of length 0 gives a cosine of NaN, one of the truth an error and scale of NaN.

    Raises:
        Refused: sides of different lengths or units; bootstrap below 0, or without groups.
    """
    if len(estimate) != len(truth):
        raise Refused(f"the estimate has {len(estimate)} rows, the truth {len(truth)}")
    if estimate.unit != truth.unit:
        raise Refused(f"the estimate is per {estimate.unit}, the truth per {truth.unit}")
    both = estimate.credited & truth.credited
    x, y = estimate.values[both], truth.values[both]
    correlated: dict[str, Any] = {name: f(x, y) for name, f in CORRELATIONS.items()}
    return Agreement(
        n=len(x),
        **correlated,
        undefined=int(np.isnan(list(correlated.values())).sum()),
        **_signs(x, y),
        **_sizes(x, y),
        **_by_rollout(x, y, None if rollout is None else rollout[both]),
        **_gradients(estimate.values, truth.values, both, gradient),
        intervals=_resampled(x, y, both, rollout if group is None else group, bootstrap, seed),
        estimand=estimate.estimand,
        truth=truth.estimand,
        effective_sample_size=estimate.diagnostics.get("effective_sample_size"),
        truth_sample_size=truth.diagnostics.get("effective_sample_size"),
    )


def _signs(x: Floats, y: Floats) -> dict[str, Any]:
    nonzero, answered = np.abs(y) > _ZERO_TRUTH, np.abs(x) > _ZERO_ESTIMATE
    decided = nonzero & answered
    return {
        "sign_accuracy": _mean(np.sign(x[decided]) == np.sign(y[decided])),
        "coverage": _mean(answered[nonzero]),
        "false_alarms": _mean(answered[~nonzero]),
        "nonzero": int(np.count_nonzero(nonzero)),
        "zero": int(np.count_nonzero(~nonzero)),
        "decided": int(np.count_nonzero(decided)),
    }


def _sizes(x: Floats, y: Floats) -> dict[str, Any]:
    square = float(x @ x)
    scale = float(x @ y) / square if square else float("nan")
    return {
        "mse": _mean((x - y) ** 2),
        "best_scale": scale,
        "mse_scaled": _mean((scale * x - y) ** 2) if square else _mean(y**2),
        "second_moment": _mean(x**2),
    }


def _by_rollout(x: Floats, y: Floats, rollout: Ints | None) -> dict[str, Any]:
    if rollout is None:
        return {"culprit": float("nan"), "culprits": 0, "conservation_error": float("nan")}
    _, rollout = np.unique(rollout, return_inverse=True)
    n = int(rollout.max(initial=-1)) + 1
    harmed = _least(y, rollout, n) < -_ZERO_TRUTH
    guilty = y <= _least(y, rollout, n)[rollout] + _ZERO_TRUTH
    named = x <= _least(x, rollout, n)[rollout] + _ZERO_ESTIMATE
    hits = groups.count(rollout[named & guilty], n) / groups.count(rollout[named], n)
    off = groups.total(rollout, x - y, n)
    return {
        "culprit": _mean(hits[harmed]),
        "culprits": int(np.count_nonzero(harmed)),
        "conservation_error": float(np.abs(off).max()) if n else float("nan"),
    }


def _least(x: Floats, rollout: Ints, n: int) -> Floats:
    out = np.full(n, np.inf)
    np.minimum.at(out, rollout, x)
    return out


def _gradients(
    x: Floats, y: Floats, both: npt.NDArray[np.bool_], gradient: Callable[[Floats], Any] | None
) -> dict[str, Any]:
    names = ("gradient_cosine", "gradient_error", "gradient_scale")
    if gradient is None:
        return dict.fromkeys(names, float("nan"))
    g, exact = (np.ravel(gradient(np.where(both, side, 0.0))).astype(float) for side in (x, y))
    size = float(exact @ exact)
    error = float(np.linalg.norm(g - exact)) / np.sqrt(size) if size else float("nan")
    scale = float(g @ exact) / size if size else float("nan")
    return dict(zip(names, (cosine(g, exact), error, scale), strict=True))


def _resampled(
    x: Floats,
    y: Floats,
    both: npt.NDArray[np.bool_],
    group: Ints | None,
    bootstrap: int,
    seed: int,
) -> dict[str, tuple[float, float]]:
    if not bootstrap:
        return {}
    if bootstrap < 0 or group is None:
        raise Refused(
            f"bootstrap={bootstrap} draws groups again: it is 0 or more, and needs group= or "
            "rollout=, the code of each row's"
        )
    return intervals(x, y, group[both], bootstrap, seed)


def _mean(x: npt.NDArray[Any]) -> float:
    return float(x.mean()) if len(x) else float("nan")


def _said(value: Any) -> str:
    return "unsaid" if value is None else f"{value:.6g}"
