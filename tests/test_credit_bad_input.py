"""Bad input to credit: refused with column and row, or taken and flagged in words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from counterpoint.credit import METHODS, dr_mas, estimate, gae, gigpo, grpo, ppo_ratio, reinforce
from counterpoint.credit.grouped import rewards_copied
from counterpoint.formats import read
from counterpoint.ledger import Credit
from counterpoint.recorder import Recorder
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

NAN = math.nan
COPIED = "column reward says the same on every turn"
OBSERVED = [name for name, row in METHODS.items() if row.family == "observational"]
APART = "every group holds one rollout, so nothing is compared"


def table(**columns) -> Steps:
    """Four rollouts of two turns in two groups, with every column that some method needs."""
    plain = {
        "group": ["q", "q", "q", "q", "p", "p", "p", "p"],
        "rollout": [0, 0, 1, 1, 2, 2, 3, 3],
        "step": [0, 1] * 4,
        "reward": [0, 1, 0, 0, 0, 1, 0, 0],
        "anchor": ["s", "t"] * 4,
        "value": [0.5] * 8,
        "value_high": [0.5] * 8,
        "segment_start": [1, 0] * 4,
        "logprob": [-1.0] * 8,
        "quality": [0.5] * 8,
        "depends": [None] * 8,
    }
    return Steps.from_columns(**{k: v for k, v in (plain | columns).items() if v is not None})


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"reward": [1] * 7}, "column reward has 7 rows where rollout has 8 rows"),
        ({"value": [1] * 9}, "column value has 9 rows where rollout has 8 rows"),
        ({"reward": [0, math.inf, *[0] * 6]}, "column reward, row 1: inf is infinite"),
        ({"reward": [0, -math.inf, *[0] * 6]}, "column reward, row 1: -inf is infinite"),
        ({"reward": [*[0] * 6, "good", 0]}, "column reward, row 6: 'good' is not a number"),
        ({"value_high": [0, 0, "x", *[0] * 5]}, "column value_high, row 2: 'x' is not a number"),
        ({"outcome": [1j] * 8, "reward": None}, "column outcome, row 0: 1j is not a number"),
        ({"step": [0, -1] * 4}, "column step, row 1: -1 is no whole number from 0 up"),
        ({"step": [0, NAN] * 4}, "column step, row 1: nan is no whole number"),
        ({"env_step": [0, -1] * 4}, "column env_step, row 1: -1 is no whole number"),
        ({"step": [0, 0] * 4}, "column step, row 1: step 0 of rollout 0 stands twice"),
        ({"logprob": [-1, 0.25, *[-1] * 6]}, "column logprob, row 1: 0.25 is above 0"),
        ({"logprob_new": [0.5] + [-1] * 7}, "column logprob_new, row 0: 0.5 is above 0"),
        ({"mask": [1, 1, 5, *[1] * 5]}, "column mask, row 2: 5 is neither true nor false"),
        ({"segment_start": [0.5] * 8}, "column segment_start, row 0: 0.5 is neither true nor"),
        ({"outcome": [1, 2] * 4}, "column outcome, row 1: 2 differs from another row"),
        ({"group": [["q"]] * 8}, "column group, row 0: a list cannot be a label"),
    ],
)
def test_a_column_that_is_wrong_is_refused_with_its_row(columns, says):
    """Lengths, infinities, texts, negative steps, logprobs above 0: one sentence, no traceback."""
    with pytest.raises(Refused, match=says):
        table(**columns)


def test_a_missing_reward_is_no_number_and_no_error():
    """NaN and None mean that nothing was scored: the rollout leaves its group, and is counted."""
    for missing in (NAN, None):
        credit = grpo(table(reward=[missing, missing, 0, 0, 0, 1, 0, 0]))
        assert np.isnan(credit.values[:2]).all()
        assert credit.diagnostics["unscored"] == 1


@pytest.mark.parametrize("name", OBSERVED)
def test_rows_in_any_order_and_rows_that_are_missing(name):
    """Unsorted rows give the same credit; no rows give none."""
    steps, order = table(), [5, 0, 7, 2, 1, 6, 3, 4]
    columns = ("group", "rollout", "step", "reward", "anchor", "value", "value_high")
    moved = {c: np.asarray(getattr(steps, c))[order] for c in (*columns, "segment_start")}
    values = estimate(name, table(**moved, logprob=None)).values
    np.testing.assert_allclose(values, estimate(name, steps).values[order], atol=1e-12)
    empty = {c: [] for c in (*columns, "segment_start", "quality", "depends")}
    assert len(estimate(name, Steps.from_columns(**empty))) == 0


@pytest.mark.parametrize("name", OBSERVED)
def test_everything_masked_is_said(name):
    """Nothing is credited, and the sentence names the column that did it."""
    credit = estimate(name, table(mask=[False] * 8))
    assert np.isnan(credit.values).all()
    assert "column mask is false on every row, so nothing is credited" in str(credit)


ALONE = {"reinforce", "reinforce_pp", "gae", "hiper", "blame"}
"""Methods that compare no rollout with another unless asked to."""


@pytest.mark.parametrize("name", [name for name in OBSERVED if name not in ALONE])
def test_a_group_for_every_rollout_is_said(name):
    """Grouped by trajectory id nothing can be compared: counted, and said in a sentence."""
    steps = table(group=[0, 0, 1, 1, 2, 2, 3, 3])
    if name in ("dr_mas", "m_grpo", "magrpo"):
        steps = table(group=[0, 1, 2, 3], rollout=[0, 1, 2, 3], **one_turn())
    credit = estimate(name, steps)
    assert credit.diagnostics["singletons"] == credit.diagnostics["groups"]
    assert APART in str(credit)
    assert APART not in str(estimate(name, table()))


def test_methods_that_compare_nothing_do_not_mind():
    """One rollout a task is no mistake where there is no baseline, and one where there is."""
    steps = table(group=[0, 0, 1, 1, 2, 2, 3, 3])
    for name in ALONE:
        assert APART not in str(estimate(name, steps))
    for name, baseline in (("reinforce", "leave_one_out"), ("reinforce_pp", "group")):
        assert APART in str(estimate(name, steps, baseline=baseline))


def one_turn() -> dict[str, list]:
    rest = ("step", "anchor", "value", "value_high", "segment_start", "logprob")
    rest += ("quality", "depends")
    return {"reward": [1, 0, 1, 0], **dict.fromkeys(rest)} | {"anchor": ["s"] * 4, "value": [0] * 4}


def test_one_task_with_four_trajectory_ids():
    """Rewards 1, 0, 1, 0: by task ±.866; by trajectory four singletons, raw only when asked."""
    columns = {"rollout": list("wxyz"), "reward": [1, 0, 1, 0]}
    task = grpo(Steps.from_columns(group=["q"] * 4, **columns))
    np.testing.assert_allclose(task.values, [0.866, -0.866, 0.866, -0.866], atol=1e-4)
    alone = Steps.from_columns(group=list("wxyz"), **columns)
    assert grpo(alone).values.tolist() == [0, 0, 0, 0]
    assert grpo(alone, singleton="raw").values.tolist() == [1, 0, 1, 0]
    assert "group be the task, not the trajectory" in str(grpo(alone))


@pytest.mark.parametrize("name", OBSERVED)
def test_a_final_reward_copied_to_every_turn_is_said(name):
    """Both rewarded rollouts carry their reward on both turns: two are counted, and it is said."""
    credit = estimate(name, table(reward=[1, 1, 0, 0, 1, 1, 0, 0]))
    assert credit.diagnostics["reward_copied"] == 2
    assert COPIED in str(credit)
    assert "reward_copied" not in estimate(name, table()).diagnostics


@pytest.mark.parametrize(
    ("reward", "copied"),
    [
        ([1, 1, 0, 0, 0.5, 0.5, 0, 0], 2),
        ([1, 1, 0, 1, 0, 0, 0, 0], 0),  # one rollout tells its turns apart
        ([0, 1, 0, 1, 0, 1, 0, 0], 0),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0),
        ([-1, -1, 0, 0, 0, 0, 0, 0], 1),
        ([1, 1, 0, 0, -0.5, 0.5, 0, 0], 0),
    ],
)
def test_what_counts_as_copied(reward, copied):
    """One reward, not 0, on every turn of each rewarded rollout; in any order of rows."""
    steps = table(reward=reward)
    assert rewards_copied(steps) == copied
    back = {c: np.asarray(getattr(steps, c))[::-1] for c in ("group", "rollout", "step", "reward")}
    assert rewards_copied(Steps.from_columns(**back)) == copied


def test_a_reward_for_one_turn_is_no_copy():
    """A rollout of one turn cannot repeat itself, and long ones beside it still can."""
    assert rewards_copied(Steps.from_columns(rollout=[0, 1], reward=[1, 1])) == 0
    assert rewards_copied(Steps.from_columns(rollout=[0, 1, 1], reward=[1, 1, 1])) == 1
    late = Steps.from_columns(rollout=[0, 0, 0, 1, 1], reward=[1, 1, 0, 1, 1])
    assert rewards_copied(late) == 0  # told apart at the third turn


# ---------------------------------------------------------------------------------------------
# Down to tokens


def credited(*values) -> Credit:
    return Credit(np.array(values), estimand="outcome")


def test_every_run_of_the_mask_is_trained_and_nothing_between():
    """Mask 000 1111 000 11111: nine tokens get the turn's credit, not the span of twelve."""
    mask = [[0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]]
    tokens = credited(-2.0).tokens(mask)
    assert np.count_nonzero(tokens) == 9
    assert tokens.sum() == -18
    assert tokens[0].tolist() == [-2.0 * on for on in mask[0]]


