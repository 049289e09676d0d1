"""Re-drive and the contract of environments: a run goes on as before, and pits are found."""

import random

import msgspec
import pytest

from counterpoint.envs import ENVS, Amount, Env, make, tool
from counterpoint.harness import Run, next_event, rollout
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import check_env, depends, redrive
from counterpoint.schema import Act, Cause, Header, Observe, Reward, Trace, encode
from counterpoint.spelling import Refused, freeze
from little_envs import Doors, Fog, Office

SHORT = {"limits": {"turns": 16}}


def played(env, policies=None, **options):
    given = {"groups": 2, "rollouts": 2, "seed": 3, "config": SHORT, **options}
    return rollout(env, policies or Softmax(), **given)


def gone_on(run):
    """The events from where a run stands to its end, spelled."""
    start = len(run.events)
    while (event := next_event(run)) is not None:
        run.emit(event)
    return [encode(event) for event in run.events[start:]]


def agree_at_every_event(env, trace, team):
    """P24 at each event of one run, by re-drive and by snapshot; how many places were tried."""
    spelled = [encode(event) for event in trace.events]
    states = []
    run = redrive(trace[:0], env, team)
    for event in trace.events:
        states.append(env.snapshot())
        next_event(run)
        run.emit(event)
    for t, state in enumerate(states):
        assert gone_on(redrive(trace[:t], env, team)) == spelled[t:]
        env.reset(0)
        env.restore(state)
        assert (
            gone_on(Run(trace.header, env, dict.fromkeys(env.roles, team), trace[:t]))
            == spelled[t:]
        )
    assert gone_on(redrive(trace, env, team)) == []
    return len(trace) + 1


# -- P24 ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_going_on_at_any_event_gives_the_suffix_of_the_parent():
    """P24 at 40 runs: at every event, also between two items of one act, byte for byte."""
    places = between = 0
    for env, rollouts in ((Doors(), 8), (Fog(), 6), (Office(), 6)):
        for trace in played(env, rollouts=rollouts):
            places += agree_at_every_event(env, trace, Softmax())
            between += sum(e.kind == "message" and e.item == 1 for e in trace.events)
    assert places > 500
    assert between > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", ["doors", "fog", "office", *ENVS])
def test_going_on_at_any_event_of_two_hundred_runs(name):
    """P24 at full size, over the table too."""
    ours = {"doors": Doors, "fog": Fog, "office": Office}
    env = ours[name]() if name in ours else make(name)
    for trace in played(env, groups=20, rollouts=2):
        agree_at_every_event(env, trace, Softmax())


def test_a_run_can_go_on_between_two_items_of_one_act():
    """The second item of an act is still to be done after the first, and is done."""
    text = "message leader: one\nmessage leader: two"
    team = {"scout": Scripted([text]), "leader": Softmax()}
    trace = played(Doors(), team)[0]
    first = trace.of("message")[0]
    run = redrive(trace[: first.seq + 1], Doors(), team)
    event = next_event(run)
    assert (event.kind, event.item, event.seq) == ("message", 1, first.seq + 1)


def test_a_run_goes_on_under_the_policies_of_the_record():
    """The run that comes back is a plain run, with the events so far and the team's policies."""
    trace = played(Doors())[0]
    run = redrive(trace[:5], Doors(), Softmax())
    assert tuple(run.events) == trace.events[:5]
    assert set(run.policies) == {"scout", "leader"}


def test_whom_a_rule_asks_is_asked_again_after_the_prefix():
    """A human's answers in the prefix are given; what is asked later is asked of who is there."""
    ask = {"permissions": [{"effect": "ask", "name": "open"}], **SHORT}
    yes = lambda seen, item: True  # noqa: E731
    trace = played(Doors(), config=ask, human=yes)[0]
    spelled = [encode(event) for event in trace.events]
    for t in range(len(trace)):
        assert gone_on(redrive(trace[:t], Doors(), Softmax(), yes)) == spelled[t:]
    refused = redrive(trace[:1], Doors(), Softmax())
    gone_on(refused)
    assert [e.do for e in refused.trace().of("intervene")] == ["refuse"] * 8


