"""The documentation is true: what is generated is up to date, and what is shown is what happens."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest

from counterpoint.credit import METHODS, estimate, ppo_ratio
from counterpoint.envs import make
from counterpoint.formats import read
from counterpoint.games import deal, play
from counterpoint.games.replaying import Rerun
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import Branching
from counterpoint.save import save, trace_lines
from counterpoint.steps import Steps

ROOT = Path(__file__).parent.parent
COPIED = ("Makefile", "pyproject.toml", "README.md", "examples", "tests/data")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def loaded(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = loaded("generate")
sizes = loaded("sizes")
PAGES = generate.pages()
NOTES = [*ROOT.glob("C*.md"), ROOT / "LOG.md", *sorted((ROOT / "design").glob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---------------------------------------------------------------------------------------------
# What is generated


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_generated_parts_are_up_to_date(page):
    """What stands between the markers of a page is what the code says now."""
    text = page.read_text(encoding="utf-8")
    assert generate.fill(text, page) == text, "say `make docs`, and commit what it writes"


def test_the_json_schema_is_up_to_date():
    """docs/trace.schema.json is the schema of the structs."""
    assert json.loads(generate.SCHEMA.read_text()) == json.loads(generate.json_schema())


def test_a_stale_page_is_noticed():
    """A page whose table lost a row, or whose head speaks of another method, is not up to date."""
    page = ROOT / "docs/methods/grpo.md"
    text = page.read_text(encoding="utf-8")
    assert generate.fill(text.replace("| `eps` |", "| `epsilon` |"), page) == text
    assert (
        generate.fill(text.replace("generated: method grpo", "generated: method gae"), page) != text
    )


def test_every_generated_part_is_shown_on_some_page():
    """No function of the generator writes for nobody."""
    shown = {n for p in PAGES for n in re.findall(r"<!-- generated: (\w+)", p.read_text("utf-8"))}
    assert shown == set(generate.BLOCKS)


def test_every_command_is_documented():
    """Every command of the command line has a heading on its page."""
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/cli.md").read_text("utf-8"), re.MULTILINE)
    assert headings == list(generate.commands_by_name())


# ---------------------------------------------------------------------------------------------
# Methods


@pytest.mark.parametrize("name", METHODS)
def test_every_part_and_diagnostic_of_a_method_is_defined(name):
    """Whatever a credit prints stands in backticks on the method's page, or is common to all."""
    page = (ROOT / f"docs/methods/{name}.md").read_text(encoding="utf-8")
    assert f"<!-- generated: method {name} -->" in page
    defined = page + (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    for credit in printed_by(name):
        printed = (*credit.parts, *credit.diagnostics)
        assert not [word for word in printed if f"`{word}`" not in defined]


def printed_by(name) -> Iterator[Credit]:
    """Credit of a method on tables that differ, in every form that prints something else."""
    for steps, given in tables(name):
        for options in VARIANTS.get(name, [{}]):
            credit = estimate(name, steps, **given | options)
            yield ppo_ratio(steps, credit) if credit.unit == "turn" else credit


VARIANTS = {
    "gae": [{}, {"values": "mc"}],
    "hiper": [{}, {"level": "high"}, {"level": "switch"}],
    "reinforce_pp": [{}, {"baseline": "group"}],
    "cad_grpo": [{}, {"gate": True}],
    "ccpo": [{}, {"version": 1}],
    "spawn": [{}, {"replay": None}],
}
"""Options under which a method prints something else."""

GIVEN = {
    "treemem": {"length_penalty": 0.1},
    "blame": {"split": True},
    "cosac": {"ridge": 0.1, "continuations": 2},
}
"""Options that a method cannot do without, or that say more, where there is somebody to ask."""


def tables(name) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """Tables that give a method what it needs, each with what runs its runs again."""
    row = METHODS[name]
    if "decisions" in row.needs:
        traces = rollout(make("ledger-v0"), Softmax(), groups=8, rollouts=4, seed=2)
        yield Steps.from_traces(traces), {"replay": Branching(traces), "n": 2}
    if "replay" in row.needs or name == "blame":
        plays = play(deal("T3", agents=2), groups=2, rollouts=4)
        yield plays.steps, {"replay": Rerun(plays), **GIVEN.get(name, {})}
    if "policy" in row.needs:
        plays = play(deal("T3", agents=2), groups=2, rollouts=4)
        yield plays.steps, {"policy": Rerun(plays), **GIVEN.get(name, {})}
    if row.family == "observational":
        yield eight_rows(np.arange(8) % 3), {}
        yield eight_rows([1, 1, 0, 0, 1, 1, 1, 1]), {}


def eight_rows(reward) -> Steps:
    """Two groups of two rollouts of two turns, with every column that a method may need."""
    row = np.arange(8)
    return Steps.from_columns(
        group=["a"] * 4 + ["b"] * 4,
        rollout=row // 2,
        reward=reward,
        anchor=[f"s{r % 2}" for r in row],
        value=row / 8,
        value_high=row / 9,
        segment_start=row % 2 == 0,
        logprob=-row / 4,
        logprob_new=-row / 5,
        state_digest=[f"d{r % 3}" for r in row],
        quality=row // 2 % 2,
        depends=[[0]] * 8,
    )


def test_every_estimand_is_put_into_words():
    """What the numbers of the table say has a sentence."""
    assert {row.estimand for row in METHODS.values()} <= set(generate.ESTIMANDS)


# ---------------------------------------------------------------------------------------------
# The format


@pytest.mark.parametrize(
    ("path", "format_"),
    [
        ("tests/data/mas_rl_v1/example_trace.json", "mas_rl_v1"),
        ("tests/data/who_and_when/algorithm_generated/1.json", "who_and_when"),
        ("src/counterpoint/excerpts/tau_bench/airline.json.gz", "openai_chat"),
    ],
)
def test_our_files_satisfy_the_json_schema(tmp_path, path, format_):
    """Every line that we write, of every kind met in the examples, is one of the schema's."""
    schema = json.loads(generate.SCHEMA.read_text())
    check = {
        kind: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]})
        for kind, name in kinds_of(schema).items()
    }
    few = islice(read(ROOT / path, format_), 4)
    lines = [line for trace in few for line in trace_lines(trace)]
    save(tmp_path / "t.jsonl", lines)
    for text in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        check[line["type"]].validate(line)


