"""The commands, one function each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from counterpoint.cli import render
from counterpoint.credit import METHODS, estimate, parameters, ppo_ratio, score
from counterpoint.credit.identify import Unidentified
from counterpoint.creditfile import entries, matched, read_entries
from counterpoint.envs import ENVS, make
from counterpoint.formats import FORMATS, Tally, export, read
from counterpoint.games import GAMES, deal, gradient, play, truth
from counterpoint.games.replaying import Rerun
from counterpoint.harness import runs
from counterpoint.lanes import known, lanes, summary
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.redrive import replay
from counterpoint.rows import difference, load_batch, save_batch
from counterpoint.save import folder, save, trace_lines, whole_file
from counterpoint.schema import CreditEntry, Finding, LateReward, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.store import side_records
from counterpoint.targets import load_target
from counterpoint.validate import validate
from counterpoint.vocabulary import UNITS
from counterpoint.world import fold

app = typer.Typer(
    help="Who earned the reward, in a run of a team of agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

LINE = 160
"""Characters of an event that `show` prints, unless asked for all."""

Traces = Annotated[Path, typer.Argument(help="A trace file, a folder of them, or a glob.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Every = Annotated[bool, typer.Option("-v", help="Show every finding, not the first twenty.")]
Out = Annotated[Path | None, typer.Option("-o", help="Write to this file.")]
Append = Annotated[bool, typer.Option("--append", help="Add to the end of an existing file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Format = Annotated[str | None, typer.Option(help="Foreign format to read; default: our own.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the method, NAME=VALUE.")
]


@app.command("list")
def list_(
    what: Annotated[
        Literal["methods", "envs", "formats", "games"], typer.Argument(help="Which table.")
    ],
    json_: Json = False,
) -> None:
    """List the methods, environments, formats or games there are."""
    tables: dict[str, Any] = {
        "methods": METHODS,
        "envs": ENVS,
        "formats": FORMATS,
        "games": GAMES,
    }
    rows = []
    for name, row in tables[what].items():
        fields = {key: value for key, value in row._asdict().items() if not callable(value)}
        fields.pop("target", None)
        rows.append({"name": name, **fields})
    render.as_json(rows) if json_ else render.table(rows)


@app.command("import")
def import_(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="`counterpoint list formats`.")],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The log, or a folder of logs.")],
    out: Annotated[Path, typer.Option("-o", help="The trace file to write.")],
    anchor: Annotated[str, typer.Option(help="What the state before a turn is known by.")] = (
        "last_message"
    ),
    append: Append = False,
    force: Force = False,
    json_: Json = False,
    every: Every = False,
) -> None:
    """Turn a foreign log into traces, and say what was read, inferred and dropped."""
    found: list[Finding] = []
    tally = Tally()
    written: list[Trace] = []
    runs = read(path, format_, anchor=anchor, findings=found, tally=tally)  # type: ignore[arg-type]

    def lines() -> Iterator[Any]:
        for trace in render.progress(runs, "importing"):
            written.append(trace)
            yield from trace_lines(trace)

    save(out, lines(), append=append, force=force)
    rejected = any(finding.rule in ("V01", "V02") for finding in found)
    report = validate(written, found)
    result = {
        "traces": tally.traces,
        "records": tally.records,
        "events": tally.events,
        "edges_recorded": tally.edges_recorded,
        "edges_inferred": dict(tally.edges_inferred),
        "dropped": dict(tally.dropped),
        "extra_roots": tally.extra_roots,
        "findings": report.findings,
    }
    _present(result, json_, every)
    raise typer.Exit(1 if rejected else 0)


@app.command("export")
def export_(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="`counterpoint list formats`.")],
    path: Traces,
    out: Annotated[Path, typer.Option("-o", help="The file to write.")],
    force: Force = False,
    json_: Json = False,
) -> None:
    """Turn traces into a foreign log."""
    tally = Tally()
    with whole_file(out, force=force) as file:
        for line in export(format_, read_traces(path), tally=tally):
            file.write(line)
    result = {"traces": tally.traces, "dropped": dict(tally.dropped)}
    render.as_json(result) if json_ else render.pairs(result)


@app.command("validate")
def validate_(path: Traces, json_: Json = False, every: Every = False) -> None:
    """Check traces against every rule of the format; exit 1 if one of V01–V15 is broken."""
    found: list[Finding] = []
    report = validate(render.progress(read(path, findings=found), "validating"), found)
    result = {name: getattr(report, name) for name in ("traces", "events", "findings", "counts")}
    _present(result, json_, every)
    raise typer.Exit(1 if report.broken else 0)


@app.command()
def show(
    path: Traces,
    trace: Annotated[str | None, typer.Option(help="Id of the trace; default: the first.")] = None,
    summary_: Annotated[bool, typer.Option("--summary", help="One row per run.")] = False,
    world: Annotated[bool, typer.Option("--world", help="What was known at --at.")] = False,
    at: Annotated[int | None, typer.Option(help="Seq of the last event to take in.")] = None,
    credit_: Annotated[Path | None, typer.Option("--credit", help="A credit file.")] = None,
    whole: Annotated[bool, typer.Option("-v", help="Do not cut long texts.")] = False,
    json_: Json = False,
) -> None:
    """Read a run: its events with agents as lanes, its facts, or the world at an event."""
    if summary_:
        by_trace: dict[str, list[CreditEntry]] = {}
        for entry in read_entries(credit_) if credit_ else ():
            by_trace.setdefault(entry.trace_id, []).append(entry)
        rows = [summary(t, by_trace.get(t.trace_id, ())) for t in read_traces(path)]
        render.as_json(rows) if json_ else render.table(rows)
        return
    chosen = _choose(path, trace)
    if at is not None and not chosen.first <= at < chosen.first + len(chosen):
        last = chosen.first + len(chosen) - 1
        raise Refused(f"trace {chosen.trace_id} has events {chosen.first} to {last}, not {at}")
    prefix = chosen if at is None else chosen[: at + 1]
    if json_:
        events = {"header": prefix.header, "events": prefix.events, "seal": prefix.seal}
        render.as_json(fold(prefix).as_dict() if world else events)
        return
    texts = lanes(prefix)
    if world:
        state = fold(prefix)
        render.world(state.as_dict())
        texts = known(prefix, state)
    for text in texts:
        render.line(render.plain(text, 0 if whole else LINE))


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
    out: Out = None,
    append: Append = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Say what every turn, or another unit, earned, by one method or several on the same runs."""
    options = _options(settings)
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
        save_batch(out, batch, result, force=force)
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
    settings: Settings = None,
    json_: Json = False,
) -> None:
    """Compare a method with exact credit on a game, or one credit file with another."""
    if Path(estimate_).is_file() and Path(against).is_file():
        given, true, unmatched = matched(read_entries(estimate_), read_entries(against))
        found: dict[str, Any] = {**score(given, true)._asdict(), **unmatched}
    else:
        game = deal(against, contexts=groups, seed=seed)
        plays = play(game, groups=groups, rollouts=rollouts, seed=seed)
        options = _options(settings)
        if estimate_ in METHODS and "replay" in METHODS[estimate_].needs:
            options["replay"] = Rerun(plays)
        result = estimate(estimate_, plays.steps, **options)
        found = {"method": estimate_, "game": against, "seed": seed}
        agreement = score(result, truth(plays, estimand), gradient=partial(gradient, plays))
        found |= agreement._asdict()
    render.as_json(found) if json_ else render.pairs(found)


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
    played = make(env, **_options(settings))
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
    told = replay(render.progress(read_traces(path), "replaying"))
    if json_:
        render.as_json(told.as_dict())
    else:
        for text in str(told).splitlines():
            render.line(render.plain(text))
    raise typer.Exit(1 if told.diverged else 0)


