"""Where a text came from, kept beside it until a prompt needs it, and visible there.

A `Labelled` text is what prompts are built from. Text that is not the policy's own is put into a
block whose fence the text itself cannot contain: no text can end its block, claim another origin,
or open a block of its own.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from counterpoint.spelling import digest_of
from counterpoint.vocabulary import Trust


class Labelled(NamedTuple):
    """A text with its origin (an agent, a tool, `env`, `human`) and its trust."""

    text: str
    origin: str
    trust: Trust


def wrap(labelled: Labelled) -> str:
    """The text as one block: a line that says where it came from, the text, a line that ends it.

        <<from search, untrusted, 3f9a2c11
        …
        3f9a2c11>>

    The fence is a digest that does not occur in the text; the origin is spelled without controls.
    """
    fence = _fence(labelled.text)
    head = f"<<from {_plain(labelled.origin)}, {labelled.trust}, {fence}"
    return f"{head}\n{labelled.text}\n{fence}>>"


def spoken(labelled: Labelled) -> str:
    """The environment's own words: bare, unless they hold what could be read as a block's head."""
    return wrap(labelled) if _HEAD in labelled.text else labelled.text


_HEAD = "<<from "


@lru_cache(maxsize=4096)
def _plain(origin: str) -> str:
    return re.sub(r"[^\w.:/@-]", "_", origin)[:80]


def _fence(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")
    while (fence := digest_of(data).hex()[:8]) in text:
        data += b"."
    return fence
