"""The commands that end in a page to look at: report, study, demo."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli import render
from counterpoint.cli.options import Force, Json, Traces, app
from counterpoint.credit import method
from counterpoint.formats import read
from counterpoint.save import folder, whole_file
from counterpoint.schema import Finding
from counterpoint.spelling import Refused
from counterpoint.training import read_curve


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
    """Write one page about a set of runs, or a folder of `train`: facts, credit, a figure."""
    from counterpoint.report import about_runs, curve_of

    first = []
    if (path / "curve.jsonl").is_file():
        rows = read_curve(path)
        first, path = [curve_of(rows)], path / "traces" / f"{len(rows) - 1:04}.jsonl"
    for name in methods.split(",") if methods else ():
        method(name)  # refused, if there is none of that name
    found: list[Finding] = []
    traces = list(render.progress(read(path, format_, findings=found), "reading"))
    result = about_runs(traces, methods.split(",") if methods else None, found, first)
    folder(out)
    with whole_file(out / "report.html", force=force) as file:
        file.write(result.html.encode("utf-8", "backslashreplace"))
    render.as_json(result.rows) if json_ else render.table(result.rows)
    render.note(f"wrote {out / 'report.html'}")


@app.command("study")
def study_(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="`diffusion`, `reference`, `cad`, `proof`, `stopping`, `two-agent`.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", help="The folder to write into; default: study-NAME.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer draws.")] = False,
    own: Annotated[
        str | None, typer.Option(help="file.py:function, a method of yours beside those of `cad`.")
    ] = None,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Answer a question with figures: what uniform credit loses, which method is worth its cost."""
    from counterpoint.study import study

    out = out or Path(f"study-{name}")
    if (out / "report.html").exists() and not force:
        raise Refused(f"{out / 'report.html'} exists; choose another folder, or say --force")
    result = study(name, out, quick, render.progress, own)
    with whole_file(out / "report.html", force=force) as file:
        file.write(result.html.encode())
    if json_:
        render.as_json(result.rows)
    else:
        for _, alike in groupby(result.rows, key=tuple):  # rows that have the same columns
            render.table(list(alike))
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
