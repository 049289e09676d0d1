"""The gate: what it believes, what it refuses, and where its figures come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counterpoint import Softmax, Steps, make, rloo, rollout
from counterpoint.credit.cad import cad_grpo
from counterpoint.credit.gate import Gate
from counterpoint.games import deal, play
from counterpoint.games.proxies import proxies
from qualities import own_act, with_quality

SEEDS = 20


def noise(plays, seed):
    return np.random.default_rng([seed, 7]).normal(size=len(plays.steps))


def own(plays, seed):
    return proxies(plays, "own")


def succeeded(plays, seed):
    return plays.action == 1


def kind(name):
    return lambda plays, seed: proxies(plays, name, seed=seed)


def examined(game, q, seed, verifiable="executed", **options):
    """CAD-GRPO with the gate on 16 tasks of 8 rollouts, agents that see nobody."""
    plays = play(game, groups=16, rollouts=8, seed=seed)
    steps = with_quality(plays.steps, q(plays, seed), np.eye(game.agents, dtype=bool), verifiable)
    return cad_grpo(steps, gate=options.pop("gate", True), seed=seed, **options)


def accepted(q, name="T1", seeds=SEEDS, **dials) -> float:
    """Share of seeds in which the gate accepts, game and plays drawn anew each time."""
    found = [
        examined(deal(name, contexts=16, seed=seed, **dials), q, seed).diagnostics["gate"]
        for seed in range(seeds)
    ]
    return float(np.mean([verdict["accepted"] for verdict in found]))


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.5, 1.0])
def test_a_checked_quality_in_an_additive_team_is_accepted(error):
    """In at least 95 % of seeds; the outcome errs by half of an act's spread, or by all of it."""
    assert accepted(own, noise=error) >= 0.95


@pytest.mark.slow
def test_noise_is_refused():
    """In at least 95 % of seeds."""
    assert accepted(noise, noise=0.5) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("agents", [2, 4])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_xor_is_refused(agents, spread):
    """What nobody earns alone no sum of shares can say, be the coins fair or not."""
    assert accepted(succeeded, "T5", agents=agents, spread=spread) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["self_report", "call_count", "padding"])
def test_the_decoys_of_t9_are_refused(name):
    """Even where they pass for verified."""
    assert accepted(kind(name), "T9", noise=0.5) <= 0.05


@pytest.mark.soak
def test_over_a_hundred_seeds():
    assert accepted(own, seeds=100, noise=0.5) >= 0.95
    assert accepted(noise, seeds=100, noise=0.5) <= 0.05
    assert accepted(succeeded, "T5", seeds=100, agents=4, spread=0.0) <= 0.05


@pytest.mark.parametrize("channel", ["self_report", "count"])
def test_what_research_agents_say_of_themselves_is_refused_with_the_reason(channel):
    """research-v0: rating oneself and counting one's calls are named as unverifiable."""
    traces = rollout(make("research-v0"), Softmax(), groups=6, rollouts=6, seed=0)
    steps = Steps.from_traces(traces)
    credit = cad_grpo(steps, channels=[channel], gate=True)
    verdict = credit.diagnostics["gate"]
    assert not verdict["accepted"]
    for agent in ("coordinator", "researcher"):
        assert f"unverifiable: the quality of {agent} ({channel})" in " ".join(verdict["reasons"])
    assert verdict["recommended"] == "rloo, or cad_grpo with other channels"
    np.testing.assert_allclose(credit.values, rloo(steps).values, atol=1e-12)


def test_refused_means_rloo_and_says_why():
    """Each fold asks the others; where all refuse, the credit is RLOO's number for number."""
    game = deal("T1", contexts=16, noise=0.5, seed=1)
    credit = examined(game, noise, 3)
    plays = play(game, groups=16, rollouts=8, seed=3)
    np.testing.assert_allclose(credit.values, rloo(plays.steps).values, atol=1e-12)
    assert "gate: no fit" in str(credit)
    assert credit.diagnostics["gate"]["recommended"] == "rloo"


def test_accepted_changes_no_number():
    game = deal("T1", contexts=16, noise=0.5, seed=1)
    with_gate, without = examined(game, own, 3), examined(game, own, 3, gate=False)
    np.testing.assert_array_equal(with_gate.values, without.values)
    assert with_gate.diagnostics["gate"]["recommended"] == "cad_grpo"
    assert "gate" not in without.diagnostics


def test_the_own_outcomes_have_no_say_in_the_decision():
    """A fold's verdict is the same whatever its own rollouts earned."""
    game = deal("T1", contexts=16, noise=0.5, seed=1)
    plays = play(game, groups=16, rollouts=8, seed=3)
    steps = with_quality(plays.steps, own(plays, 3), np.eye(4, dtype=bool))
    before = cad_grpo(steps, gate=True)
    beta = before.parts["beta"][steps.agent == 0]
    mine = steps.group == steps.group[0]
    after = cad_grpo(replace(steps, outcome=np.where(mine, -9 * steps.outcome, steps.outcome)),
                     gate=True)  # fmt: skip
    first, second = before.diagnostics["gate"]["folds"], after.diagnostics["gate"]["folds"]
    assert sum(one == two for one, two in zip(first, second, strict=True)) == 1
    kept = mine[steps.agent == 0]
    np.testing.assert_array_equal(beta[kept], after.parts["beta"][steps.agent == 0][kept])


