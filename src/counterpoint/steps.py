"""The table that every credit method reads: one row per act, as a struct of arrays.

`Steps.from_traces` makes the rows from traces, `Steps.from_columns` from the arrays of any trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from counterpoint import groups
from counterpoint.cells import chosen, encode, events, flags, floats, whole, without_none
from counterpoint.descent import Descent, given_pairs
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.quality import Quality, from_rows, tabled
from counterpoint.schema import LateReward, Trace
from counterpoint.spelling import Refused
from counterpoint.tokens import Tokens
from counterpoint.turns import turns
from counterpoint.units import TOGETHER, Units, units_of

Weight = Literal["rollout", "step"]

_NEEDS = {
    "anchor": "give anchor= to from_columns, or record acts with anchor= (import: --anchor)",
    "value": "give value= to from_columns, or record acts with value=, or let gae fit them "
    "(values='mc', on the command line --set values=mc)",
    "logprob": "give logprob= to from_columns, or record acts with logprobs=",
    "logprob_new": "give logprob_new=, the log-probabilities under the policy being updated",
    "step_return": "give step_return=, the already discounted return of each row",
    "segment_start": "give segment_start=, true on the first turn of each segment",
    "value_high": "give value_high=, what the critic of segments expects from each first turn",
    "menu": "give menu= and action= to from_columns, or play an environment with menus",
    "descends": "say from_traces(…, descent=True), or give descends= to from_columns, for each row "
    "the rows whose reward descends from it",
    "state_digest": "give state_digest= to from_columns, or record it on observe",
    "quality": "give quality= to from_columns, or record rewards of agents on channels of their "
    "own",
}
_FLOAT = ("value", "value_high", "logprob", "logprob_new", "step_return", "time")
_LABEL = ("group", "task", "agent", "role", "anchor", "state_digest", "menu", "version")
_PLAIN = ("rollout", "step", "reward", "outcome", "mask", "n_tokens", "valid", "env_step")
_LATER = ("segment_start", "event", "action", "descends")
_QUALITY = ("quality", "verifiable", "error_rate", "depends")
_COLUMNS: tuple[str, ...] = (*_LABEL, *_FLOAT, *_PLAIN, *_LATER, *_QUALITY)


@dataclass(frozen=True, eq=False)
class Steps:
    """Turns of many rollouts as arrays of shape (rows,); one row is one act.

    Labels (`group`, `task`, `rollout`, `agent`, `role`, `anchor`, `state_digest`, `menu`)
    are integer codes, their texts are in `names`. Columns that were not given are None; a missing
    float is NaN.

    Attributes:
        group: what is normalised over: same task, policy version and fork arm.
        task: what is cross-fitted over; by default the group.
        rollout: one code per rollout, over all groups.
        step: position in the rollout; rows may stand in any order.
        agent, role: who acted.
        anchor: key of the state before the action, −1 where missing.
        reward: reward received after the row and before the rollout's next row.
        outcome: what a group compares: one value per rollout (or per agent of a rollout); NaN where
            nothing was scored. By default the undiscounted sum of the rewards.
        value: a critic's estimate of the return from the row.
        segment_start: whether a new segment, or subgoal, begins with the row.
        value_high: estimate of the return from the row before its segment's subgoal is chosen.
        logprob, logprob_new: log-probability of the whole turn when sampled, and now.
        step_return: return from the row, already discounted, used as it stands.
        mask: whether the row is trainable.
        n_tokens: tokens of the turn. time: seconds.
        valid: whether the turn could be parsed. env_step: the environment's own step count.
        state_digest: code of the full state, to see which anchors alias; −1 where missing.
        menu: code of the labels that could be chosen from; −1 where nothing was prescribed.
        action: index of the chosen label in the menu, −1 where none was chosen.
        version: code of the policy's version when it acted; −1 where nobody said.
        event: (rows, 2) index of the trace and `seq` of the act, or None for columns.
        descends: which rewards descend from which row; see `descent.Descent`.
        quality: what is known of each agent's own work; see `quality.Quality`.
        tokens: what models were fed and wrote, where traces stored it; see `tokens.Tokens`.
        parts: the parts of the turns, where they came from traces; `units` gives them.
        counts: what was left out while the rows were made.
    """

    group: Ints
    task: Ints
    rollout: Ints
    step: Ints
    agent: Ints
    role: Ints
    reward: Floats
    outcome: Floats
    mask: Bools
    n_tokens: Ints
    valid: Bools
    env_step: Ints
    anchor: Ints | None = None
    value: Floats | None = None
    logprob: Floats | None = None
    logprob_new: Floats | None = None
    step_return: Floats | None = None
    state_digest: Ints | None = None
    time: Floats | None = None
    event: Ints | None = None
    menu: Ints | None = None
    action: Ints | None = None
    version: Ints | None = None
    segment_start: Bools | None = None
    value_high: Floats | None = None
    descends: Descent | None = None
    quality: Quality | None = None
    tokens: Tokens | None = None
    parts: Mapping[str, Units] = field(default_factory=dict)
    names: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.group)

    @staticmethod
    def from_columns(**columns: Any) -> Steps:
        """Make steps from arrays of one length: `rollout` and `reward`, and whatever else is known.

        Args:
            **columns: any attribute of Steps by name. `rollout` (labels) is needed, and one of
                `reward` and `outcome`. Labels may be strings or numbers, None where missing.
                `group` defaults to one group, `agent` to one agent, `role` to the agent, `task` to
                the group, `step` to the order of rows in the rollout, `outcome` to the sum of the
                rollout's rewards, `mask` and `valid` to true. A NaN or None reward means that
                nothing was scored there. `quality` is one number for each agent of a rollout, with
                `verifiable`, `error_rate` and `depends` beside it (`quality.from_rows`).

        Raises:
            Refused: a column of another length, an unknown name, a value that is not a number,
                an infinite one, a step that repeats in its rollout, an outcome that varies within
                one agent of a rollout. The sentence names column and row.
        """
        given = {name: value for name, value in columns.items() if value is not None}
        for name in given:
            if name not in _COLUMNS:
                raise Refused(f"Steps have no column {name!r}; they have {', '.join(_COLUMNS)}")
        if "rollout" not in given or not {"reward", "outcome"} & set(given):
            raise Refused("Steps need the columns rollout and reward (or outcome)")
        for name, value in given.items():
            if isinstance(value, str | bytes) or not np.iterable(value):
                raise Refused(f"column {name} is a single value where one per row is needed")
            if not hasattr(value, "__len__"):
                given[name] = list(value)
        n = len(given["rollout"])
        for name, value in given.items():
            if len(value) != n:
                raise Refused(f"column {name} has {len(value)} rows where rollout has {n} rows")
        return _assemble(given, n, {})

    @staticmethod
    def from_traces(
        traces: Iterable[Trace],
        late_rewards: Iterable[LateReward] | None = None,
        channel: str = "team",
        forks: bool = False,
        descent: bool = False,
    ) -> Steps:
        """Make steps from traces: one row per act, one rollout per trace.

        Args:
            traces: any iterable of traces.
            late_rewards: rewards that came after the seal; each must name its trace's digest.
            channel: the reward channel that is the outcome; costs (family R7) always count.
            forks: whether forks take part; they belong to groups of their own.
            descent: whether to find out which rewards descend from which turn, for causal returns.

        A reward goes to the row it targets, else to the last act before it (of the targeted agent).
        Rewards without an amount are not zero: a rollout without any scored amount has outcome NaN.
        A trace without acts has no row and is counted in `counts["rollouts_without_steps"]`.

        Raises:
            Refused: a late reward for a trace that is absent or was changed since; with `descent`,
                a trace whose edges are missing or guessed.
        """
        columns, counts = turns(traces, late_rewards, channel, forks, descent)
        return _assemble(columns, len(columns["rollout"]), counts)

    # -- looking things up --------------------------------------------------------------------

    def need(self, column: str, *others: str) -> Any:
        """Return an optional column, or raise Refused saying how to supply it, and all others that
        are needed and missing with it.
        """
        missing = [name for name in (column, *others) if getattr(self, name) is None]
        if missing:
            columns, are = ("column", "is") if len(missing) == 1 else ("columns", "are")
            how = "; ".join(dict.fromkeys(_NEEDS[name] for name in missing))
            raise Refused(
                f"this needs the {columns} {', '.join(missing)}, which {are} missing: {how}"
            )
        return getattr(self, column)

    def label(self, column: str, row: int) -> Any:
        """The text behind a code, None where it is missing."""
        code = int(getattr(self, column)[row])
        return None if code < 0 else self.names[column][code]

    def units(self, kind: str) -> Units:
        """What can carry credit (`vocabulary.UNITS`): parts of turns, turns, or groups of them.

        Decisions, messages, tool calls and tokens are parts of a row, known from traces alone;
        agents, roles and the team are the rows of a rollout that share them.

        Raises:
            Refused: no such kind; parts of turns, where the steps were made from columns.
        """
        together = kind in TOGETHER and kind != "team"
        labels = getattr(self, kind) if together else None
        names = self.names[kind] if together else ()
        return units_of(kind, self.parts, self.event, self.rollout, labels, names)

    @cached_property
    def n_groups(self) -> int:
        """Number of groups."""
        return len(self.names["group"])

    @cached_property
    def n_rollouts(self) -> int:
        """Number of rollouts that have rows."""
        return int(self.rollout.max(initial=-1)) + 1

    @cached_property
    def in_order(self) -> bool:
        """Whether the rows stand sorted by rollout, then step, as most tables do."""
        return _in_order(self.rollout, self.step)

    @cached_property
    def order(self) -> Ints:
        """Rows sorted by rollout, then step."""
        return np.arange(len(self)) if self.in_order else np.lexsort((self.step, self.rollout))

    # -- statistics over the rollouts of a group -----------------------------------------------

    @cached_property
    def cell(self) -> Ints:
        """What counts once in a group: the rollout, or the agent of a rollout where the agents of
        one rollout have outcomes of their own.
        """
        if self.n_rollouts == len(self):
            return self.rollout
        within = groups.same_as_next(self.rollout)[:-1]
        within &= self.outcome[1:] != self.outcome[:-1]
        if self.in_order and not within.any():
            return self.rollout
        first = np.zeros(self.n_rollouts)
        first[self.rollout[::-1]] = self.outcome[::-1]
        same = first.take(self.rollout) == self.outcome
        if np.all(same | np.isnan(self.outcome)):
            return self.rollout
        return groups.pair(self.rollout, self.agent)

    @cached_property
    def singular(self) -> bool:
        """Whether every row is a trainable rollout of its own."""
        return self.n_rollouts == len(self) and bool(self.mask.all())

    @cached_property
    def unscored(self) -> Ints:
        """Rows whose outcome is missing."""
        return np.flatnonzero(np.isnan(self.outcome))

    @cached_property
    def head(self) -> Ints:
        """First trainable row of every cell that has one."""
        n = int(self.cell.max(initial=-1)) + 1
        if n == len(self):  # every row is a rollout of its own: nothing to sort
            return np.flatnonzero(self.mask)
        rows = self.trainable
        if self.cell is self.rollout:
            begins = np.ones(len(rows), dtype=bool)
            np.logical_not(self.goes_on[:-1], out=begins[1:])
            return rows[begins]
        return groups.first_of(self.cell, rows)

    @cached_property
    def trainable(self) -> Ints:
        """Trainable rows, sorted by rollout, then step."""
        if self.in_order:
            return np.flatnonzero(self.mask)
        return self.order[self.mask[self.order]]

    @cached_property
    def goes_on(self) -> Bools:
        """Whether each of `trainable` is followed by another of its rollout."""
        return groups.same_as_next(self.rollout[self.trainable])

    def picked(self, x: Floats, weight: Weight = "rollout") -> Ints:
        """Rows that enter the statistics of `x`: trainable and not NaN, each cell once unless
        `weight` is `step`.

        Raises:
            Refused: `weight` is neither `rollout` nor `step`.
        """
        if weight not in ("rollout", "step"):
            raise Refused(f"weight is {weight!r}; it is 'rollout' or 'step'")
        rows = self.head if weight == "rollout" else np.flatnonzero(self.mask)
        missing = np.isnan(x)
        return rows[~missing[rows]] if missing.any() else rows

    def moments(
        self, x: Floats, ddof: int = 1, weight: Weight = "rollout"
    ) -> tuple[Floats, Floats, Floats]:
        """Mean, standard deviation and number of `x` over each group's scored, trainable rollouts.

        Each has shape (n_groups,); `take(steps.group)` spreads it over the rows.
        """
        if self.singular and weight == "rollout" and not np.isnan(x).any():
            return groups.moments(self.group, x, self.n_groups, ddof)
        rows = self.picked(x, weight)
        if len(rows) == len(self):  # every row counts, so their order does not matter
            return groups.moments(self.group, x, self.n_groups, ddof)
        return groups.moments(self.group[rows], x[rows], self.n_groups, ddof)

    def mean(self, x: Floats, weight: Weight = "rollout") -> Floats:
        """Mean of `x` over the scored, trainable rollouts of each row's group, shape (rows,)."""
        return self.moments(x, 1, weight)[0].take(self.group)

    def std(self, x: Floats, ddof: int = 1, weight: Weight = "rollout") -> Floats:
        """Standard deviation over the same rollouts as `mean`, shape (rows,); 0 for one rollout."""
        return self.moments(x, ddof, weight)[1].take(self.group)

    def count(self, x: Floats, weight: Weight = "rollout") -> Floats:
        """How many rollouts (or rows) `mean` is taken over, shape (rows,)."""
        return self.moments(x, 1, weight)[2].take(self.group)

    def first(self, x: Floats) -> Floats:
        """Value of `x` at the first trainable row of each row's cell; NaN if it has none."""
        held = np.full(int(self.cell.max(initial=-1)) + 1, np.nan)
        held[self.cell[self.head]] = x[self.head]
        return held.take(self.cell)


