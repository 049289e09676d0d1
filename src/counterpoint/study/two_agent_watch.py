"""What is watched while two agents learn: exact success, exact credit, failures, diversity."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.credit import score
from counterpoint.envs import make
from counterpoint.groups import Floats, Ints
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.quality import CHECKS, Quality
from counterpoint.schema import Act, Observe, ToolResult, Trace
from counterpoint.spelling import digest_of
from counterpoint.steps import Steps
from counterpoint.study.diffusion import all_runs

HELD: dict[str, tuple[int, ...]] = {"research-v0": (0,), "plan-execute-v0": (0, 2, 4, 6)}
"""Tasks that nobody trains on, one of each kind; their runs are listed, so success is exact."""

PROBED = 4
"""Tasks of a batch whose exact credit is listed."""

FIGURES = ("pearson", "sign_accuracy", "coverage", "false_alarms", "gradient_cosine")
"""What is said of credit beside the exact one."""

Row = dict[str, Any]
"""What is known after one update; the first row of a run is before any."""


class Choices(NamedTuple):
    """Rows as entries of one long vector of probabilities, state by state.

    Attributes:
        states: (anchor, labels) of each state.
        cell: (rows,) the state of each row.
        entry: (rows,) place of what was chosen in the vector.
        owner: (entries,) the state of each entry.
    """

    states: list[tuple[str, Sequence[str]]]
    cell: Ints
    entry: Ints
    owner: Ints

    @staticmethod
    def of(steps: Steps) -> Choices:
        """The rows of some steps."""
        both = np.stack([steps.need("anchor"), steps.need("menu")])
        pairs, cell = np.unique(both, axis=1, return_inverse=True)
        names = steps.names
        states = [(names["anchor"][a], names["menu"][m]) for a, m in pairs.T.tolist()]
        size = np.array([len(labels) for _, labels in states])
        cell = cell.reshape(-1)
        entry = (np.cumsum(size) - size)[cell] + steps.need("action")
        return Choices(states, cell, entry, np.repeat(np.arange(len(size)), size))

    def chances(self, policy: Softmax) -> Floats:
        """(entries,) π of every entry."""
        z = [policy.logits.get(a, {}).get(name, 0.0) for a, names in self.states for name in names]
        weight = np.exp(np.array(z) - max(z))
        return np.asarray(weight / np.bincount(self.owner, weight)[self.owner])

    def slope(self, policy: Softmax, advantage: Floats) -> Floats:
        """(entries,) Σ A ∇log π over the rows."""
        each = np.bincount(self.cell, advantage, minlength=len(self.states))
        taken = np.bincount(self.entry, advantage, minlength=len(self.owner))
        return np.asarray(taken - self.chances(policy) * each[self.owner])


# ---------------------------------------------------------------------------------------------
# Success, exactly


class Listed(NamedTuple):
    """All runs of a task, in the order of what was said and read in them.

    Attributes:
        paths: of each run its acts and results; runs with a common beginning stand side by side.
        choices: of all their turns.
        run: (turns,) the place of a turn's run.
        nature: (runs,) what chance alone adds to the probability of a run.
        outcome: (runs,) how it ends.
        prompts: what anybody was shown in any of them.
    """

    paths: list[tuple[str, ...]]
    choices: Choices
    run: Ints
    nature: Floats
    outcome: Floats
    prompts: str

    def chance(self, policy: Softmax) -> Floats:
        """(runs,) P(nature) · Π π(act | state)."""
        log = np.log(self.choices.chances(policy))[self.choices.entry]
        return np.asarray(self.nature * np.exp(np.bincount(self.run, log)))

    def seqau(self, policy: Softmax, traces: Sequence[Trace]) -> list[list[float]]:
        """Q(h, a) − V(h) of each act of some runs of this task, in order, exactly.

        V of a beginning is Σ P · R ÷ Σ P over the runs that begin so.
        """
        chance = self.chance(policy)
        paid, weight = (np.append(0.0, np.cumsum(x)) for x in (chance * self.outcome, chance))

        def value(path: tuple[str, ...]) -> float:
            low, high = (
                bisect_left(self.paths, path),
                bisect_left(self.paths, (*path, "\U0010ffff")),
            )
            return float((paid[high] - paid[low]) / (weight[high] - weight[low]))

        found = []
        for trace in traces:
            path = _path(trace)
            acts = [n for n, e in enumerate(_said(trace)) if isinstance(e, Act)]
            found.append([value(path[: n + 1]) - value(path[:n]) for n in acts])
        return found


def _said(trace: Trace) -> list[Act | ToolResult]:
    return [event for event in trace.events if isinstance(event, Act | ToolResult)]


def _path(trace: Trace) -> tuple[str, ...]:
    said = _said(trace)
    return tuple(str(e.text if isinstance(e, Act) else e.content) for e in said)


@lru_cache(maxsize=64)
def listed(env: str, team: str, task: int, seed: int) -> Listed:
    """All runs of the task that is group `task` of `rollout` with this seed."""
    runs = sorted(all_runs(make(env, team=team), task, seed), key=lambda run: _path(run[0]))
    steps = Steps.from_traces([trace for trace, _ in runs])
    choices = Choices.of(steps)
    even = np.log(choices.chances(Softmax()))[choices.entry]
    nature = np.array([p for _, p in runs]) / np.exp(np.bincount(steps.rollout, even))
    outcome = np.array([trace.outcome or 0.0 for trace, _ in runs])
    told = [str(e.content) for t, _ in runs for e in t.events if isinstance(e, Observe)]
    paths = [_path(trace) for trace, _ in runs]
    return Listed(paths, choices, steps.rollout, nature, outcome, "\n".join(told))


def _held(env: str, team: str) -> list[Listed]:
    return [listed(env, team, task, 0) for task in HELD[env]]


def success(env: str, team: str, policy: Softmax) -> float:
    """Expected success on the tasks that are held out, of a policy that draws its acts: exact."""
    return float(np.mean([held.chance(policy) @ held.outcome for held in _held(env, team)]))


def digests(team: str, trace: Trace) -> dict[str, str]:
    """What has to be the same for two runs to be compared, by digest: env, prompt, config, tools.

    The first two also say who plays. The option that says so is left out of the settings, so that
    these and the tools are equal for a pair and a single agent.
    """
    header = trace.header
    assert header.env is not None  # ours name it
    settings = {**header.config, "options": {**header.config["options"], "team": None}}
    parts = {
        "env": header.env.digest or "",
        "prompt": "\n".join(held.prompts for held in _held(header.env.id, team)),
        "config": repr(sorted(settings.items())),
        "tools": repr(sorted(header.tools.items())),
    }
    return {name: digest_of(text.encode("utf-8", "replace")).hex() for name, text in parts.items()}


# ---------------------------------------------------------------------------------------------
# Without an oracle


def watched(steps: Steps, credit: Credit) -> Row:
    """What a batch and its credit say by themselves.

    Returns:
        gate: share of folds in which β was used, None without a gate; beta: by agent;
        residual_share: Σ |e| ÷ Σ (|e| + |c|) over turns, None of other methods; distinct;
        failing_together.
    """
    said = credit.diagnostics
    gate = said.get("gate")
    e, c = (np.nansum(np.abs(credit.parts.get(n, np.zeros(1)))) for n in ("residual", "share"))
    beta = {name: found["beta"] for name, found in said.get("coefficients", {}).items()}
    return {
        "gate": None if gate is None else float(np.mean([f["accepted"] for f in gate["folds"]])),
        "beta": {name: b if np.isfinite(b) else None for name, b in beta.items()},
        "residual_share": float(e / (e + c)) if e + c > 0 else None,
        "distinct": distinct(steps),
        "failing_together": failing_together(steps),
    }


def distinct(steps: Steps) -> float:
    """Share of a batch's runs that differ from all before them in what was chosen."""
    held: dict[int, list[tuple[int, int]]] = {}
    for row in np.lexsort((steps.step, steps.rollout)).tolist():
        chosen = int(steps.need("menu")[row]), int(steps.need("action")[row])
        held.setdefault(int(steps.rollout[row]), []).append(chosen)
    return len(set(map(tuple, held.values()))) / len(held)


