"""Critics: generalised advantage estimation, with values given or fitted on anchors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.anchors import KEY, anchor_groups, sample_sizes
from counterpoint.credit.grouped import group_diagnostics
from counterpoint.credit.returns import (
    MaskedReward,
    check_fraction,
    in_scored_rollout,
    on_rows,
    rewards,
    scan,
    values_given,
    whitened,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Values = Literal["given", "mc", "td"]
Who = Literal["team", "agent"]

_SWEEPS = 10_000
_SETTLED = 1e-12


def gae(
    steps: Steps,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    whiten: bool = False,
    values: Values = "given",
    critic: Who = "team",
    bootstrap: bool = False,
    masked_reward: MaskedReward = "previous",
    sigma_floor: float = 1e-6,
) -> Credit:
    """Generalised advantage estimation: a critic's surprise, summed over what followed.

    With the true V(h) of the team it estimates `seqau`: Q(h, a) − V(h), whatever λ is. A critic
    fitted on anchors in the same batch estimates `anchor`: Q(o, a) − V(o), and so does one that
    looks at a single agent's turns. A centralised critic, as in MAPPO, is `critic="team"` with
    values of the whole team's state in the column `value`, the same critic for every agent.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = δ_t + γλ A_{t+1},    return = A + V

    Source: Schulman et al. 2016 (arXiv:1506.02438, eq. 16); λ = .95 is the value that trainers use
    by default. Fitted: Monte Carlo and TD(λ), Sutton and Barto 2018, §5.1 and §12.2.

    Args:
        steps: rows with `rollout`, `step`, `reward`, `mask`, and `value` or `anchor`.
        gamma: factor per trainable turn, 0 to 1.
        gae_lambda: λ, 0 to 1: 0 is δ, 1 is the return minus V.
        whiten: subtract the mean of all credited turns and divide by √(variance + 1e-8), with n − 1
            in the variance.
        values: "given": the column `value`. "mc": the mean return of the turns at the same anchor
            of the group, of the same agent and role. "td": the fixed point of TD(λ) there.
        critic: "team": the next value is that of the rollout's next trainable turn, whoever takes
            it. "agent": of the agent's own next turn; rewards in between, and γ once per trainable
            turn in between, enter δ, so that λ = 1 is the return minus V for everyone.
        bootstrap: go on after the last trainable turn with the value of the rollout's last row, if
            that row is masked and has one: the state in which a truncated rollout was cut. By
            default nothing follows.
        masked_reward: where a reward on a masked row goes: "previous", "drop" or "error".
        sigma_floor: a group whose outcomes spread at or below this counts as without signal.

    Returns:
        Credit per turn with parts delta, value, next_value, gae (before whitening), return. Masked
        rows and unscored rollouts are never credited (NaN), and inserting them changes nothing.
        `effective_sample_size` counts scored rollouts; with fitted values it counts anchor groups
        with two different rollouts or more. Empty steps give empty credit.

    Raises:
        Refused: an option out of range; no values, or a trainable row without one; no anchors to
            fit on; fewer than two turns to whiten; TD(λ) that does not settle.
    """
    _check(gamma, gae_lambda, values, critic, bootstrap)
    chain = chain_of(steps, gamma, critic, masked_reward)
    if values == "given":
        V = values_given(steps).take(chain.rows)
    else:
        cell = anchor_groups(steps, KEY)[-1].take(chain.rows)
        V = _monte_carlo(chain, cell) if values == "mc" else _td(chain, cell, gae_lambda)
    after = following(V, chain)
    ahead = chain.decay * after
    if bootstrap:
        cut = _cut_values(steps, chain)
        after, ahead = np.where(chain.last, cut, after), np.where(chain.last, gamma * cut, ahead)
    ahead += chain.reward
    ahead -= V
    A = scan(ahead, chain.decay, gae_lambda)
    made = {"delta": ahead, "value": V, "next_value": after, "gae": A}

    def part(name: str) -> Callable[[], Floats]:
        return lambda: on_rows(steps, chain.rows, made[name])

    return Credit(
        on_rows(steps, chain.rows, _whitened(steps, chain, A) if whiten else A),
        estimand="seqau" if values == "given" and critic == "team" else "anchor",
        identified="assumption:true_value" if values == "given" else "heuristic",
        parts=Parts(
            {name: part(name) for name in made},
            {"return": lambda: on_rows(steps, chain.rows, A + V)},
        ),
        diagnostics=_diagnostics(steps, values, sigma_floor),
    )


class Chain(NamedTuple):
    """Turns in an order in which each is followed by the turn whose value it looks at.

    Each field has shape (trainable rows of scored rollouts,): the row of the table, the reward up
    to the next turn, the discount to it (0 after the last), and whether it is the last.
    """

    rows: Ints
    reward: Floats
    decay: Floats
    last: Bools


def chain_of(steps: Steps, gamma: float, critic: Who, masked_reward: MaskedReward) -> Chain:
    """The trainable turns of scored rollouts, each followed by the one that its critic looks at."""
    reward = rewards(steps, masked_reward)
    rows, last = steps.trainable, ~steps.goes_on
    if len(steps.unscored):
        kept = in_scored_rollout(steps)[rows]
        rows, reward, last = rows[kept], reward[kept], last[kept]
    decay = np.where(last, 0.0, gamma)
    if critic == "team":
        return Chain(rows, reward, decay, last)
    G = scan(reward, decay)
    actor = groups.pair(steps.rollout[rows], steps.agent[rows])
    own = np.argsort(actor, kind="stable")
    ends = ~groups.same_as_next(actor[own])
    turns = np.diff(own, append=0)
    decay = np.where(ends, 0.0, gamma ** np.where(ends, 0, turns))
    reward = G[own] - decay * np.roll(G[own], -1)
    return Chain(rows[own], reward, decay, ends)


def following(x: Floats, chain: Chain) -> Floats:
    """The following turn's `x`, 0 after the last."""
    out = np.append(x[1:], x[:1])
    out[chain.last] = 0.0
    return out


