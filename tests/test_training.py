"""An update of tables of logits, and the exact credit of many runs, each a second way."""

import math

import numpy as np
import pytest

from counterpoint import Softmax, Steps, make, rollout, update
from counterpoint.ledger import Credit
from counterpoint.redrive import credit_of, credits_of


def test_an_update_is_the_gradient_of_what_it_climbs():
    """The step ÷ lr is the slope of Σ A log π ÷ groups, by central differences of each logit."""
    menu, h = ("left", "right", "stay"), 1e-5
    table = {"s": {"left": 0.3, "right": -0.2}, "t": {"stay": 0.5}}
    anchors, actions = ["s", "s", "t", "t"], [0, 1, 2, 0]
    advantage = np.array([1.0, -0.5, 2.0, 0.25])
    steps = Steps.from_columns(
        group=["g", "g", "h", "h"], rollout=["a", "b", "c", "d"], reward=[0.0] * 4,
        anchor=anchors, menu=[menu] * 4, action=actions,
    )  # fmt: skip

    def climbed(logits):
        total = 0.0
        for a, anchor, action in zip(advantage, anchors, actions, strict=True):
            z = [logits.get(anchor, {}).get(label, 0.0) for label in menu]
            total += a * (z[action] - math.log(sum(map(math.exp, z))))
        return total / 2  # two groups

    policy = Softmax(table)
    before = policy.version
    update(policy, steps, Credit(advantage, estimand="outcome"), lr=0.1)
    assert policy.version != before
    for anchor in ("s", "t"):
        for label in menu:
            ends = []
            for side in (h, -h):
                moved = {key: dict(row) for key, row in table.items()}
                moved[anchor][label] = moved[anchor].get(label, 0.0) + side
                ends.append(climbed(moved))
            step = policy.logits[anchor][label] - table[anchor].get(label, 0.0)
            assert step / 0.1 == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-8)


@pytest.mark.slow
def test_one_tree_gives_every_run_the_credit_of_its_own_walk():
    """Listing a task once agrees with the walk that lists it from the end of each run."""
    env, team = make("research-v0"), Softmax()
    traces = rollout(env, team, groups=1, rollouts=3, seed=4)
    for trace, found in zip(traces, credits_of(traces, env, team), strict=True):
        walked = credit_of(trace, env, team)
        assert [value.seq for value in found] == [value.seq for value in walked]
        assert [v.seqau for v in found] == pytest.approx([v.seqau for v in walked], abs=1e-12)
