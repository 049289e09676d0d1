"""A small transformer from scratch, and the policy that plays by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.policies.tokenizer import FIRST_BYTE, Words
from counterpoint.policies.torch_writer import Net, Writer, saved
from counterpoint.spelling import Refused

Memory: TypeAlias = list[tuple[Tensor, Tensor]]


class Transformer(Writer):
    """A policy that reads and writes words by a transformer of a few layers, in float64.

    One may play all roles of a team (its prompt begins with the role), or each role one of its own.

    Args:
        words: the words that it knows, such as `words_in` finds in traces.
        writes: those that it may write without a menu; None for all.
        limit, says: as in `Writer`.
        width: numbers a token, a multiple of `heads`. layers, heads: of attention.
        context: the most tokens of prompt and turn.
        seed: of the first numbers.

    Raises:
        Refused: a size that is none, or what `Words` and `Writer` refuse.
    """

    kind = "transformer"

    def __init__(
        self,
        words: Sequence[str],
        writes: Sequence[str] | None = None,
        *,
        limit: int = 16,
        says: Mapping[str, Sequence[str]] | None = None,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        context: int = 512,
        seed: int = 0,
    ) -> None:
        tokenizer = Words(words, writes)
        shape = {"width": width, "layers": layers, "heads": heads, "context": context}
        if odd := [f"{n} {v}" for n, v in shape.items() if type(v) is not int or v < 1]:
            raise Refused(f"a transformer of {odd[0]} cannot be built; a size is 1 or more")
        if width % heads:
            raise Refused(f"width {width} is no multiple of {heads} heads")
        self._words = {"words": list(words), "writes": None if writes is None else list(writes)}
        super().__init__(_Layers(tokenizer.size, shape, seed), tokenizer, limit=limit, says=says)

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, the first numbers' seed left out."""
        return {**super().settings, **self._words}

    @classmethod
    def load(cls, path: str | Path, digest: str | None = None) -> Transformer:
        """Read a transformer; if `digest` is given, it must be the one that it has.

        Raises:
            Refused: no such file, no transformer in it, or another digest.
        """
        updates, settings, state = saved(path, cls.kind)
        try:
            loaded = cls(**settings)
            loaded._put(state)
        except (TypeError, Refused) as error:
            raise Refused(f"{path} holds no transformer: {error}") from None
        loaded._settle(updates)
        if digest is not None and loaded.params_digest != digest:
            raise Refused(f"{path} has digest {loaded.params_digest}, not {digest}")
        loaded.target = f"transformer:{path}"
        return loaded


_SPREAD = {"token.weight": 1.0, "place.weight": 0.2}
_MARKS = 0.2
"""Spread of the first numbers, times 1/√width; others have 2, and the marks of a prompt less than
its words. With the usual small ones an agent writes nearly the same whatever it has read, and a
team that starts so learns no language.
"""


class _Layers(Net):
    """Attention and a feed-forward part a layer, each after a norm, with learned places."""

    exact = True

    def __init__(self, size: int, shape: Mapping[str, int], seed: int) -> None:
        with torch.random.fork_rng(devices=[]):  # the first numbers are nobody else's chance
            torch.manual_seed(seed)
            super().__init__()
            width = shape["width"]
            self.settings = dict(shape)
            self.context = shape["context"]
            self.token = nn.Embedding(size, width, dtype=torch.float64)
            self.place = nn.Embedding(shape["context"], width, dtype=torch.float64)
            self.layers = nn.ModuleList(
                _Layer(width, shape["heads"]) for _ in range(shape["layers"])
            )
            self.norm = nn.LayerNorm(width, dtype=torch.float64)
            self.head = nn.Linear(width, size, bias=False, dtype=torch.float64)
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=_SPREAD.get(name, 2.0) * weight.shape[1] ** -0.5)
            with torch.no_grad():
                self.token.weight[:FIRST_BYTE] *= _MARKS

    def read(self, ids: Tensor, at: Tensor, seen: Tensor, past: Any) -> tuple[Tensor, Memory]:
        x = self.token(ids) + self.place(at)
        memory: Memory = []
        for number, layer in enumerate(self.layers):
            x, held = layer(x, seen[:, None], None if past is None else past[number])
            memory.append(held)
        return self.norm(x), memory

    def logits(self, vectors: Tensor) -> Tensor:
        return self.head(vectors)  # type: ignore[no-any-return]

    def pick(self, past: Memory, rows: Tensor) -> Memory:
        return [(keys[rows], values[rows]) for keys, values in past]


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width, dtype=torch.float64)
        self.asks = nn.Linear(width, 3 * width, bias=False, dtype=torch.float64)
        self.out = nn.Linear(width, width, bias=False, dtype=torch.float64)
        self.between = nn.LayerNorm(width, dtype=torch.float64)
        self.up = nn.Linear(width, 4 * width, dtype=torch.float64)
        self.down = nn.Linear(4 * width, width, dtype=torch.float64)

    def forward(
        self, x: Tensor, seen: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        split = self.asks(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        seen_by = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        x = x + self.out(seen_by.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)))), (key, value)
