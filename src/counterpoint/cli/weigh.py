"""The commands that say who earned the reward: credit, and score, which judges it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoint.cli import render
from counterpoint.cli.options import Append, Force, Json, Out, Settings, app, options_of
from counterpoint.credit import METHODS, estimate, parameters, ppo_ratio, score
from counterpoint.credit.identify import Unidentified
from counterpoint.creditfile import entries, matched, read_entries
from counterpoint.formats import read
from counterpoint.games import deal, gradient, play, truth
from counterpoint.games.replaying import Rerun
from counterpoint.ledger import Credit
from counterpoint.rows import ROWS, batch_of, difference, load_batch, save_batch
from counterpoint.save import save
from counterpoint.schema import Finding, LateReward, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.store import side_records
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
    how: Annotated[str, typer.Option(help="Of several turns: `mean` or `sum`.")] = "mean",
    rows: Annotated[
        str | None, typer.Option(help=f"Write a trainer's batch: {', '.join(ROWS)}.")
    ] = None,
    out: Out = None,
    append: Append = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Say what every turn, or another unit, earned, by one method or several on the same runs."""
    options = options_of(settings)
    if path.suffix in (".npz", ".parquet"):
        _credit_batch(methods, path, options, out, force, json_)
        return
    found: list[Finding] = []
    kept: list[Trace] = []
    traces = render.progress(read(path, format_, findings=found), "reading")
    rewards = [r for r in side_records(late) if isinstance(r, LateReward)] if late else None
    causal = options.get("causal") is True
    steps = Steps.from_traces(_keep(traces, kept) if out else traces, rewards, descent=causal)
    try:
        results, refused = _estimates(methods.split(","), steps, options)
    except Unidentified as unidentified:
        if json_:
            render.as_json(unidentified.as_dict())
        raise
    if rows:
        _hand_out(rows, steps, results, options, out, force)
        out = None
    units = {n: steps.units(unit if r.unit == "turn" else r.unit) for n, r in results.items()}
    if unit != "turn":
        results = {
            name: result.at(units[name], how) if result.unit == "turn" else result  # type: ignore[arg-type]
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
            for name, result in results.items()
        ]
        shown += [{"method": n, "identified": "not", "reason": why} for n, why in refused.items()]
        render.as_json(shown[0] if len(shown) == 1 else shown)
    else:
        for name, result in results.items():
            render.line(f"{name}: {render.plain(str(result))}")
            render.line(f"  {render.plain(result.why())}")
            if explain:
                render.explain(result, steps, units[name])
    for name, why in refused.items():
        render.note(render.plain(f"refused: {name}: {why}"))
    if found:
        render.note(f"{len(found)} lines could not be read; `counterpoint validate` names them")
    if found or refused:
        raise typer.Exit(1)


def _estimates(
    names: list[str], steps: Steps, options: dict[str, Any]
) -> tuple[dict[str, Credit], dict[str, str]]:
    """The credit by every method, and of several the refusals; one alone is refused outright."""
    results, refused = {}, {}
    for name in names:
        try:
            result = estimate(name, steps, **options)
            results[name] = ppo_ratio(steps, result) if result.unit == "turn" else result
        except Refused as refusal:
            if len(names) == 1:
                raise
            refused[name] = str(refusal)
    return results, refused


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
    settings: Settings = None,
    json_: Json = False,
) -> None:
    """Compare a method with exact credit on a game, or one credit file with another."""
    if Path(estimate_).is_file() and Path(against).is_file():
        both = matched(read_entries(estimate_), read_entries(against))
        agreement = score(both.one, both.other, rollout=both.run, bootstrap=bootstrap, seed=seed)
        found: dict[str, Any] = {**agreement._asdict(), **both.unmatched}
    else:
        game = deal(against, contexts=groups, seed=seed)
        plays = play(game, groups=groups, rollouts=rollouts, seed=seed)
        options = options_of(settings)
        if estimate_ in METHODS:
            options |= dict.fromkeys(METHODS[estimate_].needs & {"replay", "policy"}, Rerun(plays))
        result = estimate(estimate_, plays.steps, **options)
        found = {"method": estimate_, "game": against, "seed": seed}
        found |= score(
            result,
            truth(plays, estimand),
            gradient=partial(gradient, plays),
            rollout=plays.steps.rollout,
            group=plays.steps.group,
            bootstrap=bootstrap,
            seed=seed,
        )._asdict()
    if json_:
        render.as_json(found)
    else:
        render.pairs(_lined(found))


def _lined(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures with each interval on a line of its own."""
    ends = found["intervals"].items()
    lines = {f"95% of {name}": f"{low:.6g} to {high:.6g}" for name, (low, high) in ends}
    return {**{name: value for name, value in found.items() if name != "intervals"}, **lines}
