"""V by branches, and the harness as what measured credit asks, against exact values and `fork`."""

import math

import numpy as np
import pytest

from counterpoint.branches import KEEP, NULL, RESAMPLE, Spent
from counterpoint.credit import check_replay, estimate
from counterpoint.credit.account import Account
from counterpoint.credit.protocols import Replay
from counterpoint.envs import ENVS, make
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import Branching, credit_of, fork, value_by_branches, value_of
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from forks import SHORT, recorded
from little_envs import Doors, Fog, Office
from stages import played, room

pytestmark = pytest.mark.slow

NOBODY = {"coordinator": "none", "researcher": "return: nothing"}


def ledger(**options):
    given = {"groups": 2, "rollouts": 4, "seed": 3, **options}
    return rollout(make("ledger-v0"), Softmax(), **given)


def places(traces):
    return Steps.from_traces(traces).event


def all_of(where, action):
    return np.full(len(where), action)


def seconds(trace, event):
    """A trace of one place."""
    return np.array([[0, event.seq]])


# -- V(G≤t) ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_v_by_branches_agrees_with_v_by_listing(name):
    """Within four standard errors at every prefix, and exactly where nothing is left to chance."""
    env = make(name)
    (trace,) = rollout(env, Softmax(), groups=1, rollouts=1, seed=2)
    for t in range(0, len(trace) + 1, 3):
        mean, stderr, spent = value_by_branches(trace, t, 200)
        exact = value_of(trace[:t], env)
        assert abs(mean - exact) <= 4 * stderr + 1e-12
        assert spent.forward_passes == 0 or t < len(trace)


def test_v_of_a_finished_run_is_its_own_outcome():
    """Without error, from one branch as from many, at no cost but leading the run."""
    trace = ledger()[0]
    for n in (1, 5):
        mean, stderr, spent = value_by_branches(trace, n=n)
        assert (mean, stderr, spent.forward_passes) == (trace.outcome, 0.0, 0)
    assert math.isnan(value_by_branches(trace, 0, 1).stderr)


def test_v_of_a_stored_prefix_needs_no_more_than_the_prefix():
    """A prefix knows nothing of its run, and is valued as the run's at that place."""
    trace = recorded(make("ledger-v0"))[0]
    given = {"env": make("ledger-v0"), "policies": Softmax()}
    assert value_by_branches(trace[:3], n=20, **given) == value_by_branches(trace, 3, 20)


def test_v_is_refused_where_there_is_none():
    """No branches, a place that is not there, a run that ends unscored."""
    trace = ledger()[0]
    for at, n in ((1, 0), (-1, 5), (len(trace) + 1, 5)):
        with pytest.raises(Refused, match="V needs n of 1 at least and t from 0 to"):
            value_by_branches(trace, at, n)

    class Unpaid(Doors):
        def rewards(self, trace):
            return []

    with pytest.raises(Refused, match="ends unscored, so V has no value to expect"):
        value_by_branches(recorded(Unpaid())[0], 1, 2)


# -- branches for measured credit --------------------------------------------------------------


def test_the_harness_is_a_replay():
    """It has what credit asks for, and an account keeps to a budget around it."""
    traces = ledger()
    replaying = Branching(traces)
    assert isinstance(replaying, Replay)
    steps = Steps.from_traces(traces)
    account = Account(replaying, steps, {"forward_passes": 40})
    where = places(traces)
    found = account.branch(where, all_of(where, RESAMPLE), 8)
    assert 0 < np.isnan(found.values).sum() < found.values.size
    assert account.left_out == np.isnan(found.values).sum()
    again = account.branch(where[:1], all_of(where[:1], RESAMPLE), 8)
    assert again.spent == Spent()
    np.testing.assert_array_equal(again.values[0], found.values[0])


@pytest.mark.slow
def test_branches_at_an_act_estimate_its_exact_values():
    """RESAMPLE gives V and KEEP gives Q, within four standard errors at every act of four runs."""
    traces = ledger(groups=1)
    replaying = Branching(traces)
    for number, trace in enumerate(traces):
        exact = credit_of(trace, make("ledger-v0"))
        where = np.array([(number, each.seq) for each in exact])
        for action, values in ((RESAMPLE, "value"), (KEEP, "q")):
            found = replaying.branch(where, all_of(where, action), 150)
            mean, error = found.values.mean(axis=1), found.values.std(axis=1, ddof=1) / 150**0.5
            truth = np.array([getattr(each, values) for each in exact])
            assert (np.abs(mean - truth) <= 4 * error + 1e-12).all()
            assert found.exact


