"""Quality: what is known of each agent's own work in a rollout, beside the outcome of the team.

Every reward that is no outcome is one: a proxy q of an agent, on a channel. Who could have moved it
is worked out here, once, from the graph of its trace, so that credit needs no graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.graph import TraceGraph
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.schema import Act, LateReward, Reward, Trace, counts_as_outcome
from counterpoint.spelling import Refused

CHECKS = ("executed", "checked_fact", "artefact_diff", "judge", "unsaid", "self_report", "count")
"""How a quality was checked, from what is trusted most to what is trusted least."""


@dataclass(frozen=True, eq=False)
class Quality:
    """What is known of agents' work; one row per (rollout, agent, channel).

    Attributes:
        rollout, agent: (n,) codes of the `Steps` that it belongs to.
        channel: (n,) code of the reward's channel; texts in `channels`.
        value: (n,) float64, NaN where the agent's work was not scored. Several rewards of one
            channel are summed.
        verifiable: (n,) place in `CHECKS`; of several, the one trusted least.
        error_rate: (n,) how often the check errs, NaN where unsaid; of several, the largest.
        event: (n, 2) index of the trace and seq of the (last) scoring event, −1 where none.
        depends: (n, agents) whether the value, or the agent's being there, descends from an event
            of that agent; None where the rows were made from columns that do not say.
        channels: texts of `channel`.
    """

    rollout: Ints
    agent: Ints
    channel: Ints
    value: Floats
    verifiable: Ints
    error_rate: Floats
    event: Ints
    depends: Bools | None
    channels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.value)


class Scored(NamedTuple):
    """One row on its way into the table, with labels for codes."""

    rollout: int
    agent: str
    channel: str
    value: float
    verifiable: int
    error_rate: float
    event: tuple[int, int]
    depends: frozenset[str] | None
    """None is everybody: the edges that could tell are missing or guessed."""


def scored(
    trace: Trace,
    late: Sequence[LateReward],
    channel: str,
    at: tuple[int, int],
    fault: str | None,
) -> Iterator[Scored]:
    """The rows of one trace.

    A reward belongs to the agent it targets, or to the one whose event it targets, or to the only
    agent of the role it targets; what targets the team is nobody's.

    Args:
        trace: the trace.
        late: its rewards that came after the seal; they may depend on everybody.
        channel: the channel of the outcome, which is no quality.
        at: number of the rollout among those that have rows, and index of the trace.
        fault: what makes its edges unfit for descent, from `descent.gap`. Then every value is
            taken to depend on everybody, since one edge too few would bias a credit unseen.
    """
    found: dict[tuple[str, str], list[tuple[int, Reward | LateReward]]] = {}
    timed: list[tuple[int, Reward | LateReward]] = [(-1, reward) for reward in late]
    timed += [(event.seq, event) for event in trace.events if isinstance(event, Reward)]
    for seq, event in timed:
        agent = None if counts_as_outcome(event, channel) else _owner(trace, event)
        if agent is not None:
            found.setdefault((agent, event.channel), []).append((seq, event))
    if not found:
        return
    behind = cache(TraceGraph(trace).behind)
    for (agent, name), held in found.items():
        amounts = [event.amount for _, event in held if event.amount is not None]
        rates = [event.error_rate for _, event in held if event.error_rate is not None]
        known = fault is None and all(seq >= 0 for seq, _ in held)
        yield Scored(
            at[0],
            agent,
            name,
            math.fsum(amounts) if amounts else math.nan,
            max(CHECKS.index(event.verifiable or "unsaid") for _, event in held),
            max(rates, default=math.nan),
            (at[1], max(seq for seq, _ in held)),
            _behind(trace, behind, agent, [seq for seq, _ in held]) if known else None,
        )


def _owner(trace: Trace, reward: Reward | LateReward) -> str | None:
    target = reward.target
    if target is None:
        return None
    if target.agent is not None:
        return target.agent
    if target.seq is not None:
        inside = trace.first <= target.seq < trace.first + len(trace.events)
        return trace[target.seq].agent if inside else None
    bearers = [agent.id for agent in trace.header.agents if agent.role == target.role]
    return bearers[0] if len(bearers) == 1 else None


def _behind(
    trace: Trace, behind: Callable[[int], tuple[str, ...]], agent: str, seqs: Sequence[int]
) -> frozenset[str]:
    """Whose events the rewards descend from, and whose the agent's first act does: whether an
    agent is there at all is part of what its quality says.
    """
    acts = [e for e in trace.events if isinstance(e, Act)]
    first = [e.seq for e in acts if e.agent == agent][:1]
    found = {agent}
    for seq in (*seqs, *first):
        if any(cause.basis == "inferred:run" for cause in trace[seq].causes):
            found |= {e.agent for e in acts if e.seq < seq}
        else:
            found |= {*behind(seq)}
    return frozenset(found)


def tabled(rows: Iterable[Scored], rollouts: Ints, agents: Sequence[Any]) -> tuple[Quality, int]:
    """Rows of traces as a table, and how many were left out because their agent never acts.

    Args:
        rows: of all traces.
        rollouts: code of each rollout, by its number among those that have rows.
        agents: labels of the agents, by code.
    """
    number = {agent: code for code, agent in enumerate(agents)}
    every = list(rows)
    kept = [row for row in every if row.agent in number]
    depends = np.zeros((len(kept), len(agents)), dtype=bool)
    for place, row in enumerate(kept):
        if row.depends is None:
            depends[place] = True
        else:
            depends[place, [number[a] for a in row.depends if a in number]] = True
    channel, channels = groups.encode_labels([row.channel for row in kept])
    where = np.array([row.rollout for row in kept], dtype=np.int64)
    quality = Quality(
        rollout=rollouts[where],
        agent=np.array([number[row.agent] for row in kept], dtype=np.int64),
        channel=channel,
        value=np.array([row.value for row in kept], dtype=np.float64),
        verifiable=np.array([row.verifiable for row in kept], dtype=np.int64),
        error_rate=np.array([row.error_rate for row in kept], dtype=np.float64),
        event=np.array([row.event for row in kept], dtype=np.int64).reshape(-1, 2),
        depends=depends,
        channels=channels,
    )
    return quality, len(every) - len(kept)


# ---------------------------------------------------------------------------------------------
# From columns


def from_rows(
    value: Floats,
    rollout: Ints,
    agent: Ints,
    agents: Sequence[Any],
    *,
    verifiable: Sequence[Any] | None = None,
    error_rate: Floats | None = None,
    depends: Sequence[Any] | None = None,
) -> Quality:
    """Quality from columns with one entry per turn; each agent of a rollout has one value.

    Args:
        value: (rows,) the agent's quality in the rollout, NaN where unscored; on several turns of
            one agent it says the same, or is NaN on all but one.
        rollout: (rows,) codes.
        agent: (rows,) codes.
        agents: labels of the agents, by code.
        verifiable: (rows,) how the value was checked, one of `CHECKS`; None is unsaid.
        error_rate: (rows,) how often the check errs.
        depends: (rows,) for each row the labels of the agents whose acts the value, or the
            agent's being there, descends from; None is everybody.

    Raises:
        Refused: two values for one agent of a rollout; an unknown way of checking; an error rate
            outside 0 … 1; a label in `depends` that is no agent. The sentence names column and row.
    """
    cell = groups.pair(rollout, agent)
    first = np.full(int(cell.max(initial=-1)) + 1, -1, dtype=np.int64)
    order = np.arange(len(cell))[::-1]
    order = order[np.argsort(~np.isnan(value[order]), kind="stable")]
    first[cell[order]] = order  # the last written is the earliest row with a value
    differs = ~np.isnan(value) & (value != value[first[cell]])
    if differs.any():
        row = int(np.argmax(differs))
        raise Refused(
            f"column quality, row {row}: {value[row]:g} differs from another row of the same agent "
            "and rollout; an agent has one quality in a rollout"
        )
    n = len(first)
    return Quality(
        rollout=rollout[first],
        agent=agent[first],
        channel=np.zeros(n, dtype=np.int64),
        value=value[first],
        verifiable=_checks(verifiable, first),
        error_rate=_rates(error_rate, first),
        event=np.full((n, 2), -1, dtype=np.int64),
        depends=None if depends is None else _named(depends, agents)[first],
        channels=("quality",),
    )


def _checks(given: Sequence[Any] | None, first: Ints) -> Ints:
    unsaid = CHECKS.index("unsaid")
    if given is None:
        return np.full(len(first), unsaid, dtype=np.int64)
    for row, check in enumerate(given):
        if check is not None and check not in CHECKS:
            raise Refused(
                f"column verifiable, row {row}: {check!r:.60} is none of {', '.join(CHECKS)}"
            )
    codes = [unsaid if check is None else CHECKS.index(check) for check in given]
    return np.array(codes, dtype=np.int64)[first]


def _rates(given: Floats | None, first: Ints) -> Floats:
    if given is None:
        return np.full(len(first), np.nan)
    outside = (given < 0) | (given > 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise Refused(f"column error_rate, row {row}: {given[row]:g} does not lie between 0 and 1")
    return given[first]


def _named(given: Sequence[Any], agents: Sequence[Any]) -> Bools:
    number = {agent: code for code, agent in enumerate(agents)}
    out = np.zeros((len(given), len(agents)), dtype=bool)
    known: dict[tuple[Any, ...], list[int]] = {}
    for row, line in enumerate(given):
        if line is None:
            out[row] = True
            continue
        try:
            key = tuple(line) if not isinstance(line, str) else (line,)
            if key not in known:
                known[key] = [number[label] for label in key]
        except (TypeError, KeyError):
            raise Refused(
                f"column depends, row {row}: {line!r:.60} is no list of labels of column agent"
            ) from None
        out[row, known[key]] = True
    return out
