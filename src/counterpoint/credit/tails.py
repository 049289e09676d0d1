"""Tails of the t and F distributions, which NumPy does not have."""

from __future__ import annotations

import math
from functools import lru_cache

_SMALLEST = 1e-300


def beta_share(x: float, a: float, b: float) -> float:
    """I_x(a, b), the regularised incomplete beta function, to about 1e-12.

    By its continued fraction (DLMF 8.17.22) in Lentz's form, on the side where it converges fast.
    NaN where x is NaN.
    """
    if not 0 < x < 1:
        return x if math.isnan(x) else float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - beta_share(1.0 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 1000):
        before = fraction
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away(1.0 + step * d)
            c = _away(1.0 + step / c)
            fraction *= c * d
        if abs(fraction - before) < 1e-15 * abs(fraction):
            break
    return math.exp(front) * fraction / a


def _away(x: float) -> float:
    """x, kept from zero."""
    return x if abs(x) > _SMALLEST else _SMALLEST


@lru_cache(maxsize=256)
def t_critical(level: float, df: float) -> float:
    """What |t| with `df` degrees of freedom stays below with probability `level`; NaN for df < 1.

    By halving an interval, since P(|t| > c) = I_{df/(df + c²)}(df/2, ½).
    """
    if not df >= 1:
        return math.nan
    low, high = 0.0, 1.0
    while beta_share(df / (df + high * high), df / 2, 0.5) > 1 - level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        outside = beta_share(df / (df + middle * middle), df / 2, 0.5)
        low, high = (middle, high) if outside > 1 - level else (low, middle)
    return high


def f_tail(f: float, first: float, second: float) -> float:
    """P(F > f) with `first` and `second` degrees of freedom; NaN where either is below 1."""
    if not (first >= 1 and second >= 1):
        return math.nan
    return beta_share(second / (second + first * f), second / 2, first / 2)
