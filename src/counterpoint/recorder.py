"""The door, seen from your own loop: a run is written down event by event, each exactly once.

    with Recorder("runs.jsonl") as rec, rec.trace(task_id="capital-of-peru") as t:
        t.act("planner", "ask the worker")
        t.stop("planner", answer="Lima")
        t.reward(1.0)

Every method returns the event that it wrote, and later calls take events as causes. An event is on
its way to the disk before the call returns (see `sync`); nothing written is ever cut or rewritten.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET

from counterpoint.append import AppendOnly, Sync
from counterpoint.schema import (
    FORMAT,
    Act,
    AgentRef,
    AgentReturn,
    Aggregate,
    AnyEvent,
    Cause,
    Custom,
    Delegate,
    Deliver,
    Despawn,
    EdgeKind,
    Event,
    Header,
    Intervene,
    Item,
    Line,
    Message,
    Observe,
    PolicyRef,
    Read,
    Reward,
    Safety,
    Seal,
    Source,
    Spawn,
    Stop,
    Target,
    ToolCall,
    ToolResult,
    Write,
    chain,
    decode,
    encode,
    header_digest,
)
from counterpoint.spelling import CANONICAL, Payload, Refused, digest_of, freeze
from counterpoint.store import records, side_folder

Cited = Event | int
E = TypeVar("E", bound=Event)

SIDE_FILE_OVER = 1 << 20
"""Bytes of content above which it goes to a side file."""


class Recorder:
    """Owner of one trace file: appends traces, several at once if you like.

    Args:
        path: the file, created if absent; in an existing folder, a new file with a name of its own.
        sync: what a recorded event survives. "write" (default): the death of this process, by one
            `os.write` per event. "disk": also a power cut, but for the last 64 events.
            "trace": nothing until the trace ends, for seeded simulations that can be run again.

    Raises:
        Refused: another recorder owns the file, or it cannot be written.
    """

    def __init__(self, path: str | Path, *, sync: Sync = "write") -> None:
        self._store = AppendOnly(Path(path), sync)
        self.path = self._store.path
        self._trace_ids: set[str] = set()
        self._rollouts: dict[str, int] = {}
        for _, value in records(self.path):
            if isinstance(value, Header):
                self._remember(value)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; traces that were not ended stay without a seal, and readable."""
        self._store.close()

    def trace(
        self,
        task_id: str | None = None,
        *,
        group_id: str | None = None,
        rollout_id: str | None = None,
        roles: Mapping[str, str] | None = None,
        policies: Mapping[str, PolicyRef] | None = None,
        meta: Any = None,
    ) -> TraceRecorder:
        """Open a trace, to be used in a `with` block.

        Args:
            task_id: what was asked; runs of one task are compared.
            group_id: what is normalised over; by default the task, under the given policies.
            rollout_id: name in the group; by default how many of the group the file holds already.
            roles: {agent: role} of those alive at the start; an agent's role defaults to its id.
            policies: {role: PolicyRef}; another version makes another group.
            meta: free notes that no method reads.
        """
        group = group_id if group_id is not None else _group(task_id, policies or {})
        header = Header(
            trace_id=uuid.uuid4().hex,
            writer="counterpoint",
            started=time.time(),
            meta_raw=freeze(meta),
            counterpoint=FORMAT,
            task_id=task_id,
            group_id=group,
            rollout_id=rollout_id or str(self._rollouts.get(group or "", 0)),
            policies=dict(policies or {}),
            agents=tuple(AgentRef(id=a, role=r) for a, r in (roles or {}).items()),
        )
        return self.open(header)

    def open(self, header: Header) -> TraceRecorder:
        """Open a trace under a header of your own; with `started` absent its clock is virtual.

        Raises:
            Refused: the file already holds this trace_id.
        """
        if header.trace_id in self._trace_ids:
            raise Refused(f"{self.path} already holds trace {header.trace_id}; give it another id")
        return TraceRecorder(self, header)

    # -- what the traces of this recorder call --------------------------------------------------

    def _remember(self, header: Header) -> None:
        self._trace_ids.add(header.trace_id)
        group = header.group_id or ""
        self._rollouts[group] = self._rollouts.get(group, 0) + 1

    def _payload(self, value: Any) -> Payload:
        """Freeze a value; over a mebibyte it goes to a side file and a reference stays."""
        raw = freeze(value)
        if raw is UNSET or len(data := bytes(raw)) <= SIDE_FILE_OVER:
            return raw
        name = digest_of(data).hex()
        folder = side_folder(self.path)
        folder.mkdir(exist_ok=True)
        if not (folder / name).exists():
            draft = folder / f"{name}.{uuid.uuid4().hex}.draft"
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(folder / name)
        return freeze({"$file": name, "bytes": len(data)})


