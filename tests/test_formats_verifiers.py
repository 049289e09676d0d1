"""Claims about episodes of the library verifiers: turns, tokens, links and credit survive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.credit import reinforce
from counterpoint.creditfile import entries
from counterpoint.formats import Tally, export, read
from counterpoint.recorder import Recorder
from counterpoint.schema import Act, Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.validate import validate

EPISODE = Path(__file__).parent / "data" / "verifiers" / "episode.json"


def imported(path: Path) -> tuple[list[Trace], list[Finding], Tally]:
    findings: list[Finding] = []
    tally = Tally()
    return list(read(path, "verifiers", findings=findings, tally=tally)), findings, tally


def given(tmp_path: Path, document: Any) -> tuple[list[Trace], list[Finding], Tally]:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(document))
    return imported(path)


def again(traces: list[Trace], path: Path, **options: Any) -> tuple[list[Trace], Tally]:
    """The traces, written as episodes and read back; what was dropped on the way out."""
    tally = Tally()
    path.write_bytes(b"".join(export("verifiers", traces, tally=tally, **options)))
    back, findings, _ = imported(path)
    assert findings == []
    return back, tally


def said(trace: Trace) -> list[tuple[Any, ...]]:
    """Each act: who, what, with which tokens; and from which other act by which edge."""
    acts = {act.seq: n for n, act in enumerate(trace.of("act"))}
    return [
        (act.agent, act.text, act.trainable, act.token_ids, act.mask, act.logprobs,
         sorted((acts[c.seq], c.kind) for c in act.causes if c.seq in acts))
        for act in trace.of("act")
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# In


def test_an_episode_of_verifiers_own_writing_is_read_whole():
    """Written by the library (tests/peers/verifiers_episode.py): by hand, three turns of a solver
    of which one is a sub-agent's on a branch of its own, and a judge's, with the tokens of their
    paths, typed links and weighted rewards.
    """
    traces, findings, tally = imported(EPISODE)
    (trace,) = traces
    assert (findings, dict(tally.dropped), tally.records) == ([], {}, 9)
    solver = ((1, 2, 3, 4, 5, 6), (False,) * 4 + (True,) * 2, (0, 0, 0, 0, -0.5, -0.25))
    reader = ((7, 8, 9, 10), (False,) * 3 + (True,), (0, 0, 0, -1.0))
    last = ((1, 2, 3, 4, 5, 6, 11, 12, 13, 14), (False,) * 9 + (True,), (0,) * 9 + (-0.125,))
    assert said(trace) == [
        ("solver", "Ask the reader.", True, *solver, []),
        ("solver/1", "It was Ada.", True, *reader, [(0, "delegates")]),
        ("solver", "Ada.", True, *last, [(1, "derives"), (1, "returns")]),
        ("judge", "yes", False, None, None, None, []),
    ]
    paid = [(r.source, r.channel, r.amount, r.target.agent) for r in trace.of("reward")]
    assert paid == [
        ("correct", "team", 0.5, "solver"), ("format", "team", 0.25, "solver"),
        (None, "pages", 3.0, "solver"), (None, "speed", None, "solver"),
    ]  # fmt: skip
    (call,), (result,) = trace.of("tool_call"), trace.of("tool_result")
    assert (call.tool, call.arguments, result.call) == ("search", {"q": "it"}, call.seq)
    assert (trace.header.task_id, trace.header.group_id) == ("q1", "g1")
    assert validate(traces, []).findings == []


def test_what_is_imported_goes_out_and_comes_back():
    """Turns, tokens, edges and advantages are the same after export and import; the type of a link
    that we have no edge for, and a system prompt's role, too.
    """
    traces, _, _ = imported(EPISODE)
    lines = list(export("verifiers", traces))
    nodes = json.loads(lines[0])["traces"][0]["nodes"]
    turns = [node for node in nodes if node["sampled"]]
    assert [node.get("advantages") for node in turns] == [[1.0, 1.0], [-0.5], [2.0], None]
    assert nodes[0]["message"] == {"role": "system", "content": "You plan."}
    index = [nodes.index(node) for node in turns]
    assert turns[2]["semantic_parents"] == [
        {"node": index[1], "type": "subagent_return"}, {"node": index[1], "type": "vendor:review"}
    ]  # fmt: skip
    assert turns[2]["token_ids"] == [11, 12, 13, 14]


@pytest.mark.parametrize("times", [1, 2])
def test_round_trips_change_no_turn(tmp_path, times):
    """Once or twice out and in, and every act is as it was."""
    first, _, _ = imported(EPISODE)
    traces = first
    for _ in range(times):
        traces, tally = again(traces, tmp_path / "e.json")
        assert set(tally.dropped) <= {"reward.target"}
    assert said(traces[0]) == said(first[0])
    amounts = [(r.source, r.channel, r.amount) for r in traces[0].of("reward")]
    assert amounts == [(r.source, r.channel, r.amount) for r in first[0].of("reward")]


# ---------------------------------------------------------------------------------------------
# Out


@pytest.fixture
def team(tmp_path):
    """Three runs of a planner that calls a tool and a coder that answers it, with tokens."""
    with Recorder(tmp_path / "team.jsonl") as recorder:
        for number in range(3):
            with recorder.trace(task_id="q", roles={"p": "planner", "c": "coder"}) as run:
                plan = run.act("p", "look", token_ids=(1, 2, 3), mask=(False, True, True),
                               logprobs=(0, -0.5, -0.25))  # fmt: skip
                call = run.tool_call("p", "search", {"q": number}, causes=[plan])
                run.tool_result(call, "found")
                told = run.act("p", "do it", token_ids=(1, 2, 3, 9, 4), logprobs=(0,) * 4 + (-1.0,),
                               mask=(False,) * 4 + (True,))  # fmt: skip
                run.message("p", "c", "do it", causes=[told])
                run.act("c", "done", token_ids=(7, 8), mask=(False, True), trainable=number > 0)
                run.reward(float(number))
                run.reward(0.5, channel="style")
    return list(read(tmp_path / "team.jsonl"))


def test_a_team_goes_out_with_links_and_credit(team, tmp_path):
    """By hand: each agent's turns are a path whose tokens are what its model saw; the message is a
    link from the planner's turn to the coder's; each sampled token has its turn's advantage, and
    what was never credited has none.
    """
    steps = Steps.from_traces(team)
    credit = reinforce(steps)
    object.__setattr__(credit, "values", np.arange(9.0) / 4)
    credit.values[4] = np.nan
    lines = list(entries(credit, steps.units("turn"), steps.event, team, method="m", params={}))
    out = [json.loads(line) for line in export("verifiers", team, credit=lines)]
    nodes = out[1]["traces"][0]["nodes"]
    turns = [node for node in nodes if node["sampled"]]
    assert [node["token_ids"] for node in turns] == [[1, 2, 3], [9, 4], [7, 8]]
    assert [node["logprobs"] for node in turns] == [[-0.5, -0.25], [-1.0], []]
    assert [node.get("advantages") for node in turns] == [[0.75, 0.75], None, [1.25]]
    planner, coder = nodes.index(turns[1]), turns[2]
    assert coder["semantic_parents"] == [{"node": planner, "type": "agent_message"}]
    assert turns[0]["message"]["tool_calls"][0]["arguments"] == '{"q": 1}'
    assert out[1]["traces"][0]["rewards"] == {"env": {"score": 1.0, "weight": 1.0}}
    assert out[1]["traces"][0]["metrics"] == {"style": 0.5}
    back, _ = again(team, tmp_path / "e.json")
    for ours, theirs in zip(team, back, strict=True):
        own = [(a.agent, a.text, a.trainable, a.token_ids, a.mask) for a in ours.of("act")]
        assert own == [
            (a.agent, a.text, a.trainable, a.token_ids, a.mask) for a in theirs.of("act")
        ]
        assert [m.agent for m in theirs.of("message")] == ["p"]
        assert {a.id: a.role for a in theirs.header.agents} == {"p": "planner", "c": "coder"}
        assert theirs.outcome == ours.outcome


def test_a_prompt_that_does_not_go_on_begins_a_path(tmp_path):
    """Three prompts: the second has forgotten the first, the third goes on from the first."""
    with Recorder(tmp_path / "t.jsonl") as recorder, recorder.trace() as run:
        for ids in ((1, 2), (5, 6), (1, 2, 3)):
            run.act("a", "x", token_ids=ids, mask=(False,) * (len(ids) - 1) + (True,))
    traces = list(read(tmp_path / "t.jsonl"))
    nodes = json.loads(next(export("verifiers", traces)))["traces"][0]["nodes"]
    turns = [(node["parent"], node["token_ids"]) for node in nodes if node["sampled"]]
    first = next(n for n, node in enumerate(nodes) if node["sampled"])
    assert turns == [(None, [1, 2]), (None, [5, 6]), (first, [3])]
    assert said(again(traces, tmp_path / "e.json")[0][0])[2][3:5] == (
        (1, 2, 3),
        (False, False, True),
    )


def test_credit_that_has_no_node_is_counted_or_refused(team):
    """Credit of an agent has no node; other formats have no place for credit at all."""
    steps = Steps.from_traces(team)
    units = steps.units("agent")
    lines = list(entries(reinforce(steps).at(units), units, steps.event, team, method="m",
                         params={}))  # fmt: skip
    tally = Tally()
    list(export("verifiers", team, credit=lines, tally=tally))
    assert tally.dropped["credit per agent"] == len(lines)
    with pytest.raises(Refused, match="no place for credit"):
        export("mas_rl_v1", team, credit=lines)


# ---------------------------------------------------------------------------------------------
# Damage


def node(**more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": "x"}, "sampled": True} | more


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        ([node(token_ids=[1, 2], mask=[True])], "mask"),
        ([node(token_ids=[1.5], mask=[True])], "token_ids"),
        ([node(token_ids=[-1], mask=[True])], "token_ids"),
        ([node(token_ids=[1], mask=[True], logprobs=[0, 0])], "logprobs"),
        ([node(token_ids=[1], mask=[True], advantages=[0, 0])], "advantages"),
        ([node(parent=0)], "parent"),
        ([node(parent=9)], "parent"),
        ([node(parent=True)], "parent"),
        ([node(parent=-1)], "parent"),
        ([node(message={"role": "wizard"})], "role"),
        ([node(message=3)], "message"),
        ([node(semantic_parents=[{"node": "x", "type": "y"}])], "semantic_parents"),
        ([node(message={"role": "assistant", "tool_calls": [{"id": "c"}]})], "tool_calls"),
    ],
)
def test_a_node_that_cannot_be_kept_costs_only_itself(tmp_path, nodes, field):
    """It becomes one finding that names the field; the good node after it is an act."""
    traces, findings, _ = given(tmp_path, {"nodes": [*nodes, node()]})
    assert [finding.rule for finding in findings] == ["V02"]
    assert field in (findings[0].field or "")
    assert len(traces[0].of("act")) == 1
    assert validate(traces, []).findings == []


@pytest.mark.parametrize("run", [[], 3, {}, {"traces": [{}]}, {"traces": [3]}, {"nodes": 3}])
def test_what_is_no_episode_is_a_finding(tmp_path, run):
    """No trace is made of it, and nothing is raised."""
    traces, findings, _ = given(tmp_path, [run] if run == [] else run)
    assert traces == []
    assert findings


def test_a_link_to_a_later_turn_is_counted(tmp_path):
    """Links may form loops there; an edge of ours goes forward."""
    nodes = [node(semantic_parents=[{"node": 1, "type": "subagent_cancel"}]), node()]
    traces, findings, tally = given(tmp_path, {"nodes": nodes})
    assert (findings, dict(tally.dropped)) == ([], {"semantic_parents to no earlier turn": 1})
    assert len(traces[0].of("act")) == 2


@pytest.mark.parametrize(
    "meta",
    [3, "x", {"links": 3}, {"advantages": {"a": 1}}, {"system": [None]}, {"links": {"3": []}}],
)
def test_notes_of_any_kind_export(tmp_path, meta):
    """What stands in the header's notes is free text of the file, and never breaks an export."""
    import msgspec

    from counterpoint.spelling import freeze

    (trace,), _, _ = imported(EPISODE)
    header = msgspec.structs.replace(trace.header, meta_raw=freeze(meta))
    odd = Trace(header, trace.events, trace.seal)
    assert len(list(export("verifiers", [odd]))) == 1
    assert isinstance(odd.of("act")[0], Act)
