"""The stage as a state machine: who acts when, what an item brings about, how a run ends."""

import math
from itertools import pairwise

import msgspec
import pytest

from counterpoint.envs import Amount, tool
from counterpoint.formats import read
from counterpoint.harness import next_event, rollout
from counterpoint.harness.run import Run
from counterpoint.policies import Output
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.provenance import Labelled
from counterpoint.recorder import Recorder
from counterpoint.schema import Act, Cause, Intervene, Item, Safety
from counterpoint.spelling import freeze
from counterpoint.world import fold
from stages import begun, blocks, edges, go, names, played, room, sound, team

# -- a turn ----------------------------------------------------------------------------------------


def test_a_run_by_hand():
    """Two agents, one call, one message, an answer: every event, every edge, trust and clock, as
    the format page asks for them.
    """
    env = room({"a": ["mark", "message"], "b": ["stop"]}, observe="go", agents=["a", "b"])
    trace = played(env, team(a=["call mark {}\nmessage b: hi"], b=["stop: done"]))
    got = [(f"{e.kind} {e.agent}", edges(trace, e), e.trust, (e.t_start, e.t_end)) for e in trace]
    assert got == [
        ("observe a", set(), "trusted", (0.0, 0.0)),
        ("act a", {"derives 0"}, "trusted", (0.0, 1.0)),
        ("tool_call a", {"authorizes 1"}, "trusted", (1.0, 1.0)),
        ("tool_result a", {"answers 2"}, "untrusted", (1.0, 1.5)),
        ("message a", {"authorizes 1"}, "trusted", (1.0, 1.0)),
        ("deliver b", {"delivers 4"}, "trusted", (1.0, 1.0)),
        # what b is told comes from a room that a's call has changed, and the room chose b's turn
        (
            "observe b",
            {"consumes 4", "derives 3 environment", "precedes 5 turn"},
            "untrusted",
            (1.5, 1.5),
        ),
        ("act b", {"derives 6"}, "untrusted", (1.5, 2.5)),
        ("stop b", {"authorizes 7"}, "untrusted", (2.5, 2.5)),
    ]
    assert [len(act.items) for act in trace.of("act")] == [2, 1]
    assert trace.of("stop")[0].reason == "answered"
    assert trace.of("stop")[0].answer == "done"
    assert not trace.of("stop")[0].truncated
    assert trace.of("tool_call")[0].verdict == "allow"
    assert trace.of("tool_call")[0].rule == "list"


def test_a_message_arrives_as_a_turn_that_says_whose_it_is():
    """It is a user turn of the receiver whose origin is the sender; its own turns are assistant
    turns; and the whole context keeps the order.
    """
    seen = []

    def listen(observation, menu):
        seen.append((observation.turns, observation.messages(), observation.turn))
        return "thanks" if len(seen) == 1 else "stop: x"

    env = room({"a": ["message"], "b": ["stop"]}, agents=["a", "b"], observe="your turn")
    played(env, team(a=["message b: look it up"], b=listen))
    (new, whole, turn), (_, whole2, turn2) = seen
    assert [(t.role, t.origin) for t in new] == [("user", "a"), ("user", "env")]
    assert blocks(new[0].text) == [Labelled("look it up", "a", "trusted")]
    assert (new[1].text, turn, turn2) == ("your turn", 0, 1)
    assert whole == list(new)
    assert [t.role for t in whole2] == ["user", "user", "assistant", "user", "user"]
    assert whole2[2].text == "thanks"
    assert whole2[2].origin == "b"


def test_a_message_to_several_goes_to_each_of_them_once():
    """Also to one who is named twice, and to oneself."""
    env = room({"a": ["message"], "b": []}, agents=["a", "b"])
    trace = played(env, team(a=["message b, a, b: hi", "hm"], b=["hm"]), limits={"turns": 3})
    (message,) = trace.of("message")
    assert message.to == ("b", "a")
    assert [d.agent for d in trace.of("deliver")] == ["b", "a"]


