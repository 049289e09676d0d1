"""A run led along a record: acts and what people did are given, everything else is computed.

This is re-drive. It rebuilds the hidden state of an environment, which no event holds, by doing to
it what was done; and since each event is computed before it is taken from the record, it finds the
first one that the harness or the environment would not have made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from counterpoint.envs import ENVS, Env, make
from counterpoint.harness import VERSION as HARNESS
from counterpoint.harness import Human, Run, next_event, team_of
from counterpoint.policies import Menu, Observation, Output, Policy, described
from counterpoint.policies.grammar import VERSION as GRAMMAR
from counterpoint.policies.tabular import Softmax
from counterpoint.schema import (
    Act,
    AnyEvent,
    Header,
    Intervene,
    Item,
    PolicyRef,
    ToolCall,
    ToolResult,
    Trace,
    encode,
)
from counterpoint.spelling import CANONICAL, Refused
from counterpoint.streams import Draws

Team = Policy | Mapping[str, Policy]
"""One policy for all roles, or one for each."""

SHOWN = 60
"""Characters of a field that a difference shows."""

ANSWERS = ("consent", "refuse")
"""What a human says when a permission rule asks; other interventions come unasked."""


class Given:
    """Stands in for every policy and every human: says what the record says next."""

    def __init__(self) -> None:
        self.event: AnyEvent | None = None

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """The recorded turn. Its text is parsed again where its items came from the text."""
        act = self.event
        if not isinstance(act, Act):
            return Output("")
        items = [item for item in act.items if not item.verb.startswith("no_")]
        parsed = bool(items) and all(item.span is not None for item in items)
        said = None if parsed else items
        return Output(act.text or "", said, act.token_ids, act.logprobs, act.value, act.mask)

    def human(self, observation: Observation, item: Item) -> bool:
        """The recorded answer."""
        return isinstance(self.event, Intervene) and self.event.do == "consent"

    @property
    def version(self) -> str | None:
        """The version of the policy that wrote the turn."""
        return self.event.policy_version if isinstance(self.event, Act) else None

    @property
    def trainable(self) -> bool:
        """Whether a learning agent wrote the turn."""
        return isinstance(self.event, Act) and self.event.trainable


class Led(Run):
    """A run that stands where a record stands, and computes each event before it takes it in."""

    def __init__(self, header: Header, env: Env) -> None:
        env.reset(header.task_seed or 0)
        self.given = Given()
        team: dict[str, Policy] = dict.fromkeys(env.roles, self.given)
        super().__init__(header, env, team, human=self.given.human)

    def differs(self, event: AnyEvent) -> str | None:
        """What the harness or the environment computes otherwise than recorded; None if nothing.

        Standing before `event`, which is not taken in: `emit` does that.
        """
        self.given.event = event
        try:
            if by_hand(event):
                return None if event.seq == len(self.events) else f"its seq is {event.seq}"
            return difference(_bare(event), next_event(self))
        except Refused as refusal:
            return str(refusal)

    def follow(self, trace: Trace) -> tuple[int, str] | None:
        """Go along the events of `trace` from where this run stands.

        Returns (seq, what) of the first event that is computed differently; the run then stands
        before it. None if there is none.
        """
        for event in trace.events[len(self.events) :]:
            if what := self.differs(event):
                return len(self.events), what
            self.emit(event)
        return None


def redrive(
    prefix: Trace,
    env: Env | None = None,
    policies: Team | None = None,
    human: Human | None = None,
) -> Run:
    """Bring a run to the end of a prefix: `redrive(trace[:t], env, team)` stands before event t.

    The environment is reset with the task's seed and taken through every recorded event; the run
    then goes on under `policies`, with the streams of the record. An untouched run that goes on
    so gives the record's own suffix, byte for byte, if its policies are deterministic.

    Args:
        prefix: the first events of a recorded run. It may end between two items of one act.
        env: as in `replay`; it is used, not copied.
        policies: as in `replay`.
        human: asked, after the prefix, where a permission rule says `ask`; nobody there refuses.

    Raises:
        Refused: the prefix cannot be re-driven (imported, a fork without its parent, another
            version), or an event of it is computed differently; the sentence says which.
    """
    env = env_for(prefix.header, env)
    team = team_for(prefix.header, env, policies)
    led = Led(prefix.header, env)
    found = led.follow(prefix)
    if found is not None:
        seq, what = found
        raise Refused(f"trace {prefix.trace_id} cannot be re-driven past event {seq}: {what}")
    return Run(prefix.header, env, team, led.events, human)


def call_of(run: Run, result: ToolResult) -> ToolCall:
    """The call that a result of a played run answers."""
    return cast(ToolCall, run.events[cast(int, result.call)])


def by_hand(event: AnyEvent) -> bool:
    """Whether nobody computes the event: a human's edit, or what a fork put in its place."""
    if isinstance(event, Intervene):
        return event.do not in ANSWERS
    return any(cause.kind == "forks" for cause in event.causes)


