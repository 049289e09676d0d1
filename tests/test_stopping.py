"""When to stop: listings have the environment's own values, best rules are the best there are."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint import make, rloo
from counterpoint.cli import app
from counterpoint.games import (
    deal,
    expected_gradient,
    gradient,
    optimal_value,
    play,
    policy_gradient,
    values,
)
from counterpoint.harness import header_of
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import value_of
from counterpoint.schema import Trace
from counterpoint.steps import Steps
from counterpoint.study.listing import best_rule, listed, ruled, value
from counterpoint.study.stopping import (
    LEDGERS,
    READER,
    Multiplier,
    branched,
    centred,
    controllers,
    decision,
    learned,
    observed,
    pandora,
    spent,
    takes,
    told,
)
from counterpoint.vocabulary import DECISIONS

pytestmark = pytest.mark.slow


def team():
    return {"coordinator": Softmax(), "researcher": READER}


def worth(task):
    """V(h₀) of a task under `team`, by the walker that every environment has."""
    env = make("ledger-v0")
    header = header_of(env, team(), group=task, rollout=0, seed=0)
    return value_of(Trace(header, ()), env, team())


@pytest.mark.slow
def test_a_listing_without_a_decision_has_the_value_of_the_environment():
    """Two tasks side by side, all of it chance: V is the mean of theirs."""
    listing = listed(make("ledger-v0"), team(), lambda role, text: False, 2)
    assert listing.anchors == ()
    found = values(listing.game)[listing.game.start]
    assert found == pytest.approx([worth(0), worth(1)], abs=1e-12)


def test_a_listing_under_the_policy_that_it_was_made_from_has_its_value():
    """A coordinator that chooses evenly spawns with probability 1/3: then the value is its own."""
    listing = decision("spawn", "as it comes")
    rule = np.array([[2 / 3, 1 / 3]] * len(listing.anchors))
    assert set(listing.anchors) == {"hire 0: nobody", "hire 1: nobody", "hire 1: 0"}
    assert value(listing.game, rule) == pytest.approx(worth(0), abs=1e-12)


@pytest.mark.parametrize("verb", DECISIONS)
def test_the_best_rule_is_the_best_of_all(verb):
    """By trying every rule, for each of the five decisions; also where recall is not perfect."""
    listing = decision(verb, "as it comes")
    game, n = listing.game, len(listing.anchors)
    best = value(game, best_rule(game, np.ones((n, 2), dtype=bool)))
    every = (value(game, np.eye(2)[list(acts)]) for acts in product((0, 1), repeat=n))
    assert best == pytest.approx(max(every), abs=1e-12)


def test_the_best_rule_of_a_stopping_game_is_that_of_optimal_stopping():
    """On T16, where every state is seen, backward induction is value iteration."""
    for seed in range(5):
        game = deal("T16", turns=5, seed=seed)
        rule = best_rule(game, np.ones((5, 2), dtype=bool))
        assert value(game, rule) == pytest.approx(optimal_value(game)[0], abs=1e-12)


def test_a_listed_run_is_as_likely_as_in_the_environment():
    """One task has one reading of chance: 4 noisy readers, asked in turn, lowest taken."""
    listing = decision("stop", "one after another")
    caps = {k: np.array([[float(told(a) < k), float(told(a) >= k)] for a in listing.anchors])
            for k in (1, 2, 3)}  # fmt: skip
    for k, rule in caps.items():  # right unless all k readings were off; 4 hired, k asked
        exact = 1 - 0.3**k - 4 * 0.02 - k * 0.08
        assert value(listing.game, rule) == pytest.approx(exact, abs=1e-12)


def test_what_an_anchor_tells():
    """Reports and what was spent, by hand: two hired at .2, one asked and told at .1 + .1."""
    prices = {"spawn": 0.2, "message": 0.1, "read": 0.1}
    assert (told("hire 1: 0"), told("go on: 01, asked 01, told by 01")) == (0, 2)
    assert spent("hire 1: 0", prices) == pytest.approx(0.2)
    assert spent("go on: 01, asked 1, told by 1", prices) == pytest.approx(0.6)
    assert spent("go on: 0, asked nobody, told by nobody", prices) == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------------
# Pandora's box


@pytest.mark.parametrize("seed", range(12))
def test_the_index_rule_is_optimal(seed):
    """Weitzman's theorem, to rounding, on boxes drawn at random."""
    game, allowed, index = pandora(seed)
    assert value(game, index) == pytest.approx(value(game, best_rule(game, allowed)), abs=1e-12)


def test_a_box_of_ones_own():
    """One box: worth opening if p·v > c, and then the value is p·v − c."""
    for seed in range(6):
        game, _, index = pandora(seed, boxes=1)
        (cost,), chance = -game.reward[0, :1], game.policy[-1, 1]
        prize = game.reward[game.next[-1, 1], 1]
        assert value(game, index) == pytest.approx(max(0.0, chance * prize - cost), abs=1e-12)


# ---------------------------------------------------------------------------------------------
# Credit of the decision to stop


