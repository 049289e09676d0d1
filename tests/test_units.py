"""Units: the eight kinds of things that carry credit, and credit carried to them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from counterpoint.cli import app
from counterpoint.credit import estimate
from counterpoint.envs.research import Research
from counterpoint.formats import read
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.save import save, trace_lines
from counterpoint.schema import Act, Cause, Effect, Item, Message, ToolCall
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.units import PARTS
from counterpoint.vocabulary import UNITS

DATA = Path(__file__).parent / "data"
TAU = DATA / "tau_bench" / "gpt-4o-airline.json.gz"


@pytest.fixture
def team(tmp_path):
    """Two turns of a planner, one of a worker, with one part of every kind."""
    items = (
        Item(verb="message", name=("worker",), span=(0, 14), tokens=(1, 3), logprob=-0.5),
        Item(verb="call", name=("search",), span=(15, 25)),
        Item(verb="no_stop"),
    )
    with Recorder(tmp_path / "team.jsonl") as rec, rec.trace(roles={"planner": "lead"}) as t:
        t.message("user", "planner", "find the mill")
        t.act("planner", "message worker", items=items, token_ids=[7, 8, 9, 10], logprobs=[-1] * 4)
        t.message("planner", "worker", "look", channel="talk")
        t.tool_result(t.tool_call("planner", "search", {"q": "mill"}), "3")
        t.act("worker", "an answer", token_ids=[1, 2])
        t.message("worker", ["planner", "user"], "37")
        t.act("planner", "stop: 37", items=(Item(verb="stop", logprob=-0.25),))
        t.stop("planner", "37")
        t.reward(1.0)
    return list(read(tmp_path / "team.jsonl"))


def lines(units) -> list[tuple]:
    return [
        (
            int(units.row[i]),
            int(units.item[i]),
            (int(units.start[i]), int(units.end[i])),
            units.name("label", i),
            units.name("receiver", i),
        )
        for i in range(len(units))
    ]


# ---------------------------------------------------------------------------------------------
# Parts of turns


def test_decisions_are_items_with_their_own_logprob(team):
    """Of an act's items those that are decisions, or decline one; the call is none. A turn that
    was not parsed is told by its effects: the worker's message. Nobody's logprob is NaN.
    """
    found = Steps.from_traces(team).units("decision")
    assert lines(found) == [
        (0, 0, (0, 14), "message", ("worker",)),
        (0, 2, (-1, -1), "no_stop", None),
        (1, -1, (-1, -1), "message", ("planner", "user")),
        (2, 0, (-1, -1), "stop", None),
    ]
    np.testing.assert_array_equal(found.logprob, [-0.5, np.nan, np.nan, -0.25])
    acts = [event.seq for event in team[0].of("act")]
    said = team[0].of("message")[-1].seq
    assert found.seq.tolist() == [acts[0], acts[0], said, acts[2]]


def test_messages_and_calls_are_events_of_their_turn(team):
    """What the simulated user said is no part of anybody's turn."""
    steps = Steps.from_traces(team)
    assert lines(steps.units("message")) == [
        (0, -1, (-1, -1), "talk", ("worker",)),
        (1, -1, (-1, -1), None, ("planner", "user")),
    ]
    assert lines(steps.units("tool_call")) == [(0, -1, (-1, -1), "search", None)]
    assert steps.units("tool_call").seq.tolist() == [team[0].of("tool_call")[0].seq]


def test_a_part_belongs_to_the_act_that_authorises_it(tmp_path):
    """A call that is made late is of the turn that asked for it, not of the last before it."""
    link = (Cause(seq=0, kind="authorizes"),)
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        t.act("a", "call later")
        t.act("a", "something else")
        t.emit(ToolCall(trace_id="", seq=0, agent="a", tool="late", causes=link))
        t.reward(1.0)
    found = Steps.from_traces(read(tmp_path / "a.jsonl")).units("tool_call")
    assert found.row.tolist() == [0]


def test_tokens_are_places_in_their_turn(team):
    """Four tokens of which the message is the second and third, then two; a text without token
    ids has as many as it says it cost, here none.
    """
    found = Steps.from_traces(team).units("token")
    assert found.row.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.start.tolist() == [0, 1, 2, 3, 0, 1]
    assert (found.end - found.start).tolist() == [1] * 6
    assert found.item.tolist() == [-1, 0, 0, -1, -1, -1]


