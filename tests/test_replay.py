"""Replay: what each of three modes names, what is only folded, what is refused and how."""

import random
from pathlib import Path

import msgspec
import pytest

from counterpoint.credit import grpo
from counterpoint.envs import ENVS, make
from counterpoint.formats import read
from counterpoint.harness import rollout, sealed
from counterpoint.policies import Output
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.redrive import Divergence, replay
from counterpoint.schema import (
    Act,
    Cause,
    Intervene,
    Item,
    Observe,
    ToolResult,
    Trace,
    encode,
)
from counterpoint.spelling import Refused, freeze
from counterpoint.steps import Steps
from counterpoint.validate import validate
from counterpoint.world import fold
from little_envs import Doors, Fog, Office

GOLDEN = Path(__file__).parent / "data/golden_traces"
SHORT = {"limits": {"turns": 24}}


def played(env, policies=None, **options):
    given = {"groups": 2, "rollouts": 2, "seed": 3, "config": SHORT, **options}
    return rollout(env, policies or Softmax(), **given)


def with_event(trace, seq, /, **fields):
    """The trace with one event changed by hand; its seal is left as it was."""
    events = list(trace.events)
    events[seq] = msgspec.structs.replace(events[seq], **fields)
    return Trace(trace.header, tuple(events), trace.seal)


def with_header(trace, **fields):
    return Trace(msgspec.structs.replace(trace.header, **fields), trace.events, trace.seal)


def seqs(trace, kind):
    return [event.seq for event in trace.events if isinstance(event, kind)]


def by_mode(told):
    return {found.mode: found for found in told.diverged}


# -- what is identical ----------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Doors, Fog, Office])
def test_untouched_runs_are_identical_in_all_three_modes(env):
    """What was recorded is what the run gives again, acts included, after any other run."""
    traces = played(env(), groups=4, rollouts=4)
    told = replay(traces, env=env(), policies=Softmax())
    assert told == (16, 16, 0, (), {})


@pytest.mark.parametrize("name", ENVS)
def test_runs_of_the_table_replay_from_their_header_alone(name, tmp_path):
    """Environment and an empty table of logits are found by what the header says, from the file."""
    with Recorder(tmp_path / "r.jsonl") as rec:
        rollout(make(name), Softmax(), groups=3, rollouts=2, recorder=rec)
    assert replay(read(tmp_path / "r.jsonl")) == (6, 6, 0, (), {})


@pytest.mark.soak
def test_a_thousand_runs_are_identical():
    """P8 at full size: 1,000 seeded runs refolded and re-driven to the same bytes."""
    for seed in range(10):
        traces = played(Office(), groups=25, rollouts=4, seed=seed)
        assert replay(traces, env=Office(), policies=Softmax()).identical == 100
        assert [fold(t).digest() for t in traces] == [fold(t).digest() for t in traces]


def test_no_traces_give_zeros():
    """An empty iterable is not an error."""
    assert replay([]).as_dict() == {"traces": 0, "identical": 0, "folded_only": 0, "diverged": []}


def test_options_of_the_environment_are_part_of_what_is_replayed():
    """An environment with other options is another environment, and its header says so."""
    trace = played(Doors(color="red"))[0]
    assert replay(trace, env=Doors(color="red"), policies=Softmax()).identical == 1
    with pytest.raises(Refused, match=r"was played in doors-v0 with digest .*, not in doors-v0"):
        replay(trace, env=Doors(), policies=Softmax())


# -- what each mode names -------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Doors, Fog, Office])
def test_a_tool_result_changed_by_hand_is_named_by_mode_2(env):
    """The harness computes each result again, so the changed one itself is the first to differ."""
    changed = 0
    for trace in played(env()):
        for seq in seqs(trace, ToolResult):
            forged = with_event(trace, seq, content_raw=freeze("forged"))
            found = by_mode(replay(forged, env=env(), policies=Softmax()))
            assert (found[2].seq, found[2].trace_id) == (seq, trace.trace_id)
            assert found[2].what.startswith("content")
            assert "forged" in found[2].what
            assert found[1].seq is None
            assert 3 not in found
            changed += 1
    assert changed > 3


def test_a_forger_who_seals_again_is_found_by_mode_2_alone():
    """The seal vouches for the bytes, re-drive for the world that made them."""
    trace = played(Doors())[0]
    forged = with_event(trace, seqs(trace, ToolResult)[0], content_raw=freeze("prize!"))
    told = replay(sealed(forged), env=Doors(), policies=Softmax())
    assert [found.mode for found in told.diverged] == [2]


