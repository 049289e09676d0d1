"""The games: their exact values against slower and independent ways to the same numbers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from counterpoint.games import (
    GAMES,
    Game,
    action_values,
    chain,
    deal,
    every,
    gradient,
    optimal_value,
    play,
    policy_gradient,
    truth,
    values,
)
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

# ---------------------------------------------------------------------------------------------
# The slow reference: conditional expectations over the joint law, in fractions


def rational_team(seed: int, agents: int = 3, actions: int = 3):
    """Outcomes and policies with rational numbers: {joint act: R}, {prefix: [π(a | prefix)]}."""
    rng = np.random.default_rng(seed)
    joint = list(product(range(actions), repeat=agents))
    outcome = {acts: Fraction(int(rng.integers(-9, 10)), 7) for acts in joint}
    prefixes = [p for i in range(agents) for p in product(range(actions), repeat=i)]
    odds = {p: [int(x) for x in rng.integers(1, 9, size=actions)] for p in prefixes}
    policy = {p: [Fraction(x, sum(row)) for x in row] for p, row in odds.items()}
    return outcome, policy


def expected(outcome, policy, prefix) -> Fraction:
    """E[R | prefix] = Σ P(acts) R(acts) ÷ Σ P(acts), over the joint acts that begin with prefix."""
    mass = total = Fraction(0)
    for acts, paid in outcome.items():
        if acts[: len(prefix)] == prefix:
            p = Fraction(1)
            for i, act in enumerate(acts):
                p *= policy[acts[:i]][act]
            mass, total = mass + p, total + p * paid
    return total / mass


def as_game(outcome, policy, agents: int = 3, actions: int = 3) -> Game:
    table = np.array([float(r) for r in outcome.values()]).reshape((actions,) * agents)
    return chain(table, np.log([[float(x) for x in row] for row in policy.values()]))


@pytest.mark.parametrize("seed", range(5))
def test_values_are_the_conditional_expectations_of_the_joint_law(seed):
    """V(h) and Q(h, a) of a chain are E[R | h] and E[R | h, a], computed in fractions."""
    outcome, policy = rational_team(seed)
    game = as_game(outcome, policy)
    for state, prefix in enumerate(policy):
        assert values(game)[state] == pytest.approx(
            float(expected(outcome, policy, prefix)), abs=1e-12
        )
        for act in range(3):
            want = expected(outcome, policy, (*prefix, act))
            assert action_values(game)[state, act] == pytest.approx(float(want), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_seqau_telescopes(seed):
    """Σ_i Q(h_i, a_i) − V(h_i) = R − V(h₀) for every joint act: exact in fractions, and ours."""
    outcome, policy = rational_team(seed)
    begin = expected(outcome, policy, ())
    for acts, paid in outcome.items():
        parts = [
            expected(outcome, policy, acts[: i + 1]) - expected(outcome, policy, acts[:i])
            for i in range(3)
        ]
        assert sum(parts) == paid - begin
    plays, _ = every(as_game(outcome, policy), 1)
    summed = np.bincount(plays.steps.rollout, truth(plays).values)
    ends = plays.steps.outcome[plays.steps.step == 0]
    np.testing.assert_allclose(summed, ends - float(begin), atol=1e-12)


def solve(a: list[list[Fraction]], b: list[Fraction]) -> list[Fraction]:
    """Gauss and Jordan on fractions."""
    rows = [[*line, right] for line, right in zip(a, b, strict=True)]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows]


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_loop_values_solve_the_linear_system(gamma):
    """On T11, V = (I − γP)⁻¹ r, solved in fractions from the game's own floats."""
    game = deal("T11", gamma=gamma, seed=3)
    n = len(game.reward)
    system = [[Fraction(int(i == j)) for j in range(n)] for i in range(n)]
    right = [Fraction(0)] * n
    for state, act in product(range(n), range(2)):
        p = Fraction(game.policy[state, act])
        right[state] += p * Fraction(game.reward[state, act])
        if game.next[state, act] >= 0:
            system[state][game.next[state, act]] -= Fraction(gamma) * p
    exact = [float(v) for v in solve(system, right)]
    np.testing.assert_allclose(values(game), exact, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------------------------------
# Every game of the table


def shifted(game: Game, anchor: int, action: int, by: float) -> Game:
    """The game with one logit of its policy moved."""
    odds = game.policy[anchor] * np.exp(by * (np.arange(game.policy.shape[1]) == action))
    policy = game.policy.copy()
    policy[anchor] = odds / odds.sum()
    return replace(game, policy=policy)


@pytest.mark.parametrize("name", GAMES)
def test_policy_gradient_is_the_slope_of_the_value(name):
    """∂J/∂θ by enumeration equals the central difference of mean V(h₀), two contexts at once; in
    what nature does it is 0.
    """
    game = deal(name, contexts=2, seed=5)
    exact = policy_gradient(game)
    trained = np.unique(game.anchor[game.trainable])
    assert np.all(exact[np.setdiff1d(game.anchor, trained)] == 0)
    for anchor, action in list(product(trained, range(exact.shape[1])))[::7]:
        up, down = (shifted(game, anchor, action, by) for by in (1e-5, -1e-5))
        slope = (values(up)[game.start].mean() - values(down)[game.start].mean()) / 2e-5
        assert exact[anchor, action] == pytest.approx(slope, abs=1e-8)
    assert np.abs(exact).max() > 0.01


@pytest.mark.parametrize("name", GAMES)
def test_sampled_returns_agree_with_the_exact_value(name):
    """In each of 200 contexts the mean return of 400 plays is within 4 standard errors of V(h₀)."""
    game = deal(name, contexts=200, noise=0.1)
    plays = play(game, groups=200, rollouts=400, seed=3)
    steps = plays.steps
    discounted = np.bincount(steps.rollout, steps.reward * game.gamma**steps.step)
    returns = discounted.reshape(200, 400)
    error = returns.std(axis=1, ddof=1) / np.sqrt(400)
    miss = np.abs(returns.mean(axis=1) - values(game)[game.start]) / error
    assert miss.max() < 4


@pytest.mark.parametrize("name", GAMES)
def test_plays_are_the_steps_that_the_checked_builder_makes(name):
    """The columns that `play` makes directly are those of `Steps.from_columns` from its labels."""
    steps = play(deal(name, contexts=3), groups=6, rollouts=4, seed=2).steps
    rows = range(len(steps))
    labels = {
        column: [steps.label(column, row) for row in rows]
        for column in ("group", "task", "rollout", "agent", "role", "anchor", "state_digest")
    }
    plain = {c: getattr(steps, c) for c in ("step", "reward", "value", "logprob", "mask")}
    again = Steps.from_columns(**labels, **plain)
    for column in ("group", "task", "rollout", "step", "outcome", "n_tokens", "mask", "env_step"):
        np.testing.assert_allclose(getattr(steps, column), getattr(again, column))
    np.testing.assert_array_equal(steps.order, np.arange(len(steps)))
    for column, texts in labels.items():
        assert [again.label(column, row) for row in rows] == texts
    assert (again.n_groups, again.n_rollouts) == (6, 24)


@pytest.mark.parametrize("name", GAMES)
def test_same_seed_same_plays(name):
    """A seed fixes every act and reward; another seed changes them."""
    game = deal(name, noise=0.5)
    one, two, other = (play(game, groups=20, rollouts=5, seed=s).steps for s in (7, 7, 8))
    np.testing.assert_array_equal(one.reward, two.reward)
    np.testing.assert_array_equal(one.anchor, two.anchor)
    assert not np.array_equal(one.outcome[:20], other.outcome[:20])


@pytest.mark.parametrize("name", GAMES)
def test_a_context_does_not_depend_on_how_many_there_are(name):
    """Context 1 of two is context 1 of three, and stands for itself in value and gradient."""
    two, three = (deal(name, contexts=n, seed=4) for n in (2, 3))
    size, seen = two.start[1], len(two.policy) // 2
    np.testing.assert_allclose(values(two), values(three)[: 2 * size], atol=1e-13)
    slope, more = policy_gradient(two), policy_gradient(three)
    np.testing.assert_allclose(3 * more[: 2 * seen], 2 * slope, atol=1e-13)


# ---------------------------------------------------------------------------------------------
# What the games say about credit


def test_an_additive_team_that_nobody_watches_pays_each_its_own_part():
    """On T1 seqau is f_i(a_i) − E f_i: what i adds, whatever the others do."""
    game = deal("T1", agents=3, actions=3, seed=1)
    plays, _ = every(game, 1)
    outcome = plays.steps.outcome[plays.steps.step == 0]
    acts = plays.action.reshape(-1, 3)
    paid = {tuple(a): r for a, r in zip(acts.tolist(), outcome, strict=True)}
    assert paid[0, 0, 0] == 0  # three null acts
    credit = truth(plays).values.reshape(-1, 3)
    for i in range(3):
        part = [paid[tuple(a if j == i else 0 for j in range(3))] for a in range(3)]
        own = part - game.policy[i] @ np.array(part)
        np.testing.assert_allclose(credit[:, i], own[acts[:, i]], atol=1e-12)


def test_reaction_adds_an_indirect_term():
    """On T2 the last agent still earns its own part, the first one more than that."""
    game = deal("T2", agents=2, seed=1)
    q = action_values(game)
    direct = game.reward[1:, 0] - game.reward[1, 0]  # f₁(a₁), read off at a₂ = null
    indirect = q[0] - q[0, 0] - direct
    assert np.abs(indirect).max() > 0.1
    np.testing.assert_allclose(np.diff(game.reward[1:] - game.reward[1:, :1], axis=0), 0, atol=1e-9)


def test_what_an_agent_cannot_see_is_not_in_its_anchor_credit():
    """Two fair coins that pay when equal: seqau of the second is ±½, given that it sees nothing 0.

    V = ½ at every prefix but the last, R ∈ {0, 1}.
    """
    game = chain(np.eye(2), np.zeros((2, 2)))
    plays, _ = every(game, 1)
    assert sorted(truth(plays).values) == [-0.5, -0.5, 0, 0, 0, 0, 0.5, 0.5]
    np.testing.assert_allclose(truth(plays, "anchor").values, 0)
    np.testing.assert_array_equal(plays.steps.anchor, plays.steps.agent)
    assert len(set(plays.steps.state_digest.tolist())) == 3


def test_states_that_look_alike_count_as_often_as_they_are_visited():
    """The first coin falls on 0 three times in four, so the second earns ¾ − ½ by playing 0."""
    game = chain(np.eye(2), np.log([[0.75, 0.25], [0.5, 0.5]]))
    plays, _ = every(game, 1)
    credit = dict(
        zip(zip(plays.state, plays.action, strict=True), truth(plays, "anchor").values, strict=True)
    )
    assert credit[1, 0] == credit[2, 0] == pytest.approx(0.25)
    assert credit[1, 1] == credit[2, 1] == pytest.approx(-0.25)


@pytest.mark.parametrize("name", ["T0", "T2", "T16", "T11"])
def test_anchor_credit_is_seqau_where_the_state_is_seen(name):
    """No two states look alike, so Q(o, a) − V(o) = Q(h, a) − V(h)."""
    plays = play(deal(name, contexts=2), groups=4, rollouts=6)
    np.testing.assert_allclose(truth(plays, "anchor").values, truth(plays).values, atol=1e-12)


def test_outcome_credit_counts_what_was_paid_before():
    """Three turns pay 1 each, the policy stops half the time: V(h₀) = 1 + ½ + ¼ = 1.75.

    In turn 0 stopping makes the outcome 1, going on 1 + 1.5; in turn 1 it makes 2, or 3; in turn 2
    it is 3 either way.
    """
    game = replace(deal("T16", turns=3, pay=1.0, spread=0.0), policy=np.full((3, 2), 0.5))
    plays, chance = every(game, 1)
    credit = truth(plays, "outcome").values + 1.75
    want = {(0, 0): 1, (0, 1): 2.5, (1, 0): 2, (1, 1): 3, (2, 0): 3, (2, 1): 3}
    rows = zip(plays.state.tolist(), plays.action.tolist(), strict=True)
    np.testing.assert_allclose(credit, [want[row] for row in rows])
    assert sorted(chance) == [0.125, 0.125, 0.25, 0.5]
    both = truth(plays, "outcome+anchor")
    np.testing.assert_allclose(
        both.values, truth(plays, "outcome").values + truth(plays, "anchor").values
    )
    assert both.estimand == "outcome+anchor"


@pytest.mark.parametrize("name", GAMES)
def test_the_last_act_settles_the_outcome(name):
    """On the last row of a play the exact outcome credit is R − V(h₀), both undiscounted."""
    game = deal(name, contexts=3, noise=0.0)
    plays = play(game, groups=6, rollouts=5)
    steps = plays.steps
    last = np.append(steps.rollout[1:] != steps.rollout[:-1], True)
    begin = values(replace(game, gamma=1.0))[game.start][steps.task]
    np.testing.assert_allclose(
        truth(plays, "outcome").values[last], (steps.outcome - begin)[last], atol=1e-12
    )


@pytest.mark.parametrize("name", GAMES)
def test_noise_sits_on_the_last_reward(name):
    """The same seed with and without noise gives the same acts; only last rewards differ."""
    quiet, loud = (play(deal(name, noise=x), groups=6, rollouts=5).steps for x in (0.0, 1.0))
    last = np.append(quiet.rollout[1:] != quiet.rollout[:-1], True)
    np.testing.assert_array_equal(quiet.anchor, loud.anchor)
    np.testing.assert_array_equal(quiet.reward != loud.reward, last)


def test_a_fair_walk_over_three_nodes_takes_twelve_moves():
    """On T11 the walk reflects at node 0: E₀ = N(N + 1) = 12 moves at .05 for a prize of 1."""
    game = replace(deal("T11", nodes=3, gamma=1.0), policy=np.full((3, 2), 0.5))
    assert values(game)[0] == pytest.approx(1 - 12 * 0.05, abs=1e-12)


def test_optimal_stopping_is_the_best_of_all_stopping_rules():
    """V*(0) on T16 is the largest value over all 2^turns deterministic rules."""
    game = deal("T16", turns=4, contexts=20, seed=2)
    rules = [np.eye(2)[list(rule) * 20] for rule in product((0, 1), repeat=4)]
    best = np.max([values(replace(game, policy=rule))[game.start] for rule in rules], axis=0)
    np.testing.assert_allclose(optimal_value(game)[game.start], best, atol=1e-12)
    assert np.all(optimal_value(game) >= values(game))


def test_the_first_and_the_last_stop():
    """Three turns that pay 2 each are all taken (6); when each costs 2, the first ends it (−2)."""
    assert optimal_value(deal("T16", turns=3, pay=2.0, spread=0.0))[0] == 6
    assert optimal_value(deal("T16", turns=3, pay=-2.0, spread=0.0))[0] == -2


def test_every_play_is_listed_once():
    """Two agents with three acts make nine plays and 81 pairs, whose probabilities sum to 1."""
    plays, chance = every(deal("T2", agents=2, contexts=2), 2)
    assert len(chance) == 2 * 81
    assert chance.sum() == pytest.approx(1, abs=1e-12)
    pairs = np.hstack([plays.state.reshape(-1, 4), plays.action.reshape(-1, 4)])
    assert len(np.unique(pairs, axis=0)) == 2 * 81
    logprob = np.bincount(plays.steps.group, plays.steps.logprob)
    np.testing.assert_allclose(np.exp(logprob) / 2, chance)


def test_what_was_never_credited_moves_nothing():
    """NaN and 0 leave the same gradient, which is that of the other rows."""
    plays = play(deal("T1"), groups=3, rollouts=2)
    some = np.arange(len(plays.steps), dtype=float)
    np.testing.assert_array_equal(
        gradient(plays, np.where(some < 9, np.nan, some)),
        gradient(plays, np.where(some < 9, 0.0, some)),
    )


def test_masked_rows_move_nothing():
    """On T14 credit that stands on nature's rows leaves the gradient of the agents' rows."""
    plays = play(deal("T14"), groups=3, rollouts=2)
    some = np.arange(len(plays.steps), dtype=float)
    np.testing.assert_array_equal(
        gradient(plays, some), gradient(plays, np.where(plays.steps.mask, some, 0.0))
    )


def test_large_games_are_enumerated():
    """Eight agents with four acts: 21,845 states, 65,536 outcomes, and Σ π V = V at the root."""
    game = deal("T2", agents=8, actions=4)
    assert len(values(game)) == (4**8 - 1) // 3
    assert np.sum(game.policy[0] * values(game)[1:5]) == pytest.approx(values(game)[0])


# ---------------------------------------------------------------------------------------------
# Refusals

REFUSED = {
    "unknown game": (lambda: deal("T99"), "no game 'T99'"),
    "unknown dial": (lambda: deal("T0", agents=3), "no dial 'agents'; it has actions, noise"),
    "no contexts": (lambda: deal("T0", contexts=0), "0 contexts"),
    "half an agent": (lambda: deal("T1", agents=2.5), "agents of game T1 is 2.5"),
    "no agent": (lambda: deal("T1", agents=0), "agents of game T1 is 0"),
    "one act": (lambda: deal("T0", actions=1), "two or more actions"),
    "infinite pay": (lambda: deal("T16", pay=np.inf), "pay of game T16 is inf"),
    "too many agents": (lambda: deal("T2", agents=9, actions=4), "349525 prefixes"),
    "too many acts": (lambda: deal("T0", actions=10**9), "1000000001 prefixes"),
    "unequal acts": (lambda: chain(np.zeros((2, 3)), np.zeros((2, 3))), "shape (2, 3)"),
    "no acts": (lambda: chain(np.array(1.0), np.zeros((1, 2))), "shape ()"),
    "odd logits": (lambda: chain(np.eye(2), np.zeros((4, 2))), "(2, 2), (3, 2) or a row"),
    "negative noise": (lambda: deal("T0", noise=-1.0), "noise is -1"),
    "gamma above 1": (lambda: deal("T11", gamma=1.5), "gamma is 1.5"),
    "no distribution": (
        lambda: replace(deal("T0"), policy=np.array([[0.5, 0.2, 0.2]])),
        "no probability distribution",
    ),
    "nowhere": (lambda: replace(deal("T0"), next=np.array([[-1, 1, -1]])), "does not exist"),
    "shapes": (lambda: replace(deal("T0"), next=np.array([[-1, -1]])), "next of shape (1, 2)"),
    "never ends": (
        lambda: replace(deal("T11"), policy=np.tile([0.0, 1.0], (4, 1))),
        "from state 0 the policy never reaches the end",
    ),
    "a loop that pays": (
        lambda: optimal_value(deal("T11", gamma=1.0, cost=-1.0)),
        "a loop pays without discount",
    ),
    "no groups": (lambda: play(deal("T0"), groups=0, rollouts=3), "0 groups of 3"),
    "no rollouts": (lambda: every(deal("T0"), 0), "groups of 0 rollouts"),
    "noise listed": (lambda: every(deal("T0", noise=1.0), 2), "set its noise to 0"),
    "loop listed": (lambda: every(deal("T11"), 1), "meet a state twice"),
    "too many plays": (lambda: every(deal("T0"), 11), "take 1948617 plays"),
    "unknown estimand": (
        lambda: truth(play(deal("T0"), groups=1, rollouts=1), "shapley"),
        "no exact 'shapley' of a game, only seqau, outcome, anchor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case):
    """What cannot be built, played or listed is refused in words that say what and why."""
    action, sentence = REFUSED[case]
    with pytest.raises(Refused) as refusal:
        action()
    assert sentence in str(refusal.value)
