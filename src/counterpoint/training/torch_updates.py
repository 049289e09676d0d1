"""Models on their way: the gradient by torch, on the ids that were stored, never encoded again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from counterpoint.groups import Floats
from counterpoint.losses import aggregate, clipped_surrogate, kl, reinforce_loss
from counterpoint.policies import described
from counterpoint.save import whole_file
from counterpoint.spelling import Refused
from counterpoint.training.step import Rows, Rule, Slope, Terms, added

MOST_TOKENS = 1 << 16
"""Tokens that go through a model at once, rows filled up to the longest among them."""


class Descending:
    """A model that learns: anything with `logprobs_of`, `parameters` and `install`.

    Its numbers move in place; `install` makes a version of them, `give_up` puts them back.
    """

    def __init__(self, policy: Any, rows: Rows, optimizer: torch.optim.Optimizer | None) -> None:
        steps = rows.steps
        if steps.tokens is None:
            raise Refused(
                f"the acts hold no token ids, and a {type(policy).__name__} learns from those that "
                "it was fed and wrote"
            )
        if rows.reference is not None and not described(rows.reference, "logprobs_of"):
            held = type(rows.reference).__name__
            raise Refused(f"a model is held to a model, not to a {held}")
        self.policy, self.rows, self.optimizer = policy, rows, optimizer
        self.numbers: list[Tensor] = policy.parameters()
        self.before = [p.detach().clone() for p in self.numbers]
        self.moments = None if optimizer is None else _copied(optimizer)
        self.ids, self.mask, self.old = steps.tokens.padded(rows.at)
        self.away = self._reference()

    def _reference(self) -> Tensor | None:
        """(n, 1) log-probability of every turn under the reference."""
        if self.rows.reference is None:
            return None
        with torch.no_grad():
            found = [
                self.rows.reference.logprobs_of(self.ids[part], self.mask[part]).sum(1)
                for part in self._parts()
            ]
        return torch.cat(found)[:, None]

    def slope(self, rule: Rule) -> Slope:
        """The gradient of the loss, gathered part by part, with its sign turned in `move`."""
        terms: Terms = {"loss": (0.0, 0)}
        unsound = [np.zeros(0, dtype=np.int64)]
        for p in self.numbers:
            p.grad = torch.zeros_like(p)
        for part in self._parts():
            logp = self.policy.logprobs_of(self.ids[part], self.mask[part])
            bad = ~torch.isfinite(logp.detach()).all(1).numpy()
            bad |= ~np.isfinite(self.rows.advantage[part])
            if bad.any():
                unsound.append(self.rows.at[part][bad])
                added(terms, {"loss": (float("nan"), 0)})
                continue
            loss, about = self._loss(rule, logp, part)
            loss.backward()  # type: ignore[no-untyped-call]
            added(terms, {"loss": (float(loss.detach()), 0), **about})
        square = sum(
            float(p.grad.double().square().sum()) for p in self.numbers if p.grad is not None
        )
        return Slope(square, terms, np.concatenate(unsound))

    def _loss(self, rule: Rule, logp: Tensor, part: slice) -> tuple[Tensor, Terms]:
        mask = torch.from_numpy(self.mask[part])
        A = torch.from_numpy(self.rows.advantage[part])[:, None].expand(mask.shape).to(logp.dtype)
        size: dict[str, Any] = {
            "aggregation": "constant",
            "divisor": float(self.rows.steps.n_groups),
        }
        turn, n = logp.sum(1, keepdim=True), len(logp)
        there = torch.ones_like(turn, dtype=torch.bool)
        about: Terms = {"entropy": (-float(turn.detach().sum()), n)}
        if rule.loss == "clip":
            old = torch.from_numpy(self._sampled(part)).to(logp.dtype)
            told = clipped_surrogate(
                logp, old, A, mask, clip_low=rule.clip_low, clip_high=rule.clip_high, **size
            )
            about["clip_fraction"] = told.clip_fraction * told.tokens, told.tokens
            about["approx_kl"] = told.approx_kl * told.tokens, told.tokens
        else:
            told = reinforce_loss(logp, A, mask, **size)
        loss = told.loss
        if rule.entropy:  # half the square of log π has the gradient of −H on average over π
            spread = kl(turn, torch.zeros_like(turn), there, kind="k2")
            loss = loss + rule.entropy * aggregate(spread, there, **size)
        if self.away is not None:
            away = self.away[part]
            about["kl"] = float((turn.detach() - away).sum()), n
            loss = loss + rule.kl * aggregate(kl(turn, away, there, kind="k2"), there, **size)
        return loss, about

    def _sampled(self, part: slice) -> Floats:
        missing = np.isnan(self.old[part]) & self.mask[part]
        if missing.any():
            row = int(self.rows.at[part][missing.any(1)][0])
            steps = self.rows.steps
            raise Refused(
                f"trace {steps.label('rollout', row)}, step {steps.step[row]} has a token without "
                "log-probability, and the clipped surrogate compares with it; say loss='reinforce'"
            )
        return self.old[part]

    def _parts(self) -> Iterator[slice]:
        step = max(1, MOST_TOKENS // max(1, self.ids.shape[1]))
        return (slice(at, at + step) for at in range(0, len(self.ids), step))

    def move(self, lr: float, scale: float) -> None:
        """Go down the gradient, by the optimiser's rule where there is one."""
        if self.optimizer is None:
            with torch.no_grad():
                for p in self.numbers:
                    if p.grad is not None:
                        p -= lr * scale * p.grad
        else:
            for p in self.numbers:
                if p.grad is not None:
                    p.grad *= scale
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with _alone(self.optimizer, self.numbers):
                self.optimizer.step()
        for p in self.numbers:
            p.grad = None

    def install(self) -> None:
        """A new version, if a number is another one."""
        if any(not torch.equal(p, q) for p, q in zip(self.numbers, self.before, strict=True)):
            self.policy.install()

    def give_up(self) -> None:
        """Numbers and moments as they were."""
        with torch.no_grad():
            for p, before in zip(self.numbers, self.before, strict=True):
                p.copy_(before)
                p.grad = None
        if self.optimizer is not None and self.moments is not None:
            self.optimizer.load_state_dict(self.moments)


