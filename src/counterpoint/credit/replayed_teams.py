"""Methods that run a whole run again without one of its agents, and shape the reward by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.branches import Branches, Downstream
from counterpoint.credit.grouped import Singleton, Spread, check_spread, compared, lone, single
from counterpoint.credit.protocols import Harness, Replay, mean_of, needed, places
from counterpoint.credit.replayed import due, measured
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


class Statistics(NamedTuple):
    """Moving mean and variance of earlier batches, and how many samples they have seen."""

    mean: float = 0.0
    variance: float = 1.0
    n: int = 0


def ccpo(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    version: Literal[1, 2] = 2,
    earlier: Mapping[str, Sequence[Any]] | None = None,
    lam: float = 0.2,
    alpha: float = 1.0,
    eta: float = 1.0,
    decay: float = 0.99,
    min_samples: int = 10,
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    seed: int = 0,
) -> Credit:
    """Counterfactual credit of two agents: the run against the second agent's run alone.

    Estimates `shaped`: version 2 a reward with a bonus, relative to the group; version 1 squashed
    scores.

        2   r_first = R + λ(helped − hurt), r_second = R, then GRPO within (group, role)
            helped: R > 0 and mean solo reward of the task < 0;  hurt: the other way round
        1   first tanh(α(Δ − μ)/(σ + ε)),  Δ = R − R_solo
            second g·z(R) + (1 − g)·z(R_solo),  g = sigmoid(ημ/(σ + ε))

    μ and σ belong to Δ, z standardises; both take moving statistics of earlier batches.

    Source: CCPO (arXiv:2603.21563), its two versions.

    Args:
        steps: rows with `group`, `rollout`, `step`, `role`, `outcome`, `mask`; two roles, the first
            is the one that opens every rollout.
        replay: what runs the second agent alone: the first one takes the default act, and the
            second answers to that.
        version: of the paper. 2 needs outcomes of −1 and +1; 0 and 1 are mapped to them.
        earlier: what the diagnostic `statistics` of the batch before said; version 1 standardises
            by it, so the first batch is used as it is (mean 0, variance 1).
        lam: λ of version 2.
        alpha: scale of version 1's first agent.
        eta: scale of version 1's gate.
        decay: of the moving statistics.
        min_samples: fewer samples before this batch count as none.
        eps: added to standard deviations; a variance at or below it counts as 1 in version 1.
        ddof: 1 divides the squared deviations by n − 1, 0 by n (version 2).
        singleton: what a role without another rollout to compare with gets (version 2).
        sigma_floor: rewards that spread at or below this have no signal (version 2).
        seed: of all draws.

    Returns:
        Credit per turn with parts outcome, solo (R of the second agent alone), and shaped, mean,
        std, n in version 2 or gate in version 1. `statistics` holds mean, variance and number of
        samples for delta, joint and solo after this batch. Rows that cannot be credited are NaN.

    Raises:
        Refused: no replay; not exactly two roles; rollouts that open with different ones; outcomes
            that are neither −1, +1 nor 0, 1 in version 2; another version.
    """
    check_spread(True, ddof, eps, sigma_floor)
    if version not in (1, 2):
        raise Refused(f"version is {version!r}; it is 1 or 2")
    runner, rows = needed(replay, "ccpo"), due(steps)
    first = _opens(steps, rows, "ccpo")
    solo, found = _without(steps, runner, rows, steps.role == first, seed)
    if version == 1:
        values, parts, after = _scores(steps, rows, first, solo, earlier or {}, alpha, eta, decay,
                                       min_samples, eps)  # fmt: skip
        return measured(steps, rows, values, "shaped", parts, [found], statistics=after)
    joint, solo = _signed(steps.outcome[rows]), _signed(solo)
    task = steps.group[rows]
    there = ~np.isnan(solo)
    mean_solo = groups.mean(task[there], solo[there], steps.n_groups)[task]
    bonus = lam * (((joint > 0) & (mean_solo < 0)) * 1.0 - ((joint < 0) & (mean_solo > 0)))
    shaped = np.where(np.isnan(mean_solo), np.nan, joint + (steps.role[rows] == first) * bonus)
    spread = Spread(True, ddof, eps, sigma_floor)
    values, parts = _relative(steps, rows, steps.role, shaped, spread, singleton)
    parts = {"outcome": joint, "solo": solo, "shaped": shaped, **parts}
    return measured(steps, rows, values, "shaped", parts, [found])


def sharp(
    steps: Steps,
    *,
    replay: Replay | Harness | None = None,
    planner: str | int | None = None,
    tool: Sequence[float] | None = None,
    lam: float = 1.0,
    downstream: Downstream = "replay",
    n: int = 1,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    sigma_floor: float = 1e-6,
    seed: int = 0,
) -> Credit:
    """Shares of a planner and its workers: the outcome, a marginal, and how tools were used.

    Estimates `shaped`: a reward with terms added, against the same agent's in the group.

        worker m   .9·R + .9·(R − R(run without m)) + .1·tool
        planner    .9·R + .9·λ·mean over workers of max(marginal, 0) + .1·tool
        A          (reward − mean) / (std + eps) over (group, agent)

    The planner's marginal is never negative, and the only worker of a run that needs it gets 1.8 of
    an outcome of 1.

    Source: SHARP (arXiv:2602.08335); the weights are known from one secondary source, and λ from
    none.

    Args:
        steps: rows with `group`, `rollout`, `step`, `agent`, `outcome`, `mask`.
        replay: what runs them again without a worker.
        planner: name of the planning agent; by default whoever opens every rollout.
        tool: (rows,) reward for the use of tools; 0 if not given.
        lam: λ.
        downstream: what the others do in the run without m.
        n: branches of each run without a worker.
        ddof: 1 divides the squared deviations by n − 1, 0 by n.
        eps: added to the standard deviation.
        singleton: what an agent without another rollout to compare with gets.
        sigma_floor: rewards that spread at or below this have no signal: 0.
        seed: of all draws.

    Returns:
        Credit per turn with parts outcome, marginal (of the worker; of the planner the mean that it
        gets), shaped, mean, std, n. A planner without workers has marginal 0. Rows that cannot be
        credited are NaN.

    Raises:
        Refused: no replay; no such planner; rollouts that open with different agents and `planner`
            not given; `tool` of another length.
    """
    check_spread(True, ddof, eps, sigma_floor)
    runner, rows = needed(replay, "sharp"), due(steps, n=n)
    extra = np.zeros(len(steps)) if tool is None else np.asarray(tool, dtype=np.float64)
    if extra.shape != (len(steps),):
        raise Refused(f"tool has {extra.size} numbers where the table has {len(steps)} rows")
    lead = _planner(steps, rows, planner)
    left, found = _left_out(steps, runner, rows, lead, n, downstream, seed)
    own, who = steps.outcome[rows], steps.agent[rows]
    gain = own - left
    marginal = np.where(who == lead, lam * _helped(steps, rows, lead, gain), gain)
    shaped = 0.9 * own + 0.9 * marginal + 0.1 * extra[rows]
    spread = Spread(True, ddof, eps, sigma_floor)
    values, parts = _relative(steps, rows, steps.agent, shaped, spread, singleton)
    parts = {"outcome": own, "marginal": marginal, "shaped": shaped, **parts}
    return measured(steps, rows, values, "shaped", parts, [found])


def _relative(
    steps: Steps, rows: Ints, who: Ints, shaped: Floats, spread: Spread, singleton: Singleton
) -> tuple[Floats, dict[str, Floats]]:
    """Shaped rewards against those of the same agent or role in the group, each rollout once."""
    whole = np.full(len(steps), np.nan)
    whole[rows] = shaped
    team = groups.pair(steps.rollout, who)
    once = rows[np.unique(team[rows], return_index=True)[1]]
    cell = groups.pair(steps.group, who)
    result = compared(whole, cell, once[~np.isnan(whole[once])], spread)
    lone(steps, whole, result.advantage, single(cell, result.size), singleton)
    about = {name: result.about[name]()[rows] for name in ("mean", "std", "n")}
    return result.advantage[rows], about


def _opens(steps: Steps, rows: Ints, name: str) -> int:
    """Code of the role that opens every rollout, of two."""
    known = steps.names["role"]
    if len(rows) and len(np.unique(steps.role[rows])) != 2:
        raise Refused(
            f"{name} compares two roles, and these rows have {', '.join(map(str, known))}"
        )
    return _first(steps, rows, "role", "ccpo needs one that always does")


def _first(steps: Steps, rows: Ints, column: str, way_out: str) -> int:
    order = rows[np.lexsort((steps.step[rows], steps.rollout[rows]))]
    begins = order[np.unique(steps.rollout[order], return_index=True)[1]]
    codes = getattr(steps, column)[begins]
    if len(codes) and np.any(codes != codes[0]):
        row = int(begins[np.argmax(codes != codes[0])])
        raise Refused(
            f"row {row}: rollout {steps.label('rollout', row)!r} opens with {column} "
            f"{steps.label(column, row)!r}, others with another; {way_out}"
        )
    return int(codes[0]) if len(codes) else 0


def _planner(steps: Steps, rows: Ints, planner: str | int | None) -> int:
    known = steps.names["agent"]
    if planner is None:
        return _first(steps, rows, "agent", "name one with planner=")
    if planner not in known:
        raise Refused(
            f"planner is {planner!r}, but column agent holds {', '.join(map(repr, known))}"
        )
    return known.index(planner)


def _without(
    steps: Steps, runner: Replay, rows: Ints, out: Bools, seed: int
) -> tuple[Floats, Branches]:
    """(len(rows),) outcome of each row's run without the agents whose rows are `out`."""
    agents = steps.names["agent"]
    rollouts, place = np.unique(steps.rollout[rows], return_inverse=True)
    present = np.ones((len(rollouts), len(agents)), dtype=bool)
    gone = rows[out[rows]]
    present[np.searchsorted(rollouts, steps.rollout[gone]), steps.agent[gone]] = False
    found = runner.absent(_numbers(steps, rows, place), agents, present, 1, seed=seed)
    return mean_of(found.values)[place], found


