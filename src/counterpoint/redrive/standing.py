"""Where branches leave: a recorded run brought to one of its events, and copied from there.

A prefix is driven once, whatever the number of branches: each gets a copy of the world and the
environment's snapshot, and goes on from there, so that it costs as much as what it plays.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from counterpoint.branches import Spent
from counterpoint.envs import Env
from counterpoint.harness import Human, Run, attached, next_event, reference, team_of
from counterpoint.policies import Policy
from counterpoint.redrive.follow import Led, Team, by_hand, env_for, team_for
from counterpoint.schema import (
    Act,
    AnyEvent,
    EnvRef,
    Header,
    Observe,
    ToolCall,
    ToolResult,
    Trace,
    chain,
    encode,
    header_digest,
)
from counterpoint.spelling import Refused
from counterpoint.streams import Keys, keys_of
from counterpoint.world import Agent, Control, World

R = TypeVar("R", bound=Run)


class Stage(NamedTuple):
    """A recorded run with all it takes to go on with it.

    Attributes:
        trace: the run; it may be a fork.
        header: of the whole run: of no fork, under the environment and policies that go on.
        events: from the first on, those of a fork's parents before its own.
        keys: of its random streams.
        env, team, human: who goes on.
        changed: what is not as the trace's header says, in words; empty if all of it is.
    """

    trace: Trace
    header: Header
    events: tuple[AnyEvent, ...]
    keys: Keys
    env: Env
    team: Mapping[str, Policy]
    human: Human | None
    changed: tuple[str, ...]


class Standing(NamedTuple):
    """A run before its next event, and the environment's hidden state there."""

    run: Led
    state: Any


# ---------------------------------------------------------------------------------------------
# Who goes on


def staged(trace: Trace, env: Env | None, policies: Team | None, allow_changed: bool) -> Stage:
    """Find everything that a recorded run needs to go on, and check that it is what played.

    Raises:
        Refused: the run was not played by our harness, or was changed since it was sealed; it is a
            fork whose parent is not at hand; an environment or a policy is gone, or is another one
            than the header names (unless `allow_changed`).
    """
    if trace.seal is not None and trace.seal.digest != digest_before(
        trace, trace.first + len(trace)
    ):
        raise Refused(
            f"trace {trace.trace_id} was changed since it was sealed; `counterpoint replay` says "
            "where"
        )
    known = attached(trace)
    env = known.env if env is None else env
    policies = known.team if policies is None else policies
    header = msgspec.structs.replace(trace.header, fork=None)
    changed: tuple[str, ...] = ()
    if allow_changed:
        header, changed = _as_given(header, env, policies)
    env = env_for(header, env)
    team = team_for(header, env, policies)
    for role, ref in header.policies.items():
        if role in env.roles and role not in team:
            raise Refused(
                f"trace {trace.trace_id}: the policy of {role} ({ref.target or 'without a name'}) "
                "is gone: nothing here can load it; give it as policies="
            )
    fork = trace.header.fork
    keys = keys_of(trace.header.seed or 0, fork.keys if fork else ())
    return Stage(trace, header, history(trace), keys, env, team, known.human, changed)


def _as_given(
    header: Header, env: Env | None, policies: Team | None
) -> tuple[Header, tuple[str, ...]]:
    """The header under what goes on, and what of it differs from the record."""
    changed = []
    if env is not None and header.env is not None:
        ours = EnvRef(id=env.id, digest=env.digest())
        changed += [f"environment {env.id}"] if ours != header.env else []
        header = msgspec.structs.replace(header, env=ours)
    if policies is not None:
        team = team_of(env_for(header, env), policies)
        refs = {role: reference(team[role]) for role in header.policies if role in team}
        changed += [f"policy of {role}" for role in refs if refs[role] != header.policies[role]]
        header = msgspec.structs.replace(header, policies={**header.policies, **refs})
    return header, tuple(changed)


def history(trace: Trace) -> tuple[AnyEvent, ...]:
    """All events of a run from the first on, under one trace_id: a fork's parents have the rest.

    Raises:
        Refused: the parent of a fork is not attached, or is not the one that the fork left.
    """
    ref = trace.header.fork
    if ref is None:
        return trace.events
    parent = attached(trace).parent
    if parent is None:
        raise Refused(
            f"trace {trace.trace_id} is a fork and holds only its suffix: its parent, trace "
            f"{ref.trace_id}, has to be at hand (in the same file or folder)"
        )
    if parent.trace_id != ref.trace_id or digest_before(parent, ref.seq) != ref.digest:
        raise Refused(
            f"trace {trace.trace_id} does not leave trace {parent.trace_id} at event {ref.seq}: "
            f"there it has another digest than {ref.digest}"
        )
    before = history(parent)[: ref.seq]
    return (*(renamed(event, trace.trace_id) for event in before), *trace.events)


