"""The other group-relative methods: against slow references, by hand, and their identities."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import reference
from batches import close, few, tables
from counterpoint.credit import (
    dr_mas,
    estimate,
    fold_grpo,
    gigpo,
    grpo,
    grpo_process,
    m_grpo,
    magrpo,
    reinforce,
    reinforce_pp,
    rloo,
)
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

NAN = math.nan
gammas = st.sampled_from([0.0, 0.5, 0.9, 1.0])
orders = st.sampled_from(["normalize_then_sum", "sum_then_normalize"])

# ---------------------------------------------------------------------------------------------
# Against the references


@few
@given(tables())
def test_rloo_lists_the_others(steps):
    """The mean of the other scored rollouts, taken one by one."""
    close(rloo(steps).values, reference.rloo(steps))


@few
@given(tables(), gammas, st.sampled_from([None, "group"]))
def test_reinforce_pp_whitens_what_it_lists(steps, gamma, baseline):
    """Returns, or outcomes less the group's mean, less the batch's mean, over its deviation."""
    credited = int(np.sum(steps.mask & ~np.isnan(steps.outcome)))
    if credited == 1:
        with pytest.raises(Refused, match="two credited turns or more"):
            reinforce_pp(steps, gamma=gamma, baseline=baseline)
    elif credited:
        ours = reinforce_pp(steps, gamma=gamma, baseline=baseline)
        np.testing.assert_allclose(
            ours.values, reference.reinforce_pp(steps, gamma, baseline), rtol=0, atol=1e-11
        )
        parts = ours.parts
        close(ours.values * parts["batch_std"] + parts["batch_mean"], parts["x"])


@few
@given(tables(), orders, st.booleans(), st.sampled_from([0, 1]))
def test_grpo_process_pools_the_turns_of_a_group(steps, order, normalize_std, ddof):
    """Both orders, masked rewards moved, groups of one left out."""
    ours = grpo_process(steps, order=order, normalize_std=normalize_std, ddof=ddof)
    close(ours.values, reference.grpo_process(steps, order, normalize_std, ddof))


@few
@given(tables(), gammas)
def test_magrpo_compares_the_rollouts_at_a_joint_turn(steps, gamma):
    """One return per environment step, each rollout once however many agents acted in it."""
    close(magrpo(steps, gamma=gamma).values, reference.magrpo(steps, gamma))


@few
@given(tables(), st.sampled_from(["agent", "role"]), st.sampled_from([0, 1]))
def test_dr_mas_compares_the_calls_of_an_agent(steps, by, ddof):
    """z-scores over the rows of equal group and agent."""
    close(dr_mas(steps, by=by, ddof=ddof).values, reference.dr_mas(steps, by, ddof))


@few
@given(tables(), st.sampled_from(["agent", "role"]))
def test_m_grpo_nests_its_means(steps, by):
    """Mean over rollouts of the mean over calls; every call of a rollout shares its weight."""
    ours = m_grpo(steps, by=by, main=steps.names[by][0])
    values, weights = reference.m_grpo(steps, by, 0)
    close(ours.values, values)
    close(ours.parts["loss_weight"], weights)


@few
@given(tables(), st.sampled_from(["paper", "code"]), st.booleans(), st.booleans())
def test_fold_grpo_clips_or_replaces(steps, form, unit_sigma, given_flags):
    """The two forms, with flags from `valid` or as given."""
    unit_sigma = unit_sigma and form == "paper"
    process = None
    if given_flags:
        process = np.random.default_rng(len(steps)).choice([0.0, 0.2, -0.2, -1.0], len(steps))
    ours = fold_grpo(steps, form=form, process=process, unit_sigma=unit_sigma)
    flags = np.where(steps.valid, 0.0, -1.0) if process is None else process
    close(ours.values, reference.fold_grpo(steps, form, list(flags), unit_sigma))


@few
@given(tables(), gammas, st.booleans())
def test_gigpo_by_environment_step_is_the_double_loop(steps, gamma, normalize_std):
    """Rows of one environment step share one return, on a clock of its own."""
    ours = gigpo(steps, gamma=gamma, normalize_std=normalize_std, step_unit="env_step")
    close(ours.values, reference.gigpo(steps, gamma, 1.0, normalize_std, step_unit="env_step"))


# ---------------------------------------------------------------------------------------------
# Identities


@few
@given(tables(masks=False))
def test_rloo_is_reinforce_against_the_others_and_grpo_times_n_over_n_less_1(steps):
    """One reward at the end and γ 1: the return is the outcome, on every turn."""
    columns = {"group": steps.group, "rollout": steps.rollout, "step": steps.step}
    terminal = Steps.from_columns(outcome=steps.outcome, **columns)
    ours = rloo(terminal).values
    close(ours, reinforce(terminal, baseline="leave_one_out").values)
    close(ours, grpo(terminal, normalize_std=False, unbias=True).values)


@few
@given(tables(unscored=False, masks=False))
def test_rloo_sums_to_nothing_over_a_group(steps):
    """Σ_i (R_i − mean of the others) = 0, each rollout once."""
    values = rloo(steps).values[steps.head]
    np.testing.assert_allclose(np.bincount(steps.group[steps.head], values), 0, atol=1e-12)


@few
@given(st.integers(0, 2**32 - 1))
def test_dr_mas_is_grpo_where_every_agent_acts_once(seed):
    """Two agents once each, one outcome per rollout: the same group, the same number."""
    rng = np.random.default_rng(seed)
    outcome = np.repeat(rng.integers(0, 3, 8), 2)
    steps = Steps.from_columns(
        group=np.repeat(["a", "b"], 8),
        rollout=np.repeat(np.arange(8), 2),
        agent=["planner", "worker"] * 8,
        outcome=outcome,
    )
    close(dr_mas(steps).values, grpo(steps).values)


@few
@given(tables())
def test_m_grpo_of_one_agent_is_grpo(steps):
    """A team of one has no calls: GRPO with the population's deviation."""
    alone = replace(
        steps, agent=steps.agent * 0, role=steps.role * 0, names=steps.names | {"role": ("r",)}
    )
    close(m_grpo(alone).values, grpo(alone, ddof=0).values)