# ---------------------------------------------------------------------------------------------
# Optimisers


def adam(policies: Sequence[Any]) -> torch.optim.Adam:
    """Adam over the numbers of all models among the policies, in their order.

    Raises:
        Refused: none of them is a model.
    """
    numbers = [
        p for policy in policies if described(policy, "logprobs_of") for p in policy.parameters()
    ]
    if not numbers:
        raise Refused("optimizer is 'adam', and none of the policies that learn is a model")
    return torch.optim.Adam(numbers)


@contextmanager
def _alone(optimizer: torch.optim.Optimizer, numbers: Sequence[Tensor]) -> Iterator[None]:
    """Only these numbers have a gradient here: a step of an optimiser takes all that have one, and
    the other policies that it moves have their own turn.
    """
    own = {id(p) for p in numbers}
    held = [
        (p, p.grad) for group in optimizer.param_groups for p in group["params"] if id(p) not in own
    ]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in held:
            p.grad = grad


def save_moments(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write what an optimiser remembers as .npz, whole or not at all."""
    held = {
        f"{number}/{name}": np.asarray(value)
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    with whole_file(path, force=True) as file:
        np.savez(file, **held)  # type: ignore[arg-type]


def load_moments(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Let an optimiser remember what was written. Raises Refused if it cannot be read."""
    state: dict[int, dict[str, Tensor]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                number, _, name = key.partition("/")
                state.setdefault(int(number), {})[name] = torch.from_numpy(file[key])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise Refused(f"{path} holds no optimiser: {error}") from None


def _copied(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())
