"""Fork: a recorded run goes otherwise from one of its events on.

The prefix is re-driven once; every branch starts from a snapshot, with a key of its own for all
draws that are asked for after the fork, and plays to its end under the run's own policies. A branch
is a trace that holds its suffix only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from counterpoint.branches import Spent
from counterpoint.credit.account import check_budget, covered
from counterpoint.credit.protocols import Budget
from counterpoint.envs import Env
from counterpoint.harness import Cast, Run, attach, sealed
from counterpoint.harness.workers import Job, spread
from counterpoint.policies import described
from counterpoint.redrive.branches import Branches
from counterpoint.redrive.follow import Team
from counterpoint.redrive.interventions import WAYS, Change, Level, begins, planned
from counterpoint.redrive.standing import (
    Along,
    Stage,
    Standing,
    asked_at,
    cost,
    digest_before,
    go_on,
    renamed,
    snapshot,
    staged,
    twin,
)
from counterpoint.schema import Event, ForkRef, Header, Trace, header_digest
from counterpoint.spelling import CANONICAL, Refused, digest_of, freeze
from counterpoint.streams import Keys, branch_key

Streams = Literal["branch", "parent"]


def fork(
    trace: Trace,
    at: Event | int,
    do: str,
    *,
    n: int,
    content: Any = None,
    seed: int = 0,
    streams: Streams = "branch",
    level: Level | None = None,
    env: Env | None = None,
    policies: Team | None = None,
    allow_changed: bool = False,
    workers: int = 1,
    budget: Budget | None = None,
) -> Branches:
    """Go back to an event of a recorded run, do something to it, and play on to the end, n times.

        resample   nothing is put in: from before the event on, all is drawn anew
        keep       the event as it was, and all after it drawn anew: the control arm
        replace    an act says `content`, the text of a whole turn; a message, delegation, return,
                   write, spawn, stop or result says it on the way (level channel), or its act does
                   (decision); a result that is replaced stands for its tool, which does not run
        edit       as replace, by a human, whose label of trust it gets
        remove     an act does nothing; of an effect, its act is without it
        no_spawn   the act without its spawn
        mute       a message, delegation or return is sent and reaches nobody; nobody waits for it
        redirect   a message or delegation goes to the agents in `content`
        stop_now   the run ends in place of the event, with `content` for its answer

    Interventions of level `channel` leave the act as it was, those of level `decision` put another
    in its place: two estimands. What was asked for before the fork is answered as in the record, so
    a fork that draws an act anew begins at its observation, and one that draws a result at its
    call. Arms at one event share the later draws of branches that bear one number.

    Args:
        trace: a run that our harness played, or a branch of one whose parent is at hand.
        at: the event, or its seq.
        do: what is done there.
        n: branches, numbered from 0.
        content: what `do` puts in, if it puts something in.
        seed: of all draws after the fork.
        streams: "branch", or "parent" for the record's own draws: then nothing is drawn anew, and
            an untouched fork is the record's own suffix, byte for byte.
        level: "channel" or "decision" where `do` has both; by default the first that it can have.
        env: the environment; by default the one that played the trace in this process, else the
            one of the table that the header names. It is used, not copied.
        policies: who goes on; by default who played in this process, else what the header's
            targets load.
        allow_changed: also go on under an environment or policies that are not the record's. Their
            names then stand in the branches' headers and in `Branches.changed`.
        workers: processes that share the branches; their number changes no branch.
        budget: the most to spend, by the names of `Spent`; as for a `credit.Account`. Branches that
            it does not pay for are not played, and `notes` says how many.

    Raises:
        Refused: a trace that cannot be re-driven (imported, changed since it was sealed, a fork
            whose parent is not at hand), an event that is not there or of a kind that `do` cannot
            be done to, content that is missing, policies or an environment that are gone or
            changed, n below 1; the sentence says which and the way out.
    """
    arm = arm_of(
        trace,
        at,
        do,
        content=content,
        seed=seed,
        streams=streams,
        level=level,
        env=env,
        policies=policies,
        allow_changed=allow_changed,
    )
    return arm.played(n, workers, budget=budget)


def arm_of(
    trace: Trace,
    at: Event | int,
    do: str,
    *,
    content: Any = None,
    seed: int = 0,
    streams: Streams = "branch",
    level: Level | None = None,
    env: Env | None = None,
    policies: Team | None = None,
    allow_changed: bool = False,
) -> Arm:
    """What `fork` plays, before it is played; arguments and errors as there."""
    if streams not in ("branch", "parent"):
        raise Refused(f"streams are 'branch' or 'parent', not {streams!r:.40}")
    stage = staged(trace, env, policies, allow_changed)
    change = planned(trace, stage.events, placed(trace, at), do, content, level)
    return Arm(stage, change, begins(change, streams), seed, streams)


def placed(trace: Trace, at: Event | int) -> int:
    """The seq of an event of a trace. Refused if it has none such."""
    seq = at if isinstance(at, int) else at.seq
    last = trace.first + len(trace) - 1
    if not trace.first <= seq <= last:
        there = f"it has events {trace.first} to {last}" if len(trace) else "it has no events"
        parent = trace.header.fork
        above = f", those before are in its parent {parent.trace_id}" if parent else ""
        raise Refused(f"trace {trace.trace_id} has no event {seq}: {there}{above}")
    if isinstance(at, Event) and trace[seq] != at:
        raise Refused(f"event {seq} of trace {trace.trace_id} is not the {at.kind} that was given")
    return seq


def _spelled(content: Any) -> str:
    raw = freeze(content)
    return "" if isinstance(raw, msgspec.UnsetType) else bytes(raw).decode()


def _repeats(stage: Stage) -> bool:
    return all(described(policy, "deterministic") for policy in stage.team.values())


class Arm:
    """All branches of one intervention at one event of one run.

    Raises:
        Refused: the fork would begin before the trace does.
    """

    def __init__(self, stage: Stage, change: Change, begin: int, seed: int, streams: Streams):
        trace = stage.trace
        if begin < trace.first:
            fork_ = trace.header.fork
            raise Refused(
                f"what stands at event {change.event.seq} was asked for at event {begin}, which is "
                f"in the parent of trace {trace.trace_id}: fork trace "
                f"{fork_.trace_id if fork_ else trace.trace_id} there"
            )
        self.stage, self.change, self.begin = stage, change, begin
        self.seed, self.streams = seed, streams
        self._digest = digest_before(trace, begin)
        self._blank = self._header()

    def keys(self, number: int) -> Keys:
        """The keys of a branch."""
        keys = self.stage.keys
        if self.streams == "parent":
            return keys
        asked = asked_at(self.stage.events, self.begin)
        return branch_key(keys, self.begin, self.seed, number, asked)

    def header(self, number: int) -> Header:
        """The header of a branch; its trace_id is a digest of all that decides what is played."""
        ref = ForkRef(
            trace_id=self.stage.trace.trace_id,
            seq=self.begin,
            digest=self._digest,
            do=self.change.do,
            level=self.change.level,
            branch=number,
            streams=self.streams,
            keys=self.keys(number),
        )
        header = msgspec.structs.replace(self._blank, rollout_id=str(number), fork=ref)
        return msgspec.structs.replace(header, trace_id=header_digest(header).hex())

    def _header(self) -> Header:
        header, change = self.stage.header, self.change
        under = [header.policies, header.env, self._digest, change.event.seq, change.do,
                 change.level, _spelled(change.content), self.seed, self.streams]  # fmt: skip
        arm = digest_of(CANONICAL.encode(under)).hex()[:8]
        group = header.group_id or header.task_id or header.trace_id
        return msgspec.structs.replace(
            header,
            trace_id="",
            writer="counterpoint",
            started=None,
            meta_raw=msgspec.UNSET,
            group_id=f"{group}/{change.event.seq}:{change.do}@{arm}",
        )

    def played(
        self,
        n: int,
        workers: int = 1,
        known: Mapping[str, Trace] = MappingProxyType({}),
        watched: Callable[[Iterator[Trace]], Iterator[Trace]] = iter,
        budget: Budget | None = None,
    ) -> Branches:
        """Branches 0 … n − 1, in their order.

        Those that are `known` by their trace_id are not played again: it is a digest of the prefix,
        the intervention and the keys, and so names what would be played. `watched` passes the
        others on as they end. What the `budget` does not cover at the record's price is left out,
        and noted.

        Raises:
            Refused: n or workers below 1; a known branch that is torn or was changed; with the
                record's own draws, more than one branch where none can differ.
        """
        check_budget(budget or {})
        for what, number in (("branches", n), ("workers", workers)):
            if number < 1:
                raise Refused(f"{number} {what} play nothing; ask for 1 at least")
        if n > 1 and self.streams == "parent" and _repeats(self.stage):
            raise Refused("with the record's own draws all branches are the same one; ask for n=1")
        headers = [self.header(number) for number in range(n)]
        held = [_whole(known[h.trace_id]) for h in headers if h.trace_id in known]
        found = {branch.trace_id: attach(branch, self._cast) for branch in held}
        cached, notes = len(found), list[str]()
        missing = [header for header in headers if header.trace_id not in found]
        new, spent = self._paid(missing, workers, watched, budget or {}, notes)
        found |= {branch.trace_id: attach(branch, self._cast) for branch in new}
        return Branches(
            parent=self.stage.trace,
            seq=self.change.event.seq,
            do=self.change.do,
            level=self.change.level,
            n=n,
            traces=tuple(found[h.trace_id] for h in headers if h.trace_id in found),
            spent=spent,
            cached=cached,
            changed=self.stage.changed,
            notes=tuple(notes),
        )

    def _paid(
        self,
        missing: list[Header],
        workers: int,
        watched: Callable[[Iterator[Trace]], Iterator[Trace]],
        budget: Budget,
        notes: list[str],
    ) -> tuple[list[Trace], Spent]:
        """The branches that are not there and that the budget pays for, and what they cost."""
        made, spent = list[Trace](), Spent()
        if missing and covered(budget, self._lead, self._each, 1):
            standing, spent = self._standing()
            while size := covered(budget, spent, self._each, len(missing)):
                for trace in watched(self._shared(standing, missing[:size], workers, notes)):
                    made.append(trace)
                    whole = (*standing.run.events[: self.begin], *trace.events)
                    spent += cost(whole, len(standing.run.events), standing.run.specs)
                missing = missing[size:]
        if missing:
            notes.append(f"the budget is spent: {len(missing)} branches are left out")
        return made, spent

    def price(self, n: int) -> Spent:
        """What n branches would cost if each were as long as the record is from there on."""
        amounts = zip(vars(self._lead).values(), vars(self._each).values(), strict=True)
        return Spent(*(lead + n * each for lead, each in amounts))

    @cached_property
    def _lead(self) -> Spent:
        """What leading the run along its record to the fork costs."""
        before = self.stage.events[: self.begin]
        return cost(before, 0, self.stage.env.tools(), policies=False)

    @cached_property
    def _each(self) -> Spent:
        """What the record from the fork on costs: of an act that is put in, no pass."""
        since = self.begin if self.change.do == "resample" else self.change.event.seq + 1
        return cost(self.stage.events, since, self.stage.env.tools())

    @property
    def _cast(self) -> Cast:
        return Cast(self.stage.env, self.stage.team, self.stage.human, self.stage.trace)

    def _standing(self) -> tuple[Standing, Spent]:
        """The run with the change in it, and the calls of the environment that it took."""
        along = Along(self.stage)
        standing = changed(along.standing(self.begin), self.change)
        run = standing.run
        return standing, along.spent + cost(run.events, self.begin, run.specs, policies=False)

    def _shared(
        self, standing: Standing, headers: list[Header], workers: int, notes: list[str]
    ) -> Iterator[Trace]:
        if workers > 1 and self.stage.human is not None:
            raise Refused(f"{workers} workers cannot ask one human; say workers=1")
        by_number = {int(header.rollout_id or 0): header for header in headers}

        def played(job: Job) -> Trace:
            return self._branch(standing, by_number[job[1]])

        jobs = [(self.change.event.seq, number) for number in by_number]
        return map(played, jobs) if workers == 1 else spread(jobs, workers, played, notes)

    def _branch(self, standing: Standing, header: Header) -> Trace:
        keys = header.fork.keys if header.fork else ()
        run = go_on(begun(standing, self.stage, self.begin, header.trace_id, keys))
        return sealed(Trace(header, tuple(run.events[self.begin :])))


def changed(standing: Standing, change: Change) -> Standing:
    """A place after something was done to what came next."""
    led = twin(standing.run)
    led.env.restore(standing.state)
    WAYS[change.do].put(led, change)
    return Standing(led, snapshot(led.env))


def begun(standing: Standing, stage: Stage, begin: int, trace_id: str, keys: Keys) -> Run:
    """A run of its own from a place on, under whoever goes on; from `begin` on it bears this id."""
    run = twin(standing.run)
    run.env.restore(standing.state)
    run.header = msgspec.structs.replace(stage.header, trace_id=trace_id)
    run.events[begin:] = [renamed(event, trace_id) for event in run.events[begin:]]
    run.keys, run.policies, run.human = keys, stage.team, stage.human
    return run


def _whole(trace: Trace) -> Trace:
    """A branch that is there already. Refused if it is torn or was changed."""
    if trace.seal is None or trace.seal.digest != digest_before(trace, trace.first + len(trace)):
        raise Refused(
            f"branch {trace.trace_id} is there already but was torn or changed; take it out of the "
            "traces, and it is played anew"
        )
    return trace
