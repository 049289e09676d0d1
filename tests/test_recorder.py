"""Claims about recording: a loop of one's own becomes a trace that validates, and nothing else."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from counterpoint.append import SIDE_FILE_OVER
from counterpoint.recorder import Recorder, TraceRecorder
from counterpoint.schema import (
    KINDS,
    Act,
    Anneal,
    Cause,
    Custom,
    Event,
    Finding,
    ForkRef,
    Header,
    Item,
    Message,
    Observe,
    PolicyRef,
    Read,
    Reward,
    Source,
    Target,
    Trace,
    encode,
)
from counterpoint.spelling import MAX_LINE, Raw, Refused, freeze
from counterpoint.store import read_file, records, side_content
from counterpoint.validate import Report, validate

EXAMPLE = Path(__file__).parents[1] / "examples" / "log_my_loop.py"


def checked(path: Path) -> tuple[list[Trace], Report]:
    """The traces of a file, which reading and validation must find nothing wrong with."""
    findings: list[Finding] = []
    traces = list(read_file(path, findings))
    report = validate(traces, findings)
    assert report.findings == []
    for trace in traces:
        assert [e.seq for e in trace] == list(range(trace.first, trace.first + len(trace)))
        if trace.seal:
            assert trace.seal.digest == trace.digest
            assert trace.seal.events == len(trace)
    return traces, report


def edges(event: Event) -> list[tuple[int, str, str]]:
    return [(c.seq, c.kind, c.basis) for c in event.causes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.jsonl"


# ---------------------------------------------------------------------------------------------
# What is filled in


def test_the_example_program_twice_is_eight_rollouts_of_one_group(path):
    """Program (a): eight sealed traces, one group, rollouts 0 to 7, two groups of wrong answers."""
    for _ in range(2):
        runpy.run_path(str(EXAMPLE))["main"](path)
    traces, report = checked(path)
    assert report.counts["required_edges_missing"] == 0
    assert report.counts["extra_roots"] == 0
    assert [t.header.rollout_id for t in traces] == [str(i) for i in range(8)]
    assert {(t.header.task_id, t.header.group_id) for t in traces} == {("capital-of-peru",) * 2}
    assert len({t.trace_id for t in traces}) == 8
    assert [t.outcome for t in traces] == [0.0, 1.0, 1.0, 1.0] * 2
    assert all(t.seal for t in traces)


def test_every_edge_of_the_example_is_the_one_that_schema_asks_for(path):
    """By hand: the ten events of one run and each edge into them."""
    runpy.run_path(str(EXAMPLE))["main"](path)
    trace = next(read_file(path))
    mail = "inferred:mailbox"
    assert [(e.kind, e.agent, edges(e)) for e in trace] == [
        ("act", "planner", []),
        ("message", "planner", [(0, "authorizes", "recorded")]),
        ("observe", "worker", [(1, "consumes", mail)]),
        ("act", "worker", [(2, "derives", "recorded")]),
        ("tool_call", "worker", [(3, "authorizes", "recorded")]),
        ("tool_result", "worker", [(4, "answers", "recorded")]),
        (
            "observe",
            "worker",
            [(2, "precedes", "recorded"), (3, "precedes", "recorded"), (5, "consumes", mail)],
        ),
        ("act", "worker", [(6, "derives", "recorded")]),
        ("stop", "worker", [(7, "authorizes", "recorded")]),
        ("reward", "env", [(8, "rewards", "inferred:run")]),
    ]
    assert [e.trust for e in trace].count("untrusted") == 1
    assert trace[5].trust == "untrusted"
    assert trace[6].sources == (Source(seq=5),)
    assert [e.trainable for e in trace] == [e.kind == "act" for e in trace]


def test_the_header_says_what_was_given_and_fills_in_the_rest(path):
    """A random id, the group from task and policies, roles, the writer, the format."""
    team = {"lead": PolicyRef(version="1")}
    with Recorder(path) as rec:
        with rec.trace("t", roles={"lead": "boss"}, policies=team, meta={"note": 1}) as a:
            a.act("lead")
        with rec.trace("t", policies={"lead": PolicyRef(version="2")}) as b:
            b.act("lead")
        with rec.trace("t", group_id="mine", rollout_id="x") as c:
            c.act("lead")
        with rec.trace() as d:
            d.act("lead")
    headers = [t.header for t in checked(path)[0]]
    assert re.fullmatch(r"t@[0-9a-f]{8}", headers[0].group_id)
    assert headers[1].group_id != headers[0].group_id
    assert [(h.group_id, h.rollout_id) for h in headers[2:]] == [("mine", "x"), (None, "0")]
    assert headers[0].agents[0].role == "boss"
    assert headers[0].meta == {"note": 1}
    assert (headers[0].writer, headers[0].counterpoint) == ("counterpoint", 1)
    assert abs(headers[0].started - time.time()) < 60
    assert all(re.fullmatch("[0-9a-f]{32}", h.trace_id) for h in headers)


def test_rollout_ids_are_free_ones_of_the_group_over_all_that_the_file_holds(path):
    """A name that was given is not given again; unsealed traces count; groups count apart."""
    for given in ("1", None, None, "0", None):
        with Recorder(path) as rec:
            rec.trace("t", rollout_id=given)
            rec.trace("u")
    ids = [r.value.rollout_id for r in records(path) if r.value.task_id == "t"]
    assert ids == ["1", "2", "3", "0", "4"]
    assert [r.value.rollout_id for r in records(path) if r.value.task_id == "u"] == list("01234")


def test_what_an_agent_saw_is_its_mailbox_unless_said(path):
    """Messages and results since its last act; an explicit list is recorded as such; an anchor."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
        first = t.message("a", ["b", "c"], "one")
        second = t.message("a", "b", "two")
        t.act("b")
        seen_by_b = t._next - 2
        t.act("b")  # an empty mailbox and no anchor: no observation
        t.act("c", sees=[second])
        t.act("c")  # the mailbox was emptied by acting
        t.act("a", anchor="s0")
        t.act("a", sees=[])
    (trace,), _ = checked(path)
    observed = [(e.agent, [s.seq for s in e.sources], e.anchor) for e in trace.of("observe")]
    assert observed == [
        ("b", [first.seq, second.seq], None),
        ("c", [second.seq], None),
        ("a", [], "s0"),
    ]
    assert {c.basis for c in trace[seen_by_b].causes} == {"inferred:mailbox"}
    assert {c.basis for c in trace.of("observe")[1].causes} == {"recorded"}
    assert len(trace.of("act")) == 7