def test_mail_is_sent_then_delivered_then_consumed():
    """At each prefix a message is in one place; the fold of the file alone knows which."""
    env = room({"a": ["message"], "b": ["stop"]}, agents=["a", "b"])
    trace = played(env, team(a=["message b: hi"], b=["stop: x"]))
    sent, delivered = trace.of("message")[0].seq, trace.of("deliver")[0].seq
    shown = trace.of("observe")[1].seq

    def place(t):
        b = fold(trace[:t]).agents["b"]
        return sent in b.mail, sent in b.inbox, sent in b.seen

    assert [place(sent), place(sent + 1)] == [(False, False, False), (True, False, False)]
    assert place(delivered + 1) == (False, True, False)
    assert place(shown + 1) == (False, False, True)


def test_no_edge_from_turns_where_the_environment_does_not_order_them():
    """Without an order of turns two agents' lives run beside each other: nothing of b descends
    from a.
    """
    env = room({"a": ["look"], "b": ["look", "stop"]})
    trace = played(env, team(a=["call look {}"], b=["call look {}", "stop: x"]))
    b = trace.of("observe")[1]
    assert (b.agent, edges(trace, b)) == ("b", {f"precedes {b.seq - 1} order"})


def test_the_environment_is_shared_state():
    """A result follows the last one that may have changed the room, across agents; a pure tool and
    a denied call change nothing and break no chain.
    """
    env = room({"a": ["mark", "look"], "b": ["mark"]}, agents=["a", "b"])
    script = team(
        a=["call mark {}\ncall look {}\ncall nowhere {}\ncall mark {}"], b=["call mark {}"]
    )
    trace = played(env, script, limits={"turns": 2})
    first, looked, denied, second, other = trace.of("tool_result")
    assert denied.error == "denied: unknown tool"
    assert edges(trace, looked) == {f"answers {looked.call}"}
    assert edges(trace, denied) == {f"answers {denied.call}"}
    assert edges(trace, second) == {f"answers {second.call}", f"derives {first.seq} environment"}
    assert edges(trace, other) == {f"answers {other.call}", f"derives {second.seq} environment"}


# -- decisions -------------------------------------------------------------------------------------

EVERYTHING = ["spawn", "delegate", "message", "aggregate", "stop"]


def test_each_decision_that_was_possible_and_not_taken_is_a_no_op():
    """All five without a menu; what the list or a rule forbids, and a spawn at the limit of agents,
    was not possible.
    """
    env = room({"a": [*EVERYTHING, "look"], "b": []})

    def declined(**config):
        return [i.verb for i in played(env, team(a=["hm"], b=["hm"]), **config).of("act")[0].items]

    limits = {"turns": 1}
    assert declined(limits=limits) == [f"no_{verb}" for verb in EVERYTHING]
    rule = {"effect": "deny", "name": "message"}
    assert "no_message" not in declined(limits=limits, permissions=[rule])
    assert "no_spawn" not in declined(limits={"turns": 1, "agents": 2})
    assert "no_spawn" in declined(limits={"turns": 1, "agents": 3})


def test_with_a_menu_possible_is_what_an_entry_would_do():
    """And the probability of taking or declining is the sum over the entries that do, or do not:
    .5 + .2 for a message, .2 + .1 for a stop.
    """
    menu = {
        "tell": "message b: x",
        "both": "message b: y\nstop: y\nspawn b: never reached",
        "end": "stop: z",
        "wait": "none",
    }
    chances = [0.5, 0.2, 0.1, 0.2]
    logits = {"here": dict(zip(menu, map(math.log, chances), strict=True))}
    env = room({"a": EVERYTHING, "b": []}, legal=menu, anchor="here", start={"a": "a", "b": "b"})
    seen = {}
    for seed in range(40):
        env_trace = played(env, Softmax(logits), seed=seed, limits={"turns": 1})
        (act,) = env_trace.of("act")
        label = next(k for k, text in menu.items() if text == act.text)
        seen[label] = {i.verb: math.exp(i.logprob) for i in act.items if i.logprob is not None}
        assert math.exp(act.logprobs[0]) == pytest.approx(chances[list(menu).index(label)])
    take, leave = pytest.approx(0.7), pytest.approx(0.7)
    assert seen["tell"] == {"message": take, "no_stop": leave}
    assert seen["both"] == {"message": take, "stop": pytest.approx(0.3)}
    assert seen["end"] == {"no_message": pytest.approx(0.3), "stop": pytest.approx(0.3)}
    assert seen["wait"] == {"no_message": pytest.approx(0.3), "no_stop": leave}


