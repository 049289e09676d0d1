"""Claims about reading: what can be read is read, the rest is named by line, byte and field."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import tracemalloc
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint import store
from counterpoint.schema import Custom, Event, Finding, Header, Seal, Trace, encode
from counterpoint.spelling import MAX_LINE, Refused, freeze
from counterpoint.store import Record, read_file, records, side_records

HEADER = b'{"type":"header","trace_id":"t","counterpoint":1}'


def event(seq: int, own: str = '"name":"a.b"', kind: str = "custom") -> bytes:
    return f'{{"type":"{kind}","trace_id":"t","seq":{seq},"agent":"a",{own}}}'.encode()


def read(path: Path, data: bytes) -> tuple[list[Record], list[Finding]]:
    path.write_bytes(data)
    findings: list[Finding] = []
    return list(records(path, findings)), findings


def sample(events: int, padding: int = 1) -> bytes:
    """A file of two interleaved traces, sealed, with payloads of all sorts."""
    draw = random.Random(5)
    lines = [encode(Header(trace_id=t, counterpoint=1)) for t in "ab"]
    count = {"a": 0, "b": 0}
    for _ in range(events):
        t = draw.choice("ab")
        text = "".join(draw.choice('ab é🍸"\\\n{[') for _ in range(draw.randrange(30)))
        text += "x" * draw.randrange(padding)
        data = freeze(draw.choice([text, {"k": [text, 1.5, None]}, 7, True]))
        lines.append(encode(Custom(trace_id=t, seq=count[t], agent="x", name="a.b", data_raw=data)))
        count[t] += 1
    lines += [encode(Seal(trace_id=t, events=n, digest="0")) for t, n in count.items()]
    return b"\n".join(lines) + b"\n"


# ---------------------------------------------------------------------------------------------
# V01: one UTF-8 JSON object a line

V01 = {
    "bad utf-8": (event(0, '"name":"a.\xf0"').replace("\xf0".encode(), b"\xf0"), "byte 0xf0 at"),
    "bad utf-8 in a payload": (
        event(0, '"name":"a.b","data":"?"').replace(b"?", b"\xf0"),
        "is not UTF-8",
    ),
    "no object": (b"[1,2]", "this one holds a list"),
    "no json": (b'{"type":"custom",', "not JSON"),
    "two values": (event(0) + event(1), "not JSON: extra data"),
    "duplicate key": (event(0, '"name":"a.b","seq":0'), "the key 'seq' stands twice"),
    "duplicate key in a payload": (
        event(0, '"name":"a.b","data":{"k":1,"k":2}'),
        "'k' stands twice",
    ),
    "NaN": (event(0, '"name":"a.b","data":NaN'), "NaN is no JSON number"),
    "infinity": (event(0, '"name":"a.b","data":[-Infinity]'), "-Infinity is no JSON number"),
    "1e999": (event(0, '"name":"a.b","data":1e999'), "1e999 is not finite"),
    "1e999 in a field": (
        event(0, '"name":"a.b"').replace(b'"seq"', b'"t_start":1e999,"seq"'),
        "not finite",
    ),
    "long integer in a payload": (event(0, f'"name":"a.b","data":{1 << 64}'), "more than 64 bits"),
    "long negative": (event(0, f'"name":"a.b","data":[{-(1 << 63) - 1}]'), "more than 64 bits"),
    "digits without end": (event(0, f'"name":"a.b","data":{"9" * 5000}'), "more than 64 bits"),
    "depth 65": (event(0, f'"name":"a.b","data":{"[" * 64}{"]" * 64}'), "deeper than 64"),
    "depth 5,000": (event(0, f'"name":"a.b","data":{"[" * 5000}{"]" * 5000}'), "deeper than 64"),
    "depth with brackets in texts": (
        event(0, f'"name":"a.b","data":{"[" * 64}"[[","]]"{"]" * 64}'),
        "deeper than 64",
    ),
}


@pytest.mark.parametrize("case", V01)
def test_v01_names_line_byte_and_fault_and_reads_the_rest(tmp_path, case):
    """Each clause of V01: one finding on the line, by byte, and the lines around it are read."""
    bad, sentence = V01[case]
    found, findings = read(tmp_path / "t.jsonl", b"\n".join([HEADER, bad, event(1), b""]))
    assert [r.line for r in found] == [1, 3]
    (finding,) = findings
    assert (finding.rule, finding.line, finding.file) == ("V01", 2, str(tmp_path / "t.jsonl"))
    assert sentence in finding.message
    assert f"line starts at byte {len(HEADER) + 1}" in finding.message


def test_what_a_clause_of_v01_still_allows_is_read(tmp_path):
    """Depth 64, the ends of 64 bits, long digits in a text."""
    deep = f'"name":"a.b","data":{"[" * 63}{"]" * 63}'
    ends = f'"name":"a.b","data":[{(1 << 64) - 1},{-(1 << 63)},"{"9" * 50}"]'
    found, findings = read(tmp_path / "t.jsonl", event(0, deep) + b"\n" + event(1, ends) + b"\n")
    assert findings == []
    assert found[1].value.data == [(1 << 64) - 1, -(1 << 63), "9" * 50]


def test_escapes_in_a_foreign_spelling_are_read(tmp_path):
    """Fault 27: an escaped lone surrogate survives, an escaped pair is one character."""
    line = event(0, '"name":"a.b","data":["\\ud800","\\ud83c\\udf78"]')
    (record,), findings = read(tmp_path / "t.jsonl", line)
    assert findings == []
    assert record.value.data == ["\ud800", "🍸"]
    again, _ = read(tmp_path / "u.jsonl", encode(record.value) + b"\n")
    assert again[0].value == record.value


def test_another_spelling_is_the_same_event(tmp_path):
    """Spaces, order of keys, CRLF, exponents, escapes, written-out defaults: the same record."""
    plain = event(0, '"name":"a.b","data":{"k":100.0,"t":"é"}')
    other = (
        b'{ "seq" : 0, "data": {"t": "\\u00e9", "k": 1e2}, "agent": "a", "name": "a.b",'
        b' "trust": "unknown", "trace_id": "t", "type": "custom" }'
    )
    found, findings = read(tmp_path / "t.jsonl", plain + b"\r\n" + other + b"\r\n")
    assert findings == []
    assert found[0].value == found[1].value
    assert encode(found[1].value) == plain


# ---------------------------------------------------------------------------------------------
# V02: fields and types

V02 = {
    "unknown kind": (event(0, kind="mesage"), "type", "did you mean 'message'?"),
    "no type": (b'{"seq":1}', "type", "no kind of line"),
    "type of another type": (b'{"type":["act"]}', "type", "no kind of line"),
    "unknown field": (
        event(0, '"name":"a.b","trustt":"unknown"'),
        "trustt",
        "did you mean 'trust'?",
    ),
    "far unknown field": (event(0, '"name":"a.b","zzzz":1'), "zzzz", "custom has no field 'zzzz'"),
    "wrong type": (event(0, '"name":5'), "name", "name: expected `str`, got `int`"),
    "missing": (event(0, '"data":5'), "name", "missing required field `name`"),
    "null where a value is needed": (event(0, '"name":null'), "name", "got `null`"),
    "no such label": (event(0, '"name":"a","trust":"high"'), "trust", "'high'"),
    "inside a cause": (
        event(0, '"name":"a","causes":[{"seq":"x","kind":"derives"}]'),
        "causes[0].seq",
        "got `str`",
    ),
    "missing in a cause": (
        event(0, '"name":"a","causes":[{"seq":0}]'),
        "causes[0].kind",
        "missing",
    ),
    "no such edge": (
        event(0, '"name":"a","causes":[{"seq":0,"kind":"caused"}]'),
        "causes[0].kind",
        "caused",
    ),
    "unknown in a cause": (
        event(0, '"name":"a","causes":[{"seq":0,"kind":"derives","wherefore":1}]'),
        "causes[0]",
        "`wherefore`",
    ),
    "misspelt in a cause": (
        event(0, '"name":"a","causes":[{"seq":0,"kind":"derives","bases":"x"}]'),
        "causes[0]",
        "did you mean 'basis'?",
    ),
    "too long for a column": (event(1 << 63), "seq", "<="),
    "float for an integer": (event(0).replace(b'"seq":0', b'"seq":0.0'), "seq", "got `float`"),
    "bool for a float": (event(0, '"amount":true', "reward"), "amount", "got `bool`"),
}


@pytest.mark.parametrize("case", V02)
def test_v02_names_the_field_and_reads_the_rest(tmp_path, case):
    """Each clause of V02: the line, the field, what it holds; the lines around it are read."""
    bad, field, sentence = V02[case]
    found, findings = read(tmp_path / "t.jsonl", b"\n".join([HEADER, bad, event(1), b""]))
    assert [r.line for r in found] == [1, 3]
    (finding,) = findings
    assert (finding.rule, finding.line, finding.field) == ("V02", 2, field)
    assert sentence in finding.message


def test_a_finding_says_which_event_it_was_as_far_as_it_can(tmp_path):
    """trace_id and seq are read off an unreadable line."""
    _, (finding,) = read(tmp_path / "t.jsonl", event(17, '"nam":"a"') + b"\n")
    assert (finding.trace_id, finding.seq) == ("t", 17)
    assert str(finding).startswith(f"V02 {tmp_path / 't.jsonl'}:1 trace t event 17: custom has no")


def test_hostile_text_in_a_finding_is_short_and_printable(tmp_path):
    """No control characters and no megabyte of a stranger's text reaches a terminal."""
    for own in (
        '"name":"a","\x1b[31m' + "x" * 9000 + '":1',
        '"name":"a","trust":"\\u001b[31m\\u202e' + "x" * 9000 + '"',
        '"name":"a","data":{"\\u001b":1,"\\u001b":2}',
    ):
        line = event(0, own).replace(b'"t"', b'"t\x1b[2J"')
        _, (finding,) = read(tmp_path / "t.jsonl", line + b"\n")
        text = str(finding).replace(str(tmp_path), "") + (finding.field or "")
        assert text.replace("…", "").isascii()
        assert text.isprintable()
        assert len(text) < 500