def test_nothing_known_means_the_previous_event_marked_inferred(path):
    """Every event but the first has a cause."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.custom("a", "x.y")
        t.custom("b", "x.y")
        t.act("c", anchor="s")
        t.message("d", "e")
    (trace,), _ = checked(path)
    order = "inferred:order"
    assert [edges(e) for e in trace] == [
        [],
        [(0, "precedes", order)],
        [(1, "precedes", order)],
        [(2, "derives", "recorded")],
        [(3, "precedes", order)],
    ]


def test_the_environment_is_shared_between_calls(path):
    """A result descends from the last result that was not pure, whoever's it was."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
        t.act("b")
        one = t.tool_result(t.tool_call("a", "write"), "ok")
        two = t.tool_result(t.tool_call("b", "read"), "x", pure=True)
        three = t.tool_result(t.tool_call("b", "read"), None, error="gone", trust="unknown")
    state = [(one.seq, "derives", "inferred:environment")]
    assert edges(two)[1:] == edges(three)[1:] == state
    assert edges(one)[1:] == []
    (trace,), _ = checked(path)
    assert (trace[three.seq].error, trace[three.seq].trust) == ("gone", "unknown")


def test_a_reward_depends_on_everything_the_run_did_and_so_does_the_next(path):
    """The loose ends of the run; named causes narrow it; order alone is no descent."""
    with Recorder(path) as rec, rec.trace("t") as t:
        a = t.act("a")
        t.act("b")
        c = t.act("c", causes=[1])
        first = t.reward(1)
        second = t.reward(None, channel="style", verifiable="judge", error_rate=0.25)
        third = t.reward(0.5, causes=[a], target=Target(agent="a"), family="R2", channel="own")
    run = "inferred:run"
    assert edges(c) == [(1, "derives", "recorded")]
    assert edges(first) == edges(second) == [(0, "rewards", run), (2, "rewards", run)]
    assert edges(third) == [(0, "rewards", "recorded")]
    (trace,), _ = checked(path)
    assert edges(trace[1]) == [(0, "precedes", "inferred:order")]
    assert trace.outcome == 1.0


