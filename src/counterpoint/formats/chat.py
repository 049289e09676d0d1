"""A shared history becomes events: each turn an observation of what is new, and an act.

Chat logs say what was said in which order, not who had seen what. Laid out here, everyone who acts
has seen all of the history that it may see; those edges are marked `inferred:history`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import UNSET

from counterpoint.formats.intake import Anchor, Intake, Rejected, add, caused
from counterpoint.schema import Act, AnyEvent, Item, Message, Observe, Source
from counterpoint.spelling import CANONICAL, Payload, digest_of
from counterpoint.vocabulary import RESERVED, Trust

MAX_AGENTS = 64
"""Most participants of one run: every one of them sees all, so edges grow with their number."""


class Shown(NamedTuple):
    """One content event of the history: who said it (None: a tool), and to whom (None: all)."""

    seq: int
    speaker: str | None
    to: tuple[str, ...] | None


@dataclass
class Chat:
    """The events of one run so far, and how far into the history each agent has read."""

    intake: Intake
    participants: tuple[str, ...]
    events: list[AnyEvent] = field(default_factory=list)
    _history: list[Shown] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)
    _life: dict[str, list[int]] = field(default_factory=dict)
    _addressed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.participants) > MAX_AGENTS:
            n = len(self.participants)
            raise Rejected("run", f"names {n} participants, more than {MAX_AGENTS}; split it")

    def observe(self, agent: str, anchor: str | None, content: Payload = UNSET) -> int:
        """What the agent now sees: everything in the history since it last looked."""
        new = [
            shown.seq
            for shown in self._history[self._read.get(agent, 0) :]
            if shown.speaker != agent and (shown.to is None or agent in shown.to)
        ]
        self._read[agent] = len(self._history)
        before = caused("precedes", self._life.get(agent, ()), "history")
        seq = add(
            self.events,
            Observe,
            self.intake,
            agent,
            causes=before + caused("consumes", new, "history"),
            sources=tuple(Source(seq=s) for s in new),
            content_raw=content,
            anchor=anchor,
        )
        self._life[agent] = [seq]
        return seq

    def act(
        self,
        agent: str,
        observed: int,
        text: Payload,
        items: Sequence[Item],
        *,
        source_id: str | None,
        trainable: bool = True,
        trust: Trust = "unknown",
    ) -> int:
        """The turn itself, computed from what was observed."""
        seq = add(
            self.events,
            Act,
            self.intake,
            agent,
            causes=caused("derives", [observed], "history"),
            text_raw=text,
            items=tuple(items),
            source_id=source_id,
            trainable=trainable,
            trust=trust,
        )
        self._life[agent].append(seq)
        return seq

    def send(
        self, act: int, item: int, to: tuple[str, ...], span: tuple[int, int], trust: Trust
    ) -> None:
        """An agent's message, whose words are a span of its act's text."""
        agent = self.events[act].agent
        causes = caused("authorizes", [act])
        fields = {"to": to, "item": item, "span": span, "trust": trust}
        self._sent(add(self.events, Message, self.intake, agent, causes=causes, **fields), to)

    def speak(self, speaker: str, to: tuple[str, ...], content: Payload) -> None:
        """A message by someone who is no agent: it follows what was last said to them."""
        heard = caused(
            "derives", [s for s in [self._addressed.get(speaker)] if s is not None], "history"
        )
        before = caused("precedes", self._life.get(speaker, ()), "history")
        fields = {"to": to, "content_raw": content}
        seq = add(self.events, Message, self.intake, speaker, causes=before + heard, **fields)
        self._life[speaker] = [seq]
        self._sent(seq, to)

    def show(self, seq: int, speaker: str | None = None) -> None:
        """Put a content event before everyone."""
        self._history.append(Shown(seq, speaker, None))

    def others(self, agent: str) -> tuple[str, ...]:
        """All participants but one, in order of appearance."""
        return tuple(p for p in self.participants if p != agent)

    def _sent(self, seq: int, to: tuple[str, ...]) -> None:
        self._history.append(Shown(seq, self.events[seq].agent, to))
        self._addressed.update(dict.fromkeys(to, seq))


def agent_id(name: str) -> str:
    """An agent's id: its name, unless that is reserved for what is no agent."""
    return f"agent:{name}" if name in RESERVED else name


class Said(NamedTuple):
    """What an anchor sees of a message."""

    role: str
    name: str | None
    content: Payload


def anchors(kind: Anchor, messages: Sequence[Said]) -> Iterator[str]:
    """For each message the key of what stands before it: an observation, not a state.

    `last_message` digests role, name and content of the message before, `last_tool` of the last
    tool message before, `history` of all of them; where there is none, the empty text.
    """
    key = digest_of(b"")
    for role, name, content in messages:
        yield key.hex()
        if kind == "last_tool" and role != "tool":
            continue
        held = None if content is UNSET else content
        own = CANONICAL.encode([role, name, held])
        key = digest_of(key + own) if kind == "history" else digest_of(own)


def roles_of(participants: Mapping[str, str]) -> dict[str, str]:
    """The participants that are agents, with their roles; a human is none."""
    return {name: role for name, role in participants.items() if name not in RESERVED}