def test_a_prefix_that_does_not_come_back_is_refused_with_the_event():
    """Going on from a state that was never reached would be fiction."""
    trace = played(Doors())[0]
    events = list(trace.events)
    events[7] = msgspec.structs.replace(events[7], content_raw=freeze("forged"))
    with pytest.raises(Refused, match=r"cannot be re-driven past event 7: content"):
        redrive(Trace(trace.header, tuple(events))[:9], Doors(), Softmax())


def test_what_cannot_be_re_driven_says_so():
    """An import has no environment, a fork no beginning."""
    trace = played(Doors())[0]
    imported = msgspec.structs.replace(
        trace.header, env=msgspec.structs.replace(trace.header.env, id="imported:openai_chat")
    )
    with pytest.raises(Refused, match="can be folded, not re-driven"):
        redrive(Trace(imported, ()), Doors(), Softmax())


# -- contracts that are kept ----------------------------------------------------------------------


@pytest.mark.parametrize("env", [Doors, Fog])
def test_an_environment_that_keeps_its_contract_says_what_was_examined(env):
    """Each clause examined something; a clause that found nothing to examine says 0."""
    kept = check_env(env())
    assert kept.traces == 6
    assert kept.clauses["snapshot"] == kept.clauses["redrive"] == kept.events
    assert all(kept.clauses[name] for name in ("menus", "deterministic", "edges"))
    assert kept.clauses["pure"] == (0 if env is Doors else kept.clauses["pure"])
    assert str(kept).startswith(f"{env.id} keeps its contract in 6 runs, {kept.events} events: ")


@pytest.mark.slow
def test_lives_beside_each_other_keep_the_contract():
    """Spawns, waits, shared memory and messages, where no environment decides the turns."""
    assert check_env(Office(), tasks=2).clauses["edges"] > 100


@pytest.mark.parametrize("name", ENVS)
def test_every_environment_of_the_table_keeps_its_contract(name):
    """A new row is checked by existing."""
    check_env(make(name))


# -- contracts that are broken: the clause is named -----------------------------------------------


class Unversioned(Doors):
    id = "doors"


class Misspelt(Doors):
    id = "misspelt-v0"
    roles = {"scout": ["mesage"], "leader": ["open"]}  # noqa: RUF012


class Strangers(Doors):
    id = "strangers-v0"

    def start(self):
        return {"scout": "scout", "leader": "boss"}


class Prose(Doors):
    id = "prose-v0"

    def legal(self, agent):
        return {**super().legal(agent), "chat": "what a lovely day"}


class Overreach(Doors):
    id = "overreach-v0"

    def legal(self, agent):
        return {**super().legal(agent), "end": "stop: enough"}


class Twice(Doors):
    id = "twice-v0"

    def legal(self, agent):
        return ["message leader: 1", "message leader: 1"] if agent == "scout" else None


class Nan(Doors):
    id = "nan-v0"

    def rewards(self, trace):
        return [(float("nan"), None)]


class Stranger(Doors):
    id = "stranger-v0"

    def rewards(self, trace):
        return [(1.0, "nobody")]


class Forgetful(Doors):
    """Its reset leaves a counter as it was."""

    id = "forgetful-v0"
    looks = 0

    def observe(self, agent):
        self.looks += 1
        return f"look {self.looks}"


class Chancy(Doors):
    """Draws from a generator of its own."""

    id = "chancy-v0"

    def observe(self, agent):
        return str(random.random())


class Shallow(Doors):
    """Its snapshot shares a list with the run."""

    id = "shallow-v0"

    def reset(self, task_seed):
        super().reset(task_seed)
        self.tried = []

    @tool
    def open(self, door: int) -> str:
        self.tried.append(door)
        self.opened = door if len(self.tried) == 2 else None
        return f"{len(self.tried)} tried"

    def snapshot(self):
        return dict(vars(self))

    def restore(self, snapshot):
        vars(self).update(snapshot)


