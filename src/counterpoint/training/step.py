"""One update, whatever the policies are: who moves, by which rows, and what a step is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.policies import described
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Loss: TypeAlias = Literal["reinforce", "clip"]
Stale: TypeAlias = Literal["refuse", "skip", "use"]

TRACES_NAMED = 3
"""How many traces a refusal names."""


class Rule(NamedTuple):
    """What is climbed: a loss, and what is added to it."""

    lr: float
    loss: Loss
    epochs: int
    clip_low: float
    clip_high: float
    kl: float
    entropy: float
    max_norm: float | None
    stale: Stale


class Rows(NamedTuple):
    """The rows that move one policy, and what they bring.

    Attributes:
        steps: the whole table.
        at: (n,) rows of it.
        advantage: (n,) what each earned.
        reference: the policy that it is held to, or None.
    """

    steps: Steps
    at: Ints
    advantage: Floats
    reference: Any


Terms: TypeAlias = dict[str, tuple[float, int]]
"""Name → (sum over what is counted, how many); `loss` is a sum alone, over groups."""


class Slope(NamedTuple):
    """What one policy says of a step before it is taken.

    Attributes:
        square: squared Euclidean length of its gradient.
        terms: what is reported.
        unsound: rows whose own part of the loss is no finite number.
    """

    square: float
    terms: Terms
    unsound: Ints


class Learner(Protocol):
    """A policy on its way: it is the old one for everybody else until `install`."""

    def slope(self, rule: Rule) -> Slope:
        """The gradient where it stands now, kept for `move`."""

    def move(self, lr: float, scale: float) -> None:
        """Go a step of size lr along the gradient, which is `scale` times as long as it was."""

    def install(self) -> None:
        """Act by where it stands from now on; where nothing moved, nothing changes."""

    def give_up(self) -> None:
        """Be as before."""


def checked(rule: Rule, steps: Steps, credit: Credit) -> None:
    """Refuse an option out of range, or a credit of another table or unit."""
    ranges = {
        "lr": (rule.lr, 0 < _number(rule.lr) < math.inf, "a step size is above 0"),
        "epochs": (rule.epochs, type(rule.epochs) is int and rule.epochs >= 1, "one at least"),
        "clip_low": (rule.clip_low, 0 <= _number(rule.clip_low) <= 1, "0 to 1"),
        "clip_high": (rule.clip_high, 0 <= _number(rule.clip_high) < math.inf, "0 or more"),
        "kl": (rule.kl, 0 <= _number(rule.kl) < math.inf, "0 or more"),
        "entropy": (rule.entropy, 0 <= _number(rule.entropy) < math.inf, "0 or more"),
        "max_norm": (rule.max_norm, _number(rule.max_norm, 1.0) > 0, "above 0, or None"),
    }
    for name, (value, fits, words) in ranges.items():
        if not fits:
            raise Refused(f"{name} is {value!r}; {words}")
    if rule.loss not in ("reinforce", "clip"):
        raise Refused(f"loss is {rule.loss!r}; it is 'reinforce' or 'clip'")
    if rule.stale not in ("refuse", "skip", "use"):
        raise Refused(f"stale is {rule.stale!r}; it is 'refuse', 'skip' or 'use'")
    if rule.loss == "reinforce" and rule.epochs > 1 and rule.stale != "use":
        raise Refused(
            f"{rule.epochs} epochs of reinforce take rows of a policy that has moved since; "
            "say loss='clip', which weighs them, or stale='use'"
        )
    if credit.unit != "turn":
        raise Refused(
            f"the credit is per {credit.unit}, and an update moves turns; `Credit.at` carries it"
        )
    if len(credit) != len(steps):
        raise Refused(f"the credit has {len(credit)} rows where the steps have {len(steps)}")


def _number(value: Any, default: float = math.nan) -> float:
    """The value, or NaN for what is no number, which lies in no range."""
    if value is None:
        return default
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def actors(policies: Any, steps: Steps) -> list[tuple[Any, list[int]]]:
    """Every distinct policy that learns, and the codes of the roles that act by it."""
    names = steps.names["role"]
    by_role = policies if isinstance(policies, Mapping) else dict.fromkeys(names, policies)
    found: dict[int, tuple[Any, list[int]]] = {}
    for code, name in enumerate(names):
        policy = by_role.get(name)
        if policy is not None and described(policy, "trainable"):
            found.setdefault(id(policy), (policy, []))[1].append(code)
    return list(found.values())


def fresh(policy: Any, steps: Steps, rows: Ints, rule: Rule) -> Ints:
    """Those of the rows that the loss may use: all but what is `stale`.

    A row is stale whose act names another version than the policy has now; one whose act names none
    counts as the policy's own. The clipped surrogate weighs stale rows by their ratio, and needs
    the log-probability that every row had when it was sampled.
    """
    if rule.loss == "clip":
        return rows
    other = _other_version(policy, steps, rows)
    if rule.stale == "use" or not other.any():
        return rows
    if rule.stale == "skip":
        return rows[~other]
    row = int(rows[other][0])
    raise Refused(
        f"trace {steps.label('rollout', row)} was played by version {steps.label('version', row)}, "
        f"and the policy of {steps.label('role', row)} is {described(policy, 'version')} now; say "
        "loss='clip', which weighs such rows, or stale='skip', or stale='use'"
    )


def _other_version(policy: Any, steps: Steps, rows: Ints) -> Bools:
    if steps.version is None:
        return np.zeros(len(rows), dtype=bool)
    now = described(policy, "version")
    own = [code for code, name in enumerate(steps.names["version"]) if name == now]
    version = steps.version[rows]
    return (version >= 0) & ~np.isin(version, own)


def sound(steps: Steps, slopes: list[Slope], rows: list[Ints], epoch: int) -> float:
    """Length of the whole gradient; Refused if it, or the loss, is no finite number."""
    length = math.sqrt(math.fsum(slope.square for slope in slopes))
    loss = math.fsum(slope.terms["loss"][0] for slope in slopes)
    if math.isfinite(length) and math.isfinite(loss):
        return length
    bad = np.concatenate([slope.unsound for slope in slopes])
    blamed = bad if len(bad) else np.concatenate(rows)
    names = list(dict.fromkeys(steps.label("rollout", int(row)) for row in blamed))
    more = f" and {len(names) - TRACES_NAMED} more" if len(names) > TRACES_NAMED else ""
    raise Refused(
        f"the loss is {loss:g} and the gradient {length:g} long in epoch {epoch}, from trace "
        f"{', '.join(map(str, names[:TRACES_NAMED]))}{more}; nothing was installed"
    )


def added(into: Terms, more: Terms) -> None:
    """Count more of the same."""
    for name, (value, count) in more.items():
        had = into.get(name, (0.0, 0))
        into[name] = had[0] + value, had[1] + count


def summed(slopes: list[Slope]) -> dict[str, float]:
    """What all policies together say: the loss, and the mean of everything else that is counted."""
    names = dict.fromkeys(name for slope in slopes for name in slope.terms)
    told = {}
    for name in names:
        pairs = [slope.terms[name] for slope in slopes if name in slope.terms]
        total = math.fsum(value for value, _ in pairs)
        count = sum(count for _, count in pairs)
        told[name] = total if name == "loss" else total / count if count else math.nan
    return told
