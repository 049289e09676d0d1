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
    step_unit: str = "event",
) -> list[float]:
    episode = grpo(steps, normalize_std, ddof, eps, floor)
    G = returns(steps, gamma) if step_unit == "event" else env_returns(steps, gamma)
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


# ---------------------------------------------------------------------------------------------
# Against the others


def rloo(steps: Steps) -> list[float]:
    """Each scored rollout against the mean of the others, which are listed."""
    out = [NAN] * len(steps)
    for row in range(len(steps)):
        if scored(steps, row):
            group = [
                float(steps.outcome[rows[0]])
                for r, rows in rows_of(steps).items()
                if steps.group[rows[0]] == steps.group[row] and r != steps.rollout[row]
            ]
            others = [v for v in group if not math.isnan(v)]
            own = float(steps.outcome[row])
            out[row] = own - math.fsum(others) / len(others) if others else 0.0
    return out


def reinforce_pp(steps: Steps, gamma: float, baseline: str | None) -> list[float]:
    """What is whitened is written down first, then whitened."""
    centred = grpo(steps, normalize_std=False, floor=-1.0)
    x = returns(steps, gamma) if baseline is None else centred
    known = [v for v in x if not math.isnan(v)]
    mean = math.fsum(known) / len(known)
    variance = math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in x]


def grpo_process(steps: Steps, order: str, normalize_std: bool, ddof: int) -> list[float]:
    """Pools the rewards, or their sums, of a group's turns."""
    reward, out = reward_of(steps), [NAN] * len(steps)
    lines = {r: rows for r, rows in rows_of(steps).items() if scored(steps, rows[0])}
    x = {row: reward[row] for rows in lines.values() for row in rows}
    if order == "sum_then_normalize":
        x = {
            row: math.fsum(reward[later] for later in rows[i:])
            for rows in lines.values()
            for i, row in enumerate(rows)
        }
    group = [int(steps.group[row]) for row in x]
    each = dict(
        zip(x, compared([*x.values()], group, normalize_std, ddof, 1e-6, 1e-6), strict=True)
    )
    for rows in lines.values():
        alone = [r for r in lines.values() if steps.group[r[0]] == steps.group[rows[0]]] == [rows]
        for i, row in enumerate(rows):
            onward = rows[i : i + 1] if order == "sum_then_normalize" else rows[i:]
            out[row] = 0.0 if alone else math.fsum(each[later] for later in onward)
    return out


def env_returns(steps: Steps, gamma: float) -> list[float]:
    """One return for all rows of an environment step, a factor γ from step to step."""
    reward, out = reward_of(steps), [NAN] * len(steps)
    for rows in rows_of(steps).values():
        ticks = sorted({int(steps.env_step[row]) for row in rows})
        for row in rows:
            if scored(steps, row):
                here = ticks.index(int(steps.env_step[row]))
                out[row] = math.fsum(
                    gamma ** (ticks.index(int(steps.env_step[r])) - here) * reward[r]
                    for r in rows
                    if steps.env_step[r] >= steps.env_step[row]
                )
    return out


def magrpo(steps: Steps, gamma: float) -> list[float]:
    """Each rollout's return at an environment step against all rollouts that have that step."""
    G, out = env_returns(steps, gamma), [NAN] * len(steps)
    for row in range(len(steps)):
        if scored(steps, row):
            there = {
                int(steps.rollout[r]): G[r]
                for r in range(len(steps))
                if scored(steps, r)
                and steps.group[r] == steps.group[row]
                and steps.env_step[r] == steps.env_step[row]
            }
            mean, std = spread(list(there.values()), 1)
            out[row] = G[row] - mean if std > 1e-6 else 0.0
    return out


def dr_mas(steps: Steps, by: str, ddof: int) -> list[float]:
    """z-scores over the rows of equal group and agent (or role)."""
    rows = [row for row in range(len(steps)) if scored(steps, row)]
    keys = [(int(steps.group[row]), int(getattr(steps, by)[row])) for row in rows]
    outcome = [float(steps.outcome[row]) for row in rows]
    each = dict(zip(rows, compared(outcome, keys, True, ddof, 1e-6, 1e-6), strict=True))
    return [each.get(row, NAN) for row in range(len(steps))]


def calls_of(steps: Steps, by: str, main: int) -> dict[int, dict[tuple, list[int]]]:
    """Rollout → calls → their scored rows; a call is (who, agent, main turns before it)."""
    found: dict[int, dict[tuple, list[int]]] = {}
    for rollout in sorted(set(steps.rollout.tolist())):
        turns = 0
        rows = [row for row in range(len(steps)) if steps.rollout[row] == rollout]
        for row in sorted(rows, key=lambda i: steps.step[i]):
            who = int(getattr(steps, by)[row])
            turns += who == main
            key = (who,) if who == main else (who, int(steps.agent[row]), turns)
            if scored(steps, row):
                found.setdefault(rollout, {}).setdefault(key, []).append(row)
    return found