def _monte_carlo(chain: Chain, cell: Ints) -> Floats:
    """Mean return of the turns at each turn's anchor."""
    G = scan(chain.reward, chain.decay)
    return groups.mean(cell, G, int(cell.max(initial=-1)) + 1).take(cell)


def _td(chain: Chain, cell: Ints, gae_lambda: float) -> Floats:
    """The values at which every anchor's value is the mean of its turns' λ-returns."""
    n = int(cell.max(initial=-1)) + 1
    V = np.zeros(len(cell))
    for _ in range(_SWEEPS):
        delta = chain.reward + chain.decay * following(V, chain) - V
        new = groups.mean(cell, V + scan(delta, chain.decay, gae_lambda), n).take(cell)
        moved = np.abs(new - V).max(initial=0.0)
        V = new
        if moved <= _SETTLED * max(1.0, np.abs(V).max(initial=0.0)):
            return V
    raise Refused(
        f"TD(λ) still moves by {moved:.2g} after {_SWEEPS} sweeps; "
        "raise gae_lambda, lower gamma, or fit values='mc'"
    )


def _cut_values(steps: Steps, chain: Chain) -> Floats:
    """Value of the rollout's last row where that is masked and has one, else 0."""
    final = np.zeros(steps.n_rollouts, dtype=np.int64)
    final[steps.rollout[steps.order]] = steps.order
    value: Floats = np.where(steps.mask, 0.0, np.nan_to_num(steps.need("value")))
    return value.take(final.take(steps.rollout[chain.rows]))


def _whitened(steps: Steps, chain: Chain, A: Floats) -> Floats:
    """Zero mean and unit variance over the credited turns."""
    if not len(steps.unscored):
        return whitened(A)[0]
    credited = ~np.isnan(steps.outcome[chain.rows])
    out = np.full(len(A), np.nan)
    out[credited] = whitened(A[credited])[0]
    return out


def _diagnostics(steps: Steps, values: Values, sigma_floor: float) -> dict[str, float]:
    _, sigma, scored = steps.moments(steps.outcome)
    about = group_diagnostics(steps, sigma > sigma_floor, scored, int(scored.sum()), compares=False)
    if values != "given":
        counted = steps.mask & ~np.isnan(steps.outcome)
        about |= sample_sizes(steps, counted, anchor_groups(steps, KEY))
        about["effective_sample_size"] = about.pop("effective_sample_size_step")
    return about


def _check(gamma: float, gae_lambda: float, values: str, critic: str, bootstrap: bool) -> None:
    check_fraction(gamma=gamma, gae_lambda=gae_lambda)
    if values not in ("given", "mc", "td"):
        raise Refused(f"values is {values!r}; it is 'given', 'mc' or 'td'")
    if critic not in ("team", "agent"):
        raise Refused(f"critic is {critic!r}; it is 'team' or 'agent'")
    if bootstrap and (values != "given" or critic == "agent"):
        raise Refused("bootstrap goes with values='given' and critic='team' only")
