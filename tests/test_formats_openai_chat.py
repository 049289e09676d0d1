"""Claims about OpenAI chat logs, on tau-bench's public runs and on small ones made by hand."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from counterpoint.formats import Tally, read
from counterpoint.schema import Act, Finding, Message, Observe, Reward, ToolCall, ToolResult, Trace
from counterpoint.validate import validate

TAU = Path(__file__).parent / "data" / "tau_bench" / "gpt-4o-airline.json.gz"


@pytest.fixture(scope="module")
def raw() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(gzip.decompress(TAU.read_bytes()))
    return runs


@pytest.fixture(scope="module")
def tau() -> tuple[list[Trace], Tally]:
    tally = Tally()
    return list(read(TAU, "openai_chat", tally=tally)), tally


def call(tool: str, id: str | None = None, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"function": function, "type": "function"} | ({} if id is None else {"id": id})


def asks(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(content: Any, id: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id, **more}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Chats:
    """Imports a run made of messages, and keeps what was found on the way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run.json"
        self.findings: list[Finding] = []
        self.tally = Tally()

    def __call__(self, *messages: Any, anchor: Any = "last_message", **about: Any) -> Trace:
        self.path.write_text(json.dumps({"messages": messages, **about}))
        given = {"findings": self.findings, "tally": self.tally, "anchor": anchor}
        (trace,) = read(self.path, "openai_chat", **given)
        return trace


@pytest.fixture
def chats(tmp_path: Path) -> Chats:
    return Chats(tmp_path)


def pairs(trace: Trace) -> list[tuple[str, Any, Any]]:
    """Tool, arguments and result of every call, None where it has no result."""
    answers = {r.call: r.content for r in trace if isinstance(r, ToolResult)}
    return [(c.tool, c.arguments, answers.get(c.seq)) for c in trace if isinstance(c, ToolCall)]


# -- the real runs ---------------------------------------------------------------------------------


def test_every_message_of_the_real_runs_is_read(tau: tuple[list[Trace], Tally]) -> None:
    """200 runs, 5,308 messages, 2,454 acts, 1,490 user messages, 1,164 calls, nothing dropped."""
    traces, tally = tau
    kinds = Counter(event.kind for trace in traces for event in trace)
    assert (tally.traces, tally.records) == (200, 5308)
    assert kinds["act"] == kinds["observe"] == 2454
    assert kinds["tool_call"] == kinds["tool_result"] == 1164
    # 1,490 of the user and 2,454 − 1,164 of the assistant
    assert kinds["message"] == 1490 + 1290
    assert not tally.dropped
    assert tally.extra_roots == 0


def test_rewards_and_groups_of_the_real_runs(tau: tuple[list[Trace], Tally]) -> None:
    """84 of 200 runs succeed; 50 groups of 4 with 14, 12, 10, 4, 10 groups of 0 to 4 successes."""
    traces, _ = tau
    assert Counter(t.outcome for t in traces) == {1.0: 84, 0.0: 116}
    wins = Counter[str]()
    for trace in traces:
        wins[trace.header.group_id or ""] += trace.outcome == 1.0
    assert Counter(wins.values()) == {0: 14, 1: 12, 2: 10, 3: 4, 4: 10}
    assert {t.header.rollout_id for t in traces} == {"0", "1", "2", "3"}


def test_each_of_the_1164_calls_has_its_own_result(
    tau: tuple[list[Trace], Tally], raw: list[dict[str, Any]]
) -> None:
    """A call's result is the next message; ids used twice, in 49 runs, do not blur it."""
    reused = 0
    for trace, run in zip(tau[0], raw, strict=True):
        expected, ids = [], []
        for message, following in zip(run["traj"], run["traj"][1:], strict=False):
            for asked in message.get("tool_calls") or []:
                function = asked["function"]
                ids.append(asked["id"])
                assert following["tool_call_id"] == asked["id"]
                arguments = json.loads(function["arguments"])
                expected.append((function["name"], arguments, following["content"]))
        assert pairs(trace) == expected
        reused += len(set(ids)) < len(ids)
    assert reused == 49


