"""Tools: the signature is the schema, a call is checked, and whatever happens becomes an answer."""

import threading
import time
from typing import Annotated, Literal

import msgspec
import pytest

from counterpoint.envs import Env, tool
from counterpoint.spelling import Refused, digest_of
from counterpoint.streams import Draws
from counterpoint.tools import call, cut, spec_of, specs


class Box(Env):
    """Tools that do what tools do in the wild."""

    id = "box-v0"

    @tool
    def search(self, query: str, most: int = 3) -> list:
        """Find it."""
        return [query, most]

    @tool(pure=True)
    def throw(self, draws) -> float:
        return draws.random()

    @tool
    def typed(
        self, side: Literal["a", "b"], size: Annotated[float, msgspec.Meta(ge=0)], notes: list[str]
    ) -> str:
        return f"{side} {size!r} {notes}"

    @tool
    def fails(self, how: str) -> str:
        raise {"key": KeyError, "exit": SystemExit, "deep": RecursionError, "words": Wordless}[how](
            "no \ud800" * 400
        )

    @tool
    def gives(self, what: str):
        return {
            "nothing": None,
            "bytes": "é".encode() + b"\xff\xfe",
            "nan": float("nan"),
            "object": object(),
            "deep": deep(100),
            "keys": {"b": 1, "a": [2.5, "x"]},
            "flood": "y" * 50_000_000,
            "wide": {"k": "é" * 1000},
        }[what]

    @tool(seconds=0.2)
    def hangs(self, how: str) -> str:
        if how == "no":
            return "quick"
        self.looping = True
        while how == "loop":
            self.turns = getattr(self, "turns", 0) + 1
        time.sleep(0.6)
        return "late"


class Wordless(Exception):
    def __str__(self):
        raise ValueError


def deep(n):
    value = []
    for _ in range(n):
        value = [value]
    return value


def ask(name, arguments=None, most=1000):
    env = Box()
    return call(
        env,
        spec_of(env, name),
        {} if arguments is None else arguments,
        Draws("k", "tool", "a", 0),
        most,
    )


def thawed(answer):
    return msgspec.json.decode(answer.content)


def test_a_signature_is_a_schema():
    """Name, description, the JSON Schema of each parameter, which are required; `draws` is none."""
    tools = specs(Box())
    assert list(tools) == ["fails", "gives", "hangs", "search", "throw", "typed"]
    assert tools["search"].schema == {
        "name": "search",
        "description": "Find it.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    }
    assert tools["throw"].schema["parameters"]["properties"] == {}
    assert (tools["throw"].pure, tools["throw"].draws, tools["search"].pure) == (True, True, False)
    assert tools["hangs"].seconds == 0.2


def test_the_digest_is_over_the_whole_schema():
    """Spelled canonically: keys sorted, no blanks."""
    spec = specs(Box())["throw"]
    spelled = (
        b'{"description":"","name":"throw","parameters":{"additionalProperties":false,'
        b'"properties":{},"required":[],"type":"object"}}'
    )
    assert spec.digest == digest_of(spelled).hex()


def changed(**parts):
    """The digest of a tool that differs from another in one part."""

    def look(self, at: int) -> str:
        """Look."""

    for name, value in parts.items():
        setattr(look, name, value)
    kind = type("One", (Env,), {"id": "one-v0", "look": tool(look)})
    return spec_of(kind(), "look").digest


@pytest.mark.parametrize(
    "parts",
    [
        {"__doc__": "Look!"},
        {"__doc__": None},
        {"__annotations__": {"at": float}},
        {"__annotations__": {"at": Annotated[int, msgspec.Meta(ge=0)]}},
        {"__defaults__": (1,)},
    ],
)
def test_any_change_of_a_schema_changes_its_digest(parts):
    """P18: a word of the description, a type, a bound, a default."""
    assert changed() == changed() != changed(**parts)


def test_a_change_is_seen_although_a_spec_is_kept():
    """A second look gives the same object; after a change of the description, in place, another."""

    class One(Env):
        id = "one-v0"

        @tool
        def look(self, at: int) -> str:
            """Look."""

    env = One()
    first = spec_of(env, "look")
    assert spec_of(env, "look") is first
    One.look.__annotations__["at"] = str
    second = spec_of(env, "look")
    assert second.digest != first.digest
    env.look = lambda at, further: None
    assert spec_of(env, "look").required == ("at", "further")


def test_a_subclass_can_take_a_tool_away_or_replace_it():
    """What a name means now is what counts."""

    class Less(Box):
        search = None

        @tool
        def throw(self) -> int:
            return 4

    assert "search" not in specs(Less())
    assert specs(Less())["throw"].draws is False
    assert spec_of(Less(), "reset") is None
    assert spec_of(Less(), "no such thing") is None


def test_a_schema_that_cannot_be_is_refused():
    """Parameters without names of their own, a type that JSON does not know, a type that is not
    there.
    """

    def loose(self, **rest) -> str: ...

    def foreign(self, at: complex) -> str: ...

    def unknown(self, at: "Nowhere") -> str: ...  # noqa: F821

    for function, says in ((loose, "name them all"), (foreign, "JSON"), (unknown, "Nowhere")):
        kind = type("One", (Env,), {"id": "one-v0", "bad": tool(function)})
        with pytest.raises(Refused, match=says):
            _ = spec_of(kind(), "bad").digest


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("search", {}, "query missing"),
        ("search", {"query": 3}, "Expected `str`, got `int`"),
        ("search", {"query": "x", "moast": 1}, "no parameter 'moast'"),
        ("search", {"query": "x", "self": 1}, "no parameter 'self'"),
        ("throw", {"draws": 1}, "no parameter 'draws'"),
        ("search", ["x"], "arguments are an object, not list"),
        ("typed", {"side": "c", "size": 1, "notes": []}, "Invalid enum value 'c'"),
        ("typed", {"side": "a", "size": -1, "notes": []}, ">= 0"),
        ("typed", {"side": "a", "size": 1, "notes": [1]}, "Expected `str`"),
    ],
)
def test_wrong_arguments_are_an_error_of_the_call(name, arguments, says):
    """The tool is not run."""
    answer = ask(name, arguments)
    assert answer.error.startswith("wrong arguments: ")
    assert says in answer.error
    assert answer.content is msgspec.UNSET