def test_the_json_schema_refuses_what_the_reader_refuses():
    """An unknown field, a missing one, and a wrong type are errors of the schema."""
    schema = json.loads(generate.SCHEMA.read_text())
    check = jsonschema.Draft202012Validator(schema)
    good = {"type": "act", "trace_id": "t", "seq": 0, "agent": "a"}
    assert check.is_valid(good)
    for bad in ({**good, "sq": 1}, {**good, "seq": "0"}, {"type": "act", "seq": 0, "agent": "a"}):
        assert not check.is_valid(bad)


def kinds_of(schema) -> dict[str, str]:
    """`type` of a line → name of its definition."""
    mapping = schema["discriminator"]["mapping"]
    return {kind: reference.rpartition("/")[2] for kind, reference in mapping.items()}


# ---------------------------------------------------------------------------------------------
# Pages as a whole


def test_the_readme_opens_with_the_two_commands():
    """The first block of the README is `make demo` and `make test`."""
    _, first = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert [line.partition("#")[0].strip() for line in first.splitlines()] == [
        "make demo",
        "make test",
    ]


def test_the_word_estimand_is_explained_before_it_is_used():
    """The README uses the word first where it explains it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("estimand") == text.index("is called its **estimand**") + len(
        "is called its **"
    )


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=named)
def test_links_lead_somewhere(page):
    """Every relative link of a page names a file or folder that is there, every #part a heading."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        file, _, part = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if part:
            assert part in anchors(target.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_index_leads_to_every_page():
    """docs/index.md links every page of docs/ but those of methods, which stand in their table."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in PAGES if p.name != "README.md"}
    assert {p for p in pages - {"index.md"} if not p.startswith("methods/")} <= set(
        re.findall(r"\]\(([^)]+)\)", index)
    )


# ---------------------------------------------------------------------------------------------
# What is shown


class Shown(NamedTuple):
    """One thing that a reader may run, and what the page says it prints; None if it shows none."""

    program: list[str]
    output: str | None


def shown(page: Path) -> list[Shown]:
    """The commands and programs of a page in their order."""
    blocks, found = FENCE.findall(page.read_text(encoding="utf-8")), []
    for (kind, text), (after, output) in pairwise([*blocks, ("", "")]):
        if kind == "python":
            found.append(Shown([sys.executable, "-c", text], output if after == "text" else None))
        elif kind == "console":
            parts = re.split(r"^\$ (.+)\n", text, flags=re.MULTILINE)[1:]
            found += [
                Shown(["bash", "-c", c], o) for c, o in zip(parts[::2], parts[1::2], strict=True)
            ]
        elif kind == "sh":
            found += [Shown(["bash", "-c", runnable(line)], None) for line in text.splitlines()]
    return found


def runnable(line: str) -> str:
    """`make test` is what runs this, and test_cli runs the demo, so both are only looked up."""
    return line.replace("make ", "make -n ")


WITH_PROGRAMS = [page for page in PAGES if shown(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=named)
def test_what_a_page_shows_is_what_happens(page, tmp_path):
    """Each command and program of a page runs in a copy of the repository and prints what it shows.

    `…` in a shown output stands for anything within a line; words for people on stderr are not
    compared.
    """
    for name in COPIED:
        into, of = tmp_path / name, ROOT / name
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(of, into) if of.is_dir() else shutil.copy(of, into)
    installed = tmp_path / ".venv"
    installed.mkdir()
    (installed / "bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".installed", ".developer"):
        (installed / stamp).touch()
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for program, expected in shown(page):
        run = subprocess.run(
            program,
            cwd=tmp_path,
            env={**os.environ, "PATH": places, "PYTHONWARNINGS": "error"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if expected is None:
            assert run.returncode == 0, run.stderr
        else:
            assert matches(run.stdout, expected), f"{program[-1]}\n{run.stdout}{run.stderr}"


def matches(printed: str, expected: str) -> bool:
    pattern = ".*".join(map(re.escape, expected.rstrip().split("…")))
    return (
        re.fullmatch(pattern, "\n".join(map(str.rstrip, printed.rstrip().splitlines()))) is not None
    )


def test_a_shown_output_that_differs_is_noticed():
    """One changed digit, a missing line, or an additional one is a difference; `…` is not."""
    assert matches("trace 7f  1.0\n", "trace …  1.0\n")
    for other in ("trace 7f  1.1\n", "trace 7f  1.0\nmore\n", ""):
        assert not matches(other, "trace …  1.0\n")


# ---------------------------------------------------------------------------------------------
# Sizes


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    """Of nine lines three hold code."""
    source = '"""Doc.\n\nMore.\n"""\n\n# why\ndef f():\n    """Doc."""\n    x = (1,\n         2)\n'
    assert sizes.code_lines(source) == 3
    assert [tuple(size) for size in sizes.functions(source, "a.py")] == [(4, "a.py:f")]
