"""Claims about spelling: one value has one spelling, and what JSON cannot spell is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from counterpoint.spelling import Refused, canonical, deeper, digest_of, freeze, thaw

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels - 1):
        value = [value]
    return value


@given(VALUES)
@settings(deadline=None, max_examples=30)
def test_a_value_survives_and_is_spelled_as_the_json_module_reads_it(value):
    """Two independent readers find in the spelling what was frozen, and it is canonical."""
    raw = freeze(value)
    if value is None:
        assert raw is UNSET
        assert thaw(raw) is None
        return
    assert thaw(raw) == value
    assert json.loads(bytes(raw)) == value
    assert canonical([raw])
    assert freeze(thaw(raw)) == raw


def test_one_value_has_one_spelling():
    """Order of keys, of set members, tuples against lists: no trace of them in the bytes."""
    assert (
        freeze({"b": 1, "a": [1.0, 2]})
        == freeze({"a": (1.0, 2), "b": 1})
        == Raw(b'{"a":[1.0,2],"b":1}')
    )
    assert freeze({3, 1, 2}) == Raw(b"[1,2,3]")
    assert freeze("é\n🍸") == Raw('"é\\n🍸"'.encode())


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (math.nan, "NaN or infinity"),
        ([1, [math.inf]], "NaN or infinity"),
        ({"a": {-math.inf}}, "NaN or infinity"),
        (1 << 64, "over 64 bits"),
        ({"a": -(1 << 63) - 1}, "over 64 bits"),
        (nested(62), "deeper than 61"),
        ({"a": object()}, "type dict has no JSON form"),
        ({1: "a", "1": "b"}, "type dict has no JSON form"),
        ({"\ud800": 1, "\\ud800": 2}, "differ in lone surrogates"),
        (Raw(b'{"b":1,"a":2}'), "not spelled canonically"),
        (Raw(b'"a"\n'), "not spelled canonically"),
        (Raw(b'"a'), "not spelled canonically"),
        (Raw(b'"\xf0"'), "not spelled canonically"),
        (Raw(b"1e999"), "not spelled canonically"),
    ],
)
def test_what_json_cannot_spell_is_refused(value, sentence):
    """A sentence, never null in place of NaN, never a line that cannot be read back."""
    with pytest.raises(Refused, match=sentence):
        freeze(value)


def test_nan_inside_a_dataclass_is_refused():
    """What the encoder opens up by itself is looked into as well."""

    @dataclasses.dataclass
    class Score:
        value: float

    assert thaw(freeze([Score(0.5), None])) == [{"value": 0.5}, None]
    with pytest.raises(Refused, match="NaN"):
        freeze([Score(math.nan)])


def test_a_deep_value_is_a_sentence_and_no_crash():
    """Ten thousand levels end in a sentence; brackets inside texts are no levels."""
    with pytest.raises(Refused):
        freeze(nested(10_000))
    assert thaw(freeze(nested(61))) == nested(61)
    text = ["][" * 500, "{" * 500, '\\"[']
    assert thaw(freeze(text)) == text
    assert freeze([[]] * 1000) is not UNSET


@given(VALUES)
@settings(deadline=None, max_examples=50)
def test_depth_is_what_a_recursive_count_finds(value):
    """Peeling layers off the text agrees with walking the value."""

    def depth(v: object) -> int:
        if isinstance(v, dict):
            v = list(v.values())
        return 1 + max(map(depth, v), default=0) if isinstance(v, list) else 0

    text = json.dumps(value).encode()
    levels = depth(value)
    assert not deeper(text, levels)
    assert levels == 0 or deeper(text, levels - 1)


@given(st.text(st.characters()))
@settings(deadline=None, max_examples=200)
def test_any_python_text_survives_with_a_stable_digest(text):
    """Lone surrogates are kept; a pair of them is the one character that it means (fault 27)."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    raw = freeze({"t": text})
    assert thaw(raw) == {"t": joined}
    bytes(raw).decode()
    assert freeze(thaw(raw)) == raw
    assert digest_of(bytes(raw)) == digest_of(bytes(freeze({"t": joined})))


def test_lone_and_paired_surrogates():
    """Fault 27 to the letter."""
    assert freeze("\ud800") == Raw(b'{"$wtf8":"7aCA"}')
    assert thaw(freeze("\ud800")) == "\ud800"
    assert freeze("\ud83c\udf78") == freeze("🍸") == Raw('"🍸"'.encode())
    assert thaw(freeze({"\ud800": "k"})) == {"\\ud800": "k"}


@pytest.mark.parametrize("literal", ["YWI=", "not base64!", "", 5])
def test_an_object_that_only_looks_escaped_stays_an_object(literal):
    """What a tool returned is not turned into another value because of its key."""
    assert thaw(freeze({"$wtf8": literal})) == {"$wtf8": literal}


def test_long_digits_in_texts_and_fractions_are_no_long_integers():
    """Only a number of over 64 bits is one."""
    value = {"id": "9" * 40, "f": 0.12345678901234568, "g": 1e22, "n": (1 << 64) - 1}
    assert thaw(freeze(value)) == value


def test_the_digest_is_blake2b_of_16_bytes():
    """RFC 7693, as the standard library has it."""
    assert digest_of(b"abc") == hashlib.blake2b(b"abc", digest_size=16).digest()
