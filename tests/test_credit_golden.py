"""Golden vectors of public implementations: conventions pinned to 1e-6."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from counterpoint.credit import dr_mas, gae, gigpo, grpo, hiper, reinforce, reinforce_pp, rloo
from counterpoint.steps import Steps

GOLDEN = Path(__file__).parent / "data" / "golden"


def cases(name: str):
    found = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in found]


def from_matrix(case, **columns) -> Steps:
    """Rows of a (trajectory, step) matrix, row-major; padding is masked."""
    shape = np.shape(case["reward"])
    flat = {name: np.ravel(case[name]) for name in ("reward", *columns.pop("also", ()))}
    return Steps.from_columns(
        rollout=np.repeat(np.arange(shape[0]), shape[1]),
        step=np.tile(np.arange(shape[1]), shape[0]),
        mask=np.ravel(case["mask"]),
        **flat,
        **columns,
    )


def off_by(values, expected) -> float:
    """Largest difference on credited rows; rows without credit stand as 0 in the files."""
    return float(np.abs(np.nan_to_num(values) - np.ravel(expected)).max())


@pytest.mark.parametrize("case", cases("grpo"))
def test_grpo(case):
    """Grpo gives verl's and TRL's advantages for the same rewards and groups."""
    reward = case["reward"]
    steps = Steps.from_columns(group=case["group_id"], rollout=range(len(reward)), reward=reward)
    assert off_by(grpo(steps, **case["params"]).values, case["advantage"]) < 1e-6


@pytest.mark.parametrize("case", cases("gae"))
def test_gae(case):
    """Gae gives verl's advantages, returns and whitened advantages, holes in the mask included."""
    steps = from_matrix(case, also=("value",))
    plain = gae(steps, **case["params"])
    mask = np.ravel(case["mask"])
    assert off_by(plain.values, case["advantage_unwhitened"]) < 1e-6
    assert off_by(plain.parts["return"], np.ravel(case["return"]) * mask) < 1e-6
    white = gae(steps, whiten=True, **case["params"])
    assert off_by(white.values, np.ravel(case["advantage_whitened"]) * mask) < 1e-6


@pytest.mark.parametrize("case", cases("rloo"))
def test_rloo(case):
    """Rloo gives verl's leave-one-out advantages."""
    reward = case["reward"]
    steps = Steps.from_columns(group=case["group_id"], rollout=range(len(reward)), reward=reward)
    assert off_by(rloo(steps, **case["params"]).values, case["advantage"]) < 1e-6


@pytest.mark.parametrize("case", cases("reinforce_plus_plus"))
def test_reinforce_pp(case):
    """Reinforce_pp gives verl's whitened returns, and reinforce what they start from."""
    steps = from_matrix(case)
    assert off_by(reinforce(steps, **case["params"]).values, case["return"]) < 1e-6
    white = reinforce_pp(steps, **case["params"])
    assert off_by(white.values, case["advantage_whitened"]) < 1e-6
    assert off_by(white.parts["G"], case["return"]) < 1e-6


@pytest.mark.parametrize("case", cases("dr_mas"))
def test_dr_mas(case):
    """Dr_mas gives DrMAS's advantages, a penalty on one agent's calls included."""
    steps = Steps.from_columns(
        group=case["task_id"],
        rollout=case["trajectory_id"],
        agent=case["agent_id"],
        outcome=case["reward"],
    )
    assert off_by(dr_mas(steps, **case["params"]).values, case["advantage"]) < 1e-6


@pytest.mark.parametrize("case", cases("hiper"))
@pytest.mark.parametrize("level", ["low", "high"])
def test_hiper(case, level):
    """Hiper gives the advantages of HiPER's code at both levels (in its float32, 3e-7 off)."""
    columns = {name: case[name] for name in ("step", "segment_start", "reward", "value_high")}
    steps = Steps.from_columns(rollout=case["trajectory_id"], value=case["value_low"], **columns)
    values = hiper(steps, level=level, **case["params"]).values
    assert off_by(values, case[f"advantage_{level}"]) < 1e-6
    if level == "high":
        np.testing.assert_array_equal(~np.isnan(values), case["segment_start"])


@pytest.mark.parametrize("case", cases("gigpo"))
def test_gigpo(case):
    """Gigpo gives verl-agent's advantages in both modes, with weights, and with similar anchors."""
    params = dict(case["params"])
    columns = {"group": case["task_id"], "rollout": case["trajectory_id"], "anchor": case["anchor"]}
    if "similarity" in params:
        columns |= {"step_return": case["step_return"], "outcome": case["episode_return"]}
        params["order"] = "as_given"
    else:
        columns |= {"step": case["step"], "reward": case["reward"]}
    normalize = params.pop("mode") == "mean_std_norm"
    credit = gigpo(Steps.from_columns(**columns), normalize_std=normalize, **params)
    assert off_by(credit.values, case["advantage"]) < 1e-6
    assert off_by(credit.parts["step_return"], case["step_return"]) < 1e-6
    if "episode_advantage" in case:
        assert off_by(credit.parts["episode"], case["episode_advantage"]) < 1e-6
