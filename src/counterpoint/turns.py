"""Traces become turns: one entry per act, with the reward that followed it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple

from counterpoint.descent import Descent, Paid, descends, gap, joined
from counterpoint.quality import Scored, scored
from counterpoint.schema import (
    Act,
    LateReward,
    Observe,
    Reward,
    Spawn,
    Trace,
    counts_as_outcome,
    summed,
)
from counterpoint.spelling import Refused
from counterpoint.tokens import stored, tokens_of, written
from counterpoint.units import PARTS, Part, packed, parts_of


class Turn(NamedTuple):
    """One act on its way into the table."""

    act: Act
    seq: int
    agent: str
    role: str
    anchor: str | None
    state_digest: str | None
    value: float | None
    logprob: float | None
    mask: bool
    n_tokens: int
    time: float | None
    valid: bool
    menu: tuple[str, ...] | None
    action: int | None
    version: str | None


def turns(
    traces: Iterable[Trace],
    late_rewards: Iterable[LateReward] | None = None,
    channel: str = "team",
    forks: bool = False,
    descent: bool = False,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Columns of `Steps`, one entry per act, and counts of what was left out; under `parts` the
    parts of the turns, under `descends` what `descent` asks for.

    Arguments and errors as in `Steps.from_traces`.
    """
    later = _by_trace(late_rewards)
    columns: dict[str, list[Any]] = {name: [] for name in Turn._fields}
    for name in ("group", "task", "rollout", "step", "reward", "outcome", "trace"):
        columns[name] = []
    counts = {"rollouts_without_steps": 0, "forks_left_out": 0}
    parts: dict[str, list[Part]] = {kind: [] for kind in PARTS}
    pairs: list[Descent] = []
    quality: list[Scored] = []
    begins: list[int] = []
    for number, trace in enumerate(traces):
        if trace.header.fork is not None and not forks:
            counts["forks_left_out"] += 1
            continue
        rows = _rows(trace)
        extra = _late_of(trace, later)
        if not rows:
            counts["rollouts_without_steps"] += 1
            continue
        reward, outcome, paid = _rewards(trace, rows, extra, channel)
        first = len(columns["trace"])
        for kind, part in parts_of(trace, first):
            parts[kind].append(part)
        if _judges(trace, extra, channel):
            fault = gap(trace)
            if fault:
                unsure = counts.get("quality_from_unsure_edges", 0)
                counts["quality_from_unsure_edges"] = unsure + 1
            quality += scored(trace, extra, channel, (len(begins), number), fault)
        begins.append(first)
        if descent:
            pairs.append(descends(trace, [row.seq for row in rows], paid, first))
        header = trace.header
        group = header.group_id or header.task_id or trace.trace_id
        columns["group"] += [group] * len(rows)
        columns["task"] += [header.task_id or group] * len(rows)
        columns["rollout"] += [trace.trace_id] * len(rows)
        columns["trace"] += [number] * len(rows)
        columns["step"] += range(len(rows))
        columns["reward"] += reward
        columns["outcome"] += outcome
        for name, values in zip(Turn._fields, zip(*rows, strict=True), strict=True):
            columns[name] += values
    if later:
        raise Refused(f"a late reward names trace {next(iter(later))}, which is not among these")
    given = _given(columns)
    given["parts"] = {kind: packed(kind, len(given["event"]), parts[kind]) for kind in PARTS}
    if descent:
        given["descends"] = joined(pairs)
    if quality:
        given["quality"], given["scored"] = quality, begins
    return given, counts


def _judges(trace: Trace, late: list[LateReward], channel: str) -> bool:
    """Whether any reward is about an agent's own work, and not the outcome."""
    paid: list[Reward | LateReward] = list(late)
    paid += [event for event in trace.events if isinstance(event, Reward)]
    return any(reward.target and not counts_as_outcome(reward, channel) for reward in paid)


