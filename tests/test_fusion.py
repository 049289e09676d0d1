"""Fusion: exact where a model is right, unbiased where that is asked, never dearer than said."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from counterpoint.branches import RESAMPLE, Branches, Menu
from counterpoint.credit import Account, c3, cad_grpo, cosac, fusion, price
from counterpoint.credit.account import Prices
from counterpoint.credit.interactions import LADDER, Choice, Sought, fit, held_out, kernels
from counterpoint.credit.outcome_model import by_group, choice_of, later, rows_of
from counterpoint.credit.protocols import places
from counterpoint.credit.purchase import informative, record
from counterpoint.envs import make
from counterpoint.games import deal, judged, play, truth
from counterpoint.games.replaying import Rerun
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import Branching, credits_of
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

pytestmark = pytest.mark.slow


def played(name="T2", contexts=4, rollouts=8, seed=1, **dials):
    game = deal(name, contexts=contexts, seed=seed, **dials)
    plays = play(game, groups=contexts, rollouts=rollouts, seed=seed)
    return plays, Rerun(plays)


def error(credit, plays):
    """Mean square error against the exact credit, as a share of that credit's mean square."""
    exact = truth(plays).values
    on = ~np.isnan(exact)
    return np.mean((credit.values - exact)[on] ** 2) / np.mean(exact[on] ** 2)


class Untold:
    """A replay that does not tell what was done in its branches."""

    def __init__(self, replay):
        self._replay = replay
        self.menu, self.branch, self.absent = replay.menu, replay.branch, replay.absent


class Unread(Untold):
    """One whose acts are free text: nothing was offered, so nothing can be read as a choice."""

    def __init__(self, replay):
        super().__init__(replay)
        self.menu, self.branch = self.nothing, self.blind

    def nothing(self, at):
        n = len(at)
        return Menu(np.zeros(n, int), np.zeros((n, 0)), np.full(n, -1), np.full(n, -1))

    def blind(self, *asked, **how):
        found = self._replay.branch(*asked, **how)
        return replace(found, drawn=np.full_like(found.drawn, -1))


class Counted(Untold):
    """Adds up what the branches really cost."""

    def __init__(self, replay):
        super().__init__(replay)
        self.calls = 0
        self.branch, self.retell = self.counted, replay.retell

    def counted(self, *asked, **how):
        found = self._replay.branch(*asked, **how)
        self.calls += found.spent.env_calls
        return found


# ---------------------------------------------------------------------------------------------
# Exact


@pytest.mark.parametrize(
    ("name", "dials", "order"),
    [
        ("T1", {"agents": 3}, 1),
        ("T2", {"agents": 3, "actions": 2, "spread": 0.3}, 1),
        ("T17", {"agents": 3, "actions": 2}, 2),
        ("T17", {"agents": 3, "actions": 2, "dep": 1.0}, 2),
        ("T5", {"agents": 3, "spread": 0.0}, 3),
        ("T10", {}, 1),
    ],
)
def test_a_model_that_can_be_right_is_exact(name, dials, order):
    """Without noise the order that the game has is found, and the credit is seqau to 1e-6.

    Sums need order 1, pairs 2, XOR of three agents 3; later agents react where dep is not 0, and in
    T10 nature moves first. Every act is likely enough to be met.
    """
    plays, rerun = played(name, rollouts=24, **dials)
    credit = fusion(plays.steps, replay=rerun)
    assert credit.diagnostics["order"] == order
    np.testing.assert_allclose(credit.values, truth(plays).values, atol=1e-6)
    assert credit.diagnostics["r2"] == pytest.approx(1.0, abs=1e-6)


def test_a_model_that_says_nothing_leaves_c3():
    """Order 0 with the correction everywhere is C3, number for number, from the same branches."""
    plays, rerun = played("T5", noise=0.5)
    sweep = (
        Prices(plays.steps)
        .of_branch(
            places(plays.steps, np.arange(len(plays.steps))),
            np.full(len(plays.steps), RESAMPLE),
            "anew",
        )[:, 0]
        .sum()
    )
    credit = fusion(plays.steps, replay=rerun, order=0, correction="always", budget=int(3 * sweep))
    reference = c3(plays.steps, replay=rerun, alternatives=3)
    np.testing.assert_allclose(credit.values, reference.values, atol=1e-12)
    assert credit.identified == "randomised"
    assert credit.diagnostics["env_calls"] == reference.diagnostics["env_calls"]


