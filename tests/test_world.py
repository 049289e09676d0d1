import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.lanes import known
from counterpoint.schema import (
    KINDS,
    AgentRef,
    AgentReturn,
    Cause,
    Delegate,
    ForkRef,
    Header,
    Message,
    Observe,
    Source,
    Target,
    Trace,
)
from counterpoint.spelling import freeze
from counterpoint.vocabulary import RESERVED
from counterpoint.world import World, apply, fold

DEFAULTS = {
    "spawn": {"child": "c"},
    "despawn": {"child": "c"},
    "delegate": {"to": ("b",)},
    "message": {"to": ("b",)},
    "deliver": {"message": 0},
    "tool_call": {"tool": "search"},
    "write": {"artefact": "draft", "version": 1},
    "agent_return": {"to": ("a",)},
    "intervene": {"do": "edit"},
    "safety": {"rule": "r", "effect": "flagged"},
    "custom": {"name": "vendor.kind"},
}
"""What each kind needs to exist."""


def trace_of(*events, delivery="implicit", agents=(), fork=None):
    """A trace of (kind, agent, fields) in order; `sources` are given as seqs."""
    first = 0 if fork is None else fork.seq
    made = []
    for seq, (kind, agent, *fields) in enumerate(events, first):
        named = DEFAULTS.get(kind, {}) | (fields[0] if fields else {})
        if "sources" in named:
            named["sources"] = tuple(Source(seq=s) for s in named["sources"])
        for payload in ("content", "text", "context", "answer", "arguments"):
            if payload in named and not (kind == "observe" and payload == "context"):
                named[f"{payload}_raw"] = freeze(named.pop(payload))
        made.append(KINDS[kind](trace_id="t", seq=seq, agent=agent, **named))
    refs = tuple(AgentRef(id=name, role=role) for name, role in agents)
    header = Header(trace_id="t", counterpoint=1, delivery=delivery, agents=refs, fork=fork)
    return Trace(header, tuple(made))


def boxes(trace):
    return {name: list(agent.inbox) for name, agent in fold(trace).agents.items()}


# -- mailboxes -----------------------------------------------------------------------------------


def test_a_message_waits_until_it_is_shown():
    """Sent without deliveries, it lies in the receiver's mailbox at once and leaves it for `seen`
    when an observation shows it.
    """
    trace = trace_of(
        ("message", "a", {"to": ("b", "c")}),
        ("observe", "b", {"sources": (0,)}),
    )
    assert boxes(trace[:1]) == {"a": [], "b": [0], "c": [0]}
    assert boxes(trace) == {"a": [], "b": [], "c": [0]}
    assert list(fold(trace).agents["b"].seen) == [0]


def test_with_deliveries_a_message_is_in_flight_first():
    """Under explicit delivery it reaches each mailbox with its own deliver event, once."""
    trace = trace_of(
        ("message", "a", {"to": ("b", "c")}),
        ("deliver", "b", {"message": 0}),
        ("deliver", "b", {"message": 0}),
        ("observe", "b", {"sources": (0,)}),
        ("deliver", "b", {"message": 0}),
        delivery="explicit",
    )
    assert boxes(trace[:1]) == {"a": [], "b": [], "c": []}
    assert fold(trace[:1]).in_flight == {0: {"b", "c"}}
    assert fold(trace[:2]).in_flight == {0: {"c"}}
    assert boxes(trace[:3])["b"] == [0]
    assert boxes(trace) == {"a": [], "b": [], "c": []}


def test_what_is_shown_before_it_is_delivered_is_no_longer_in_flight():
    """Validation reports it; the world does not hold it twice."""
    trace = trace_of(("message", "a"), ("observe", "b", {"sources": (0,)}), delivery="explicit")
    assert fold(trace).in_flight == {}
    assert list(fold(trace).agents["b"].seen) == [0]


