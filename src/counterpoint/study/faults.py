"""Faults planted in runs, one decision in each, and who is found to have made them.

A team that otherwise does the right thing slips at one known turn, with a chance of ½. Runs in
which it slipped have one culprit that nobody needs to argue about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from counterpoint.credit import blame, c3, grpo, loo, score
from counterpoint.envs import Env, make
from counterpoint.games import deal, play, truth
from counterpoint.games.replaying import Rerun
from counterpoint.groups import Floats, Ints
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies import Menu, Observation
from counterpoint.redrive import Branching, credits_of
from counterpoint.schema import Act, Observe, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.streams import Draws

SLIP = 0.5
"""How often the team slips where it can."""

NOTHING = {"coordinator": "none", "researcher": "return: nothing"}
"""What doing nothing is, by role."""

BLAMED = -1e-9
"""Credit below this blames somebody."""


class Slipping:
    """A policy that takes the first of its labels that the menu has, and slips at one of them.

    Args:
        labels: what it prefers, best first; without any of them it takes the menu's last entry.
        right: where it would take this label,
        wrong: it takes that one instead, if the menu has it,
        chance: with this chance.
    """

    deterministic = True
    trainable = True

    def __init__(
        self, labels: Sequence[str], right: str = "", wrong: str = "", chance: float = 0.0
    ) -> None:
        self._labels, self._right, self._wrong, self._chance = labels, right, wrong, chance
        self.version = f"{'/'.join(labels)}, {right} → {wrong}: {chance:g}"
        self.target = f"slipping:{self.version}"

    def probs(self, observation: Observation, legal: Menu) -> list[float]:
        """One probability per entry of the menu."""
        menu = list(legal or ())
        own = next((label for label in self._labels if label in menu), menu[-1])
        slips = self._chance if own == self._right and self._wrong in menu else 0.0
        chances = dict.fromkeys(menu, 0.0) | {own: 1.0 - slips}
        return list((chances | {self._wrong: slips} if slips else chances).values())

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> str:
        """The turn."""
        return list((legal or {}).values())[draws.choice(self.probs(observation, legal))]


class Kind(NamedTuple):
    """One kind of fault: where it is planted, and what is said instead of what.

    Attributes:
        about: what goes wrong, in words.
        env, options: the environment.
        team: labels that each role prefers.
        role: who slips.
        right, wrong: the label that it should take, and the one that it takes.
    """

    about: str
    env: str
    options: Mapping[str, Any]
    team: Mapping[str, Sequence[str]]
    role: str
    right: str
    wrong: str


_ONE = {
    "coordinator": ("spawn:0", "pass", "ask:0", "stop:lowest", "stop:sum"),
    "researcher": ("read", "tell:exact"),
}
_BOTH = _ONE | {"coordinator": ("spawn:0", "spawn:1", "ask:0+1", "stop:lowest")}
_FIRST = _ONE | {"coordinator": ("spawn:0", "spawn:1", "stop:lowest", "stop:sum", "ask:0")}
_THREE = _ONE | {
    "coordinator": ("spawn:0", "spawn:1", "spawn:2", "pass", "ask:0", "ask:1", "stop:lowest")
}
_READ = {"coordinator": ("ask:new", "answer:3"), "researcher": ("read:survey", "tell:3")}
_FREE = {"spawn_cost": 0.0}
_COSTLESS = {"spawn_cost": 0.0, "message_cost": 0.0, "read_cost": 0.0}
_POISON = {"inject": "document"}

KINDS: dict[str, Kind] = {
    "wrong content": Kind(
        "a researcher rounds what it read",
        "ledger-v0", {}, _ONE, "researcher", "tell:exact", "tell:rough",
    ),
    "omitted message": Kind(
        "a researcher hands nothing back", "ledger-v0", {}, _ONE, "researcher", "read", "skip",
    ),
    "wrong receiver": Kind(
        "the job goes to one who reads what is known",
        "ledger-v0", {**_FREE, "researchers": 4}, _THREE, "coordinator", "ask:1", "ask:2",
    ),
    "needless spawn": Kind(
        "a second researcher for a page that one can read",
        "ledger-v0", {}, _ONE, "coordinator", "pass", "spawn:1",
    ),
    "missing spawn": Kind(
        "nobody is hired", "ledger-v0", {}, _ONE, "coordinator", "spawn:0", "pass",
    ),
    "early stop": Kind(
        "the run is given up after hiring",
        "ledger-v0", {}, _ONE, "coordinator", "pass", "stop:unknown",
    ),
    "late stop": Kind(
        "more is asked for when the number is there",
        "ledger-v0", _FREE, _FIRST, "coordinator", "stop:sum", "ask:1",
    ),
    "wrong aggregation": Kind(
        "two readings of one page are added up",
        "ledger-v0", _COSTLESS, _BOTH, "coordinator", "stop:lowest", "stop:sum",
    ),
    "poisoned read": Kind(
        "an order in a document is obeyed",
        "research-v0", _POISON, _READ, "researcher", "tell:3", "tell:order",
    ),
    "ignored result": Kind(
        "what was read is not reported",
        "research-v0", {}, _READ, "researcher", "tell:3", "tell:nothing",
    ),
}  # fmt: skip
"""Name → fault."""

HARMLESS = Kind(
    "work is rated 4 instead of 3, which nobody acts on",
    "research-v0", {}, _READ, "researcher", "tell:3", "tell:4",
)  # fmt: skip
"""A change without effect."""

Replayed: TypeAlias = Callable[[Steps, Branching | Rerun], Credit]

METHODS: dict[str, Replayed] = {
    "blame": lambda steps, replay: blame(steps, replay=replay, n=8),
    "c3": lambda steps, replay: c3(steps, replay=replay, own=4),
    "loo": lambda steps, replay: loo(steps, replay=replay, n=2),
    "grpo": lambda steps, replay: grpo(steps),
}
"""Who is asked. The last one knows the outcomes of the group and nothing else."""


# ---------------------------------------------------------------------------------------------
# Runs


class Runs(NamedTuple):
    """Recorded runs of one kind: env and team, the table, and which row was planted in each."""

    traces: list[Trace]
    env: Env
    team: Mapping[str, Slipping]
    steps: Steps
    planted: Ints

    @property
    def replay(self) -> Branching:
        """What runs them again."""
        return Branching(self.traces, self.env, self.team, null=NOTHING)

    @property
    def exact(self) -> Floats:
        """(rows,) seqau of every act, by listing."""
        found = credits_of(self.traces, self.env, self.team)
        return np.array([act.seqau for acts in found for act in acts])


def recorded(kind: Kind, runs: int, *, seed: int = 0, chance: float = SLIP, **dials: float) -> Runs:
    """Runs of a team that slips with a chance, until `runs` slipped; none slip at chance 0.

    Args:
        kind: what is planted.
        runs: how many are kept: those that slipped, and at chance 0 all.
        seed: of tasks and runs.
        chance: of slipping.
        **dials: of the environment, over those of the kind.
    """
    env = make(kind.env, **{**kind.options, **dials})
    team = {
        role: Slipping(labels, *((kind.right, kind.wrong, chance) if role == kind.role else ()))
        for role, labels in kind.team.items()
    }
    played = rollout(env, team, groups=1, rollouts=4 * runs + 8, seed=seed)
    kept = [trace for trace in played if not chance or _planted(trace, kind)][:runs]
    steps = Steps.from_traces(kept)
    seqs = [(number, seq) for number, trace in enumerate(kept) for seq in _planted(trace, kind)]
    place = {tuple(at): row for row, at in enumerate(cast(Ints, steps.event).tolist())}
    return Runs(kept, env, team, steps, np.array([place[at] for at in seqs], dtype=np.int64))


def _planted(trace: Trace, kind: Kind) -> list[int]:
    """Seqs of the acts that took the wrong label where the right one was there."""
    found = []
    for event in trace.of("act"):
        menu = dict(cast(Observe, trace[event.causes[0].seq]).legal or ())
        wrong = menu.get(kind.wrong) if kind.right in menu else None
        if wrong is not None and cast(Act, event).text == wrong:
            found.append(event.seq)
    return found


# ---------------------------------------------------------------------------------------------
# Who is found


def found_by(credit: Floats, steps: Steps, planted: Ints) -> float:
    """Share of the runs in which the planted act has the lowest credit; ties count as a guess."""
    guilty = np.where(np.isin(np.arange(len(steps)), planted), -1.0, 0.0)
    return score(Credit(credit), Credit(guilty), rollout=steps.rollout).culprit


def floors(steps: Steps, planted: Ints) -> dict[str, float]:
    """What naming the first act of every run, or the last, would find."""
    length = np.bincount(steps.rollout)[steps.rollout]
    return {
        "first act": found_by(np.where(steps.step == 0, -1.0, 0.0), steps, planted),
        "last act": found_by(np.where(steps.step == length - 1, -1.0, 0.0), steps, planted),
    }


def detected(runs: int, seed: int = 0) -> list[dict[str, Any]]:
    """For each kind, the exact worth of what was planted, and how often who finds it."""
    rows = []
    for name, kind in KINDS.items():
        found = recorded(kind, runs, seed=seed)
        exact, replay = found.exact, found.replay
        rows.append(
            {
                "fault": name,
                "what goes wrong": kind.about,
                "runs": len(found.traces),
                "worth": float(exact[found.planted].mean()),
                "exact": found_by(exact, found.steps, found.planted),
                **{
                    method: found_by(ask(found.steps, replay).values, found.steps, found.planted)
                    for method, ask in METHODS.items()
                },
                **floors(found.steps, found.planted),
            }
        )
    return rows


def relayed(plays: int, seed: int = 0) -> list[dict[str, Any]]:
    """The same on T12, where an error may be repaired: runs that failed, and runs that did not."""
    game = deal("T12", contexts=20, seed=seed)
    played = play(game, groups=20, rollouts=plays // 20, seed=seed)
    steps, broke = played.steps, played.action == 1
    erred = np.zeros(steps.n_rollouts, dtype=bool)
    erred[steps.rollout[broke]] = True
    credited = {"exact": truth(played).values} | {
        method: ask(steps, Rerun(played)).values for method, ask in METHODS.items()
    }
    rows = []
    for name, outcome in (("not repaired", 0.0), ("repaired", 1.0)):
        kept = erred[steps.rollout] & (steps.outcome == outcome)
        planted = np.flatnonzero(broke & kept)
        rows.append(
            {"T12, the error was": name, "runs": len(planted)}
            | {
                method: found_by(np.where(kept, values, np.nan), steps, planted)
                for method, values in credited.items()
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------
# Nobody is to be found


def control(
    runs: int, methods: Mapping[str, Replayed] = METHODS, seed: int = 0
) -> list[dict[str, Any]]:
    """Runs without a fault: nothing was planted, or what was planted changes nothing.

    Chance in reading is off, so that whoever blames somebody there has no excuse.

    Raises:
        Refused: somebody was blamed; the sentence says who, by whom, and for how much.
    """
    rows = []
    for name, kind, chance in _CONTROLS:
        found = recorded(kind, runs, seed=seed, chance=chance, noise=0.0)
        exact, replay = found.exact, found.replay
        least = {"exact": float(exact.min())} | {
            method: float(np.nanmin(ask(found.steps, replay).values))
            for method, ask in methods.items()
        }
        for method, lowest in least.items():
            if lowest < BLAMED:
                raise Refused(
                    f"the control of the proof failed: {method} blames somebody for {lowest:.3g} "
                    f"in runs of “{name}”, in which nobody did any harm"
                )
        rows.append({"control": name, "runs": len(found.traces), **least})
    return rows


_CONTROLS = [
    *((f"{name}, not planted", kind, 0.0) for name, kind in KINDS.items()),
    (HARMLESS.about, HARMLESS, SLIP),
]
