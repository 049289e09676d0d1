"""Causal returns: only what descends from a turn, and refused where descent is not known."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from counterpoint.credit import estimate, reinforce
from counterpoint.envs import Amount, Env
from counterpoint.formats import read
from counterpoint.graph import TraceGraph
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.schema import Act, Cause, Item, LateReward, Read, Reward, Target, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from little_envs import Doors


def causal(traces, late=None, **options):
    return reinforce(Steps.from_traces(traces, late, descent=True), causal=True, **options).values


def without(trace: Trace, effect: int, cause: int) -> Trace:
    """The trace with one edge taken out."""
    events = list(trace.events)
    kept = tuple(c for c in events[effect].causes if c.seq != cause)
    events[effect] = msgspec.structs.replace(events[effect], causes=kept)
    return Trace(trace.header, tuple(events))


# ---------------------------------------------------------------------------------------------
# The pit


@pytest.fixture
def pit(tmp_path):
    """An agent a sets what an agent b reads, and the reward depends on what b read. No message
    passes between them: the environment's edge is all that ties a to the reward.
    """
    with Recorder(tmp_path / "pit.jsonl") as rec, rec.trace() as t:
        start = t.custom("env", "test.start")
        t.act("a", "set 1", causes=[start])
        t.tool_result(t.tool_call("a", "set", 1), "done")
        t.act("b", "get", causes=[start])
        value = t.tool_result(t.tool_call("b", "get"), 1)
        t.reward(1.0, causes=[value])
    (trace,) = read(tmp_path / "pit.jsonl")
    return trace


def test_the_environment_leads_from_one_agent_to_another(pit):
    """Through the environment's edge the one who set the value earns what it led to."""
    assert causal([pit]).tolist() == [1, 1]


def test_one_missing_edge_would_make_1_into_0_and_is_refused(pit):
    """Without the environment's edge the graph says that a did nothing for the reward; that the
    edge is missing is seen, and the trace refused.
    """
    first, second = (event.seq for event in pit.of("tool_result"))
    act, paid = pit.of("act")[0].seq, pit.of("reward")[0].seq
    broken = without(pit, second, first)
    assert act in TraceGraph(pit).ancestors(paid, descent=True)
    assert act not in TraceGraph(broken).ancestors(paid, descent=True)
    with pytest.raises(Refused, match=f"no edge from result {first}, which may have changed"):
        causal([broken])


def test_any_required_edge_that_is_bent_or_taken_out_is_seen(tmp_path):
    """Whichever edge of a trace with every kind of work is taken out, or led to the first event
    instead, either another path still goes where it went or the trace is refused. Edges into a
    reward say what it depends on, and nothing else can.
    """
    with Recorder(tmp_path / "all.jsonl") as rec, rec.trace() as t:
        t.act("boss", "hire")
        t.spawn("boss", "clerk")
        t.spawn("boss", "idler")
        idle = t.act("idler", "hum", sees=[])
        job = t.delegate("boss", "clerk", "look")
        t.deliver("clerk", job)
        t.act("clerk", "call", sees=[job])
        found = t.tool_result(t.tool_call("clerk", "look"), 3)
        t.act("clerk", "return", sees=[found])
        note = t.write("clerk", "note", 1, "3")
        t.write("clerk", "aside", 1, "5")
        done = t.agent_return("clerk", "boss", "3")
        t.act("boss", "sum", sees=[done])
        t.write("boss", "note", 2, "4", reads=[Read(artefact="note", version=1)], causes=[note])
        t.aggregate("boss", [done, idle], "3")
        t.act("boss", "stop", sees=[])
        t.stop("boss", "3")
        t.reward(1.0)
    (trace,) = read(tmp_path / "all.jsonl")
    assert causal([trace]).tolist() == [1] * 6
    tried = 0
    for event in trace.events:
        for cause in () if isinstance(event, Reward) else event.causes:
            less = without(trace, event.seq, cause.seq)
            for changed in (less, bent(trace, event.seq, cause.seq)):
                if cause.seq not in TraceGraph(changed).ancestors(event.seq):
                    tried += 1
                    with pytest.raises(Refused, match=f"event {event.seq} "):
                        causal([changed])
    assert tried > 40