@pytest.mark.slow
@pytest.mark.parametrize("env", [make("ledger-v0"), make("research-v0"), Doors(), Office()])
def test_a_branch_for_credit_is_the_fork_of_the_same_number(env):
    """Outcome by outcome, at every act: drawn anew, kept, and another entry of the menu."""
    trace = recorded(env, groups=1, rollouts=1)[0]
    replaying = Branching([trace])
    for act in trace.of("act")[:6]:
        where = np.array([[0, act.seq]])
        menu = replaying.menu(where)
        texts = [text for _, text in trace[act.seq - 1].legal]
        other = (int(menu.taken[0]) + 1) % len(texts)
        for action, do, content in (
            (RESAMPLE, "resample", None),
            (KEEP, "keep", None),
            (other, "replace", texts[other]),
        ):
            found = replaying.branch(where, np.array([action]), 5, seed=4)
            forked = fork(trace, act, do, n=5, seed=4, content=content)
            np.testing.assert_array_equal(found.values[0], forked.values)
            assert found.spent.forward_passes == forked.spent.forward_passes


def test_branches_are_the_same_whatever_is_asked_beside_them():
    """In another order, in two portions, or alone."""
    traces = ledger()
    where = places(traces)
    whole = Branching(traces).branch(where, all_of(where, RESAMPLE), 6)
    replaying = Branching(traces)
    parts = [replaying.branch(where[::-1], all_of(where, RESAMPLE), 3, start=s) for s in (0, 3)]
    joined = np.concatenate([part.values[::-1] for part in parts], axis=1)
    np.testing.assert_array_equal(joined, whole.values)


def test_menus_say_what_could_be_done_and_how_likely():
    """Sizes, uniform probabilities, what was taken, what does nothing, which entry decides what."""
    traces = ledger()
    where = places(traces)
    menu = Branching(traces, null=NOBODY).menu(where)
    acts = [traces[run][seq] for run, seq in where.tolist()]
    shown = [traces[run][seq - 1].legal for run, seq in where.tolist()]
    for row, (act, legal) in enumerate(zip(acts, shown, strict=True)):
        texts = [text for _, text in legal]
        assert menu.size[row] == len(texts)
        assert menu.probs[row, : len(texts)] == pytest.approx(1 / len(texts))
        assert (menu.probs[row, len(texts) :] == 0).all()
        assert texts[menu.taken[row]] == act.text
        nothing = NOBODY["coordinator" if act.agent == "coordinator" else "researcher"]
        assert menu.null[row] == (texts.index(nothing) if nothing in texts else -1)
        for column, text in enumerate(texts):
            assert menu.does["spawn"][row, column] == text.startswith("spawn")
            assert menu.does["stop"][row, column] == ("stop: " in text)


def test_what_cannot_be_run_is_missing_and_not_zero():
    """An entry that is not on the menu, a frozen act that the record does not hold."""
    traces = ledger(rollouts=8)
    where = places(traces)
    replaying = Branching(traces, null=NOBODY)
    beyond = replaying.branch(where, all_of(where, 99), 2)
    assert np.isnan(beyond.values).all()
    assert not beyond.leaves.any()
    assert beyond.spent.forward_passes == 0
    stops = np.array([p for p in where.tolist() if traces[p[0]][p[1]].text == "stop: unknown"][:1])
    early = replaying.branch(stops, np.array([NULL]), 2, downstream="frozen")
    assert np.isnan(early.values).all()


def test_several_continuations_go_on_from_one_act():
    """The act is drawn once a branch; its value is the mean of its leaves."""
    traces = ledger(rollouts=8)
    trace = next(t for t in traces if t.of("delegate"))
    where = np.array([[0, trace.of("act")[0].seq]])
    replaying = Branching([trace])
    one, many = (replaying.branch(where, np.array([RESAMPLE]), 6, each=each) for each in (1, 30))
    assert one.drawn.tolist() == many.drawn.tolist()
    assert (many.leaves == 30).all()
    assert many.spent.forward_passes > 10 * one.spent.forward_passes
    for env in (make("ledger-v0"), Doors()):
        short = rollout(env, Softmax(), groups=1, rollouts=1, seed=5)[0]
        act = np.array([[0, short.of("act")[0].seq]])
        (leaves,) = Branching([short]).branch(act, np.array([KEEP]), 1, each=200).values
        apart = Branching([short]).branch(act, np.array([KEEP]), 200).values[0]
        assert abs(leaves[0] - credit_of(short, env)[0].q) < 4 * apart.std() / 200**0.5
        assert apart.std() > 0


def test_a_record_that_is_followed_is_the_record():
    """With everything kept, replayed or frozen, each run gives its own outcome; nobody is asked."""
    for traces in (ledger(), recorded(Fog()), recorded(Office())):
        where = places(traces)
        replaying = Branching(traces)
        for downstream in ("replay", "frozen"):
            found = replaying.branch(where, all_of(where, KEEP), 2, downstream=downstream)
            own = [[traces[run].outcome] * 2 for run, _ in where.tolist()]
            np.testing.assert_array_equal(found.values, own)
            assert found.spent.forward_passes == 0


