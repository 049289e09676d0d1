"""What each game is there to show, by arithmetic on its rules."""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.coalitions import marginals, permutations, shapley_values
from counterpoint.credit import estimate
from counterpoint.games import (
    PROXIES,
    TRUTHS,
    action_values,
    deal,
    every,
    play,
    proxies,
    truth,
    values,
)
from counterpoint.steps import Steps
from in_fractions import one_play, paths

# ---------------------------------------------------------------------------------------------
# What the games say


TEXTBOOK = {
    "glove": [2 / 3, 1 / 6, 1 / 6],
    "airport": [1 / 4, 11 / 12, 29 / 12, 77 / 12],
    "majority": [2 / 3, 1 / 6, 1 / 6],
}


@pytest.mark.parametrize("form", TEXTBOOK)
def test_textbook_values(form):
    """T7: where all joined, the Shapley values of the glove, airport and majority games."""
    everybody = one_play(deal("T7", form=form), [1] * len(TEXTBOOK[form]))
    np.testing.assert_allclose(truth(everybody, "shapley:frozen").values, TEXTBOOK[form])


@pytest.mark.parametrize("agents", [2, 4])
@pytest.mark.parametrize("name", ["T3", "T4"])
def test_and_and_or_pay_every_success_the_same(name, agents):
    """Where all n succeeded, AND and OR pay 1/n each; what OR pays is none by removal."""
    all_in = one_play(deal(name, agents=agents), [1] * agents)
    np.testing.assert_allclose(truth(all_in, "shapley:frozen").values, 1 / agents)
    lone = 1.0 if name == "T3" else 0.0
    np.testing.assert_array_equal(truth(all_in, "removal:frozen").values, lone)


def test_over_determination():
    """T4: two succeeded where one is enough: removal 0 for both, Shapley ½; the idle third 0."""
    two = one_play(deal("T4", agents=3), [1, 0, 1])
    for removal in ("removal:frozen", "removal:replayed"):
        np.testing.assert_array_equal(truth(two, removal).values, 0)
    np.testing.assert_allclose(truth(two, "shapley:frozen").values, [0.5, 0, 0.5])


def test_and_blames_the_first_failure():
    """T3: (1 − p_i)Π_{j>i} p_j for a success while all before succeeded, −Π_{j≥i} p_j for the first
    failure, nothing afterwards; GRPO's outcome blames all four alike.
    """
    game = deal("T3", agents=4, seed=2)
    p = game.policy[:, 1]
    for acts in ([1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 1]):
        want, alive = [], True
        for i, success in enumerate(acts):
            later = np.prod(p[i + 1 :])
            want.append(alive * ((1 - p[i]) * later if success else -p[i] * later))
            alive = alive and success
        np.testing.assert_allclose(truth(one_play(game, acts)).values, want, atol=1e-14)


def test_a_dummy_earns_nothing_and_is_paid_by_its_group():
    """T8: agent 1 of 3 is 0 by every estimand that looks at what an act changes, though others
    react to each other; mean-only GRPO pays it like anybody, and removal that draws everything
    anew pays it for the luck of those who come later.
    """
    game = deal("T8", agents=3, contexts=4, seed=3)
    plays = play(game, groups=8, rollouts=8)
    idle = plays.steps.agent == 1
    for estimand in set(TRUTHS) - {"outcome", "first_error", "removal:anew"}:
        credit = truth(plays, estimand).values
        np.testing.assert_allclose(credit[idle], 0, atol=1e-12)
        assert np.abs(credit[~idle]).max() > 0.5
    paid = estimate("grpo", plays.steps, normalize_std=False).values
    np.testing.assert_array_equal(paid[idle], paid[plays.steps.agent == 0])
    assert np.abs(paid[idle]).mean() > 0.3


def test_xor_has_no_additive_part():
    """T5 with fair coins: least squares of R on all acts explains nothing; seqau falls on the last.

    Before the last act success is ½ whatever was done, so only the last act settles it.
    """
    plays, _ = every(deal("T5", agents=3, spread=0.0), 1)
    acts = plays.action.reshape(-1, 3)
    outcome = plays.steps.outcome[::3]
    fit = np.linalg.lstsq(np.column_stack([np.ones(8), acts]), outcome, rcond=None)[0]
    np.testing.assert_allclose(fit, [0.5, 0, 0, 0], atol=1e-12)
    credit = truth(plays).values.reshape(-1, 3)
    np.testing.assert_allclose(credit[:, :2], 0, atol=1e-12)
    np.testing.assert_allclose(np.abs(credit[:, 2]), 0.5)