# ---------------------------------------------------------------------------------------------
# Bytes and files


def test_byte_order_mark_crlf_and_blank_lines(tmp_path):
    """They are accepted, and line numbers and offsets count as an editor counts."""
    data = b"\xef\xbb\xbf" + HEADER + b"\r\n\r\n  \n" + event(0) + b"\r\nx\r\n" + event(1)
    found, (finding,) = read(tmp_path / "t.jsonl", data)
    assert [r.line for r in found] == [1, 4, 6]
    assert finding.line == 5
    assert f"byte {data.index(b'x' + bytes([13]))}" in finding.message


def test_a_stray_byte_in_the_middle_leaves_the_rest_and_stays_in_the_file(tmp_path):
    """Fault 28: the line is reported by byte, the others are read, the bytes are recoverable."""
    path = tmp_path / "t.jsonl"
    lines = [HEADER, *(event(i, f'"name":"a.b","data":"text {i}"') for i in range(2000))]
    lines[1000] = lines[1000].replace(b"text", b"te\xf0xt")
    found, (finding,) = read(path, b"\n".join(lines) + b"\n")
    assert [r.line for r in found] == [n for n in range(1, 2002) if n != 1001]
    assert (finding.rule, finding.line, finding.trace_id, finding.seq) == ("V01", 1001, "t", 999)
    start = int(re.search(r"starts at byte (\d+)", finding.message)[1])
    at = int(re.search(r"0xf0 at (\d+)", finding.message)[1])
    assert path.read_bytes()[start + at] == 0xF0
    assert path.read_bytes()[start:].split(b"\n")[0] == lines[1000]