def test_the_real_runs_break_no_rule_but_that_of_used_ids(tau: tuple[list[Trace], Tally]) -> None:
    """Validation finds W03 in exactly 49 runs and nothing else: no trust is raised, no edge odd."""
    report = validate(tau[0])
    assert {f.rule for f in report.findings} == {"W03"}
    assert len({f.trace_id for f in report.findings}) == 49


def test_nothing_of_a_real_message_is_lost(
    tau: tuple[list[Trace], Tally], raw: list[dict[str, Any]]
) -> None:
    """Every content of the log stands in the trace, in order, and with the role that said it."""
    for trace, run in zip(tau[0], raw, strict=True):
        said: list[tuple[str, Any]] = []
        for event in trace:
            if isinstance(event, Observe) and event.content is not None:
                said.insert(0, ("system", event.content))
            elif isinstance(event, Act):
                said.append(("assistant", event.text))
            elif isinstance(event, ToolResult):
                said.append(("tool", event.content))
            elif isinstance(event, Message) and event.agent == "user":
                said.append(("user", event.content))
        assert said == [(m["role"], m["content"]) for m in run["traj"]]
        assert trace.header.meta["info"] == run["info"]


# -- the shape of events ---------------------------------------------------------------------------


def test_one_exchange_event_by_event(chats: Chats) -> None:
    """System and user go into the first observation; a call, its result, then an answer."""
    trace = chats(
        {"role": "system", "content": "be kind"},
        user("hi"),
        asks(call("look", "c1", at=2)),
        result("found", "c1"),
        says("here"),
        user("thanks"),
        task_id=7,
        trial=1,
        reward=0.5,
        note="x",
    )
    kinds = "message observe act tool_call tool_result observe act message message reward"
    assert [e.kind for e in trace] == kinds.split()
    edges = {(c.seq, e.seq, c.kind, c.basis) for e in trace for c in e.causes}
    history = "inferred:history"
    assert edges == {
        (0, 1, "consumes", history),
        (1, 2, "derives", history),
        (2, 3, "authorizes", "recorded"),
        (3, 4, "answers", "recorded"),
        (1, 5, "precedes", history),
        (2, 5, "precedes", history),
        (4, 5, "consumes", history),
        (5, 6, "derives", history),
        (6, 7, "authorizes", "recorded"),
        (0, 8, "precedes", history),
        (7, 8, "derives", history),
        (8, 9, "rewards", "inferred:outcome"),
    }
    assert [e.agent for e in trace] == ["user", *["assistant"] * 7, "user", "env"]
    assert [e.seq for e in trace if e.trainable] == [2, 6]
    assert [e.trust for e in trace] == [*["unknown"] * 4, "untrusted", *["unknown"] * 5]
    assert trace[1].content == "be kind"  # type: ignore[union-attr]
    assert trace.content(trace[7]) == "here"
    assert trace[7].to == ("user",)  # type: ignore[union-attr]
    header = trace.header
    assert (header.task_id, header.group_id, header.rollout_id) == ("7", "7", "1")
    assert header.meta == {"note": "x"}
    assert [(a.id, a.role) for a in header.agents] == [("user", "user"), ("assistant", "assistant")]


def test_the_model_keeps_groups_apart(chats: Chats) -> None:
    """Runs of one task by two models are no group: an advantage between them would mean nothing."""
    groups = [chats(user("x"), task_id=1, model=m).header.group_id for m in ("a", "b")]
    assert groups == ["1@a", "1@b"]


def test_parallel_calls_in_one_message_are_one_act(chats: Chats) -> None:
    """Two calls, their results in the other order: one act, each call with the result it asked."""
    trace = chats(
        user("go"),
        asks(call("f", "a", n=1), call("f", "b", n=2)),
        result("two", "b"),
        result("one", "a"),
    )
    assert len(trace.of("act")) == 1
    assert pairs(trace) == [("f", {"n": 1}, "one"), ("f", {"n": 2}, "two")]
    assert [i.verb for i in trace.of("act")[0].items] == ["call", "call"]  # type: ignore[union-attr]


