"""Acting by any OpenAI-compatible chat endpoint, hosted or local. It acts and does not learn.

Verbs and tools are offered as tools, and what the model calls becomes the items of its turn; its
text is never parsed. Text from others reaches it in blocks that say whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from counterpoint.policies import Menu, Observation, Output
from counterpoint.policies.grammar import arguments_of
from counterpoint.schema import Item
from counterpoint.spelling import CANONICAL, Refused, digest_of, freeze
from counterpoint.streams import Draws
from counterpoint.tools import Spec
from counterpoint.vocabulary import Verb


class _Verb(NamedTuple):
    """How a verb is offered: what it does, the argument that names somebody, that which says it."""

    about: str
    name: str | None
    content: str | None


_VERBS: Mapping[str, _Verb] = {
    "message": _Verb("Send a message to agents; their next turn shows it.", "to", "content"),
    "delegate": _Verb("Hand work over to agents and wait for what they return.", "to", "content"),
    "spawn": _Verb("Bring an agent of a role to life.", "role", "context"),
    "despawn": _Verb("End an agent that you spawned.", "agent", None),
    "return": _Verb("Give your result back to whoever delegated to you.", None, "content"),
    "write": _Verb("Write a shared artefact.", "artefact", "content"),
    "aggregate": _Verb("Put what you were given together, by a rule.", "rule", "content"),
    "stop": _Verb("End the whole run with an answer.", None, "answer"),
}
_SEVERAL = "to"
_READ = {"artefact": {"type": "string"}}
_TOOL = re.compile(r"[A-Za-z_][\w.]*")
_UNSPELLABLE = re.compile(r"[\ud800-\udfff]")
_SHOWN = 200


class Endpoint:
    """A policy that asks a chat endpoint for every turn.

    What the model calls and nobody can read (no JSON object, a name that is none, a verb without
    its argument) does nothing and stays in the text of the turn. Where the endpoint is busy, slow
    or cut off it is asked again, waiting longer each time and as long as it says.

    Args:
        model: as the endpoint names it.
        roles: role → verbs and tools that are offered to it, such as `env.roles`.
        tools: the tools of the environment, `env.tools()`.
        url: of the endpoint, up to `/v1`; None for the client's own default.
        key: of the endpoint; None for the client's own default. It is written nowhere.
        tries: how often a turn is asked for at most.
        timeout: seconds for one answer.
        options: further fields of a request, such as {"temperature": 0.7}.

    Raises:
        Refused: the client is not installed, or has no key.
    """

    deterministic = False
    trainable = False

    def __init__(
        self,
        model: str,
        roles: Mapping[str, Sequence[str]],
        tools: Mapping[str, Spec] | None = None,
        *,
        url: str | None = None,
        key: str | None = None,
        tries: int = 5,
        timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError:
            raise Refused("an endpoint needs the openai client: pip install -e '.[llm]'") from None
        self._broken = openai.OpenAIError
        try:
            self._client = openai.OpenAI(
                base_url=url, api_key=key, timeout=timeout, max_retries=max(0, tries - 1)
            )
        except openai.OpenAIError as error:
            raise Refused(f"no endpoint without a key: {_plain(error)}") from None
        self._model, self._tries, self._options = model, tries, dict(options or {})
        self._offers = {role: _offered(names, tools or {}) for role, names in roles.items()}
        self.target = f"endpoint:{model}"
        self.version = f"{model}-{digest_of(CANONICAL.encode(self._options)).hex()[:8]}"

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """One turn. Raises Refused when there is none, or no answer that can be read, after all
        tries.
        """
        offered = self._offers.get(observation.role, [])
        asked: dict[str, Any] = {"seed": draws.integer(2**31), **self._options}
        if offered:
            asked["tools"] = offered
        try:
            given = self._client.chat.completions.create(
                model=self._model, messages=cast(Any, _messages(observation)), **asked
            )
            return _turn(given.choices[0].message)
        except self._broken as error:
            why = f"{type(error).__name__}: {_plain(error)}"
            raise Refused(
                f"the endpoint of {self._model} gave no turn for {observation.agent}, asked "
                f"{self._tries} times at most: {why}"
            ) from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Refused(
                f"the endpoint of {self._model} gave {observation.agent} what is no chat "
                f"completion ({type(error).__name__}); is its address right up to /v1?"
            ) from None


def _plain(error: BaseException) -> str:
    """An error's words in one short line."""
    return ascii(" ".join(str(error).split()))[1:-1][:_SHOWN]


def _messages(observation: Observation) -> list[dict[str, str]]:
    """The whole context as chat messages, the agent's own turns as the assistant's."""
    who = f"You are {observation.agent}, {observation.role} of a team. Act by calling tools."
    turns = observation.messages()
    return [
        {"role": "system", "content": who},
        *({"role": turn.role, "content": turn.text} for turn in turns),
    ]


# ---------------------------------------------------------------------------------------------
# What is offered


def _offered(names: Iterable[str], tools: Mapping[str, Spec]) -> list[dict[str, Any]]:
    schemas = [_schema(name, tools) for name in names if name != "none"]
    return [{"type": "function", "function": schema} for schema in schemas]


def _schema(name: str, tools: Mapping[str, Spec]) -> dict[str, Any]:
    if name in tools:
        return tools[name].schema
    about, properties = "Read a shared artefact.", dict[str, Any](_READ)
    if name in _VERBS:
        verb = _VERBS[name]
        several = {"type": "array", "items": {"type": "string"}}
        about, properties = verb.about, {}
        if verb.name is not None:
            properties[verb.name] = several if verb.name == _SEVERAL else {"type": "string"}
        if verb.content is not None:
            properties[verb.content] = {"type": "string"}
    shape = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": about, "parameters": shape}


# ---------------------------------------------------------------------------------------------
# What came back


def _turn(message: Any) -> Output:
    """The turn that a chat message is: its text, a line for each call, and the calls as items."""
    text, lines, items = message.content or "", [], []
    if not isinstance(text, str):
        raise TypeError("content is no text")
    for call in message.tool_calls or ():
        name, arguments = call.function.name, call.function.arguments
        item = _item(name, arguments)
        if item is not None:
            items.append(item)
        lines.append(f"{name} {arguments}" if item else f"unreadable: {name} {arguments}")
    return Output("\n".join([text, *lines] if text else lines), tuple(items))


def _item(name: Any, arguments: Any) -> Item | None:
    """The item that a call asks for; None if it cannot be read."""
    if not isinstance(name, str) or not _TOOL.fullmatch(name) or not isinstance(arguments, str):
        return None
    given = arguments_of(arguments)
    if given is None:
        return None
    fields: dict[str, Any] = {} if given is msgspec.UNSET else msgspec.json.decode(bytes(given))
    if name not in _VERBS:
        return Item(verb="call", name=(name,), content_raw=given)
    verb = _VERBS[name]
    named = fields.get(verb.name) if verb.name is not None else []
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(map(_is_name, names)):
        return None
    if verb.name is not None and not names:
        return None
    said = fields.get(verb.content) if verb.content is not None else None
    return Item(verb=cast(Verb, name), name=tuple(names), content_raw=freeze(said))


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and given != "" and not _UNSPELLABLE.search(given)
