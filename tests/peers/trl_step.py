"""TRL's own loss and one of its own steps on a batch of ours, with a random Llama of two layers.

Run where TRL is installed: `python trl_step.py FOLDER`; prints what it measured as one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from message_game import VOCABULARY, of_responses, played, worth
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from counterpoint.credit import rloo
from counterpoint.losses import clipped_surrogate
from counterpoint.rows import batch_of, load_batch, save_batch
from counterpoint.rows.trl import INPUTS
from counterpoint.steps import Steps

GROUPS, ROLLOUTS = 100, 8


class Given(GRPOTrainer):
    """TRL's trainer, fed with a finished batch instead of generating one."""

    inputs: dict[str, torch.Tensor]

    def _prepare_inputs(self, generation_batch):
        return {**self.inputs, "num_items_in_batch": self.inputs["tool_mask"].sum()}


def trainer_of(model: LlamaForCausalLM, inputs: dict[str, torch.Tensor], folder: Path) -> Given:
    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="1"
    )
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=8,
        beta=0.0,
        loss_type="bnpo",
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": "0"}] * 8)
    made = Given(
        model, reward_funcs=[lambda **_: []], args=settings, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    made.inputs = inputs
    return made


def gradient(loss: torch.Tensor, model: LlamaForCausalLM) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def inputs_of(steps: Steps, values: np.ndarray, path: Path) -> dict[str, torch.Tensor]:
    """A batch written and read as TRL's inputs."""
    credit = rloo(steps)
    object.__setattr__(credit, "values", values)
    save_batch(path, batch_of("trl", steps), credit, force=True)
    return {k: torch.as_tensor(v) for k, v in load_batch(path).columns.items() if k in INPUTS}


def main(folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
        initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(shape).eval()

    def scored(ids: torch.Tensor, there: torch.Tensor | None = None) -> torch.Tensor:
        return torch.log_softmax(model(input_ids=ids, attention_mask=there).logits.float(), -1)

    exact = gradient(worth(scored), model).clone()
    traces = played(scored, folder / "t.jsonl", groups=GROUPS, rollouts=ROLLOUTS, seed=0)
    steps = Steps.from_traces(traces)
    values = rloo(steps).values
    inputs = inputs_of(steps, values, folder / "b.npz")
    trainer = trainer_of(model, inputs, folder)
    model.eval()
    out: dict[str, float] = {"rows": len(steps)}

    # Its loss has our gradient, and both have the game's.
    ids = torch.hstack([inputs["prompt_ids"], inputs["completion_ids"]])
    there = torch.hstack([inputs["prompt_mask"], inputs["completion_mask"]])
    log = of_responses(scored(ids, there), ids, inputs["tool_mask"].shape[1])
    old, A, mask = inputs["old_per_token_logps"], inputs["advantages"], inputs["tool_mask"]
    out["old_logps_difference"] = float((log - old)[mask == 1].detach().abs().max())
    ours = clipped_surrogate(torch.clamp(log, max=0), torch.clamp(old, max=0), A, mask)
    g = gradient(ours.loss, model).clone()
    theirs = gradient(trainer._compute_loss(model, trainer._prepare_inputs([])), model).clone()
    out["gradient_norm"] = float(g.norm())
    out["relative_difference"] = float((g - theirs).norm() / g.norm())
    out["cosine_with_exact"] = float(torch.cosine_similarity(-theirs, exact, dim=0))
    along = []
    for group in range(GROUPS):
        on = torch.as_tensor(steps.group == group)
        trainer.inputs = {name: values[on] for name, values in inputs.items()}
        own = gradient(trainer._compute_loss(model, trainer._prepare_inputs([])), model)
        per_rollout = -own * int(mask[on].sum()) / ROLLOUTS  # the loss is a mean over tokens
        along.append(float(per_rollout @ exact / exact.norm() ** 2))
    out["along_exact"] = float(np.mean(along))
    out["along_exact_error"] = float(np.std(along, ddof=1) / GROUPS**0.5)

    # Masked tokens get no gradient: their ids' credit may be anything.
    noisy = dict(inputs)
    noisy["advantages"] = torch.where(mask == 1, A, 1e3)
    trainer.inputs = noisy
    again = gradient(trainer._compute_loss(model, trainer._prepare_inputs([])), model)
    out["masked_difference"] = float((again - theirs).abs().max())

    # Flipping the executor's credit flips its part of the gradient and no other.
    executor = np.array([steps.label("agent", row) == "executor" for row in range(len(steps))])
    parts = {}
    for name, kept in {"planner": ~executor, "executor": executor}.items():
        trainer.inputs = inputs_of(steps, np.where(kept, values, 0.0), folder / "b.npz")
        parts[name] = gradient(trainer._compute_loss(model, trainer._prepare_inputs([])), model)
        parts[name] = parts[name].clone()
    flipped = np.where(executor, -values, values)
    trainer.inputs = inputs_of(steps, flipped, folder / "b.npz")
    turned = gradient(trainer._compute_loss(model, trainer._prepare_inputs([])), model)
    want = parts["planner"] - parts["executor"]
    out["flip_difference"] = float((turned - want).norm() / want.norm())

    # One of its own steps of plain SGD is the gradient times the rate, and pays.
    trainer.inputs = inputs
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    with torch.no_grad():
        out["worth_before"] = float(worth(scored))
    trainer.train()
    model.eval()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    out["step_difference"] = float((after - before + 0.1 * theirs).norm() / (0.1 * theirs).norm())
    with torch.no_grad():
        out["worth_after"] = float(worth(scored))
    return out


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