def test_nobody_sees_so_nobody_answers():
    """Where agents see nothing, replaying after a change is keeping everything else as it was."""
    plays = play(deal("T17", dep=0.0), groups=5, rollouts=4)
    for estimand in ("removal", "shapley"):
        frozen, replayed = (truth(plays, f"{estimand}:{d}").values for d in ("frozen", "replayed"))
        np.testing.assert_allclose(replayed, frozen, atol=1e-12)


def test_what_a_replay_says_of_an_act_on_average():
    """E[removal | h, a] = Q(h, a) − Q(h, null), replayed or anew: the luck of later agents averages
    out. Replaying has less of it.
    """
    game = deal("T13", agents=3, actions=2, topology="chain", seed=1)
    plays, chance = every(game, 1)
    weight = chance[plays.steps.group]
    key = plays.state * 2 + plays.action
    q = action_values(game)
    want = q[plays.state, plays.action] - q[plays.state, 0]
    spread = {}
    for downstream in ("replayed", "anew"):
        credit = truth(plays, f"removal:{downstream}").values
        mean = np.bincount(key, credit * weight) / np.bincount(key, weight)
        np.testing.assert_allclose(mean[key], want, atol=1e-12)
        spread[downstream] = weight @ (credit - want) ** 2
    assert spread["replayed"] < 0.8 * spread["anew"]


def test_coma_sums_to_zero_over_a_policy_and_not_over_a_team():
    """Σ_a π(a | h) coma(a, others fixed) = 0; given h alone its mean is not, once others react."""
    game = deal("T5", agents=2, actions=3, dep=1.0, seed=1)
    plays, chance = every(game, 1)
    first = plays.steps.step == 0
    one, two = plays.action.reshape(-1, 2).T
    credit = truth(plays, "coma").values[first]
    fixed = np.bincount(two, game.policy[0, one] * credit)
    np.testing.assert_allclose(fixed, [0, 0, 0], atol=1e-12)
    assert abs(chance @ credit) > 0.04
    assert chance @ truth(plays).values[first] == pytest.approx(0, abs=1e-12)


# ---------------------------------------------------------------------------------------------
# Spawning, confounding, mediation


def spawned(game):
    """Every play of a spawn game: did agent 0 spawn, R, logged chance of spawning, P(play)."""
    plays, chance = every(game, 1)
    at = (plays.steps.agent == 0) & plays.steps.mask
    e = game.probability[plays.state[at], 1]
    return plays.action[at], plays.steps.outcome[at], e, chance


def ips(s, outcome, e, chance):
    return float(chance @ (s * outcome / e - (1 - s) * outcome / (1 - e)))


@pytest.mark.parametrize("coverage", [0.2, 0.5, 0.9])
def test_spawn_effect_from_a_log_with_coverage(coverage):
    """T6: IPS, and DR with any model, have the exact effect Q(spawn) − Q(not) as expectation.

    With two workers it is (1 − s)(1 − (1 − p₁)(1 − p₂)) − 2·cost by hand.
    """
    game = deal("T6", agents=3, coverage=coverage, cost=0.2, seed=1)
    q = action_values(game)[0]
    effect = q[1] - q[0]
    fail = game.policy[[2, 4], 0]  # anchors: agent 0; agent 1 idle, spawned; agent 2 idle, spawned
    assert effect == pytest.approx((1 - q[0]) * (1 - fail.prod()) - 0.4, abs=1e-12)
    s, outcome, e, chance = spawned(game)
    assert ips(s, outcome, e, chance) == pytest.approx(effect, abs=1e-12)
    yes, no = 0.7, -0.3  # a model that is wrong
    residual = s * (outcome - yes) / e - (1 - s) * (outcome - no) / (1 - e)
    assert chance @ (yes - no + residual) == pytest.approx(effect, abs=1e-12)


def test_spawn_effect_changes_its_sign_with_the_team():
    """One worker pays on most draws, five never do: what is left to find grows less than cost."""
    effects = {}
    for agents in (2, 6):
        game = deal("T6", agents=agents, contexts=100)
        q = action_values(game)[game.start]
        effects[agents] = q[:, 1] - q[:, 0]
    assert np.median(effects[2]) > 0.05
    assert np.all(effects[6] < -0.4)


