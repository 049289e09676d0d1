"""T9: what might be taken for the quality of an agent's work, beside the plays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from counterpoint.games.credit import alone
from counterpoint.games.plays import Plays
from counterpoint.groups import Floats
from counterpoint.spelling import Refused

PROXIES: dict[str, Callable[[Plays, np.random.Generator], Floats]] = {
    "own": lambda plays, rng: alone(plays),
    "self_report": lambda plays, rng: rng.normal(0.9, 0.05, len(plays.steps)),
    "call_count": lambda plays, rng: rng.poisson(3.0, len(plays.steps)).astype(np.float64),
    "padding": lambda plays, rng: np.floor(rng.lognormal(5.0, 1.0, len(plays.steps))),
}
"""Name → q of every row. `own` is what the agent's act earns when all others take the null act;
the others can be raised at will and say nothing of it: what the agent says of itself, how many
calls it made, how many tokens it wrote."""


def proxies(plays: Plays, kind: str, *, seed: int = 0) -> Floats:
    """(rows,) a proxy q of the quality of every act, one of `PROXIES`; NaN on rows of nature.

    Args:
        plays: of a game whose agents act once; T9 is made for it.
        kind: own, self_report, call_count or padding.
        seed: of the draws; the plays' own draws are no part of it.

    Raises:
        Refused: another kind, or what exact Shapley values are refused for.
    """
    if kind not in PROXIES:
        raise Refused(f"there is no proxy {kind!r}, only {', '.join(PROXIES)}")
    found = PROXIES[kind](plays, np.random.default_rng([seed, *kind.encode()]))
    return np.where(plays.steps.mask, found, np.nan)
