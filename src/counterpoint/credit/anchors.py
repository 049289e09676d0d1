"""Anchors: turns that were taken from the same state, exactly or nearly so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, Literal, TypeVar

import numpy as np

from counterpoint import groups
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

_Column = TypeVar("_Column", Ints, Floats)
Order = Literal["sorted", "as_given"]

KEY = ("anchor", "agent", "role")
"""What makes two turns of a group comparable: the state, who acted, and in which role."""

_PARTS = ("anchor", "agent", "role", "task", "state_digest", "menu")
_DIGEST = re.compile(r"[0-9a-f]{32,}")


def anchor_groups(steps: Steps, key: Sequence[str], anchor: Ints | None = None) -> list[Ints]:
    """Number the anchor groups of every row, one array per part of the key, coarse to fine.

    Two rows share the last code if they are of one group and agree in every part of the key, the
    first one if their anchors agree. `anchor` takes the place of `steps.anchor`, to put similar
    anchors together.

    Raises:
        Refused: a key without the anchor, an unknown part, or a column that is missing.
    """
    parts = check_key(key)
    codes = steps.group
    nested: list[Ints] = []
    used: list[Ints] = []
    for part in parts:
        column = steps.need(part) if part != "anchor" or anchor is None else anchor
        known = any(np.array_equal(column, other) for other in used)
        if not known and len(column) and np.any(column != column[0]):
            codes = groups.pair(codes, column - min(0, int(column.min())))
        used.append(column)
        nested.append(codes)
    return nested


def check_key(key: Sequence[str]) -> tuple[str, ...]:
    """The parts of a key with the anchor first, or Refused."""
    parts = tuple(key.split(",")) if isinstance(key, str) else tuple(key)
    if "anchor" not in parts or any(part not in _PARTS for part in parts):
        raise Refused(f"key is {','.join(parts)}; it holds anchor, and of {', '.join(_PARTS[1:])}")
    return ("anchor", *(part for part in parts if part != "anchor"))


def similar_anchors(
    steps: Steps, key: Sequence[str], threshold: float, order: Order, autojunk: bool
) -> Ints:
    """Give similar anchors one code within each group and rest of the key, shape (rows,).

    Anchors that are equal always share a code; −1 where the anchor is missing.

    Raises:
        Refused: a threshold out of (0, 1], an unknown order, anchors that are not texts.
    """
    if not 0 < threshold <= 1:
        raise Refused(f"similarity is {threshold!r}; it lies above 0 and is at most 1")
    if order not in ("sorted", "as_given"):
        raise Refused(f"order is {order!r}; it is 'sorted' or 'as_given'")
    anchor = steps.need("anchor")
    texts = _texts(steps.names["anchor"])
    place = anchor_groups(steps, key, anchor * 0)[-1]
    merged: Ints = anchor.copy()
    known = np.flatnonzero(anchor >= 0)
    rows = known[np.argsort(place[known], kind="stable")]
    begun = 0
    for here in np.split(rows, np.flatnonzero(np.diff(place[rows])) + 1):
        codes = list(dict.fromkeys(anchor[here].tolist()))
        if order == "sorted":
            codes.sort(key=texts.__getitem__)
        found = clusters([texts[code] for code in codes], threshold, autojunk)
        label = dict(zip(codes, found, strict=True))
        merged[here] = [begun + label[code] for code in anchor[here].tolist()]
        begun += max(found, default=-1) + 1
    return merged


def _texts(labels: Sequence[Any]) -> Sequence[str]:
    for label in labels:
        if not isinstance(label, str):
            raise Refused(f"similarity compares texts, but the anchor {label!r:.60} is none")
    if labels and all(_DIGEST.fullmatch(label) for label in labels):
        raise Refused(
            "similarity compares texts, but these anchors are digests, which are never similar; "
            "give the texts as anchors"
        )
    return labels


def clusters(texts: Sequence[str], threshold: float, autojunk: bool = True) -> list[int]:
    """Greedy clusters: each text joins the first cluster whose first member is similar enough.

    Similar means difflib's `SequenceMatcher(None, text, first member).ratio() >= threshold`. Its
    two quick bounds are asked first; they never fall below the ratio, so the clusters are those of
    the plain loop.
    """
    heads: list[SequenceMatcher[str]] = []
    found = []
    for text in texts:
        near = (i for i, head in enumerate(heads) if _near(head, text, threshold))
        number = next(near, len(heads))
        if number == len(heads):
            heads.append(SequenceMatcher(None, "", text, autojunk))
        found.append(number)
    return found


def _near(head: SequenceMatcher[str], text: str, threshold: float) -> bool:
    head.set_seq1(text)
    bounds = (head.real_quick_ratio, head.quick_ratio, head.ratio)
    return all(bound() >= threshold for bound in bounds)


def sample_sizes(steps: Steps, counted: Bools, nested: Sequence[Ints]) -> dict[str, float]:
    """Diagnostics of anchor groups: how many there are, and how many can compare rollouts.

    `counted` says which rows enter, the last of `nested` their anchor group. `aliased_anchors`, the
    share of anchor groups with two rows or more whose `state_digest` differs, is there if that
    column is.
    """
    codes = nested[-1]
    n = int(codes.max(initial=-1)) + 1
    cell, rollout = only(counted, codes, steps.rollout)
    about: dict[str, float] = {
        "effective_sample_size_step": int(np.count_nonzero(groups.shared(cell, rollout, n))),
        "anchor_groups": int(np.count_nonzero(np.bincount(cell, minlength=n))),
        "without_anchor": int(np.count_nonzero(steps.mask & (steps.need("anchor") < 0))),
    }
    if steps.state_digest is not None:
        cell, state = only(counted & (steps.state_digest >= 0), codes, steps.state_digest)
        repeated = np.count_nonzero(np.bincount(cell, minlength=n) > 1)
        differ = np.count_nonzero(groups.shared(cell, state, n))
        about["aliased_anchors"] = differ / repeated if repeated else float("nan")
    return about


def key_cost(
    steps: Steps, counted: Bools, nested: Sequence[Ints], key: Sequence[str]
) -> dict[str, int]:
    """How many turns lose their last partner from another rollout with each further part."""
    cost: dict[str, int] = {}
    before: int | None = None
    for part, coarse, fine in zip(key[1:], nested, nested[1:], strict=False):
        if fine is coarse:
            cost[part] = 0
            continue
        before = _partnered(steps, counted, coarse) if before is None else before
        after = _partnered(steps, counted, fine)
        cost[part], before = before - after, after
    return cost


def _partnered(steps: Steps, counted: Bools, codes: Ints) -> int:
    """Turns whose anchor group holds another rollout too."""
    n = int(codes.max(initial=-1)) + 1
    cell, rollout = only(counted, codes, steps.rollout)
    return int(np.bincount(cell, minlength=n)[groups.shared(cell, rollout, n)].sum())


def only(counted: Bools, codes: Ints, x: _Column) -> tuple[Ints, _Column]:
    """The rows that count, without a copy where all do."""
    return (codes, x) if counted.all() else (codes[counted], x[counted])