def renamed(event: AnyEvent, trace_id: str) -> AnyEvent:
    """The event as one of another trace."""
    return msgspec.structs.replace(event, trace_id=trace_id)


def digest_before(trace: Trace, seq: int) -> str:
    """The chained digest of a trace before its event `seq`."""
    state = header_digest(trace.header)
    for event in trace.events[: seq - trace.first]:
        state = chain(state, encode(event))
    return state.hex()


# ---------------------------------------------------------------------------------------------
# Along the record


class Along:
    """A run led along its record, from one place to a later one; back to an earlier one, anew.

    Attributes:
        spent: calls of the environment that leading took.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.spent = Spent()
        self._begin()

    def _begin(self) -> None:
        self._led = Led(self.stage.header, self.stage.env)
        self._led.keys = self.stage.keys
        self._state = snapshot(self.stage.env)

    def standing(self, seq: int) -> Standing:
        """The run before event `seq`, with a snapshot; both can be used again and again.

        Raises:
            Refused: the environment or the harness computes an event before it differently; or
                the environment gives no snapshot.
        """
        if seq < len(self._led.events):
            self._begin()
        led, done = self._led, len(self._led.events)
        self.stage.env.restore(self._state)
        found = led.follow(Trace(led.header, self.stage.events[:seq]))
        if found is not None:
            raise Refused(
                f"trace {self.stage.trace.trace_id} cannot be re-driven past event {found[0]}: "
                f"{found[1]}"
            )
        self.spent += cost(led.events, done, led.specs, policies=False)
        self._state = snapshot(self.stage.env)
        return Standing(twin(led), self._state)


def snapshot(env: Env) -> Any:
    """The environment's hidden state; without it no branch may start, so there is no other way."""
    try:
        state = env.snapshot()
    except TypeError as error:  # what a deep copy says of a lock, a file, a generator
        raise Refused(
            f"{env.id} gives no snapshot, so no run can leave here: {error}; write its snapshot() "
            "and restore()"
        ) from error
    if state is None:
        raise Refused(f"{env.id} gives no snapshot, so no run can leave here: snapshot() is None")
    return state


def twin(run: R) -> R:
    """A run that stands where another one stands and goes its own way; they share the environment.

    It takes as long as copying references to what agents have seen, not as replaying the events.
    """
    made = copy.copy(run)
    made.events = list(run.events)
    made.versions = dict(run.versions)
    made.world = _copied(run.world)
    return made


def _copied(world: World) -> World:
    made: World = _alike(world, World)
    made.agents = {name: _alike(agent, Agent) for name, agent in world.agents.items()}
    made.open_delegations = {seq: set(ids) for seq, ids in world.open_delegations.items()}
    made.control = _alike(world.control, Control)
    return made


def _alike(thing: Any, kind: Any) -> Any:
    """Another object with the same slots; dictionaries and lists are its own."""
    made = object.__new__(kind)
    for slot in kind.__slots__:
        value = getattr(thing, slot)
        setattr(made, slot, value.copy() if isinstance(value, dict | list) else value)
    return made


def go_on(run: Run) -> Run:
    """Play a run to its end. What goes wrong says where."""
    try:
        while (event := next_event(run)) is not None:
            run.emit(event)
    except Exception as error:
        error.add_note(f"at event {len(run.events)} of branch {run.header.trace_id}")
        raise
    return run


def cost(
    events: Sequence[AnyEvent], since: int, specs: Collection[str], policies: bool = True
) -> Spent:
    """What the events of a whole run from `since` on took to compute: calls of tools that the
    environment has (`specs`) and ran, and, if policies were asked, their passes and tokens.
    """
    calls = passes = tokens = 0
    for event in events[since:]:
        if not isinstance(event, ToolResult | Act) or by_hand(event):
            continue
        if isinstance(event, ToolResult):
            call = cast(ToolCall, events[cast(int, event.call)])
            calls += call.verdict != "deny" and call.tool in specs
        elif policies:
            passes += 1
            tokens += (event.tokens_in or 0) + (event.tokens_out or 0)
    return Spent(calls, passes, tokens)


def asked_at(events: tuple[AnyEvent, ...], seq: int) -> int:
    """Where what comes at `seq` was asked for: an act at its observation, a result at its call."""
    asks = seq > 0 and isinstance(events[seq - 1], Observe | ToolCall)
    return seq - 1 if asks else seq
