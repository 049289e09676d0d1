"""What a log can say about a decision, what it refuses to say, and what branches say instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.credit import (
    METHODS,
    Unidentified,
    aggregate,
    communicate,
    delegate,
    estimate,
    identify,
    spawn,
    stop,
)
from counterpoint.credit.identify import REASONS, kish
from counterpoint.credit.orchestration import quantile
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.games import action_values, deal, play
from counterpoint.games.replaying import Rerun
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.units import Part, packed

pytestmark = pytest.mark.slow

TAU = Path(__file__).parent / "data" / "tau_bench"

SPAWNS = [[0, 1], [0, 0], [0, 0]]
"""Which entries spawn, by agent: act 1 of agent 0."""


def decided(steps, rows, taken, logprob):
    """The same table with a spawn decision on some rows."""
    parts = [
        Part(int(row), int(steps.step[row]), 0, -1, -1, "spawn" if yes else "no_spawn", None, lp)
        for row, yes, lp in zip(rows, taken, logprob, strict=True)
    ]
    return replace(steps, parts={"decision": packed("decision", len(steps), parts)})


def gates(groups=1, rollouts=1000, seed=1, **dials):
    """Plays of T6, whose agent 0 spawns the others or does not, with its decisions as units."""
    plays = play(deal("T6", contexts=groups, **dials), groups=groups, rollouts=rollouts, seed=seed)
    steps = plays.steps
    rows = np.flatnonzero(steps.mask & (steps.agent == 0))
    return plays, decided(steps, rows, plays.action[rows] == 1, steps.logprob[rows])


def small(taken, outcome, chance, task=None, **columns):
    """A table of one turn a rollout, each with a spawn decision of known chance."""
    n = len(taken)
    steps = Steps.from_columns(
        rollout=list(range(n)), outcome=outcome, group=task or [0] * n, **columns
    )
    with np.errstate(divide="ignore"):
        logprob = np.log(np.where(taken, chance, 1 - np.asarray(chance, dtype=float)))
    return decided(steps, range(n), taken, logprob)


# ---------------------------------------------------------------------------------------------
# From a log


def test_a_hidden_cause_is_seen_through_logged_probabilities_only():
    """A cause u is drawn, agent 0 sees it, and R is u − ½ whatever anybody does: the effect is 0.
    With the marginal chance of spawning, ½, IPS says +.30; with the logged one 0; with frequencies
    where the agent saw the same, 0 too, and without what it saw +.30 again.
    """
    _, steps = gates(agents=1, hidden=0.3, rollouts=20_000)
    blind = replace(steps, anchor=None)
    for expected, kind, table, propensity in (
        (0.0, "overlap", steps, "logged"),
        (0.3, "randomised", steps, 0.5),
        (0.0, "assumption:ignorability", steps, "estimated"),
        (0.3, "assumption:ignorability", blind, "estimated"),
    ):
        credit = spawn(table, propensity=propensity)
        said = credit.diagnostics
        assert credit.identified == kind
        assert credit.estimand == "effect:average"
        assert said["average"] == pytest.approx(expected, abs=4 * said["average_stderr"])
        assert said["average_stderr"] < 0.01
        assert (credit.values[credit.credited] == said["average"]).all()


@pytest.mark.parametrize("estimator", ["ips", "snips", "dr"])
def test_average_effects_from_a_log_cover_the_exact_one(estimator):
    """Over 100 logs of a gate with two workers the 95 % interval holds the exact average effect of
    spawning in 88 or more (a fair coin of .95 falls below that once in 2,000).
    """
    game = deal("T6", agents=3, contexts=4)
    q = action_values(game)[game.start]
    exact = (q[:, 1] - q[:, 0]).mean()
    held = 0
    for seed in range(100):
        _, steps = gates(groups=4, rollouts=50, seed=seed, agents=3)
        credit = spawn(steps, estimator=estimator)
        first = int(np.flatnonzero(credit.credited)[0])
        held += credit.parts["low"][first] <= exact <= credit.parts["high"][first]
    assert held >= 88


def test_ips_by_hand():
    """Taken with .5 and .25, declined with .5 and .75: terms 2·1, 4·0, −2·1, −(4/3)·1."""
    steps = small([1, 1, 0, 0] * 8, [1, 0, 1, 1] * 8, [0.5, 0.25, 0.5, 0.25] * 8)
    credit = spawn(steps)
    assert credit.parts["term"][:4].tolist() == pytest.approx([2, 0, -2, -4 / 3])
    assert credit.diagnostics["average"] == pytest.approx((2 - 2 - 4 / 3) / 4)
    term = np.tile([2, 0, -2, -4 / 3], 8)
    assert credit.diagnostics["average_stderr"] == pytest.approx(term.std(ddof=1) / 32**0.5)


def test_snips_by_hand():
    """Weights 2, 4 and 2, 4/3: (2·1 + 4·0)/6 − (2·1 + 4/3·1)/(10/3) = 1/3 − 1."""
    steps = small([1, 1, 0, 0] * 8, [1, 0, 1, 1] * 8, [0.5, 0.25, 0.5, 0.25] * 8)
    credit = spawn(steps, estimator="snips")
    assert credit.diagnostics["average"] == pytest.approx(1 / 3 - 1)
    assert credit.parts["term"].mean() == pytest.approx(1 / 3 - 1)


def test_dr_by_hand():
    """Two tasks, e = .5. In task a, m₁ = 0 and m₀ = 1, the means of task b: a taken decision with
    R = 1 has the term 0 − 1 + (1 − 0)/.5 = 1, a declined one with R = 0 −1 − (0 − 1)/.5 = 1.
    In task b, m₁ = 1 and m₀ = 0: 1 + (0 − 1)/.5 = −1 and 1 − (1 − 0)/.5 = −1.
    """
    taken, outcome = [1, 0] * 20, [1, 0] * 10 + [0, 1] * 10
    steps = small(taken, outcome, [0.5] * 40, task=["a"] * 20 + ["b"] * 20)
    credit = spawn(steps, estimator="dr")
    assert credit.parts["term"].tolist() == [1.0] * 20 + [-1.0] * 20
    alone = small(taken, outcome, [0.5] * 40)
    with pytest.raises(Refused, match="all decisions are of one; say estimator='ips'"):
        spawn(alone, estimator="dr")


def test_decisions_of_one_rollout_vary_together():
    """Every rollout copied to two decisions: the same average, and the same error, not one that is
    smaller by √2.
    """
    taken, outcome = [1, 0] * 16, list(np.random.default_rng(0).random(32).round(3))
    once = spawn(small(taken, outcome, [0.5] * 32)).diagnostics
    steps = Steps.from_columns(rollout=np.repeat(np.arange(32), 2), outcome=np.repeat(outcome, 2))
    lp = np.full(64, np.log(0.5))
    twice = spawn(decided(steps, range(64), np.repeat(taken, 2), lp)).diagnostics
    assert twice["average"] == pytest.approx(once["average"])
    assert twice["average_stderr"] == pytest.approx(once["average_stderr"])


# ---------------------------------------------------------------------------------------------
# Refused

HALF = [0.5] * 40
ARMS = [1, 0] * 20

LOGS = {
    "never_declined": lambda: small([1] * 40, ARMS, HALF),
    "never_taken": lambda: small([0] * 40, ARMS, HALF),
    "no_propensity": lambda: small(ARMS, ARMS, [np.nan] * 40),
    "no_overlap": lambda: small(ARMS, ARMS, [0.995, *HALF[1:]]),
    "few": lambda: small(ARMS[:18], ARMS[:18], HALF[:18]),
    "unscored": lambda: small(ARMS, [None] * 40, HALF),
    "no_decisions": lambda: small([], [], []),
}


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_log_that_meets_it(reason):
    """The code, the sentence, and the remedy with its price; a program gets the same as a dict."""
    found = identify(LOGS[reason](), "spawn")
    assert (found.kind, found.reason) == ("not", reason)
    with pytest.raises(Unidentified) as refused:
        spawn(LOGS[reason]())
    told = refused.value.as_dict()
    assert set(told) >= {"identified", "reason", "would_identify"}
    assert (told["identified"], told["reason"]) == ("not", reason)
    assert REASONS[reason] in str(refused.value)
    assert "spawn needs more than this log holds" in str(refused.value)
    assert "fork 8 branches" in told["would_identify"]


def test_thin_arms_are_counted_by_their_weights():
    """Twenty decisions of an arm, one of which counts as much as all others: Kish's n is not 20.

    With chance .02 once and .5 else, 1/e is 50 and 2: (50 + 38)²/(2500 + 76) = 3.006.
    """
    chance = np.array([0.02] + [0.5] * 19)
    assert kish(chance) == pytest.approx(88**2 / 2576)
    found = identify(small([1] * 20 + [0] * 20, [1] * 40, [*chance, *HALF[:20]]), "spawn")
    assert found.reason == "few"
    assert found.effective_taken == pytest.approx(88**2 / 2576)
    assert found.effective_declined == 20
    assert (found.taken, found.declined, found.least) == (20, 20, pytest.approx(0.02))


def test_a_policy_that_always_spawns_is_refused():
    """On T6 with coverage 1 one arm is absent; with .995 it is too thin; with .5 it is answered."""
    for coverage, reason in ((1.0, "never_declined"), (0.995, "no_overlap"), (0.5, None)):
        _, steps = gates(agents=3, coverage=coverage)
        found = identify(steps, "spawn")
        assert found.reason == reason
        assert (found.would_identify is None) == (reason is None)


def test_the_remedy_is_the_cheapest_and_its_price_that_of_the_record():
    """Of decisions at the first and the last of three turns the last is cheaper: 16 branches that
    make one act each, which is given, so 16 environment calls and not one forward pass.
    """
    steps = Steps.from_columns(rollout=["r"] * 3, reward=[0, 0, 1], n_tokens=[5, 6, 7])
    first = decided(steps, [0], [1], [0.0])
    both = decided(steps, [0, 2], [1, 1], [0.0, 0.0])
    assert "event 0 of r, about 48 environment calls, 32 forward passes, 208 tokens" in str(
        identify(first, "spawn").would_identify
    )
    assert "event 2 of r, about 16 environment calls, 0 forward passes;" in str(
        identify(both, "spawn").would_identify
    )


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.unit == "decision"])
def test_an_imported_log_gets_the_refusal_and_never_a_number(name):
    """tau-bench: nobody spawns, delegates or aggregates, an assistant that did not write to the
    user is on no record, and no probability is either.
    """
    steps = Steps.from_traces(read(TAU, format="openai_chat"))
    with pytest.raises(Unidentified) as refused:
        estimate(name, steps)
    expected = {"communicate": "never_declined", "stop": "never_declined"}
    told = refused.value.as_dict()
    assert told["reason"] in ("no_decisions", expected.get(name))
    assert "environment calls" in told["would_identify"]


def test_columns_do_not_know_decisions():
    """Steps from arrays: the sentence says what to make them of."""
    with pytest.raises(Refused, match="columns do not tell which decisions a turn has"):
        spawn(Steps.from_columns(rollout=[0], reward=[1]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"propensity": 1.0}, "propensity is 1.0; a probability lies between 0 and 1"),
        ({"propensity": "guessed"}, "propensity is 'guessed'; it is 'logged', 'estimated' or"),
        ({"estimator": "ols"}, "estimator is 'ols'; it is one of ips, snips, dr"),
        ({"n": 1}, "n is too low"),
    ],
)
def test_options_out_of_range_are_named(options, says):
    """One sentence each."""
    with pytest.raises(Refused, match=says):
        spawn(small(ARMS, ARMS, HALF), **options)
    with pytest.raises(Refused, match="no decision 'fire'; there are"):
        identify(small(ARMS, ARMS, HALF), "fire")


def test_recorded_runs_identify_the_decisions_of_a_uniform_policy():
    """ledger-v0 writes down the probability of each decision: spawn, delegate and aggregate are
    identified by overlap, and the average has its error.
    """
    traces = rollout(make("ledger-v0"), Softmax(), groups=8, rollouts=24, seed=3)
    steps = Steps.from_traces(traces)
    for method, verb in ((spawn, "spawn"), (delegate, "delegate")):
        found = identify(steps, verb)
        assert found.kind == "overlap", found
        credit = method(steps)
        assert credit.credited.sum() == found.taken + found.declined
        assert len(credit) == len(steps.units("decision"))
        assert np.isfinite(credit.diagnostics["average_stderr"])


# ---------------------------------------------------------------------------------------------
# By branches


def test_effects_by_branches_cover_the_exact_ones():
    """Q(h, spawn) − Q(h, do not) at every single decision of T6: nine in ten and more of the 95 %
    intervals hold it, and a log in which everybody spawns is no obstacle.
    """
    for coverage in (0.5, 1.0):
        plays, steps = gates(groups=20, rollouts=10, agents=3, coverage=coverage)
        credit = spawn(steps, replay=Rerun(plays, does={"spawn": SPAWNS}), n=64)
        q = action_values(plays.game)[plays.state[steps.units("decision").row]]
        exact = q[:, 1] - q[:, 0]
        inside = (credit.parts["low"] <= exact) & (exact <= credit.parts["high"])
        assert inside.mean() > 0.9
        assert (credit.unit, credit.estimand) == ("decision", "effect")
        assert credit.identified == "randomised"
        assert credit.diagnostics["branches"] == 2 * 64 * 200
        assert np.corrcoef(credit.values, exact)[0, 1] > 0.9


def test_the_worth_of_spawning_changes_its_sign_with_the_size_of_the_team():
    """T6: two agents are worth their cost and six are not, by branches as by enumeration."""
    signs = []
    for agents in (2, 6):
        plays, steps = gates(groups=10, rollouts=4, agents=agents, cost=0.15)
        does = np.zeros((agents, 2), dtype=bool)
        does[0, 1] = True
        credit = spawn(steps, replay=Rerun(plays, does={"spawn": does}), n=128)
        q = action_values(plays.game)[plays.game.start]
        assert credit.diagnostics["average"] == pytest.approx(
            (q[:, 1] - q[:, 0]).mean(), abs=4 * credit.diagnostics["average_stderr"]
        )
        signs.append(np.sign((q[:, 1] - q[:, 0]).mean()))
    assert signs == [1, -1]


def test_paired_differences_by_hand():
    """τ, its error and interval from the very branches: the arms share their numbers."""
    plays, steps = gates(groups=3, rollouts=2, agents=3)
    rerun = Rerun(plays, does={"spawn": SPAWNS})
    credit = spawn(steps, replay=rerun, n=6, seed=4)
    at = np.column_stack([steps.rollout, steps.step])[steps.units("decision").row]
    arms = [rerun.branch(at, np.full(len(at), act), 6, seed=4).values for act in (1, 0)]
    gain = arms[0] - arms[1]
    np.testing.assert_allclose(credit.values, gain.mean(axis=1))
    np.testing.assert_allclose(credit.parts["stderr"], gain.std(axis=1, ddof=1) / 6**0.5)
    reach = 2.5706 * credit.parts["stderr"]
    np.testing.assert_allclose(credit.parts["high"] - credit.values, reach, rtol=1e-3, atol=1e-12)


def test_without_menus_an_act_is_kept_against_the_default():
    """Where no menu says which entries spawn, a decision that was taken is measured against doing
    nothing, and one that was declined cannot be: NaN, and counted.
    """
    plays, steps = gates(groups=6, rollouts=4, agents=3)
    credit = spawn(steps, replay=Rerun(plays), n=200)
    taken = credit.parts["taken"] == 1
    q = action_values(plays.game)[plays.state[steps.units("decision").row]]
    off = credit.values - (q[:, 1] - q[:, 0])
    assert np.all(np.abs(off[taken]) < 5 * credit.parts["stderr"][taken] + 1e-9)
    assert np.isnan(credit.values[~taken]).all()
    assert credit.diagnostics["not_run"] == 2 * 200 * (~taken).sum()


def test_decisions_of_other_verbs_are_not_credited():
    """A delegate among the spawns is NaN for spawn; the others have no decision to credit, which
    branches do not mind.
    """
    plays, steps = gates(groups=2, rollouts=2, agents=3)
    rerun = Rerun(plays, does={"spawn": SPAWNS})
    for method in (delegate, communicate, aggregate, stop):
        with pytest.raises(Unidentified, match="nobody in these runs could take it"):
            method(steps, replay=rerun)


def test_quantiles_of_students_t():
    """Against the table: 12.706, 4.303, 3.182, 2.571, 2.365, 2.228, 2.042, and 1.960 at the end."""
    found = quantile(np.array([1, 2, 3, 5, 7, 10, 30, 1e9, 0]))
    table = [12.706, 4.303, 3.182, 2.571, 2.365, 2.228, 2.042, 1.960]
    np.testing.assert_allclose(found[:-1], table, rtol=2e-3)
    assert np.isnan(found[-1])