def test_parallel_calls_written_one_by_one_under_a_message_id_are_one_act(chats: Chats) -> None:
    """Call, result, call, result under one message id: one decision with two calls."""
    trace = chats(
        user("go"),
        asks(call("f", "a"), id="m1"),
        result("one", "a"),
        asks(call("g", "b"), id="m1"),
        result("two", "b"),
        asks(call("h", "c"), id="m2"),
        result("three", "c"),
    )
    assert len(trace.of("act")) == 2
    # message 0, observe 1, act 2, calls 3 and 4, results 5 and 6, observe 7, act 8
    assert [c.causes[0].seq for c in trace.of("tool_call")] == [2, 2, 8]
    assert pairs(trace) == [("f", {}, "one"), ("g", {}, "two"), ("h", {}, "three")]
    assert chats.tally.records == 7


def test_one_id_for_two_calls_is_two_calls(chats: Chats) -> None:
    """Each gets its own result, whether the calls follow each other or stand in one message."""
    after = chats(
        asks(call("f", "x", n=1)), result("one", "x"), asks(call("f", "x", n=2)), result("two", "x")
    )
    beside = chats(
        asks(call("f", "x", n=1), call("f", "x", n=2)), result("one", "x"), result("two", "x")
    )
    for trace in (after, beside):
        assert pairs(trace) == [("f", {"n": 1}, "one"), ("f", {"n": 2}, "two")]


def test_a_result_belongs_to_the_latest_turn_that_used_its_id(chats: Chats) -> None:
    """A first call that was never answered does not take the result of the second."""
    trace = chats(asks(call("f", "x", n=1)), asks(call("f", "x", n=2)), result("two", "x"))
    assert pairs(trace) == [("f", {"n": 1}, None), ("f", {"n": 2}, "two")]


def test_ids_that_contain_each_other_stay_apart(chats: Chats) -> None:
    """The ids x and x-1 are two calls, in the order of the log."""
    trace = chats(asks(call("f", "x"), call("g", "x-1")), result("g", "x-1"), result("f", "x"))
    assert pairs(trace) == [("f", {}, "f"), ("g", {}, "g")]
    assert [c.source_id for c in trace.of("tool_call")] == ["x", "x-1"]


def test_results_without_ids_are_matched_by_position_and_say_so(chats: Chats) -> None:
    """The basis of such an edge is inferred, and a result of another tool is not forced to fit."""
    trace = chats(asks(call("f"), call("g")), result("one"), result("two", name="g"), result("no"))
    assert pairs(trace) == [("f", {}, "one"), ("g", {}, "two")]
    answers = [r.causes[0].basis for r in trace.of("tool_result")[:2]]
    assert answers == ["inferred:position"] * 2
    assert trace.of("tool_result")[2].call is None  # type: ignore[union-attr]
    mixed = chats(asks(call("f", "a", n=1), call("f", n=2)), result("one", "a"), result("two"))
    assert pairs(mixed) == [("f", {"n": 1}, "one"), ("f", {"n": 2}, "two")]
    other = chats(asks(call("f", "a")), result("?", "b", name="g"))
    assert pairs(other) == [("f", {}, None)]


def test_results_share_an_environment(chats: Chats) -> None:
    """A result depends on the result before it, even of another agent's call: state is shared."""
    trace = chats(
        asks(call("f", "a"), name="ann"),
        result(1, "a"),
        asks(call("g", "b"), name="bob"),
        result(2, "b"),
    )
    first, second = trace.of("tool_result")
    assert [(c.seq, c.kind, c.basis) for c in second.causes][1] == (
        first.seq,
        "derives",
        "inferred:environment",
    )
    assert [r.agent for r in (first, second)] == ["ann", "bob"]


def test_several_agents_are_told_apart_by_name(chats: Chats) -> None:
    """Each agent sees what the others said since it last acted, once, and never its own words."""
    trace = chats(
        user("plan"), says("one", name="ann"), says("two", name="bob"), says("three", name="ann")
    )
    looks = trace.of("observe")
    seen = [[trace.content(trace[s.seq]) for s in o.sources] for o in looks]  # type: ignore[union-attr]
    assert seen == [["plan"], ["plan", "one"], ["two"]]
    assert [m.to for m in trace.of("message")][1:] == [  # type: ignore[union-attr]
        ("user", "bob"),
        ("user", "ann"),
        ("user", "bob"),
    ]


