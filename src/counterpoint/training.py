"""The workshop: credit becomes an update of the policies that earned it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Team = Softmax | Mapping[str, Softmax]


def update(
    policies: Team,
    steps: Steps,
    credit: Credit,
    *,
    lr: float,
    loss: Literal["reinforce"] = "reinforce",
) -> dict[str, float]:
    """Move tables of logits along the policy gradient; each moved policy gets a new version.

        θ ← θ + lr · Σ over rows of A ∇log π(label | anchor, menu) ÷ number of groups

    Args:
        policies: one table for all roles, or one per role; roles without a table are left alone.
        steps: rows with `anchor`, `menu` and `action`, as traces of a played environment give.
        credit: one advantage per row; rows that are NaN, masked, or chose nothing move nothing.
        lr: step size, per group and turn.
        loss: the plain policy gradient; there is no other yet.

    Returns:
        {rows: how many moved something, gradient_norm: Euclidean length of the step ÷ lr}.

    Raises:
        Refused: credit of another length, a missing column, a step size that is not positive, or a
            policy that is no table.
    """
    if loss != "reinforce":
        raise Refused(f"loss is {loss!r}; 'reinforce' is the only one yet")
    if not lr > 0:
        raise Refused(f"lr is {lr}; a step size is above 0")
    if len(credit) != len(steps):
        raise Refused(f"the credit has {len(credit)} rows where the steps have {len(steps)}")
    steps.need("menu")
    anchor, action = steps.need("anchor"), steps.need("action")
    used = credit.credited & steps.mask & (anchor >= 0) & (action >= 0)
    squares = 0.0
    for policy, roles in _learners(policies, steps):
        rows = np.flatnonzero(used & np.isin(steps.role, roles))
        gradient = _gradient(policy, steps, rows, credit.values)
        squares += sum(g * g for row in gradient.values() for g in row.values())
        if gradient:
            policy.install(_moved(policy, gradient, lr))
    return {"rows": int(used.sum()), "gradient_norm": float(np.sqrt(squares))}


def _learners(policies: Team, steps: Steps) -> list[tuple[Softmax, list[int]]]:
    """Every distinct table, and the codes of the roles that act by it."""
    names = steps.names["role"]
    by_role = policies if isinstance(policies, Mapping) else dict.fromkeys(names, policies)
    found: dict[int, tuple[Softmax, list[int]]] = {}
    for code, name in enumerate(names):
        policy = by_role.get(name)
        if policy is None or not getattr(policy, "trainable", False):
            continue
        if not isinstance(policy, Softmax):
            raise Refused(f"the policy of {name} is a {type(policy).__name__}, not a Softmax table")
        found.setdefault(id(policy), (policy, []))[1].append(code)
    return list(found.values())


def _gradient(
    policy: Softmax, steps: Steps, rows: Ints, advantage: Floats
) -> dict[str, dict[str, float]]:
    """Anchor → label → Σ A (1[label] − π(label)) ÷ groups, over `rows`."""
    anchor, menu, action = steps.need("anchor"), steps.need("menu"), steps.need("action")
    out: dict[str, dict[str, float]] = {}
    key = anchor[rows] * len(steps.names["menu"]) + menu[rows]
    for value in np.unique(key):
        here = rows[key == value]
        labels = steps.names["menu"][menu[here[0]]]
        name = steps.names["anchor"][anchor[here[0]]]
        a = advantage[here]
        taken = np.bincount(action[here], weights=a, minlength=len(labels))
        slope = (taken - a.sum() * _chances(policy, name, labels)) / steps.n_groups
        held = out.setdefault(name, {})
        for label, g in zip(labels, slope.tolist(), strict=True):
            held[label] = held.get(label, 0.0) + g
    return out


def _chances(policy: Softmax, anchor: str, labels: Sequence[str]) -> Floats:
    row = policy.logits.get(anchor, {})
    z = np.array([row.get(label, 0.0) for label in labels])
    weight = np.exp(z - z.max())
    p: Floats = weight / weight.sum()
    return p


def _moved(
    policy: Softmax, gradient: Mapping[str, Mapping[str, float]], lr: float
) -> dict[str, dict[str, float]]:
    logits = {anchor: dict(row) for anchor, row in policy.logits.items()}
    for anchor, slope in gradient.items():
        row = logits.setdefault(anchor, {})
        for label, g in slope.items():
            row[label] = row.get(label, 0.0) + lr * g
    return logits
