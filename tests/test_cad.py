"""CAD-GRPO: exact gradients by listing everything that can happen, and numbers by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from counterpoint import Softmax, Steps, Trace, make, rloo, rollout
from counterpoint.credit.cad import cad_grpo
from counterpoint.games import (
    Plays,
    deal,
    every,
    expected_gradient,
    gradient,
    play,
    policy_gradient,
    truth,
)
from counterpoint.games.proxies import proxies
from counterpoint.ledger import Credit
from counterpoint.report import about_runs
from counterpoint.spelling import Refused
from qualities import earlier, own_act, with_quality

SMALL = {
    "T1": deal("T1", agents=2, actions=2, contexts=2, seed=3),
    "T2": deal("T2", agents=3, actions=2, contexts=2, seed=4),
    "T3": deal("T3", agents=2, contexts=2, seed=5),
    "T3, reacting": deal("T3", agents=3, dep=1.0, contexts=2, seed=6),
    "T17": deal("T17", agents=2, actions=2, contexts=2, seed=7),
    "T17, reacting": deal("T17", agents=3, actions=2, dep=1.0, contexts=2, seed=8),
}
small = pytest.mark.parametrize("game", SMALL.values(), ids=SMALL.keys())


def credited(steps: Steps, agents: int, **options) -> Credit:
    return cad_grpo(with_quality(steps, own_act(steps), earlier(agents)), **options)


def off(got, exact) -> float:
    """Relative error of a gradient."""
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


# ---------------------------------------------------------------------------------------------
# The gradient, exactly


@small
@pytest.mark.parametrize("penalty", [None, 0.0, 0.5])
def test_upstream_is_the_policy_gradient(game, penalty):
    """All groups of both contexts are listed; each context's β is fitted on the other's. However
    badly q fits, the expectation is exactly the gradient.
    """
    rollouts = 3 if game.agents == 2 else 2  # three of three agents are 30,000 plays
    method = partial(credited, agents=game.agents, ridge=penalty)
    got = expected_gradient(game, method, rollouts)
    np.testing.assert_allclose(got, policy_gradient(game), atol=1e-12)


@small
def test_the_shares_do_take_part(game):
    """The same credit is no RLOO: some share is taken off, or the test above would say nothing."""
    plays, _ = every(game, 2)
    got = credited(plays.steps, game.agents)
    assert np.abs(got.values - rloo(plays.steps).values).max() > 0.01


@small
def test_shared_is_exact_only_without_influence(game):
    """Agents that do not see each other: exact. Where they react, q_j moves with i: biased."""
    got = expected_gradient(game, partial(credited, agents=game.agents, advantage="shared"), 2)
    exact = policy_gradient(game)
    # In a group of two rollouts nobody reacts in T1, T3 and T17 with dep 0.
    if game in (SMALL["T1"], SMALL["T3"], SMALL["T17"]):
        np.testing.assert_allclose(got, exact, atol=1e-12)
    else:
        assert off(got, exact) > 0.01


@pytest.mark.parametrize("form", ["drop", "equal"])
def test_drop_and_equal_are_biased_where_q_is_not_the_worth(form):
    """A q that is a function of the own act, but not what it earns: the wrong gradient even where
    nobody reacts.
    """
    for name in ("T1", "T3", "T17"):
        game = SMALL[name]
        got = expected_gradient(game, partial(credited, agents=2, advantage=form), 2)
        assert off(got, policy_gradient(game)) > 0.2


@pytest.mark.parametrize("form", ["drop", "equal", "shared", "upstream"])
def test_every_form_is_exact_where_q_is_what_the_act_earns(form):
    """T1, R = Σ q_i: β = 1 on any task, e = 0, and c_i is the act's own term."""
    game = SMALL["T1"]

    plays, chance = every(game, 3)
    steps = with_quality(plays.steps, proxies(plays, "own"), np.eye(2, dtype=bool))
    credit = cad_grpo(steps, advantage=form, ridge=0.0)
    np.testing.assert_allclose(credit.parts["beta"], 1.0, atol=1e-9)
    weight = chance[plays.steps.group] * len(chance)
    got = gradient(plays, credit.values * weight)
    np.testing.assert_allclose(got, policy_gradient(game), atol=1e-9)


