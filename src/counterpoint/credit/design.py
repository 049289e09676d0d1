"""What a regression on proxies sees: one row per rollout, one q per player, and who moves whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit.regression import within
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.quality import CHECKS, Quality
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.vocabulary import EXECUTED

By = Literal["agent", "role"]


class Proxy(NamedTuple):
    """The q of one player: its channel, or None where it has none that may be used, how it was
    checked (a name of `CHECKS`), how often that check errs, and in how many of the compared
    rollouts the player acted without being scored on it.
    """

    player: Any
    channel: str | None
    check: str
    error_rate: float
    missing: int


class Design(NamedTuple):
    """The regression problem. A cell is a scored, trainable rollout; a player an agent or a role.

    Attributes:
        cell: (rows,) cell of each row of the steps, −1 where its rollout is none.
        player: (rows,) code of who acted.
        proxies: one for each player.
        q: (cells, players) the proxies, NaN where there is none.
        acts: (cells, players) whether the player has a trainable turn in the rollout.
        raw: (cells, columns) the regressors: q with 0 for a missing one, then one presence column
            for each player whose q is missing in some cells and not in others.
        owner: (columns,) whose column it is.
        X, y: the regressors and the outcome within groups.
        group, task: (cells,) codes.
        depends: (players, players) whether the q of the first descends from an event of the second;
            None where the columns do not say.
    """

    cell: Ints
    player: Ints
    proxies: tuple[Proxy, ...]
    q: Floats
    acts: Bools
    raw: Floats
    owner: Ints
    X: Floats
    y: Floats
    group: Ints
    task: Ints
    depends: Bools | None


def design(
    steps: Steps, by: By, channels: Sequence[str] | None, checked_only: bool = False
) -> Design:
    """Lay rollouts out for a regression of outcomes on proxies.

    Args:
        steps: with `quality`.
        by: whether q is per agent, or per role, as the mean of its agents' q in the rollout.
        channels: of the channels that a player has, the first of these; by default the one that
            was checked best, in the order of `CHECKS`.
        checked_only: leave out what nobody executed or looked up.

    Raises:
        Refused: no quality; an unknown `by`; agents of one rollout with outcomes of their own.
    """
    quality: Quality = steps.need("quality")
    if by not in ("agent", "role"):
        raise Refused(f"by is {by!r}; it is 'agent' or 'role'")
    if steps.cell is not steps.rollout:
        raise Refused(
            "the agents of a rollout have outcomes of their own; what is shared out here is one "
            "outcome of the team"
        )
    player: Ints = getattr(steps, by)
    names = steps.names[by]
    heads = steps.picked(steps.outcome)
    of_rollout = np.full(steps.n_rollouts, -1, dtype=np.int64)
    of_rollout[steps.rollout[heads]] = np.arange(len(heads))
    cell = of_rollout[steps.rollout]
    acts = np.zeros((len(heads), len(names)), dtype=bool)
    on = steps.mask & (cell >= 0)
    acts[cell[on], player[on]] = True
    proxies, q, used = _proxies(steps, quality, by, channels, checked_only, of_rollout, acts)
    there = ~np.isnan(q)
    partial = np.flatnonzero(there.any(axis=0) & ~there.all(axis=0))
    raw = np.concatenate([np.nan_to_num(q), there[:, partial].astype(np.float64)], axis=1)
    group = steps.group[heads]
    return Design(
        cell=cell,
        player=player,
        proxies=proxies,
        q=q,
        acts=acts,
        raw=raw,
        owner=np.concatenate([np.arange(len(names)), partial]),
        X=within(group, raw, steps.n_groups),
        y=within(group, steps.outcome[heads], steps.n_groups),
        group=group,
        task=steps.task[heads],
        depends=_depends(steps, quality, by, used),
    )


def _players(steps: Steps, quality: Quality, by: By) -> Ints:
    """(rows of quality,) whose each is; −1 where the agent has no turn in the rollout."""
    if by == "agent":
        return quality.agent
    width = len(steps.names["agent"])
    key = steps.rollout * width + steps.agent
    known, first = np.unique(key, return_index=True)
    asked = quality.rollout * width + quality.agent
    place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[place] == asked, steps.role[first[place]], -1)


def _proxies(
    steps: Steps,
    quality: Quality,
    by: By,
    channels: Sequence[str] | None,
    checked_only: bool,
    of_rollout: Ints,
    acts: Bools,
) -> tuple[tuple[Proxy, ...], Floats, list[Ints]]:
    """The proxy of each player, its values (cells, players), and the rows of quality it uses."""
    players = _players(steps, quality, by)
    cell = of_rollout[quality.rollout]
    scored = (cell >= 0) & ~np.isnan(quality.value) & (players >= 0)
    of, begin = _by_player(players, acts.shape[1])
    q = np.full(acts.shape, np.nan)
    used: list[Ints] = []
    proxies = []
    for code, label in enumerate(steps.names[by]):
        own = of[begin[code] : begin[code + 1]]
        there = own[scored[own]]
        channel = _chosen(quality, there, channels, checked_only)
        if channel is None:
            proxies.append(Proxy(label, None, "unsaid", float("nan"), int(acts[:, code].sum())))
            used.append(own[:0])
            continue
        used.append(own[quality.channel[own] == channel])
        rows = there[quality.channel[there] == channel]
        q[:, code] = groups.mean(cell[rows], quality.value[rows], len(q))
        rates = quality.error_rate[rows]
        proxies.append(
            Proxy(
                label,
                quality.channels[channel],
                CHECKS[quality.verifiable[rows].max()],
                float(np.nanmax(rates)) if (~np.isnan(rates)).any() else float("nan"),
                int(np.count_nonzero(acts[:, code] & np.isnan(q[:, code]))),
            )
        )
    return tuple(proxies), q, used


def _by_player(players: Ints, n: int) -> tuple[Ints, Ints]:
    """Rows sorted by player, and where each of `n` players begins; rows of none stand first."""
    order = np.argsort(players, kind="stable")
    return order, np.searchsorted(players[order], np.arange(n + 1))


def _chosen(
    quality: Quality, rows: Ints, channels: Sequence[str] | None, checked_only: bool
) -> int | None:
    """Code of the channel whose rows are used, None where there is none that may be."""
    there = np.unique(quality.channel[rows]).tolist()
    ranks = {
        code: int(quality.verifiable[rows[quality.channel[rows] == code]].max()) for code in there
    }
    if checked_only:
        ranks = {code: rank for code, rank in ranks.items() if CHECKS[rank] in EXECUTED}
    if channels is not None:
        order = {name: place for place, name in enumerate(channels)}
        ranks = {
            code: order[quality.channels[code]] for code in ranks if quality.channels[code] in order
        }
    return min(ranks, key=lambda code: (ranks[code], quality.channels[code]), default=None)


def _depends(steps: Steps, quality: Quality, by: By, used: list[Ints]) -> Bools | None:
    """Over all rollouts together: an influence that one rollout shows could be there in any."""
    if quality.depends is None:
        return None
    agents = np.zeros((len(steps.names["agent"]), len(steps.names[by])), dtype=bool)
    agents[steps.agent, getattr(steps, by)] = True
    behind = np.array([quality.depends[rows].any(axis=0) for rows in used])
    moved: Bools = (behind.reshape(len(used), len(agents)).astype(int) @ agents.astype(int)) > 0
    return moved


def by_owner(held: Design, columns: Floats) -> Floats:
    """(cells, players) sums of the columns that are a player's."""
    own = columns[:, : held.q.shape[1]].copy()
    for at in range(own.shape[1], columns.shape[1]):
        own[:, held.owner[at]] += columns[:, at]
    return own
