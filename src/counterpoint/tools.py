"""Tools and who may use them: schemas pinned by digest, checked calls, permissions with reasons."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints

import msgspec

from counterpoint.schema import Trust
from counterpoint.spelling import CANONICAL, Payload, Refused, digest_of, freeze
from counterpoint.streams import Draws

Verdict: TypeAlias = Literal["allow", "ask", "deny"]
F = TypeVar("F", bound=Callable[..., Any])


class Spec(NamedTuple):
    """What a tool is to those who call it; the digest pins every byte of its schema.

    `pure` says that it reads only what the environment's reset fixed, and its own draws; `seconds`
    how long a call may take, None for as long as it likes.
    """

    name: str
    about: str
    parameters: Mapping[str, Any]
    pure: bool
    seconds: float | None

    @property
    def schema(self) -> dict[str, Any]:
        """The schema as shown to a policy: name, description, JSON Schema of each parameter."""
        shown = {name: msgspec.json.schema(kind) for name, kind in self.parameters.items()}
        return {"name": self.name, "description": self.about, "parameters": shown}

    @property
    def digest(self) -> str:
        """Digest of the whole schema, as hexadecimal."""
        return digest_of(CANONICAL.encode(self.schema)).hex()


def tool(function: F | None = None, *, pure: bool = False, seconds: float | None = None) -> Any:
    """Mark a method of an environment as a tool: its signature is the schema.

    A parameter named `draws` receives the tool's random draws and is not part of the schema. What
    it returns must have a JSON form; bytes are read as UTF-8.
    """

    def mark(method: F) -> F:
        method.__tool__ = (pure, seconds)  # type: ignore[attr-defined]
        return method

    return mark if function is None else mark(function)


def specs(owner: Any) -> dict[str, Spec]:
    """The tools of an environment, by name, as they are now."""
    found = {}
    for name in dir(type(owner)):
        marked = getattr(getattr(type(owner), name, None), "__tool__", None)
        if marked is not None:
            found[name] = _spec(getattr(owner, name), name, *marked)
    return found


def _spec(method: Callable[..., Any], name: str, pure: bool, seconds: float | None) -> Spec:
    hints = get_type_hints(method)
    parameters = {
        p: hints.get(p, Any) for p in inspect.signature(method).parameters if p != "draws"
    }
    return Spec(name, inspect.getdoc(method) or "", parameters, pure, seconds)


class Answer(NamedTuple):
    """What a call gave: a payload, or the error that stands in its place; `size` in bytes."""

    content: Payload
    error: str | None
    size: int


def call(owner: Any, spec: Spec, arguments: Any, draws: Draws, most_bytes: int) -> Answer:
    """Run a tool. Whatever happens in it becomes an answer: an exception, a hang, a flood, bytes.

    Arguments are checked against the signature; content over `most_bytes` is cut and its size kept.
    """
    method = getattr(owner, spec.name)
    try:
        given = _checked(method, spec, arguments)
    except (TypeError, msgspec.ValidationError) as error:
        return _failed(f"wrong arguments: {error}")
    if "draws" in inspect.signature(method).parameters:
        given["draws"] = draws
    if spec.seconds is None:
        return _answer(lambda: method(**given), most_bytes)
    held: list[Answer] = []
    thread = threading.Thread(
        target=lambda: held.append(_answer(lambda: method(**given), most_bytes)), daemon=True
    )
    thread.start()
    thread.join(spec.seconds)
    return held[0] if held else _failed(f"no answer within {spec.seconds:g} s")


def _checked(method: Callable[..., Any], spec: Spec, arguments: Any) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments are an object, not {type(arguments).__name__}")
    bound = inspect.signature(method).bind_partial(
        **{k: v for k, v in arguments.items() if k != "draws"}
    )
    if missing := [
        p.name
        for p in inspect.signature(method).parameters.values()
        if p.default is p.empty and p.name != "draws" and p.name not in bound.arguments
    ]:
        raise TypeError(f"{', '.join(missing)} missing")
    return {k: msgspec.convert(v, spec.parameters[k]) for k, v in bound.arguments.items()}


def _answer(run: Callable[[], Any], most_bytes: int) -> Answer:
    try:
        value = run()
        if isinstance(value, bytes | bytearray):
            value = bytes(value).decode("utf-8", "surrogateescape")
        raw = freeze(value)
    except Exception as error:  # a tool may raise anything, and the run goes on
        return _failed(f"{type(error).__name__}: {str(error)[:500]}")
    if isinstance(raw, msgspec.UnsetType):
        return Answer(raw, None, 0)
    size = len(bytes(raw))
    if size > most_bytes:
        text = value if isinstance(value, str) else bytes(raw).decode()
        raw = freeze(text.encode("utf-8", "surrogatepass")[:most_bytes].decode("utf-8", "ignore"))
    return Answer(raw, None, size)


def _failed(why: str) -> Answer:
    return Answer(msgspec.UNSET, why, 0)


# ---------------------------------------------------------------------------------------------
# Permission


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
