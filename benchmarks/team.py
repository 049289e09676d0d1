"""A step of training with traces and credit, against the same step without them.

Two small transformers play the message game: 32 tasks, 8 runs of each, a plain policy gradient.
`rollout` records every event, GRPO credits every turn, `update` learns from what was stored. The
bare loop writes by the same models and draws, scores in an array and steps by the same optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import _medians, _row
from counterpoint import Steps, grpo, make, rollout, update
from counterpoint.groups import Bools, Ints
from counterpoint.policies import Observation, Output, Shown
from counterpoint.policies.torch_transformer import Transformer
from counterpoint.streams import Draws
from counterpoint.targets import load_target

GAME = str(Path(__file__).parent.parent / "examples" / "message_game.py")
TARGETS: Sequence[str] = load_target(f"{GAME}:TARGETS")
SIGNS = tuple(f" {sign}" for sign in load_target(f"{GAME}:SIGNS"))
GROUPS, ROLLOUTS, LR = 32, 8, 3e-3

Team = dict[str, Transformer]


def team(seed: int = 0) -> Team:
    """A transformer of two layers for each role, which writes signs, or one target."""
    words = ("planner", "executor", ",", " trusted", *TARGETS, *SIGNS)
    sizes: dict[str, Any] = {"context": 32, "width": 32, "layers": 2, "seed": seed}
    return {
        "planner": Transformer(
            words, SIGNS, limit=4, says={"planner": ("message", "executor")}, **sizes
        ),
        "executor": Transformer(
            words, TARGETS, limit=1, says={"executor": ("stop",)}, **sizes
        ),
    }  # fmt: skip


def adam(policies: Team) -> torch.optim.Adam:
    """One optimiser for both."""
    return torch.optim.Adam([p for policy in policies.values() for p in policy.parameters()], lr=LR)


def recorded(env: Any, policies: Team, optimizer: torch.optim.Adam, seed: int) -> float:
    """One step with traces and credit; the share of runs that were won."""
    traces = rollout(env, policies, groups=GROUPS, rollouts=ROLLOUTS, seed=seed)
    steps = Steps.from_traces(traces)
    update(policies, steps, grpo(steps), lr=LR, optimizer=optimizer)
    return float(np.mean([trace.outcome for trace in traces]))


def bare(policies: Team, optimizer: torch.optim.Adam, seed: int) -> float:
    """The same step in a dozen lines, with nothing kept."""
    task = np.repeat(np.random.default_rng(seed).integers(len(TARGETS), size=GROUPS), ROLLOUTS)
    asked = [_told("planner", TARGETS[t]) for t in task]
    signs = _asked(policies["planner"], asked, seed)
    heard = [_told("executor", f"<<from planner, trusted, 00000000\n{o.text}\n00000000>>")
             for o in signs]  # fmt: skip
    named = _asked(policies["executor"], heard, seed)
    won = np.array([o.text == TARGETS[t] for o, t in zip(named, task, strict=True)], dtype=float)
    each = won.reshape(GROUPS, ROLLOUTS)
    mean, std = each.mean(1, keepdims=True), each.std(1, ddof=1, keepdims=True)
    A = torch.from_numpy(((each - mean) / (std + 1e-6)).reshape(-1, 1))
    for role, outputs in (("planner", signs), ("executor", named)):
        ids, mask = _padded(outputs)
        (-(A * policies[role].logprobs_of(ids, mask)).sum() / GROUPS).backward()
    optimizer.step()
    optimizer.zero_grad()
    for policy in policies.values():
        policy.install()
    return float(won.mean())


def _told(role: str, text: str) -> Observation:
    turns = (Shown("user", "", text),)
    return Observation(role, role, turns, None, 0, lambda: list(turns))


def _asked(policy: Transformer, told: Sequence[Observation], seed: int) -> list[Output]:
    names = [Draws(f"{seed}/{run}", "policy", o.agent, 0) for run, o in enumerate(told)]
    return policy.many(told, [None] * len(told), names)


def _padded(outputs: Sequence[Output]) -> tuple[Ints, Bools]:
    size = max(len(o.token_ids or ()) for o in outputs)
    ids, mask = np.zeros((len(outputs), size), dtype=np.int64), np.zeros((len(outputs), size), bool)
    for row, o in enumerate(outputs):
        ids[row, : len(o.token_ids or ())] = o.token_ids
        mask[row, : len(o.mask or ())] = o.mask
    return ids, mask


def rows() -> list[dict[str, Any]]:
    """One row: {job, ours, peer, peer_name, ratio, goal}, seconds a step."""
    env = make(f"{GAME}:Signal")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sides: list[tuple[Team, torch.optim.Adam]] = [(held := team(), adam(held)) for _ in range(2)]
    counts = {"recorded": 0, "bare": 0}

    def step(name: str) -> int:
        counts[name] += 1
        return counts[name]

    ours, theirs = _medians(
        lambda: recorded(env, *sides[0], step("recorded")), lambda: bare(*sides[1], step("bare"))
    )
    torch.set_num_threads(threads)
    job = "256 episodes of two transformers, traces, credit, update (at most 3 times the bare loop)"
    return [_row(job, ours, theirs, "bare loop", goal=1 / 3)]
