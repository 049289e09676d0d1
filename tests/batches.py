"""Random small batches for the tests of credit methods."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings

from counterpoint.steps import Steps

NAN = math.nan

few = settings(deadline=None, max_examples=40)


@st.composite
def tables(draw, unscored: bool = True, masks: bool = True, anchors: int = 4) -> Steps:
    """Small batches with everything that can be odd: holes, missing scores, missing anchors."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = sum(lengths)
    rollout = np.repeat(np.arange(len(lengths)), lengths)
    group = rng.integers(0, 3, len(lengths))
    reward = rng.choice([0.0, 0.0, 1.0, -0.5, 0.3], n)
    mask = rng.random(n) < (0.8 if masks else 2.0)
    if draw(st.booleans()):
        mask[np.cumsum(lengths) - lengths] = True  # so that every masked reward has a place
    else:
        reward[~mask] = 0.0
    if unscored:
        reward[(rng.random(len(lengths)) < 0.2)[rollout]] = NAN
    anchor = [None if a == anchors else f"s{a}" for a in rng.integers(0, anchors + 1, n)]
    order = rng.permutation(n)
    return Steps.from_columns(
        group=group[rollout][order],
        rollout=rollout[order],
        step=np.concatenate([np.arange(k) for k in lengths])[order],
        reward=reward[order],
        mask=mask[order],
        agent=[f"a{i}" for i in rng.integers(0, 3, n)],
        role=[f"r{i}" for i in rng.integers(0, 2, n)],
        anchor=anchor,
        value=rng.normal(size=n),
        value_high=rng.normal(size=n),
        segment_start=rng.random(n) < 0.4,
        env_step=np.concatenate([np.sort(rng.integers(0, 4, k)) for k in lengths])[order],
        valid=rng.random(n) < 0.8,
        logprob=-rng.random(n) * 3,
        logprob_new=-rng.random(n) * 3,
    )


def close(values, expected) -> None:
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
