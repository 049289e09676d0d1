"""Fill the generated parts of README.md and of the pages in docs/, and write trace.schema.json.

A page is written by hand; between two markers stands what the code knows better:

    <!-- generated: methods -->
    …
    <!-- end -->

The word after `generated:` names a function of `BLOCKS`, further words are its arguments. `fill`
returns a page as it should be; `main` writes what differs; a test compares.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from counterpoint import schema
from counterpoint.cli import app
from counterpoint.credit import METHODS, method
from counterpoint.envs import ENVS
from counterpoint.formats import FORMATS
from counterpoint.games import GAMES
from counterpoint.rows import verl
from counterpoint.targets import load_target
from counterpoint.validate import COUNTS, RULES, across
from counterpoint.vocabulary import DECISIONS, EDGES, FAMILIES, TRUST, UNITS

ROOT = Path(__file__).parent.parent
SCHEMA = ROOT / "docs" / "trace.schema.json"
_BLOCK = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)

ESTIMANDS: dict[str, str] = {
    "outcome": "how good the run looks after this turn, against the average run of the task",
    "seqau": "how much this turn changed what the team could expect",
    "anchor": "how this turn compares with what is usually done in the state it saw",
    "outcome+anchor": "the run against its task, plus the turn against its state",
    "outcome+hindsight": "the run against its group, plus how likely this turn looks in hindsight",
    "removal:replayed": "what the run would have lost without this act, others answering anew",
    "removal:frozen": "what the run would have lost without this act, everybody else as they were",
    "removal:anew": "what the run would have lost without this act, all that follows drawn anew",
    "coma": "this act against what its agent usually does, everybody else as they were",
    "coma:replayed": "this act against what its agent usually does, others answering anew",
    "shapley:frozen": "the agent's fair share of the outcome, everybody else as they were",
    "shapley:replayed": "the agent's fair share of the outcome, others answering anew",
    "shapley:resampled": "the agent's fair share of the outcome, absent agents acting as usual",
    "shaped": "a reward with terms added, against the same agent's or role's in the group",
    "effect": "what taking this decision was worth, against declining it there",
    "effect:average": "what taking such decisions was worth on average, over those of the log",
}
"""What the number of a method says, in words for people."""

BETWEEN: dict[str, Callable[..., Any]] = {"V11": across.stored_once, "V15": across.grown}
"""Rules that look at several traces at once."""

WHILE_READING: dict[str, str] = {
    "V01": "one UTF-8 JSON object a line, no key twice, finite numbers, integers of 64 bits, "
    "nesting of at most 64, at most 64 MiB; also inside payloads.",
    "V02": "known fields of the right type; an unknown field is reported with the nearest name. "
    "Every trace opens with one readable header.",
    "W02": "a label that came with a foreign log disagrees with its events.",
}
"""Rules that the readers of files and of foreign logs find on their way."""


# ---------------------------------------------------------------------------------------------
# Pages


def pages() -> list[Path]:
    """Every hand-written page that has generated parts or may have some."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str, page: Path) -> str:
    """The text of a page with every generated part as the code has it now."""

    def one(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}{BLOCKS[name](page, *arguments).strip()}\n{found[3]}"

    return _BLOCK.sub(one, text)


