"""Steps: what is accepted, what is refused and how, and the statistics over rollouts."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from counterpoint import groups
from counterpoint.formats import read
from counterpoint.recorder import Recorder
from counterpoint.schema import LateReward
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

NAN = math.nan

# ---------------------------------------------------------------------------------------------
# Labels and groups


@settings(deadline=None)
@given(
    st.one_of(
        st.lists(st.one_of(st.text(max_size=2), st.integers(-3, 3), st.none())),
        st.lists(st.integers(-5, 5)).map(lambda x: np.array(x, dtype=np.int8)),
        st.lists(st.sampled_from([0, 1, 2**40, -(2**62), 2**62])).map(
            lambda x: np.array(x, dtype=np.int64)
        ),
        st.lists(st.sampled_from([0, 2**63, 2**64 - 1])).map(
            lambda x: np.array(x, dtype=np.uint64)
        ),
        st.lists(st.booleans()).map(lambda x: np.array(x, dtype=bool)),
    )
)
def test_labels_are_numbered_in_order_of_appearance(labels):
    """The code of a label is its place among the distinct ones, for any type, by any path."""
    codes, texts = groups.encode_labels(labels)
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    assert list(texts) == list(dict.fromkeys(values))
    assert [texts[code] for code in codes] == values


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_pairs_are_numbered_in_ascending_order(pairs):
    """Dense codes that sort as the pairs do."""
    first = np.array([a for a, _ in pairs], dtype=np.int64)
    second = np.array([b for _, b in pairs], dtype=np.int64)
    distinct = sorted(set(pairs))
    assert groups.pair(first, second).tolist() == [distinct.index(p) for p in pairs]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=30))
def test_shared_groups_hold_two_members(rows):
    """A group is shared if its set of members has two elements or more."""
    codes = np.array([c for c, _ in rows], dtype=np.int64)
    members = np.array([m for _, m in rows], dtype=np.int64)
    expected = [len({m for c, m in rows if c == group}) > 1 for group in range(5)]
    assert groups.shared(codes, members, 5).tolist() == expected


def test_moments_keep_a_spread_in_the_seventh_digit():
    """Two passes: 1e6 + (0, 1e-3) has σ = 1e-3/√2, which squares of the values would lose."""
    x = np.array([1e6, 1e6 + 1e-3, 5.0])
    mean, sigma, n = groups.moments(np.array([0, 0, 1]), x, 3)
    assert sigma[0] == pytest.approx(1e-3 / math.sqrt(2), rel=1e-6)
    assert (sigma[1], sigma[2]) == (0, 0)
    assert n.tolist() == [2, 1, 0]
    assert math.isnan(mean[2])


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([0, 1]), st.integers(0, 2**32 - 1))
def test_groups_that_stand_in_blocks_have_the_moments_of_any_order(n, each, ddof, seed):
    """The short way for groups of one size in order finds what sums by code find."""
    rng = np.random.default_rng(seed)
    codes, x = np.repeat(np.arange(n), each), rng.normal(size=n * each)
    order = rng.permutation(n * each)
    blocks = groups.moments(codes, x, n, ddof)
    shuffled = groups.moments(codes[order], x[order], n, ddof)
    for ours, other in zip(blocks, shuffled, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-12)
    for group in range(n):
        own = x[codes == group]
        mean, sigma, size = (found[group] for found in blocks)
        assert (mean, size) == (pytest.approx(own.mean()), each)
        assert sigma == pytest.approx(own.std(ddof=ddof) if each > ddof else 0, abs=1e-12)


# ---------------------------------------------------------------------------------------------
# From columns


def test_the_least_that_is_needed():
    """Rollouts and rewards make steps; everything else has a stated default."""
    steps = Steps.from_columns(rollout=["a", "b", "a"], reward=[0.5, 1, 0.25])
    assert steps.group.tolist() == [0, 0, 0]
    assert steps.step.tolist() == [0, 0, 1]
    assert steps.outcome.tolist() == [0.75, 1, 0.75]
    assert steps.mask.all()
    assert steps.label("rollout", 2) == "a"
    assert steps.order.tolist() == [0, 2, 1]
    assert steps.anchor is None


def test_a_rollout_is_named_within_its_group():
    """One rollout id in two groups is two rollouts."""
    steps = Steps.from_columns(group=["x", "y"], rollout=[0, 0], reward=[1, 0])
    assert steps.n_rollouts == 2
    assert steps.mean(steps.outcome).tolist() == [1, 0]


def test_any_sized_or_lazy_column_is_taken():
    """Arrays, lists, tuples, ranges and iterators of one length."""
    steps = Steps.from_columns(rollout=range(2), reward=iter([1, 0]), mask=np.array([1, 0]))
    assert steps.outcome.tolist() == [1, 0]
    assert steps.mask.tolist() == [True, False]


def test_missing_labels_and_numbers():
    """None is missing in anchors (−1) and values (NaN); other anchors keep their order."""
    steps = Steps.from_columns(
        rollout=[0] * 3, reward=[1, None, NAN], anchor=["s", None, "t"], value=[None, 1, 2]
    )
    assert steps.anchor.tolist() == [0, -1, 1]
    assert steps.label("anchor", 1) is None
    assert steps.label("anchor", 2) == "t"
    assert math.isnan(steps.value[0])
    assert steps.outcome.tolist() == [1, 1, 1]
    unscored = Steps.from_columns(rollout=[0, 1], reward=[None, 0])
    np.testing.assert_array_equal(unscored.outcome, [NAN, 0])
    assert unscored.reward.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({}, "need the columns rollout and reward"),
        ({"rollout": [0]}, "need the columns rollout and reward"),
        ({"rollout": [0], "reward": [1], "score": [2]}, "have no column 'score'"),
        ({"rollout": 5, "reward": [1]}, "column rollout is a single value"),
        ({"rollout": "abc", "reward": [1, 2, 3]}, "column rollout is a single value"),
        ({"rollout": [0, 1], "reward": [1]}, "column reward has 1 rows where rollout has 2"),
        ({"rollout": [0], "reward": ["high"]}, "column reward, row 0: 'high' is not a number"),
        ({"rollout": [0, 1], "reward": [1, [2, 3]]}, r"row 1: \[2, 3\] is not a number"),
        ({"rollout": [0, 1], "reward": [0, 10**400]}, "row 1: 1000.* is not a number"),
        ({"rollout": [0, 1], "reward": [1, math.inf]}, "row 1: inf is infinite or too large"),
        ({"rollout": [0], "reward": [1e200]}, r"row 0: 1e\+200 is infinite or too large"),
        ({"rollout": [0], "reward": [[1, 2]]}, "column reward has 2 dimensions"),
        ({"rollout": [[0, 1]], "reward": [1]}, "column rollout, row 0: a list cannot be a label"),
        ({"rollout": [0], "reward": [1], "anchor": [{}]}, "row 0: a dict cannot be a label"),
        ({"rollout": [0], "reward": [1], "mask": [2]}, "row 0: 2 is neither true nor false"),
        ({"rollout": [0], "reward": [1], "mask": [[True]]}, "column mask has 2 dimensions"),
        ({"rollout": [0], "reward": [1], "step": [0.5]}, "row 0: 0.5 is no whole number"),
        ({"rollout": [0], "reward": [1], "n_tokens": [-1]}, "row 0: -1 is no whole number"),
        ({"rollout": [0], "reward": [1], "logprob": [0.5]}, "row 0: 0.5 is above 0"),
        ({"rollout": [0], "reward": [1], "event": ["x"]}, "column event needs a pair"),
        (
            {"rollout": ["r", "q", "r"], "reward": [1, 1, 1], "step": [3, 0, 3]},
            "column step, row 2: step 3 of rollout 'r' stands twice",
        ),
        (
            {"rollout": [0, 0], "outcome": [1, 0]},
            "column outcome, row 1: 0 differs from another row",
        ),
    ],
)
def test_bad_columns_are_refused_with_column_and_row(columns, says):
    """One sentence that names the column and the row; never a traceback of NumPy's."""
    with pytest.raises(Refused, match=says):
        Steps.from_columns(**columns)


