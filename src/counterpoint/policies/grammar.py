"""A turn of text becomes items, one a line; whatever is no item is prose and does nothing.

    message worker: look it up        delegate a, b: count the doors
    spawn researcher: read shard 2    return: forty-two
    call search {"q": "Peru"}         write draft: Lima
    aggregate sum: 7                  stop: Lima
    despawn worker                    none

A payload is the rest of its line. The parser never sees an endpoint's structured calls: those come
as items already, and then the text is not parsed at all. Every step is linear in the text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import cast

import msgspec
from msgspec import UNSET

from counterpoint.schema import Item
from counterpoint.spelling import PLAIN, Payload, Refused, freeze
from counterpoint.vocabulary import Verb

VERSION = 1
"""Version of the grammar, stored in a run's config."""

NAMED: frozenset[str] = frozenset({"message", "delegate", "spawn", "write", "despawn", "call"})
"""Verbs that need a name: receivers, a role, an artefact, a child, a tool."""

_ADDRESSED = NAMED | {"aggregate"}
_BLANK = " \t\r"
_VERB = re.compile(
    r"(message|delegate|spawn|return|write|aggregate|stop|despawn|none|call)(?=[ \t\r:]|$)"
)
_TOOL = re.compile(r"[A-Za-z_][\w.]*")
_UNSPELLABLE = re.compile(r"[\ud800-\udfff]")
_SHORT = 2000


def parse(text: str) -> tuple[Item, ...]:
    """The items of a turn, in order, each with its span of characters.

    A text without any gives (). A name holds no colon and no lone surrogate; a call's payload is a
    JSON object; a line that has the form of no item is prose.
    """
    return _known(text) if len(text) <= _SHORT else _parsed(text)


def arguments_of(text: str) -> Payload | None:
    """The arguments of a call from their JSON text; None for what is no object that fits an event.

    An empty text gives no arguments.
    """
    return _known_arguments(text) if len(text) <= _SHORT else _arguments(text)


def _arguments(text: str) -> Payload | None:
    if not text:
        return UNSET
    try:
        value = PLAIN.decode(text)
        return freeze(value) if isinstance(value, dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError, Refused):
        return None


_known_arguments = lru_cache(maxsize=4096)(_arguments)


def _parsed(text: str) -> tuple[Item, ...]:
    items = []
    at = 0
    for line in text.split("\n"):
        item = _item(line, at)
        if item is not None:
            items.append(item)
        at += len(line) + 1
    return tuple(items)


_known = lru_cache(maxsize=4096)(_parsed)


def _item(line: str, at: int) -> Item | None:
    found = _VERB.match(line, len(line) - len(line.lstrip(_BLANK)))
    if found is None:
        return None
    verb, end = found[0], len(line.rstrip(_BLANK))
    if verb == "call":
        return _called(line, at, found.end(), end)
    colon = line.find(":", found.end(), end)
    names = line[found.end() : end if colon < 0 else colon]
    given = tuple(name.strip(_BLANK) for name in names.split(",") if name.strip(_BLANK))
    if verb not in _ADDRESSED if given else verb in NAMED:
        return None
    body = None if colon < 0 else _trimmed(line, colon + 1, end)
    return _made(verb, given, line, at, body)


def _called(line: str, at: int, start: int, end: int) -> Item | None:
    start = _trimmed(line, start, end)[0]
    tool = _TOOL.match(line, start, end)
    if tool is None:
        return None
    body = _trimmed(line, tool.end(), end)
    given = line[slice(*body)]
    if given and (given[0] != "{" or arguments_of(given) is None):
        return None
    return _made("call", (tool[0],), line, at, body if given else None)


def _trimmed(line: str, start: int, end: int) -> tuple[int, int]:
    """The span without blanks at its start; there are none at its end."""
    inner = line[start:end].lstrip(_BLANK)
    return end - len(inner), end


def _made(
    verb: str, name: tuple[str, ...], line: str, at: int, body: tuple[int, int] | None
) -> Item | None:
    if any(map(_UNSPELLABLE.search, name)):
        return None
    span = None if body is None else (at + body[0], at + body[1])
    return Item(verb=cast(Verb, verb), name=name, span=(at, at + len(line)), body=span)
