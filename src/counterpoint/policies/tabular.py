"""A table of logits: the smallest policy that learns, and one whose gradient is exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from counterpoint.groups import Floats
from counterpoint.policies import Menu, Observation, Output
from counterpoint.save import whole_file
from counterpoint.spelling import CANONICAL, Refused, digest_of
from counterpoint.streams import Draws

Logits = Mapping[str, Mapping[str, float]]
"""Anchor → label → logit."""


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    logits: dict[str, dict[str, float]]


class Softmax:
    """π(label | anchor) ∝ exp(logit[anchor, label]); a label that was never met has logit 0.

    It acts from a menu only. The table changes by `install` alone, which counts a new version.

    Args:
        logits: anchor → label → logit; anchors and labels left out have logit 0.
        version: how many times it was updated before.

    Attributes:
        target: how a header names it: by the file it was loaded from, else by its digest.
        version: number of updates, and the digest of the logits.
        params_digest: digest of the logits.

    Raises:
        Refused: a logit that is no finite number.
    """

    deterministic = True
    trainable = True

    def __init__(self, logits: Logits | None = None, version: int = 0) -> None:
        self._put(logits or {}, version)

    @property
    def logits(self) -> Logits:
        """The table, to be read: a change would slip past its digest."""
        return self._logits

    def install(self, logits: Logits) -> None:
        """Act by another table from now on: the next version. Raises Refused like the class."""
        self._put(logits, self._updates + 1)

    def _put(self, logits: Logits, updates: int) -> None:
        table = {
            anchor: {label: _number(logit, anchor, label) for label, logit in row.items()}
            for anchor, row in logits.items()
        }
        self._logits = MappingProxyType({a: MappingProxyType(row) for a, row in table.items()})
        self._updates = updates
        self.params_digest = digest_of(CANONICAL.encode(table)).hex()
        self.version = f"{updates}-{self.params_digest[:8]}"
        self.target = f"tabular:{self.params_digest}"

    def restore(self, path: str | Path) -> None:
        """Act as the saved table does, by its version too. Raises Refused like `load`."""
        held = Softmax.load(path)
        self._put(held._logits, held._updates)

    def __deepcopy__(self, memo: Any) -> Softmax:
        return Softmax(self._logits, self._updates)

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """Draw an entry of the menu."""
        menu, p = self._p(observation, legal)
        choice = draws.choice(p)
        return Output(list(menu.values())[choice], logprobs=(min(0.0, math.log(p[choice])),))

    def probs(self, observation: Observation, legal: Menu) -> Floats:
        """(menu entries,) the probability of each, in menu order. Raises Refused without a menu."""
        return np.array(self._p(observation, legal)[1])

    def _p(self, observation: Observation, legal: Menu) -> tuple[Mapping[str, str], list[float]]:
        # plain floats: a menu is short, and arrays would take several times as long
        if not legal:
            raise Refused(
                f"a table acts from a menu, and {observation.agent} has none here; "
                "let the environment's legal() give one"
            )
        row: Mapping[str, float] = self._logits.get(observation.anchor or "", {})
        z = [row.get(label, 0.0) for label in legal]
        top = max(z)
        e = [math.exp(logit - top) for logit in z]
        total = math.fsum(e)
        return legal, [weight / total for weight in e]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the table as JSON, whole or not at all.

        Raises:
            Refused: the file exists and `force` is not set, or it cannot be written.
        """
        table = {anchor: dict(row) for anchor, row in self._logits.items()}
        with whole_file(path, force=force) as file:
            file.write(CANONICAL.encode(_Saved(self._updates, table)) + b"\n")

    @classmethod
    def load(cls, path: str | Path, digest: str | None = None) -> Softmax:
        """Read a table; if `digest` is given, it must be the one that its logits have.

        Raises:
            Refused: no such file, no table in it, or another digest.
        """
        try:
            held = msgspec.json.decode(Path(path).read_bytes(), type=_Saved)
        except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Refused(f"{path} holds no table of logits: {error}") from None
        loaded = cls(held.logits, held.version)
        if digest is not None and loaded.params_digest != digest:
            raise Refused(f"{path} has digest {loaded.params_digest}, not {digest}")
        loaded.target = f"tabular:{path}"
        return loaded


def _number(logit: float, anchor: str, label: str) -> float:
    if not math.isfinite(logit):
        raise Refused(f"the logit of {label!r} at anchor {anchor!r} is {logit}")
    return float(logit)
