"""Claims about the survey's JSON Schema: its example, the way back, cycles, and our own runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from counterpoint.formats import Tally, export, read
from counterpoint.formats.mas_rl_v1_out import document
from counterpoint.recorder import Recorder
from counterpoint.schema import Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.validate import validate

FOLDER = Path(__file__).parent / "data" / "mas_rl_v1"
EXAMPLE: dict[str, Any] = json.loads((FOLDER / "example_trace.json").read_text())
SCHEMA: dict[str, Any] = json.loads((FOLDER / "trace_schema.json").read_text())


def one(folder: Path, run: Any) -> tuple[Trace, list[Finding], Tally]:
    path = folder / "x.json"
    path.write_text(json.dumps(run))
    findings: list[Finding] = []
    tally = Tally()
    (trace,) = read(path, "mas_rl_v1", findings=findings, tally=tally)
    return trace, findings, tally


def run_of(*edges: tuple[str, str], events: str = "abcd", **about: Any) -> dict[str, Any]:
    """A run of messages named by letters, with causal edges between them."""
    listed = [{"id": e, "t": i, "type": "message", "agent": e} for i, e in enumerate(events)]
    joined = [{"src": s, "dst": d, "type": "causal"} for s, d in edges]
    return {"trace_id": "t", "task_id": "k", "events": listed, "edges": joined, **about}


def test_the_example_event_by_event() -> None:
    """Types, edges, roles, trust and rewards of the official example, each under its own word."""
    findings: list[Finding] = []
    (trace,) = read(FOLDER / "example_trace.json", "mas_rl_v1", findings=findings)
    assert findings == []
    kinds = "act spawn spawn message tool_call tool_result agent_return aggregate"
    assert [e.kind for e in trace] == [*kinds.split(), "reward", "reward", "reward"]
    assert [(c.seq, e.seq, c.kind) for e in trace.events[:8] for c in e.causes] == [
        (0, 1, "spawns"),
        (0, 2, "spawns"),
        (1, 3, "derives"),
        (2, 3, "delivers"),
        (3, 4, "authorizes"),
        (4, 5, "answers"),
        (5, 6, "derives"),
        (6, 7, "aggregates"),
    ]
    unknown, trusted = "unknown", "trusted"
    expected = [unknown, unknown, unknown, trusted, trusted, "untrusted", trusted, unknown]
    assert [e.trust for e in trace.events[:8]] == expected
    assert [(a.id, a.role) for a in trace.header.agents] == [("orchestrator", "lead")]
    assert trace.header.topology == "centralized"
    scored = {e.channel: (e.amount, e.family) for e in trace.of("reward")}  # type: ignore[union-attr]
    assert scored == {"team": (1.0, "R1"), "orchestration": (0.3, "R8"), "tool": (0.1, "R5")}
    assert trace.outcome == 1.0
    assert all(e.t_start is None for e in trace)
    assert trace[0].text is None  # type: ignore[union-attr]
    assert trace[5].call == 4  # type: ignore[union-attr]
    assert trace[7].inputs == (6,)  # type: ignore[union-attr]
    rest = trace.header.meta["rest"]  # what an event has no field for, and only that
    assert rest[0] == {"t": 0, "role": "lead", "content_ref": "decide_spawn_planner_executor"}
    assert rest[5] == {"t": 5, "agent": "browser.search", "tool": "browser.search"}


def test_the_example_raises_trust_at_e7_and_only_there(tmp_path: Path) -> None:
    """One V10, at the event made from e7; none once e7 is marked untrusted."""
    trace, _, _ = one(tmp_path, EXAMPLE)
    (finding,) = validate([trace]).findings
    assert finding.rule == "V10"
    assert trace[finding.seq or 0].source_id == "e7"
    honest = json.loads(json.dumps(EXAMPLE))
    honest["events"][6]["trusted"] = False
    assert validate([one(tmp_path, honest)[0]]).findings == []


def test_the_example_comes_back_as_it_was(tmp_path: Path) -> None:
    """8 events, 8 edges with their types, rewards and costs, and whatever else it said."""
    trace, _, _ = one(tmp_path, EXAMPLE)
    (line,) = export("mas_rl_v1", [trace])
    again = json.loads(line)
    jsonschema.validate(again, SCHEMA)
    assert again == EXAMPLE


def test_it_comes_back_after_a_time_on_disk(tmp_path: Path) -> None:
    """What export needs is in the trace file, not in the importer's memory."""
    out = tmp_path / "ours.jsonl"
    out.write_bytes(b"".join(export("counterpoint", [one(tmp_path, EXAMPLE)[0]])))
    assert json.loads(next(export("mas_rl_v1", read(out)))) == EXAMPLE