def test_a_torn_piece_in_the_middle_is_one_unreadable_line(tmp_path):
    """A crash left half a line and the next recorder ended it: one finding, nothing else lost."""
    torn = event(0)[:40]
    found, (finding,) = read(tmp_path / "t.jsonl", b"\n".join([HEADER, torn, event(0), b""]))
    assert [r.line for r in found] == [1, 3]
    assert finding.line == 2
    assert "not JSON" in finding.message
    assert "incomplete" not in finding.message


def test_an_unended_last_line_is_called_incomplete(tmp_path):
    """It may still be being written; one that is whole is read."""
    found, (finding,) = read(tmp_path / "t.jsonl", HEADER + b"\n" + event(0)[:-5])
    assert len(found) == 1
    assert "incomplete last line, it may still be being written" in finding.message
    found, findings = read(tmp_path / "t.jsonl", HEADER + b"\n" + event(0))
    assert (len(found), findings) == (2, [])


def cut_everywhere(path: Path, data: bytes, cuts: list[int], write: Any) -> None:
    """A file cut at a byte holds exactly the lines that end before it, and names that byte."""
    ends = [i for i, byte in enumerate(data) if byte == 10]
    whole = list(records_of(path, data))
    for cut in cuts:
        write(cut)
        findings: list[Finding] = []
        found = list(records(path, findings))
        complete = bisect_right(ends, cut)
        assert found == whole[:complete], cut
        start = ends[complete - 1] + 1 if complete else 0
        assert len(findings) == (cut > start)
        if findings:
            assert findings[0].line == complete + 1
            assert f"byte {start})" in findings[0].message


