"""The one table of methods: command line, documentation and tests all read it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


class Method(NamedTuple):
    """One row: where the function is and what may be said of its result.

    `needs` are the columns of Steps that it cannot do without; `conserves` whether the credits of a
    rollout sum to what is shared out; `unbiased` whether its default form is an unbiased policy
    gradient, which a test proves on an enumerated game.
    """

    target: str
    family: Literal["observational", "measured", "generated"]
    unit: str
    estimand: str
    needs: frozenset[str]
    conserves: bool
    unbiased: bool
    paper: str


METHODS: dict[str, Method] = {
    "grpo": Method(
        target="counterpoint.credit.grouped:grpo",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2402.03300",
    ),
}


def method(name: str) -> Callable[..., Credit]:
    """The function behind a name of the table, or behind `file.py:function`.

    Raises:
        Refused: no such name, file or function. An error inside the user's own file is not caught.
    """
    if name in METHODS:
        module, _, function = METHODS[name].target.partition(":")
        found: Callable[..., Credit] = getattr(importlib.import_module(module), function)
        return found
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Refused(
            f"there is no method {name!r}; the methods are {', '.join(METHODS)}, "
            "and a function of your own is named file.py:function"
        )
    if not Path(path).is_file():
        raise Refused(f"there is no file {path} to take {function} from")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{path} cannot be loaded as Python")
    module_of_user = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_of_user)
    own: Callable[..., Credit] | None = getattr(module_of_user, function, None)
    if not callable(own):
        raise Refused(f"{path} has no function {function}")
    return own


def estimate(name: str, steps: Steps, **options: Any) -> Credit:
    """Run a method by its name in `METHODS`, or by `file.py:function`.

    Raises:
        Refused: no such method, an option that it does not have, or whatever the method refuses.
    """
    function = method(name)
    known = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ][1:]
    for option in options:
        if option not in known:
            raise Refused(f"{name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    result = function(steps, **options)
    if not isinstance(result, Credit) or len(result) != len(steps):
        raise Refused(f"{name} must return Credit with one value per row ({len(steps)} rows)")
    return result