def _given(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """The columns that say anything, and where each row came from."""
    given: dict[str, Any] = {k: v for k, v in columns.items() if k not in ("act", "seq", "trace")}
    for name in ("anchor", "state_digest", "value", "logprob", "time", "menu", "action", "version"):
        if all(v is None for v in given[name]):
            del given[name]
    given["tokens"] = tokens_of(columns["act"])
    given["event"] = list(zip(columns["trace"], columns["seq"], strict=True))
    return given


def _rows(trace: Trace) -> list[Turn]:
    roles = {agent.id: agent.role for agent in trace.header.agents}
    seen: dict[str, Observe] = {}
    rows = []
    parsed = any(isinstance(event, Act) and event.items for event in trace.events)
    for event in trace.events:
        if isinstance(event, Observe):
            seen[event.agent] = event
        elif isinstance(event, Spawn):
            roles[event.child] = event.child_role or event.child
        elif isinstance(event, Act):
            shown = seen.pop(event.agent, None)
            anchor, state = (shown.anchor, shown.state_digest) if shown else (None, None)
            tokens = stored(event)
            size = written(tokens, event.mask) if tokens else event.tokens_out or 0
            rows.append(
                Turn(
                    act=event,
                    seq=event.seq,
                    agent=event.agent,
                    role=roles.get(event.agent, event.agent),
                    anchor=anchor,
                    state_digest=state,
                    value=event.value,
                    logprob=math.fsum(event.logprobs) if event.logprobs else None,
                    mask=event.trainable,
                    n_tokens=size,
                    time=event.t_start,
                    valid=bool(event.items) or not parsed,
                    menu=_labels(shown) if shown else None,
                    action=_chosen(shown, event) if shown else None,
                    version=event.policy_version,
                )
            )
    return rows


def _labels(shown: Observe) -> tuple[str, ...] | None:
    return None if shown.legal is None else tuple(label for label, _ in shown.legal)


def _chosen(shown: Observe, act: Act) -> int | None:
    """Which entry of the menu was said: the first with that text; None if it was none of them."""
    if shown.legal is None:
        return None
    text = act.text
    return next((i for i, (_, entry) in enumerate(shown.legal) if entry == text), None)


def _rewards(
    trace: Trace, rows: list[Turn], late: list[LateReward], channel: str
) -> tuple[list[float], list[float], list[Paid]]:
    """Reward and outcome of each row, and the rewards one by one."""
    paid: list[Paid] = []
    reward = [0.0] * len(rows)
    shared: list[float] = []
    own: dict[str, list[float]] = {}
    at_seq = {row.seq: i for i, row in enumerate(rows)}
    acts: dict[str | None, list[int]] = {None: list(at_seq)}
    for row in rows:
        acts.setdefault(row.agent, []).append(row.seq)
    timed: list[tuple[float, Reward | LateReward]] = []
    timed += [(event.seq, event) for event in trace.events if isinstance(event, Reward)]
    timed += [(math.inf, event) for event in late]
    for seq, event in timed:
        if event.amount is None or not counts_as_outcome(event, channel):
            continue
        target = event.target
        agent = target.agent if target else None
        held = own.setdefault(agent, []) if agent else shared
        held.append(event.amount)
        place = at_seq.get(target.seq) if target and target.seq is not None else None
        if place is None:
            seqs = acts.get(agent, [])
            before = bisect_left(seqs, seq)
            place = at_seq[seqs[before - 1]] if before else 0
        reward[place] += event.amount
        paid.append(Paid(place, event.amount, event))
    base = summed(shared, trace.trace_id) if shared else math.nan
    if not own:
        return reward, [base] * len(rows), paid
    sums = {agent: summed([*shared, *held], trace.trace_id) for agent, held in own.items()}
    return reward, [sums.get(row.agent, base) for row in rows], paid


def _by_trace(late: Iterable[LateReward] | None) -> dict[str, list[LateReward]]:
    out: dict[str, list[LateReward]] = {}
    for reward in late or ():
        out.setdefault(reward.trace_id, []).append(reward)
    return out


def _late_of(trace: Trace, later: dict[str, list[LateReward]]) -> list[LateReward]:
    found = later.pop(trace.trace_id, [])
    for reward in found:
        if reward.digest != trace.digest:
            raise Refused(
                f"a late reward names trace {trace.trace_id} with digest {reward.digest}, "
                f"but the trace has {trace.digest}: it was changed since it was judged"
            )
    return found
