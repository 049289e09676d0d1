"""The loop: play, credit, update, keep; nothing in it that a loop of yours could not do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from counterpoint import groups
from counterpoint.branches import Spent
from counterpoint.credit import METHODS, Account, Unidentified, estimate, parameters
from counterpoint.credit import method as function
from counterpoint.envs import Env
from counterpoint.harness import header_of, rollout, team_of
from counterpoint.ledger import Credit
from counterpoint.policies import Policy, described
from counterpoint.redrive import Branching
from counterpoint.redrive.follow import Team
from counterpoint.redrive.standing import cost
from counterpoint.schema import Reward, Stop, Trace
from counterpoint.spelling import Refused, digest_of
from counterpoint.steps import Steps
from counterpoint.streams import Draws
from counterpoint.training.climb import update
from counterpoint.training.kept import Kept, Row, encode

Budget = Mapping[str, int]
"""The most that may be spent, by the names of `Spent`."""

Progress = Callable[[Iterable[int]], Iterable[int]]
"""Passes steps on, and may show that they go by."""


class _Run(NamedTuple):
    """What stays the same from step to step."""

    env: Env
    team: dict[str, Policy]
    method: str
    options: Mapping[str, Any]
    size: tuple[int, int]
    seed: int
    rule: Mapping[str, Any]
    optimizer: Any


class _Step(NamedTuple):
    """What a step was."""

    row: Row
    traces: list[Trace]
    steps: Steps
    credit: Credit


def train(
    env: Env,
    policies: Team,
    method: str,
    *,
    steps: int,
    groups: int = 16,
    rollouts: int = 8,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    budget: Budget | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **rule: Any,
) -> list[Row]:
    """Train a team: again and again play, credit by a method, and update the policies.

    Args:
        env: where they play.
        policies: one policy for all roles, or one per role; those that are `trainable` move, in
            place. `training.cast_for` freezes some, and copies others.
        method: a name of the table, or file.py:function. One that runs runs again is given a
            `Branching` of the step's traces.
        steps: how many updates.
        groups: tasks in each step, drawn anew every time.
        rollouts: runs of each task.
        seed: of everything.
        options: of the method.
        budget: the most that the whole run may spend, by the names of `Spent`, runs and branches
            together. The first step that it does not cover is the last one; its branches keep to
            what is left.
        out: a folder for traces, credit, policies, settings and the curve (`kept`).
        resume: go on with the run that is in the folder.
        progress: is given the steps and passes them on, such as a progress bar.
        **rule: of `update`: lr, and what else it takes; optimizer is "adam" for models, or None.

    Returns:
        The curve, one row a step: step, runs, success (mean of what the team was paid, costs left
        out), outcome (costs taken off), truncated (runs that a limit ended), dead_groups (groups
        that gave nothing to learn from), env_calls, forward_passes and tokens (runs and branches),
        branches_left_out (that the budget did not cover), versions, what `update` says, and under
        `credit` what the method's diagnostics say in one number or word.

    Raises:
        Refused: what `rollout`, `estimate` and `update` refuse, with the step; a folder that holds
            another run, or one that cannot be written. What was finished before stays whole.
    """
    team = team_of(env, policies)
    learn = _learners(team)
    optimizer = _optimizer(rule.get("optimizer"), learn)
    run = _Run(env, team, method, dict(options or {}), (groups, rollouts), seed, rule, optimizer)
    if steps < 0 or min(run.size) < 1:
        raise Refused(f"{steps} steps of {groups} groups of {rollouts} runs cannot be played")
    _named(rule)
    if odd := [name for name in budget or () if name not in vars(Spent())]:
        raise Refused(f"a budget is in {', '.join(vars(Spent()))}, not {odd[0]}")
    kept = None if out is None else Kept(out, _settings(run, budget), resume)
    rows: list[Row] = []
    if kept is not None:
        kept.put_back(learn, optimizer)
        rows += kept.rows
    for step in (progress or iter)(range(len(rows), steps)):
        left = _left(budget, rows)
        if left is not None and (
            min(left.values()) <= 0 or any(r["branches_left_out"] for r in rows)
        ):
            break
        made = _stepped(run, step, left)
        if kept is not None:
            params = _plain(parameters(method, run.options))
            kept.keep(made.row, made.traces, made.steps, made.credit, learn, optimizer,
                      method=method, params=params)  # fmt: skip
        rows.append(made.row)
    return rows


def _named(rule: Mapping[str, Any]) -> None:
    """Refuse an option that `update` does not have, or a missing step size."""
    known = list(inspect.signature(update).parameters)[3:]
    if odd := [name for name in rule if name not in known]:
        raise Refused(f"update has no option {odd[0]!r}; it has {', '.join(known)}")
    if "lr" not in rule:
        raise Refused("lr is missing; a step size is above 0")


def _optimizer(name: Any, learn: Sequence[Any]) -> Any:
    """The optimiser of that name for the models among those that learn."""
    if name is None:
        return None
    if name != "adam":
        raise Refused(f"optimizer is {name!r:.80}; in a loop it is 'adam', or None")
    from counterpoint.training.torch_updates import adam

    return adam(learn)


def _learners(team: Mapping[str, Policy]) -> list[Any]:
    """Every policy that learns, once."""
    return list({id(p): p for p in team.values() if described(p, "trainable")}.values())


def _left(budget: Budget | None, rows: Sequence[Row]) -> dict[str, int] | None:
    """What is left of the budget."""
    if budget is None:
        return None
    return {name: most - sum(row[name] for row in rows) for name, most in budget.items()}


def _stepped(run: _Run, step: int, left: Budget | None) -> _Step:
    seed = Draws(str(run.seed), "schedule", "train", step).integer(1 << 53)
    try:
        traces = rollout(run.env, run.team, groups=run.size[0], rollouts=run.size[1], seed=seed)
        steps = Steps.from_traces(traces)
        specs = run.env.tools()
        spent = sum((cost(trace.events, 0, specs) for trace in traces), Spent())
        credit, account = credited(run.method, steps, traces, run.options, _less(left, spent))
        told = update(run.team, steps, credit, **{**run.rule, "optimizer": run.optimizer})
    except Refused as refusal:
        raise Refused(f"step {step}: {refusal}") from refusal
    spent = spent + account.spent
    row = {
        "step": step,
        "runs": len(traces),
        "success": _mean([_paid(trace) for trace in traces]),
        "outcome": _mean([trace.outcome for trace in traces]),
        "truncated": sum(isinstance(e, Stop) and e.truncated for t in traces for e in t.events),
        "dead_groups": _dead(steps, credit),
        **vars(spent),
        "branches_left_out": account.left_out,
        "versions": [described(policy, "version") for policy in _learners(run.team)],
        **told,
        "credit": _plain(credit.diagnostics),
    }
    # as it will be read again: what is no number is None
    return _Step(msgspec.json.decode(encode(row)), traces, steps, credit)


def credited(
    method: str,
    steps: Steps,
    traces: Sequence[Trace],
    options: Mapping[str, Any] | None = None,
    budget: Budget | None = None,
) -> tuple[Credit, Account]:
    """Credit per turn by a method, and the account of the branches that it took.

    A method that needs to run the runs again is given their `Branching`, within the budget; one
    about decisions gives numbers per turn by `by_turn`, and none where nobody could decide.

    Args:
        method: as in `estimate`.
        steps: the table of `traces`.
        traces: as `rollout` gave them, not yet updated on.
        options: of the method.
        budget: the most that branches may cost; None for no limit.

    Raises:
        Refused: whatever the method refuses.
    """
    given = dict(options or {})
    account = Account(Branching(traces), steps, budget)
    asks = "replay" in inspect.signature(function(method)).parameters
    if asks and _measures(method, steps):
        given = {"replay": account, **given}
    try:
        return by_turn(steps, estimate(method, steps, **given)), account
    except Unidentified as nobody:
        if "replay" not in given or nobody.found.taken or nobody.found.declined:
            raise
    # the decision never came up in these runs: nothing to learn from them, which is no fault
    nothing = np.full(len(steps), np.nan)
    return Credit(nothing, estimand="seqau", diagnostics={"effective_sample_size": 0}), account


def _measures(method: str, steps: Steps) -> bool:
    """Whether a method has to run the runs again; one of your own is always let."""
    if method not in METHODS:
        return True
    needs = METHODS[method].needs
    return bool(needs & {"replay", "decisions"}) or ("value" in needs and steps.value is None)


def by_turn(steps: Steps, credit: Credit) -> Credit:
    """The credit of decisions as credit of the turns that took or declined them.

        A = (1 − p) · τ where it was taken,  −(1 − p) · τ where it was declined

    p is the probability of what was done. So A is Q − V of that choice between two, and its mean
    over the policy 0. Turns without such a decision were never credited; those with several get
    the sum. Credit of turns stays as it is.

    Raises:
        Refused: decisions without probabilities.
    """
    if credit.unit != "decision":
        return credit
    units = steps.units("decision")
    made = np.flatnonzero(credit.credited)
    unlikely = -np.expm1(units.logprob[made])
    if np.isnan(unlikely).any():
        raise Refused("these decisions have no probabilities; their policy has no `probs`")
    sign = np.where(credit.parts["taken"][made] > 0, 1.0, -1.0)
    earned = groups.total(units.row[made], sign * unlikely * credit.values[made], len(steps))
    seen = groups.count(units.row[made], len(steps)) > 0
    values = np.where(seen, earned, np.nan)
    return Credit(values, "turn", "seqau", credit.identified, {}, credit.diagnostics)


def _dead(steps: Steps, credit: Credit) -> int:
    """Groups in which nobody is credited with anything but 0."""
    moved = groups.total(steps.group, np.abs(np.nan_to_num(credit.values)), steps.n_groups)
    return int((moved == 0).sum())


def _paid(trace: Trace) -> float | None:
    """What the team was paid for its result, costs left out; None if nothing was scored."""
    amounts = [
        event.amount
        for event in trace.events
        if isinstance(event, Reward) and event.channel == "team" and event.family != "R7"
    ]
    scored = [amount for amount in amounts if amount is not None]
    return math.fsum(scored) if scored else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _less(budget: Budget | None, spent: Spent) -> Budget | None:
    if budget is None:
        return None
    return {name: max(0, most - getattr(spent, name)) for name, most in budget.items()}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that JSON has a form for and that are no table."""
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
    return {k: v for k, v in plain.items() if v is None or isinstance(v, str | bool | int | float)}


def _settings(run: _Run, budget: Budget | None) -> dict[str, Any]:
    """What a folder says of its run; what differs here is another run."""
    header = header_of(run.env, run.team, group=0, rollout=0, seed=run.seed)
    own = Path(run.method.rpartition(":")[0])
    return {
        "env": header.env,
        "config": header.config,
        "tools": header.tools,
        "policies": header.policies,
        "learn": [role for role, p in run.team.items() if described(p, "trainable")],
        "method": run.method,
        "method_digest": digest_of(own.read_bytes()).hex() if own.is_file() else None,
        "options": _plain(parameters(run.method, run.options)),
        "groups": run.size[0],
        "rollouts": run.size[1],
        "seed": run.seed,
        "budget": budget,
        "update": _plain(run.rule),
    }
