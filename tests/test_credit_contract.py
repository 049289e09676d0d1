"""The contract: our own methods keep it, and each promise is caught when it is broken."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

import reference
from counterpoint.credit import METHODS, check_credit_method, estimate, method
from counterpoint.ledger import Credit, Parts
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from foresight import asking

OBSERVED = [name for name, row in METHODS.items() if row.family == "observational"]
"""Measured methods are held to their contract in test_measured_methods, on games."""

ASKING = [name for name, row in METHODS.items() if row.family == "generated"]
"""Methods that ask a policy; a stand-in answers, for no game played the cases."""


@pytest.mark.parametrize("name", OBSERVED)
def test_every_method_of_the_table_keeps_the_contract(name):
    """A new row is checked by existing."""
    check_credit_method(method(name))


@pytest.mark.parametrize("name", ASKING)
def test_methods_that_ask_a_policy_keep_the_contract(name):
    """With a policy to ask; without one they refuse, and name what is missing."""
    check_credit_method(asking(name))
    with pytest.raises(Refused, match=f"{name} needs policy="):
        estimate(name, two_rollouts())
    credit, row = asking(name)(two_rollouts()), METHODS[name]
    assert (credit.unit, credit.estimand, row.needs) == (row.unit, row.estimand, {"policy"})
    assert not row.conserves
    assert {"env_calls", "forward_passes", "tokens"} <= set(credit.diagnostics)


def two_rollouts(**columns) -> Steps:
    """Two rollouts of two turns with every column that some method needs."""
    values = {"value": [0.2] * 4, "value_high": [0.3] * 4, "segment_start": [1, 0, 1, 1],
              "quality": [1, 1, 0, 0], "depends": [[0]] * 4}  # fmt: skip
    given = {"rollout": [0, 0, 1, 1], "reward": [0, 1, 0, 0.5], "anchor": ["s", "t"] * 2}
    return Steps.from_columns(**given | values | columns)


@pytest.mark.parametrize("name", OBSERVED)
def test_row_and_result_agree(name):
    """The unit and the estimand that the table states are those that the default form returns."""
    credit, row = estimate(name, two_rollouts()), METHODS[name]
    assert (credit.unit, credit.estimand) == (row.unit, row.estimand)


@pytest.mark.parametrize("name", OBSERVED)
def test_a_method_needs_what_its_row_says(name):
    """Without each needed column it refuses and names the column; with them alone it runs."""
    columns = {"rollout": [0, 1], "reward": [1.0, 0.0]}
    extra = {"value": [0.0, 0.0], "anchor": ["s", "s"]}
    extra |= {"value_high": [0.0, 0.0], "segment_start": [1, 1]}
    extra |= {"quality": [0.0, 1.0], "depends": [[0], [0]]}
    needed = {column: extra[column] for column in METHODS[name].needs}
    assert len(estimate(name, Steps.from_columns(**columns, **needed))) == 2
    for column in needed:
        rest = {k: v for k, v in needed.items() if k != column}
        with pytest.raises(Refused, match=f"column {column}"):
            estimate(name, Steps.from_columns(**columns, **rest))


@pytest.mark.parametrize("name", OBSERVED)
def test_conserving_methods_conserve(name):
    """A row that claims conservation shares out the rollout's outcome exactly."""
    steps = two_rollouts()
    shared_out = np.bincount(steps.rollout, weights=estimate(name, steps).values)
    due = SHARED_OUT.get(name, [1, 0.5])
    assert np.allclose(shared_out, due) == METHODS[name].conserves


SHARED_OUT = {"blame": [0.8, 0.3]}
"""What is shared out where it is not the outcome: R − V(h₀), with .2 expected."""


def centred(steps: Steps) -> Credit:
    """A method that keeps the contract, to be broken below."""
    advantage = np.where(steps.mask, steps.outcome - steps.mean(steps.outcome), np.nan)
    said = {"effective_sample_size": len(steps.head)}
    return Credit(advantage, estimand="outcome", diagnostics=said)


def changed(**fields):
    return lambda steps: replace(centred(steps), **fields)


def with_values(make):
    return lambda steps: replace(centred(steps), values=make(steps, centred(steps).values))


def spoils(steps: Steps) -> Credit:
    credit = centred(steps)
    steps.reward[:] = 0
    return credit


def forgets(steps: Steps) -> Credit:
    forgets.calls += 1
    credit = centred(steps)
    return replace(credit, values=credit.values * forgets.calls)


forgets.calls = 0


def unscored_as_zero(steps: Steps, values):
    return np.where(steps.mask, np.nan_to_num(values), np.nan)


def by_row(steps: Steps, values):
    return values + np.arange(len(values))


def by_rollout(steps: Steps, values):
    return values + steps.rollout


