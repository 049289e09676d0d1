"""A turn of text becomes items, one a line; whatever is no item is prose and does nothing.

    message worker: look it up        delegate a, b: count the doors
    spawn researcher: read shard 2    return: forty-two
    call search {"q": "Peru"}         write draft: Lima
    aggregate sum: 7                  stop: Lima
    despawn worker                    none

A payload is the rest of its line. The parser never sees an endpoint's structured calls: those come
as items already, and then the text is not parsed at all.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import cast

from counterpoint.schema import Item, Verb
from counterpoint.spelling import freeze

VERSION = 1
"""Version of the grammar, stored in a run's config."""

_ADDRESSED = frozenset({"message", "delegate", "spawn", "write", "aggregate", "despawn"})
_LINE = re.compile(
    r"[ \t]*(?P<verb>message|delegate|spawn|return|write|aggregate|stop|despawn|none)\b"
    r"[ \t]*(?P<names>[^:\n]*?)[ \t]*(?::[ \t]*(?P<body>[^\n]*?))?[ \t]*$"
)
_CALL = re.compile(r"[ \t]*call[ \t]+(?P<tool>[A-Za-z_][\w.]*)[ \t]*(?P<body>\{.*\})?[ \t]*$")


@lru_cache(maxsize=65536)
def parse(text: str) -> tuple[Item, ...]:
    """The items of a turn, in order, each with its span of characters."""
    items = []
    at = 0
    for line in text.split("\n"):
        item = _item(line, at)
        if item is not None:
            items.append(item)
        at += len(line) + 1
    return tuple(items)


def _item(line: str, at: int) -> Item | None:
    called = _CALL.match(line)
    if called:
        if called["body"] and not _is_object(called["body"]):
            return None
        return _made("call", (called["tool"],), at, len(line), called)
    found = _LINE.match(line)
    if not found:
        return None
    verb, names = found["verb"], found["names"]
    if names and verb not in _ADDRESSED:
        return None
    given = tuple(name.strip() for name in names.split(",") if name.strip())
    if verb in ("message", "delegate", "spawn", "write", "despawn") and not given:
        return None
    return _made(verb, given, at, len(line), found)


def _made(verb: str, name: tuple[str, ...], at: int, size: int, found: re.Match[str]) -> Item:
    start, end = found.span("body")
    body = None if start < 0 else (at + start, at + end)
    return Item(verb=cast(Verb, verb), name=name, span=(at, at + size), body=body)


def _is_object(text: str) -> bool:
    try:
        value = json.loads(text)
        freeze(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
