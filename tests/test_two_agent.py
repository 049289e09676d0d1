"""The experiment with two agents: statistics over seeds, equal budgets, controls, its folder."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from counterpoint.branches import Spent
from counterpoint.credit import cad_grpo, rloo
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import credits_of, value_of
from counterpoint.report import Page
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.study import two_agent
from counterpoint.study.two_agent import Size, comparable
from counterpoint.study.two_agent_page import verdict
from counterpoint.study.two_agent_run import (
    ARMS,
    BUDGET,
    HEADLINE,
    Arm,
    Cell,
    batch_size,
    permuted,
    scaled,
    trained,
)
from counterpoint.study.two_agent_stats import (
    at_mark,
    best_path,
    improvement,
    interval,
    outcomes,
    over_budget,
)
from counterpoint.study.two_agent_watch import distinct, failing_together, listed, success

pytestmark = pytest.mark.slow

LINE = [
    {"env_calls": 0, "tokens": 0, "success": 0.1},
    {"env_calls": 4, "tokens": 90, "success": 0.5},
    {"env_calls": 10, "tokens": 200, "success": 0.9},
]
LEARNT = Softmax({"question": {"ask:new": 1.3}, "asked:new": {"read:survey": 0.7}})
RESEARCH = "research-v0"


# ---------------------------------------------------------------------------------------------
# Statistics


def test_interval_of_two_runs_by_hand():
    """Drawn again, two runs give 0, ½ or 1 with chances ¼, ½, ¼: the interval is all of it."""
    assert interval([0.0, 1.0]) == (0.5, 0.0, 1.0)


def test_interval_of_runs_that_agree_has_no_width():
    """Equal runs, and a single one."""
    assert interval([0.25] * 5) == (0.25, 0.25, 0.25)
    assert interval([0.25]) == (0.25, 0.25, 0.25)


def test_interval_of_nothing_is_nothing():
    """No run has no mean."""
    assert all(math.isnan(each) for each in interval([]))


def test_improvement_by_hand():
    """(1, 2) against (0, 2): 1 > 0, 1 < 2, 2 > 0, 2 = 2, so (1 + 0 + 1 + ½) ÷ 4."""
    assert improvement([1, 2], [0, 2])[0] == 0.625


def test_improvement_of_what_is_always_better_is_sure():
    """Every pair is won, however runs are drawn."""
    assert improvement([3, 4, 5], [0, 1, 2]) == (1.0, 1.0, 1.0)
    assert improvement([0, 1, 2], [3, 4]) == (0.0, 0.0, 0.0)


def test_improvement_of_equal_runs_is_a_half():
    """Ties count half, so that a method against its copy says no difference."""
    assert improvement([0.7, 0.7], [0.7, 0.7]) == (0.5, 0.5, 0.5)


def test_improvement_is_antisymmetric():
    """P(X > Y) + P(Y > X) = 1, ties halved."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 5, 9).tolist(), rng.integers(0, 5, 7).tolist()
    assert improvement(x, y)[0] + improvement(y, x)[0] == pytest.approx(1)


def test_success_over_the_budget_by_hand():
    """.1 for four calls, .5 for six; what is left of a larger budget is played by the last."""
    assert over_budget(LINE, 10) == pytest.approx((0.1 * 4 + 0.5 * 6) / 10)
    assert over_budget(LINE, 20) == pytest.approx((0.1 * 4 + 0.5 * 6 + 0.9 * 10) / 20)
    assert over_budget(LINE, 5) == pytest.approx((0.1 * 4 + 0.5 * 1) / 5)


def test_a_mark_is_read_at_the_nearest_update():
    """By calls and by tokens."""
    assert at_mark(LINE, "env_calls", 5)["success"] == 0.5
    assert at_mark(LINE, "tokens", 180)["success"] == 0.9


