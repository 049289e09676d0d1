"""Every method takes time in proportion to its rows, and little memory beyond them."""

from __future__ import annotations

import math
import statistics
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from counterpoint.credit import METHODS, estimate, method
from counterpoint.steps import Steps

pytestmark = pytest.mark.slow


def batch(n: int) -> Steps:
    """`n` turns: groups of eight rollouts of ten turns, three agents, forty states, segments."""
    rng = np.random.default_rng(0)
    row = np.arange(n)
    return Steps.from_columns(
        group=row // 80,
        rollout=row // 10,
        step=row % 10,
        agent=row % 3,
        reward=np.where(row % 10 == 9, rng.random(n) < 0.5, 0.0),
        anchor=rng.integers(0, 40, n),
        value=rng.random(n),
        value_high=rng.random(n),
        segment_start=rng.random(n) < 0.3,
        valid=rng.random(n) < 0.9,
        quality=np.cos(row // 10 * 3 + row % 3),
        depends=[(agent,) for agent in (row % 3).tolist()],
    )


OBSERVED = [name for name, row in METHODS.items() if row.family == "observational"]
OPTIONS = {"m_grpo": {"main": 0}}


def seconds(name: str, n: int, times: int) -> float:
    """Least CPU time of a few runs: what else the machine does can only add to it."""
    steps, taken = batch(n), []
    for _ in range(times):
        fresh = replace(steps)  # without what was computed from it before
        begin = time.process_time()
        estimate(name, fresh, **OPTIONS.get(name, {}))
        taken.append(time.process_time() - begin)
    return min(taken)


@pytest.mark.parametrize("name", OBSERVED)
def test_time_grows_with_the_rows(name):
    """Eight times the rows take less than twenty times the time; the square would be 64 times."""
    small, large = seconds(name, 12_500, 5), seconds(name, 100_000, 3)
    assert large < 20 * small


@pytest.mark.soak
@pytest.mark.parametrize("name", OBSERVED)
def test_the_growth_exponent_to_a_million_rows(name):
    """Over two decades, from 10⁴ to 10⁶ turns, the exponent is at most 1.1, in the median of three.

    Over the last decade alone it would also measure that 10⁵ rows fit into a cache and 10⁶ do not.
    """
    found = [
        math.log(seconds(name, 1_000_000, 3) / seconds(name, 10_000, 5), 100) for _ in range(3)
    ]
    assert statistics.median(found) <= 1.1


@pytest.mark.parametrize("name", OBSERVED)
def test_memory_beyond_the_rows(name):
    """At most 200 bytes a row at the peak, every part that nobody reads left out."""
    steps, run = replace(batch(100_000)), method(name)
    tracemalloc.start()
    try:
        run(steps, **OPTIONS.get(name, {}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / len(steps) <= 200