def test_a_result_goes_to_the_caller_at_once():
    """Also where messages need deliveries, and whoever's name the result bears."""
    trace = trace_of(
        ("tool_call", "a"),
        ("tool_call", "b"),
        ("tool_result", "env", {"call": 0}),
        ("tool_result", "b", {"call": 0}),
        delivery="explicit",
    )
    assert fold(trace[:2]).open_calls == {0: "a", 1: "b"}
    assert boxes(trace[:3]) == {"a": [2], "b": []}
    # a second answer to one call is kept where its own name says
    assert boxes(trace) == {"a": [2], "b": [3]}
    assert fold(trace).open_calls == {1: "b"}


def test_reserved_ids_have_no_mailbox():
    """env, human and harness are nobody: writing to them or as them brings no agent alive."""
    trace = trace_of(("message", "a", {"to": ("human",)}), ("message", "env", {"to": ("a",)}))
    assert boxes(trace) == {"a": [1]}


def test_a_muted_message_reaches_nobody():
    """Muted before or after it was sent, by hand or by a check, it leaves mailboxes and transit, a
    muted delegation releases its waiter, and who has read it has read it.
    """
    muted = ("intervene", "human", {"do": "mute", "target": 0})
    sent = ("delegate", "a", {"to": ("b", "c")})
    read = ("observe", "c", {"sources": (0,)})
    for blocked in (muted, ("safety", "harness", {"effect": "blocked", "target": 0})):
        world = fold(trace_of(sent, read, blocked))
        assert [list(world.agents[x].inbox) for x in "bc"] == [[], []]
        assert list(world.agents["c"].seen) == [0]
        assert world.open_delegations == {}
    late = trace_of(sent, muted, ("deliver", "b", {"message": 0}), delivery="explicit")
    assert fold(late).in_flight == {}
    assert boxes(late) == {"a": [], "b": [], "c": []}
    early = trace_of(("intervene", "human", {"do": "mute", "target": 1}), ("delegate", "a"))
    assert boxes(early) == {"a": []}
    assert fold(early).open_delegations == {}


def test_a_flag_blocks_nothing():
    """A check that only flags leaves the message where it is."""
    trace = trace_of(("message", "a"), ("safety", "harness", {"target": 0}))
    assert boxes(trace) == {"a": [], "b": [0]}


# -- agents --------------------------------------------------------------------------------------


def test_agents_live_from_the_start_their_spawn_or_their_first_deed():
    """Roles come from the header, the spawn, or are the id; a despawned agent stays dead,
    whatever it does, until it is spawned again.
    """
    trace = trace_of(
        ("act", "lead"),
        ("spawn", "lead", {"child": "w.1", "child_role": "worker"}),
        ("spawn", "lead", {"child": "w.2"}),
        ("message", "x", {"to": ("y",)}),
        ("despawn", "lead", {"child": "w.1"}),
        ("act", "w.1"),
        ("spawn", "lead", {"child": "w.1"}),
        agents=[("lead", "planner"), ("idle", "critic")],
    )
    roles = {name: agent.role for name, agent in fold(trace).agents.items()}
    assert roles == {
        "lead": "planner", "idle": "critic", "w.1": "worker", "w.2": "w.2", "x": "x", "y": "y",
    }  # fmt: skip
    assert {n for n, a in fold(trace[:0]).agents.items() if a.alive} == {"lead", "idle"}
    assert [fold(trace[:t]).agents["w.1"].alive for t in (2, 5, 6, 7)] == [True, False, False, True]


def test_a_newborn_finds_its_context_in_its_mailbox():
    """What a spawn tells the child waits to be shown, like a message."""
    trace = trace_of(("spawn", "a", {"context": "look"}), ("spawn", "a", {"child": "d"}))
    assert boxes(trace) == {"a": [], "c": [0], "d": []}


def test_those_who_only_score_or_check_are_no_agents():
    """A judge, a checker and a foreign record bring nobody alive."""
    events = [("reward", "judge"), ("safety", "guard"), ("custom", "x"), ("intervene", "editor")]
    assert fold(trace_of(*events)).agents == {}


