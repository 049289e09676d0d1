"""What a policy reads: built from the `observe` event and the fold of the run, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, cast

from msgspec import UNSET, Raw

from counterpoint.harness.run import Run
from counterpoint.policies import Observation, Shown
from counterpoint.provenance import Labelled, spoken, wrap
from counterpoint.schema import (
    Act,
    AnyEvent,
    Observe,
    Source,
    Spawn,
    ToolCall,
    ToolResult,
    content_of,
)
from counterpoint.spelling import Payload, freeze, thaw


def observation_of(run: Run, seen: Observe) -> Observation:
    """The observation that belongs to an `observe` event."""
    if run.shown is not None and run.shown[0] is seen:
        turns = run.shown[1]
    else:
        turns = new_turns(run, seen.agent, seen.sources, seen.content_raw)
    held = run.world.agents[seen.agent]
    return Observation(
        seen.agent,
        held.role,
        turns,
        seen.anchor,
        held.acts,
        lambda: whole_context(run, seen.agent),
    )


def new_turns(
    run: Run, agent: str, sources: Sequence[Source], content: Payload
) -> tuple[Shown, ...]:
    """What an observation shows for the first time, in its order; the environment's words last."""
    turns = [_turn(run, run.events[source.seq], agent) for source in sources]
    if content is not UNSET:
        turns.append(_environment(thaw(content)))
    return tuple(turns)


def whole_context(run: Run, agent: str) -> list[Shown]:
    """Everything an agent has before its eyes, by the context rule of its observations."""
    return [_turn(run, run.events[seq], agent) for seq in run.world.agents[agent].context]


def text_of(value: Any) -> str:
    """A payload as text: itself, nothing for None, else its JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return bytes(cast(Raw, freeze(value))).decode()


def _environment(content: Any) -> Shown:
    return Shown("user", "env", spoken(Labelled(text_of(content), "env", "trusted")))


def _turn(run: Run, event: AnyEvent, reader: str) -> Shown:
    """Another's words are a user turn, in a block that says whose they are and how far to trust."""
    if isinstance(event, Act):
        return Shown("assistant", event.agent, event.text or "", _written(event))
    if isinstance(event, Observe):
        return _environment(event.content)
    origin = event.agent
    if isinstance(event, ToolResult):
        call = run.call_of(event)
        origin = "" if call is None else call.tool
        said = event.content if event.error is None else f"error: {event.error}"
    elif isinstance(event, Spawn):
        said = f"spawned {event.child}" if event.agent == reader else event.context
    else:
        said = said_by(run, event)
    return Shown("user", origin, wrap(Labelled(text_of(said), origin, event.trust)))


def _written(act: Act) -> tuple[int, ...]:
    """The ids that the policy wrote in a turn, without those that it was fed."""
    ids = act.token_ids or ()
    return ids if act.mask is None else tuple(compress(ids, act.mask))


def said_by(run: Run, event: AnyEvent) -> Any:
    """The content of an event, taken from its act where it names only a span of the text."""
    if isinstance(event, ToolCall):
        return event.arguments
    return content_of(event, run.events)
