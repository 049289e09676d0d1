"""Claims about hostile logs: whatever one run holds, it costs at most itself, and is reported."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from counterpoint.formats import export, read
from counterpoint.schema import Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.validate import validate

DATA = Path(__file__).parent / "data"
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((DATA / "mas_rl_v1" / "trace_schema.json").read_text())
)


def _tau() -> list[Any]:
    runs = json.loads(gzip.decompress((DATA / "tau_bench" / "gpt-4o-airline.json.gz").read_bytes()))
    return [{**run, "traj": run["traj"][1:14], "info": {"k": [1]}} for run in runs[:6]]


def _who() -> list[Any]:
    folder = DATA / "who_and_when" / "algorithm_generated"
    runs = [json.loads((folder / f"{n}.json").read_text()) for n in (1, 14, 30)]
    roles = ["human", "Boss (thought)", "Boss (-> Surfer)", "Surfer"]
    said = [{"role": role, "content": role} for role in roles]
    other = {"history": said, "is_corrected": False, "mistake_agent": "Boss", "mistake_step": "2"}
    return [{**run, "history": run["history"][:8]} for run in runs] + [other]


def _survey() -> list[Any]:
    example = json.loads((DATA / "mas_rl_v1" / "example_trace.json").read_text())
    more = json.loads(json.dumps(example))
    for event, kind in zip(
        more["events"], ("human_intervention", "despawn", "safety_event"), strict=False
    ):
        event["type"] = kind
    return [example, more]


def _episodes() -> list[Any]:
    episode = json.loads((DATA / "verifiers" / "episode.json").read_text())
    ours = {"agents": ["a", "b"], "speakers": ["env", "b"], "roles": {"a": "x"}, "untrained": [2]}
    for run in (episode, *episode["traces"]):
        run["task"] = {"key": "q1"}
    for trace in episode["traces"]:
        trace["agent"].pop("config")
    more = json.loads(json.dumps(episode["traces"][0]))
    return [episode, {**more, "info": {"counterpoint": ours}}]


SEEDS = {
    "openai_chat": _tau(),
    "who_and_when": _who(),
    "mas_rl_v1": _survey(),
    "verifiers": _episodes(),
}


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 5, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**63, 10**30),
    *("", " ", "env", "human", "x" * 3000, "\ud800", "a\udfffb", "\x00", '"', "\n", "e1", "e6"),
    *([], {}, [[]], [None], {"": ""}, {"$wtf8": "AA"}, {"$wtf8": "!"}, {"$file": "x", "bytes": 1}),
    *(["a", "b"], {"a": {"b": 1}}, {"\ud800": 1}, _nested(58), _nested(63), _nested(200)),
    *("user", "assistant", "tool", "system", "stop", "delegate", "spawn"),
    *("A (-> B)", "B (thought)"),
]

KEYS = ["id", "name", "role", "reward", "decision", "x\ud800"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a value with every key or index of it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def mutated_value(run: Any, draw: random.Random) -> Any:
    """A copy of a run with one to three places replaced, removed, repeated, swapped or added."""
    run = copy.deepcopy(run)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(run))
        if not places:
            break
        held, key = draw.choice(places)
        what, hostile = draw.randrange(6), copy.deepcopy(draw.choice(HOSTILE))
        if what == 0:
            del held[key]
        elif what == 1 and isinstance(held, list):
            held.insert(draw.randint(0, len(held)), copy.deepcopy(held[key]))
        elif what == 2:
            other, place = draw.choice(places)
            held[key] = copy.deepcopy(other[place])
        elif what == 3 and isinstance(held, dict):
            held[draw.choice(KEYS)] = hostile
        else:
            held[key] = hostile
    return run


def mutated_bytes(line: bytes, draw: random.Random) -> bytes:
    """A line with one to four bytes or stretches changed, removed, doubled or put in."""
    data = bytearray(line)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice([1, 1, 1, 5, 50]))
        what = draw.randrange(4)
        if what == 0:
            data[at:end] = bytes(draw.randrange(256) for _ in range(end - at))
        elif what == 1:
            del data[at:end]
        elif what == 2:
            data[at:at] = data[at:end]
        else:
            data[at:at] = draw.choice([b'"', b"{", b"]", b",", b"\\", b"\xf0", b"\xff\xfe", b"NaN"])
    return bytes(data).replace(b"\n", b" ")


def imported(path: Path, format: str) -> tuple[list[Trace], list[Finding]]:
    findings: list[Finding] = []
    return list(read(path, format, findings=findings)), findings


def check_traces(traces: list[Trace], folder: Path, format: str) -> None:
    """They survive the disk, break no rule about causes or trust, and export to valid documents."""
    out = folder / "out.jsonl"
    out.write_bytes(b"".join(export("counterpoint", traces)))
    findings: list[Finding] = []
    assert list(read(out, findings=findings)) == traces
    assert findings == []
    broken = {"V03", "V04"} | ({"V10"} if format != "mas_rl_v1" else set())
    assert not [f for f in validate(traces).findings if f.rule in broken]
    for trace in traces:
        try:
            (line,) = export("mas_rl_v1", [trace])
        except Refused:
            continue
        SCHEMA.validate(json.loads(line))


def check_findings(findings: list[Finding], path: Path) -> None:
    for finding in findings:
        assert finding.rule in ("V01", "V02", "V04", "W02")
        assert finding.file == str(path)
        assert finding.message
        assert finding.line is not None
        if finding.rule == "V02":
            assert finding.field or "no run of format" in finding.message
        str(finding).encode()


def fuzz(format: str, folder: Path, rounds: int, seed: int) -> None:
    """Between two sound runs, one that was damaged: the sound ones come out as if alone."""
    draw = random.Random(seed)
    path = folder / "runs.jsonl"
    seeds = SEEDS[format]
    ends = json.dumps(seeds[0]).encode(), json.dumps(seeds[1]).encode()
    path.write_bytes(b"\n".join(ends))
    alone, before = imported(path, format)
    for number in range(rounds):
        run = draw.choice(seeds)
        if number % 2:
            line = json.dumps(mutated_value(run, draw)).encode()
        else:
            line = mutated_bytes(json.dumps(run).encode(), draw)
        path.write_bytes(b"\n".join((ends[0], line, ends[1])))
        traces, findings = imported(path, format)
        kept = [trace for trace in traces if trace.header.trace_id in {t.trace_id for t in alone}]
        assert kept == alone or traces[1:2] == alone[:1], f"round {number} of seed {seed}"
        assert len(traces) in (2, 3) or line[:1] == b"["
        if len(traces) == 2:
            assert len(findings) > len(before), f"round {number} of seed {seed} lost a run silently"
        check_findings(findings, path)
        if number % 4 == 0 or len(findings) > len(before):
            check_traces(traces[1:2], folder, format)


@pytest.mark.slow
@pytest.mark.parametrize("format", SEEDS)
def test_a_damaged_run_costs_at_most_itself(format: str, tmp_path: Path) -> None:
    """700 damaged runs of each format: no traceback, each rejection placed, the neighbours kept."""
    fuzz(format, tmp_path, 700, 1)


@pytest.mark.soak
@pytest.mark.parametrize("format", SEEDS)
@pytest.mark.parametrize("seed", range(2, 12))
def test_twenty_thousand_damaged_runs(format: str, seed: int, tmp_path: Path) -> None:
    """The same with 20,000, under other seeds."""
    fuzz(format, tmp_path, 670, seed)


@pytest.mark.slow
@pytest.mark.parametrize("format", SEEDS)
def test_a_damaged_file_is_read_to_its_end(format: str, tmp_path: Path) -> None:
    """A list of runs damaged anywhere, plain or gzip: an answer, never a traceback."""
    draw = random.Random(7)
    whole = json.dumps(SEEDS[format]).encode()
    path = tmp_path / "runs.json"
    for number in range(300):
        data = mutated_bytes(whole, draw)
        if number % 3 == 0:
            data = mutated_bytes(gzip.compress(whole, mtime=0), draw)
        if number % 3 == 1:
            data = data[: draw.randrange(len(data))]
        path.write_bytes(data)
        traces, findings = imported(path, format)
        assert findings or len(traces) >= 1
        assert all(f.file == str(path) and f.message for f in findings)
