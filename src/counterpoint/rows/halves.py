"""The tokens of turns as trainers take them: a prompt, filled up on the left, and a response."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.tokens import Tokens


class Halves(NamedTuple):
    """Every row cut before the first token that the policy wrote; 0 and False where filled up.

    Attributes:
        prompt: (rows, longest prompt) what came before that token; its end stands at the right.
        prompt_there: the same shape, False where filled up.
        response: (rows, longest response) from that token on, with what others put in between.
        response_there: the same shape, False where filled up.
        written: the same shape, True where the policy wrote the token.
        logprobs: the same shape, log-probability when sampled; 0 on what it did not write, NaN
            where nobody recorded it.
    """

    prompt: Ints
    prompt_there: Bools
    response: Ints
    response_there: Bools
    written: Bools
    logprobs: Floats


def halves(tokens: Tokens) -> Halves:
    """Cut rows into prompt and response; a row in which nothing was written is all prompt."""
    ids, mask, logprobs = tokens.padded()
    length = np.diff(tokens.begin)
    first = np.where(mask.any(1), np.argmax(mask, 1) if mask.size else 0, length)
    width, span = int(first.max(initial=0)), int((length - first).max(initial=0))
    before = np.arange(width)[None] - (width - first)[:, None]
    after = np.arange(span)[None] + first[:, None]
    there, then = before >= 0, after < length[:, None]
    written = _at(mask, after, then)
    return Halves(
        prompt=_at(ids, before, there),
        prompt_there=there,
        response=_at(ids, after, then),
        response_there=then,
        written=written,
        logprobs=np.where(written, _at(logprobs, after, then), 0.0),
    )


def joined(cut: Halves) -> Tokens:
    """The rows in one piece again, as `halves` was given them."""
    there = np.hstack([cut.prompt_there, cut.response_there])
    unwritten = np.zeros_like(cut.prompt_there)
    ids = np.hstack([cut.prompt, cut.response])
    return Tokens(
        ids=ids[there].astype(np.int64),
        mask=np.hstack([unwritten, cut.written])[there].astype(bool),
        logprobs=np.hstack([unwritten.astype(float), cut.logprobs])[there].astype(float),
        begin=np.append(0, np.cumsum(there.sum(1))),
    )


def _at(values: npt.NDArray[Any], place: Ints, there: Bools) -> npt.NDArray[Any]:
    """Values at the places of each row, 0 where there is none."""
    if not place.size:
        return np.zeros(place.shape, values.dtype)
    held = np.take_along_axis(values, np.where(there, place, 0), axis=1)
    return np.where(there, held, np.zeros((), values.dtype))
