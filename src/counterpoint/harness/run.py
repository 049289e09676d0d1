"""A run in progress, and how an event of it is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from counterpoint.envs import Amount, Env
from counterpoint.harness.contract import amounts_of, settings_of
from counterpoint.policies import Observation, Policy, Shown
from counterpoint.schema import (
    Act,
    AnyEvent,
    Cause,
    Event,
    Header,
    Item,
    Observe,
    Reward,
    ToolCall,
    ToolResult,
    Trace,
    Write,
)
from counterpoint.spelling import Refused
from counterpoint.streams import Domain, Draws, Keys, key_at, keys_of
from counterpoint.tools import Rule, Spec, rules_of, verdict
from counterpoint.vocabulary import DECISIONS, TRUST, Trust
from counterpoint.world import World, apply

READ = "read"
"""Built-in tool of every role that lists it, unless the environment has one of that name: the
content of a shared artefact."""

Human = Callable[[Observation, Item], bool]
"""Asked where a permission rule says `ask`: whether the item may go ahead."""

_RANK: dict[str, int] = {label: rank for rank, label in enumerate(TRUST)}
_ORDER = "inferred:order"


class Run:
    """A run in progress.

    The header, the events and the environment's hidden state are all there is: `world` is the fold
    of the events, and what else stands here is looked up from them once. To go on from a prefix,
    give its events and an environment that has been brought to the same place.

    Raises:
        Refused: the header's config cannot be read.
    """

    def __init__(
        self,
        header: Header,
        env: Env,
        policies: Mapping[str, Policy],
        events: Iterable[AnyEvent] = (),
        human: Human | None = None,
    ) -> None:
        config = header.config
        settings = settings_of(config)
        self.header = header
        self.env = env
        self.policies = policies
        self.human = human
        self.limits: dict[str, int] = settings["limits"]
        self.latency: dict[str, float] = settings["latency"]
        self.rules: list[Rule] = rules_of(config)
        self.keys: Keys = keys_of(header.seed or 0, header.fork.keys if header.fork else ())
        self.specs: dict[str, Spec] = env.tools()
        self.world = World(msgspec.structs.replace(header, fork=None))
        self.events: list[AnyEvent] = []
        self.changed: int | None = None
        """The last result that may have changed the environment."""
        self.versions: dict[tuple[str, str], int] = {}
        """The version of an artefact that an agent has last seen: (agent, artefact) → version."""
        self.shown: tuple[Observe, tuple[Shown, ...]] | None = None
        """The last observation that was put together, and its rendered turns."""
        self.said: tuple[Act, str] | None = None
        """The last act that was put together or looked at, and its text."""
        self._decisions: dict[tuple[str, Trust], tuple[str, ...]] = {}
        self._amounts: list[Amount] | None = None
        self._ends: tuple[int, ...] | None = None
        for event in events:
            self.emit(event)

    def emit(self, event: AnyEvent) -> AnyEvent:
        """Take an event in: the world moves on."""
        if event.seq != len(self.events):
            raise Refused(f"event {event.seq} cannot follow event {len(self.events) - 1}")
        self.events.append(event)
        apply(self.world, event)
        if notes := _NOTES.get(type(event)):
            notes(self, event)
        return event

    def trace(self) -> Trace:
        """What has been played so far."""
        return Trace(self.header, tuple(self.events))

    def draws(self, domain: Domain, owner: str, k: int, asked_at: int) -> Draws:
        """The draws of one call; the key is the one in force where the call was asked for."""
        return Draws(key_at(self.keys, asked_at), domain, owner, k)

    def amounts(self) -> list[Amount]:
        """What the environment pays for the run, asked once."""
        if self._amounts is None:
            self._amounts = amounts_of(self.env, self.trace(), self.world)
        return self._amounts

    def ends(self) -> tuple[int, ...]:
        """Events that nothing follows from: what descends from them depends on the whole run.

        An edge that was inferred from order alone is no descent, and so it hides no end.
        """
        if self._ends is None:
            played = [event for event in self.events if not isinstance(event, Reward)]
            used = {link.seq for e in played for link in e.causes if link.basis != _ORDER}
            self._ends = tuple(event.seq for event in played if event.seq not in used)
        return self._ends

    def role(self, agent: str) -> str:
        """The role of an agent."""
        return self.world.agents[agent].role

    def alive(self) -> int:
        """How many agents are alive."""
        return sum(agent.alive for agent in self.world.agents.values())

    def decisions(self, role: str, trust: Trust) -> tuple[str, ...]:
        """The decisions that a role may take with such text before its eyes."""
        verbs = self._decisions.get((role, trust))
        if verbs is None:
            allowed = self.env.roles.get(role, ())
            asked = ((v, verdict(self.rules, allowed, role, v, trust)[0]) for v in DECISIONS)
            verbs = self._decisions[role, trust] = tuple(v for v, may in asked if may != "deny")
        if "spawn" in verbs and self.alive() >= self.limits["agents"]:
            return tuple(verb for verb in verbs if verb != "spawn")
        return verbs

    def text_of(self, act: Act) -> str:
        """The text of an act, which each of its effects asks for."""
        if self.said is None or self.said[0] is not act:
            self.said = (act, act.text or "")
        return self.said[1]

    def call_of(self, result: ToolResult) -> ToolCall | None:
        """The call that a result answers."""
        call = None if result.call is None else self.events[result.call]
        return call if isinstance(call, ToolCall) else None

    def is_read(self, call: ToolCall | None) -> bool:
        """Whether a call is one of the built-in tool."""
        return call is not None and call.tool == READ and READ not in self.specs

    # -- what is looked up from the events -------------------------------------------------------

    def _note_result(self, event: ToolResult) -> None:
        """A call that was denied, and one that reads only what the reset fixed, change nothing."""
        call = self.call_of(event)
        if call is None or call.verdict == "deny" or self.is_read(call):
            return
        spec = self.specs.get(call.tool)
        if spec is None or not spec.pure:
            self.changed = event.seq

    def _note_write(self, event: Write) -> None:
        self.versions[event.agent, event.artefact] = event.version

    def _note_observe(self, event: Observe) -> None:
        """What an agent has read of an artefact counts once it was shown to it."""
        for source in event.sources:
            result = self.events[source.seq]
            if isinstance(result, ToolResult) and self.is_read(self.call_of(result)):
                for write in (self.events[link.seq] for link in result.causes):
                    if isinstance(write, Write):
                        self.versions[event.agent, write.artefact] = write.version


_NOTES: dict[type[Event], Callable[[Run, Any], None]] = {
    ToolResult: Run._note_result,
    Write: Run._note_write,
    Observe: Run._note_observe,
}


def made(
    run: Run,
    kind: type[Event],
    agent: str,
    causes: Iterable[Cause],
    own: Trust = "trusted",
    **fields: Any,
) -> AnyEvent:
    """The next event, with its clock and trust: it starts when the last of its causes has ended,
    and is trusted no more than its own source (`own`) and the least trusted of them.

    A `trust` among the fields stands, whatever the causes are.
    """
    events = run.events
    links = tuple(causes)
    if not links and events:
        links = (Cause(seq=len(events) - 1, kind="precedes", basis=_ORDER),)
    start, rank = 0.0, _RANK[own]
    for link in links:
        before = events[link.seq]
        if before.t_end is not None and before.t_end > start:
            start = before.t_end
        if _RANK[before.trust] < rank and link.basis != _ORDER:
            rank = _RANK[before.trust]
    if "trust" not in fields:
        fields["trust"] = TRUST[rank]
    event = kind(
        trace_id=run.header.trace_id,
        t_start=start,
        t_end=start + run.latency.get(kind.kind, 0.0),
        seq=len(events),
        agent=agent,
        causes=links,
        **fields,
    )
    return cast(AnyEvent, event)


def environment(run: Run) -> list[Cause]:
    """The edge from the shared state: whatever the environment computes descends from the last
    result that may have changed it.
    """
    if run.changed is None:
        return []
    return [Cause(seq=run.changed, kind="derives", basis="inferred:environment")]


def turn_edge(run: Run, links: Iterable[Cause]) -> list[Cause]:
    """The edge for what the environment decided about turns: it follows whatever was last."""
    last = len(run.events) - 1
    if last < 0 or any(link.seq == last for link in links):
        return []
    return [Cause(seq=last, kind="precedes", basis="inferred:turn")]
