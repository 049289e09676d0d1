"""Exact credit against a slow reference in fractions, against dice, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import permutations as all_orders

import numpy as np
import pytest

from counterpoint.games import chain, deal, every, play, proxies, truth
from counterpoint.spelling import Refused
from in_fractions import Reference, paths

# ---------------------------------------------------------------------------------------------
# In fractions

TEAMS = {
    "T1": deal("T1", agents=3, seed=1),
    "T2": deal("T2", agents=3, seed=2),
    "T3": deal("T3", agents=3, seed=3),
    "T4": deal("T4", agents=3, dep=1.0, seed=4),
    "T5": deal("T5", agents=3, actions=3, dep=1.0, seed=5),
    "T6": deal("T6", agents=3, seed=6),
    "T8": deal("T8", agents=3, seed=8),
}
MORE = {
    "T6, hidden": deal("T6", agents=2, hidden=0.3, seed=6),
    "T10": deal("T10"),
    "T12": deal("T12", agents=3, seed=12),
    "T13, chain": deal("T13", agents=4, topology="chain", seed=13),
    "T13, star": deal("T13", agents=4, topology="star", seed=13),
    "T13, tree": deal("T13", agents=4, topology="tree", seed=13),
    "T14": deal("T14", agents=2, actions=2, seed=14),
    "T17": deal("T17", agents=3, dep=1.0, seed=17),
    "contexts": deal("T2", agents=2, contexts=3, seed=7),
}
ALL = {**TEAMS, **MORE}
on_teams = pytest.mark.parametrize("name", TEAMS)
on_all = pytest.mark.parametrize("name", ALL)

SHAPLEY = {
    "shapley:frozen": (True, False),
    "shapley:replayed": (True, True),
    "shapley:resampled": (False, False),
}


@on_teams
def test_seqau_telescopes_in_fractions(name):
    """Σ Q(h, a) − V(h) = R − V(h₀) exactly, for every play; ours is that to rounding."""
    game = TEAMS[name]
    slow, (plays, _) = Reference(game), every(game, 1)
    got = truth(plays).values
    for rows, path in paths(plays):
        parts = [slow.q(s)[a] - slow.value(s) for s, a in path]
        assert sum(parts) == slow.paid(path) - slow.value(0)
        np.testing.assert_allclose(got[rows], [float(x) for x in parts], atol=1e-12)


@on_teams
@pytest.mark.parametrize("estimand", SHAPLEY)
def test_shapley_is_efficient_in_fractions(name, estimand):
    """Σ φ = R − R(all null), or R − V(h₀) where the absent are resampled, for every play."""
    game = TEAMS[name]
    slow, (plays, _) = Reference(game), every(game, 1)
    got = truth(plays, estimand).values
    idle, state = Fraction(0), 0
    while state >= 0:
        idle, state = idle + slow.reward[state][0], slow.next[state][0]
    for rows, path in paths(plays):
        phi = slow.shapley(path, *SHAPLEY[estimand])
        nobody = slow.value(0) if estimand == "shapley:resampled" else idle
        assert sum(phi.values()) == slow.paid(path) - nobody
        np.testing.assert_allclose(got[rows], [float(phi[i]) for i in range(3)], atol=1e-12)


@on_all
@pytest.mark.parametrize("estimand", SHAPLEY)
def test_shapley_with_nature_contexts_and_topologies(name, estimand):
    """The mean over all orders in fractions, where nature moves and where acts are unseen."""
    game = ALL[name]
    slow, plays = Reference(game), play(game, groups=6, rollouts=2, seed=1)
    got = truth(plays, estimand).values
    for rows, path in paths(plays):
        phi = slow.shapley(path, *SHAPLEY[estimand])
        want = [np.nan if s in slow.nature else float(phi[slow.agent[s]]) for s, _ in path]
        np.testing.assert_allclose(got[rows], want, atol=1e-12)


@on_all
def test_one_act_changed(name):
    """coma, removal:frozen and removal:replayed, from their definitions in fractions."""
    game = ALL[name]
    slow, plays = Reference(game), play(game, groups=6, rollouts=3, seed=2)
    ways = {
        "coma": slow.coma,
        "removal:frozen": lambda path, t: slow.removal(path, t, False),
        "removal:replayed": lambda path, t: slow.removal(path, t, True),
    }
    for estimand, way in ways.items():
        got = truth(plays, estimand).values
        for rows, path in paths(plays):
            trained = [i for i, (s, _) in enumerate(path) if s not in slow.nature]
            want = [float(way(path, i)) for i in trained]
            np.testing.assert_allclose(got[rows][trained], want, atol=1e-12)
            assert np.isnan(np.delete(got[rows], trained)).all()


# ---------------------------------------------------------------------------------------------
# By sampling


def continued(game, path, absent, null, answers, n, rng, turn=0, state=None):
    """N returns from a turn on, played out act by act with dice; a turn is one level of a chain."""
    state = np.full(n, path[0][0] if state is None else state)
    total = np.zeros(n)
    for i in range(turn, len(path)):
        then, act = path[i]
        agent = game.agent[state[0]]
        dice = np.sum(
            rng.random(n)[:, None] >= np.cumsum(game.probability[state], axis=1)[:, :-1], axis=1
        )
        if agent in absent:
            acts = np.zeros(n, dtype=int) if null else dice
        else:
            moved = game.anchor[state] != game.anchor[then]
            acts = np.where(moved & answers, dice, act)
        total += game.reward[state, acts]
        state = game.next[state, acts]
    return total


@pytest.mark.slow
def test_sampling_agrees_on_two_hundred_random_games():
    """In each of 200 games one play's removal:replayed of every act, and shapley:replayed and
    shapley:resampled of every agent, are within 4 standard errors of 1,000 draws, and the squared
    miss is 1 on average: the errors are what they are said to be.

    A branch of chance 9/n stays unseen once in e⁹ times, and is in no standard error then; it moves
    the mean by 9/n of the range of outcomes.
    """
    rng, missed, n = np.random.default_rng(0), defaultdict(list), 1000
    for seed in range(200):
        game = deal("T17", agents=3, dep=1.0, seed=seed)
        plays = play(game, groups=1, rollouts=1, seed=seed)
        ((_, path),) = paths(plays)
        last = game.reward[game.next < 0]
        paid, span = plays.steps.outcome[0], last.max() - last.min()
        for t, (state, _) in enumerate(path[:-1]):
            other = continued(game, path, (), True, True, n, rng, t + 1, game.next[state, 0])
            exact = truth(plays, "removal:replayed").values[t]
            missed["removal:replayed"].append(((paid - other) / span, exact / span))
        for estimand in ("shapley:replayed", "shapley:resampled"):
            null, answers = SHAPLEY[estimand]
            drawn = np.zeros((3, n))
            for order in all_orders(range(3)):
                gone = [set(order[i:]) for i in range(4)]
                worth = [continued(game, path, who, null, answers, n, rng) for who in gone]
                drawn[list(order)] += np.diff(worth, axis=0) / 6
            for sample, exact in zip(drawn, truth(plays, estimand).values, strict=True):
                missed[estimand].append((sample / span, exact / span))
    for found in missed.values():
        sample = np.array([x for x, _ in found])
        error = sample.std(axis=1, ddof=1) / np.sqrt(n)
        off = sample.mean(axis=1) - [exact for _, exact in found]
        assert np.all(np.abs(off) < 4 * error + 9 / n)
        plain = error > 0.05 / np.sqrt(n)  # no rare branch decides
        assert plain.sum() > 100
        assert np.mean((off[plain] / error[plain]) ** 2) == pytest.approx(1, abs=0.25)


# ---------------------------------------------------------------------------------------------
# Odd games and refusals


def test_stopping_can_be_removed_and_answered():
    """T16: stopping instead of going on cuts the play short, which every downstream allows.

    Two turns, go on then stop: R = 2·pay + prize₁, removed at turn 0 it is pay + prize₀.
    """
    game = deal("T16", turns=3, seed=1)
    plays, _ = every(game, 1)
    at = [i for i, (_, path) in enumerate(paths(plays)) if [a for _, a in path] == [1, 0]]
    rows = np.flatnonzero(plays.steps.rollout == at[0])
    want = game.reward[0, 1] + game.reward[1, 0] - game.reward[0, 0]
    for removal in ("removal:frozen", "removal:replayed"):
        np.testing.assert_allclose(truth(plays, removal).values[rows], [want, 0], atol=1e-12)


PLAYS = {name: play(deal(name), groups=2, rollouts=4) for name in ("T2", "T16")}
SHORT = play(deal("T16", turns=2), groups=2, rollouts=4)
SIXTEEN = chain(np.zeros((2,) * 16), np.zeros((16, 2)))
REFUSED = {
    "unknown estimand": (lambda: truth(PLAYS["T2"], "shapley"), "no exact 'shapley' of a game"),
    "acts that nobody made": (lambda: truth(PLAYS["T16"], "coma"), "grows longer"),
    "the next play is another one": (lambda: truth(SHORT, "coma"), "grows longer"),
    "one agent, many turns": (
        lambda: truth(PLAYS["T16"], "shapley:frozen"),
        "an agent acts twice",
    ),
    "no failure": (lambda: truth(PLAYS["T2"], "first_error"), "not 0 and 1"),
    "too many agents": (
        lambda: truth(play(SIXTEEN, groups=1, rollouts=1000), "shapley:frozen"),
        "takes over 50000000 histories",
    ),
    "unknown proxy": (lambda: proxies(PLAYS["T2"], "charm"), "no proxy 'charm', only own"),
    "unknown topology": (lambda: deal("T13", topology="ring"), "one of chain, star, tree, dense"),
    "a number for a name": (lambda: deal("T3", rule=1), "one of and, or, xor"),
    "a name for a number": (lambda: deal("T3", spread="wide"), "it is a finite number"),
    "no chance": (lambda: deal("T6", coverage=0.9, hidden=0.5), "coverage ± hidden/2 is"),
    "no chance of repair": (lambda: deal("T12", repair=-0.1), "repair is -0.1"),
    "nature nowhere": (
        lambda: replace(deal("T0"), nature=np.array([1])),
        "a state that does not exist",
    ),
    "anchors without logits": (
        lambda: chain(np.eye(2), np.zeros((2, 2)), anchor=np.array([0, 1, 2])),
        "a row for each anchor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(case):
    """What has no exact answer is refused in words that say what and why."""
    action, sentence = REFUSED[case]
    with pytest.raises(Refused) as refusal:
        action()
    assert sentence in str(refusal.value)