def test_equal_with_a_q_that_says_nothing_is_the_gradient_over_n():
    """β = 0 leaves e/n: half of the gradient for two agents; `drop` leaves nothing."""
    game = SMALL["T1"]

    def method(steps, form):
        return cad_grpo(with_quality(steps, np.zeros(len(steps))), advantage=form)

    exact = policy_gradient(game)
    np.testing.assert_allclose(
        expected_gradient(game, partial(method, form="equal"), 2), exact / 2, atol=1e-12
    )
    assert not expected_gradient(game, partial(method, form="drop"), 2).any()


def test_a_missing_edge_biases_upstream_without_a_warning():
    """If the columns deny that later agents react, the gradient of the first ones is wrong."""
    game = SMALL["T2"]

    def denied(steps):
        return cad_grpo(with_quality(steps, own_act(steps), np.eye(3, dtype=bool)))

    assert off(expected_gradient(game, denied, 2), policy_gradient(game)) > 0.01


def batches(game, rollouts: int):
    """Every batch of one group per context, and its probability."""
    plays, chance = every(game, rollouts)
    steps = plays.steps
    task = np.zeros(len(chance), dtype=np.int64)
    task[steps.group] = steps.task
    of = [np.flatnonzero(task == context) for context in range(len(game.start))]
    for groups in itertools.product(*of):
        rows = np.flatnonzero(np.isin(steps.group, groups))
        held = np.unique(steps.rollout[rows], return_inverse=True)[1].reshape(-1)
        chosen = {
            name: getattr(steps, name)[rows]
            for name in ("agent", "task", "step", "outcome", "logprob", "group")
        }
        yield (
            Plays(game, Steps.from_columns(rollout=held, **chosen), plays.state[rows],
                  plays.action[rows]),
            float(np.prod(chance[list(groups)] * len(game.start))),
        )  # fmt: skip


@pytest.mark.slow
def test_beta_from_the_own_rollouts_biases_at_few_groups():
    """All batches of two groups of two: β in-sample is off by over 3 %, cross-fitted by nothing."""
    game = SMALL["T1"]
    got = {1: 0.0, 2: 0.0}
    total = 0.0
    for plays, chance in batches(game, 2):
        total += chance
        for folds in got:
            credit = credited(plays.steps, 2, folds=folds, ridge=1e-3)
            assert credit.diagnostics["unbiased"] == (folds == 2)
            got[folds] = got[folds] + chance * gradient(plays, credit.values)
    exact = policy_gradient(game)
    assert total == pytest.approx(1)
    assert off(got[2], exact) < 1e-12
    assert off(got[1], exact) > 0.03


def test_zeroing_dead_groups_would_bias_upstream():
    """Which groups are dead depends on the acts: their shares, set to 0, are missed on average."""
    game = deal("T3", agents=2, contexts=2, seed=5)

    def zeroed(steps):
        credit = credited(steps, 2)
        return replace(credit, values=np.where(steps.std(steps.outcome) > 0, credit.values, 0.0))

    assert off(expected_gradient(game, zeroed, 2), policy_gradient(game)) > 0.005


# ---------------------------------------------------------------------------------------------
# Numbers


