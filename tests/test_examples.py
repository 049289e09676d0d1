"""Every program in examples/ runs as it stands, and does what the README promises of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import counterpoint
from counterpoint.credit import check_credit_method, estimate, grpo, method
from counterpoint.formats import read
from counterpoint.steps import Steps
from counterpoint.validate import validate

MOST_LINES = 20


def imported(path: Path) -> set[str]:
    """What a program takes from the root of the package."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    froms = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "counterpoint"]
    return {alias.name for node in froms for alias in node.names}


ALL = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
EXAMPLES = [path for path in ALL if imported(path) <= set(counterpoint.__all__)]
"""Programs whose names are all there; one that is ahead of the package waits for it."""


def named(path: Path) -> str:
    return path.name


def run(path: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_an_example_runs(path, tmp_path):
    """The program ends well in an empty folder, without a warning."""
    run(path, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_an_example_uses_public_names_only(path):
    """A program imports from the root alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deep = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    assert imported(path)
    assert not [module for module in deep if module.startswith("counterpoint.")]


@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_an_example_is_short(path):
    """A program that needs more than twenty lines says that the interface is wrong.

    Imports, docstring, blank lines, data at the top and the call at the bottom do not count.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    program = [
        line
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for line in lines[node.lineno - 1 : node.end_lineno]
        if line.strip()
    ]
    assert 1 <= len(program) <= MOST_LINES


@pytest.mark.slow
def test_the_logged_loop_is_a_valid_trace_with_credit(tmp_path):
    """log_my_loop.py run twice leaves eight rollouts of one group that break no rule.

    One in four of them finds nothing and answers wrongly, so GRPO by hand: mean 6/8, and the two
    that failed are 0.75 below it.
    """
    script = next(path for path in EXAMPLES if path.name == "log_my_loop.py")
    run(script, tmp_path)
    run(script, tmp_path)
    traces = list(read(tmp_path / "runs.jsonl"))
    assert not validate(traces).findings
    assert [trace.header.rollout_id for trace in traces] == [str(i) for i in range(8)]
    credit = grpo(Steps.from_traces(traces), normalize_std=False)
    assert sorted(set(credit.values.round(12))) == [-0.75, 0.25]


def test_the_method_of_ones_own_is_what_grpo_is_without_scaling():
    """my_method.py:centred passes the contract, runs by file name, and equals mean-only GRPO."""
    script = next(path for path in EXAMPLES if path.name == "my_method.py")
    name = f"{script}:centred"
    check_credit_method(method(name), lambda steps: grpo(steps, normalize_std=False))
    steps = Steps.from_columns(group=["q"] * 3, rollout=[0, 1, 2], reward=[1.0, 0.0, 0.5])
    assert estimate(name, steps).values.tolist() == [0.5, -0.5, 0.0]
