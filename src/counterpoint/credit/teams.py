"""Methods that compare an agent with its like: the same agent or role in the group's rollouts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.grouped import (
    Singleton,
    Spread,
    check_spread,
    compared,
    group_diagnostics,
    lone,
    n_rollouts,
    only_trainable,
    scaling,
    single,
    spread_over,
)
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.streams import Draws

By = Literal["agent", "role"]
Form = Literal["closed", "sampled"]


def dr_mas(
    steps: Steps,
    *,
    by: By = "agent",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
) -> Credit:
    """Agent-wise advantage: a call's outcome against all calls of the same agent in the group.

    Estimates `outcome`: Q(h, a) − V(h₀), on a scale of its own for every agent.

        A = (R − mean R) / (std R + eps)    over the calls of (group, agent)

    An agent that was called twice counts twice. R is the outcome of the row: where agents of a
    rollout have outcomes of their own (a penalty for one of them), each call has its agent's.

    Source: Dr.MAS (arXiv:2602.08847, eq. 9).

    Args:
        steps: rows with `group`, `rollout`, `agent` or `role`, `outcome`, `mask`; a call is a
            trainable row.
        by: "agent", or "role" where the ids of agents differ between rollouts.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what the only call of its agent gets: 0, its raw outcome, or an error.
        sigma_floor: calls whose outcomes spread at or below this have no signal: 0.

    Returns:
        Credit per turn with parts outcome, mean, std, n (calls compared). Masked rows and unscored
        rollouts are never credited (NaN) and count nowhere. `groups` and its kin count (group,
        agent); `effective_sample_size` rollouts with a call that was compared with others. If every
        agent acts once in every rollout, the credit is that of `grpo`. Empty steps give empty
        credit.

    Raises:
        Refused: an option out of range; an only call with singleton="error".

    Differs from the paper in dividing by n − 1, as its code does (`ddof=0` for the paper).
    """
    check_spread(True, ddof, eps, sigma_floor)
    cell = groups.pair(steps.group, _who(steps, by))
    calls = np.flatnonzero(steps.mask & ~np.isnan(steps.outcome))
    found = compared(steps.outcome, cell, calls, Spread(True, ddof, eps, sigma_floor))
    lone(steps, steps.outcome, found.advantage, single(cell, found.size), singleton)
    live = calls[found.alive[cell[calls]]]
    sample = n_rollouts(steps, live)
    return Credit(
        only_trainable(steps, found.advantage),
        estimand="outcome",
        parts=Parts({"outcome": steps.outcome}, found.about),
        diagnostics=group_diagnostics(steps, found.alive, found.size, sample),
    )


def m_grpo(
    steps: Steps,
    *,
    main: str | int | None = None,
    by: By = "role",
    form: Form = "closed",
    calls: int | None = None,
    seed: int = 0,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
) -> Credit:
    """Hierarchical GRPO: the main agent once a rollout, its sub-agents once a call.

    Estimates `outcome`: Q(h, a) − V(h₀), within the main agent and within each kind of sub-agent.

        main    A_k = (R_k − mean_k R) / (σ + eps)                   over the group's K rollouts
        sub     μ = mean_k mean_i R_ki,  σ² = mean_k mean_i (R_ki − μ)²,
                A_ki = (R_ki − μ) / (σ + eps)                        over the K⁺ rollouts that call

    A rollout that calls a sub-agent d_k times weighs as much as one that calls it once: call i has
    the weight 1/(K⁺ d_k), in the statistics and, as the part `loss_weight`, in the loss.

    Source: M-GRPO (arXiv:2511.13288, §3.2); standard deviations divide by n, as there.

    Args:
        steps: rows with `group`, `rollout`, `step`, `agent`, `role`, `outcome`, `mask`. A call is
            all turns of one agent between two turns of the main one; its reward is the `outcome` of
            the row, so calls that were judged apart are agents of their own, of one role.
        main: name of the main agent (or role, as `by` says); by default whoever takes the first
            turn of every rollout.
        by: what makes sub-agents comparable, and what `main` names: "role" or "agent".
        form: "closed" as above, or "sampled" as in the paper: the calls of each rollout are first
            brought to one number by random duplicates or drops.
        calls: that number, in the sampled form; by default the most that a rollout of the group
            makes, so that none is dropped.
        seed: of the sampled form. Draws belong to (group, rollout, sub-agent).
        eps: added to the standard deviation.
        singleton: what a call gets that has no other to be compared with: 0, its raw outcome, or an
            error.
        sigma_floor: calls whose outcomes spread at or below this have no signal: 0.

    Returns:
        Credit per turn with parts outcome, mean, std, n (calls compared), calls (d_k), loss_weight
        (0 for a call that the sampled form dropped). All turns of a call share them. Masked rows
        and unscored rollouts are never credited (NaN) and count nowhere; a rollout without calls
        has none to credit. `groups` and its kin count (group, agent or role);
        `effective_sample_size` rollouts with a call that was compared. Empty steps give empty
        credit.

    Raises:
        Refused: an option out of range; no such main agent; rollouts that open with different ones
            and `main` not given; a lone call with singleton="error".
    """
    check_spread(True, 0, eps, sigma_floor)
    if form not in ("closed", "sampled"):
        raise Refused(f"form is {form!r}; it is 'closed' or 'sampled'")
    if calls is not None and (form == "closed" or calls < 1):
        raise Refused(f"calls is {calls!r}; it is a number from 1 up, of form='sampled' only")
    who = _who(steps, by)
    code = _main(steps, who, main, by)
    made = _calls(steps, who, code)
    times = np.ones(len(made.row))
    if form == "sampled":
        times = _sampled(steps, made, who[made.row] == code, by, calls, seed)
    weight = times / (made.rollouts * groups.total(made.team, times, made.teams)[made.team])
    mu = groups.total(made.cell, weight * made.reward, made.cells)
    off = made.reward - mu[made.cell]
    sigma = np.sqrt(groups.total(made.cell, weight * off * off, made.cells))
    alive = sigma > sigma_floor
    size = groups.count(made.cell, made.cells)
    cell, mean = groups.pair(steps.group, who), np.where(size > 0, mu, np.nan)
    advantage = (steps.outcome - mu[cell]) * scaling(sigma, alive, eps)[cell] + 0.0
    lone(steps, steps.outcome, advantage, single(cell, size), singleton)
    live = made.row[alive[made.cell]]
    sample = n_rollouts(steps, live)
    return Credit(
        only_trainable(steps, advantage),
        estimand="outcome",
        parts=Parts(
            {"outcome": steps.outcome},
            spread_over(cell, {"mean": mean, "std": sigma, "n": size}),
            {
                "calls": lambda: made.on_rows(made.made),
                "loss_weight": lambda: made.on_rows(weight),
            },
        ),
        diagnostics=group_diagnostics(steps, alive, size, sample),
    )


def _who(steps: Steps, by: By) -> Ints:
    if by not in ("agent", "role"):
        raise Refused(f"by is {by!r}; it is 'agent' or 'role'")
    return steps.agent if by == "agent" else steps.role


def _main(steps: Steps, who: Ints, main: str | int | None, by: By) -> int:
    """Code of the main agent or role: the one that is named, or that opens every rollout."""
    known = steps.names[by]
    if main is not None:
        if main not in known:
            raise Refused(f"main is {main!r}, but column {by} holds {', '.join(map(repr, known))}")
        return known.index(main)
    opens = groups.first_of(steps.rollout, steps.order)
    first = who[opens]
    if len(first) and np.any(first != first[0]):
        row = int(opens[np.argmax(first != first[0])])
        raise Refused(
            f"row {row}: rollout {steps.label('rollout', row)!r} opens with {by} "
            f"{steps.label(by, row)!r}, others with {known[first[0]]!r}; name one with main="
        )
    return int(first[0]) if len(first) else 0


class _Calls(NamedTuple):
    """Calls of scored, trainable rows; every field but the last three has one entry per call.

    Attributes:
        row: first row of the call.
        reward: its outcome.
        cell: (group, agent or role) it is compared in.
        team: (rollout, agent or role): the calls that share a rollout's weight.
        made: d_k, calls of the team.
        rollouts: K⁺, teams of the cell.
        of: (rows,) number of each row's call, or −1.
        cells, teams: how many there are.
    """

    row: Ints
    reward: Floats
    cell: Ints
    team: Ints
    made: Floats
    rollouts: Floats
    of: Ints
    cells: int
    teams: int

    def on_rows(self, x: Floats) -> Floats:
        """Spread a value per call over its rows, NaN elsewhere."""
        return np.append(x, np.nan)[self.of]


def _calls(steps: Steps, who: Ints, main: int) -> _Calls:
    """Every call: all turns of an agent between two of the main one; the main's turns are one."""
    order = steps.order
    is_main = who == main
    cycle = np.empty(len(steps), dtype=np.int64)
    cycle[order] = np.cumsum(is_main[order]) + 1
    cycle[is_main] = 0
    actor = np.where(is_main, 0, steps.agent + 1)
    key = groups.pair(groups.pair(groups.pair(steps.rollout, who), actor), cycle)
    counted = steps.mask & ~np.isnan(steps.outcome)
    begins = np.zeros(len(steps), dtype=bool)
    begins[groups.first_of(key, order[counted[order]])] = True
    row = order[begins[order]]  # calls in the order in which they began, whatever the codes are
    place = np.full(int(key.max(initial=-1)) + 1, -1, dtype=np.int64)
    place[key[row]] = np.arange(len(row))
    cell, team = groups.pair(steps.group, who), groups.pair(steps.rollout, who)
    cells, teams = int(cell.max(initial=-1)) + 1, int(team.max(initial=-1)) + 1
    one_a_team = groups.first_of(team, row)
    return _Calls(
        row=row,
        reward=steps.outcome[row],
        cell=cell[row],
        team=team[row],
        made=groups.count(team[row], teams)[team[row]],
        rollouts=groups.count(cell[one_a_team], cells)[cell[row]],
        of=np.where(counted, place[key], -1),
        cells=cells,
        teams=teams,
    )


