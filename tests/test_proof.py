"""The proof: faults where they were planted, two causes by hand, and a control that can fail."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.credit import blame, c3, coma, loo, reinforce, shapley
from counterpoint.games import every, truth
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.policies import Observation
from counterpoint.redrive import value_of
from counterpoint.spelling import Refused
from counterpoint.streams import Draws
from counterpoint.study import proof as proof_module
from counterpoint.study.coverage import _listed, coverage
from counterpoint.study.faults import (
    HARMLESS,
    KINDS,
    METHODS,
    Slipping,
    control,
    found_by,
    recorded,
)
from counterpoint.study.proof import CAUSES, competing, fragile

# ---------------------------------------------------------------------------------------------
# Planting


def test_a_slip_has_the_chance_that_it_says():
    """Of the labels that the menu has the first is taken; where that is the right one and the wrong
    one is there too, they share the chance, and draws fall on it so.
    """
    policy = Slipping(("a", "b"), "a", "c", 0.25)
    seen = Observation("x", "x", (), None, 0, list)
    assert policy.probs(seen, {"c": "C", "a": "A", "b": "B"}) == [0.25, 0.75, 0.0]
    assert policy.probs(seen, {"b": "B", "c": "C"}) == [1.0, 0.0]
    assert policy.probs(seen, {"a": "A", "b": "B"}) == [1.0, 0.0]
    assert policy.probs(seen, {"d": "D", "e": "E"}) == [0.0, 1.0]
    menu = {"c": "C", "a": "A"}
    said = [policy(seen, menu, Draws("k", "policy", "x", k)) for k in range(400)]
    assert abs(said.count("C") / 400 - 0.25) < 4 * (0.25 * 0.75 / 400) ** 0.5


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_planted_once_a_run_and_does_harm(name):
    """One row of each run is planted; its exact credit, as `value_of` says on both sides of the
    act, is below 0, or 0 where chance had already lost the run.
    """
    kind = KINDS[name]
    found = recorded(kind, 2, seed=3)
    assert len(found.traces) == 2
    assert found.steps.rollout[found.planted].tolist() == [0, 1]
    number, seq = found.steps.event[found.planted[0]].tolist()
    trace = found.traces[number]
    before, after = (value_of(trace[:t], found.env, found.team) for t in (seq, seq + 1))
    assert found.exact[found.planted[0]] == pytest.approx(after - before)
    assert after <= before
    assert trace[seq].agent.startswith(kind.role) or trace[seq].agent.startswith("coordinator.")


def test_the_worth_of_a_needless_spawn_by_hand():
    """It costs .2, and half of the others cost it too: −.2 against −.1 on average."""
    found = recorded(KINDS["needless spawn"], 2)
    assert found.exact[found.planted] == pytest.approx([-0.1, -0.1])


def test_who_is_found_by_hand():
    """Planted in rows 1 and 4; the lowest of the first run is 1, of the second all three tie."""
    steps = every(fragile(), 1)[0].steps
    credit = np.array([0, -1, 0, 2, 2, 2, *np.zeros(18)])
    kept = np.where(steps.rollout < 2, credit, np.nan)
    assert found_by(kept, steps, np.array([1, 4])) == pytest.approx((1 + 1 / 3) / 2)


# ---------------------------------------------------------------------------------------------
# Two causes


def test_two_causes_by_hand():
    """Each errs with .3. Two erred: V falls from .7³ to 0 at the first, and nobody else has any;
    taking one out changes nothing; v(∅) = 1 and v = 0 for any other coalition, ½ each. One erred:
    it bears all, by seqau what was left to lose, .7³ or .7² after the first did right, +.7² − .7³.
    """
    rows = {(row["who erred"], row["credit"]): row for row in competing()}
    want = {
        ("the first alone", "seqau"): (-0.343, 0, 0),
        ("the first alone", "coma"): (-0.7, 0, 0),
        ("the first alone", "removal:frozen"): (-1, 0, 0),
        ("the first alone", "shapley:frozen"): (-1, 0, 0),
        ("the second alone", "seqau"): (0.147, -0.49, 0),
        ("the first and the second", "seqau"): (-0.343, 0, 0),
        ("the first and the second", "coma"): (0, 0, 0),
        ("the first and the second", "removal:frozen"): (0, 0, 0),
        ("the first and the second", "shapley:frozen"): (-0.5, -0.5, 0),
        ("the first and the second", "first_error"): (0, 0, 0),
    }
    for key, numbers in want.items():
        row = rows[key]
        assert [row[n] for n in ("first", "second", "third")] == pytest.approx(numbers)
        assert row["sum"] == pytest.approx(sum(numbers))


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        ("seqau", partial(blame, n=2000)),
        ("seqau", partial(c3, alternatives=2000, own=2000)),
        ("coma", coma),
        ("removal:frozen", partial(loo, downstream="frozen", n=1)),
        ("shapley:frozen", shapley),
    ],
)
def test_methods_say_of_two_causes_what_the_table_says(name, measure):
    """Measured by branches, on the plays of the table."""
    plays, _ = every(fragile(), 1)
    found = measure(plays.steps, replay=Rerun(plays)).values.reshape(-1, 3)
    exact = truth(plays, name).values.reshape(-1, 3)
    acts = plays.action.reshape(-1, 3).tolist()
    for did in CAUSES.values():
        play = acts.index(list(did))
        assert found[play] == pytest.approx(exact[play], abs=0.06)


# ---------------------------------------------------------------------------------------------
# The control


def test_a_change_without_effect_is_planted_all_the_same():
    """Half of the runs rate the work otherwise, and earn what the others do."""
    found = recorded(HARMLESS, 4, noise=0.0)
    assert len(found.planted) == 4
    assert {trace.outcome for trace in found.traces} == {1.0}
    assert not found.exact.any()


def test_the_control_fails_when_somebody_is_blamed():
    """A method that takes 2 off the outcome blames everybody: the study ends with a sentence."""

    def harsh(steps, replay):
        return Credit(reinforce(steps, baseline="constant", constant=2.0).values)

    with pytest.raises(Refused, match="the control of the proof failed: harsh blames somebody for"):
        control(1, {"harsh": harsh})


# ---------------------------------------------------------------------------------------------
# Coverage


def test_the_listed_figures_are_those_of_endless_play():
    """RLOO in groups of two, by hand: its mean gradient is the exact one, its error has no bias
    but what the teammate's luck brings, and its correlation lies below 1/√2 by the group's noise.
    """
    _, exact = _listed()
    assert exact["gradient_scale"] == pytest.approx(1)
    assert 0 < exact["bias2"] < exact["mse"]
    assert 0 < exact["pearson"] < 0.5**0.5


@pytest.mark.soak
def test_intervals_hold_what_they_should_but_those_of_few_branches():
    """A hundred simulations: none is off by more than three standard errors but the effects by
    eight pairs of branches, which are too narrow, as the page says.
    """
    verdicts = {row["interval"]: row["verdict"] for row in coverage(100)}
    assert verdicts.pop("spawn: 8 pairs of branches") == "too narrow"
    assert set(verdicts.values()) == {"as it says"}


# ---------------------------------------------------------------------------------------------
# The study


@pytest.mark.slow
def test_the_study_prints_what_it_found(tmp_path):
    """A page and its numbers: ten kinds, each found by listing, a control, causes and intervals."""
    arguments = ["study", "proof", "-o", str(tmp_path), "--quick", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    faults, nobody, held = (
        [row for row in rows if name in row] for name in ("fault", "control", "interval")
    )
    assert [row["fault"] for row in faults] == list(KINDS)
    found = {name: np.mean([row[name] for row in faults]) for name in ("exact", "c3", "grpo")}
    assert found["exact"] > 0.8
    assert found["c3"] > 0.6 > 0.3 > found["grpo"]
    assert len(nobody) == len(KINDS) + 1
    for row in nobody:
        assert all(abs(row[name]) < 1e-9 for name in ("exact", *METHODS))
    for row in held:
        share, n = row["hold the exact value"], row["intervals"]
        assert share * n == pytest.approx(round(share * n))
        assert row["±"] == pytest.approx(1.96 * (0.95 * 0.05 / n) ** 0.5)
    assert "spawn: 8 pairs of branches" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_failed_control_ends_the_study(tmp_path, monkeypatch):
    """No page, exit 1, one sentence: the run of a control in which the team does slip."""
    slipping = [("slipped", KINDS["early stop"], 0.5)]
    monkeypatch.setattr("counterpoint.study.faults._CONTROLS", slipping)
    with pytest.raises(Refused, match=r"exact blames somebody for -0\.\d+ in runs of “slipped”"):
        proof_module.proof(tmp_path, quick=True)
    assert not list(tmp_path.iterdir())
