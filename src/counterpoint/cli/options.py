"""What every command shares: the application, the words for its options, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoint.cli import render
from counterpoint.envs import Env, make
from counterpoint.formats import read
from counterpoint.policies.tabular import Softmax
from counterpoint.schema import Finding, Header, Trace
from counterpoint.spelling import Refused
from counterpoint.targets import load_target

app = typer.Typer(
    help="Who earned the reward, in a run of a team of agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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
Budgeted = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", help="The most to spend, as env_calls=500; also forward_passes=, tokens=."
    ),
]
Priced = Annotated[bool, typer.Option("--price", help="Say what it would cost; play nothing.")]
OwnEnv = Annotated[
    str | None,
    typer.Option("--env", help="file.py:Class, where the environment is your own."),
]
OwnPolicy = Annotated[
    str | None,
    typer.Option("--policy", help="`uniform`, a table's file, or file.py:policy; all roles."),
]
Changed = Annotated[
    bool, typer.Option("--allow-changed", help="Go on under others than the record's.")
]


_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's spelling of what JSON calls otherwise."""


def options_of(settings: list[str] | None, rule: str = "--set takes NAME=VALUE") -> dict[str, Any]:
    """NAME=VALUE pairs; a value is JSON where it can be, else text."""
    options: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"{rule}, not {setting!r}")
        text = _PYTHON.get(text, text)
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def budget_of(amounts: list[str] | None) -> dict[str, int]:
    """NAME=NUMBER pairs: the most that may be spent of each."""
    budget = options_of(amounts, "--budget takes NAME=NUMBER")
    for name, amount in budget.items():
        if type(amount) is not int:
            raise Refused(f"the budget of {name} is a whole number, not {amount!r:.40}")
    return budget


def own_env(name: str | None, header: Header) -> Env | None:
    """The environment of a file of yours, with the options of the record."""
    if name is None:
        return None
    config: Any = header.config
    options = config.get("options") if isinstance(config, dict) else None
    return make(name, **(options if isinstance(options, dict) else {}))


def policy_of(name: str) -> Any:
    """A policy for all roles: a uniform table, a saved one, or what a file of yours makes."""
    if name == "uniform":
        return Softmax()
    return load_target(name) if ".py:" in name else Softmax.load(name)


def read_traces(path: Path, format_: str | None = None) -> Iterator[Trace]:
    """Read traces and say how many lines could not be read."""
    found: list[Finding] = []
    none = True
    for trace in read(path, format_, findings=found):
        none = False
        yield trace
    if found and none:
        raise Refused(f"{path} holds no trace that can be read: {found[0]}")
    if found:
        render.note(f"{len(found)} lines could not be read; `counterpoint validate` names them")
