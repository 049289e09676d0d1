"""Fork: what an intervention does to a run and what it leaves alone, by hand on small rooms."""

import pytest

from counterpoint.envs import ENVS, make
from counterpoint.formats import read
from counterpoint.redrive import fork
from counterpoint.redrive.interventions import WAYS
from counterpoint.save import save, trace_lines
from counterpoint.spelling import Refused
from counterpoint.validate import validate
from forks import bare, one, recorded, scouted, untouched, whole
from little_envs import Doors, Fog, Office
from stages import names, played, room, team

# -- P24: the untouched fork is the parent -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_the_untouched_fork_is_the_parent(name):
    """P24 at 40 runs of both environments: byte for byte, at every event."""
    assert sum(map(untouched, recorded(make(name), groups=10, rollouts=4))) > 500


@pytest.mark.soak
@pytest.mark.parametrize("name", ENVS)
def test_the_untouched_fork_is_the_parent_at_full_size(name):
    """P24 at 200 runs of each environment."""
    assert sum(map(untouched, recorded(make(name), groups=20, rollouts=10))) > 2_000


@pytest.mark.slow
def test_the_untouched_fork_is_the_parent_between_items_and_with_mail_in_flight():
    """The little environments have what the others lack: turns, several items, two lives."""
    places = [untouched(t) for env in (Doors(), Fog(), Office()) for t in recorded(env)]
    assert sum(places) > 250