def test_a_shifted_mask_trains_the_first_response_token():
    """Three prompt and two response tokens; token t is predicted at t − 1, so both are trained.

    Shifting the tokens, or crediting with the shifted mask 0 0 1 1, is the same.
    """
    mask, credit = np.array([[0, 0, 0, 1, 1]]), credited(0.5)
    assert credit.tokens(mask)[:, 1:].tolist() == [[0, 0, 0.5, 0.5]]
    np.testing.assert_array_equal(credit.tokens(mask)[:, 1:], credit.tokens(mask[:, 1:]))


def test_turns_and_mask_entries_that_do_not_match_are_never_shifted():
    """Five mask entries for three turns are refused, per turn and per token."""
    with pytest.raises(Refused, match="column mask has 5 rows where rollout has 3 rows"):
        Steps.from_columns(rollout=[0] * 3, reward=[0, 0, 1], mask=[1, 0, 0, 1, 0])
    three = credited(1.0, 2.0, 3.0)
    for mask, shape in ((np.ones((5, 4)), r"\(5, 4\)"), (np.ones(3), r"\(3,\)")):
        with pytest.raises(Refused, match=rf"mask has shape {shape} where \(3, tokens\)"):
            three.tokens(mask)


@pytest.mark.parametrize("odd", [0.5, 2, -1, NAN])
def test_a_mask_that_is_neither_true_nor_false_is_refused(odd):
    """A weight or a missing value is no mask: row and token are named."""
    with pytest.raises(Refused, match=f"mask, row 1, token 2: {odd} is neither true nor false"):
        credited(1.0, 2.0).tokens([[1.0, 1, 0, 0], [0, 1, odd, 0]])


