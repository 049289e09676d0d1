"""One game as arrays over its states, and its exact values.

In a state one agent acts, by a tabular softmax policy over what it sees of the state. The action
pays, and leads to the next state or to the end. Chains of agents, loops and stopping games are all
this one thing, so one recursion values them and one walker plays them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from counterpoint import groups
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused

_MOST_SWEEPS = 20_000
_NOWHERE = np.zeros(0, dtype=np.int64)
_ROUNDING = 4 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Game:
    """A team game as arrays over its states.

    Attributes:
        policy: (anchors, actions) π(a | o), rows sum to 1; the parameters are its logits θ.
        anchor: (states,) what the acting agent sees of the state. It is what the policy reads and
            what GiGPO may group by; states with one anchor alias.
        agent: (states,) who acts.
        reward: (states, actions) what the action pays.
        next: (states, actions) the state that follows, −1 for the end.
        start: (contexts,) first state of each context, ascending; contexts share no state.
        gamma: discount per turn, in (0, 1].
        noise: standard deviation of a normal error on the last reward of a play.
        nature: states in which no agent acts but chance, by its row of the policy: what a tool
            answers, or something that nobody knows. Plays show them as masked rows, which nobody
            is credited for or trained on. Their `agent` is a number of its own.

    Raises:
        Refused: shapes that do not fit, a policy that is no distribution, a next state that does
            not exist, a state from which the policy never reaches the end.
    """

    policy: Floats
    anchor: Ints
    agent: Ints
    reward: Floats
    next: Ints
    start: Ints
    gamma: float = 1.0
    noise: float = 0.0
    nature: Ints = field(default_factory=_NOWHERE.copy)

    def __post_init__(self) -> None:
        states, actions = self.reward.shape
        if self.next.shape != (states, actions) or self.policy.shape[1] != actions:
            raise Refused(
                f"a game of {states} states and {actions} actions has next of shape "
                f"{self.next.shape} and a policy over {self.policy.shape[1]} actions"
            )
        if self.policy.min() < 0 or not np.allclose(self.policy.sum(axis=1), 1, atol=1e-12):
            raise Refused("the policy of a game has a row that is no probability distribution")
        if self.next.min() < -1 or max(self.next.max(), self.nature.max(initial=0)) >= states:
            raise Refused(f"a game of {states} states leads to a state that does not exist")
        if not 0 < self.gamma <= 1:
            raise Refused(f"the game's gamma is {self.gamma:g}; it is above 0 and at most 1")
        if not self.noise >= 0:
            raise Refused(f"the game's noise is {self.noise:g}; a standard deviation is 0 or more")
        ends = _reaches_end(self)
        if not ends.all():
            state = int(np.argmin(ends))
            raise Refused(f"from state {state} the policy never reaches the end of the game")

    @property
    def probability(self) -> Floats:
        """(states, actions) π(a | what the agent sees of the state)."""
        return self.policy[self.anchor]

    @property
    def trainable(self) -> Bools:
        """(states,) whether an agent acts, and not nature."""
        mask = np.ones(len(self.reward), dtype=bool)
        mask[self.nature] = False
        return mask

    @property
    def agents(self) -> int:
        """How many agents there are; they are numbered from 0, nature is none of them."""
        return int(self.agent[self.trainable].max()) + 1


def _reaches_end(game: Game) -> Bools:
    ends = np.zeros(len(game.reward), dtype=bool)
    while True:
        after = (game.next < 0) | ends[game.next]
        more: Bools = np.any(after & (game.probability > 0), axis=1)
        if np.array_equal(more, ends):
            return ends
        ends = more


def values(game: Game) -> Floats:
    """(states,) exact V(h) = Σ_a π(a | h) Q(h, a), the expected discounted return from the state.

    Source: Bellman equation (Sutton and Barto, §3.5). Every prefix is visited once per turn of the
    longest play, so the cost is that of enumerating the game; loops converge to rounding.
    """
    pi = game.probability

    def sweep(v: Floats) -> Floats:
        mean: Floats = np.sum(pi * _backup(game, v), axis=1)
        return mean

    return _settle(sweep, np.zeros(len(pi)))


def action_values(game: Game) -> Floats:
    """(states, actions) exact Q(h, a) = r(h, a) + γ V(h'), with V = 0 after the end."""
    return _backup(game, values(game))


def optimal_value(game: Game) -> Floats:
    """(states,) V*(h) = max_a r(h, a) + γ V*(h'): the best that any policy over states can do.

    Source: value iteration (Sutton and Barto, §4.4); on T16 it is the value of optimal stopping.

    Raises:
        Refused: a loop that pays without discount, so that there is no best.
    """

    def sweep(v: Floats) -> Floats:
        best: Floats = _backup(game, v).max(axis=1)
        return best

    return _settle(sweep, np.zeros(len(game.reward)))


def policy_gradient(game: Game) -> Floats:
    """(anchors, actions) exact gradient of J = mean over contexts of V(h₀) in the policy's logits.

        ∂J/∂θ(o, b) = Σ_{h: o(h) = o} d(h) π(b | o) (Q(h, b) − V(h)),  d(h) = Σ_t γ^t P(h_t = h)

    Source: policy gradient theorem (Sutton et al., 1999) for softmax tables.
    """
    q, v = action_values(game), values(game)
    gain = visits(game, game.gamma)[:, None] * game.probability * (q - v[:, None])
    gain[game.nature] = 0.0
    return per_anchor(game, gain)


def visits(game: Game, gamma: float) -> Floats:
    """(states,) d(h) = Σ_t γ^t P(h_t = h), averaged over contexts; γ = 1 counts the visits."""
    states = len(game.reward)
    begin = np.bincount(game.start, minlength=states) / len(game.start)
    goes = game.next >= 0

    def sweep(d: Floats) -> Floats:
        moved = gamma * d[:, None] * game.probability
        return begin + groups.total(game.next[goes], moved[goes], states)

    return _settle(sweep, begin)


def per_anchor(game: Game, by_state: Floats) -> Floats:
    """(anchors, k) sums of a (states, k) array over the states that look alike."""
    out = np.zeros((len(game.policy), by_state.shape[1]))
    np.add.at(out, game.anchor, by_state)
    return out


def _backup(game: Game, v: Floats) -> Floats:
    return game.reward + game.gamma * np.where(game.next < 0, 0.0, v[game.next])


def _settle(sweep: Callable[[Floats], Floats], x: Floats) -> Floats:
    """Fixed point of `sweep`: reached after as many sweeps as a play has turns; loops converge."""
    for _ in range(_MOST_SWEEPS):
        new = sweep(x)
        if np.max(np.abs(new - x)) <= _ROUNDING * np.max(np.abs(new)):
            return new
        x = new
    raise Refused(
        f"the values of the game do not settle within {_MOST_SWEEPS} sweeps: a loop pays without "
        "discount, or hardly ever ends; lower gamma"
    )
