"""Branches of forks: counted, paired, played by workers, refused, compared."""

import math
import os
import pickle
import signal
import threading

import msgspec
import pytest

from counterpoint.envs import make
from counterpoint.harness import attached, rollout
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import at_of, credit_of, diff, fork
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from forks import SHORT, one, recorded, scouted, scouted_simply, untouched
from little_envs import Doors

pytestmark = pytest.mark.slow

# -- branches ----------------------------------------------------------------------------------


def test_branches_are_counted_by_hand():
    """A leader guesses one door of three: outcomes 0 and 1, mean, s/√n, 95 % interval."""
    trace = rollout(Doors(), Softmax(), groups=1, rollouts=1, config={"limits": {"turns": 2}})[0]
    branches = fork(trace, at_of(trace, "last:act"), "resample", n=40)
    ones = sum(trace.outcome == 1.0 for trace in branches.traces)
    p = ones / 40
    assert branches.counts() == {1.0: ones, 0.0: 40 - ones}
    assert branches.mean == pytest.approx(p)
    assert branches.stderr == pytest.approx(math.sqrt(p * (1 - p) / 39))
    assert branches.ci == pytest.approx(
        (p - 1.96 * branches.stderr, p + 1.96 * branches.stderr), abs=1e-4
    )
    assert (branches.spent.env_calls, branches.spent.forward_passes) == (40, 40)
    assert 0.1 < p < 0.6


def test_arms_are_paired_by_the_number_of_the_branch():
    """The difference and its error by hand, the correlation, and the string of the README."""
    trace = recorded(Doors(), groups=1)[0]
    message = trace.of("message")[0]
    kept, muted = (fork(trace, message, do, n=30) for do in ("keep", "mute"))
    gaps = [a.outcome - b.outcome for a, b in zip(kept.traces, muted.traces, strict=True)]
    mean = sum(gaps) / 30
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 29 / 30)
    found = kept.minus(muted)
    assert tuple(found) == pytest.approx((mean, spread))
    assert "{:.2f} ± {:.2f}".format(*found) == f"{mean:.2f} ± {spread:.2f}"
    assert found.pairs == 30
    assert "30 pairs, correlation" in str(found)
    few = fork(trace, message, "mute", n=10)
    assert kept.minus(few).pairs == 10
    with pytest.raises(Refused, match="only branches of one run are paired"):
        kept.minus(fork(recorded(Doors())[2], 1, "keep", n=1))


def test_arms_share_their_draws_as_far_as_they_can():
    """An act that is replaced by what it said is, from there on, the branch that keeps it."""
    trace = recorded(make("research-v0"))[0]
    act = trace.of("act")[0]
    kept = fork(trace, act, "keep", n=8)
    same = fork(trace, act, "replace", n=8, content=act.text)
    assert [t.outcome for t in kept.traces] == [t.outcome for t in same.traces]
    for a, b in zip(kept.traces, same.traces, strict=True):
        assert diff(a, b).what == "they say the same"


@pytest.mark.slow
def test_the_spawn_effect_covers_the_exact_value():
    """On ledger-v0: do(spawn) less do(not) by branches, against Q of both acts, listed."""
    env = make("ledger-v0")
    traces = rollout(env, Softmax(), groups=1, rollouts=16, seed=1)
    firsts = {t.of("act")[0].text.split()[0]: t for t in traces}
    exact = {say: credit_of(t, env)[0].q for say, t in firsts.items()}
    trace = firsts["spawn"]
    spawned = fork(trace, trace.of("act")[0], "keep", n=400)
    declined = fork(trace, trace.of("spawn")[0], "no_spawn", n=400)
    gain, error = spawned.minus(declined)
    assert abs(gain - (exact["spawn"] - exact["none"])) < 4 * error
    assert error < 0.06