def test_arguments_arrive_as_their_types():
    """A whole number for a float is one; a default stands where nothing is given."""
    given = {"side": "a", "size": 1, "notes": ["n"]}
    assert thawed(ask("typed", given)) == "a 1.0 ['n']"
    assert thawed(ask("search", {"query": "x"})) == ["x", 3]
    assert thawed(ask("throw")) == Draws("k", "tool", "a", 0).random()


@pytest.mark.parametrize("how", ["key", "exit", "deep", "words"])
def test_what_a_tool_raises_is_an_answer(how):
    """Also an exit, a recursion, words that raise themselves or that UTF-8 cannot spell."""
    answer = ask("fails", {"how": how})
    kind = {"key": "KeyError", "exit": "SystemExit", "deep": "RecursionError", "words": "Wordless"}
    assert answer.error.startswith(kind[how])
    assert len(answer.error.encode()) < 1600


def test_what_a_tool_gives_is_an_answer():
    """Nothing, bytes that are no UTF-8, objects with sorted keys; what JSON cannot spell fails."""
    assert ask("gives", {"what": "nothing"}) == (msgspec.UNSET, None, 0)
    assert ask("gives", {"what": "keys"}).content == msgspec.Raw(b'{"a":[2.5,"x"],"b":1}')
    raw = ask("gives", {"what": "bytes"})
    assert (raw.error, raw.size) == (None, len("é".encode()) + 2 * 3)
    assert b"$wtf8" in bytes(raw.content)
    for what, says in [("nan", "NaN"), ("object", "no JSON form"), ("deep", "nested deeper")]:
        answer = ask("gives", {"what": what})
        assert answer.content is msgspec.UNSET
        assert says in answer.error


def test_a_flood_is_cut_and_its_size_kept():
    """50 MB of text keep their first bytes; of an object the beginning of its JSON is kept."""
    answer = ask("gives", {"what": "flood"}, most=100)
    assert (thawed(answer), answer.size) == ("y" * 100, 50_000_000)
    wide = ask("gives", {"what": "wide"}, most=8)
    assert thawed(wide) == '{"k":"é'
    assert wide.size == len('{"k":""}') + 2 * 1000


@pytest.mark.parametrize("text", ["abcé", "éé", "€\ud800x", "𝄞𝄞", ""])
def test_a_cut_is_the_longest_beginning_that_fits(text):
    """Against the slow way: the longest prefix of whole characters of at most n bytes."""
    for n in range(1, 12):
        fits = [
            text[:k]
            for k in range(len(text) + 1)
            if len(text[:k].encode("utf-8", "surrogatepass")) <= n
        ]
        assert cut(text, n) == fits[-1]


def test_a_tool_that_hangs_is_left_in_time_and_ended():
    """A loop gets no answer within its seconds and does not go on for ever behind the run's back;
    what waits too long is no answer either, and a quick one is.
    """
    assert thawed(ask("hangs", {"how": "no"})) == "quick"
    for how in ("loop", "sleep"):
        began = time.monotonic()
        answer = ask("hangs", {"how": how})
        assert answer.error == "no answer within 0.2 s"
        assert time.monotonic() - began < 5
    ends = time.monotonic() + 10
    while threading.active_count() > 1 and time.monotonic() < ends:
        time.sleep(0.05)
    assert threading.active_count() == 1