def test_reserved_ids_never_become_agents(chats: Chats) -> None:
    """An assistant called env would be taken for the environment; a user called human is none."""
    trace = chats(user("hi", name="human"), says("x", name="env"))
    assert trace.of("act")[0].agent == "agent:env"
    assert [a.id for a in trace.header.agents] == ["agent:env"]
    assert not validate([trace]).findings


# -- anchors ---------------------------------------------------------------------------------------


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def anchors(trace: Trace) -> list[str | None]:
    return [o.anchor for o in trace.of("observe")]  # type: ignore[union-attr]


def test_an_anchor_is_the_digest_of_the_message_before(chats: Chats) -> None:
    """Role, name and content of the last message; of the last tool message; of all of them."""
    run = (
        user("hi"),
        asks(call("f", "a")),
        result("r", "a", name="f"),
        says("done"),
        user("more"),
        says("ok"),
    )
    r, more = '["tool","f","r"]', '["user",null,"more"]'
    assert anchors(chats(*run)) == [digest('["user",null,"hi"]'), digest(r), digest(more)]
    assert anchors(chats(*run, anchor="last_tool")) == [digest(""), digest(r), digest(r)]
    state = hashlib.blake2b(b"", digest_size=16).digest()
    state = hashlib.blake2b(state + b'["user",null,"hi"]', digest_size=16).digest()
    assert anchors(chats(*run, anchor="history"))[0] == state.hex()


def test_anchors_of_a_history_differ_where_only_an_early_message_did(chats: Chats) -> None:
    """`history` tells runs apart that `last_message` calls equal."""
    one = [user("a"), says("b"), user("c"), says("d")]
    two = [user("A"), *one[1:]]
    assert anchors(chats(*one))[1] == anchors(chats(*two))[1]
    long = [anchors(chats(*run, anchor="history"))[1] for run in (one, two)]
    assert long[0] != long[1]


# -- odd and hostile -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "field", "reason"),
    [
        (5, "messages[1]", "is a number, not an object"),
        (None, "messages[1]", "is null, not an object"),
        ({"content": "x"}, "messages[1].role", "is null; it is one of system"),
        ({"role": "wizard"}, "messages[1].role", "'wizard'"),
        ({"role": ["user"]}, "messages[1].role", "is a list"),
        ({"role": "user", "content": float("nan")}, "messages[1].content", "NaN"),
        ({"role": "user", "content": 10**30}, "messages[1].content", "64 bits"),
        ({"role": "assistant", "content": 5}, "messages[1].content", "is a number, not a list"),
        ({"role": "user", "name": {}}, "messages[1].name", "is an object, not a name"),
        (asks("f"), "messages[1].tool_calls[0]", "is a text, not an object"),  # type: ignore[arg-type]
        ({**asks(), "tool_calls": 3}, "messages[1].tool_calls", "is a number, not a list"),
        (asks({"id": "a"}), "messages[1].tool_calls[0].function", "is null, not an object"),
        (asks({"function": {}}), "messages[1].tool_calls[0].function.name", "no tool to call"),
        (result("x", id=True), "messages[1].tool_call_id", "is true or false"),  # type: ignore[arg-type]
    ],
)
def test_a_message_that_cannot_be_kept_costs_only_itself(
    chats: Chats, message: Any, field: str, reason: str
) -> None:
    """One finding names file, run, field and reason; the messages around it are kept."""
    trace = chats(user("before"), message, says("after"))
    (finding,) = chats.findings
    assert (finding.rule, finding.file, finding.field) == ("V02", str(chats.path), field)
    assert finding.message.startswith("run 0: ")
    assert reason in finding.message
    assert [trace.content(m) for m in trace.of("message")] == ["before", "after"]
    assert chats.tally.records == 3


