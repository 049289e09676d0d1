"""What each method claims about its expectation, against the exact policy gradient of the games.

Where a game is small the expectation itself is computed, by listing every group of rollouts that
can happen; larger games are sampled, and a deviation is judged by its standard error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from counterpoint.credit import METHODS, estimate, score
from counterpoint.games import (
    Plays,
    action_values,
    chain,
    deal,
    every,
    expected_gradient,
    gradient,
    play,
    policy_gradient,
    truth,
    values,
)
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.steps import Steps
from qualities import earlier, own_act, with_quality

SMALL = {
    "bandit": deal("T0", seed=1),
    "two bandits": deal("T0", actions=2, contexts=2, seed=2),
    "nobody reacts": deal("T1", agents=2, actions=3, seed=3),
    "later agents react": deal("T2", agents=3, actions=2, seed=4),
    "stopping": deal("T16", turns=4, seed=5),
    "paid per turn": deal("T16", turns=3, pay=1.0, spread=0.0, seed=6),
}


def unbiased(family: str) -> list[str]:
    """Names of a family whose row says unbiased."""
    return [name for name, row in METHODS.items() if row.unbiased and row.family == family]


small = pytest.mark.parametrize("game", SMALL.values(), ids=SMALL.keys())

reinforce = partial(estimate, "reinforce")
gae = partial(estimate, "gae", gamma=1.0)
grpo = partial(estimate, "grpo")
mean_only = partial(estimate, "grpo", normalize_std=False)
gigpo = partial(estimate, "gigpo", normalize_std=False, gamma=1.0)
process = partial(estimate, "grpo_process", normalize_std=False)
magrpo = partial(estimate, "magrpo", gamma=1.0)


def cosine(a, b) -> float:
    return float(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))


def mean_by(keys, x, weight):
    """Weighted mean of x for every distinct row of keys, and those keys."""
    distinct, code = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    code = code.reshape(-1)
    return distinct, np.bincount(code, x * weight) / np.bincount(code, weight)


# ---------------------------------------------------------------------------------------------
# Exactly, by listing all groups


@small
def test_the_outcome_itself_is_unbiased(game):
    """E[Σ R ∇log π] is the policy gradient, for every game and without any baseline."""
    outcome = expected_gradient(game, lambda s: Credit(s.outcome, estimand="outcome"), 1)
    np.testing.assert_allclose(outcome, policy_gradient(game), atol=1e-13)


@small
@pytest.mark.parametrize("estimand", ["seqau", "outcome"])
def test_exact_credit_is_unbiased(game, estimand):
    """E[Σ A ∇log π] is the policy gradient when A is the exact seqau, or the exact outcome."""
    plays, chance = every(game, 1)
    weight = chance[plays.steps.group] * len(chance)
    got = gradient(plays, truth(plays, estimand).values * weight)
    np.testing.assert_allclose(got, policy_gradient(game), atol=1e-13)


UNBIASED = {
    "reinforce": reinforce,
    "reinforce, constant": partial(reinforce, baseline="constant", constant=3.0),
    "reinforce, leave one out": partial(reinforce, baseline="leave_one_out"),
    "reinforce, critic": partial(reinforce, baseline="critic"),
    "gae, λ 0": partial(gae, gae_lambda=0.0),
    "gae, λ .7": partial(gae, gae_lambda=0.7),
    "gae, λ 1": partial(gae, gae_lambda=1.0),
    "reinforce, the others by turn": partial(reinforce, baseline="leave_one_out", weight="step"),
    "grpo, mean only × G/(G − 1)": partial(mean_only, unbias=True),
    "rloo": partial(estimate, "rloo"),
}


@small
@pytest.mark.parametrize("method", UNBIASED.values(), ids=UNBIASED.keys())
def test_unbiased_methods(game, method):
    """Their expectation is the policy gradient, with true values where a critic is asked for."""
    for rollouts in (2, 3):
        got = expected_gradient(game, method, rollouts)
        np.testing.assert_allclose(got, policy_gradient(game), atol=1e-12)


@small
@pytest.mark.parametrize("name", unbiased("observational"))
def test_what_the_table_calls_unbiased(game, name):
    """A method whose row says unbiased gives, as it stands, the policy gradient on every game."""

    def method(steps: Steps) -> Credit:
        judged = with_quality(steps, own_act(steps), earlier(len(steps.names["agent"])))
        return estimate(name, judged)

    got = expected_gradient(game, method, 3)
    np.testing.assert_allclose(got, policy_gradient(game), atol=1e-12)


def test_methods_that_ask_a_policy_claim_nothing():
    """No row of theirs says unbiased; one that did would need its test here. That they are biased
    indeed is shown in test_cosac and test_hindsight.
    """
    assert unbiased("generated") == []


def measured(game, name: str, seed: int, **options):
    """Gradient of a method that runs the plays again, weighed over all plays that can happen."""
    plays, chance = every(game, 1)
    credit = estimate(name, plays.steps, replay=Rerun(plays), seed=seed, **options)
    return gradient(plays, credit.values * chance[plays.steps.group] * len(chance))


@small
@pytest.mark.parametrize("name", unbiased("measured"))
def test_what_the_table_calls_unbiased_and_measures(game, name):
    """Branches are drawn: over 40 seeds their mean is within 4 standard errors of the gradient."""
    got = np.array([measured(game, name, seed) for seed in range(40)])
    error = got.std(axis=0, ddof=1) / np.sqrt(len(got))
    assert np.all(np.abs(got.mean(axis=0) - policy_gradient(game)) <= 4 * error + 1e-12)
    assert np.all(error < 0.1)


@small
@pytest.mark.parametrize("rollouts", [2, 3, 4])
def test_a_mean_with_oneself_in_it_shrinks(game, rollouts):
    """E of mean-only GRPO, and of REINFORCE with the group's mean, is (G − 1)/G of the gradient."""
    shrunk = (rollouts - 1) / rollouts * policy_gradient(game)
    for method in (mean_only, partial(reinforce, baseline="group")):
        np.testing.assert_allclose(expected_gradient(game, method, rollouts), shrunk, atol=1e-12)


