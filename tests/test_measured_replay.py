"""Running again: a game as a replay, the account of what it costs, and a harness of one's own."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.branches import KEEP, NULL, RESAMPLE, Branches, Spent
from counterpoint.credit.account import Account, price
from counterpoint.credit.protocols import Adapted, Replay, needed, places
from counterpoint.credit.replayed import c3, coma, loo
from counterpoint.credit.replayed_contract import check_replay
from counterpoint.games import GAMES, action_values, deal, play, values
from counterpoint.games.replaying import Rerun
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent / "examples" / "my_replay.py"


def played(name="T2", groups=6, rollouts=4, seed=1, **dials):
    """Plays of a game, something that runs them again, and where their rows stand."""
    plays = play(deal(name, contexts=groups, seed=seed, **dials), groups=groups, rollouts=rollouts)
    return plays, Rerun(plays), places(plays.steps, np.arange(len(plays.steps)))


def each(at, action):
    return np.full(len(at), action)


# ---------------------------------------------------------------------------------------------
# A game is a replay


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", GAMES)
def test_every_game_keeps_the_contract_of_a_replay(name, noise):
    """Without knowing the protocol; with noise on the outcome and without."""
    dials = {"agents": 4} if name == "T13" else {}
    plays, rerun, _ = played(name, groups=10, noise=noise, **dials)
    assert isinstance(rerun, Replay)
    told = check_replay(rerun, plays.steps)
    assert min(told.clauses.values()) > 0
    assert f"the replay of {told.rows} turns keeps its contract: menu" in str(told)


@pytest.mark.parametrize("name", ["T2", "T11", "T14", "T16"])
def test_branches_have_the_mean_that_enumeration_gives(name):
    """Acts drawn anew: V; entry 1: Q(h, 1); what was earned before belongs to both. 400 branches a
    row, on average within a fifth of a standard error, and with a spread of one.
    """
    plays, rerun, at = played(name, **({"gamma": 1.0} if name == "T11" else {}))
    v, q = values(plays.game)[plays.state], action_values(plays.game)[plays.state, 1]
    steps = plays.steps
    before = np.cumsum(steps.reward) - steps.reward
    past = before - before[steps.step == 0][steps.rollout]
    for action, exact in ((RESAMPLE, v), (1, q)):
        found = rerun.branch(at, each(at, action), 400).values
        off, error = found.mean(axis=1) - past - exact, found.std(axis=1) / 20
        np.testing.assert_allclose(off[error < 1e-9], 0, atol=1e-9)
        z = off[error >= 1e-9] / error[error >= 1e-9]
        assert abs(z.mean()) < 4 / len(z) ** 0.5 + 0.2
        assert 0.7 < z.std() < 1.3


def test_the_critic_of_a_branch_is_the_exact_worth_of_its_act():
    """Q of the entry that the branch drew, on every branch."""
    plays, rerun, at = played()
    found = rerun.branch(at, each(at, RESAMPLE), 5)
    exact = action_values(plays.game)[plays.state[:, None], found.drawn]
    np.testing.assert_allclose(found.critic, exact, atol=1e-12)


def test_what_nobody_notices_changes_nobody():
    """In a star only agent 0 is seen: when agent 2 does nothing instead, replay keeps what the
    others did, so one branch is exact; drawn anew, later acts differ.
    """
    plays, rerun, at = played("T13", topology="star", agents=4)
    row = np.flatnonzero(plays.steps.agent == 2)
    part = rerun.branch(at[row], each(row, NULL), 8, downstream="replay").values
    assert np.ptp(part, axis=1).max() == 0
    assert np.ptp(rerun.branch(at[row], each(row, NULL), 8).values, axis=1).max() > 0


def test_arms_of_one_number_share_their_draws():
    """Two arms at one place: later agents who react alike act alike, so the difference varies less
    than that of branches with other numbers.
    """
    plays, rerun, at = played("T2", dep=0.3, groups=20)
    first = at[plays.steps.step == 0]
    arms = [rerun.branch(first, each(first, act), 64).values for act in (1, 2)]
    paired = (arms[0] - arms[1]).var(axis=1).mean()
    crossed = (arms[0] - np.roll(arms[1], 1, axis=1)).var(axis=1).mean()
    assert paired < 0.6 * crossed


def test_a_game_that_absence_would_keep_from_ending_cannot_be_run():
    """On the loop an absent agent that always goes back never ends: NaN, and not 0."""
    plays, _, _ = played("T11")
    rerun = Rerun(plays, null=1)
    there = np.zeros((1, 1), dtype=bool)
    assert np.isnan(rerun.absent(np.array([0]), (0,), there, 2).values).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: Rerun(p, null=7), "doing nothing is entry 7; the game has 3 actions"),
        (lambda p: Rerun(p, does={"spawn": [[1, 0]]}), r"has shape \(1, 2\), not \(4, 3\)"),
        (lambda p: Rerun(p).menu(np.array([[0, 9]])), "no step 9 in a run 0"),
        (lambda p: Rerun(p).menu(np.array([[99, 0]])), "no step 0 in a run 99"),
    ],
)
def test_a_game_refuses_what_it_has_not(call, says):
    """Entries, shapes and places that do not exist are named."""
    with pytest.raises(Refused, match=says):
        call(played()[0])


# ---------------------------------------------------------------------------------------------
# The contract catches what is broken


class Lopsided(Rerun):
    """Goes on better than the record did."""

    def branch(self, *args, **options):
        found = super().branch(*args, **options)
        return replace(found, values=found.values + 3.0)


class Ordered(Rerun):
    """Draws by where a place stands in the question."""

    def branch(self, at, action, n, **options):
        seed = options.pop("seed", 0) + int(at[0, 0]) * 1000 + int(at[0, 1])
        return super().branch(at, action, n, seed=seed, **options)


class Deaf(Rerun):
    """Ignores the seed."""

    def branch(self, *args, **options):
        return super().branch(*args, **{**options, "seed": 0})


class Forgetful(Rerun):
    """Draws again what the record holds."""

    def branch(self, *args, **options):
        return super().branch(*args, **{**options, "downstream": "anew"})

    def absent(self, runs, agents, present, n, **options):
        return super().absent(runs, agents, present & (np.arange(len(agents)) > 0), n, **options)


class Absent(Rerun):
    """Takes the first agent out of every run."""

    def absent(self, runs, agents, present, n, **options):
        return super().absent(runs, agents, present & (np.arange(len(agents)) > 0), n, **options)


class Obliging(Rerun):
    """Knows an act for every entry."""

    def branch(self, at, action, n, **options):
        return super().branch(at, np.where(action > 2, 0, action), n, **options)


class Free(Rerun):
    """Costs nothing."""

    def branch(self, *args, **options):
        return replace(super().branch(*args, **options), spent=Spent())


class Loose(Rerun):
    """Its probabilities are none."""

    def menu(self, at):
        menu = super().menu(at)
        return menu._replace(probs=menu.probs / 2)


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (Loose, "menu: the probabilities"),
        (Ordered, "again: asked in another order"),
        (Deaf, "seeds: two seeds"),
        (Lopsided, "parent: runs drawn anew"),
        (Forgetful, "frozen: row"),
        (Absent, "present: row"),
        (Obliging, "impossible: an entry"),
        (Free, "spent: branches were run"),
    ],
)
def test_a_broken_promise_is_named(broken, clause):
    """Each fault is found, by the clause that it breaks."""
    plays, _, _ = played(groups=10)
    with pytest.raises(Refused, match=f"breaks its contract, clause {clause}"):
        check_replay(broken(plays), plays.steps)


# ---------------------------------------------------------------------------------------------
# The account


class Counted(Rerun):
    """Counts the branches that it is asked for."""

    asked = 0

    def branch(self, at, action, n, **options):
        self.asked += len(at) * n
        return super().branch(at, action, n, **options)


def test_an_account_answers_as_the_replay_does():
    """Every array, in whatever order and portions it is asked."""
    plays, rerun, at = played()
    account = Account(rerun, plays.steps)
    account.branch(at[::3], each(at[::3], RESAMPLE), 2)
    held = account.branch(at[::-1], each(at, RESAMPLE), 5, seed=0)
    bare = rerun.branch(at[::-1], each(at, RESAMPLE), 5, seed=0)
    for name in ("values", "leaves", "drawn", "critic"):
        np.testing.assert_array_equal(getattr(held, name), getattr(bare, name))
    assert held.exact
    there = np.ones((3, 4), dtype=bool)
    there[1, 2] = False
    runs = np.array([2, 2, 5])
    for _ in range(2):
        held = account.absent(runs, (0, 1, 2, 3), there, 3)
        np.testing.assert_array_equal(
            held.values, rerun.absent(runs, (0, 1, 2, 3), there, 3).values
        )


def test_no_branch_is_run_twice():
    """Asked again: nothing is run. More of them: the rest. Twice in one question: once."""
    plays, _, at = played()
    counted = Counted(plays)
    account = Account(counted, plays.steps)
    account.branch(at, each(at, RESAMPLE), 2)
    account.branch(at, each(at, RESAMPLE), 2)
    assert counted.asked == 2 * len(at)
    account.branch(np.concatenate([at, at]), each(np.append(at, at), RESAMPLE)[: 2 * len(at)], 5)
    assert counted.asked == 5 * len(at)
    assert account.spent == counted.branch(at, each(at, RESAMPLE), 5).spent


def test_methods_that_share_an_account_share_their_branches():
    """C3 with four siblings after C3 with sixteen costs nothing, and says the same as alone."""
    plays, rerun, _ = played()
    account = Account(rerun, plays.steps)
    c3(plays.steps, replay=account, alternatives=16)
    again = c3(plays.steps, replay=account, alternatives=4)
    assert again.diagnostics["env_calls"] == again.diagnostics["forward_passes"] == 0
    np.testing.assert_array_equal(again.values, c3(plays.steps, replay=rerun).values)


@pytest.mark.parametrize(
    ("method", "options"),
    [(c3, {"alternatives": 3, "own": 2}), (coma, {}), (loo, {"downstream": "anew", "n": 2})],
)
def test_a_price_is_what_is_then_spent(method, options):
    """In a chain every branch is as long as the record, so price and cost agree to the call."""
    plays, rerun, _ = played()
    quoted = price(method, plays.steps, rerun, **options)
    said = method(plays.steps, replay=rerun, **options).diagnostics
    assert quoted.env_calls == said["env_calls"]
    assert quoted.forward_passes == said["forward_passes"]


@pytest.mark.parametrize(("budget", "rows"), [(0, 0), (15, 0), (16, 1), (60, 5), (10**6, 96)])
def test_a_budget_spent_midway_gives_a_part_and_says_so(budget, rows):
    """No more is spent; the rows that it covers have the credit that they would have had, the
    others NaN, which is not 0; the credit counts them. Four siblings at the turns of a play of four
    take 16, 12, 8 and 4 passes, so 16 pay for a row, and 60 for 16 + 12 + 8 + 4 + 16 and no more.
    """
    plays, rerun, _ = played()
    steps = plays.steps
    account = Account(rerun, steps, {"forward_passes": budget})
    part, whole = (c3(steps, replay=r) for r in (account, rerun))
    assert account.spent.forward_passes <= budget
    assert part.credited.sum() == rows
    np.testing.assert_array_equal(part.values[part.credited], whole.values[part.credited])
    left = int((~part.credited).sum())
    assert part.diagnostics["not_run"] == account.left_out == 4 * left
    assert (f"{left} of {len(steps)} turns are not credited" in str(part)) == (left > 0)


def test_a_budget_in_another_coin_is_refused():
    """Money is not counted here."""
    plays, rerun, _ = played()
    with pytest.raises(Refused, match="in env_calls, forward_passes, tokens, not dollars"):
        Account(rerun, plays.steps, {"dollars": 3})


# ---------------------------------------------------------------------------------------------
# Three methods of one's own


@pytest.fixture(scope="module")
def coins():
    spec = importlib.util.spec_from_file_location("my_replay", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_keeps_the_contract(coins):
    """Clauses that three methods cannot answer count 0; all others have something to examine."""
    told = check_replay(coins.Coins(), coins.steps)
    assert {name for name, n in told.clauses.items() if not n} == {"menu", "frozen", "present"}


def test_c3_of_two_coins_by_hand(coins):
    """The second agent wins for the team if the first showed heads: its seqau is 1 − .6 or 0 − .6
    then and 0 otherwise. With 400 siblings the error is below .1 and has mean 0.
    """
    credit = c3(coins.steps, replay=coins.Coins(), alternatives=400)
    first, second = np.array(coins.runs).T
    off = credit.values[1::2] - first * (second - 0.6)
    assert np.abs(off).max() < 0.1
    assert credit.identified == "assumption:replay"
    assert credit.diagnostics["env_calls"] == 40 * 400 * (2 + 1)


def test_an_adapted_harness_without_a_default_or_a_menu(coins):
    """Where put returns None branch cannot be run, NaN. Frozen acts and absent agents are refused
    with the way out, and so is a mean over a menu that is not there.
    """

    class Shy(coins.Coins):
        def put(self, state, action, seed):
            return None if action == NULL else super().put(state, action, seed)

    credit = loo(coins.steps, replay=Shy(), downstream="anew")
    assert np.isnan(credit.values).all()
    assert "80 of 80 turns are not credited" in str(credit)
    with pytest.raises(Refused, match="give your replay a method branch of its own"):
        loo(coins.steps, replay=coins.Coins())
    with pytest.raises(Refused, match="say alternatives=8"):
        coma(coins.steps, replay=coins.Coins(), downstream="anew")
    with pytest.raises(Refused, match="give your replay a method absent"):
        Adapted(coins.Coins()).absent(np.array([0]), ("first",), np.ones((1, 1), dtype=bool), 1)
    with pytest.raises(Refused, match="replay is int, which has neither menu, branch and absent"):
        c3(coins.steps, replay=7)
    with pytest.raises(Refused, match="an imported log cannot be run again"):
        needed(None, "c3")


def test_a_fourth_method_gives_menus(coins):
    """With menu the exact mean over the policy: R − (.6·[first, 1] + .4·[first, 0]) for the second
    agent, which is exact as nothing is drawn after it.
    """

    class Offering(coins.Coins):
        def menu(self, state):
            return (0.4, 0.6), state[1][0], 0

        def put(self, state, action, seed):
            return super().put(state, action, seed) or (state[0] + [action], len(state[1]) - 1)

    credit = coma(coins.steps, replay=Offering(), downstream="anew")
    first, second = np.array(coins.runs).T
    np.testing.assert_allclose(credit.values[1::2], first * (second - 0.6), atol=1e-12)


def test_steps_without_anything_to_replay():
    """Nothing trainable: check_replay says so."""
    plays, rerun, _ = played()
    masked = replace(plays.steps, mask=np.zeros(len(plays.steps), dtype=bool))
    with pytest.raises(Refused, match="no trainable, scored row"):
        check_replay(rerun, masked)


def test_branches_say_what_they_do_not_know():
    """Of values alone: one continuation each but where it is NaN, no entry, no critic, on trust."""
    found = Branches.of([[1.0, np.nan]], Spent(1, 2, 3) + Spent(1, 0, 0))
    assert found.leaves.tolist() == [[1, 0]]
    assert found.drawn.tolist() == [[-1, -1]]
    assert np.isnan(found.critic).all()
    assert not found.exact
    assert str(found.spent) == "2 environment calls, 2 forward passes, 3 tokens"


def test_places_are_events_where_steps_have_them():
    """(trace, seq) from traces, (rollout, step) from columns."""
    steps = Steps.from_columns(rollout=[0, 0], reward=[0, 1])
    assert places(steps, np.array([1])).tolist() == [[0, 1]]
    events = Steps.from_columns(rollout=[0, 0], reward=[0, 1], event=[(0, 3), (0, 9)])
    assert places(events, np.array([1])).tolist() == [[0, 9]]


def test_kept_acts_are_kept():
    """Kept with all that follows, an act gives the outcome of the record to the last bit."""
    plays, rerun, at = played(noise=0.3)
    kept = rerun.branch(at, each(at, KEEP), 1, downstream="frozen").values[:, 0]
    assert kept.tolist() == plays.steps.outcome.tolist()
