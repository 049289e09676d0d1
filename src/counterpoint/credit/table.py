"""The one table of methods: command line, documentation and tests all read it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
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
    "reinforce": Method(
        target="counterpoint.credit.returns:reinforce",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=True,
        paper="Williams 1992",
    ),
    "reinforce_pp": Method(
        target="counterpoint.credit.returns:reinforce_pp",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2501.03262",
    ),
    "gae": Method(
        target="counterpoint.credit.critic:gae",
        family="observational",
        unit="turn",
        estimand="seqau",
        needs=frozenset({"value"}),
        conserves=False,
        unbiased=False,  # with λ below 1 only as far as the critic's values are true
        paper="arXiv:1506.02438",
    ),
    "hiper": Method(
        target="counterpoint.credit.hierarchy:hiper",
        family="observational",
        unit="turn",
        estimand="seqau",
        needs=frozenset({"segment_start", "value", "value_high"}),
        conserves=False,
        unbiased=False,  # as with gae
        paper="arXiv:2602.16165",
    ),
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
    "rloo": Method(
        target="counterpoint.credit.grouped:rloo",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=True,
        paper="arXiv:2402.14740",
    ),
    "grpo_process": Method(
        target="counterpoint.credit.turnwise:grpo_process",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2402.03300",
    ),
    "gigpo": Method(
        target="counterpoint.credit.anchored:gigpo",
        family="observational",
        unit="turn",
        estimand="outcome+anchor",
        needs=frozenset({"anchor"}),
        conserves=False,
        unbiased=False,
        paper="arXiv:2505.10978",
    ),
    "dr_mas": Method(
        target="counterpoint.credit.teams:dr_mas",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2602.08847",
    ),
    "m_grpo": Method(
        target="counterpoint.credit.teams:m_grpo",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2511.13288",
    ),
    "magrpo": Method(
        target="counterpoint.credit.turnwise:magrpo",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2508.04652",
    ),
    "fold_grpo": Method(
        target="counterpoint.credit.folded:fold_grpo",
        family="observational",
        unit="turn",
        estimand="outcome",
        needs=frozenset(),
        conserves=False,
        unbiased=False,
        paper="arXiv:2510.11967",
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
        Refused: no such method, an option that it does not have or of the wrong type, or whatever
            the method refuses.
    """
    function = method(name)
    known, hints = _options(function), _hints(function)
    for option, value in options.items():
        if option not in known:
            raise Refused(f"{name} has no option {option!r}; it has {', '.join(known) or 'none'}")
        if option in hints and not _fits(value, hints[option]):
            raise Refused(f"{name}: {option} is {value!r}; it is {_said(hints[option])}")
    result = function(steps, **options)
    if not isinstance(result, Credit) or len(result) != len(steps):
        raise Refused(f"{name} must return Credit with one value per row ({len(steps)} rows)")
    return result


def parameters(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option that a method runs with: those given, and the defaults of the others."""
    defaults = {k: p.default for k, p in _options(method(name)).items() if p.default is not p.empty}
    return {**defaults, **options}


def _options(function: Callable[..., Credit]) -> dict[str, inspect.Parameter]:
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return {p.name: p for p in [p for p in found if p.kind in named][1:]}


def _hints(function: Callable[..., Credit]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a user's annotation that does not resolve says nothing
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may be given where the signature says `hint`; what is unknown may."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(value == known and type(value) is type(known) for known in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Sequence:
        return isinstance(value, str | list | tuple)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _said(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_said(argument) for argument in typing.get_args(hint))
    return _KINDS.get(hint, str(hint))


_KINDS: dict[Any, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    type(None): "nothing",
}