@pytest.mark.parametrize("env", [Doors, Fog, Office])
def test_an_act_changed_by_hand_is_named_by_mode_3(env):
    """P8: the policy, asked again, says what it had said; no earlier event differs."""
    draw = random.Random(5)
    for trace in played(env(), groups=4):
        seq = draw.choice(seqs(trace, Act))
        seen = next(e for e in reversed(trace.events[:seq]) if isinstance(e, Observe))
        other = draw.choice([t for _, t in seen.legal if t != trace[seq].text])
        forged = with_event(trace, seq, text_raw=freeze(other))
        found = by_mode(replay(forged, env=env(), policies=Softmax()))
        assert found[3].seq == seq
        assert found[3].what.startswith("text")
        assert 2 not in found or found[2].seq >= seq


@pytest.mark.soak
def test_two_hundred_changed_acts_are_named():
    """P8 at full size."""
    for seed in range(50):
        for trace in played(Office(), seed=seed):
            seq = random.Random(seed).choice(seqs(trace, Act))
            forged = with_event(trace, seq, text_raw=freeze("none of it"))
            assert by_mode(replay(forged, env=Office(), policies=Softmax()))[3].seq == seq


def test_a_changed_seed_is_seen_by_the_seal_and_moves_nothing_without_chance():
    """Doors draws no noise: from the recorded acts everything comes out as before."""
    trace = played(Doors(), Scripted(lambda seen, legal: next(iter(legal.values()))))[0]
    other = with_header(trace, seed=trace.header.seed + 1)
    told = replay(
        other, env=Doors(), policies=Scripted(lambda seen, legal: next(iter(legal.values())))
    )
    assert [(found.seq, found.mode) for found in told.diverged] == [(None, 1)]
    assert "digest" in told.diverged[0].what


def test_a_changed_seed_is_named_by_mode_2_where_a_tool_draws():
    """Dice fall by the trace's seed, so the first throw that falls otherwise is named."""
    trace = next(t for t in played(Office(), groups=6) if len(t.of("tool_result")) > 6)
    found = by_mode(
        replay(with_header(trace, seed=trace.header.seed + 1), env=Office(), policies=Softmax())
    )
    assert isinstance(trace[found[2].seq], ToolResult)


def test_a_run_that_was_cut_short_goes_on_when_re_driven():
    """A seal over fewer events than the run had: the first missing one is named."""
    trace = played(Doors())[0]
    told = replay(sealed(trace[:7]), env=Doors(), policies=Softmax())
    assert told.diverged == (
        Divergence(trace.trace_id, 7, 2, "the record ends, the run goes on with tool_result"),
    )


def test_a_run_that_goes_on_after_its_end_is_named_there():
    """An event that nobody would have made."""
    trace = played(Doors())[0]
    more = msgspec.structs.replace(trace.events[-1], seq=len(trace))
    told = replay(
        sealed(Trace(trace.header, (*trace.events, more))), env=Doors(), policies=Softmax()
    )
    assert [(d.seq, d.mode) for d in told.diverged] == [(len(trace), 2)]
    assert "the run is over here" in told.diverged[0].what


def test_counts_that_do_not_agree_with_the_seal_are_said():
    """Mode 1 names the number of events before the digest."""
    trace = played(Doors())[0]
    short = Trace(trace.header, trace.events[:-1], trace.seal)
    what = by_mode(replay(short, env=Doors(), policies=Softmax()))[1].what
    assert "counts 10 events, the trace holds 9" in what


def test_one_bad_trace_does_not_hide_the_others():
    """Each trace is replayed for itself, and the sums add up."""
    traces = played(Doors())
    traces[1] = with_event(traces[1], 7, content_raw=freeze("forged"))
    told = replay(traces, env=Doors(), policies=Softmax())
    assert (told.traces, told.identical, told.folded_only) == (4, 3, 0)
    assert {found.trace_id for found in told.diverged} == {traces[1].trace_id}


# -- what policies and people are asked for -------------------------------------------------------


def test_acts_of_a_policy_that_is_not_deterministic_are_given_and_counted():
    """Mode 3 does not pretend: what did not act again is counted by role."""
    team = {"scout": lambda seen, legal, draws: "message leader: 1", "leader": Softmax()}
    trace = played(Doors(), team)[0]
    told = replay(trace, env=Doors(), policies=team)
    assert (told.identical, told.unacted) == (1, {"scout": 1})
    assert "1 acts of scout did not act again" in str(told)
    forged = with_event(trace, 1, text_raw=freeze("message leader: 2"))
    assert 3 not in by_mode(replay(forged, env=Doors(), policies=team))


