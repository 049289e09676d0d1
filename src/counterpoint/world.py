"""The room of time, as state: the public world that a trace's events add up to.

`apply` is the only place where state changes, and `fold` is `apply` over all events, so a world can
be rebuilt at any prefix from the file alone, without the code that played it. It knows what agents,
mailboxes, artefacts and calls are; it knows no environment's hidden facts.

The fold is total. Events that make no sense (a result without a call, a despawn of a stranger, a
delivery of nothing) change what they still can and raise nothing; saying that they are wrong is the
business of validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import UNSET

from counterpoint.schema import (
    Act,
    AgentReturn,
    Aggregate,
    AnyEvent,
    Custom,
    Delegate,
    Deliver,
    Despawn,
    Effect,
    Header,
    Intervene,
    Item,
    Message,
    Observe,
    Reward,
    Safety,
    Spawn,
    Stop,
    ToolCall,
    ToolResult,
    Trace,
    Write,
)
from counterpoint.spelling import CANONICAL, digest_of
from counterpoint.vocabulary import DECISIONS, RESERVED

Seqs: TypeAlias = dict[int, None]
"""Distinct seqs in the order they came: a set that remembers order."""

Ids: TypeAlias = set[str]
"""Ids of agents that something is still open for."""


class Agent:
    """What the world knows of one agent.

    `mail` is on its way to it; `inbox` holds what was put in its mailbox and has not been shown to
    it yet; `seen` every event that an observation has shown it, in order of first sight; `context`
    what it has before its eyes now (what it was shown, what the environment told it, its own acts);
    a reset empties it, a fold replaces it by the events that are kept.
    """

    __slots__ = (
        "acts",
        "alive",
        "births",
        "context",
        "fresh",
        "inbox",
        "last",
        "mail",
        "results",
        "role",
        "seen",
    )

    def __init__(self, role: str) -> None:
        self.role = role
        self.alive = True
        self.acts = 0
        """Turns it has taken."""
        self.results = 0
        """Results it has been given."""
        self.births = 0
        """Times it spawned or declined to."""
        self.last: list[int] = []
        """What its next turn follows: its last observation and act, or the spawn that made it."""
        self.mail: Seqs = {}
        """Sent to it and not yet delivered. Empty under implicit delivery."""
        self.inbox: Seqs = {}
        self.seen: Seqs = {}
        self.context: Seqs = {}
        self.fresh: Seqs = {}
        """What it was shown since it last aggregated."""


class Control:
    """Where in a turn the run stands, so that it can go on between two items of one act.

    An observation is followed by its agent's act, an act by its items in order.
    """

    __slots__ = (
        "act",
        "calls",
        "consent",
        "cursor",
        "handled",
        "items",
        "observe",
        "paid",
        "tokens",
        "turns",
        "waits",
    )

    def __init__(self) -> None:
        self.cursor: str | None = None
        """Who acted last."""
        self.observe: int | None = None
        """An observation whose act has not come."""
        self.act: int | None = None
        """The last act."""
        self.items: tuple[Item, ...] = ()
        self.handled = 0
        """Its items, and how many of them are dealt with."""
        self.consent: int | None = None
        """The event in which a human answered for the item that is next."""
        self.waits: dict[int, str] = {}
        """Delegations whose sender goes on only after the return: seq → sender."""
        self.turns = 0
        self.calls = 0
        self.tokens = 0
        self.paid = 0
        """Rewards since the stop."""

    @property
    def next_item(self) -> int | None:
        """Index of the next item that does something; None if the turn is over."""
        for index in range(self.handled, len(self.items)):
            if self.items[index].verb not in INERT:
                return index
        return None


INERT: frozenset[str] = frozenset({"none", *(f"no_{verb}" for verb in DECISIONS)})
"""Verbs that have no effect."""


class World:
    """The public state of a run between two events; `World(header)` is the state before the first.

    Changed by `apply` alone. Seqs stand for events throughout.
    """

    __slots__ = (
        "agents",
        "artefacts",
        "blocked",
        "control",
        "explicit",
        "next_seq",
        "open_calls",
        "open_delegations",
        "rewards",
        "stopped",
    )

    def __init__(self, header: Header) -> None:
        self.explicit = header.delivery == "explicit"
        self.agents = {ref.id: Agent(ref.role) for ref in header.agents}
        """Every agent that was ever alive, by id; the despawned ones too."""
        self.artefacts: dict[str, tuple[int, int]] = {}
        """Name → (version, seq of the write that made it)."""
        self.open_calls: dict[int, str] = {}
        """Calls without a result: seq → caller."""
        self.open_delegations: dict[int, Ids] = {}
        """Delegations without a return: seq → agents that still owe one."""
        self.blocked: Seqs = {}
        """Events that reach nobody: muted by hand, or blocked by a check."""
        self.stopped: tuple[int, str] | None = None
        """(seq, reason) of the first stop."""
        self.rewards: dict[str, float] = {}
        """Sum of the scored amounts of each channel."""
        self.next_seq = 0 if header.fork is None else header.fork.seq
        self.control = Control()

    @property
    def in_flight(self) -> dict[int, Ids]:
        """Sent and not yet delivered: seq → receivers."""
        flying: dict[int, Ids] = {}
        for name, agent in self.agents.items():
            for seq in agent.mail:
                flying.setdefault(seq, set()).add(name)
        return dict(sorted(flying.items()))

    def digest(self) -> str:
        """Digest of the whole public state, so that two worlds can be compared."""
        state = {
            "agents": {
                name: [
                    *(a.role, a.alive, list(a.inbox), list(a.seen), list(a.context), list(a.fresh)),
                    *(a.acts, a.results, a.births, a.last),
                ]
                for name, a in self.agents.items()
            },
            "control": [getattr(self.control, n) for n in Control.__slots__ if n != "waits"],
            "waits": list(self.control.waits.items()),
            "artefacts": self.artefacts,
            "in_flight": _by_seq(self.in_flight),
            "open_calls": list(self.open_calls.items()),
            "open_delegations": _by_seq(self.open_delegations),
            "blocked": sorted(self.blocked),
            "stopped": self.stopped,
            "rewards": {channel: amount.hex() for channel, amount in self.rewards.items()},
            "next_seq": self.next_seq,
        }
        return digest_of(CANONICAL.encode(state)).hex()

    def as_dict(self) -> dict[str, Any]:
        """The state for `show --world --json`: agents in order of appearance, artefacts, calls."""
        return {
            "agents": [
                {
                    "id": name,
                    "role": agent.role,
                    "alive": agent.alive,
                    "inbox": list(agent.inbox),
                    "seen": list(agent.seen),
                }
                for name, agent in self.agents.items()
            ],
            "artefacts": {
                name: {"version": version, "seq": seq}
                for name, (version, seq) in self.artefacts.items()
            },
            "open_calls": list(self.open_calls),
            "digest": self.digest(),
        }


def _by_seq(open_for: dict[int, Ids]) -> list[tuple[int, list[str]]]:
    return [(seq, sorted(ids)) for seq, ids in open_for.items()]


def fold(trace: Trace) -> World:
    """Rebuild the public world after the last event of `trace`; `fold(trace[:t])` at a prefix.

    A fork stores its own events only: folded alone, it knows nothing of its parent's. Its whole
    world is `fold(parent[:fork.header.fork.seq])` with the fork's events applied to it.
    """
    world = World(trace.header)
    for event in trace.events:
        apply(world, event)
    return world


def apply(world: World, event: AnyEvent) -> None:
    """Bring `world` past `event`. The only function that changes a world; it never raises.

    Whoever acts, is addressed or is spawned without having been declared comes alive at that
    moment, its id for a role; `env`, `human` and `harness` never do. After its despawn an agent
    stays dead, whatever it does, until it is spawned again.
    """
    _APPLY[type(event)](world, event)
    if isinstance(event, Effect):
        _handled(world, event.item)
    if event.seq >= world.next_seq:
        world.next_seq = event.seq + 1


# ---------------------------------------------------------------------------------------------
# What each kind does to the world


def _agent(world: World, name: str) -> Agent | None:
    """The agent of that name, brought alive if it is new; None for a reserved one."""
    agent = world.agents.get(name)
    if agent is None and name not in RESERVED:
        agent = world.agents[name] = Agent(name)
    return agent


def _observe(world: World, event: Observe) -> None:
    agent = _agent(world, event.agent)
    if agent is None:
        return
    world.control.observe = event.seq
    agent.last = [event.seq]
    if event.context != "append":
        agent.context = dict.fromkeys(event.kept if event.context == "fold" else ())
    for source in event.sources:
        agent.inbox.pop(source.seq, None)
        agent.mail.pop(source.seq, None)
        agent.seen[source.seq] = agent.fresh[source.seq] = None
        agent.context[source.seq] = None
    if event.content_raw is not UNSET:
        agent.context[event.seq] = None


def _act(world: World, event: Act) -> None:
    control = world.control
    control.cursor, control.observe, control.act = event.agent, None, event.seq
    control.items, control.handled, control.consent = event.items, 0, None
    control.turns += 1
    control.tokens += event.tokens_out or 0
    agent = _agent(world, event.agent)
    if agent is not None:
        agent.context[event.seq] = None
        agent.acts += 1
        agent.births += sum(item.verb in ("spawn", "no_spawn") for item in event.items)
        agent.last = [*agent.last[-1:], event.seq]


def _spawn(world: World, event: Spawn) -> None:
    parent = _agent(world, event.agent)
    if parent is not None and world.explicit:
        parent.inbox[event.seq] = None  # it has to learn the child's id
    child = _agent(world, event.child)
    if child is None:
        return
    child.last = [event.seq]
    child.alive = True
    child.role = event.child_role or child.role
    if event.context_raw is not UNSET:
        child.inbox[event.seq] = None


def _despawn(world: World, event: Despawn) -> None:
    _agent(world, event.agent)
    child = world.agents.get(event.child)
    if child is not None:
        child.alive = False
    for seq in [s for s, owing in world.open_delegations.items() if event.child in owing]:
        _settle(world.open_delegations, seq, event.child)


def _send(world: World, event: Message | Delegate | AgentReturn) -> None:
    _agent(world, event.agent)
    if event.seq in world.blocked:
        return
    seq = event.seq
    for name in event.to:
        receiver = _agent(world, name)
        if receiver is None:
            continue
        delivered = seq in receiver.inbox  # before it was sent: nonsense, but then it is there
        box = receiver.mail if world.explicit and not delivered else receiver.inbox
        box[seq] = None


def _delegate(world: World, event: Delegate) -> None:
    _send(world, event)
    owing = {name for name in event.to if name not in RESERVED}
    if owing and event.seq not in world.blocked:
        world.open_delegations[event.seq] = owing
        if event.waits:
            world.control.waits[event.seq] = event.agent


def _agent_return(world: World, event: AgentReturn) -> None:
    """Settles the delegations that it names as causes; if it names none, the oldest one owed."""
    _send(world, event)
    named = [cause.seq for cause in event.causes if cause.kind == "returns"]
    owed = [seq for seq, owing in world.open_delegations.items() if event.agent in owing]
    for seq in named or owed[:1]:
        _settle(world.open_delegations, seq, event.agent)


def _deliver(world: World, event: Deliver) -> None:
    """Puts the message into the mailbox, unless it was read already or is blocked."""
    agent = _agent(world, event.agent)
    seq = event.message
    if agent is None:
        return
    agent.mail.pop(seq, None)
    if seq not in agent.seen and seq not in world.blocked:
        agent.inbox[seq] = None


def _settle(open_for: dict[int, Ids], seq: int, name: str) -> None:
    ids = open_for.get(seq)
    if ids is not None:
        ids.discard(name)
        if not ids:
            del open_for[seq]


def _tool_call(world: World, event: ToolCall) -> None:
    _agent(world, event.agent)
    world.open_calls[event.seq] = event.agent
    world.control.calls += 1


def _tool_result(world: World, event: ToolResult) -> None:
    """A result goes to the caller at once; where no open call is named, to the event's agent."""
    caller = event.agent if event.call is None else world.open_calls.pop(event.call, event.agent)
    agent = _agent(world, caller)
    if agent is not None:
        agent.results += 1
    if agent is not None and event.seq not in world.blocked:
        agent.inbox[event.seq] = None