def every_kind(t: TraceRecorder) -> None:
    """A run that uses every method of the Recorder."""
    plan = t.act("lead", "spawn", items=[Item(verb="spawn", name=("w",), logprob=-1)])
    t.spawn("lead", "w", "worker", context={"brief": "be quick"})
    asked = t.delegate("lead", "w", "find it", waits=True)
    t.deliver("w", asked)
    t.act("w", "search", token_ids=[1, 2], logprobs=[-1, 0], value=1, policy_version="v")
    call = t.tool_call("w", "search", {"q": ["x", 1, None]}, source_id="id-1")
    got = t.tool_result(call, {"hits": []})
    t.safety("r1", "flagged", got)
    t.act("w", "note")
    t.write("w", "memory/k", 1, "found", base_version=0, reads=[Read(artefact="k", version=0)])
    back = t.agent_return("w", "lead", "found", answers=asked)
    also = t.message("w", ["lead"], "by the way", channel="side")
    t.act("lead", "sum up", causes=[plan])
    joined = t.aggregate("lead", [back, also], "found", rule="first")
    t.despawn("lead", "w")
    t.custom("lead", "acme.note", {"n": 1})
    t.intervene("edit", target=joined, content="lost")
    t.stop("lead", "found", reason="finished", truncated=False)
    t.reward(1, source="checker", verifiable="executed")


def test_every_method_writes_what_validates_and_every_kind_is_reached(path):
    """A run of all kinds has no finding, and no required edge is missing."""
    with Recorder(path) as rec, rec.trace("t", roles={"lead": "orchestrator"}) as t:
        every_kind(t)
    (trace,), report = checked(path)
    assert {e.kind for e in trace} == set(KINDS)
    assert report.counts["required_edges_missing"] == 0
    assert report.counts["missing_returns"] == 0
    assert report.counts["unanswered_calls"] == 0
    assert sum(trace.seal.kinds.values()) == len(trace)


def test_every_method_returns_the_event_that_stands_in_the_file(path):
    """What a caller holds is what a reader will find, whole numbers made floats and all."""
    returned: list[Event] = []
    with Recorder(path) as rec, rec.trace("t") as t:
        for name in ("act", "message", "tool_call", "reward", "stop"):
            assert callable(getattr(t, name))
        returned.append(t.act("a", "x", token_ids=np.array([1, 2]), logprobs=np.zeros(2), value=1))
        returned.append(t.message("a", "b", {"k": (1, 2)}))
        returned.append(t.reward(1))
    (trace,), _ = checked(path)
    assert returned == list(trace.events)
    assert type(returned[0].value) is type(returned[2].amount) is float
    assert returned[1].content == {"k": [1, 2]}


def test_the_seal_counts_kinds_tokens_and_cost(path):
    """Totals are those of the events; where none carries a figure, none is written."""
    with Recorder(path) as rec:
        with rec.trace("t") as t:
            for tokens, cost in ((3, 0.5), (4, None), (None, 0.25)):
                link = (Cause(seq=t.act("a").seq, kind="precedes"),)
                own = {"tokens_out": tokens, "cost_usd": cost, "causes": link}
                t.emit(Act(trace_id="", seq=0, agent="a", **own))
        with rec.trace("t") as t:
            t.act("a")
    one, two = checked(path)[0]
    assert (one.seal.tokens_in, one.seal.tokens_out, one.seal.cost_usd) == (None, 7, 0.75)
    assert one.seal.kinds == {"act": 6}
    assert (two.seal.tokens_out, two.seal.cost_usd, two.seal.dropped) == (None, None, 0)


# ---------------------------------------------------------------------------------------------
# Events of one's own, headers of one's own