def test_step_length_is_chosen_on_its_own_seeds():
    """The other seeds, where the other length is better, have no say."""
    bad, good = [{**LINE[0]}], [{**LINE[0], "success": 0.8}]
    runs = {
        Cell("e", "naive_grpo", 6.0, 1000): bad,
        Cell("e", "naive_grpo", 24.0, 1000): good,
        Cell("e", "naive_grpo", 6.0, 0): good,
        Cell("e", "naive_grpo", 24.0, 0): bad,
    }
    assert best_path(runs, "e", "naive_grpo", [1000], Spent(10)) == 24.0


def ended(**finals: list[float]) -> dict:
    """Runs of arms that end so, after one update."""
    return {
        Cell("e", name, 6.0, seed): [LINE[0], {**LINE[2], "step": 1, "rollouts": 8, "success": end}]
        for name, ends in finals.items()
        for seed, end in enumerate(ends)
    }


def test_a_gain_that_the_control_shows_too_is_not_credits():
    """Better than naive GRPO and no better than q dealt anew; then better than both; then no
    better than either.
    """
    low, high = [0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9]
    runs = ended(
        single_agent=low, naive_grpo=low, cad_upstream=high, cad_upstream_permuted=high,
        cad_equal=high, cad_equal_permuted=low,
    )  # fmt: skip
    said = verdict(runs, "e", Spent(10, 0, 200))
    assert said[0].endswith("but not than its control: not credit's gain.")
    assert said[1].endswith("so it does than its control: credit's gain.")
    assert "single agent is not told apart" in said[2]
    worse = ended(
        single_agent=low, naive_grpo=high, cad_upstream=low, cad_upstream_permuted=low,
        cad_equal=low, cad_equal_permuted=high,
    )  # fmt: skip
    said = verdict(worse, "e", Spent(10, 0, 200))
    assert said[0].endswith("but not than its control: not q's doing.")
    assert said[1].endswith("its control ends higher than it does: q does harm.")
    same = ended(**dict.fromkeys(HEADLINE, low))
    assert "a null result" in verdict(same, "e", Spent(10, 0, 200))[0]


def test_a_table_has_success_at_both_marks_and_what_it_cost():
    """A row for each arm that was run, in the order of the table of arms."""
    table = outcomes(ended(naive_grpo=[0.5, 0.7], rloo=[0.6]), "e", Spent(10, 0, 200))
    assert [row["method"] for row in table] == ["naive_grpo", "rloo"]
    assert table[0]["final"].startswith(".600 [")
    assert (table[0]["seeds"], table[0]["env_calls"], table[0]["tokens"]) == (2, 10, 200)


# ---------------------------------------------------------------------------------------------
# Budgets


def test_the_last_batch_is_what_is_left():
    """80 of 100 calls for eight tasks leave two; tokens would leave eight."""
    arm, most = Arm("grpo"), Spent(100, 0, 1000)
    assert batch_size(arm, most, Spent(), 0) == 8
    assert batch_size(arm, most, Spent(80, 0, 500), 8) == 2


def test_a_budget_that_is_spent_waits_for_the_other():
    """97 of 100 calls leave less than half a task, so only tokens count: 500 are four tasks."""
    arm, most = Arm("grpo"), Spent(100, 0, 1000)
    assert batch_size(arm, most, Spent(97, 0, 500), 4) == 4
    assert batch_size(arm, most, Spent(97, 0, 990), 8) == 0


def test_who_never_calls_a_tool_comes_to_an_end():
    """Calls are never spent; three times the tokens are enough."""
    arm, most = Arm("grpo"), Spent(100, 0, 1000)
    assert batch_size(arm, most, Spent(0, 0, 2999), 8) > 0
    assert batch_size(arm, most, Spent(0, 0, 3000), 8) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single_agent", "naive_grpo", "c3"])
def test_arms_spend_the_same_calls_and_the_same_tokens(method):
    """Within two percent, at some update of every arm, for both."""
    most = scaled(RESEARCH, 0.5)
    rows = trained(Cell(RESEARCH, method, 6.0, 0), 0.5, 0).rows
    for axis in ("env_calls", "tokens"):
        whole = getattr(most, axis)
        assert abs(at_mark(rows, axis, whole)[axis] - whole) <= 0.02 * whole


