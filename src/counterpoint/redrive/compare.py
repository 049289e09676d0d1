"""Replay: is this trace what the run would give again? Three modes, each naming what it finds.

1. The seal: do its digest and counts agree with the lines?
2. Re-drive: from the recorded acts, do harness and environment compute every other event?
3. Act again: do the policies that are deterministic write the recorded acts?

Mode 1 sees any change and cannot say where. Mode 2 names a changed result, or the first event that
a changed act leads to. Mode 3 names the act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from counterpoint.envs import Env
from counterpoint.harness import attached, next_event
from counterpoint.policies import Policy, described
from counterpoint.redrive.follow import Led, Team, by_hand, difference, env_for, played, team_for
from counterpoint.redrive.standing import history
from counterpoint.schema import Act, AnyEvent, Trace
from counterpoint.spelling import Refused
from counterpoint.streams import keys_of
from counterpoint.world import fold

MODES = {1: "seal", 2: "re-drive", 3: "act again"}


class Divergence(NamedTuple):
    """Where a trace is not what the run would give again.

    `seq` is the event, None where only the seal disagrees; `mode` 1, 2 or 3; `what` in words.
    """

    trace_id: str
    seq: int | None
    mode: int
    what: str

    def __str__(self) -> str:
        event = "" if self.seq is None else f", event {self.seq}"
        return f"trace {self.trace_id}{event}, mode {self.mode} ({MODES[self.mode]}): {self.what}"


class Replayed(NamedTuple):
    """What `replay` found.

    `identical` traces agree in every mode; `folded_only` ones came from elsewhere, or have no seal
    yet; `unacted` counts the acts of each role that mode 3 had to leave out.
    """

    traces: int
    identical: int
    folded_only: int
    diverged: tuple[Divergence, ...]
    unacted: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "traces": self.traces,
            "identical": self.identical,
            "folded_only": self.folded_only,
            "diverged": [found._asdict() for found in self.diverged],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.traces} traces: {self.identical} identical, {self.folded_only} folded only"
        ]
        lines += map(str, self.diverged)
        lines += [
            f"{count} acts of {role} did not act again: no deterministic policy is at hand"
            for role, count in self.unacted.items()
        ]
        return "\n".join(lines)


def replay(
    traces: Trace | Iterable[Trace], *, env: Env | None = None, policies: Team | None = None
) -> Replayed:
    """Play recorded runs again and compare byte for byte.

    Args:
        traces: one trace or several.
        env: the environment that they were played in; by default the one of the table that their
            headers name, with the options written there.
        policies: a policy per role, or one for all; by default those that the headers' targets
            load (a table of logits that is empty or has a file). Acts of a role without a
            deterministic policy are taken as given, and counted.

    Returns:
        Counts, and the first divergence of each mode of each trace. Imported traces, those of the
        Recorder, forks whose parent is not at hand (a fork holds its suffix only) and those without
        a seal are only folded; their seal is still checked. No traces give zeros.

    Raises:
        Refused: harness, grammar, environment or a policy given is not the version that played, or
            the environment is not in the table and was not given.
    """
    diverged: list[Divergence] = []
    unacted: Counter[str] = Counter()
    read = identical = folded_only = 0
    for trace in [traces] if isinstance(traces, Trace) else traces:
        read += 1
        found = _seal(trace)
        if trace.seal is None or _apart(trace) or not played(trace.header):
            fold(trace)
            folded_only += not found
        else:
            found += _driven(trace, env, policies, unacted)
            identical += not found
        diverged += found
    return Replayed(read, identical, folded_only, tuple(diverged), dict(unacted))


def _apart(trace: Trace) -> bool:
    """Whether the first events of a fork are not at hand."""
    above: Trace | None = trace
    while above is not None and above.header.fork is not None:
        above = attached(above).parent
    return above is None


def _seal(trace: Trace) -> list[Divergence]:
    """Mode 1."""
    seal = trace.seal
    if seal is None:
        return []
    kinds = dict(Counter(event.kind for event in trace.events))
    wrong = []
    if seal.events != len(trace):
        wrong.append(f"the seal counts {seal.events} events, the trace holds {len(trace)}")
    elif seal.kinds and seal.kinds != kinds:
        wrong.append("the seal counts other kinds of events than the trace holds")
    if seal.digest != trace.digest:
        wrong.append(
            f"the seal says digest {ascii(seal.digest)[1:-1]:.40}, the lines give {trace.digest}"
        )
    return [Divergence(trace.trace_id, None, 1, "; ".join(wrong))] if wrong else []


def _driven(
    trace: Trace, env: Env | None, policies: Team | None, unacted: Counter[str]
) -> list[Divergence]:
    """Modes 2 and 3 in one pass, up to the first event that mode 2 computes differently; of a fork
    with its parents' events before its own.
    """
    try:
        events = history(trace)
    except Refused as refusal:  # the parent is another one than the fork left
        return [Divergence(trace.trace_id, None, 1, str(refusal))]
    header, ref = msgspec.structs.replace(trace.header, fork=None), trace.header.fork
    env = env_for(header, env)
    team = team_for(header, env, policies)
    led = Led(header, env)
    led.keys = keys_of(header.seed or 0, ref.keys if ref else ())
    found: dict[int, Divergence] = {}
    for event in events:
        again = _again(led, event, team, unacted)
        if again:
            found.setdefault(3, Divergence(trace.trace_id, len(led.events), 3, again))
        # an act that was written again to the byte needs no second comparison
        if again != "" and (what := led.differs(event)):
            found[2] = Divergence(trace.trace_id, len(led.events), 2, what)
            break
        led.emit(event)
    if 2 not in found and (what := _goes_on(led)):
        found[2] = Divergence(trace.trace_id, len(led.events), 2, what)
    return [found[mode] for mode in sorted(found)]


def _again(
    led: Led, event: AnyEvent, team: Mapping[str, Policy], unacted: Counter[str]
) -> str | None:
    """What a deterministic policy, asked again, does differently; empty if it writes the same
    bytes, None if nobody was to act or the policy is no such one.
    """
    asked = led.world.control.observe
    if not isinstance(event, Act) or asked is None or by_hand(event):
        return None
    role = led.role(led.events[asked].agent)
    if not described(team.get(role), "deterministic"):
        unacted[role] += 1
        return None
    given, led.policies = led.policies, team
    try:
        return difference(event, next_event(led)) or ""
    except Refused as refusal:
        return str(refusal)
    finally:
        led.policies = given


def _goes_on(led: Led) -> str | None:
    """What would come after the last recorded event; None if nothing."""
    try:
        more = next_event(led)
    except Refused as refusal:
        return str(refusal)
    return None if more is None else f"the record ends, the run goes on with {more.kind}"