def test_what_follows_a_stop_is_dropped_where_the_agent_may_stop():
    """Items after it are no part of the act; for one who may not stop they stand."""
    env = room({"a": ["stop", "look"], "b": ["look"]}, agents=["b", "a"])
    trace = played(env, team(a=["stop: x\ncall look {}"], b=["stop: x\ncall look {}"]))
    b, a = trace.of("act")
    assert [i.verb for i in a.items] == ["stop"]
    assert [i.verb for i in b.items] == ["stop", "call"]
    assert names(trace)[2:5] == ["safety harness", "tool_call b", "tool_result b"]


def test_a_spawn_names_the_child_after_its_spawner_and_count():
    """The count goes over spawns and declined spawns, whatever else happened; both sides learn of
    it: the child its task, the spawner the child's id.
    """
    heard = {}

    def child(observation, menu):
        heard[observation.agent] = [block.text for block in blocks(observation.text)]
        return "ok"

    def boss(observation, menu):
        heard.setdefault("boss", []).extend(block.text for block in blocks(observation.text))
        turns = ["hm", "spawn w: one\nspawn w: two", "stop: x"]
        return turns[observation.turn]

    env = room({"boss": ["spawn", "stop"], "w": []}, start={"boss": "boss"})
    trace = played(env, team(boss=boss, w=child))
    assert [s.child for s in trace.of("spawn")] == ["boss.1", "boss.2"]
    assert heard["boss.1"] == ["one"]
    assert heard["boss.2"] == ["two"]
    assert heard["boss"] == ["spawned boss.1", "spawned boss.2"]
    spawn = trace.of("spawn")[0].seq
    first = next(e for e in trace.of("observe") if e.agent == "boss.1")
    assert edges(trace, first) == {f"spawns {spawn}", f"consumes {spawn}"}


def test_a_delegation_is_waited_for_until_its_return():
    """The sender takes no turn in between; the return goes to it and closes the job."""
    env = room({"a": ["delegate", "stop"], "b": ["return"]}, start={"a": "a", "b": "b"})
    trace = played(env, team(a=["delegate b: count", "stop: x"], b=["hm", "hm", "return: 3"]))
    assert [act.agent for act in trace.of("act")] == ["a", "b", "b", "b", "a"]
    (back,) = trace.of("agent_return")
    assert back.to == ("a",)
    assert f"returns {trace.of('delegate')[0].seq}" in edges(trace, back)


def test_a_return_without_a_job_is_blocked():
    """There is nobody it could go to."""
    env = room({"b": ["return", "stop"]})
    trace = played(env, team(b=["return: 3", "stop: x"]))
    assert [s.rule for s in trace.of("safety")] == ["no open delegation"]


def test_a_muted_delegate_releases_its_waiter_and_reaches_nobody():
    """Muting keeps the event, so the sender believes it; nothing arrives and nobody waits."""
    env = room({"a": ["delegate", "stop"], "b": ["return"]}, start={"a": "a", "b": "b"})
    run = begun(env, team(a=["delegate b: x", "stop: y"], b=["hm"]))
    sent = go(run, lambda e: e.kind == "delegate").seq
    run.emit(
        Intervene(
            trace_id=run.header.trace_id,
            seq=sent + 1,
            agent="human",
            causes=(Cause(seq=sent, kind="derives"),),
            trust="human",
            do="mute",
            target=sent,
        )
    )
    go(run)
    assert run.trace().of("deliver") == []
    assert [a.agent for a in run.trace().of("act")] == ["a", "b", "a"]