class Elsewhere(Doors):
    """Keeps hidden state where no snapshot looks."""

    id = "elsewhere-v0"
    notes: list = []  # noqa: RUF012

    def reset(self, task_seed):
        super().reset(task_seed)
        self.notes.clear()

    @tool
    def open(self, door: int) -> str:
        self.notes.append(door)
        self.opened = door if len(self.notes) == 2 else None
        return f"{len(self.notes)} tried"


BROKEN = {
    Unversioned: "versioned: its id ends in no version",
    Prose: "menus: event .* offers scout 'chat', but 'what a lovely day' holds nothing",
    Overreach: "menus: event .* offers scout 'end', but its role may not stop",
    Forgetful: "deterministic: played again, event 0 differs: content, ",
    Chancy: "deterministic: played again, event 0 differs: content, ",
    Shallow: "snapshot: restored before event",
    Elsewhere: "snapshot: restored before event",
}


@pytest.mark.parametrize("env", BROKEN, ids=lambda env: env.__name__)
def test_a_broken_clause_is_named(env):
    """The sentence says which environment, which clause, where, and what was seen."""
    with pytest.raises(Refused, match=f"^{env.id} breaks its contract, clause {BROKEN[env]}"):
        check_env(env())


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (Misspelt, "role 'scout' lists 'mesage'"),
        (Strangers, "gives 'leader' the role 'boss'"),
        (Twice, "two entries with one label"),
        (Nan, "an amount is a finite number"),
        (Stranger, "pays 'nobody'"),
    ],
)
def test_what_playing_itself_refuses_comes_through(env, sentence):
    """Some clauses are held at every turn of every run; the check plays, so it meets them."""
    with pytest.raises(Refused, match=f"^{env.id}: .*{sentence}"):
        check_env(env())


def test_an_environment_without_menus_needs_policies():
    """The default table cannot speak freely, and says so; with policies the check runs."""

    class Free(Doors):
        id = "free-v0"

        def legal(self, agent):
            return None

    with pytest.raises(Refused, match="a table acts from a menu"):
        check_env(Free())
    team = {"scout": Scripted(["message leader: 1"]), "leader": Scripted(['call open {"door": 1}'])}
    assert check_env(Free(), team).clauses["menus"] == 0


# -- pits: what one agent does reaches another past the graph -------------------------------------


class Pit(Env):
    """Agent a sets what agent b reads. Each acts once; nothing is said between them."""

    id = "pit-v0"
    roles = {"a": ["set"], "b": ["get"]}  # noqa: RUF012

    def reset(self, task_seed):
        self.lever, self.got = 0, None

    def agents(self):
        return None if self.got is None else []

    def legal(self, agent):
        if agent == "a":
            return {str(n): f'call set {{"lever": {n}}}' for n in (1, 2)}
        return {"get": "call get {}", "wait": "none"}

    @tool
    def set(self, lever: int) -> str:
        self.lever = lever
        return "done"

    @tool
    def get(self) -> int:
        self.got = self.lever
        return self.got

    def rewards(self, trace):
        result = [e for e in trace.of("tool_result") if e.agent == "b"]
        yield Amount(float(self.got or 0), "b", channel="got", causes=result or None)


class PureSet(Pit):
    """The same, with the tool that writes declared pure: no edge leads from it."""

    id = "pure-set-v0"

    @tool(pure=True)
    def set(self, lever: int) -> str:
        self.lever = lever
        return "done"


class PureGet(Pit):
    """The same, with the tool that reads declared pure: no edge leads to it."""

    id = "pure-get-v0"

    @tool(pure=True)
    def get(self) -> int:
        return self.lever

    def agents(self):
        return None if not any(self.view("b").made(Act, "b")) else []

    def rewards(self, trace):
        result = [e for e in trace.of("tool_result") if e.agent == "b"]
        yield Amount(float(self.lever), "b", channel="got", causes=result or None)


