"""The commands that play environments: record, replay, and fork, which plays on otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from counterpoint.cli import render
from counterpoint.cli.options import (
    Append,
    Budgeted,
    Changed,
    Force,
    Json,
    Out,
    OwnEnv,
    OwnPolicy,
    Priced,
    Traces,
    app,
    budget_of,
    options_of,
    own_env,
    policy_of,
    read_traces,
)
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.harness import Cast, attach, runs
from counterpoint.recorder import Recorder
from counterpoint.redrive import replay
from counterpoint.redrive.arms import arm_of
from counterpoint.redrive.branches import Branches
from counterpoint.redrive.continuations import at_of, diff
from counterpoint.redrive.interventions import WAYS
from counterpoint.save import save, trace_lines
from counterpoint.schema import Finding, Trace
from counterpoint.spelling import Refused


@app.command()
def record(
    env: Annotated[str, typer.Argument(metavar="ENV", help="`list envs`, or file.py:Class.")],
    out: Annotated[Path, typer.Option("-o", help="The trace file to write.")],
    groups: Annotated[int, typer.Option(min=1, help="Tasks.")] = 16,
    rollouts: Annotated[int, typer.Option(min=1, help="Runs of each task.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    policy: Annotated[
        str, typer.Option(help="`uniform`, a table's file, or file.py:policy.")
    ] = "uniform",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the environment, NAME=VALUE.")
    ] = None,
    append: Append = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Play an environment and write every event down as it happens."""
    played = make(env, **options_of(settings))
    team = policy_of(policy)
    if out.exists() and not append:
        if out.is_dir() or not force:
            raise Refused(f"{out} exists; choose another name, or say --append or --force")
        out.unlink()
    outcomes, events = [], 0
    with Recorder(out) as recorder:
        traces = runs(
            played, team, groups=range(groups), rollouts=rollouts, seed=seed, recorder=recorder
        )
        for trace in render.progress(traces, "recording"):
            outcomes.append(trace.outcome)
            events += len(trace)
    scored = [outcome for outcome in outcomes if outcome is not None]
    mean = sum(scored) / len(scored) if scored else None
    result = {"env": played.id, "traces": len(outcomes), "events": events, "mean_outcome": mean}
    render.as_json(result) if json_ else render.pairs(result)


@app.command("replay")
def replay_(path: Traces, json_: Json = False) -> None:
    """Play recorded runs again and compare byte for byte; exit 1 if one diverged."""
    told = replay(render.progress(_with_parents(path), "replaying"))
    if json_:
        render.as_json(told.as_dict())
    else:
        for text in str(told).splitlines():
            render.line(render.plain(text))
    raise typer.Exit(1 if told.diverged else 0)


def _with_parents(path: Path) -> Iterator[Trace]:
    """The traces; forks at the end, with the parents that are there at hand."""
    forks: dict[str, Trace] = {}
    for trace in read_traces(path):
        if trace.header.fork is None:
            yield trace
        else:
            forks[trace.trace_id] = trace
    wanted = {fork.header.fork.trace_id for fork in forks.values() if fork.header.fork}
    parents = {t.trace_id: t for t in read(path) if t.trace_id in wanted} if forks else {}
    for fork in forks.values():
        above = fork.header.fork.trace_id if fork.header.fork else ""
        parent = forks.get(above) or parents.get(above)
        if parent is not None:
            attach(fork, Cast(parent=parent))
    yield from forks.values()


SHOWN = 12
"""Branches that the table shows."""