def test_emit_numbers_an_event_and_leaves_the_rest(path):
    """Own observations and acts mix with the methods: mailbox, calls and lives are remembered."""
    with Recorder(path) as rec, rec.trace("t") as t:
        sent = t.emit(Message(trace_id="?", seq=99, agent="a", to=("b",), content_raw=freeze("hi")))
        assert (sent.trace_id, sent.seq) == (t.header.trace_id, 0)
        link = (Cause(seq=0, kind="consumes"),)
        t.emit(Observe(trace_id="", seq=0, agent="b", sources=(Source(seq=0),), causes=link))
        act = t.act("b", "hello")
        link = (Cause(seq=act.seq, kind="authorizes"),)
        paid = Anneal(weight=1, step=2)
        t.emit(Reward(trace_id="", seq=0, agent="env", amount=2, anneal=paid, causes=link))
    (trace,), _ = checked(path)
    assert edges(act) == [(1, "derives", "recorded")]
    assert [e.kind for e in trace] == ["message", "observe", "act", "reward"]
    assert trace[3].anneal == Anneal(weight=1.0, step=2)


def test_a_header_of_one_s_own_and_a_fork(path):
    """`started` absent: a virtual clock. A fork counts on from its seq, and may cite its parent."""
    fork = ForkRef(trace_id="p", seq=7, digest="0" * 32, do="keep")
    with Recorder(path) as rec:
        with rec.open(Header(trace_id="p", counterpoint=1, config_raw=freeze({"x": 1}))) as parent:
            before = parent.act("a")
        with rec.open(Header(trace_id="f", counterpoint=1, fork=fork)) as t:
            t.custom("a", "x.y", causes=[before])
            t.act("a")
    findings: list[Finding] = []
    parent, forked = read_file(path, findings)
    assert findings == []
    assert [e.seq for e in forked] == [7, 8]
    assert parent[0].t_start is None
    assert forked.seal.digest == forked.digest


def test_a_trace_id_that_the_file_holds_is_refused(path):
    """In this recorder or an earlier one; the file stays as it was."""
    with Recorder(path) as rec:
        rec.open(Header(trace_id="x", counterpoint=1)).end()
        with pytest.raises(Refused, match="already holds trace x"):
            rec.open(Header(trace_id="x", counterpoint=1))
    before = path.read_bytes()
    with Recorder(path) as rec, pytest.raises(Refused, match="already holds trace x"):
        rec.open(Header(trace_id="x", counterpoint=1))
    assert path.read_bytes() == before


# ---------------------------------------------------------------------------------------------
# Refusals: a sentence, and nothing of it written

