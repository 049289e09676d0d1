"""COSAC: what it claims of its expectations, its additive model and its cost, on games."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from counterpoint.branches import Foreseen, Menu
from counterpoint.credit import METHODS, cosac, estimate, grpo, score
from counterpoint.credit.cosac import fitted, told
from counterpoint.games import (
    deal,
    every,
    expected_gradient,
    play,
    policy_gradient,
    truth,
)
from counterpoint.games.replaying import Rerun
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from foresight import TwoEntries, asking

EXACT = {"expectation": "enumerate", "intercept": "centred"}


def credited(plays, **options):
    """Credit with what the test does not care about filled in."""
    given = {"ridge": 0.1, "continuations": 4} | options
    return cosac(plays.steps, policy=Rerun(plays), **given)


def listed(name: str, **dials):
    """Every play of a game once."""
    return every(deal(name, seed=3, **dials), 1)[0]


def mean_over_the_policy(plays, values):
    """For every state, Σ_a π(a) A(a): each act of each state stands in some row, all alike."""
    by_act = np.full(plays.game.reward.shape, np.nan)
    by_act[plays.state, plays.action] = values
    return np.sum(plays.game.probability * by_act, axis=1)


# ---------------------------------------------------------------------------------------------
# Expectations


@pytest.mark.parametrize("name", ["T2", "T3", "T17"])
@pytest.mark.parametrize("intercept", ["none", "centred"])
def test_enumerated_credit_has_mean_zero_over_the_policy(name, intercept):
    """Σ_a π(a | h) A(h, a) = 0 at every state, with one continuation set for each label."""
    plays = listed(name, agents=3, actions=3, dep=1.0)
    found = credited(plays, expectation="enumerate", intercept=intercept).values
    np.testing.assert_allclose(mean_over_the_policy(plays, found), 0, atol=1e-12)


def test_paired_credit_has_mean_zero_in_expectation_only():
    """Over 200 seeds the mean is within 4 standard errors of 0, and one seed is not 0."""
    plays = listed("T2", agents=3, actions=2)
    means = np.array(
        [mean_over_the_policy(plays, credited(plays, seed=seed).values) for seed in range(200)]
    )
    error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
    assert np.all(np.abs(means.mean(axis=0)) <= 4 * error)
    assert np.abs(means[0]).max() > 0.01


def test_both_expectations_have_one_mean():
    """Drawing a' or taking the mean over the menu: over 100 seeds the same credit."""
    plays = listed("T2", agents=3, actions=2)
    drawn = np.array([credited(plays, seed=seed).values for seed in range(100)])
    taken = np.array(
        [credited(plays, seed=seed, expectation="enumerate").values for seed in range(100)]
    )
    error = np.sqrt((drawn.var(axis=0, ddof=1) + taken.var(axis=0, ddof=1)) / 100)
    assert np.all(np.abs(drawn.mean(axis=0) - taken.mean(axis=0)) <= 4 * error)
    assert np.all(drawn.var(axis=0) >= taken.var(axis=0) - 1e-12)


# ---------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_a_constant_added_to_every_outcome(scope):
    """Under `centred` it changes nothing; under `none` it changes what acts are worth against each
    other, by more than a tenth of their spread.
    """
    plays = play(deal("T2", agents=3, seed=1), groups=2, rollouts=16)
    moved = replace(plays, steps=replace(plays.steps, outcome=plays.steps.outcome + 100.0))
    run = partial(credited, fit_scope=scope, expectation="enumerate")
    centred = run(plays, intercept="centred").values
    np.testing.assert_allclose(run(moved, intercept="centred").values, centred, atol=1e-10)
    off = run(moved, intercept="none").values - run(plays, intercept="none").values
    assert np.abs(off).max() > 0.1 * centred.std()


def test_a_constant_in_a_block_is_nobodys_credit():
    """φ_k + 5 for all labels of one agent, who acts once in every run, leaves every A as it was."""
    plays = listed("T2", agents=3, actions=3)
    steps, rerun = plays.steps, Rerun(plays)
    model = fitted(steps, plays.action, np.zeros(len(steps), dtype=np.int64), 0.1, False)
    for agent in range(3):
        block = model.keys // 3 == agent
        raised = model._replace(phi=model.phi + 5.0 * block)
        before, after = (
            told(rerun, steps, each, np.arange(len(steps)), plays.action, n=3, seed=0)
            for each in (model, raised)
        )
        assert (
            np.ptp((after.act + after.later - before.act - before.later)[steps.agent <= agent])
            < 1e-12
        )
        assert np.abs(after.act + after.later - before.act - before.later).max() == pytest.approx(5)


