"""Levels of credit added up: the plain sum, and the partition with its identities."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from counterpoint.credit import estimate, stack
from counterpoint.games import deal, every, expected_gradient, play, policy_gradient, truth
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

LEVELS = ("role", "agent", "turn")


def team_of(steps: Steps) -> Credit:
    return estimate("grpo", steps)


def random_table(seed: int) -> tuple[Steps, dict[str, Credit], dict[str, float]]:
    """Rollouts with masked and unscored rows, crossed roles and agents, in any order."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    rollout = rng.integers(0, 5, n)
    outcome = np.where(rng.random(5) < 0.2, np.nan, rng.normal(size=5))[rollout]
    steps = Steps.from_columns(
        group=rollout % 2,
        rollout=rollout,
        agent=rng.integers(0, 3, n),
        role=rng.integers(0, 2, n),
        outcome=outcome,
        reward=rng.normal(size=n),
        mask=rng.random(n) < 0.8,
    )
    levels = {name: Credit(rng.normal(size=n), estimand=name) for name in LEVELS}
    weights = {name: float(rng.normal()) for name in LEVELS}
    return steps, {"team": team_of(steps), **levels}, weights


def shares(steps: Steps, on, by: str) -> list[float]:
    """m, counted row by row."""
    rows = range(len(steps))
    m = []
    for row in rows:
        peers = [r for r in rows if on[r] and steps.rollout[r] == steps.rollout[row]]
        same = [r for r in peers if steps.agent[r] == steps.agent[row]]
        agents = {int(steps.agent[r]) for r in peers}
        even = 1 / len(peers) if by == "event" and peers else 0.0
        m.append((even if by == "event" else 1 / len(agents) / len(same)) if on[row] else 0.0)
    return m


def averaged(keys: list, x, m, on) -> np.ndarray:
    """The m-weighted mean over rows with an equal key, row by row."""
    out = np.zeros(len(keys))
    for row in range(len(keys)):
        same = [r for r in range(len(keys)) if on[r] and keys[r] == keys[row]]
        weight = sum(m[r] for r in same)
        out[row] = sum(m[r] * x[r] for r in same) / weight if weight else 0.0
    return out


def keys_of(steps: Steps) -> dict[str, list]:
    """The cells of each level by name; where role and agent cross, their pairs."""
    rows = range(len(steps))
    return {
        "team": [steps.rollout[r] for r in rows],
        "role": [(steps.rollout[r], steps.role[r]) for r in rows],
        "agent": [(steps.rollout[r], steps.role[r], steps.agent[r]) for r in rows],
        "turn": list(rows),
    }


# ---------------------------------------------------------------------------------------------
# The plain sum


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_plain_sum_of_both_parts_is_gigpo(normalize_std, weight):
    """With team = A_E and turn = A_S the weighted sum is GiGPO, to the last bit."""
    steps = play(deal("T11", contexts=4, seed=1), groups=4, rollouts=6).steps
    options = {"normalize_std": normalize_std, "step_weight": weight}
    whole = estimate("gigpo", steps, **options)
    levels = {
        "team": Credit(whole.parts["episode"], estimand="outcome"),
        "turn": Credit(whole.parts["step"], estimand="anchor"),
    }
    got = stack(steps, levels, {"turn": weight})
    np.testing.assert_array_equal(got.values, whole.values)
    assert got.estimand == "outcome+anchor"


def test_the_plain_sum_by_hand():
    """1 + ½·4 and 1 + ½·2; a row that the level did not credit keeps the team's number."""
    steps = Steps.from_columns(rollout=[0, 0, 0, 1], reward=[0, 0, 1, 0], mask=[1, 1, 1, 0])
    levels = {"team": Credit([1, 1, 1, 9]), "agent": Credit([4, 2, np.nan, 5])}
    got = stack(steps, levels, {"agent": 0.5})
    np.testing.assert_array_equal(got.values, [3, 2, 1, np.nan])
    assert got.diagnostics["levels"]["agent"]["missing"] == 1
    # P_0 x = (4 + 2 + 0)/3 = 2, weighted ½, is in all three rows; 3·2² of 4² + 2² is double
    np.testing.assert_allclose(got.parts["shared"], [1, 1, 1, np.nan])
    assert got.diagnostics["levels"]["agent"]["double_counted"] == pytest.approx(12 / 20)


