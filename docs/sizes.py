"""Print how large the package is: the ten longest files and functions, and all lines of code.

A line of code holds code: blank lines, comments and docstrings do not count. Files over 500 lines
and functions over 50 are flagged, counted as an editor counts them, and never fail anything: the
list is for the reader of a change.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "src" / "counterpoint"
LONGEST_FILE, LONGEST_FUNCTION, SHOWN = 500, 50, 10

_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


class Size(NamedTuple):
    """How many lines something has, and where it is."""

    lines: int
    where: str


def code_lines(source: str) -> int:
    """Lines that hold code: no blanks, no comments, no docstrings."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            held.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(held)


def functions(source: str, file: str) -> Iterator[Size]:
    """Every function and method with the lines from its `def` to its end."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Size((node.end_lineno or 0) - node.lineno + 1, f"{file}:{node.name}")


def main() -> None:
    files, longest, total = [], [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
        files.append(Size(source.count("\n"), name))
        longest += functions(source, name)
        total += code_lines(source)
    print(f"{total} lines of code in {len(files)} files, {len(longest)} functions")
    _show("longest files", files, LONGEST_FILE)
    _show("longest functions", longest, LONGEST_FUNCTION)


def _show(title: str, sizes: list[Size], limit: int) -> None:
    print(f"\n{title}")
    for size in sorted(sizes, reverse=True)[:SHOWN]:
        print(f"{size.lines:6} {size.where}{f'  over {limit}' if size.lines > limit else ''}")


if __name__ == "__main__":
    main()