def bent(trace: Trace, effect: int, cause: int) -> Trace:
    """The trace with one edge led to its first event."""
    events = list(trace.events)
    links = [c for c in events[effect].causes if c.seq != cause]
    links.append(Cause(seq=0, kind="derives"))
    events[effect] = msgspec.structs.replace(events[effect], causes=tuple(links))
    return Trace(trace.header, tuple(events))


def test_a_cause_that_is_not_there_is_refused(pit):
    """An edge to an event that the trace does not hold, or that came later."""
    for seq in (99, len(pit) - 1):
        events = list(pit.events)
        causes = (*events[1].causes, Cause(seq=seq, kind="derives"))
        events[1] = msgspec.structs.replace(events[1], causes=causes)
        with pytest.raises(Refused, match=f"event 1 .*: its cause {seq} is no earlier event"):
            causal([Trace(pit.header, tuple(events))])


@pytest.mark.parametrize(
    ("recorded", "sentence"),
    [
        (lambda t: t.act("b", "answer"), "inferred by the rule 'mailbox'"),
        (lambda t: t.act("c", "answer"), "inferred by the rule 'order'"),
    ],
    ids=["mailbox", "order"],
)
def test_guessed_edges_are_refused_with_the_way_out(tmp_path, recorded, sentence):
    """What a recorder filled in because it was not told is no ground for a causal return."""
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        t.act("a", "ask")
        t.message("a", "b", "what is it?")
        recorded(t)
        t.reward(1.0)
    with pytest.raises(Refused, match=sentence) as refusal:
        causal(read(tmp_path / "a.jsonl"))
    assert "record it, or take the return over all later rewards" in str(refusal.value)


def test_imported_logs_are_refused():
    """An importer's edges are inferred from history: no causal return on them."""
    folder = "tests/data/who_and_when/algorithm_generated/1.json"
    with pytest.raises(Refused, match="inferred by the rule"):
        causal(read(folder, "who_and_when"))


def test_it_is_refused_where_nothing_tells_descent():
    """Columns without `descends`, and returns that were given as they stand."""
    with pytest.raises(Refused, match=r"say from_traces\(…, descent=True\), or give descends="):
        reinforce(Steps.from_columns(rollout=[0], reward=[1]), causal=True)
    given = Steps.from_columns(rollout=[0], reward=[1], step_return=[1], descends=[[]])
    with pytest.raises(Refused, match="step_return is a return over all later rewards"):
        reinforce(given, causal=True)


# ---------------------------------------------------------------------------------------------
# What is summed


def test_each_reward_counts_once_and_only_where_it_descends(tmp_path):
    """Agent a asks b and c, who answer d. b's own reward of ¼ is b's and a's; d's of 1 is
    everybody's, once for a although two paths lead to it; c's of −½ is c's and a's.
    """
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        t.act("a", "ask")
        asked = t.message("a", ["b", "c"], "?")
        by_b = t.act("b", "one", sees=[asked])
        t.reward(0.25, causes=[by_b])
        by_c = t.act("c", "two", sees=[asked])
        t.reward(-0.5, causes=[by_c])
        told = [t.message("b", "d", "one"), t.message("c", "d", "two")]
        by_d = t.act("d", "three", sees=told)
        t.reward(1.0, causes=[by_d])
    traces = list(read(tmp_path / "a.jsonl"))
    assert causal(traces).tolist() == [0.75, 1.25, 0.5, 1]
    # γ ½ per turn: a at 0, b at 1, c at 2, d at 3
    want = [0.25 / 2 - 0.5 / 4 + 1 / 8, 0.25 + 1 / 4, -0.5 + 1 / 2, 1]
    np.testing.assert_allclose(causal(traces, gamma=0.5), want, atol=1e-15)
    assert reinforce(Steps.from_traces(traces)).values.tolist() == [0.75, 0.75, 0.5, 1]


def test_who_could_have_stopped_and_did_not_leads_to_everything_after(tmp_path):
    """A turn with `no_stop` earns what nothing else ties to it."""
    for name, items in (("silent", ()), ("declined", (Item(verb="no_stop"),))):
        with Recorder(tmp_path / f"{name}.jsonl") as rec, rec.trace() as t:
            start = t.custom("env", "test.start")
            t.act("a", "go on", items=items, causes=[start])
            by_b = t.act("b", "work", causes=[start])
            t.reward(1.0, causes=[by_b])
    assert causal(read(tmp_path / "silent.jsonl")).tolist() == [0, 1]
    assert causal(read(tmp_path / "declined.jsonl")).tolist() == [1, 1]


