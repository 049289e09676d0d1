"""verl-agent's batch: one row per interaction step of a trajectory.

Its `step_rewards` is the return from the step, already discounted; `rewards` is what the step
itself earned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.spelling import Refused
from counterpoint.steps import Steps

COLUMNS: dict[str, str] = {
    "uid": "group",
    "traj_uid": "rollout",
    "agent_id": "agent",
    "anchor_obs": "anchor",
    "rewards": "reward",
    "step_rewards": "step_return",
    "active_masks": "mask",
    "is_action_valid": "valid",
}
"""verl-agent's column → that of Steps; others are kept and passed on."""

NEEDED = ("uid", "traj_uid", "rewards")


def to_steps(columns: Mapping[str, npt.NDArray[Any]]) -> Steps:
    """Steps of a batch, in its row order; `n_tokens` counts the tokens of `response_mask`.

    Raises:
        Refused: a needed column is missing, or what `Steps.from_columns` refuses.
    """
    for name in NEEDED:
        if name not in columns:
            raise Refused(f"the batch has no column {name}; it has {', '.join(columns) or 'none'}")
    given: dict[str, Any] = {ours: columns[its] for its, ours in COLUMNS.items() if its in columns}
    if "response_mask" in columns:
        given["n_tokens"] = np.asarray(columns["response_mask"]).astype(bool).sum(-1)
    return Steps.from_columns(**given)