def test_events_out_of_order_are_sorted_and_put_back(tmp_path: Path) -> None:
    """Edges decide, then position; export restores the order and the places are in meta."""
    run = run_of(("d", "b"), ("b", "a"), rewards={}, costs={"tokens": 1, "wall_clock_s": 2})
    trace, findings, _ = one(tmp_path, run)
    assert findings == []
    assert [e.source_id for e in trace] == ["c", "d", "b", "a"]
    assert trace.header.meta["source_index"] == [2, 3, 1, 0]
    assert validate([trace]).findings == []
    assert json.loads(next(export("mas_rl_v1", [trace])))["events"] == run["events"]


def test_a_cycle_is_cut_and_named(tmp_path: Path) -> None:
    """X (parent A), B (parent X), X again (parent B): finite, and the finding names X."""
    run = run_of(("A", "X"), ("X", "B"), ("B", "X"), events="AXBX")
    trace, (finding,), _ = one(tmp_path, run)
    assert (finding.rule, finding.file) == ("V04", str(tmp_path / "x.json"))
    assert "the edge from B back to X" in finding.message
    assert [e.source_id for e in trace] == ["A", "X", "B", "X"]
    assert [(c.seq, e.seq) for e in trace for c in e.causes] == [(0, 1), (1, 2)]


def test_only_edges_on_a_cycle_are_cut(tmp_path: Path) -> None:
    """An event downstream of a cycle keeps its cause, wherever it stands in the file."""
    trace, findings, _ = one(tmp_path, run_of(("c", "a"), ("b", "c"), ("c", "b"), ("d", "d")))
    assert len(findings) == 2
    links = {(trace[c.seq].source_id, e.source_id) for e in trace for c in e.causes}
    assert links in ({("c", "a"), ("b", "c")}, {("c", "a"), ("c", "b")})


@pytest.mark.slow
def test_a_large_tangle_takes_finite_time(tmp_path: Path) -> None:
    """20,000 events in one ring with chords both ways: cut in linear time, and a valid order."""
    n = 20_000
    events = [{"id": str(i), "t": i, "type": "message", "agent": "a"} for i in range(n)]
    ends = [(i, (i + 1) % n) for i in range(n)] + [((i + 7) % n, i) for i in range(n)]
    edges = [{"src": str(s), "dst": str(d), "type": "temporal"} for s, d in ends]
    start = time.perf_counter()
    trace, findings, _ = one(tmp_path, {"events": events, "edges": edges})
    assert time.perf_counter() - start < 10
    assert findings
    assert all(c.seq < e.seq for e in trace for c in e.causes)


def test_roots_are_kept_and_counted(tmp_path: Path) -> None:
    """Three spans, two without a parent: no cause is invented, one extra root is counted."""
    trace, findings, tally = one(tmp_path, run_of(("a", "b"), events="abc"))
    assert findings == []
    assert [len(e.causes) for e in trace] == [0, 1, 0]
    assert tally.extra_roots == 1


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ("x", "events[1]"),
        ({"t": 0, "type": "message", "agent": "a"}, "events[1].id"),
        ({"id": "n", "agent": "a"}, "events[1].type"),
        ({"id": "n", "type": "message"}, "events[1].agent"),
        ({"id": "n", "type": "message", "agent": ["a"]}, "events[1].agent"),
        ({"id": "n", "type": "message", "agent": "a", "trusted": "yes"}, "events[1].trusted"),
        ({"id": "n", "type": "message", "agent": "a", "x": 1e999}, "events[1]"),
    ],
)
def test_an_event_that_cannot_be_kept_costs_itself_and_its_edges(
    tmp_path: Path, event: Any, field: str
) -> None:
    """The finding names the field; edges that name the lost event are findings of their own."""
    run = run_of(("a", "b"), events="ab", rewards={"team": 1})
    run["events"].insert(1, event)
    run["edges"] += [{"src": "a", "dst": "n", "type": "causal"}, {"src": "a", "dst": "b"}]
    trace, findings, tally = one(tmp_path, run)
    assert [f.field for f in findings] == [field, "edges[1].dst", "edges[2].type"]
    assert {f.rule for f in findings} == {"V02"}
    assert [e.source_id for e in trace.of("message")] == ["a", "b"]
    assert tally.records == 3
    assert trace.outcome == 1.0


def test_odd_rewards_and_topologies_are_reported(tmp_path: Path) -> None:
    """A reward that is no number and a topology that is none are left out, with their field."""
    rewards = {"team": "1.0", "process": True, "tool": 0.5, "R7": -0.25}
    trace, findings, _ = one(tmp_path, run_of(rewards=rewards, topology="ring"))
    assert [f.field for f in findings] == ["rewards.team", "rewards.process", "topology"]
    assert [(e.channel, e.amount) for e in trace.of("reward")] == [("tool", 0.5), ("R7", -0.25)]  # type: ignore[union-attr]
    assert trace.outcome == -0.25  # a key that is a family: R7 is a cost of the outcome
    assert trace.header.topology == "unknown"
    trace, (finding,), _ = one(tmp_path, run_of(rewards={str(n): 1 for n in range(99)}))
    assert finding.field == "rewards"
    assert trace.of("reward") == []