def test_forks_have_a_group_of_their_own_and_stay_out_of_the_table():
    """Eight forks beside their parent change no mean of its group unless they are asked for."""
    traces = recorded(Doors())
    branches = fork(traces[0], 1, "keep", n=8)
    assert len({t.header.group_id for t in branches.traces}) == 1
    assert branches.traces[0].header.group_id != traces[0].header.group_id
    assert [t.header.rollout_id for t in branches.traces] == [str(k) for k in range(8)]
    alone, beside = (Steps.from_traces(ts) for ts in (traces, [*traces, *branches.traces]))
    assert alone.outcome.tolist() == beside.outcome.tolist()
    assert len(Steps.from_traces([*traces, *branches.traces], forks=True)) > len(alone)


def test_two_arms_have_two_groups_and_ids():
    """The content of a replacement, the seed and the place are part of who a branch is."""
    trace = recorded(Doors())[0]
    arms = [
        fork(trace, 1, "replace", n=2, content="message leader: 0"),
        fork(trace, 1, "replace", n=2, content="message leader: 1"),
        fork(trace, 1, "replace", n=2, content="message leader: 1", seed=1),
        fork(trace, 1, "resample", n=2),
        fork(trace, 1, "keep", n=2),
    ]
    assert len({t.trace_id for arm in arms for t in arm.traces}) == 10
    assert len({t.header.group_id for arm in arms for t in arm.traces}) == 5


def test_what_a_fork_says_of_itself():
    """One line with the arm, its outcome beside the run's, and what it cost; JSON of the issue."""
    trace = recorded(Doors())[0]
    told = fork(trace, 1, "keep", n=4)
    assert str(told).startswith(f"4 branches of trace {trace.trace_id} at event 1, keep: outcome ")
    assert list(told.as_dict())[:11] == [
        "parent", "seq", "do", "level", "n", "branches", "outcome_parent", "mean", "stderr", "ci",
        "spent",
    ]  # fmt: skip
    assert len(told.as_dict()["branches"]) == 4


# -- workers and snapshots ---------------------------------------------------------------------


def test_any_number_of_workers_plays_the_same_branches():
    """Trace by trace, and what they cost."""
    trace = recorded(make("ledger-v0"))[0]
    alone = fork(trace, 1, "resample", n=9)
    for workers in (2, 3, 20):
        shared = fork(trace, 1, "resample", n=9, workers=workers)
        assert shared.traces == alone.traces
        assert shared.spent == alone.spent
        assert shared.notes == ()


class Fatal:
    """A table that ends its process at one branch: at the first try, or always."""

    deterministic = True

    def __init__(self, tries, mark):
        self.table, self.tries, self.mark = Softmax(), tries, mark
        self.armed, self.here = False, os.getpid()

    def __call__(self, observation, legal, draws):
        said = self.table(observation, legal, draws)
        if self.armed and os.getpid() != self.here and draws.random() < 0.2:
            with self.mark.open("a") as file:
                file.write("x")
            if len(self.mark.read_text()) <= self.tries:
                os.kill(os.getpid(), signal.SIGKILL)
        return said


def test_a_worker_that_dies_is_replaced_once_and_named(tmp_path):
    """All branches are there, as without workers, and a note says what happened."""
    fatal = Fatal(1, tmp_path / "tries")
    trace = recorded(Doors(), fatal)[0]
    fatal.armed = True
    found = fork(trace, 1, "resample", n=12, workers=2)
    (note,) = found.notes
    assert "worker 1 was ended by SIGKILL" in note
    assert note.endswith("; another took over")
    assert found.traces == fork(trace, 1, "resample", n=12).traces
    assert note in str(found)


def test_a_branch_that_ends_two_workers_is_left_out(tmp_path):
    """The others are kept, the numbers stay theirs, and the mean is over what was played."""
    fatal = Fatal(2, tmp_path / "tries")
    trace = recorded(Doors(), fatal)[0]
    fatal.armed = True
    found = fork(trace, 1, "resample", n=12, workers=2)
    assert [note.rsplit("; ")[1] for note in found.notes] == [
        "another took over",
        "that one is left out",
    ]
    assert len(found.traces) == 11
    whole_ = {t.trace_id for t in fork(trace, 1, "resample", n=12).traces}
    assert {t.trace_id for t in found.traces} < whole_
    assert "ended by SIGKILL" in found.notes[1]


