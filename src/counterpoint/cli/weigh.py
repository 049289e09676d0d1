"""The commands that say who earned the reward: credit, and score, which judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from counterpoint.cli import render
from counterpoint.cli.again import Again, Answer, accounts, answered, foreign
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
    Settings,
    app,
    options_of,
)
from counterpoint.credit import METHODS, Account, estimate, parameters, ppo_ratio, score
from counterpoint.credit.identify import Unidentified
from counterpoint.creditfile import entries, matched, read_entries
from counterpoint.formats import read
from counterpoint.games import Plays, deal, gradient, play, truth
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.rows import ROWS, batch_of, difference, load_batch, save_batch
from counterpoint.save import save
from counterpoint.schema import Finding, LateReward, Trace
from counterpoint.scoring import over_batches
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.store import records
from counterpoint.units import Units
from counterpoint.vocabulary import UNITS


@app.command()
def credit(
    methods: Annotated[str, typer.Argument(metavar="METHOD[,METHOD]", help="Names, or file.py:f.")],
    path: Annotated[Path, typer.Argument(metavar="TRACES", help="Traces, or a trainer's batch.")],
    settings: Settings = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every intermediate.")] = False,
    format_: Annotated[str | None, typer.Option("--format", help="Foreign format.")] = None,
    late: Annotated[Path | None, typer.Option("--late", help="A file of late rewards.")] = None,
    unit: Annotated[str, typer.Option(help=f"What carries it: {', '.join(UNITS)}.")] = "turn",
    how: Annotated[
        Literal["mean", "sum"], typer.Option(help="Of several turns, for another --unit.")
    ] = "mean",
    rerun: Annotated[
        bool | None,
        typer.Option("--rerun/--no-rerun", help="Play on from the runs; default: as METHOD needs."),
    ] = None,
    budget: Budgeted = None,
    price: Priced = False,
    cache: Annotated[
        Path | None, typer.Option(help="Keep branches in this file or folder; play none twice.")
    ] = None,
    env: OwnEnv = None,
    policy: OwnPolicy = None,
    allow_changed: Changed = False,
    rows: Annotated[
        str | None, typer.Option(help=f"Write a trainer's batch: {', '.join(ROWS)}.")
    ] = None,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Say what every turn, or another unit, earned, by one method or several on the same runs."""
    options, names = options_of(settings), methods.split(",")
    again = Again(rerun, budget, price, cache, env, policy, allow_changed)
    if path.suffix in (".npz", ".parquet"):
        moot = {"--unit": unit != "turn", "--late": late, "--format": format_, "--append": append}
        if said := again.said() + [option for option, given in moot.items() if given]:
            raise Refused(f"{path} is a trainer's batch, of which {said[0]} says nothing")
        _credit_batch(methods, path, options, out, force, json_)
        return
    found: list[Finding] = []
    kept: list[Trace] = []
    traces = render.progress(read(path, format_, findings=found), "reading")
    rewards = _late(late) if late else None
    causal = options.get("causal") is True
    steps = Steps.from_traces(_keep(traces, kept), rewards, descent=causal)
    try:
        with accounts(again, names, steps, kept) as replay_for:
            answers, refused = _estimates(names, steps, options, replay_for)
    except Unidentified as unidentified:
        if json_:
            render.as_json(unidentified.as_dict())
        if kept and foreign(kept) is None:
            render.note("these runs can be played on from: with --rerun, branches tell it")
        raise
    if price:
        _priced(answers, refused, json_)
        return
    results = {
        name: ppo_ratio(steps, answer.credit) if answer.credit.unit == "turn" else answer.credit
        for name, answer in answers.items()
    }
    left_out = {name: answer.left_out for name, answer in answers.items() if answer.left_out}
    if rows:
        _hand_out(rows, steps, results, options, out, force)
        out = None
    units = {n: steps.units(unit if r.unit == "turn" else r.unit) for n, r in results.items()}
    if unit != "turn":
        results = {
            name: result.at(units[name], how) if result.unit == "turn" else result
            for name, result in results.items()
        }
    params = {name: parameters(name, options) for name in results}
    if out and steps.event is not None:
        lines = (
            entry
            for name, result in results.items()
            for entry in entries(
                result, units[name], steps.event, kept, method=name, params=params[name]
            )
        )
        save(out, lines, append=append, force=force)
    if json_:
        shown = [
            render.listing(name, result, params[name], steps, units[name], explain)
            | ({"left_out": left_out[name]} if name in left_out else {})
            for name, result in results.items()
        ]
        shown += [{"method": n, "identified": "not", "reason": why} for n, why in refused.items()]
        render.as_json(shown[0] if len(shown) == 1 else shown)
    else:
        for name, result in results.items():
            render.line(f"{name}: {render.plain(str(result))}")
            render.line(f"  {render.plain(_why(result, steps, units[name]))}")
            if explain:
                render.explain(result, steps, units[name])
    for name, why in refused.items():
        render.note(render.plain(f"refused: {name}: {why}"))
    for name, number in left_out.items():
        render.note(f"{name}: the budget is spent: {number} branches are left out")
    if found:
        render.note(f"{len(found)} lines could not be read; `counterpoint validate` names them")
    if found or refused or left_out:
        raise typer.Exit(1)