def test_always_spawning_leaves_one_arm():
    """With coverage 1 every play of the log spawned; there is nothing to compare with."""
    s, _, e, _ = spawned(deal("T6", coverage=1.0))
    assert set(s[e < 1]) == set()
    plays = play(deal("T6", coverage=1.0), groups=10, rollouts=8)
    assert set(plays.action[plays.steps.agent == 0]) == {1}


def test_hidden_confounder():
    """T6: spawning nobody changes nothing, yet IPS with the marginal chance says +.30; with the
    chance that was logged, given what the decider saw, it says 0.
    """
    game = deal("T6", agents=1, hidden=0.3, seed=4)
    s, outcome, e, chance = spawned(game)
    marginal = np.full(len(s), chance @ s)
    assert marginal[0] == pytest.approx(0.5)
    assert ips(s, outcome, marginal, chance) == pytest.approx(0.3, abs=1e-12)
    assert ips(s, outcome, e, chance) == pytest.approx(0, abs=1e-12)
    plays, _ = every(game, 1)
    np.testing.assert_allclose(truth(plays).values[plays.steps.mask], 0, atol=1e-12)


def test_regression_against_doing():
    """T10: R on a₀ gives the total effect plus δγ; on both acts the direct one plus a bias.

    direct + onward·react = .5 + .5·.6 = .8 by doing, and δγ = .4·1 more by observing. Without the
    confounder both regressions are right about what they hold fixed.
    """
    for hidden in (1.0, 0.0):
        game = deal("T10", hidden=hidden)
        plays, chance = every(game, 1)
        acts = plays.action.reshape(-1, 3).astype(float)
        outcome = plays.steps.outcome[::3]
        root = np.sqrt(chance)
        alone, both = (
            np.linalg.lstsq(root[:, None] * x, root * outcome, rcond=None)[0]
            for x in (
                np.column_stack([np.ones(8), acts[:, 1]]),
                np.column_stack([np.ones(8), acts[:, 1:]]),
            )
        )
        q = action_values(game)[1:3]  # what agent 0 can do, for either u
        np.testing.assert_allclose(q[:, 1] - q[:, 0], 0.8, atol=1e-12)
        assert alone[1] == pytest.approx(0.8 + 0.4 * hidden, abs=1e-12)
        assert both[1] == pytest.approx(0.5 + 0.4 * hidden, abs=1e-12)
        assert both[2] == pytest.approx(0.5, abs=1e-12)


# ---------------------------------------------------------------------------------------------
# Errors and repairs


@pytest.mark.parametrize("repair", [0.0, 0.3, 1.0])
def test_errors_are_repaired_as_often_as_said(repair):
    """T12: after the error V = ρ, and V(h₀) = 1 − error·(1 − ρ), whoever erred."""
    game = deal("T12", agents=5, error=0.4, repair=repair, contexts=20)
    np.testing.assert_allclose(values(game)[game.start], 1 - 0.4 * (1 - repair), atol=1e-12)
    seen = np.unique(every(game, 1)[0].state)
    erred = seen[game.probability[seen, 1] > 0]
    assert len(erred) == 20
    np.testing.assert_allclose(action_values(game)[erred, 1], repair, atol=1e-12)
    np.testing.assert_allclose(action_values(game)[erred, 0], 1, atol=1e-12)


def test_the_first_error_is_the_injected_one():
    """T12: on every failed play the error and nothing else is named; a success has none."""
    plays = play(deal("T12", agents=5, contexts=30), groups=30, rollouts=10)
    credit, failed = truth(plays, "first_error").values, plays.steps.outcome == 0
    assert 0.1 < failed.mean() < 0.5
    np.testing.assert_array_equal(np.isnan(credit), ~failed)
    np.testing.assert_array_equal(credit[failed], np.where(plays.action[failed] == 1, -1.0, 0.0))


def test_two_failures_have_no_first_error():
    """Of an AND with two failures no single change succeeds; with one failure that one does."""
    game = deal("T3", agents=3)
    got = truth(one_play(game, [1, 0, 0]), "first_error").values
    np.testing.assert_array_equal(got, [0, 0, 0])
    got = truth(one_play(game, [1, 0, 1]), "first_error").values
    np.testing.assert_array_equal(got, [0, -1, 0])


