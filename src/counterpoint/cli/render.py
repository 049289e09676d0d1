"""The one renderer: results become a table for people or JSON for programs.

Text that came out of a trace is hostile: control characters are spelled out before a terminal sees
them, and nothing is interpreted as markup.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from counterpoint.ledger import Credit
from counterpoint.schema import Finding
from counterpoint.steps import Steps
from counterpoint.units import Units

FINDINGS_SHOWN = 20
ROWS_EXPLAINED = 20


class Gone(Exception):
    """Whoever read the output has closed it. The parser of options would call that a failure."""


@contextmanager
def _to_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise Gone from None


def plain(value: Any, width: int = 0) -> str:
    """One line of harmless text: controls and invisible characters spelled out, cut to `width`."""
    if value is None:
        return "–"
    if isinstance(value, float):
        text = "–" if math.isnan(value) else f"{value:.6g}"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{k} {plain(v)}" for k, v in value.items())
    elif isinstance(value, set | frozenset):
        text = ", ".join(sorted(plain(v) for v in value))
    elif isinstance(value, list | tuple):
        text = ", ".join(plain(v) for v in value)
    else:
        text = str(value)
    if not text.isprintable():
        text = "".join(_harmless(c) for c in text)
    return text if not width or len(text) <= width else text[: width - 1] + "…"


def _harmless(character: str) -> str:
    if character == "\n":
        return "⏎"
    if unicodedata.category(character)[0] == "C":
        return f"\\u{ord(character):04x}"
    return character


def table(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print rows with one set of keys as a table; nothing for no rows."""
    if not rows:
        return
    drawn = Table(title=title and Text(title), title_justify="left", header_style="bold")
    for name in rows[0]:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        drawn.add_column(Text(name.replace("_", " ")), justify="right" if numeric else "left")
    for row in rows:
        drawn.add_row(*(Text(plain(value)) for value in row.values()))
    console = _console()
    with console.capture() as text:  # by itself it would end the process where nobody reads
        console.print(drawn)
    line(text.get().removesuffix("\n"))


def pairs(record: Mapping[str, Any]) -> None:
    """Print a record as one `name  value` line each."""
    wide = max((len(name) for name in record), default=0)
    for name, value in record.items():
        line(f"{name.replace('_', ' '):<{wide}}  {plain(value) or 'none'}")


def line(text: str) -> None:
    """Print one line of text to stdout, as it stands."""
    with _to_reader():
        sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Say something to a person, on stderr."""
    Console(stderr=True).print(Text(text), soft_wrap=True)


def findings(found: Iterable[Finding], every: bool) -> None:
    """Print findings, the first twenty unless `every`, and the totals by rule."""
    found = list(found)
    shown = found if every else found[:FINDINGS_SHOWN]
    for finding in shown:
        line(plain(str(finding)))
    if len(shown) < len(found):
        line(f"… and {len(found) - len(shown)} more; -v shows all")
    totals: dict[str, int] = {}
    for finding in found:
        totals[finding.rule] = totals.get(finding.rule, 0) + 1
    if totals:
        line("findings by rule: " + plain(dict(sorted(totals.items()))))


def world(state: Mapping[str, Any]) -> None:
    """Print a folded world: the agents as a table, then what is left."""
    table(state["agents"])
    pairs({name: value for name, value in state.items() if name != "agents"})


def explain(credit: Credit, steps: Steps, units: Units) -> None:
    """Print every diagnostic, and the intermediates of the units with the largest credit."""
    pairs(credit.diagnostics)
    largest = np.argsort(-np.abs(np.nan_to_num(credit.values)), kind="stable")[:ROWS_EXPLAINED]
    table(
        [
            {
                "rollout": steps.label("rollout", row),
                "step": int(steps.step[row]),
                "agent": steps.label("agent", row),
                **({} if units.kind == "turn" else {credit.unit: units.name("label", unit)}),
                "credit": float(credit.values[unit]),
                **{name: part[unit].item() for name, part in credit.parts.items()},
            }
            for unit, row in zip(largest.tolist(), units.row[largest].tolist(), strict=True)
        ],
        f"the {len(largest)} {units.kind}s with the largest credit",
    )


def listing(
    name: str, result: Credit, params: dict[str, Any], steps: Steps, units: Units, explain: bool
) -> dict[str, Any]:
    """A method's credit as JSON shows it: what the number means, then every unit's."""
    names, rollout = steps.names["rollout"], steps.rollout[units.row].tolist()
    parts = {key: part.tolist() for key, part in result.parts.items()} if explain else {}
    listed = [
        {
            "trace_id": names[rollout[i]],
            **_place(units, i),
            "value": value,
            **{key: part[i] for key, part in parts.items()},
        }
        for i, value in enumerate(result.values.tolist())
    ]
    return {
        "method": name,
        "unit": result.unit,
        "estimand": result.estimand,
        "identified": result.identified,
        "params": params,
        "diagnostics": result.diagnostics,
        "units": listed,
    }


def _place(units: Units, unit: int) -> dict[str, Any]:
    """Where a unit stands in its trace: its event, item and token, or the agent or role."""
    if units.of is not None:
        label = units.name("label", unit)
        return {} if label is None else {units.kind: label}
    columns = {"seq": units.seq, "item": units.item}
    if units.kind == "token":
        columns["token"] = units.start
    return {name: int(column[unit]) for name, column in columns.items() if column[unit] >= 0}


def spelled(value: Any) -> bytes:
    """A value as indented JSON bytes; NaN becomes null."""
    encoded = msgspec.json.encode(value, enc_hook=_plain_types)
    return msgspec.json.format(encoded, indent=2) + b"\n"


def as_json(value: Any) -> None:
    """Write a value to stdout as JSON."""
    with _to_reader():
        sys.stdout.flush()
        sys.stdout.buffer.write(spelled(value))
        sys.stdout.buffer.flush()


T = TypeVar("T")


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Pass items on; on a terminal a counter on stderr shows that work is going on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, description=label)


def _plain_types(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _console() -> Console:
    width = None if sys.stdout.isatty() else 240
    return Console(highlight=False, markup=False, emoji=False, width=width)
