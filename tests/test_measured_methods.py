"""Measured methods: exact where games are enumerated, by hand where a team fits on a page."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from batches import few
from counterpoint.branches import KEEP, RESAMPLE
from counterpoint.credit import (
    METHODS,
    Account,
    at_grpo,
    c3,
    ccpo,
    coma,
    estimate,
    loo,
    shapley,
    sharp,
    treemem,
)
from counterpoint.credit.protocols import places
from counterpoint.credit.replayed import leave_one_out
from counterpoint.games import action_values, chain, deal, every, play, truth, values
from counterpoint.games.replaying import Rerun
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

GOLDEN = Path(__file__).parent / "data" / "golden" / "c3_siblings.json"


def played(name="T2", groups=12, rollouts=4, seed=1, **dials):
    plays = play(deal(name, contexts=groups, seed=seed, **dials), groups=groups, rollouts=rollouts)
    return plays, Rerun(plays)


def close(credit, exact, atol=1e-12):
    """The same rows are credited, with the same numbers."""
    np.testing.assert_allclose(credit.values, exact, atol=atol)


# ---------------------------------------------------------------------------------------------
# Every method of the table


OPTIONS = {"treemem": {"length_penalty": 0.1}}
"""What a method cannot do without."""

MODELLED = {"fusion": "assumption:outcome_model"}
"""What does not rest on branches alone."""

TURNWISE = [n for n, row in METHODS.items() if row.family == "measured" and row.unit == "turn"]


def two_agents(**changed):
    """Plays of two agents with outcomes 0 and 1, which every method can credit."""
    plays, rerun = played("T3", agents=2, actions=2, groups=6, rollouts=5, **changed)
    return plays, rerun


@pytest.mark.parametrize("name", TURNWISE)
def test_row_and_result_agree(name):
    """Unit and estimand of the default form are those of the row; it says what it spent."""
    plays, rerun = two_agents()
    credit = estimate(name, plays.steps, replay=rerun, **OPTIONS.get(name, {}))
    assert (credit.unit, credit.estimand) == ("turn", METHODS[name].estimand)
    assert credit.identified == MODELLED.get(name, "randomised")
    said = credit.diagnostics
    assert said["env_calls"] > 0
    assert said["branches"] > 0
    assert said["not_run"] == 0
    assert said["effective_sample_size"] == 30
    assert credit.credited.all()


@pytest.mark.parametrize("name", TURNWISE)
def test_credit_belongs_to_a_row_wherever_it_stands(name):
    """Rows in another order have the credit that they had: draws belong to the place."""
    plays, rerun = two_agents()
    order = np.random.default_rng(0).permutation(len(plays.steps))
    columns = {
        name: column[order]
        for name, column in vars(plays.steps).items()
        if isinstance(column, np.ndarray) and name not in ("cell", "head", "order", "trainable")
    }
    moved = Steps(
        **{k: v for k, v in columns.items() if k in Steps.__dataclass_fields__},
        names=plays.steps.names,
    )
    run = partial(estimate, name, replay=rerun, **OPTIONS.get(name, {}))
    np.testing.assert_allclose(run(moved).values, run(plays.steps).values[order], atol=1e-12)


@pytest.mark.parametrize("name", TURNWISE)
def test_masked_and_unscored_rows_are_never_credited(name):
    """NaN, and nothing is run for them; no rows give no credit."""
    plays, rerun = two_agents()
    steps, first = plays.steps, plays.steps.rollout < 5
    outcome = np.where(steps.rollout == 7, np.nan, steps.outcome)
    run = partial(estimate, name, replay=rerun, **OPTIONS.get(name, {}))
    credit = run(replace(steps, outcome=outcome, mask=~first))
    assert not credit.credited[first | (steps.rollout == 7)].any()
    assert credit.credited[~first & (steps.rollout != 7)].all()
    nothing = run(replace(steps, mask=np.zeros(len(steps), dtype=bool)))
    assert not nothing.credited.any()
    assert nothing.diagnostics["branches"] == 0
    empty = run(Steps.from_columns(rollout=[], reward=[]))
    assert len(empty) == 0
    assert empty.diagnostics["effective_sample_size"] == 0


@pytest.mark.parametrize("name", TURNWISE)
def test_without_money_nothing_is_credited(name):
    """What could not be run is NaN, and not no effect."""
    plays, rerun = two_agents()
    account = Account(rerun, plays.steps, {"env_calls": 0})
    credit = estimate(name, plays.steps, replay=account, **OPTIONS.get(name, {}))
    # the outcome of nobody, or the planner's, is not asked, and a model has recorded runs
    absent = name in ("shapley", "sharp", "fusion")
    assert not credit.credited.any() or absent
    assert credit.diagnostics["branches"] == 0
    assert credit.diagnostics["not_run"] == account.left_out > 0


@pytest.mark.parametrize("name", TURNWISE)
def test_without_a_replay_it_says_what_it_needs(name):
    """The sentence names the method, and what can run the runs again."""
    plays, _ = two_agents()
    with pytest.raises(Refused, match=f"{name} needs replay="):
        estimate(name, plays.steps, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", TURNWISE)
def test_the_same_seed_gives_the_same_credit(name):
    """And nothing is changed in place."""
    plays, rerun = played("T2", agents=2, actions=2, groups=6, rollouts=5)
    if name == "ccpo":
        plays, rerun = two_agents()
    run = partial(estimate, name, plays.steps, replay=rerun, **OPTIONS.get(name, {}))
    before = plays.steps.outcome.copy()
    np.testing.assert_array_equal(run(seed=3).values, run(seed=3).values)
    np.testing.assert_array_equal(plays.steps.outcome, before)


# ---------------------------------------------------------------------------------------------
# Against enumeration

GAMES = {
    "nobody reacts": ("T1", {}),
    "later agents react": ("T2", {}),
    "and": ("T3", {}),
    "or": ("T4", {}),
    "xor": ("T5", {}),
    "a dummy": ("T8", {}),
    "a star": ("T13", {"topology": "star", "agents": 5}),
    "nature moves": ("T10", {}),
    "noise": ("T15", {"agents": 3}),
}
games = pytest.mark.parametrize(("name", "dials"), GAMES.values(), ids=GAMES.keys())


@games
def test_frozen_credit_is_exact(name, dials):
    """COMA by the whole menu, the difference reward and Shapley values with later acts frozen are
    those of enumeration; noise on the outcome cancels, since what nature did is kept.
    """
    plays, rerun = played(name, **dials)
    exact = {e: truth(plays, e).values for e in ("coma", "removal:frozen", "shapley:frozen")}
    close(coma(plays.steps, replay=rerun), exact["coma"])
    close(loo(plays.steps, replay=rerun, downstream="frozen", n=1), exact["removal:frozen"])
    close(shapley(plays.steps, replay=rerun), exact["shapley:frozen"])
    close(
        shapley(plays.steps, replay=rerun, form="kernel", samples=64), exact["shapley:frozen"], 1e-9
    )


@games
def test_replayed_credit_has_the_exact_mean(name, dials):
    """Difference reward and Shapley values whose later agents answer, within their errors."""
    plays, rerun = played(name, **dials)
    credit = loo(plays.steps, replay=rerun, n=200)
    off = np.abs(credit.values - truth(plays, "removal:replayed").values)
    there = plays.steps.mask  # a rare act can be missing from 200 branches, hence the 0.01
    assert np.all(off[there] < 5 * credit.parts["stderr"][there] + 0.01)
    for options, estimand in (
        ({"downstream": "replay"}, "shapley:replayed"),
        ({"absence": "resample"}, "shapley:resampled"),
    ):
        credit = shapley(plays.steps, replay=rerun, n=200, **options)
        assert credit.estimand == estimand
        off = (credit.values - truth(plays, estimand).values)[plays.steps.mask]
        assert abs(off.mean()) < 0.02
        assert off.std() < 0.1


def test_c3_has_the_mean_that_enumeration_gives():
    """E[A | h, a] = Q(h, a) − V(h): over 40 seeds, every row within five standard errors, whether
    the own value is the run's outcome or continued.
    """
    plays, rerun = played("T2", agents=3, groups=4, rollouts=2)
    exact = truth(plays).values
    for own in (0, 3):
        draws = [c3(plays.steps, replay=rerun, own=own, seed=s).values for s in range(40)]
        last = plays.steps.step == 2  # whose outcome is Q, if nothing is drawn after it
        rows = last if own == 0 else np.ones(len(last), dtype=bool)
        off, error = np.mean(draws, axis=0) - exact, np.std(draws, axis=0) / 40**0.5
        assert np.all(np.abs(off[rows]) < 5 * error[rows])


@pytest.mark.parametrize("agents", [2, 3])
def test_the_aristocrat_utility_has_mean_zero_over_ones_own_acts(agents):
    """Σ_a π(a | h) A(a; others fixed) = 0 exactly, for every agent, whatever the others did; but
    over the joint law E[COMA | h] ≠ 0 where a later agent reads an act with which its own interact,
    and E[seqau | h] = 0.
    """
    game = deal("T17", agents=agents, actions=3, dep=1.0, seed=4)
    plays, chance = every(game, 1)
    steps = plays.steps
    credit = coma(steps, replay=Rerun(plays)).values
    acts = plays.action.reshape(-1, agents)
    index = tuple(acts.T)
    drawn = np.exp(steps.logprob)
    biased = 0.0
    for agent in range(agents):
        rows = steps.agent == agent
        table, policy = np.empty((2, *[3] * agents))
        table[index], policy[index] = credit[rows], drawn[rows]
        np.testing.assert_allclose((table * policy).sum(axis=agent), 0, atol=1e-12)
        for exact, is_zero in ((credit, False), (truth(plays).values, True)):
            mean = np.bincount(plays.state[rows], chance * exact[rows])
            if is_zero:
                np.testing.assert_allclose(mean, 0, atol=1e-12)
            else:
                biased = max(biased, float(np.abs(mean).max()))
    assert biased > 0.01


# ---------------------------------------------------------------------------------------------
# C3


def test_leave_one_out_of_siblings_is_that_of_the_public_code():
    """Node values in, advantages out, to 1e-6."""
    for case in json.loads(GOLDEN.read_text("utf-8"))["cases"]:
        node = np.array([case["node_value"]])
        baseline = leave_one_out(node, np.ones(node.shape, dtype=np.int64))
        np.testing.assert_allclose(baseline[0], case["baseline"], atol=1e-6)
        np.testing.assert_allclose((node - baseline)[0], case["advantage"], atol=1e-6)


@few
@given(arrays(np.float64, (3, 5), elements=st.floats(-9, 9)), st.integers(1, 4))
def test_advantages_of_siblings_sum_to_zero(node, leaves):
    """Over siblings with equal numbers of continuations."""
    off = node - leave_one_out(node, np.full(node.shape, leaves))
    np.testing.assert_allclose(off.sum(axis=1), 0, atol=1e-9)


def test_siblings_that_were_not_run_and_others_that_count_more():
    """Of 1, NaN, 4, 7 with 1, 2, 2, 1 continuations: the first one's siblings are worth
    (2·4 + 7)/3 = 5, the last one's (1 + 2·4)/3 = 3; an only child has none.
    """
    node = np.array([[1, np.nan, 4, 7], [2, np.nan, np.nan, np.nan]])
    found = leave_one_out(node, np.array([[1, 2, 2, 1], [1, 1, 1, 1]]))
    assert found[0].tolist() == [5.0, 4.0, 4.0, 3.0]
    assert np.isnan(found[1, 0])


def test_c3_is_its_own_value_minus_the_siblings_that_the_replay_draws():
    """Recomputed from the very branches, row by row."""
    plays, rerun = played()
    at = places(plays.steps, np.arange(len(plays.steps)))
    drawn = rerun.branch(at, np.full(len(at), RESAMPLE), 3, each=2, seed=5).values
    kept = rerun.branch(at, np.full(len(at), KEEP), 4, seed=5).values
    credit = c3(plays.steps, replay=rerun, alternatives=3, continuations=2, own=4, seed=5)
    close(credit, kept.mean(axis=1) - drawn.mean(axis=1))
    credit = c3(plays.steps, replay=rerun, alternatives=3, continuations=2, seed=5)
    close(credit, plays.steps.outcome - drawn.mean(axis=1))
    np.testing.assert_allclose(credit.parts["stderr"], drawn.std(axis=1, ddof=1) / 3**0.5)


def test_shared_draws_cancel_what_the_act_and_its_siblings_both_meet():
    """The same mean with draws apart, and a fifth more error and over: on XOR of four agents."""
    plays, rerun = played("T5", actions=3, dep=1.0, groups=60)
    exact, error = truth(plays).values, []
    for paired in (True, False):
        off = c3(plays.steps, replay=rerun, alternatives=16, own=4, paired=paired).values - exact
        assert abs(off.mean()) < 4 * off.std() / len(off) ** 0.5
        error.append(off.var())
    assert error[1] > 1.2 * error[0]


def test_variants_of_c3_ask_a_critic():
    """With the exact critic of the game, value_only is Q minus the siblings' Q; value_assisted
    keeps the outcome, and is reward_only at alpha 0.
    """
    plays, rerun = played()
    steps = plays.steps
    run = partial(c3, steps, replay=rerun, alternatives=3)
    at = places(steps, np.arange(len(steps)))
    critic = rerun.branch(at, np.full(len(at), RESAMPLE), 3).critic
    own = action_values(plays.game)[plays.state, plays.action]
    close(run(variant="value_only"), own - critic.mean(axis=1))
    close(run(variant="value_assisted"), steps.outcome - critic.mean(axis=1))
    close(run(variant="value_assisted", alpha=0.0), run().values)
    half = (run().values + run(variant="value_assisted").values) / 2
    close(run(variant="value_assisted", alpha=0.5), half)


def test_whitened_c3_has_mean_zero_and_variance_one():
    """Over the credited rows."""
    plays, rerun = played()
    found = c3(plays.steps, replay=rerun, whiten=True).values
    assert abs(found.mean()) < 1e-12
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)


# ---------------------------------------------------------------------------------------------
# Candidates and trees


def test_at_grpo_compares_the_act_with_candidates_of_its_state():
    """(R − mean)/(std + eps) over R and three drawn outcomes, with the best of them named."""
    plays, rerun = played()
    at = places(plays.steps, np.arange(len(plays.steps)))
    found = rerun.branch(at, np.full(len(at), RESAMPLE), 3)
    node = np.column_stack([plays.steps.outcome, found.values])
    spread = node.std(axis=1, ddof=1)
    expected = (node[:, 0] - node.mean(axis=1)) / (spread + 1e-6)
    credit = at_grpo(plays.steps, replay=rerun)
    close(credit, np.where(spread > 1e-6, expected, 0.0))
    best = np.column_stack([np.full(len(at), -1), found.drawn])[
        np.arange(len(at)), node.argmax(axis=1)
    ]
    assert credit.parts["best"].tolist() == best.tolist()
    plain = at_grpo(plays.steps, replay=rerun, normalize_std=False)
    close(plain, np.where(spread > 1e-6, node[:, 0] - node.mean(axis=1), 0.0))
    close(plain, 3 / 4 * c3(plays.steps, replay=rerun, alternatives=3).values)


def test_treemem_compares_subtrees_at_one_depth():
    """By (group, step) the mean of R and four continuations, less the penalty, standardised."""
    plays, rerun = played()
    steps = plays.steps
    at = places(steps, np.arange(len(steps)))
    kept = rerun.branch(at, np.full(len(at), KEEP), 4).values
    node = np.column_stack([steps.outcome, kept]).mean(axis=1) - 0.5 * steps.n_tokens
    expected = np.empty(len(node))
    for group in range(12):
        for step in range(4):
            own = (steps.group == group) & (steps.step == step)
            spread = node[own].std(ddof=1)
            expected[own] = (node[own] - node[own].mean()) / (spread + 1e-6) * (spread > 1e-6)
    close(treemem(steps, replay=rerun, length_penalty=0.5), expected)


# ---------------------------------------------------------------------------------------------
# Shapley


def shares(plays, credit):
    """(rollouts, agents) credits of plays in which everybody acts once."""
    return credit.values[plays.steps.mask].reshape(plays.steps.n_rollouts, -1)


FORMS = ["exact", "permutation", "antithetic", "kernel", "precedence"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("downstream", ["frozen", "replay", "anew"])
def test_every_sample_is_shared_out_exactly(form, downstream):
    """Σ φ = R − v(∅) in each run, whatever is drawn."""
    plays, rerun = played(noise=0.3)
    options = {"form": form, "downstream": downstream, "samples": 16}
    credit = shapley(plays.steps, replay=rerun, **options)
    whole = credit.parts["everybody"] - credit.parts["nobody"]
    np.testing.assert_allclose(shares(plays, credit).sum(axis=1), whole[::4], atol=1e-12)


def test_one_pair_of_orders_is_exact_for_pairwise_interactions():
    """On T17; one order alone is not."""
    plays, rerun = played("T17")
    exact = truth(plays, "shapley:frozen").values
    pair = shapley(plays.steps, replay=rerun, form="antithetic", samples=2)
    close(pair, exact)
    assert pair.diagnostics["branches"] < 16 * 48
    alone = shapley(plays.steps, replay=rerun, form="permutation", samples=2)
    assert np.abs(alone.values - exact).max() > 0.1


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("glove", [2 / 3, 1 / 6, 1 / 6]),
        ("airport", [1 / 4, 11 / 12, 29 / 12, 77 / 12]),
        ("majority", [2 / 3, 1 / 6, 1 / 6]),
    ],
)
def test_textbook_values_where_all_joined(form, expected):
    """Glove with one left, airport with costs 1, 3, 6, 10, weighted majority [3; 2, 1, 1]."""
    plays = play(deal("T7", form=form), groups=1, rollouts=64)
    credit = shapley(plays.steps, replay=Rerun(plays))
    joined = plays.action.reshape(64, -1).all(axis=1)
    assert joined.any()
    for row in shares(plays, credit)[joined]:
        np.testing.assert_allclose(row, expected, atol=1e-12)


def test_an_order_of_events_leaves_one_order_to_a_chain():
    """Agents that act one after the other can only join so: φ_i is what i adds to those before."""
    plays, rerun = played("T2", agents=3, groups=4)
    steps = plays.steps
    there = np.tril(np.ones((4, 3), dtype=bool), -1)  # nobody, then one more each
    runs = np.repeat(np.arange(16), 4)
    worth = rerun.absent(
        runs, (0, 1, 2), np.tile(there, (16, 1)), 1, downstream="frozen"
    ).values.reshape(16, 4)
    credit = shapley(steps, replay=rerun, form="precedence")
    np.testing.assert_allclose(shares(plays, credit), np.diff(worth, axis=1), atol=1e-12)


def test_an_agent_that_acts_twice_shares_its_value():
    """T16 has one agent: over its m turns everybody gets φ/m, and they sum to R − v(∅)."""
    plays = play(deal("T16", turns=4, seed=5), groups=1, rollouts=40)
    steps = plays.steps
    credit = shapley(steps, replay=Rerun(plays), downstream="replay")
    length = np.bincount(steps.rollout)[steps.rollout]
    assert length.max() > 1
    assert credit.parts["turns"].tolist() == length.tolist()
    whole = credit.parts["everybody"] - credit.parts["nobody"]
    np.testing.assert_allclose(credit.values, whole / length, atol=1e-12)


def test_two_that_both_succeeded():
    """OR: the difference reward of either is 0, so it pays nobody; Shapley gives each a half. AND:
    each is paid 1, which is twice the gain, and Shapley again a half.
    """
    for rule, removal in (("or", 0.0), ("and", 1.0)):
        table = np.array([[0.0, rule == "or"], [rule == "or", 1.0]])
        plays = play(chain(table, np.zeros((2, 2))), groups=1, rollouts=16)
        rerun = Rerun(plays)
        both = plays.action.reshape(-1, 2).all(axis=1)
        assert both.any()
        paid = shares(plays, loo(plays.steps, replay=rerun, downstream="frozen", n=1))[both]
        assert (paid == removal).all()
        assert (shares(plays, shapley(plays.steps, replay=rerun))[both] == 0.5).all()


def test_too_many_agents_to_list():
    """17 agents have 131,072 coalitions: refused, and told to draw orders instead."""
    plays = play(deal("T13", agents=2), groups=1, rollouts=2)
    many = Steps.from_columns(
        rollout=[0] * 17, agent=list(range(17)), outcome=[1.0] * 17, step=list(range(17))
    )
    with pytest.raises(Refused, match=r"17 agents, so 131072 coalitions.*say form='antithetic'"):
        shapley(many, replay=Rerun(plays))


# ---------------------------------------------------------------------------------------------
# Shaped rewards, by hand

WINS = np.array([[0.0, 1.0], [0.0, 1.0]])
"""R(a₁, a₂) of a team whose second agent decides alone."""


def four(table):
    """All four plays of two agents with two acts, once each in one group: 00, 01, 10, 11."""
    plays, _ = every(chain(table, np.zeros((2, 2))), 4)
    steps = plays.steps
    acts = plays.action.reshape(-1, 4, 2)
    group = int(np.flatnonzero((acts @ [2, 1] == [0, 1, 2, 3]).all(axis=1))[0])
    return plays, (steps.group == group), Rerun(plays)


def test_sharp_by_hand():
    """AND of two workers, planner agent 0: outcomes 0, 0, 0, 1.

    Without the second agent R is 0, so its marginal is its run's R, and its reward 1.8 R: 0, 0, 0,
    1.8. The planner's marginal is the mean over its one worker, so its reward is the same. Mean
    .45, standard deviation .9: −.5, −.5, −.5, 1.5.
    """
    plays, own, rerun = four(np.array([[0.0, 0.0], [0.0, 1.0]]))
    credit = sharp(plays.steps, replay=rerun)
    assert credit.parts["shaped"][own].tolist() == np.repeat([0, 0, 0, 1.8], 2).tolist()
    np.testing.assert_allclose(credit.values[own], np.repeat([-0.5, -0.5, -0.5, 1.5], 2), atol=1e-5)
    tool = np.where(plays.steps.agent == 1, 1.0, 0.0)
    with_tool = sharp(plays.steps, replay=rerun, tool=tool).parts["shaped"][own]
    np.testing.assert_allclose(with_tool.reshape(4, 2) - [0, 0.1], [[0] * 2] * 3 + [[1.8] * 2])


def test_a_planner_is_never_charged_for_a_worker():
    """A worker that ruins the run: R(a₁, a₂) = 1 − a₂, marginal R − 1. The worker is charged, the
    planner's mean of max(marginal, 0) is 0.
    """
    plays, own, rerun = four(np.array([[1.0, 0.0], [1.0, 0.0]]))
    marginal = sharp(plays.steps, replay=rerun).parts["marginal"][own].reshape(4, 2)
    assert marginal.tolist() == [[0, 0], [0, -1], [0, 0], [0, -1]]


def test_ccpo_rewards_a_first_agent_that_helped():
    """The second agent alone never wins (R needs the first), so every win was helped: r_first is
    1 + .2 where the team won and −1 elsewhere, r_second ±1.
    """
    plays, own, rerun = four(np.array([[0.0, 0.0], [0.0, 1.0]]))
    credit = ccpo(plays.steps, replay=rerun)
    shaped = credit.parts["shaped"][own].reshape(4, 2)
    assert shaped.tolist() == [[-1, -1], [-1, -1], [-1, -1], [1.2, 1]]
    for column in range(2):
        z = (shaped[:, column] - shaped[:, column].mean()) / (shaped[:, column].std(ddof=1) + 1e-6)
        np.testing.assert_allclose(credit.values[own].reshape(4, 2)[:, column], z, atol=1e-12)


def test_ccpo_charges_a_first_agent_that_hurt():
    """The second agent alone wins in three plays of four; the first one's act spoils one of them:
    R = a₂ unless a₁, in a group 01, 01, 01, 11 of mean solo +1.
    """
    plays, _ = every(chain(np.array([[0.0, 1.0], [0.0, 0.0]]), np.zeros((2, 2))), 4)
    acts = plays.action.reshape(-1, 4, 2) @ [2, 1]
    group = int(np.flatnonzero((acts == [1, 1, 1, 3]).all(axis=1))[0])
    own = plays.steps.group == group
    shaped = ccpo(plays.steps, replay=Rerun(plays)).parts["shaped"][own].reshape(4, 2)
    assert shaped.tolist() == [[1, 1], [1, 1], [1, 1], [-1.2, -1]]


def test_ccpo_of_the_first_version_by_hand():
    """Δ = R − R_solo. Without earlier batches μ = 0 and σ = 1, so the first gets tanh Δ and the
    second half of R + R_solo; with them the moving statistics of both standardise.
    """
    plays, own, rerun = four(np.array([[0.0, 0.0], [0.0, 1.0]]))
    first = ccpo(plays.steps, replay=rerun, version=1, eps=0.0)
    expected = [[0, 0], [0, 0], [0, 0], [np.tanh(1), 0.5]]
    np.testing.assert_allclose(first.values[own].reshape(4, 2), expected, atol=1e-12)
    held = {"delta": (0.5, 0.25, 10), "joint": (0.5, 0.25, 10), "solo": (0.0, 0.0, 10)}
    then = ccpo(plays.steps, replay=rerun, version=1, earlier=held, eps=0.0)
    gate = 1 / (1 + np.exp(-1))  # μ/σ = 1
    assert then.parts["gate"][0] == pytest.approx(gate)
    joint = np.array([-1, -1, -1, 1])
    expected = np.column_stack([np.tanh(joint), gate * joint])
    np.testing.assert_allclose(then.values[own].reshape(4, 2), expected, atol=1e-12)
    n = plays.steps.n_rollouts
    after = then.diagnostics["statistics"]["joint"]
    mean, variance = plays.steps.outcome[::2].mean(), plays.steps.outcome[::2].var()
    assert after == pytest.approx((0.99 * 0.5 + 0.01 * mean, 0.2475 + 0.01 * variance, 10 + n))
    few_seen = dict.fromkeys(held, (9.0, 9.0, 9))
    close(ccpo(plays.steps, replay=rerun, version=1, earlier=few_seen, eps=0.0), first.values)


# ---------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (loo, {"n": 0}, "n is too low: a measured credit takes one branch at least"),
        (coma, {"alternatives": 0}, "alternatives is too low"),
        (c3, {"alternatives": 0}, "alternatives is too low"),
        (c3, {"continuations": 0}, "continuations is too low"),
        (c3, {"own": -1}, "own is too low"),
        (c3, {"variant": "q"}, "variant is 'q'; it is 'reward_only', 'value_only' or"),
        (c3, {"alpha": 2.0}, "alpha is 2.0; it is a share, 0 to 1"),
        (at_grpo, {"candidates": 1}, "candidates is too low"),
        (at_grpo, {"ddof": 2}, "ddof is 2"),
        (treemem, {}, "length_penalty=0.01\\), which its paper does not publish"),
        (shapley, {"form": "quick"}, "form is 'quick'; it is one of exact, permutation"),
        (shapley, {"form": "antithetic", "samples": 3}, "antithetic orders come in pairs"),
        (ccpo, {}, "ccpo compares two roles, and these rows have 0, 1, 2, 3"),
        (ccpo, {"version": 3}, "version is 3; it is 1 or 2"),
        (sharp, {"planner": "boss"}, "planner is 'boss', but column agent holds 0, 1, 2, 3"),
        (sharp, {"tool": [1.0]}, "tool has 1 numbers where the table has 192 rows"),
    ],
)
def test_options_out_of_range_are_named(method, options, says):
    """One sentence, with what would do."""
    plays, rerun = played()
    with pytest.raises(Refused, match=says):
        method(plays.steps, replay=rerun, **options)


def test_a_critic_that_is_not_there():
    """value_only without values of acts, or without the column value."""
    plays, rerun = played()

    class Blind(Rerun):
        def branch(self, *args, **options):
            found = super().branch(*args, **options)
            return replace(found, critic=np.full(found.values.shape, np.nan))

    with pytest.raises(Refused, match="needs a critic, and this replay gives no value of acts"):
        c3(plays.steps, replay=Blind(plays), variant="value_only")
    with pytest.raises(Refused, match="this needs the column value"):
        c3(replace(plays.steps, value=None), replay=rerun, variant="value_only")


def test_ccpo_needs_outcomes_of_two_kinds_and_one_opening():
    """Version 2 maps 0 and 1; .5 is neither. Rollouts that open with different roles are named."""
    plays, rerun = two_agents()
    half = replace(plays.steps, outcome=plays.steps.outcome / 2 + 0.25)
    with pytest.raises(Refused, match="needs outcomes of −1 and"):
        ccpo(half, replay=rerun)
    turned = replace(
        plays.steps, role=np.where(plays.steps.rollout, plays.steps.role, 1 - plays.steps.role)
    )
    with pytest.raises(Refused, match=r"opens with role .* others with another"):
        ccpo(turned, replay=rerun)


def test_the_critic_of_the_game_is_the_value_of_the_table():
    """What `value_only` takes for the own act is V of the next row, R on the last: V is exact."""
    plays, _ = played()
    steps = plays.steps
    follows = np.append(steps.value[1:], 0.0)
    last = steps.step == 3
    own = np.where(last, steps.outcome, follows)
    np.testing.assert_allclose(own, action_values(plays.game)[plays.state, plays.action])
    np.testing.assert_allclose(values(plays.game)[plays.state], steps.value)