class TooNarrow(Pit):
    """b goes first; its reward names what b did, though it pays what a set after that."""

    id = "too-narrow-v0"
    roles = {"b": ["get"], "a": ["set"]}  # noqa: RUF012

    def agents(self):
        return None if self.lever == 0 else []

    def rewards(self, trace):
        acts = [e for e in trace.of("act") if e.agent == "b"]
        yield Amount(float(self.lever), "b", channel="got", causes=acts[:1])


class Nothing(Pit):
    """The same, with a reward that says it came from nothing."""

    id = "nothing-v0"

    def rewards(self, trace):
        yield Amount(float(self.got or 0), "b", channel="got", causes=[])


class Leak(Env):
    """What b is shown, in its first and only turn, tells what a told c, past every edge."""

    id = "leak-v0"
    roles = {"a": ["message"], "b": ["stop"], "c": ["message"]}  # noqa: RUF012

    def observe(self, agent):
        told = [e.span for e in self._events if e.agent == "a" and e.kind == "message"]
        return f"a said {len(told)} things" if agent == "b" else None

    def legal(self, agent):
        return {"a": ["message c: hello", "none"], "b": ["stop: x"], "c": ["none"]}[agent]

    def rewards(self, trace):
        return [(1.0, None)]


def reward_of(trace, channel):
    return next(e for e in trace.events if isinstance(e, Reward) and e.channel == channel)


def test_a_reward_of_b_depends_on_a_where_a_set_what_b_read():
    """The edge of the shared environment leads from b's result to a's; b saw nothing of a."""
    traces = [t for t in played(Pit(), groups=4) if reward_of(t, "got").amount]
    assert traces
    for trace in traces:
        assert depends(trace, reward_of(trace, "got")) == ("a", "b")
    kept = check_env(Pit())
    assert kept.clauses["edges"] > 0


PITS = {
    PureSet: "pure: without set running, event",
    PureGet: "pure: get read what the run had changed by event",
    TooNarrow: "narrow: its reward at event .* names causes, but editing what a did",
    Nothing: "narrow: its reward at event .* names causes, but editing what",
    Leak: "edges: editing what a did at event .* moved content",
}


@pytest.mark.parametrize("env", PITS, ids=lambda env: env.__name__)
def test_the_same_pit_with_an_edge_or_a_cause_left_out_is_convicted(env):
    """Where the graph does not show a, the check does."""
    with pytest.raises(Refused, match=f"^{env.id} breaks its contract, clause {PITS[env]}"):
        check_env(env())


def test_without_the_edge_depends_misses_a():
    """Why it matters: of the pure pit the graph says that b's reward is b's alone."""
    trace = next(t for t in played(PureSet(), groups=4) if reward_of(t, "got").amount)
    assert depends(trace, reward_of(trace, "got")) == ("b",)


def test_a_reward_of_the_whole_run_depends_on_everybody():
    """Rewards without causes descend from every agent, also the second one, and through waits."""
    for trace in played(Office(), groups=3):
        lived = {event.agent for event in trace.of("act")}
        for reward in trace.of("reward"):
            assert set(depends(trace, reward)) == lived


def test_who_could_have_stopped_is_among_those_a_reward_depends_on():
    """A declined stop: without it the later events would not have been."""

    class Going(Pit):
        id = "going-v0"
        roles = {"a": ["stop"], "b": ["get"]}  # noqa: RUF012

        def legal(self, agent):
            return {"on": "none", "end": "stop: now"} if agent == "a" else {"get": "call get {}"}

    team = {"a": Scripted(["none"]), "b": Softmax()}
    trace = played(Going(), team)[0]
    assert set(depends(trace, reward_of(trace, "got"))) == {"a", "b"}


def test_who_was_only_shown_something_did_nothing():
    """A reward may descend from what b was shown; b has no part in that."""
    said = Act(trace_id="t", seq=0, agent="a")
    shown = Observe(trace_id="t", seq=1, agent="b", causes=(Cause(seq=0, kind="consumes"),))
    paid = Reward(trace_id="t", seq=2, agent="env", causes=(Cause(seq=1, kind="rewards"),))
    assert depends(Trace(Header(trace_id="t", counterpoint=1), (said, shown, paid)), 2) == ("a",)