def test_a_despawn_releases_who_waits_and_ends_what_the_child_may_do():
    """Mail to the dead is blocked; an agent that ends itself does nothing more in that turn."""
    env = room(
        {"a": ["delegate", "message", "stop"], "b": ["despawn", "look"]},
        start={"a": "a", "b": "b"},
    )
    script = team(a=["delegate b: x", "message b: y\nstop: z"], b=["despawn b\ncall look {}"])
    trace = played(env, script)
    assert [s.rule for s in trace.of("safety")] == ["despawned", "no such agent"]
    assert trace.of("tool_call") == []


def test_an_aggregate_takes_what_came_since_the_last_one():
    """Messages, results and returns that were shown, each once."""
    env = room({"a": ["aggregate", "look", "stop"], "b": ["message"]}, agents=["b", "a"])
    script = team(
        b=["message a: one"],
        a=["call look {}", "aggregate sum: 1", "aggregate: 2\nstop: x"],
    )
    trace = played(env, script)
    told = [m.seq for m in trace.of("message")]
    looked = trace.of("tool_result")[0].seq
    first, second = trace.of("aggregate")
    assert set(first.inputs) == {told[0], told[1], looked}
    assert second.inputs == (told[2],)
    assert (first.rule, second.rule) == ("sum", None)


# -- shared memory ---------------------------------------------------------------------------------


def test_shared_memory_is_read_through_a_call_and_written_on_the_version_read():
    """A write on anything but the version that its agent has last seen is refused; the base and the
    read stand in the event, and the text read comes with the trust of its writer.
    """
    env = room({"a": ["write", "stop"], "b": ["write", "read"]}, agents=["a", "b"])
    script = team(
        a=["write memory/plan: v1", "hm", "write memory/plan: mine", "stop: x"],
        b=[
            'write memory/plan: blind\ncall read {"artefact": "memory/plan"}',
            "write memory/plan: v2",
            "hm",
        ],
    )
    trace = played(env, script)
    one, two = trace.of("write")
    assert (one.version, one.base_version, one.reads) == (1, 0, ())
    assert (two.version, two.base_version) == (2, 1)
    assert [(r.artefact, r.version) for r in two.reads] == [("memory/plan", 1)]
    assert trace.content(two) == "v2"
    assert [s.rule for s in trace.of("safety")] == ["one writer: stale read"] * 2
    (got,) = trace.of("tool_result")
    assert got.content == {"artefact": "memory/plan", "version": 1, "content": "v1"}
    assert got.trust == "trusted"
    assert f"derives {one.seq}" in edges(trace, got)


def test_what_was_read_counts_once_it_was_shown():
    """A read and a write in one turn: the agent cannot have known what it wrote over."""
    env = room({"a": ["write"], "b": ["write", "read", "stop"]}, agents=["a", "b"])
    script = team(
        a=["write p: v1", "hm"], b=['call read {"artefact": "p"}\nwrite p: v2', "stop: x"]
    )
    assert len(played(env, script).of("write")) == 1


def test_reading_what_is_not_there_is_an_error_of_the_call():
    """And so is a read without a name."""
    env = room({"b": ["read", "stop"]})
    trace = played(env, team(b=['call read {"artefact": "p"}\ncall read {}', "stop: x"]))
    assert [r.error for r in trace.of("tool_result")] == [
        "there is no artefact 'p'",
        "there is no artefact 'None'",
    ]