def json_schema() -> str:
    """JSON Schema of one line of a trace file."""
    described = msgspec.json.schema(schema.Line)
    title = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of a Counterpoint trace file, format {schema.FORMAT}",
    }
    return json.dumps({**title, **described}, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        _write(page, text, fill(text, page))
    _write(SCHEMA, SCHEMA.read_text(encoding="utf-8") if SCHEMA.exists() else "", json_schema())


def _write(path: Path, old: str, new: str) -> None:
    if new != old:
        path.write_text(new, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


# ---------------------------------------------------------------------------------------------
# Methods


def methods(page: Path) -> str:
    """The table of methods; each name links to its page."""
    rows = []
    for name, row in METHODS.items():
        link = os.path.relpath(ROOT / "docs" / "methods" / f"{name}.md", page.parent)
        says = f"`{row.estimand}`: {ESTIMANDS[row.estimand]}"
        needs = ", ".join(f"`{column}`" for column in sorted(row.needs)) or "–"
        rows.append([f"[{name}]({link})", says, needs, _yes(row.unbiased), row.paper])
    return table(["method", "the number says", "needs", "unbiased", "source"], rows)


def questions(page: Path) -> str:
    """What a number may say, in words, and the methods that say it."""
    said: dict[str, list[str]] = {}
    for name, row in METHODS.items():
        link = os.path.relpath(ROOT / "docs" / "methods" / f"{name}.md", page.parent)
        said.setdefault(row.estimand, []).append(f"[{name}]({link})")
    rows = [[ESTIMANDS[estimand], ", ".join(names)] for estimand, names in said.items()]
    return table(["the number says", "methods"], rows)


def method_head(page: Path, name: str) -> str:
    """What the table says of one method, its summary, and its options."""
    row, function = METHODS[name], method(name)
    facts = [
        ["says", f"`{row.estimand}`: {ESTIMANDS[row.estimand]}"],
        ["credits", f"each {row.unit}"],
        ["family", row.family],
        ["needs", ", ".join(sorted(row.needs)) or "rollout, reward"],
        ["credits of a rollout sum to what is shared out", _yes(row.conserves)],
        ["unbiased policy gradient with its defaults", _yes(row.unbiased)],
        ["source", row.paper],
        ["code", f"`{row.target}`"],
    ]
    summary = inspect.cleandoc(function.__doc__ or "").partition("\n")[0]
    named = list(inspect.signature(function).parameters)[1:]
    return "\n\n".join([summary, table(["", ""], facts), options(function, named)])


def estimands(page: Path) -> str:
    """The names of what numbers say."""
    return table(["estimand", "in words"], [[f"`{k}`", v] for k, v in ESTIMANDS.items()])


def options(function: Callable[..., Any], names: Sequence[str]) -> str:
    """The options of a function with their defaults and what the docstring says of them."""
    said, given = arguments(function), inspect.signature(function).parameters
    rows = [[f"`{name}`", f"`{given[name].default!r}`", said.get(name, "")] for name in names]
    return table(["option", "default", "what it does"], rows)


def arguments(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring says of each argument, as one line each."""
    inside = re.search(
        r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(function.__doc__ or ""), re.M | re.S
    )
    found = re.findall(
        r"^ {4}(\w[\w, ]*): (.*?)(?=^ {4}\w[\w, ]*: |\Z)", inside[1] if inside else "", re.M | re.S
    )
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


# ---------------------------------------------------------------------------------------------
# Games, formats, commands


def games(page: Path) -> str:
    """Every game: what it is, what it tells apart, its dials, and how it is made."""
    parts = [table(["game", "what it is", "what it tells apart"], map(_game_row, GAMES))]
    for names, factory in _factories().items():
        dials = list(inspect.signature(factory).parameters.values())[1:]
        parts.append(f"### {names}")
        parts.append(", ".join(f"`{dial.name}={dial.default!r}`" for dial in dials))
        parts.append(inspect.cleandoc(factory.__doc__ or ""))
    return "\n\n".join(parts)


def _game_row(name: str) -> list[str]:
    return [name, GAMES[name].about, GAMES[name].separates]


def _factories() -> dict[str, Callable[..., Any]]:
    """The functions behind the games, each once, under the names of the games it makes."""
    held: dict[Callable[..., Any], list[str]] = {}
    for name, row in GAMES.items():
        held.setdefault(getattr(row.factory, "func", row.factory), []).append(name)
    return {", ".join(names): factory for factory, names in held.items()}


def envs(page: Path) -> str:
    """Every environment: what it is, who acts, how far its oracle reaches, and how it is played."""
    rows = [[f"`{name}`", row.about, row.agents, row.oracle] for name, row in ENVS.items()]
    parts = [table(["environment", "what it is", "agents", "oracle"], rows)]
    for name, row in ENVS.items():
        made = load_target(row.target)
        about = inspect.cleandoc(made.__doc__ or "").partition("\n\nArgs:")[0]
        parts += [f"## {name}", about, options(made, list(inspect.signature(made).parameters))]
    return "\n\n".join(parts)


def formats(page: Path) -> str:
    """The table of formats."""
    rows = [[f"`{n}`", f.about, _yes(f.reads), _yes(f.writes)] for n, f in FORMATS.items()]
    return table(["format", "what it is", "read", "written"], rows)


def batch(page: Path) -> str:
    """Which column of a trainer's batch becomes which column of Steps."""
    rows = [
        [f"`{its}`", f"`{ours}`", _yes(its in verl.NEEDED)] for its, ours in verl.COLUMNS.items()
    ]
    return table(["verl-agent", "Steps", "needed"], rows)


def commands(page: Path) -> str:
    """The help of every command."""
    parts = []
    for name, function in commands_by_name().items():
        given = inspect.signature(function, eval_str=True).parameters.values()
        rows = [_parameter(p) for p in given]
        usage = " ".join(
            [f"counterpoint {name}", *(r[0].strip("`") for r in rows if r[1] == "needed")]
        )
        parts += [
            f"## {name}",
            inspect.cleandoc(function.__doc__ or ""),
            f"```text\n{usage}\n```",
            table(["", "default", "what it is"], rows),
        ]
    return "\n\n".join(parts)


def commands_by_name() -> dict[str, Callable[..., Any]]:
    """Command → the function that runs it."""
    found = {}
    for command in app.registered_commands:
        assert command.callback is not None
        found[command.name or command.callback.__name__] = command.callback
    return found


def _parameter(parameter: inspect.Parameter) -> list[str]:
    kind, info = typing.get_args(parameter.annotation)
    plain = parameter.name.strip("_").replace("_", "-")
    if isinstance(info, typer.models.ArgumentInfo):
        shown = info.metavar or (_value(kind) if _choices(kind) else plain.upper())
    else:
        # in Annotated[…, Option("-o")] Typer keeps the first name as the default
        names = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
        shown = ", ".join(names or [f"--{plain}"]) + ("" if kind is bool else f" {_value(kind)}")
    needed = parameter.default is parameter.empty
    default = parameter.default
    told = "needed" if needed else "–" if default in (None, False) else f"`{default}`"
    return [f"`{shown}`", told, info.help or ""]


def _choices(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _value(kind: Any) -> str:
    """What a person types for a value of this type."""
    (plain, *_) = [k for k in typing.get_args(kind) if k is not type(None)] or [kind]
    if _choices(kind):
        return "|".join(_choices(kind))
    return {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(plain, "NAME=VALUE")


# ---------------------------------------------------------------------------------------------
# The trace format


def kinds(page: Path) -> str:
    """Every kind of line: what it says and its own fields."""
    parts = []
    common = set(schema.Event.__struct_fields__) | {"type"}
    for name, struct in schema.LINES.items():
        event = issubclass(struct, schema.Event)
        fields = [f for f in msgspec.structs.fields(struct) if not (event and f.name in common)]
        parts += [f"### {name}", inspect.cleandoc(struct.__doc__ or ""), _fields(fields)]
    return "\n\n".join(parts)


def common(page: Path) -> str:
    """The fields that every event has."""
    return "\n\n".join(
        [
            inspect.cleandoc(schema.Event.__doc__ or ""),
            _fields(msgspec.structs.fields(schema.Event)),
        ]
    )


def parts(page: Path) -> str:
    """The structs that stand inside lines."""
    inside = (
        schema.Cause,
        schema.Source,
        schema.Item,
        schema.Read,
        schema.Target,
        schema.Anneal,
        schema.EnvRef,
        schema.PolicyRef,
        schema.AgentRef,
        schema.ForkRef,
    )
    out = []
    for struct in inside:
        doc = inspect.cleandoc(struct.__doc__ or "")
        out += [f"### {struct.__name__}", doc, _fields(msgspec.structs.fields(struct))]
    return "\n\n".join(out)


def _fields(fields: Sequence[Any]) -> str:
    rows = [[f"`{f.encode_name}`", f"`{_type(f.type)}`", _default(f)] for f in fields]
    return table(["field", "type", "default"], rows)


def _type(kind: Any) -> str:
    """A type as the format page writes it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind == schema.Payload:
        return "any JSON"
    if origin is typing.Annotated:
        return _type(inner[0])
    if origin is typing.Literal:
        return " or ".join(map(str, inner))
    if origin is tuple:
        return f"[{_type(inner[0])}, …]" if ... in inner else f"[{', '.join(map(_type, inner))}]"
    if origin is dict:
        return f"{{{_type(inner[0])}: {_type(inner[1])}}}"
    if inner:
        return " or ".join(_type(k) for k in inner)
    return {type(None): "null"}.get(kind, kind.__name__)


def _default(field: Any) -> str:
    if field.required:
        return "needed"
    if field.default is msgspec.UNSET or field.default is None:
        return "absent"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{json.dumps(value)}`"


def edges(page: Path) -> str:
    """The kinds of edges."""
    return table(["edge", "what it says"], [[f"`{k}`", v] for k, v in EDGES.items()])


def vocabulary(page: Path) -> str:
    """Closed lists: reward families, units of credit, trust labels, decisions."""
    families = table(["family", "reward"], [[k, v] for k, v in FAMILIES.items()])
    lists = {
        "Units of credit": UNITS,
        "Orchestration decisions": DECISIONS,
        "Trust, from lowest to highest": TRUST,
    }
    return "\n\n".join([families, *(f"{k}: {', '.join(v)}." for k, v in lists.items())])


def rules(page: Path) -> str:
    """Every rule, in the words of the functions that check it: one sentence, then the rest."""
    rows = []
    for name in sorted({*RULES, *BETWEEN, *WHILE_READING}):
        rule, _, more = _rule(name).partition(". ")
        rows.append([name, rule.rstrip("."), more])
    return table(["rule", "what it says", "in detail"], rows)


def _rule(name: str) -> str:
    checks = [held[name] for held in (RULES, BETWEEN) if name in held]
    said = [_sentence(check).removeprefix(f"{name}: ") for check in checks]
    found = [text for text in (WHILE_READING.get(name), *said) if text]
    return " ".join(text[:1].upper() + text[1:] for text in found)


def counts(page: Path) -> str:
    """What is counted and breaks no rule."""
    rows = [[f"`{name}`", _sentence(count)] for name, count in COUNTS.items()]
    return table(["count", "what it is"], rows)


def _sentence(function: Callable[..., Any]) -> str:
    """A docstring as one line, up to its arguments."""
    text = inspect.cleandoc(function.__doc__ or "").partition("\nReturns")[0]
    return " ".join(text.split())


# ---------------------------------------------------------------------------------------------
# Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


BLOCKS: dict[str, Callable[..., str]] = {
    "methods": methods,
    "questions": questions,
    "method": method_head,
    "estimands": estimands,
    "games": games,
    "envs": envs,
    "formats": formats,
    "batch": batch,
    "commands": commands,
    "kinds": kinds,
    "common": common,
    "parts": parts,
    "edges": edges,
    "vocabulary": vocabulary,
    "rules": rules,
    "counts": counts,
}
"""Name of a generated part → the function that writes it; it gets the page, then its arguments."""

if __name__ == "__main__":
    main()
