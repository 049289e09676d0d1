"""Speed of the credit methods against the loops that trainers run.

The peers are written here after the public algorithms, so that nothing has to be installed; they
take the same inputs and must give the same numbers, which is checked before anything is timed.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from counterpoint.credit import METHODS, estimate, gae, gigpo, grpo, rloo
from counterpoint.groups import encode_labels
from counterpoint.steps import Steps

EPS = 1e-6

TEXTS = "string ids (rollouts are numbered too, which the peer never looks at)"
"""A dictionary look-up a label; the ids of 100,000 rollouts cost more than all of the rest."""

BYTES = "both sides wait for memory"
"""Why GAE cannot win by much: half a million turns are moved through a dozen arrays of 4 MB."""


def rows() -> list[dict[str, Any]]:
    """One entry per job: CPU seconds of ours and of the peer, their ratio, and the goal.

    Where `peer` is None the goal is on `ours` itself: microseconds a row, or an exponent.
    """
    return [
        gigpo_against_loop(),
        *gigpo_growth(),
        against_vectorised("GRPO", codes=False),
        against_vectorised("GRPO", codes=True),
        against_vectorised("RLOO", codes=False),
        against_vectorised("RLOO", codes=True),
        gae_against_loop(holes=True),
        gae_against_loop(holes=False),
        label_coding(),
        *memory(),
    ]


def alternately(
    ours: Callable[[], Any], peer: Callable[[], Any], times: int = 5
) -> tuple[float, float]:
    """Median CPU seconds of both, run by turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for held, job in zip(taken, (ours, peer), strict=True):
            held.append(cpu(job))
    return statistics.median(taken[0]), statistics.median(taken[1])


def cpu(job: Callable[[], Any]) -> float:
    begin = time.process_time()
    job()
    return time.process_time() - begin


def fresh(steps: Steps) -> Steps:
    """The same table without anything that was computed from it before."""
    return replace(steps)


def entry(job: str, ours: float, peer: float, peer_name: str, goal: float) -> dict[str, Any]:
    return {
        "job": job,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": peer / ours,
        "goal": goal,
    }


# ---------------------------------------------------------------------------------------------
# GiGPO


def episodes(n: int, rollouts: int = 8, turns: int = 10, states: int = 40) -> dict[str, Any]:
    """A batch of `n` turns: groups of eight rollouts of ten turns each in forty states."""
    rng = np.random.default_rng(0)
    turn = np.arange(n) % turns
    rollout = np.arange(n) // turns
    return {
        "group": rollout // rollouts,
        "rollout": rollout,
        "step": turn,
        "anchor": rng.integers(0, states, n),
        "reward": np.where(turn == turns - 1, rng.random(n) < 0.5, 0.0),
    }


def as_strings(batch: dict[str, Any]) -> dict[str, Any]:
    """The same batch as a trainer holds it: ids and observations are texts in object arrays."""
    texts = {"group": "task-{}", "rollout": "run-{}", "anchor": "you are in room {}"}
    held = {k: np.array([t.format(v) for v in batch[k]], dtype=object) for k, t in texts.items()}
    return {**batch, **held}


def gigpo_loop(batch: dict[str, Any], gamma: float) -> np.ndarray:
    """Finds the rows of every trajectory, group and anchor by comparing all ids with each."""
    group, rollout, anchor = batch["group"], batch["rollout"], batch["anchor"]
    reward, n = batch["reward"], len(batch["reward"])
    returns, score = np.zeros(n), np.zeros(n)
    for name in np.unique(rollout):
        at, later = np.where(rollout == name)[0], 0.0
        score[at] = reward[at].sum()
        for row in at[::-1]:
            later = reward[row] + gamma * later
            returns[row] = later
    seen, scores = set(), defaultdict(list)
    for row in range(n):
        if (group[row], rollout[row]) not in seen:
            seen.add((group[row], rollout[row]))
            scores[group[row]].append(score[row])
    step_group = np.empty(n, dtype=np.int64)
    for number, name in enumerate(np.unique(group)):
        clusters: dict[Any, list[int]] = defaultdict(list)
        for row in np.where(group == name)[0]:
            clusters[anchor[row]].append(row)
        for i, members in enumerate(clusters.values()):
            step_group[members] = number * n + i
    held = defaultdict(list)
    for row in range(n):
        held[step_group[row]].append(returns[row])
    return normalised(score, group, scores) + normalised(returns, step_group, held)


