"""The command for studies, whose module draws figures and is loaded only when one is run.

With it `app` is complete.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli import render
from counterpoint.cli.commands import Force, Json, app
from counterpoint.save import folder, whole_file

__all__ = ["app"]


@app.command("study")
def study_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="`diffusion`.")],
    out: Annotated[Path, typer.Option("-o", help="The folder to write into.")] = Path("study"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer draws.")] = False,
    force: Force = False,
    json_: Json = False,
) -> None:
    """Answer a question of this package's own with figures: what uniform credit loses."""
    from counterpoint.study import study

    result = study(name, quick)
    folder(out)
    with whole_file(out / f"{name}.html", force=force) as file:
        file.write(result.html.encode())
    if json_:
        render.as_json(result.rows)
    else:
        for _, alike in groupby(result.rows, key=tuple):  # rows that have the same columns
            render.table(list(alike))
    render.note(f"wrote {out / f'{name}.html'}")