def records_of(path: Path, data: bytes) -> list[Record]:
    path.write_bytes(data)
    return list(records(path))


def test_a_file_cut_at_any_byte_gives_the_events_before_the_cut(tmp_path):
    """Recovery is a prefix, at every byte of a small file (P3)."""
    path, data = tmp_path / "t.jsonl", sample(8)
    cut_everywhere(path, data, list(range(len(data) + 1)), lambda n: path.write_bytes(data[:n]))


@pytest.mark.soak
def test_a_megabyte_cut_at_ten_thousand_bytes_gives_the_events_before_the_cut(tmp_path):
    """The same in 10,000 places of a file of a megabyte, from the end backwards (P3)."""
    path, data = tmp_path / "t.jsonl", sample(600, padding=9000)
    assert len(data) > 1 << 20
    cuts = sorted(random.Random(3).sample(range(len(data)), 10_000), reverse=True)
    cut_everywhere(path, data, cuts, lambda n: os.truncate(path, n))


def test_gzip_is_read_like_the_plain_file(tmp_path):
    """Also when it was gzipped in two goes."""
    data = sample(3000)
    plain, _ = read(tmp_path / "t.jsonl", data)
    half = data.index(b"\n", len(data) // 2) + 1
    packed = gzip.compress(data[:half]) + gzip.compress(data[half:])
    found, findings = read(tmp_path / "t.jsonl.gz", packed)
    assert (found, findings) == (plain, [])


def test_a_truncated_gzip_gives_what_it_holds_and_a_finding(tmp_path):
    """Every whole line that the stream still holds is read; the damage is named."""
    data = sample(3000)
    plain, _ = read(tmp_path / "t.jsonl", data)
    packed = gzip.compress(data)
    held = len(packed) // 2
    found, findings = read(tmp_path / "t.jsonl.gz", packed[:held])
    assert 1000 < len(found) < 2000
    assert found == plain[: len(found)]
    assert "gzip stream is damaged or cut short" in findings[0].message
    for cut in range(2, 30):
        found, findings = read(tmp_path / "t.jsonl.gz", packed[:cut])
        assert (found, findings[0].rule) == ([], "V01")
    _, findings = read(tmp_path / "t.jsonl.gz", packed + b"trailing garbage")
    assert "gzip" in findings[0].message
    _, findings = read(tmp_path / "t.jsonl.gz", packed[:held] + b"\xff" * 90 + packed[held + 90 :])
    assert "gzip" in findings[0].message


def test_an_empty_file_holds_nothing(tmp_path):
    """No trace, no finding, no error; and a lone byte-order mark no more than that."""
    assert read(tmp_path / "t.jsonl", b"") == ([], [])
    assert read(tmp_path / "t.jsonl", b"\n\n") == ([], [])
    assert read(tmp_path / "t.jsonl", b"\xef\xbb\xbf") == ([], [])
    assert list(read_file(tmp_path / "t.jsonl")) == []


def test_what_is_no_readable_file_is_refused_in_a_sentence(tmp_path):
    """A folder where a file belongs, a file that is not there, one without permission."""
    with pytest.raises(Refused, match="cannot be read: Is a directory"):
        list(records(tmp_path))
    with pytest.raises(Refused, match=r"none\.jsonl cannot be read: No such file"):
        list(read_file(tmp_path / "none.jsonl"))


def test_a_line_over_the_limit_is_one_finding_and_the_rest_is_read(tmp_path, monkeypatch):
    """At the limit it is read; over it, one finding with its length; memory stays bounded (P6)."""
    assert MAX_LINE == 64 << 20
    limit = 3 * store._CHUNK
    monkeypatch.setattr(store, "MAX_LINE", limit)
    for over, kept in ((-1, 3), (0, 3), (1, 2), (limit * 3, 2)):
        line = event(0, '"name":"a.b","data":"?"')
        line = line.replace(b"?", b"x" * (limit + over - len(line) + 1))
        data = b"\n".join([HEADER, line, event(1), b""])
        found, findings = read(tmp_path / "t.jsonl", data)
        assert len(found) == kept
        assert found[-1] == (3, found[-1].value)
        if over > 0:
            assert findings[0].line == 2
            assert f"{len(line)} bytes on one line" in findings[0].message
            assert f"byte {len(HEADER) + 1})" in findings[0].message
    _, findings = read(tmp_path / "t.jsonl", HEADER + b"\n" + b"x" * limit * 2)
    assert "incomplete last line" in findings[0].message


def test_reading_while_writing_sees_a_prefix_each_time(tmp_path):
    """A reader beside a writer sees whole events only, and more of them later."""
    path, data = tmp_path / "t.jsonl", sample(300)
    whole = records_of(path, data)
    seen = 0
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 577):
            file.write(data[start : start + 577])
            found = list(records(path))
            assert found == whole[: len(found)]
            assert len(found) >= seen
            seen = len(found)
    assert seen == len(whole)