def test_a_useless_model_falls_back_to_plain_branches():
    """Acts that cannot be read as choices leave no model: all of the budget goes to plain branches,
    and as they show more than noise, the credit is C3's.
    """
    plays, rerun = played("T2", contexts=12)
    credit = fusion(plays.steps, replay=Unread(rerun))
    reference = c3(plays.steps, replay=rerun, alternatives=4)
    assert credit.diagnostics["order"] == 0
    assert credit.diagnostics["put_in"] == 0
    assert credit.diagnostics["corrected_share"] == 1.0
    np.testing.assert_allclose(credit.values, reference.values, atol=1e-12)
    assert "only branches can credit them" in " ".join(credit.diagnostics["advice"])


def test_noise_is_not_taken_for_a_wrong_model():
    """Where branches say less than the noise of outcomes, they are not believed over the model."""
    plays, rerun = played("T3", contexts=12, noise=2.0)
    credit = fusion(plays.steps, replay=rerun)
    assert credit.diagnostics["corrected_share"] == 0.0
    assert error(credit, plays) < 0.1 * error(c3(plays.steps, replay=rerun), plays)


# ---------------------------------------------------------------------------------------------
# Unbiased


@pytest.mark.slow
def test_corrected_everywhere_it_is_unbiased_whatever_the_model():
    """Over fresh runs and branches the mean of each (history, act) is seqau within 4 standard
    errors, with a model that is wrong: XOR taken for a sum. The model alone is far off.
    """
    found = {"always": [], "never": []}
    for seed in range(40):
        plays = play(deal("T5", agents=2, spread=0.3, seed=3), groups=4, rollouts=3, seed=seed)
        for correction, errors in found.items():
            credit = fusion(
                plays.steps, replay=Rerun(plays), order=1, correction=correction, seed=seed
            )
            off = credit.values - truth(plays).values
            cell = plays.state * 2 + plays.action
            errors.append(np.bincount(cell, off, minlength=6) / len(plays.steps))
    z = {
        name: np.mean(each, axis=0) / (np.std(each, axis=0, ddof=1) / np.sqrt(len(each)))
        for name, each in found.items()
    }
    assert np.abs(z["always"]).max() < 4
    assert np.abs(z["never"]).max() > 8


def test_a_model_takes_the_noise_off_without_bias():
    """Corrected everywhere, a good model halves the error of C3 at the same branches, and more."""
    plays, rerun = played("T1", contexts=12)
    corrected = fusion(plays.steps, replay=rerun, correction="always")
    plain = fusion(plays.steps, replay=rerun, correction="always", order=0)
    assert error(corrected, plays) < 0.01 * error(plain, plays)


# ---------------------------------------------------------------------------------------------
# Against other methods


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dials"),
    [
        ("T1", {}),
        ("T2", {}),
        ("T3", {}),
        ("T4", {}),
        ("T5", {}),
        ("T6", {}),
        ("T8", {}),
        ("T17", {}),
    ],
)
def test_at_the_calls_of_c3_it_errs_half_as_much_as_the_best_other(name, dials):
    """Four agents, noise .5: at equal calls at most half the error of C3, of COSAC on the same runs
    (exact policies, its better of two λ) and of CAD-GRPO with what each act earns alone as q.
    """
    plays, rerun = played(name, contexts=8, noise=0.5, agents=4, **dials)
    options = {"expectation": "enumerate", "intercept": "centred", "fit_scope": "group"}
    judged_ = judged(plays, "own").steps
    others = [
        c3(plays.steps, replay=rerun),
        *(
            cosac(plays.steps, policy=rerun, ridge=ridge, continuations=32, **options)
            for ridge in (0.01, 1.0)
        ),
        *(cad_grpo(judged_, advantage=form) for form in ("equal", "upstream")),
    ]
    credit = fusion(plays.steps, replay=rerun)
    assert error(credit, plays) < 0.5 * min(error(each, plays) for each in others)


@pytest.mark.parametrize("name", ["T2", "T5", "T17"])
def test_branches_that_are_not_told_still_teach(name):
    """A replay that says only how branches ended serves too, at less than half of C3's error."""
    plays, rerun = played(name, contexts=8, noise=0.5)
    credit = fusion(plays.steps, replay=Untold(rerun))
    assert error(credit, plays) < 0.5 * error(c3(plays.steps, replay=rerun), plays)


# ---------------------------------------------------------------------------------------------
# Money


@pytest.mark.parametrize("budget", [0, 1, 37, 400])
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_budget_is_never_exceeded(budget, rounds):
    """What was really run is what is said, and no more than the budget."""
    plays, rerun = played()
    counted = Counted(rerun)
    credit = fusion(plays.steps, replay=counted, budget=budget, rounds=rounds)
    assert counted.calls == credit.diagnostics["env_calls"] <= budget
    assert budget < 100 or counted.calls > 0.9 * budget