def test_a_column_that_is_missing_is_asked_for():
    """`need` says what to supply."""
    steps = Steps.from_columns(rollout=[0], reward=[1])
    with pytest.raises(Refused, match="column anchor, which is missing: give anchor="):
        steps.need("anchor")


# ---------------------------------------------------------------------------------------------
# Statistics over rollouts


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_statistics_count_each_rollout_once(seed):
    """Mean, deviation and number over scored rollouts with a trainable row, however long."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 25))
    rollout = rng.integers(0, 6, n)
    group = rollout % 2
    outcome = np.where(rng.random(6) < 0.2, np.nan, rng.integers(0, 3, 6))[rollout]
    mask = rng.random(n) < 0.7
    steps = Steps.from_columns(group=group, rollout=rollout, outcome=outcome, mask=mask)
    for row in range(n):
        kept = {
            int(rollout[i]): outcome[i]
            for i in range(n)
            if group[i] == group[row] and mask[i] and not math.isnan(outcome[i])
        }
        values = list(kept.values())
        assert steps.count(steps.outcome)[row] == len(values)
        np.testing.assert_allclose(
            steps.mean(steps.outcome)[row], np.mean(values) if values else NAN
        )
        deviation = np.std(values, ddof=1) if len(values) > 1 else 0
        assert steps.std(steps.outcome)[row] == pytest.approx(deviation, abs=1e-12)
        by_step = [
            outcome[i]
            for i in range(n)
            if group[i] == group[row] and mask[i] and not math.isnan(outcome[i])
        ]
        assert steps.count(steps.outcome, "step")[row] == len(by_step)


def test_outcomes_per_agent_are_cells_of_their_own():
    """Where the agents of a rollout have outcomes of their own, each counts once."""
    steps = Steps.from_columns(
        rollout=[0, 0, 0, 1], agent=["a", "b", "a", "a"], outcome=[1, 0, 1, 0]
    )
    assert steps.count(steps.outcome).tolist() == [3, 3, 3, 3]
    assert steps.mean(steps.outcome)[0] == pytest.approx(1 / 3)
    assert steps.first(np.array([5.0, 6, 7, 8])).tolist() == [5, 6, 5, 8]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_heads_and_order_do_not_depend_on_how_rows_stand(seed):
    """The short ways for sorted tables and for one row per rollout find what sorting finds."""
    rng = np.random.default_rng(seed)
    rollout = np.sort(rng.integers(0, 5, 12)) if rng.random() < 0.7 else np.arange(12)
    mask = rng.random(12) < 0.7
    steps = Steps.from_columns(rollout=rollout, reward=rng.random(12), mask=mask)
    shuffled = rng.permutation(12)
    columns = ("group", "task", "rollout", "step", "agent", "role", "reward", "outcome", "mask")
    moved = replace(steps, **{name: getattr(steps, name)[shuffled] for name in columns})
    assert sorted(shuffled[moved.head]) == sorted(steps.head)
    assert shuffled[moved.order].tolist() == steps.order.tolist()
    assert shuffled[moved.trainable].tolist() == steps.trainable.tolist()
    firsts = {}
    for row in range(12):
        if mask[row]:
            firsts.setdefault(int(rollout[row]), row)
    assert sorted(steps.head) == sorted(firsts.values())


# ---------------------------------------------------------------------------------------------
# From traces


def recorded(path, *, rewards=(("team", 1.0, None),), acts=("planner", "worker")):
    with Recorder(path) as rec, rec.trace(task_id="t") as trace:
        for agent in acts:
            trace.act(agent, f"{agent} speaks")
        for channel, amount, target in rewards:
            trace.reward(amount, channel=channel, target=target)
    return list(read(path))


def test_a_row_is_an_act(tmp_path):
    """Acts become rows in order, the final reward goes to the last one, the outcome to all."""
    steps = Steps.from_traces(recorded(tmp_path / "a.jsonl"))
    assert [steps.label("agent", row) for row in range(2)] == ["planner", "worker"]
    assert steps.reward.tolist() == [0, 1]
    assert steps.outcome.tolist() == [1, 1]
    assert steps.event[:, 0].tolist() == [0, 0]


def test_other_channels_are_no_outcome(tmp_path):
    """Only the team's channel and costs are compared; quality is kept out."""
    rewards = (("team", 1.0, None), ("style", 5.0, None))
    assert Steps.from_traces(recorded(tmp_path / "a.jsonl", rewards=rewards)).outcome[0] == 1


