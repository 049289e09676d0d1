"""Which measured credit is a policy gradient: against the exact one, over all plays of a game.

The plays are listed with their probabilities, so that only the branches are drawn; with a few
thousand of them at each act a method that is unbiased lies within a thousandth of the gradient.
"""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.credit import METHODS, blame, c3, coma, estimate, loo, rloo, shapley
from counterpoint.games import deal, every, expected_gradient, gradient, policy_gradient, truth
from counterpoint.games.replaying import Rerun

pytestmark = pytest.mark.slow

REACTS = {f"T17 {seed}": deal("T17", agents=3, dep=1.0, seed=seed) for seed in (0, 1, 2)}
"""Pairwise interactions, and agents who read what was done before them."""

APART = {
    f"{name} {seed}": deal(name, agents=3, dep=0.0, seed=seed)
    for name in ("T1", "T17")
    for seed in (0, 1)
}
"""Nobody sees anything."""

reacts = pytest.mark.parametrize("game", REACTS.values(), ids=REACTS.keys())
apart = pytest.mark.parametrize("game", APART.values(), ids=APART.keys())


def cosine(game, method):
    """Of a method's mean step, over all plays of the game, and the exact gradient; and their ratio
    of lengths.
    """
    plays, chance = every(game, 1)
    weight = chance[plays.steps.group] * len(chance)
    step = gradient(plays, method(plays.steps, Rerun(plays)).values * weight)
    exact = policy_gradient(game)
    lengths = np.linalg.norm(step), np.linalg.norm(exact)
    return float(np.sum(step * exact) / np.prod(lengths)), float(lengths[0] / lengths[1])


UNBIASED = {
    "c3": lambda s, r: c3(s, replay=r, alternatives=3000),
    "c3, continued": lambda s, r: c3(s, replay=r, alternatives=1500, own=1500),
    "c3, by a critic": lambda s, r: c3(s, replay=r, alternatives=3000, variant="value_only"),
    "coma, anew": lambda s, r: coma(s, replay=r, downstream="anew", n=500),
    "loo, replayed": lambda s, r: loo(s, replay=r, n=1000),
    "loo, anew": lambda s, r: loo(s, replay=r, n=1000, downstream="anew"),
    "blame by branches": lambda s, r: blame(s, replay=r, n=3000),
}


@reacts
@pytest.mark.parametrize("method", UNBIASED.values(), ids=UNBIASED.keys())
def test_what_is_drawn_anew_after_the_act_is_a_policy_gradient(game, method):
    """Cosine above .999 and the length within two in a hundred, where later agents react."""
    angle, length = cosine(game, method)
    assert angle > 0.999
    assert length == pytest.approx(1, abs=0.02)


CALLED = [n for n, row in METHODS.items() if row.unbiased and row.family == "measured"]


@pytest.mark.parametrize("name", CALLED)
def test_what_the_table_calls_unbiased(name):
    """A measured method whose row says so, with its defaults: over 400 seeds the mean step is the
    gradient, within four standard errors in every component.
    """
    game = deal("T17", agents=2, dep=1.0, seed=1)
    plays, chance = every(game, 1)
    weight, rerun = chance[plays.steps.group] * len(chance), Rerun(plays)
    steps = [
        gradient(plays, estimate(name, plays.steps, replay=rerun, seed=seed).values * weight)
        for seed in range(400)
    ]
    error = np.std(steps, axis=0) / 20
    assert np.all(np.abs(np.mean(steps, axis=0) - policy_gradient(game)) < 4 * error + 1e-12)


@reacts
def test_exact_credit_and_rloo_are_policy_gradients(game):
    """Seqau and RLOO, exactly."""
    assert cosine(game, lambda steps, rerun: truth(every(game, 1)[0])) == pytest.approx((1, 1))
    step = expected_gradient(game, rloo, 2)
    np.testing.assert_allclose(step, policy_gradient(game), atol=1e-12)


FROZEN = {
    "coma": lambda s, r: coma(s, replay=r),
    "removal": lambda s, r: loo(s, replay=r, downstream="frozen", n=1),
    "shapley": lambda s, r: shapley(s, replay=r),
}


@reacts
@pytest.mark.parametrize("method", FROZEN.values(), ids=FROZEN.keys())
def test_what_freezes_later_acts_is_no_policy_gradient_where_they_react(game, method):
    """COMA, removal and Shapley with later acts frozen: cosine below .98 on each game."""
    assert cosine(game, method)[0] < 0.98


@apart
@pytest.mark.parametrize("name", ["coma", "removal"])
def test_where_nobody_reacts_frozen_credit_is_a_policy_gradient(game, name):
    """The same two are exact there, so it is the reaction that they miss."""
    angle, length = cosine(game, FROZEN[name])
    assert angle == pytest.approx(1, abs=1e-9)
    assert length == pytest.approx(1, abs=1e-9)
