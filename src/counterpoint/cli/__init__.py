"""The command line: a command parses, calls one function, and hands the result to the renderer.

Exit status: 0 done; 1 the input broke a rule, or the question is refused; 2 wrong usage. Data goes
to stdout or to `-o`, words for people to stderr.
"""

from __future__ import annotations

import os
import sys

from counterpoint.cli import render
from counterpoint.cli.branching import app
from counterpoint.spelling import Refused

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; bad input ends in one sentence, never in a traceback."""
    try:
        app()
    except Refused as refusal:
        render.note(render.plain(f"refused: {refusal}"))
        sys.exit(1)
    except BrokenPipeError:  # whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        render.note("interrupted; what was written before is whole")
        sys.exit(130)