BAD: dict[str, tuple[Callable[[TraceRecorder], Any], str]] = {
    "NaN amount": (
        lambda t: t.reward(math.nan),
        "reward, event 2, cannot be recorded: it holds NaN",
    ),
    "infinite value": (lambda t: t.act("a", value=math.inf), "NaN or infinity"),
    "NaN logprob": (
        lambda t: t.act("a", logprobs=[math.nan]),
        r"got `null` - at `\$.logprobs\[0\]`",
    ),
    "NaN in an array": (lambda t: t.act("a", logprobs=np.array([np.nan])), "logprobs"),
    "NaN in content": (lambda t: t.message("a", "b", [math.nan]), "NaN or infinity"),
    "NaN in an item": (lambda t: t.act("a", items=[Item(verb="stop", logprob=math.nan)]), "NaN"),
    "text that is none": (lambda t: t.act("a", 5), "the text of an act is a string"),
    "agent that is none": (lambda t: t.act(5), r"got `int` - at `\$.agent`"),
    "checker that is none": (lambda t: t.reward(1, source=5), r"got `int` - at `\$.agent`"),
    "agent is a list": (lambda t: t.message(["a"], "b"), "an agent is named by a string"),
    "receiver that is none": (lambda t: t.message("a", 5), r"\$.to"),
    "amount that is none": (lambda t: t.reward("1"), r"got `str` - at `\$.amount`"),
    "amount is a bool": (lambda t: t.reward(True), r"got `bool` - at `\$.amount`"),
    "float token ids": (lambda t: t.act("a", token_ids=np.array([1.5])), r"\$.token_ids\[0\]"),
    "no sequence": (lambda t: t.act("a", token_ids=7), r"\$.token_ids"),
    "no label": (lambda t: t.despawn("a", "b", "done"), r"'done' - at `\$.status`"),
    "no family": (lambda t: t.reward(1, family="R9"), r"'R9' - at `\$.family`"),
    "no reason": (lambda t: t.stop("a", reason="bored"), r"'bored' - at `\$.reason`"),
    "long integer": (lambda t: t.tool_call("a", "x", {"n": 1 << 64}), "over 64 bits"),
    "long version": (lambda t: t.write("a", "k", 1 << 63), r"\$.version"),
    "foreign type": (lambda t: t.custom("a", "x.y", object()), "type object has no JSON form"),
    "too deep": (lambda t: t.custom("a", "x.y", json.loads("[" * 90 + "]" * 90)), "deeper than"),
    "surrogate in a name": (lambda t: t.act("\ud800"), "surrogates not allowed"),
    "cause to come": (lambda t: t.act("a", causes=[2]), "earlier event of trace .*, not 2"),
    "negative cause": (lambda t: t.act("a", causes=[-1]), "not -1"),
    "cause that is none": (
        lambda t: t.act("a", causes=["0"]),
        "a cause is an earlier event .* not this str",
    ),
    "one cause, not a list": (lambda t: t.act("a", causes=t.header), "list of events"),
    "sees no list": (lambda t: t.act("a", sees=1), "list of events"),
    "no such call": (lambda t: t.tool_result(0, "x"), "is no tool call that waits"),
    "raw that is no JSON": (
        lambda t: t.message("a", "b", Raw(b'"x"\n')),
        "not spelled canonically",
    ),
    "emit of raw": (
        lambda t: t.emit(Custom(trace_id="", seq=0, agent="a", name="x", data_raw=Raw(b"{"))),
        "give the value itself",
    ),
    "emit of raw in an item": (
        lambda t: t.emit(
            Act(trace_id="", seq=0, agent="a", items=(Item(verb="none", content_raw=Raw(b"{")),))
        ),
        "content of an item is made by `freeze`",
    ),
    "emit of a negative cause": (
        lambda t: t.emit(
            Act(trace_id="", seq=0, agent="a", causes=(Cause(seq=-1, kind="derives"),))
        ),
        "event -1 is its cause and not earlier",
    ),
    "emit of no causes": (
        lambda t: t.emit(Act(trace_id="", seq=0, agent="a", causes=None)),
        r"\$.causes",
    ),
    "emit of no event": (lambda t: t.emit(t.header), "recorded by `emit`, not a Header"),
    "emit of NaN": (
        lambda t: t.emit(Reward(trace_id="", seq=0, agent="a", amount=math.nan)),
        "NaN or infinity",
    ),
    "emit of a cause to come": (
        lambda t: t.emit(
            Act(trace_id="", seq=0, agent="a", causes=(Cause(seq=2, kind="derives"),))
        ),
        "event 2 is its cause and not earlier",
    ),
    "emit of a wrong type": (lambda t: t.emit(Act(trace_id="", seq=0, agent=None)), r"\$.agent"),
}


@pytest.mark.parametrize("sync", ["write", "trace"])
@pytest.mark.parametrize("case", BAD)
def test_what_could_not_be_read_back_is_refused_and_not_written(path, case, sync):
    """One sentence naming event and field; the file is untouched and the trace goes on."""
    attempt, sentence = BAD[case]
    with Recorder(path, sync=sync) as rec, rec.trace("t") as t:
        t.message("b", "a", "unread, so that the next act has something to see")
        t.act("c")
        before = path.read_bytes()
        with pytest.raises(Refused, match=sentence):
            attempt(t)
        assert path.read_bytes() == before
        t.act("a", "goes on")
    (trace,), _ = checked(path)
    assert [e.kind for e in trace] == ["message", "act", "observe", "act"]


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda rec: rec.trace(5), r"this header cannot be recorded: .*\$.task_id"),
        (lambda rec: rec.trace("t", meta=[math.nan]), "NaN"),
        (lambda rec: rec.trace("t", roles={"a": 5}), r"\$.agents"),
        (lambda rec: rec.trace("\ud800"), "surrogates"),
        (lambda rec: rec.open(Header(trace_id="x", counterpoint=1, seed=1 << 64)), r"\$.seed"),
        (
            lambda rec: rec.open(Header(trace_id="x", counterpoint=1, meta_raw=Raw(b"{\n}"))),
            "build its payloads with `freeze`",
        ),
    ],
)
def test_a_header_that_could_not_be_read_back_is_refused(path, attempt, sentence):
    """Nothing is written, and the name is still free."""
    with Recorder(path) as rec:
        with pytest.raises(Refused, match=sentence):
            attempt(rec)
        assert path.read_bytes() == b""
        rec.open(Header(trace_id="x", counterpoint=1)).end()
    checked(path)