def _sampled(
    steps: Steps, made: _Calls, is_main: Bools, by: By, calls: int | None, seed: int
) -> Floats:
    """How often each call counts once every team of sub-agents has the same number of calls."""
    most = np.zeros(made.cells)
    np.maximum.at(most, made.cell, made.made)
    wanted = most[made.cell] if calls is None else np.where(is_main, 1.0, calls)
    times = np.ones(len(made.row))
    of_team = np.argsort(made.team, kind="stable")
    cuts = np.flatnonzero(np.diff(made.team[of_team])) + 1
    for own in np.split(of_team, cuts):
        if len(own) and wanted[own[0]] != len(own):
            row = int(made.row[own[0]])
            owner = repr([steps.label(column, row) for column in ("group", "rollout", by)])
            draws = Draws(str(seed), "schedule", owner, 0)
            times[own] = _multiplicity(len(own), int(wanted[own[0]]), draws)
    return times


def _multiplicity(have: int, want: int, draws: Draws) -> Ints:
    """How often each of `have` counts in a sample of `want`: all once and some again, or some not.

    Each has the same chance, so the mean over the sample is on average the mean over all.
    """
    if want >= have:
        again = [draws.integer(have) for _ in range(want - have)]
        return np.bincount(again, minlength=have) + 1 if again else np.ones(have, dtype=np.int64)
    left = list(range(have))
    taken = [left.pop(draws.integer(len(left))) for _ in range(want)]
    return np.bincount(taken, minlength=have)
