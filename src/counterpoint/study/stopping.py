"""When to stop, learned and exact: what each way of deciding it loses against the best rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from counterpoint import groups
from counterpoint.credit import coma, rloo
from counterpoint.envs import make
from counterpoint.games import Game, Plays, deal, expected_gradient, gradient, play, policy_gradient
from counterpoint.games.chains import softmax
from counterpoint.games.replaying import Rerun
from counterpoint.groups import Bools, Floats
from counterpoint.ledger import Credit
from counterpoint.policies import Menu, Observation, Output
from counterpoint.policies.grammar import parse
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.report import Page, Section, page
from counterpoint.steps import Steps
from counterpoint.streams import Draws
from counterpoint.study.asked import Progress, silent
from counterpoint.study.listing import Listing, best_rule, listed, ruled, value
from counterpoint.vocabulary import DECISIONS

GROUPS, ROLLOUTS = 16, 8
BEST = "the best, by dynamic programming"

Advantage: TypeAlias = Callable[[Plays, int], Floats]
"""(plays, seed) → one number per row."""


# ---------------------------------------------------------------------------------------------
# Credit


def observed(plays: Plays, seed: int) -> Floats:
    """The outcome against the others of the group (RLOO): what was seen, no branch."""
    return rloo(plays.steps).values


def branched(plays: Plays, seed: int) -> Floats:
    """Take it now against declining it now, one continuation of each, by the policy's chances."""
    rerun = Rerun(plays)
    return coma(plays.steps, replay=rerun, downstream="anew", n=1, seed=seed).values


def centred(steps: Steps) -> Credit:
    """Every reward less the mean reward of its turn index, over the rollouts of the group that got
    that far, summed from the turn on. Who stops early is never charged for turns it did not take.
    """
    key = groups.pair(steps.group, steps.step)
    n = int(key.max(initial=-1)) + 1
    mean = groups.total(key, steps.reward, n) / np.maximum(groups.count(key, n), 1)
    left = steps.reward - mean[key]
    total = np.cumsum(left[::-1])[::-1]
    last = np.flatnonzero(np.append(np.diff(steps.rollout), 1))
    end = last[np.searchsorted(last, np.arange(len(steps)))]
    after = np.append(total, 0.0)[end + 1]
    return Credit(total - after, estimand="outcome")


def per_turn(plays: Plays, seed: int) -> Floats:
    """`centred`, as an arm."""
    return centred(plays.steps).values


class Multiplier:
    """A controller by policy gradient that is paid for success alone and kept to a mean cost.

        A = RLOO of (success − λ·cost),  λ ← max(0, λ + rate·(mean cost − budget))

    Source: the form of arXiv:2605.08686; rate and budget are ours.
    """

    def __init__(self, cost: Floats, budget: float, rate: float = 0.5) -> None:
        self.cost, self.budget, self.rate, self.weight = cost, budget, rate, 0.0

    def __call__(self, plays: Plays, seed: int) -> Floats:
        """The advantage, and a step of the multiplier."""
        steps, n = plays.steps, plays.steps.n_rollouts
        cost = groups.total(steps.rollout, self.cost[plays.state, plays.action], n)
        success = groups.total(steps.rollout, steps.reward, n) + cost
        priced = (success - self.weight * cost)[steps.rollout]
        self.weight = max(0.0, self.weight + self.rate * (float(cost.mean()) - self.budget))
        return rloo(Steps.from_columns(group=steps.group, rollout=steps.rollout, outcome=priced,
                                       mask=steps.mask)).values  # fmt: skip


def learned(
    game: Game, allowed: Bools, credit: Advantage, *, seed: int, steps: int, lr: float = 5.0
) -> Floats:
    """(anchors, actions) the rule after `steps` updates from an even one, by games played anew."""
    logits = np.where(allowed, 0.0, -np.inf)
    for step in range(steps):
        now = ruled(game, softmax(logits))
        plays = play(now, groups=GROUPS, rollouts=ROLLOUTS, seed=seed * 10_000 + step)
        slope = gradient(plays, credit(plays, step))[: len(logits), : logits.shape[1]]
        logits = logits + np.where(allowed, lr * slope, 0.0)
    return softmax(logits)


# ---------------------------------------------------------------------------------------------
# Pandora's box


