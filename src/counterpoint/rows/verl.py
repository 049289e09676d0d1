"""verl's batch (`DataProto` of verl 0.9), with verl-agent's names for whose row it is.

One row per turn. Of verl-agent's columns `step_rewards` is the return from the step, already
discounted; `rewards` is what the step itself earned. A batch for verl carries each token's credit
twice: as `advantages`, and as `token_level_rewards` for a trainer that computes advantages itself
and is to be told by `register` to pass them through.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from counterpoint.groups import Bools, Floats
from counterpoint.ledger import Credit
from counterpoint.rows.halves import Halves
from counterpoint.rows.named import Column, Columns
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

ABOUT = "verl's DataProto, and verl-agent's"

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
"""Their column → that of Steps; others are kept and passed on."""

NEEDED = ("uid", "traj_uid", "rewards")


def lay(cut: Halves, trained: Bools) -> dict[str, Column]:
    """The tokens as tensors of `DataProto.batch`; `old_log_probs` only where all are known.

    Args:
        cut: the tokens of all rows.
        trained: (rows, tokens of a response) True where the token is trained.
    """
    there = np.hstack([cut.prompt_there, cut.response_there])
    out: dict[str, Column] = {
        "prompts": cut.prompt,
        "responses": cut.response,
        "input_ids": np.hstack([cut.prompt, cut.response]),
        "attention_mask": there.astype(np.int64),
        "position_ids": np.maximum(np.cumsum(there, 1) - 1, 0),
        "response_mask": trained.astype(np.int64),
    }
    if not np.isnan(cut.logprobs).any():
        out["old_log_probs"] = cut.logprobs.astype(np.float32)
    return out


def take(given: Columns) -> Halves | None:
    """The tokens of a batch; None where it holds none, or only their mask."""
    if "responses" not in given:
        return None
    split = given["prompts"].shape[1]
    there, written = given["attention_mask"].astype(bool), given["response_mask"].astype(bool)
    unknown = np.where(written, np.nan, 0.0)
    return Halves(
        prompt=given["prompts"],
        prompt_there=there[:, :split],
        response=given["responses"],
        response_there=there[:, split:],
        written=written,
        logprobs=np.asarray(given.get("old_log_probs", unknown), dtype=np.float64),
    )


def trained(given: Columns) -> Column | None:
    """Where a token is trained: `response_mask`; None for a batch without tokens."""
    return given.get("response_mask")


def carried(per_token: Floats) -> dict[str, Column]:
    """The credit of tokens under verl's names."""
    held = per_token.astype(np.float32)
    return {"token_level_rewards": held, "advantages": held}


# ---------------------------------------------------------------------------------------------
# In verl's own process


def register(*methods: Callable[[Steps], Credit]) -> tuple[str, ...]:
    """Put advantage estimators into verl's registry, for `algorithm.adv_estimator=NAME`.

    `counterpoint` passes finished credit through: A = token_level_rewards · response_mask. Each
    method, such as `grpo`, becomes `counterpoint_grpo`: it sees a row as a rollout of the group
    `uid` whose reward is the sum of its token_level_rewards, and its credit goes to every token
    of the row's response_mask. To say it twice changes nothing.

    Args:
        *methods: functions from Steps to Credit that need no column beside group and reward.

    Returns:
        The names, in verl's registry now.

    Raises:
        Refused: verl is not installed, or the name is taken by another function.
    """
    try:
        registry = importlib.import_module("verl.trainer.ppo.core_algos")
    except ImportError as error:
        raise Refused(f"verl cannot be imported ({error}); install verl where you train") from None
    estimators = {"counterpoint": passed_through}
    estimators |= {f"counterpoint_{m.__name__}": estimator(m) for m in methods}
    for name, function in estimators.items():
        try:
            registry.register_adv_est(name)(function)
        except ValueError as error:
            raise Refused(f"verl does not register {name}: {error}") from None
    return tuple(estimators)


def passed_through(token_level_rewards: Any, response_mask: Any, **_: Any) -> tuple[Any, Any]:
    """Finished credit as (advantages, returns), each of shape (rows, tokens)."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


@cache
def estimator(method: Callable[[Steps], Credit]) -> Callable[..., tuple[Any, Any]]:
    """A method as verl calls it: tensors of shape (rows, tokens) and `index`, the group's labels.

    Returns (advantages, returns) like the rewards in type and device; 0 where nothing was credited.
    """

    def advantages(
        token_level_rewards: Any, response_mask: Any, index: Any, **_: Any
    ) -> tuple[Any, Any]:
        mask = response_mask.cpu().numpy().astype(bool)
        rewards = token_level_rewards.double().cpu().numpy().sum(-1)
        steps = Steps.from_columns(
            group=list(index), rollout=np.arange(len(mask)), reward=rewards, mask=mask.any(1)
        )
        made = token_level_rewards.new_tensor(method(steps).tokens(mask))
        return made, made

    return advantages
