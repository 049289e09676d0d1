"""The command line: a command parses, calls one function, and hands the result to the renderer.

Exit status: 0 done; 1 the input broke a rule, or the question is refused; 2 wrong usage. Data goes
to stdout or to `-o`, words for people to stderr.
"""

from __future__ import annotations

import errno
import os
import sys

# In the order in which `--help` lists their commands.
from counterpoint.cli import traces, weigh, play, train, pages, render  # isort: skip
from counterpoint.cli.options import app
from counterpoint.spelling import Refused

__all__ = ["app", "main", "pages", "play", "traces", "train", "weigh"]


def main() -> None:
    """Run the command line; bad input ends in one sentence, never in a traceback."""
    if sys.stdout is None:
        sys.exit(1)  # there is nobody to tell
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except Refused as refusal:
        render.note(render.plain(f"refused: {refusal}"))
        sys.exit(1)
    except render.Gone:  # whoever read us has seen enough
        _no_more_output()
        sys.exit(0)
    except SystemExit:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _no_more_output()
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _no_more_output()
        render.note("refused: the output cannot be written: no space is left")
        sys.exit(1)
    except KeyboardInterrupt:
        render.note("interrupted; what was written before is whole")
        sys.exit(130)


def _no_more_output() -> None:
    """What is still buffered has nowhere to go; the interpreter must not try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
