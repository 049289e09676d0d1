"""Validation: every rule of the format, each one function over the columns of whole traces.

`RULES` and `COUNTS` are the tables; a rule says what is wrong (V) or odd (W), a count says how
often something is absent that may be. Rules V01 and V02, and V13 after the seal, are found while
reading (`store`), W02 while importing. Rules that look at two traces at once are in `across`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from counterpoint.schema import Finding, Trace
from counterpoint.validate import across, exchange, lives, order, trust, values
from counterpoint.validate.chunk import Chunk

CHUNK = 4096
"""Events that a chunk holds at least, but for the last one."""

RULES: dict[str, Callable[[Chunk], Iterator[Finding]]] = {
    "V03": order.dense,
    "V04": order.caused,
    "V05": lives.lived,
    "V06": exchange.answered,
    "V07": exchange.delivered,
    "V08": exchange.returned,
    "V09": values.aligned,
    "V10": trust.untainted,
    "V11": values.sealed,
    "V12": values.one_writer,
    "V13": order.ended,
    "V14": values.aimed,
    "W01": order.clocks,
    "W03": exchange.repeated_sources,
    "W04": values.copied,
}
"""Rule → the function that finds what breaks it in a chunk of whole traces."""

COUNTS: dict[str, Callable[[Chunk], int]] = {
    "unfinished_traces": values.unfinished_traces,
    "dropped_events": values.dropped_events,
    "extra_roots": order.extra_roots,
    "required_edges_missing": order.required_edges_missing,
    "causes_in_parent": order.causes_in_parent,
    "unanswered_calls": exchange.unanswered_calls,
    "results_without_calls": exchange.results_without_calls,
    "missing_returns": exchange.missing_returns,
    "unscored_rewards": values.unscored_rewards,
}
"""What is counted and is no finding → the function that counts it in a chunk."""


class Report(Struct, frozen=True, kw_only=True):
    """What `validate` found: how much it saw, every finding by place, and the counts."""

    traces: int
    events: int
    findings: list[Finding]
    counts: dict[str, int]

    @property
    def broken(self) -> bool:
        """Whether a rule is broken; warnings (W) break none."""
        return any(finding.rule.startswith("V") for finding in self.findings)


def validate(traces: Iterable[Trace], findings: Iterable[Finding] = ()) -> Report:
    """Check traces against all rules and go on to the end, whatever is found.

    Args:
        traces: any number of traces, taken one by one and let go: memory grows with the largest
            trace, a few words for each trace, and the findings. Traces that came from no file
            are kept if they have to serve as parents of forks.
        findings: what the reader of these traces finds while they are taken from it
            (`read(path, findings=found)`); it is looked at last and merged.

    Returns:
        A Report; its findings are sorted by file, line, trace and event, so that neither the order
        of the traces nor the size of the chunks shows. No traces give a report of zeros. The
        counts are those of `COUNTS`, and of traces that share a (group_id, rollout_id)
        (`repeated_rollouts`) and forks whose parent is absent (`forks_not_checked`).

    No trace makes it raise; what is malformed is a finding.
    """
    seen, found, counts = across.Seen(), list[Finding](), Counter(dict.fromkeys(COUNTS, 0))
    n_traces = n_events = 0
    for chunk in chunks(traces):
        n_traces += len(chunk.traces)
        n_events += len(chunk.events)
        for rule in RULES.values():
            found += rule(chunk)
        for name, number in COUNTS.items():
            counts[name] += number(chunk)
        seen.note(chunk.traces)
        del chunk  # before the next is read: two traces of 10^6 events need not be held at once
    forked, unchecked = across.grown(seen)
    found += [*across.stored_once(seen), *forked, *findings]
    counts["repeated_rollouts"] = across.repeated_rollouts(seen)
    counts["forks_not_checked"] = unchecked
    found.sort(key=_place)
    return Report(traces=n_traces, events=n_events, findings=found, counts=dict(counts))


def chunks(traces: Iterable[Trace]) -> Iterator[Chunk]:
    """Gather whole traces until they hold `CHUNK` events together; a header weighs as one."""
    batch: list[Trace] = []
    weight = 0
    for trace in traces:
        batch.append(trace)
        weight += 1 + len(trace.events)
        if weight >= CHUNK:
            yield Chunk.of_traces(batch)
            batch, weight = [], 0
    if batch:
        yield Chunk.of_traces(batch)


def _place(finding: Finding) -> tuple[object, ...]:
    where = (finding.file or "", finding.line or 0, finding.trace_id or "", finding.seq or 0)
    return (*where, finding.rule, finding.field or "", finding.message)