def test_against_a_slow_version():
    """φ by least squares with √λ·I appended, loops over rows, and the later acts by enumeration."""
    plays = play(deal("T2", agents=3, seed=5, contexts=2), groups=2, rollouts=12, seed=1)
    steps, game = plays.steps, plays.game
    found = credited(plays, continuations=4000, fit_scope="group", **EXACT)
    for group in range(2):
        runs = np.unique(steps.rollout[steps.group == group])
        X, y = np.zeros((len(runs), 9)), np.zeros(len(runs))
        for row in np.flatnonzero(steps.group == group):
            X[steps.rollout[row] - runs[0], 3 * steps.agent[row] + plays.action[row]] += 1
            y[steps.rollout[row] - runs[0]] = steps.outcome[row]
        X, y = X - X.mean(axis=0), y - y.mean()
        phi = np.linalg.lstsq(
            np.vstack([X, np.sqrt(0.1) * np.eye(9)]), np.append(y, np.zeros(9)), rcond=None
        )[0].reshape(3, 3)

        def worth(state, phi=phi):
            """(actions,) φ of each act and the mean φ of all that the policies do after it."""
            after = [game.probability[s] @ worth(s) if s >= 0 else 0 for s in game.next[state]]
            return phi[game.agent[state]] + np.array(after)

        for row in np.flatnonzero(steps.group == group):
            state, act, p = plays.state[row], plays.action[row], game.probability[plays.state[row]]
            direct = phi[steps.agent[row]][act] - p @ phi[steps.agent[row]]
            assert found.parts["direct"][row] == pytest.approx(direct, abs=1e-10)
            exact = worth(state)[act] - p @ worth(state)
            assert found.values[row] == pytest.approx(exact, abs=0.08)
    np.testing.assert_allclose(found.values, found.parts["direct"] + found.parts["indirect"])


# ---------------------------------------------------------------------------------------------
# What it estimates


def error_to_seqau(plays, **options) -> float:
    """Root of the mean squared distance from exact seqau."""
    found = credited(plays, **EXACT | options).values
    return float(np.sqrt(np.nanmean((found - truth(plays).values) ** 2)))


def test_where_outcomes_are_sums_it_is_seqau():
    """Additive outcome, every play seen, λ → 0: exact at once where nobody reacts; where later
    agents do, the error falls with L as 1/√L.
    """
    alone = listed("T1", agents=3, actions=3)
    assert error_to_seqau(alone, ridge=1e-9) < 1e-7
    assert error_to_seqau(alone, ridge=1.0) > 1e-3
    seen = listed("T2", agents=3, actions=3)
    few, many = (error_to_seqau(seen, ridge=1e-9, continuations=n) for n in (32, 8192))
    assert 6 < few / many < 40  # 16, give or take
    assert many < 0.03


def test_more_runs_help_where_outcomes_are_noisy_sums():
    """T2 with an error of 1 on the outcome: 64 times the rollouts, about an eighth of the error."""
    errors = []
    for rollouts in (100, 6400):
        plays = play(deal("T2", agents=3, noise=1.0, seed=2), groups=1, rollouts=rollouts, seed=1)
        errors.append(error_to_seqau(plays, ridge=1e-6, continuations=2000))
    assert 4 < errors[0] / errors[1] < 16


def test_more_runs_do_not_help_where_acts_need_each_other():
    """AND of four is no sum: 8,000 rollouts of one task are as far from seqau as 500."""
    errors = []
    for rollouts in (500, 8000):
        plays = play(deal("T3", agents=4, dep=1.0, seed=2), groups=1, rollouts=rollouts, seed=1)
        errors.append(error_to_seqau(plays, ridge=1e-6, continuations=200))
    assert errors[1] > 0.8 * errors[0]
    assert errors[1] > 0.3 * truth(plays).values.std()


def test_it_ranks_well_in_sums_and_badly_elsewhere():
    """Four agents: far above GRPO in an additive team, below it under AND and XOR."""
    for name, better in (("T2", True), ("T3", False), ("T5", False)):
        dials = {"agents": 4, "actions": 3, "dep": 1.0, "spread": 0.0}
        plays = play(deal(name, contexts=100, **dials), groups=100, rollouts=8)
        ours = credited(plays, ridge=0.01, continuations=8, fit_scope="group", **EXACT)
        exact = truth(plays)
        gain = (
            score(ours, exact).pearson
            - score(grpo(plays.steps, normalize_std=False), exact).pearson
        )
        assert gain > 0.3 if better else gain < -0.05