def test_turns_with_items_of_their_own_are_not_parsed_again():
    """An endpoint's tool calls come as items without spans; their text may look like anything."""

    def endpoint(seen, legal, draws):
        if seen.role == "scout":
            said = Item(verb="message", name=("leader",), content_raw=freeze("two"))
            return Output("message leader: this is prose", [said])
        return Output('call open {"door": 0}', [])  # prose too: no items, so nothing is opened

    trace = played(Doors(), endpoint, config={"limits": {"turns": 4}})[0]
    assert [e.content for e in trace.of("message")] == ["two", "two"]
    assert replay(trace, env=Doors(), policies=endpoint).identical == 1


def test_what_a_human_allowed_is_part_of_the_record():
    """Consent and refusal stand in the record and are given again; nobody is asked twice."""
    ask = {"permissions": [{"effect": "ask", "name": "open"}], **SHORT}
    asked = []

    def human(seen, item):
        asked.append(item)
        return len(asked) % 2 == 0

    traces = played(Doors(), config=ask, human=human)
    dos = {e.do for t in traces for e in t.of("intervene")}
    before = len(asked)
    assert dos == {"consent", "refuse"}
    assert replay(traces, env=Doors(), policies=Softmax()).identical == len(traces)
    assert len(asked) == before


def test_a_human_edit_is_given_and_what_follows_from_it_is_computed():
    """A message muted by hand: nobody computes the hand, the rest follows from it."""
    trace = played(Doors())[0]
    sent = trace.of("message")[0]
    hand = Intervene(
        trace_id=trace.trace_id, seq=3, agent="human", do="mute", target=sent.seq, trust="human",
        causes=(Cause(seq=sent.seq, kind="guards"),),
    )  # fmt: skip
    told = replay(
        sealed(Trace(trace.header, (*trace.events[:3], hand))), env=Doors(), policies=Softmax()
    )
    # the message was muted, so no delivery comes next: the leader sees nothing but the question
    assert told.diverged[0].what == "the record ends, the run goes on with observe"


# -- folded only, and refused ---------------------------------------------------------------------


def test_what_was_not_played_here_is_folded_and_counted(tmp_path):
    """Imports, own loops, forks and unsealed traces: nothing is claimed of them."""
    with Recorder(tmp_path / "own.jsonl") as rec, rec.trace(task_id="x") as own:
        own.act("a", "hello")
        own.stop("a")
    unsealed = played(Doors())[0][:9]
    own_trace = next(iter(read(tmp_path / "own.jsonl")))
    assert replay([own_trace, unsealed]).as_dict() == {
        "traces": 2, "identical": 0, "folded_only": 2, "diverged": [],
    }  # fmt: skip


def test_imported_runs_are_folded_only():
    """tau-bench's public runs have an environment of their own that nobody here can reset."""
    path = Path(__file__).parent / "data/tau_bench/gpt-4o-airline.json.gz"
    told = replay(read(path, format="openai_chat"))
    assert told.traces == told.folded_only == 200


def test_the_seal_of_a_trace_that_is_only_folded_is_still_checked(tmp_path):
    """Mode 1 needs no environment."""
    with Recorder(tmp_path / "own.jsonl") as rec, rec.trace(task_id="x") as own:
        own.act("a", "hello")
    text = (tmp_path / "own.jsonl").read_text().replace("hello", "hullo")
    (tmp_path / "own.jsonl").write_text(text)
    told = replay(read(tmp_path / "own.jsonl"))
    assert (told.folded_only, [d.mode for d in told.diverged]) == (0, [1])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("harness", r"harness version 99, this is version \d+: replay it with the release"),
        ("grammar", r"grammar version 99, this is version \d+: replay it with the release"),
    ],
)
def test_another_version_has_a_sentence_of_its_own(setting, sentence):
    """A run is replayed by the harness that its header names, or not at all."""
    trace = played(Doors())[0]
    config = {**trace.header.config, setting: 99}
    with pytest.raises(Refused, match=sentence):
        replay(with_header(trace, config_raw=freeze(config)), env=Doors())


def test_policies_that_did_not_play_are_refused():
    """A table with other logits is another policy; to act with it would prove nothing."""
    trace = played(Doors())[0]
    other = Softmax({"x": {"1": 2.0}})
    with pytest.raises(
        Refused, match=r"scout was played by tabular:.*give the policies that played"
    ):
        replay(trace, env=Doors(), policies=other)


def test_an_environment_outside_the_table_has_to_be_given():
    """The sentence says how."""
    with pytest.raises(
        Refused, match=r"'doors-v0' is no environment of the table; give it as env="
    ):
        replay(played(Doors())[0])