@few
@given(tables(unscored=False))
def test_m_grpo_weighs_every_group_as_one(steps):
    """The loss weights of one group's calls of one agent sum to 1, call by call."""
    by = "role"
    credit = m_grpo(steps, main=steps.names[by][0])
    calls = reference.calls_of(steps, by, 0)
    sums = {}
    for own in calls.values():
        for key, rows in own.items():
            cell = (int(steps.group[rows[0]]), key[0])
            weight = float(credit.parts["loss_weight"][rows[0]])
            sums[cell] = sums.get(cell, 0.0) + weight
    close(list(sums.values()), np.ones(len(sums)))


@few
@given(tables())
def test_methods_with_nothing_special_to_say_are_grpo(steps):
    """FoldGRPO without penalties (outcomes within 0 to 1), MAGRPO of one turn with γ 1."""
    bounded = replace(steps, outcome=np.clip(steps.outcome, 0, 1))
    close(fold_grpo(bounded, process=np.zeros(len(steps))).values, grpo(bounded).values)
    close(fold_grpo(steps, form="code", process=np.zeros(len(steps))).values, grpo(steps).values)
    single = Steps.from_columns(
        group=steps.group[steps.head], rollout=steps.head, reward=steps.outcome[steps.head]
    )
    close(magrpo(single).values, grpo(single, normalize_std=False).values)


# ---------------------------------------------------------------------------------------------
# Values by hand