def _group(task_id: str | None, policies: Mapping[str, PolicyRef]) -> str | None:
    if task_id is None or not policies:
        return task_id
    return f"{task_id}@{digest_of(CANONICAL.encode(dict(policies))).hex()[:8]}"


class TraceRecorder:
    """One trace being written. Leave its `with` block normally and it is sealed.

    An exception leaves it unsealed: whatever was recorded stays, and readers say unfinished.
    Methods may be called from several threads. Each takes `causes`, earlier events (or their
    `seq`) that it was computed from, besides the edges that the method itself implies.
    """

    def __init__(self, owner: Recorder, header: Header) -> None:
        self.header = header
        self._owner = owner
        self._lock = threading.RLock()
        self._pending: list[bytes] | None = [] if owner._store.sync == "trace" else None
        self._digest = header_digest(header)
        self._first = header.fork.seq if header.fork else 0
        self._next = self._first
        self._clock = time.time if header.started is not None else None
        self._kinds: dict[str, int] = {}
        self._totals: dict[str, float] = {}
        self._last: dict[tuple[str, str], int] = {}
        self._inbox: dict[str, list[int]] = {}
        self._calls: dict[int, str] = {}
        self._leaves: dict[int, None] = {}
        self._environment: int | None = None
        self._ended = False
        self._write(encode(header))
        owner._remember(header)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()

    def end(self) -> Seal:
        """Write the seal: nothing follows it. Ending twice is refused."""
        with self._lock:
            self._still_open()
            seal = Seal(
                trace_id=self.header.trace_id,
                events=self._next - self._first,
                kinds=self._kinds,
                digest=self._digest.hex(),
                **cast(Any, {name: total for name, total in self._totals.items() if total}),
            )
            self._write(encode(seal), sealed=True)
            self._ended = True
            return seal

    def emit(self, event: E) -> E:
        """Write an event that you built yourself: `trace_id` and `seq` are set, the rest is yours.

        Raises:
            Refused: the event could not be read back (a NaN, a wrong type), or the trace has ended.
            OSError: the disk refused; events written before are intact and you may try again.
        """
        with self._lock:
            self._still_open()
            event = msgspec.structs.replace(event, trace_id=self.header.trace_id, seq=self._next)
            self._put(event)
            return event

    # -- what an agent does ------------------------------------------------------------------

    def act(
        self,
        agent: str,
        text: str | None = None,
        *,
        sees: Iterable[Cited] | None = None,
        anchor: str | None = None,
        items: Sequence[Item] = (),
        token_ids: Any = None,
        logprobs: Any = None,
        trainable: bool = True,
        value: float | None = None,
        policy_version: str | None = None,
        causes: Iterable[Cited] = (),
    ) -> Act:
        """One turn of one agent.

        Args:
            agent: who acts.
            text: what the policy wrote.
            sees: events that it read; left out, everything that reached it since its last act
                (messages to it, results of its calls), marked `inferred:mailbox`.
            anchor: key of the state before the action, for methods that compare equal states.
            items: the parsed turn, if you parse it.
            token_ids: the tokens of the text, any sequence or array.
            logprobs: log-probability of each token, likewise.
            trainable: whether the policy being trained wrote the text.
            value: a critic's estimate of the return from here.
            policy_version: which parameters acted.
            causes: further events that it was computed from.
        """
        with self._lock:
            waiting = self._inbox.get(agent, [])
            shown = waiting if sees is None else [_seq(e) for e in sees]
            link = self._before(agent)
            if shown or anchor is not None:
                basis = "inferred:mailbox" if sees is None else "recorded"
                seen = self._event(
                    Observe,
                    agent,
                    [*link, *(Cause(seq=s, kind="consumes", basis=basis) for s in shown)],
                    sources=tuple(Source(seq=s) for s in shown),
                    anchor=anchor,
                )
                link = [Cause(seq=seen.seq, kind="derives")]
            act = self._event(
                Act,
                agent,
                [*link, *self._cited(causes)],
                text_raw=self._owner._payload(text),
                items=tuple(items),
                token_ids=_sequence(token_ids),
                logprobs=_sequence(logprobs),
                trainable=trainable,
                value=value,
                policy_version=policy_version,
            )
            self._inbox[agent] = []
            return act

    def message(
        self,
        agent: str,
        to: str | Sequence[str],
        content: Any = None,
        *,
        channel: str | None = None,
        causes: Iterable[Cited] = (),
    ) -> Message:
        """Send a message; it waits in each receiver's mailbox until that agent acts."""
        return self._sent(Message, agent, _ids(to), causes, content=content, channel=channel)

    def delegate(
        self,
        agent: str,
        to: str | Sequence[str],
        content: Any = None,
        *,
        waits: bool = False,
        causes: Iterable[Cited] = (),
    ) -> Delegate:
        """Hand work over; `waits` says that the sender goes on only after the return."""
        return self._sent(Delegate, agent, _ids(to), causes, content=content, waits=waits)

    def agent_return(
        self,
        agent: str,
        to: str | Sequence[str],
        content: Any = None,
        *,
        answers: Cited | None = None,
        causes: Iterable[Cited] = (),
    ) -> AgentReturn:
        """A sub-agent's result goes back; `answers` is the delegation, if there was one."""
        with self._lock:
            answered = [] if answers is None else [Cause(seq=_seq(answers), kind="returns")]
            return self._sent(AgentReturn, agent, _ids(to), causes, answered, content=content)

    def spawn(
        self,
        agent: str,
        child: str,
        role: str | None = None,
        *,
        context: Any = None,
        causes: Iterable[Cited] = (),
    ) -> Spawn:
        """Bring an agent to life; `context` waits in its mailbox."""
        with self._lock:
            born = self._effect(
                Spawn,
                agent,
                causes,
                child=child,
                child_role=role,
                context_raw=self._owner._payload(context),
            )
            self._last[(child, "spawn")] = born.seq
            if context is not None:
                self._inbox.setdefault(child, []).append(born.seq)
            return born

    def despawn(
        self,
        agent: str,
        child: str,
        status: Literal["completed", "errored", "cancelled", "timed_out"] = "completed",
        *,
        causes: Iterable[Cited] = (),
    ) -> Despawn:
        """End an agent."""
        return self._effect(Despawn, agent, causes, child=child, status=status)

    def tool_call(
        self,
        agent: str,
        tool: str,
        arguments: Any = None,
        *,
        source_id: str | None = None,
        causes: Iterable[Cited] = (),
    ) -> ToolCall:
        """Call a tool; give the returned event to `tool_result`."""
        with self._lock:
            arguments_raw = self._owner._payload(arguments)
            call = self._effect(
                ToolCall, agent, causes, tool=tool, arguments_raw=arguments_raw, source_id=source_id
            )
            self._calls[call.seq] = agent
            return call

    def tool_result(
        self,
        call: Cited,
        content: Any = None,
        *,
        error: str | None = None,
        trust: Literal["untrusted", "unknown", "human", "trusted"] = "untrusted",
        pure: bool = False,
        causes: Iterable[Cited] = (),
    ) -> ToolResult:
        """Answer a call. Untrusted unless you say otherwise; `pure` if it changed nothing.

        A result also descends from the last one that was not pure: the environment is shared.

        Raises:
            Refused: the call is unknown or already answered.
        """
        with self._lock:
            agent = self._calls.pop(_seq(call), None)
            if agent is None:
                raise Refused(f"event {_seq(call)} is no tool call that waits for its result")
            links = [Cause(seq=_seq(call), kind="answers")]
            if self._environment is not None:
                state = Cause(seq=self._environment, kind="derives", basis="inferred:environment")
                links.append(state)
            result = self._event(
                ToolResult,
                agent,
                [*links, *self._cited(causes)],
                call=_seq(call),
                content_raw=self._owner._payload(content),
                error=error,
                trust=trust,
            )
            if not pure:
                self._environment = result.seq
            self._inbox.setdefault(agent, []).append(result.seq)
            return result

    def write(
        self,
        agent: str,
        artefact: str,
        version: int,
        content: Any = None,
        *,
        base_version: int | None = None,
        reads: Sequence[Read] = (),
        causes: Iterable[Cited] = (),
    ) -> Write:
        """Record that a shared artefact changed from `base_version` to `version`."""
        return self._effect(
            Write,
            agent,
            causes,
            artefact=artefact,
            version=version,
            base_version=base_version,
            reads=tuple(reads),
            content_raw=self._owner._payload(content),
        )

    def aggregate(
        self,
        agent: str,
        inputs: Iterable[Cited],
        content: Any = None,
        *,
        rule: str | None = None,
        causes: Iterable[Cited] = (),
    ) -> Aggregate:
        """Several earlier events become one."""
        with self._lock:
            used = tuple(_seq(e) for e in inputs)
            return self._effect(
                Aggregate,
                agent,
                causes,
                [Cause(seq=s, kind="aggregates") for s in used],
                inputs=used,
                content_raw=self._owner._payload(content),
                rule=rule,
            )

    def stop(
        self,
        agent: str,
        answer: Any = None,
        *,
        reason: str = "answered",
        truncated: bool = False,
        causes: Iterable[Cited] = (),
    ) -> Stop:
        """The run ends: only rewards may follow."""
        answer_raw = self._owner._payload(answer)
        return self._effect(
            Stop, agent, causes, reason=reason, answer_raw=answer_raw, truncated=truncated
        )

    # -- what happens to them ----------------------------------------------------------------

    def reward(
        self,
        amount: float | None,
        *,
        channel: str = "team",
        family: str = "R1",
        target: Target | None = None,
        source: str = "env",
        verifiable: str | None = None,
        error_rate: float | None = None,
        causes: Iterable[Cited] | None = None,
    ) -> Reward:
        """Record one amount on one channel; None says that scoring failed, which is not zero.

        `causes` are the events that it depends on; left out, it depends on everything the run did.
        """
        with self._lock:
            if causes is None:
                basis = "inferred:run"
                links = [Cause(seq=s, kind="rewards", basis=basis) for s in self._leaves]
            else:
                links = [Cause(seq=_seq(c), kind="rewards") for c in causes]
            return self._event(
                Reward,
                source,
                links,
                amount=amount,
                channel=channel,
                family=family,
                target=target,
                source=source,
                verifiable=verifiable,
                error_rate=error_rate,
            )

    def deliver(self, agent: str, message: Cited) -> Deliver:
        """Record when a message reached a mailbox, for loops in which that is not at once."""
        seq = _seq(message)
        return self._event(Deliver, agent, [Cause(seq=seq, kind="delivers")], message=seq)

    def intervene(
        self, do: str, *, target: Cited | None = None, content: Any = None, agent: str = "human"
    ) -> Intervene:
        """Record that a person changed something by hand."""
        seq = None if target is None else _seq(target)
        links = [] if seq is None else [Cause(seq=seq, kind="derives")]
        content_raw = self._owner._payload(content)
        return self._event(
            Intervene, agent, links, do=do, target=seq, content_raw=content_raw, trust="human"
        )

    def safety(
        self,
        rule: str,
        effect: Literal["blocked", "flagged", "declassified"],
        target: Cited,
        *,
        agent: str = "harness",
    ) -> Safety:
        """Record that a check blocked, flagged or declassified an event."""
        seq = _seq(target)
        guard = [Cause(seq=seq, kind="guards")]
        return self._event(Safety, agent, guard, rule=rule, effect=effect, target=seq)

    def custom(
        self, agent: str, name: str, data: Any = None, *, causes: Iterable[Cited] = ()
    ) -> Custom:
        """Keep something outside the vocabulary, under the name `vendor.kind`."""
        data_raw = self._owner._payload(data)
        return self._event(Custom, agent, self._cited(causes), name=name, data_raw=data_raw)

    # -- how an event is put down --------------------------------------------------------------

    def _sent(
        self,
        kind: type[E],
        agent: str,
        to: tuple[str, ...],
        causes: Iterable[Cited],
        links: Sequence[Cause] = (),
        *,
        content: Any,
        **fields: Any,
    ) -> E:
        with self._lock:
            content_raw = self._owner._payload(content)
            event = self._effect(
                kind, agent, causes, links, to=to, content_raw=content_raw, **fields
            )
            for receiver in to:
                self._inbox.setdefault(receiver, []).append(event.seq)
            return event

    def _effect(
        self,
        kind: type[E],
        agent: str,
        causes: Iterable[Cited],
        links: Sequence[Cause] = (),
        **fields: Any,
    ) -> E:
        """Something that an act brought about: authorised by the agent's last act."""
        with self._lock:
            act = self._last.get((agent, "act"))
            own = [] if act is None else [Cause(seq=act, kind="authorizes")]
            return self._event(kind, agent, [*own, *links, *self._cited(causes)], **fields)

    def _event(self, kind: type[E], agent: str, links: Sequence[Cause], **fields: Any) -> E:
        with self._lock:
            self._still_open()
            if not links and self._next > self._first:
                order = Cause(seq=self._next - 1, kind="precedes", basis="inferred:order")
                links = [order]
            event = kind(
                trace_id=self.header.trace_id,
                t_start=self._clock() if self._clock else None,
                seq=self._next,
                agent=agent,
                causes=tuple(links),
                **fields,
            )
            self._put(event)
            return event

    def _put(self, event: Event) -> None:
        line = _checked(cast(AnyEvent, event), self._first)
        self._write(line)
        self._next += 1
        self._digest = chain(self._digest, line)
        kind = event.kind
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if event.tokens_in or event.tokens_out or event.cost_usd:
            for name in ("tokens_in", "tokens_out", "cost_usd"):
                self._totals[name] = self._totals.get(name, 0) + (getattr(event, name) or 0)
        self._last[(event.agent, kind)] = event.seq
        for cause in event.causes:
            self._leaves.pop(cause.seq, None)
        if kind != "reward":
            self._leaves[event.seq] = None

    def _before(self, agent: str) -> list[Cause]:
        """An agent's earlier life: what precedes its next turn."""
        found = []
        for kind in ("observe", "act"):
            seq = self._last.get((agent, kind))
            if seq is not None:
                found.append(Cause(seq=seq, kind="precedes"))
        born = self._last.get((agent, "spawn")) if not found else None
        return found if born is None else [Cause(seq=born, kind="spawns")]

    def _cited(self, causes: Iterable[Cited], kind: EdgeKind = "derives") -> list[Cause]:
        return [Cause(seq=_seq(cause), kind=kind) for cause in causes]

    def _write(self, line: bytes, sealed: bool = False) -> None:
        if self._pending is None:
            self._owner._store.append(line + b"\n", sealed)
        elif sealed:
            self._owner._store.append(b"\n".join([*self._pending, line]) + b"\n", sealed)
        else:
            self._pending.append(line)

    def _still_open(self) -> None:
        if self._ended:
            raise Refused(f"trace {self.header.trace_id} has its seal; open another trace")


def _checked(event: AnyEvent, first: int) -> bytes:
    """Spell an event, and make sure that a reader will find in it what the caller meant."""
    for cause in event.causes:
        if not 0 <= cause.seq < event.seq:
            raise Refused(f"event {event.seq} names {cause.seq} as a cause, which is not earlier")
    try:
        line = encode(cast(Line, event))
        again = decode(line)
    except (TypeError, OverflowError, UnicodeError, msgspec.MsgspecError) as error:
        raise Refused(f"this {event.kind} cannot be recorded: {error}") from None
    # NaN and infinity are spelled as null, which would read back as "not given"
    if b"null" in line and again != event:
        raise Refused(f"this {event.kind} cannot be recorded: it holds NaN or infinity")
    return line


def _seq(event: Cited) -> int:
    return event if isinstance(event, int) else event.seq


def _ids(to: str | Sequence[str]) -> tuple[str, ...]:
    return (to,) if isinstance(to, str) else tuple(to)


def _sequence(values: Any) -> Any:
    """A tuple from any sequence or array; None stays None."""
    if values is None:
        return None
    return tuple(values.tolist() if hasattr(values, "tolist") else values)