@app.command("fork")
def fork_(
    path: Traces,
    at: Annotated[str, typer.Option("--at", help="A seq, first:KIND or last:KIND.")],
    do: Annotated[str, typer.Option("--do", help=f"One of {', '.join(WAYS)}.")],
    n: Annotated[int, typer.Option("-n", help="Branches.")],
    trace: Annotated[str | None, typer.Option(help="Id of the trace; default: the first.")] = None,
    content: Annotated[
        str | None, typer.Option(help="What is put in; ids with commas for redirect.")
    ] = None,
    level: Annotated[
        Literal["channel", "decision"] | None, typer.Option(help="Where --do has both.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws after the fork.")] = 0,
    streams: Annotated[
        Literal["branch", "parent"], typer.Option(help="Draws of each branch, or the record's.")
    ] = "branch",
    env: OwnEnv = None,
    policy: OwnPolicy = None,
    allow_changed: Changed = False,
    budget: Budgeted = None,
    price: Priced = False,
    workers: Annotated[int, typer.Option(help="Processes that share the branches.")] = 1,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Go back to an event, do something to it, and play on to the end, n times."""
    if out is not None and out.exists() and not (append or force):
        raise Refused(f"{out} exists; choose another name, or say --append or --force")
    parent, known = _found(path, trace)
    if append and out is not None and out.exists():
        known |= _branches(out)
    arm = arm_of(
        parent,
        at_of(parent, at),
        do,
        content=content.split(",") if content is not None and do == "redirect" else content,
        seed=seed,
        streams=streams,
        level=level,
        env=own_env(env, parent.header),
        policies=None if policy is None else policy_of(policy),
        allow_changed=allow_changed,
    )
    if price:
        cost = vars(arm.price(n))
        render.as_json(cost) if json_ else render.pairs(cost)
        return
    watched = partial(render.progress, label="playing")
    played = arm.played(n, workers, known, watched, budget_of(budget))
    if out is not None:
        new = [branch for branch in played.traces if branch.trace_id not in known]
        save(out, (line for branch in new for line in trace_lines(branch)), append=append,
             force=force)  # fmt: skip
    render.as_json(played.as_dict()) if json_ else _shown(played)
    if len(played.traces) < n:
        raise typer.Exit(1)


def _found(path: Path, trace_id: str | None) -> tuple[Trace, dict[str, Trace]]:
    """The trace, with its parents at hand if it is a fork, and all branches that are there."""
    chosen: Trace | None = None
    forks: list[Trace] = []
    others = 0
    for trace in read_traces(path):
        others += chosen is not None
        if chosen is None and trace_id in (None, trace.trace_id):
            chosen = trace
        elif trace.header.fork is not None:
            forks.append(trace)
    if chosen is None:
        wanted = "any trace" if trace_id is None else f"a trace {trace_id}"
        raise Refused(f"{path} does not hold {wanted}; `show --summary` lists what it holds")
    if trace_id is None and others:
        render.note(f"the first of {others + 1} traces; --trace ID takes another")
    child = chosen
    while child.header.fork is not None:
        above = _named(path, child.header.fork.trace_id)
        if above is None:
            break
        attach(child, Cast(parent=above))
        child = above
    return chosen, {fork.trace_id: fork for fork in forks}


def _branches(path: Path) -> dict[str, Trace]:
    """The branches of a file that others will be added to. Refused if a line of it is torn."""
    found: list[Finding] = []
    branches = {t.trace_id: t for t in read(path, findings=found) if t.header.fork is not None}
    if found:
        raise Refused(f"{found[0]}; take the line out, and its branch is played again")
    return branches


def _named(path: Path, trace_id: str) -> Trace | None:
    return next((trace for trace in read_traces(path) if trace.trace_id == trace_id), None)


def _shown(played: Branches) -> None:
    """For people: what the arm says, and where its first branches part from the run."""
    for text in str(played).splitlines():
        render.line(render.plain(text))
    low, high = played.ci
    render.line(f"95 % interval {low:.3g} to {high:.3g}; played {_counted(played)}")
    render.table(
        [
            {
                "branch": branch.header.rollout_id,
                "trace id": branch.trace_id,
                "outcome": branch.outcome,
                "run / branch": diff(played.parent, branch).what,
            }
            for branch in played.traces[:SHOWN]
        ]
    )


def _counted(played: Branches) -> str:
    """How often each outcome came."""
    parts: Iterator[str] = (
        f"{'not scored' if outcome is None else f'{outcome:g}'} × {count}"
        for outcome, count in played.counts().items()
    )
    return ", ".join(parts)