def test_an_event_of_another_trace_is_no_cause(path):
    """Its seq would point at something else here."""
    with Recorder(path) as rec, rec.trace("t") as a, rec.trace("t") as b:
        other = a.act("x")
        b.act("y")
        with pytest.raises(Refused, match=f"earlier event of trace {b.header.trace_id}"):
            b.act("y", causes=[other])
        call = a.tool_call("x", "search")
        with pytest.raises(Refused, match="earlier event of trace"):
            b.tool_result(call)
        a.tool_result(call)
        with pytest.raises(Refused, match="no tool call that waits for its result"):
            a.tool_result(call)


def test_a_refused_act_leaves_its_mailbox(path):
    """Neither observation nor act is written, and the next act still sees the message."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
        sent = t.message("a", "b", "hi")
        with pytest.raises(Refused):
            t.act("b", logprobs=[math.nan])
        t.act("b")
    (trace,), _ = checked(path)
    assert [e.kind for e in trace] == ["act", "message", "observe", "act"]
    assert trace[2].sources == (Source(seq=sent.seq),)


def test_an_ended_trace_takes_nothing_more(path):
    """Not an event, not a second seal; and a closed recorder takes nothing either."""
    rec = Recorder(path)
    with rec.trace("t") as t:
        t.act("a")
    with pytest.raises(Refused, match="has its seal; open another trace"):
        t.act("a")
    with pytest.raises(Refused, match="has its seal"):
        t.end()
    other = rec.trace("t")
    rec.close()
    rec.close()
    for late in (lambda: other.act("a"), other.end, lambda: rec.trace("t")):
        with pytest.raises(Refused, match=r"the recorder of .* is closed"):
            late()
    sealed, unsealed = checked(path)[0]
    assert (len(sealed), len(unsealed), unsealed.seal) == (1, 0, None)


# ---------------------------------------------------------------------------------------------
# Content


def test_surrogates_in_content_survive_with_a_stable_digest(path):
    """Fault 27: what a tool returned is kept, whatever half characters it holds."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a", "\ud800")
        t.tool_result(t.tool_call("a", "x", {"q": "\udfff"}), ["\ud83c\udf78", "\ud800"])
    (trace,), _ = checked(path)
    assert trace[0].text == "\ud800"
    assert trace[1].arguments == {"q": "\udfff"}
    assert trace[2].content == ["🍸", "\ud800"]
    again = path.with_name("again.jsonl")
    lines = [trace.header, *trace, trace.seal]
    again.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    assert checked(again)[0][0].digest == trace.digest


