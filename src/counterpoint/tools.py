"""Tools and who may use them: schemas pinned by digest, checked calls, permissions with reasons."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints

import msgspec

from counterpoint.spelling import CANONICAL, Payload, Refused, digest_of, freeze
from counterpoint.streams import Draws
from counterpoint.vocabulary import Trust

Verdict: TypeAlias = Literal["allow", "ask", "deny"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Spec:
    """What a tool is to those who call it; the digest pins every byte of its schema.

    `parameters` maps names to types and `required` says which have no default. `draws`: it takes
    random draws. `pure`: it reads only what the environment's reset fixed, and its draws.
    `seconds`: how long a call may take, None for as long as it likes.
    """

    name: str
    about: str
    parameters: Mapping[str, Any]
    required: tuple[str, ...]
    draws: bool
    pure: bool
    seconds: float | None

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The schema as shown to a policy: name, description, JSON Schema of the arguments.

        Raises Refused for a parameter whose type has no JSON form.
        """
        try:
            shown = {name: msgspec.json.schema(kind) for name, kind in self.parameters.items()}
        except TypeError as error:
            raise Refused(f"tool {self.name} takes what has no JSON form: {error}") from None
        return {
            "name": self.name,
            "description": self.about,
            "parameters": {
                "type": "object",
                "properties": shown,
                "required": list(self.required),
                "additionalProperties": False,
            },
        }

    @cached_property
    def digest(self) -> str:
        """Digest of the whole schema, as hexadecimal."""
        return digest_of(CANONICAL.encode(self.schema)).hex()


def tool(function: F | None = None, *, pure: bool = False, seconds: float | None = None) -> Any:
    """Mark a method of an environment as a tool: its signature is the schema.

    A parameter named `draws` receives the tool's random draws and is not part of the schema. What
    it returns must have a JSON form; bytes are read as UTF-8. After `seconds` the call gets an
    error for its answer, and what still runs of it in Python is ended at its next instruction; a
    call that waits inside C goes on alone, so it should not touch the environment afterwards.
    """

    def mark(method: F) -> F:
        method.__tool__ = (pure, seconds)  # type: ignore[attr-defined]
        return method

    return mark if function is None else mark(function)


def specs(owner: Any) -> dict[str, Spec]:
    """The tools of an environment, by name, as they are now."""
    classes = type(owner).__mro__
    names = {n for kind in classes for n, value in vars(kind).items() if hasattr(value, "__tool__")}
    found = {name: spec_of(owner, name) for name in sorted(names)}
    return {name: spec for name, spec in found.items() if spec is not None}


def spec_of(owner: Any, name: str) -> Spec | None:
    """One tool of an environment as it is now; None if it has none of that name.

    What was found is kept on the function, and looked at again when anything of it has changed.
    """
    marked = getattr(getattr(type(owner), name, None), "__tool__", None)
    if marked is None:
        return None
    method = getattr(owner, name)
    function = getattr(method, "__func__", method)
    face = (
        name,
        marked,
        getattr(function, "__code__", None),
        function.__doc__,
        len(getattr(function, "__defaults__", None) or ()),
        tuple(getattr(function, "__kwdefaults__", None) or ()),
        getattr(function, "__annotations__", {}),
    )
    known = getattr(function, "__spec__", None)
    if known is not None and known[0] == face:
        spec: Spec = known[1]
        return spec
    spec = _spec(method, name, *marked)
    function.__spec__ = ((*face[:-1], dict(face[-1])), spec)
    return spec


def _spec(method: Callable[..., Any], name: str, pure: bool, seconds: float | None) -> Spec:
    taken = dict(inspect.signature(method).parameters)
    if odd := [p for p in taken.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise Refused(f"tool {name} takes {odd[0]}; its signature is its schema, so name them all")
    try:
        hints = get_type_hints(method, include_extras=True)
    except NameError as error:
        raise Refused(f"the signature of tool {name} cannot be read: {error}") from None
    draws = taken.pop("draws", None) is not None
    return Spec(
        name=name,
        about=inspect.getdoc(method) or "",
        parameters={p: hints.get(p, Any) for p in taken},
        required=tuple(n for n, p in taken.items() if p.default is p.empty),
        draws=draws,
        pure=pure,
        seconds=seconds,
    )


class Answer(NamedTuple):
    """What a call gave: a payload, or the error that stands in its place; `size` in bytes."""

    content: Payload
    error: str | None
    size: int


def call(owner: Any, spec: Spec, arguments: Any, draws: Draws | None, most_bytes: int) -> Answer:
    """Run a tool. Whatever happens in it becomes an answer: an exception, a hang, a flood, bytes.

    Arguments are checked against the signature. `size` is that of the whole content, a text's in
    UTF-8, anything else's in JSON; of what is over `most_bytes` the beginning is kept, as a text.
    """
    try:
        given = _checked(spec, arguments)
    except (TypeError, msgspec.ValidationError) as error:
        return _failed(f"wrong arguments: {error}")
    if spec.draws:
        given["draws"] = draws
    method = getattr(owner, spec.name)
    if spec.seconds is None:
        return _answer(method, given, most_bytes)
    return _in_time(method, given, most_bytes, spec.seconds)


def _in_time(
    method: Callable[..., Any], given: dict[str, Any], most_bytes: int, seconds: float
) -> Answer:
    held: list[Answer] = []
    thread = threading.Thread(
        target=lambda: held.append(_answer(method, given, most_bytes)), daemon=True
    )
    thread.start()
    thread.join(seconds)
    if held:
        return held[0]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )
    return _failed(f"no answer within {seconds:g} s")


