"""`make bench`: print every figure, write docs/benchmarks.md, fail where half of a goal is missed.

A goal on a ratio is asserted at half, so that a busy machine does not fail it. Rows without a peer
are absolute figures: printed and never asserted. Rows in `MISSED` are known to miss and say so.
"""

from __future__ import annotations

import importlib
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

PARTS = (
    "reading",
    "recording",
    "graph",
    "credit",
    "coalitions",
    "regression",
    "harness",
    "fork",
    "team",
)
MISSED = (
    "read and check",
    "record an event",
    "durable append",
    "critical path",
    "GAE, 1024",
    "GRPO, 100,000 rollouts, from string ids",
    "RLOO, 100,000 rollouts, from string ids",
    "regression within groups",
)
"""Jobs whose goal NumPy cannot reach here; the miss is printed and not asserted."""

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def verdict(row: dict[str, Any]) -> str:
    """How a row stands to its goal."""
    ratio, goal = row.get("ratio"), row.get("goal")
    if ratio is None or goal is None:
        return "printed"
    if ratio >= goal:
        return "reached"
    if ratio >= goal / 2:
        return "half"
    return "missed" if row["job"].startswith(MISSED) else "FAILED"


def plain(value: Any) -> str:
    """A figure in four digits."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run all parts; the exit status is 1 if a row failed."""
    head = ("job", "ours", "peer", "peer_name", "ratio", "goal", "verdict")
    lines, failed = [], 0
    for part in PARTS:
        for row in importlib.import_module(f"benchmarks.{part}").rows():
            shown = {**row, "verdict": verdict(row)}
            failed += shown["verdict"] == "FAILED"
            lines.append("| " + " | ".join(plain(shown.get(name)) for name in head) + " |")
            print(lines[-1], flush=True)
    where = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}"
    page = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {date.today().isoformat()} ({where}).",
        "",
        "CPU seconds, median, both sides alternately in one run. A ratio is peer ÷ ours. Rows with",
        "a ratio are asserted at half of the goal; rows without a peer are printed only.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *lines,
    ]
    PAGE.write_text("\n".join(page) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
