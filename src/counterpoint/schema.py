"""The vocabulary: every event and edge kind, the header, the seal, and how a line is spelled.

A trace is one rollout: a header line, event lines, a seal line. This module says what those lines
hold, how they are written (`encode`), read (`decode`), and digested (`header_digest`, `chain`).
It reads no files and knows no methods.

Two conventions run through all kinds. The *volatile* fields (who ran it, when, at what cost, under
which foreign id) stand before `seq` and are outside the digest; everything from `seq` on is inside.
A *payload* (text, content, arguments: whatever a model, a tool or a person produced) is kept as
the raw bytes of its JSON value in a field named `…_raw` and decoded when the property of the plain
name is read, so that reading a trace costs nothing for text that nobody looks at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args, overload

import msgspec
from msgspec import UNSET, Struct, field

from counterpoint.spelling import CANONICAL, Payload, Refused, digest_of, thaw
from counterpoint.vocabulary import (
    EdgeKind,
    Family,
    Status,
    StopReason,
    Topology,
    Trust,
    Verb,
    Verifiable,
)

FORMAT = 1
"""Version of the file format, written in every header."""

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that a column of 64-bit integers can hold."""
Span: TypeAlias = tuple[Int64, Int64]


# ---------------------------------------------------------------------------------------------
# Parts of events


class Part(
    Struct, kw_only=True, frozen=True, omit_defaults=True, gc=False, forbid_unknown_fields=True
):
    """Options of every struct here; subclasses repeat `kw_only`, which msgspec does not inherit."""


class Cause(Part, kw_only=True, frozen=True):
    """An edge of the graph, stored on the later event.

    `seq` is the earlier event; `kind` an edge kind; `basis` is `recorded`, or `inferred:RULE`
    naming the rule that supplied the edge.
    """

    seq: Int64
    kind: EdgeKind
    basis: str = "recorded"


class Source(Part, kw_only=True, frozen=True):
    """One content event that an observation shows; `tokens` is its span in the prompt, if known."""

    seq: Int64
    tokens: Span | None = None


class Item(Part, kw_only=True, frozen=True):
    """One thing that an act does or declines.

    `name` holds receivers, child role, tool, artefact or rule; `span` the characters of the act's
    text; `body` the characters of the payload, or `content` the payload itself; `tokens` the span
    in `token_ids`; `logprob` the log-probability of taking or declining *this decision*.
    """

    verb: Verb
    name: tuple[str, ...] = ()
    span: Span | None = None
    body: Span | None = None
    content_raw: Payload = field(default=UNSET, name="content")
    tokens: Span | None = None
    logprob: float | None = None

    @property
    def content(self) -> Any:
        """The payload, decoded."""
        return thaw(self.content_raw)


class Read(Part, kw_only=True, frozen=True):
    """An artefact version that a write was based on."""

    artefact: str
    version: Int64


class Target(Part, kw_only=True, frozen=True):
    """What a reward or a credit is about: an event, one item of it, an agent, or a role."""

    seq: Int64 | None = None
    item: Int64 | None = None
    agent: str | None = None
    role: str | None = None


class Anneal(Part, kw_only=True, frozen=True):
    """Weight of a shaped reward when it was paid, and the training step it was paid at."""

    weight: float
    step: Int64


# ---------------------------------------------------------------------------------------------
# Events


class Event(Part, kw_only=True, frozen=True, tag_field="type"):
    """What every event has.

    `t_start`, `t_end` in seconds; `cost_usd` in US dollars; `source_id` the foreign id (an
    attribute, never a key). `seq` counts from 0 in the trace; `agent` did it; `causes` are the
    edges into it; `trust` its label; `tokens_in`, `tokens_out` what it cost a model; `trainable`
    whether a learning agent of this run wrote its text.
    """

    kind: ClassVar[str]
    """The event's kind, as written in `type`."""

    trace_id: str
    t_start: float | None = None
    t_end: float | None = None
    cost_usd: float | None = None
    source_id: str | None = None
    seq: Int64
    agent: str
    causes: tuple[Cause, ...] = ()
    trust: Trust = "unknown"
    tokens_in: Int64 | None = None
    tokens_out: Int64 | None = None
    trainable: bool = False


