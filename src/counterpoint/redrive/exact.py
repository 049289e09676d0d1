"""V(G≤t) = E[R | the first t events, task_seed], by listing everything that may still happen.

One walker serves every environment. It asks the harness for the next event as a run does, but with
draws whose choices it decides: wherever a policy chooses from its menu or a tool calls
`draws.choice`, it goes every way that has a chance, and weighs the outcomes. What cannot be listed
(free text, `draws.random`, a policy that gives no probabilities, too many prefixes) is refused: it
needs branches that are sampled, which is `fork`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from counterpoint.envs import Env
from counterpoint.harness import Run, next_event
from counterpoint.policies import Menu, Observation, Output, Policy, described
from counterpoint.redrive.follow import Led, Team, call_of, difference, env_for, redrive, team_for
from counterpoint.schema import Act, AnyEvent, Header, Intervene, ToolResult, Trace
from counterpoint.spelling import Refused
from counterpoint.streams import Domain, Draws

PREFIXES = 200_000
"""How many prefixes are listed before a sentence says that sampling is cheaper."""


class ActValue(NamedTuple):
    """The exact worth of one act: V before it, Q after it, and seqau = Q − V."""

    seq: int
    agent: str
    value: float
    q: float

    @property
    def seqau(self) -> float:
        """Q(h, a) − V(h): what the act was worth more than its policy's average there."""
        return self.q - self.value


def value_of(prefix: Trace, env: Env | None = None, policies: Team | None = None) -> float:
    """V(G≤t), exact: the expected outcome of a run, given its first events and its task.

    R is `Trace.outcome`: rewards of the team and costs (R7), undiscounted. `trace[:0]` gives V(h₀);
    a finished run its own outcome.

    Args:
        prefix: first events of a recorded run, `trace[:t]`.
        env: as in `replay`; it is used, not copied.
        policies: as in `replay`. They must be those that the header names: V belongs to them. For
            others, give a prefix whose header names them.

    Raises:
        Refused: the prefix cannot be re-driven; or what follows cannot be listed, and the sentence
            says why it needs fork; or a run ends unscored.
    """
    run = redrive(prefix, env, policies)
    return _Walk().value(Listed(run.header, run.env, all_listed(run.policies), run.events))


def values_along(trace: Trace, env: Env | None = None, policies: Team | None = None) -> list[float]:
    """V(G≤t) for t = 0 … len(trace): what the run was worth after each of its events.

    A martingale: it moves only at acts and at results of tools with chance, and its last value is
    the outcome. The values are computed from the end, so the whole costs no more than the first.

    Arguments and errors as in `value_of`.
    """
    env = env_for(trace.header, env)
    team = all_listed(team_for(trace.header, env, policies))
    states = _states(trace, env)
    walk = _Walk()
    values = [0.0] * (len(trace) + 1)
    for t in reversed(range(len(trace) + 1)):
        if t < len(trace) and not isinstance(trace.events[t], Act | ToolResult):
            values[t] = values[t + 1]
            continue
        env.restore(states[t])
        run = Listed(trace.header, env, team, trace.events[:t])
        known = (trace.events[t], values[t + 1]) if t < len(trace) else None
        values[t] = walk.value(run, known)
    return values


def credit_of(trace: Trace, env: Env | None = None, policies: Team | None = None) -> list[ActValue]:
    """Exact Q, V and seqau of each act of a run, in order.

    Without chance in tools they telescope: Σ seqau = R − V(h₀). With it, what the results brought
    is the rest. Arguments and errors as in `value_of`.
    """
    values = values_along(trace, env, policies)
    return [
        ActValue(event.seq, event.agent, values[event.seq], values[event.seq + 1])
        for event in trace.events
        if isinstance(event, Act)
    ]


def _states(trace: Trace, env: Env) -> list[Any]:
    """Snapshots of the environment before each event, and after the last."""
    led = Led(trace.header, env)
    states = [env.snapshot()]
    for event in trace.events:
        if what := led.differs(event):
            raise Refused(
                f"trace {trace.trace_id} cannot be re-driven past event {len(led.events)}: {what}"
            )
        led.emit(event)
        states.append(env.snapshot())
    return states


# ---------------------------------------------------------------------------------------------
# Chance, listed


class Chance(Draws):
    """Draws that are decided from outside: `path` says how the first choices fall, and those after
    it fall on the first outcome that has a chance.
    """

    __slots__ = ("faced", "path", "probability", "taken", "unlisted")

    def __init__(self) -> None:
        self.follow([])

    def follow(self, path: list[int]) -> None:
        """Begin a call anew."""
        self.path = path
        self.taken: list[int] = []
        self.faced: list[list[float]] = []
        self.probability = 1.0
        self.unlisted = False

    def random(self) -> float:
        """A number from a continuum cannot be listed; whoever walks finds out from `unlisted`."""
        self.unlisted = True
        return 0.0

    def choice(self, p: Sequence[float]) -> int:
        """The index that the path names. Raises Refused as `Draws.choice` does."""
        chances = [float(each) for each in p]
        # asked the way round that refuses NaN
        if not chances or not min(chances) >= 0 or not abs(math.fsum(chances) - 1.0) <= 1e-9:
            raise Refused(f"draws.choice needs probabilities that sum to 1, not {chances[:8]}")
        place = len(self.taken)
        possible = (index for index, each in enumerate(chances) if each > 0)
        index = self.path[place] if place < len(self.path) else next(possible)
        self.taken.append(index)
        self.faced.append(chances)
        self.probability *= chances[index]
        return index

    def integer(self, n: int) -> int:
        """A choice among n outcomes of one probability. Raises Refused for n < 1."""
        return self.choice([1.0 / n] * n if n > 0 else [])

    def next_path(self) -> list[int] | None:
        """The path after the one just gone: the last choice that has outcomes left moves on."""
        for place in reversed(range(len(self.taken))):
            chances = self.faced[place]
            for index in range(self.taken[place] + 1, len(chances)):
                if chances[index] > 0:
                    return [*self.taken[:place], index]
        return None


