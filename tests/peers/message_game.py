"""A game of two agents and one message, small enough that its policy gradient is a sum of nine.

A planner writes one word, an executor that is fed it writes another, and the team is paid by a
table. Any model plays that gives log-probabilities of the next token: of a table here, of a
transformer where a trainer's library is at hand.
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
    with torch.no_grad():
        whole = [
            model(torch.tensor([[PLANNER]]))[:, -1],
            model(torch.tensor([[EXECUTOR, word] for word in range(VOCABULARY)]))[:, -1],
        ]
    first, second = (table.double().numpy() for table in whole)

    def drawn(log: np.ndarray) -> int:
        p = np.exp(log)
        return int(draws.choice(len(p), p=p / p.sum()))

    with Recorder(path, sync="trace") as recorder:
        for group in range(groups):
            for _ in range(rollouts):
                with recorder.trace(task_id=f"task {group}") as run:
                    a = drawn(first[0])
                    b = drawn(second[a])
                    log = (min(float(first[0, a]), 0.0), min(float(second[a, b]), 0.0))
                    act = run.act(
                        "planner",
                        str(a),
                        token_ids=(PLANNER, a),
                        mask=(False, True),
                        logprobs=(0, log[0]),
                    )
                    run.message("planner", "executor", str(a), causes=[act])
                    run.act(
                        "executor",
                        str(b),
                        token_ids=(EXECUTOR, a, b),
                        mask=(False, False, True),
                        logprobs=(0, 0, log[1]),
                    )
                    off = a >= WORDS or b >= WORDS
                    run.reward(0.0 if off else float(PAID[a, b]), verifiable="executed")
    return list(read(path))


def of_responses(log: Tensor, ids: Tensor, width: int) -> Tensor:
    """Of (rows, tokens, vocabulary) log-probabilities after each token, those of the last `width`
    tokens of every row, (rows, width).
    """
    return log[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][:, -width:]
