"""A table of logits: the smallest policy that learns, and one whose gradient is exact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from counterpoint.groups import Floats
from counterpoint.policies import Menu, Observation, Output
from counterpoint.spelling import CANONICAL, Refused, digest_of
from counterpoint.streams import Draws


class Softmax:
    """π(label | anchor) ∝ exp(logit[anchor, label]); a label that was never met has logit 0.

    It acts from a menu only. `version` counts updates; `params_digest` names the logits.
    """

    deterministic = True
    trainable = True

    def __init__(self, logits: dict[str, dict[str, float]] | None = None, version: int = 0) -> None:
        self.logits = logits or {}
        self._version = version

    @property
    def version(self) -> str:
        """Number of updates, and the digest of the logits."""
        return f"{self._version}-{self.params_digest[:8]}"

    @property
    def target(self) -> str:
        """How a header names it."""
        return f"tabular:{self.params_digest}"

    @property
    def params_digest(self) -> str:
        """Digest of the logits."""
        return digest_of(CANONICAL.encode(self.logits)).hex()

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """Draw an entry of the menu."""
        p = self.probs(observation, legal)
        choice = draws.choice(p.tolist())
        texts = list((legal or {}).values())
        return Output(texts[choice], logprobs=(min(0.0, float(np.log(p[choice]))),))

    def probs(self, observation: Observation, legal: Menu) -> Floats:
        """(menu entries,) the probability of each, in menu order."""
        if not legal:
            raise Refused(
                f"a table acts from a menu, and {observation.agent} has none here; "
                "let the environment's legal() give one"
            )
        row = self.logits.get(observation.anchor or "", {})
        z = np.array([row.get(label, 0.0) for label in legal])
        e = np.exp(z - z.max())
        out: Floats = e / e.sum()
        return out

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, named by its digest when it is loaded."""
        Path(path).write_bytes(
            CANONICAL.encode({"version": self._version, "logits": self.logits}) + b"\n"
        )

    @classmethod
    def load(cls, path: str | Path, digest: str | None = None) -> Softmax:
        """Read a table; if `digest` is given, it must be the one that its logits have.

        Raises:
            Refused: no such file, no table in it, or another digest.
        """
        try:
            held = json.loads(Path(path).read_bytes())
            loaded = cls(held["logits"], held["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"{path} holds no table of logits: {error}") from None
        if digest is not None and loaded.params_digest != digest:
            raise Refused(f"{path} has digest {loaded.params_digest}, not {digest}")
        return loaded