def test_content_over_a_mebibyte_goes_to_a_side_file(path):
    """At the limit it stays; over it a reference stands for it; missing or altered is reported."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a", "x" * (SIDE_FILE_OVER - 2))
        t.message("a", "b", "y" * (SIDE_FILE_OVER - 1))
        t.message("a", "b", "y" * (SIDE_FILE_OVER - 1))
        own = {"data_raw": freeze(["z" * (1 << 20)]), "causes": t.act("a").causes}
        t.emit(Custom(trace_id="", seq=0, agent="a", name="x.y", **own))
    (trace,), _ = checked(path)
    assert len(trace[0].text) == SIDE_FILE_OVER - 2
    assert trace[1].content == trace[2].content
    assert set(trace[1].content) == {"$file", "bytes"}
    assert side_content(path, trace[1].content) == "y" * (SIDE_FILE_OVER - 1)
    assert side_content(path, trace[4].data) == ["z" * (1 << 20)]
    files = sorted(path.with_name("runs.jsonl.files").iterdir())
    assert sorted(f.name for f in files) == sorted(
        {trace[1].content["$file"], trace[4].data["$file"]}
    )
    (path.with_name("runs.jsonl.files") / trace[1].content["$file"]).write_bytes(b'"other"')
    (path.with_name("runs.jsonl.files") / trace[4].data["$file"]).unlink()
    findings: list[Finding] = []
    (again,) = read_file(path, findings)
    assert len(again) == 5
    assert [(f.rule, f.seq) for f in findings] == [("V02", 1), ("V02", 2), ("V02", 4)]


def test_content_that_only_looks_like_a_reference_is_content(path):
    """A tool cannot point a reader at a file by returning the right words."""
    hostile = {"$file": "0" * 32, "bytes": 1}
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
        t.tool_result(t.tool_call("a", "x"), hostile)
    (trace,), _ = checked(path)
    assert side_content(path, trace[2].content) == hostile


def test_a_line_that_no_reader_would_take_is_refused(path):
    """Even where it is not the content that is long."""
    with Recorder(path) as rec, rec.trace("t") as t:
        with pytest.raises(Refused, match=f"over the {MAX_LINE} of a line"):
            t.act("a", policy_version="x" * MAX_LINE)
        t.act("a")
    checked(path)


# ---------------------------------------------------------------------------------------------
# Who owns the file


def test_a_second_recorder_on_one_file_is_refused(path):
    """In this process and in another; after closing it is free."""
    with Recorder(path):
        with pytest.raises(Refused, match="another recorder owns"):
            Recorder(path)
        code = f"from counterpoint.recorder import Recorder; Recorder({str(path)!r})"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "Refused: another recorder owns" in child.stderr
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
    checked(path)


def test_in_a_folder_each_recorder_has_a_file_of_its_own(tmp_path):
    """Many workers write one folder."""
    with Recorder(tmp_path) as one, Recorder(tmp_path) as two:
        assert one.path != two.path
        for rec in (one, two):
            with rec.trace("t") as t:
                t.act("a")
    assert sorted(tmp_path.iterdir()) == sorted([one.path, two.path])
    assert one.path.suffix == ".jsonl"
    for file in (one.path, two.path):
        checked(file)


def test_a_forked_child_does_not_write_its_parent_s_file(path):
    """Two processes would number events twice: the child is refused, the parent goes on."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
        child = os.fork()
        if child == 0:
            try:
                t.act("a")
                os._exit(1)
            except Refused:
                os._exit(42)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        t.act("a")
    (trace,), _ = checked(path)
    assert len(trace) == 2


@pytest.mark.parametrize(
    ("name", "sync", "sentence"),
    [
        ("no/such/folder.jsonl", "write", "cannot be written: No such file"),
        ("runs.jsonl.gz", "write", "gzip it after"),
        ("runs.jsonl", "sometimes", "sync is 'sometimes'"),
    ],
)
def test_a_file_that_cannot_be_recorded_to_is_refused(tmp_path, name, sync, sentence):
    """In a sentence, before anything is made."""
    with pytest.raises(Refused, match=sentence):
        Recorder(tmp_path / name, sync=sync)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_last_newline_is_gone_on_with_on_a_new_line(path):
    """A torn piece stays as one unreadable line; nothing is cut."""
    with Recorder(path) as rec, rec.trace("t") as t:
        t.act("a")
    torn = path.read_bytes() + b'{"type":"act","trace_id":"x"'
    path.write_bytes(torn)
    with Recorder(path) as rec:
        assert path.read_bytes() == torn
        with rec.trace("t") as t:
            t.act("b")
    assert path.read_bytes().startswith(torn + b"\n")
    findings: list[Finding] = []
    one, two = read_file(path, findings)
    assert [f.line for f in findings] == [4]
    assert (one.header.rollout_id, two.header.rollout_id) == ("0", "1")
    assert two.seal.digest == two.digest


# ---------------------------------------------------------------------------------------------
# Several traces, several threads, interruptions