def test_the_prefix_is_driven_once_for_all_branches():
    """Resets and calls of the environment do not grow with the number of branches."""
    resets = []

    class Counted(Doors):
        def reset(self, task_seed):
            resets.append(task_seed)
            super().reset(task_seed)

    trace = recorded(Counted())[0]
    resets.clear()
    few, many = (fork(trace, at_of(trace, "last:act"), "resample", n=n) for n in (1, 50))
    assert len(resets) == 2
    ahead = sum(e.kind == "tool_call" for e in trace.events[: many.traces[0].first])
    assert few.spent.env_calls - len(few.traces[0].of("tool_call")) == ahead
    assert many.spent.env_calls - sum(len(t.of("tool_call")) for t in many.traces) == ahead


def test_a_missing_snapshot_is_an_error():
    """No branch starts from anywhere else instead."""

    class Locked(Doors):
        def reset(self, task_seed):
            super().reset(task_seed)
            self.lock = threading.Lock()

    class Empty(Doors):
        def snapshot(self):
            return None

    for env, what in ((Locked(), "write its snapshot"), (Empty(), r"snapshot\(\) is None")):
        trace = recorded(env)[0]
        with pytest.raises(Refused, match=f"doors-v0 gives no snapshot.*{what}"):
            fork(trace, 3, "keep", n=1)


# -- who goes on -------------------------------------------------------------------------------


def test_who_played_is_remembered_for_this_process_only():
    """Of the very object that rollout gave, and of no copy, file or pickle of it."""
    trace = recorded(Doors())[0]
    assert attached(trace).env.id == "doors-v0"
    assert attached(trace[:3]).env is None
    copy = Trace(trace.header, trace.events, trace.seal)
    assert copy == trace
    with pytest.raises(Refused, match="'doors-v0' is no environment of the table; give it as env="):
        fork(copy, 1, "keep", n=1)
    assert fork(copy, 1, "keep", n=1, env=Doors()).traces
    assert b"little_envs" not in pickle.dumps(trace)


def test_after_an_update_a_fork_is_refused_or_marked():
    """Else it would go on under other policies and say nothing."""
    table = Softmax()
    trace = recorded(Doors(), table)[0]
    before = fork(trace, 1, "keep", n=2)
    table.install({"x": {"y": 1.0}})
    with pytest.raises(Refused, match=r"was played by tabular:.* give the policies that played"):
        fork(trace, 1, "keep", n=2)
    after = fork(trace, 1, "keep", n=2, allow_changed=True)
    assert after.changed == ("policy of scout", "policy of leader")
    assert "under another policy of scout than the record's" in str(after)
    assert {ref.version for ref in after.traces[0].header.policies.values()} == {table.version}
    assert after.traces[0].header.group_id != before.traces[0].header.group_id
    assert fork(trace, 1, "keep", n=2, policies=Softmax()).traces == before.traces


def test_another_environment_is_refused_or_marked():
    """A dial that was turned since is another world; what does not even re-drive is refused."""
    env, other = make("ledger-v0"), make("ledger-v0", read_cost=0.5)
    trace = rollout(env, Softmax(), groups=1, rollouts=1)[0]
    with pytest.raises(Refused, match="with digest"):
        fork(trace, 1, "keep", n=1, env=other)
    marked = fork(trace, 1, "keep", n=1, env=other, allow_changed=True)
    assert marked.changed == ("environment ledger-v0",)
    assert marked.traces[0].header.env.digest == other.digest()