def test_an_environments_own_read_comes_before_the_built_in():
    """It may call a tool of its own `read`."""

    def own(self, page: int) -> str:
        return f"page {page}"

    env = room({"b": ["read", "stop"]}, read=tool(own))
    trace = played(env, team(b=['call read {"page": 3}', "stop: x"]))
    assert trace.of("tool_result")[0].content == "page 3"
    assert trace.of("tool_result")[0].trust == "untrusted"


@pytest.mark.parametrize("schedules", [60, pytest.param(10_000, marks=pytest.mark.soak)], ids=str)
def test_writes_have_one_order_whoever_writes_when(schedules):
    """P19: random schedules of four agents who read, write and wait: versions go 1, 2, 3 …, each
    on the one before, which its writer was shown; nobody else's write stands in between.
    """
    env = room({name: ["read", "write"] for name in "abcd"})
    texts = ['call read {"artefact": "p"}', "write p: x", "none", "write p: x\nwrite p: y"]

    def policy(observation, menu, draws):
        return texts[draws.integer(len(texts))]

    stale = 0
    for seed in range(schedules):
        trace = played(env, policy, seed=seed, limits={"turns": 24})
        writes = trace.of("write")
        assert [w.version for w in writes] == list(range(1, len(writes) + 1))
        assert all(w.base_version == w.version - 1 for w in writes)
        assert all([(r.version) for r in w.reads] == [w.base_version] for w in writes[1:])
        for before, after in pairwise(writes):
            known = fold(trace[: after.seq]).agents[after.agent].seen
            reads = [trace[s] for s in known if trace[s].kind == "tool_result"]
            versions = [r.content["version"] for r in reads if r.error is None]
            assert before.agent == after.agent or after.base_version in versions
        stale += sum(s.rule == "one writer: stale read" for s in trace.of("safety"))
    assert stale > schedules  # the rule was put to use


# -- stops and limits ------------------------------------------------------------------------------


def test_an_empty_order_of_turns_finishes_the_run():
    """The environment's word, following whatever it may have looked at."""
    env = room({"a": ["look"]}, agents=lambda self: [] if self.view("a").events else ["a"])
    trace = played(env, team(a=["call look {}"]))
    (stop,) = trace.of("stop")
    assert (stop.reason, stop.agent, stop.truncated) == ("finished", "env", False)
    assert edges(trace, stop) == {f"precedes {stop.seq - 1} turn"}