def _left_out(
    steps: Steps, runner: Replay, rows: Ints, lead: int, n: int, downstream: Downstream, seed: int
) -> tuple[Floats, Branches]:
    """(len(rows),) outcome of each row's run without its agent; of the planner's rows, its own."""
    agents = steps.names["agent"]
    worker = rows[steps.agent[rows] != lead]
    team = groups.pair(steps.rollout, steps.agent)
    _, first, place = np.unique(team[worker], return_index=True, return_inverse=True)
    present = np.ones((len(first), len(agents)), dtype=bool)
    present[np.arange(len(first)), steps.agent[worker[first]]] = False
    runs = places(steps, worker[first])[:, 0]
    found = runner.absent(runs, agents, present, n, seed=seed, downstream=downstream)
    left = steps.outcome.copy()
    left[worker] = mean_of(found.values)[place]
    return left[rows], found


def _helped(steps: Steps, rows: Ints, lead: int, gain: Floats) -> Floats:
    """(len(rows),) mean over the workers of the row's run of max(marginal, 0); 0 without any."""
    team = groups.pair(steps.rollout, steps.agent)[rows]
    once = np.unique(team, return_index=True)[1]
    once = once[steps.agent[rows][once] != lead]
    run = steps.rollout[rows]
    mean = groups.mean(run[once], np.maximum(gain[once], 0.0), steps.n_rollouts)[run]
    none = groups.count(run[once], steps.n_rollouts)[run] == 0
    return np.where(none, 0.0, mean)


