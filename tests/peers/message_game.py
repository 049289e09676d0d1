"""A game of two agents and one message, small enough that its policy gradient is a sum of nine.

A planner writes one word, an executor that is fed it writes another, and the team is paid by a
table. A tool answers the executor, who writes a last word that nothing depends on: so turns differ
in length, and a token in the midst of one is not trained. Any model plays that gives
log-probabilities of the next token: of a table here, of a transformer where a trainer's library is
at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterpoint.formats import read
from counterpoint.recorder import Recorder
from counterpoint.schema import Trace

WORDS = 3
PLANNER, EXECUTOR = 3, 4
"""Ids of the tokens that tell the model whose turn it is; the words are 0, 1, 2."""

TOOL = PLANNER
"""What the tool says."""

VOCABULARY = 5

PAID = torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.5, 0.0], [0.3, 0.0, 0.9]])
"""(word of the planner, word of the executor) → reward of the team."""

Next = Callable[[Tensor], Tensor]
"""(rows, tokens) ids, none of them padding → (rows, tokens, vocabulary) log-probabilities of the
token after each."""


def chances(model: Next) -> tuple[Tensor, Tensor]:
    """Log-probability of the planner's word, (WORDS,), and of the executor's, (WORDS, WORDS)."""
    first = model(torch.tensor([[PLANNER]]))[0, -1, :WORDS]
    fed = torch.tensor([[EXECUTOR, word] for word in range(WORDS)])
    return first, model(fed)[:, -1, :WORDS]


def worth(model: Next) -> Tensor:
    """The expected reward, by summing over all nine plays; words off the table pay nothing."""
    first, second = chances(model)
    return torch.sum((first[:, None] + second).exp() * PAID)


def played(model: Next, path: Path, *, groups: int, rollouts: int, seed: int) -> list[Trace]:
    """Runs of the game as recorded traces, prompts and masks with their tokens."""
    draws = np.random.default_rng(seed)
    word = range(VOCABULARY)
    with torch.no_grad():
        first = model(torch.tensor([[PLANNER]]))[0, -1]
        second = model(torch.tensor([[EXECUTOR, a] for a in word]))[:, -1]
        third = model(torch.tensor([[EXECUTOR, a, b, TOOL] for a in word for b in word]))[:, -1]

    def drawn(log: Tensor) -> tuple[int, float]:
        p = log.double().exp().numpy()
        at = int(draws.choice(VOCABULARY, p=p / p.sum()))
        return at, min(float(log[at]), 0.0)

    with Recorder(path, sync="trace") as recorder:
        for task in np.repeat(np.arange(groups), rollouts).tolist():
            with recorder.trace(task_id=f"task {task}") as run:
                a, p_a = drawn(first)
                b, p_b = drawn(second[a])
                c, p_c = drawn(third[a * VOCABULARY + b])
                run.act("planner", str(a), token_ids=(PLANNER, a), mask=(False, True),
                        logprobs=(0, p_a))  # fmt: skip
                run.message("planner", "executor", str(a))
                run.act("executor", f"{b} {c}", token_ids=(EXECUTOR, a, b, TOOL, c),
                        mask=(False, False, True, False, True),
                        logprobs=(0, 0, p_b, 0, p_c))  # fmt: skip
                off = a >= WORDS or b >= WORDS
                run.reward(0.0 if off else float(PAID[a, b]), verifiable="executed")
    return list(read(path))


def of_responses(log: Tensor, ids: Tensor, width: int) -> Tensor:
    """Of (rows, tokens, vocabulary) log-probabilities after each token, those of the last `width`
    tokens of every row, (rows, width).
    """
    return log[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][:, -width:]