@pytest.mark.slow
def test_a_run_is_decided_by_its_seed_and_learns():
    """The same curve twice; after a tenth of the budget success has risen."""
    one, two = (trained(Cell(RESEARCH, "rloo", 6.0, 0), 0.1, 0).rows for _ in range(2))
    assert one == two
    assert one[-1]["success"] > one[0]["success"] + 0.02


# ---------------------------------------------------------------------------------------------
# The control


@pytest.fixture(scope="module")
def played() -> Steps:
    """Some runs of research-v0 by chance."""
    return Steps.from_traces(rollout(make(RESEARCH), Softmax(), groups=32, rollouts=8, seed=3))


def test_permuted_quality_stays_in_its_group(played):
    """Per task, agent and channel the same values; another run has them; nothing else moves."""
    held, dealt = played.quality, permuted(played, 5).quality
    group = np.zeros(played.n_rollouts, dtype=int)
    group[played.rollout] = played.group

    def values(quality):
        keys = zip(group[quality.rollout], quality.agent, quality.channel, strict=True)
        return Counter((*key, str(v)) for key, v in zip(keys, quality.value, strict=True))

    assert values(dealt) == values(held)
    assert not np.array_equal(dealt.value, held.value, equal_nan=True)
    assert np.array_equal(dealt.rollout, held.rollout)
    assert np.array_equal(dealt.depends, held.depends)


def test_permuted_quality_has_no_beta(played):
    """The researcher's β is many errors above 0 before, and within them after; the gate accepts
    the one and refuses the other, whose credit is that of RLOO.
    """
    real = cad_grpo(played, gate=True).diagnostics
    lost = cad_grpo(permuted(played, 5), gate=True)
    there, gone = (said["coefficients"]["researcher"] for said in (real, lost.diagnostics))
    assert there["beta"] > 8 * there["stderr"]
    assert abs(gone["beta"]) < 4 * gone["stderr"]
    assert real["gate"]["accepted"]
    assert not lost.diagnostics["gate"]["accepted"]
    assert np.allclose(lost.values, rloo(played).values)


# ---------------------------------------------------------------------------------------------
# What is watched


def test_success_is_the_value_before_the_first_event():
    """By an oracle of its own, for chance and for a table that has learnt something."""
    for policy in (Softmax(), LEARNT):
        trace = rollout(make(RESEARCH), policy, groups=1, rollouts=1, seed=0)[0]
        known = value_of(trace[:0], policies=policy)
        assert success(RESEARCH, "pair", policy) == pytest.approx(known, abs=1e-12)


def test_chance_by_hand():
    """Alone: a survey is read with ⅓, rightly twice with .9², and answered with ⅚."""
    assert success(RESEARCH, "single", Softmax()) == pytest.approx(0.81 / 3 * 5 / 6, abs=1e-12)


@pytest.mark.slow
def test_exact_credit_from_the_list_is_the_oracles():
    """Every act of some runs, by `credits_of`, which walks the tree itself."""
    traces = rollout(make(RESEARCH), LEARNT, groups=2, rollouts=3, seed=12345)
    known = [[v.seqau for v in run] for run in credits_of(traces, policies=LEARNT)]
    for task in range(2):
        own = slice(3 * task, 3 * task + 3)
        found = listed(RESEARCH, "pair", task, 12345).seqau(LEARNT, traces[own])
        for mine, theirs in zip(found, known[own], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-12)


def table(q: list[tuple[float, float]]) -> Steps:
    """Runs of two agents, a and b, with a checked quality each; b always does the same."""
    n = len(q)
    return Steps.from_columns(
        rollout=[k for k in range(n) for _ in "ab"],
        agent=list("ab") * n,
        reward=[0.0] * (2 * n),
        quality=[each for pair in q for each in pair],
        verifiable=["executed"] * (2 * n),
        menu=[("x", "y")] * (2 * n),
        action=[k % 2 if agent == "a" else 0 for k in range(n) for agent in "ab"],
    )