def test_a_policy_that_nothing_can_load_is_named():
    """The header names it, the file does not hold it."""
    script = Scripted(["none"], "mine")
    env = make("research-v0")
    trace = rollout(env, {"coordinator": Softmax(), "researcher": script}, groups=1, rollouts=1)[0]
    with pytest.raises(Refused, match=r"policy of researcher \(scripted:mine\) is gone"):
        fork(Trace(trace.header, trace.events, trace.seal), 1, "keep", n=1)


def test_a_human_who_answered_is_asked_again():
    """Who consented in the rollout consents in its forks; in a file's nobody is there."""
    ask = {"permissions": [{"effect": "ask", "name": "open"}], **SHORT}
    trace = recorded(Doors(), config=ask, human=lambda seen, item: True)[0]
    untouched(trace)
    stranger = Trace(trace.header, trace.events, trace.seal)
    (branch,) = fork(stranger, 1, "keep", n=1, env=Doors()).traces
    assert {e.do for e in branch.of("intervene")} == {"refuse"}
    with pytest.raises(Refused, match="2 workers cannot ask one human"):
        fork(trace, 1, "keep", n=2, workers=2)


# -- refusals ----------------------------------------------------------------------------------

BAD = {
    "no such event": (999, "keep", {}, r"has no event 999: it has events 0 to \d+"),
    "below": (-1, "keep", {}, r"has no event -1"),
    "no such way": (1, "muted", {}, r"there is no intervention 'muted'; there are resample"),
    "n": (1, "keep", {"n": 0}, r"0 branches play nothing; ask for 1"),
    "workers": (1, "keep", {"workers": 0}, r"0 workers play nothing"),
    "mute an act": (
        1,
        "mute",
        {},
        r"to event 1, act of scout; the nearest event that can is 2, message of scout",
    ),
    "mute a deliver": (3, "mute", {}, r"the nearest event that can is 2, message of scout"),
    "remove a result": (7, "remove", {}, r"the nearest event that can is 6, tool_call"),
    "no spawn": (1, "no_spawn", {}, r"this run has no event that can"),
    "level": (2, "mute", {"level": "decision"}, r"mute has no level 'decision'; it has channel"),
    "level of keep": (2, "keep", {"level": "channel"}, r"it has none, since it changes nothing"),
    "level of act": (
        1,
        "replace",
        {"content": "none", "level": "channel"},
        r"replace at level channel cannot be done to event 1",
    ),
    "content missing": (1, "replace", {}, r"replace needs content: what it says instead"),
    "content": (1, "keep", {"content": "x"}, r"keep takes no content; replace does"),
    "no text": (
        1,
        "replace",
        {"content": 3},
        r"an act is replaced by the text of a whole turn, not 3",
    ),
    "two lines": (2, "replace", {"content": "a\nb", "level": "decision"}, r"one line of text"),
    "nobody": (
        2,
        "redirect",
        {"content": "nobody"},
        r"cannot be redirected to nobody; there are scout, leader",
    ),
    "no receiver": (2, "redirect", {"content": []}, r"cannot be redirected to"),
    "streams": (2, "keep", {"streams": "mine"}, "streams are 'branch' or 'parent'"),
    "copies": (2, "keep", {"streams": "parent", "n": 2}, r"all branches are the same one"),
    "unspeakable": (2, "replace", {"content": object()}, r"object"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_asked_is_refused_in_a_sentence(name):
    """Each with what is wrong and the way out."""
    at, do, options, sentence = BAD[name]
    with pytest.raises(Refused, match=sentence):
        fork(scouted_simply(), at, do, **{"n": 1, **options})


def test_what_cannot_be_re_driven_is_not_forked():
    """An imported log, one that was changed, one whose parent is not at hand or is another one."""
    trace = scouted_simply()
    foreign = msgspec.structs.replace(
        trace.header, env=msgspec.structs.replace(trace.header.env, id="imported:openai_chat")
    )
    with pytest.raises(Refused, match="not played by our harness: it can be folded"):
        fork(Trace(foreign, trace.events), 1, "keep", n=1)
    events = list(trace.events)
    events[2] = msgspec.structs.replace(events[2], to=("scout",))
    with pytest.raises(Refused, match="was changed since it was sealed"):
        fork(Trace(trace.header, tuple(events), trace.seal), 3, "keep", n=1, env=Doors())
    with pytest.raises(Refused, match="cannot be re-driven past event 2: to of message"):
        fork(
            Trace(trace.header, tuple(events)),
            3,
            "keep",
            n=1,
            env=Doors(),
            policies=attached(trace).team,
        )
    branch = one(trace, 3, "keep")
    lonely = Trace(branch.header, branch.events, branch.seal)
    with pytest.raises(Refused, match=r"its parent, trace .* has to be at hand"):
        fork(lonely, 3, "keep", n=1, env=Doors(), policies=attached(trace).team)
    with pytest.raises(
        Refused, match=r"has no event 1: it has events 3 to \d+, those before are in its parent"
    ):
        fork(branch, 1, "keep", n=1)
    other = recorded(Doors())[1]
    with pytest.raises(Refused, match="is not the message that was given"):
        fork(other, trace.of("message")[0], "keep", n=1)


def test_a_fork_whose_first_act_was_asked_for_in_its_parent_says_so():
    """To draw it anew, the parent is forked."""
    trace = recorded(Doors())[0]
    branch = one(trace, 1, "resample", streams="parent")
    assert branch.events[0].kind == "act"
    with pytest.raises(
        Refused, match=f"asked for at event 0, which is in the parent.*fork trace {trace.trace_id}"
    ):
        fork(branch, 1, "resample", n=1)


def test_an_unfinished_run_can_be_forked_and_edited():
    """A human edits mid-run: a prefix goes on from any of its events."""
    trace = scouted_simply()
    prefix = trace[:5]
    found = fork(prefix, 2, "edit", n=1, content="two", env=Doors(), policies=attached(trace).team)
    assert found.traces[0].of("stop")
    assert found.parent.outcome is None


# -- finding events, comparing runs ------------------------------------------------------------


def test_a_place_is_named_by_its_kind():
    """First and last of a kind, a seq as it stands, and sentences for the rest."""
    trace = scouted('call open {"door": 0}')
    assert [at_of(trace, p) for p in ("first:message", "last:message", "7")] == [2, 3, 7]
    with pytest.raises(Refused, match="'second:act' names no event: say a seq, first:KIND"):
        at_of(trace, "second:act")
    with pytest.raises(Refused, match="has no spawn; it has observe, act, message"):
        at_of(trace, "first:spawn")


def test_two_continuations_part_at_the_first_event_that_differs():
    """By seq in each, in words, and what came of it; interventions shift and are passed over."""
    trace = scouted('call open {"door": 0}')
    act = next(e for e in trace.of("act") if e.agent == "leader")
    branch = one(trace, act, "replace", content='call open {"door": 1}')
    found = diff(trace, branch)
    assert (found.first, found.second) == (act.seq, act.seq + 1)
    assert '"door": 0}\' / event' in found.what
    assert found.outcomes == (trace.outcome, branch.outcome)
    assert found.gain == branch.outcome - trace.outcome
    assert str(found).endswith(f"; outcome {trace.outcome:g} → {branch.outcome:g}")
    same = diff(trace, one(trace, 3, "keep"))
    assert same == (None, None, "they say the same", (trace.outcome, trace.outcome))
    short = diff(trace, one(trace, act, "stop_now"))
    assert short.second is not None
    lonely = Trace(branch.header, branch.events)
    with pytest.raises(Refused, match="its parent, trace"):
        diff(trace, lonely)


def test_branches_of_one_place_are_compared_without_their_parent():
    """Two suffixes that begin alike need no more than themselves."""
    trace = recorded(Doors())[0]
    first, second = fork(trace, 1, "resample", n=2).traces
    apart = [Trace(t.header, t.events) for t in (first, second)]
    assert diff(*apart) == diff(first, second)