# ---------------------------------------------------------------------------------------------
# The partition


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["event", "agent"]))
def test_identities_of_the_partition(seed, by):
    """For any x, w, m, to 1e-12: the parts are the slow reference's, each vanishes on average in
    the level above, parts are orthogonal, and the average of the whole is the team's credit.
    """
    steps, levels, weights = random_table(seed)
    got = stack(steps, levels, weights, partition=True, by=by)
    on, rollouts = ~np.isnan(levels["team"].values), steps.rollout
    m, keys = np.array(shares(steps, on, by)), keys_of(steps)
    np.testing.assert_allclose(got.parts["m"], m, atol=1e-15)
    for above, name in zip(("team", *LEVELS), LEVELS, strict=False):
        x = levels[name].values
        contrast = averaged(keys[name], x, m, on) - averaged(keys[above], x, m, on)
        part = np.nan_to_num(got.parts[name])
        np.testing.assert_allclose(part[on], weights[name] * contrast[on], atol=1e-12)
        np.testing.assert_allclose(averaged(keys[above], part, m, on), 0, atol=1e-12)
    for rollout in range(steps.n_rollouts):
        here = on & (rollouts == rollout)
        if here.any():
            mean = np.sum(m[here] * got.values[here])
            np.testing.assert_allclose(mean, levels["team"].values[here][0], atol=1e-12)
            for one, two in (("role", "agent"), ("role", "turn"), ("agent", "turn")):
                product = m[here] * got.parts[one][here] * got.parts[two][here]
                assert abs(product.sum()) < 1e-12
    assert np.isnan(got.values[~on]).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["event", "agent"]))
def test_one_score_at_all_levels_comes_back(seed, by):
    """With one x at all levels, P_0 x as the team's credit and w = 1, the stack is x itself."""
    steps, levels, _ = random_table(seed)
    x = levels["turn"].values
    on = ~np.isnan(levels["team"].values)
    mean = averaged(keys_of(steps)["team"], x, shares(steps, on, by), on)
    one = np.zeros(steps.n_rollouts)  # one number per rollout, to the last bit
    one[steps.rollout[on]] = mean[on]
    team = Credit(np.where(on, one[steps.rollout], np.nan))
    got = stack(steps, {"team": team, **dict.fromkeys(LEVELS, Credit(x))}, partition=True, by=by)
    np.testing.assert_allclose(got.values[on], x[on], atol=1e-12)