def _write(world: World, event: Write) -> None:
    """The last write stands, marked as a conflict or not."""
    _agent(world, event.agent)
    world.artefacts[event.artefact] = (event.version, event.seq)


def _aggregate(world: World, event: Aggregate) -> None:
    agent = _agent(world, event.agent)
    if agent is not None:
        agent.fresh = {}


def _stop(world: World, event: Stop) -> None:
    _agent(world, event.agent)
    if world.stopped is None:
        world.stopped = (event.seq, event.reason)


def _reward(world: World, event: Reward) -> None:
    if world.stopped is not None:
        world.control.paid += 1
    if event.amount is not None:
        world.rewards[event.channel] = world.rewards.get(event.channel, 0.0) + event.amount


def _intervene(world: World, event: Intervene) -> None:
    if event.do == "mute":
        _block(world, event.target)
    elif event.do in ("consent", "refuse") and event.target == world.control.act:
        world.control.consent = event.seq


def _safety(world: World, event: Safety) -> None:
    if event.effect != "blocked":
        return
    if event.target is not None and event.target == world.control.act:
        _handled(world, world.control.next_item)
    else:
        _block(world, event.target)


def _handled(world: World, item: int | None) -> None:
    """An item of the current act is dealt with."""
    if item is not None:
        world.control.handled = item + 1
        world.control.consent = None


def _block(world: World, seq: int | None) -> None:
    """The event reaches nobody who has not read it; if it is a delegation, nobody owes a return."""
    if seq is None:
        return
    world.blocked[seq] = None
    world.open_delegations.pop(seq, None)
    for agent in world.agents.values():
        agent.mail.pop(seq, None)
        agent.inbox.pop(seq, None)


def _nothing(world: World, event: Custom) -> None:
    """What is outside the vocabulary changes nothing."""


_APPLY: dict[type, Callable[[World, Any], None]] = {
    Observe: _observe,
    Act: _act,
    Spawn: _spawn,
    Despawn: _despawn,
    Delegate: _delegate,
    Message: _send,
    Deliver: _deliver,
    ToolCall: _tool_call,
    ToolResult: _tool_result,
    Write: _write,
    AgentReturn: _agent_return,
    Aggregate: _aggregate,
    Stop: _stop,
    Reward: _reward,
    Intervene: _intervene,
    Safety: _safety,
    Custom: _nothing,
}