def test_tokens_that_the_policy_did_not_write_are_none(tmp_path):
    """A turn with a copied token in its middle has two runs of its own."""
    act = Act(trace_id="", seq=0, agent="a", token_ids=(1, 2, 3, 4), mask=(True, False, True, True))
    with Recorder(tmp_path / "a.jsonl") as rec, rec.trace() as t:
        t.emit(act)
        t.reward(1.0)
    found = Steps.from_traces(read(tmp_path / "a.jsonl")).units("token")
    assert found.start.tolist() == [0, 2, 3]


def test_parts_of_real_runs_are_counted_another_way():
    """tau-bench: every call, and every message of the agent, is a part of the turn before it."""
    traces = list(read(TAU, "openai_chat"))
    steps = Steps.from_traces(traces)
    counted = Counter()
    for trace in traces:
        acting = {event.agent for event in trace.of("act")}
        for event in trace.events:
            counted[event.kind] += isinstance(event, Effect) and event.agent in acting
    for kind, cls in (("message", Message), ("tool_call", ToolCall)):
        units = steps.units(kind)
        assert len(units) == counted[kind] > 100
        for unit in range(0, len(units), 97):
            number, act = steps.event[units.row[unit]]
            event = traces[number][int(units.seq[unit])]
            assert isinstance(event, cls)
            assert event.agent == traces[number][int(act)].agent
            between = traces[number].events[act + 1 : event.seq]
            assert not any(isinstance(e, Act) and e.agent == event.agent for e in between)
    assert len(steps.units("turn")) == 2454


def test_a_played_turn_has_its_menus_decisions():
    """research-v0: every decision, taken or declined, with the log-probability that the uniform
    policy gives it over the menu.
    """
    traces = rollout(Research(), Softmax(), groups=1, rollouts=4)
    steps = Steps.from_traces(traces)
    found = steps.units("decision")
    want = [
        (event.seq, index, item.verb, item.logprob)
        for trace in traces
        for event in trace.of("act")
        for index, item in enumerate(event.items)
        if item.verb not in ("call", "write", "return", "despawn", "none")
    ]
    got = zip(found.seq.tolist(), found.item.tolist(), strict=True)
    names = [found.name("label", i) for i in range(len(found))]
    assert list(got) == [(seq, index) for seq, index, _, _ in want]
    assert names == [verb for _, _, verb, _ in want]
    np.testing.assert_array_equal(
        found.logprob, [np.nan if logprob is None else logprob for *_, logprob in want]
    )
    assert np.isfinite(found.logprob).any()


# ---------------------------------------------------------------------------------------------
# Turns taken together


COLUMNS = Steps.from_columns(
    rollout=["r", "r", "s", "r"],
    agent=["a", "b", "a", "a"],
    role=["x", "x", "x", "y"],
    reward=[0, 0, 1, 0],
)


def test_an_agent_is_its_turns_in_a_rollout():
    """One unit per rollout and agent, role, or rollout; `of` says which unit a row belongs to."""
    agents = COLUMNS.units("agent")
    assert agents.of.tolist() == [0, 1, 2, 0]
    assert [agents.name("label", i) for i in range(3)] == ["a", "b", "a"]
    assert agents.row.tolist() == [0, 1, 2]
    assert COLUMNS.units("role").of.tolist() == [0, 0, 2, 1]
    assert COLUMNS.units("team").of.tolist() == [0, 0, 1, 0]
    assert COLUMNS.units("turn").row.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", PARTS)
def test_columns_do_not_tell_parts(kind):
    """Arrays of a trainer have turns; what a turn was made of only a trace says."""
    with pytest.raises(Refused, match=f"which {kind}s a turn has; make the steps by from_traces"):
        COLUMNS.units(kind)


def test_an_unknown_unit_is_refused():
    """With the list of those there are."""
    with pytest.raises(Refused, match="no unit 'word'; the units are token, turn, message"):
        COLUMNS.units("word")


def test_no_runs_have_no_units():
    """Every kind of nothing is empty."""
    steps = Steps.from_traces([])
    for kind in UNITS:
        units = steps.units(kind)
        assert len(units) == len(Credit([]).at(units)) == 0


# ---------------------------------------------------------------------------------------------
# Credit at units


def test_parts_get_the_number_of_their_turn(team):
    """A uniform broadcast, said so; parts of the number go along."""
    steps = Steps.from_traces(team)
    credit = Credit([0.5, np.nan, 2.0], parts={"G": np.array([1, 2, 3])}, diagnostics={"n": 3})
    for kind in ("token", "message", "tool_call", "decision"):
        units = steps.units(kind)
        got = credit.at(units)
        assert (got.unit, got.diagnostics["carried"], got.diagnostics["n"]) == (
            kind,
            "broadcast",
            3,
        )
        np.testing.assert_array_equal(got.values, credit.values[units.row])
        np.testing.assert_array_equal(got.parts["G"], units.row + 1)
    tokens = credit.at(steps.units("token")).values
    mask = np.zeros((3, 4), dtype=bool)
    mask[0], mask[1, :2] = True, True
    np.testing.assert_array_equal(np.nan_to_num(tokens), credit.tokens(mask)[mask])