def test_its_price_is_known_beforehand():
    """Priced without running anything, it costs what C3 does, its default budget."""
    plays, rerun = played()
    asked = price(fusion, plays.steps, rerun)
    assert asked.env_calls == price(c3, plays.steps, rerun).env_calls


def test_without_a_budget_the_model_of_the_record_speaks_and_says_so():
    """Budget 0 runs nothing; a sum without noise is then known from 24 runs alone."""
    plays, rerun = played("T1", rollouts=24, actions=2, spread=0.3)
    credit = fusion(plays.steps, replay=rerun, budget=0)
    assert credit.diagnostics["env_calls"] == credit.diagnostics["plain"] == 0
    assert "nothing was branched" in " ".join(credit.diagnostics["advice"])
    assert credit.identified == "assumption:outcome_model"
    np.testing.assert_allclose(credit.values, truth(plays).values, atol=1e-6)


def test_an_account_is_asked_like_any_replay():
    """Through an account the credit is the same, and the account knows the cost."""
    plays, rerun = played()
    account = Account(rerun, plays.steps)
    credit = fusion(plays.steps, replay=account)
    np.testing.assert_array_equal(credit.values, fusion(plays.steps, replay=rerun).values)
    assert account.spent.env_calls == credit.diagnostics["env_calls"]


@pytest.mark.parametrize("seed", range(6))
def test_the_first_branch_is_where_a_call_takes_most_error_off(seed):
    """The first choice is the best of all (turn, act) by the posterior of a regression on one
    indicator for each choice and each pair, written out.
    """
    plays, rerun = played("T17", contexts=1, rollouts=5, agents=3, actions=2, seed=seed)
    held = record(plays.steps, rerun, 0)
    (group,) = by_group(held.runs)
    choice = Choice(2, 0.1, 0.0)
    found = informative(held, group, choice, 3.0)
    X = rows_of(group.laid, group.runs, later(group))
    best = max(gains(plays, held, group, X, choice), key=lambda each: each[0])
    assert best[0] == pytest.approx(gain_of(plays, held, group, X, choice, found), rel=1e-9)


def indicators(X, order):
    """(rows, columns) the constant, and every combination of choices up to an order, so that their
    inner products are the kernel: counts of combinations, as a share of all.
    """
    slots = X.shape[1]
    sets = [c for o in range(1, order + 1) for c in combinations(range(slots), o)]
    columns = [np.ones((len(X), 1))]
    for chosen in sets:
        each = X[:, chosen[0]]
        for slot in chosen[1:]:
            each = (each[:, :, None] * X[:, slot][:, None, :]).reshape(len(X), -1)
        columns.append(each / np.sqrt(len(sets)))
    return np.concatenate(columns, axis=1)


def gains(plays, held, group, X, choice):
    """(gain per call, row, act) of every turn and act, by the posterior covariance of weights."""
    F = indicators(X, choice.order)
    cover = np.linalg.inv(F.T @ F / choice.penalty + np.eye(F.shape[1]))
    rest, laid = later(group), group.laid
    asked = {}
    for run, turn in zip(*np.nonzero(held.row >= 0), strict=True):
        x = np.zeros((2, *X.shape[1:]))
        for before in range(turn):
            x[:, laid.slot[run, before]] = laid.took[run, before, laid.slot[run, before]]
        x[:, laid.slot[run, turn]] = np.eye(2)
        x = np.where(x.any(axis=2, keepdims=True), x, rest[turn + 1])
        asked[held.row[run, turn]] = indicators(x, choice.order)
    probs = plays.game.probability[plays.state]
    contrast = np.array([asked[r][plays.action[r]] - probs[r] @ asked[r] for r in asked])
    for row, rows in asked.items():
        for act, f in enumerate(rows):
            less = (contrast @ cover @ f) ** 2 / (choice.penalty + f @ cover @ f)
            yield less.sum() / held.price[row], row, act


def gain_of(plays, held, group, X, choice, found):
    first = (int(found.row[0]), int(found.action[0]))
    return next(g for g, *place in gains(plays, held, group, X, choice) if tuple(place) == first)


# ---------------------------------------------------------------------------------------------
# The ridge