def test_arguments_that_are_no_json_are_kept_as_text(chats: Chats) -> None:
    """A model's broken JSON is data: nothing is guessed, nothing is lost."""
    broken = ['{"a": 1', '{"a": 1e999}', "[" * 100, ""]
    calls = [{"function": {"name": "f", "arguments": text}} for text in broken]
    calls.append({"function": {"name": "f", "arguments": {"already": "parsed"}}})
    trace = chats(asks(*calls))
    assert [c.arguments for c in trace.of("tool_call")] == [*broken, {"already": "parsed"}]  # type: ignore[union-attr]
    assert chats.findings == []


def test_fields_without_a_place_are_counted(chats: Chats) -> None:
    """Dropped fields are counted by name; trace-level fields in a message change nothing."""
    trace = chats(
        user("hi", refusal=None),
        says("x", reward=9, task_id="other", usage={"tokens": 1}),
        task_id="root",
        reward=1,
    )
    assert chats.tally.dropped == {"refusal": 1, "reward": 1, "task_id": 1, "usage": 1}
    assert (trace.header.task_id, trace.outcome) == ("root", 1.0)


def test_missing_is_not_zero(chats: Chats) -> None:
    """Without a reward nothing was scored; null says that scoring failed; neither is 0."""
    assert chats(user("x")).outcome is None
    failed = chats(user("x"), reward=None)
    assert failed.outcome is None
    assert len(failed.of("reward")) == 1
    odd = chats(user("x"), reward="high")
    assert odd.outcome is None
    assert chats.findings[0].field == "reward"


def test_a_run_without_messages_is_kept_without_acts(chats: Chats) -> None:
    """An empty run is a run: its reward counts, and it has no turn to be credited."""
    trace = chats(reward=1.0)
    assert [e.kind for e in trace] == ["reward"]
    assert isinstance(trace[0], Reward)


def test_content_in_parts_is_read_as_text(chats: Chats) -> None:
    """An assistant's parts are joined; a part without text is counted as dropped."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    trace = chats(user(parts), says(parts))
    assert trace.of("act")[0].text == "ab"  # type: ignore[union-attr]
    assert trace.of("message")[0].content == parts  # type: ignore[union-attr]
    assert chats.tally.dropped == {"content part without text": 1}


def test_lone_surrogates_survive_and_pairs_become_characters(chats: Chats) -> None:
    r"""\ud800 comes back as it was; the escaped pair \ud83c\udf78 is one character."""
    trace = chats(user("\ud800"), says("x\ud800y"), user("\ud83c\udf78"), says("a", name="\udfff"))
    words = [trace.content(m) for m in trace.of("message")]
    assert words[:2] == ["\ud800", "x\ud800y"]
    assert words[2] == "\N{COCKTAIL GLASS}"
    assert trace.of("act")[1].agent == r"\udfff"


def test_system_words_after_the_last_turn_are_kept(chats: Chats) -> None:
    """They stand in an observation that no act followed."""
    trace = chats(user("a"), says("b"), {"role": "system", "content": "late"})
    assert trace.events[-1].content == "late"  # type: ignore[union-attr]
    assert len(trace.of("act")) == 1


def test_older_names_of_the_api_are_understood(chats: Chats) -> None:
    """Developer is system; function_call and the role function are a call and its result."""
    trace = chats(
        {"role": "developer", "content": "rules"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    )
    assert trace.of("observe")[0].content == "rules"  # type: ignore[union-attr]
    assert pairs(trace) == [("f", {}, "r")]


def test_too_many_participants_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """Everyone sees everything, so a thousand made-up names would give millions of edges."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps([[says("x", name=str(n)) for n in range(300)], [user("ok")]]))
    findings: list[Finding] = []
    assert len(list(read(path, "openai_chat", findings=findings))) == 1
    assert "300 participants" in findings[0].message


def test_a_bare_list_of_messages_is_one_run(tmp_path: Path) -> None:
    """A file may hold one conversation, or a list of conversations, without anything around."""
    path = tmp_path / "x.json"
    path.write_text(json.dumps([user("a"), says("b")]))
    assert [len(t.of("act")) for t in read(path, "openai_chat")] == [1]
    path.write_text(json.dumps([[user("a"), says("b")], [says("c")]]))
    assert [len(t) for t in read(path, "openai_chat")] == [4, 3]
