"""Claims about hostile input: whatever bytes a file holds, reading ends in records and findings."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from counterpoint.schema import LINES, Event, Finding, encode
from counterpoint.spelling import Refused
from counterpoint.store import read_file, records
from counterpoint.validate import validate

DATA = Path(__file__).parent / "data"
GOLDEN = (DATA / "traces" / "version_1.jsonl").read_bytes().splitlines()

TOKENS = [
    *(
        b"null",
        b"true",
        b"-0",
        b"1e999",
        b"-1e-999",
        b"NaN",
        b"Infinity",
        b"9" * 30,
        b"0.1",
        b"1.0",
    ),
    *(b"[]", b"{}", b"[" * 70, b"]" * 70, b'{"a":' * 70, b"\\", b"\\u", b",", b":", b"\t", b"\r"),
    *(b'"', b'""', b'"\\ud800"', b'"\\ud83c\\udf78"', b"\xf0", b"\xc0\x80", b"\xed\xa0\x80"),
    *(b"\xef\xbb\xbf", b"\x00", b"\x1b[2J", b'"seq":', b'"type":"act"'),
    *(b'"$file"', b'{"$file":"x"}', b'{"$wtf8":"7aCA"}'),
]
VALUES = [
    None,
    -1,
    1.5,
    True,
    "x",
    [],
    {},
    [[1, 2]],
    {"seq": 0, "kind": "derives"},
    1 << 70,
    "\ud800",
]


def foreign_lines() -> list[bytes]:
    """Lines of real logs of others: messages, records, whole documents."""
    with gzip.open(DATA / "tau_bench" / "gpt-4o-airline.json.gz") as file:
        runs = json.load(file)
    lines = [json.dumps(message).encode() for message in runs[0]["traj"]]
    folder = DATA / "who_and_when" / "algorithm_generated"
    lines += [
        line
        for path in sorted(folder.glob("1*.json"))[:5]
        for line in path.read_bytes().splitlines()
    ]
    example = (DATA / "mas_rl_v1" / "example_trace.json").read_bytes()
    return [*lines, *example.splitlines(), json.dumps(json.loads(example)).encode()]


def mutate(line: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """A few of: a flipped bit, a cut, a doubled piece, a hostile token, a splice, a new value."""
    data = bytearray(line)
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.randrange(12))
        match draw.randrange(10):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end]
            case 3:
                data[at:end] = draw.choice(TOKENS)
            case 4:
                other = draw.choice(others)
                data[at:] = other[draw.randrange(len(other) + 1) :]
            case _:
                data = bytearray(_changed_value(bytes(data), draw))
    return bytes(data).replace(b"\n", b" ")


def _changed_value(line: bytes, draw: random.Random) -> bytes:
    """Well-formed JSON with one value, somewhere, put in another's place."""
    try:
        whole = json.loads(line)
    except (ValueError, RecursionError):
        return line
    place = whole
    while isinstance(place, dict | list) and place:
        at = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        if draw.random() < 0.5 or not isinstance(place[at], dict | list):
            place[at] = draw.choice([*VALUES, place[at], str(place[at]) + "\x00é"])
            break
        place = place[at]
    return json.dumps(whole, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def fuzz(path: Path, count: int, seed: int) -> None:
    """`count` mutated lines among whole ones: every whole one is read, every bad one is named."""
    draw = random.Random(seed)
    foreign = foreign_lines()
    good = b'{"type":"custom","trace_id":"whole","seq":%d,"agent":"a","name":"a.b"}'
    lines: list[bytes] = []
    for i in range(count):
        pool = draw.choice([GOLDEN, GOLDEN, foreign])
        lines += [mutate(draw.choice(pool), draw, pool), good % i]
    path.write_bytes(b"\n".join(lines) + b"\n")
    findings: list[Finding] = []
    read = {record.line: record.value for record in records(path, findings)}
    for i in range(count):
        assert encode(read[2 * i + 2]) == good % i
    named: set[int] = set()
    for finding in findings:
        assert finding.rule in ("V01", "V02")
        assert finding.file == str(path)
        assert finding.message
        assert finding.message.isprintable()
        assert finding.rule == "V02" or "byte" in finding.message
        named.add(finding.line)
    for number, line in enumerate(lines, 1):
        assert number in read or number in named or not line.strip(b" \t\r"), line
    assert count / 4 < len(named) < count
    assert len(read) > count * 1.03  # some of what was changed can still be read
    for value in read.values():
        _looked_at(value)
    found: list[Finding] = []
    validate(read_file(path, found), found)


def _looked_at(value: object) -> None:
    """What was read has sound payloads, and is spelled in one way that reads back the same."""
    assert type(value) in LINES.values()
    if isinstance(value, Event):
        for name in ("content", "text", "arguments", "answer", "data", "context"):
            getattr(value, name, None)
        for item in getattr(value, "items", ()):
            _ = item.content
        line = encode(value)
        assert not any(byte < 32 for byte in line)
        line.decode()


def test_two_thousand_fuzzed_lines_are_read_or_named(tmp_path):
    """No exception; each rejection has file, line, rule and reason; the rest is read (P5)."""
    fuzz(tmp_path / "t.jsonl", 2000, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_fuzzed_lines_are_read_or_named(tmp_path, seed):
    """The same at full size (P5), in ten files."""
    fuzz(tmp_path / "t.jsonl", 10_000, seed=100 + seed)


def damaged(folder: Path, count: int, seed: int) -> None:
    """Whole files, damaged as files: nothing but Refused is raised."""
    draw = random.Random(seed)
    whole = b"\n".join(GOLDEN) + b"\n"
    for i in range(count):
        data = mutate(whole, draw, [whole]) if i % 2 else bytearray(whole)
        data = bytearray(data)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data) + 1)
            data[at : at + draw.randrange(200)] = draw.choice(
                [b"", b"\n", b"\n\n", b"\x00" * 40, whole[:300]]
            )
        packed = bytearray(gzip.compress(bytes(data)) if i % 3 == 0 else data)
        if i % 3 == 0 and packed:
            packed[draw.randrange(len(packed))] ^= 1 << draw.randrange(8)
        path = folder / "damaged.jsonl"
        path.write_bytes(packed)
        findings: list[Finding] = []
        try:
            validate(read_file(path, findings), findings)
        except Refused:
            continue


def test_damaged_files_end_in_findings(tmp_path):
    """Holes, zeros, doubled pieces, broken gzip: read, or refused in a sentence."""
    damaged(tmp_path, 150, seed=7)


@pytest.mark.soak
def test_five_thousand_damaged_files_end_in_findings(tmp_path):
    """The same at full size."""
    damaged(tmp_path, 5000, seed=8)
