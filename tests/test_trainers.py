"""Claims about trainers' own code on our batches, each library in an environment of its own."""

from __future__ import annotations

import pytest

from peers.environment import TRL, VERIFIERS, VERL, made, measured


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return measured(made(folder / "own", TRL), "trl_step.py", folder / "run")


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    return measured(made(folder / "own", VERL), "verl_step.py", folder / "run")


@pytest.mark.soak
def test_trl_takes_our_gradient(trl):
    """TRL's loss on a batch of ours has the gradient of `counterpoint.losses` to float32, and along
    the game's exact policy gradient its length, within four standard errors.
    """
    assert trl["old_logps_difference"] < 1e-5
    assert trl["relative_difference"] < 1e-5
    assert abs(trl["along_exact"] - 1) < 4 * trl["along_exact_error"] < 1


@pytest.mark.soak
def test_trl_gives_masked_tokens_no_gradient_and_each_agent_its_own(trl):
    """Credit of 1000 on every token off the mask changes nothing; the executor's credit with its
    sign turned gives the planner's part minus the executor's.
    """
    assert trl["masked_difference"] == 0
    assert trl["flip_difference"] < 1e-5


@pytest.mark.soak
def test_one_step_of_trl_is_the_gradient_times_the_rate(trl):
    """One step of its trainer moves the weights by that gradient, and the team earns more."""
    assert trl["step_difference"] < 1e-3
    assert trl["worth_after"] > trl["worth_before"]


@pytest.mark.soak
def test_verl_carries_our_credit_and_takes_our_gradient(verl):
    """Through verl's registry and advantage step credit arrives as it was; its loss has our
    gradient in three aggregations, on policy and where the clip stops a quarter of the tokens.
    """
    assert verl["carried_difference"] == 0
    assert verl["relative_difference"] < 1e-5
    assert 0.1 < verl["clip_fraction_off_policy"] < 0.9
    assert abs(verl["along_exact"] - 1) < 4 * verl["along_exact_error"] < 1


@pytest.mark.soak
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_our_estimators_in_verls_registry_give_our_credit(verl, name):
    """Ours as verl calls them give what `estimate` gives, and what verl's of that name gives."""
    assert verl[f"{name}_difference"] < 1e-6
    assert verl[f"{name}_difference_from_verls"] < 1e-5


@pytest.mark.soak
def test_verifiers_trains_on_our_tokens_and_credit(tmp_path):
    """What verifiers makes of an export: by hand, a branch for each agent with the tokens of its
    turns one after the other, and on each written token its log-probability and its turn's credit.
    """
    told = measured(made(tmp_path / "own", VERIFIERS), "verifiers_step.py", tmp_path / "run")
    a, b, d = told["credit"]
    assert (told["reward"], told["credit"]) == (4.0, [4.0, 3.0, 2.0])
    assert sorted(told["branches"]) == [
        [[1, 2, 3, 4], [False, True, False, True], [0, -0.5, 0, -0.25], [0, a, 0, d]],
        [[7, 8, 9], [False, True, True], [0, -1, -2], [0, b, b]],
    ]
    assert [[0, "agent_message"]] in told["links"]
