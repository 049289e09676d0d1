"""Rules about what events hold: tokens, totals, versions, rewards."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from counterpoint.schema import KINDS, Act, Finding, Reward, Spawn, Target, Trace, Write
from counterpoint.validate.chunk import Chunk, about, short


def aligned(chunk: Chunk) -> Iterator[Finding]:
    """V09: token_ids, logprobs and mask have one length; no logprob is above 0."""
    for row, _, act in chunk.each(Act):
        parts = {"token_ids": act.token_ids, "logprobs": act.logprobs, "mask": act.mask}
        sizes = {name: len(values) for name, values in parts.items() if values is not None}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{name} {size}" for name, size in sizes.items())
            yield chunk.finding("V09", row, f"lengths differ: {lengths}", next(iter(sizes)))
        if act.logprobs and max(act.logprobs) > 0:
            message = f"a logprob of {max(act.logprobs)} is above 0"
            yield chunk.finding("V09", row, message, "logprobs")
        for index, item in enumerate(act.items):
            if item.logprob is not None and item.logprob > 0:
                message = f"the logprob {item.logprob} of item {index} is above 0"
                yield chunk.finding("V09", row, message, "items")


def sealed(chunk: Chunk) -> Iterator[Finding]:
    """V11: the seal's count, kinds, tokens, cost and digest are those of the events.

    A total is compared only where events carry the figure, cost to a relative 1e-9.
    """
    for trace in chunk.traces:
        seal = trace.seal
        if seal is None:
            continue
        if seal.events != len(trace.events):
            message = f"the seal counts {seal.events} events, the trace has {len(trace.events)}"
            yield about("V11", trace, message, "events")
        yield from _totals(trace)
        if seal.digest != trace.digest:
            message = (
                f"the digest of header and events is {trace.digest}, the seal says {seal.digest}: "
                "something was changed, lost or moved after it was written"
            )
            yield about("V11", trace, message, "digest")


def _totals(trace: Trace) -> Iterator[Finding]:
    seal = trace.seal
    assert seal is not None
    by_class = Counter(map(type, trace.events))
    counted = {kind: by_class[cls] for kind, cls in KINDS.items() if by_class[cls]}
    if seal.kinds and seal.kinds != counted:
        wrong = {kind for kind, _ in seal.kinds.items() ^ counted.items()}
        kind = min(wrong)
        message = (
            f"the seal counts {seal.kinds.get(kind, 0)} events of kind {short(kind)}, "
            f"the trace has {counted.get(kind, 0)}"
        )
        yield about("V11", trace, message, "kinds")
    for field in ("tokens_in", "tokens_out", "cost_usd"):
        said = getattr(seal, field)
        if said is not None:
            held = [v for e in trace.events if (v := getattr(e, field)) is not None]
            total = sum(held)
            if held and not math.isclose(total, said, rel_tol=1e-9, abs_tol=1e-12):
                message = f"{field} is {said} in the seal and {total:.12g} in the events"
                yield about("V11", trace, message, field)


def one_writer(chunk: Chunk) -> Iterator[Finding]:
    """V12: of two writes of one artefact from one base version, the later is marked a conflict."""
    first: dict[tuple[int, str, int], int] = {}
    for row, trace, write in chunk.each(Write):
        if write.base_version is not None:
            key = (trace, write.artefact, write.base_version)
            earlier = first.setdefault(key, row)
            if earlier != row and not write.conflict:
                message = (
                    f"{short(write.artefact)} was already written from version "
                    f"{write.base_version} by {chunk.events[earlier].seq}; no conflict is marked"
                )
                yield chunk.finding("V12", row, message, "conflict")


def aimed(chunk: Chunk) -> Iterator[Finding]:
    """V14: what a reward is about exists: the event, the item of its act, the agent, the role.

    In a fork an event below `fork.seq`, an agent or a role may be the parent's and is not checked.
    """
    names: dict[int, tuple[set[str], set[str]]] = {}
    for row, index, reward in chunk.each(Reward):
        target = reward.target
        if target is None:
            continue
        fault = _no_event(chunk, row, target)
        if fault is None and chunk.traces[index].header.fork is None:
            if index not in names:
                names[index] = _names(chunk.traces[index])
            agents, roles = names[index]
            if target.agent is not None and target.agent not in agents:
                fault = f"agent {short(target.agent)} is not one of this trace"
            elif target.role is not None and target.role not in roles:
                fault = f"role {short(target.role)} is not one of this trace"
        if fault is not None:
            yield chunk.finding("V14", row, fault, "target")


def _no_event(chunk: Chunk, row: int, target: Target) -> str | None:
    """What is wrong with the event and item that a target names; None if nothing is."""
    if target.seq is None:
        return None if target.item is None else f"item {target.item} is of no event"
    rows, seqs = np.array([row]), np.array([target.seq], dtype=np.int64)
    if chunk.in_parent(rows, seqs)[0]:
        return None
    home = int(chunk.at(rows, seqs)[0])
    if home < 0:
        return f"event {target.seq} is not in this trace"
    if target.item is None:
        return None
    act = chunk.events[home]
    if not isinstance(act, Act):
        return f"event {target.seq} is a {act.kind}, which has no items"
    if not 0 <= target.item < len(act.items):
        return f"act {target.seq} has {len(act.items)} items, none is number {target.item}"
    return None


def _names(trace: Trace) -> tuple[set[str], set[str]]:
    """Agents and roles that a trace knows of; the role of an agent without one is its id."""
    header, spawns = trace.header, [event for event in trace.events if isinstance(event, Spawn)]
    agents = {event.agent for event in trace.events} | {spawn.child for spawn in spawns}
    agents |= {agent.id for agent in header.agents} | set(header.possible_agents or ())
    roles = {agent.role for agent in header.agents} | set(header.policies)
    roles |= {spawn.child_role for spawn in spawns if spawn.child_role is not None}
    return agents, roles | agents


def copied(chunk: Chunk) -> Iterator[Finding]:
    """W04: a terminal reward seems to be copied to every step, and would count once for each.

    True where a trace has three or more team rewards that name no agent, all of one amount that is
    not zero, and as many acts, each with a reward of its own: the act that the reward names, else
    the last before it.
    """
    paid: dict[int, list[int]] = defaultdict(list)
    for row, index, reward in chunk.each(Reward):
        if reward.channel == "team" and (reward.target is None or reward.target.agent is None):
            paid[index].append(row)
    acts = chunk.rows("act")
    turns = np.bincount(chunk.table.trace[acts], minlength=len(chunk.traces))
    for index, rows in paid.items():
        rewards = [e for row in rows if isinstance(e := chunk.events[row], Reward)]
        amounts = {reward.amount for reward in rewards}
        if len(rows) < 3 or len(rows) != turns[index] or amounts <= {None, 0.0} or len(amounts) > 1:
            continue
        last = np.searchsorted(acts, rows) - 1
        own = {
            int(act) if reward.target is None or reward.target.seq is None else ~reward.target.seq
            for act, reward in zip(last, rewards, strict=True)
        }
        if len(own) == len(rows):
            message = f"{len(rows)} acts have a team reward of {rewards[0].amount} each"
            yield chunk.finding("W04", rows[0], f"{message}: a terminal one, copied?", "amount")


def unscored_rewards(chunk: Chunk) -> int:
    """Reward events without an amount, which is not zero."""
    return sum(reward.amount is None for *_, reward in chunk.each(Reward))


def unfinished_traces(chunk: Chunk) -> int:
    """Traces without a seal."""
    return sum(trace.seal is None for trace in chunk.traces)


def dropped_events(chunk: Chunk) -> int:
    """Events that the writers say they left out."""
    return sum(trace.seal.dropped for trace in chunk.traces if trace.seal is not None)
