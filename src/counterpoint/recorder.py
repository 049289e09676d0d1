"""The door, seen from your own loop: a run is written down event by event, each exactly once.

    with Recorder("runs.jsonl") as rec, rec.trace(task_id="capital-of-peru") as t:
        t.act("planner", "ask the worker")
        t.stop("planner", answer="Lima")
        t.reward(1.0)

Every method returns the event that it wrote, and later calls take events as causes. An event is on
its way to the disk before the call returns (see `sync`); nothing written is ever cut or rewritten.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import UNSET

from counterpoint.append import AppendOnly, Links, Sync, TraceLog, aside
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
    Message,
    Observe,
    PolicyRef,
    Read,
    Reward,
    Safety,
    Source,
    Spawn,
    Status,
    Stop,
    Target,
    ToolCall,
    ToolResult,
    Trust,
    Write,
)
from counterpoint.spelling import CANONICAL, Payload, Refused, canonical, digest_of, freeze
from counterpoint.store import PAYLOADS, SIDE, payloads, records, side_folder

Cited: TypeAlias = Event | int
"""An earlier event, or its `seq`."""
Causes: TypeAlias = Iterable[Cited]
Ids: TypeAlias = str | Sequence[str]
"""One agent's id, or several."""
E = TypeVar("E", bound=Event)

SIDE_FILE_OVER = 1 << 20
"""Bytes of content above which it goes to a side file."""


class Recorder:
    """Owner of one trace file: appends traces, several at once if you like.

    Args:
        path: the file, created if absent; in an existing folder, a new file with a name of its own.
        sync: what a recorded event survives. "write" (default): the death of this process, by one
            `os.write` per call. "disk": also a power cut, but for the last 64 events.
            "trace": nothing until the trace ends, for seeded simulations that can be run again.

    Raises:
        Refused: another recorder owns the file, or it cannot be written.
    """

    def __init__(self, path: str | Path, *, sync: Sync = "write") -> None:
        self._store = AppendOnly(Path(path), sync)
        self.path = self._store.path
        self._lock = threading.Lock()
        self._trace_ids: set[str] = set()
        self._rollouts: dict[str | None, set[str | None]] = {}
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

        Raises:
            Refused: the header could not be read back (a wrong type).
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
            rollout_id=rollout_id,
            policies=dict(policies or {}),
            agents=tuple(AgentRef(id=a, role=r) for a, r in (roles or {}).items()),
        )
        with self._lock:
            if rollout_id is None:
                header = msgspec.structs.replace(header, rollout_id=self._next_rollout(group))
            return self._begin(header)

    def open(self, header: Header) -> TraceRecorder:
        """Open a trace under a header of your own; with `started` absent its clock is virtual.

        Raises:
            Refused: the file already holds this trace_id, or the header could not be read back.
        """
        if not canonical(payloads([header])):
            raise Refused("this header cannot be recorded: build its payloads with `freeze`")
        with self._lock:
            return self._begin(header)

    def _begin(self, header: Header) -> TraceRecorder:
        if header.trace_id in self._trace_ids:
            raise Refused(f"{self.path} already holds trace {header.trace_id}; give it another id")
        trace = TraceRecorder(self._store, header)
        self._remember(header)
        return trace

    def _remember(self, header: Header) -> None:
        self._trace_ids.add(header.trace_id)
        self._rollouts.setdefault(header.group_id, set()).add(header.rollout_id)

    def _next_rollout(self, group: str | None) -> str:
        taken = self._rollouts.get(group, set())
        free = len(taken)
        while str(free) in taken:
            free += 1
        return str(free)


def _group(task_id: str | None, policies: Mapping[str, PolicyRef]) -> str | None:
    if task_id is None or not policies:
        return task_id
    return f"{task_id}@{digest_of(CANONICAL.encode(dict(policies))).hex()[:8]}"