# ---------------------------------------------------------------------------------------------
# Making steps


def _assemble(given: dict[str, Any], n: int, counts: dict[str, int]) -> Steps:
    names: dict[str, tuple[Any, ...]] = {}

    def labels(name: str, like: str | None = None) -> Ints:
        if name in given:
            codes, names[name] = encode(name, given[name])
            return codes
        names[name] = names[like] if like else ((0,) if n else ())
        return held[like] if like else np.zeros(n, dtype=np.int64)

    def optional_labels(name: str) -> Ints | None:
        if name not in given:
            return None
        codes, names[name] = without_none(*encode(name, given[name]))
        return codes

    held: dict[str, Ints] = {}
    group = held["group"] = labels("group")
    own, texts = encode("rollout", given["rollout"])
    rollout = groups.pair(group, own)
    names["rollout"] = _named(rollout, own, texts)
    agent = held["agent"] = labels("agent")
    step = _step(given, rollout, n)
    scored = floats("reward", given["reward"]) if "reward" in given else None
    outcome = _outcome(given, scored, rollout, agent)
    reward = _terminal(outcome, rollout, step) if scored is None else np.nan_to_num(scored)
    return Steps(
        group=group,
        task=labels("task", like="group"),
        rollout=rollout,
        step=step,
        agent=agent,
        role=labels("role", like="agent"),
        reward=reward,
        outcome=outcome,
        mask=flags("mask", given, n),
        n_tokens=whole("n_tokens", given) if "n_tokens" in given else np.ones(n, dtype=np.int64),
        valid=flags("valid", given, n),
        env_step=whole("env_step", given) if "env_step" in given else step,
        anchor=optional_labels("anchor"),
        state_digest=optional_labels("state_digest"),
        menu=optional_labels("menu"),
        version=optional_labels("version"),
        action=chosen(given["action"]) if "action" in given else None,
        event=events(given["event"]) if "event" in given else None,
        quality=_quality(given, rollout, agent, names["agent"], counts),
        descends=_descends(given.get("descends"), reward, rollout, step),
        parts=given.get("parts", {}),
        tokens=given.get("tokens"),
        segment_start=flags("segment_start", given, n) if "segment_start" in given else None,
        names=names,
        counts=counts,
        **{name: floats(name, given[name]) for name in _FLOAT if name in given},
    )