def _estimates(
    names: list[str],
    steps: Steps,
    options: dict[str, Any],
    replay_for: Callable[[str], Account | None],
) -> tuple[dict[str, Answer], dict[str, str]]:
    """The credit by every method, and of several the refusals; one alone is refused outright."""
    answers, refused = {}, {}
    for name in names:
        try:
            answers[name] = answered(name, steps, options, replay_for(name))
        except Refused as refusal:
            if len(names) == 1:
                raise
            refused[name] = str(refusal)
    return answers, refused


def _why(credit: Credit, steps: Steps, units: Units) -> str:
    """What the largest credit is made of, and where it stands: trace and event."""
    if not credit.credited.any():
        return credit.why()
    unit = int(np.nanargmax(np.abs(credit.values)))
    row, seq = int(units.row[unit]), int(units.seq[unit])
    place = steps.label("rollout", row) if seq < 0 else f"{steps.label('rollout', row)}:{seq}"
    return f"{place}, {credit.why(unit)}"


def _priced(answers: dict[str, Answer], refused: dict[str, str], json_: bool) -> None:
    """Say what the branches of each method would cost that are not held yet."""
    rows = [{"method": name, **vars(answer.priced)} for name, answer in answers.items()]
    render.as_json(rows) if json_ else render.table(rows)
    for name, why in refused.items():
        render.note(render.plain(f"refused: {name}: {why}"))
    if refused:
        raise typer.Exit(1)


def _hand_out(
    rows: str,
    steps: Steps,
    results: dict[str, Credit],
    options: dict[str, Any],
    out: Path | None,
    force: bool,
) -> None:
    """Write a trainer's batch with the advantages of the one method."""
    if out is None or len(results) != 1:
        raise Refused("a batch holds the advantages of one method; name one, and a file with -o")
    ((name, result),) = results.items()
    about = {"method": name, "params": parameters(name, options)}
    save_batch(out, batch_of(rows, steps), result, about=about, force=force)


def _late(path: Path) -> list[LateReward]:
    """The late rewards of a file. Refused if it holds none, or a line that cannot be read."""
    found: list[Finding] = []
    rewards = [line.value for line in records(path, found) if isinstance(line.value, LateReward)]
    if found:
        raise Refused(str(found[0]))
    if not rewards:
        raise Refused(f"{path} holds no late reward")
    return rewards


def _keep(traces: Iterator[Trace], kept: list[Trace]) -> Iterator[Trace]:
    for trace in traces:
        kept.append(trace)
        yield trace


