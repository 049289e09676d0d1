"""COSAC: an additive model of the outcome, asked about what the policies would have chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from counterpoint import groups
from counterpoint.branches import KEEP, RESAMPLE, Menu, Spent
from counterpoint.credit.asking import Foresight, foresight
from counterpoint.credit.grouped import group_diagnostics, n_rollouts
from counterpoint.credit.protocols import places
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Expectation = Literal["paired", "enumerate"]
Intercept = Literal["none", "centred"]
Scope = Literal["batch", "group"]

MOST_CELLS = 50_000_000
"""Rollouts times labels of one regression."""


def cosac(
    steps: Steps,
    *,
    policy: Foresight | None = None,
    ridge: float | None = None,
    continuations: int | None = None,
    expectation: Expectation = "paired",
    intercept: Intercept = "none",
    fit_scope: Scope = "batch",
    seed: int = 0,
) -> Credit:
    """Counterfactual credit without branches: an additive model of the outcome, asked about what
    the policies would have chosen.

    Estimates `seqau`, Q(h, a) − V(h), where the outcome is a sum of what the acts are worth one by
    one; where acts need each other it is wrong, and more runs do not help.

        R ≈ Σ over turns of φ(agent, label)               ridge: (XᵀX + λI)⁻¹ XᵀR
        A = D + I
        D = φ(a) − E_π φ(a')                              the act itself
        I = E[Σ later φ | h, a] − E[Σ later φ | h]        what it makes later agents choose

    X counts how often each agent chose each label in a run. Expectations are means over L
    continuations that the policies choose, with nothing run.

    Source: COSAC (arXiv:2604.17693), whose λ and L are not published. There each agent acts once,
    and agents are updated one after another; that is up to whoever updates, who asks again with the
    policy as it is then.

    Args:
        steps: rows with `rollout`, `outcome`, `mask`, `agent`.
        policy: what the agents would choose (`credit.asking.Foresight`).
        ridge: λ, above 0; it has no default.
        continuations: L, from 1; it has no default.
        expectation: "paired" as published, L acts drawn from the policy with what follows each of
            them; "enumerate" takes the exact mean over the menu, L continuations of every entry.
        intercept: "none" as published, so that φ depends on where 0 of the outcome lies; "centred"
            takes the mean off R and X first.
        fit_scope: one regression over the "batch", as published, or one per "group".
        seed: of all draws.

    Returns:
        Credit per turn with parts direct (D), indirect (I), phi (φ(a)), n (rollouts behind φ).
        Masked rows and unscored rollouts are never credited (NaN), and neither is an act that no
        menu offers, which is counted in `unlabelled`. A label that no run of the fit chose has φ 0;
        `unseen` is the share of foreseen acts with such a label. A group of one is fitted like any
        other: centred it gives 0. Diagnostics say what the continuations cost. Empty steps give
        empty credit.

    Raises:
        Refused: no policy, ridge or continuations, an option out of range; agents of one rollout
            with outcomes of their own; with "enumerate" a row without menu or probabilities; more
            labels than a regression can hold.
    """
    asked = foresight(policy, "cosac")
    if ridge is None or not 0 < ridge < np.inf or continuations is None or continuations < 1:
        raise Refused(
            "cosac needs ridge=, a number above 0, and continuations=, a whole number from 1, "
            f"which its paper does not publish; here they are {ridge!r} and {continuations!r}"
        )
    _check(steps, expectation, intercept, fit_scope)
    menu = asked.menu(places(steps, np.arange(len(steps))))
    scope = steps.group if fit_scope == "group" else np.zeros(len(steps), dtype=np.int64)
    model = fitted(steps, _said(menu), scope, ridge, intercept == "centred")
    rows = np.flatnonzero(steps.mask & ~np.isnan(steps.outcome) & (_said(menu) >= 0))
    ask = partial(told, asked, steps, model, n=continuations, seed=seed)
    own, usual = enumerated(ask, rows, menu) if expectation == "enumerate" else paired(ask, rows)
    said = {"ridge": ridge, "continuations": continuations}
    return _credit(steps, rows, model, own, usual, said)


def _check(steps: Steps, expectation: str, intercept: str, fit_scope: str) -> None:
    for name, given, known in (
        ("expectation", expectation, ("paired", "enumerate")),
        ("intercept", intercept, ("none", "centred")),
        ("fit_scope", fit_scope, ("batch", "group")),
    ):
        if given not in known:
            raise Refused(f"{name} is {given!r}; it is {known[0]!r} or {known[1]!r}")
    if steps.cell is not steps.rollout:
        raise Refused(
            "the agents of a rollout have outcomes of their own; cosac explains one outcome of the "
            "team"
        )


def _said(menu: Menu) -> Ints:
    """(places,) the label of the act that was taken, −1 if no menu offers it."""
    if menu.label is None:
        return menu.taken
    at = np.maximum(menu.taken, 0)[:, None]
    return np.where(menu.taken < 0, -1, np.take_along_axis(menu.label, at, axis=1)[:, 0])


# ---------------------------------------------------------------------------------------------
# The model


class Model(NamedTuple):
    """φ of every label that an agent chose in a fit.

    Attributes:
        keys: sorted; (fit · agents + agent) · labels + label.
        phi: (keys,).
        agents, labels: how many there are.
        fit: (rows,) which regression each row belongs to.
        size: (fits,) rollouts behind each.
    """

    keys: Ints
    phi: Floats
    agents: int
    labels: int
    fit: Ints
    size: Floats

    def place(self, fit: Ints, agent: Ints, label: Ints) -> Ints:
        """Where φ of each label stands, −1 where no run of the fit chose it."""
        known = (agent >= 0) & (label >= 0) & (label < self.labels)
        key = (fit * self.agents + agent) * self.labels + label
        at = np.minimum(np.searchsorted(self.keys, key), max(len(self.keys) - 1, 0))
        if not len(self.keys):
            return np.full(key.shape, -1)
        return np.where(known & (self.keys[at] == key), at, -1)

    def worth(self, at: Ints) -> Floats:
        """φ at these places; 0 where it is unknown."""
        return np.append(self.phi, 0.0)[at]


def fitted(steps: Steps, label: Ints, scope: Ints, penalty: float, centred: bool) -> Model:
    """One ridge regression for each scope, over its scored rollouts that have a trainable row."""
    heads = steps.picked(steps.outcome)
    heads = heads[np.argsort(scope[heads], kind="stable")]
    run = np.full(steps.n_rollouts, -1)
    run[steps.rollout[heads]] = np.arange(len(heads))
    rows = np.flatnonzero((run[steps.rollout] >= 0) & (label >= 0))
    rows = rows[np.argsort(run[steps.rollout[rows]], kind="stable")]
    agents, labels = len(steps.names["agent"]), int(label.max(initial=-1)) + 1
    keys, column = np.unique(
        (scope[rows] * agents + steps.agent[rows]) * labels + label[rows], return_inverse=True
    )
    phi = np.zeros(len(keys))
    fits = np.unique(scope[heads])
    edges = np.append(fits, fits.max(initial=-1) + 1)
    of_runs = np.searchsorted(scope[heads], edges)
    of_rows = np.searchsorted(run[steps.rollout[rows]], of_runs)
    of_keys = np.searchsorted(keys, edges * agents * labels)
    for (a, b), (c, d), (e, f) in zip(
        pairwise(of_runs), pairwise(of_rows), pairwise(of_keys), strict=True
    ):
        X = _counts(run[steps.rollout[rows[c:d]]] - a, column[c:d] - e, b - a, f - e)
        phi[e:f] = _ridge(X, steps.outcome[heads[a:b]], penalty, centred)
    size = groups.count(scope[heads], int(scope.max(initial=-1)) + 1)
    return Model(keys, phi, agents, labels, scope, size)


def _counts(run: Ints, column: Ints, runs: int, columns: int) -> Floats:
    """(runs, columns) how often each label was chosen in each run."""
    if runs * columns > MOST_CELLS:
        raise Refused(
            f"a regression of {runs} rollouts on {columns} labels is too large; labels are choices "
            "from menus, not texts, and fit_scope='group' fits each group by itself"
        )
    return groups.count(run * columns + column, runs * columns).reshape(runs, columns)


def _ridge(X: Floats, y: Floats, penalty: float, centred: bool) -> Floats:
    """(columns,) the φ that minimises |y − Xφ|² + λ|φ|², with the means taken off where asked."""
    x = X - X.mean(axis=0) if centred else X
    found: Floats = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
    return found


# ---------------------------------------------------------------------------------------------
# What the policies would choose


class Told(NamedTuple):
    """What the model makes of acts and of what the policies would choose after them.

    Attributes:
        act: (rows,) mean φ of the act.
        later: (rows,) mean φ of all that follows.
        acts: how many were foreseen.
        unseen: how many of them have no φ.
        spent: what asking cost.
    """

    act: Floats
    later: Floats
    acts: int
    unseen: int
    spent: Spent


_Ask: TypeAlias = Callable[[Ints, Ints], Told]


def told(
    policy: Foresight, steps: Steps, model: Model, rows: Ints, action: Ints, *, n: int, seed: int
) -> Told:
    """Ask what would follow, were `action` chosen at each of the rows."""
    at = places(steps, rows)
    found = policy.foresee(at, action, n, agents=steps.names["agent"], seed=seed)
    sets = len(found.agent)
    pair, back = np.unique(model.fit[rows] * sets + found.of, return_inverse=True)
    fit, of = np.divmod(pair, max(sets, 1))
    agent, label = found.agent[of], found.label[of]
    known = model.place(fit[:, None, None], agent, label)
    phi, there = model.worth(known), (agent >= 0) | (label >= 0)
    return Told(
        act=phi[:, :, :1].sum(axis=2).mean(axis=1)[back],
        later=phi[:, :, 1:].sum(axis=2).mean(axis=1)[back],
        acts=int(there.sum()),
        unseen=int((there & (known < 0)).sum()),
        spent=found.spent,
    )


def paired(ask: _Ask, rows: Ints) -> tuple[Told, Told]:
    """The act with what follows, and acts drawn anew with what follows each."""
    return ask(rows, np.full(len(rows), KEEP)), ask(rows, np.full(len(rows), RESAMPLE))


def enumerated(ask: _Ask, rows: Ints, menu: Menu) -> tuple[Told, Told]:
    """The act with what follows, and the mean over the menu of every entry with what follows."""
    probs, taken = menu.probs[rows], menu.taken[rows]
    blind = (menu.size[rows] == 0) | np.isnan(probs).any(axis=1)
    if blind.any():
        raise Refused(
            f"row {int(rows[np.argmax(blind)])}: the policy gives no menu with probabilities "
            "there, so there is no mean over it; say expectation='paired' to draw acts instead"
        )
    row, entry = np.nonzero((probs > 0) | (np.arange(probs.shape[1]) == taken[:, None]))
    found = ask(rows[row], entry)
    own = entry == taken[row]

    def usual(each: Floats) -> Floats:
        return groups.total(row, probs[row, entry] * each, len(rows))

    return (
        Told(found.act[own], found.later[own], 0, 0, Spent()),
        found._replace(act=usual(found.act), later=usual(found.later)),
    )


def _credit(
    steps: Steps, rows: Ints, model: Model, own: Told, usual: Told, said: dict[str, Any]
) -> Credit:
    def spread(part: Floats) -> Floats:
        out = np.full(len(steps), np.nan)
        out[rows] = part
        return out

    direct, indirect = own.act - usual.act, own.later - usual.later
    _, sigma, scored = steps.moments(steps.outcome)
    foreseen = own.acts + usual.acts
    about = group_diagnostics(
        steps, sigma > 0, scored, sample=n_rollouts(steps, rows), compares=False
    )
    due = int(np.count_nonzero(steps.mask & ~np.isnan(steps.outcome)))
    about |= vars(own.spent + usual.spent) | said
    about |= {
        "fits": int(np.count_nonzero(model.size)),
        "labels": len(model.keys),
        "unlabelled": due - len(rows),
        "unseen": (own.unseen + usual.unseen) / foreseen if foreseen else 0.0,
    }
    parts = {"direct": direct, "indirect": indirect, "phi": own.act}
    return Credit(
        spread(direct + indirect),
        estimand="seqau",
        identified="assumption:additive",
        parts={name: spread(part) for name, part in parts.items()}
        | {"n": model.size[model.fit] if len(steps) else np.zeros(0)},
        diagnostics=about,
    )