# -- the rest of the state ------------------------------------------------------------------------


def test_delegations_are_open_until_returned():
    """Three sub-agents that return out of order close three; a return that names its delegation
    closes that one, a return without a name the oldest owed, a despawn all that the child owed.
    """
    asked = [("delegate", "a", {"to": (x,)}) for x in ("b", "c", "b", "d")]
    named = {"causes": (Cause(seq=2, kind="returns"),)}
    trace = trace_of(
        *asked,
        ("agent_return", "c"),
        ("agent_return", "b", named),
        ("agent_return", "b"),
        ("agent_return", "b"),
        ("despawn", "a", {"child": "d"}),
    )
    still = [list(fold(trace[:t]).open_delegations) for t in range(4, 10)]
    assert still == [[0, 1, 2, 3], [0, 2, 3], [0, 3], [3], [3], []]


def test_a_delegation_to_two_is_open_until_both_returned():
    """And one to a reserved id is never owed."""
    trace = trace_of(
        ("delegate", "a", {"to": ("b", "c")}), ("agent_return", "c"), ("agent_return", "b"),
        ("delegate", "a", {"to": ("human",)}),
    )  # fmt: skip
    assert [fold(trace[:t]).open_delegations for t in (1, 2, 3, 4)] == [
        {0: {"b", "c"}}, {0: {"b"}}, {}, {},
    ]  # fmt: skip


def test_the_last_write_stands():
    """An artefact has the version of its last write and knows which event that was."""
    trace = trace_of(
        ("write", "a", {"version": 1}),
        ("write", "b", {"version": 2, "base_version": 1}),
        ("write", "a", {"artefact": "memory/k", "version": 1}),
        ("write", "a", {"version": 2, "base_version": 1, "conflict": True}),
    )
    assert fold(trace[:3]).artefacts == {"draft": (2, 1), "memory/k": (1, 2)}
    assert fold(trace).artefacts["draft"] == (2, 3)


def test_rewards_add_up_by_channel_and_missing_is_not_zero():
    """1 + .5 on the team's channel; a channel that was only ever unscored has no sum."""
    trace = trace_of(
        ("reward", "env", {"amount": 1.0}),
        ("reward", "env", {"amount": 0.5, "target": Target(agent="a")}),
        ("reward", "env", {"amount": None}),
        ("reward", "env", {"amount": None, "channel": "quality"}),
        ("reward", "env", {"amount": -2.0, "channel": "cost"}),
    )
    assert fold(trace).rewards == {"team": 1.5, "cost": -2.0}


def test_the_first_stop_stands():
    """A run ends once."""
    trace = trace_of(("act", "a"), ("stop", "a", {"reason": "answered"}), ("stop", "a"))
    assert fold(trace[:1]).stopped is None
    assert fold(trace).stopped == (1, "answered")


def test_seqs_go_on_where_the_trace_ends():
    """Empty, full, and in a fork, whose first event is not 0."""
    fork = ForkRef(trace_id="p", seq=7, digest="0" * 32, do="mute")
    assert fold(trace_of()).next_seq == 0
    assert fold(trace_of(("act", "a"), ("act", "a"))).next_seq == 2
    assert fold(trace_of(fork=fork)).next_seq == 7
    assert fold(trace_of(("act", "a"), fork=fork)).next_seq == 8


def test_a_fork_goes_on_from_its_parents_world():
    """The parent's prefix with the fork's events applied is the world of the whole branch."""
    whole = [("message", "a"), ("act", "a"), ("observe", "b", {"sources": (0,)}), ("act", "b")]
    parent = trace_of(*whole)
    ref = ForkRef(trace_id="t", seq=2, digest="0" * 32, do="keep")
    world = fold(parent[:2])
    for event in trace_of(*whole[2:], fork=ref):
        apply(world, event)
    assert world.digest() == fold(parent).digest()


# -- what an agent has before its eyes -------------------------------------------------------------