def pandora(seed: int, boxes: int = 3) -> tuple[Game, Bools, Floats]:
    """Boxes that cost something to open and hold a prize or nothing; whoever stops keeps the best.

    Returns:
        The game, what may be done in each state, (states, boxes + 1), and Weitzman's index rule:
        open the box of the largest reservation value σ, p(v − σ) = c, until none is above the best
        prize so far. It is optimal (Weitzman, 1979, Econometrica 47).
    """
    rng = np.random.default_rng([seed, 31])
    prize, chance = rng.uniform(0.5, 2.0, boxes), rng.uniform(0.2, 0.8, boxes)
    cost = prize * chance * rng.uniform(0.2, 0.9, boxes)
    worth = prize - cost / chance
    states = [(opened, best) for opened in range(1 << boxes) for best in range(-1, boxes)
              if best < 0 or opened >> best & 1]  # fmt: skip
    at = {state: number for number, state in enumerate(states)}
    draws = [
        (s, box) for s in range(len(states)) for box in range(boxes) if not states[s][0] >> box & 1
    ]
    size, width = len(states) + len(draws), boxes + 1
    reward, follows = np.zeros((size, width)), np.full((size, width), -1)
    allowed, index = np.zeros((2, len(states), width))
    policy = np.zeros((size, width))
    for number, (opened, best) in enumerate(states):
        held = prize[best] if best >= 0 else 0.0
        reward[number, boxes] = held
        allowed[number, boxes] = 1.0
        closed = [box for box in range(boxes) if not opened >> box & 1]
        allowed[number, closed] = 1.0
        top = max(closed, key=lambda box: worth[box], default=boxes)
        index[number, top if top < boxes and worth[top] > held else boxes] = 1.0
    for number, (state, box) in enumerate(draws, len(states)):
        opened, best = states[state]
        reward[state, box], follows[state, box] = -cost[box], number
        better = box if best < 0 or prize[box] > prize[best] else best
        follows[number, :2] = at[opened | 1 << box, best], at[opened | 1 << box, better]
        policy[number, :2] = 1 - chance[box], chance[box]
    policy[: len(states)] = allowed / allowed.sum(axis=1, keepdims=True)
    nature = np.arange(len(states), size)
    agent = (np.arange(size) >= len(states)).astype(np.int64)
    game = Game(policy, np.arange(size), agent, reward, follows, np.zeros(1, dtype=np.int64),
                nature=nature)  # fmt: skip
    return game, allowed > 0, index


def boxes_rows(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Pandora's box: the index rule and a learned one against dynamic programming."""
    found = []
    for seed in range(seeds):
        game, allowed, index = pandora(seed)
        best = value(game, best_rule(game, allowed))
        even = value(game, allowed / allowed.sum(axis=1, keepdims=True))
        by_credit = [
            value(game, learned(game, allowed, credit, seed=seed, steps=steps, lr=4.0))
            for credit in (observed, branched)
        ]
        found.append([best, value(game, index), even, *by_credit])
    columns = np.array(found).T
    names = (BEST, "index rule", "even", "learned, observed credit", "learned, branch credit")
    return [{"rule": name, **_spread("value", column), **_spread("regret", columns[0] - column)}
            for name, column in zip(names, columns, strict=True)]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The ledger


def told(anchor: str) -> int:
    """How many reports a coordinator has at an anchor of the ledger."""
    names = anchor.rpartition("told by ")[2] if "told by " in anchor else "nobody"
    return 0 if names == "nobody" else len(names)


def spent(anchor: str, prices: Mapping[str, float]) -> float:
    """What has been spent at an anchor of the ledger, as far as it tells."""
    hired = anchor.split(": ")[1].split(",")[0]
    asked = anchor.partition("asked ")[2].partition(",")[0] or "nobody"
    count = [0 if names == "nobody" else len(names) for names in (hired, asked)]
    return count[0] * prices["spawn"] + count[1] * (prices["message"] + prices["read"])


_STOP: tuple[str, ...] = ("stop:lowest", "stop:sum", "stop:unknown")
"""Ways to stop, the better ones first."""


class Stepwise:
    """A coordinator that hires everybody, asks one after another, and may stop after any of them.

    It gives the two ways on even chances; a listing leaves that choice to be learned.
    """

    deterministic = True
    trainable = False

    def probs(self, observation: Observation, legal: Menu) -> Floats:
        """Even between the next researcher and the lowest of what there is."""
        labels = list(legal or {})
        hires = [label for label in labels if label.startswith("spawn")]
        asks = [label for label in labels if label.startswith("ask:") and "+" not in label][:1]
        stops = [label for label in _STOP if label in labels][:1]
        chosen = hires or asks + stops
        return np.array([(label in chosen) / len(chosen) for label in labels])

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """A draw by `probs`."""
        return Output(
            list((legal or {}).values())[draws.choice(self.probs(observation, legal).tolist())]
        )


def _reads(observation: Observation, menu: Menu) -> str:
    """A researcher that reads and tells what it read."""
    entries = menu or {}
    return entries.get("read") or entries.get("tell:exact") or next(iter(entries.values()))


READER = Scripted(_reads, "reads")

LADDER = {"researchers": 4, "redundancy": 4, "noise": 0.3, "spawn_cost": 0.02,
          "message_cost": 0.04, "read_cost": 0.04}  # fmt: skip
"""Four may read the one shard, one after another: a second reading pays, a third does not."""

LEDGERS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "as it comes": ({}, Softmax),
    "one after another": (LADDER, Stepwise),
}
"""Name → dials of `ledger-v0`, and the coordinator whose other choices stay as they are."""


