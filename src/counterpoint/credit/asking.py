"""What credit asks of policies where nothing is run: what they would choose, and how likely they
find what was chosen once they know how it ended.

A game's `Rerun` is both as it stands. A harness answers with tables over menus, or with forward
passes of its model; both count in the price of what asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from counterpoint.branches import Foreseen, Menu
from counterpoint.groups import Floats, Ints
from counterpoint.spelling import Refused

Hindsight: TypeAlias = Callable[[Ints, Floats], Floats]
"""(places, outcome) → log-probability of each act, with the outcome of its run in the prompt.

Places are those of `credit.protocols.places`: (n, 2), rows of `Steps.event`, or rollout and step.
What comes back is (n,), the mean over the tokens of the act; for an act that is one entry of a
menu, the logarithm of its probability."""


@runtime_checkable
class Foresight(Protocol):
    """Policies that say what they would choose, at places of the record and after them.

    What environments answer is not asked: acts lead on as whoever implements this knows or
    believes. All draws belong to (seed, place, number), and two acts put in at one place share
    theirs as far as they can.
    """

    def menu(self, places: Ints) -> Menu:
        """What could be chosen at (places, 2), with probabilities; costs nothing to speak of."""

    def foresee(
        self,
        places: Ints,
        action: Ints,
        n: int,
        *,
        agents: Sequence[Any],
        seed: int = 0,
    ) -> Foreseen:
        """Put an act in its place, let the policies choose all that follows, run nothing.

        Args:
            places: (places, 2); one may occur several times.
            action: (places,) an entry of the menu, or RESAMPLE or KEEP.
            n: continuations of each, numbered from 0.
            agents: names, as in `Steps.names["agent"]`; who acts is told by the place in this list.
            seed: of all draws.
        """


def foresight(policy: Foresight | None, name: str) -> Foresight:
    """The policies; Refused where there are none, or where they cannot foresee."""
    if policy is None:
        raise Refused(
            f"{name} needs policy=, policies that say what they would choose: a game "
            "(games.replaying), or something of yours with menu and foresee (credit.asking)"
        )
    if isinstance(policy, Foresight):
        return policy
    raise Refused(
        f"{name}: policy is {type(policy).__name__}, which has not menu and foresee (credit.asking)"
    )