TALK = trace_of(
    ("observe", "b", {"content": "You are b."}),
    ("act", "b", {"text": "ready"}),
    ("message", "a", {"content": "2 + 2?"}),
    ("observe", "b", {"sources": (2,), "content": "clock: 5"}),
    ("act", "b", {"text": "4"}),
    ("observe", "b", {"context": "fold", "kept": (2, 4)}),
    ("observe", "b", {"context": "reset", "content": "You are new."}),
)


def context(trace, agent):
    return list(fold(trace).agents[agent].context)


def test_context_is_what_was_shown_told_and_said_in_order():
    """Before its second turn b has its own first one, a's question and the environment's words."""
    assert context(TALK[:4], "b") == [0, 1, 2, 3]


def test_a_fold_keeps_and_a_reset_forgets_but_seen_remembers():
    """The context shrinks to the kept events, then to nothing but what is new; `seen` does not."""
    assert context(TALK[:6], "b") == [2, 4]
    assert context(TALK, "b") == [6]
    assert list(fold(TALK).agents["b"].seen) == [2]


def test_what_an_agent_knows_is_said_in_words():
    """A message that only names characters of its act's text is told with those characters, a
    call with its arguments, the environment's words as they are, and an event that the trace does
    not hold by its number.
    """
    authorised = (Cause(seq=0, kind="authorizes"),)
    trace = trace_of(
        ("act", "a", {"text": "@b hello there"}),
        ("message", "a", {"span": (3, 8), "causes": authorised}),
        ("tool_call", "a", {"arguments": {"q": 1}}),
        ("observe", "b", {"sources": (1, 2, 40), "content": "dark"}),
    )
    assert list(known(trace, fold(trace))) == [
        "a knows 0, act by a: @b hello there",
        "b knows 1, message by a: → b: hello",
        "b knows 2, tool_call by a: search {'q': 1}",
        "b knows 40, which is not in this trace",
        "b knows 3, observe by b: saw 1, 2, 40 dark",
    ]


# -- digest and JSON ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("aggregate", "custom", "observe")])
def test_every_kind_that_changes_the_world_changes_its_digest(kind):
    """Beyond the count of events: the digest covers each part of the state."""
    changes = {
        "reward": {"amount": 0.0},
        "despawn": {"child": "b"},
        "deliver": {"message": 9},
        "intervene": {"do": "mute", "target": 0},
        "safety": {"effect": "blocked", "target": 0},
        "spawn": {"child": "new"},
    }
    start = [("message", "a", {"to": ("b",)}), ("delegate", "a", {"to": ("b",)})]
    event = (kind, "b" if kind == "agent_return" else "a", changes.get(kind, {}))
    nothing = ("custom", "a")
    assert fold(trace_of(*start, event)).digest() != fold(trace_of(*start, nothing)).digest()


def test_whether_a_sender_waits_is_part_of_the_digest():
    """Two delegations that differ in `waits` alone leave different worlds."""
    waits, goes_on = (trace_of(("delegate", "a", {"waits": w})) for w in (True, False))
    assert fold(waits).digest() != fold(goes_on).digest()


def test_the_digest_ignores_the_order_in_which_agents_appeared():
    """Two worlds with equal parts are equal."""
    one = trace_of(("act", "env"), agents=[("a", "r"), ("b", "r")])
    two = trace_of(("act", "env"), agents=[("b", "r"), ("a", "r")])
    assert fold(one).digest() == fold(two).digest()


def test_as_json_a_world_has_the_documented_keys():
    """Agents with id, role, alive, inbox, seen; artefacts; open calls; the digest."""
    trace = trace_of(("message", "a"), ("tool_call", "b"), ("write", "a"))
    world = fold(trace)
    assert world.as_dict() == {
        "agents": [
            {"id": "a", "role": "a", "alive": True, "inbox": [], "seen": []},
            {"id": "b", "role": "b", "alive": True, "inbox": [0], "seen": []},
        ],
        "artefacts": {"draft": {"version": 1, "seq": 2}},
        "open_calls": [1],
        "digest": world.digest(),
    }