@pytest.mark.slow
def test_branches_point_along_the_gradient_of_the_decision():
    """Stop now against one more round: over 200 batches the mean step is the policy gradient of the
    listed ledger, within four standard errors.
    """
    listing = decision("stop", "as it comes")
    n = len(listing.anchors)
    game = ruled(listing.game, np.full((n, 2), 0.5))
    for credit in (branched, observed):
        found = []
        for seed in range(200):
            plays = play(game, groups=4, rollouts=8, seed=seed)
            found.append(gradient(plays, credit(plays, seed))[:n, 0])
        mean, error = np.mean(found, 0), np.std(found, 0, ddof=1) / np.sqrt(200)
        exact = policy_gradient(game)[:n, 0]
        assert np.all(np.abs(mean - exact) < 4 * error + 1e-12), credit.__name__


def test_rewards_centred_per_turn_are_biased_once_stopping_is_an_act():
    """Every turn pays 1: the longer run earned more, but centred per turn nobody earned anything.
    RLOO is the gradient.
    """
    steps = Steps.from_columns(rollout=["a", "b", "b", "b"], reward=[1.0, 1, 1, 1], group=["g"] * 4)
    assert list(centred(steps).values) == [0, 0, 0, 0]
    game = deal("T16", turns=3, pay=1.0, spread=0.0, seed=6)
    exact = policy_gradient(game)
    assert expected_gradient(game, rloo, 3) == pytest.approx(exact, abs=1e-12)
    assert np.linalg.norm(expected_gradient(game, centred, 3)) < 1e-12 < np.linalg.norm(exact)


def test_a_reward_per_turn_is_centred_by_hand():
    """Runs of rewards 1, 2 and 3, 0: the means by turn are 2 and 1."""
    steps = Steps.from_columns(
        rollout=["a", "a", "b", "b"], reward=[1.0, 2.0, 3.0, 0.0], group=["g"] * 4
    )
    # a: (1 − 2) + (2 − 1), (2 − 1); b: (3 − 2) + (0 − 1), (0 − 1)
    assert list(centred(steps).values) == [0.0, 1.0, 0.0, -1.0]


def test_the_multiplier_rises_while_the_cost_is_above_the_budget():
    """λ ← λ + rate·(mean cost − budget), by hand on plays of the ladder; never below 0."""
    listing = decision("stop", "one after another")
    game = ruled(listing.game, np.array([[1.0, 0.0]] * len(listing.anchors)))
    plays = play(game, groups=2, rollouts=4, seed=0)  # everybody is asked: 4·.02 + 4·.08 = .40
    dear = Multiplier(listing.cost, budget=0.1, rate=2.0)
    dear(plays, 0)
    assert dear.weight == pytest.approx(2 * (0.4 - 0.1))
    cheap = Multiplier(listing.cost, budget=0.9)
    cheap(plays, 0)
    assert cheap.weight == 0


@pytest.mark.slow
def test_learning_comes_near_the_best_rule_and_the_biased_baseline_does_not():
    """On the ladder: observed and branch credit lose under .02, centring per turn over .05."""
    listing = decision("stop", "one after another")
    allowed = np.ones((len(listing.anchors), 2), dtype=bool)
    top = value(listing.game, best_rule(listing.game, allowed))
    lost = {
        credit: top - value(listing.game, learned(listing.game, allowed, credit, seed=1, steps=60))
        for credit in (observed, branched, lambda plays, seed: centred(plays.steps).values)
    }
    first, second, third = lost.values()
    assert max(first, second) < 0.02
    assert third > 0.05


def test_rules_are_reported_as_regret_to_the_best():
    """Caps and budgets of the ladder: a cap of two is the best rule, and nothing is above it."""
    rows = controllers("one after another", seeds=1, steps=1)
    regret = {row["rule"]: row["regret"] for row in rows}
    assert min(regret.values()) >= -1e-12
    assert regret["fixed cap, 2"] == pytest.approx(0, abs=1e-12)
    assert regret["fixed cap, 1"] == pytest.approx(0.7 * 0.3 - 0.08, abs=1e-12)


@pytest.mark.slow
def test_the_study_writes_a_page(tmp_path):
    """All four parts, with regrets and their intervals."""
    done = CliRunner().invoke(app, ["study", "stopping", "-o", str(tmp_path), "--quick"])
    assert done.exit_code == 0
    page = (tmp_path / "report.html").read_text()
    for heading in ("When to stop in ledger-v0", "The five decisions", "Pandora", "breaks"):
        assert heading in page


def test_a_turn_of_a_coordinator_takes_what_it_says():
    """By the grammar: asking twice sends a message and delegates; a researcher decides nothing."""
    twice = "message coordinator.0: twice\ndelegate coordinator.0: read"
    assert [verb for verb in DECISIONS if takes(verb, "coordinator", twice)] == [
        "delegate",
        "message",
    ]
    assert not any(takes(verb, "researcher", "return: 3") for verb in DECISIONS)
    assert partial(takes, "stop")("coordinator", "aggregate sum: 7\nstop: 7")
    assert set(LEDGERS) == {"as it comes", "one after another"}