def table(**changed) -> Steps:
    """Two tasks of three rollouts, agents a and b; R = 2·q_a + q_b in the first, and in the second
    R = q_a + 3·q_b, so that no fold's β fits its own rollouts.
    """
    q = {"t": [(0, 1), (1, 0), (2, 5)], "u": [(1, 1), (3, 0), (-1, 5)]}
    worth = {"t": (2, 1), "u": (1, 3)}
    rows = [
        (task, f"{task}{n}", agent, pair[at], worth[task][0] * pair[0] + worth[task][1] * pair[1])
        for task, pairs in q.items()
        for n, pair in enumerate(pairs)
        for at, agent in enumerate("ab")
    ]
    group, rollout, agent, quality, outcome = (list(column) for column in zip(*rows, strict=True))
    columns = {
        "group": group,
        "rollout": rollout,
        "agent": agent,
        "quality": quality,
        "outcome": outcome,
        "depends": [[name] for name in agent],
    }
    return Steps.from_columns(**columns | changed)


def test_every_part_by_hand():
    """λ = 0: rollouts of t get β = (1, 3) from u, those of u get (2, 1) from t.

    In t, q̃_a = −1, 0, 1, q̃_b = −1, −2, 3 and R̃ = −3, −2, 5. First rollout: c_a = −1, c_b = −3,
    e = −3 + 4 = 1. G/(G − 1) = 3/2.
    """
    forms = {
        "upstream": (-3 - (-3), -3 - (-1)),
        "shared": (-1 + 1, -3 + 1),
        "equal": (-1 + 0.5, -3 + 0.5),
        "drop": (-1, -3),
    }
    for form, want in forms.items():
        credit = cad_grpo(table(), advantage=form, ridge=0.0)
        np.testing.assert_allclose(credit.values[:2], np.multiply(1.5, want), atol=1e-9)
    got = {name: part[:2].tolist() for name, part in credit.parts.items()}
    assert got["q"] == [0, 1]
    np.testing.assert_allclose(got["beta"], [1, 3], atol=1e-9)
    np.testing.assert_allclose(got["share"], [-1, -3], atol=1e-9)
    np.testing.assert_allclose(got["residual"], [1, 1], atol=1e-9)
    assert got["depends"] == [0, 0]
    np.testing.assert_allclose(credit.parts["beta"][6:8], [2, 1], atol=1e-9)


@pytest.mark.parametrize("folds", [1, 2, 3])
@pytest.mark.parametrize("penalty", [None, 0.0, 10.0])
def test_shares_and_residual_make_the_outcome(folds, penalty):
    """Σ c_i + e = R − mean R in every rollout, whatever β; under `equal` Σ A_i is RLOO's."""
    game = deal("T17", agents=4, contexts=6, seed=1)
    plays = play(game, groups=6, rollouts=5, seed=2)
    steps = with_quality(plays.steps, own_act(plays.steps), earlier(4))
    credit = cad_grpo(steps, advantage="equal", folds=folds, ridge=penalty)
    R, parts = steps.outcome, credit.parts
    total = np.bincount(steps.rollout, parts["share"])[steps.rollout] + parts["residual"]
    np.testing.assert_allclose(total, R - steps.mean(R), atol=1e-12)
    summed = np.bincount(steps.rollout, credit.values)[steps.rollout]
    np.testing.assert_allclose(summed, rloo(steps).values, atol=1e-12)
    assert credit.diagnostics["unclaimed"] == 0.0


def test_it_says_that_it_is_a_reconstruction():
    credit = cad_grpo(table())
    assert credit.diagnostics["reconstruction"] is True
    assert "reconstruction" in str(credit)


def test_order_of_rows_and_names_of_groups_have_no_say():
    """Rows in another order get the same numbers, gate included."""
    game = deal("T1", agents=3, contexts=8, noise=0.3, seed=1)
    plays = play(game, groups=8, rollouts=4, seed=2)
    s, q = plays.steps, proxies(plays, "own")
    columns = {
        "group": s.group, "task": s.task, "rollout": s.rollout, "step": s.step, "agent": s.agent,
        "outcome": s.outcome, "quality": q, "depends": [[a] for a in s.agent.tolist()],
        "verifiable": ["executed"] * len(s),
    }  # fmt: skip
    order = np.random.default_rng(0).permutation(len(s))
    moved = {name: [column[i] for i in order] for name, column in columns.items()}
    for gate in (False, True):
        one = cad_grpo(Steps.from_columns(**columns), gate=gate)
        two = cad_grpo(Steps.from_columns(**moved), gate=gate)
        np.testing.assert_allclose(two.values, one.values[order], atol=1e-9)