class Listed(Run):
    """A run that can be asked for everything that may come next."""

    def __init__(
        self, header: Header, env: Env, policies: Mapping[str, Policy], events: Sequence[AnyEvent]
    ) -> None:
        self.chance = Chance()
        super().__init__(header, env, policies, events)

    def draws(self, domain: Domain, owner: str, k: int, asked_at: int) -> Draws:
        """All draws are the walker's."""
        return self.chance

    def after(self, events: Sequence[AnyEvent]) -> Listed:
        """The same run after other events; the environment is shared."""
        return Listed(self.header, self.env, self.policies, events)


def all_listed(team: Mapping[str, Policy]) -> dict[str, Policy]:
    """Every policy of a team with its chance in the open."""
    return {role: _listed(role, policy) for role, policy in team.items()}


def _listed(role: str, policy: Policy) -> Policy:
    """The policy with its chance in the open: its menu, weighed by `probs`."""
    probs = described(policy, "probs")

    def act(observation: Observation, legal: Menu, draws: Draws) -> str | Output:
        if probs is not None and legal:
            chances = list(probs(observation, legal))
            if len(chances) != len(legal):
                raise Refused(
                    f"the policy of {role} gives {len(chances)} probabilities for a menu of "
                    f"{len(legal)}"
                )
            return Output(list(legal.values())[draws.choice(chances)])
        if described(policy, "deterministic"):
            return policy(observation, legal, draws)
        why = "has no probs" if probs is None else f"has no menu for {observation.agent} here"
        raise Refused(f"V cannot be listed, it needs fork: the policy of {role} {why}")

    return act


class Branch(NamedTuple):
    """One event that may come next, with its probability; `state` of the environment after it, if
    the environment computed it.
    """

    probability: float
    event: AnyEvent
    state: Any


def branches(run: Listed) -> list[Branch]:
    """Every event that may come next; none if the run is over."""
    computing = bool(run.world.open_calls)  # a tool will run, and may change the environment
    before = run.env.snapshot() if computing else None
    found: list[Branch] = []
    path: list[int] | None = []
    while path is not None:
        if found and computing:
            run.env.restore(before)
        run.chance.follow(path)
        event = next_event(run)
        if event is None:
            return []
        _listable(run, event)
        path = run.chance.next_path()
        several = computing and (bool(found) or path is not None)
        state = run.env.snapshot() if several else None
        found.append(Branch(run.chance.probability, event, state))
    return found


def _listable(run: Listed, event: AnyEvent) -> None:
    if isinstance(event, Intervene):
        raise Refused("V cannot be listed, it needs fork: a permission rule asks a human")
    if run.chance.unlisted:
        what = call_of(run, event).tool if isinstance(event, ToolResult) else run.role(event.agent)
        raise Refused(
            f"V cannot be listed, it needs fork: {what} draws by draws.random(), not by choice"
        )


class _Walk:
    """Sums outcomes over all continuations, and counts the prefixes that it met."""

    def __init__(self) -> None:
        self.met = 0

    def value(self, run: Listed, known: tuple[AnyEvent, float] | None = None) -> float:
        """Expected outcome from where `run` stands, which is moved: Σ P(end) · R(end).

        `known` is an event that may come next, and the value after it.
        """
        terms: list[float] = []
        left: list[tuple[float, tuple[AnyEvent, ...], Any]] = []
        weight = 1.0
        while True:
            self._count()
            ahead = branches(run)
            if len(ahead) == 1 and known is None:
                run.emit(ahead[0].event)
                continue
            if not ahead:
                terms.append(weight * _outcome(run))
            here = run.env.snapshot() if ahead else None
            for chance, event, state in ahead:
                if known is not None and _same(known[0], event):
                    terms.append(weight * chance * known[1])
                else:
                    after = here if state is None else state
                    left.append((weight * chance, (*run.events, event), after))
            if not left:
                return math.fsum(terms)
            known = None
            weight, events, state = left.pop()
            run.env.restore(state)
            if ahead:  # the last one left is a continuation of this very run
                run.emit(events[-1])
            else:
                run = run.after(events)

    def _count(self) -> None:
        self.met += 1
        if self.met > PREFIXES:
            raise Refused(
                f"V cannot be listed, it needs fork: more than {PREFIXES} prefixes follow"
            )


def _same(recorded: AnyEvent, listed: AnyEvent) -> bool:
    """Whether an event is the recorded one; an act is what it says."""
    if isinstance(recorded, Act) and isinstance(listed, Act):
        return recorded.text_raw == listed.text_raw
    return difference(recorded, listed) is None


def _outcome(run: Run) -> float:
    outcome = run.trace().outcome
    if outcome is None:
        raise Refused(f"a run of {run.env.id} ends unscored, so V has no value to expect")
    return outcome
