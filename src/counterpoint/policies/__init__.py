"""What acts: any callable from an observation to text, and a few that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from counterpoint.schema import Item
from counterpoint.streams import Draws
from counterpoint.tokens import written


class Shown(NamedTuple):
    """One turn of what an agent reads: a chat role (system, user, assistant), whose it is, text.

    `tokens` are the ids of a turn of its own, as they were stored when it was written; () if none
    were. A later prompt takes these and never encodes the text again.
    """

    role: str
    origin: str
    text: str
    tokens: tuple[int, ...] = ()


class Observation(NamedTuple):
    """What a policy sees, built from the `observe` event and the fold alone.

    Attributes:
        agent, role: who is to act.
        turns: what is new since its last act.
        anchor: key of the state before the action.
        turn: how many turns it has taken before this one.
        context: gives the whole context by the context rule, oldest first.
    """

    agent: str
    role: str
    turns: tuple[Shown, ...]
    anchor: str | None
    turn: int
    context: Callable[[], list[Shown]]

    @property
    def text(self) -> str:
        """The new turns as one text."""
        return "\n".join(turn.text for turn in self.turns)

    def messages(self) -> list[Shown]:
        """Everything the agent has before its eyes, the new turns last."""
        return self.context()


class Output(NamedTuple):
    """A turn. With `items` (an endpoint's tool calls) the text is never parsed.

    Items name no declined decisions (`no_message`): the harness adds those. `token_ids` are all
    that a model was fed and wrote in this turn; `mask` is True on what it wrote, and left out where
    it wrote them all. `logprobs` are 0 where it wrote nothing.
    """

    text: str
    items: Sequence[Item] | None = None
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    value: float | None = None
    mask: Sequence[bool] | None = None


def sizes(output: Output) -> tuple[int, int | None]:
    """Tokens that a turn wrote, and those that were fed, None where the output does not say.

    Words count where there are no tokens.
    """
    ids = output.token_ids or output.text.split()
    out = written(ids, output.mask)
    return out, None if output.mask is None else len(ids) - out


Menu = Mapping[str, str] | None
"""Label → text of a whole turn, in menu order; None where nothing is prescribed."""


class Policy(Protocol):
    """A callable from (observation, menu, draws) to a turn.

    It may also have `probs(observation, legal)` (one probability per menu entry, in order), which
    propensities need; and the attributes `target`, `version`, `params_digest` (what a header says
    of it), `deterministic` (the same observation, menu and draws give the same turn: chance comes
    from `draws` alone) and `trainable` (it learns). A plain function has none of them and counts
    as neither. With `many(observations, legals, draws)`, lists of one length, it answers several
    runs at once: a list of outputs, each what a call of its own would give.
    """

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> str | Output:
        """One turn."""


def described(policy: Any, name: str) -> Any:
    """An attribute that a policy may have, None where it has not."""
    return getattr(policy, name, None)
