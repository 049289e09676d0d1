"""The causal return: of the rewards that came later, only those that descend from the turn."""

from __future__ import annotations

import numpy as np

from counterpoint import groups
from counterpoint.descent import Descent
from counterpoint.groups import Floats
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


def causal_returns(steps: Steps, gamma: float, keep_masked: bool) -> Floats:
    """Discounted sum of the rewards that descend from each trainable row, NaN elsewhere, (rows,).

        G_t = Σ over rewards r that descend from t of γ^(trainable turns from t to r) r

    Each counts once, however many paths lead to it. A reward on a masked row falls on the trainable
    turn before it, or is left out without `keep_masked`; one that falls before the row although it
    descends from it, since it was given to an earlier turn, takes no factor γ.

    Raises:
        Refused: `descends` is missing, or the returns were given as they stand.
    """
    pairs: Descent = steps.need("descends")
    if steps.step_return is not None:
        raise Refused(
            "step_return is a return over all later rewards; a causal one needs the column reward"
        )
    turn = np.empty(len(steps), dtype=np.int64)
    turn[steps.order] = np.cumsum(steps.mask[steps.order])
    kept = steps.mask[pairs.row]
    if not keep_masked:
        kept &= steps.mask[pairs.place]
    row, place, amount = pairs.row[kept], pairs.place[kept], pairs.amount[kept]
    passed = np.maximum(turn[place] - turn[row], 0)
    G = groups.total(row, gamma**passed * amount, len(steps))
    return np.where(steps.mask, G, np.nan)
