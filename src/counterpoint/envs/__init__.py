"""Where runs are born: the base class of environments, and the table of those that ship.

An environment knows hidden facts and pays rewards. Who is alive, who said what and who saw it is
the world's business; `view` gives an environment what one agent may know of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, get_type_hints

import msgspec

from counterpoint.schema import AnyEvent, Delegate, Event, Target, Trace, content_of
from counterpoint.spelling import Refused, digest_of
from counterpoint.targets import load_target
from counterpoint.tools import Spec, specs, tool
from counterpoint.vocabulary import Family, Verifiable
from counterpoint.world import World

__all__ = ["ENVS", "Amount", "Env", "EnvRow", "View", "make", "tool"]


class Amount(NamedTuple):
    """One reward that an environment pays at the end of a run.

    `target` is an agent's id, a `schema.Target`, or None for the team. `causes` are the events it
    was computed from; None means everything the run did, which is always safe to say.
    """

    amount: float | None
    target: str | Target | None = None
    channel: str = "team"
    family: Family = "R1"
    verifiable: Verifiable | None = None
    error_rate: float | None = None
    causes: Sequence[Event | int] | None = None


class View(NamedTuple):
    """What one agent may know of the run: events it made, was shown or is about to be shown, who is
    alive, open jobs, its role.

    `jobs` are delegations to the agent that it has not returned, `waiting` those of its own that
    are still out.
    """

    events: tuple[AnyEvent, ...]
    alive: tuple[str, ...]
    jobs: tuple[Delegate, ...]
    waiting: tuple[Delegate, ...]
    role: str

    def made(self, kind: type[Event], agent: str) -> list[Any]:
        """The events of one kind by one agent, in order."""
        return [e for e in self.events if isinstance(e, kind) and e.agent == agent]


class Env:
    """Base class of environments. A subclass writes `id`, `roles`, and the methods it needs.

    `id` is versioned (`doors-v0`); `roles` maps each role to the verbs and tools it may use;
    `on_call` names the roles that act only while a delegation to them is open. Options are keyword
    arguments of `__init__`, kept in `self.options`.
    """

    id: ClassVar[str]
    roles: ClassVar[Mapping[str, Sequence[str]]]
    on_call: ClassVar[Collection[str]] = ()

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._world: World | None = None
        self._events: Sequence[AnyEvent] = ()

    # -- what a subclass may write ---------------------------------------------------------------

    def reset(self, task_seed: int) -> None:
        """Draw the hidden facts of a task from its seed, which the rollouts of a group share."""

    def start(self) -> Mapping[str, str]:
        """Agents alive at the start and their roles; by default one per role, named like it."""
        return {role: role for role in self.roles}

    def agents(self) -> Sequence[str] | None:
        """Agents in the order of their turns; an empty list ends the run.

        None, the default, is everybody alive in order of birth who does not wait and is not on
        call without a job: then the environment does not decide who acts.
        """
        return None

    def observe(self, agent: str) -> Any:
        """What the environment tells an agent at the start of its turn; None for nothing new."""
        return None

    def legal(self, agent: str) -> Mapping[str, str] | Sequence[str] | None:
        """The menu: texts of whole turns, {label: text} or a list; None if nothing is prescribed.

        It describes and does not enforce.
        """
        return None

    def anchor(self, agent: str, shown: str) -> str:
        """Key of the state before the action; by default a digest of role and rendered turns."""
        role = self._world.agents[agent].role if self._world else agent
        return digest_of(f"{role}\n{shown}".encode("utf-8", "surrogatepass")).hex()

    def rewards(self, trace: Trace) -> Iterable[Amount | tuple[float | None, str | None]]:
        """What the run earned, once it has stopped: (amount, agent or None), or Amount."""
        return ()

    def snapshot(self) -> Any:
        """A copy of all hidden state."""
        hidden = {k: v for k, v in vars(self).items() if k not in ("_world", "_events")}
        return copy.deepcopy(hidden)

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot; it can be used again."""
        vars(self).update(copy.deepcopy(snapshot))

    # -- what it is given ------------------------------------------------------------------------

    def view(self, agent: str) -> View:
        """What `agent` may know of the run so far, with the mail that its next turn will show."""
        world = self._world
        if world is None:
            raise Refused(f"{self.id} is not being played, so {agent} has no view")
        own = world.agents.get(agent)
        seen, mail = (own.seen, own.inbox) if own else ({}, {})
        open_jobs = world.open_delegations
        sent = [e for seq in open_jobs if isinstance(e := self._events[seq], Delegate)]
        return View(
            tuple([e for e in self._events if e.agent == agent or e.seq in seen or e.seq in mail]),
            alive=tuple([name for name, held in world.agents.items() if held.alive]),
            jobs=tuple([e for e in sent if agent in open_jobs[e.seq]]),
            waiting=tuple([e for e in sent if e.agent == agent]),
            role=own.role if own else agent,
        )

    def turn(self, agent: str) -> int:
        """How many turns an agent has taken, 0 at its first."""
        world = self._world
        return world.agents[agent].acts if world is not None and agent in world.agents else 0

    def said(self, event: AnyEvent) -> Any:
        """What an event says; where it names only a span, that span of its act's text."""
        return content_of(event, self._events)

    def bind(self, world: World, events: Sequence[AnyEvent]) -> None:
        """Let `view` look at a run; the harness calls it before every turn."""
        self._world, self._events = world, events

    # -- identity --------------------------------------------------------------------------------

    def tools(self) -> dict[str, Spec]:
        """Its tools by name, with their schemas as they are now."""
        return specs(self)

    def digest(self) -> str:
        """Digest of what defines the environment: id, options, roles and tool schemas."""
        parts = [self.id, repr(sorted(self.options.items())), repr(sorted(self.roles.items()))]
        parts += [spec.digest for spec in self.tools().values()]
        return digest_of("\n".join(parts).encode("utf-8", "surrogatepass")).hex()


