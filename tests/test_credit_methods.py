"""REINFORCE, GAE, GRPO and GiGPO against slow references, their invariances, and known faults."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import reference
from batches import close, few, tables
from counterpoint.credit import (
    METHODS,
    estimate,
    gae,
    gigpo,
    grpo,
    parameters,
    ppo_ratio,
    reinforce,
)
from counterpoint.credit.returns import scan
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

NAN = math.nan


# ---------------------------------------------------------------------------------------------
# Against the references


@few
@given(tables(), st.booleans(), st.sampled_from([0, 1]))
def test_grpo_is_the_loop_over_rollouts(steps, normalize_std, ddof):
    """Every group, mean, deviation and missing value as in the loop."""
    ours = grpo(steps, normalize_std=normalize_std, ddof=ddof).values
    close(ours, reference.grpo(steps, normalize_std, ddof))


@few
@given(
    tables(),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from(["none", "group", "leave_one_out"]),
)
def test_reinforce_is_the_sum_of_what_came_later(steps, gamma, baseline):
    """Returns term by term, and the group's baseline rollout by rollout."""
    ours = reinforce(steps, gamma=gamma, baseline=baseline).values
    close(ours, reference.reinforce(steps, gamma, baseline))


@few
@given(
    tables(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from(["team", "agent"]),
)
def test_gae_is_the_recursion_over_each_actors_turns(steps, gamma, gae_lambda, critic):
    """δ with the rewards and the γ's of the turns in between, for the team and for one agent."""
    ours = gae(steps, gamma=gamma, gae_lambda=gae_lambda, critic=critic)
    close(ours.values, reference.gae(steps, list(steps.value), gamma, gae_lambda, critic))


@few
@given(tables(), st.sampled_from([0.5, 1.0]))
def test_gae_fits_the_mean_return_of_an_anchor(steps, gamma):
    """values='mc' is gae on the mean returns that a loop finds."""
    ours = gae(steps, gamma=gamma, values="mc")
    V = reference.monte_carlo(steps, gamma)
    close(ours.values, reference.gae(steps, V, gamma, 0.95, "team"))


@few
@given(tables(), st.sampled_from([0.0, 0.5, 0.95]), st.booleans(), st.sampled_from([0.0, 0.7, 1.0]))
def test_gigpo_is_the_double_loop(steps, gamma, normalize_std, step_weight):
    """Both parts, all keys, singletons and dead anchors as in the loops."""
    ours = gigpo(steps, gamma=gamma, normalize_std=normalize_std, step_weight=step_weight)
    close(ours.values, reference.gigpo(steps, gamma, step_weight, normalize_std))
    parts = ours.parts
    close(ours.values, parts["episode"] + step_weight * parts["step"])


def test_scan_is_the_loop_over_chunks_too():
    """A_i = x_i + c_i A_{i+1} over 50,000 rows, in rollouts longer than a chunk and shorter."""
    rng = np.random.default_rng(3)
    x, decay = rng.normal(size=50_000), np.full(50_000, 0.999)
    decay[[9, 10, 700, 16_383, 16_384, 49_999]] = 0
    out = np.zeros(50_001)
    for i in range(49_999, -1, -1):
        out[i] = x[i] + decay[i] * out[i + 1]
    np.testing.assert_allclose(scan(x, decay), out[:-1], rtol=0, atol=1e-11)


@few
@given(tables(masks=False))
def test_ratio_and_clip_are_where_the_loss_is_flat(steps):
    """Clipped says exactly where moving ρ either way does not move PPO's loss."""
    credit = ppo_ratio(steps, reinforce(steps), clip_low=0.2, clip_high=0.28)
    for row in np.flatnonzero(credit.credited):
        rho, flat = reference.ratio(
            steps.logprob_new[row], steps.logprob[row], credit.values[row], 0.2, 0.28
        )
        assert credit.parts["ratio"][row] == pytest.approx(rho, abs=1e-12)
        assert credit.parts["clipped"][row] == flat


# ---------------------------------------------------------------------------------------------
# Invariances


@few
@given(tables(unscored=False, masks=False), st.floats(-5, 5))
def test_a_shift_of_all_rewards_changes_no_comparison(steps, shift):
    """The same constant on every rollout's outcome leaves grpo and both parts of gigpo alone."""
    last = steps.order[np.append(np.diff(steps.rollout[steps.order]) != 0, True)]
    reward = steps.reward.copy()
    reward[last] += shift
    columns = {"group": steps.group, "rollout": steps.rollout, "step": steps.step}
    columns |= {"anchor": steps.anchor, "agent": steps.agent}
    moved = Steps.from_columns(reward=reward, **columns)
    plain = Steps.from_columns(reward=steps.reward, **columns)
    for options in ({"normalize_std": True}, {"normalize_std": False}):
        before, after = grpo(plain, **options).values, grpo(moved, **options).values
        np.testing.assert_allclose(after, before, atol=1e-8)
        before = gigpo(plain, gamma=1.0, **options).values
        np.testing.assert_allclose(gigpo(moved, gamma=1.0, **options).values, before, atol=1e-7)


@few
@given(tables(), st.sampled_from([2.0, 10.0, 1000.0]))
def test_a_scale_of_rewards_scales_or_vanishes(steps, scale):
    """Without the deviation credit scales with the rewards; with it, only eps notices."""
    columns = {"group": steps.group, "rollout": steps.rollout, "step": steps.step}
    reward = np.where(np.isnan(steps.outcome), np.nan, steps.reward)
    one = Steps.from_columns(reward=reward, mask=steps.mask, **columns)
    big = Steps.from_columns(reward=reward * scale, mask=steps.mask, **columns)
    plain = {"normalize_std": False, "sigma_floor": 0.0}
    before = grpo(one, **plain).values * scale
    np.testing.assert_allclose(grpo(big, **plain).values, before, atol=1e-9)
    exact = {"eps": 0.0, "sigma_floor": 1e-9}
    before = grpo(one, **exact).values
    np.testing.assert_allclose(grpo(big, **exact).values, before, atol=1e-9)


@few
@given(tables(masks=False))
def test_masked_rows_can_be_put_in_anywhere(steps):
    """A masked row without reward between any two turns changes no credit of any method."""
    n = len(steps)
    judged = {"quality": np.cos(steps.rollout + steps.agent), "depends": [None] * n}

    def twice(column, inserted):
        return np.concatenate([column, inserted])

    padded = Steps.from_columns(
        group=twice(steps.group, steps.group),
        rollout=twice(steps.rollout, steps.rollout),
        step=twice(2 * steps.step, 2 * steps.step + 1),
        agent=twice(steps.agent, steps.agent),
        anchor=twice(steps.anchor, steps.anchor),
        reward=twice(np.where(np.isnan(steps.outcome), NAN, steps.reward), np.full(n, NAN)),
        value=twice(steps.value, np.full(n, 7.0)),
        value_high=twice(steps.value_high, np.full(n, 7.0)),
        segment_start=twice(steps.segment_start, np.zeros(n)),
        mask=twice(steps.mask, np.zeros(n, dtype=bool)),
        **{name: twice(column, column) for name, column in judged.items()},
    )
    plain = Steps.from_columns(
        group=steps.group,
        rollout=steps.rollout,
        step=steps.step,
        agent=steps.agent,
        anchor=steps.anchor,
        reward=np.where(np.isnan(steps.outcome), NAN, steps.reward),
        value=steps.value,
        value_high=steps.value_high,
        segment_start=steps.segment_start,
        **judged,
    )
    for name in [n for n, row in METHODS.items() if row.family == "observational"]:
        given = {"gamma": 0.9, "main": int(steps.agent[0])}
        options = {k: v for k, v in given.items() if k in parameters(name, {})}
        if name == "reinforce_pp" and np.sum(~np.isnan(steps.outcome)) == 1:
            continue
        credit = estimate(name, padded, **options).values
        close(credit[:n], estimate(name, plain, **options).values)
        assert np.isnan(credit[n:]).all()


@few
@given(tables())
def test_lambda_runs_from_delta_to_return(steps):
    """λ = 1 is G − V, λ = 0 is δ, for a team's critic and for an agent's."""
    G = reinforce(steps, gamma=0.9).values
    for critic in ("team", "agent"):
        far = gae(steps, gamma=0.9, gae_lambda=1.0, critic=critic)
        close(far.values, G - steps.value)
        near = gae(steps, gamma=0.9, gae_lambda=0.0, critic=critic)
        close(near.values, near.parts["delta"])


@few
@given(tables(), st.sampled_from([0.0, 0.5, 0.95]))
def test_td_is_a_fixed_point(steps, gae_lambda):
    """With values='td' every anchor's value is the mean of its turns' λ-returns; λ = 1 is 'mc'."""
    credit = gae(steps, gamma=0.9, gae_lambda=gae_lambda, values="td")
    rows = np.flatnonzero(credit.credited)
    for row in rows:
        key = reference.anchor_key(steps, row)
        same = [r for r in rows if reference.anchor_key(steps, r) == key]
        mean = np.mean(credit.parts["return"][same])
        assert mean == pytest.approx(credit.parts["value"][row], abs=1e-9)
    one = {"gamma": 0.9, "gae_lambda": 1.0}
    far = gae(steps, values="td", **one).values
    np.testing.assert_allclose(far, gae(steps, values="mc", **one).values, atol=1e-9)


@few
@given(tables(anchors=1000))
def test_gigpo_without_repeats_is_grpo(steps):
    """When no state comes back there is nothing to compare but the rollouts: exactly grpo."""
    alone = Steps.from_columns(
        group=steps.group,
        rollout=steps.rollout,
        step=steps.step,
        reward=np.where(np.isnan(steps.outcome), NAN, steps.reward),
        mask=steps.mask,
        anchor=np.arange(len(steps)),
    )
    assert np.array_equal(gigpo(alone).values, grpo(alone).values, equal_nan=True)


# ---------------------------------------------------------------------------------------------
# Values by hand


def one_row_each(reward, group=None, **options) -> Credit:
    n = len(reward)
    return grpo(
        Steps.from_columns(group=group or ["g"] * n, rollout=range(n), reward=reward), **options
    )


def test_rollouts_are_compared_within_their_task():
    """Rewards 1, 0, 1, 0 of one task: mean .5, σ √(1/3), so ±.5/.57735 = ±.866."""
    credit = one_row_each([1, 0, 1, 0])
    np.testing.assert_allclose(credit.values, [0.866024, -0.866024, 0.866024, -0.866024], atol=1e-6)
    assert credit.diagnostics["singletons"] == 0


def test_tiny_but_real_spread_is_kept_and_alike():
    """Rewards 1 and 1.00001 have σ 7.07e-6: ±5e-6 / (7.07e-6 + 1e-6) = ±.6195, at any level."""
    credit = one_row_each([1.0, 1.00001, 2.0, 2.00001], ["a", "a", "b", "b"])
    np.testing.assert_allclose(credit.values, [-0.6195, 0.6195, -0.6195, 0.6195], atol=1e-4)
    np.testing.assert_allclose(credit.values[:2], credit.values[2:], atol=1e-9)


def test_equal_rewards_teach_nothing():
    """Three times 0.1, whose mean is not 0.1 in floats, gives exactly 0, and is flagged."""
    for options in ({}, {"normalize_std": False}, {"unbias": True}, {"ddof": 0}):
        credit = one_row_each([0.1, 0.1, 0.1], **options)
        assert credit.values.tolist() == [0, 0, 0]
        assert credit.diagnostics["groups_without_signal"] == 1
        assert credit.diagnostics["effective_sample_size"] == 0


def test_a_batch_scale_still_flags_a_group_without_spread():
    """[1, 1] and [1, 0] over the σ .5 of all four: 0, 0 and ±.5/.5, one group without signal."""
    credit = one_row_each([1, 1, 1, 0], ["a", "a", "b", "b"], normalize_std="batch", eps=0.0)
    np.testing.assert_allclose(credit.values, [0, 0, 1, -1], atol=1e-12)
    assert credit.diagnostics["groups_without_signal"] == 1
    assert credit.diagnostics["effective_sample_size"] == 2


def test_unbias_and_weight_change_the_mean_as_stated():
    """Outcomes 1 and 0 in 1 and 3 turns: mean .5 by rollouts, .25 by turns; n/(n − 1) is 2."""
    steps = Steps.from_columns(rollout=[0, 1, 1, 1], reward=[1, 0, 0, 0])
    plain = {"normalize_std": False}
    assert grpo(steps, **plain).values.tolist() == [0.5, -0.5, -0.5, -0.5]
    assert grpo(steps, unbias=True, **plain).values.tolist() == [1, -1, -1, -1]
    by_turn = grpo(steps, weight="step", **plain)
    assert by_turn.values.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert by_turn.parts["n"].tolist() == [4] * 4
    assert by_turn.diagnostics["effective_sample_size"] == 2


def test_missing_is_not_zero():
    """Of rewards 1 and missing the second leaves the statistics, the first is a group of one."""
    credit = one_row_each([1, None])
    np.testing.assert_array_equal(credit.values, [0, NAN])
    assert credit.diagnostics["singletons"] == credit.diagnostics["unscored"] == 1
    assert one_row_each([1, None], singleton="raw").values[0] == 1
    with pytest.raises(Refused, match="group 'g' has one scored rollout"):
        one_row_each([1, None], singleton="error")
    assert one_row_each([1, None, 0], normalize_std=False).values[::2].tolist() == [0.5, -0.5]


def test_a_masked_rollout_leaves_its_group():
    """[1, 1, 0, 0] with the second masked: mean 1/3, so 2/3 and −1/3; divided by σ .577."""
    steps = Steps.from_columns(rollout=range(4), reward=[1, 1, 0, 0], mask=[1, 0, 1, 1])
    plain = grpo(steps, normalize_std=False).values
    np.testing.assert_allclose(plain, [2 / 3, NAN, -1 / 3, -1 / 3], atol=1e-12)
    np.testing.assert_allclose(grpo(steps).values, [1.155, NAN, -0.577, -0.577], atol=1e-3)


def test_a_masked_position_takes_no_discount():
    """Rewards 0, 0, 1 with mask 1, 0, 1 and γ .5: the first turn is one trainable turn away."""
    steps = Steps.from_columns(rollout=[0, 0, 0], reward=[0, 0, 1], mask=[1, 0, 1])
    np.testing.assert_array_equal(reinforce(steps, gamma=0.5).values, [0.5, NAN, 1])


def test_a_terminal_reward_on_padding_reaches_the_last_turn():
    """Mask 1, 1, 0, 0 and the reward at the end: γ 0 leaves it on the last trainable turn."""
    steps = Steps.from_columns(rollout=[0] * 4, reward=[0, 0, 0, 1], mask=[1, 1, 0, 0])
    np.testing.assert_array_equal(reinforce(steps, gamma=0.0).values, [0, 1, NAN, NAN])
    dropped = reinforce(steps, masked_reward="drop").values
    np.testing.assert_array_equal(dropped, [0, 0, NAN, NAN])
    with pytest.raises(Refused, match="row 3 of rollout 0: a reward on a masked row;"):
        reinforce(steps, masked_reward="error")


def test_a_masked_reward_before_any_turn_has_no_place():
    """A reward on a masked first row is refused by name, unless nothing of the rollout trains."""
    steps = Steps.from_columns(rollout=["r", "r"], reward=[1, 0], mask=[0, 1])
    with pytest.raises(Refused, match=r"row 0 of rollout 'r'.*no trainable row before it"):
        reinforce(steps)
    untrained = Steps.from_columns(rollout=["r", "r"], reward=[1, 0], mask=[0, 0])
    assert np.isnan(reinforce(untrained).values).all()


def test_outcomes_alone_are_terminal_rewards():
    """Given outcomes and no rewards, each rollout earned its outcome at its end."""
    steps = Steps.from_columns(rollout=[0, 0, 1, 1], outcome=[1, 1, 0, 0])
    assert reinforce(steps, gamma=0.5).values.tolist() == [0.5, 1, 0, 0]
    per_agent = Steps.from_columns(rollout=[0, 0], agent=["a", "b"], outcome=[1, 0])
    with pytest.raises(Refused, match="outcomes per agent but no reward"):
        reinforce(per_agent)


def test_group_and_leave_one_out_baselines():
    """Outcomes 1, 0, 0: the mean is 1/3; the others' means are 0, 1/2, 1/2."""
    steps = Steps.from_columns(rollout=[0, 0, 1, 2], reward=[0, 1, 0, 0])
    group = reinforce(steps, baseline="group").values
    np.testing.assert_allclose(group, [2 / 3, 2 / 3, -1 / 3, -1 / 3], atol=1e-12)
    others = reinforce(steps, baseline="leave_one_out").values
    np.testing.assert_allclose(others, [1, 1, -1 / 2, -1 / 2], atol=1e-12)
    assert reinforce(steps, baseline="constant", constant=0.25).values[0] == 0.75


def test_an_agents_critic_counts_the_turns_in_between():
    """Agent a acts at 0 and 2, b at 1 with reward 1, γ .5: δ₀ = .5·1 + .25·V₂ − V₀."""
    steps = Steps.from_columns(
        rollout=[0] * 3, agent=["a", "b", "a"], reward=[0, 1, 0], value=[0.1, 0.2, 0.4]
    )
    credit = gae(steps, gamma=0.5, critic="agent", gae_lambda=0.0)
    # a: .5 + .25·.4 − .1 = .5; b: 1 − .2 = .8; a at the end: 0 − .4
    np.testing.assert_allclose(credit.values, [0.5, 0.8, -0.4], atol=1e-12)
    assert credit.parts["next_value"].tolist() == [0.4, 0, 0]
    assert credit.estimand == "anchor"


def test_a_truncated_rollout_goes_on_only_when_asked():
    """A masked last row with value 2 is what was still expected: δ = 0 + .5·2 − 1 = 0, not −1."""
    steps = Steps.from_columns(rollout=[0, 0], reward=[0, 0], value=[1, 2], mask=[1, 0])
    assert gae(steps, gamma=0.5).values[0] == -1
    assert gae(steps, gamma=0.5, bootstrap=True).values[0] == 0
    with pytest.raises(Refused, match="bootstrap goes with"):
        gae(steps, values="mc", bootstrap=True)


def test_a_given_step_return_is_never_discounted_again():
    """With step_return the γ of gigpo and reinforce has no part."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1, 1],
        reward=[0, 1, 0, 0],
        step_return=[0.9, 1, 0, 0],
        anchor=["s", "t", "s", "t"],
    )
    assert reinforce(steps, gamma=0.1).values.tolist() == [0.9, 1, 0, 0]
    assert gigpo(steps, gamma=0.1, normalize_std=False).parts["step"].tolist() == [
        0.45,
        0.5,
        -0.45,
        -0.5,
    ]


def test_gigpo_splits_anchors_by_who_acted():
    """One observation by two agents is two anchors; the cost of that split is counted."""
    steps = Steps.from_columns(
        rollout=[0, 1, 2], agent=["a", "a", "b"], reward=[1, 0, 0], anchor=["s"] * 3
    )
    credit = gigpo(steps, normalize_std=False)
    assert credit.parts["step"].tolist() == [0.5, -0.5, 0]
    assert credit.parts["anchor_size"].tolist() == [2, 2, 1]
    assert credit.diagnostics["key_cost"] == {"agent": 1, "role": 0}
    assert gigpo(steps, key=("anchor",)).parts["anchor_size"].tolist() == [3, 3, 3]
    assert credit.diagnostics["effective_sample_size_step"] == 1


def test_a_state_seen_twice_in_one_rollout_counts_but_is_no_second_rollout():
    """Revisits enter the mean; the effective sample counts anchors with two rollouts."""
    steps = Steps.from_columns(rollout=[0, 0], reward=[0, 1], anchor=["s", "s"])
    credit = gigpo(steps, gamma=0.5, normalize_std=False)
    assert credit.parts["step"].tolist() == [-0.25, 0.25]
    assert credit.diagnostics["effective_sample_size_step"] == 0
    assert credit.diagnostics["anchor_groups"] == 1


def test_aliased_anchors_are_reported():
    """Of two repeated anchors one hides two states: half of them alias; a lone one counts not."""
    steps = Steps.from_columns(
        rollout=[0, 1, 0, 1, 0],
        step=[0, 0, 1, 1, 2],
        reward=[0, 0, 1, 0, 0],
        anchor=["s", "s", "t", "t", "u"],
        state_digest=["1", "2", "3", "3", "4"],
    )
    assert gigpo(steps).diagnostics["aliased_anchors"] == 0.5


def test_ratio_is_absent_without_both_logprobs():
    """Without logprob_new nothing stands in for the ratio, least of all 1."""
    steps = Steps.from_columns(rollout=[0, 1], reward=[1, 0], logprob=[-1, -1])
    credit = ppo_ratio(steps, grpo(steps))
    assert "ratio" not in credit.parts
    assert credit.diagnostics["ratio"] == "not available"
    some = Steps.from_columns(
        rollout=[0, 1], reward=[1, 0], logprob=[-1, None], logprob_new=[-0.5, -1]
    )
    credit = ppo_ratio(some, grpo(some))
    np.testing.assert_allclose(credit.parts["ratio"], [math.exp(0.5), NAN])
    np.testing.assert_array_equal(credit.parts["clipped"], [1, NAN])
    assert credit.diagnostics["clip_fraction"] == 1


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("reinforce", {"baseline": "mean"}, "baseline is 'mean'"),
        ("reinforce", {"gamma": 1.5}, "gamma is 1.5"),
        ("reinforce", {"gamma": "x"}, "gamma is 'x'; it is a number"),
        ("reinforce", {"weight": "turn", "baseline": "group"}, "weight is 'turn'"),
        ("reinforce", {"masked_reward": "next"}, "masked_reward is 'next'"),
        ("grpo", {"ddof": 2}, "ddof is 2"),
        ("grpo", {"normalize_std": "task"}, "normalize_std is 'task'"),
        ("grpo", {"eps": -1.0}, "eps"),
        ("grpo", {"singleton": "one"}, "singleton is 'one'"),
        ("gae", {"values": "true"}, "values is 'true'"),
        ("gae", {"critic": "role"}, "critic is 'role'"),
        ("gae", {"gae_lambda": -0.1}, "gae_lambda is -0.1"),
        ("gigpo", {"similarity": 1.5}, "similarity is 1.5"),
        ("gigpo", {"key": ["agent"]}, "key is agent"),
        ("gigpo", {"order": "random"}, "order is 'random'"),
        ("gigpo", {"step_weight": NAN}, "step_weight is nan"),
        ("gigpo", {"normalize": True}, "gigpo has no option 'normalize'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, options, says):
    """The sentence names the option and what it was, through `estimate` and in a direct call."""
    steps = Steps.from_columns(
        rollout=[0, 1], reward=[1, 0], value=[0, 0], anchor=["long text", "long test"]
    )
    if "order" in options:
        options |= {"similarity": 0.9}
    with pytest.raises(Refused, match=says):
        estimate(name, steps, **options)
    direct = {"reinforce": reinforce, "grpo": grpo, "gae": gae, "gigpo": gigpo}[name]
    if says.endswith("a number") or "no option" in says:
        return
    with pytest.raises(Refused, match=says):
        direct(steps, **options)


def test_missing_columns_are_named_with_the_way_out():
    """No values, no anchors, a trainable row without a value: each says which column to give."""
    steps = Steps.from_columns(rollout=[0, 1], reward=[1, 0])
    with pytest.raises(Refused, match=r"column value.*values='mc'"):
        gae(steps)
    with pytest.raises(Refused, match="column anchor"):
        gigpo(steps)
    holed = Steps.from_columns(rollout=[0, 1], reward=[1, 0], value=[0.5, None])
    with pytest.raises(Refused, match="row 1 is trainable and has no value"):
        gae(holed)
    with pytest.raises(Refused, match="two credited turns"):
        gae(Steps.from_columns(rollout=[0], reward=[1], value=[0]), whiten=True)


def test_no_rows_give_no_credit():
    """Every method returns an empty credit for an empty table."""
    columns = ("rollout", "reward", "value", "anchor", "value_high", "segment_start")
    columns += ("quality", "depends")
    empty = Steps.from_columns(**{column: [] for column in columns})
    for name in [n for n, row in METHODS.items() if row.family == "observational"]:
        credit = estimate(name, empty)
        assert len(credit) == 0
        assert credit.diagnostics["effective_sample_size"] == 0
