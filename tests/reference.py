"""Slow and obvious versions of the credit methods: loops over rows, no arrays, one line a rule."""

from __future__ import annotations

import math
from difflib import SequenceMatcher

from counterpoint.steps import Steps

NAN = math.nan


def rows_of(steps: Steps) -> dict[int, list[int]]:
    """Rollout → its trainable rows in order."""
    found: dict[int, list[int]] = {}
    for row in sorted(range(len(steps)), key=lambda i: (steps.rollout[i], steps.step[i])):
        if steps.mask[row]:
            found.setdefault(int(steps.rollout[row]), []).append(row)
    return found


def scored(steps: Steps, row: int) -> bool:
    return bool(steps.mask[row]) and not math.isnan(steps.outcome[row])


def reward_of(steps: Steps) -> list[float]:
    """Rewards, those of masked rows moved to the previous trainable row of their rollout."""
    out = [0.0] * len(steps)
    for row in range(len(steps)):
        held = [
            other
            for other in rows_of(steps).get(int(steps.rollout[row]), [])
            if steps.step[other] <= steps.step[row]
        ]
        if held:
            out[held[-1]] += steps.reward[row]
    return out


def returns(steps: Steps, gamma: float) -> list[float]:
    """G_t = Σ_{τ ≥ t} γ^(number of trainable turns in between) r_τ, summed term by term."""
    reward, out = reward_of(steps), [NAN] * len(steps)
    for rows in rows_of(steps).values():
        for i, row in enumerate(rows):
            if scored(steps, row):
                later = rows[i:]
                out[row] = math.fsum(gamma**k * reward[other] for k, other in enumerate(later))
    return out


def spread(values: list[float], ddof: int) -> tuple[float, float]:
    """Mean and standard deviation of a list."""
    mean = math.fsum(values) / len(values)
    degrees = len(values) - ddof
    squares = math.fsum((v - mean) ** 2 for v in values)
    return mean, math.sqrt(squares / degrees) if degrees > 0 else 0.0


def compared(
    x: list[float], keys: list, normalize_std: bool, ddof: int, eps: float, floor: float
) -> list[float]:
    """(x − mean) / (std + eps) within equal keys; 0 where there is no spread."""
    out = []
    for value, key in zip(x, keys, strict=True):
        mean, std = spread([v for v, k in zip(x, keys, strict=True) if k == key], ddof)
        alive = std > floor
        out.append((value - mean) / ((std + eps) if normalize_std else 1.0) if alive else 0.0)
    return out


def grpo(
    steps: Steps, normalize_std: bool = True, ddof: int = 1, eps: float = 1e-6, floor: float = 1e-6
) -> list[float]:
    rollouts = {r: rows[0] for r, rows in rows_of(steps).items() if scored(steps, rows[0])}
    outcome = [float(steps.outcome[row]) for row in rollouts.values()]
    group = [int(steps.group[row]) for row in rollouts.values()]
    each = compared(outcome, group, normalize_std, ddof, eps, floor)
    by_rollout = dict(zip(rollouts, each, strict=True))
    return [
        by_rollout[int(steps.rollout[row])] if scored(steps, row) else NAN
        for row in range(len(steps))
    ]


def reinforce(steps: Steps, gamma: float, baseline: str, singleton: str = "zero") -> list[float]:
    G, out = returns(steps, gamma), [NAN] * len(steps)
    for row in range(len(steps)):
        if not scored(steps, row):
            continue
        firsts = {
            r: G[rows[0]]
            for r, rows in rows_of(steps).items()
            if steps.group[rows[0]] == steps.group[row] and scored(steps, rows[0])
        }
        if baseline == "none":
            out[row] = G[row]
        elif len(firsts) == 1:
            out[row] = 0.0 if singleton == "zero" else G[row]
        else:
            if baseline == "leave_one_out":
                del firsts[int(steps.rollout[row])]
            out[row] = G[row] - math.fsum(firsts.values()) / len(firsts)
    return out


def gae(
    steps: Steps, value: list[float], gamma: float, gae_lambda: float, critic: str
) -> list[float]:
    """A_t = Σ_k (λ-weighted) δ, written as a recursion over each actor's own turns."""
    reward, out = reward_of(steps), [NAN] * len(steps)
    for rows in rows_of(steps).values():
        if math.isnan(steps.outcome[rows[0]]):
            continue
        actors = [0 if critic == "team" else int(steps.agent[row]) for row in rows]
        for actor in set(actors):
            places = [i for i, who in enumerate(actors) if who == actor]
            following = 0.0
            for n in range(len(places) - 1, -1, -1):
                i = places[n]
                last = n + 1 == len(places)
                j = len(rows) if last else places[n + 1]
                between = math.fsum(gamma ** (k - i) * reward[rows[k]] for k in range(i, j))
                step = 0.0 if last else gamma ** (j - i)
                then = 0.0 if last else value[rows[j]]
                delta = between + step * then - value[rows[i]]
                following = delta + gae_lambda * step * following
                out[rows[i]] = following
    return out


def anchor_key(steps: Steps, row: int) -> tuple:
    return tuple(int(getattr(steps, c)[row]) for c in ("group", "anchor", "agent", "role"))


def monte_carlo(steps: Steps, gamma: float) -> list[float]:
    """V of a row: mean return of the scored rows with its key."""
    G = returns(steps, gamma)
    out = []
    for row in range(len(steps)):
        same = [
            G[other]
            for other in range(len(steps))
            if scored(steps, other) and anchor_key(steps, other) == anchor_key(steps, row)
        ]
        out.append(math.fsum(same) / len(same) if same else NAN)
    return out


def gigpo(
    steps: Steps,
    gamma: float,
    step_weight: float,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    floor: float = 1e-6,
) -> list[float]:
    episode, G = grpo(steps, normalize_std, ddof, eps, floor), returns(steps, gamma)
    rows = [row for row in range(len(steps)) if scored(steps, row)]
    keys = [anchor_key(steps, row) if steps.anchor[row] >= 0 else ("alone", row) for row in rows]
    each = compared([G[row] for row in rows], keys, normalize_std, ddof, eps, floor)
    step = dict(zip(rows, each, strict=True))
    return [episode[row] + step_weight * step.get(row, NAN) for row in range(len(steps))]


def clusters(texts: list[str], threshold: float, autojunk: bool = True) -> list[int]:
    """The plain greedy loop: first cluster whose first member is similar enough."""
    heads: list[str] = []
    found = []
    for text in texts:
        for number, head in enumerate(heads):
            if SequenceMatcher(None, text, head, autojunk).ratio() >= threshold:
                found.append(number)
                break
        else:
            found.append(len(heads))
            heads.append(text)
    return found


def ratio(new: float, old: float, A: float, low: float, high: float) -> tuple[float, bool]:
    """PPO's ratio, and whether max(−Aρ, −A·clip(ρ)) is flat in it, by moving ρ both ways."""
    rho = math.exp(max(-20.0, min(20.0, new - old)))

    def loss(r: float) -> float:
        return max(-A * r, -A * max(1 - low, min(1 + high, r)))

    tiny = 1e-7 * rho
    return rho, A != 0 and loss(rho - tiny) == loss(rho) == loss(rho + tiny)