def test_an_agents_own_reward_is_its_own(tmp_path):
    """A reward for one agent adds to its outcome alone."""
    rewards = (("team", 1.0, None), ("team", -0.25, {"agent": "planner"}))
    steps = Steps.from_traces(recorded(tmp_path / "a.jsonl", rewards=rewards))
    assert steps.outcome.tolist() == [0.75, 1]
    assert steps.reward.tolist() == [-0.25, 1]


def test_a_failed_grader_is_not_zero(tmp_path):
    """A reward without an amount leaves the rollout unscored."""
    steps = Steps.from_traces(recorded(tmp_path / "a.jsonl", rewards=(("team", None, None),)))
    assert np.isnan(steps.outcome).all()


def test_a_run_without_acts_has_no_row_and_is_counted(tmp_path):
    """Three runs and one in which nobody acted: three rollouts, one counted as left out."""
    traces = []
    for i in range(3):
        traces += recorded(tmp_path / f"{i}.jsonl")
    traces += recorded(tmp_path / "empty.jsonl", acts=())
    steps = Steps.from_traces(traces)
    assert steps.n_rollouts == 3
    assert steps.counts["rollouts_without_steps"] == 1


def test_late_rewards_name_the_trace_they_judged(tmp_path):
    """A late reward counts; for an absent or a changed trace it is refused."""
    (trace,) = recorded(tmp_path / "a.jsonl", rewards=())
    late = LateReward(trace_id=trace.trace_id, digest=trace.digest, amount=0.5)
    assert Steps.from_traces([trace], [late]).outcome.tolist() == [0.5, 0.5]
    other = LateReward(trace_id="elsewhere", digest=trace.digest, amount=0.5)
    with pytest.raises(Refused, match="names trace elsewhere, which is not among these"):
        Steps.from_traces([trace], [other])
    changed = LateReward(trace_id=trace.trace_id, digest="00", amount=0.5)
    with pytest.raises(Refused, match="it was changed since it was judged"):
        Steps.from_traces([trace], [changed])
