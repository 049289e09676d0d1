"""The one table of methods: command line, documentation and tests all read it."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from counterpoint.ledger import Credit
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.targets import load_target


class Method(NamedTuple):
    """One row: where the function is and what may be said of its result.

    `needs` are the columns of Steps that it cannot do without; `replay` is something that can run
    the runs again, `policy` something that says what agents would choose, `decisions` are those of
    traces. `conserves` says whether the credits of a rollout sum to what is shared out; `unbiased`
    whether its default form is an unbiased policy gradient, which a test proves on an enumerated
    game.
    """

    target: str
    family: Literal["observational", "measured", "generated"]
    unit: str
    estimand: str
    needs: frozenset[str]
    conserves: bool
    unbiased: bool
    paper: str


def _observational(
    where: str,
    estimand: str,
    paper: str,
    *,
    needs: Iterable[str] = (),
    conserves: bool = False,
    unbiased: bool = False,
) -> Method:
    """A method that reads the runs as they were and gives every turn a number."""
    return Method(
        target=f"counterpoint.credit.{where}",
        family="observational",
        unit="turn",
        estimand=estimand,
        needs=frozenset(needs),
        conserves=conserves,
        unbiased=unbiased,
        paper=paper,
    )


def _measured(
    where: str,
    estimand: str,
    paper: str,
    *,
    unit: str = "turn",
    needs: Iterable[str] = ("replay",),
    conserves: bool = False,
    unbiased: bool = False,
) -> Method:
    """A method that runs the runs again, with something changed."""
    return Method(
        target=f"counterpoint.credit.{where}",
        family="measured",
        unit=unit,
        estimand=estimand,
        needs=frozenset(needs),
        conserves=conserves,
        unbiased=unbiased,
        paper=paper,
    )


def _generated(where: str, estimand: str, paper: str) -> Method:
    """A method that asks the policies what they would choose, and runs nothing."""
    return Method(
        target=f"counterpoint.credit.{where}",
        family="generated",
        unit="turn",
        estimand=estimand,
        needs=frozenset({"policy"}),
        conserves=False,
        unbiased=False,
        paper=paper,
    )


def _decided(verb: str) -> Method:
    """The effect of a decision: by branches, or from a log whose decisions have probabilities."""
    where = f"orchestration:{verb}"
    return _measured(where, "effect", "Robins et al. 1994", unit="decision", needs=["decisions"])


METHODS: dict[str, Method] = {
    "reinforce": _observational("returns:reinforce", "outcome", "Williams 1992", unbiased=True),
    "reinforce_pp": _observational("returns:reinforce_pp", "outcome", "arXiv:2501.03262"),
    "gae": _observational("critic:gae", "seqau", "arXiv:1506.02438", needs={"value"}),
    "hiper": _observational(
        "hierarchy:hiper",
        "seqau",
        "arXiv:2602.16165",
        needs={"segment_start", "value", "value_high"},
    ),
    "grpo": _observational("grouped:grpo", "outcome", "arXiv:2402.03300"),
    "rloo": _observational("grouped:rloo", "outcome", "arXiv:2402.14740", unbiased=True),
    "grpo_process": _observational("turnwise:grpo_process", "outcome", "arXiv:2402.03300"),
    "gigpo": _observational(
        "anchored:gigpo", "outcome+anchor", "arXiv:2505.10978", needs={"anchor"}
    ),
    "dr_mas": _observational("teams:dr_mas", "outcome", "arXiv:2602.08847"),
    "m_grpo": _observational("teams:m_grpo", "outcome", "arXiv:2511.13288"),
    "magrpo": _observational("turnwise:magrpo", "outcome", "arXiv:2508.04652"),
    "fold_grpo": _observational("folded:fold_grpo", "outcome", "arXiv:2510.11967"),
    "cad_grpo": _observational(
        "cad:cad_grpo",
        "outcome",
        "a reconstruction; none is public",
        needs={"quality", "depends"},
        unbiased=True,
    ),
    "blame": _observational(
        "blame:blame", "seqau", "Ng et al. 1999", needs={"value"}, conserves=True
    ),
    "cosac": _generated("cosac:cosac", "seqau", "arXiv:2604.17693"),
    "hcapo": _generated("hindsight:hcapo", "outcome+hindsight", "arXiv:2603.08754"),
    "loo": _measured("replayed:loo", "removal:replayed", "Wolpert and Tumer 2001", unbiased=True),
    "coma": _measured("replayed:coma", "coma", "arXiv:1705.08926"),
    "shapley": _measured(
        "replayed_shapley:shapley", "shapley:frozen", "Shapley 1953", conserves=True
    ),
    "c3": _measured("replayed:c3", "seqau", "arXiv:2603.06859", unbiased=True),
    "fusion": _measured("fusion:fusion", "seqau", "this project's own"),
    "at_grpo": _measured("replayed:at_grpo", "seqau", "arXiv:2510.11062"),
    "treemem": _measured("replayed:treemem", "outcome", "arXiv:2605.04811"),
    "ccpo": _measured("replayed_teams:ccpo", "shaped", "arXiv:2603.21563"),
    "sharp": _measured("replayed_teams:sharp", "shaped", "arXiv:2602.08335"),
    "spawn": _decided("spawn"),
    "delegate": _decided("delegate"),
    "communicate": _decided("communicate"),
    "aggregate": _decided("aggregate"),
    "stop": _decided("stop"),
}
"""Name → row. A method with a critic is unbiased only as far as the values are true, and so is not
called unbiased here.
"""


def method(name: str) -> Callable[..., Credit]:
    """The function behind a name of the table, or behind `file.py:function`.

    Raises:
        Refused: no such name, file or function. An error inside the user's own file is not caught.
    """
    if name in METHODS:
        found: Callable[..., Credit] = load_target(METHODS[name].target)
        return found
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise Refused(
            f"there is no method {name!r}; the methods are {', '.join(METHODS)}, "
            "and a function of your own is named file.py:function"
        )
    own: Callable[..., Credit] = load_target(name)
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
    unit = result.unit if isinstance(result, Credit) else "turn"
    due = len(steps) if unit == "turn" else len(steps.units(unit))
    if not isinstance(result, Credit) or len(result) != due:
        each = "row" if unit == "turn" else unit
        raise Refused(f"{name} must return Credit with one value per {each} ({due} {each}s)")
    return result


def parameters(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option that a method runs with: those given, and the defaults of the others. What runs
    the runs again is none: no file can say it.
    """
    defaults = {k: p.default for k, p in _options(method(name)).items() if p.default is not p.empty}
    defaults.pop("replay", None)
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
