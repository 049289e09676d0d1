"""Policies that ship: the grammar of a turn, tables of logits, scripts, records."""

import copy
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.harness import rollout
from counterpoint.policies import Observation, Output
from counterpoint.policies.grammar import arguments_of, parse
from counterpoint.policies.scripted import Recorded, Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.schema import Item
from counterpoint.spelling import Refused, freeze
from counterpoint.streams import Draws
from stages import room

# -- the grammar -----------------------------------------------------------------------------------


def read(text):
    """Verb, names and payload of each item."""
    return [
        (i.verb, i.name, None if i.body is None else text[i.body[0] : i.body[1]])
        for i in parse(text)
    ]


@pytest.mark.parametrize(
    ("line", "item"),
    [
        ("message worker: look it up", ("message", ("worker",), "look it up")),
        ("delegate a, b: count: all", ("delegate", ("a", "b"), "count: all")),
        ("spawn researcher", ("spawn", ("researcher",), None)),
        ("return: forty-two", ("return", (), "forty-two")),
        ("return", ("return", (), None)),
        ("write memory/plan: Lima", ("write", ("memory/plan",), "Lima")),
        ("aggregate sum: 7", ("aggregate", ("sum",), "7")),
        ("aggregate: 7", ("aggregate", (), "7")),
        ("stop:", ("stop", (), "")),
        ("despawn w.1", ("despawn", ("w.1",), None)),
        ("none", ("none", (), None)),
        ('call search {"q": "a: b"}', ("call", ("search",), '{"q": "a: b"}')),
        ("call search", ("call", ("search",), None)),
        (" \tstop \t:  x \r", ("stop", (), "x")),
    ],
)
def test_a_line_is_an_item(line, item):
    """Each form of the page, and the payload is the rest of the line without blanks at its ends."""
    assert read(line) == [item]
    assert parse(line)[0].span == (0, len(line))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Message worker: hi",
        "messages worker: hi",
        "message-board: hi",
        "message: hi",
        "message ,: hi",
        "delegate",
        "stop now: x",
        "none of them work",
        "I stop: x",
        "call",
        "call 3d {}",
        "call look {} and more",
        "call look [1]",
        'call look {"a": NaN}',
        'call look {"a": 1e999}',
        'call look {"a": 99999999999999999999}',
        'call look {"a": "\\ud800"}',
        "call look " + "[" * 50,
        'call look {"a": ' + "[" * 80 + "]" * 80 + "}",
        "message \ud800: x",
        "no_stop",
    ],
)
def test_whatever_is_no_item_is_prose(line):
    """Other words, other cases, missing names, arguments that are no object, no-ops."""
    assert parse(line) == ()


@given(
    st.lists(st.sampled_from(["message a: hi", "stop: x", "prose", "", "call t {}"]), max_size=6)
)
def test_spans_are_the_lines(lines):
    """Items keep their order, and each span is its line."""
    text = "\n".join(lines)
    items = [line for line in lines if line not in ("prose", "")]
    assert [text[i.span[0] : i.span[1]] for i in parse(text)] == items


@given(st.text(alphabet='mesagcl stop:,{}"\n\r\t\ud8001é', max_size=60))
def test_any_text_parses(text):
    """Nothing raises, and what is found lies within the text."""
    for item in parse(text):
        assert 0 <= item.span[0] <= item.span[1] <= len(text)
        assert "\n" not in text[item.span[0] : item.span[1]]
        if item.body is not None:
            assert item.span[0] <= item.body[0] <= item.body[1] <= item.span[1]
        if item.verb == "call":
            assert arguments_of("" if item.body is None else text[slice(*item.body)]) is not None


@pytest.mark.parametrize(
    "text",
    [
        "message" + " " * 200_000 + "x",
        "call t " + "{" * 200_000,
        "message a: b\n" * 20_000,
        "message " + "a," * 100_000 + ": x",
    ],
)
def test_parsing_takes_time_in_proportion_to_the_text(text):
    """Long runs of blanks, brackets and names, on which a pattern would go back and forth."""
    began = time.process_time()
    parse(text)
    assert time.process_time() - began < 2


# -- tables ----------------------------------------------------------------------------------------

MENU = {"left": "stop: l", "right": "stop: r", "wait": "none"}


def seen(anchor="here", turn=0):
    return Observation("a", "r", (), anchor, turn, list)


def test_a_table_is_a_softmax_of_its_logits():
    """exp(1), exp(0), exp(−1) over their sum, 4.0862; a label that was never met has logit 0."""
    table = Softmax({"here": {"left": 1.0, "wait": -1.0, "elsewhere": 9.0}})
    assert table.probs(seen(), MENU) == pytest.approx([0.66524, 0.24473, 0.09003], abs=1e-5)
    assert table.probs(seen("there"), MENU) == pytest.approx([1 / 3] * 3)
    assert table.probs(seen(None), MENU) == pytest.approx([1 / 3] * 3)
    assert Softmax({"here": {"left": 1e4}}).probs(seen(), MENU).tolist() == [1.0, 0.0, 0.0]


def test_what_it_says_it_drew_with_its_probability():
    """The log-probability it gives is that of the entry it took."""
    table = Softmax({"here": {"left": 1.0, "wait": -1.0}})
    p = dict(zip(MENU.values(), table.probs(seen(), MENU), strict=True))
    for k in range(20):
        out = table(seen(), MENU, Draws("s", "policy", "a", k))
        assert math.exp(out.logprobs[0]) == pytest.approx(p[out.text])


