"""Claims about reading logs from files, folders and globs, and about the table of formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from counterpoint.formats import FORMATS, Tally, export, read
from counterpoint.recorder import Recorder
from counterpoint.schema import Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.store import read_file

DATA = Path(__file__).parent / "data"
EXAMPLES = {
    "openai_chat": DATA / "tau_bench" / "gpt-4o-airline.json.gz",
    "who_and_when": DATA / "who_and_when" / "algorithm_generated" / "1.json",
    "mas_rl_v1": DATA / "mas_rl_v1" / "example_trace.json",
    "verifiers": DATA / "verifiers" / "episode.json",
}


def chat(*words: str, **about: Any) -> dict[str, Any]:
    """A run of one question and one answer per word."""
    messages = []
    for word in words:
        messages += [{"role": "user", "content": word}, {"role": "assistant", "content": word * 2}]
    return {"messages": messages, **about}


def imported(path: Path, format: str = "openai_chat") -> tuple[list[Trace], list[Finding], Tally]:
    findings: list[Finding] = []
    tally = Tally()
    return list(read(path, format, findings=findings, tally=tally)), findings, tally


def tasks(traces: list[Trace]) -> list[str | None]:
    return [trace.header.task_id for trace in traces]


@pytest.mark.parametrize("format", EXAMPLES)
def test_an_imported_file_reads_back_as_the_same_traces(format: str, tmp_path: Path) -> None:
    """What an importer makes is finished, digested, and survives the disk without a finding."""
    traces, _, tally = imported(EXAMPLES[format], format)
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(export("counterpoint", traces)))
    findings: list[Finding] = []
    again = list(read(out, findings=findings))
    assert again == traces
    assert findings == []
    assert all(t.seal is not None and t.seal.digest == t.digest for t in again)
    assert tally.traces == len(traces)
    assert tally.events == sum(len(t) for t in traces)


@pytest.mark.parametrize("format", EXAMPLES)
def test_importing_twice_gives_the_same_bytes(format: str) -> None:
    """No clock and no random id enters an import."""
    first, second = (list(read(EXAMPLES[format], format)) for _ in range(2))
    assert b"".join(export("counterpoint", first)) == b"".join(export("counterpoint", second))
    assert {t.header.env.id for t in first if t.header.env} == {f"imported:{format}"}


def test_the_table_says_what_read_and_export_do() -> None:
    """Every format of the table is readable, and export takes exactly those said to be writable."""
    assert all(row.reads for row in FORMATS.values())
    assert {"counterpoint", *EXAMPLES} == set(FORMATS)
    for name, row in FORMATS.items():
        if not row.writes:
            with pytest.raises(Refused, match="there is no format"):
                export(name, [])
        else:
            assert list(export(name, [])) == []


def test_unknown_names_are_refused_with_those_that_exist(tmp_path: Path) -> None:
    """A wrong format or anchor is a sentence at the call, before anything is read."""
    with pytest.raises(Refused, match=r"'openai'.*openai_chat"):
        read(tmp_path / "x.json", "openai")
    with pytest.raises(Refused, match="last_message, last_tool, history"):
        read(tmp_path / "x.json", "openai_chat", anchor="lastmessage")  # type: ignore[arg-type]


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    """2.json comes before 10.json, other files are passed over, and a glob chooses among them."""
    for n in (10, 2, 1):
        (tmp_path / f"{n}.json").write_text(json.dumps(chat("hi", task_id=n)))
    (tmp_path / "LICENSE").write_text("not a log")
    assert tasks(imported(tmp_path)[0]) == ["1", "2", "10"]
    assert tasks(list(read(str(tmp_path / "1*.json"), "openai_chat"))) == ["1", "10"]


def test_a_folder_of_our_own_files_is_read_like_a_file(tmp_path: Path) -> None:
    """Without a format a folder means its .jsonl and .jsonl.gz files, in numeric order."""
    for n in (10, 9):
        with Recorder(tmp_path / f"{n}.jsonl") as recorder, recorder.trace(task_id=str(n)) as t:
            t.act("a", "hello")
    zipped = gzip.compress((tmp_path / "10.jsonl").read_bytes())
    (tmp_path / "10.jsonl").unlink()
    (tmp_path / "10.jsonl.gz").write_bytes(zipped)
    (tmp_path / "notes.json").write_text("{}")
    findings: list[Finding] = []
    assert tasks(list(read(tmp_path, findings=findings))) == ["9", "10"]
    assert findings == []


@pytest.mark.parametrize("format", [None, "openai_chat"])
def test_a_path_that_means_no_file_is_refused_by_name(format: str | None, tmp_path: Path) -> None:
    """A missing file, a folder without logs and a glob without matches are sentences."""
    with pytest.raises(Refused, match=r"nowhere.*No such file"):
        list(read(tmp_path / "nowhere.json", format))
    with pytest.raises(Refused, match="holds no file"):
        list(read(tmp_path, format))
    with pytest.raises(Refused, match="no file matches"):
        list(read(str(tmp_path / "*.jsonl"), format))


def test_the_same_run_twice_keeps_both_with_ids_of_their_own(tmp_path: Path) -> None:
    """Equal runs in one file stay two traces; the id of the first is the same in another file."""
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([chat("a"), chat("a"), chat("b")]))
    ids = [t.trace_id for t in imported(path)[0]]
    assert ids[1] == f"{ids[0]}-2"
    assert len(set(ids)) == 3
    path.write_text(json.dumps(chat("a")))
    assert imported(path)[0][0].trace_id == ids[0]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["runs.jsonl", "runs.json", "runs.jsonl.gz"])
def test_json_lines_of_runs_are_read_line_by_line(tmp_path: Path, name: str, ending: str) -> None:
    """JSON Lines are known by name or by an object that ends on its line; BOM and CRLF are fine."""
    text = ending.join(json.dumps(chat("hi", task_id=n)) for n in range(3)) + ending
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    traces, findings, _ = imported(tmp_path / name)
    assert tasks(traces) == ["0", "1", "2"]
    assert findings == []


def test_a_broken_line_costs_only_itself(tmp_path: Path) -> None:
    """A line that is no JSON is a finding with file and line; the lines around it are kept."""
    path = tmp_path / "runs.jsonl"
    good = [json.dumps(chat("hi", task_id=n)) for n in (1, 2)]
    path.write_text(f"{good[0]}\n{{'single': 'quotes'}}\n\n{good[1]}\n[1, 2]\n7\n")
    traces, findings, _ = imported(path)
    assert tasks(traces) == ["1", "2"]
    assert [(f.rule, f.file, f.line) for f in findings[:1]] == [("V01", str(path), 2)]
    assert {f.line for f in findings} == {2, 5, 6}


def test_a_broken_element_of_a_list_costs_only_itself(tmp_path: Path) -> None:
    """In a list of runs a word that is no JSON, or nesting too deep to parse, is skipped."""
    good = [json.dumps(chat("hi", task_id=n)) for n in (1, 2, 3)]
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path = tmp_path / "runs.json"
    path.write_text(f'[{good[0]}, {{"messages": nul}}, {good[1]},\n{deep}, {good[2]}]')
    traces, findings, _ = imported(path)
    assert tasks(traces) == ["1", "2", "3"]
    assert [(f.rule, f.line) for f in findings] == [("V01", 1), ("V01", 2)]


def test_a_list_cut_short_keeps_what_was_complete(tmp_path: Path) -> None:
    """A file that ends in the middle of a run gives the runs before it, and findings."""
    text = json.dumps([chat("hi", task_id=n) for n in range(4)])
    path = tmp_path / "runs.json"
    path.write_text(text[:-30])
    traces, findings, _ = imported(path)
    assert tasks(traces) == ["0", "1", "2"]
    assert findings
    assert all(f.rule == "V01" and f.file == str(path) for f in findings)


def test_a_damaged_gzip_gives_what_could_be_unpacked(tmp_path: Path) -> None:
    """A truncated gzip file is reported as such and its complete runs are kept."""
    lines = "".join(json.dumps(chat(str(n) * 50, task_id=n)) + "\n" for n in range(50))
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-20])
    traces, findings, _ = imported(path)
    assert tasks(traces)[:3] == ["0", "1", "2"]
    assert any("cut short" in f.message for f in findings)


@pytest.mark.parametrize("content", ["", " \n\n", "[]", "null", '"text"', "{}", "3 4", "{", "\0"])
@pytest.mark.parametrize("format", EXAMPLES)
def test_a_file_without_a_run_says_so(tmp_path: Path, content: str, format: str) -> None:
    """Whatever a file holds instead of runs, the answer is a finding that names the file."""
    path = tmp_path / "x.json"
    path.write_text(content)
    traces, findings, _ = imported(path, format)
    assert traces == []
    assert findings
    assert all(f.file == str(path) and f.message for f in findings)


def test_a_key_that_stands_twice_is_reported(tmp_path: Path) -> None:
    """Which of two values was meant cannot be known: the last is kept, and it is said."""
    path = tmp_path / "x.json"
    path.write_text('{"messages": [{"role": "user", "content": "a", "content": "b"}]}')
    traces, findings, _ = imported(path)
    assert [e.content for e in traces[0].of("message")] == ["b"]  # type: ignore[union-attr]
    assert "'content' stands twice" in findings[0].message


def test_a_byte_that_is_not_utf8_is_reported_and_recoverable(tmp_path: Path) -> None:
    """The byte 0xF0 in a content is reported with its line; the byte comes back from the trace."""
    path = tmp_path / "x.jsonl"
    bad = json.dumps(chat("Q")).encode().replace(b'"Q"', b'"a\xf0b"')
    path.write_bytes(json.dumps(chat("ok")).encode() + b"\n" + bad + b"\n")
    traces, findings, _ = imported(path)
    assert [(f.rule, f.line) for f in findings] == [("V01", 2)]
    assert "0xf0" in findings[0].message
    words = traces[1].of("message")[0].content  # type: ignore[union-attr]
    assert words.encode("utf-8", "surrogateescape") == b"a\xf0b"
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(export("counterpoint", traces)))
    assert list(read_file(out)) == traces


def test_reading_our_own_form_counts_it_too() -> None:
    """The tally of our own files holds traces, events and edges by basis."""
    traces = list(read(EXAMPLES["mas_rl_v1"], "mas_rl_v1"))
    tally = Tally()
    for trace in traces:
        tally.add(trace)
    assert (tally.edges_recorded, dict(tally.edges_inferred)) == (8, {"outcome": 3})


@pytest.mark.parametrize("format", EXAMPLES)
def test_findings_name_run_and_field(format: str, tmp_path: Path) -> None:
    """A run that is no object is rejected by its position, and the next one is read."""
    good = json.loads(
        gzip.decompress(p) if (p := EXAMPLES[format].read_bytes())[:1] == b"\x1f" else p
    )
    good = good[0] if isinstance(good, list) else good
    path = tmp_path / "x.json"
    path.write_text(json.dumps([good, 17, good]))
    traces, findings, _ = imported(path, format)
    assert len(traces) == 2
    rejected = [f for f in findings if f.rule == "V02"]
    assert [(f.file, f.field) for f in rejected] == [(str(path), "run")]
    assert "run 1: run is a number, not an object" in rejected[0].message
