"""Bias, variance and cost over batches: against hand arithmetic and the listing of all plays."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.credit import c3, coma, cosac, estimate, grpo, reinforce, rloo, score
from counterpoint.formats import read
from counterpoint.games import chain, deal, every, gradient, play, policy_gradient, truth
from counterpoint.games.game import visits
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.scoring import Metered, over_batches
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

OUTCOME = {
    "plain": lambda plays, again: reinforce(plays.steps, baseline="none"),
    "others": lambda plays, again: rloo(plays.steps),
    "mean": lambda plays, again: grpo(plays.steps, normalize_std=False, sigma_floor=0.0),
}
EVEN = {"agents": 2, "actions": 2, "dep": 0.5, "spread": 0.3, "seed": 3}
"""Dials of a game of which no state is rare, so that few batches meet them all."""


def coin():
    """One agent tosses a fair coin: heads pays 1."""
    return chain(np.array([0.0, 1.0]), np.zeros((1, 2)))


def listed(game, measure, rollouts):
    """Bias², MSE and mean gradient of a method by listing all groups of all contexts.

    E[S_c], E[Σ e²] and E g are sums over the groups that can happen, each with its probability; a
    batch plays every context once.
    """
    plays, chance = every(game, rollouts)
    weight = chance[plays.steps.group] * len(game.start)
    credit = measure(plays, None).values
    error = credit - truth(plays).values
    cell = plays.state * game.policy.shape[1] + plays.action
    often = (visits(game, 1.0)[:, None] * game.probability).reshape(-1) * len(game.start) * rollouts
    total = np.bincount(cell, weight * error, minlength=len(often))
    rows = often.sum()
    bias2 = np.sum(total[often > 0] ** 2 / often[often > 0]) / rows
    step = gradient(plays, credit * chance[plays.steps.group] * len(chance))
    return float(bias2), float(np.sum(weight * error**2) / rows), step.reshape(-1)


# ---------------------------------------------------------------------------------------------
# Bias, variance, MSE


@pytest.mark.parametrize(
    ("name", "bias2", "variance"),
    [("plain", 1 / 4, 0), ("others", 0, 1 / 4), ("mean", 1 / 16, 1 / 16)],
)
def test_a_coin_by_hand(name, bias2, variance):
    """Heads is worth ½, tails −½, in groups of two. Without a baseline the credit is R, always ½
    too much. Against the other one: right on average, and off by ½ either way. Against the mean it
    is half of that: ¼ too small, and off by ¼.
    """
    game = coin()
    assert listed(game, OUTCOME[name], 2)[:2] == pytest.approx((bias2, bias2 + variance))
    found = over_batches(game, {name: OUTCOME[name]}, batches=200, rollouts=2)[name]
    assert found.bias2 == pytest.approx(bias2, abs=0.05)
    assert found.variance == pytest.approx(variance, abs=0.05)
    assert found.mse == pytest.approx(found.bias2 + found.variance, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTCOME)
def test_a_few_batches_are_right_on_average(name):
    """Of 60 estimates by three batches each the mean lies within four standard errors of what
    listing gives: bias² is unbiased however few batches there are, and so are variance and MSE.
    """
    game = deal("T2", **EVEN, contexts=2)
    bias2, mse, _ = listed(game, OUTCOME[name], 2)
    found = [
        over_batches(game, {name: OUTCOME[name]}, batches=3, rollouts=2, seed=seed)[name]
        for seed in range(60)
    ]
    for got, want in (("bias2", bias2), ("mse", mse), ("variance", mse - bias2)):
        values = np.array([getattr(each, got) for each in found])
        assert abs(values.mean() - want) < 4 * values.std(ddof=1) / len(values) ** 0.5


@pytest.mark.slow
def test_intervals_cover_what_listing_gives():
    """Of 30 intervals from 15 batches each, 95 % less four Monte-Carlo errors (.16) hold the exact
    figure; where there is no bias, all but a few, since they are wide there.
    """
    game = deal("T2", **EVEN, contexts=4)
    measures = {name: OUTCOME[name] for name in ("plain", "others")}
    exact = {name: listed(game, measures[name], 2) for name in measures}
    hits = dict.fromkeys([(name, figure) for name in measures for figure in ("bias2", "mse")], 0)
    for seed in range(30):
        for name, found in over_batches(game, measures, batches=15, rollouts=2, seed=seed).items():
            for figure, want in zip(("bias2", "mse"), exact[name][:2], strict=True):
                low, high = found.intervals[figure]
                hits[name, figure] += low <= want <= high
    assert min(hits.values()) / 30 > 0.95 - 0.16


def test_the_truth_is_never_off():
    """Exact credit has no error, is told apart by every figure, and costs what the plays cost."""
    game = deal("T2", agents=3, contexts=8, seed=1)
    found = over_batches(game, {"exact": lambda plays, again: truth(plays)}, batches=5, rollouts=4)[
        "exact"
    ]
    assert (found.bias2, found.variance, found.mse, found.conservation_error) == (0, 0, 0, 0)
    assert found.kendall == found.sign_accuracy == found.culprit == 1
    assert found.intervals["pearson"] == pytest.approx((1, 1))
    assert (found.env_calls, found.forward_passes, found.tokens) == (8 * 4 * 3, 8 * 4 * 3, 0)
    assert (found.estimand, found.truth) == ("seqau", "seqau")


def test_what_is_left_uncredited_counts_as_nothing():
    """A method that never speaks is off by the truth itself, and all of that is bias."""
    game = coin()

    def silent(plays, again):
        return Credit(np.full(len(plays.steps), np.nan))

    found = over_batches(game, {"silent": silent}, batches=50, rollouts=2)["silent"]
    assert (found.credited, found.mse) == (0, 1 / 4)
    assert found.bias2 == pytest.approx(1 / 4, abs=0.02)
    assert math.isnan(found.pearson)
    assert all(math.isnan(end) for end in found.intervals["pearson"])


def test_rows_of_nature_are_no_decisions():
    """T14 is T2 with masked rows between the acts: the figures are those of T2, within noise."""
    measures = {"others": OUTCOME["others"]}
    mse, bias2 = {}, {}
    for name in ("T14", "T2"):
        game = deal(name, agents=2, contexts=2, seed=2)
        found = over_batches(game, measures, batches=100, rollouts=2)["others"]
        assert found.credited == 1
        mse[name], bias2[name] = found.intervals["mse"], found.intervals["bias2"]
    for ends in (mse, bias2):
        assert max(low for low, _ in ends.values()) < min(high for _, high in ends.values())


# ---------------------------------------------------------------------------------------------
# Gradient


@pytest.mark.slow
def test_the_mean_gradient_is_what_listing_gives():
    """The scale, error and cosine of E g against g*, from the exact expectation of the method."""
    game = deal("T2", **EVEN, contexts=2)
    exact = policy_gradient(game).reshape(-1)
    found = over_batches(game, OUTCOME, batches=200, rollouts=2)
    for name in ("others", "mean"):
        _, _, g = listed(game, OUTCOME[name], 2)
        scale = g @ exact / (exact @ exact)
        low, high = found[name].intervals["gradient_scale"]
        assert low - 0.1 < scale < high + 0.1
        error = np.linalg.norm(g - exact) / np.linalg.norm(exact)
        low, high = found[name].intervals["gradient_error"]
        assert low - 0.1 < error < high + 0.1
    assert found["others"].gradient_cosine > 0.99
    # mean-only GRPO with n = 2 is half of RLOO, row by row, so half of its noise too
    assert found["mean"].gradient_noise == pytest.approx(found["others"].gradient_noise / 2)


# ---------------------------------------------------------------------------------------------
# Cost


def test_what_a_batch_costs_by_hand():
    """Four agents: a rollout is four turns. C3 with one sibling draws each act anew and plays to
    the end: 4 + 3 + 2 + 1 turns more, each a call and a pass. COMA repeats later acts without
    asking, so no pass; two of three acts are alternatives: 2 · 10 calls. COSAC asks, and runs none.
    """
    measures = {
        "rloo": lambda plays, again: rloo(plays.steps),
        "c3": lambda plays, again: c3(plays.steps, replay=again, alternatives=1),
        "coma": lambda plays, again: coma(plays.steps, replay=again),
        "cosac": lambda plays, again: cosac(plays.steps, policy=again, ridge=0.01, continuations=1),
    }
    found = over_batches(deal("T2", contexts=3), measures, batches=2, rollouts=2)
    spent = {name: (each.env_calls, each.forward_passes) for name, each in found.items()}
    assert spent["rloo"] == (24, 24)
    assert spent["c3"] == (6 * 14, 6 * 14)
    assert spent["coma"] == (6 * 24, 24)
    assert spent["cosac"][0] == 24 < spent["cosac"][1]


def test_one_budget_pays_for_rollouts_or_for_branches():
    """100 calls, groups of two in three contexts, 24 of them for rollouts. RLOO: ⌊100 ÷ 12⌋ = 8
    rollouts a group. C3 with a sibling each needs 4 + 3 + 2 + 1 turns a run, 60 for six, out of 76
    that are left. With two it needs 8 + 6 + 4 + 2: three runs are 60, and of the fourth 8 + 6 make
    74; for the third turn's 4 only 2 are left. So 10 turns of 24 go without, two branches each.
    """
    measures = {
        "rloo": lambda plays, again: rloo(plays.steps),
        "one": lambda plays, again: c3(plays.steps, replay=again, alternatives=1),
        "two": lambda plays, again: c3(plays.steps, replay=again, alternatives=2),
    }
    found = over_batches(deal("T2", contexts=3), measures, batches=2, rollouts=2, calls=100)
    assert [found[name].rollouts for name in measures] == [8, 2, 2]
    assert [found[name].env_calls for name in measures] == [96, 84, 98]
    assert [found[name].left_out for name in measures] == [0, 0, 20]
    assert found["two"].credited == pytest.approx(14 / 24)


def test_batches_share_no_draws():
    """One place of one game in two batches: other branches. In the same batch: the same ones."""
    plays = play(deal("T15", contexts=1), groups=1, rollouts=3)
    where, drawn = np.array([[0, 0], [1, 2]]), np.array([-1, -1])

    def branched(seed):
        return Metered(Rerun(plays), plays.steps, seed).branch(where, drawn, 8).values

    assert not np.isin(branched(1), branched(2)).any()
    np.testing.assert_array_equal(branched(1), branched(1))


def test_methods_are_judged_on_the_same_plays():
    """A method asked for twice, or beside others, gets the same figures; another seed, others."""
    game = deal("T2", contexts=2)
    both = over_batches(game, OUTCOME, batches=3, rollouts=2, seed=4)
    alone = over_batches(game, {"a": OUTCOME["mean"]}, batches=3, rollouts=2, seed=4)["a"]
    np.testing.assert_equal(alone._asdict(), both["mean"]._asdict())
    other = over_batches(game, {"a": OUTCOME["mean"]}, batches=3, rollouts=2, seed=5)["a"]
    assert alone.mse != other.mse


# ---------------------------------------------------------------------------------------------
# Odd input


def test_what_cannot_be_judged_is_refused():
    """One batch; a truth that not every decision has; a budget below the rollouts."""
    game = deal("T12", contexts=2)
    with pytest.raises(Refused, match="1 batches; bias and variance"):
        over_batches(game, OUTCOME, batches=1, rollouts=2)
    with pytest.raises(Refused, match="first_error is not defined for every decision"):
        over_batches(game, OUTCOME, batches=2, rollouts=2, estimand="first_error")
    with pytest.raises(Refused, match="15 calls does not pay for 2 groups of 2 rollouts, which"):
        over_batches(game, OUTCOME, batches=2, rollouts=2, calls=15)


def test_a_game_without_gradient_has_no_relative_error():
    """Where nothing that anybody does pays, g* is 0: NaN, and no warning."""
    game = replace(coin(), reward=np.zeros((1, 2)))
    found = over_batches(game, OUTCOME, batches=3, rollouts=2)["others"]
    assert math.isnan(found.gradient_error)
    assert math.isnan(found.gradient_scale)
    assert found.mse == 0


# ---------------------------------------------------------------------------------------------
# On the command line


def printed(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_the_command_prints_both(tmp_path):
    """One batch and many, as JSON and as lines that hold the same numbers with their intervals."""
    arguments = ["score", "c3", "T2", "--groups", 3, "--rollouts", 2, "--batches", 4]
    told = json.loads(printed(*arguments, "--calls", 100, "--json"))
    game = deal("T2", contexts=3)
    c3_ = {"c3": lambda plays, again: c3(plays.steps, replay=again)}
    want = over_batches(game, c3_, batches=4, rollouts=2, calls=100)["c3"]
    assert told["over_batches"]["bias2"] == want.bias2
    assert told["over_batches"]["left_out"] == want.left_out > 0
    assert told["intervals"].keys() == {"pearson", "spearman", "kendall"}
    shown = printed(*arguments, "--calls", 100)
    low, high = want.intervals["bias2"]
    assert re.search(rf"^bias2 +{want.bias2:.6g} \({low:.6g} to {high:.6g}\)$", shown, re.MULTILINE)
    assert json.loads(printed(*arguments[:3], "--bootstrap", 0, "--json"))["intervals"] == {}


def test_a_budget_and_batches_go_together(tmp_path):
    """A budget without batches, batches of two files: refused, with the way out."""
    for arguments, why in (
        (["c3", "T2", "--calls", "100"], "say --batches 20 too"),
        ([__file__, __file__, "--batches", "2"], "two credit files are one batch"),
    ):
        found = CliRunner().invoke(app, ["score", *arguments]).exception
        assert isinstance(found, Refused)
        assert why in str(found)


@pytest.mark.slow
def test_two_files_know_their_runs(tmp_path):
    """Culprits and sums by run, out of the files alone, are those of the tables they came from."""
    runs, files = tmp_path / "runs.jsonl", {name: tmp_path / name for name in ("rloo", "gigpo")}
    printed("record", "research-v0", "-o", runs, "--groups", 3, "--rollouts", 3)
    for name, file in files.items():
        printed("credit", name, runs, "-o", file)
    told = json.loads(printed("score", *files.values(), "--json"))
    steps = Steps.from_traces(read(runs))
    one, other = (estimate(name, steps) for name in files)
    want = score(one, other, rollout=steps.rollout, bootstrap=200)
    for name in ("culprit", "culprits", "conservation_error", "kendall"):
        assert told[name] == getattr(want, name)
    assert told["culprits"] > 0
    assert told["intervals"] == {name: list(ends) for name, ends in want.intervals.items()}
