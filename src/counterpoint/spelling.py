"""How values are spelled: the one JSON form of a payload, and the error that is a sentence.

Canonical JSON here: keys sorted, shortest floats, integers of at most 64 bits, finite numbers,
nesting of at most 64. A text with lone surrogates, which UTF-8 cannot spell, has a form of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

Payload: TypeAlias = Raw | UnsetType
"""A value kept as the bytes of its JSON form, or absent."""

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects that a line may have."""

_PAYLOAD_DEPTH = MAX_DEPTH - 3
"""Deepest nesting of a payload: the content of an act's item lies three levels inside its line."""

CANONICAL = msgspec.json.Encoder(order="deterministic")
PLAIN = msgspec.json.Decoder()


def digest_of(data: bytes) -> bytes:
    """BLAKE2b of `data`, 16 bytes: the one digest of this package."""
    return hashlib.blake2b(data, digest_size=16).digest()


class Refused(ValueError):
    """A question or an input that cannot be honoured; the message says why and the way out."""


def freeze(value: Any) -> Payload:
    """Turn a Python value into the raw JSON bytes of a payload field; None becomes absent.

    A string with lone surrogates, which UTF-8 cannot spell, is stored as ``{"$wtf8": base64}``.
    Raises Refused for a value that JSON cannot spell (NaN, infinity, an integer over 64 bits,
    nesting deeper than 61, so that the line stays within 64; a foreign type).
    """
    if value is None or value is UNSET:
        return UNSET
    if type(value) is Raw:
        return value
    try:
        spelled = CANONICAL.encode(value)
    except UnicodeEncodeError:
        return freeze(escape_surrogates(value))
    except (TypeError, OverflowError, RecursionError, ValueError) as error:
        kind = type(value).__name__
        raise Refused(f"a payload of type {kind} has no JSON form: {error}") from None
    if type(value) is str:
        return Raw(spelled)
    if b"null" in spelled and not _finite(value):
        raise Refused("a payload holds NaN or infinity, which JSON cannot spell")
    nested = spelled.count(b"[") + spelled.count(b"{")
    if nested > _PAYLOAD_DEPTH and _depth(value) > _PAYLOAD_DEPTH:
        raise Refused(f"a payload is nested deeper than {_PAYLOAD_DEPTH} levels")
    return Raw(spelled)


def thaw(raw: Payload) -> Any:
    """Decode a payload; absent gives None."""
    if raw is UNSET:
        return None
    value = PLAIN.decode(raw)
    return _restore_surrogates(value) if b"$wtf8" in bytes(raw) else value


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(v) for v in value)
    return True


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level:
        children: list[Any] = []
        for v in level:
            if isinstance(v, dict):
                children += v.values()
            elif isinstance(v, list | tuple):
                children += v
        held = any(isinstance(v, dict | list | tuple) for v in level)
        deepest += held
        level = children
    return deepest


def escape_surrogates(value: Any) -> Any:
    """Replace every text that holds a lone surrogate by its ``{"$wtf8": …}`` form."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            joined = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
            raw = joined.encode("utf-8", "surrogatepass")
            return {"$wtf8": base64.b64encode(raw).decode()}
        return value
    if isinstance(value, dict):
        return {_escape_key(k): escape_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [escape_surrogates(v) for v in value]
    return value


def _escape_key(key: Any) -> Any:
    """A key has no object form, so a lone surrogate in one is written out as its escape."""
    return key.encode("utf-8", "backslashreplace").decode() if isinstance(key, str) else key


def _restore_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        packed = value.get("$wtf8")
        if len(value) == 1 and isinstance(packed, str):
            try:
                return base64.b64decode(packed, validate=True).decode("utf-8", "surrogatepass")
            except (binascii.Error, UnicodeDecodeError):
                return value
        return {k: _restore_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_surrogates(v) for v in value]
    return value
