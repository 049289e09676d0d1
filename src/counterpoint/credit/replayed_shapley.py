"""Shapley values of the agents of a run: it is run again without some of them, for many choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.branches import Absence, Branches, Downstream
from counterpoint.coalitions import (
    Worth,
    every_coalition,
    kernel_shap,
    marginals,
    ordered_shapley,
    paired_coalitions,
    permutations,
    shapley_values,
)
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.replayed import due, measured
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.streams import Draws

Form = Literal["exact", "permutation", "antithetic", "kernel", "precedence"]

MOST_PLAYERS = 16
"""Exact values take 2ⁿ runs of every run; beyond this many agents orders are to be sampled."""


class _Run(NamedTuple):
    """A run that is to be shared out.

    Attributes:
        rollout: its code.
        number: what the replay calls it.
        outcome: what it earned.
        players: codes of the agents that have a trainable turn, in order of their first.
        before: (players, players) whether one had its last turn before the other's first.
    """

    rollout: int
    number: int
    outcome: float
    players: tuple[int, ...]
    before: Bools


def shapley(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    form: Form = "exact",
    absence: Absence = "null",
    downstream: Downstream = "frozen",
    samples: int = 16,
    n: int = 1,
    seed: int = 0,
) -> Credit:
    """Shapley value of every agent in its own run: its marginal, averaged over who came before.

    Estimates `shapley:frozen` (or `replayed`, `resampled`), which depends on what an absent agent
    does: v(S) is the mean outcome of the run with the agents outside S absent, and v of all is the
    outcome that the run had.

        φ_i = Σ_{S∌i} |S|!(k−|S|−1)!/k! · (v(S ∪ i) − v(S)),  Σ φ = R − v(∅) in every form

    An agent with m trainable turns gives each φ/m, so that credits of a rollout sum to R − v(∅).

    Source: Shapley (1953); permutation sampling by Castro et al. (2009), antithetic by Mitchell et
    al. (2022), kernel by Lundberg and Lee (2017), precedence by Faigle and Kern (1992).

    Args:
        steps: rows with `rollout`, `step`, `agent`, `outcome`, `mask`.
        replay: what runs them again.
        form: "exact" over all 2ᵏ coalitions of the k agents of a run; "permutation" over sampled
            orders; "antithetic" over orders and their reverses, exact for pairwise interactions;
            "kernel" by regression over sampled coalitions, exact if they are all of them;
            "precedence" exactly, over orders in which nobody joins before an agent that had
            finished when it began.
        absence: "null", absent agents do the default; "resample", they follow their policy.
        downstream: "frozen", the others do what they did; "replay", those who see a difference
            answer anew; "anew", all that follows is drawn.
        samples: orders, or coalitions, per run in the sampled forms.
        n: branches of each coalition; more than 1 helps only where something is drawn.
        seed: of all draws.

    Returns:
        Credit per turn with parts shapley (φ of the agent), everybody (R), nobody (v(∅)), turns
        (m). Masked rows, unscored rollouts and runs of which a coalition could not be run are never
        credited (NaN). Empty steps give empty credit.

    Raises:
        Refused: no replay; samples or n below 1; an odd number of antithetic samples; over 16
            agents in a form that lists coalitions.
    """
    runner, rows = needed(replay, "shapley"), due(steps, samples=samples, n=n)
    if form not in _FORMS:
        raise Refused(f"form is {form!r}; it is one of {', '.join(_FORMS)}")
    runs = _runs(steps, rows)
    plans = [_FORMS[form](run, samples, _rng(steps, run.rollout, seed)) for run in runs]
    wanted = [_wanted(plan, len(run.players)) for run, plan in zip(runs, plans, strict=True)]
    options = {"absence": absence, "downstream": downstream, "seed": seed}
    worth, found = _worth(steps, runner, runs, wanted, n, options)
    phi, nobody = np.full((2, steps.n_rollouts, len(steps.names["agent"])), np.nan)
    for run, plan, known, v in zip(runs, plans, wanted, worth, strict=True):
        phi[run.rollout, run.players] = plan(_looked_up(known, v))
        nobody[run.rollout] = v[0]
    of, who = steps.rollout[rows], steps.agent[rows]
    team = groups.pair(of, who)
    turns = groups.count(team, int(team.max(initial=-1)) + 1)[team]
    parts = {
        "shapley": phi[of, who],
        "everybody": steps.outcome[rows],
        "nobody": nobody[of, who],
        "turns": turns,
    }
    estimand = f"shapley:{_MEANT.get((absence, downstream), f'{absence}:{downstream}')}"
    return measured(steps, rows, phi[of, who] / turns, estimand, parts, [found])


_MEANT = {
    ("null", "frozen"): "frozen",
    ("null", "replay"): "replayed",
    ("resample", "frozen"): "resampled",
}

_Plan = Callable[[Worth], Floats]
"""From v to the values of all players; all its draws are already made."""


def _exact(run: _Run, samples: int, rng: np.random.Generator) -> _Plan:
    n = _listable(run)
    return lambda v: shapley_values(_of(v, np.arange(2**n)), n)


def _permuted(run: _Run, samples: int, rng: np.random.Generator) -> _Plan:
    orders = permutations(len(run.players), samples, rng)
    return lambda v: marginals(v, orders).mean(axis=0)


def _antithetic(run: _Run, samples: int, rng: np.random.Generator) -> _Plan:
    orders = permutations(len(run.players), samples, rng, antithetic=True)
    return lambda v: marginals(v, orders).mean(axis=0)


def _kernel(run: _Run, samples: int, rng: np.random.Generator) -> _Plan:
    n = len(run.players)
    few = n <= MOST_PLAYERS and 2**n - 2 <= samples
    drawn = every_coalition(n) if few else paired_coalitions(n, max(samples // 2, 1), rng)
    return lambda v: kernel_shap(v, n, drawn)


def _preceded(run: _Run, samples: int, rng: np.random.Generator) -> _Plan:
    _listable(run)
    return lambda v: ordered_shapley(v, run.before)


_FORMS: dict[str, Callable[[_Run, int, np.random.Generator], _Plan]] = {
    "exact": _exact,
    "permutation": _permuted,
    "antithetic": _antithetic,
    "kernel": _kernel,
    "precedence": _preceded,
}


def _listable(run: _Run) -> int:
    n = len(run.players)
    if n > MOST_PLAYERS:
        raise Refused(
            f"a run has {n} agents, so {2**n} coalitions; at most {MOST_PLAYERS} agents are "
            "listed: say form='antithetic'"
        )
    return n


def _of(v: Worth, coalitions: Ints) -> Floats:
    return v(coalitions) if callable(v) else v[coalitions]


def _wanted(plan: _Plan, players: int) -> Ints:
    """The coalitions that a plan asks for, ascending, the empty and the full one among them."""
    asked = [np.array([0, (1 << players) - 1])]

    def v(coalitions: Ints) -> Floats:
        asked.append(coalitions)
        return np.zeros(len(coalitions))

    plan(v)
    return np.unique(np.concatenate(asked))


def _looked_up(known: Ints, worth: Floats) -> Callable[[Ints], Floats]:
    return lambda coalitions: worth[np.searchsorted(known, coalitions)]


def _worth(
    steps: Steps,
    runner: Replay,
    runs: Sequence[_Run],
    wanted: Sequence[Ints],
    n: int,
    options: Mapping[str, Any],
) -> tuple[list[Floats], Branches]:
    """What the wanted coalitions of every run are worth; with all agents, its outcome."""
    agents = tuple(range(len(steps.names["agent"])))
    number, present = [], []
    for run, coalitions in zip(runs, wanted, strict=True):
        there = np.ones((len(coalitions) - 1, len(agents)), dtype=bool)
        there[:, run.players] = coalitions[:-1, None] >> np.arange(len(run.players)) & 1
        present.append(there)
        number += [run.number] * len(there)
    gathered = np.concatenate([np.zeros((0, len(agents)), dtype=bool), *present])
    ids = np.array(number, dtype=np.int64)
    found = runner.absent(ids, steps.names["agent"], gathered, n, **options)
    cuts = np.cumsum([len(there) for there in present])[:-1]
    values = np.split(mean_of(found.values), cuts) if runs else []
    return [np.append(v, run.outcome) for v, run in zip(values, runs, strict=True)], found


def _runs(steps: Steps, rows: Ints) -> list[_Run]:
    """The runs of the rows to be credited, by rollout."""
    order = rows[np.lexsort((steps.step[rows], steps.rollout[rows]))]
    cuts = np.flatnonzero(np.diff(steps.rollout[order])) + 1
    found = []
    for own in np.split(order, cuts) if len(order) else ():
        agent = steps.agent[own]
        players = tuple(dict.fromkeys(agent.tolist()))
        first = np.array([np.argmax(agent == who) for who in players])
        last = np.array([np.flatnonzero(agent == who)[-1] for who in players])
        number = int(places(steps, own[:1])[0, 0])
        outcome = float(steps.outcome[own[0]])
        before = last[:, None] < first[None, :]
        found.append(_Run(int(steps.rollout[own[0]]), number, outcome, players, before))
    return found


def _rng(steps: Steps, rollout: int, seed: int) -> np.random.Generator:
    """Draws that belong to the run, wherever it stands in the table."""
    row = int(np.argmax(steps.rollout == rollout))
    owner = repr([steps.label(column, row) for column in ("group", "rollout")])
    return np.random.default_rng(Draws(str(seed), "schedule", owner, 0).integer(1 << 53))
