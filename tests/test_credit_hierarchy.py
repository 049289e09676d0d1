"""HiPER: three levels against their recursions, where they meet gae, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import reference
from batches import close, few, tables
from counterpoint.credit import gae, hiper
from counterpoint.games import deal, expected_gradient, play, policy_gradient, truth
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

NAN = math.nan
fractions = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@few
@given(
    tables(),
    st.sampled_from([("low", "paper"), ("high", "paper"), ("switch", "paper"), ("switch", "code")]),
    fractions,
    fractions,
    fractions,
)
def test_every_level_is_its_recursion(steps, which, gamma, lam_turn, lam_seg):
    """Segments with holes, of one turn, begun on masked rows: as the loop over them."""
    level, form = which
    options = {"gamma": gamma, "lam_turn": lam_turn, "lam_seg": lam_seg}
    ours = hiper(steps, level=level, form=form, **options)
    close(ours.values, reference.hiper(steps, level, form, gamma, lam_turn, lam_seg))


@few
@given(tables(), fractions, fractions)
def test_one_segment_is_gae(steps, gamma, lam):
    """Without a switch the low level is gae, and the high level the return minus V_high."""
    whole = replace(steps, segment_start=np.zeros(len(steps), dtype=bool))
    close(
        hiper(whole, gamma=gamma, lam_turn=lam).values,
        gae(steps, gamma=gamma, gae_lambda=lam).values,
    )
    high = hiper(whole, level="high", gamma=gamma).values
    against = replace(steps, value=steps.value_high)
    plain = gae(against, gamma=gamma, gae_lambda=1.0).values
    first = ~np.isnan(high)
    close(high[first], plain[first])


@few
@given(tables(), fractions, fractions)
def test_segments_of_one_turn_are_gae_on_the_high_values(steps, gamma, lam):
    """If every turn begins a segment, the high level is gae with λ_seg and V_high."""
    short = replace(steps, segment_start=np.ones(len(steps), dtype=bool), value=steps.value_high)
    high = hiper(short, level="high", gamma=gamma, lam_seg=lam).values
    close(high, gae(short, gamma=gamma, gae_lambda=lam).values)


@few
@given(tables(), fractions)
def test_with_both_lambdas_at_1_the_high_level_is_the_return_minus_its_value(steps, gamma):
    """The bootstraps cancel from segment to segment, whatever the values are."""
    high = hiper(steps, level="high", gamma=gamma, lam_seg=1.0)
    G = gae(replace(steps, value=steps.value_high * 0), gamma=gamma, gae_lambda=1.0).values
    first = ~np.isnan(high.values)
    close(high.values[first], (G - steps.value_high)[first])


def test_hiper_by_hand():
    """Three turns, rewards 1, 0, 4, γ ½, the last begins a segment; V_low 1, 2, 3, V_high 5, –, 6.

    Low, λ 0: 1 + ½·2 − 1, 0 + ½·6 − 2, 4 − 3. High: (1 + ½·0 + ¼·6) − 5, 4 − 6.
    Switch in the code: 1 + ½·(0 + ½·6) − 1, 0 + ½·6 − 2, 4 − 3; in the paper V_high − V_low.
    """
    steps = Steps.from_columns(
        rollout=[0] * 3,
        reward=[1, 0, 4],
        value=[1, 2, 3],
        value_high=[5, None, 6],
        segment_start=[1, 0, 1],
    )
    low = hiper(steps, gamma=0.5, lam_turn=0.0)
    assert low.values.tolist() == [1, 1, 1]
    assert low.parts["next_value"].tolist() == [2, 6, 0]
    assert low.diagnostics["segments"] == 2
    high = hiper(steps, level="high", gamma=0.5, lam_seg=0.0)
    np.testing.assert_array_equal(high.values, [-2.5, NAN, -2])
    # λ_seg is not raised to the length of the segment: −2.5 + ¼·½·(−2)
    half = hiper(steps, level="high", gamma=0.5, lam_seg=0.5)
    np.testing.assert_array_equal(half.values, [-2.75, NAN, -2])
    code = hiper(steps, level="switch", form="code", gamma=0.5)
    assert code.values.tolist() == [1.5, 1, 1]
    with pytest.raises(Refused, match="row 1 is trainable and has no value; give one in column"):
        hiper(steps, level="switch")
    full = replace(steps, value_high=np.array([5.0, 7.0, 6.0]))
    paper = hiper(full, level="switch", gamma=0.5)
    np.testing.assert_array_equal(paper.values, [NAN, 5, 3])
    assert paper.estimand == "switch"


def test_a_high_value_is_asked_for_where_segments_begin():
    """The column may be empty elsewhere; a first turn without one is refused by row."""
    steps = Steps.from_columns(
        rollout=[0] * 3,
        reward=[0] * 3,
        value=[0] * 3,
        value_high=[None, 1, 1],
        segment_start=[1, 0, 1],
    )
    with pytest.raises(Refused, match=r"row 0 is trainable and has no value.*value_high"):
        hiper(steps)
    for options, says in (
        ({"level": "middle"}, "level is 'middle'"),
        ({"form": "talk"}, "form is 'talk'"),
        ({"lam_seg": 2.0}, "lam_seg is 2.0"),
    ):
        with pytest.raises(Refused, match=says):
            hiper(steps, **options)


def with_true_values(steps: Steps) -> Steps:
    """Every other turn begins a segment; without a subgoal V_high is V_low is V(h)."""
    return replace(steps, value_high=steps.value, segment_start=steps.step % 2 == 0)


@pytest.mark.parametrize("name", ["T2", "T16"])
def test_with_true_values_the_low_level_is_unbiased(name):
    """Whatever λ is, E[Σ A ∇log π] is the policy gradient; with λ 0 every row is exact."""
    game = deal(name, seed=4, **({"turns": 4} if name == "T16" else {"agents": 3, "actions": 2}))
    for lam in (0.0, 0.7, 1.0):
        got = expected_gradient(
            game, lambda s, lam=lam: hiper(with_true_values(s), gamma=1.0, lam_turn=lam), 2
        )
        np.testing.assert_allclose(got, policy_gradient(game), atol=1e-12)
    plays = play(game, groups=5, rollouts=4)
    exact = hiper(with_true_values(plays.steps), gamma=1.0, lam_turn=0.0)
    np.testing.assert_allclose(exact.values, truth(plays).values, atol=1e-12)
