"""HCAPO by hand, the hindsight of games by enumeration, and what the method cannot tell apart."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from counterpoint.credit import METHODS, estimate, grpo, hcapo, score
from counterpoint.games import (
    action_values,
    deal,
    every,
    expected_gradient,
    play,
    policy_gradient,
    truth,
)
from counterpoint.games.replaying import Rerun
from counterpoint.policies.tabular import Softmax
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from foresight import TwoEntries, asking

TWO = Steps.from_columns(rollout=[0, 0, 0, 1, 1], reward=[0, 0, 1, 0, 0], n_tokens=[5, 7, 11, 2, 3])
"""A success of three turns and a failure of two, in one group."""


def says(*logprob):
    """A policy that gives these log-probabilities to the turns of the success."""
    return lambda places, outcome: np.array(logprob)


# ---------------------------------------------------------------------------------------------
# The formula


def test_by_hand():
    """exp(log π / 5) is 1, .9, .8, whose mean is .9: ratios 10/9, 1, 8/9, discounted by .81, .9, 1
    they are Q = .9, .9, .889 beside 0 and 0. The mean is 2.6889/5, and z follows.
    """
    told = says(0.0, 5 * math.log(0.9), 5 * math.log(0.8))
    found = hcapo(TWO, policy=told, gamma=0.9)
    q = np.array([0.9, 0.9, 8 / 9, 0, 0])
    np.testing.assert_allclose(found.parts["hindsight"][:3], [1, 0.9, 0.8])
    np.testing.assert_allclose(found.parts["ratio"][:3], [10 / 9, 1, 8 / 9])
    np.testing.assert_allclose(found.parts["q"], q)
    mean = (0.9 + 0.9 + 8 / 9) / 5
    std = math.sqrt(sum((x - mean) ** 2 for x in q) / 4)
    half = 0.5 / math.sqrt(0.5)  # GRPO of outcomes 1 and 0: ± half over their spread
    expected = np.array([half] * 3 + [-half] * 2) + (q - mean) / std
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    assert found.estimand == METHODS["hcapo"].estimand == "outcome+hindsight"


def test_ratios_are_clipped():
    """π_h of 1, .5 and .1 over their mean .533 is 1.875, .9375, .1875: two of three are clipped."""
    found = hcapo(TWO, policy=says(0.0, 5 * math.log(0.5), 5 * math.log(0.1)))
    np.testing.assert_allclose(found.parts["ratio"][:3], [1.2, 0.9375, 0.8])
    assert found.diagnostics["clipped"] == pytest.approx(2 / 3)


def test_smoothing_mixes_with_the_next_turn():
    """Ratios 1.2, .9375, .8 with α = ½: halves with the next one, the last stays."""
    told = says(0.0, 5 * math.log(0.5), 5 * math.log(0.1))
    found = hcapo(TWO, policy=told, smoothing=0.5)
    np.testing.assert_allclose(found.parts["ratio"][:3], [1.06875, 0.86875, 0.8])


def test_a_success_is_never_punished_by_hindsight():
    """Two successes, one of them long: its early turns have a Q below the mean, and get 0."""
    steps = Steps.from_columns(rollout=[0] * 30 + [1], reward=[0] * 29 + [1, 1])
    found = hcapo(steps, policy=lambda places, outcome: np.full(len(places), -1.0), gamma=0.9)
    early = found.parts["q"] < found.parts["mean"]
    assert early[0]
    assert (found.parts["step"][early] == 0).all()
    assert (found.parts["step"][~early] > 0).all()


def test_on_failures_all_turns_are_alike():
    """All turns of all failures of a group get one number, whatever the policy thinks of them."""
    plays = play(deal("T3", agents=4, dep=1.0, contexts=5), groups=5, rollouts=16)
    found = hcapo(plays.steps, policy=Rerun(plays))
    failed = plays.steps.outcome == 0
    for group in range(5):
        assert np.ptp(found.values[failed & (plays.steps.group == group)]) < 1e-12
    assert np.ptp(found.values[~failed & (plays.steps.group == 0)]) > 1e-3
    assert found.diagnostics["failures"] == len(np.unique(plays.steps.rollout[failed]))


def test_failures_are_not_asked_about():
    """The price is one forward pass for each turn of the success, and its tokens."""
    asked = []

    def told(places, outcome):
        asked.append((places.tolist(), outcome.tolist()))
        return np.full(len(places), -0.5)

    said = hcapo(TWO, policy=told).diagnostics
    assert asked == [([[0, 0], [0, 1], [0, 2]], [1, 1, 1])]
    assert (said["forward_passes"], said["tokens"], said["env_calls"]) == (3, 23, 0)
    nothing = replace(TWO, outcome=np.zeros(5))
    hcapo(nothing, policy=told)
    assert len(asked) == 1


def test_without_its_second_term_it_is_grpo():
    """ω = 0, and masked rows stay out: they are asked about by nobody and take no discount."""
    found = hcapo(TWO, policy=says(-1, -2, -3), step_weight=0.0)
    np.testing.assert_array_equal(found.values, grpo(TWO).values)
    masked = replace(TWO, mask=np.array([True, False, True, True, True]))
    found = hcapo(masked, policy=says(-1, -1), gamma=0.9)
    np.testing.assert_allclose(found.parts["q"], [0.9, np.nan, 1, 0, 0])
    assert np.isnan(found.values[1])


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"policy": None}, "hcapo needs policy=, a function"),
        ({"policy": says(-1, -1)}, r"shape \(2,\) where \(3,\) was asked"),
        ({"policy": says(-1, 0.5, -1)}, "row 1: policy says 0.5, which is no log-probability"),
        ({"policy": says(-1, -1, math.nan)}, "row 2: policy says nan"),
        ({"temperature": 0.0}, "temperature is 0.0; it is a number above 0"),
        ({"clip_low": 1.1}, "clip_low .1.1. and clip_high .1.2. are numbers below and above 1"),
        ({"gamma": 1.5}, "gamma .1.5. and smoothing .0.0. are shares"),
        ({"step_weight": math.inf}, "step_weight is inf; it is a number"),
        ({"singleton": "none"}, "singleton is 'none'"),
    ],
)
def test_what_is_refused(options, refusal):
    """One sentence for each option out of range and each answer that is no log-probability."""
    with pytest.raises(Refused, match=refusal):
        hcapo(TWO, **{"policy": says(-1, -1, -1)} | options)


def test_a_table_of_logits_can_be_asked():
    """A table whose anchors say whether the outcome is known: it knows that "b" is what wins."""
    table = Softmax({"s, it was won": {"b": 2.0}})
    steps = Steps.from_columns(
        rollout=[0, 0, 1], reward=[0, 1, 0], anchor=["s"] * 3, menu=[("a", "b")] * 3,
        action=[0, 1, 0],
    )  # fmt: skip

    def told(places, outcome):
        logits = table.logits["s, it was won"]
        z = np.array([logits.get(label, 0.0) for label in ("a", "b")])
        p = np.exp(z) / np.exp(z).sum()
        at = {(r, s): a for r, s, a in zip(steps.rollout, steps.step, steps.action, strict=True)}
        return np.log([p[at[run, step]] for run, step in places.tolist()])

    ratio = hcapo(steps, policy=told).parts["ratio"]
    assert ratio[0] < 1 < ratio[1]


def test_a_table_that_no_game_played():
    """The stand-in of the contract tests has a method hindsight; a bare function does as well."""
    found = asking("hcapo")(TWO)
    bare = estimate("hcapo", TWO, policy=TwoEntries(TWO).hindsight)
    np.testing.assert_array_equal(found.values, bare.values)


# ---------------------------------------------------------------------------------------------
# Hindsight in games


@pytest.mark.parametrize(
    "game",
    [
        deal("T2", agents=3, actions=2, seed=1),
        deal("T3", agents=3, actions=3, dep=1.0, seed=2),
        deal("T16", turns=4, seed=3),
        deal("T6", agents=2, seed=4),
    ],
    ids=["additive", "AND", "stopping", "gate"],
)
def test_hindsight_is_bayes(game):
    """π(a | h, R) is P(h, a, R) ÷ P(h, R), counted over all plays."""
    plays, chance = every(replace(game, gamma=1.0), 1)
    steps, outcome = plays.steps, plays.steps.outcome.round(9)
    at = np.column_stack([steps.rollout, steps.step])
    found = np.exp(Rerun(plays).hindsight(at, steps.outcome))
    weight = chance[steps.group]
    for row in range(len(steps)):
        alike = (plays.state == plays.state[row]) & (outcome == outcome[row])
        same = alike & (plays.action == plays.action[row])
        assert found[row] == pytest.approx(weight[same].sum() / weight[alike].sum(), abs=1e-12)


def test_exact_hindsight_ratios_give_exact_values():
    """E[R π(a | h, R) / π(a | h) | h] = Q(h, a) (Harutyunyan et al. 2019, theorem 1): what HCAPO
    would estimate, did it divide by π(a | h) and not by a mean over the run.
    """
    game = deal("T2", agents=2, actions=2, seed=6)
    plays, chance = every(game, 1)
    steps, q = plays.steps, action_values(game)
    at = np.column_stack([steps.rollout, steps.step])
    taken = np.exp(Rerun(plays).hindsight(at, steps.outcome))
    for state, act in np.ndindex(q.shape):
        rows = plays.state == state
        weight = chance[steps.group[rows]]
        # of two acts the other one has what is left
        known = np.where(plays.action == act, taken, 1 - taken)[rows]
        mean = np.average(steps.outcome[rows] * known, weights=weight)
        assert mean / game.probability[state, act] == pytest.approx(q[state, act], abs=1e-12)


def test_hindsight_of_a_noisy_outcome():
    """One agent, two acts that pay r₀ and r₁ with an error of σ: the densities weigh them."""
    game = deal("T0", actions=2, seed=1)
    noisy = replace(game, noise=0.5)
    plays = play(noisy, groups=1, rollouts=6, seed=2)
    R, (p, r) = plays.steps.outcome, (noisy.policy[0], noisy.reward[0])
    density = np.exp(-((R[:, None] - r) ** 2) / (2 * 0.5**2))
    exact = np.log(p * density / (density @ p)[:, None])[np.arange(6), plays.action]
    at = np.column_stack([plays.steps.rollout, plays.steps.step])
    np.testing.assert_allclose(Rerun(plays).hindsight(at, R), exact, atol=1e-9)


def test_an_outcome_that_cannot_be():
    """Refused, and not given a chance of 0/0."""
    plays = play(deal("T3", agents=2), groups=1, rollouts=2)
    with pytest.raises(Refused, match="cannot be reached"):
        Rerun(plays).hindsight(np.array([[0, 0]]), np.array([0.5]))


@pytest.mark.slow
def test_plays_that_cannot_be_listed():
    """A loop is refused after as many turns as are walked at most."""
    loop = play(deal("T11"), groups=1, rollouts=2)
    with pytest.raises(Refused, match="takes over 10000000 turns"):
        Rerun(loop).hindsight(np.array([[0, 0]]), loop.steps.outcome[:1])


# ---------------------------------------------------------------------------------------------
# What it is worth


def test_it_is_no_policy_gradient():
    """Even with the exact hindsight of a game; its row says so. All groups of two are listed."""
    game = deal("T3", agents=2, dep=1.0, seed=4)
    rerun = Rerun(every(game, 2)[0])
    found = expected_gradient(game, partial(hcapo, policy=rerun), 2)
    exact = policy_gradient(game)
    cosine = np.sum(found * exact) / np.linalg.norm(found) / np.linalg.norm(exact)
    assert not METHODS["hcapo"].unbiased
    assert cosine < 0.999


def test_what_hindsight_adds_to_the_outcome_of_a_run():
    """Measured, with exact hindsight on AND of four: it ranks acts within .05 of what GRPO alone
    does, for it is silent where most information is, on failures.
    """
    dials = {"agents": 4, "actions": 3, "dep": 1.0, "spread": 0.0}
    plays = play(deal("T3", contexts=150, **dials), groups=150, rollouts=8)
    ours = score(hcapo(plays.steps, policy=Rerun(plays)), truth(plays)).pearson
    assert abs(ours - score(grpo(plays.steps), truth(plays)).pearson) < 0.05