@pytest.mark.parametrize("menu", [None, {}])
def test_a_table_without_a_menu_is_refused(menu):
    """It has nothing to choose from."""
    with pytest.raises(Refused, match="acts from a menu, and a has none"):
        Softmax()(seen(), menu, Draws("s", "policy", "a", 0))


def test_a_table_is_named_by_its_logits_and_a_version_by_its_updates():
    """The digest does not depend on the order of entries; installing another table counts one up,
    also if its logits are the same.
    """
    one = Softmax({"a": {"x": 1.0, "y": 2.0}, "b": {}})
    assert one.params_digest == Softmax({"b": {}, "a": {"y": 2, "x": np.float32(1)}}).params_digest
    assert one.params_digest != Softmax({"a": {"x": 1.0, "y": 2.5}, "b": {}}).params_digest
    before = one.version
    one.install(one.logits)
    assert (before[:2], one.version[:2]) == ("0-", "1-")
    assert before[2:] == one.version[2:] == one.params_digest[:8]
    one.install({"a": {"x": 3.0}})
    assert one.target == f"tabular:{one.params_digest}"
    assert one.probs(seen("a"), {"x": "none", "y": "none"})[0] == pytest.approx(
        1 / (1 + math.e**-3)
    )


def test_nobody_changes_a_table_past_its_digest():
    """What can be read of it cannot be written, and what it was made from is not what it holds."""
    given = {"a": {"x": 1.0}}
    table = Softmax(given)
    given["a"]["x"] = 5.0
    assert table.logits["a"]["x"] == 1.0
    with pytest.raises(TypeError):
        table.logits["a"]["x"] = 2.0
    with pytest.raises(TypeError):
        table.logits["b"] = {}
    twin = copy.deepcopy(table)
    twin.install({})
    assert table.logits["a"]["x"] == 1.0


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_refused_and_nothing_changes(logit):
    """Neither when it is made nor when it is installed."""
    with pytest.raises(Refused, match="'x' at anchor 'a'"):
        Softmax({"a": {"x": logit}})
    table = Softmax({"a": {"x": 1.0}})
    with pytest.raises(Refused):
        table.install({"a": {"x": logit}})
    assert (table.logits["a"]["x"], table.version[:2]) == (1.0, "0-")


def test_a_table_is_saved_and_loaded_by_its_digest(tmp_path):
    """The same table, version and digest, its target the file; another digest is refused."""
    table = Softmax({"a": {"x": 1.0, "é": -0.25}})
    table.install({**table.logits, "b": {"y": 0.1}})
    path = tmp_path / "t.json"
    table.save(path)
    assert json.loads(path.read_text()) == {
        "version": 1,
        "logits": {"a": {"x": 1.0, "é": -0.25}, "b": {"y": 0.1}},
    }
    loaded = Softmax.load(path, table.params_digest)
    assert (loaded.version, loaded.logits) == (table.version, table.logits)
    assert loaded.target == f"tabular:{path}"
    with pytest.raises(Refused, match="has digest"):
        Softmax.load(path, "0" * 32)
    with pytest.raises(Refused, match="exists"):
        table.save(path)
    table.save(path, force=True)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"version": 0, "logits": {"a": {"x": "1"}}}', '{"version": 0, "logits": 3}',
     '{"version": "0", "logits": {}}', '{"version": 0, "logits": {"a": {"x": NaN}}}', "\xff",
     '{"version": 0, "logits": {}, "code": "import os"}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_holds_no_table_is_refused(text, tmp_path):
    """With its name, whatever is in it."""
    path = tmp_path / "t.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(Refused, match=r"t\.json holds no table"):
        Softmax.load(path)
    with pytest.raises(Refused, match=r"no\.json holds no table"):
        Softmax.load(tmp_path / "no.json")


# -- scripts and records ---------------------------------------------------------------------------


def test_a_script_is_said_in_turn_and_its_end_again_and_again():
    """By the number of turns taken before."""
    script = Scripted(["one", "two"])
    said = [script(seen(turn=t), None, Draws("s", "policy", "a", t)) for t in range(4)]
    assert said == ["one", "two", "two", "two"]
    assert (script.deterministic, script.trainable, script.target) == (
        True,
        False,
        "scripted:script",
    )
    with pytest.raises(Refused, match="at least one"):
        Scripted([])


def test_a_record_says_what_a_trace_holds():
    """Text, items that came with it, tokens and their log-probabilities, value: played again under
    the record, a run gives the same acts; past its end it is refused.
    """
    item = Item(verb="message", name=("b",), content_raw=freeze("hi"))

    def policy(observation, menu, draws):
        if observation.agent == "a":
            return Output(f"words {draws.random()}", [item], [1, 2], [-0.5, -0.25], 0.75)
        return f"I drew {draws.random()}\ncall throw {{}}"

    env = room({"a": ["message", "stop"], "b": ["throw"]}, start={"a": "a", "b": "b"})
    config = {"limits": {"turns": 6}}
    (first,) = rollout(env, policy, groups=1, rollouts=1, config=config)
    (again,) = rollout(env, Recorded(first.events), groups=1, rollouts=1, config=config)
    assert [a.kind for a in again] == [a.kind for a in first]
    same = ("text", "items", "token_ids", "logprobs", "value", "tokens_out")
    for one, two in zip(first.of("act"), again.of("act"), strict=True):
        assert [getattr(one, n) for n in same] == [getattr(two, n) for n in same]
    assert any(i.verb == "no_stop" for i in again.of("act")[0].items)
    with pytest.raises(Refused, match="holds 3 acts of a, no more"):
        rollout(env, Recorded(first.events), groups=1, rollouts=1, config={"limits": {"turns": 7}})
