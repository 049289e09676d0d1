"""Claims about validation: each rule fires on its smallest violation and on nothing beside it."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.schema import (
    KINDS,
    Act,
    AgentRef,
    AgentReturn,
    Aggregate,
    Cause,
    Delegate,
    Deliver,
    Despawn,
    EnvRef,
    Event,
    Finding,
    ForkRef,
    Header,
    Intervene,
    Item,
    Message,
    Observe,
    Reward,
    Safety,
    Seal,
    Source,
    Spawn,
    Stop,
    Target,
    ToolCall,
    ToolResult,
    Trace,
    Write,
    encode,
)
from counterpoint.spelling import freeze
from counterpoint.store import read_file
from counterpoint.validate import COUNTS, RULES, validate
from counterpoint.vocabulary import EDGES, TRUST

# ---------------------------------------------------------------------------------------------
# Traces by hand


def link(*causes: int | tuple[int, str] | Cause) -> tuple[Cause, ...]:
    """Causes; a bare seq is a `precedes` edge."""
    made = []
    for cause in causes:
        if isinstance(cause, int):
            cause = Cause(seq=cause, kind="precedes")
        elif isinstance(cause, tuple):
            cause = Cause(seq=cause[0], kind=cause[1])  # type: ignore[arg-type]
        made.append(cause)
    return tuple(made)


def trace(*events: tuple[type[Event], dict[str, Any]], **header: Any) -> Trace:
    """A trace of `events`; seq counts on from the fork unless given, the agent is `a`."""
    header = {"trace_id": "t", "counterpoint": 1, "writer": "elsewhere 1"} | header
    first = header["fork"].seq if header.get("fork") else 0
    made = []
    for seq, (cls, fields) in enumerate(events, first):
        fields = {"seq": seq, "agent": "a", "trace_id": header["trace_id"]} | fields
        made.append(cls(**fields))
    return Trace(Header(**header), tuple(made))  # type: ignore[arg-type]


def seal(run: Trace, **fields: Any) -> Trace:
    """The trace with a true seal, or one that says otherwise in `fields`."""
    kinds = dict(Counter(event.kind for event in run.events))
    true = {"events": len(run), "kinds": kinds, "digest": run.digest} | fields
    return replace(run, seal=Seal(trace_id=run.trace_id, **true))


def good(trace_id: str = "good", **header: Any) -> Trace:
    """A team of two with every kind of exchange, as our harness would record it."""
    lead, worker = {"agent": "lead"}, {"agent": "worker"}
    low: dict[str, Any] = {"trust": "untrusted"}
    run = trace(
        (Observe, lead | {"content_raw": freeze("Find x."), "trust": "trusted", "t_start": 0.0}),
        (Act, lead | {"causes": link((0, "derives")), "token_ids": (1, 2), "logprobs": (-0.5, 0.0),
                      "mask": (True, True), "items": (Item(verb="spawn", logprob=-0.1),
                      Item(verb="delegate")), "tokens_out": 2, "cost_usd": 0.1, "t_start": 1.0}),
        (Spawn, lead | {"child": "worker", "causes": link((1, "authorizes"))}),
        (Delegate, lead | {"to": ("worker",), "causes": link((1, "authorizes"))}),
        (Deliver, worker | {"message": 3, "causes": link((3, "delivers"), (2, "spawns"))}),
        (Observe, worker | {"sources": (Source(seq=3),), "causes": link((3, "consumes"), 4)}),
        (Act, worker | {"causes": link((5, "derives")), "cost_usd": 0.2, "t_start": 2.0}),
        (ToolCall, worker | {"tool": "search", "source_id": "x",
                             "causes": link((6, "authorizes"))}),
        (ToolResult, worker | low | {"call": 7, "causes": link((7, "answers"))}),
        (Write, worker | low | {"artefact": "n", "version": 1, "base_version": 0,
                                "causes": link((6, "authorizes"), (8, "derives"))}),
        (Observe, worker | low | {"sources": (Source(seq=8),),
                                  "causes": link((8, "consumes"), 5, 6)}),
        (Act, worker | low | {"causes": link((10, "derives"))}),
        (AgentReturn, worker | low | {"to": ("lead",),
                                      "causes": link((11, "authorizes"), (3, "returns"))}),
        (Deliver, lead | low | {"message": 12, "causes": link((12, "delivers"))}),
        (Despawn, lead | low | {"child": "worker", "causes": link(13, (1, "authorizes"))}),
        (Observe, lead | low | {"sources": (Source(seq=12),),
                                "causes": link((12, "consumes"), 0, 1)}),
        (Act, lead | low | {"causes": link((15, "derives")), "items": (Item(verb="stop"),)}),
        (Aggregate, lead | low | {"inputs": (12,),
                                  "causes": link((16, "authorizes"), (12, "aggregates"))}),
        (Stop, lead | low | {"reason": "answered", "causes": link((16, "authorizes"))}),
        (Reward, {"agent": "env", "amount": 1.0, "verifiable": "executed", "trust": "trusted",
                  "causes": link((18, "rewards")), "target": Target(seq=1, item=1)}),
        trace_id=trace_id, writer="counterpoint 0.1.0", delivery="explicit",
        agents=(AgentRef(id="lead", role="orchestrator"),), **header,
    )  # fmt: skip
    return seal(run, tokens_out=2, cost_usd=0.3)


def found(*traces: Trace) -> list[tuple[str, int | None]]:
    """Rule and seq of every finding."""
    return [(finding.rule, finding.seq) for finding in validate(traces).findings]


# ---------------------------------------------------------------------------------------------
# Each rule: the smallest violation, where it is, and a legal neighbour

HUMAN: dict[str, Any] = {"do": "edit", "trust": "human", "agent": "human"}
CHECKED: dict[str, Any] = {"verifiable": "executed", "trust": "trusted", "agent": "env"}
UNTRUSTED: tuple[type[Event], dict[str, Any]] = (Message, {"to": (), "trust": "untrusted"})
TEAM = {"agents": (AgentRef(id="a", role="r"),)}
PARENT = seal(trace((Observe, {}), (Act, {}), (Stop, {}), trace_id="parent"))


def message(**fields: Any) -> tuple[type[Event], dict[str, Any]]:
    return Message, {"to": (), **fields}


def fork(seq: int = 1, digest: str | None = None, of: str = "parent") -> ForkRef:
    return ForkRef(trace_id=of, seq=seq, do="edit", digest=digest or PARENT[:seq].digest)


def branch(*events: tuple[type[Event], dict[str, Any]], **header: Any) -> Trace:
    """A fork at 3 of a run that is not here, in which each event follows the one before it."""
    caused = [(cls, {"causes": link(seq)} | fields) for seq, (cls, fields) in enumerate(events, 2)]
    return trace(*caused, fork=fork(3, "0" * 32, of="absent"), **header)


def forked(ref: ForkRef) -> Trace:
    return trace((Act, {"causes": link((0, "derives"))}), trace_id="child", fork=ref)


def rewards(*amounts: float, acts: int | None = None) -> Trace:
    steps = [(kind, fields) for amount in amounts
             for kind, fields in ((Act, {}), (Reward, {"amount": amount}))]  # fmt: skip
    return trace(*steps, *[(Act, {})] * (0 if acts is None else acts - len(amounts)))


Case = tuple[str, list[Trace], list[int | None], list[Trace]]
CASES: list[Case] = [
    ("V03", [trace((Act, {}), (Act, {"seq": 2}))], [2], [trace((Act, {}), (Act, {}))]),
    ("V03", [trace((Act, {}), (Act, {"seq": 0}))], [0], [trace((Act, {"seq": 0}))]),
    ("V03", [trace((Act, {"seq": 1}), (Act, {"seq": 0}))], [1, 0], [trace((Act, {}))]),
    ("V03", [trace((Act, {"seq": 1}), (Act, {"seq": 2}))], [1], [PARENT, forked(fork())]),
    ("V04", [trace((Act, {}), (Act, {"causes": link(7)}))], [1],
     [trace((Act, {}), (Act, {"causes": link(0)}))]),
    ("V04", [trace((Act, {}), (Act, {"causes": link(1)}))], [1],
     [PARENT, forked(fork())]),
    ("V04", [branch((Act, {"causes": link(-1)}))], [3], [branch((Act, {}))]),
    ("V04", [branch((Act, {"causes": ()}), writer="counterpoint 0.1.0")], [3],
     [trace((Act, {}), writer="counterpoint 0.1.0")]),
    ("V04", [trace((Act, {}), (Act, {}), writer="counterpoint 0.1.0")], [1],
     [trace((Act, {}), (Act, {}), writer="counterpoint 0.1.0", env=EnvRef(id="imported:x"))]),
    ("V05", [trace((Spawn, {"child": "b"}), (Despawn, {"child": "b"}), (Act, {"agent": "b"}))], [2],
     [trace((Spawn, {"child": "b"}), (Act, {"agent": "b"}), (Despawn, {"child": "b"}))]),
    ("V05", [trace((Act, {"agent": "b"}), (Spawn, {"child": "b"}))], [0],
     [trace((Act, {"agent": "b"}), (Despawn, {"child": "b"}), (Spawn, {"child": "b"}),
            (Act, {"agent": "b"}), agents=(*TEAM["agents"], AgentRef(id="b", role="r")))]),
    ("V05", [branch((Spawn, {"child": "b"}), (Despawn, {"child": "b"}), (Act, {"agent": "b"}))],
     [5],
     [branch((Act, {"agent": "b"}), (Spawn, {"child": "b"}), **TEAM)]),
    ("V05", [trace((Act, {"agent": "b"}), delivery="explicit", **TEAM)], [0],
     [trace((Act, {"agent": "b"}), **TEAM), trace((Act, {"agent": "b"}), delivery="explicit"),
      trace((Stop, {"agent": "harness"}), delivery="explicit", **TEAM)]),
    ("V06", [trace((ToolCall, {"tool": "x"}), *[(ToolResult, {"call": 0})] * 2)],
     [2], [trace((ToolCall, {"tool": "x"}), (ToolCall, {"tool": "x"}), (ToolResult, {"call": 0}),
                 (ToolResult, {"call": 1}))]),
    ("V06", [trace((ToolCall, {"tool": "x"}), (ToolResult, {}))], [1], [trace((ToolResult, {}))]),
    ("V06", [trace((Act, {}), (ToolResult, {"call": 0}))], [1],
     [trace((ToolCall, {"tool": "x"}), (ToolResult, {"causes": link((0, "answers"))}))]),
    ("V06", [trace((ToolResult, {"call": 1}), (ToolCall, {"tool": "x"}))], [0],
     [branch((ToolResult, {"call": 1}))]),
    ("V06", [branch((ToolResult, {"call": 9}))], [3], []),
    ("V06", [trace((ToolCall, {"tool": "x"}), (ToolCall, {"tool": "x"}),
                   (ToolResult, {"call": 0, "causes": link((1, "answers"))}))], [2], []),
    ("V07", [trace((Deliver, {"message": 1}), message())], [0],
     [trace(message(), (Deliver, {"message": 0}))]),
    ("V07", [trace((Act, {}), (Deliver, {"message": 0}))], [1],
     [branch((Deliver, {"message": 0}), (Observe, {"sources": (Source(seq=1),)}),
             delivery="explicit")]),
    ("V07", [trace(message(agent="b"), (Observe, {"sources": (Source(seq=0),)}),
                   delivery="explicit")], [1],
     [trace(message(agent="b"), (Deliver, {"message": 0}), (Observe, {"sources": (Source(seq=0),)}),
            delivery="explicit"),
      trace(message(agent="b"), (Observe, {"sources": (Source(seq=0),)}))]),
    ("V07", [trace(message(agent="b"), (Observe, {"sources": (Source(seq=0),)}),
                   (Deliver, {"message": 0}))], [1], []),
    ("V07", [trace((Observe, {"sources": (Source(seq=1),)}), message(agent="b"))], [0],
     [trace(message(), (Observe, {"sources": (Source(seq=0),)}), delivery="explicit")]),
    ("V08", [trace((Delegate, {"to": ("b",)}),
                   (AgentReturn, {"agent": "c", "to": (), "causes": link((0, "returns"))}))], [1],
     [trace((Delegate, {"to": ("b",)}),
            (AgentReturn, {"agent": "b", "to": ("a",), "causes": link((0, "returns"))}))]),
    ("V08", [trace((Delegate, {"to": ("b",)}),
                   *[(AgentReturn, {"agent": "b", "to": (), "causes": link((0, "returns"))})] * 2)],
     [2], []),
    ("V09", [trace((Act, {"token_ids": (1, 2), "logprobs": (-1.0,)}))], [0],
     [trace((Act, {"token_ids": (1, 2), "logprobs": (-1.0, 0.0), "mask": (True, False)}))]),
    ("V09", [trace((Act, {"token_ids": (1,), "mask": ()}))], [0], [trace((Act, {"mask": ()}))]),
    ("V09", [trace((Act, {"logprobs": (-1.0, 0.1)}))], [0], [trace((Act, {"logprobs": ()}))]),
    ("V09", [trace((Act, {"items": (Item(verb="none", logprob=0.1),)}))], [0],
     [trace((Act, {"items": (Item(verb="none", logprob=0.0),)}))]),
    ("V10", [trace(UNTRUSTED, (Act, {"trust": "trusted", "causes": link(0)}))], [1],
     [trace(UNTRUSTED, (Act, {"trust": "unknown", "causes": link(0)}))]),
    ("V10", [trace(UNTRUSTED, message(causes=link(0)), message(trust="human", causes=link(1)))],
     [2],
     [trace(UNTRUSTED, message(), message(trust="human", causes=link(1)))]),
    ("V10", [trace(UNTRUSTED, message(trust="trusted", causes=link((0, "guards"))))], [1],
     [trace(UNTRUSTED, message(trust="trusted", causes=(
         Cause(seq=0, kind="precedes", basis="inferred:order"),)))]),
    ("V10", [trace(UNTRUSTED, (Safety, {"rule": "r", "effect": "flagged", "causes": link(0)}),
                   message(trust="trusted", causes=link(1)))], [2],
     [trace(UNTRUSTED, (Safety, {"rule": "r", "effect": "declassified", "causes": link(0),
                                 "trust": "trusted"}), message(trust="trusted", causes=link(1)))]),
    ("V10", [trace(UNTRUSTED, (Intervene, HUMAN | {"causes": link(0)}),
                   message(trust="human", causes=link(1)))], [2],
     [trace(UNTRUSTED, (Intervene, HUMAN | {"causes": link(0)}))]),
    ("V10", [trace(UNTRUSTED, (Intervene, HUMAN | {"causes": link(0), "trust": "trusted"}))],
     [1], []),
    ("V10", [trace(UNTRUSTED, (Reward, CHECKED | {"causes": link(0)}),
                   message(trust="trusted", causes=link(1)))], [2],
     [trace(UNTRUSTED, (Reward, CHECKED | {"causes": link(0)}))]),
    ("V10", [trace(UNTRUSTED, (Reward, CHECKED | {"verifiable": "judge", "causes": link(0)}))],
     [1], []),
    ("V10", [trace(UNTRUSTED, message(trust="trusted", causes=link(0)),
                   message(trust="trusted", causes=link(1)))], [1], []),
    ("V11", [seal(trace((Act, {})), events=2)], [None], [seal(trace((Act, {})))]),
    ("V11", [seal(trace((Act, {})), kinds={"act": 1, "stop": 1})], [None],
     [seal(trace((Act, {})), kinds={})]),
    ("V11", [seal(trace((Act, {"tokens_in": 3})), tokens_in=4)], [None],
     [seal(trace((Act, {})), tokens_in=4)]),
    ("V11", [seal(trace((Act, {"cost_usd": 0.1}), (Act, {"cost_usd": 0.2})), cost_usd=0.31)],
     [None],
     [seal(trace((Act, {"cost_usd": 0.1}), (Act, {"cost_usd": 0.2})), cost_usd=0.3)]),
    ("V11", [seal(trace((Act, {})), digest="0" * 32)], [None], []),
    ("V11", [trace((Act, {})), trace((Act, {}), trace_id="u")], [None],
     [trace((Act, {}), rollout_id="0"), trace((Act, {}), trace_id="u", rollout_id="1")]),
    ("V12", [trace(*[(Write, {"artefact": "x", "version": 2, "base_version": 1})] * 2)], [1],
     [trace((Write, {"artefact": "x", "version": 2, "base_version": 1}),
            (Write, {"artefact": "x", "version": 2, "base_version": 1, "conflict": True}),
            (Write, {"artefact": "y", "version": 2, "base_version": 1}))]),
    ("V13", [trace((Stop, {}), (Act, {}))], [1], [trace((Act, {}), (Stop, {}), (Reward, {}))]),
    ("V14", [trace((Reward, {"target": Target(seq=4)}))], [0],
     [trace((Act, {}), (Reward, {"target": Target(seq=0)}))]),
    ("V14", [trace((Act, {"items": (Item(verb="none"),)}),
                   (Reward, {"target": Target(seq=0, item=1)}))], [1],
     [trace((Act, {"items": (Item(verb="none"),)}), (Reward, {"target": Target(seq=0, item=0)}))]),
    ("V14", [trace((Stop, {}), (Reward, {"target": Target(seq=0, item=0)}))], [1], []),
    ("V14", [trace((Reward, {"target": Target(item=0)}))], [0],
     [branch((Reward, {"target": Target(seq=0, item=5)}), (Reward, {"target": Target(agent="z")}),
             (Reward, {"target": Target(role="z")}))]),
    ("V14", [trace((Reward, {"target": Target(agent="b")}))], [0],
     [trace((Reward, {"agent": "env", "target": Target(agent="a")}), **TEAM)]),
    ("V14", [trace((Reward, {"target": Target(role="b")}))], [0],
     [trace((Spawn, {"child": "c", "child_role": "b"}), (Reward, {"target": Target(role="b")}))]),
    ("V15", [PARENT, forked(fork(digest="0" * 32))], [None], [PARENT, forked(fork())]),
    ("V15", [PARENT, forked(fork(seq=9, digest="0" * 32))], [None], [forked(fork(of="absent"))]),
    ("W01", [trace((Act, {"t_start": 1.0, "t_end": 0.5}))], [0],
     [trace((Act, {"t_start": 1.0, "t_end": 1.0}))]),
    ("W01", [trace((Act, {"t_start": 1.0}), (Act, {"t_start": 0.5, "causes": link(0)}))], [1],
     [trace((Act, {"t_start": 1.0}), (Act, {"t_start": 0.5}))]),
    ("W01", [trace((Act, {"t_start": 5.0}), started=1.7e9)], [0], [trace((Act, {"t_start": 5.0}))]),
    ("W01", [trace((Act, {"t_start": 1.7e9}), (Act, {}), (Act, {"t_start": 1.7e9 + 86_401}),
                   started=1.7e9)], [2],
     [trace((Act, {"t_start": 1.7e9}), (Act, {"t_start": 1.7e9 + 86_399}), started=1.7e9),
      trace((Act, {"t_start": 0.0}), (Act, {"t_start": 1e6}))]),
    ("W03", [trace(*[(ToolCall, {"tool": "x", "source_id": "c"})] * 2)], [1],
     [trace((ToolCall, {"tool": "x", "source_id": "c"}), (Act, {"source_id": "c"}),
            (ToolCall, {"tool": "x"}), (ToolCall, {"tool": "x"}))]),
    ("W04", [rewards(1.0, 1.0, 1.0)], [1],
     [rewards(1.0, 1.0), rewards(1.0, 1.0, 0.5), rewards(0.0, 0.0, 0.0),
      rewards(1.0, 1.0, 1.0, acts=4),
      trace(*[(Act, {})] * 3, *[(Reward, {"amount": 1.0})] * 3)]),
    ("W04", [trace(*[(Act, {})] * 3,
                   *[(Reward, {"amount": 1.0, "target": Target(seq=seq)}) for seq in range(3)])],
     [3], [trace(*[(Act, {})] * 3,
                 *[(Reward, {"amount": 1.0, "target": Target(seq=0)})] * 3)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "bad", "where", "legal"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)]
)
def test_each_rule_fires_on_its_smallest_violation_and_not_beside_it(
    rule: str, bad: list[Trace], where: list[int | None], legal: list[Trace]
) -> None:
    """A rule names exactly the violating events of a violating trace, and none of a legal one."""
    assert [seq for name, seq in found(*bad) if name == rule] == sorted(where, key=lambda s: s or 0)
    report = validate(legal)
    assert not [finding for finding in report.findings if finding.rule == rule]


def test_every_rule_of_the_table_has_a_case() -> None:
    """A new rule that no case violates fails here; so does a case for a rule that is gone."""
    assert {case[0] for case in CASES} == {*RULES, "V15"}


def test_a_good_run_breaks_no_rule_and_lacks_nothing() -> None:
    """A run recorded with every required edge has no finding, and nothing is counted as absent."""
    report = validate([good()])
    assert report.findings == []
    assert report.counts == dict.fromkeys([*COUNTS, "repeated_rollouts", "forks_not_checked"], 0)
    assert (report.traces, report.events, report.broken) == (1, 20, False)


@pytest.mark.parametrize("cut", range(20))
def test_a_prefix_of_a_good_run_is_good(cut: int) -> None:
    """Cutting a run short breaks no rule: it is unfinished, and its target may not have come."""
    assert validate([good()[:cut]]).findings == []


def test_totals_too_large_for_a_float_do_not_stop_the_pass() -> None:
    """Two costs of 1e308 add to infinity, which no seal can say: V11, not an error."""
    run = trace((Act, {"cost_usd": 1e308}), (Act, {"cost_usd": 1e308}))
    assert found(seal(run, cost_usd=1.0)) == [("V11", None)]


def test_no_traces_give_a_report_of_zeros() -> None:
    """Nothing in, nothing found, every count present; a header alone is an unfinished trace."""
    report = validate([])
    assert (report.traces, report.events, report.findings) == (0, 0, [])
    assert set(report.counts.values()) == {0}
    assert validate([trace()]).counts["unfinished_traces"] == 1


# ---------------------------------------------------------------------------------------------
# What is counted


def counts(*traces: Trace) -> dict[str, int]:
    """The counts that are not zero."""
    return {name: number for name, number in validate(traces).counts.items() if number}


def test_what_may_be_absent_is_counted_and_is_no_finding() -> None:
    """One open call, one delegation of two without a return, one unscored reward, three further
    roots, and no seal: five counts, no finding.
    """
    run = trace(
        (ToolCall, {"tool": "x"}),
        (Delegate, {"to": ("b", "c"), "causes": link(0)}),
        (AgentReturn, {"agent": "b", "to": ("a",)}),
        (Reward, {"agent": "env"}),
        (Reward, {"agent": "env", "amount": 0.0}),
    )
    assert found(run) == []
    assert counts(run) == {
        "unanswered_calls": 1,
        "missing_returns": 1,
        "unscored_rewards": 1,
        "extra_roots": 3,
        "unfinished_traces": 1,
    }


def test_results_of_a_log_without_calls_are_counted() -> None:
    """A log that records results only breaks no rule; with one call beside them it does."""
    assert counts(trace((ToolResult, {}), (ToolResult, {"causes": link(0)}))) == {
        "results_without_calls": 2, "unfinished_traces": 1
    }  # fmt: skip


def test_the_same_delegation_three_times_misses_what_was_not_returned() -> None:
    """Three delegations to one agent, closed oldest first by a return without an edge, by one
    with an edge to the last, and then all by a despawn.
    """
    work = (Delegate, {"to": ("b",)})
    plain = (AgentReturn, {"agent": "b", "to": ("a",)})
    to_last = (AgentReturn, {"agent": "b", "to": ("a",), "causes": link((2, "returns"))})
    events = [work, work, work, to_last, plain, (Despawn, {"child": "b"})]
    seen = [counts(trace(*events[:n])).get("missing_returns", 0) for n in range(3, 7)]
    assert seen == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("seq", "edge"),
    [(1, "derives"), (2, "authorizes"), (3, "authorizes"), (4, "delivers"), (5, "consumes"),
     (6, "derives"), (8, "answers"), (12, "authorizes"), (17, "aggregates")],
)  # fmt: skip
def test_each_required_edge_that_is_taken_away_is_counted(seq: int, edge: str) -> None:
    """Dropping one required edge of a good run raises the count by one."""
    run = good()
    event = run[seq]
    kept = tuple(cause for cause in event.causes if cause.kind != edge)
    less = msgspec.structs.replace(event, causes=kept)
    cut = Trace(run.header, (*run.events[:seq], less, *run.events[seq + 1 :]))
    assert counts(cut)["required_edges_missing"] == 1


def test_an_observation_follows_the_last_one_and_the_last_act() -> None:
    """Both `precedes` edges are required, unless the context is reset."""
    life = [(Observe, {}), (Act, {"causes": link((0, "derives"))})]
    for causes, context, missing in (
        (link(0, 1), "append", None), (link(1), "append", None), (link(), "append", 1),
        (link(), "reset", None),
    ):  # fmt: skip
        last = (Observe, {"causes": causes, "context": context})
        assert counts(trace(*life, last)).get("required_edges_missing") == missing


def test_causes_in_the_parent_of_a_fork_are_counted_and_not_missing() -> None:
    """A fork at 1 whose act derives from 0: one cause in the parent, no finding; alone, the fork
    was not checked against its parent.
    """
    assert counts(forked(fork())) == {
        "causes_in_parent": 1, "unfinished_traces": 1, "forks_not_checked": 1
    }  # fmt: skip
    assert "forks_not_checked" not in counts(forked(fork()), PARENT)


def test_events_that_the_writer_dropped_are_counted() -> None:
    """The seal's `dropped` is carried into the counts."""
    assert counts(seal(trace((Act, {})), dropped=3)) == {"dropped_events": 3}


