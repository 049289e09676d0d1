"""Plays with a quality for every act."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counterpoint import cad_grpo
from counterpoint.games import deal, judged, play, proxies
from counterpoint.quality import CHECKS
from counterpoint.spelling import Refused


def of(name: str, **dials):
    return play(deal(name, contexts=3, seed=1, **dials), groups=3, rollouts=4, seed=2)


@pytest.mark.parametrize(
    ("kind", "dep", "behind"),
    [
        ("own", 0.0, np.eye(3)),
        ("own", 1.0, np.tril(np.ones((3, 3)))),
        ("mediated", 0.0, np.tril(np.ones((3, 3)))),
    ],
)
def test_a_quality_depends_on_whom_its_agent_could_see(kind, dep, behind):
    """Without reaction an act descends from its agent alone; with it, or where the proxy is taken
    of work that others began, from all that acted before.
    """
    quality = judged(of("T1", agents=3, dep=dep), kind).steps.quality
    for row, agent in enumerate(quality.agent):
        assert quality.depends[row].tolist() == behind[agent].astype(bool).tolist()


def test_mediated_counts_the_successes_so_far():
    """Three acts of which the first and the third succeed: 1, 1, 2."""
    plays = of("T3", agents=3)
    q = judged(plays, "mediated").steps.quality
    for rollout in range(4):
        done = (plays.action[plays.steps.rollout == rollout] == 1).cumsum()
        mine = q.value[q.rollout == rollout][np.argsort(q.agent[q.rollout == rollout])]
        assert mine.tolist() == done.tolist()


def test_the_error_is_in_standard_deviations_of_the_proxy():
    """With error 2 the spread of q grows by √(1 + 4)."""
    plays = play(deal("T1", contexts=50, seed=0), groups=50, rollouts=8, seed=0)
    exact, noisy = (np.std(judged(plays, "own", error=e).steps.quality.value) for e in (0, 2))
    assert noisy / exact == pytest.approx(5**0.5, rel=0.06)


def test_nature_has_no_quality_and_the_credit_runs():
    """On T10, whose first row is nature's, the two agents have a quality each and cad_grpo runs."""
    plays = judged(of("T10"), "success")
    assert set(plays.steps.quality.agent.tolist()) == {0, 1}
    assert cad_grpo(plays.steps).credited.sum() == plays.steps.mask.sum()


@pytest.mark.parametrize("dep", [0.0, 1.0])
def test_agents_that_act_by_turns_have_the_sum_of_their_acts(dep):
    """Four acts by two agents in turn: q is what the first and third earn alone, and with reaction
    each quality descends from both agents.
    """
    plain = of("T1", agents=4, dep=dep)
    game = replace(plain.game, agent=plain.game.agent % 2)
    plays = play(game, groups=3, rollouts=4, seed=2)
    each = proxies(plain, "own").reshape(-1, 2, 2).sum(axis=1)
    quality = judged(plays, "own").steps.quality
    for row in range(len(quality)):
        assert quality.value[row] == pytest.approx(each[quality.rollout[row], quality.agent[row]])
        assert quality.depends[row].sum() == (2 if dep else 1)


def test_how_it_was_checked_is_said():
    """A self-report says so in the words of the table of checks."""
    quality = judged(of("T9"), "self_report").steps.quality
    assert {CHECKS[code] for code in quality.verifiable} == {"self_report"}


def test_an_error_that_is_none_is_refused():
    """Minus one, and what is no number."""
    for error in (-1.0, float("nan")):
        with pytest.raises(Refused, match="number from 0 up"):
            judged(of("T1"), "own", error=error)
