"""What was said in a recorded run, turn by turn: by whom, from which menu, on seeing what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias, cast

from counterpoint.groups import Floats
from counterpoint.harness import Run
from counterpoint.harness.prompt import observation_of
from counterpoint.policies import Menu, Observation, Output, described
from counterpoint.redrive.standing import Along, Stage, Standing
from counterpoint.schema import Act, Observe
from counterpoint.spelling import CANONICAL, digest_of

PLACES = 64
"""Places of one run that are kept, each with the environment's state."""


Turn: TypeAlias = tuple[str, int]
"""Whose turn, and the how-manieth of that agent."""


class Said(NamedTuple):
    """One turn of a record.

    Attributes:
        act, role: what was said, and in which role.
        begin: seq of the observation that it was drawn from.
        texts: the entries of the menu; none where nothing was prescribed.
    """

    act: Act
    role: str
    begin: int
    texts: tuple[str, ...]

    def entry(self, text: str | None) -> int:
        """Which entry of the menu a text is; −1 for none of them."""
        return next((i for i, entry in enumerate(self.texts) if entry == text), -1)

    @property
    def output(self) -> Output:
        """The turn as its policy gave it."""
        act = self.act
        items = tuple(item for item in act.items if not item.verb.startswith("no_"))
        return Output(act.text or "", items, act.token_ids, act.logprobs, act.value, act.mask)


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
    def said(self) -> dict[int, Said]:
        """All turns, by the seq of their act."""
        return {
            act.seq: Said(act, observation.role, begin, tuple((menu or {}).values()))
            for act, begin, observation, menu in self._observed()
        }

    @cached_property
    def turns(self) -> dict[Turn, Said]:
        """All turns, by whose they are."""
        return {
            (observation.agent, observation.turn): self.said[act.seq]
            for act, _, observation, _ in self._observed()
        }

    @cached_property
    def probs(self) -> dict[int, Floats | None]:
        """The policies' probabilities of each entry of the menus, by act; None where none are."""
        found: dict[int, Floats | None] = {}
        for act, _, observation, menu in self._observed():
            probs = described(self.stage.team.get(observation.role), "probs")
            found[act.seq] = probs(observation, menu) if probs is not None and menu else None
        return found

    @cached_property
    def seen(self) -> dict[Turn, bytes]:
        """What every agent had before its eyes at its turns."""
        return {
            (observation.agent, observation.turn): sight(observation, menu)
            for _, _, observation, menu in self._observed()
        }

    def _observed(self) -> Iterator[tuple[Act, int, Observation, Menu]]:
        """Each act with its observation, read from the events alone: no tool runs."""
        run = Run(self.stage.header, self.stage.env, self.stage.team)
        for event in self.stage.events:
            begin = run.world.control.observe
            if isinstance(event, Act) and begin is not None:
                shown = cast(Observe, run.events[begin])
                menu = None if shown.legal is None else dict(shown.legal)
                yield event, begin, observation_of(run, shown), menu
            run.emit(event)


def sight(observation: Observation, menu: Menu) -> bytes:
    """Digest of all that an agent has before its eyes when it acts, its own earlier turns too."""
    shown = [observation.role, observation.messages(), list((menu or {}).items())]
    return digest_of(CANONICAL.encode(shown))