def test_two_traces_of_one_rollout_are_counted() -> None:
    """Three traces of rollout 0 and one of rollout 1: two are repeats; nothing is a finding."""
    same = [trace((Act, {"agent": name}), trace_id=name, group_id="g", rollout_id=rollout)
            for name, rollout in (("a", "0"), ("b", "0"), ("c", "1"), ("d", "0"))]  # fmt: skip
    assert counts(*same)["repeated_rollouts"] == 2
    assert found(*same) == []


# ---------------------------------------------------------------------------------------------
# Files


def write_file(path: Path, *traces: Trace) -> Path:
    """Traces as lines, one after the other."""
    records = [(run.header, *run.events, *([run.seal] if run.seal else [])) for run in traces]
    path.write_bytes(b"".join(encode(record) + b"\n" for run in records for record in run))
    return path


def check(path: Path) -> list[Finding]:
    """Everything that reader and rules find in a file."""
    findings: list[Finding] = []
    return validate(read_file(path, findings), findings).findings


def test_a_finding_names_file_line_trace_event_and_field(tmp_path: Path) -> None:
    """The call without its answer's call stands on line 3 of the file, behind header and event."""
    path = write_file(tmp_path / "t.jsonl", trace((Act, {}), (Act, {"causes": link(7)})))
    (only,) = check(path)
    assert msgspec.to_builtins(only) == {
        "rule": "V04",
        "message": "its cause 7 is not in this trace",
        "file": str(path),
        "line": 3,
        "trace_id": "t",
        "seq": 1,
        "field": "causes",
    }