def test_a_trace_does_not_say_which_code_is_run(tmp_path, monkeypatch):
    """A header's texts are hostile: neither environment nor policies load a file of code."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("raise SystemExit('evil ran')\nEnv = None\n")
    trace = played(Doors())[0]
    env = msgspec.structs.replace(trace.header.env, id="evil.py:Env")
    with pytest.raises(Refused, match="give it as env="):
        replay(with_header(trace, env=env))
    policies = {
        role: msgspec.structs.replace(ref, target="evil.py:Env")
        for role, ref in trace.header.policies.items()
    }
    told = replay(with_header(trace, policies=policies), env=Doors())
    assert told.unacted == {"scout": 1, "leader": 1}


def test_a_table_is_loaded_from_the_file_that_its_target_names(tmp_path, monkeypatch):
    """By its digest: what is there under that name but has other logits does not act."""
    table = Softmax({"x": {"1": 2.0}})
    table.save(tmp_path / "t.json")
    trace = played(Doors(), table)[0]
    refs = {
        role: msgspec.structs.replace(ref, target=f"tabular:{tmp_path / 't.json'}")
        for role, ref in trace.header.policies.items()
    }
    assert replay(trace, env=Doors()).unacted == {"scout": 1, "leader": 1}
    named = sealed(Trace(msgspec.structs.replace(trace.header, policies=refs), trace.events))
    assert replay(named, env=Doors()) == (1, 1, 0, (), {})


@pytest.mark.slow
@pytest.mark.parametrize("env", [Doors, Office])
def test_damaged_traces_are_named_or_refused_and_never_a_traceback(env):
    """Any field of any event replaced by that of another: a divergence or a sentence."""
    draw = random.Random(11)
    traces = played(env())
    for _ in range(80):
        trace = draw.choice(traces)
        seq = draw.randrange(len(trace))
        event = trace.events[seq]
        other = draw.choice([e for e in trace.events if e.kind == event.kind])
        name = draw.choice(event.__struct_fields__)
        damaged = [
            with_event(trace, seq, **{name: getattr(other, name)}),
            Trace(trace.header, (*trace.events[:seq], *trace.events[seq + 1 :]), trace.seal),
            Trace(trace.header, (*trace.events[:seq], other, *trace.events[seq:]), trace.seal),
        ]
        for case in damaged:
            told = replay(case, env=env(), policies=Softmax())
            same = b"".join(map(encode, case.events)) == b"".join(map(encode, trace.events))
            assert same == (not told.diverged), (seq, name)


# -- P9, P10 --------------------------------------------------------------------------------------


def test_everything_recomputes_from_the_file_alone(tmp_path):
    """P9: what each agent read, rewards, masks and advantages, from the file as from memory."""
    read_by = []

    class Watching(Softmax):
        """The same table; it notes what it was shown."""

        def __call__(self, observation, legal, draws):
            read_by.append((observation.agent, [turn.text for turn in observation.messages()]))
            return super().__call__(observation, legal, draws)

    with Recorder(tmp_path / "r.jsonl") as rec:
        live = played(Office(), Watching(), groups=2, rollouts=3, recorder=rec)
    stored = list(read(tmp_path / "r.jsonl"))
    assert stored == live
    said = [(t, act) for t in stored for act in t.of("act")]
    assert len(said) == len(read_by)
    for (trace, act), (agent, texts) in zip(said, read_by, strict=True):
        shown = [trace[seq] for seq in fold(trace[: act.seq]).agents[agent].context]
        assert len(shown) == len(texts)
        for event, text in zip(shown, texts, strict=True):
            words = event.text if event.kind == "act" else trace.content(event)
            if isinstance(words, str):
                assert words in text
    a, b = Steps.from_traces(live), Steps.from_traces(stored)
    for name in ("reward", "outcome", "mask", "n_tokens"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    assert grpo(a).values.tobytes() == grpo(b).values.tobytes()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda p: p.stem)
def test_golden_traces_stay_readable_and_replay(path):
    """P10: files of every format version are read, validated, folded and replayed for ever."""
    findings = []
    traces = list(read(path, findings=findings))
    assert traces
    assert not findings
    assert not [f for f in validate(traces).findings if f.rule.startswith("V")]
    lines = path.read_bytes().splitlines()
    again = [encode(x) for t in traces for x in (t.header, *t.events, t.seal)]
    assert sorted(lines) == sorted(again)
    for trace in traces:
        fold(trace)
    ours = {env.id: env for env in (Doors, Fog, Office)}
    for trace in traces:
        name = trace.header.env.id if trace.header.env else None
        told = replay(trace, env=ours[name]() if name in ours else None)
        assert told == ((1, 1, 0, (), {}) if name else (1, 0, 1, (), {}))


def test_the_golden_folder_is_not_empty():
    """A test over no files would prove nothing."""
    assert len(list(GOLDEN.glob("1-*.jsonl"))) >= 4
