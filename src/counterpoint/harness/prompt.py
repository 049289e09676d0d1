"""What a policy reads: built from the `observe` event and the fold of the run, and nothing else."""

from __future__ import annotations

from typing import Any, cast

from msgspec import UNSET, Raw

from counterpoint.harness.run import Run
from counterpoint.policies import Observation, Shown
from counterpoint.provenance import Labelled, wrap
from counterpoint.schema import Act, AnyEvent, Observe, Spawn, ToolCall, ToolResult
from counterpoint.spelling import freeze


def observation_of(run: Run, seen: Observe) -> Observation:
    """The observation that belongs to an `observe` event."""
    return Observation(
        agent=seen.agent,
        role=run.role(seen.agent),
        turns=tuple(new_turns(run, seen)),
        anchor=seen.anchor,
        context=lambda: whole_context(run, seen.agent),
    )


def new_turns(run: Run, seen: Observe) -> list[Shown]:
    """What an observation shows for the first time, in its order; the environment's words last."""
    turns = [_turn(run, run.events[source.seq], seen.agent) for source in seen.sources]
    if seen.content_raw is not UNSET:
        turns.append(Shown("user", "env", text_of(seen.content)))
    return turns


def whole_context(run: Run, agent: str) -> list[Shown]:
    """Everything an agent has before its eyes, by the context rule of its observations."""
    return [_turn(run, run.events[seq], agent) for seq in run.world.agents[agent].context]


def text_of(value: Any) -> str:
    """A payload as text: itself, nothing for None, else its JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return bytes(cast(Raw, freeze(value))).decode()


def _turn(run: Run, event: AnyEvent, reader: str) -> Shown:
    """Another's words are a user turn, in a block that says whose they are and how far to trust."""
    if isinstance(event, Act):
        return Shown("assistant", event.agent, event.text or "")
    if isinstance(event, Observe):
        return Shown("user", "env", text_of(event.content))
    origin, said = event.agent, said_by(run, event)
    if isinstance(event, Spawn):
        said = f"spawned {event.child}" if event.agent == reader else event.context
    elif isinstance(event, ToolResult):
        origin = run.tool_of(event)
        said = event.content if event.error is None else f"error: {event.error}"
    return Shown("user", origin, wrap(Labelled(text_of(said), origin, event.trust)))


def said_by(run: Run, event: AnyEvent) -> Any:
    """The content of an event, taken from its act where it names only a span of the text."""
    own = getattr(event, "content", None)
    span = getattr(event, "span", None)
    if own is not None or span is None:
        return event.arguments if isinstance(event, ToolCall) else own
    authorised = (run.events[c.seq] for c in event.causes if c.kind == "authorizes")
    text = next((act.text for act in authorised if isinstance(act, Act)), None)
    return None if text is None else text[span[0] : span[1]]