def test_what_the_reader_finds_is_merged_by_place(tmp_path: Path) -> None:
    """A torn line 2 and a dangling cause on line 4 come out in the order of the file, and the
    missing event is seen by the rules too.
    """
    run = trace((Act, {}), (Act, {"causes": link(0)}), (Act, {"causes": link(7)}))
    path = write_file(tmp_path / "t.jsonl", run)
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:20]
    path.write_bytes(b"\n".join(lines))
    assert [(f.rule, f.line) for f in check(path)] == [
        ("V01", 2), ("V03", 3), ("V04", 3), ("V04", 4)
    ]  # fmt: skip


def test_a_run_that_is_stored_twice_names_both_files(tmp_path: Path) -> None:
    """A copied file is one finding, which names the original and the copy, in either order."""
    one = write_file(tmp_path / "a.jsonl", good())
    two = write_file(tmp_path / "b.jsonl", good())
    for order in ([one, two], [two, one]):
        (only,) = validate(run for path in order for run in read_file(path)).findings
        assert (only.rule, only.file) == ("V11", str(two))
        assert str(one) in only.message


def test_forks_are_checked_against_parents_in_other_files(tmp_path: Path) -> None:
    """A fork in one file finds its parent in another, before it or after it, and a parent that
    changed is found by the digest.
    """
    parent = write_file(tmp_path / "parent.jsonl", good("p"))
    true = fork(seq=9, of="p", digest=good("p")[:9].digest)
    wrong = fork(seq=9, of="p", digest=good("p")[:8].digest)
    children = write_file(
        tmp_path / "forks.jsonl",
        trace((Act, {}), trace_id="c1", fork=true),
        trace((Act, {}), trace_id="c2", fork=wrong),
    )
    for order in ([parent, children], [children, parent]):
        report = validate(run for path in order for run in read_file(path))
        assert [(f.rule, f.trace_id, f.field) for f in report.findings] == [
            ("V15", "c2", "fork.digest")
        ]
        assert report.counts["forks_not_checked"] == 0