def takes(verb: str, role: str, text: str) -> bool:
    """Whether a coordinator's turn takes a decision."""
    return role == "coordinator" and any(item.verb == verb for item in parse(text))


def decision(verb: str, ledger: str, tasks: int = 1) -> Listing:
    """A ledger in which one decision of the coordinator is to be learned."""
    dials, coordinator = LEDGERS[ledger]
    team = {"coordinator": coordinator(), "researcher": READER}
    return listed(make("ledger-v0", **dials), team, partial(takes, verb), tasks)


def scripted_rules(listing: Listing, prices: Mapping[str, float]) -> dict[str, Floats]:
    """Rules that nobody learned, by what an anchor tells."""
    tests: dict[str, Callable[[str], bool]] = {
        **{f"fixed cap, {k}": partial(_cap, k) for k in (1, 2, 3)},
        **{f"budget, {b:g}": partial(_over, b, prices) for b in (0.2, 0.4, 0.6)},
        "when verified by a second report": partial(_cap, 2),
        "never, until it must": lambda anchor: False,
    }
    return {
        name: np.array([[1.0 - stops(a), float(stops(a))] for a in listing.anchors])
        for name, stops in tests.items()
    }


def _cap(k: int, anchor: str) -> bool:
    return told(anchor) >= k


def _over(budget: float, prices: Mapping[str, float], anchor: str) -> bool:
    return spent(anchor, prices) >= budget - 1e-9


def controllers(ledger: str, seeds: int, steps: int) -> list[dict[str, Any]]:
    """Every way to decide when to stop, as regret to the best rule."""
    listing = decision("stop", ledger)
    game, n = listing.game, len(listing.anchors)
    allowed = np.ones((n, 2), dtype=bool)
    best = best_rule(game, allowed)
    top = value(game, best)
    mean_cost = _mean_cost(listing, best)
    env: Any = make("ledger-v0", **LEDGERS[ledger][0])
    rows = [_row(ledger, BEST, [top], top)]
    rows += [_row(ledger, name, [value(game, rule)], top)
             for name, rule in scripted_rules(listing, env.costs).items()]  # fmt: skip
    arms: dict[str, Callable[[], Advantage]] = {
        "learned, observed credit": lambda: observed,
        "learned, branch credit": lambda: branched,
        "learned, cost multiplier": lambda: Multiplier(listing.cost, mean_cost),
        "learned, centred per turn (biased)": lambda: per_turn,
    }
    for name, arm in arms.items():
        found = [value(game, learned(game, allowed, arm(), seed=seed, steps=steps))
                 for seed in range(seeds)]  # fmt: skip
        rows.append(_row(ledger, name, found, top))
    return rows


def _mean_cost(listing: Listing, rule: Floats) -> float:
    """What a rule spends, on average."""
    paid = replace(ruled(listing.game, rule), reward=listing.cost)
    return value(paid, rule)


def _row(ledger: str, rule: str, found: Sequence[float], top: float) -> dict[str, Any]:
    values = np.array(found)
    return {
        "ledger": ledger,
        "rule": rule,
        **_spread("value", values),
        **_spread("regret", top - values),
    }


