"""The study of diffusion: its closed forms against listing, and what units show, by hand."""

from __future__ import annotations

import json
from functools import reduce

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.credit import estimate
from counterpoint.envs.research import Research
from counterpoint.games import chain, deal, every, truth
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import value_of
from counterpoint.spelling import Refused
from counterpoint.study import study
from counterpoint.study.diffusion import (
    additive_ratio,
    all_runs,
    closed,
    density,
    listed_correlation,
    listed_ratio,
)
from little_envs import Doors


def team(agents: int, seed: int, actions: int = 2):
    """An additive team: its parts, its policy, and the game that they make."""
    part, logits = np.random.default_rng(seed).normal(size=(2, agents, actions))
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return part, policy, chain(reduce(np.add.outer, part), np.log(policy))


# ---------------------------------------------------------------------------------------------
# Signal to noise


@pytest.mark.parametrize("agents", [2, 5])
@pytest.mark.parametrize("actions", [2, 3])
def test_the_closed_form_is_what_listing_finds(agents, actions):
    """Of everybody's number, of one for pairs of decisions, and of each decision's own."""
    part, policy, game = team(agents, 1, actions)
    plays, chance = every(game, 1)
    exact = truth(plays, "seqau").values
    for size in (agents, 2, 1):
        scope = np.arange(agents) // size
        cell = plays.steps.rollout * agents + scope[plays.steps.step]
        shared = np.bincount(cell, exact)[cell]
        want = listed_ratio(plays, chance, shared)
        assert additive_ratio(part, policy, scope, None) == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("rollouts", [2, 3])
def test_a_group_adds_the_noise_of_its_mean(rollouts):
    """RLOO over every group that can happen has the ratio of the closed form."""
    part, policy, game = team(3, 2)
    plays, chance = every(game, rollouts)
    credit = estimate("grpo", plays.steps, normalize_std=False, unbias=True, sigma_floor=0.0)
    want = listed_ratio(plays, chance, credit.values)
    got = additive_ratio(part, policy, np.zeros(3, dtype=np.int64), rollouts)
    assert got == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("decisions", [2, 3, 9])
def test_even_decisions_by_hand(decisions):
    """A coin per decision, x = ±½ and ∇log π = ±(½, −½): g = x·s is the same on both sides, and
    each of the T − 1 others adds ¼·½ of noise to a signal of ⅛: 1/(T − 1).
    """
    part, policy = np.tile([0.0, 1.0], (decisions, 1)), np.full((decisions, 2), 0.5)
    one = np.zeros(decisions, dtype=np.int64)
    assert additive_ratio(part, policy, one, None) == pytest.approx(1 / (decisions - 1))
    assert additive_ratio(part, policy, np.arange(decisions), None) == np.inf


def test_only_the_number_of_decisions_counts():
    """Four agents of four turns and sixteen of one turn have one ratio; what an agent's own number
    has does not depend on how many agents there are.
    """
    rows = closed()
    by_size: dict[int, set] = {}
    by_turns: dict[int, set] = {}
    for row in rows:
        by_size.setdefault(row["decisions"], set()).add(round(row["outcome"], 12))
        by_turns.setdefault(row["turns_each"], set()).add(round(row["agent"], 12))
    assert {len(found) for found in (*by_size.values(), *by_turns.values())} == {1}
    assert all(a["outcome"] < a["agent"] for a in rows)


@pytest.mark.parametrize("name", ["T1", "T2"])
@pytest.mark.parametrize("agents", [2, 4])
def test_the_outcome_correlates_by_one_over_root_k(name, agents):
    """R − V(h₀) is the sum of K uncorrelated steps, so its correlation with them is 1/√K exactly,
    whether or not anybody reacts; that of seqau with itself is 1.
    """
    plays, chance = every(deal(name, agents=agents, actions=2, seed=7), 1)
    steps = plays.steps
    uniform = steps.outcome - chance @ steps.outcome[steps.step == 0]
    assert listed_correlation(plays, chance, uniform) == pytest.approx(agents**-0.5, abs=1e-12)
    assert listed_correlation(plays, chance, truth(plays).values) == pytest.approx(1)


# ---------------------------------------------------------------------------------------------
# Density and visibility


@pytest.mark.slow
def test_all_runs_of_a_task_are_listed_with_their_chances():
    """868 runs of research-v0, of total probability 1, whose mean outcome is the exact V(h₀)."""
    runs = list(all_runs(Research()))
    assert len(runs) == 868
    assert sum(p for _, p in runs) == pytest.approx(1, abs=1e-12)
    (trace,) = rollout(Research(), Softmax(), groups=1, rollouts=1)
    mean = sum(p * trace.outcome for trace, p in runs)
    assert mean == pytest.approx(value_of(trace[:0], policies=Softmax()), abs=1e-12)


def test_what_units_show_by_hand():
    """Doors: a scout says one of three doors, `message leader: 0`, and a leader opens one of three
    whatever it was told, `call open {"door": 0}`; it pays if that was the prize. So the call shows
    all of the outcome and the message nothing; of seven words one shows all.
    """
    rows = {row["unit"]: row for row in density(Doors())}
    assert {row["listed"] for row in rows.values()} == {9}
    want = {
        "token": (7, 7, 1 / 7, 1),
        "turn": (2, 2, 1 / 2, 1),
        "message": (1, 1, 0, 0),
        "tool_call": (1, 1, 1, 1),
        "agent": (2, 2, 1 / 2, 1),
        "role": (2, 2, 1 / 2, 1),
        "decision": (1, 1, 0, 0),
        "team": (1, 1, 1, 1),
    }
    for kind, numbers in want.items():
        got = [rows[kind][name] for name in ("per_run", "places", "shows", "most")]
        np.testing.assert_allclose(got, numbers, atol=1e-12)


# ---------------------------------------------------------------------------------------------
# On the command line


@pytest.mark.slow
def test_the_study_writes_a_page(tmp_path):
    """One page with three figures, its numbers as JSON, and no page written over."""
    arguments = ["study", "diffusion", "-o", str(tmp_path), "--quick", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert {"outcome", "T2_ratio", "shows"} < {name for row in rows for name in row}
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert isinstance(CliRunner().invoke(app, arguments).exception, Refused)


def test_an_unknown_study_is_refused(tmp_path):
    """With the list of those there are."""
    with pytest.raises(Refused, match="no study 'osmosis'; the studies are diffusion"):
        study("osmosis", tmp_path)
