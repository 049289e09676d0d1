"""The command that trains: play, credit, update, again and again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli import render
from counterpoint.cli.options import Budgeted, Json, Settings, app, budget_of, options_of, policy_of
from counterpoint.envs import make


@app.command("train")
def train_(
    env: Annotated[str, typer.Argument(metavar="ENV", help="`list envs`, or file.py:Class.")],
    method: Annotated[str, typer.Option(help="A credit method, or file.py:function.")],
    steps: Annotated[int, typer.Option(min=0, help="Updates.")] = 20,
    groups: Annotated[int, typer.Option(min=1, help="Tasks in each step.")] = 16,
    rollouts: Annotated[int, typer.Option(min=1, help="Runs of each task.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    lr: Annotated[float, typer.Option(help="Step size.")] = 1.0,
    policy: Annotated[
        str, typer.Option(help="`uniform`, a table's file, or file.py:policy.")
    ] = "uniform",
    learners: Annotated[
        str | None, typer.Option(help="Roles that learn, with commas; default: all.")
    ] = None,
    apart: Annotated[bool, typer.Option("--apart", help="A policy for each role.")] = False,
    settings: Settings = None,
    dials: Annotated[
        list[str] | None, typer.Option("--dial", help="An option of the environment, NAME=VALUE.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option("--update", help="An option of `update`, NAME=VALUE.")
    ] = None,
    budget: Budgeted = None,
    out: Annotated[Path | None, typer.Option("-o", help="A folder for everything.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder's run.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Three small steps.")] = False,
    json_: Json = False,
) -> None:
    """Train a team by a credit method, and show how it went."""
    from counterpoint.report import some_steps
    from counterpoint.training import cast_for, train

    played = make(env, **options_of(dials))
    roles = None if learners is None else learners.split(",")
    team = cast_for(played, policy_of(policy), roles, shared=not apart)
    curve = train(
        played,
        team,
        method,
        steps=min(steps, 3) if quick else steps,
        groups=min(groups, 4) if quick else groups,
        rollouts=min(rollouts, 4) if quick else rollouts,
        seed=seed,
        options=options_of(settings),
        budget=budget_of(budget) or None,
        out=out,
        resume=resume,
        progress=partial(render.progress, label="training"),
        **{"lr": lr, **options_of(rule, "--update takes NAME=VALUE")},
    )
    if json_:
        render.as_json(curve)
        return
    render.table(some_steps(curve), f"{method} in {played.id}")
    if out is not None:
        render.note(f"wrote {out}; `counterpoint report {out} -o PAGE` makes a page of it")