@pytest.mark.slow
def test_untouched_forks_of_forks_are_their_parents():
    """Also where the parent is a branch, kept or resampled, and holds its suffix only."""
    places = 0
    for env in (make("ledger-v0"), Office()):
        trace = recorded(env)[0]
        for do in ("resample", "keep"):
            for at in (0, len(trace) // 2):
                branch = one(trace, at, do, seed=5)
                places += untouched(branch)
                again = one(branch, branch.events[len(branch) // 2], "keep")
                places += untouched(again)
    assert places > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_every_fork_is_a_valid_trace_that_reads_back(name, tmp_path):
    """V15 and the rest hold for every intervention at every event that it can be done to."""
    trace = recorded(make(name))[0]
    contents = {"replace": "none", "edit": "none", "redirect": "researcher"}
    made = 0
    branches = []
    for do in WAYS:
        for event in trace.events:
            try:
                branches += fork(trace, event, do, n=2, content=contents.get(do)).traces
            except Refused:
                continue
            made += 1
    assert made > 3 * len(trace)
    save(tmp_path / "all.jsonl", (line for t in [trace, *branches] for line in trace_lines(t)))
    stored = list(read(tmp_path / "all.jsonl"))
    assert stored == [trace, *branches]
    report = validate(stored)
    assert report.findings == []
    assert report.counts["forks_not_checked"] == 0
    assert len({branch.trace_id for branch in branches}) == len(branches)


# -- what other tools get wrong ----------------------------------------------------------------


def boss_and_two(clerk, **config):
    """A boss asks two clerks at once, waits for both, sums; each throws, then returns."""
    env = room(
        {"boss": ["delegate", "message", "aggregate", "stop"], "clerk": ["throw", "return"]},
        start=lambda self: {"boss": "boss", "ann": "clerk", "bob": "clerk"},
        rewards=lambda self, trace: [(float(len(trace.of("aggregate"))), None)],
    )
    type(env).on_call = ("clerk",)
    boss = ["delegate ann, bob: throw once", "aggregate sum: both\nstop: done"]
    return env, team(boss=boss, clerk=clerk), config


class Throwing:
    """A clerk who throws and returns what came; it says how often it was asked, and by whom."""

    deterministic = True
    target = version = "throwing"

    def __init__(self):
        self.asked = []

    def __call__(self, observation, legal, draws):
        self.asked.append(observation.agent)
        thrown = [turn.text for turn in observation.turns if turn.origin == "throw"]
        return f"return: {thrown[0].split()[-2]}" if thrown else "call throw {}"


def test_a_fork_inside_a_sub_team_runs_only_from_that_event_on():
    """What came before is the parent's: nobody is asked again for it, and no tool runs for it."""
    clerk = Throwing()
    env, policies, _ = boss_and_two(clerk)
    trace = played(env, {**policies, "clerk": clerk})
    last = [e for e in trace.of("act") if e.agent == "bob"][-1]
    clerk.asked.clear()
    branch = one(trace, last, "keep")
    assert clerk.asked == []
    assert branch.first == last.seq
    assert [e.agent for e in branch.of("act")] == ["bob", "boss"]
    assert fork(trace, last, "keep", n=3).spent.forward_passes == 3


def test_editing_one_of_two_parallel_siblings_keeps_the_others_result():
    """What the other had before the fork stays; what it draws later it draws as in the parent."""
    clerk = Throwing()
    env, policies, _ = boss_and_two(clerk)
    trace = played(env, {**policies, "clerk": clerk})
    results = {e.agent: e for e in trace.of("tool_result")}
    first, second = sorted(results.values(), key=lambda e: e.seq)
    later = one(trace, second, "replace", content=7.0)
    assert whole(later)[first.seq].content == first.content
    earlier = one(trace, first, "replace", content=7.0, streams="parent")
    told = {e.agent: e.content for e in earlier.of("tool_result")}
    assert told == {first.agent: 7.0, second.agent: second.content}
    sent = {e.agent: whole(earlier).content(e) for e in earlier.of("agent_return")}
    assert sent[first.agent] == "7.0"


def test_messages_in_flight_and_mailboxes_survive():
    """What was sent and not delivered, and delivered and not read, is shown after the fork."""
    say = ["message ann: one\nmessage ann: two\nmessage bob: three", "stop: enough"]
    env = room(
        {"boss": ["message", "stop"], "clerk": ["message"]},
        start=lambda self: {"boss": "boss", "ann": "clerk", "bob": "clerk"},
    )
    trace = played(env, team(boss=say, clerk=["none"]))
    between = list(trace.of("message"))[1]
    waiting = list(trace.of("deliver"))[1]
    for at in (between, waiting):
        story = whole(one(trace, at, "keep"))
        shown = [(e.agent, s.seq) for e in story.of("observe") for s in e.sources]
        said = {e.seq: story.content(e) for e in story.of("message")}
        assert [(who, said[seq]) for who, seq in shown if seq in said] == [
            ("ann", "one"), ("ann", "two"), ("bob", "three"),
        ]  # fmt: skip


def test_a_change_in_the_parent_changes_what_the_child_is_asked():
    """The child reads the new words, not those that were recorded for it."""
    heard = []

    def child(observation, legal):
        heard.append(observation.text)
        return "return: ok"

    env = room(
        {"boss": ["spawn", "delegate", "stop"], "clerk": ["return"]},
        start=lambda self: {"boss": "boss"},
    )
    type(env).on_call = ("clerk",)
    boss = ["spawn clerk: hello", "delegate boss.0: count beans", "stop: done"]
    trace = played(env, team(boss=boss, clerk=child))
    (asked,) = trace.of("delegate")
    for level, at in (("channel", asked), ("decision", asked)):
        heard.clear()
        branch = one(trace, at, "replace", content="count peas", level=level)
        assert "count peas" in heard[-1]
        assert "beans" not in heard[-1]
        acts = [e.text for e in whole(branch).of("act") if e.agent == "boss"]
        assert (acts[1] == "delegate boss.0: count beans") == (level == "channel")


def test_a_muted_delegate_releases_its_waiter():
    """The boss believes that it asked, nobody is asked, and it goes on at once."""
    env, policies, _ = boss_and_two(["return: x"])
    trace = played(env, policies)
    (asked,) = trace.of("delegate")
    branch = one(trace, asked, "mute")
    assert names(whole(branch))[asked.seq :][:5] == [
        "delegate boss", "intervene harness", "observe boss", "act boss", "aggregate boss",
    ]  # fmt: skip
    assert branch.of("stop")[0].reason == "answered"
    assert not [e for e in branch.events if e.agent in ("ann", "bob")]
    (mark,) = branch.of("intervene")
    assert (mark.do, mark.target) == ("mute", asked.seq)


def test_a_muted_message_was_sent_and_reaches_nobody():
    """The act and the message stand in the branch; no delivery, no observation shows it."""
    trace = recorded(Doors(), groups=1)[0]
    (first, *_) = trace.of("message")
    branch = one(trace, first, "mute")
    assert bare(branch[first.seq]) == bare(first)
    assert not [e for e in branch.of("deliver") if e.message == first.seq]
    assert not [s for e in branch.of("observe") for s in e.sources if s.seq == first.seq]
    assert branch.header.fork.level == "channel"


# -- each way of intervening, by hand ----------------------------------------------------------


def test_an_act_is_replaced_as_a_decision():
    """The new text is parsed and acted upon; nobody's tokens are trained on it."""
    trace = scouted('call open {"door": 0}')
    (act,) = [e for e in trace.of("act") if e.agent == "leader"]
    branch = one(trace, act, "replace", content='call open {"door": 2}')
    mark, edited, call = branch.events[:3]
    assert (mark.do, mark.target, mark.replaces) == ("replace", edited.seq, act.seq)
    assert (edited.text, edited.trainable, edited.policy_version) == (
        'call open {"door": 2}',
        False,
        None,
    )
    assert {(c.seq, c.kind) for c in edited.causes} == {
        (act.seq - 1, "derives"),
        (mark.seq, "forks"),
    }
    assert call.arguments == {"door": 2}
    assert branch.header.fork.level == "decision"


def test_a_human_s_edit_is_a_replacement_that_bears_the_human_s_label():
    """The intervention is the human's, and nothing that stands on it is trusted more."""
    trace = scouted('call open {"door": 0}')
    (first, _) = trace.of("message")
    branch = one(trace, first, "edit", content="three")
    mark, edited = branch.events[:2]
    assert (mark.agent, mark.do, mark.trust) == ("human", "edit", "human")
    assert (edited.content, edited.trust, edited.trainable) == ("three", "human", False)
    seen = branch.of("observe")[0]
    assert seen.trust == "human"
    harness = one(trace, first, "replace", content="three")
    assert harness.events[1].trust == first.trust


def test_an_item_is_removed_and_the_others_stay():
    """The act is said without it: the second message is sent, as its first item."""
    trace = scouted('call open {"door": 0}')
    first, _second = trace.of("message")
    branch = one(trace, first, "remove")
    assert next(e.text for e in branch.of("act")) == "message leader: two"
    assert [whole(branch).content(e) for e in branch.of("message")] == ["two"]
    assert branch.first == 1
    silent = one(trace, trace.of("act")[0], "remove")
    assert next(e.text for e in silent.of("act")) == "none"
    assert not silent.of("message")


def test_a_spawn_is_taken_out_at_its_act():
    """no_spawn cuts at the act: the child is never born, the declined spawn counts as one."""
    trace = next(t for t in recorded(make("ledger-v0"), rollouts=8) if t.of("spawn"))
    spawn = trace.of("spawn")[0]
    branch = one(trace, spawn, "no_spawn")
    act = branch.of("act")[0]
    assert act.text == "none"
    assert [item.verb for item in act.items] == ["none", "no_spawn", "no_stop"]
    story = whole(branch)
    born = [e.child for e in story.of("spawn")]
    assert spawn.child not in born
    assert not [e for e in story.events if e.agent == spawn.child]


def test_a_message_is_redirected():
    """The sender said it to one, another one gets it."""
    env = room(
        {"boss": ["message", "stop"], "clerk": ["message"]},
        start=lambda self: {"boss": "boss", "ann": "clerk", "bob": "clerk"},
    )
    trace = played(env, team(boss=["message ann: hi", "stop: enough"], clerk=["none"]))
    (sent,) = trace.of("message")
    branch = one(trace, sent, "redirect", content="bob")
    assert branch.of("message")[0].to == ("bob",)
    assert [e.agent for e in branch.of("deliver")] == ["bob"]
    assert trace.content(sent) == whole(branch).content(branch.of("message")[0]) == "hi"


def test_the_run_stops_now():
    """In place of the event the run ends, answered or not, and is paid for what it has."""
    trace = scouted('call open {"door": 0}')
    (call,) = trace.of("tool_call")
    branch = one(trace, call, "stop_now", content="enough")
    assert [e.kind for e in branch.events] == ["intervene", "stop", "reward"]
    stop = branch.of("stop")[0]
    assert (stop.reason, stop.answer, stop.truncated, branch.outcome) == (
        "intervened",
        "enough",
        False,
        0.0,
    )


def test_keep_commits_the_event_and_draws_what_follows():
    """Of a call that is kept the result is thrown anew; of a result that is kept, what is next."""
    throw = ["call throw {}\ncall throw {}", "stop: done"]
    trace = played(room({"a": ["throw", "stop"]}), team(a=throw))
    call, _again = trace.of("tool_call")
    first, second = (e.content for e in trace.of("tool_result"))
    kept = whole(one(trace, call, "keep")).of("tool_result")
    assert bare(one(trace, call, "keep").events[0]) == bare(call)
    assert first not in [e.content for e in kept]
    later = whole(one(trace, trace.of("tool_result")[0], "keep")).of("tool_result")
    assert later[0].content == first
    assert later[1].content != second


def test_what_was_asked_for_before_the_fork_is_answered_as_in_the_parent():
    """A result is drawn with the key at its call, so drawing it anew begins at the call."""
    throw = ["call throw {}", "stop: done"]
    trace = played(room({"a": ["throw", "stop"]}), team(a=throw))
    (result,) = trace.of("tool_result")
    assert one(trace, result, "resample").first == result.seq - 1
    assert one(trace, result, "resample").of("tool_result")[0].content != result.content
    assert one(trace, result, "keep").first == result.seq
    act = trace.of("act")[0]
    assert one(trace, act, "resample").first == act.seq - 1


def test_a_replaced_result_stands_for_its_tool_which_does_not_run():
    """The room has no mark of it, and the agent reads what was put there."""
    trace = played(
        room({"a": ["mark", "stop"]}),
        team(a=['call mark {"n": 1}', 'call mark {"n": 2}', "stop: x"]),
    )
    first, second = trace.of("tool_result")
    assert second.content == [1, 2]
    story = whole(one(trace, first, "replace", content="nothing"))
    assert [e.content for e in story.of("tool_result")] == ["nothing", [2]]


def test_a_fork_of_an_edited_fork_keeps_the_edit():
    """Re-drive takes what was put in as given; nobody computes it again."""
    trace = scouted('call open {"door": 0}')
    act = next(e for e in trace.of("act") if e.agent == "leader")
    child = one(trace, act, "replace", content='call open {"door": 1}')
    grand = one(child, child.of("tool_call")[0], "keep")
    assert whole(grand).of("tool_call")[0].arguments == {"door": 1}
    assert grand.header.fork.trace_id == child.trace_id
    for at in child.events[:2]:
        with pytest.raises(Refused, match="put there by hand; the nearest event that can is"):
            fork(child, at, "resample", n=1)