def test_noise_as_q_turns_shared_and_upstream_into_rloo():
    """Over 4,000 rollouts β of noise is 0 within .1, and so both are RLOO's numbers within .3."""
    plays = play(deal("T1", contexts=50, seed=1), groups=500, rollouts=8, seed=2)
    noise = np.random.default_rng(0).normal(size=len(plays.steps))
    steps = with_quality(plays.steps, noise, np.eye(4, dtype=bool))
    for form in ("shared", "upstream"):
        credit = cad_grpo(steps, advantage=form)
        assert np.abs(credit.parts["beta"]).max() < 0.1
        assert np.abs(credit.values - rloo(steps).values).max() < 0.6


def test_a_fitting_beta_lowers_the_variance_of_upstream_and_noise_raises_it_little():
    """E[A²] is below RLOO's with q = what the act earns, and with noise at most 30 % above it."""
    plays = play(deal("T1", contexts=20, noise=0.5, seed=1), groups=20, rollouts=8, seed=2)
    base = np.mean(rloo(plays.steps).values ** 2)
    everybody = np.eye(4, dtype=bool)
    good = cad_grpo(with_quality(plays.steps, proxies(plays, "own"), everybody))
    noise = np.random.default_rng(0).normal(size=len(plays.steps))
    bad = cad_grpo(with_quality(plays.steps, noise, everybody))
    assert np.mean(good.values**2) < 0.7 * base
    assert np.mean(bad.values**2) < 1.3 * base


def test_ranking_and_the_unbiased_gradient_are_two_goals():
    """T1 with four agents: `equal` follows seqau closer than RLOO does; its r is .7 or more."""
    plays = play(deal("T1", contexts=50, seed=1), groups=150, rollouts=8, seed=2)
    steps = with_quality(plays.steps, proxies(plays, "own"), np.eye(4, dtype=bool))
    want = truth(plays).values
    r = {
        form: np.corrcoef(cad_grpo(steps, advantage=form).values, want)[0, 1]
        for form in ("equal", "upstream")
    }
    assert r["equal"] > 0.7
    assert r["equal"] > np.corrcoef(rloo(steps).values, want)[0, 1] + 0.2


def test_by_role_is_the_mean_of_its_agents():
    """Two agents of a role count as one player; who bears the role may change between rollouts."""
    steps = Steps.from_columns(
        group=["t"] * 6 + ["u"] * 6,
        rollout=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
        agent=["a", "x", "y", "a", "x", "z", "a", "x", "y", "a", "y", "z"],
        role=["lead", "hand", "hand"] * 4,
        quality=[1, 2, 4, 0, 6, 2, 5, 1, 1, 3, 2, 6],
        outcome=[7.0] * 3 + [1.0] * 3 + [2.0] * 3 + [4.0] * 3,
    )
    credit = cad_grpo(steps, advantage="drop", by="role")
    assert credit.parts["q"].tolist() == [1, 3, 3, 0, 4, 4, 5, 1, 1, 3, 4, 4]
    assert set(credit.diagnostics["coefficients"]) == {"lead", "hand"}


def test_absent_agents_have_a_column_of_their_own():
    """Q of b is 2 wherever b is there, and R = 10 if it is: β says nothing, presence says it all.

    In a group of four in two of which b acts: R̃ = ±5, so b's share is 5 where it is there.
    """
    rows = [(task, n, agent) for task in "tu" for n in range(4) for agent in "ab"[: 1 + (n < 2)]]
    steps = Steps.from_columns(
        group=[r[0] for r in rows],
        rollout=[r[1] for r in rows],
        agent=[r[2] for r in rows],
        quality=[1.0 + r[1] % 2 if r[2] == "a" else 2.0 for r in rows],
        outcome=[10.0 * (r[1] < 2) for r in rows],
    )
    credit = cad_grpo(steps, advantage="drop", ridge=1e-9)
    there = np.array([r[2] == "b" for r in rows])
    np.testing.assert_allclose(credit.parts["share"][there], 5.0, atol=1e-6)
    assert credit.diagnostics["unclaimed"] == pytest.approx(2.5, abs=1e-6)
    assert "do not add up" in str(credit)