def _bare(event: AnyEvent) -> AnyEvent:
    """An act without what only its policy could compute: the propensities of its decisions."""
    if not isinstance(event, Act):
        return event
    items = tuple(msgspec.structs.replace(item, logprob=None) for item in event.items)
    return msgspec.structs.replace(event, items=items)


# ---------------------------------------------------------------------------------------------
# Two events, compared


def difference(recorded: AnyEvent, computed: AnyEvent | None) -> str | None:
    """How a computed event differs from the recorded one, in words; None if in no byte."""
    if computed is None:
        return f"the run is over here, but the record goes on with {_named(recorded)}"
    if encode(recorded) == encode(computed):
        return None
    if (recorded.kind, recorded.agent) != (computed.kind, computed.agent):
        return f"recorded is {_named(recorded)}, computed {_named(computed)}"
    fields = [
        name
        for name in recorded.__struct_fields__
        if _spelled(recorded, name) != _spelled(computed, name)
    ]
    shown = _spelled(recorded, fields[0]), _spelled(computed, fields[0])
    names = ", ".join(name.removesuffix("_raw") for name in fields)
    cut = [text if len(text) <= SHOWN else f"{text[:SHOWN]}…" for text in shown]
    return f"{names} of {_named(recorded)} (recorded {cut[0]}, computed {cut[1]})"


def _spelled(event: AnyEvent, name: str) -> str:
    value = getattr(event, name)
    if value is msgspec.UNSET:
        return "nothing"
    # JSON has escaped the controls, the rest that is not ASCII could still dress up a terminal
    return CANONICAL.encode(value).decode().encode("ascii", "backslashreplace").decode()


def _named(event: AnyEvent) -> str:
    return f"{event.kind} by {ascii(event.agent)[1:-1]:.60}"


# ---------------------------------------------------------------------------------------------
# Who played


def played(header: Header) -> bool:
    """Whether our harness played the run, so that it can be re-driven at all."""
    env = header.env
    return env is not None and not env.id.startswith("imported:") and "harness" in config_of(header)


def config_of(header: Header) -> dict[str, Any]:
    """The settings of a run; empty where there are none."""
    config = header.config
    return config if isinstance(config, dict) else {}


def env_for(header: Header, env: Env | None = None) -> Env:
    """The environment that a header names: the one given, else one of the table.

    Raises:
        Refused: the trace was not played by our harness; or harness, grammar or environment are
            not the versions that it was played with.
    """
    name = f"trace {header.trace_id}"
    if not played(header) or header.env is None:
        raise Refused(f"{name} was not played by our harness: it can be folded, not re-driven")
    if header.fork is not None:
        raise Refused(
            f"{name} is a fork and holds only its suffix: it is re-driven with its parent"
        )
    config = config_of(header)
    for what, recorded, ours in (
        ("harness", config.get("harness"), HARNESS),
        ("grammar", config.get("grammar"), GRAMMAR),
    ):
        if recorded != ours:
            raise Refused(
                f"{name} was played with {what} version {recorded!r}, this is version {ours}: "
                "replay it with the release that recorded it"
            )
    found = env if env is not None else _made(header.env.id, config.get("options"))
    if (found.id, found.digest()) != (header.env.id, header.env.digest):
        raise Refused(
            f"{name} was played in {header.env.id} with digest {header.env.digest}, "
            f"not in {found.id} with digest {found.digest()}"
        )
    return found


def _made(name: str, options: Any) -> Env:
    """Only environments of the table: a trace does not get to say which file is run."""
    if name not in ENVS:
        raise Refused(f"{name!a:.80} is no environment of the table; give it as env=")
    return make(name, **(options if isinstance(options, dict) else {}))


def team_for(header: Header, env: Env, policies: Team | None) -> dict[str, Policy]:
    """The policies that a header names: those given, else those of its targets that load.

    Raises:
        Refused: a policy that is given is not the one that played.
    """
    if policies is None:
        loaded = {role: _loaded(ref) for role, ref in header.policies.items()}
        return {role: policy for role, policy in loaded.items() if policy is not None}
    team = team_of(env, policies)
    for role, ref in header.policies.items():
        if role in team and not _is(team[role], ref):
            ours = described(team[role], "target"), described(team[role], "version")
            raise Refused(
                f"trace {header.trace_id}: {role} was played by {ref.target} ({ref.version}), "
                f"not by {ours[0]} ({ours[1]}); give the policies that played"
            )
    return team


def _is(policy: Policy, ref: PolicyRef) -> bool:
    names = ("target", "version", "params_digest")
    return all(described(policy, name) == getattr(ref, name) for name in names)


def _loaded(ref: PolicyRef) -> Policy | None:
    """A table of logits, from its file or because it is empty; no trace gets to run code."""
    scheme, _, place = (ref.target or "").partition(":")
    if scheme != "tabular":
        return None
    policy = Softmax.load(place, ref.params_digest) if Path(place).is_file() else Softmax()
    return (
        policy
        if (policy.params_digest, policy.version) == (ref.params_digest, ref.version)
        else None
    )
