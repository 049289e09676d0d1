"""Tables of logits on their way: the gradient in closed form, state by state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.policies.tabular import Softmax
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.training.step import Rows, Rule, Slope, Terms, added

_BOUND = 20.0  # of a log-ratio, as in `counterpoint.losses`

Table = dict[str, dict[str, float]]
"""Anchor → label → number."""


class _Cell(NamedTuple):
    """Rows of one anchor and one menu: the state in which a label is chosen."""

    anchor: str
    labels: Sequence[str]
    rows: Ints
    advantage: Floats
    action: Ints


class Moving:
    """A table of logits that climbs; the policy itself stays as it is until `install`."""

    def __init__(self, policy: Softmax, rows: Rows) -> None:
        if rows.reference is not None and not isinstance(rows.reference, Softmax):
            raise Refused(f"a table is held to a table, not to a {type(rows.reference).__name__}")
        self.policy, self.steps = policy, rows.steps
        self.held: Softmax | None = rows.reference
        self.logits: Table = {anchor: dict(row) for anchor, row in policy.logits.items()}
        self.cells = list(_cells(rows))
        self.gradient: Table = {}

    @np.errstate(all="ignore")  # what is no finite number is refused by name, in `sound`
    def slope(self, rule: Rule) -> Slope:
        """Σ over rows of the slope of the loss in each logit ÷ groups, with its sign turned."""
        self.gradient = {}
        unsound = [np.zeros(0, dtype=np.int64)]
        terms: Terms = {"loss": (0.0, 0)}
        for cell in self.cells:
            p = _chances(self.logits, cell)
            weight, lost, about = _surrogate(rule, self.steps, cell, p)
            unsound.append(cell.rows[~np.isfinite(lost)])
            pull = np.bincount(cell.action, weights=weight, minlength=len(p)) - weight.sum() * p
            held, costs = self._regular(rule, cell, p)
            added(terms, {"loss": (float(lost.sum()) / self.steps.n_groups, 0), **about})
            added(terms, costs)
            slope = (pull + held * len(cell.rows)) / self.steps.n_groups
            kept = self.gradient.setdefault(cell.anchor, {})
            for label, g in zip(cell.labels, slope.tolist(), strict=True):
                kept[label] = kept.get(label, 0.0) + g
        square = float(sum(g * g for row in self.gradient.values() for g in row.values()))
        return Slope(square, terms, np.concatenate(unsound))

    def _regular(self, rule: Rule, cell: _Cell, p: Floats) -> tuple[Floats, Terms]:
        """The pull of entropy and KL on the logits of a state, exact, and what both are there."""
        log, n = np.log(np.maximum(p, np.finfo(float).tiny)), len(cell.rows)
        entropy = -float(p @ log)
        pull = -rule.entropy * p * (log + entropy)
        about = {"entropy": (entropy * n, n)}
        loss = -rule.entropy * entropy
        if self.held is not None:
            gap = log - np.log(np.maximum(_chances(self.held.logits, cell), np.finfo(float).tiny))
            away = float(p @ gap)
            pull = pull - rule.kl * p * (gap - away)
            about["kl"] = (away * n, n)
            loss += rule.kl * away
        return pull, {**about, "loss": (loss * n / self.steps.n_groups, 0)}

    def move(self, lr: float, scale: float) -> None:
        """Go along the gradient."""
        for anchor, slope in self.gradient.items():
            row = self.logits.setdefault(anchor, {})
            for label, g in slope.items():
                row[label] = row.get(label, 0.0) + lr * scale * g

    def install(self) -> None:
        """Act by the table as it is now, if that is another one."""
        labels = ((a, label) for a, row in self.logits.items() for label in row)
        old = self.policy.logits
        if any(self.logits[a][label] != old.get(a, {}).get(label, 0.0) for a, label in labels):
            self.policy.install(self.logits)

    def give_up(self) -> None:
        """Nothing was touched."""


def _cells(rows: Rows) -> Iterator[_Cell]:
    steps = rows.steps
    steps.need("menu")
    anchor, menu, action = steps.need("anchor"), steps.need("menu"), steps.need("action")
    chose = (anchor[rows.at] >= 0) & (action[rows.at] >= 0)
    at, advantage = rows.at[chose], rows.advantage[chose]
    key = anchor[at] * len(steps.names["menu"]) + menu[at]
    order = np.argsort(key, kind="stable")
    begins = np.flatnonzero(np.diff(key[order], prepend=-1))
    for here in np.split(order, begins[1:]) if len(order) else ():
        first = at[here[0]]
        yield _Cell(
            steps.names["anchor"][anchor[first]],
            steps.names["menu"][menu[first]],
            at[here],
            advantage[here],
            action[at[here]],
        )


def _surrogate(rule: Rule, steps: Steps, cell: _Cell, p: Floats) -> tuple[Floats, Floats, Terms]:
    """(rows,) what each row weighs ∇log π with, its part of the loss, and what was clipped."""
    A, logp = cell.advantage, np.log(np.maximum(p, np.finfo(float).tiny))[cell.action]
    if rule.loss == "reinforce":
        return A, -A * logp, {}
    gap = np.clip(logp - _sampled(steps, cell.rows), -_BOUND, _BOUND)
    ratio = np.exp(gap)
    low, high = 1 - rule.clip_low, 1 + rule.clip_high
    stopped: Bools = ((A > 0) & (ratio > high)) | ((A < 0) & (ratio < low))
    weight = np.where(stopped | (np.abs(gap) >= _BOUND), 0.0, A * ratio)
    lost = -A * np.where(stopped, np.clip(ratio, low, high), ratio)
    n = len(A)
    return weight, lost, {"clip_fraction": (float(stopped.sum()), n), "approx_kl": (-gap.sum(), n)}


def _sampled(steps: Steps, rows: Ints) -> Floats:
    old: Floats = steps.need("logprob")[rows]
    if np.isnan(old).any():
        row = int(rows[np.isnan(old)][0])
        raise Refused(
            f"trace {steps.label('rollout', row)}, step {steps.step[row]} has no log-probability, "
            "and the clipped surrogate compares with it; say loss='reinforce'"
        )
    return old


def _chances(logits: Mapping[str, Mapping[str, float]], cell: _Cell) -> Floats:
    row = logits.get(cell.anchor, {})
    z = np.array([row.get(label, 0.0) for label in cell.labels])
    weight = np.exp(z - z.max())
    p: Floats = weight / weight.sum()
    return p