def test_the_kernel_counts_combinations():
    """Of each order the kernel is the inner product of one indicator for each combination."""
    rng = np.random.default_rng(0)
    X = rng.dirichlet(np.ones(3), size=(6, 4))
    for order, K in enumerate(kernels(X, X, 4), 1):
        F = indicators(X, order)[:, 1:]
        np.testing.assert_allclose(K, F @ F.T, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_held_out_errors_are_those_of_leaving_runs_out(order):
    """The errors from one decomposition are those of as many fits, each without one run; repeated
    runs are left out one at a time.
    """
    rng = np.random.default_rng(1)
    X = np.eye(2)[rng.integers(2, size=(12, 3))]
    y = rng.normal(size=12)
    found = held_out(X, y, 3)
    for at, penalty in enumerate(LADDER):
        if penalty < 1e-3:
            continue
        missed = [
            y[i] - fit(np.delete(X, i, 0), np.delete(y, i), order, penalty)(X[i : i + 1])[0]
            for i in range(12)
        ]
        assert found[order, at] == pytest.approx(np.sum(np.square(missed)), rel=1e-6)
    means = [y[i] - np.delete(y, i).mean() for i in range(12)]
    np.testing.assert_allclose(found[0], np.sum(np.square(means)))


def test_without_spread_the_lowest_order_is_taken():
    """Outcomes that are all equal are credited with 0, by a model of order 0."""
    plays, rerun = played("T3", contexts=1, rollouts=3)
    steps = replace(plays.steps, outcome=np.ones(len(plays.steps)))
    credit = fusion(steps, replay=rerun, budget=0)
    assert credit.diagnostics["order"] == 0
    assert (credit.values == 0).all()


# ---------------------------------------------------------------------------------------------
# Games tell their branches


@pytest.mark.parametrize("action", [RESAMPLE, 1])
def test_a_game_tells_what_its_branches_did(action):
    """Told again, the turns of a branch earn what the branch earned, under the same policy."""
    plays, rerun = played("T2", contexts=2)
    steps, game = plays.steps, plays.game
    at = places(steps, np.arange(len(steps)))
    asked = np.full(len(at), action)
    found = rerun.branch(at, asked, 3, start=2, seed=5)
    told = rerun.retell(at, asked, 3, agents=steps.names["agent"], start=2, seed=5)
    for row, number in np.ndindex(found.values.shape):
        state, earned = plays.state[row], 0.0
        for agent, act, probs in zip(
            told.agent[row, number], told.label[row, number], told.probs[row, number], strict=True
        ):
            if agent < 0:
                continue
            assert agent == game.agent[state]
            np.testing.assert_array_equal(probs, game.probability[state])
            earned, state = earned + game.reward[state, act], game.next[state, act]
        assert state == -1
        assert earned == pytest.approx(found.values[row, number])


# ---------------------------------------------------------------------------------------------
# Tables and traces


def test_the_order_of_rows_does_not_matter():
    """Rows in another order give the same credits."""
    plays, rerun = played(noise=0.5)
    steps = plays.steps
    order = np.random.default_rng(0).permutation(len(steps))
    columns = ("group", "rollout", "step", "agent", "reward")
    mixed = Steps.from_columns(**{name: getattr(steps, name)[order] for name in columns})
    moved = Moved(rerun, mixed)
    credit = fusion(mixed, replay=moved)
    np.testing.assert_allclose(credit.values, fusion(steps, replay=rerun).values[order], atol=1e-9)


class Moved:
    """A game's replay under the rollout numbers that a table in another order has."""

    def __init__(self, rerun, steps):
        self._rerun = rerun
        self._run = np.array(steps.names["rollout"])

    def _at(self, at):
        return np.column_stack([self._run[at[:, 0]], at[:, 1]])

    def menu(self, at):
        return self._rerun.menu(self._at(at))

    def branch(self, at, *asked, **how) -> Branches:
        return self._rerun.branch(self._at(at), *asked, **how)

    def absent(self, runs, *asked, **how) -> Branches:
        return self._rerun.absent(self._run[runs], *asked, **how)

    def retell(self, at, *asked, agents, **how):
        names = sorted(agents)
        told = self._rerun.retell(self._at(at), *asked, agents=names, **how)
        back = np.array([agents.index(name) for name in names] + [-1])
        return told._replace(agent=back[told.agent])


def test_masked_and_unscored_rows_are_left_out():
    """A masked turn and an unscored run get NaN, and the others the credit they have without."""
    plays, rerun = played("T1", contexts=2, rollouts=24)
    steps, exact = plays.steps, truth(plays).values
    outcome, mask = steps.outcome.copy(), steps.mask.copy()
    outcome[steps.rollout == 3] = np.nan
    mask[0] = False
    credit = fusion(replace(steps, outcome=outcome, mask=mask), replay=rerun)
    left = (steps.rollout == 3) | ~mask
    assert np.isnan(credit.values[left]).all()
    np.testing.assert_allclose(credit.values[~left], exact[~left], atol=1e-6)


@pytest.mark.slow
def test_recorded_teams_are_credited():
    """Traces of the harness: with what C3 has for two siblings a turn it errs a fifth as much, by
    the exact credit from listing, and less than from the record alone.
    """
    traces = rollout(make("ledger-v0"), Softmax(), groups=3, rollouts=8, seed=3)
    steps = Steps.from_traces(traces)
    listed = {
        (run, each.seq): each.seqau for run, acts in enumerate(credits_of(traces)) for each in acts
    }
    exact = np.array([listed[tuple(place)] for place in steps.event.tolist()])
    reference = c3(steps, replay=Branching(traces), alternatives=2)
    budget = reference.diagnostics["env_calls"]
    credit = fusion(steps, replay=Branching(traces), budget=budget)
    record_only = fusion(steps, replay=Branching(traces), budget=0)
    off = [np.mean((each.values - exact) ** 2) for each in (credit, record_only, reference)]
    assert credit.credited.all()
    assert credit.diagnostics["env_calls"] <= budget
    assert off[0] < min(off[1], 0.2 * off[2])


def test_a_harness_tells_what_its_branches_did():
    """The turns of the last branches come back: the act that was put in or drawn, who acted, and
    what the policy gave each text of its menu; of other branches nothing is known any more.
    """
    traces = rollout(make("ledger-v0"), Softmax(), groups=1, rollouts=2, seed=2)
    steps, replay = Steps.from_traces(traces), Branching(traces)
    at = places(steps, np.arange(len(steps)))
    menu = replay.menu(at)
    names = steps.names["agent"]
    for action in (np.zeros(len(at), dtype=np.int64), np.full(len(at), RESAMPLE)):
        found = replay.branch(at, action, 2, seed=7)
        told = replay.retell(at, action, 2, agents=names, seed=7)
        rows = np.arange(len(at))
        np.testing.assert_array_equal(told.label[:, :, 0], menu.label[rows[:, None], found.drawn])
        np.testing.assert_array_equal(told.agent[:, 0, 0], steps.agent)
        there = told.agent >= 0
        np.testing.assert_allclose(np.nansum(told.probs, axis=3)[there], 1.0)
        assert (np.take_along_axis(told.probs, told.label[..., None], axis=3)[there] > 0).all()
        assert there.sum(axis=2).max() > 1
    earlier = replay.retell(at, np.zeros(len(at), dtype=np.int64), 1, agents=names, seed=7)
    assert (earlier.agent == -1).all()


def test_empty_steps_give_empty_credit():
    """Nothing is run for nobody."""
    plays, rerun = played("T1", contexts=1, rollouts=2)
    columns = ("group", "rollout", "step", "agent", "reward")
    empty = Steps.from_columns(**{name: getattr(plays.steps, name)[:0] for name in columns})
    assert len(fusion(empty, replay=rerun)) == 0


def test_order_and_ridge_are_found_over_all_groups():
    """What is given is taken, what is not is found, and an order beyond the team is cut."""
    plays, rerun = played("T17", contexts=3, rollouts=24, agents=3, actions=2)
    parts = by_group(record(plays.steps, rerun, 0).runs)
    assert choice_of(parts, Sought()).order == 2
    assert choice_of(parts, Sought(order=8)).order == 3
    assert choice_of(parts, Sought(penalty=0.25)).penalty == 0.25


# ---------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replay": None}, "fusion needs replay="),
        ({"correction": "some"}, "'auto', 'always' or 'never'"),
        ({"budget": -1}, "budget is -1"),
        ({"order": 9}, "order is 9"),
        ({"ridge": 0.0}, "ridge is 0.0"),
        ({"rounds": 0}, "rounds is too low"),
        ({"folds": 1}, "folds is too low"),
        ({"correction": "always", "budget": 5}, "one branch of every turn"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    """Each refusal says what is wrong and what would do."""
    plays, rerun = played("T1", contexts=1)
    with pytest.raises(Refused, match=said):
        fusion(plays.steps, **{"replay": rerun, **options})


def test_one_rollout_is_refused():
    """A group of one has nothing to fit, and its name is said."""
    plays = play(deal("T1", contexts=2), groups=2, rollouts=1)
    with pytest.raises(Refused, match="group 0 has one scored rollout"):
        fusion(plays.steps, replay=Rerun(plays))


def test_outcomes_of_agents_are_refused():
    """One outcome of the team is what the model explains."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1, 1], agent=["a", "b"] * 2, outcome=[1.0, 2.0, 0.0, 1.0]
    )
    with pytest.raises(Refused, match="outcomes of their own"):
        fusion(steps, replay=played("T1", contexts=1, rollouts=2, agents=2)[1])