def normalised(x: np.ndarray, keys: Any, held: dict[Any, list[float]]) -> np.ndarray:
    """Each value against the list of its key; a list of one compares with itself."""
    mean = {key: np.mean(values) for key, values in held.items()}
    std = {key: np.std(v, ddof=1) if len(v) > 1 else 1.0 for key, v in held.items()}
    return np.array([(x[i] - mean[key]) / (std[key] + EPS) for i, key in enumerate(keys)])


def gigpo_against_loop(n: int = 10_000) -> dict[str, Any]:
    batch = episodes(n)
    steps, texts = Steps.from_columns(**batch), as_strings(batch)
    assert np.allclose(gigpo(steps).values, gigpo_loop(texts, 0.95), atol=1e-9)
    ours, peer = alternately(lambda: gigpo(fresh(steps)), lambda: gigpo_loop(texts, 0.95))
    return entry(
        f"GiGPO, {n:,} turns, from coded anchors",
        ours,
        peer,
        "loop over ids and dictionaries, as in verl-agent (there with torch scalars)",
        300,
    )


def gigpo_growth() -> list[dict[str, Any]]:
    """Microseconds a turn at a million turns, and the exponent of the growth from 10⁵ on."""
    taken = {}
    for n in (100_000, 1_000_000):
        steps = Steps.from_columns(**episodes(n))
        taken[n] = statistics.median(cpu(lambda s=steps: gigpo(fresh(s))) for _ in range(3))
    each = taken[1_000_000]
    exponent = float(np.log10(each / taken[100_000]))
    none = {"peer": None, "peer_name": None, "ratio": None}
    return [
        {"job": "GiGPO, µs a turn at 1,000,000", "ours": each, **none, "goal": 0.3},
        {"job": "GiGPO, growth exponent", "ours": exponent, **none, "goal": 1.1},
    ]


# ---------------------------------------------------------------------------------------------
# GRPO and RLOO


