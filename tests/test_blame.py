"""Blame that adds up: on failures and successes, for any estimate of V, repairs included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from batches import few, tables
from counterpoint.credit import Account, blame, estimate
from counterpoint.games import action_values, deal, every, play, truth, values
from counterpoint.games.replaying import Rerun
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


def run(value, outcome, **columns):
    """One rollout with these values and this outcome."""
    return Steps.from_columns(
        rollout=[0] * len(value), value=value, outcome=[outcome] * len(value), **columns
    )


def by_rollout(steps, x):
    rows = ~np.isnan(x)
    return np.bincount(steps.rollout[rows], x[rows], minlength=steps.n_rollouts)


# ---------------------------------------------------------------------------------------------
# By hand


def test_an_error_and_its_repair():
    """V goes .6, .1, .8 and the run succeeds: the first act costs .5, the second, which repairs it,
    has blame −.7, the last −.2. They sum to V(h₀) − R = −.4, and the credit is the negative.
    """
    credit = blame(run([0.6, 0.1, 0.8], 1.0))
    np.testing.assert_allclose(credit.parts["blame"], [0.5, -0.7, -0.2])
    np.testing.assert_allclose(credit.values, [-0.5, 0.7, 0.2])
    np.testing.assert_allclose(credit.parts["next"], [0.1, 0.8, 1.0])
    assert credit.parts["first_drop"].tolist() == [1, 0, 0]
    assert credit.identified == "assumption:true_value"
    assert credit.estimand == "seqau"


def test_the_first_drop_is_the_first_above_its_threshold():
    """Blame .05, .3, .4: the second turn, and none where the threshold is .5."""
    steps = run([0.9, 0.85, 0.55], 0.15)
    assert blame(steps).parts["first_drop"].tolist() == [0, 1, 0]
    assert blame(steps, drop=0.5).parts["first_drop"].tolist() == [0, 0, 0]


def test_rewards_on_the_way_are_part_of_what_a_run_is_worth():
    """A turn that pays .3 and leaves .2 of .5 to come has moved nothing: blame 0."""
    steps = Steps.from_columns(rollout=[0, 0], value=[0.5, 0.2], reward=[0.3, 0.0])
    np.testing.assert_allclose(blame(steps).parts["blame"], [0.0, 0.2], atol=1e-15)


def test_what_happens_on_masked_rows_falls_to_the_turn_before():
    """V .5, (masked .9), .3, then R = 0: the first act answers for .5 − .3."""
    steps = run([0.5, 0.9, 0.3], 0.0, mask=[1, 0, 1])
    credit = blame(steps)
    np.testing.assert_allclose(credit.parts["blame"], [0.2, np.nan, 0.3])
    assert not credit.credited[1]


def test_values_that_are_missing():
    """On a trainable row: refused, with the row. No column and no replay: refused as for gae."""
    with pytest.raises(Refused, match="row 1 is trainable and has no value"):
        blame(run([0.5, None, 0.2], 1.0))
    with pytest.raises(Refused, match="needs the column value"):
        blame(Steps.from_columns(rollout=[0], reward=[1]))
    with pytest.raises(Refused, match="cannot split off chance from values alone"):
        blame(run([0.5], 1.0), split=True)


# ---------------------------------------------------------------------------------------------
# It adds up


@few
@given(tables())
def test_blame_sums_to_what_was_expected_minus_what_came(steps):
    """Σ b = V(h₀) − R in every rollout, whatever the values are, in whatever order rows stand; h₀
    is the first trainable turn.
    """
    credit = blame(steps)
    due = credit.credited
    assert (due == (steps.mask & ~np.isnan(steps.outcome))).all()
    for rollout in np.unique(steps.rollout[due]):
        rows = np.flatnonzero(due & (steps.rollout == rollout))
        first = rows[np.argmin(steps.step[rows])]
        expected = credit.parts["value"][first] - steps.outcome[first]
        assert credit.parts["blame"][rows].sum() == pytest.approx(expected, abs=1e-9)
        assert credit.parts["first_drop"][rows].sum() <= 1


@pytest.mark.parametrize("n", [1, 3, 64])
def test_it_adds_up_for_values_from_branches_however_few(n):
    """On successes and failures of a relay, with V(h₀) the same estimate that the first act has."""
    plays = play(deal("T12", contexts=10, seed=2), groups=10, rollouts=6)
    steps = plays.steps
    credit = blame(steps, replay=Rerun(plays), n=n)
    first = steps.step == 0
    whole = credit.parts["value"][first] - steps.outcome[first]
    np.testing.assert_allclose(by_rollout(steps, credit.parts["blame"]), whole, atol=1e-12)
    assert set(np.unique(steps.outcome)) == {0.0, 1.0}
    assert (credit.parts["blame"] < -0.1).any()
    assert credit.identified == "randomised"
    assert credit.diagnostics["branches"] == n * len(steps)


def test_it_is_exactly_seqau_with_true_values():
    """−b = Q(h, a) − V(h) where nothing but agents draws; so is the expectation by branches."""
    for name in ("T2", "T12", "T16"):
        plays, _ = every(deal(name, seed=4), 1)
        credit = blame(plays.steps)
        np.testing.assert_allclose(credit.values, truth(plays).values, atol=1e-12)
        np.testing.assert_allclose(
            credit.values,
            estimate("gae", plays.steps, gamma=1.0, gae_lambda=0.0).values,
            atol=1e-12,
        )
        drawn = np.mean(
            [blame(plays.steps, replay=Rerun(plays), n=30, seed=s).values for s in range(20)],
            axis=0,
        )
        assert np.abs(drawn - truth(plays).values).max() < 0.4


def test_chance_is_not_the_agents_fault():
    """T14 with a tool of two answers between the acts: with masked rows of nature and split, the
    agent's part is V − Q and chance the rest; nature moves nothing here, so that is about 0.
    """
    plays = play(deal("T14", contexts=4, seed=1), groups=4, rollouts=4)
    steps = plays.steps
    credit = blame(steps, replay=Rerun(plays), n=400, split=True)
    on = steps.mask
    both = credit.parts["agent"] + credit.parts["chance"]
    np.testing.assert_allclose(both[on], credit.parts["blame"][on], atol=1e-12)
    q, v = action_values(plays.game), values(plays.game)
    own = (v[:, None] - q)[plays.state, plays.action]
    assert np.abs(credit.parts["agent"] - own)[on].max() < 0.35
    assert abs(credit.parts["chance"][on].mean()) < 0.05


def test_luck_is_chances_and_not_the_last_actors():
    """One agent acts and the outcome has noise: its own part stays small, and chance takes the rest
    of R, exactly, however large the error was.
    """
    plays = play(deal("T0", contexts=3, noise=5.0, seed=1), groups=3, rollouts=5)
    credit = blame(plays.steps, replay=Rerun(plays), n=4000, split=True)
    own = -truth(plays).values
    assert np.abs(credit.parts["agent"] - own).max() < 0.5
    luck = credit.parts["blame"] - own
    assert np.abs(luck).max() > 3
    assert np.abs(credit.parts["chance"] - luck).max() < 0.5


def test_values_that_could_not_be_run_are_left_out_and_the_rest_adds_up():
    """With a budget for some rows: those are credited, sums hold from the first value on."""
    plays = play(deal("T2", contexts=6, seed=1), groups=6, rollouts=4)
    steps = plays.steps
    account = Account(Rerun(plays), steps, {"forward_passes": 500})
    credit = blame(steps, replay=account, n=8)
    assert 0 < credit.credited.sum() < len(steps)
    assert credit.diagnostics["without_value"] == (~credit.credited).sum()
    for rollout in np.unique(steps.rollout[credit.credited]):
        rows = np.flatnonzero(credit.credited & (steps.rollout == rollout))
        expected = credit.parts["value"][rows[0]] - steps.outcome[rows[0]]
        assert credit.parts["blame"][rows].sum() == pytest.approx(expected, abs=1e-12)


def test_rows_in_another_order():
    """The same numbers, wherever they stand."""
    steps = run([0.6, 0.1, 0.8], 1.0, step=[0, 1, 2])
    turned = run([0.8, 0.6, 0.1], 1.0, step=[2, 0, 1])
    assert blame(turned).values.tolist() == blame(steps).values[[2, 0, 1]].tolist()
    assert len(blame(replace(steps, mask=np.zeros(3, dtype=bool))).values) == 3
