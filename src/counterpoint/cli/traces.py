"""The commands that read and write traces: list, import, export, validate, show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from counterpoint.cli import render
from counterpoint.cli.options import Append, Every, Force, Json, Traces, app, read_traces
from counterpoint.credit import METHODS
from counterpoint.creditfile import about_credit, read_entries
from counterpoint.envs import ENVS
from counterpoint.formats import FORMATS, Tally, export, read
from counterpoint.games import GAMES
from counterpoint.lanes import known, lanes, summary
from counterpoint.rows import about_path
from counterpoint.save import save, trace_lines, whole_file
from counterpoint.schema import CreditEntry, Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.validate import validate
from counterpoint.world import fold

LINE = 160
"""Characters of an event that `show` prints, unless asked for all."""


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
    credit: Annotated[
        Path | None, typer.Option(help="A credit file, whose advantages go out with the turns.")
    ] = None,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Turn traces into a foreign log."""
    tally = Tally()
    given = read_entries(credit) if credit else []
    lines = export(format_, read_traces(path), tally=tally, credit=given)
    with ExitStack() as both:
        if given:
            beside = both.enter_context(whole_file(about_path(out), force=force))
            beside.write(json.dumps(about_credit(given), indent=2).encode() + b"\n")
        both.enter_context(whole_file(out, force=force)).writelines(lines)
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
    if credit_ and not summary_:
        raise Refused("--credit adds to the rows of --summary, which is not asked for")
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


def _present(result: dict[str, Any], json_: bool, every: bool) -> None:
    """Show a result that ends in findings."""
    if json_:
        render.as_json(result)
    else:
        render.pairs({name: value for name, value in result.items() if name != "findings"})
        render.findings(result["findings"], every)
