"""A run in progress, and how an event of it is put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import msgspec

from counterpoint.envs import Amount, Env
from counterpoint.policies import Observation, Policy
from counterpoint.schema import (
    TRUST,
    AnyEvent,
    Cause,
    Event,
    Header,
    Item,
    ToolCall,
    ToolResult,
    Trace,
    Trust,
)
from counterpoint.spelling import Refused
from counterpoint.streams import Domain, Draws, Keys, key_at, keys_of
from counterpoint.tools import Rule, Spec, rules_of
from counterpoint.world import World, apply

LIMITS: dict[str, int] = {
    "turns": 200,
    "agents": 32,
    "calls": 500,
    "tokens": 1_000_000,
    "item_bytes": 65_536,
}
"""What a run may use unless its config says otherwise; `item_bytes` bounds one payload."""

LATENCY: dict[str, float] = {"act": 1.0, "tool_result": 0.5}
"""Seconds that the virtual clock gives an event of a kind; others take none."""

READ = "read"
"""Built-in tool of every role that lists it: the content of a shared artefact."""

Human = Callable[[Observation, Item], bool]
"""Asked where a permission rule says `ask`: whether the item may go ahead."""


class Run:
    """A run in progress.

    The header, the events and the environment's hidden state are all there is: `world` is the fold
    of the events, and what else stands here is looked up from them once. To go on from a prefix,
    give its events and an environment that has been brought to the same place.
    """

    def __init__(
        self,
        header: Header,
        env: Env,
        policies: Mapping[str, Policy],
        events: Iterable[AnyEvent] = (),
        human: Human | None = None,
    ) -> None:
        config = header.config or {}
        self.header = header
        self.env = env
        self.policies = policies
        self.human = human
        self.limits: dict[str, int] = {**LIMITS, **config.get("limits", {})}
        self.latency: dict[str, float] = {**LATENCY, **config.get("latency", {})}
        self.rules: list[Rule] = rules_of(config)
        self.keys: Keys = keys_of(header.seed or 0, header.fork.keys if header.fork else ())
        self.specs: dict[str, Spec] = env.tools()
        self.world = World(msgspec.structs.replace(header, fork=None))
        self.events: list[AnyEvent] = []
        self.changed: int | None = None
        """The last result that may have changed the environment."""
        self._amounts: list[Amount] | None = None
        for event in events:
            self.emit(event)

    def emit(self, event: AnyEvent) -> AnyEvent:
        """Take an event in: the world moves on."""
        if event.seq != len(self.events):
            raise Refused(f"event {event.seq} cannot follow event {len(self.events) - 1}")
        self.events.append(event)
        apply(self.world, event)
        if isinstance(event, ToolResult) and not self.pure(self.tool_of(event)):
            self.changed = event.seq
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
            paid = self.env.rewards(self.trace())
            self._amounts = [a if isinstance(a, Amount) else Amount(*a) for a in paid]
        return self._amounts

    def role(self, agent: str) -> str:
        """The role of an agent."""
        return self.world.agents[agent].role

    def tool_of(self, result: ToolResult) -> str:
        """The tool that a result came from."""
        return "" if result.call is None else cast(ToolCall, self.events[result.call]).tool

    def pure(self, tool: str) -> bool:
        """Whether a tool reads only what the reset fixed; the built-in read does."""
        spec = self.specs.get(tool)
        return tool == READ or (spec is not None and spec.pure)


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
    """
    links = tuple(causes)
    if not links and run.events:
        links = (Cause(seq=len(run.events) - 1, kind="precedes", basis="inferred:order"),)
    start, trust = 0.0, TRUST.index(own)
    for link in links:
        before = run.events[link.seq]
        start = max(start, before.t_end or 0.0)
        if link.basis != "inferred:order":
            trust = min(trust, TRUST.index(before.trust))
    event = kind(
        trace_id=run.header.trace_id,
        t_start=start,
        t_end=start + run.latency.get(kind.kind, 0.0),
        seq=len(run.events),
        agent=agent,
        causes=links,
        **{"trust": TRUST[trust], **fields},
    )
    return cast(AnyEvent, event)


def environment(run: Run) -> list[Cause]:
    """The edge from the shared state: whatever the environment computes descends from the last
    result that may have changed it.
    """
    if run.changed is None:
        return []
    return [Cause(seq=run.changed, kind="derives", basis="inferred:environment")]
