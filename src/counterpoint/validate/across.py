"""Rules between traces: what was stored twice, and forks against their parents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from counterpoint.schema import Finding, Trace, chain, encode, header_digest
from counterpoint.spelling import Refused
from counterpoint.store import read_file
from counterpoint.validate.chunk import about, short


@dataclass
class Seen:
    """What is kept of the traces that have passed: a few words of each, never its events.

    Only a trace that came from no file is kept whole, since it could not be read again.
    """

    digests: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Digest → (file, trace_id) of every trace that has it."""
    rollouts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(group_id, rollout_id) → traces."""
    forks: list[Trace] = field(default_factory=list)
    """Forks, without their events."""
    homes: dict[str, str | Trace] = field(default_factory=dict)
    """trace_id → its file, or the trace."""

    def note(self, traces: Sequence[Trace]) -> None:
        """Remember what the rules between traces ask of `traces`."""
        for trace in traces:
            header = trace.header
            self.digests[trace.digest].append((trace.file or "", header.trace_id))
            self.homes.setdefault(header.trace_id, trace.file or trace)
            if header.group_id is not None and header.rollout_id is not None:
                self.rollouts[header.group_id, header.rollout_id] += 1
            if header.fork is not None:
                self.forks.append(replace(trace, events=(), lines=()))


def stored_once(seen: Seen) -> Iterator[Finding]:
    """V11: no two traces have one digest; they would be one run, counted twice."""
    for digest, places in seen.digests.items():
        first, *others = sorted(places)
        for file, trace_id in others:
            message = (
                f"the same run, digest {digest}, is trace {first[1]} in {first[0] or 'memory'} "
                f"and trace {trace_id} in {file or 'memory'}"
            )
            yield Finding(
                rule="V11", message=message, file=file or None, trace_id=trace_id, field="digest"
            )


def repeated_rollouts(seen: Seen) -> int:
    """Traces that share group and rollout with one before them."""
    return sum(traces - 1 for traces in seen.rollouts.values())


def grown(seen: Seen) -> tuple[list[Finding], int]:
    """V15: a fork leaves its parent at a seq that the parent has, and names its digest there.

    Returns the findings, and how many forks were not checked since their parent is not among the
    traces. Files that hold parents are read a second time, one trace in memory.
    """
    waiting: dict[str, list[Trace]] = defaultdict(list)
    for fork in seen.forks:
        if fork.header.fork is not None:
            waiting[fork.header.fork.trace_id].append(fork)
    found: list[Finding] = []
    for parent in _again([seen.homes[name] for name in waiting if name in seen.homes]):
        forks = waiting.pop(parent.trace_id, [])
        states = _states(parent, {fork.first for fork in forks})
        found += (fault for fork in forks if (fault := _differs(fork, parent, states)))
    return found, sum(len(forks) for forks in waiting.values())


def _again(homes: list[str | Trace]) -> Iterator[Trace]:
    """The traces of these homes once more, with their file-mates."""
    yield from (home for home in homes if isinstance(home, Trace))
    for file in sorted({home for home in homes if isinstance(home, str)}):
        try:
            yield from read_file(file)
        except Refused:  # it was there a moment ago; its forks stay unchecked
            continue


def _states(trace: Trace, wanted: Collection[int]) -> dict[int, str]:
    """The chained digest before each wanted seq that the trace has."""
    state, out = header_digest(trace.header), {}
    for seq, event in enumerate(trace.events, trace.first):
        if seq in wanted:
            out[seq] = state.hex()
        state = chain(state, encode(event))
    return out | {trace.first + len(trace.events): state.hex()}


def _differs(fork: Trace, parent: Trace, states: dict[int, str]) -> Finding | None:
    """What is wrong between a fork and its parent."""
    ref = fork.header.fork
    assert ref is not None
    if ref.seq not in states:
        message = f"{short(ref.trace_id)}, which it leaves at {ref.seq}, has no such event"
        return about("V15", fork, message, "fork.seq")
    if states[ref.seq] != ref.digest:
        message = f"before {ref.seq}, {short(ref.trace_id)} has digest {states[ref.seq]}"
        return about("V15", fork, f"{message}, not {short(ref.digest)}", "fork.digest")
    return None