def too_much(steps: Steps, values):
    return np.where(np.isnan(values), np.nan, np.inf)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda steps: centred(steps).values, "it returns ndarray, not Credit"),
        (with_values(lambda steps, values: values[:-1]), "17 values for 18 rows"),
        (changed(estimand="unstated"), "the estimand is not stated"),
        (changed(unit="paragraph"), "the unit is 'paragraph'"),
        (changed(diagnostics={}), "diagnostics lack effective_sample_size"),
        (changed(parts=Parts({"mean": lambda: np.zeros(3)})), "the part mean has not one entry"),
        (with_values(lambda steps, values: np.nan_to_num(values)), "a masked row is credited"),
        (with_values(unscored_as_zero), "an unscored rollout is credited"),
        (with_values(lambda steps, values: values * np.nan), "has no finite credit"),
        (with_values(too_much), "has no finite credit"),
        (spoils, "it changes the steps in place"),
        (forgets, "give other values when asked again"),
        (with_values(by_row), "with rows reversed a row's credit changes"),
        (with_values(by_rollout), "rollouts that are alike in everything differ"),
    ],
)
def test_a_broken_promise_is_named(broken, says):
    """Each breach is refused with its own sentence, and with the case in which it shows."""
    check_credit_method(centred)
    with pytest.raises(Refused, match=rf"^case '[a-z ]+': .*{says}"):
        check_credit_method(broken)


def test_a_method_that_refuses_a_case_is_refused():
    """The case and the method's own sentence are both named."""

    def picky(steps):
        if not steps.mask.all():
            raise Refused("masks are not for me")
        return centred(steps)

    with pytest.raises(Refused, match=r"case 'masked rows': .*masks are not for me"):
        check_credit_method(picky)


def test_a_single_row_may_be_refused():
    """What compares may say that one turn is too few; a method that never refuses passes too."""

    def choosy(steps):
        if len(steps) == 1:
            raise Refused("one turn cannot be compared")
        return centred(steps)

    check_credit_method(choosy)


def test_an_error_inside_the_method_is_its_own():
    """A bug in a user's function comes out as it is, for its traceback."""

    def buggy(steps):
        return centred(steps).nothing

    with pytest.raises(AttributeError, match="nothing"):
        check_credit_method(buggy)


def test_parts_are_worked_out_when_they_are_read():
    """Nothing is made for nobody, nothing twice; and a copy in another process has them all."""
    made = []
    parts = Parts({"x": np.ones(2)}, {"y": lambda: made.append("y") or np.full(2, 5.0)})
    credit = Credit(np.zeros(2), estimand="outcome", parts=Parts(parts, {"z": np.zeros(2)}))
    assert (list(credit.parts), len(credit.parts), made) == (["x", "y", "z"], 3, [])
    assert credit.why(0) == "row 0: 0 (outcome) from x 1, y 5, z 0"
    assert credit.parts["y"] is credit.parts["y"]
    assert made == ["y"]
    copy = pickle.loads(pickle.dumps(credit))
    assert {name: part.tolist() for name, part in copy.parts.items()} == {
        "x": [1, 1],
        "y": [5, 5],
        "z": [0, 0],
    }


def test_a_reference_is_compared():
    """An independent slow version that agrees passes; one that differs is refused."""

    def loop(steps):
        return Credit(reference.grpo(steps, normalize_std=False), estimand="outcome")

    check_credit_method(centred, loop)
    with pytest.raises(Refused, match="differ from the reference"):
        check_credit_method(centred, method("grpo"))


def test_a_function_in_a_file_is_a_method(tmp_path):
    """`file.py:function` runs without a row in the table; what is missing is said."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from counterpoint.ledger import Credit\n"
        "def mine(steps, *, factor: float = 1.0):\n"
        "    return Credit(factor * steps.outcome, estimand='outcome')\n"
        "def short(steps):\n"
        "    return Credit([1.0])\n"
        "def odd(steps, *, x: 'Unknown' = 1):\n"
        "    return Credit(steps.outcome)\n"
    )
    steps = Steps.from_columns(rollout=[0, 1], reward=[1, 0])
    assert estimate(f"{path}:mine", steps, factor=2).values.tolist() == [2, 0]
    assert estimate(f"{path}:odd", steps, x=3).values.tolist() == [1, 0]
    with pytest.raises(Refused, match="factor is 'two'; it is a number"):
        estimate(f"{path}:mine", steps, factor="two")
    with pytest.raises(Refused, match="must return Credit with one value per row"):
        estimate(f"{path}:short", steps)
    with pytest.raises(Refused, match="has no function or class yours"):
        estimate(f"{path}:yours", steps)
    with pytest.raises(Refused, match="there is no file"):
        estimate(f"{tmp_path}/other.py:mine", steps)
    with pytest.raises(Refused, match="the methods are reinforce, reinforce_pp, gae"):
        estimate("mine", steps)