def test_grpo_with_std_turns_the_gradient():
    """Three acts pay 0, 1 and 10: dividing by the group's spread is no rescaling of the gradient.

    Of two rollouts the better gets +√½ and the worse −√½, however far apart they are, so the step
    is towards being better than another draw: π(a)·√½·(P(worse) − P(better)).
    """
    p = np.array([0.6, 0.3, 0.1])
    game = chain(np.array([0.0, 1.0, 10.0]), np.log(p)[None])
    got = expected_gradient(game, partial(grpo, eps=1e-12), 2)
    wins = np.array([-0.4, 0.6 - 0.1, 0.9])
    np.testing.assert_allclose(got[0], p * np.sqrt(0.5) * wins, atol=1e-9)
    assert cosine(got, policy_gradient(game)) < 0.9


def test_grpo_with_std_weighs_tasks_by_their_difficulty():
    """Dividing by the spread pushes a task solved one time in ten more than one solved half the
    time: GRPO's share of the gradient is no constant over tasks.

    With s successes in 4 the spread (ddof 1) is σ = √(s(4 − s)/12), and the gradient of the group
    at the good act is s/4·(1 − s/4)/σ = ¾σ; a group with s = 0 or 4 gives nothing.
    """
    share = {}
    for p in (0.5, 0.1):
        game = chain(np.array([0.0, 1.0]), np.log([[1 - p, p]]))
        got = expected_gradient(game, partial(grpo, eps=1e-12), 4)
        mixed = [4 * p * (1 - p) ** 3, 6 * p**2 * (1 - p) ** 2, 4 * p**3 * (1 - p)]
        want = 0.75 * np.dot(mixed, np.sqrt([3 / 12, 4 / 12, 3 / 12]))
        assert got[0, 1] == pytest.approx(want, abs=1e-9)
        share[p] = got[0, 1] / policy_gradient(game)[0, 1]
    assert share[0.1] > 1.04 * share[0.5]


@small
def test_mean_only_grpo_given_the_act(game):
    """E[A | rollout so far, a] = (G − 1)/G of the exact outcome credit, row by row."""
    plays, chance = every(game, 3)
    steps, weight = plays.steps, chance[plays.steps.group]
    keys = (plays.state, plays.action)  # in these games a state has one past
    _, got = mean_by(keys, mean_only(steps).values, weight)
    _, want = mean_by(keys, truth(plays, "outcome").values, weight)
    np.testing.assert_allclose(got, 2 / 3 * want, atol=1e-12)


@small
def test_gae_of_one_step_is_seqau(game):
    """With the true V and λ = 0, δ = r + V' − V is Q(h, a) − V(h) on every row, without error."""
    plays, _ = every(game, 2)
    np.testing.assert_allclose(
        gae(plays.steps, gae_lambda=0.0).values, truth(plays).values, atol=1e-12
    )