def failing_together(steps: Steps) -> float | None:
    """Correlation over runs of whether each of two agents failed by what was checked of its work.

    An agent fails where its quality is below 1. None unless there are two agents, and where one of
    them always fails or never does.
    """
    held: Quality = steps.need("quality")
    rows = held.verifiable <= CHECKS.index("checked_fact")
    q = held.value[rows]
    failed = np.full((len(steps.names["agent"]), steps.n_rollouts), np.nan)
    failed[held.agent[rows], held.rollout[rows]] = np.where(np.isnan(q), np.nan, q < 1)
    known = failed[:, ~np.isnan(failed).any(axis=0)]
    if len(known) != 2 or not known.size or not np.ptp(known, axis=1).all():
        return None
    return float(np.corrcoef(known)[0, 1])


# ---------------------------------------------------------------------------------------------
# With the oracle


def against_exact(
    steps: Steps, credit: Credit, traces: Sequence[Trace], policy: Softmax, team: str, seed: int
) -> Row:
    """The credit of the first tasks of a batch beside seqau, and what each quality says of that.

    Args:
        steps: the table of `traces`.
        credit: one number a turn.
        traces: a batch, task by task.
        policy: who played it, not yet updated.
        team: who that is, by the option of the environment.
        seed: of the batch.

    Returns:
        credit_NAME for each of `FIGURES`, None where undefined, and quality.
    """
    held: dict[int | None, list[Trace]] = {}
    for trace in traces:
        held.setdefault(trace.header.task_seed, []).append(trace)
    env = traces[0].header.env
    assert env is not None  # ours name it
    exact = [
        value
        for task, runs in enumerate(list(held.values())[:PROBED])
        for run in listed(env.id, team, task, seed).seqau(policy, runs)
        for value in run
    ]
    rows, choices = np.arange(len(exact)), Choices.of(steps)

    def gradient(values: Floats) -> Floats:
        spread = np.zeros(len(steps))
        spread[rows] = values
        return choices.slope(policy, spread)

    estimate = Credit(credit.values[rows], estimand=credit.estimand)
    found = score(estimate, Credit(np.array(exact), estimand="seqau"), gradient=gradient)
    figures = {f"credit_{name}": _known(getattr(found, name)) for name in FIGURES}
    return {**figures, "quality": _quality(steps, rows, np.array(exact))}


