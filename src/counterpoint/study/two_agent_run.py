"""One training run of the two-agent experiment: an arm, a seed, and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.branches import Spent
from counterpoint.envs import make
from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.quality import Quality
from counterpoint.redrive.standing import cost
from counterpoint.schema import Trace
from counterpoint.steps import Steps
from counterpoint.streams import Draws
from counterpoint.study.two_agent_watch import Row, against_exact, digests, success, watched
from counterpoint.training import credited, update


class Arm(NamedTuple):
    """What is compared: who plays, and how it is credited.

    A batch is `groups` tasks of `rollouts` runs each. With `permuted`, each quality of an agent is
    dealt anew among the runs of a task. `seeds` is the most of them that are run.
    """

    method: str
    options: Mapping[str, Any] = {}
    team: str = "pair"
    permuted: bool = False
    groups: int = 8
    rollouts: int = 8
    seeds: int = 10


_GATED = {"gate": True}
_EQUAL = {"advantage": "equal", "gate": True}

HEADLINE: dict[str, Arm] = {
    "single_agent": Arm("grpo", team="single"),
    "naive_grpo": Arm("grpo"),
    "cad_upstream": Arm("cad_grpo", _GATED),
    "cad_upstream_permuted": Arm("cad_grpo", _GATED, permuted=True),
    "cad_equal": Arm("cad_grpo", _EQUAL),
    "cad_equal_permuted": Arm("cad_grpo", _EQUAL, permuted=True),
}
"""The three arms that are asked about, CAD-GRPO in two forms, and the control of each form."""

APPENDIX: dict[str, Arm] = {
    "rloo": Arm("rloo", seeds=4),
    "dr_mas": Arm("dr_mas", seeds=4),
    "gigpo": Arm("gigpo", seeds=4),
    "cad_upstream_ungated": Arm("cad_grpo", seeds=4),
    "cad_shared_ungated": Arm("cad_grpo", {"advantage": "shared"}, seeds=4),
    "cad_equal_ungated": Arm("cad_grpo", {"advantage": "equal"}, seeds=4),
    "cad_drop_ungated": Arm("cad_grpo", {"advantage": "drop"}, seeds=4),
    "sharp": Arm("sharp", seeds=4),
    "c3": Arm("c3", {"alternatives": 2}, rollouts=1, seeds=4),
    "blame": Arm("blame", {"n": 2}, rollouts=1, seeds=4),
    "fusion": Arm("fusion", {"budget": 64}, groups=4, seeds=4),
}
"""Everything else, on fewer seeds. Methods that pay for branches play smaller batches, so that a
batch and its branches cost about what a batch of the others does."""

ARMS = HEADLINE | APPENDIX

BUDGET: dict[str, Spent] = {
    "research-v0": Spent(env_calls=1536, tokens=26_000),
    "plan-execute-v0": Spent(env_calls=2304, tokens=24_000),
}
"""What a run may spend, in calls of tools and in tokens; branches are paid out of it."""

MOST = 3
"""Who hardly calls a tool never spends its calls: this many times the tokens end a run, too."""

PROBES = 3
"""How often in a run credit is held against the exact one."""

KEPT = 8
"""Runs of the last batch that are kept."""

_SHORT = 1e-9  # a length that every gradient has but one that is 0


class Cell(NamedTuple):
    """One training run: where, which arm of `ARMS`, how far the table may move, and a seed."""

    env: str
    method: str
    path: float
    seed: int


class Trained(NamedTuple):
    """A curve, the last runs, and the digests of what has to be alike."""

    rows: list[Row]
    traces: list[Trace]
    digests: dict[str, str]


def scaled(env: str, scale: float) -> Spent:
    """The budget of an environment, or a part of it."""
    whole = BUDGET[env]
    return Spent(round(whole.env_calls * scale), 0, round(whole.tokens * scale))


def trained(cell: Cell, scale: float = 1.0, probes: int = PROBES) -> Trained:
    """Train an arm until calls and tokens are both spent.

    Every update moves the table by a length that is its share of the budget times `cell.path`: the
    direction is the method's, the pace is the same for everybody.

    Args:
        cell: what is run.
        scale: of the budget.
        probes: how often credit is held against the exact one, at equal distances of the calls.
    """
    arm, most = ARMS[cell.method], scaled(cell.env, scale)
    env, policy = make(cell.env, team=arm.team), Softmax()
    spent, tasks, probed = Spent(), 0, 0
    start = {"step": 0, "env_calls": 0, "tokens": 0, "rollouts": 0}
    rows = [{**cell._asdict(), **start, "success": success(cell.env, arm.team, policy)}]
    traces: list[Trace] = []
    while due := batch_size(arm, most, spent, tasks):
        seed = Draws(str(cell.seed), "schedule", "two-agent", len(rows)).integer(1 << 53)
        traces = rollout(env, policy, groups=due, rollouts=arm.rollouts, seed=seed)
        steps = Steps.from_traces(traces)
        seen = permuted(steps, seed) if arm.permuted else steps
        credit, account = credited(arm.method, seen, traces, arm.options)
        row = watched(steps, credit)
        if probed < probes and spent.env_calls * probes >= probed * most.env_calls:
            probed += 1
            row |= against_exact(steps, credit, traces, policy, arm.team, seed)
        paid = sum((cost(t.events, 0, env.tools()) for t in traces), account.spent)
        share = max(paid.env_calls / most.env_calls, paid.tokens / most.tokens)
        told = update(policy, steps, credit, lr=cell.path * share / _SHORT, max_norm=_SHORT)
        spent, tasks = spent + paid, tasks + due
        row |= {"env_calls": spent.env_calls, "tokens": spent.tokens, "entropy": told["entropy"]}
        row |= {"step": len(rows), "success": success(cell.env, arm.team, policy)}
        rows.append({**cell._asdict(), **row, "rollouts": rows[-1]["rollouts"] + len(traces)})
    return Trained(rows, traces[:KEPT], digests(arm.team, traces[0]))


def batch_size(arm: Arm, most: Spent, spent: Spent, tasks: int) -> int:
    """How many tasks come next: a whole batch, or what is left until calls or tokens run out.

    Args:
        arm: whose batch it is.
        most: what it may spend.
        spent: what it has spent.
        tasks: how many it has played for that.

    Returns:
        Tasks, 0 where calls and tokens are spent but for less than half a task.
    """
    if not tasks:
        return arm.groups
    if spent.tokens >= MOST * most.tokens:
        return 0
    pairs = ((most.env_calls, spent.env_calls), (most.tokens, spent.tokens))
    left = [(whole - gone) * tasks / max(gone, 1) for whole, gone in pairs]
    unspent = [each for each in left if each >= 0.5]
    return min(arm.groups, max(1, round(min(unspent)))) if unspent else 0


def permuted(steps: Steps, seed: int) -> Steps:
    """The steps with each quality of an agent dealt anew among the runs of its group.

    What is lost is which run a value belongs to: its distribution stays, and β has nothing to find.
    """
    held: Quality = steps.need("quality")
    group = np.zeros(steps.n_rollouts, dtype=np.int64)
    group[steps.rollout] = steps.group
    key = groups.pair(groups.pair(group[held.rollout], held.agent), held.channel)
    chance = np.random.default_rng(seed).random(len(held))
    value = np.empty_like(held.value)
    value[np.argsort(key, kind="stable")] = held.value[np.lexsort((chance, key))]
    return replace(steps, quality=replace(held, value=value))