def test_a_turn_that_was_never_credited_has_no_tokens():
    """NaN gives 0 everywhere, a fully masked row too, and nothing turns into NaN."""
    tokens = credited(NAN, 2.0, 3.0).tokens([[1, 1], [0, 0], [0, 1]])
    assert tokens.tolist() == [[0, 0], [0, 0], [0, 3]]


def test_a_run_in_which_nobody_acted_is_counted_beside_the_credit(tmp_path):
    """Three runs and one without an act: credit for three, and the fourth is reported."""
    path = tmp_path / "runs.jsonl"
    with Recorder(path) as record:
        for number in range(4):
            with record.trace(task_id="q") as trace:
                if number < 3:
                    trace.act("solver", "an answer")
                trace.reward(float(number == 0))
    credit = grpo(Steps.from_traces(read(path)), normalize_std=False)
    np.testing.assert_allclose(credit.values, [2 / 3, -1 / 3, -1 / 3])
    assert credit.diagnostics["rollouts_without_steps"] == 1
    assert "rollouts_without_steps 1" in str(credit)


# ---------------------------------------------------------------------------------------------
# Names and needs


def test_two_roles_with_ids_of_their_own():
    """Two roles in four rollouts, ids that differ per rollout: by role there are four of each."""
    steps = Steps.from_columns(
        rollout=np.repeat(np.arange(4), 2),
        agent=[f"{role}_{run}" for run in range(4) for role in ("planner", "solver")],
        role=["planner", "solver"] * 4,
        outcome=np.repeat([1, 0, 1, 0], 2),
    )
    assert dr_mas(steps, by="role").parts["n"].tolist() == [4] * 8
    assert dr_mas(steps).diagnostics["singletons"] == 8
    assert APART in str(dr_mas(steps))


def test_a_missing_need_says_which_and_how():
    """Rewards that differ and no logprobs, values or anchors: the sentence names the column."""
    bare = table(anchor=None, value=None, logprob=None, segment_start=None, value_high=None)
    for run, column in (
        (gae, "value"),
        (gigpo, "anchor"),
        (lambda steps: steps.need("logprob"), "logprob"),
    ):
        with pytest.raises(Refused, match=rf"needs the column {column}, which is missing: give"):
            run(bare)
    every = "needs the columns segment_start, value, value_high, which are missing: give segment"
    with pytest.raises(Refused, match=every):  # all of them at once
        estimate("hiper", bare)
    assert ppo_ratio(bare, reinforce(bare)).diagnostics["ratio"] == "not available"
