"""Claims about the vocabulary: a file written today is readable, and means the same, for ever."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import UNSET, Raw, Struct

from counterpoint import schema
from counterpoint.schema import (
    KINDS,
    LINES,
    Act,
    Cause,
    Finding,
    ForkRef,
    Header,
    Message,
    Reward,
    Seal,
    Trace,
    chain,
    decode,
    encode,
    header_digest,
)
from counterpoint.spelling import freeze
from counterpoint.store import read_file, records
from counterpoint.validate import validate

GOLDEN = Path(__file__).parent / "data" / "traces" / "version_1.jsonl"
"""Written by hand, every field of every kind; its digests were made with hashlib alone."""

VOLATILE = "trace_id t_start t_end cost_usd source_id"
COMMON = f"{VOLATILE} seq agent causes trust tokens_in tokens_out trainable"
FIELDS = {
    "header": "trace_id writer started meta counterpoint task_id group_id rollout_id env task_seed "
    "seed config tools policies topology agents possible_agents fork delivery",
    "observe": f"{COMMON} sources content template context kept prompt_digest anchor state_digest "
    "legal",
    "act": f"{COMMON} text items token_ids logprobs mask policy_version value",
    "spawn": f"{COMMON} item span child child_role context tools",
    "despawn": f"{COMMON} item span child status",
    "delegate": f"{COMMON} item span to content waits",
    "message": f"{COMMON} item span to content channel",
    "deliver": f"{COMMON} message",
    "tool_call": f"{COMMON} item span tool arguments call_index verdict rule",
    "tool_result": f"{COMMON} call content error bytes",
    "write": f"{COMMON} item span artefact version base_version reads content conflict",
    "agent_return": f"{COMMON} item span to content status",
    "aggregate": f"{COMMON} item span inputs content rule",
    "stop": f"{COMMON} item span reason answer truncated",
    "reward": f"{COMMON} amount family channel unit target source verifiable error_rate anneal",
    "intervene": f"{COMMON} do target replaces content",
    "safety": f"{COMMON} rule effect target",
    "custom": f"{COMMON} name data",
    "seal": "trace_id events kinds tokens_in tokens_out cost_usd dropped digest",
    "late_reward": "trace_id digest amount family channel unit target source verifiable error_rate "
    "judge judge_version",
    "credit": "trace_id digest method params estimand identified unit target value policy_version "
    "update",
    "Cause": "seq kind basis",
    "Source": "seq tokens",
    "Item": "verb name span body content tokens logprob",
    "Read": "artefact version",
    "Target": "seq item agent role",
    "Anneal": "weight step",
    "EnvRef": "id digest",
    "PolicyRef": "target version params_digest deterministic",
    "AgentRef": "id role",
    "ForkRef": "trace_id seq digest do level branch streams keys",
}
REQUIRED = {
    "header": "trace_id counterpoint",
    **dict.fromkeys(KINDS, "trace_id seq agent"),
    "spawn": "trace_id seq agent child",
    "despawn": "trace_id seq agent child",
    "delegate": "trace_id seq agent to",
    "message": "trace_id seq agent to",
    "deliver": "trace_id seq agent message",
    "tool_call": "trace_id seq agent tool",
    "write": "trace_id seq agent artefact version",
    "agent_return": "trace_id seq agent to",
    "intervene": "trace_id seq agent do",
    "safety": "trace_id seq agent rule effect",
    "custom": "trace_id seq agent name",
    "seal": "trace_id events digest",
    "late_reward": "trace_id digest",
    "credit": "trace_id digest method estimand identified unit target",
    "Cause": "seq kind",
    "Source": "seq",
    "Item": "verb",
    "Read": "artefact version",
    "Target": "",
    "Anneal": "weight step",
    "EnvRef": "id",
    "PolicyRef": "",
    "AgentRef": "id role",
    "ForkRef": "trace_id seq digest do",
}
DEFAULTS: dict[tuple[str, str], Any] = {
    **{(kind, "causes"): () for kind in KINDS},
    **{(kind, "trust"): "unknown" for kind in KINDS},
    **{(kind, "trainable"): False for kind in KINDS},
    ("header", "tools"): {},
    ("header", "policies"): {},
    ("header", "topology"): "unknown",
    ("header", "agents"): (),
    ("header", "delivery"): "implicit",
    ("observe", "sources"): (),
    ("observe", "context"): "append",
    ("observe", "kept"): (),
    ("act", "items"): (),
    ("despawn", "status"): "completed",
    ("delegate", "waits"): False,
    ("tool_call", "call_index"): 0,
    ("write", "reads"): (),
    ("write", "conflict"): False,
    ("agent_return", "status"): "completed",
    ("aggregate", "inputs"): (),
    ("stop", "reason"): "unknown",
    ("stop", "truncated"): False,
    ("reward", "family"): "R1",
    ("reward", "channel"): "team",
    ("late_reward", "family"): "R1",
    ("late_reward", "channel"): "team",
    ("seal", "kinds"): {},
    ("seal", "dropped"): 0,
    ("Cause", "basis"): "recorded",
    ("Item", "name"): (),
    ("PolicyRef", "deterministic"): False,
    ("ForkRef", "branch"): 0,
    ("ForkRef", "streams"): "branch",
    ("ForkRef", "keys"): (),
}
"""What absent means where it does not mean None or, for a payload, absent."""
PAYLOADS = {
    "header": "meta config",
    "observe": "content",
    "act": "text",
    "spawn": "context",
    "delegate": "content",
    "message": "content",
    "tool_call": "arguments",
    "tool_result": "content",
    "write": "content",
    "agent_return": "content",
    "aggregate": "content",
    "stop": "answer",
    "intervene": "content",
    "custom": "data",
    "credit": "params",
    "Item": "content",
}
STRUCTS: dict[str, type[Struct]] = LINES | {
    name: getattr(schema, name) for name in FIELDS if name[0].isupper()
}


@pytest.fixture(scope="module")
def golden() -> list[bytes]:
    return GOLDEN.read_bytes().splitlines()


def test_every_struct_of_the_format_is_pinned_here():
    """No struct joins the format without its fields being written down in this file."""
    parts = {
        name
        for name, cls in vars(schema).items()
        if isinstance(cls, type)
        and issubclass(cls, schema.Part)
        and cls not in (schema.Part, schema.Event, schema.Effect, *LINES.values())
    }
    assert set(FIELDS) == set(LINES) | parts
    assert list(LINES) == list(FIELDS)[: len(LINES)]
    assert tuple(KINDS.values()) == get_args(schema.AnyEvent)


@pytest.mark.parametrize("name", FIELDS)
def test_the_order_of_fields_never_changes(name):
    """The order on disk is part of the format, since digests go over the bytes."""
    assert STRUCTS[name].__struct_encode_fields__ == tuple(FIELDS[name].split())


@pytest.mark.parametrize("name", FIELDS)
def test_a_default_once_released_never_changes(name):
    """Absent means for ever what it meant when the line was written."""
    payloads = PAYLOADS.get(name, "").split()
    required = []
    for field in msgspec.structs.fields(STRUCTS[name]):
        made = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if made else field.default
        if default is msgspec.NODEFAULT:
            required.append(field.encode_name)
        else:
            expected = DEFAULTS.get(
                (name, field.encode_name), UNSET if field.encode_name in payloads else None
            )
            assert default == expected
            assert type(default) is type(expected)
        assert field.name.endswith("_raw") == (field.encode_name in payloads)
    assert required == REQUIRED[name].split()


@pytest.mark.parametrize("name", FIELDS)
def test_structs_are_frozen_keyword_only_and_refuse_what_they_do_not_know(name):
    """`kw_only` is not inherited: a forgotten one would let a new field move the others."""
    config = STRUCTS[name].__struct_config__
    assert config.frozen
    assert config.omit_defaults
    assert config.forbid_unknown_fields
    with pytest.raises(TypeError, match="positional"):
        STRUCTS[name]("x")


def test_a_line_begins_with_its_type_and_the_volatile_fields(golden):
    """Digest and reader find `type` first, the volatile fields before `seq`, the rest after."""
    for line in golden:
        value = json.loads(line)
        keys = list(value)
        assert keys[0] == "type"
        if value["type"] in KINDS:
            assert set(keys[1 : keys.index("seq")]) <= set(VOLATILE.split())
            assert not set(keys[keys.index("seq") :]) & set(VOLATILE.split())


def test_the_golden_file_holds_every_field_of_every_kind(golden):
    """What is pinned below is the whole format."""
    seen: dict[str, set[str]] = {kind: set() for kind in LINES}
    for line in golden:
        value = json.loads(line)
        seen[value.pop("type")] |= set(value)
    common = set(COMMON.split())
    missing = {kind: set(FIELDS[kind].split()) - found for kind, found in seen.items()}
    missing["seal"].discard("dropped")  # 0 in every trace, and 0 is not written
    assert not any(missing[kind] - common for kind in missing), missing
    assert common <= set.union(*(seen[kind] for kind in KINDS))


def test_every_line_of_the_golden_file_is_read_and_written_back_byte_for_byte(golden):
    """A file of format version 1 stays readable, and our spelling of it stays the same."""
    findings: list[Finding] = []
    for line, record in zip(golden, records(GOLDEN, findings), strict=True):
        assert encode(record.value) == line
        assert decode(line) == record.value
    assert findings == []
    assert validate(read_file(GOLDEN)).findings == []


def test_the_golden_values_mean_what_they_meant(golden):
    """Some values of the golden file, looked at through the structs."""
    main, fork = read_file(GOLDEN)
    assert len(main) == 19
    assert main[1].text == "spawn w\nask é 🍸"
    assert main[1].items[1].content == {"why": None}
    assert main[1].logprobs == (-0.1, -0.2, 0.0)
    assert main[8].content == "\ud800"
    assert main[0].legal == (("ask", "message w"), ("end", "stop"))
    assert main[18].target.role == "orchestrator"
    assert main[18].anneal.weight == 0.5
    assert main.outcome is None  # its one reward is an agent's own
    assert fork.first == 5
    assert fork[5].replaces == 5
    assert fork.header.fork.keys == ((0, "k0"), (5, "k1"))


def test_the_digest_is_the_published_formula(golden):
    """H chained over type and everything from `seq` on, made here with hashlib alone."""

    def blake(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    states: dict[str, bytes] = {}
    at_fork = b""
    for line in golden:
        value = json.loads(line)
        kind, trace_id = value["type"], value["trace_id"]
        if kind == "header":
            states[trace_id] = blake(line[line.index(b'"counterpoint":') :])
            if value.get("fork"):
                assert value["fork"]["digest"] == at_fork.hex()
                states[trace_id] = blake(states[trace_id] + at_fork.hex().encode())
        elif kind in KINDS:
            if value["seq"] == 5 and trace_id == "golden-1":
                at_fork = states[trace_id]
            tail = line[line.index(b'"seq":') :]
            states[trace_id] = blake(states[trace_id] + kind.encode() + tail)
    for trace in read_file(GOLDEN):
        assert trace.digest == states[trace.trace_id].hex() == trace.seal.digest


def test_the_header_digest_ignores_who_when_and_notes():
    """trace_id, writer, started and meta may change; nothing else may."""
    header = decode(GOLDEN.read_bytes().splitlines()[0])
    same = msgspec.structs.replace(
        header, trace_id='"counterpoint":', writer=None, started=1.0, meta_raw=freeze('"seq":')
    )
    assert header_digest(same) == header_digest(header)
    for name in FIELDS["header"].split()[4:]:
        field = f"{name}_raw" if name == "config" else name
        default = getattr(Header(trace_id="x", counterpoint=2), field)
        if getattr(header, field) != default:
            changed = msgspec.structs.replace(header, **{field: default})
            assert header_digest(changed) != header_digest(header), name


def test_the_digest_of_an_event_ignores_its_volatile_fields_only():
    """Even volatile text that spells `"seq":` does not move where the digest begins."""
    start = b"0" * 16
    event = Message(trace_id="t", seq=3, agent="a", to=("b",), content_raw=freeze("c"))
    moved = msgspec.structs.replace(
        event, trace_id='"seq":9', source_id='","seq":7,"', t_start=1.0, t_end=2.0, cost_usd=3.0
    )
    assert chain(start, encode(moved)) == chain(start, encode(event))
    other = {"seq": 4, "agent": "b", "causes": (Cause(seq=0, kind="derives"),), "trust": "human"}
    other |= {"tokens_in": 1, "tokens_out": 1, "trainable": True, "to": ("c",), "channel": "x"}
    for name, value in (other | {"content_raw": freeze("d"), "item": 1, "span": (0, 1)}).items():
        changed = msgspec.structs.replace(event, **{name: value})
        assert chain(start, encode(changed)) != chain(start, encode(event)), name


def test_the_type_is_inside_the_digest():
    """A message that is turned into a delegation is another event, with equal fields."""
    line = encode(Message(trace_id="t", seq=0, agent="a", to=("b",)))
    turned = line.replace(b'"type":"message"', b'"type":"delegate"')
    assert isinstance(decode(turned), schema.Delegate)
    assert chain(b"", turned) != chain(b"", line)


def flips(count: int, seed: int) -> list[tuple[int, int]]:
    """Bits of the golden trace outside the volatile fields: (byte, bit)."""
    inside, offset = [], 0
    for line in GOLDEN.read_bytes().splitlines(keepends=True)[:21]:
        start = line.index(b'"counterpoint":') if b'"header"' in line[:17] else 0
        start = start or (line.index(b'"seq":') if b'"seq":' in line else 0)
        inside += range(offset + start, offset + len(line) - 1)
        offset += len(line)
    draw = random.Random(seed)
    return [(draw.choice(inside), draw.randrange(8)) for _ in range(count)]


def unseen(folder: Path, count: int, seed: int) -> list[tuple[int, int]]:
    data = b"".join(GOLDEN.read_bytes().splitlines(keepends=True)[:21])
    missed = []
    path = folder / "flipped.jsonl"
    for at, bit in flips(count, seed):
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        findings: list[Finding] = []
        report = validate(read_file(path, findings), findings)
        if report.traces == 1 and not report.broken:
            missed.append((at, bit))
    return missed


@pytest.mark.slow
def test_a_flipped_bit_is_seen(tmp_path):
    """One bit flipped outside the volatile fields of a sealed trace is always a finding."""
    assert unseen(tmp_path, 250, seed=1) == []


@pytest.mark.soak
def test_twenty_thousand_flipped_bits_are_seen(tmp_path):
    """The same at full size (P4)."""
    assert unseen(tmp_path, 20_000, seed=2) == []


def test_deleted_swapped_and_repeated_events_are_seen(tmp_path):
    """An event that is missing, moved or written twice is a finding in a sealed trace (P4)."""
    lines = GOLDEN.read_bytes().splitlines(keepends=True)[:21]
    path = tmp_path / "t.jsonl"
    for i in range(1, 20):
        for changed in (
            lines[:i] + lines[i + 1 :],
            [*lines[:i], lines[i], *lines[i:]],
            [*lines[:i], *reversed(lines[i : i + 2]), *lines[i + 2 :]],
        ):
            path.write_bytes(b"".join(changed))
            findings: list[Finding] = []
            assert validate(read_file(path, findings), findings).broken, i


def test_a_prefix_is_a_trace_and_an_index_is_a_seq():
    """trace[:t] excludes the event t, keeps the header, and has no seal."""
    main, fork = read_file(GOLDEN)
    prefix = main[:5]
    assert [event.seq for event in prefix] == [0, 1, 2, 3, 4]
    assert prefix.header is main.header
    assert prefix.seal is None
    assert prefix.digest == fork.header.fork.digest
    assert main[:0].digest == header_digest(main.header).hex()
    assert [event.seq for event in fork[:6]] == [5]
    assert fork[6].kind == "stop"
    with pytest.raises(IndexError, match="no event 4"):
        fork[4]
    with pytest.raises(schema.Refused, match="prefix"):
        main[2:5]
    with pytest.raises(schema.Refused, match="no event kind 'mesage'"):
        main.of("mesage")


def test_content_of_an_effect_may_be_a_span_of_its_act():
    """An effect without content says what its span of the act's text says, or nothing where the
    trace does not hold the act.
    """
    act = Act(trace_id="t", seq=0, agent="a", text_raw=freeze("say: 🍸 to b"))
    link = (Cause(seq=0, kind="authorizes"),)
    sent = Message(trace_id="t", seq=1, agent="a", to=("b",), span=(5, 6), causes=link)
    own = msgspec.structs.replace(sent, content_raw=freeze("own"))
    trace = Trace(Header(trace_id="t", counterpoint=1), (act, sent))
    assert trace.content(sent) == "🍸"
    assert trace.content(own) == "own"
    stray = (Cause(seq=7, kind="authorizes"),)
    assert trace.content(msgspec.structs.replace(sent, causes=stray)) is None


def test_the_outcome_is_the_team_s_and_none_where_nothing_was_scored():
    """Missing is not zero; other channels are quality; costs (R7) count; an agent has its own."""

    def outcome(*rewards: dict[str, Any]) -> float | None:
        made = [Reward(trace_id="t", seq=i, agent="env", **r) for i, r in enumerate(rewards)]
        return Trace(Header(trace_id="t", counterpoint=1), tuple(made)).outcome

    assert outcome() is None
    assert outcome({"amount": None}) is None
    assert outcome({"amount": 0.0}) == 0.0
    assert outcome({"amount": 1.0}, {"amount": 2.0, "channel": "style"}) == 1.0
    cost = {"amount": -0.25, "channel": "cost", "family": "R7"}
    assert outcome({"amount": 1.0}, cost) == 0.75
    assert outcome({"amount": 1.0}, {"amount": 5.0, "target": schema.Target(agent="a")}) == 1.0


def test_a_payload_is_decoded_when_it_is_looked_at():
    """Reading keeps the bytes; equality and the struct do not need the value."""
    event = decode(b'{"type":"custom","trace_id":"t","seq":0,"agent":"a","name":"x.y","data":[1]}')
    assert event.data_raw == Raw(b"[1]")
    assert event.data == [1]
    assert Seal(trace_id="t", events=1, digest="d").kinds == {}
    assert ForkRef(trace_id="t", seq=1, digest="d", do="keep").keys == ()


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 10**30])
def test_no_integer_of_the_format_exceeds_a_column(number):
    """Integers outside 64 bits with sign are refused wherever a field holds one."""
    lines = [
        f'{{"type":"header","trace_id":"t","counterpoint":{number}}}',
        f'{{"type":"header","trace_id":"t","counterpoint":1,"seed":{number}}}',
        f'{{"type":"deliver","trace_id":"t","seq":{number},"agent":"a","message":0}}',
        f'{{"type":"act","trace_id":"t","seq":0,"agent":"a","token_ids":[{number}]}}',
        f'{{"type":"seal","trace_id":"t","events":1,"kinds":{{"act":{number}}},"digest":"d"}}',
    ]
    for line in lines:
        with pytest.raises(msgspec.ValidationError):
            decode(line.encode())
