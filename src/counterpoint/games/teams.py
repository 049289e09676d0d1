"""Games of a team, one function for each kind: a source of random terms, and dials.

Every agent acts once, and act 0 is the null act: doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from counterpoint.games.chains import (
    chain,
    led_by_nature,
    level,
    log,
    prefixes,
    reacting,
    sees,
    sight,
)
from counterpoint.games.game import Game
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.spelling import Refused


def bandit(rng: np.random.Generator, *, actions: int = 3, noise: float = 0.0) -> Game:
    """T0: one agent acts once, R(a) ~ N(0, 1): the k-armed bandit of Sutton and Barto, ch. 2.

    ∂J/∂θ(a) = π(a)·(R(a) − V). The expectation of an estimator can be written down by hand here.
    """
    prefixes(1, actions)
    return chain(rng.normal(size=actions), rng.normal(size=(1, actions)), noise)


# ---------------------------------------------------------------------------------------------
# What each does adds up


def additive(
    rng: np.random.Generator,
    *,
    agents: int = 4,
    actions: int = 3,
    dep: float = 0.0,
    spread: float = 1.0,
    noise: float = 0.0,
    topology: str = "dense",
) -> Game:
    """T1 (dep 0) and T2 (dep 1): R = Σ_i f_i(a_i), f_i ~ N(0, 1), f_i(0) = 0 for the null act.

        π_i(a | h) ∝ exp(spread·own_i(a) + dep·react_h(a)),  own, react ~ N(0, 1)

    With dep 0 the agents see nothing and seqau = f_i(a_i) − E f_i. With dep > 0 they see what the
    topology shows them, and an act also earns what it makes later agents do. T9 is T1 beside
    proxies that say nothing (`proxies`), T13 has 2 to 16 agents in a chain, star, tree or dense
    graph, T15 an outcome with noise. Source: the additive team of difference rewards (Wolpert and
    Tumer, Advances in Complex Systems 4, 2001), in sequence.
    """
    prefixes(agents, actions)
    part = _parts(rng, agents, actions)
    logits, anchor = reacting(rng, sees(agents, topology), actions, dep, spread)
    return chain(reduce(np.add.outer, part), logits, noise, anchor)


def dummy(
    rng: np.random.Generator,
    *,
    agents: int = 3,
    actions: int = 3,
    dep: float = 1.0,
    noise: float = 0.0,
) -> Game:
    """T8: an additive team whose agent number agents // 2 earns nothing and is seen by nobody.

    Its credit is 0 for every estimand that looks at what an act changes.
    """
    prefixes(agents, actions)
    idle = agents // 2
    part = _parts(rng, agents, actions)
    part[idle] = 0.0
    seen = sees(agents, "dense")
    seen[:, idle] = False
    logits, anchor = reacting(rng, seen, actions, dep)
    return chain(reduce(np.add.outer, part), logits, noise, anchor)


def pairwise(
    rng: np.random.Generator,
    *,
    agents: int = 4,
    actions: int = 3,
    dep: float = 0.0,
    strength: float = 1.0,
    noise: float = 0.0,
) -> Game:
    """T17: R = Σ_i f_i(a_i) + strength·Σ_{i<j} g_ij(a_i, a_j), with 0 wherever an act is null.

    Interactions of two and no more: one pair of antithetic orders gives the Shapley values, an
    additive model misses g, a pairwise one is exact.
    """
    prefixes(agents, actions)
    part = _parts(rng, agents, actions)
    both = strength * rng.normal(size=(agents, agents, actions, actions))
    both[:, :, 0] = both[:, :, :, 0] = 0.0
    acts = _acts(agents, actions)
    outcome = reduce(np.add.outer, part)
    for i in range(agents):
        for j in range(i + 1, agents):
            outcome = outcome + both[i, j, acts[i], acts[j]]
    logits, anchor = reacting(rng, sees(agents, "dense"), actions, dep)
    return chain(outcome, logits, noise, anchor)


def _parts(rng: np.random.Generator, agents: int, actions: int) -> Floats:
    """(agents, actions) what each act earns by itself; the null act nothing."""
    part = rng.normal(size=(agents, actions))
    part[:, 0] = 0.0
    return part


def _acts(agents: int, actions: int) -> Ints:
    """(agents, A, …, A) what each agent does in each joint act."""
    return np.indices((actions,) * agents)


# ---------------------------------------------------------------------------------------------
# Success and failure

RULES: dict[str, Callable[[Bools], npt.ArrayLike]] = {
    "and": lambda success: success.all(axis=0),
    "or": lambda success: success.any(axis=0),
    "xor": lambda success: success.sum(axis=0) % 2 == 1,
}
"""Whether the team succeeds: if all of its agents do, if one does, if an odd number does."""


def logic(
    rng: np.random.Generator,
    *,
    rule: str = "and",
    agents: int = 4,
    actions: int = 2,
    dep: float = 0.0,
    spread: float = 1.0,
    noise: float = 0.0,
) -> Game:
    """T3 (and), T4 (or), T5 (xor): R = 1 if the agents' successes make one of the team, else 0.

    An agent succeeds with act 1 and fails with any other. With two actions and dep 0 its chance is
    p_i = 1/(1 + exp(spread·(own_i(0) − own_i(1)))), own ~ N(0, 1), a fair coin where spread is 0.
    With AND the seqau of a success while all before succeeded is (1 − p_i)·Π_{j>i} p_j, that of
    the first failure −Π_{j≥i} p_j, and 0 for all that comes after it. OR is over-determined: when
    two succeeded, removing either changes nothing. XOR of fair coins has no additive part at all.
    """
    prefixes(agents, actions)
    outcome = np.asarray(RULES[rule](_acts(agents, actions) == 1), dtype=np.float64)
    logits, anchor = reacting(rng, sees(agents, "dense"), actions, dep, spread)
    return chain(outcome, logits, noise, anchor)


def relay(
    rng: np.random.Generator,
    *,
    agents: int = 4,
    error: float = 0.5,
    repair: float = 0.5,
    noise: float = 0.0,
) -> Game:
    """T12: one agent may make a decisive error, which later agents repair with a known chance.

    Acts: 0 passes on what came, 1 breaks it, 2 repairs it. One agent, drawn from all but the last,
    errs with chance `error`; nobody else ever does. Whoever finds the work broken repairs it with
    a chance h such that it ends up repaired with chance `repair`: 1 − (1 − h)^m = repair for the m
    agents after the error. R = 1 unless the work is broken at the end. The first error of a failed
    play is known exactly. Source: the decisive error of Zhang et al. (2025), arXiv:2505.00212, §3.

    Raises:
        Refused: a chance outside 0 … 1.
    """
    _chances(error=error, repair=repair)
    prefixes(agents, 3)
    culprit = int(rng.integers(max(agents - 1, 1)))
    hazard = 1 - (1 - repair) ** (1 / max(agents - 1 - culprit, 1))
    whole, broken = [np.array([False])], np.array([False])
    for _ in range(agents):
        broken = np.stack([broken, np.ones_like(broken), np.zeros_like(broken)], axis=1).reshape(-1)
        whole.append(broken)
    found = np.concatenate(whole[:-1])[:, None]
    policy = np.where(found, [1 - hazard, 0.0, hazard], [1.0, 0.0, 0.0])
    policy[level(agents, 3) == culprit] = [1 - error, error, 0.0]
    return chain((~broken).astype(np.float64).reshape((3,) * agents), log(policy), noise)


def gate(
    rng: np.random.Generator,
    *,
    agents: int = 3,
    cost: float = 0.3,
    coverage: float = 0.5,
    hidden: float = 0.0,
    noise: float = 0.0,
) -> Game:
    """T6: agent 0 spawns the others, or does not; each spawned worker costs, and one is enough.

        R = s + (1 − s)·[a worker succeeded] − cost·workers·[spawned] (+ u − ½)

    Agent 0 alone is worth s ~ U(0, ½) and spawns (act 1) with chance `coverage`; a worker succeeds
    (act 1) with chance p_i ~ U(.3, .9) if it was spawned, and idles for certain if not. The effect
    of spawning, (1 − s)(1 − Π(1 − p_i)) − cost·workers, changes its sign as the team grows. With
    coverage 0 or 1 a log holds one arm only.

    With `hidden` > 0 nature first draws u ∈ {0, 1}, a fair coin that agent 0 sees: it spawns with
    chance coverage ± hidden/2, and u − ½ is paid whatever anybody does. At coverage ½ inverse
    propensities with the marginal chance then see `hidden` more than the true effect, which with
    one agent, and so nobody to spawn, is 0.

    Raises:
        Refused: a chance outside 0 … 1.
    """
    prefixes(agents, 2)
    alone, chance = rng.uniform(0, 0.5), rng.uniform(0.3, 0.9, size=agents)
    acts = _acts(agents, 2)
    helped = acts[1:].any(axis=0) & (acts[0] == 1)
    outcome = alone + (1 - alone) * helped - cost * (agents - 1) * acts[0]
    spawned = np.array([coverage - hidden / 2, coverage + hidden / 2])
    _chances(coverage=coverage, **{"coverage ± hidden/2": spawned})
    works = [[1.0, 0.0], *([1 - p, p] for p in chance)]
    workers = np.array([works[i * s] for i in range(1, agents) for s in (0, 1)]).reshape(-1, 2)
    if not hidden:
        first = np.array([[1 - coverage, coverage]])
        anchor = sight(sees(agents, "star"), 2)
        return chain(outcome, log(np.concatenate([first, workers])), noise, anchor)
    first = np.stack([1 - spawned, spawned], axis=1)
    seen = np.zeros((agents + 1, agents + 1), dtype=bool)
    seen[1, 0], seen[2:, 1] = True, True
    policy = np.concatenate([[[0.5, 0.5]], first, workers])
    both = np.stack([outcome - 0.5, outcome + 0.5])
    return led_by_nature(chain(both, log(policy), noise, sight(seen, 2)))


def mediated(
    rng: np.random.Generator,
    *,
    direct: float = 0.5,
    onward: float = 0.5,
    react: float = 0.6,
    seen: float = 0.4,
    hidden: float = 1.0,
    noise: float = 0.0,
) -> Game:
    """T10: nature draws u, agent 0 sees it, agent 1 sees agent 0: a confounder and a mediator.

        R = direct·a₀ + onward·a₁ + hidden·u,  u a fair coin
        P(a₀ = 1 | u) = ½ + seen·(u − ½),  P(a₁ = 1 | a₀) = ½ + react·(a₀ − ½)

    Doing a₀ is worth direct + onward·react, of which onward·react goes through agent 1. Regressing
    R on a₀ alone gives that plus seen·hidden, the bias of the omitted u (δγ); regressing on both
    acts takes the mediated part out. Nothing is drawn: all contexts are the same. Source: Pearl
    (2009), Causality, §3.3.

    Raises:
        Refused: a chance outside 0 … 1.
    """
    u, first, second = _acts(3, 2)
    tilt = np.array([[-0.5], [0.5]])
    chance = np.concatenate([[[0.5]], 0.5 + seen * tilt, 0.5 + react * tilt])
    _chances(**{"½ ± seen/2 and ½ ± react/2": chance})
    policy = np.concatenate([1 - chance, chance], axis=1)
    outcome = direct * first + onward * second + hidden * u
    return led_by_nature(chain(outcome, log(policy), noise, sight(sees(3, "chain"), 2)))


def _chances(**named: float | Floats) -> None:
    for name, value in named.items():
        if not (np.min(value) >= 0 and np.max(value) <= 1):
            raise Refused(f"{name} is {np.round(value, 6).tolist()}; chances lie between 0 and 1")


# ---------------------------------------------------------------------------------------------
# Characteristic functions

FORMS: dict[str, tuple[int, Callable[[Ints], npt.ArrayLike]]] = {
    "glove": (3, lambda there: np.minimum(there[0], there[1] + there[2])),
    "airport": (4, lambda there: np.max(there.T * [1, 3, 6, 10], axis=-1).T),
    "majority": (3, lambda there: np.tensordot([2, 1, 1], there, 1) >= 3),
}
"""Players, and what (players, …) zeros and ones are worth."""


def cooperative(rng: np.random.Generator, *, form: str = "glove", noise: float = 0.0) -> Game:
    """T7: every agent joins (act 1) or stays away, a fair coin each; R = v(those who joined).

    Where all joined, the Shapley values with absent agents null and the rest frozen are those of
    the textbooks. glove: one left and two right gloves, a pair is worth 1: (2/3, 1/6, 1/6).
    airport: a runway for the largest of four aircraft that need 1, 3, 6 and 10:
    φ_i = Σ_{k≤i} (c_k − c_{k−1})/(n − k + 1) = (1/4, 11/12, 29/12, 77/12). majority: weights 2, 1
    and 1, quota 3: (2/3, 1/6, 1/6). Nothing is drawn: all contexts are the same. Sources: Shapley
    (1953); Littlechild and Owen (1973), Management Science 20; Shapley and Shubik (1954).
    """
    players, worth = FORMS[form]
    outcome = np.asarray(worth(_acts(players, 2)), dtype=np.float64)
    return chain(outcome, np.zeros((players, 2)), noise)


# ---------------------------------------------------------------------------------------------
# Rows that nobody trains


def interrupted(
    rng: np.random.Generator,
    *,
    agents: int = 3,
    actions: int = 3,
    dep: float = 1.0,
    longer: float = 0.5,
    noise: float = 0.0,
) -> Game:
    """T14: an additive team with one or two masked rows before every act but the first.

    They are nature's: what a tool answered, say, in a second row with chance `longer`. They pay
    nothing and change nothing, so plays differ in length and the credit of the agents' rows is
    that of the game without them.

    Raises:
        Refused: a chance outside 0 … 1.
    """
    _chances(longer=longer)
    prefixes(agents, actions)
    plain = additive(rng, agents=agents, actions=actions, dep=dep, noise=noise)
    states, anchors = len(plain.reward), len(plain.policy)
    inside = np.arange(1, states)
    once, twice = states + inside - 1, 2 * states - 1 + inside - 1
    answers = np.zeros((2, actions))
    answers[0, :2], answers[1, 0] = [1 - longer, longer], 1.0
    onward = np.repeat(inside[:, None], actions, axis=1)
    again = onward.copy()
    again[:, 1] = twice
    return replace(
        plain,
        policy=np.concatenate([plain.policy, answers]),
        anchor=np.concatenate([plain.anchor, np.repeat([anchors, anchors + 1], states - 1)]),
        agent=np.concatenate([plain.agent, np.full(2 * (states - 1), agents)]),
        reward=np.concatenate([plain.reward, np.zeros((2 * (states - 1), actions))]),
        next=np.concatenate([np.where(plain.next < 0, -1, plain.next + states - 1), again, onward]),
        nature=np.concatenate([once, twice]),
    )