class EnvRow(NamedTuple):
    """One row of the table: where the class is, what it is, how far its oracle reaches."""

    target: str
    about: str
    agents: str
    oracle: str


ENVS: dict[str, EnvRow] = {
    "research-v0": EnvRow(
        target="counterpoint.envs.research:Research",
        about="a question needs current figures out of stale and contradicting documents",
        agents="coordinator + researcher, a fixed team",
        oracle="exact: menus and misreadings, 868 runs of a task",
    ),
    "research-review-v0": EnvRow(
        target="counterpoint.envs.review:Review",
        about="the same with a reviewer, who checks the draft and may send it back once",
        agents="coordinator + researcher + reviewer, a fixed team",
        oracle="exact: menus, misreadings and slips of the check, 1,432 runs of a task",
    ),
    "plan-execute-v0": EnvRow(
        target="counterpoint.envs.plan:PlanExecute",
        about="a task in typed steps for a stack machine, tested on hidden lists",
        agents="planner + executor, a fixed team, or one agent alone",
        oracle="exact: menus and jams of the machine, 728 runs of a task",
    ),
    "ledger-v0": EnvRow(
        target="counterpoint.envs.ledger:Ledger",
        about="whom to spawn and to ask, how much, how to combine and when to stop, at a price",
        agents="coordinator + 0 to K researchers, spawned as it likes",
        oracle="exact: menus and misreadings, 1,297 runs of a task",
    ),
}
"""Versioned id → row; command line, docs and tests read it."""


def make(name: str, **options: Any) -> Env:
    """Build an environment by its id, or by `file.py:Class`.

    Raises:
        Refused: no such environment, or an option that it does not take.
    """
    target = ENVS[name].target if name in ENVS else name
    if name not in ENVS and ".py:" not in name:
        raise Refused(
            f"there is no environment {name!r}; there are {', '.join(ENVS) or 'none'}, "
            "and a class of your own is named file.py:Class"
        )
    found = load_target(target)
    try:
        inspect.signature(found).bind(**options)
        if name in ENVS:
            _typed(found, options)
    except TypeError as error:
        raise Refused(f"{name} cannot be made with these options: {error}") from None
    made = found(**options)
    if not isinstance(made, Env):
        raise Refused(f"{name} does not make an Env")
    return made


def _typed(found: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that is not of its declared type."""
    declared = get_type_hints(found.__init__)
    for option, value in options.items():
        try:
            msgspec.convert(value, declared.get(option, Any))
        except msgspec.ValidationError as error:
            raise TypeError(f"{option}: {error}") from None