def m_grpo(steps: Steps, by: str, main: int) -> tuple[list[float], list[float]]:
    """Advantages and loss weights by nested means, rollout by rollout."""
    values, weights = [NAN] * len(steps), [NAN] * len(steps)
    calls = calls_of(steps, by, main)
    group_of = {r: int(steps.group[next(iter(c.values()))[0]]) for r, c in calls.items()}
    for group in set(group_of.values()):
        for who in {key[0] for r, own in calls.items() if group_of[r] == group for key in own}:
            lists = [
                [rows for key, rows in own.items() if key[0] == who]
                for r, own in calls.items()
                if group_of[r] == group
            ]
            lists = [own for own in lists if own]
            R = [[float(steps.outcome[rows[0]]) for rows in own] for own in lists]
            mu = math.fsum(math.fsum(own) / len(own) for own in R) / len(R)
            square = [math.fsum((v - mu) ** 2 for v in own) / len(own) for own in R]
            sigma = math.sqrt(math.fsum(square) / len(R))
            for own, outcomes in zip(lists, R, strict=True):
                for rows, outcome in zip(own, outcomes, strict=True):
                    for row in rows:
                        values[row] = (outcome - mu) / (sigma + 1e-6) if sigma > 1e-6 else 0.0
                        weights[row] = 1 / (len(R) * len(own))
    return values, weights


def fold_grpo(steps: Steps, form: str, process: list[float], unit_sigma: bool) -> list[float]:
    """The clipped outcome against the group, or flags in place of the advantage."""
    plain, out = grpo(steps), [NAN] * len(steps)
    for row in range(len(steps)):
        if not scored(steps, row):
            continue
        heads = [rows[0] for rows in rows_of(steps).values()]
        group = [r for r in heads if steps.group[r] == steps.group[row] and scored(steps, r)]
        mean, std = spread([float(steps.outcome[r]) for r in group], 1)
        Q, R = process[row], float(steps.outcome[row])
        if form == "code":
            low, high = min(plain[r] for r in group), max(plain[r] for r in group)
            bad, good = (-1.0 if low >= 0 else low), (1.0 if high <= 0 else high)
            out[row] = bad if Q < 0 else good if Q > 0 else plain[row]
        elif len(group) == 1:
            out[row] = 0.0
        elif std > 1e-6:
            out[row] = (max(0.0, min(1.0, R + Q)) - mean) / (std + 1e-6)
        else:
            out[row] = max(0.0, min(1.0, R + Q)) - max(0.0, min(1.0, R)) if unit_sigma else 0.0
    return out


# ---------------------------------------------------------------------------------------------
# Two levels


def segments_of(steps: Steps) -> dict[int, list[list[int]]]:
    """Rollout → segments → trainable rows; a start on a masked row waits for the next one."""
    found: dict[int, list[list[int]]] = {}
    for rollout in set(steps.rollout.tolist()):
        rows = [row for row in range(len(steps)) if steps.rollout[row] == rollout]
        new = True
        for row in sorted(rows, key=lambda i: steps.step[i]):
            new = new or bool(steps.segment_start[row])
            if scored(steps, row):
                if new:
                    found.setdefault(rollout, []).append([])
                found[rollout][-1].append(row)
                new = False
    return found


def hiper(
    steps: Steps, level: str, form: str, gamma: float, lam_turn: float, lam_seg: float
) -> list[float]:
    """Each level as its own recursion, backwards."""
    reward, out = reward_of(steps), [NAN] * len(steps)
    low, high = steps.value, steps.value_high
    for segments in segments_of(steps).values():
        next_high, next_credit = 0.0, 0.0
        for k, rows in reversed(list(enumerate(segments))):
            follow, state, left = 0.0, next_high, next_high
            for i, row in reversed(list(enumerate(rows))):
                left = reward[row] + gamma * left
                delta = reward[row] + gamma * state - low[row]
                follow = delta + gamma * lam_turn * follow
                state = low[row]
                if level == "low":
                    out[row] = follow
                elif level == "switch" and form == "code":
                    out[row] = left - low[row]
                elif level == "switch" and (k, i) != (0, 0):
                    out[row] = high[row] - low[row]
            gain = left - high[rows[0]]
            next_credit = gain + gamma ** len(rows) * lam_seg * next_credit
            next_high = high[rows[0]]
            if level == "high":
                out[rows[0]] = next_credit
    return out