def test_it_is_no_policy_gradient_where_acts_need_each_other():
    """Its row says that it is biased, and so it is: under AND of two, all groups of four listed."""
    game = deal("T3", agents=2, seed=4)
    assert not METHODS["cosac"].unbiased
    rerun = Rerun(every(game, 4)[0])
    found = expected_gradient(
        game,
        lambda steps: cosac(
            steps, policy=rerun, ridge=1e-3, continuations=50, fit_scope="group", **EXACT
        ),
        4,
    )
    exact = policy_gradient(game)
    assert np.linalg.norm(found - exact) > 0.05 * np.linalg.norm(exact)


# ---------------------------------------------------------------------------------------------
# What it asks and what it costs


def test_what_continuations_cost():
    """Two agents with two acts, every play listed, L = 5. Enumerated, each of the two first acts is
    continued by one choice: 2 × 5 passes, whoever asks. Paired, the two acts of the record are
    continued, 10 passes, and new ones drawn: 5 × 2 at the start, 5 × 1 at each of two later states.
    """
    plays = listed("T2", agents=2, actions=2)
    whole = credited(plays, expectation="enumerate", continuations=5).diagnostics
    assert (whole["env_calls"], whole["forward_passes"], whole["tokens"]) == (0, 10, 0)
    assert credited(plays, continuations=5).diagnostics["forward_passes"] == 10 + 10 + 10
    assert (whole["ridge"], whole["continuations"], whole["fits"], whole["labels"]) == (
        0.1,
        5,
        1,
        4,
    )


def test_continuations_are_those_that_the_policy_would_play():
    """How often the acts after a first act are foreseen is how often the game says, within 4
    standard errors; acts put in at one state meet the same draws.
    """
    plays = listed("T2", agents=3, actions=2)
    rerun, n = Rerun(plays), 20_000
    first = np.flatnonzero(plays.steps.step == 0)[:1]
    at = np.column_stack([plays.steps.rollout[first], plays.steps.step[first]])
    for act in (0, 1):
        found = rerun.foresee(at, np.array([act]), n, agents=(0, 1, 2))
        assert found.label[0, :, 0].tolist() == [act] * n
        assert (found.agent[0] == [0, 1, 2]).all()
        second = plays.game.next[plays.state[first[0]], act]
        p = plays.game.probability[second, 1]
        assert abs(found.label[0, :, 1].mean() - p) < 4 * np.sqrt(p * (1 - p) / n)
        third = plays.game.next[second]
        p = plays.game.probability[third, 1] @ plays.game.probability[second]
        assert abs(found.label[0, :, 2].mean() - p) < 4 * np.sqrt(p * (1 - p) / n)
    named = rerun.foresee(at, np.array([1]), 3, agents=(2, 0))
    assert named.agent[0].tolist() == [[1, -1, 0]] * 3  # agent 1 is not in the list


class Reversed:
    """The policies of a game whose menus stand the other way round at every second turn."""

    def __init__(self, plays) -> None:
        self._rerun, self._last = Rerun(plays), plays.game.policy.shape[1] - 1

    def menu(self, places) -> Menu:
        found, turned = self._rerun.menu(places), places[:, 1] % 2 == 1
        label = np.broadcast_to(np.arange(self._last + 1), found.probs.shape)
        flip = partial(np.where, turned[:, None])
        return found._replace(
            probs=flip(found.probs[:, ::-1], found.probs),
            label=flip(label[:, ::-1], label),
            taken=np.where(turned, self._last - found.taken, found.taken),
        )

    def foresee(self, places, action, n, **given) -> Foreseen:
        meant = np.where((action >= 0) & (places[:, 1] % 2 == 1), self._last - action, action)
        return self._rerun.foresee(places, meant, n, **given)


@pytest.mark.parametrize("expectation", ["paired", "enumerate"])
def test_labels_and_not_entries_are_what_is_credited(expectation):
    """The same labels at other places of the menu: the same credit."""
    plays = play(deal("T2", agents=3, contexts=3), groups=3, rollouts=8)
    options = {"ridge": 0.1, "continuations": 4, "expectation": expectation}
    turned = cosac(plays.steps, policy=Reversed(plays), **options)
    plain = cosac(plays.steps, policy=Rerun(plays), **options)
    np.testing.assert_allclose(turned.values, plain.values, atol=1e-12)


def test_an_act_that_no_menu_offers_is_not_credited():
    """A text of the agent's own has no label: NaN, counted, and the others' credit is finite."""
    plays = play(deal("T2", agents=2), groups=2, rollouts=8)

    class Silent(Rerun):
        def menu(self, places):
            found = super().menu(places)
            return found._replace(taken=np.where(places[:, 0] == 3, -1, found.taken))

    found = cosac(plays.steps, policy=Silent(plays), ridge=0.1, continuations=2)
    assert (np.isnan(found.values) == (plays.steps.rollout == 3)).all()
    assert found.diagnostics["unlabelled"] == 2