def grpo_vectorised(uid: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Numbers the ids by sorting them, then sums, squares and counts by group."""
    group = np.unique(uid, return_inverse=True)[1]
    n = np.bincount(group)
    off = score - (np.bincount(group, weights=score) / n)[group]
    variance = np.bincount(group, weights=off * off) / np.maximum(n - 1, 1)
    return off / (np.sqrt(variance)[group] + EPS)


def rloo_vectorised(uid: np.ndarray, score: np.ndarray) -> np.ndarray:
    """The same numbering, then n/(n − 1) times the distance from the group's mean."""
    group = np.unique(uid, return_inverse=True)[1]
    n = np.bincount(group)
    off = score - (np.bincount(group, weights=score) / n)[group]
    return off * (n / np.maximum(n - 1, 1))[group]


RELATIVE = {"GRPO": (grpo, grpo_vectorised), "RLOO": (rloo, rloo_vectorised)}


def against_vectorised(name: str, codes: bool, n: int = 100_000) -> dict[str, Any]:
    run, vectorised = RELATIVE[name]
    score = np.random.default_rng(0).random(n)
    group = np.arange(n) // 8
    uid = np.array([f"task-{g}" for g in group], dtype=object)
    traj = np.array([f"run-{i}" for i in range(n)], dtype=object)
    steps = Steps.from_columns(group=group, rollout=np.arange(n), reward=score)
    assert np.allclose(run(steps).values, vectorised(uid, score), atol=1e-9)

    def from_texts() -> Any:
        return run(Steps.from_columns(group=uid, rollout=traj, reward=score))

    ours, peer = alternately(
        (lambda: run(fresh(steps))) if codes else from_texts, lambda: vectorised(uid, score)
    )
    return entry(
        f"{name}, {n:,} rollouts, from {'codes' if codes else TEXTS}",
        ours,
        peer,
        "sorted string ids, then sums by group, as in verl's vectorised form (there in torch)",
        50 if codes else 4,
    )


# ---------------------------------------------------------------------------------------------
# GAE


def gae_loop(
    reward: np.ndarray, value: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """From the last position back, all rows at once; masked positions keep what follows."""
    rows, length = reward.shape
    after, last, kept = np.zeros(rows), np.zeros(rows), []
    for t in range(length - 1, -1, -1):
        delta = reward[:, t] + gamma * after - value[:, t]
        here = delta + gamma * lam * last
        after = value[:, t] * mask[:, t] + (1 - mask[:, t]) * after
        last = here * mask[:, t] + (1 - mask[:, t]) * last
        kept.append(last)
    advantage = np.stack(kept[::-1], axis=1)
    held = advantage[mask > 0]
    return (advantage - held.mean()) / np.sqrt(held.var(ddof=1) + 1e-8) * mask


def gae_against_loop(holes: bool, rows_: int = 1024, length: int = 512) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (rows_, length)
    mask = (rng.random(shape) < (0.9 if holes else 2.0)).astype(float)
    reward, value = rng.normal(size=shape) * mask, rng.normal(size=shape)
    steps = Steps.from_columns(
        rollout=np.repeat(np.arange(rows_), length),
        step=np.tile(np.arange(length), rows_),
        reward=reward.ravel(),
        value=value.ravel(),
        mask=mask.ravel(),
    )

    def ours_() -> Any:
        return gae(fresh(steps), gamma=0.99, gae_lambda=0.95, whiten=True)

    def peer_() -> Any:
        return gae_loop(reward, value, mask, 0.99, 0.95)

    assert np.allclose(np.nan_to_num(ours_().values), peer_().ravel(), atol=1e-9)
    ours, peer = alternately(ours_, peer_, 7)
    name = "loop over positions, as in verl (there in torch)"
    shown = "with holes" if holes else "all trainable"
    return entry(f"GAE, {rows_} × {length}, {shown}, whitened ({BYTES})", ours, peer, name, 20)


# ---------------------------------------------------------------------------------------------
# Labels


def label_coding(n: int = 1_000_000) -> dict[str, Any]:
    """Microseconds a row to number string anchors, which happens once, when steps are made."""
    anchors = [f"you are in room {i % 1000}" for i in range(n)]
    taken = statistics.median(cpu(lambda: encode_labels(anchors)) for _ in range(3))
    return {
        "job": "numbering string anchors, µs a row",
        "ours": taken * 1e6 / n,
        "peer": None,
        "peer_name": None,
        "ratio": None,
        "goal": 1.2,
    }


# ---------------------------------------------------------------------------------------------
# Memory


def memory(n: int = 100_000) -> list[dict[str, Any]]:
    """Bytes a turn that each method holds at its peak, beyond the table it reads."""
    row = np.arange(n)
    more = {"value": row % 7, "value_high": row % 5, "segment_start": row % 3 == 0}
    steps = Steps.from_columns(**episodes(n), **more)
    rows_ = []
    for name, method in METHODS.items():
        if method.family == "observational" and "quality" not in method.needs:
            tracemalloc.start()
            estimate(name, fresh(steps))
            peak = tracemalloc.get_traced_memory()[1] / n
            tracemalloc.stop()
            none = {"peer": None, "peer_name": None, "ratio": None}
            rows_.append({"job": f"{name}, bytes a turn", "ours": peak, **none, "goal": 200})
    return rows_


if __name__ == "__main__":
    for row in rows():
        print({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
