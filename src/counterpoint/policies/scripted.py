"""Policies that do not learn: a function of the observation, or what a trace recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from counterpoint.policies import Menu, Observation, Output
from counterpoint.schema import Act
from counterpoint.spelling import Refused
from counterpoint.streams import Draws


class Scripted:
    """A policy that looks its turn up, without chance: for tests, demos and scripted cheats.

    Args:
        script: a function (observation, menu) → text, or a list of texts that are said in turn, the
            last one again and again.
        name: appears in headers as `scripted:NAME`.
    """

    deterministic = True
    trainable = False

    def __init__(
        self, script: Callable[[Observation, Menu], str] | Sequence[str], name: str = "script"
    ) -> None:
        self._script = script
        self.target = f"scripted:{name}"
        self.version = name

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> str | Output:
        """The scripted turn."""
        if callable(self._script):
            return self._script(observation, legal)
        said = sum(turn.role == "assistant" for turn in observation.messages())
        return self._script[min(said, len(self._script) - 1)]


class Recorded:
    """A policy that says again what an agent said in a trace, turn by turn."""

    deterministic = True
    trainable = False

    def __init__(self, acts: Sequence[Act]) -> None:
        self._acts: dict[str, list[Act]] = {}
        for act in acts:
            self._acts.setdefault(act.agent, []).append(act)

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """The recorded turn. Raises Refused when the trace holds no more of them."""
        said = sum(turn.role == "assistant" for turn in observation.messages())
        acts = self._acts.get(observation.agent, [])
        if said >= len(acts):
            raise Refused(f"the trace holds {len(acts)} acts of {observation.agent}, no more")
        act = acts[said]
        return Output(act.text or "", None, act.token_ids, act.logprobs, act.value)