def test_one_task_is_rloo_with_a_sentence():
    steps = table(task=["only"] * 12)
    credit = cad_grpo(steps)
    np.testing.assert_allclose(credit.values, rloo(steps).values, atol=1e-12)
    assert "fewer than two tasks" in str(credit)


# ---------------------------------------------------------------------------------------------
# Bad input


def test_upstream_is_refused_where_nobody_says_what_q_depends_on():
    with pytest.raises(Refused, match=r"needs the column depends.* or take another advantage"):
        cad_grpo(table(depends=None))
    assert cad_grpo(table(depends=None), advantage="shared").diagnostics["unbiased"] is False


SENTENCES = {
    "constant": ({"quality": [1, 5] * 6}, "no β for a, b: its quality is missing, or does not"),
    "missing": ({"quality": [None, 1] * 3 + [2, 1] * 3}, "the agent acted: a (3 rollouts)"),
    "collinear": ({"quality": [0, 0, 1, 1, 2, 2, 1, 1, 3, 3, -1, -1]}, "collinear"),
    "fewer rows than players": ({"group": [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]},
                                "cannot tell 2 players apart"),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_each_fault_has_its_sentence(case):
    """Credit is finite all the same, and never silently zero: the result says what is wrong."""
    changed, sentence = SENTENCES[case]
    credit = cad_grpo(table(**changed))
    assert np.isfinite(credit.values).all()
    assert sentence in str(credit)


def test_fewer_groups_than_players_are_said():
    steps = Steps.from_columns(
        group=[0] * 9 + [1] * 9,
        rollout=np.repeat(np.arange(6), 3),
        agent=list("abc") * 6,
        quality=np.sin(np.arange(18.0)),
        outcome=np.repeat([1.0, 0, 2, 1, 3, 0], 3),
        depends=[[a] for a in "abc" * 6],
    )
    assert "fewer groups (2) than players with a quality (3)" in str(cad_grpo(steps))


def test_a_quality_that_contains_the_outcome_is_said():
    steps = table()
    leaking = table(quality=np.where(np.arange(12) % 2, steps.outcome, 0.0))
    assert "the quality of b all but contains the outcome" in str(cad_grpo(leaking))


def test_infinite_and_contradicting_qualities_are_refused():
    with pytest.raises(Refused, match="column quality, row 3: inf is infinite"):
        table(quality=[0, 1, 1, np.inf] + [0] * 8)
    with pytest.raises(Refused, match="column quality, row 1: 2 differs from another row"):
        table(agent=["a"] * 12, quality=[1, 2] * 6)
    with pytest.raises(Refused, match="column verifiable, row 0: 'sworn' is none of executed"):
        table(verifiable=["sworn"] * 12)
    with pytest.raises(Refused, match=r"column error_rate, row 2: 1\.5 does not lie"):
        table(error_rate=[0, 0, 1.5] + [0] * 9)
    with pytest.raises(Refused, match=r"column depends, row 4: .* is no list of labels"):
        table(depends=[["a"]] * 4 + [["nobody"]] * 8)


def test_only_checked_qualities_where_only_those_are_allowed():
    """What an agent says of itself is left out, named, and gets no β."""
    credit = cad_grpo(table(verifiable=["executed", "self_report"] * 6), checked_only=True)
    assert credit.diagnostics["not_estimated"] == ["b"]
    assert credit.diagnostics["proxies"][1]["channel"] is None


def test_options_out_of_range_are_refused():
    bad = [{"advantage": "most"}, {"ridge": -1.0}, {"folds": 0}, {"by": "team"}, {"errors": "hc9"}]
    for options in bad:
        with pytest.raises(Refused, match=next(iter(options))):
            cad_grpo(table(), **options)
    with pytest.raises(Refused, match="needs the column quality"):
        cad_grpo(Steps.from_columns(rollout=[0, 1], reward=[0, 1]))


def test_unscored_masked_and_lone_rollouts():
    """Unscored rollouts and masked rows are never credited; a group of one gets 0, as in RLOO."""
    R = [7.0, 7, 2, 2, None, None, 4, 4, 3, 3, 5, 5]
    steps = table(outcome=R, mask=[True] * 11 + [False], group=["t"] * 10 + ["lone"] * 2,
                  task=list("tttttt" "uuuuuu"))  # fmt: skip
    credit = cad_grpo(steps)
    assert np.isnan(credit.values).tolist() == [r is None for r in R[:11]] + [True]
    assert credit.values[10] == 0.0
    assert credit.diagnostics["singletons"] == 1
    nothing = cad_grpo(table(outcome=[None] * 12))
    assert np.isnan(nothing.values).all()
    assert "no rollout is both scored and trainable" in str(nothing)
    empty = {name: [] for name in ("quality", "depends", "group", "agent", "outcome", "rollout")}
    assert len(cad_grpo(table(**empty))) == 0


# ---------------------------------------------------------------------------------------------
# From traces


@pytest.fixture(scope="module")
def played() -> list[Trace]:
    return rollout(make("research-v0"), Softmax(), groups=8, rollouts=6, seed=0)


@pytest.fixture(scope="module")
def research(played) -> Steps:
    return Steps.from_traces(played)


def test_the_page_shows_what_each_quality_is_worth_and_the_gate(played):
    """A row and a bar for both agents with the numbers of the credit, and the gate's decision."""
    text = about_runs(played, ["cad_grpo"]).html
    said = cad_grpo(Steps.from_traces(played), gate=True).diagnostics
    for player, numbers in said["coefficients"].items():
        assert f"<td>{player}</td>" in text
        assert f"{numbers['beta']:.4g}" in text
    decision = "accepts" if said["gate"]["accepted"] else "refuses"
    assert f"The gate {decision} it" in text


def test_quality_of_a_recorded_run(research):
    """One row per (rollout, agent, channel), with the check, and the whole run behind it."""
    quality = research.quality
    cells = set(zip(quality.rollout, quality.agent, quality.channel, strict=True))
    assert len(cells) == len(quality)
    assert set(quality.channels) == {"executed", "checked_fact", "self_report", "count"}
    executed = quality.channel == quality.channels.index("executed")
    assert quality.depends[executed].all()
    assert (quality.verifiable[executed] == 0).all()
    assert (quality.error_rate[executed] == 0).all()


def test_a_rating_depends_on_what_its_agent_had_seen(research):
    """The coordinator rates its work after the researcher's report: it descends from both."""
    quality, names = research.quality, research.names["agent"]
    own = quality.agent == names.index("coordinator")
    rated = own & (quality.channel == quality.channels.index("self_report"))
    scored = rated & ~np.isnan(quality.value)
    assert scored.any()
    assert quality.depends[scored].all()


def test_program_f_runs_on_recorded_traces(research):
    """cad_grpo takes for each agent the channel that was checked best."""
    credit = cad_grpo(research)
    assert [p["channel"] for p in credit.diagnostics["proxies"]] == ["executed", "checked_fact"]
    assert np.isfinite(credit.values[research.mask]).all()


def test_a_quality_that_all_depend_on_leaves_rloo(research):
    """Both q of research-v0 descend from both agents, so upstream may take nothing off."""
    np.testing.assert_allclose(cad_grpo(research).values, rloo(research).values, atol=1e-12)