@pytest.fixture
def hasty():
    """Threads that change places a thousand times more often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


def test_interleaved_traces_of_one_recorder_come_apart(path):
    """Three open traces in one file, written in turns."""
    with Recorder(path) as rec:
        open_traces = [rec.trace("t") for _ in range(3)]
        for i in range(30):
            open_traces[i % 3].act("a", f"turn {i}")
        for t in open_traces:
            t.end()
    traces, report = checked(path)
    assert [[int(e.text[5:]) % 3 for e in t] for t in traces] == [[0] * 10, [1] * 10, [2] * 10]
    assert report.counts["repeated_rollouts"] == 0


@pytest.mark.parametrize("sync", ["write", "trace"])
def test_four_threads_write_one_trace_and_four_their_own(path, sync, hasty):
    """Over 500 events from each of four threads: no finding, no gap, nothing twice."""
    failures: list[BaseException] = []

    def work(rec: Recorder, shared: TraceRecorder, name: str) -> None:
        try:
            with rec.trace("own") as own:
                for i in range(100):
                    own.act(name)
                    shared.act(name, f"{name} {i}")
                    shared.message(name, ["0", "1", "2", "3"], i)
                    shared.custom(name, "x.y", i)
                    call = shared.tool_call(name, "x")
                    shared.tool_result(call, i)
        except BaseException as error:
            failures.append(error)

    with Recorder(path, sync=sync) as rec, rec.trace("t") as shared:
        threads = [threading.Thread(target=work, args=(rec, shared, str(i))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    traces, report = checked(path)
    (together,) = [t for t in traces if t.header.task_id == "t"]
    assert sorted(len(t) for t in traces)[:4] == [100] * 4
    said = [e.text for e in together.of("act")]
    assert sorted(said) == sorted(f"{n} {i}" for n in "0123" for i in range(100))
    assert report.counts["repeated_rollouts"] == 0


@pytest.mark.parametrize("sync", ["write", "trace"])
def test_an_exception_leaves_an_unsealed_readable_trace(path, sync):
    """Whatever was recorded before stays, at each level of `sync`, and the next trace is fine."""
    with Recorder(path, sync=sync) as rec:
        with pytest.raises(KeyboardInterrupt), rec.trace("t") as t:  # noqa: PT012
            t.act("a")
            raise KeyboardInterrupt
        assert len(next(read_file(path))) == 1  # before the file is closed
        with rec.trace("t") as t:
            t.act("b")
        left = rec.trace("t")
        left.act("c")
    traces, report = checked(path)
    assert sorted((t[0].agent, t.seal is None) for t in traces) == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]
    assert report.counts["unfinished_traces"] == 2


def busy(path: Path, ready: int) -> None:
    """Record without end, as a program would that a person stops."""
    with Recorder(path) as rec, rec.trace("t") as t:
        os.write(ready, b".")
        while True:
            t.act("a", "x" * 100)
            t.tool_result(t.tool_call("a", "y"), "z")


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_a_readable_trace(tmp_path):
    """A real SIGINT into a busy loop, 40 times: a dense unsealed prefix, no finding."""
    for i in range(40):
        path = tmp_path / f"{i}.jsonl"
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                busy(path, into)
            except KeyboardInterrupt:
                os._exit(42)
            finally:
                os._exit(1)
        os.read(out, 1)
        time.sleep(0.0007 * i)
        os.kill(child, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        os.close(out)
        os.close(into)
        (trace,), _ = checked(path)
        assert trace.seal is None


def test_a_trace_that_was_interrupted_within_a_write_takes_nothing_more(path, monkeypatch):
    """The event may be in the file or not, so that the next seq is not known."""
    with Recorder(path) as rec:
        t = rec.trace("t")
        t.act("a")
        write = os.write

        def interrupted(file: int, data: bytes) -> int:
            write(file, data)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            t.act("a")
        monkeypatch.undo()
        with pytest.raises(Refused, match="was interrupted within a write"):
            t.act("a")
        with pytest.raises(Refused, match="was interrupted within a write"):
            t.end()
        with rec.trace("t") as other:
            other.act("b")
    traces, _ = checked(path)
    assert sorted(len(t) for t in traces) == [1, 2]


def test_what_is_recorded_imports_nothing_else_of_ours():
    """The Recorder and the minimal profile need no credit, no harness, no torch."""
    code = (
        "import sys, counterpoint.recorder as r; print(sorted(m for m in sys.modules "
        "if m.split('.')[0] in ('torch', 'matplotlib', 'pyarrow', 'pandas')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert msgspec.json.encode(1) == b"1"
