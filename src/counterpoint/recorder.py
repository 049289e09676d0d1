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
import time
import uuid
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from counterpoint.append import AppendOnly, Causes, Cited, E, Ids, Sync, TraceLog, as_tuple, ids
from counterpoint.schema import (
    FORMAT,
    Act,
    AgentRef,
    AgentReturn,
    Aggregate,
    Cause,
    Custom,
    Delegate,
    Deliver,
    Despawn,
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
    Stop,
    Target,
    ToolCall,
    ToolResult,
    Write,
)
from counterpoint.spelling import CANONICAL, Refused, canonical, digest_of, freeze
from counterpoint.store import PAYLOADS, payloads, records
from counterpoint.vocabulary import Family, Status, StopReason, Trust, Verifiable


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
        if not isinstance(path, str | os.PathLike):
            raise Refused(f"a recorder writes to a file or folder, not to {type(path).__name__}")
        self._store = AppendOnly(Path(path), sync)
        self.path = self._store.path
        self._trace_ids: set[str] = set()
        self._rollouts: dict[str | None, set[str | None]] = {}
        try:
            for _, value in records(self.path):
                if isinstance(value, Header):
                    self._remember(value)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *raised: object) -> None:
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
        with self._store.lock:
            if rollout_id is None:
                header = replace(header, rollout_id=self._next_rollout(group))
            return self._begin(header)

    def open(self, header: Header) -> TraceRecorder:
        """Open a trace under a header of your own; with `started` absent its clock is virtual.

        Raises:
            Refused: the file already holds this trace_id, or the header could not be read back.
        """
        if not canonical(payloads([header])):
            raise Refused("this header cannot be recorded: build its payloads with `freeze`")
        with self._store.lock:
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
        return next(name for name in map(str, count(len(taken))) if name not in taken)


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

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.end()
        elif not self._closed:
            self._store.release(self._id)

    def emit(self, event: E) -> E:
        """Write an event that you built yourself: `trace_id` and `seq` are set, the rest is yours.

        Its payloads are made by `freeze`.
        """
        if not isinstance(event, Event):
            raise Refused(f"an event is recorded by `emit`, not a {type(event).__name__}")
        kept = {name: self._payload(getattr(event, name)) for name in PAYLOADS[type(event)]}
        if isinstance(event, Act) and not canonical(payloads([event])):
            raise Refused("the content of an item is made by `freeze`")
        with self._lock:
            return self._put(replace(event, trace_id=self._id, seq=self._next, **kept))

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
        mask: Any = None,
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
            token_ids: the tokens of the text, any sequence or array; with `mask`, what the model
                was fed before it too.
            logprobs: log-probability of each token, likewise; 0 on what it was fed.
            mask: whether the policy wrote each token; left out, it wrote them all.
            trainable: whether the policy being trained wrote the text.
            value: a critic's estimate of the return from here.
            policy_version: which parameters acted.
            causes: further events that it was computed from.
        """
        if text is not None and not isinstance(text, str):
            raise Refused(f"the text of an act is a string, not of type {type(text).__name__}")
        act = Act(
            trace_id="",
            seq=0,
            agent=agent,
            trainable=trainable,
            text_raw=self._payload(text),
            items=as_tuple(items),
            token_ids=as_tuple(token_ids),
            logprobs=as_tuple(logprobs),
            mask=as_tuple(mask),
            policy_version=policy_version,
            value=value,
        )
        with self._lock:
            further = self._links("derives", causes)
            shown = self._inbox.get(agent, ()) if sees is None else sees
            basis = "inferred:mailbox" if sees is None else "recorded"
            shows = self._links("consumes", shown, basis)
            if not shows and anchor is None:
                return self._put(self._stamped(act, self._life(agent, acts=True) + further))
            sources = tuple([Source(seq=cause.seq) for cause in shows])
            seen = Observe(trace_id="", seq=0, agent=agent, sources=sources, anchor=anchor)
            seen = self._stamped(seen, self._life(agent, acts=False) + shows)
            derives = (Cause(seq=seen.seq, kind="derives"),)
            return self._put(self._stamped(act, derives + further, after=1), before=seen)

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
        raw = self._payload(content)
        sent = Message(
            trace_id="", seq=0, agent=agent, to=ids(to), content_raw=raw, channel=channel
        )
        return self._effect(sent, self._links("derives", causes))

    def delegate(
        self, agent: str, to: Ids, content: Any = None, *, waits: bool = False, causes: Causes = ()
    ) -> Delegate:
        """Hand work over; `waits` says that the sender goes on only after the return."""
        raw = self._payload(content)
        asked = Delegate(trace_id="", seq=0, agent=agent, to=ids(to), content_raw=raw, waits=waits)
        return self._effect(asked, self._links("derives", causes))

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
        raw = self._payload(content)
        given = AgentReturn(trace_id="", seq=0, agent=agent, to=ids(to), content_raw=raw)
        answered = self._links("returns", () if answers is None else (answers,))
        return self._effect(given, answered + self._links("derives", causes))

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
        given = self._payload(context)
        born = Spawn(
            trace_id="", seq=0, agent=agent, child=child, child_role=role, context_raw=given
        )
        return self._effect(born, self._links("derives", causes))

    def despawn(
        self, agent: str, child: str, status: Status = "completed", *, causes: Causes = ()
    ) -> Despawn:
        """End an agent."""
        gone = Despawn(trace_id="", seq=0, agent=agent, child=child, status=status)
        return self._effect(gone, self._links("derives", causes))

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
        raw = self._payload(arguments)
        call = ToolCall(
            trace_id="", source_id=source_id, seq=0, agent=agent, tool=tool, arguments_raw=raw
        )
        return self._effect(call, self._links("derives", causes))

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
        at, raw = self._seq(call), self._payload(content)
        with self._lock:
            agent, before = self._calls.get(at), self._environment
            if agent is None:
                raise Refused(f"event {at} is no tool call that waits for its result")
            links = self._links("answers", (at,))
            if before is not None:
                links += self._links("derives", (before,), "inferred:environment")
            answer = ToolResult(
                trace_id="", seq=0, agent=agent, trust=trust, call=at, content_raw=raw, error=error
            )
            result = self._event(answer, links + self._links("derives", causes))
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
        written = Write(
            trace_id="",
            seq=0,
            agent=agent,
            artefact=artefact,
            version=version,
            base_version=base_version,
            reads=as_tuple(reads),
            content_raw=self._payload(content),
        )
        return self._effect(written, self._links("derives", causes))

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
        seqs, raw = tuple([cause.seq for cause in used]), self._payload(content)
        joined = Aggregate(trace_id="", seq=0, agent=agent, inputs=seqs, content_raw=raw, rule=rule)
        return self._effect(joined, used + self._links("derives", causes))

    def stop(
        self,
        agent: str,
        answer: Any = None,
        *,
        reason: StopReason = "answered",
        truncated: bool = False,
        causes: Causes = (),
    ) -> Stop:
        """The run ends: only rewards may follow."""
        raw = self._payload(answer)
        last = Stop(
            trace_id="", seq=0, agent=agent, reason=reason, answer_raw=raw, truncated=truncated
        )
        return self._effect(last, self._links("derives", causes))

    # -- what happens to them ----------------------------------------------------------------

    def reward(
        self,
        amount: float | None,
        *,
        channel: str = "team",
        family: Family = "R1",
        target: Target | None = None,
        source: str = "env",
        verifiable: Verifiable | None = None,
        error_rate: float | None = None,
        causes: Causes | None = None,
    ) -> Reward:
        """Record one amount on one channel; None says that scoring failed, which is not zero.

        `causes` are the events that it depends on; left out, it depends on everything the run did.
        """
        paid = Reward(
            trace_id="",
            seq=0,
            agent=source,
            amount=amount,
            family=family,
            channel=channel,
            target=target,
            source=source,
            verifiable=verifiable,
            error_rate=error_rate,
        )
        with self._lock:
            given = self._leaves if causes is None else causes
            basis = "inferred:run" if causes is None else "recorded"
            return self._event(paid, self._links("rewards", given, basis))

    def deliver(self, agent: str, message: Cited) -> Deliver:
        """Record when a message reached a mailbox, for loops in which that is not at once."""
        links = self._links("delivers", (message,))
        return self._event(Deliver(trace_id="", seq=0, agent=agent, message=links[0].seq), links)

    def intervene(
        self, do: str, *, target: Cited | None = None, content: Any = None, agent: str = "human"
    ) -> Intervene:
        """Record that a person changed something by hand."""
        links = self._links("derives", () if target is None else (target,))
        at, raw = links[0].seq if links else None, self._payload(content)
        change = Intervene(
            trace_id="", seq=0, agent=agent, trust="human", do=do, target=at, content_raw=raw
        )
        return self._event(change, links)

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
        at = links[0].seq
        check = Safety(trace_id="", seq=0, agent=agent, rule=rule, effect=effect, target=at)
        return self._event(check, links)

    def custom(self, agent: str, name: str, data: Any = None, *, causes: Causes = ()) -> Custom:
        """Keep something outside the vocabulary, under the name `vendor.kind`."""
        kept = Custom(trace_id="", seq=0, agent=agent, name=name, data_raw=self._payload(data))
        return self._event(kept, self._links("derives", causes))