def test_binary_search_breaks_where_errors_are_repaired():
    """V along a play of T12 falls at the error and rises at the repair, so it is not monotone."""
    plays = play(deal("T12", agents=6, repair=0.8, contexts=20), groups=20, rollouts=20)
    for rows, path in paths(plays):
        acts = [a for _, a in path]
        if 1 in acts and 2 in acts:
            step = np.diff([*plays.steps.value[rows], plays.steps.outcome[rows[0]]])
            assert step.min() < -0.05
            assert step.max() > 0.05
            return
    raise AssertionError("no play was repaired")


# ---------------------------------------------------------------------------------------------
# Who sees whom


def test_topologies():
    """What agent 4 of 5 sees: a₃ in a chain, a₀ in a star, its parent a₁ in a tree."""
    seen = {"chain": [3], "star": [0], "tree": [1], "dense": [0, 1, 2, 3]}
    acts = np.array([[h >> 3 & 1, h >> 2 & 1, h >> 1 & 1, h & 1] for h in range(16)])
    for topology, others in seen.items():
        game = deal("T13", agents=5, topology=topology)
        last = np.flatnonzero(game.agent == 4)
        for one in range(16):
            for two in range(16):
                alike = np.array_equal(acts[one, others], acts[two, others])
                assert (game.anchor[last[one]] == game.anchor[last[two]]) == alike
        assert len(game.policy) == sum(2 ** min(i, len(others)) for i in range(5))


@pytest.mark.parametrize("topology", ["chain", "star", "tree", "dense"])
def test_sixteen_agents(topology):
    """131,071 prefixes: Σ seqau = R − V(h₀), also where most of them look alike."""
    game = deal("T13", agents=16, topology=topology)
    plays = play(game, groups=2, rollouts=3)
    summed = np.bincount(plays.steps.rollout, truth(plays).values)
    outcome = plays.steps.outcome[plays.steps.step == 0]
    np.testing.assert_allclose(summed, outcome - values(game)[0], atol=1e-10)


# ---------------------------------------------------------------------------------------------
# Rows that nobody trains


def test_masked_rows_change_no_truth():
    """T14: the agents' rows are credited as in the team without the masked ones."""
    plain, _ = every(deal("T2", agents=3, seed=9), 1)
    plays = play(deal("T14", agents=3, seed=9), groups=3, rollouts=8)
    assert {int(n) for n in np.bincount(plays.steps.rollout)} == {5, 6, 7}
    mask = plays.steps.mask
    for estimand in set(TRUTHS) - {"first_error"}:
        known = {tuple(path): truth(plain, estimand).values[rows] for rows, path in paths(plain)}
        got = truth(plays, estimand).values
        assert np.isnan(got[~mask]).all()
        for rows, _ in paths(plays):
            own = rows[mask[rows]]
            key = tuple(zip(plays.state[own].tolist(), plays.action[own].tolist(), strict=True))
            np.testing.assert_allclose(got[own], known[key], atol=1e-12)


def test_masked_rows_are_nature_s():
    """T14: in every context a row is masked where agent 3 of 0 … 2 moves; a second row follows a
    first one as often as said.
    """
    steps = play(deal("T14", agents=3, longer=0.2, contexts=3), groups=300, rollouts=8).steps
    np.testing.assert_array_equal(steps.mask, steps.agent != 3)
    pauses = 2 * 2400
    second = np.sum(~steps.mask) - pauses
    assert second == pytest.approx(0.2 * pauses, abs=4 * np.sqrt(pauses * 0.16))


METHODS = {
    "reinforce": {"baseline": "group"},
    "grpo": {},
    "gae": {"gamma": 1.0, "gae_lambda": 0.9},
    "gigpo": {"gamma": 1.0},
}


@pytest.mark.parametrize("name", METHODS)
def test_masked_rows_change_no_method(name):
    """T14: a method credits the agents' rows as if the others had been dropped from the table."""
    steps = play(deal("T14", contexts=5), groups=5, rollouts=8).steps
    kept = np.flatnonzero(steps.mask)
    labels = ("group", "rollout", "agent", "anchor")
    shorter = Steps.from_columns(
        **{c: [steps.label(c, row) for row in kept] for c in labels},
        **{c: getattr(steps, c)[kept] for c in ("step", "reward", "value")},
    )
    got = estimate(name, steps, **METHODS[name]).values
    np.testing.assert_allclose(
        got[kept], estimate(name, shorter, **METHODS[name]).values, atol=1e-12
    )
    assert np.isnan(got[~steps.mask]).all()