def test_all_waiting_is_a_deadlock():
    """Two who wait for each other; and nobody left alive."""
    env = room({"a": ["delegate"], "b": ["delegate"]})
    trace = played(env, team(a=["delegate b: x"], b=["delegate a: x"]))
    assert (trace.of("stop")[0].reason, trace.of("stop")[0].truncated) == ("deadlock", True)
    alone = room({"a": ["despawn"]})
    assert played(alone, team(a=["despawn a"])).of("stop")[0].reason == "deadlock"


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_limits_hold_at_the_cap_and_one_on_either_side(over):
    """A run that needs exactly 4 turns, 4 calls, 3 agents or 8 tokens before its last turn ends by
    itself with that much or more, and is cut short with one less. A limit is never the reason where
    the run had ended by itself.
    """
    env = room({"a": ["look", "stop"]})
    script = team(a=["call look {}"] * 3 + ["call look {}\nstop: x"])  # 4 calls; 3 tokens a turn

    def reason(**limits):
        return played(env, script, limits=limits).of("stop")[0].reason

    assert reason(turns=4 + over) == ("answered" if over >= 0 else "step_limit")
    assert reason(calls=4 + over) == ("answered" if over >= 0 else "budget")
    # 9 tokens are used when the last turn is to begin, and it begins while fewer than all are used
    assert reason(tokens=10 + over) == ("answered" if over >= 0 else "token_limit")
    ends = room(
        {"a": ["look"]}, agents=lambda self: ["a"] if len(self.view("a").events) < 16 else []
    )
    looks = team(a=["call look {}"])
    assert len(played(ends, looks).of("act")) == 4
    stop = played(ends, looks, limits={"turns": 4 + over}).of("stop")[0]
    assert stop.reason == ("finished" if over >= 0 else "step_limit")

    nest = room({"a": ["spawn", "stop"], "w": []}, start={"a": "a"})
    grown = played(
        nest, team(a=["spawn w: 1\nspawn w: 2", "stop: x"], w=["hm"]), limits={"agents": 3 + over}
    )
    assert len(grown.of("spawn")) == 2 + min(over, 0)
    assert [s.rule for s in grown.of("safety")] == ["limit of agents"] * (over < 0)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_limit_of_bytes_holds_at_the_cap_and_one_on_either_side(over):
    """A turn of exactly so many bytes acts, one more does nothing and is reported by an event; a
    result of one more is cut and its whole size kept.
    """
    limit = 40
    text = "call tell {}\n" + "é" * 13 + "x" * (1 + over)
    assert len(text.encode()) == limit + over
    env = room(
        {"a": ["tell"]},
        tell=tool(lambda self: "y" * (limit + over)),
    )
    trace = played(env, team(a=[text]), limits={"turns": 1, "item_bytes": limit})
    (act,) = trace.of("act")
    if over <= 0:
        assert act.text == text
        (result,) = trace.of("tool_result")
        assert (result.content, result.bytes) == ("y" * (limit + over), limit + over)
        return
    assert act.items == ()
    assert len(act.text.encode()) == limit + 1
    assert [(s.rule, s.target) for s in trace.of("safety")] == [("limit of item bytes", act.seq)]
    short = played(env, team(a=["call tell {}"]), limits={"turns": 1, "item_bytes": limit})
    (result,) = short.of("tool_result")
    assert (result.content, result.bytes) == ("y" * limit, limit + 1)


def test_a_turn_that_is_too_long_is_cut_within_no_character():
    """Nor are lone surrogates lost; a payload of an item counts as text does."""
    env = room({"a": ["message"]}, start={"a": "a"})
    for text, kept in [("é" * 9, "é" * 6), ("\ud800" * 9, "\ud800" * 4), ("x" * 20, "x" * 11)]:
        trace = played(env, team(a=[text]), limits={"turns": 1, "item_bytes": 10})
        assert trace.of("act")[0].text == kept
    item = Item(verb="message", name=("a",), content_raw=freeze("z" * 20))
    given = team(a=lambda observation, menu: Output("short", [item]))
    trace = played(env, given, limits={"turns": 1, "item_bytes": 10})
    assert trace.of("message") == []
    assert trace.of("act")[0].text == '"' + "z" * 10


# -- rewards ---------------------------------------------------------------------------------------


def test_rewards_of_the_whole_run_descend_from_all_of_it_each_of_them():
    """Two agents whose lives never touch: both ends are causes of the first reward and of the
    second; an edge from order alone hides no end.
    """
    env = room({"a": ["look"], "b": ["look"]}, rewards=[(1.0, None), Amount(2.0, "a")])
    trace = played(env, team(a=["call look {}"], b=["call look {}"]), limits={"turns": 2})
    one, two = trace.of("reward")
    results = {r.seq for r in trace.of("tool_result")}
    assert results <= {c.seq for c in one.causes}
    assert [c.seq for c in one.causes] == [c.seq for c in two.causes]
    assert {c.basis for c in one.causes} == {"inferred:run"}


def test_a_reward_says_what_the_environment_says():
    """Amounts, targets, channels, families, missing scores; an executed check keeps its own trust,
    a narrowed reward names its events.
    """
    paid = [
        (0.5, "a"),
        Amount(None, channel="style", verifiable="self_report"),
        Amount(-0.1, family="R7", channel="cost", verifiable="executed", causes=[1]),
    ]
    env = room({"a": ["mark", "stop"]}, rewards=paid)
    trace = played(env, team(a=["call mark {}\nstop: x"]))
    one, two, three = trace.of("reward")
    assert (one.amount, one.target.agent, one.channel, one.trust) == (0.5, "a", "team", "untrusted")
    assert (two.amount, two.channel, two.verifiable) == (None, "style", "self_report")
    assert (three.family, three.trust, edges(trace, three)) == ("R7", "trusted", {"rewards 1"})
    assert trace.outcome == pytest.approx(-0.1)