def test_rloo_by_hand():
    """1, 0, 0, 0: the others' means are 0 and 1/3; 4/3·(1 − 1/4) = 1."""
    steps = Steps.from_columns(rollout=range(4), reward=[1, 0, 0, 0])
    credit = rloo(steps)
    np.testing.assert_allclose(credit.values, [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-12)
    np.testing.assert_allclose(credit.parts["baseline"], [0, 1 / 3, 1 / 3, 1 / 3], atol=1e-12)
    dead = rloo(Steps.from_columns(rollout=range(3), reward=[0.1] * 3))
    assert dead.values.tolist() == [0, 0, 0]
    assert dead.diagnostics["groups_without_signal"] == 1


def test_a_rollout_is_left_out_with_all_its_agents():
    """Agents with outcomes 3 and 1 in one rollout, 0 and 0 in the other: baselines are 0 and 2."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1, 1], agent=["a", "b"] * 2, outcome=[3, 1, 0, 0], reward=[3, 1, 0, 0]
    )
    assert rloo(steps).values.tolist() == [3, 1, -2, -2]
    others = reinforce(steps, gamma=0.0, baseline="leave_one_out")
    assert others.parts["baseline"].tolist() == [0, 0, 2, 2]
    one = Steps.from_columns(rollout=[0, 0], agent=["a", "b"], outcome=[3, 1])
    assert rloo(one).values.tolist() == [0, 0]
    assert rloo(one, singleton="raw").values.tolist() == [3, 1]


def test_reinforce_pp_by_hand():
    """Returns 2, 1, 0 of two rollouts: mean 1, deviation 1; alike everywhere: 0."""
    steps = Steps.from_columns(rollout=[0, 0, 1], reward=[1, 1, 0])
    np.testing.assert_allclose(reinforce_pp(steps).values, [1, 0, -1], atol=1e-8)
    # the group's mean is 1: 1, 1, −1; mean 1/3, deviation √(4/3)
    by_group = reinforce_pp(steps, baseline="group").values
    np.testing.assert_allclose(by_group, np.array([2, 2, -4]) / 3 / math.sqrt(4 / 3), atol=1e-7)
    flat = reinforce_pp(Steps.from_columns(rollout=range(3), reward=[0.1] * 3))
    assert flat.values.tolist() == [0, 0, 0]
    with pytest.raises(Refused, match="two credited turns or more, here is one"):
        reinforce_pp(Steps.from_columns(rollout=[0], reward=[1]))


def test_process_supervision_in_both_orders():
    """[[1,0,1],[0,0],[1]]: mean and σ (by n) are .5, so r̃ is ±1 and sums onward.

    Summed first: 2, 1, 1; 0, 0; 1 with mean 5/6 and variance (7/6² + 3·1/6² + 2·5/6²)/6 = 17/36.
    """
    steps = Steps.from_columns(rollout=[0, 0, 0, 1, 1, 2], reward=[1, 0, 1, 0, 0, 1])
    exact = {"ddof": 0, "eps": 0.0}
    paper = grpo_process(steps, **exact)
    assert paper.values.tolist() == [1, 0, 1, -2, -1, 1]
    assert paper.parts["normalized"].tolist() == [1, -1, 1, -1, -1, 1]
    summed = grpo_process(steps, order="sum_then_normalize", **exact).values
    np.testing.assert_allclose(summed * math.sqrt(17), [7, 1, 1, -5, -5, 1], atol=1e-12)


def test_magrpo_by_hand():
    """Two agents act at once: both get their joint turn's return less the mean at that turn.

    γ .5: returns 1 + .5·1 = 1.5 and 1 in the first rollout, 0 and 0 in the second.
    """
    steps = Steps.from_columns(
        rollout=[0] * 4 + [1] * 4,
        agent=["a", "b"] * 4,
        env_step=[0, 0, 1, 1] * 2,
        reward=[1, 0, 0, 1, 0, 0, 0, 0],
    )
    credit = magrpo(steps, gamma=0.5)
    assert credit.parts["G"].tolist() == [1.5, 1.5, 1, 1, 0, 0, 0, 0]
    assert credit.values.tolist() == [0.75, 0.75, 0.5, 0.5, -0.75, -0.75, -0.5, -0.5]
    assert credit.parts["n"].tolist() == [2] * 8


def test_dr_mas_counts_calls_and_compares_by_role_where_ids_differ():
    """An agent called twice counts twice; ids that differ per rollout leave singletons by agent."""
    steps = Steps.from_columns(rollout=[0, 0, 1], agent=["a", "a", "a"], outcome=[1, 1, 0])
    # three calls 1, 1, 0: mean 2/3, deviation √(1/3)
    np.testing.assert_allclose(
        dr_mas(steps).values, np.array([1, 1, -2]) / 3 / math.sqrt(1 / 3), atol=1e-5
    )
    assert dr_mas(steps).parts["n"].tolist() == [3, 3, 3]
    assert dr_mas(steps).diagnostics["effective_sample_size"] == 2
    named = Steps.from_columns(
        rollout=range(4),
        agent=["solver_0", "solver_1", "solver_2", "solver_3"],
        role=["solver"] * 4,
        reward=[1, 0, 1, 0],
    )
    alone = dr_mas(named)
    assert alone.values.tolist() == [0, 0, 0, 0]
    assert alone.diagnostics["singletons"] == 4
    assert dr_mas(named, singleton="raw").values.tolist() == [1, 0, 1, 0]
    by_role = dr_mas(named, by="role")
    np.testing.assert_allclose(by_role.values, [0.866, -0.866, 0.866, -0.866], atol=1e-4)
    assert by_role.parts["n"].tolist() == [4, 4, 4, 4]


def calling() -> Steps:
    """A planner that calls a searcher twice in one rollout, once in the next, never in the last.

    The searchers of the first rollout are told apart and got 1 and 0, that of the second got 1.
    """
    return Steps.from_columns(
        rollout=[0] * 5 + [1] * 3 + [2],
        agent=["planner", "s1", "s1", "planner", "s2", "planner", "s3", "planner", "planner"],
        role=["searcher" if row in (1, 2, 4, 6) else "planner" for row in range(9)],
        outcome=[1, 1, 1, 1, 0, 0, 1, 0, 0],
    )


def test_m_grpo_by_hand():
    """Main: 1, 0, 0. Sub: means ½ and 1 of the two rollouts that call, so μ = ¾.

    The three calls weigh ¼, ¼, ½: σ² = ¼·1/16 + ¼·9/16 + ½·1/16 = 3/16.
    """
    credit = m_grpo(calling(), eps=0.0)
    main = np.array([1, 1, -0.5, -0.5, -0.5]) * math.sqrt(2)  # (R − 1/3) / √(2/9)
    sub = np.array([0.25, 0.25, -0.75, 0.25]) / math.sqrt(3 / 16)
    np.testing.assert_allclose(credit.values[[0, 3, 5, 7, 8]], main, atol=1e-12)
    np.testing.assert_allclose(credit.values[[1, 2, 4, 6]], sub, atol=1e-12)
    assert credit.parts["loss_weight"][[1, 2, 4, 6]].tolist() == [0.25, 0.25, 0.25, 0.5]
    assert credit.parts["calls"][[1, 4, 6]].tolist() == [2, 2, 1]
    np.testing.assert_allclose(credit.parts["loss_weight"][[0, 3, 5, 8]], 1 / 3)


def test_m_grpo_sampled_brings_every_rollout_to_one_number_of_calls():
    """With d = 1 one of the two calls is dropped, with d = 2 the single call counts twice."""
    one = m_grpo(calling(), form="sampled", calls=1)
    weight = one.parts["loss_weight"][[1, 4, 6]]
    assert sorted(weight.tolist()) == [0, 0.5, 0.5]
    two = m_grpo(calling(), form="sampled", eps=0.0)
    np.testing.assert_allclose(two.values, m_grpo(calling(), eps=0.0).values)
    three = m_grpo(calling(), form="sampled", calls=3).parts["loss_weight"]
    assert sorted(three[[1, 4]].tolist()) == [1 / 6, 2 / 6]
    assert three[6] == 0.5


def test_the_sampled_mean_is_on_average_the_closed_one():
    """E[μ_sampled] = μ = ¾: with d = 1 it is ½ or 1, each half of the time."""
    steps = calling()
    seeds = range(400)
    found = [m_grpo(steps, form="sampled", calls=1, seed=s).parts["mean"][1] for s in seeds]
    assert set(found) == {0.5, 1.0}
    assert np.mean(found) == pytest.approx(0.75, abs=3 * 0.25 / 20)


def test_sampled_draws_belong_to_the_rollout_not_to_the_row():
    """Rows in another order, and labels met in another order, leave every draw where it was."""
    steps = calling()
    order = [8, 4, 2, 7, 1, 3, 0, 6, 5]
    columns = ("rollout", "agent", "role")
    moved = Steps.from_columns(
        **{c: [steps.label(c, row) for row in order] for c in columns},
        step=steps.step[order],
        outcome=steps.outcome[order],
    )
    for seed in range(5):
        options = {"form": "sampled", "calls": 1, "seed": seed}
        close(m_grpo(moved, **options).values, m_grpo(steps, **options).values[order])


def test_the_main_agent_is_named_or_opens_every_rollout():
    """Rollouts that open with different roles are refused by row, unless main names one."""
    steps = Steps.from_columns(rollout=[0, 0, 1], role=["p", "s", "s"], outcome=[1, 1, 0])
    with pytest.raises(Refused, match="row 2: rollout 1 opens with role 's', others with 'p'"):
        m_grpo(steps)
    assert np.isfinite(m_grpo(steps, main="p").values).all()
    with pytest.raises(Refused, match="main is 'q', but column role holds 'p', 's'"):
        m_grpo(steps, main="q")


def test_fold_grpo_by_hand():
    """Outcomes 1, 1, 0, a penalty in the first and the last: only success has something to lose.

    mean 2/3, σ √(1/3): 1 → .577, 1 − .2 → .231, 0 − 1 clipped to 0 → −1.155.
    """
    steps = Steps.from_columns(rollout=[0, 0, 1, 2], outcome=[1, 1, 1, 0])
    credit = fold_grpo(steps, process=[0, -0.2, 0, -1])
    np.testing.assert_allclose(
        credit.values, np.array([1 / 3, 2 / 15, 1 / 3, -2 / 3]) / math.sqrt(1 / 3), atol=1e-5
    )
    assert credit.diagnostics["flagged"] == 2
    flags = fold_grpo(steps, process=[0, -1, 1, 1], form="code")
    lone, most = -2 / 3 / math.sqrt(1 / 3), 1 / 3 / math.sqrt(1 / 3)
    np.testing.assert_allclose(flags.values, [most, lone, most, most], atol=1e-5)


def test_fold_grpo_in_a_group_of_successes():
    """Dead by default; with σ := 1 the penalties stay; the code's flags are −1 and +1 there."""
    steps = Steps.from_columns(rollout=[0, 0, 1], outcome=[1, 1, 1], valid=[1, 0, 1])
    assert fold_grpo(steps).values.tolist() == [0, 0, 0]
    assert fold_grpo(steps, unit_sigma=True).values.tolist() == [0, -1, 0]
    assert fold_grpo(steps, form="code").values.tolist() == [0, -1, 0]
    assert fold_grpo(steps, form="code", process=[1, 0, 0]).values.tolist() == [1, 0, 0]


def test_fold_grpo_says_what_it_clipped():
    """An outcome of 2 counts as 1, and is counted."""
    steps = Steps.from_columns(rollout=[0, 1], outcome=[2, 0])
    assert fold_grpo(steps).diagnostics["outcomes_clipped"] == 1
    assert fold_grpo(steps, form="code").diagnostics["outcomes_clipped"] == 0


def test_an_invalid_turn_pays_for_itself_alone():
    """A penalty of .1 is taken off the row's outcome and return, and off no other row's."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1, 1], reward=[0, 1, 0, 0], valid=[1, 0, 1, 1], anchor=["s", "t"] * 2
    )
    credit = gigpo(steps, gamma=1.0, normalize_std=False, invalid_penalty=0.1)
    np.testing.assert_allclose(credit.parts["episode"], [0.5, 0.4, -0.5, -0.5], atol=1e-12)
    np.testing.assert_allclose(credit.parts["step_return"], [1, 0.9, 0, 0], atol=1e-12)
    np.testing.assert_allclose(credit.parts["step"], [0.5, 0.45, -0.5, -0.45], atol=1e-12)
    # the group's mean stays .5 when the first turn of a rollout is the one that pays
    first = replace(steps, valid=np.array([False, True, True, True]))
    credit = gigpo(first, gamma=1.0, normalize_std=False, invalid_penalty=0.1)
    np.testing.assert_allclose(credit.parts["episode"], [0.4, 0.5, -0.5, -0.5], atol=1e-12)
    # as verl-agent counts, each row once: mean of 1, .9, 0, 0
    rows = gigpo(steps, gamma=1.0, normalize_std=False, invalid_penalty=0.1, weight="step").parts[
        "episode"
    ]
    np.testing.assert_allclose(rows, np.array([1, 0.9, 0, 0]) - 0.475, atol=1e-12)


def test_rows_of_an_environment_step_share_their_return():
    """Two agents act in step 0, one in step 1: γ .5 is taken once, from step to step."""
    steps = Steps.from_columns(
        rollout=[0] * 3,
        agent=["a", "b", "a"],
        env_step=[0, 0, 1],
        reward=[0, 1, 2],
        anchor=[1, 2, 3],
    )
    assert gigpo(steps, gamma=0.5).parts["step_return"].tolist() == [1, 2, 2]
    by_step = gigpo(steps, gamma=0.5, step_unit="env_step").parts["step_return"]
    assert by_step.tolist() == [2, 2, 2]
    back = replace(steps, env_step=np.array([1, 0, 2]))
    with pytest.raises(Refused, match="column env_step, row 1: it falls to 0 within rollout 0"):
        gigpo(back, step_unit="env_step")


def test_turns_with_different_permissions_are_no_partners():
    """The menu can be part of the key, and what it costs is counted."""
    steps = Steps.from_columns(
        rollout=[0, 1], reward=[1, 0], anchor=["s", "s"], menu=[("a", "b"), ("a",)], action=[0, 0]
    )
    split = gigpo(steps, key="anchor,menu", normalize_std=False)
    assert split.parts["step"].tolist() == [0, 0]
    assert split.diagnostics["key_cost"] == {"menu": 2}
    assert gigpo(steps, normalize_std=False).parts["step"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("rloo", {"singleton": "one"}, "singleton is 'one'"),
        ("rloo", {"sigma_floor": -1.0}, "sigma_floor"),
        ("rloo", {"singleton": "error"}, "row 2: group 'b' has one scored rollout"),
        ("reinforce_pp", {"baseline": "critic"}, "baseline is 'critic'"),
        ("reinforce_pp", {"gamma": 2.0}, "gamma is 2.0"),
        ("reinforce_pp", {"gamma": 2.0, "baseline": "group"}, "gamma is 2.0"),
        ("grpo_process", {"order": "both"}, "order is 'both'"),
        ("grpo_process", {"ddof": 3}, "ddof is 3"),
        ("grpo_process", {"singleton": "error"}, "row 2: group 'b' has one scored rollout"),
        ("magrpo", {"gamma": -1.0}, "gamma is -1.0"),
        ("magrpo", {"singleton": "error"}, "row 2: group 'b'"),
        ("dr_mas", {"by": "team"}, "by is 'team'"),
        ("dr_mas", {"singleton": "error"}, "row 2: group 'b'"),
        ("m_grpo", {"form": "open"}, "form is 'open'"),
        ("m_grpo", {"calls": 2}, "calls is 2; it is a number from 1 up, of form='sampled' only"),
        ("m_grpo", {"calls": 0, "form": "sampled"}, "calls is 0"),
        ("fold_grpo", {"form": "both"}, "form is 'both'"),
        ("fold_grpo", {"process": [0.0]}, r"process has shape \(1,\) where \(3,\) is needed"),
        ("fold_grpo", {"process": [0.0, NAN, 0.0]}, "process, row 1: nan is not finite"),
        ("fold_grpo", {"process": ["a", "b", "c"]}, "process holds something that is not a number"),
        ("fold_grpo", {"unit_sigma": True, "form": "code"}, "unit_sigma goes with form='paper'"),
        ("gigpo", {"step_unit": "second"}, "step_unit is 'second'"),
        ("gigpo", {"invalid_penalty": -1.0}, "invalid_penalty is -1.0"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, options, says):
    """The sentence names the option and what it was, or the group and row, in a direct call too."""
    steps = Steps.from_columns(
        group=["a", "a", "b"], rollout=range(3), reward=[1, 0, 1], anchor=["s"] * 3
    )
    direct = globals()[name]
    with pytest.raises(Refused, match=says):
        direct(steps, **options)
    with pytest.raises(Refused, match=says.partition(";")[0].split(" is ")[0]):
        estimate(name, steps, **options)