# ---------------------------------------------------------------------------------------------
# Noise, interactions, proxies


def test_noise_is_one_by_default_where_it_is_the_point():
    """T15 is T2 with σ = 1 on the outcome: the same truths, the outcomes off by that much."""
    loud, quiet = (play(deal(n, seed=1), groups=400, rollouts=8, seed=2) for n in ("T15", "T2"))
    for estimand in ("coma", "shapley:frozen", "removal:replayed", "outcome"):
        got, want = (truth(plays, estimand).values for plays in (loud, quiet))
        np.testing.assert_allclose(got, want, atol=1e-10)
    off = (loud.steps.outcome - quiet.steps.outcome)[loud.steps.step == 0]
    assert off.std() == pytest.approx(1, abs=4 / np.sqrt(2 * 3200))


def test_one_antithetic_pair_is_exact_where_agents_interact_in_pairs():
    """T17: v(S) of a play holds interactions of two only, T3's also those of three."""
    for name, exact in (("T17", True), ("T3", False)):
        game = deal(name, agents=3, seed=1)
        outcome = game.reward[game.next < 0].reshape((game.policy.shape[1],) * 3)
        worth = np.array([outcome[s & 1, s >> 1 & 1, s >> 2] for s in range(8)])
        pair = marginals(worth, permutations(3, 2, np.random.default_rng(0), antithetic=True))
        phi = truth(one_play(game, [1, 1, 1]), "shapley:frozen").values
        np.testing.assert_allclose(phi, shapley_values(worth, 3), atol=1e-12)
        assert (np.abs(pair.mean(axis=0) - phi).max() < 1e-12) == exact


def test_the_null_act_interacts_with_nobody():
    """T17: when one agent acts alone R does not depend on the strength; when two do it does."""
    tables = []
    for strength in (1.0, 5.0):
        game = deal("T17", agents=2, strength=strength, seed=3)
        tables.append(game.reward[game.next < 0].reshape(3, 3))
    weak, strong = tables
    assert weak[0, 0] == 0
    np.testing.assert_allclose(weak[0], strong[0])
    np.testing.assert_allclose(weak[:, 0], strong[:, 0])
    assert np.abs(weak[1:, 1:] - strong[1:, 1:]).min() > 0.05


def test_an_additive_model_misses_what_a_pairwise_one_explains():
    """T17: R on one-hot acts leaves a residual; on one-hot pairs of acts none."""
    plays, _ = every(deal("T17", agents=3, seed=2), 1)
    acts, outcome = plays.action.reshape(-1, 3), plays.steps.outcome[::3]
    hot = np.eye(3)[acts]
    single = hot.reshape(27, -1)
    pairs = [
        np.einsum("ra,rb->rab", hot[:, i], hot[:, j]).reshape(27, -1)
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    for design, left in ((single, True), (np.hstack(pairs), False)):
        fit = design @ np.linalg.lstsq(design, outcome, rcond=None)[0]
        assert (np.var(outcome - fit) > 0.05 * np.var(outcome)) == left
        assert left or np.allclose(fit, outcome, atol=1e-9)


def test_proxies():
    """T9: `own` is f_i(a_i) and explains R whole; the hacked three have nothing to do with it."""
    plays = play(deal("T9", seed=1), groups=500, rollouts=8)
    outcome = plays.steps.outcome[::4]
    np.testing.assert_allclose(proxies(plays, "own").reshape(-1, 4).sum(axis=1), outcome, atol=1e-9)
    for kind in ("self_report", "call_count", "padding"):
        q = proxies(plays, kind)
        np.testing.assert_array_equal(q, proxies(plays, kind))
        assert not np.array_equal(q, proxies(plays, kind, seed=1))
        r = [np.corrcoef(q.reshape(-1, 4)[:, i], outcome)[0, 1] for i in range(4)]
        assert np.abs(r).max() < 4 / np.sqrt(4000)
        assert q.std() > 0


def test_proxies_of_nature():
    """A row in which nature moved has no quality."""
    plays = play(deal("T14"), groups=2, rollouts=3)
    for kind in PROXIES:
        np.testing.assert_array_equal(np.isnan(proxies(plays, kind)), ~plays.steps.mask)
