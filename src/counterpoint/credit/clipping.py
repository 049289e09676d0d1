"""The probability ratio of PPO, and which turns it silences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

_BOUND = 20.0


def ppo_ratio(
    steps: Steps, credit: Credit, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Credit:
    """Add to any credit how far the policy has moved, and where PPO's clip stops its gradient.

        ρ = exp(clamp(logprob_new − logprob, ±20))
        clipped = (A > 0 and ρ > 1 + clip_high) or (A < 0 and ρ < 1 − clip_low)

    A clipped turn has a gradient of exactly 0 under the loss max(−Aρ, −A·clip(ρ)). The values of
    the credit do not change. Source: Schulman et al. 2017 (arXiv:1707.06347, eq. 7); two bounds as
    in DAPO (arXiv:2503.14476).

    Args:
        steps: rows with `logprob` and `logprob_new`, log-probabilities of the whole turn in nats.
        credit: what a method returned for the same steps.
        clip_low: how far ρ may fall below 1, 0 to 1.
        clip_high: how far ρ may rise above 1.

    Returns:
        The credit with parts ratio and clipped (1, 0; NaN where a row has no log-probability or no
        credit), and `clip_fraction` over the rows that have both. Where either column is missing
        altogether there are no such parts, and `diagnostics["ratio"]` is "not available"; a ratio
        is never made up as 1.

    Raises:
        Refused: a credit of other rows; a bound out of range.
    """
    if len(credit) != len(steps):
        raise Refused(f"the credit has {len(credit)} rows, the steps have {len(steps)}")
    if not (0 <= clip_low <= 1 and 0 <= clip_high < np.inf):
        raise Refused(f"clip_low is {clip_low!r}, clip_high {clip_high!r}; 0 to 1, and 0 or more")
    if steps.logprob is None or steps.logprob_new is None:
        return replace(credit, diagnostics={**credit.diagnostics, "ratio": "not available"})
    ratio = np.exp(np.clip(steps.logprob_new - steps.logprob, -_BOUND, _BOUND))
    A = credit.values
    stopped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))
    known = ~np.isnan(ratio) & credit.credited
    fraction = float(stopped[known].mean()) if known.any() else float("nan")
    return replace(
        credit,
        parts={**credit.parts, "ratio": ratio, "clipped": np.where(known, stopped, np.nan)},
        diagnostics={**credit.diagnostics, "clip_fraction": fraction},
    )
