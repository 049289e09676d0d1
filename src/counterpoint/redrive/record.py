"""What was said in a recorded run, turn by turn: by whom, from which menu, on seeing what."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from counterpoint.groups import Floats
from counterpoint.harness import Run
from counterpoint.harness.prompt import observation_of
from counterpoint.policies import Menu, Observation, Output, described
from counterpoint.redrive.standing import Along, Stage, Standing
from counterpoint.schema import Act, Observe
from counterpoint.spelling import CANONICAL, digest_of

PLACES = 64
"""Places of one run that are kept, each with the environment's state."""


class Said(NamedTuple):
    """One turn of a record.

    Attributes:
        act, role: what was said, and in which role.
        begin: seq of the observation that it was drawn from.
        menu: label → text; None where nothing was prescribed.
        probs: the policy's probability of each entry; None where it gives none.
        seen: digest of all that was before the agent's eyes.
    """

    act: Act
    role: str
    begin: int
    menu: Menu
    probs: Floats | None
    seen: bytes

    @property
    def texts(self) -> tuple[str, ...]:
        """The entries of the menu."""
        return tuple(self.menu.values()) if self.menu else ()

    def entry(self, text: str | None) -> int:
        """Which entry of the menu a text is; −1 for none of them."""
        return next((i for i, entry in enumerate(self.texts) if entry == text), -1)

    @property
    def output(self) -> Output:
        """The turn as its policy gave it."""
        act = self.act
        items = tuple(item for item in act.items if not item.verb.startswith("no_"))
        return Output(act.text or "", items, act.token_ids, act.logprobs, act.value)


class Record:
    """A recorded run that can be asked for its turns, and led to any of its events."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.along = Along(stage)
        self._places: dict[int, Standing] = {}

    def place(self, seq: int) -> Standing:
        """The run before event `seq`; the last few places are kept."""
        if seq not in self._places:
            if len(self._places) >= PLACES:
                self._places.pop(next(iter(self._places)))
            self._places[seq] = self.along.standing(seq)
        return self._places[seq]

    @cached_property
    def said(self) -> list[Said]:
        """All turns, in order; read from events alone, so that no tool runs."""
        stage, found = self.stage, []
        run = Run(stage.header, stage.env, stage.team)
        for event in stage.events:
            begin = run.world.control.observe
            if isinstance(event, Act) and begin is not None:
                seen = run.events[begin]
                assert isinstance(seen, Observe)
                found.append(self._turn(event, seen, observation_of(run, seen)))
            run.emit(event)
        return found

    @cached_property
    def turns(self) -> dict[tuple[str, int], Said]:
        """The turns by agent and how-manieth of that agent."""
        found: dict[tuple[str, int], Said] = {}
        counts: dict[str, int] = {}
        for each in self.said:
            agent = each.act.agent
            found[agent, counts.setdefault(agent, 0)] = each
            counts[agent] += 1
        return found

    def _turn(self, act: Act, seen: Observe, observation: Observation) -> Said:
        menu = None if seen.legal is None else dict(seen.legal)
        probs = described(self.stage.team.get(observation.role), "probs")
        return Said(
            act=act,
            role=observation.role,
            begin=seen.seq,
            menu=menu,
            probs=probs(observation, menu) if probs is not None and menu else None,
            seen=sight(observation, menu),
        )


def sight(observation: Observation, menu: Menu) -> bytes:
    """Digest of all that an agent has before its eyes when it acts, its own earlier turns too."""
    shown = [observation.role, observation.messages(), list((menu or {}).items())]
    return digest_of(CANONICAL.encode(shown))