def _spread(name: str, x: Floats) -> dict[str, float]:
    """Mean, and half of a 95 % interval over seeds; NaN for one."""
    half = 1.96 * float(x.std(ddof=1)) / len(x) ** 0.5 if len(x) > 1 else float("nan")
    return {name: float(x.mean()), f"{name}_±": half}


def five(seeds: int, steps: int) -> list[dict[str, Any]]:
    """Each of the five decisions by itself, learned, against its exact best."""
    rows = []
    for verb in DECISIONS:
        listing = decision(verb, "as it comes")
        allowed = np.ones((len(listing.anchors), 2), dtype=bool)
        top = value(listing.game, best_rule(listing.game, allowed))
        row: dict[str, Any] = {"decision": verb, "anchors": len(allowed), "best": top,
                               "even": value(listing.game, allowed / 2)}  # fmt: skip
        for name, credit in (("observed", observed), ("branches", branched)):
            learn = partial(learned, listing.game, allowed, credit, steps=steps)
            found = [value(listing.game, learn(seed=seed)) for seed in range(seeds)]
            row |= _spread(f"regret_{name}", top - np.array(found))
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------
# A baseline that is biased once stopping is an act


_TURNS: dict[str, dict[str, Any]] = {
    "each turn pays": {"pay": 1.0, "spread": 0.0},
    "each turn costs": {},
}


def baselines(seeds: int) -> list[dict[str, Any]]:
    """Exact expectation of the step against the policy gradient, where stopping is an act."""
    rows = []
    for name, dials in _TURNS.items():
        for label, method in (("RLOO", rloo), ("centred per turn", centred)):
            found = []
            for seed in range(seeds):
                game = deal("T16", seed=seed, turns=3, **dials)
                step, exact = expected_gradient(game, method, 3), policy_gradient(game)
                size = float(np.linalg.norm(step) * np.linalg.norm(exact))
                found.append(float(np.sum(step * exact)) / size if size > 1e-12 else 0.0)
            row = {"game": name, "baseline": label, **_spread("cosine", np.array(found))}
            rows.append(row | {"worst": min(found)})
    return rows


# ---------------------------------------------------------------------------------------------
# The page


def stopping(out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """When to stop: controllers as regret, the five decisions one by one, Pandora's box, a bias."""
    seeds, steps = (3, 60) if quick else (16, 200)
    parts: list[Callable[[], list[dict[str, Any]]]] = [
        partial(boxes_rows, 4 if quick else 20, steps),
        partial(five, seeds, steps),
        partial(baselines, 4 if quick else 12),
        *(partial(controllers, ledger, seeds, steps) for ledger in LEDGERS),
    ]
    box, each, bias, *ledgers = [part() for part in progress(parts, "parts")]
    stops = [row for ledger in ledgers for row in ledger]
    size = (
        f"{seeds} seeds, {steps} updates of {GROUPS} groups of {ROLLOUTS} runs; "
        "± is half a 95 % interval over seeds."
    )
    sections = [
        Section("When to stop in ledger-v0", _STOPS + size, stops),
        Section("The five decisions, one by one", _FIVE + size, each),
        Section("Pandora's box", _BOX, box),
        Section("A baseline that learned stopping breaks", _BIAS, bias),
    ]
    return Page(page("When to stop", sections), [*stops, *each, *box, *bias])


_STOPS = (
    "Value is the expected outcome, costs taken off, exact: every run that can happen is listed. "
    "Regret is what a rule loses against the best one for what the coordinator can see, found by "
    "dynamic programming. Researchers read and tell the truth as they read it. `as it comes` are "
    "the default dials, where the coordinator's other choices stay even; in `one after another` it "
    "hires four readers of one shard and asks them in turn. Caps and budgets are not learned; the "
    "cost multiplier is told what the best rule spends. "
)
_FIVE = (
    "Each decision of the coordinator is a choice to take it or not, learned by itself while all "
    "other choices stay even; `best` is the exact best rule for it, `even` where learning begins. "
)
_BOX = (
    "Three boxes cost something to open and hold a prize or nothing; whoever stops keeps the best. "
    "Weitzman's index rule is known to be optimal, and is: its regret is 0. Mean over draws of the "
    "boxes; ± is half a 95 % interval."
)
_BIAS = (
    "Cosine of the exact expected step and the exact policy gradient on T16, groups of three runs. "
    "RLOO compares whole runs. Rewards centred per turn index are compared with those of runs that "
    "got as far, so that what it is worth to get there is lost. A step of length 0 has cosine 0."
)