# ---------------------------------------------------------------------------------------------
# Lines become traces


def traces_of(path: Path, *lines: bytes) -> tuple[list[Trace], list[Finding]]:
    path.write_bytes(b"\n".join([*lines, b""]))
    findings: list[Finding] = []
    return list(read_file(path, findings)), findings


SEAL = b'{"type":"seal","trace_id":"t","events":1,"digest":"d"}'


def test_interleaved_traces_come_apart_each_at_its_seal(tmp_path):
    """Events keep their order and the lines that they stood on; the sealed ones come first."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(sample(500) + HEADER + b"\n" + event(0) + b"\n")
    a, b, unsealed = read_file(path)
    assert [t.trace_id for t in (a, b, unsealed)] == ["a", "b", "t"]
    assert unsealed.seal is None
    assert len(a) + len(b) == 500
    lines = path.read_bytes().split(b"\n")
    for trace in (a, b, unsealed):
        assert [e.seq for e in trace] == list(range(len(trace)))
        assert [encode(e) for e in trace] == [lines[n - 1] for n in trace.lines]
        assert trace.file == str(path)


def test_a_trace_without_a_header_is_one_finding(tmp_path):
    """Not one per event; the next trace of the file is read."""
    lines = [event(0), event(1), SEAL, HEADER.replace(b'"t"', b'"u"')]
    (trace,), (finding,) = traces_of(tmp_path / "t.jsonl", *lines)
    assert trace.trace_id == "u"
    assert (finding.rule, finding.line, finding.trace_id) == ("V02", 1, "t")
    assert "no readable header" in finding.message
    _, (finding,) = traces_of(tmp_path / "t.jsonl", SEAL)
    assert "no readable header" in finding.message


def test_lines_after_the_seal_are_reported_each_and_left_out(tmp_path):
    """V13: an event, a second seal, the trace once more."""
    after = [event(1), SEAL, HEADER]
    (trace,), findings = traces_of(tmp_path / "t.jsonl", HEADER, event(0), SEAL, *after)
    assert len(trace) == 1
    assert [(f.rule, f.line, f.seq) for f in findings] == [
        ("V13", 4, 1),
        ("V13", 5, None),
        ("V13", 6, None),
    ]


def test_a_second_header_is_a_finding_and_the_first_is_kept(tmp_path):
    """V02, and the events go on."""
    second = b'{"type":"header","trace_id":"t","counterpoint":1,"task_id":"other"}'
    (trace,), (finding,) = traces_of(tmp_path / "t.jsonl", HEADER, second, event(0), SEAL)
    assert (len(trace), trace.header.task_id) == (1, None)
    assert (finding.rule, finding.line) == ("V02", 2)


def test_late_rewards_and_credit_are_read_beside_the_traces(tmp_path):
    """They are no part of a trace and no stray lines; `side_records` yields them."""
    late = b'{"type":"late_reward","trace_id":"t","digest":"d","amount":1.0}'
    (trace,), findings = traces_of(tmp_path / "t.jsonl", HEADER, event(0), late, SEAL)
    assert (len(trace), findings) == (1, [])
    (side,) = side_records(tmp_path / "t.jsonl")
    assert side.amount == 1.0


def test_a_side_file_is_loaded_checked_and_missed(tmp_path):
    """Present: its content. Missing, altered, or no digest: a finding, and the event is read."""
    path = tmp_path / "t.jsonl"
    content = {"big": "x" * 50}
    data = bytes(freeze(content))
    digest = store.digest_of(data).hex()
    reference = {"$file": digest, "bytes": len(data)}
    line = event(0, f'"name":"a.b","data":{json.dumps(reference, separators=(",", ":"))}')
    folder = tmp_path / "t.jsonl.files"
    folder.mkdir()
    (folder / digest).write_bytes(data)
    (trace,), findings = traces_of(path, HEADER, line, SEAL)
    assert findings == []
    assert store.side_content(path, trace[0].data) == content
    (folder / digest).write_bytes(data.replace(b"x", b"y"))
    (trace,), (finding,) = traces_of(path, HEADER, line, SEAL)
    assert (len(trace), finding.rule, finding.line, finding.seq) == (1, "V02", 2, 0)
    assert "does not hold the bytes" in finding.message
    (folder / digest).unlink()
    _, (finding,) = traces_of(path, HEADER, line, SEAL)
    assert "cannot be read: No such file" in finding.message
    hostile = event(0, '"name":"a.b","data":{"$file":"../../etc/passwd"}')
    _, (finding,) = traces_of(path, HEADER, hostile, SEAL)
    assert "is no digest of a side file" in finding.message
    with gzip.open(f"{path}.gz", "wb") as packed:
        packed.write(HEADER + b"\n" + line + b"\n")
    (folder / digest).write_bytes(data)
    findings = []
    assert len(list(read_file(f"{path}.gz", findings))) == 1
    assert findings == []


@pytest.mark.slow
def test_memory_grows_with_open_traces_and_not_with_the_file(tmp_path):
    """200 traces one after the other take no more than 20 of them."""

    def peak(traces: int) -> int:
        path = tmp_path / f"{traces}.jsonl"
        with path.open("wb") as file:
            for i in range(traces):
                name = f'"t{i}"'.encode()
                lines = [
                    HEADER,
                    *(event(s, f'"name":"a.b","data":"{"x" * 300}"') for s in range(200)),
                    SEAL,
                ]
                file.write(b"\n".join(lines).replace(b'"t"', name) + b"\n")
        tracemalloc.start()
        assert sum(1 for _ in read_file(path)) == traces
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(200) < 1.5 * peak(20)


def test_the_fast_way_and_the_slow_way_agree(tmp_path):
    """Reading whole pieces finds what reading line by line finds."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(sample(300))
    together = list(records(path))
    alone = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        path.write_bytes(b"\n" * (number - 1) + line + b" \n")
        alone += records(path)
    assert together == alone
    assert all(isinstance(r.value, Event | Header | Seal) for r in together)
    assert msgspec.json.encode(together[5].value)
