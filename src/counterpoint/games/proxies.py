"""T9: what might be taken for the quality of an agent's work, beside the plays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from counterpoint import groups
from counterpoint.games.credit import alone
from counterpoint.games.plays import Plays
from counterpoint.groups import Floats
from counterpoint.quality import from_rows
from counterpoint.spelling import Refused


def _success(plays: Plays) -> Floats:
    success: Floats = (plays.action == 1).astype(np.float64)
    return success


def _so_far(plays: Plays) -> Floats:
    """What all who acted up to the row succeeded in: measured on work that others began."""
    before = np.cumsum(done := np.where(plays.steps.mask, _success(plays), 0.0))
    start = (before - done)[plays.steps.step == 0]
    so_far: Floats = before - start[plays.steps.rollout]
    return so_far


PROXIES: dict[str, Callable[[Plays, np.random.Generator], Floats]] = {
    "own": lambda plays, rng: alone(plays),
    "success": lambda plays, rng: _success(plays),
    "mediated": lambda plays, rng: _so_far(plays),
    "self_report": lambda plays, rng: rng.normal(0.9, 0.05, len(plays.steps)),
    "call_count": lambda plays, rng: rng.poisson(3.0, len(plays.steps)).astype(np.float64),
    "padding": lambda plays, rng: np.floor(rng.lognormal(5.0, 1.0, len(plays.steps))),
}
"""Name → q of every row. `own` is what the agent's act earns when all others take the null act,
`success` whether it took act 1, `mediated` how many up to it did; the others can be raised at will
and say nothing of the act: what the agent says of itself, how many calls it made, how many tokens
it wrote."""

CHECKED: dict[str, str] = {
    **dict.fromkeys(("own", "success", "mediated"), "executed"),
    "self_report": "self_report",
    **dict.fromkeys(("call_count", "padding"), "count"),
}
"""How each kind was checked, by the words of `quality.CHECKS`."""


def proxies(plays: Plays, kind: str, *, seed: int = 0) -> Floats:
    """(rows,) a proxy q of the quality of every act, one of `PROXIES`; NaN on rows of nature.

    Args:
        plays: of a game whose agents act once; T9 is made for it.
        kind: own, success, mediated, self_report, call_count or padding.
        seed: of the draws; the plays' own draws are no part of it.

    Raises:
        Refused: another kind, or what exact Shapley values are refused for.
    """
    if kind not in PROXIES:
        raise Refused(f"there is no proxy {kind!r}, only {', '.join(PROXIES)}")
    found = PROXIES[kind](plays, np.random.default_rng([seed, *kind.encode()]))
    return np.where(plays.steps.mask, found, np.nan)


def judged(plays: Plays, kind: str, *, error: float = 0.0, seed: int = 0) -> Plays:
    """The plays with a quality for every act, as `cad_grpo` reads it.

    An act descends from all that its agent could see, so q depends on every agent before it, unless
    the agent sees the same whatever they do. The quality of an agent that acts several times is the
    sum over its acts.

    Args:
        plays: as in `proxies`.
        kind: as in `proxies`.
        error: standard deviation of a normal error on q, in standard deviations of q.
        seed: of the proxy's draws and of the error.

    Raises:
        Refused: as `proxies`; an error that is no number from 0 up.
    """
    if not 0 <= error < np.inf:
        raise Refused(f"the error of a proxy is {error!r}; it is a number from 0 up")
    q = proxies(_by_act(plays), kind, seed=seed)
    spread = float(np.nanstd(q))
    q = q + error * spread * np.random.default_rng([seed, 1]).normal(size=len(q))
    steps, on = plays.steps, np.flatnonzero(plays.steps.mask)
    behind = _behind(plays, kind)
    cell = groups.pair(steps.rollout[on], steps.agent[on])
    quality = from_rows(
        groups.total(cell, q[on], int(cell.max()) + 1)[cell],
        steps.rollout[on],
        steps.agent[on],
        steps.names["agent"],
        verifiable=[CHECKED[kind]] * len(on),
        depends=[behind[agent] for agent in steps.agent[on].tolist()],
    )
    return replace(plays, steps=replace(steps, quality=quality))


def _by_act(plays: Plays) -> Plays:
    """The plays as if every act were an agent's of its own; as they are if nobody acts twice."""
    game, steps = plays.game, plays.steps
    taken = groups.pair(steps.rollout[steps.mask], steps.agent[steps.mask])
    if int(taken.max(initial=-1)) + 1 == len(taken):
        return plays
    depth, here = np.full(len(game.agent), -1), game.start
    while len(here):
        if depth[here].max() >= 0:
            raise Refused("an agent of this game acts twice, and the game has loops: no proxies")
        depth[here] = depth.max() + 1
        onward = np.unique(game.next[here])
        here = onward[onward >= 0]
    return replace(
        plays, game=replace(game, agent=depth), steps=replace(steps, agent=depth[plays.state])
    )


def _behind(plays: Plays, kind: str) -> list[list[int]]:
    """For each agent the agents whose acts its quality can descend from, itself among them."""
    game, acting = plays.game, _by_act(plays).game
    acts = np.flatnonzero(game.trainable)
    sights = np.unique(game.anchor[acts], return_index=True)[1]
    seen = np.bincount(acting.agent[acts[sights]], minlength=acting.agents)
    looks = (seen > len(game.start)) | (kind == "mediated")
    owner = np.zeros(acting.agents, dtype=np.int64)
    owner[acting.agent[acts]] = game.agent[acts]
    behind: list[set[int]] = [set() for _ in range(game.agents)]
    for act, agent in enumerate(owner.tolist()):
        behind[agent] |= set(owner[: act + 1].tolist()) if looks[act] else {agent}
    return [sorted(agents) for agents in behind]