def _known(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None


def _quality(steps: Steps, rows: Ints, exact: Floats) -> dict[str, float | None]:
    """Correlation within tasks of each quality with the exact credit of its agent in the run."""
    held: Quality = steps.need("quality")
    shape = (len(steps.names["agent"]), steps.n_rollouts)
    worth, acts = np.zeros(shape), np.zeros(shape)
    np.add.at(worth, (steps.agent[rows], steps.rollout[rows]), exact)
    np.add.at(acts, (steps.agent[rows], steps.rollout[rows]), 1)
    group = np.zeros(steps.n_rollouts, dtype=np.int64)
    group[steps.rollout] = steps.group
    said: dict[str, float | None] = {}
    for agent, channel in sorted({*zip(held.agent.tolist(), held.channel.tolist(), strict=True)}):
        at = (held.agent == agent) & (held.channel == channel) & ~np.isnan(held.value)
        at &= acts[agent, held.rollout] > 0
        code = group[held.rollout[at]]
        x, y = (
            v - groups.mean(code, v, steps.n_groups)[code]
            for v in (held.value[at], worth[agent, held.rollout[at]])
        )
        size = float(np.sqrt((x @ x) * (y @ y)))
        name = f"{steps.names['agent'][agent]}: {held.channels[channel]}"
        said[name] = float(x @ y) / size if size > 1e-12 else None
    return said