def test_a_reward_for_a_turn_is_its_own(tmp_path):
    """A reward that targets an act counts for it; one that was given later to an earlier turn
    takes no factor γ where it descends from a turn in between.
    """
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        start = t.custom("env", "test.start")
        by_a = t.act("a", "one", causes=[start])
        by_b = t.act("b", "two", causes=[start])
        t.reward(1.0, target=Target(seq=by_a.seq), causes=[by_b])
    assert causal(read(tmp_path / "a.jsonl"), gamma=0.5).tolist() == [1, 1]


def test_a_late_reward_judges_the_whole_run(tmp_path):
    """It descends from every turn, as a judge saw them all."""
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        start = t.custom("env", "test.start")
        t.act("a", "one", causes=[start])
        t.act("b", "two", causes=[start])
    (trace,) = read(tmp_path / "a.jsonl")
    late = [LateReward(trace_id=trace.trace_id, digest=trace.digest, amount=2.0)]
    assert causal([trace], late, gamma=0.5).tolist() == [1, 2]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_it_is_the_sum_over_a_search_of_the_graph(seed):
    """On random traces with masked turns: for every turn, a search along effects, and the rewards
    it meets, each with γ to the number of trainable turns since.
    """
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    gamma = 0.5
    acts = [event for event in trace.events if isinstance(event, Act)]
    steps = Steps.from_traces([trace], descent=True)
    for drop in (False, True):
        got = reinforce(
            steps, causal=True, gamma=gamma, masked_reward="drop" if drop else "previous"
        ).values
        for row, act in enumerate(acts):
            want = 0.0
            for event in trace.events:
                if isinstance(event, Reward) and reaches(trace, act.seq, event.seq):
                    place = max(i for i, other in enumerate(acts) if other.seq < event.seq)
                    between = sum(acts[i].trainable for i in range(row + 1, place + 1))
                    if acts[place].trainable or not drop:
                        want += gamma**between * event.amount
            if act.trainable:
                assert got[row] == pytest.approx(want, abs=1e-12)
            else:
                assert math.isnan(got[row])


def random_trace(rng) -> Trace:
    """Turns of three agents, each following what it likes, and rewards that depend on some."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        with Recorder(path, sync="trace") as rec, rec.trace() as t:
            earlier = [t.custom("env", "test.start")]
            t.act("a", "first", causes=earlier)
            for number in range(int(rng.integers(1, 12))):
                some = list(rng.choice(len(earlier), size=int(rng.integers(1, 3))))
                causes = [earlier[i] for i in some]
                if rng.random() < 0.3:
                    t.reward(float(rng.integers(1, 5)), causes=causes)
                else:
                    agent, learns = "abc"[int(rng.integers(3))], bool(rng.random() < 0.7)
                    earlier.append(t.act(agent, str(number), causes=causes, trainable=learns))
            t.reward(1.0, causes=[earlier[-1]])
        (trace,) = read(path)
    return trace


def reaches(trace: Trace, start: int, end: int) -> bool:
    """Whether an event leads to another: a search backwards, cause by cause."""
    wave, seen = [end], set()
    while wave:
        seq = wave.pop()
        if seq == start:
            return True
        if seq not in seen:
            seen.add(seq)
            wave += [cause.seq for cause in trace[seq].causes]
    return False


# ---------------------------------------------------------------------------------------------
# Runs of our harness


class Apart(Env):
    """Two agents that never meet: each picks, and is paid for its own pick alone."""

    id = "apart-v0"
    roles: ClassVar = {"left": [], "right": []}

    def legal(self, agent):
        return {"low": "low", "high": "high"}

    def rewards(self, trace):
        for act in trace.of("act"):
            yield Amount(float(act.text == "high"), causes=[act])


def played(env: Env) -> list[Trace]:
    return rollout(env, Softmax(), groups=2, rollouts=4, config={"limits": {"turns": 2}})


def test_agents_that_never_meet_earn_their_own_reward():
    """In a played run an edge from order alone means that there is none: each turn's causal return
    is what it was paid, although the prefix return adds the other's.
    """
    traces = played(Apart())
    own = [float(act.text == "high") for trace in traces for act in trace.of("act")]
    assert len(set(own)) == 2
    assert causal(traces).tolist() == own
    assert reinforce(Steps.from_traces(traces)).values.tolist() != own


def test_a_reward_of_the_whole_run_is_everybodys():
    """Where an environment does not say what a reward depends on, both returns are the same."""
    traces = played(Doors())
    plain = reinforce(Steps.from_traces(traces), gamma=0.9).values
    np.testing.assert_array_equal(causal(traces, gamma=0.9), plain)
    assert plain.any()


def test_a_played_run_that_was_changed_is_refused():
    """Its edges are believed because its seal shows that nothing was touched."""
    trace = played(Apart())[0]
    last = trace.of("act")[-1]
    link = Cause(seq=0, kind="derives")
    events = tuple(
        msgspec.structs.replace(e, causes=(*e.causes, link)) if e is last else e
        for e in trace.events
    )
    for changed in (Trace(trace.header, events, trace.seal), Trace(trace.header, trace.events)):
        with pytest.raises(Refused, match="was played, but is unsealed or was changed since"):
            causal([changed])


# ---------------------------------------------------------------------------------------------
# Columns, and what the number means


def test_descends_as_a_column():
    """Row 0 leads to the reward of row 2 and not to row 1's; every row leads to its own."""
    columns = {"rollout": [0, 0, 0], "reward": [0.5, 1, 2], "descends": [[2], [], [2, 2]]}
    credit = reinforce(Steps.from_columns(**columns), causal=True, gamma=0.5)
    assert credit.values.tolist() == [0.5 + 2 / 4, 1, 2]
    assert credit.identified == "assumption:descent"


