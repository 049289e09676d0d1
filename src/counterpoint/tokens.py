"""The tokens of the turns as they were stored: what a model was fed, and what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.schema import Act
from counterpoint.spelling import Refused


class Tokens(NamedTuple):
    """The tokens of all rows, one row after the other; never encoded again.

    Attributes:
        ids: (tokens,) what the model was fed and wrote, as its act stored it.
        mask: (tokens,) True where the policy wrote the token.
        logprobs: (tokens,) log-probability when sampled; NaN where it was not recorded.
        begin: (rows + 1,) where each row begins; a row without tokens is empty.
    """

    ids: Ints
    mask: Bools
    logprobs: Floats
    begin: Ints

    def padded(self, rows: Ints | None = None, pad: int = 0) -> tuple[Ints, Bools, Floats]:
        """Ids, mask and logprobs as (rows, longest) arrays, filled up on the right.

        Args:
            rows: (n,) which rows; all by default.
            pad: the id that fills up; there the mask is False and the logprob 0.
        """
        chosen = np.arange(len(self.begin) - 1) if rows is None else rows
        first, length = self.begin[chosen], self.begin[chosen + 1] - self.begin[chosen]
        place = np.arange(int(length.max(initial=0)))
        there = place[None] < length[:, None]
        at = np.where(there, first[:, None] + place, 0)

        def spread(values: npt.NDArray[np.generic], empty: float) -> npt.NDArray[np.generic]:
            held = values if len(values) else np.zeros(1, values.dtype)
            return np.where(there, held[at], np.asarray(empty, values.dtype))

        return spread(self.ids, pad), spread(self.mask, False), spread(self.logprobs, 0.0)  # type: ignore[return-value]


def tokens_of(acts: Sequence[Act]) -> Tokens | None:
    """The tokens of acts in order, one row each; None where no act stored any.

    Raises:
        Refused: a mask or log-probabilities of another length than their act's tokens (V09).
    """
    held = [act.token_ids or () for act in acts]
    if not any(held):
        return None
    for act in acts:
        for what, beside in (("mask", act.mask), ("logprobs", act.logprobs)):
            if act.token_ids and beside and len(beside) != len(act.token_ids):
                raise Refused(
                    f"trace {act.trace_id}, event {act.seq}: {len(act.token_ids)} token_ids stand "
                    f"beside a {what} of {len(beside)}; `counterpoint validate` lists them all"
                )
    size = np.array([len(ids) for ids in held], dtype=np.int64)
    total, nothing = int(size.sum()), float("nan")
    masks = (m for act, ids in zip(acts, held, strict=True) for m in act.mask or [True] * len(ids))
    logs = (
        p for act, ids in zip(acts, held, strict=True) for p in act.logprobs or [nothing] * len(ids)
    )
    return Tokens(
        ids=np.fromiter((i for ids in held for i in ids), np.int64, total),
        mask=np.fromiter(masks, bool, total),
        logprobs=np.fromiter(logs, np.float64, total),
        begin=np.append(0, np.cumsum(size)),
    )


def stored(act: Act) -> Sequence[object]:
    """What a turn stored one of per token: ids, or log-probabilities where they are as many as the
    tokens that it counts. A policy that chooses among texts stores one for the whole text.
    """
    if act.token_ids or act.logprobs is None:
        return act.token_ids or ()
    whole = act.tokens_out is not None and act.mask is None and len(act.logprobs) != act.tokens_out
    return () if whole else act.logprobs


def written(ids: Sequence[object], mask: Sequence[bool] | None) -> int:
    """How many of a turn's tokens the policy wrote: all of them, or those of the mask."""
    return len(ids) if mask is None else sum(mask)