def _checked(spec: Spec, arguments: Any) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments are an object, not {type(arguments).__name__}")
    if missing := [name for name in spec.required if name not in arguments]:
        raise TypeError(f"{', '.join(missing)} missing")
    if beyond := [name for name in arguments if name not in spec.parameters]:
        raise TypeError(f"there is no parameter {beyond[0]!r:.80}")
    return {name: msgspec.convert(v, spec.parameters[name]) for name, v in arguments.items()}


def _answer(method: Callable[..., Any], given: dict[str, Any], most_bytes: int) -> Answer:
    try:
        value = method(**given)
        if isinstance(value, bytes | bytearray):
            value = bytes(value).decode("utf-8", "surrogateescape")
        raw = freeze(value)
    except (Exception, SystemExit) as error:  # a tool may raise anything, and the run goes on
        return _failed(f"{type(error).__name__}: {_worded(error)}")
    if isinstance(raw, msgspec.UnsetType):
        return Answer(raw, None, 0)
    text = value if isinstance(value, str) else None
    size = len(bytes(raw)) if text is None else _size(text)
    if size > most_bytes:
        raw = freeze(cut(bytes(raw).decode() if text is None else text, most_bytes))
    return Answer(raw, None, size)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def cut(text: str, most_bytes: int) -> str:
    """The beginning of a text: as many whole characters as `most_bytes` of UTF-8 hold."""
    data = text[:most_bytes].encode("utf-8", "surrogatepass")
    end = min(most_bytes, len(data))
    while end < len(data) and data[end] & 0xC0 == 0x80:  # not within a character
        end -= 1
    return data[:end].decode("utf-8", "surrogatepass")


def _worded(error: BaseException) -> str:
    try:
        text = str(error)[:500]
    except Exception:  # even its words may fail
        text = "(no words)"
    return text.encode("utf-8", "replace").decode()


def _failed(why: str) -> Answer:
    return Answer(msgspec.UNSET, why.encode("utf-8", "replace").decode(), 0)


# ---------------------------------------------------------------------------------------------
# Permission


class Rule(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One line of a permission list; an absent field matches everything.

    `trust` matches the lowest trust of what the agent had before its eyes.
    """

    effect: Verdict
    role: str | None = None
    name: str | None = None
    trust: Trust | None = None


_STRICTEST: tuple[Verdict, ...] = ("deny", "ask", "allow")


def verdict(
    rules: Sequence[Rule], allowed: Sequence[str], role: str, name: str, trust: Trust
) -> tuple[Verdict, str]:
    """Whether a role may use a verb or tool now, and by which rule.

    `allowed` is the role's own list: what it does not name is denied by default. Of the rules that
    match, a deny wins over an ask, an ask over an allow, the first of equals. Without a match the
    list decides. Returns (verdict, "rule N", "list" or "default").
    """
    if name not in allowed:
        return "deny", "default"
    matching = [
        (n, rule)
        for n, rule in enumerate(rules)
        if rule.role in (None, role) and rule.name in (None, name) and rule.trust in (None, trust)
    ]
    for effect in _STRICTEST:
        for n, rule in matching:
            if rule.effect == effect:
                return effect, f"rule {n}"
    return "allow", "list"


def rules_of(config: Any) -> list[Rule]:
    """The permission rules of a run's config. Raises Refused for one that is no rule."""
    try:
        return msgspec.convert((config or {}).get("permissions", []), list[Rule])
    except msgspec.ValidationError as error:
        raise Refused(f"the permissions of this run cannot be read: {error}") from None