def test_failing_together_by_hand():
    """Failures (1, 1, 0, 0) and (1, 0, 0, 0): covariance ⅛, spreads ½ and √3/4, so 1/√3."""
    found = failing_together(table([(0.5, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]))
    assert found == pytest.approx(1 / math.sqrt(3))


def test_who_never_fails_fails_with_nobody():
    """One agent is always right: no correlation, and not one of 0."""
    assert failing_together(table([(0.5, 1.0), (1.0, 1.0)])) is None


def test_distinct_by_hand():
    """Four runs of two kinds."""
    assert distinct(table([(1.0, 1.0)] * 4)) == 0.5


# ---------------------------------------------------------------------------------------------
# The folder


DIGESTS = {"env": "1", "prompt": "2", "config": "3", "tools": "4"}


@pytest.mark.parametrize("what", ["env", "prompt", "config", "tools"])
def test_runs_that_were_played_otherwise_are_not_compared(what):
    """Another environment, prompt, setting or tool is refused, with both runs by name."""
    one, other = Cell("e", "naive_grpo", 6.0, 0), Cell("e", "rloo", 6.0, 0)
    comparable({one: DIGESTS, other: DIGESTS})
    with pytest.raises(Refused, match=f"e-rloo-6.0-0 was played with another {what} .*naive_grpo"):
        comparable({one: DIGESTS, other: {**DIGESTS, what: "9"}})


def test_a_single_agent_has_prompts_of_its_own_and_the_same_tools():
    """Who plays is another question than by what rules."""
    one, alone = Cell("e", "naive_grpo", 6.0, 0), Cell("e", "single_agent", 6.0, 0)
    comparable({one: DIGESTS, alone: {**DIGESTS, "env": "8", "prompt": "9"}})
    with pytest.raises(Refused, match="another tools"):
        comparable({one: DIGESTS, alone: {**DIGESTS, "tools": "9"}})


@pytest.fixture
def tiny(monkeypatch):
    """The headline arms on research-v0, one seed, one update."""
    monkeypatch.setattr(two_agent, "BUDGET", {RESEARCH: BUDGET[RESEARCH]})
    sizes = {True: Size(1, 0, 0.05, tuple(HEADLINE)), False: Size(2, 0, 0.05, tuple(HEADLINE))}
    monkeypatch.setattr(two_agent, "SIZES", sizes)


@pytest.mark.slow
def test_a_study_leaves_its_folder_and_goes_on_where_it_was(tmp_path, tiny):
    """Curves, figures, traces that can be read; a run that is gone is run again, and no other;
    half a run, or other settings, are refused.
    """
    made = two_agent.two_agent(tmp_path, quick=True)
    assert isinstance(made, Page)
    assert "Verdict" in made.html
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    spec = {"env", "method", "seed", "step", "success", "env_calls", "tokens", "credit_pearson",
            "beta", "gate"}  # fmt: skip
    assert spec <= set(rows[1])
    assert {row["method"] for row in rows} == set(HEADLINE)
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert list(read(tmp_path / "traces" / f"{RESEARCH}-naive_grpo.jsonl"))
    runs = sorted((tmp_path / "runs").iterdir())
    before = {path: path.stat().st_mtime_ns for path in runs}
    old = runs[0].read_bytes()
    runs[0].unlink()
    assert two_agent.two_agent(tmp_path, quick=True).html == made.html
    assert runs[0].read_bytes() == old
    assert all(path.stat().st_mtime_ns == before[path] for path in runs[1:])
    runs[0].write_bytes(old[:20])
    with pytest.raises(Refused, match="holds no finished run"):
        two_agent.two_agent(tmp_path, quick=True)
    with pytest.raises(Refused, match="other settings"):
        two_agent.two_agent(tmp_path, quick=False)


def test_the_study_has_ten_seeds_in_full_and_three_when_quick():
    """What the command promises, and the arms that were asked for."""
    assert two_agent.SIZES[False].seeds >= 10
    assert two_agent.SIZES[True].seeds >= 3
    asked = {"rloo", "dr_mas", "gigpo", "c3", "sharp", "blame", "fusion", "cad_grpo", "grpo"}
    assert asked == {arm.method for arm in ARMS.values()}