def test_integers_over_64_bits_are_found_while_reading(tmp_path: Path) -> None:
    """A seq or a payload with an integer over 64 bits, spelled canonically, is a finding with its
    line; it never reaches the columns, where it would overflow.
    """
    for seq, content in (("0", str(1 << 64)), (str(10**30), "1"), (str(1 << 63), "1")):
        path = tmp_path / f"{len(seq)}.jsonl"
        line = f'{{"type":"message","trace_id":"t","seq":{seq},"agent":"a","to":[],"content":'
        text = encode(Header(trace_id="t", counterpoint=1)).decode()
        path.write_text(f"{text}\n{line}{content}}}\n")
        assert [(f.rule, f.line) for f in check(path)] in ([("V01", 2)], [("V02", 2)])
    path.write_text(f"{text}\n{line.replace(seq, '0')}{(1 << 64) - 1}}}\n")
    assert check(path) == []


def test_traces_that_have_passed_are_let_go() -> None:
    """Of 100 traces of 1,000 events that name a file, never more than a chunk is alive, plus the
    one that is being made.
    """
    alive: list[weakref.ref[Trace]] = []
    most = 0

    def run() -> Iterator[Trace]:
        nonlocal most
        for number in range(100):
            made = replace(trace(*[(Act, {})] * 1000, trace_id=str(number)), file="x.jsonl")
            alive.append(weakref.ref(made))
            most = max(most, sum(ref() is not None for ref in alive))
            yield made
            del made

    assert validate(run()).events == 100_000
    assert most <= 6