@app.command()
def report(
    path: Traces,
    out: Annotated[Path, typer.Option("-o", help="The folder to write report.html into.")],
    methods: Annotated[
        str | None, typer.Option(help="Methods to compare; default: the four signals.")
    ] = None,
    format_: Annotated[str | None, typer.Option("--format", help="Foreign format.")] = None,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Write one page about a set of runs: facts, findings, credit by several methods, a figure."""
    from counterpoint.report import about_runs

    found: list[Finding] = []
    traces = list(render.progress(read(path, format_, findings=found), "reading"))
    result = about_runs(traces, methods.split(",") if methods else None, found)
    folder(out)
    with whole_file(out / "report.html", force=force) as file:
        file.write(result.html.encode("utf-8", "backslashreplace"))
    render.as_json(result.rows) if json_ else render.table(result.rows)
    render.note(f"wrote {out / 'report.html'}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", help="The folder to write into.")] = Path("demo"),
    force: Force = False,
    json_: Json = False,
) -> None:
    """Credit real runs by four methods, and compare the methods with exact credit on games."""
    from counterpoint.demo import run

    folder(out)
    for name in ("report.html", "summary.json", "research-v0.jsonl"):
        if (out / name).exists() and not force:
            raise Refused(f"{out / name} exists; choose another folder, or say --force")
        (out / name).unlink(missing_ok=True)
    result = run(out, render.note)
    with whole_file(out / "report.html", force=force) as file:
        file.write(result.html.encode("utf-8", "backslashreplace"))
    with whole_file(out / "summary.json", force=force) as file:
        file.write(render.spelled(result.summary))
    if json_:
        render.as_json(result.summary)
    else:
        render.table(result.summary["methods"], "Four methods against exact credit")
        render.table(result.real, "Real runs, credited by four methods")
    render.note(f"wrote {out / 'report.html'} and {out / 'summary.json'}")


def policy_of(name: str) -> Any:
    """A policy for all roles: a uniform table, a saved one, or what a file of yours makes."""
    if name == "uniform":
        return Softmax()
    return load_target(name) if ".py:" in name else Softmax.load(name)


def read_traces(path: Path, format_: str | None = None) -> Iterator[Trace]:
    """Read traces and say how many lines could not be read."""
    found: list[Finding] = []
    yield from read(path, format_, findings=found)
    if found:
        render.note(f"{len(found)} lines could not be read; `counterpoint validate` names them")


def _choose(path: Path, trace_id: str | None) -> Trace:
    others = 0
    chosen: Trace | None = None
    for trace in read_traces(path):
        if chosen is None and (trace_id is None or trace.trace_id == trace_id):
            chosen = trace
        else:
            others += 1
    if chosen is None:
        wanted = "any trace" if trace_id is None else f"a trace {trace_id}"
        raise Refused(f"{path} does not hold {wanted}; `show --summary` lists what it holds")
    if trace_id is None and others:
        render.note(f"the first of {others + 1} traces; --trace ID shows another, --summary lists")
    return chosen


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's spelling of what JSON calls otherwise."""


def _options(settings: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it can be, else text."""
    options: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set takes NAME=VALUE, not {setting!r}")
        text = _PYTHON.get(text, text)
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def _present(result: dict[str, Any], json_: bool, every: bool) -> None:
    """Show a result that ends in findings."""
    if json_:
        render.as_json(result)
    else:
        render.pairs({name: value for name, value in result.items() if name != "findings"})
        render.findings(result["findings"], every)