# -- seeds, streams, clocks ------------------------------------------------------------------------


def rolling(observation, menu, draws):
    """Says what it drew, and throws."""
    return f"I drew {draws.random()}\ncall throw {{}}"


def test_one_seed_gives_the_same_bytes_and_another_gives_others(tmp_path):
    """Into two files, whatever was played in between."""
    env = room({"a": ["throw"], "b": ["throw"]}, rewards=[(1.0, None)])
    paths = [tmp_path / f"{n}.jsonl" for n in range(3)]
    for path, seed in zip(paths, (3, 4, 3), strict=True):
        with Recorder(path) as recorder:
            rollout(
                env,
                rolling,
                groups=2,
                rollouts=2,
                seed=seed,
                recorder=recorder,
                config={"limits": {"turns": 6}},
            )
    one, other, again = (path.read_bytes() for path in paths)
    assert one == again
    assert one != other
    traces = list(read(paths[0]))
    assert len({t.header.seed for t in traces}) == 4
    assert [t.header.task_seed for t in traces[:2]] == [traces[0].header.task_seed] * 2
    assert traces[0].header.group_id == traces[1].header.group_id != traces[2].header.group_id


def test_a_changed_act_shifts_nobody_elses_draws():
    """Three agents throw and draw; a's second act is replaced by hand by one that throws twice
    more: every draw of b and c, at the same count of theirs, is what it was.
    """
    env = room({name: ["throw"] for name in "abc"})

    def drawn(change):
        run = begun(env, rolling, limits={"turns": 12})
        while (event := next_event(run)) is not None:
            mine = event.kind == "act" and event.agent == "a"
            if change and mine and run.world.agents["a"].acts == 1:
                call = Item(verb="call", name=("throw",))
                event = msgspec.structs.replace(event, items=(call,) * 3)
            run.emit(event)
        trace = run.trace()
        return {
            name: (
                [act.text for act in trace.of("act") if act.agent == name],
                [r.content for r in trace.of("tool_result") if r.agent == name],
            )
            for name in "abc"
        }

    before, after = drawn(change=False), drawn(change=True)
    assert before["b"] == after["b"]
    assert before["c"] == after["c"]
    assert len(after["a"][1]) == len(before["a"][1]) + 2
    assert after["a"][1][:2] == before["a"][1][:2]
    flat = [u for texts, results in before.values() for u in (*texts, *results)]
    assert len(set(flat)) == len(flat)


def test_a_run_can_go_on_from_any_prefix():
    """Also between two items of one act: a run that is given the first t events goes on to the
    same bytes.
    """
    env = room(
        {"a": ["throw", "message", "aggregate"], "b": ["throw", "write"]},
        start={"a": "a", "b": "b"},
    )

    def policy(observation, menu, draws):
        if observation.agent == "a":
            return "call throw {}\nmessage b: hi\ncall throw {}\naggregate: all"
        return f"write p: {draws.random()}\ncall throw {{}}"

    whole = played(env, policy, limits={"turns": 6})
    for t in range(len(whole)):
        run = begun(env, policy, limits={"turns": 6})
        half = Run(run.header, env, run.policies, whole.events[:t])
        go(half)
        assert half.trace().digest == whole.digest


def test_the_virtual_clock_takes_its_latencies_from_the_config():
    """Two turns of 2 s and a call of .25 s, one after the other: 4.25 s."""
    env = room({"a": ["look", "stop"]})
    trace = played(
        env, team(a=["call look {}", "stop: x"]), latency={"act": 2, "tool_result": 0.25}
    )
    assert trace.of("stop")[0].t_end == 4.25