# -- over random traces --------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "human", "env"])
SEQS = st.integers(-1, 12)
FIELDS = {
    "observe": {
        "sources": st.lists(SEQS, max_size=3).map(tuple),
        "context": st.sampled_from(["append", "append", "reset", "fold"]),
        "kept": st.lists(SEQS, max_size=2).map(tuple),
        "content": st.none() | st.just("hm"),
    },
    "act": {"text": st.none() | st.just("hm")},
    "spawn": {"child": NAMES, "context": st.none() | st.just("go")},
    "despawn": {"child": NAMES},
    "delegate": {"to": st.lists(NAMES, max_size=3).map(tuple), "waits": st.booleans()},
    "message": {"to": st.lists(NAMES, max_size=3).map(tuple)},
    "deliver": {"message": SEQS},
    "tool_result": {"call": st.none() | SEQS},
    "write": {"artefact": NAMES, "version": st.integers(0, 3)},
    "agent_return": {
        "to": st.lists(NAMES, max_size=2).map(tuple),
        "causes": st.lists(st.builds(Cause, seq=SEQS, kind=st.just("returns")), max_size=1).map(
            tuple
        ),
    },
    "reward": {"amount": st.none() | st.floats(-1, 1)},
    "intervene": {"do": st.sampled_from(["mute", "edit"]), "target": st.none() | SEQS},
    "safety": {"effect": st.sampled_from(["blocked", "flagged"]), "target": st.none() | SEQS},
}


@st.composite
def traces(draw, kinds=tuple(KINDS)):
    """Up to 12 events of all kinds, sensible or not, under either delivery."""
    events = [
        (kind, draw(NAMES), draw(st.fixed_dictionaries(FIELDS.get(kind, {}))))
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=12))
    ]
    agents = draw(st.sampled_from([(), (("a", "r"),)]))
    return trace_of(
        *events, delivery=draw(st.sampled_from(["implicit", "explicit"])), agents=agents
    )


@given(traces(), st.integers(0, 12))
def test_a_world_goes_on_from_any_prefix(trace, t):
    """Folding a prefix and applying the rest gives the fold of the whole, whatever the events say;
    a prefix taken by folding does not notice what came after.
    """
    world = fold(trace[:t])
    before = world.digest()
    for event in trace.events[t:]:
        apply(world, event)
    assert world.digest() == fold(trace).digest()
    assert fold(trace[:t]).digest() == before
    assert len(list(known(trace, world))) == sum(len(a.context) for a in world.agents.values())


@given(traces(("observe", "act", "delegate", "message", "deliver", "agent_return", "tool_result")))
def test_what_was_sent_is_in_exactly_one_place(trace):
    """Per receiver, a message is in flight, in the mailbox, or seen: one of the three, at every
    prefix. Only what an observation showed before it existed may wait although it was seen.
    """
    for t in range(len(trace) + 1):
        world = fold(trace[:t])
        early = {
            (event.agent, source.seq)
            for event in trace.events[:t]
            if isinstance(event, Observe)
            for source in event.sources
            if source.seq >= event.seq
        }
        for event in trace.events[:t]:
            if not isinstance(event, Message | Delegate | AgentReturn):
                continue
            for name in set(event.to) - RESERVED:
                agent = world.agents[name]
                flying = name in world.in_flight.get(event.seq, ())
                places = [flying, event.seq in agent.inbox, event.seq in agent.seen]
                assert sum(places) == 1 or (name, event.seq) in early


@given(traces())
def test_a_world_read_from_the_header_alone_is_the_empty_fold(trace):
    """Before the first event there is what the header says, and nothing else."""
    assert World(trace.header).digest() == fold(trace[:0]).digest()
    assert set(World(trace.header).agents) == {ref.id for ref in trace.header.agents}