# ---------------------------------------------------------------------------------------------
# Order, chunks, damage


def jumble() -> list[Trace]:
    """Every violating and every legal trace of the table, with ids and files of their own."""
    runs = [run for _, bad, _, legal in CASES for run in (*bad, *legal)]
    return [
        replace(run, file=f"{number % 7}.jsonl", lines=range(2, 2 + len(run)))
        for number, run in enumerate(runs)
    ]


def test_the_order_of_traces_does_not_show() -> None:
    """Shuffled traces give the same findings and counts."""
    runs = jumble()
    first = validate(runs)
    for seed in range(5):
        random.Random(seed).shuffle(runs)
        assert validate(runs) == first


@pytest.mark.parametrize("size", [1, 2, 10, 50])
def test_the_size_of_chunks_does_not_show(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one trace or of all give the same findings and counts: no rule carries state."""
    runs = [*jumble(), good()]
    whole = validate(runs)
    monkeypatch.setattr("counterpoint.validate.CHUNK", size)
    assert validate(runs) == whole


def covered(line: bytes) -> bytes:
    """What the digest covers of a line: its type, and all from seq (in a header, version) on."""
    for mark in (b'"counterpoint":', b'"seq":'):
        if mark in line:
            return line[:12] + line[line.index(mark) :]
    return line


def damaged(lines: list[bytes], draw: random.Random) -> list[bytes] | None:
    """One random bit flipped, line lost, or two lines swapped; None if nothing promised changed."""
    out, at = list(lines), draw.randrange(len(lines))
    kind = draw.choice(["flip", "flip", "lose", "swap"])
    if kind == "lose":
        del out[at]
    elif kind == "swap":
        to = draw.randrange(len(lines))
        out[at], out[to] = out[to], out[at]
    else:
        byte = draw.randrange(len(out[at]))
        flipped = bytearray(out[at])
        flipped[byte] ^= 1 << draw.randrange(8)
        out[at] = bytes(flipped)
    return out if list(map(covered, out)) != list(map(covered, lines)) else None


@pytest.mark.slow
def test_every_damage_to_a_sealed_file_is_seen(tmp_path: Path) -> None:
    """300 random bit flips, lost lines and swapped lines in a sealed file: reader or rules see
    each one. For the volatile fields before `seq` nothing is promised. A lost seal leaves the
    trace unfinished, which is counted.
    """
    path = write_file(tmp_path / "t.jsonl", good())
    lines = path.read_bytes().split(b"\n")[:-1]
    draw, tried = random.Random(0), 0
    while tried < 300:
        out = damaged(lines, draw)
        if out is None:
            continue
        tried += 1
        path.write_bytes(b"".join(line + b"\n" for line in out))
        findings: list[Finding] = []
        report = validate(read_file(path, findings), findings)
        assert report.findings or report.counts["unfinished_traces"], out


# ---------------------------------------------------------------------------------------------
# Anything at all

SEQS = st.one_of(st.integers(-2, 9), st.integers(-(1 << 63), (1 << 63) - 1))
NAMES = st.sampled_from(["a", "b", "env", ""])
FLOATS = st.floats(allow_nan=False)
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "agent": NAMES,
    "trust": st.sampled_from(TRUST),
    "seq": SEQS,
    "causes": st.lists(
        st.builds(Cause, seq=SEQS, kind=st.sampled_from([*EDGES]),
                  basis=st.sampled_from(["recorded", "inferred:order"])), max_size=3,
    ).map(tuple),
    "sources": st.lists(st.builds(Source, seq=SEQS), max_size=2).map(tuple),
    "inputs": st.lists(SEQS, max_size=2).map(tuple),
    "to": st.lists(NAMES, max_size=2).map(tuple),
    "items": st.lists(st.builds(Item, verb=st.just("none"), logprob=FLOATS), max_size=2).map(tuple),
    "child": NAMES,
    "message": SEQS,
    "call": st.none() | SEQS,
    "source_id": st.none() | NAMES,
    "base_version": st.none() | st.integers(0, 2),
    "context": st.sampled_from(["append", "reset"]),
    "t_start": st.none() | FLOATS,
    "t_end": st.none() | FLOATS,
    "amount": st.none() | FLOATS,
    "cost_usd": st.none() | FLOATS,
    "logprobs": st.none() | st.lists(FLOATS, max_size=2).map(tuple),
    "token_ids": st.none() | st.lists(st.integers(0, 9), max_size=2).map(tuple),
    "target": st.none(),
    "effect": st.sampled_from(["flagged", "declassified"]),
    "do": NAMES, "tool": NAMES, "rule": NAMES, "name": NAMES, "artefact": NAMES,
    "version": st.integers(0, 2),
}  # fmt: skip
TARGETS = st.none() | st.builds(
    Target, seq=st.none() | SEQS, item=st.none() | SEQS, agent=st.none() | NAMES,
    role=st.none() | NAMES,
)  # fmt: skip


def any_event(cls: type[Event]) -> st.SearchStrategy[Event]:
    """Any legal struct of a kind, whatever it says about other events."""
    shapes = {name: shape for name, shape in SHAPES.items() if name in cls.__struct_fields__}
    if cls is Reward:
        shapes["target"] = TARGETS
    return st.builds(cls, trace_id=st.just("t"), **shapes)


HEADERS = st.builds(
    Header, trace_id=st.sampled_from(["t", "u"]), counterpoint=st.just(1),
    writer=st.sampled_from([None, "counterpoint 0.1.0"]), started=st.none() | FLOATS,
    agents=st.lists(st.builds(AgentRef, id=NAMES, role=NAMES), max_size=2).map(tuple),
    delivery=st.sampled_from(["explicit", "implicit"]),
    fork=st.none() | st.builds(ForkRef, trace_id=st.sampled_from(["t", "u"]), seq=SEQS,
                               digest=st.just("0" * 32), do=NAMES),
)  # fmt: skip
SEALS = st.none() | st.builds(
    Seal, trace_id=st.just("t"), events=SEQS, kinds=st.dictionaries(NAMES, SEQS, max_size=2),
    tokens_in=st.none() | SEQS, cost_usd=st.none() | FLOATS, digest=NAMES,
)  # fmt: skip
EVENTS = st.one_of([any_event(cls) for cls in KINDS.values()])
TRACES = st.builds(Trace, HEADERS, st.lists(EVENTS, max_size=9).map(tuple), SEALS)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(TRACES, max_size=4))
def test_no_trace_stops_the_pass(runs: list[Trace]) -> None:
    """Gaps, duplicates, dangling and forward references, infinite clocks, foreign forks: the pass
    goes through, and every finding points at an event that is there.
    """
    report = validate(runs)
    seqs = {event.seq for run in runs for event in run.events}
    assert report.events == sum(len(run) for run in runs)
    assert {finding.seq for finding in report.findings} <= {None, *seqs}
    assert all(number >= 0 for number in report.counts.values())


def tainted_slowly(run: Trace) -> list[int]:
    """V10 as the format words it: walk back from each label, through what may not hide taint."""

    def excused(event: Event) -> bool:
        return (isinstance(event, Intervene) and event.trust == "human") or (
            isinstance(event, Reward) and event.verifiable == "executed"
        )

    def reached(event: Event) -> bool:
        for cause in event.causes:
            before = run[cause.seq]
            if cause.basis == "inferred:order" or (
                isinstance(before, Safety) and before.effect == "declassified"
            ):
                continue
            if before.trust == "untrusted":
                return True
            if (before.trust == "unknown" or excused(before)) and reached(before):
                return True
        return False

    claims = [event for event in run.events if event.trust in ("trusted", "human")]
    clears = [e for e in claims if isinstance(e, Safety) and e.effect == "declassified"]
    return [e.seq for e in claims if not excused(e) and e not in clears and reached(e)]


@given(st.integers(0, 1 << 32))
def test_taint_is_what_a_walk_backwards_finds(seed: int) -> None:
    """On random graphs of ten events the sweep names the same events as walking back from each."""
    draw = random.Random(seed)
    events: list[tuple[type[Event], dict[str, Any]]] = []
    for seq in range(10):
        cls, fields = draw.choice([
            (Act, {}), (Act, {}), (Intervene, {"do": "edit"}),
            (Reward, {"verifiable": "executed"}), (Safety, {"rule": "r", "effect": "declassified"}),
        ])  # fmt: skip
        causes = [
            Cause(seq=draw.randrange(seq), kind="derives",
                  basis=draw.choice(["recorded", "recorded", "inferred:order"]))
            for _ in range(draw.randrange(3) if seq else 0)
        ]  # fmt: skip
        events.append((cls, fields | {"trust": draw.choice(TRUST), "causes": tuple(causes)}))
    run = trace(*events)
    assert [seq for rule, seq in found(run) if rule == "V10"] == tainted_slowly(run)