def _credit_batch(
    methods: str, path: Path, options: dict[str, Any], out: Path | None, force: bool, json_: bool
) -> None:
    """Credit a trainer's batch: the same rows in the same order, and their advantages."""
    if "," in methods:
        raise Refused("a batch has one column of advantages; name one method")
    batch = load_batch(path)
    result = estimate(methods, batch.steps, **options)
    off = difference(batch, result)
    if out:
        about = {"method": methods, "params": parameters(methods, options)}
        save_batch(out, batch, result, about=about, force=force)
    if json_:
        render.as_json(
            {
                "method": methods,
                "unit": result.unit,
                "estimand": result.estimand,
                "identified": result.identified,
                "params": parameters(methods, options),
                "diagnostics": result.diagnostics,
                "difference_from_batch": off,
                "units": [{"row": i, "value": v} for i, v in enumerate(result.values.tolist())],
            }
        )
    else:
        render.line(f"{methods}: {render.plain(str(result))}")
        if off is not None:
            render.line(f"  largest difference from the advantages of the batch: {off:.3g}")


@app.command("score")
def score_(
    estimate_: Annotated[str, typer.Argument(metavar="METHOD|CREDIT", help="What is judged.")],
    against: Annotated[str, typer.Argument(metavar="GAME|TRUTH", help="What it is judged by.")],
    groups: Annotated[int, typer.Option(min=1, max=100_000, help="Groups to play.")] = 150,
    rollouts: Annotated[int, typer.Option(min=1, max=10_000, help="Rollouts per group.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of game and plays.")] = 0,
    estimand: Annotated[str, typer.Option(help="Which exact credit.")] = "seqau",
    bootstrap: Annotated[
        int, typer.Option(min=0, max=100_000, help="Draws behind an interval; 0 for none.")
    ] = 200,
    batches: Annotated[
        int, typer.Option(min=1, max=100_000, help="Batches, to tell bias from variance.")
    ] = 1,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Budget of a batch: calls of the environment.")
    ] = None,
    settings: Settings = None,
    json_: Json = False,
) -> None:
    """Compare a method with exact credit on a game, or one credit file with another."""
    if calls is not None and batches < 2:
        raise Refused("--calls is the budget of a batch; say --batches 20 too")
    over: dict[str, Any] = {}
    if Path(estimate_).is_file() and Path(against).is_file():
        if batches > 1:
            raise Refused("two credit files are one batch; --batches plays a game")
        both = matched(read_entries(estimate_), read_entries(against))
        agreement = score(both.one, both.other, rollout=both.run, bootstrap=bootstrap, seed=seed)
        found: dict[str, Any] = {**agreement._asdict(), **both.unmatched}
    else:
        game = deal(against, contexts=groups, seed=seed)
        plays = play(game, groups=groups, rollouts=rollouts, seed=seed)
        measure = _measure(estimate_, options_of(settings))
        agreement = score(
            measure(plays, Rerun(plays)),
            truth(plays, estimand),
            gradient=partial(gradient, plays),
            rollout=plays.steps.rollout,
            group=plays.steps.group,
            bootstrap=bootstrap,
            seed=seed,
        )
        found = {"method": estimate_, "game": against, "seed": seed, **agreement._asdict()}
        if batches > 1:
            judged = over_batches(
                game,
                {estimate_: measure},
                batches=batches,
                rollouts=rollouts,
                seed=seed,
                estimand=estimand,
                calls=calls,
            )
            over = judged[estimate_]._asdict()
    if json_:
        render.as_json({**found, "over_batches": over} if over else found)
        return
    render.pairs(_with_intervals(found))
    if over:
        render.line("")
        render.pairs(_with_intervals(over))


def _measure(name: str, options: Mapping[str, Any]) -> Callable[[Plays, Any], Credit]:
    """A method with its options, which is given a game to ask if it needs one."""
    asks = METHODS[name].needs & {"replay", "policy"} if name in METHODS else ()

    def measure(plays: Plays, again: Any) -> Credit:
        return estimate(name, plays.steps, **{**options, **dict.fromkeys(asks, again)})

    return measure


def _with_intervals(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, each with its interval on its line."""
    lines = {name: value for name, value in found.items() if name != "intervals"}
    for name, (low, high) in found["intervals"].items():
        if low <= high:
            ends = f"({render.plain(low)} to {render.plain(high)})"
            lines[name] = f"{render.plain(found[name])} {ends}"
    return lines
