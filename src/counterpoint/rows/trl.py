"""TRL's batch: what `GRPOTrainer` computes its loss from (TRL 1.16), one row per turn.

TRL has no word for whose row it is, so those columns keep our names. `completion_mask` is what is
there and `tool_mask` what is trained of it: a turn's own tokens are not those of a tool.
"""

from __future__ import annotations

import numpy as np

from counterpoint.groups import Bools, Floats
from counterpoint.rows.halves import Halves
from counterpoint.rows.named import OURS, Column, Columns

ABOUT = "what TRL's GRPOTrainer computes its loss from"

COLUMNS: dict[str, str] = {}

NEEDED = tuple(f"{OURS}{name}" for name in ("group", "rollout", "reward"))

INPUTS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "advantages",
)
"""The columns that TRL's loss reads."""


def lay(cut: Halves, trained: Bools) -> dict[str, Column]:
    """The tokens under TRL's names; `old_per_token_logps` only where all are known.

    Args:
        cut: the tokens of all rows.
        trained: (rows, tokens of a completion) True where the token is trained.
    """
    out: dict[str, Column] = {
        "prompt_ids": cut.prompt,
        "prompt_mask": cut.prompt_there.astype(np.int64),
        "completion_ids": cut.response,
        "completion_mask": cut.response_there.astype(np.int64),
        "tool_mask": trained.astype(np.int64),
    }
    if not np.isnan(cut.logprobs).any():
        out["old_per_token_logps"] = cut.logprobs.astype(np.float32)
    return out


def take(given: Columns) -> Halves | None:
    """The tokens of a batch."""
    written = given["tool_mask"].astype(bool)
    unknown = np.where(written, np.nan, 0.0)
    return Halves(
        prompt=given["prompt_ids"],
        prompt_there=given["prompt_mask"].astype(bool),
        response=given["completion_ids"],
        response_there=given["completion_mask"].astype(bool),
        written=written,
        logprobs=np.asarray(given.get("old_per_token_logps", unknown), dtype=np.float64),
    )


def trained(given: Columns) -> Column | None:
    """Where a token is trained: `tool_mask`, which is 0 where nothing is there."""
    return given["tool_mask"]


def carried(per_token: Floats) -> dict[str, Column]:
    """The credit of tokens: TRL's loss takes advantages of shape (rows, tokens) as they are."""
    return {"advantages": per_token.astype(np.float32)}