def test_unverifiable_is_refused_unless_it_is_allowed():
    """Thresholds are arguments."""
    game = deal("T1", contexts=16, noise=0.5, seed=1)
    assert not examined(game, own, 3, "judge").diagnostics["gate"]["accepted"]
    lenient = Gate(checks=("judge",))
    assert examined(game, own, 3, "judge", gate=lenient).diagnostics["gate"]["accepted"]
    strict = Gate(residual=0.05)
    reasons = examined(game, own, 3, gate=strict).diagnostics["gate"]["reasons"]
    assert [reason.split(":")[0] for reason in reasons] == ["residual"]


def test_a_quality_that_contains_the_outcome_is_refused():
    """Q of the last agent is R itself: r = 1."""
    game = deal("T1", contexts=16, noise=0.5, seed=1)

    def leaking(plays, seed):
        return np.where(plays.steps.agent == 3, plays.steps.outcome, own(plays, seed))

    verdict = examined(game, leaking, 3).diagnostics["gate"]
    assert "leakage: the quality of 3 all but contains the outcome (r 1.000)" in verdict["reasons"]
    assert verdict["leakage"]["3"] == pytest.approx(1.0)


def test_two_fair_coins_of_xor_are_sent_to_a_measured_method():
    """R̃ = −2 q̃₁q̃₂ exactly when whole: the product explains what no share does."""
    game = deal("T5", agents=2, spread=0.0, contexts=16, seed=1)
    verdict = examined(game, succeeded, 3).diagnostics["gate"]
    assert verdict["additivity"]["gain"] > 0.5
    assert verdict["additivity"]["p"] < 1e-6
    assert verdict["recommended"].startswith("a measured method")


def test_figures_by_hand():
    """Two tasks of three, R = 2q in each, λ 0: R² = 1, no residual, and r of q with R is 1.

    With one player the correlations are (1), of condition 1 and VIF 1; β keeps its sign always.
    """
    steps = Steps.from_columns(
        group=list("tttuuu"), rollout=range(6), quality=[0, 1, 2, 4, 5, 9],
        outcome=[0, 2, 4, 8, 10, 18], verifiable=["executed"] * 6, depends=[[0]] * 6,
    )  # fmt: skip
    verdict = cad_grpo(steps, gate=True, ridge=0.0).diagnostics["gate"]
    for name, want in {"r2": 1, "r2_crossed": 1, "residual_share": 0, "condition": 1}.items():
        assert verdict[name] == pytest.approx(want, abs=1e-9)
    assert verdict["vif"] == verdict["stable"] == {"0": pytest.approx(1.0)}
    assert verdict["halves"]["sign_agreement"] == 1.0
    assert np.isnan(verdict["additivity"]["F"])


def test_r2_is_negative_where_beta_does_harm():
    """R = 2q on one task and −2q on the other: each β doubles the residual, 1 − 4·Σ/Σ = −3."""
    steps = Steps.from_columns(
        group=list("tttuuu"), rollout=range(6), quality=[0, 1, 2, 0, 1, 2],
        outcome=[0, 2, 4, 0, -2, -4], verifiable=["executed"] * 6, depends=[[0]] * 6,
    )  # fmt: skip
    verdict = cad_grpo(steps, gate=True, ridge=0.0).diagnostics["gate"]
    assert verdict["r2_crossed"] == pytest.approx(-3.0)
    assert verdict["r2"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.slow
def test_the_interval_of_r2_covers_and_a_placebo_explains_nothing():
    """β is the same for every task and known well, so R² over many tasks is the truth; intervals
    from 16 tasks hold it in 85 to 100 % of 40 draws. A placebo's R² is about 0.
    """
    game = deal("T1", contexts=1, noise=1.0, seed=1)

    def verdict(tasks, seed):
        plays = play(game, groups=tasks, rollouts=8, seed=seed)
        steps = with_quality(plays.steps, own(plays, seed), np.eye(4, dtype=bool))
        names = {**steps.names, "task": tuple(range(tasks))}
        return cad_grpo(replace(steps, task=steps.group, names=names), gate=True).diagnostics[
            "gate"
        ]

    truth = verdict(1000, 1)["r2_crossed"]
    found = [verdict(16, seed) for seed in range(40)]
    assert np.mean([v["r2_low"] < truth < v["r2_high"] for v in found]) >= 0.85
    assert np.mean([v["placebo_r2"] for v in found]) == pytest.approx(0.0, abs=0.03)


def test_one_task_is_not_enough_to_judge_by():
    plays = play(deal("T1", contexts=1), groups=1, rollouts=8)
    steps = with_quality(plays.steps, own_act(plays.steps), np.eye(4, dtype=bool))
    verdict = cad_grpo(steps, gate=True).diagnostics["gate"]
    assert verdict["reasons"] == ["1 tasks to judge by, so nothing says that β holds"]