def test_whoever_sees_the_same_does_the_same():
    """Ann's word goes to Bob alone: without it he is asked anew, and Cid, who never saw it, not."""
    asked = []

    def anyone(observation, legal, draws):
        asked.append(observation.agent)
        if observation.turn == 2:
            return "stop: enough"
        return "message bob: hi" if (observation.agent, observation.turn) == ("ann", 0) else "none"

    env = room(
        {"clerk": ["message", "stop"]},
        start=lambda self: dict.fromkeys(("ann", "bob", "cid"), "clerk"),
        rewards=lambda self, trace: [(float(len(trace.of("message"))), None)],
    )
    trace = played(env, anyone)
    asked.clear()
    where = np.array([[0, trace.of("act")[0].seq]])
    found = Branching([trace]).branch(where, np.array([NULL]), 1, downstream="replay")
    assert found.values.tolist() == [[0.0]]
    assert asked == ["bob", "ann", "bob", "ann"]
    assert found.spent.forward_passes == 4


# -- agents taken out --------------------------------------------------------------------------


def test_with_everybody_present_a_run_is_the_record():
    """No act gives way, so nothing is run and nothing is spent."""
    traces = ledger()
    agents = ["coordinator", "coordinator.0"]
    present = np.ones((len(traces), 2), dtype=bool)
    found = Branching(traces).absent(np.arange(len(traces)), agents, present, 3)
    np.testing.assert_array_equal(found.values, [[t.outcome] * 3 for t in traces])
    assert found.spent == Spent()


def test_a_run_without_an_agent():
    """The scout says nothing, so the leader guesses: 1/3; with it, it opens what it was told."""
    told = Softmax()
    trace = recorded(Doors(), told, groups=1, rollouts=1)[0]
    first = trace.of("act")[0]
    assert first.agent == "scout"
    agents, gone = ["scout", "leader"], np.array([[False, True]])
    found = Branching([trace]).absent(np.array([0]), agents, gone, 300, downstream="anew")
    again = fork(trace, first, "remove", n=1)
    assert again.traces[0].of("message") or again.traces[0].of("tool_call")
    p = found.values.mean()
    assert abs(p - 1 / 3) < 4 * math.sqrt(2 / 9 / 300)
    assert not np.isnan(found.values).any()


def test_an_absent_agent_that_draws_anew_is_its_policy():
    """With everybody redrawn from the first act on, the mean is V(h₀) where runs are short."""
    traces = rollout(Doors(), Softmax(), groups=1, rollouts=1, config={"limits": {"turns": 2}})
    gone = np.zeros((1, 2), dtype=bool)
    found = Branching(traces).absent(
        np.array([0]), ["scout", "leader"], gone, 400, absence="resample", downstream="anew"
    )
    assert abs(found.values.mean() - 1 / 3) < 4 * math.sqrt(2 / 9 / 400)


def test_a_replay_refuses_what_is_not_there():
    """Another run, an event that is no act, an imported log, policies that changed since."""
    traces = ledger()
    replaying = Branching(traces)
    with pytest.raises(Refused, match="there is no run 99; there are 8, from 0"):
        replaying.menu(np.array([[99, 1]]))
    with pytest.raises(Refused, match=r"event 0 of trace \w+ is no act"):
        replaying.branch(np.array([[0, 0]]), np.array([KEEP]), 1)
    table = Softmax()
    changed = recorded(Doors(), table, config=SHORT)
    table.install({})
    with pytest.raises(Refused, match="give the policies that played"):
        Branching(changed).menu(np.array([[0, 1]]))
    marked = Branching(changed, allow_changed=True)
    table.install({"x": {"0": 1.0}})
    marked = Branching(changed, allow_changed=True)
    assert not marked.branch(np.array([[0, 1]]), np.array([KEEP]), 1).exact
    stranger = [Trace(changed[0].header, changed[0].events)]
    with pytest.raises(Refused, match="no environment of the table"):
        Branching(stranger).menu(np.array([[0, 1]]))


@pytest.mark.slow
@pytest.mark.parametrize("env", [make("ledger-v0"), make("research-v0"), Doors(), Fog()])
def test_the_harness_keeps_the_contract_of_a_replay(env):
    """The shipped check of replays passes on real runs, and every clause examined something."""
    traces = rollout(env, Softmax(), groups=4, rollouts=4)
    told = check_replay(Branching(traces, null=NOBODY), Steps.from_traces(traces))
    assert all(told.clauses.values())


@pytest.mark.slow
def test_measured_credit_of_real_runs_comes_near_the_exact():
    """C3 on ledger-v0 against exact seqau: the more branches, the nearer."""
    traces = ledger()
    steps, replaying = Steps.from_traces(traces), Branching(traces)
    exact = [each.seqau for trace in traces for each in credit_of(trace, make("ledger-v0"))]
    found = [
        np.corrcoef(estimate("c3", steps, replay=replaying, **more).values, exact)[0, 1]
        for more in ({}, {"alternatives": 12, "own": 12})
    ]
    assert 0.5 < found[0] < found[1]
    assert found[1] > 0.6
