"""Claims about Who&When logs: the real half, and the other half's shape on a small file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from counterpoint.formats import Tally, read
from counterpoint.schema import Act, Finding, Message, Trace
from counterpoint.steps import Steps
from counterpoint.validate import validate

FOLDER = Path(__file__).parent / "data" / "who_and_when" / "algorithm_generated"

HAND_CRAFTED: dict[str, Any] = {
    "question": "Where is the class?",
    "question_ID": "q1",
    "is_corrected": False,
    "ground_truth": "Pear Street",
    "mistake_agent": "WebSurfer",
    "mistake_step": "3",
    "mistake_reason": "It clicked the wrong link.",
    "history": [
        {"role": "human", "content": "Where is the class?"},
        {"role": "Orchestrator (thought)", "content": "I should search."},
        {"role": "Orchestrator (-> WebSurfer)", "content": "Please search."},
        {"role": "WebSurfer", "content": "I clicked a link."},
        {"role": "Orchestrator (-> ComputerTerminal)", "content": "Run it."},
        {"role": "ComputerTerminal", "content": "exitcode: 1"},
    ],
}


@pytest.fixture(scope="module")
def real() -> tuple[list[Trace], list[Finding], Tally]:
    findings: list[Finding] = []
    tally = Tally()
    return list(read(FOLDER, "who_and_when", findings=findings, tally=tally)), findings, tally


def one(folder: Path, run: Any) -> tuple[Trace, list[Finding]]:
    path = folder / "1.json"
    path.write_text(json.dumps(run))
    findings: list[Finding] = []
    (trace,) = read(path, "who_and_when", findings=findings)
    return trace, findings


def words(trace: Trace) -> list[tuple[str, Any]]:
    return [(e.agent, e.text) for e in trace if isinstance(e, Act)]


def test_every_entry_of_the_real_runs_is_one_act(
    real: tuple[list[Trace], list[Finding], Tally],
) -> None:
    """126 runs, 1,099 entries: each is an act of the agent in `name`, in order, word for word."""
    traces, _, tally = real
    assert (tally.traces, tally.records) == (126, 1099)
    assert tally.dropped == {"role": 1099}
    for trace in traces:
        run = json.loads(Path(str(trace.file)).read_text())
        assert words(trace) == [(h["name"], h["content"]) for h in run["history"]]
        assert trace.header.task_id == run["question_ID"]
        for key in ("mistake_agent", "mistake_step", "mistake_reason", "ground_truth"):
            assert trace.header.meta[key] == run[key]


def test_the_label_disagrees_with_the_log_in_three_files(
    real: tuple[list[Trace], list[Finding], Tally],
) -> None:
    """In 14, 15 and 59 the blamed agent does not speak the blamed step: W02 names both sides."""
    findings = real[1]
    assert {f.rule for f in findings} == {"W02"}
    assert [Path(str(f.file)).name for f in findings] == ["14.json", "15.json", "59.json"]
    by_id = {trace.trace_id: trace for trace in real[0]}
    for finding in findings:
        trace = by_id[str(finding.trace_id)]
        blamed = trace[finding.seq or 0]
        assert trace.header.meta["mistake_agent"] in finding.message
        assert blamed.agent in finding.message
        assert blamed.source_id == trace.header.meta["mistake_step"]


def test_the_real_runs_failed_and_break_no_rule(
    real: tuple[list[Trace], list[Finding], Tally],
) -> None:
    """Every outcome is 0, a statement and not a gap; validation finds nothing, V10 included."""
    assert Counter(trace.outcome for trace in real[0]) == {0.0: 126}
    assert not validate(real[0]).findings
    assert real[2].extra_roots == 0


def test_terminals_are_untrusted_and_not_trained(
    real: tuple[list[Trace], list[Finding], Tally],
) -> None:
    """Computer_terminal's output is labelled like a tool's result; other acts are trained."""
    acts = [e for trace in real[0] for e in trace if isinstance(e, Act)]
    labels = {(e.agent == "Computer_terminal", e.trust, e.trainable) for e in acts}
    assert labels == {(True, "untrusted", False), (False, "unknown", True)}
    assert len(Steps.from_traces(real[0])) == 1099


def test_each_agent_first_sees_its_own_system_prompt() -> None:
    """A prompt stands in its agent's first observation; of those who never spoke, in meta."""
    for name in ("1.json", "30.json"):
        run = json.loads((FOLDER / name).read_text())
        (trace,) = read(FOLDER / name, "who_and_when")
        told = {o.agent: o.content for o in trace.of("observe") if o.content is not None}  # type: ignore[union-attr]
        rest = trace.header.meta.get("system_prompt", {})
        assert told | rest == run["system_prompt"]
        assert not told.keys() & rest.keys()