def test_labels_that_no_run_chose_are_counted():
    """One rollout: of the first agent's two entries one is unseen, and so is half of what is put
    in; with every play in the fit none is.
    """
    plays = play(deal("T1", agents=1, actions=2), groups=1, rollouts=1)
    assert credited(plays, expectation="enumerate").diagnostics["unseen"] == 0.5
    assert credited(listed("T1", agents=2), expectation="enumerate").diagnostics["unseen"] == 0


def test_a_group_of_one_and_a_loop():
    """Centred, a group of one says nothing: 0. An agent that acts often has one φ for each label,
    counted as often as it was chosen; in a loop that is credited too.
    """
    plays = play(deal("T2", agents=2), groups=3, rollouts=1)
    assert not credited(plays, fit_scope="group", **EXACT).values.any()
    loop = play(deal("T11"), groups=1, rollouts=50)
    found = credited(loop, **EXACT)
    assert found.credited.all()
    assert found.diagnostics["labels"] == 2


def test_masked_and_unscored_rows():
    """Never credited; nature's moves count in the model, and a masked turn does too."""
    plays = play(deal("T14"), groups=4, rollouts=8)
    assert not plays.steps.mask.all()
    found = credited(plays)
    assert (np.isnan(found.values) == ~plays.steps.mask).all()
    outcome = np.where(plays.steps.rollout == 2, np.nan, plays.steps.outcome)
    some = cosac(
        replace(plays.steps, outcome=outcome), policy=Rerun(plays), ridge=1, continuations=1
    )
    assert np.isnan(some.values[plays.steps.rollout == 2]).all()
    assert some.diagnostics["unscored"] == 1


STEPS = Steps.from_columns(rollout=[0, 0, 1, 1], reward=[0, 1, 0, 0], agent=["a", "b"] * 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": None}, "cosac needs policy="),
        ({"policy": 3}, "policy is 3"),
        ({"ridge": None}, "cosac needs ridge="),
        ({"ridge": 0.0}, "cosac needs ridge="),
        ({"ridge": float("nan")}, "cosac needs ridge="),
        ({"continuations": 0}, "cosac needs ridge=, a number above 0, and continuations="),
        ({"expectation": "drawn"}, "expectation is 'drawn'; it is 'paired', 'enumerate'"),
    ],
)
def test_what_is_refused(options, says):
    """One sentence for each missing or impossible option."""
    given = {"policy": TwoEntries(STEPS), "ridge": 0.1, "continuations": 2} | options
    with pytest.raises(Refused, match=says):
        estimate("cosac", STEPS, **given)


def test_called_by_itself_it_refuses_the_same():
    """Without the table: a policy that foresees nothing, an unknown option, outcomes per agent."""
    run = partial(cosac, ridge=0.1, continuations=2)
    with pytest.raises(Refused, match="policy is int, which has not menu and foresee"):
        run(STEPS, policy=3)
    with pytest.raises(Refused, match="fit_scope is 'task'; it is 'batch' or 'group'"):
        run(STEPS, policy=TwoEntries(STEPS), fit_scope="task")
    apart = Steps.from_columns(rollout=[0, 0], outcome=[1, 2], agent=["a", "b"])
    with pytest.raises(Refused, match="outcomes of their own"):
        run(apart, policy=TwoEntries(apart))


def test_without_probabilities_there_is_no_mean_over_the_menu():
    """Refused with the row and the way out; drawn acts do without."""

    class Blind(TwoEntries):
        def menu(self, places):
            found = super().menu(places)
            return found._replace(probs=found.probs * np.nan)

    run = partial(cosac, STEPS, policy=Blind(STEPS), ridge=0.1, continuations=2)
    with pytest.raises(Refused, match="row 0: the policy gives no menu with probabilities"):
        run(expectation="enumerate")
    assert run().credited.all()


def test_too_many_labels_are_refused():
    """Texts as labels, one for each of 8,000 rollouts: the regression is not begun."""
    n = 8_000
    steps = Steps.from_columns(rollout=np.arange(n), reward=np.ones(n))
    with pytest.raises(Refused, match="8000 rollouts on 8000 labels is too large"):
        fitted(steps, np.arange(n), np.zeros(n, dtype=np.int64), 0.1, False)


def test_a_table_that_no_game_played():
    """Any object with menu and foresee will do: the stand-in of the contract tests."""
    found = asking("cosac")(STEPS)
    assert (found.unit, found.estimand, found.identified) == (
        "turn",
        "seqau",
        "assumption:additive",
    )
