"""What a log can say about a decision, from the support that it has, and what it would take.

Whether an effect is identified is not read off a graph. It depends on which decisions were taken
and declined, with what probability, and on whether the runs can be run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from counterpoint import groups
from counterpoint.credit.account import Prices
from counterpoint.credit.protocols import Harness, Replay, places
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.vocabulary import DECISIONS

Propensity: TypeAlias = Literal["logged", "estimated"] | float
"""Where the probability of taking a decision comes from: the log, frequencies in the log, or an
experimenter who drew the arms with that probability."""

LEAST_CHANCE = 0.01
"""Probabilities of an arm below this leave too few of it to speak for all."""

LEAST_SAMPLE = 10.0
"""The least effective sample (Kish) of an arm."""

FORKS = 8
"""Branches of either arm that a remedy proposes."""

REASONS: dict[str, str] = {
    "no_decisions": "nobody in these runs could take it and is on record with taking or declining",
    "unscored": "no run in which it was decided has an outcome",
    "never_taken": "it was never taken, so nothing says what follows if it is",
    "never_declined": "it was always taken, so nothing says what follows if it is not",
    "no_propensity": "the log does not say with what probability it was taken",
    "no_overlap": "somewhere one choice had a probability below .01",
    "few": "a choice has an effective sample below 10",
}
"""Every reason for not being identified: code → what it means."""


class Identification(NamedTuple):
    """By what right the effect of a decision can be stated.

    Attributes:
        verb: which decision.
        kind: `randomised` (branches, or arms drawn by an experimenter), `overlap` (logged
            probabilities), `assumption:ignorability` (estimated ones), or `not`.
        reason: a code of `REASONS` if it is `not`, else None.
        would_identify: the cheapest remedy with its price if it is `not`, else None.
        taken, declined: how often, in scored runs.
        effective_taken, effective_declined: Kish's n of either, by inverse probabilities; NaN
            where there are none.
        least: the smallest probability of any choice; NaN where unknown.
    """

    verb: str
    kind: str
    reason: str | None
    would_identify: str | None
    taken: int
    declined: int
    effective_taken: float
    effective_declined: float
    least: float


_CALLED = {"message": "communicate"}
"""Methods that have another name than their verb."""


class Unidentified(Refused):
    """The log cannot answer; `found` says why, and what would."""

    def __init__(self, found: Identification) -> None:
        self.found = found
        super().__init__(
            f"{_CALLED.get(found.verb, found.verb)} needs more than this log holds: "
            f"{REASONS[found.reason or '']}; {found.would_identify}"
        )

    def as_dict(self) -> dict[str, Any]:
        """What a program is told."""
        found = self.found
        return {
            "identified": found.kind,
            "reason": found.reason,
            "would_identify": found.would_identify,
            "taken": found.taken,
            "declined": found.declined,
        }


class Decisions(NamedTuple):
    """The decisions of one verb in a table; all arrays are (decisions,).

    Attributes:
        unit: place among `steps.units("decision")`.
        row: the turn.
        taken: whether it was taken, not declined.
        chance: probability of taking it, NaN where nobody said.
        outcome: of the run.
    """

    unit: Ints
    row: Ints
    taken: Bools
    chance: Floats
    outcome: Floats

    def at(self, which: Bools) -> Decisions:
        """Some of them."""
        return Decisions(
            self.unit[which],
            self.row[which],
            self.taken[which],
            self.chance[which],
            self.outcome[which],
        )


def identify(
    steps: Steps,
    verb: str,
    *,
    replay: Replay | Harness | None = None,
    propensity: Propensity = "logged",
) -> Identification:
    """Say by what right the effect of a decision can be stated, if at all.

    A log identifies at most the average effect over the prefixes that it visited, if both choices
    had a chance everywhere (min(e, 1 − e) ≥ .01, Kish's n ≥ 10 in either arm) and e is what the
    decider went by. Runs that can be run again identify it at every single one.

    Source: Rosenbaum and Rubin (1983) for overlap and ignorability; Kish (1965) for n.

    Args:
        steps: from traces, whose decisions are items with a `logprob` each.
        verb: spawn, delegate, message, aggregate or stop.
        replay: what runs them again, if anything does.
        propensity: "logged", the items' probabilities; "estimated", frequencies by anchor (or over
            all, without anchors), which assumes ignorability; a number, with which an experimenter
            drew the arms.

    Raises:
        Refused: no such verb; steps without decisions, made from columns; a propensity that is no
            probability.
    """
    return identified(steps, decisions(steps, verb, propensity), verb, replay, propensity)


def identified(
    steps: Steps,
    made: Decisions,
    verb: str,
    replay: Replay | Harness | None,
    propensity: Propensity,
) -> Identification:
    """The same, of decisions that are already looked up."""
    scored = ~np.isnan(made.outcome)
    taken, chance = made.taken[scored], made.chance[scored]
    choice = np.where(taken, chance, 1 - chance)
    sizes = (kish(choice[taken]), kish(choice[~taken]))
    least = float(np.minimum(chance, 1 - chance).min()) if len(chance) else np.nan
    reason: str | None = None
    if not len(made.row):
        reason = "no_decisions"
    elif replay is None:
        reason = next((code for code, holds in _CHECKS.items() if holds(taken, least, sizes)), None)
    remedy = None if reason is None else _remedy(steps, made, verb, reason)
    kind = "randomised" if replay is not None else _KINDS.get(str(propensity), "randomised")
    return Identification(
        verb=verb,
        kind="not" if reason else kind,
        reason=reason,
        would_identify=remedy,
        taken=int(taken.sum()),
        declined=int((~taken).sum()),
        effective_taken=sizes[0],
        effective_declined=sizes[1],
        least=least,
    )


_KINDS = {"logged": "overlap", "estimated": "assumption:ignorability"}

_CHECKS: dict[str, Callable[[Bools, float, tuple[float, float]], bool]] = {
    "unscored": lambda taken, least, sizes: not len(taken),
    "never_taken": lambda taken, least, sizes: not taken.any(),
    "never_declined": lambda taken, least, sizes: bool(taken.all()),
    "no_propensity": lambda taken, least, sizes: bool(np.isnan(least)),
    "no_overlap": lambda taken, least, sizes: least < LEAST_CHANCE,
    "few": lambda taken, least, sizes: min(sizes) < LEAST_SAMPLE,
}
"""What makes a log unable to answer, in the order in which it is asked."""


def kish(choice: Floats) -> float:
    """(Σ w)²/Σ w² for the weights w = 1/choice: how many equal ones would say as much.

    NaN if a probability is missing or 0, 0 for none.
    """
    if not len(choice):
        return 0.0
    if not np.all(choice > 0):
        return float("nan")
    weight = 1 / choice
    return float(weight.sum() ** 2 / (weight @ weight))


def decisions(steps: Steps, verb: str, propensity: Propensity = "logged") -> Decisions:
    """The decisions of a verb on trainable turns, with the probability of taking each."""
    if verb not in DECISIONS:
        raise Refused(f"there is no decision {verb!r}; there are {', '.join(DECISIONS)}")
    units = steps.units("decision")
    known = units.names["label"]
    codes = [known.index(label) if label in known else -2 for label in (verb, f"no_{verb}")]
    unit = np.flatnonzero(np.isin(units.label, codes) & steps.mask[units.row])
    row, taken = units.row[unit], units.label[unit] == codes[0]
    said = np.exp(units.logprob[unit])
    chance = np.where(taken, said, 1 - said)
    if propensity == "estimated":
        chance = _frequency(steps, row, taken)
    elif not isinstance(propensity, str):
        if not 0 < propensity < 1:
            raise Refused(f"propensity is {propensity!r}; a probability lies between 0 and 1")
        chance = np.full(len(row), float(propensity))
    elif propensity != "logged":
        raise Refused(f"propensity is {propensity!r}; it is 'logged', 'estimated' or a number")
    return Decisions(unit, row, taken, chance, steps.outcome[row])


def _frequency(steps: Steps, row: Ints, taken: Bools) -> Floats:
    """How often the decision was taken where its agent saw the same."""
    cell = np.zeros(len(row), dtype=np.int64) if steps.anchor is None else steps.anchor[row] + 1
    n = int(cell.max(initial=-1)) + 1
    return groups.mean(cell, taken.astype(np.float64), n)[cell]


# ---------------------------------------------------------------------------------------------
# What would help


def _remedy(steps: Steps, made: Decisions, verb: str, reason: str) -> str:
    if not len(made.row):
        return (
            f"record runs of a team in which somebody may {verb}, with its probability as the "
            f"item's logprob, and fork {FORKS} branches of either choice where it is decided"
            f"{_usual(steps)}"
        )
    where, cost = _cheapest(steps, made)
    fork = f"fork {FORKS} branches of either choice at {where}, about {cost}"
    log = f"record runs by a policy that takes and declines {verb} with at least .01"
    return (
        f"{fork}; or, where runs cannot be played on from, {log}, with that probability as the "
        "item's logprob"
    )


def _cheapest(steps: Steps, made: Decisions) -> tuple[str, str]:
    """The decision after which least is left to play, and what its branches would cost."""
    at = places(steps, made.row)
    price = Prices(steps).of_branch(at, np.zeros(len(at), dtype=np.int64), "anew") * (2 * FORKS)
    best = int(np.argmin(price[:, 1] + price[:, 0] * 1e-6))
    name = steps.label("rollout", int(made.row[best]))
    return f"event {at[best, 1]} of {name}", _priced(price[best])


def _usual(steps: Steps) -> str:
    """What branches from the start of a run of these would cost, in words."""
    if not len(steps):
        return ""
    length = np.bincount(steps.rollout).mean() * 2 * FORKS
    tokens = steps.n_tokens.sum() / steps.n_rollouts * 2 * FORKS
    price = _priced(np.array([length, length, tokens]))
    return f", about {price} if its runs are as long as these"


def _priced(price: Floats) -> str:
    calls = f"{price[0]:.0f} environment calls, {price[1]:.0f} forward passes"
    return f"{calls}, {price[2]:.0f} tokens" if price[2] else calls