# -- recording, workers ----------------------------------------------------------------------------


def test_what_is_recorded_is_what_is_returned(tmp_path):
    """The file read back is the traces that were handed out, seals too."""
    env = room({"a": ["throw"]}, rewards=[(1.0, None)])
    with Recorder(tmp_path / "r.jsonl") as recorder:
        traces = rollout(
            env, rolling, groups=2, rollouts=2, recorder=recorder, config={"limits": {"turns": 3}}
        )
    assert list(read(tmp_path / "r.jsonl")) == traces
    assert traces == rollout(env, rolling, groups=2, rollouts=2, config={"limits": {"turns": 3}})
    assert all(sound(trace).seal.digest == trace.digest for trace in traces)


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_the_number_of_workers_changes_no_trace_and_no_byte(workers, tmp_path):
    """Whoever played them: the same traces in the same order, and the same file."""
    env = room({"a": ["throw", "message"], "b": ["throw"]}, rewards=[(1.0, None)])
    alike = {"groups": 2, "rollouts": 3, "seed": 5, "config": {"limits": {"turns": 4}}}
    with Recorder(tmp_path / "one.jsonl") as recorder:
        one = rollout(env, rolling, **alike, recorder=recorder)
    with Recorder(tmp_path / "many.jsonl") as recorder:
        many = rollout(env, rolling, **alike, recorder=recorder, workers=workers)
    assert one == many
    assert [t.digest for t in one] == [t.digest for t in many]
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "many.jsonl").read_bytes()


# -- policies --------------------------------------------------------------------------------------


def test_items_that_an_endpoint_gives_are_used_as_they_are():
    """The text beside them is never parsed: words of a model do not become calls."""
    item = Item(verb="message", name=("b",), content_raw=freeze("hello"))
    speak = Scripted(lambda observation, menu: Output("stop: all\ncall look {}", [item]))
    env = room({"a": ["message", "stop", "look"], "b": []}, start={"a": "a", "b": "b"})
    trace = played(env, {"a": speak, "b": Scripted(["hm"])}, limits={"turns": 2})
    assert trace.content(trace.of("message")[0]) == "hello"
    assert trace.of("tool_call") == []
    assert trace.of("stop")[0].reason == "step_limit"


def test_a_plain_function_is_a_policy_and_counts_as_one_that_does_not_learn():
    """No class, no attributes: its acts are not trainable; a table's are."""
    env = room({"a": ["stop"]}, legal={"end": "stop: x"})
    (mine,) = played(env, lambda observation, menu, draws: "stop: x").of("act")
    (table,) = played(env, Softmax()).of("act")
    assert (mine.trainable, mine.policy_version) == (False, None)
    assert (table.trainable, table.policy_version) == (True, Softmax().version)


def test_a_turn_of_prose_is_an_act_that_does_nothing():
    """No item of its own, only declined decisions; `none` is an item that does nothing."""
    env = room({"a": ["look"]})
    prose, none = (
        played(env, team(a=[t]), limits={"turns": 1}).of("act")[0] for t in ("hm", "none")
    )
    assert prose.items == ()
    assert [i.verb for i in none.items] == ["none"]
    assert isinstance(prose, Act)


def test_blocked_mail_goes_to_nobody_and_the_turn_goes_on():
    """A message to a stranger is a safety event in its place; what follows is done."""
    env = room({"a": ["message", "stop"]})
    trace = played(env, team(a=["message zed: hi\nstop: x"]))
    (safety,) = trace.of("safety")
    assert isinstance(safety, Safety)
    assert (safety.rule, safety.effect, safety.agent) == ("no such agent", "blocked", "harness")
    assert edges(trace, safety) == {f"guards {trace.of('act')[0].seq}"}
    assert trace.of("stop")[0].reason == "answered"