class TraceRecorder(TraceLog):
    """One trace being written. Leave its `with` block normally and it is sealed.

    An exception leaves it unsealed: whatever was recorded stays, and readers say unfinished.
    Methods may be called from several threads. Each takes `causes`, earlier events (or their
    `seq`) that it was computed from, besides the edges that the method itself implies.

    Every method raises:
        Refused: the event could not be read back (a NaN, a wrong type, a cause that is not
            earlier) and nothing of it was written; or the trace has ended.
        OSError: the disk refused; events written before are intact and you may try again.
    """

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
        elif not self._closed:
            self._store.release(self.header.trace_id)

    def emit(self, event: E) -> E:
        """Write an event that you built yourself: `trace_id` and `seq` are set, the rest is yours.

        Its payloads are made by `freeze`.
        """
        if not isinstance(event, Event) or not canonical(payloads([cast(AnyEvent, event)])):
            raise Refused("only an event can be recorded, and its payloads are made by `freeze`")
        kept = {name: self._stored(getattr(event, name)) for name in PAYLOADS[type(event)]}
        with self._lock:
            own = {"trace_id": self.header.trace_id, "seq": self._next}
            return self._put(msgspec.structs.replace(event, **own, **kept))

    # -- what an agent does ------------------------------------------------------------------

    def act(
        self,
        agent: str,
        text: str | None = None,
        *,
        sees: Causes | None = None,
        anchor: str | None = None,
        items: Sequence[Item] = (),
        token_ids: Any = None,
        logprobs: Any = None,
        trainable: bool = True,
        value: float | None = None,
        policy_version: str | None = None,
        causes: Causes = (),
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
        if text is not None and not isinstance(text, str):
            raise Refused(f"the text of an act is a string, not of type {type(text).__name__}")
        said = {
            "text_raw": self._payload(text),
            "items": _tuple(items),
            "token_ids": _tuple(token_ids),
            "logprobs": _tuple(logprobs),
            "trainable": trainable,
            "value": value,
            "policy_version": policy_version,
        }
        with self._lock:
            shown = self._inbox.get(agent, []) if sees is None else sees
            basis = "inferred:mailbox" if sees is None else "recorded"
            shows = self._links("consumes", shown, basis)
            observes, further = shows or anchor is not None, self._links("derives", causes)
            life = self._life(agent, acts=not observes)
            if not observes:
                return self._event(Act, agent, (*life, *further), said)
            sources = tuple(Source(seq=cause.seq) for cause in shows)
            view = {"sources": sources, "anchor": anchor}
            seen = self._built(Observe, agent, (*life, *shows), view)
            derives = Cause(seq=seen.seq, kind="derives")
            act = self._built(Act, agent, (derives, *further), said, after=1)
            return self._put(act, before=(seen,))

    def message(
        self,
        agent: str,
        to: Ids,
        content: Any = None,
        *,
        channel: str | None = None,
        causes: Causes = (),
    ) -> Message:
        """Send a message; it waits in each receiver's mailbox until that agent acts."""
        fields = {"to": _ids(to), "content_raw": self._payload(content), "channel": channel}
        return self._effect(Message, agent, self._links("derives", causes), fields)

    def delegate(
        self,
        agent: str,
        to: Ids,
        content: Any = None,
        *,
        waits: bool = False,
        causes: Causes = (),
    ) -> Delegate:
        """Hand work over; `waits` says that the sender goes on only after the return."""
        fields = {"to": _ids(to), "content_raw": self._payload(content), "waits": waits}
        return self._effect(Delegate, agent, self._links("derives", causes), fields)

    def agent_return(
        self,
        agent: str,
        to: Ids,
        content: Any = None,
        *,
        answers: Cited | None = None,
        causes: Causes = (),
    ) -> AgentReturn:
        """A sub-agent's result goes back; `answers` is the delegation, if there was one."""
        answered = self._links("returns", () if answers is None else (answers,))
        links = (*answered, *self._links("derives", causes))
        fields = {"to": _ids(to), "content_raw": self._payload(content)}
        return self._effect(AgentReturn, agent, links, fields)

    def spawn(
        self,
        agent: str,
        child: str,
        role: str | None = None,
        *,
        context: Any = None,
        causes: Causes = (),
    ) -> Spawn:
        """Bring an agent to life; `context` waits in its mailbox."""
        fields = {"child": child, "child_role": role, "context_raw": self._payload(context)}
        return self._effect(Spawn, agent, self._links("derives", causes), fields)

    def despawn(
        self, agent: str, child: str, status: Status = "completed", *, causes: Causes = ()
    ) -> Despawn:
        """End an agent."""
        fields = {"child": child, "status": status}
        return self._effect(Despawn, agent, self._links("derives", causes), fields)

    def tool_call(
        self,
        agent: str,
        tool: str,
        arguments: Any = None,
        *,
        source_id: str | None = None,
        causes: Causes = (),
    ) -> ToolCall:
        """Call a tool; give the returned event to `tool_result`."""
        given = self._payload(arguments)
        fields = {"tool": tool, "arguments_raw": given, "source_id": source_id}
        return self._effect(ToolCall, agent, self._links("derives", causes), fields)

    def tool_result(
        self,
        call: Cited,
        content: Any = None,
        *,
        error: str | None = None,
        trust: Trust = "untrusted",
        pure: bool = False,
        causes: Causes = (),
    ) -> ToolResult:
        """Answer a call. Untrusted unless you say otherwise; `pure` if it changed nothing.

        A result also descends from the last one that was not pure: the environment is shared.
        A call that is unknown or already answered is refused.
        """
        links, further = self._links("answers", (call,)), self._links("derives", causes)
        at, content_raw = links[0].seq, self._payload(content)
        fields = {"call": at, "content_raw": content_raw, "error": error, "trust": trust}
        with self._lock:
            before = self._environment
            if at not in self._calls:
                raise Refused(f"event {at} is no tool call that waits for its result")
            if before is not None:
                links += self._links("derives", (before,), "inferred:environment")
            result = self._event(ToolResult, self._calls[at], (*links, *further), fields)
            if pure:
                self._environment = before
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
        causes: Causes = (),
    ) -> Write:
        """Record that a shared artefact changed from `base_version` to `version`."""
        fields = {
            "artefact": artefact,
            "version": version,
            "base_version": base_version,
            "reads": _tuple(reads),
            "content_raw": self._payload(content),
        }
        return self._effect(Write, agent, self._links("derives", causes), fields)

    def aggregate(
        self,
        agent: str,
        inputs: Causes,
        content: Any = None,
        *,
        rule: str | None = None,
        causes: Causes = (),
    ) -> Aggregate:
        """Several earlier events become one."""
        used = self._links("aggregates", inputs)
        links = (*used, *self._links("derives", causes))
        read, content_raw = tuple(cause.seq for cause in used), self._payload(content)
        fields = {"inputs": read, "content_raw": content_raw, "rule": rule}
        return self._effect(Aggregate, agent, links, fields)

    def stop(
        self,
        agent: str,
        answer: Any = None,
        *,
        reason: str = "answered",
        truncated: bool = False,
        causes: Causes = (),
    ) -> Stop:
        """The run ends: only rewards may follow."""
        fields = {"reason": reason, "answer_raw": self._payload(answer), "truncated": truncated}
        return self._effect(Stop, agent, self._links("derives", causes), fields)

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
        causes: Causes | None = None,
    ) -> Reward:
        """Record one amount on one channel; None says that scoring failed, which is not zero.

        `causes` are the events that it depends on; left out, it depends on everything the run did.
        """
        fields = {
            "amount": amount,
            "channel": channel,
            "family": family,
            "target": target,
            "source": source,
            "verifiable": verifiable,
            "error_rate": error_rate,
        }
        with self._lock:
            given = self._leaves if causes is None else causes
            basis = "inferred:run" if causes is None else "recorded"
            return self._event(Reward, source, self._links("rewards", given, basis), fields)

    def deliver(self, agent: str, message: Cited) -> Deliver:
        """Record when a message reached a mailbox, for loops in which that is not at once."""
        links = self._links("delivers", (message,))
        return self._event(Deliver, agent, links, {"message": links[0].seq})

    def intervene(
        self, do: str, *, target: Cited | None = None, content: Any = None, agent: str = "human"
    ) -> Intervene:
        """Record that a person changed something by hand."""
        links = self._links("derives", () if target is None else (target,))
        seq = links[0].seq if links else None
        put = self._payload(content)
        fields = {"do": do, "target": seq, "content_raw": put, "trust": "human"}
        return self._event(Intervene, agent, links, fields)

    def safety(
        self,
        rule: str,
        effect: Literal["blocked", "flagged", "declassified"],
        target: Cited,
        *,
        agent: str = "harness",
    ) -> Safety:
        """Record that a check blocked, flagged or declassified an event."""
        links = self._links("guards", (target,))
        fields = {"rule": rule, "effect": effect, "target": links[0].seq}
        return self._event(Safety, agent, links, fields)

    def custom(self, agent: str, name: str, data: Any = None, *, causes: Causes = ()) -> Custom:
        """Keep something outside the vocabulary, under the name `vendor.kind`."""
        links = self._links("derives", causes)
        return self._event(Custom, agent, links, {"name": name, "data_raw": self._payload(data)})

    # -- how the arguments become fields -----------------------------------------------------

    def _links(self, kind: EdgeKind, causes: Causes, basis: str = "recorded") -> Links:
        if not causes:
            return ()
        try:
            return tuple([Cause(seq=self._seq(c), kind=kind, basis=basis) for c in causes])
        except TypeError:
            raise Refused("causes are a list of events; write [event] for one of them") from None

    def _seq(self, cited: Cited) -> int:
        here = self.header.trace_id
        if isinstance(cited, Event) and (cited.trace_id == here or self.header.fork):
            cited = cited.seq
        if isinstance(cited, int) and 0 <= cited < self._next:
            return cited
        what = cited if isinstance(cited, int) else f"this {type(cited).__name__}"
        raise Refused(f"a cause is an earlier event of trace {here} or its seq, not {what}")

    def _payload(self, value: Any) -> Payload:
        return self._stored(freeze(value))

    def _stored(self, raw: Payload) -> Payload:
        """Content over a mebibyte, or that looks like what stands for such, goes to a side file."""
        if raw is UNSET:
            return raw
        data = bytes(raw)
        if len(data) <= SIDE_FILE_OVER and not data.startswith(SIDE):
            return raw
        return freeze(aside(side_folder(self._store.path), data))


def _ids(to: Ids) -> Any:
    return (to,) if isinstance(to, str) else _tuple(to)


def _tuple(values: Any) -> Any:
    """A tuple from any sequence or array; what is none is left for the type check to refuse."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return tuple(listed)
    except TypeError:
        return values
