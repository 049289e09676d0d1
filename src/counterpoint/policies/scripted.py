"""Policies that do not learn: a function of the observation, or what a trace recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from counterpoint.policies import Menu, Observation, Output
from counterpoint.schema import Act, Event
from counterpoint.spelling import Refused
from counterpoint.streams import Draws
from counterpoint.vocabulary import DECISIONS

_DECLINED = frozenset(f"no_{verb}" for verb in DECISIONS)


class Scripted:
    """A policy that looks its turn up, without chance: for tests, demos and scripted cheats.

    Args:
        script: a function (observation, menu) → text, or a list of texts that are said in turn, the
            last one again and again.
        name: appears in headers as `scripted:NAME`.

    Raises:
        Refused: the list is empty.
    """

    deterministic = True
    trainable = False

    def __init__(
        self,
        script: Callable[[Observation, Menu], str | Output] | Sequence[str],
        name: str = "script",
    ) -> None:
        if not callable(script) and not script:
            raise Refused("a script needs at least one text to say")
        self._script = script
        self.target = f"scripted:{name}"
        self.version = name

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> str | Output:
        """The scripted turn."""
        if callable(self._script):
            return self._script(observation, legal)
        return self._script[min(observation.turn, len(self._script) - 1)]


class Recorded:
    """A policy that says again what an agent said in a trace, turn by turn.

    Args:
        events: the events of the trace; all but the acts are left out.
        name: appears in headers as `recorded:NAME`.
    """

    deterministic = True
    trainable = False

    def __init__(self, events: Iterable[Event], name: str = "trace") -> None:
        self._acts: dict[str, list[Act]] = {}
        for event in events:
            if isinstance(event, Act):
                self._acts.setdefault(event.agent, []).append(event)
        self.target = f"recorded:{name}"
        self.version = name

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """The recorded turn. Raises Refused when the trace holds no more of them."""
        acts = self._acts.get(observation.agent, [])
        if observation.turn >= len(acts):
            raise Refused(f"the trace holds {len(acts)} acts of {observation.agent}, no more")
        act = acts[observation.turn]
        items = tuple(item for item in act.items if item.verb not in _DECLINED)
        return Output(act.text or "", items, act.token_ids, act.logprobs, act.value, act.mask)