def test_an_agent_has_seen_all_that_was_said_since_its_last_turn(tmp_path: Path) -> None:
    """In a group chat sources are the others' messages since the agent's own last one."""
    said = [("a", "1"), ("b", "2"), ("c", "3"), ("a", "4"), ("a", "5")]
    history = [{"name": n, "role": "user", "content": c} for n, c in said]
    trace, _ = one(tmp_path, {"history": history})
    seen = [[trace.content(trace[s.seq]) for s in o.sources] for o in trace.of("observe")]  # type: ignore[union-attr]
    assert seen == [[], ["1"], ["1", "2"], ["2", "3"], []]


def test_the_other_half_has_the_agent_in_the_role(tmp_path: Path) -> None:
    """A thought is an act that nobody sees, `-> X` an act and a message to X, a human a message."""
    trace, findings = one(tmp_path, HAND_CRAFTED)
    assert findings == []
    assert words(trace) == [
        ("Orchestrator", "I should search."),
        ("Orchestrator", "Please search."),
        ("WebSurfer", "I clicked a link."),
        ("Orchestrator", "Run it."),
        ("ComputerTerminal", "exitcode: 1"),
    ]
    sent = [(e.agent, e.to, trace.content(e)) for e in trace if isinstance(e, Message)]
    everyone = ("Orchestrator", "WebSurfer", "ComputerTerminal")
    assert sent == [
        ("human", everyone, "Where is the class?"),
        ("Orchestrator", ("WebSurfer",), "Please search."),
        ("WebSurfer", ("human", "Orchestrator", "ComputerTerminal"), "I clicked a link."),
        ("Orchestrator", ("ComputerTerminal",), "Run it."),
        ("ComputerTerminal", ("human", "Orchestrator", "WebSurfer"), "exitcode: 1"),
    ]
    surfer = next(o for o in trace.of("observe") if o.agent == "WebSurfer")
    seen = [trace.content(trace[s.seq]) for s in surfer.sources]  # type: ignore[union-attr]
    assert seen == ["Where is the class?", "Please search."]
    assert [a.id for a in trace.header.agents] == list(everyone)
    assert trace.outcome == 0.0
    assert not validate([trace]).findings


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"mistake_step": "1"}, "where Orchestrator speaks"),
        ({"mistake_step": 99}, "which the history does not have"),
        ({"mistake_step": "third"}, "which the history does not have"),
        ({"mistake_agent": "Nobody"}, "where WebSurfer speaks"),
    ],
)
def test_a_label_that_cannot_be_right_is_w02(
    tmp_path: Path, label: dict[str, Any], message: str
) -> None:
    """A step out of range, no number, or another's is a warning; the run is kept."""
    trace, (finding,) = one(tmp_path, HAND_CRAFTED | label)
    assert (finding.rule, finding.file) == ("W02", str(tmp_path / "1.json"))
    assert message in finding.message
    assert len(trace.of("act")) == 5


def test_a_run_without_a_label_or_outcome_is_only_not_scored(tmp_path: Path) -> None:
    """Missing labels are no disagreement and a missing outcome is no failure."""
    trace, findings = one(tmp_path, {"history": HAND_CRAFTED["history"]})
    assert findings == []
    assert trace.outcome is None
    right, _ = one(tmp_path, {"history": HAND_CRAFTED["history"], "is_correct": True})
    assert right.outcome == 1.0
    odd, (finding,) = one(tmp_path, {"history": [], "is_correct": "no"})
    assert odd.outcome is None
    assert (finding.rule, finding.field) == ("V02", "is_correct")


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (3, "history[1]"),
        ({"content": "who?"}, "history[1]"),
        ({"name": 1.5, "content": "x"}, "history[1].name"),
        ({"name": "a", "role": [], "content": "x"}, "history[1].role"),
        ({"name": "a", "content": {"x": 1}}, "history[1].content"),
    ],
)
def test_an_entry_that_cannot_be_kept_costs_only_itself(
    tmp_path: Path, entry: Any, field: str
) -> None:
    """The finding names it, and the later entries keep their step numbers."""
    good = {"name": "a", "content": "x"}
    trace, (finding,) = one(tmp_path, {"history": [good, entry, good]})
    assert (finding.rule, finding.field) == ("V02", field)
    assert [e.source_id for e in trace.of("act")] == ["0", "2"]


def test_odd_brackets_in_a_role_are_part_of_nothing(tmp_path: Path) -> None:
    """Only ` (…)` at the end is read as what an agent does; anything else is a name."""
    roles = ["A (x", "(thought)", "B (->)", "C (termination condition)", "D (-> )"]
    trace, findings = one(tmp_path, {"history": [{"role": r, "content": "x"} for r in roles]})
    assert findings == []
    assert [agent for agent, _ in words(trace)] == ["A (x", "(thought)", "B", "C", "D"]
    assert [m.agent for m in trace.of("message")] == ["A (x", "(thought)"]