def _numbers(steps: Steps, rows: Ints, place: Ints) -> Ints:
    """What the replay calls the runs of these rows, one for each distinct rollout."""
    first = np.unique(place, return_index=True)[1]
    numbers: Ints = places(steps, rows[first])[:, 0]
    return numbers


def _signed(outcome: Floats) -> Floats:
    """Outcomes of −1 and +1; 0 and 1 are mapped to them."""
    there = outcome[~np.isnan(outcome)]
    if np.isin(there, (-1.0, 1.0)).all():
        return outcome
    if not np.isin(there, (0.0, 1.0)).all():
        odd = there[~np.isin(there, (-1.0, 0.0, 1.0))]
        raise Refused(
            "version 2 needs outcomes of −1 and +1, or 0 and 1; these hold "
            f"{odd[0] if len(odd) else 'both 0 and −1'}"
        )
    return 2 * outcome - 1


def _scores(
    steps: Steps,
    rows: Ints,
    first: int,
    solo: Floats,
    earlier: Mapping[str, Sequence[Any]],
    alpha: float,
    eta: float,
    decay: float,
    min_samples: int,
    eps: float,
) -> tuple[Floats, dict[str, Floats], dict[str, tuple[float, ...]]]:
    """Version 1: squashed scores, and the moving statistics after this batch."""
    joint = steps.outcome[rows]
    samples = {"delta": joint - solo, "joint": joint, "solo": solo}
    once = np.unique(steps.rollout[rows], return_index=True)[1]
    held = {name: Statistics(*earlier.get(name, ())) for name in samples}
    scale = {name: _scale(own, min_samples, eps) for name, own in held.items()}
    z = {name: (x - scale[name][0]) / (scale[name][1] + eps) for name, x in samples.items()}
    mu, sigma = scale["delta"]
    gate = 1 / (1 + np.exp(-eta * mu / (sigma + eps)))
    second = gate * z["joint"] + (1 - gate) * z["solo"]
    values = np.where(steps.role[rows] == first, np.tanh(alpha * z["delta"]), second)
    after = {name: tuple(_moved(held[name], x[once], decay)) for name, x in samples.items()}
    return values, {"outcome": joint, "solo": solo, "gate": np.full(len(rows), gate)}, after


def _scale(held: Statistics, min_samples: int, eps: float) -> tuple[float, float]:
    if held.n < min_samples:
        return 0.0, 1.0
    return held.mean, 1.0 if held.variance <= eps else float(np.sqrt(held.variance))


def _moved(held: Statistics, x: Floats, decay: float) -> Statistics:
    """Exponential moving mean and variance after a batch; the first batch sets them."""
    there = x[~np.isnan(x)]
    if not len(there):
        return held
    mean, variance = float(there.mean()), float(there.var())
    if not held.n:
        return Statistics(mean, variance, len(there))
    return Statistics(
        decay * held.mean + (1 - decay) * mean,
        decay * held.variance + (1 - decay) * variance,
        held.n + len(there),
    )
