"""Random draws that belong to somebody, so that a changed event shifts nobody else's.

    u = BLAKE2b(key ‖ domain ‖ owner ‖ k ‖ j)

There is no generator with a state. A draw is named by whose it is (`domain`, `owner`), how many
things that owner has done before (`k`), and its place within the call (`j`). The same names give
the same number in every process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Literal, TypeAlias

from counterpoint.spelling import Refused

Domain: TypeAlias = Literal["policy", "tool", "env", "schedule"]
Keys: TypeAlias = tuple[tuple[int, str], ...]
"""(seq, key) pairs, ascending: each key is in force from its seq on."""

_SCALE = 2.0**-53


class Draws:
    """The draws of one call of one owner: each method takes the next number of the stream."""

    __slots__ = ("_j", "_name")

    def __init__(self, key: str, domain: Domain, owner: str, k: int) -> None:
        # lengths keep two names from running into each other
        self._name = f"{len(key)}:{key}{domain}{len(owner)}:{owner}{k}:".encode(
            "utf-8", "surrogatepass"
        )
        self._j = 0

    def random(self) -> float:
        """The next number, uniform in [0, 1)."""
        digest = blake2b(self._name + b"%d" % self._j, digest_size=8).digest()
        self._j += 1
        return (int.from_bytes(digest, "big") >> 11) * _SCALE

    def choice(self, p: Sequence[float]) -> int:
        """The next index, drawn with the probabilities `p`; one of probability 0 is never drawn.

        Raises:
            Refused: `p` is no distribution (empty, a negative entry or NaN, a sum that is not 1).
        """
        edges = list(accumulate(p))
        # a comparison with NaN is false, so the sum is asked the way round that refuses it
        if not edges or min(p) < 0 or not abs(edges[-1] - 1.0) <= 1e-9:
            raise Refused(f"draws.choice needs probabilities that sum to 1, not {list(p)[:8]}")
        # under the last edge also after rounding: 1 − 2⁻⁵³ times a number near 1 is less than it
        return bisect_right(edges, self.random() * edges[-1])

    def integer(self, n: int) -> int:
        """The next whole number, uniform in 0 … n−1. Raises Refused for n < 1."""
        if n < 1:
            raise Refused(f"draws.integer needs n ≥ 1, not {n}")
        return int(self.random() * n)


def keys_of(seed: int, fork_keys: Keys = ()) -> Keys:
    """The keys of a run from its seed, or those that a fork carries."""
    return fork_keys or ((0, str(seed)),)


def key_at(keys: Keys, seq: int) -> str:
    """The key in force for what the event `seq` asks for."""
    if len(keys) == 1:
        return keys[0][1]
    place = bisect_right([since for since, _ in keys], seq) - 1
    return keys[max(place, 0)][1]


def branch_key(keys: Keys, seq: int, seed: int, branch: int, asked: int | None = None) -> Keys:
    """The keys of a branch that leaves its parent before `seq`: the parent's, then its own.

    The own one is named by where what comes at `seq` was `asked` for (by default there), so that
    a branch that draws an act anew, from its observation on, and one that keeps the act share it.
    """
    parent = [pair for pair in keys if pair[0] < seq] or [keys[0]]
    place = seq if asked is None else asked
    name = f"{parent[-1][1]}/fork/{place}/{seed}/{branch}".encode()
    return (*parent, (seq, blake2b(name, digest_size=8).hexdigest()))