class Observe(Event, kw_only=True, frozen=True, tag="observe"):
    """What an agent now sees: consumption, the one node of memory, communication and context.

    `sources` are the content events shown, in order; `content` what the environment said this
    turn; `template` how it was rendered; `context` whether it is appended, reset or folded to the
    events in `kept`; `anchor` a key of the state before the action; `state_digest` a digest of the
    full state; `legal` the menu as ordered [label, text] pairs.
    """

    sources: tuple[Source, ...] = ()
    content_raw: Payload = field(default=UNSET, name="content")
    template: str | None = None
    context: Literal["append", "reset", "fold"] = "append"
    kept: tuple[Int64, ...] = ()
    prompt_digest: str | None = None
    anchor: str | None = None
    state_digest: str | None = None
    legal: tuple[tuple[str, str], ...] | None = None

    @property
    def content(self) -> Any:
        """What the environment said, decoded."""
        return thaw(self.content_raw)


class Act(Event, kw_only=True, frozen=True, tag="act"):
    """The policy's output: one turn of one agent.

    `items` is the parsed list in execution order; `token_ids`, `logprobs` and `mask` (true where
    the policy wrote the token; absent: everywhere) have one length; `value` is a critic's estimate
    of the return from here.
    """

    text_raw: Payload = field(default=UNSET, name="text")
    items: tuple[Item, ...] = ()
    token_ids: tuple[Int64, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    mask: tuple[bool, ...] | None = None
    policy_version: str | None = None
    value: float | None = None

    @property
    def text(self) -> str | None:
        """The text of the turn, decoded; None for a bare decision."""
        text: str | None = thaw(self.text_raw)
        return text


class Effect(Event, kw_only=True, frozen=True, tag="effect"):
    """What all effects of an act share: which `item` of the act it is, and its `span` of the text.

    An effect whose content is absent says what its span of the act's text says.
    """

    item: Int64 | None = None
    span: Span | None = None


class Spawn(Effect, kw_only=True, frozen=True, tag="spawn"):
    """The agent set grows by `child`, whose role is `child_role`; `context` is what it is given."""

    child: str
    child_role: str | None = None
    context_raw: Payload = field(default=UNSET, name="context")
    tools: tuple[str, ...] | None = None

    @property
    def context(self) -> Any:
        """What the child is told at birth, decoded."""
        return thaw(self.context_raw)


class Despawn(Effect, kw_only=True, frozen=True, tag="despawn"):
    """The agent set shrinks by `child`."""

    child: str
    status: Status = "completed"


class Delegate(Effect, kw_only=True, frozen=True, tag="delegate"):
    """Work is handed to the agents in `to`; `waits` if the sender needs their return to go on."""

    to: tuple[str, ...]
    content_raw: Payload = field(default=UNSET, name="content")
    waits: bool = False

    @property
    def content(self) -> Any:
        """What was asked, decoded."""
        return thaw(self.content_raw)


class Message(Effect, kw_only=True, frozen=True, tag="message"):
    """A message is sent to the agents in `to`."""

    to: tuple[str, ...]
    content_raw: Payload = field(default=UNSET, name="content")
    channel: str | None = None

    @property
    def content(self) -> Any:
        """What was said, decoded."""
        return thaw(self.content_raw)


class Deliver(Event, kw_only=True, frozen=True, tag="deliver"):
    """The event `message` (a message, delegation or return) reaches the mailbox of `agent`."""

    message: Int64


class ToolCall(Effect, kw_only=True, frozen=True, tag="tool_call"):
    """A call; `verdict` and `rule` are the permission that was decided before it ran."""

    tool: str
    arguments_raw: Payload = field(default=UNSET, name="arguments")
    call_index: Int64 = 0
    verdict: Literal["allow", "ask", "deny"] | None = None
    rule: str | None = None

    @property
    def arguments(self) -> Any:
        """The arguments, decoded."""
        return thaw(self.arguments_raw)


class ToolResult(Event, kw_only=True, frozen=True, tag="tool_result"):
    """The answer to the tool_call at `call`; `error` if it failed; `bytes` its size when whole."""

    call: Int64 | None = None
    content_raw: Payload = field(default=UNSET, name="content")
    error: str | None = None
    bytes: Int64 | None = None

    @property
    def content(self) -> Any:
        """The answer, decoded."""
        return thaw(self.content_raw)


class Write(Effect, kw_only=True, frozen=True, tag="write"):
    """A shared artefact changed from `base_version` to `version`, after `reads`."""

    artefact: str
    version: Int64
    base_version: Int64 | None = None
    reads: tuple[Read, ...] = ()
    content_raw: Payload = field(default=UNSET, name="content")
    conflict: bool = False

    @property
    def content(self) -> Any:
        """The new content, decoded."""
        return thaw(self.content_raw)


class AgentReturn(Effect, kw_only=True, frozen=True, tag="agent_return"):
    """A sub-agent's result goes back to `to`."""

    to: tuple[str, ...]
    content_raw: Payload = field(default=UNSET, name="content")
    status: Status = "completed"

    @property
    def content(self) -> Any:
        """The result, decoded."""
        return thaw(self.content_raw)


class Aggregate(Effect, kw_only=True, frozen=True, tag="aggregate"):
    """The events `inputs` become one, by `rule`."""

    inputs: tuple[Int64, ...] = ()
    content_raw: Payload = field(default=UNSET, name="content")
    rule: str | None = None

    @property
    def content(self) -> Any:
        """The combined result, decoded."""
        return thaw(self.content_raw)


class Stop(Effect, kw_only=True, frozen=True, tag="stop"):
    """The run ends for `reason`, with `answer`; `truncated` if a limit cut it short."""

    reason: StopReason = "unknown"
    answer_raw: Payload = field(default=UNSET, name="answer")
    truncated: bool = False

    @property
    def answer(self) -> Any:
        """The answer, decoded."""
        return thaw(self.answer_raw)


class Reward(Event, kw_only=True, frozen=True, tag="reward"):
    """One amount on one channel; `amount` absent means not scored, which is not zero.

    `family` R1–R8; `target` what it is about (absent: the team); `source` who scored; `verifiable`
    how it was checked and `error_rate` how often that check errs; `anneal` its shaping weight.
    """

    amount: float | None = None
    family: Family = "R1"
    channel: str = "team"
    unit: str | None = None
    target: Target | None = None
    source: str | None = None
    verifiable: Verifiable | None = None
    error_rate: float | None = None
    anneal: Anneal | None = None


class Intervene(Event, kw_only=True, frozen=True, tag="intervene"):
    """Something was changed by hand: `target` here; in a fork, what it `replaces` in the parent."""

    do: str
    target: Int64 | None = None
    replaces: Int64 | None = None
    content_raw: Payload = field(default=UNSET, name="content")

    @property
    def content(self) -> Any:
        """What was put in, decoded."""
        return thaw(self.content_raw)


class Safety(Event, kw_only=True, frozen=True, tag="safety"):
    """A check blocked, flagged or declassified the event `target`."""

    rule: str
    effect: Literal["blocked", "flagged", "declassified"]
    target: Int64 | None = None


class Custom(Event, kw_only=True, frozen=True, tag="custom"):
    """Something outside the vocabulary, named `vendor.kind`: kept, passed on, ignored by credit."""

    name: str
    data_raw: Payload = field(default=UNSET, name="data")

    @property
    def data(self) -> Any:
        """Whatever it holds, decoded."""
        return thaw(self.data_raw)


AnyEvent: TypeAlias = (
    Observe
    | Act
    | Spawn
    | Despawn
    | Delegate
    | Message
    | Deliver
    | ToolCall
    | ToolResult
    | Write
    | AgentReturn
    | Aggregate
    | Stop
    | Reward
    | Intervene
    | Safety
    | Custom
)
KINDS: dict[str, type[Event]] = {str(cls.__struct_config__.tag): cls for cls in get_args(AnyEvent)}
"""Event kind → struct, in the order of the format page."""

for _kind, _struct in KINDS.items():
    _struct.kind = _kind


# ---------------------------------------------------------------------------------------------
# Header, seal, side records


class EnvRef(Part, kw_only=True, frozen=True):
    """The environment that was played: a versioned id, or `imported:FORMAT`."""

    id: str
    digest: str | None = None


class PolicyRef(Part, kw_only=True, frozen=True):
    """The policy of a role: where it loads from, which version, the digest of its parameters."""

    target: str | None = None
    version: str | None = None
    params_digest: str | None = None
    deterministic: bool = False


class AgentRef(Part, kw_only=True, frozen=True):
    """An agent alive at the start."""

    id: str
    role: str


class ForkRef(Part, kw_only=True, frozen=True):
    """Where a fork leaves its parent.

    `seq` is where this trace's own events begin, `digest` the parent's chained digest before it,
    `do` what was done there, `keys` the keys of the random streams.
    """

    trace_id: str
    seq: Int64
    digest: str
    do: str
    level: Literal["channel", "decision"] | None = None
    branch: Int64 = 0
    streams: Literal["branch", "parent"] = "branch"
    keys: tuple[tuple[Int64, str], ...] = ()


class Header(Part, kw_only=True, frozen=True, gc=True, tag_field="type", tag="header"):
    """A trace's first line: who wrote it, which task, group and rollout it is, and the settings.

    `group_id` is what is normalised over (same task, policy version and fork arm); `rollout_id`
    names the rollout in its group. `task_seed` resets the environment, `seed` drives everything
    sampled. `delivery` is `implicit` where a message is in the mailbox as soon as it is sent.
    """

    trace_id: str
    writer: str | None = None
    started: float | None = None
    meta_raw: Payload = field(default=UNSET, name="meta")
    counterpoint: Int64
    task_id: str | None = None
    group_id: str | None = None
    rollout_id: str | None = None
    env: EnvRef | None = None
    task_seed: Int64 | None = None
    seed: Int64 | None = None
    config_raw: Payload = field(default=UNSET, name="config")
    tools: dict[str, str] = {}
    policies: dict[str, PolicyRef] = {}
    topology: Topology = "unknown"
    agents: tuple[AgentRef, ...] = ()
    possible_agents: tuple[str, ...] | None = None
    fork: ForkRef | None = None
    delivery: Literal["explicit", "implicit"] = "implicit"

    @property
    def ours(self) -> bool:
        """Whether our Recorder or harness wrote the trace, which then gave every event its causes;
        what an importer of ours wrote does not count.
        """
        imported = self.env is not None and self.env.id.startswith("imported:")
        return (self.writer or "").startswith("counterpoint") and not imported

    @property
    def meta(self) -> Any:
        """Free notes, ignored by every method, decoded."""
        return thaw(self.meta_raw)

    @property
    def config(self) -> Any:
        """Everything needed to go on, decoded."""
        return thaw(self.config_raw)


class Seal(Part, kw_only=True, frozen=True, gc=True, tag_field="type", tag="seal"):
    """A trace's last line: what it should hold, and the chained digest of all of it."""

    trace_id: str
    events: Int64
    kinds: dict[str, Int64] = {}
    tokens_in: Int64 | None = None
    tokens_out: Int64 | None = None
    cost_usd: float | None = None
    dropped: Int64 = 0
    digest: str


class LateReward(Part, kw_only=True, frozen=True, gc=True, tag_field="type", tag="late_reward"):
    """A reward that came after the seal, in a file beside the trace, which it names by digest."""

    trace_id: str
    digest: str
    amount: float | None = None
    family: Family = "R1"
    channel: str = "team"
    unit: str | None = None
    target: Target | None = None
    source: str | None = None
    verifiable: Verifiable | None = None
    error_rate: float | None = None
    judge: str | None = None
    judge_version: str | None = None


class CreditEntry(Part, kw_only=True, frozen=True, gc=True, tag_field="type", tag="credit"):
    """One line of a credit file: which unit of which trace received which advantage, from what.

    `value` absent means never credited. `update` names the training update that used it.
    """

    trace_id: str
    digest: str
    method: str
    params_raw: Payload = field(default=UNSET, name="params")
    estimand: str
    identified: str
    unit: str
    target: Target
    value: float | None = None
    policy_version: str | None = None
    update: str | None = None

    @property
    def params(self) -> Any:
        """The options that the method ran with, decoded."""
        return thaw(self.params_raw)


Line: TypeAlias = Header | AnyEvent | Seal | LateReward | CreditEntry

LINES: dict[str, type[Struct]] = {
    "header": Header,
    **KINDS,
    "seal": Seal,
    "late_reward": LateReward,
    "credit": CreditEntry,
}
"""Every value that `type` may take, and its struct."""


class Finding(Struct, kw_only=True, frozen=True, gc=False):
    """Something wrong or odd, and exactly where."""

    rule: str
    message: str
    file: str | None = None
    line: int | None = None
    trace_id: str | None = None
    seq: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        event = "" if self.seq is None else f" event {self.seq}"
        trace = "" if self.trace_id is None else f" trace {self.trace_id}"
        return f"{self.rule} {where}{trace}{event}: {self.message}".replace("  ", " ")


# ---------------------------------------------------------------------------------------------
# Spelling and digests

_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def encode(record: Line) -> bytes:
    """Spell one line canonically: schema order, defaults left out, keys sorted, no newline."""
    return CANONICAL.encode(record)


def decode(line: bytes) -> Line:
    """Read one line with its types checked. Raises msgspec.ValidationError or DecodeError."""
    return _LINE.decode(line)


def header_digest(header: Header) -> bytes:
    """Start of a trace's digest: H(the header's line from `"counterpoint":` on).

    In a fork the parent's chained digest before the fork is hashed in, so that a fork's digest
    covers its whole history.
    """
    bare = msgspec.structs.replace(header, writer=None, started=None, meta_raw=UNSET)
    line = CANONICAL.encode(bare)
    start = digest_of(line[line.index(b'"counterpoint":') :])
    return start if header.fork is None else digest_of(start + header.fork.digest.encode())


def chain(previous: bytes, line: bytes) -> bytes:
    """Digest up to and including an event: H(previous ‖ its type ‖ its line from `"seq":` on).

    `line` is the canonical spelling. No volatile field holds an object and no string can contain
    an unescaped quote, so the first `"seq":` is the field.
    """
    kind = line[9 : line.index(b'"', 9)]
    return digest_of(previous + kind + line[line.index(b'"seq":') :])


# ---------------------------------------------------------------------------------------------
# The trace


@dataclass(frozen=True)
class Trace:
    """One rollout: a header, its events in order, and the seal if the run was finished.

    Immutable. `trace[t]` is the event with `seq` t; `trace[:t]` is the prefix of events before
    `t`, again a Trace (without a seal). `file` and `lines` say where it was read from and take no
    part in equality.
    """

    header: Header
    events: tuple[AnyEvent, ...]
    seal: Seal | None = None
    file: str | None = None
    lines: Sequence[int] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (self.header, self.events, self.seal) == (other.header, other.events, other.seal)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[AnyEvent]:
        return iter(self.events)

    @overload
    def __getitem__(self, at: int) -> AnyEvent: ...
    @overload
    def __getitem__(self, at: slice) -> Trace: ...
    def __getitem__(self, at: int | slice) -> AnyEvent | Trace:
        if isinstance(at, slice):
            if at.step is not None or at.start not in (None, 0) or (at.stop or 0) < 0:
                raise Refused("a trace can be cut only to a prefix: trace[:t] with t ≥ 0")
            stop = len(self.events) if at.stop is None else max(0, at.stop - self.first)
            return Trace(self.header, self.events[:stop], None, self.file, self.lines[:stop])
        index = at - self.first
        if not 0 <= index < len(self.events):
            raise IndexError(f"trace {self.trace_id} has no event {at}")
        return self.events[index]

    @property
    def trace_id(self) -> str:
        """The id that every line of the trace carries."""
        return self.header.trace_id

    @property
    def first(self) -> int:
        """`seq` of the first event: 0, or where a fork leaves its parent."""
        return 0 if self.header.fork is None else self.header.fork.seq

    def of(self, kind: str) -> list[AnyEvent]:
        """All events of one kind, in order. Raises Refused for an unknown kind."""
        if kind not in KINDS:
            raise Refused(f"there is no event kind {kind!r}; the kinds are {', '.join(KINDS)}")
        return [event for event in self.events if event.kind == kind]

    @cached_property
    def outcome(self) -> float | None:
        """Undiscounted sum of the team's rewards and costs (channel `team`, or family R7).

        Rewards that name a single agent are left out; None where nothing was scored.
        """
        amounts = [
            event.amount
            for event in self.events
            if isinstance(event, Reward)
            and counts_as_outcome(event)
            and event.amount is not None
            and (event.target is None or event.target.agent is None)
        ]
        return summed(amounts, self.trace_id) if amounts else None

    @cached_property
    def digest(self) -> str:
        """The chained digest over header and events, as hexadecimal."""
        state = header_digest(self.header)
        for event in self.events:
            state = chain(state, CANONICAL.encode(event))
        return state.hex()

    def content(self, event: AnyEvent) -> Any:
        """The content of an event, taken from its act's text where the event only names a span."""
        return content_of(event, self.events, self.first)


def content_of(event: AnyEvent, events: Sequence[AnyEvent], first: int = 0) -> Any:
    """`Trace.content` for a run in progress: its `events` so far, the first of seq `first`."""
    own, span = getattr(event, "content", None), getattr(event, "span", None)
    if own is not None or span is None:
        return own
    for cause in event.causes:
        if cause.kind == "authorizes" and 0 <= cause.seq - first < len(events):
            act = events[cause.seq - first]
            text = act.text if isinstance(act, Act) else None
            return None if text is None else text[span[0] : span[1]]
    return None


def summed(amounts: Iterable[float], trace_id: str) -> float:
    """The sum of some rewards of a trace. Refused if it is beyond every number."""
    try:
        return math.fsum(amounts)
    except OverflowError:
        raise Refused(f"the rewards of trace {trace_id} sum to more than a number holds") from None


def counts_as_outcome(reward: Reward | LateReward, channel: str = "team") -> bool:
    """Whether a reward belongs to the outcome that groups compare; all others are quality."""
    return reward.channel == channel or reward.family == "R7"
