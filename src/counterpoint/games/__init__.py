"""Games whose credit is known exactly: a few arrays each, for testing what an estimator claims.

`deal` builds a game of the table, `play` samples it into `Steps`, `truth` says what every act was
worth, and `expected_gradient` what a method's estimate is on average, without sampling.
"""

from counterpoint.games.chains import chain
from counterpoint.games.credit import TRUTHS, truth
from counterpoint.games.game import (
    Game,
    action_values,
    optimal_value,
    policy_gradient,
    values,
)
from counterpoint.games.plays import (
    Plays,
    every,
    expected_gradient,
    gradient,
    play,
)
from counterpoint.games.proxies import PROXIES, judged, proxies
from counterpoint.games.table import GAMES, Row, deal

__all__ = [
    "GAMES",
    "PROXIES",
    "TRUTHS",
    "Game",
    "Plays",
    "Row",
    "action_values",
    "chain",
    "deal",
    "every",
    "expected_gradient",
    "gradient",
    "judged",
    "optimal_value",
    "play",
    "policy_gradient",
    "proxies",
    "truth",
    "values",
]