@pytest.mark.parametrize(
    ("descends", "sentence"),
    [
        ([[5], []], "row 0: row 5 is no row from there on in its rollout"),
        ([[], [0]], "row 1: row 0 is no row from there on"),
        ([["x"], []], "row 0: .* is no list of row numbers"),
        ([1, []], "row 0: 1 is no list of row numbers"),
    ],
)
def test_bad_descent_is_refused(descends, sentence):
    """A row that does not exist or came before, and what is no list of rows."""
    with pytest.raises(Refused, match=f"column descends, {sentence}"):
        Steps.from_columns(rollout=[0, 0], reward=[1, 1], descends=descends)


def test_with_the_groups_baseline_the_first_turns_are_compared():
    """Rollouts return 3 and 1 from their first turn; each is compared with the other's."""
    steps = Steps.from_columns(
        rollout=[0, 0, 1], reward=[3, 4, 1], descends=[[], [], []], outcome=[7, 7, 1]
    )
    got = reinforce(steps, causal=True, baseline="leave_one_out").values
    assert got.tolist() == [3 - 1, 4 - 1, 1 - 3]


def two_turns(paid, leads) -> float:
    """Expected slope of REINFORCE in a's logit; a picks 0 or 1 evenly, then b is paid."""
    slopes = []
    for pick in (0, 1):
        steps = Steps.from_columns(
            rollout=[0, 0],
            agent=["a", "b"],
            reward=[0, paid[pick]],
            descends=[[1] if leads[pick] else [], []],
        )
        slopes.append((pick - 0.5) * estimate("reinforce", steps, causal=True).values[0])
    return sum(slopes) / 2


def test_a_message_that_was_not_sent_has_no_edge():
    """What descends must not hang on the choice. b is paid 1 if a stays silent and 0 if a speaks:
    dE/dθ = ¼·(0 − 1), but silence has no edge and earns nothing, so the causal slope is 0. With
    edges on both sides it is right.
    """
    assert two_turns(paid=[1, 0], leads=[True, True]) == pytest.approx(-0.25)
    assert two_turns(paid=[1, 0], leads=[False, True]) == 0


def test_it_lowers_the_variance_and_not_the_mean():
    """Two agents who are paid apart, ±1 each: the causal slope of a is ½·½ in every run, the
    prefix's ¼ on average with a variance of (½)²·1, from the other's pay.
    """
    slopes = {True: [], False: []}
    for a in (-1, 1):
        for b in (-1, 1):
            steps = Steps.from_columns(rollout=[0, 0], reward=[a, b], descends=[[], []])
            for only, found in slopes.items():
                found.append(a / 2 * reinforce(steps, causal=only).values[0])
    assert np.mean(slopes[True]) == np.mean(slopes[False]) == 0.5
    assert (np.var(slopes[True]), np.var(slopes[False])) == (0, 0.25)