def test_events_without_a_kind_here_are_kept_as_custom(tmp_path: Path) -> None:
    """A spawn that does not say of whom and a type outside the schema lose nothing."""
    run = run_of(("a", "b"), events="abc", rewards={}, costs={"tokens": 0, "wall_clock_s": 0})
    run["events"][0] |= {"type": "spawn", "role": "r", "why": "load"}
    run["events"][1]["type"] = "telepathy"
    trace, findings, _ = one(tmp_path, run)
    assert findings == []
    assert [e.name for e in trace.of("custom")] == ["mas_rl_v1.spawn", "mas_rl_v1.telepathy"]  # type: ignore[union-attr]
    tally = Tally()
    out = document(trace, tally)
    jsonschema.validate(out, SCHEMA)
    assert [e["id"] for e in out["events"]] == ["a", "c"]
    assert out["events"][0] == run["events"][0]
    assert tally.dropped == {"custom": 1}


def test_top_level_keys_that_the_schema_forbids_are_refused_on_the_way_out(tmp_path: Path) -> None:
    """They are kept when read, and export says which and where they are."""
    trace, findings, _ = one(tmp_path, EXAMPLE | {"vendor": 1})
    assert findings == []
    assert trace.header.meta["extra"] == {"vendor": 1}
    with pytest.raises(Refused, match=r"forbids: vendor; take them out"):
        list(export("mas_rl_v1", [trace]))


def recorded(folder: Path) -> Trace:
    with Recorder(folder / "own.jsonl") as recorder, recorder.trace(task_id="k") as t:
        t.act("lead", "ask bob")
        t.delegate("lead", "bob", "look it up")
        t.act("bob", "search")
        call = t.tool_call("bob", "search", {"q": 1})
        t.tool_result(call, "found")
        t.act("bob", "answer")
        t.message("bob", "lead", "it is 4")
        final = t.act("lead", "4")
        t.stop("lead", answer=final.text)
        t.reward(1.0)
        t.reward(0.5)
    (trace,) = read(folder / "own.jsonl")
    return trace


def test_a_run_of_our_own_is_exported_in_their_words(tmp_path: Path) -> None:
    """Acts, delegate and stop are decisions; what observations connected is still connected."""
    trace = recorded(tmp_path)
    tally = Tally()
    out = document(trace, tally)
    jsonschema.validate(out, SCHEMA)
    decisions = [e.get("decision") for e in out["events"] if e["type"] == "orchestrator_decision"]
    assert decisions == [None, "delegate", None, None, None, "stop"]
    assert tally.dropped == {"observe": len(trace.of("observe"))}
    assert out["rewards"] == {"team": 1.5}
    assert out["costs"]["tool_calls"] == out["costs"]["messages"] == 1
    kinds = {e["id"]: (e["type"], e.get("decision"), e["agent"]) for e in out["events"]}
    edges = {(kinds[e["src"]], kinds[e["dst"]], e["type"]) for e in out["edges"]}
    decision = "orchestrator_decision"
    bob, lead = (decision, None, "bob"), (decision, None, "lead")
    assert ((decision, "delegate", "lead"), bob, "message") in edges
    assert (("message", None, "bob"), lead, "message") in edges
    assert (("tool_result", None, "bob"), bob, "causal") in edges
    assert (("tool_call", None, "bob"), ("tool_result", None, "bob"), "return") in edges


def test_an_export_of_our_own_reads_back_with_the_same_shape(tmp_path: Path) -> None:
    """Import of our export exports to the same again, with its stop and its delegation."""
    first = document(recorded(tmp_path), Tally())
    trace, findings, _ = one(tmp_path, first)
    assert findings == []
    assert document(trace, Tally()) == first
    assert len(trace.of("stop")) == len(trace.of("delegate")) == 1


def test_a_trace_without_a_word_is_refused(tmp_path: Path) -> None:
    """The schema wants at least one event; a run of which nothing is left is a sentence."""
    with Recorder(tmp_path / "o.jsonl") as recorder, recorder.trace() as t:
        t.reward(1.0)
    with pytest.raises(Refused, match="has a word for"):
        list(export("mas_rl_v1", read(tmp_path / "o.jsonl")))


def test_several_traces_are_json_lines_that_read_back(tmp_path: Path) -> None:
    """One document a line; the reader knows them by that."""
    trace, _, _ = one(tmp_path, EXAMPLE)
    path = tmp_path / "several.json"
    path.write_bytes(b"".join(export("mas_rl_v1", [trace, trace])))
    assert [len(t) for t in read(path, "mas_rl_v1")] == [11, 11]
