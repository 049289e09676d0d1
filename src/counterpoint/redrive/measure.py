"""The harness as what measured credit asks: runs branched at any act, or played without an agent.

`Branching(traces)` is a `credit.protocols.Replay`. Its branches are not kept as traces, since
methods ask for thousands of them; `fork` gives those that can be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from counterpoint.branches import (
    KEEP,
    NULL,
    RESAMPLE,
    Absence,
    Branches,
    Downstream,
    Menu,
    Retold,
    Spent,
)
from counterpoint.credit.protocols import mean_of
from counterpoint.envs import Env
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.harness import Run, next_event
from counterpoint.policies import Menu as Legal
from counterpoint.policies import Observation, Output, Policy, described, sizes
from counterpoint.policies.grammar import parse
from counterpoint.redrive.arms import begun, changed
from counterpoint.redrive.follow import Team
from counterpoint.redrive.interventions import NOTHING, planned
from counterpoint.redrive.record import Record, Said, sight
from counterpoint.redrive.standing import Standing, asked_at, cost, go_on, snapshot, staged, twin
from counterpoint.redrive.told import Told, Turn
from counterpoint.schema import Act, Trace, header_digest
from counterpoint.spelling import CANONICAL, Refused, digest_of
from counterpoint.streams import Domain, Draws, Keys, branch_key, key_at
from counterpoint.vocabulary import DECISIONS


class Value(NamedTuple):
    """V(G≤t) as branches give it: mean outcome, its standard error, what it cost."""

    mean: float
    stderr: float
    spent: Spent


def value_by_branches(
    trace: Trace,
    at: int | None = None,
    n: int = 64,
    *,
    seed: int = 0,
    env: Env | None = None,
    policies: Team | None = None,
    allow_changed: bool = False,
) -> Value:
    """V(G≤t) = E[R | the first t events, task_seed], from n sampled continuations.

    The mean of their outcomes, which is unbiased, and its standard error s/√n. Where everything can
    be listed `value_of` gives the same number without error.

    Args:
        trace: a recorded run, or its first events.
        at: t, as in `trace[:t]`; by default all events that the trace holds.
        n: branches.
        seed: of their draws.
        env: as in `fork`.
        policies: as in `fork`.
        allow_changed: as in `fork`.

    Returns:
        Of one branch the error is NaN. A finished run gives its own outcome without error.

    Raises:
        Refused: as `fork`; or a branch ends unscored, so there is no value to expect.
    """
    end = trace.first + len(trace)
    seq = end if at is None else at
    if n < 1 or not trace.first <= seq <= end:
        raise Refused(f"V needs n of 1 at least and t from {trace.first} to {end}, not {n}, {seq}")
    record = Record(staged(trace, env, policies, allow_changed))
    begin = asked_at(record.stage.events, seq)
    standing = record.along.standing(begin)
    spent, outcomes = record.along.spent, []
    for number in range(n):
        keys = branch_key(record.stage.keys, begin, seed, number)
        run = go_on(begun(standing, record.stage, begin, trace.trace_id, keys))
        outcomes.append(_outcome(run))
        spent += cost(run.events, begin, run.specs)
    if any(map(math.isnan, outcomes)):
        raise Refused(f"a run of {record.stage.env.id} ends unscored, so V has no value to expect")
    if min(outcomes) == max(outcomes):
        over = standing.run.world.stopped is not None
        return Value(outcomes[0], 0.0 if n > 1 or over else math.nan, spent)
    return Value(float(np.mean(outcomes)), float(np.std(outcomes, ddof=1) / math.sqrt(n)), spent)


def _outcome(run: Run) -> float:
    outcome = run.trace().outcome
    return math.nan if outcome is None else outcome


# ---------------------------------------------------------------------------------------------
# Who goes on


class _Lost(Refused):
    """The record has no act for a turn that has to be taken from it."""


class _Bill:
    """What policies were asked."""

    def __init__(self, told: Told) -> None:
        self.passes = self.tokens = 0
        self._told = told

    def asked(self, policy: Policy) -> Policy:
        """The policy, at cost."""

        def act(observation: Observation, legal: Legal, draws: Draws) -> str | Output:
            said = policy(observation, legal, draws)
            self.passes += 1
            written, fed = sizes(said if isinstance(said, Output) else Output(said))
            self.tokens += written + (fed or 0)
            self._told.hear(observation, legal, said, policy)
            return said

        return act


def _again(record: Record, policy: Policy | None) -> Policy:
    """Says what was said at this turn of the record. Whoever sees anything else asks the policy;
    without one, the record is followed whatever is seen.
    """

    def act(observation: Observation, legal: Legal, draws: Draws) -> str | Output:
        turn = observation.agent, observation.turn
        if policy is not None and record.seen.get(turn) != sight(observation, legal):
            return policy(observation, legal, draws)
        said = record.turns.get(turn)
        if said is None:
            raise _Lost(f"the record has no turn {observation.turn} of {observation.agent}")
        return said.output

    return act


class _Rerun(Run):
    """A run whose tools draw from the streams of the record where nature is kept as it was."""

    nature: Keys = ()

    def draws(self, domain: Domain, owner: str, k: int, asked_at: int) -> Draws:
        """As in any run, but for the tools."""
        keys = self.nature if domain == "tool" and self.nature else self.keys
        return Draws(key_at(keys, asked_at), domain, owner, k)


# ---------------------------------------------------------------------------------------------
# The replay


class Branching:
    """Runs recorded runs again, for measured credit (`credit.protocols.Replay`).

    A place is (number of the trace among `traces`, seq of an act), as in `Steps.event`. A run is
    led along its record once for all places that are asked for together; each branch starts from a
    snapshot. Where later acts are those of the record (`downstream` "replay" or "frozen"), tools
    draw from the record's streams too. `exact` is claimed where every policy is deterministic given
    its draws and is the record's: that the environment is deterministic and the history complete,
    leading has shown.

    Args:
        traces: the runs, in the order of the table of steps.
        env: as in `fork`.
        policies: as in `fork`.
        null: what an agent says that does nothing: a text, or one for each role.
        allow_changed: as in `fork`.
        watched: passes the places on that are played from, as they are.

    Raises:
        Refused: as `fork`, when a run is first asked for.
    """

    def __init__(
        self,
        traces: Iterable[Trace],
        env: Env | None = None,
        policies: Team | None = None,
        *,
        null: str | Mapping[str, str] = NOTHING,
        allow_changed: bool = False,
        watched: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> None:
        self._traces = list(traces)
        self._given = env, policies, allow_changed
        self._watched = watched
        self._null = null
        self._records: dict[int, Record] = {}
        self._told = Told()

    def menu(self, places: Ints) -> Menu:
        """The menus of the record, with the probabilities that the policies give."""
        found = [self._at(run, seq) for run, seq in places.tolist()]
        said = [each for _, each in found]
        width = max((len(each.texts) for each in said), default=0)
        probs = np.zeros((len(said), width))
        does = {verb: np.zeros((len(said), width), dtype=bool) for verb in DECISIONS}
        label = np.full((len(said), width), -1)
        for row, (record, each) in enumerate(found):
            label[row, : len(each.texts)] = self._told.labels(each.texts)
            given = record.probs[each.act.seq]
            probs[row, : len(each.texts)] = np.nan if given is None else given
            for column, text in enumerate(each.texts):
                for verb in {item.verb for item in parse(text)} & does.keys():
                    does[verb][row, column] = True
        entries = [
            (len(each.texts), each.entry(each.act.text), each.entry(self._nothing(each.role)))
            for each in said
        ]
        size, taken, null = np.array(entries, dtype=np.int64).reshape(-1, 3).T
        return Menu(size, probs, taken, null, does, label)

    def branch(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        start: int = 0,
        each: int = 1,
        seed: int = 0,
        downstream: Downstream = "anew",
    ) -> Branches:
        """As `credit.protocols.Replay.branch`."""
        values = np.full((len(places), n, each), np.nan)
        drawn = np.full((len(places), n), -1, dtype=np.int64)
        bill, calls, exact = _Bill(self._told), Spent(), True
        self._told.forget()
        order = np.lexsort((places[:, 1], places[:, 0]))  # no run is led twice
        for row in self._watched(order.tolist()):
            record, said = self._at(*places[row].tolist())
            exact &= _exact(record)
            before = record.along.spent
            base = self._put(record, said, int(action[row]))
            calls += _since(record, before)
            if base is None:
                continue
            for number in range(n):
                keys = branch_key(record.stage.keys, said.begin, seed, start + number)
                asked = (*places[row].tolist(), int(action[row]), start + number, seed)
                self._told.begin(asked)
                run = _acted(_begun(record, base, said.begin, keys, bill), said.begin)
                if action[row] != RESAMPLE:  # then nobody was asked for it
                    self._told.begin(asked, _turn(record, said, _last(run).text))
                drawn[row, number] = said.entry(_last(run).text)
                _play_on(run, record, downstream, bill, {})
                found, made = _leaves(run, each, seed)
                values[row, number], calls = found, calls + made
        leaves = (~np.isnan(values)).sum(axis=2)
        spent = calls + Spent(0, bill.passes, bill.tokens)
        return Branches.of(mean_of(values), spent, leaves=leaves, drawn=drawn, exact=exact)

    def retell(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        agents: Sequence[Any],
        start: int = 0,
        seed: int = 0,
    ) -> Retold:
        """As `credit.protocols.Retelling.retell`, of the branches that were asked for last."""
        asked = [
            [(*place, act, number, seed) for number in range(start, start + n)]
            for place, act in zip(places.tolist(), action.tolist(), strict=True)
        ]
        return self._told.retold(asked, agents)

    def absent(
        self,
        runs: Ints,
        agents: Sequence[Any],
        present: Bools,
        n: int,
        *,
        absence: Absence = "null",
        start: int = 0,
        seed: int = 0,
        downstream: Downstream = "replay",
    ) -> Branches:
        """As `credit.protocols.Replay.absent`; every coalition of a run meets the same draws."""
        values = np.full((len(runs), n), np.nan)
        bill, calls, exact = _Bill(self._told), Spent(), True
        for row, number in enumerate(self._watched(runs.tolist())):
            record = self._record(number)
            exact &= _exact(record)
            before = record.along.spent
            gone = {str(agents[i]) for i in np.flatnonzero(~present[row]).tolist()}
            for column in range(n):
                own = branch_key(record.stage.keys, 0, seed, start + column)[-1][1]
                run = self._left(record, gone, absence, own, bill)
                if run is None:
                    outcome = record.stage.trace.outcome
                    values[row, column] = math.nan if outcome is None else outcome
                    continue
                instead = {agent: self._instead(record, agent, absence, bill) for agent in gone}
                _play_on(run, record, downstream, bill, instead)
                (values[row, column],), made = _leaves(run, 1, seed)
                calls += made
            calls += _since(record, before)
        return Branches.of(values, calls + Spent(0, bill.passes, bill.tokens), exact=exact)

    def named(self, run: int) -> str:
        """Digest of all that decides the branches of a run but the question: its whole record, the
        environment and the policies that go on, and what an agent says that does nothing.
        """
        stage = self._record(run).stage
        parts = [stage.trace.digest, header_digest(stage.header).hex(), self._null]
        return digest_of(CANONICAL.encode(parts)).hex()

    # -- parts of both ---------------------------------------------------------------------------

    def _record(self, number: int) -> Record:
        if not 0 <= number < len(self._traces):
            raise Refused(f"there is no run {number}; there are {len(self._traces)}, from 0")
        if number not in self._records:
            self._records[number] = Record(staged(self._traces[number], *self._given))
        return self._records[number]

    def _at(self, number: int, seq: int) -> tuple[Record, Said]:
        record = self._record(number)
        said = record.said.get(seq)
        if said is None:
            raise Refused(f"event {seq} of trace {record.stage.trace.trace_id} is no act")
        return record, said

    def _nothing(self, role: str) -> str:
        return self._null if isinstance(self._null, str) else self._null.get(role, NOTHING)

    def _put(self, record: Record, said: Said, action: int) -> Standing | None:
        """The run with an act in place, or about to be drawn; None for no entry of the menu."""
        place = record.place(said.begin)
        if action == RESAMPLE:
            return place
        if action == KEEP:
            return _with(record, said, place, "keep", None)
        if action == NULL:
            return _with(record, said, place, "replace", self._nothing(said.role))
        if not 0 <= action < len(said.texts):
            return None
        return _with(record, said, place, "replace", said.texts[action])

    def _left(
        self, record: Record, gone: set[str], absence: Absence, key: str, bill: _Bill
    ) -> _Rerun | None:
        """The run just after the first act that absence changes; None if it changes none."""
        for said in record.said.values():
            if said.act.agent not in gone:
                continue
            if absence == "null" and said.act.text == self._nothing(said.role):
                continue
            base = self._put(record, said, NULL if absence == "null" else RESAMPLE)
            before = [pair for pair in record.stage.keys if pair[0] < said.begin]
            keys = (*before, (said.begin, key))
            assert base is not None
            run = _acted(_begun(record, base, said.begin, keys, bill), said.begin)
            if _last(run).text != said.act.text:
                return run
        return None

    def _instead(self, record: Record, agent: str, absence: Absence, bill: _Bill) -> Policy:
        """What an absent agent does in the turns that follow."""

        def act(observation: Observation, legal: Legal, draws: Draws) -> str | Output:
            if absence == "null":
                return self._nothing(observation.role)
            return bill.asked(record.stage.team[observation.role])(observation, legal, draws)

        return act


def _turn(record: Record, said: Said, text: str | None) -> Turn:
    """The turn of a record, with another text."""
    return Turn(said.act.agent, said.texts, text, partial(record.probs.get, said.act.seq))


def _since(record: Record, before: Spent) -> Spent:
    """What leading the run along its record took since `before`."""
    return Spent(record.along.spent.env_calls - before.env_calls)


def _exact(record: Record) -> bool:
    """Whether everybody gives the same turn for the same draws, and is who played."""
    team = record.stage.team.values()
    return not record.stage.changed and all(described(each, "deterministic") for each in team)


def _with(record: Record, said: Said, place: Standing, do: str, content: str | None) -> Standing:
    stage = record.stage
    return changed(place, planned(stage.trace, stage.events, said.act.seq, do, content, None))


def _begun(record: Record, base: Standing, begin: int, keys: Keys, bill: _Bill) -> _Rerun:
    """A run of its own from a place on; its policies are billed."""
    stage = record.stage
    plain = begun(base, stage, begin, stage.header.trace_id, keys)
    run = object.__new__(_Rerun)
    vars(run).update(vars(plain))
    run.policies = {role: bill.asked(policy) for role, policy in stage.team.items()}
    return run


def _acted(run: _Rerun, begin: int) -> _Rerun:
    """The run after the act that it was begun for, which may be there already."""
    while not any(isinstance(event, Act) for event in run.events[begin:]):
        event = next_event(run)
        assert event is not None  # an observation leads to an act
        run.emit(event)
    return run


def _last(run: Run) -> Act:
    return next(event for event in reversed(run.events) if isinstance(event, Act))


def _play_on(
    run: _Rerun, record: Record, downstream: Downstream, bill: _Bill, gone: Mapping[str, Policy]
) -> None:
    """Say who acts from here on, and what nature does."""
    team = {
        role: policy if downstream == "anew" else _again(record, policy)
        for role, policy in run.policies.items()
    }
    if downstream == "frozen":
        team = {role: _again(record, None) for role in run.policies}
    run.policies = {role: _unless(gone, policy) for role, policy in team.items()}
    run.nature = () if downstream == "anew" else record.stage.keys


def _unless(gone: Mapping[str, Policy], policy: Policy) -> Policy:
    """The policy, but for agents who are gone."""

    def act(observation: Observation, legal: Legal, draws: Draws) -> str | Output:
        return gone.get(observation.agent, policy)(observation, legal, draws)

    return act


def _leaves(run: _Rerun, each: int, seed: int) -> tuple[Floats, Spent]:
    """(each,) outcomes of continuations from where a run stands, and their calls."""
    place = len(run.events)
    state = snapshot(run.env) if each > 1 else None
    values, spent = np.full(each, np.nan), Spent()
    for leaf in range(each):
        ahead = twin(run)
        if leaf:
            ahead.env.restore(state)
            ahead.keys = branch_key(run.keys, place, seed, leaf)
        with suppress(_Lost):  # then it cannot be run, which is not the same as no effect
            values[leaf] = _outcome(go_on(ahead))
        spent += cost(ahead.events, place, ahead.specs, policies=False)
    return values, spent
