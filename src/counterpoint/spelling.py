"""How values are spelled: the one JSON form of a payload, and the error that is a sentence.

Canonical JSON here: keys sorted, shortest floats, integers of at most 64 bits, finite numbers,
nesting of at most 64. A text with lone surrogates, which UTF-8 cannot spell, has a form of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

Payload: TypeAlias = Raw | UnsetType
"""A value kept as the bytes of its JSON form, or absent."""

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects that a line may have."""

MAX_LINE = 64 << 20
"""Longest line in bytes; longer content belongs in a side file."""

_PAYLOAD_DEPTH = MAX_DEPTH - 3
"""Deepest nesting of a payload: the content of an act's item lies three levels inside its line."""

SIDE = b'{"$file":'
"""How a payload begins that stands for the content of a side file."""

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
    nesting deeper than 61, so that the line stays within 64; a foreign type), and for raw bytes
    that are not the canonical spelling.
    """
    if value is None or value is UNSET:
        return UNSET
    if type(value) is Raw:
        if not canonical([value]):
            raise Refused("a raw payload is not spelled canonically; give the value itself")
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
    if not _within(spelled):
        raise Refused(
            f"a payload is nested deeper than {_PAYLOAD_DEPTH} levels, or holds an integer of over "
            "64 bits"
        )
    if b"null" in spelled and not _finite(msgspec.to_builtins(value)):
        raise Refused("a payload holds NaN or infinity, which JSON cannot spell")
    return Raw(spelled)


def thaw(raw: Payload) -> Any:
    """Decode a payload; absent gives None."""
    if raw is UNSET:
        return None
    value = PLAIN.decode(raw)
    return _restore_surrogates(value) if b"$wtf8" in bytes(raw) else value


def canonical(payloads: Sequence[Raw]) -> bool:
    """Whether each payload is spelled as `freeze` spells it; one call for many is much cheaper."""
    joined = b"[%b]" % b",".join(payloads)
    try:
        values = PLAIN.decode(joined)
        if CANONICAL.encode(values) != joined:
            return False
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return False
    return _within(*[bytes(r) for r, v in zip(payloads, values, strict=True) if type(v) is not str])


def side_folder(path: Path) -> Path:
    """The folder that holds a trace file's large contents."""
    return path.with_name(path.name.removesuffix(".gz") + ".files")


# ---------------------------------------------------------------------------------------------
# Limits: what the fast decoder would let through

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")
_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_LONG_INTEGER = re.compile(rb"(?<![\d.])-?\d{19,}(?![\d.eE])")


def _within(*texts: bytes) -> bool:
    """Whether well-formed JSON texts break none of the limits; the cheap bounds come first."""
    for text in texts:
        if text.count(b"[") + text.count(b"{") > _PAYLOAD_DEPTH and deeper(text, _PAYLOAD_DEPTH):
            return False
    long = b"0" * 19 in b" ".join(texts).translate(_AS_ZERO)
    return not (long and any(map(_long_integer, texts)))


def deeper(text: bytes, limit: int) -> bool:
    """Whether well-formed JSON is nested deeper than `limit`: peel off one layer at a time."""
    brackets = _STRING.sub(b"", text).translate(_AS_SQUARE, _NO_BRACKET)
    for _ in range(limit):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _long_integer(text: bytes) -> bool:
    bare = _STRING.sub(b"", text)
    return any(not -(1 << 63) <= int(n) < 1 << 64 for n in _LONG_INTEGER.findall(bare))


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_finite, value))
    return True


# ---------------------------------------------------------------------------------------------
# Lone surrogates


def escape_surrogates(value: Any) -> Any:
    """Replace every text that holds a lone surrogate by its ``{"$wtf8": …}`` form.

    A pair of surrogates becomes the one character that it means. A key has no object form, so a
    lone surrogate in one is written out as its escape. Raises Refused if two keys become one.
    """
    if isinstance(value, str):
        return _escape_text(value)
    if isinstance(value, dict):
        out = {_escape_key(key): escape_surrogates(v) for key, v in value.items()}
        if len(out) != len(value):
            raise Refused("two keys of one object differ in lone surrogates alone; rename one")
        return out
    if isinstance(value, list | tuple):
        return [escape_surrogates(v) for v in value]
    return value


def _escape_text(text: str) -> Any:
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if _spellable(paired):
        return paired
    return {"$wtf8": base64.b64encode(paired.encode("utf-8", "surrogatepass")).decode()}


def _escape_key(key: Any) -> Any:
    return key.encode("utf-8", "backslashreplace").decode() if isinstance(key, str) else key


def _spellable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _restore_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        packed = value.get("$wtf8")
        if len(value) == 1 and isinstance(packed, str):
            return _unpacked(packed) or value
        return {k: _restore_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore_surrogates(v) for v in value]
    return value


def _unpacked(packed: str) -> str | None:
    """The text that was escaped; None if `escape_surrogates` would not have escaped it."""
    try:
        text = base64.b64decode(packed, validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None
    return None if _spellable(text) else text