def _named(rollout: Ints, own: Ints, texts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The given name of every rollout."""
    first = groups.first_of(rollout, np.arange(len(rollout)))
    return tuple(map(texts.__getitem__, own[first].tolist()))


def _quality(
    given: dict[str, Any],
    rollout: Ints,
    agent: Ints,
    agents: tuple[Any, ...],
    counts: dict[str, int],
) -> Quality | None:
    held = given.get("quality")
    if held is None:
        return None
    if "scored" in given:
        found, left_out = tabled(held, rollout[given["scored"]], agents)
        if left_out:
            counts["quality_without_turns"] = left_out
        return found if len(found) else None
    rate = floats("error_rate", given["error_rate"]) if "error_rate" in given else None
    return from_rows(
        floats("quality", held),
        rollout,
        agent,
        agents,
        verifiable=given.get("verifiable"),
        error_rate=rate,
        depends=given.get("depends"),
    )


def _descends(given: Any, reward: Floats, rollout: Ints, step: Ints) -> Descent | None:
    if given is None or isinstance(given, Descent):
        return given
    return given_pairs(given, reward, rollout, step)


def _terminal(outcome: Floats, rollout: Ints, step: Ints) -> Floats:
    """Rewards where only outcomes were given: each rollout's outcome, on its last row.

    Outcomes that differ between the agents of a rollout say nothing about when they were earned;
    they make no rewards (`credit.returns` refuses them).
    """
    n = int(rollout.max(initial=-1)) + 1
    last = np.full(n, -1, dtype=np.int64)
    np.maximum.at(last, rollout, step)
    value = np.zeros(n)
    value[rollout] = np.nan_to_num(outcome)
    if np.any(value[rollout] != np.nan_to_num(outcome)):
        return np.zeros(len(rollout))
    return np.where(step == last[rollout], np.nan_to_num(outcome), 0.0)


def _step(given: dict[str, Any], rollout: Ints, n: int) -> Ints:
    if "step" not in given:
        order = np.argsort(rollout, kind="stable")
        size = np.bincount(rollout, minlength=1)
        begin = np.cumsum(size) - size
        step = np.empty(n, dtype=np.int64)
        step[order] = np.arange(n) - begin[rollout[order]]
        return step
    step = whole("step", given)
    if _in_order(rollout, step):
        return step
    order = np.lexsort((step, rollout))
    before, after = order[:-1], order[1:]
    again = (rollout[before] == rollout[after]) & (step[before] == step[after])
    if again.any():
        row = int(after[again].min())
        name = given["rollout"][row]
        raise Refused(f"column step, row {row}: step {step[row]} of rollout {name!r} stands twice")
    return step


def _in_order(rollout: Ints, step: Ints) -> bool:
    """Whether rollouts rise, and steps within each."""
    rises = np.greater(step[1:], step[:-1])
    rises &= rollout[1:] == rollout[:-1]
    rises |= rollout[1:] > rollout[:-1]
    return bool(rises.all())


def _outcome(given: dict[str, Any], scored: Floats | None, rollout: Ints, agent: Ints) -> Floats:
    n = int(rollout.max(initial=-1)) + 1
    if scored is not None and "outcome" not in given:
        missing = np.isnan(scored)
        if not missing.any():
            return groups.total(rollout, scored, n).take(rollout)
        has = ~missing
        summed = groups.total(rollout[has], scored[has], n)
        return np.where(groups.count(rollout[has], n) > 0, summed, np.nan)[rollout]
    outcome = floats("outcome", given["outcome"])
    cell = groups.pair(rollout, agent)
    first = np.zeros(int(cell.max(initial=-1)) + 1)
    first[cell[::-1]] = outcome[::-1]
    wrong = ~((first[cell] == outcome) | (np.isnan(first[cell]) & np.isnan(outcome)))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise Refused(
            f"column outcome, row {row}: {outcome[row]:g} differs from another row of the same "
            f"agent and rollout; a reward per turn goes into the column reward"
        )
    return outcome