@pytest.mark.parametrize(
    ("how", "want"),
    [("mean", [2.5, math.nan, 7]), ("sum", [5, math.nan, 7])],
)
def test_turns_together_get_mean_or_sum_of_what_was_credited(how, want):
    """Agent a of rollout r has turns of 1 and 4; b's was never credited."""
    got = Credit([1, np.nan, 7, 4]).at(COLUMNS.units("agent"), how)
    np.testing.assert_array_equal(got.values, want)
    np.testing.assert_array_equal(got.parts["n"], [2, 0, 1])
    assert got.diagnostics["carried"] == how
    team = Credit([1, np.nan, 7, 4]).at(COLUMNS.units("team"), "sum")
    np.testing.assert_array_equal(team.values, [5, 7])


def test_the_sums_of_agents_are_the_sum_of_turns():
    """Whatever way turns are taken together, nothing is lost on the way."""
    steps = Steps.from_traces(rollout(Research(), Softmax(), groups=3, rollouts=4))
    credit = estimate("reinforce", steps)
    for kind in ("turn", "agent", "role", "team"):
        total = (
            credit.values.sum() if kind == "turn" else credit.at(steps.units(kind), "sum").values
        )
        assert np.sum(total) == pytest.approx(credit.values.sum())


def test_units_of_other_steps_are_refused():
    """And a word that is neither mean nor sum."""
    with pytest.raises(Refused, match="units of 4 turns cannot carry a credit of 1"):
        Credit([1.0]).at(COLUMNS.units("agent"))
    with pytest.raises(Refused, match="how is 'median'; it is 'mean' or 'sum'"):
        Credit([1.0] * 4).at(COLUMNS.units("agent"), "median")


# ---------------------------------------------------------------------------------------------
# On the command line and in credit files


@pytest.fixture
def runs(team, tmp_path):
    path = tmp_path / "runs.jsonl"
    save(path, (line for trace in team for line in trace_lines(trace)))
    return path


def told(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


TARGETS = {
    "turn": ({"seq"}, 3),
    "message": ({"seq"}, 2),
    "tool_call": ({"seq"}, 1),
    "decision": ({"seq", "item"}, 4),
    "agent": ({"agent"}, 2),
    "role": ({"role"}, 2),
    "team": (set(), 1),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_credit_file_names_every_kind_of_unit(runs, tmp_path, kind):
    """By event, by event and item, by agent, by role, or the team; each line once, and it can be
    scored against itself.
    """
    out = tmp_path / "credit.jsonl"
    shown = told("credit", "reinforce", runs, "--unit", kind, "-o", out, "--json")
    fields, number = TARGETS[kind]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(shown["units"]) == len(written) == number
    assert {line["unit"] for line in written} == {shown["unit"]} == {kind}
    assert set().union(*(line["target"] for line in written)) == fields
    assert len({json.dumps(line["target"]) for line in written}) == number
    assert all(line["value"] == 1.0 for line in written)
    assert told("score", out, out, "--json")["n"] == number


def test_the_sum_of_an_agents_turns_on_the_command_line(runs):
    """REINFORCE gives each of the planner's two turns 1."""
    shown = told("credit", "reinforce", runs, "--unit", "agent", "--how", "sum", "--json")
    assert {unit["agent"]: unit["value"] for unit in shown["units"]} == {"planner": 2, "worker": 1}


def test_tokens_are_shown_and_not_filed(runs, tmp_path):
    """A token has a place in the listing; a credit file cannot name it and says what to do."""
    shown = told("credit", "reinforce", runs, "--unit", "token", "--json")
    assert [unit["token"] for unit in shown["units"]] == [0, 1, 2, 3, 0, 1]
    arguments = ["credit", "reinforce", str(runs), "--unit", "token", "-o", str(tmp_path / "c")]
    refusal = CliRunner().invoke(app, arguments).exception
    assert isinstance(refusal, Refused)
    assert "names no single token; write turns or decisions" in str(refusal)


def test_a_causal_return_on_the_command_line(runs):
    """`--set causal=true` asks the traces for descent, which a guessed mailbox refuses."""
    refusal = CliRunner().invoke(app, ["credit", "reinforce", str(runs), "--set", "causal=true"])
    assert "inferred by the rule 'mailbox'" in str(refusal.exception)