def test_gae_of_one_step_is_seqau_in_a_loop():
    """The same with revisits and γ = .9."""
    plays = play(deal("T11", seed=1), groups=20, rollouts=10)
    one_step = estimate("gae", plays.steps, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_allclose(one_step.values, truth(plays).values, atol=1e-12)


@pytest.mark.parametrize("agents", [2, 3])
def test_gigpo_step_credit_given_the_size_of_its_group(agents):
    """E[A_S | h, a] = (n − 1)/n·seqau in an anchor group of n, with the prefix as anchor."""
    plays, chance = every(deal("T2", agents=agents, actions=2, seed=4), 3)
    steps, weight = plays.steps, chance[plays.steps.group]
    credit = gigpo(steps)
    n = np.bincount(steps.group * 9 + steps.anchor)[steps.group * 9 + steps.anchor]
    np.testing.assert_array_equal(credit.parts["anchor_size"], n)
    keys, got = mean_by((plays.state, plays.action, n), credit.parts["step"], weight)
    _, want = mean_by((plays.state, plays.action, n), truth(plays).values, weight)
    np.testing.assert_allclose(got, (keys[:, 2] - 1) / keys[:, 2] * want, atol=1e-12)
    assert set(n) == {1, 2, 3}


@small
def test_gigpo_without_its_step_part_is_grpo(game):
    """A step weight of 0 leaves the episode part: (G − 1)/G of the gradient."""
    got = expected_gradient(game, partial(gigpo, step_weight=0.0), 3)
    np.testing.assert_allclose(got, 2 / 3 * policy_gradient(game), atol=1e-12)


# ---------------------------------------------------------------------------------------------
# Exact credit of other kinds

REACTING = {
    "T2": deal("T2", agents=3, actions=2, contexts=10),
    "T13": deal("T13", agents=3, actions=3, topology="tree", contexts=10),
    "T17": deal("T17", agents=3, dep=1.0, contexts=10),
}


def direction(game, estimand: str) -> float:
    """Cosine of E[Σ A ∇log π] and the policy gradient, A the exact credit, over all plays."""
    plays, chance = every(game, 1)
    weight = chance[plays.steps.group] * len(chance)
    return cosine(gradient(plays, truth(plays, estimand).values * weight), policy_gradient(game))


@pytest.mark.parametrize("game", REACTING.values(), ids=REACTING.keys())
def test_what_an_act_makes_later_agents_do_is_lost_to_frozen_credit(game):
    """Once later agents react, coma and frozen removal and Shapley point elsewhere (< .98); seqau,
    the outcome and removal that lets others answer do not (> .999), and neither do RLOO and C3.
    """
    for estimand in ("seqau", "outcome", "removal:replayed", "removal:anew"):
        assert direction(game, estimand) > 0.999
    for estimand in ("coma", "removal:frozen", "shapley:frozen"):
        assert direction(game, estimand) < 0.98
    exact = policy_gradient(game)
    assert cosine(expected_gradient(game, partial(estimate, "rloo"), 2), exact) > 0.999
    assert cosine(measured(game, "c3", 0, alternatives=400), exact) > 0.999


def test_frozen_credit_is_right_where_nobody_reacts():
    """On T1, where agents see nothing, all of these are the policy gradient."""
    game = deal("T1", agents=3, contexts=5)
    for estimand in ("seqau", "coma", "removal:frozen", "removal:replayed", "shapley:frozen"):
        assert direction(game, estimand) == pytest.approx(1, abs=1e-12)


# ---------------------------------------------------------------------------------------------
# Stopping is an act


def centred_per_turn(steps: Steps) -> Credit:
    """Each reward minus the mean of its turn index over the rollouts that got there, summed on."""
    turn = np.unique(np.column_stack([steps.group, steps.step]), axis=0, return_inverse=True)[1]
    turn = turn.reshape(-1)
    centred = steps.reward - (np.bincount(turn, steps.reward) / np.bincount(turn))[turn]
    whole = np.bincount(steps.rollout, centred)[steps.rollout]
    before = np.cumsum(centred) - centred
    return Credit(whole - (before - before[steps.step == 0][steps.rollout]), estimand="outcome")


def test_two_rollouts_of_one_and_three_turns_that_pay_one():
    """Centred per turn index every reward is 0, though the longer rollout earned three times more.

    REINFORCE credits the turns with 3, 2, 1 and the short rollout with 1; GRPO with ±1.
    """
    steps = Steps.from_columns(rollout=[0, 1, 1, 1], reward=[1, 1, 1, 1])
    assert centred_per_turn(steps).values.tolist() == [0, 0, 0, 0]
    assert reinforce(steps).values.tolist() == [1, 3, 2, 1]
    assert mean_only(steps).values.tolist() == [-1, 1, 1, 1]


@pytest.mark.parametrize("rollouts", [2, 3, 4])
def test_centring_per_turn_index_is_biased_where_stopping_is_an_act(rollouts):
    """On T16 with pay 1 for every turn its gradient is 0, and the true one is to go on.

    V = 1 + π(go | 0)(1 + π(go | 1)); the slope in the first logit is π(1 − π)(1 + π(go | 1)).
    """
    game = SMALL["paid per turn"]
    np.testing.assert_allclose(expected_gradient(game, centred_per_turn, rollouts), 0, atol=1e-12)
    first, second = game.policy[:2, 1]
    want = first * (1 - first) * (1 + second)
    assert policy_gradient(game)[0, 1] == pytest.approx(want, abs=1e-12)
    assert want > 0.2


def test_centring_per_turn_index_can_point_the_wrong_way():
    """Of a hundred games with prizes it pushes over ten away from the gradient, and most askew;
    mean-only GRPO is exactly half of the gradient on each.
    """
    off = []
    for seed in range(100):
        game = deal("T16", turns=3, pay=0.5, seed=seed)
        got, exact = expected_gradient(game, centred_per_turn, 2), policy_gradient(game)
        off.append(cosine(got, exact))
        np.testing.assert_allclose(expected_gradient(game, mean_only, 2), exact / 2, atol=1e-12)
    assert np.sum(np.less(off, 0)) > 10
    assert np.median(off) < 0.99


def step_part(steps: Steps) -> Credit:
    """GiGPO's A_S alone; on T16 an anchor is a turn index."""
    credit = gigpo(steps)
    return replace(credit, values=credit.parts["step"])


PER_TURN = {
    "process supervision": process,
    "process supervision, summed first": partial(process, order="sum_then_normalize"),
    "magrpo": magrpo,
    "gigpo's step part": step_part,
    "dr_mas": partial(estimate, "dr_mas"),
    "grpo by turn": partial(mean_only, weight="step"),
    "reinforce, group by turn": partial(reinforce, baseline="group", weight="step"),
}
"""Methods whose mean is taken over turns, so that it depends on when rollouts stopped."""


@pytest.mark.parametrize("rollouts", [2, 3, 4])
@pytest.mark.parametrize("method", PER_TURN.values(), ids=PER_TURN.keys())
def test_means_over_turns_are_biased_where_stopping_is_an_act(method, rollouts):
    """On T16 with pay per turn they are no multiple of the gradient: the second decision to stop
    gets another share than the first, or both get nothing.
    """
    game = SMALL["paid per turn"]
    got = expected_gradient(game, method, rollouts)[:2, 1] / policy_gradient(game)[:2, 1]
    assert abs(got[0] - got[1]) > 0.05 or np.abs(got).max() < 1e-12


def test_magrpo_shrinks_a_turn_by_who_else_got_there():
    """Of two rollouts both reach the first turn: half of the gradient. The second is reached by the
    other one with probability π(go | 0): π(go | 0)/2 of it.
    """
    game = SMALL["paid per turn"]
    got = expected_gradient(game, magrpo, 2)[:2, 1] / policy_gradient(game)[:2, 1]
    np.testing.assert_allclose(got, [1 / 2, game.policy[0, 1] / 2], atol=1e-12)


def test_process_supervision_is_blind_to_pay_per_turn():
    """Every reward is 1, the group's mean: credit 0 for the rollout of one turn and of three."""
    steps = Steps.from_columns(rollout=[0, 1, 1, 1], reward=[1, 1, 1, 1])
    assert process(steps).values.tolist() == [0, 0, 0, 0]
    assert estimate("rloo", steps).values.tolist() == [-2, 2, 2, 2]


# ---------------------------------------------------------------------------------------------
# By sampling


def batches(game, method, groups: int, rollouts: int = 8, n: int = 40):
    """Gradient estimates of n independent batches, (n, anchors, actions)."""
    for seed in range(n):
        plays: Plays = play(game, groups=groups, rollouts=rollouts, seed=seed)
        yield gradient(plays, method(plays.steps).values)


SAMPLED = {
    "reinforce": (reinforce, 1.0),
    "gae": (partial(gae, gae_lambda=0.95), 1.0),
    "grpo, mean only": (mean_only, 7 / 8),
    "grpo, unbiased": (partial(mean_only, unbias=True), 1.0),
}


@pytest.mark.parametrize("case", SAMPLED)
@pytest.mark.parametrize("name", ["T1", "T2", "T16"])
def test_sampled_gradients(name, case):
    """With noise on the reward, the mean of 40 batches is within 4 standard errors of what the
    method claims: the gradient, or 7/8 of it for groups of 8 that are compared with themselves.
    """
    method, factor = SAMPLED[case]
    # Two agents: a prefix that is met a few times only has no standard error to speak of.
    game = deal(name, noise=0.5, seed=7, **({} if name == "T16" else {"agents": 2}))
    got = np.array(list(batches(game, method, groups=100)))
    error = got.std(axis=0, ddof=1) / np.sqrt(len(got))
    off = np.abs(got.mean(axis=0) - factor * policy_gradient(game))
    assert np.all(off <= 4 * error + 1e-12)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gigpo_step_credit_in_a_loop_tends_to_q_minus_v(gamma):
    """On T11 the mean step credit of each (node, act) is within 4 standard errors of Q − V.

    Anchor groups are large (thousands of visits), so what a rollout's own revisits do to its
    baseline is far below the standard error, taken over 40 independent groups.
    """
    game = deal("T11", gamma=gamma, seed=2)
    plays = play(game, groups=40, rollouts=500, seed=3)
    step = estimate("gigpo", plays.steps, gamma=gamma, normalize_std=False).parts["step"]
    code = (plays.steps.group * 4 + plays.state) * 2 + plays.action
    got = (np.bincount(code, step) / np.bincount(code)).reshape(40, 4, 2)
    error = got.std(axis=0, ddof=1) / np.sqrt(40)
    want = action_values(game) - values(game)[:, None]
    assert np.all(np.abs(got.mean(axis=0) - want) < 4 * error)
    assert np.all(np.abs(want) > 20 * error)  # the comparison can tell a wrong sign


@pytest.mark.parametrize("name", ["T1", "T2"])
@pytest.mark.parametrize("agents", [2, 4])
def test_grpo_correlates_with_seqau_as_one_over_root_k(name, agents):
    """Pooled over agents, Pearson r of mean-only GRPO with seqau is √((n − 1)/(n·K)).

    R − V(h₀) = Σ_i A_i, and the A_i are uncorrelated martingale differences with variances v_i.
    Over rows, cov(R − V, A) = var(A) = Σ v_i / K and var(R − V) = Σ v_i, so r = √(1/K). A group
    mean over n multiplies covariance and variance by (n − 1)/n. Each context has its own v_i; the
    ratio holds for their sums. The standard error is taken over 30 batches.
    """
    game = deal(name, contexts=50, agents=agents)
    found = []
    for seed in range(30):
        plays = play(game, groups=50, rollouts=8, seed=seed)
        found.append(np.corrcoef(mean_only(plays.steps).values, truth(plays).values)[0, 1])
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert np.mean(found) == pytest.approx(np.sqrt(7 / 8 / agents), abs=4 * error + 0.002)
    assert error < 0.006


def test_noise_is_part_of_no_truth():
    """Noise of σ 1 lowers r to √((n − 1)/n · Σv/K / (Σv + σ²)), and leaves exact credit alone."""
    quiet = deal("T2", seed=3)
    loud = replace(quiet, noise=1.0)
    plays = play(loud, groups=4000, rollouts=8)
    np.testing.assert_array_equal(truth(plays).values, truth(replace(plays, game=quiet)).values)
    total = np.var(np.bincount(plays.steps.rollout, truth(plays).values))
    r = np.corrcoef(mean_only(plays.steps).values, truth(plays).values)[0, 1]
    assert r == pytest.approx(np.sqrt(7 / 8 * total / 4 / (total + 1)), abs=0.01)


def test_score_compares_the_gradients_that_two_credits_give():
    """Over 40,000 plays of T2, GRPO (r .47 with seqau, in theory) pushes the same way as seqau."""
    plays = play(deal("T2", seed=1), groups=5000, rollouts=8)
    found = score(mean_only(plays.steps), truth(plays), gradient=partial(gradient, plays))
    assert found.pearson < 0.6
    assert found.gradient_cosine > 0.99