def test_what_stands_alone_adds_nothing():
    """Cells of one member add nothing: one agent a role, one turn an agent, one turn a rollout."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1], agent=["a", "b", "a"], role=["x", "y", "x"], reward=[1, 0, 2]
    )
    scores = Credit([5.0, 1.0, 7.0])
    levels = {"team": Credit([0.5, 0.5, -0.5]), **dict.fromkeys(LEVELS, scores)}
    got = stack(steps, levels, partition=True)
    # the role's contrasts are ±2 round the rollout's mean 3; agent and turn have none of their own
    np.testing.assert_allclose(got.parts["role"], [2, -2, 0], atol=1e-15)
    np.testing.assert_allclose(got.parts["agent"], 0, atol=1e-15)
    np.testing.assert_allclose(got.parts["turn"], 0, atol=1e-15)
    assert got.diagnostics["aliases"] == ["role = agent", "role = turn", "agent = turn"]


def test_crossed_labels_become_pairs():
    """An agent that acts in two roles is two cells under its roles."""
    steps = Steps.from_columns(
        rollout=[0] * 4, agent=["a", "a", "b", "a"], role=["x", "y", "x", "x"], reward=[0, 0, 0, 1]
    )
    levels = {
        "team": Credit(np.ones(4)),
        "role": Credit(np.zeros(4)),
        "agent": Credit([2, 8, 5, 2]),
    }
    got = stack(steps, levels, partition=True)
    # role x holds 2, 5, 2 with mean 3; role y holds a's 8 alone
    np.testing.assert_allclose(got.values, [0, 1, 3, 0], atol=1e-15)


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_conserving_is_not_unbiased(agents, weight):
    """Where n agents act once each, x = seqau, m equal: the gradient is (1 + w(1 − 1/n)) times
    the policy gradient, by listing every play.
    """
    game = deal("T1", agents=agents, actions=2, seed=3)
    plays, _ = every(game, 2)

    def method(steps: Steps) -> Credit:
        exact = truth(plays, "seqau")
        total = np.bincount(steps.rollout, exact.values)[steps.rollout]
        return stack(
            steps, {"team": Credit(total), "turn": exact}, {"turn": weight}, partition=True
        )

    want = (1 + weight * (1 - 1 / agents)) * policy_gradient(game)
    np.testing.assert_allclose(expected_gradient(game, method, 2), want, atol=1e-12)


# ---------------------------------------------------------------------------------------------
# What is said about the levels


def test_samples_and_comparability():
    """Agent b has one rollout to itself; anchors s and t are met by two rollouts and one."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1, 1],
        agent=["a", "b", "a", "a"],
        reward=[0, 1, 0, 0],
        anchor=["s", "t", "s", None],
    )
    levels = {name: Credit(np.ones(4)) for name in ("team", "agent", "turn")}
    got = stack(steps, levels).diagnostics["levels"]
    assert (got["team"]["samples"], got["team"]["comparable"]) == (2, 1)
    assert (got["agent"]["samples"], got["agent"]["comparable"]) == (2, 0.75)
    assert (got["turn"]["samples"], got["turn"]["comparable"]) == (1.5, 0.5)
    dropped = stack(steps, levels, minimum=2)
    assert dropped.diagnostics["dropped"] == ["turn"]
    assert dropped.values.tolist() == [2, 2, 2, 2]


def test_empty_steps_stack_to_nothing():
    """No rows, no credit, no warning."""
    steps = Steps.from_columns(rollout=[], reward=[])
    levels = {"team": Credit([]), "agent": Credit([])}
    for partition in (False, True):
        assert len(stack(steps, levels, partition=partition)) == 0


STEPS = Steps.from_columns(rollout=[0, 0], reward=[0, 1])
TEAM = Credit([1.0, 1.0])
REFUSED = {
    "no team": (({"turn": TEAM},), {}, "added to the team's"),
    "unknown": (({"team": TEAM, "swarm": TEAM},), {}, "no level 'swarm'"),
    "rows": (({"team": TEAM, "turn": Credit([1.0])},), {}, "level turn has 1 values"),
    "weight": (({"team": TEAM, "turn": TEAM}, {"turn": np.nan}), {}, "weight of turn is nan"),
    "stray weight": (({"team": TEAM}, {"turn": 1.0}), {}, "of a level given"),
    "by": (({"team": TEAM},), {"by": "role"}, "by is 'role'"),
    "team varies": (({"team": Credit([1.0, 2.0])},), {"partition": True}, "row 1: the team's"),
    "no score": (
        ({"team": TEAM, "turn": Credit([1.0, np.nan])},),
        {"partition": True},
        "row 1 has team credit and none of level turn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case):
    """What cannot be stacked is refused in words that say which level and row."""
    arguments, options, sentence = REFUSED[case]
    with pytest.raises(Refused) as refusal:
        partial(stack, STEPS)(*arguments, **options)
    assert sentence in str(refusal.value)
