"""An update of policies, and the exact credit of many runs, each a second way."""

import math

import numpy as np
import pytest
import torch

from counterpoint import Softmax, Steps, make, rloo, rollout, update
from counterpoint.games import deal, every, play, policy_gradient
from counterpoint.ledger import Credit
from counterpoint.losses import clipped_surrogate, reinforce_loss
from counterpoint.redrive import credit_of, credits_of
from counterpoint.spelling import Refused


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


# ---------------------------------------------------------------------------------------------
# Losses, against torch and against finite differences

MENU = ("left", "right", "stay")
TABLE = {"s": {"left": 0.3, "right": -0.2}, "t": {"stay": 0.5, "left": -1.0}}
HELD = {"s": {"left": -0.4, "stay": 0.9}, "t": {"right": 0.2}}
ROWS = {
    "group": ["g"] * 4 + ["h"] * 4,
    "rollout": list("abcdefgh"),
    "reward": [0.0] * 8,
    "anchor": list("ssssttts"),
    "menu": [MENU] * 8,
    "action": [0, 1, 2, 0, 1, 2, 0, 1],
}
EARNED = np.array([1.0, -0.5, 2.0, -1.5, 0.25, -2.0, 1.0, 0.0])
OLD = np.array([-1.6, -0.9, -0.7, -0.5, -1.2, -1.9, -2.6, -1.0])


def rows(**more):
    return Steps.from_columns(**ROWS, **more)


def credit(values=EARNED):
    return Credit(values, estimand="outcome")


def by_torch(rule):
    """Gradient of the whole objective in every logit of TABLE, by autograd over a dense table."""
    z = torch.tensor([[TABLE[a].get(x, 0.0) for x in MENU] for a in "st"], dtype=torch.float64)
    z.requires_grad_()
    ref = torch.tensor([[HELD[a].get(x, 0.0) for x in MENU] for a in "st"], dtype=torch.float64)
    state = torch.tensor(["st".index(a) for a in ROWS["anchor"]])
    logp = torch.log_softmax(z, 1)[state]
    away = logp - torch.log_softmax(ref, 1)[state]
    taken = logp.gather(1, torch.tensor(ROWS["action"])[:, None])
    A, mask = torch.from_numpy(EARNED)[:, None], torch.ones(8, 1)
    if rule.get("loss") == "clip":
        old = torch.from_numpy(OLD)[:, None]
        lost = clipped_surrogate(
            taken, old, A, mask, aggregation="constant", divisor=2.0,
            clip_low=rule.get("clip_low", 0.2), clip_high=rule.get("clip_high", 0.2),
        )  # fmt: skip
    else:
        lost = reinforce_loss(taken, A, mask, aggregation="constant", divisor=2.0)
    p = logp.exp()
    total = lost.loss + rule.get("entropy", 0.0) * (p * logp).sum() / 2
    total = total + rule.get("kl", 0.0) * (p * away).sum() / 2
    total.backward()
    return -z.grad, float(total.detach()), lost


RULES = {
    "reinforce": {},
    "clip": {"loss": "clip"},
    "clip, uneven": {"loss": "clip", "clip_low": 0.05, "clip_high": 0.4},
    "entropy": {"entropy": 0.3},
    "kl": {"kl": 0.7},
    "all": {"loss": "clip", "entropy": 0.1, "kl": 0.2},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_closed_form_is_what_autograd_says(rule):
    """A step of every loss, with its clip, entropy and KL, against torch on the same rows."""
    expected, total, lost = by_torch(rule)
    policy = Softmax(TABLE)
    reference = Softmax(HELD) if "kl" in rule else None
    told = update(policy, rows(logprob=OLD), credit(), lr=0.01, reference=reference, **rule)
    for i, anchor in enumerate("st"):
        for j, label in enumerate(MENU):
            moved = policy.logits[anchor][label] - TABLE[anchor].get(label, 0.0)
            assert moved / 0.01 == pytest.approx(float(expected[i, j]), abs=1e-9)
    assert told["loss"] == pytest.approx(total, abs=1e-12)
    assert told["gradient_norm"] == pytest.approx(float(expected.norm()), abs=1e-12)
    if rule.get("loss") == "clip":
        assert told["clip_fraction"] == lost.clip_fraction
        assert told["approx_kl"] == pytest.approx(lost.approx_kl, abs=1e-12)


def test_epochs_are_steps_one_after_another():
    """Three epochs of the clipped surrogate move a table as three calls do, in one version."""
    once, thrice = Softmax(TABLE), Softmax(TABLE)
    update(thrice, rows(logprob=OLD), credit(), lr=0.1, loss="clip", epochs=3)
    for _ in range(3):
        update(once, rows(logprob=OLD), credit(), lr=0.1, loss="clip")
    assert thrice.logits == once.logits
    assert (thrice.version[0], once.version[0]) == ("1", "3")


def test_a_long_gradient_is_scaled_down_to_the_norm():
    """With max_norm half its length the step is half as long, and its direction the same."""
    free, held = Softmax(TABLE), Softmax(TABLE)
    length = update(free, rows(), credit(), lr=1.0)["gradient_norm"]
    told = update(held, rows(), credit(), lr=1.0, max_norm=length / 2)
    assert told["gradient_norm"] == length  # as it was before
    for anchor in "st":
        for label in MENU:
            start = TABLE[anchor].get(label, 0.0)
            step = free.logits[anchor][label] - start
            assert held.logits[anchor][label] - start == pytest.approx(step / 2, abs=1e-15)


# ---------------------------------------------------------------------------------------------
# Versions


def mixed(policy):
    """Rows of which the first four were played by the policy, the others by one before it."""
    return rows(version=[policy.version] * 4 + ["0-abc"] * 4, logprob=OLD)


def test_rows_of_another_version_are_refused_by_reinforce():
    """The sentence names trace, role and both versions; the table has not moved."""
    policy = Softmax(TABLE)
    with pytest.raises(Refused, match=f"trace e was played by version 0-abc.*{policy.version} now"):
        update(policy, mixed(policy), credit(), lr=0.1)
    assert policy.logits == TABLE


def test_rows_of_another_version_are_left_out_where_that_is_asked():
    """stale="skip" moves as the policy's own four rows do alone; the others are counted."""
    own, all_ = Softmax(TABLE), Softmax(TABLE)
    told = update(all_, mixed(all_), credit(), lr=0.1, stale="skip")
    update(own, rows(), credit(np.where(np.arange(8) < 4, EARNED, np.nan)), lr=0.1)
    assert all_.logits == own.logits
    assert (told["rows"], told["stale"]) == (4, 4)


def test_clip_takes_rows_of_any_version_and_weighs_them():
    """By the stored log-probabilities: the step is that of the same rows without versions."""
    some, none = Softmax(TABLE), Softmax(TABLE)
    told = update(some, mixed(some), credit(), lr=0.1, loss="clip")
    update(none, rows(logprob=OLD), credit(), lr=0.1, loss="clip")
    assert some.logits == none.logits
    assert (told["rows"], told["stale"]) == (8, 0)


def test_clip_needs_the_log_probability_of_every_row():
    """A row without one is refused by trace and step."""
    missing = np.where(np.arange(8) == 2, np.nan, OLD)
    with pytest.raises(Refused, match="trace c, step 0 has no log-probability"):
        update(Softmax(TABLE), rows(logprob=missing), credit(), lr=0.1, loss="clip")


def test_traces_bring_the_version_that_played_them():
    """Runs from before an update are stale after it, as they are after any other."""
    env, team = make("ledger-v0"), Softmax()
    steps = Steps.from_traces(rollout(env, team, groups=2, rollouts=4, seed=1))
    earned = Credit(steps.outcome, estimand="outcome")
    update(team, steps, earned, lr=0.1)
    with pytest.raises(Refused, match="was played by version 0-"):
        update(team, steps, earned, lr=0.1)


# ---------------------------------------------------------------------------------------------
# Bad input

BAD = {
    "lr is 0": {"lr": 0},
    "lr is nan": {"lr": math.nan},
    "loss is 'ppo'; it is 'reinforce' or 'clip'": {"loss": "ppo"},
    "epochs is 0": {"loss": "clip", "epochs": 0},
    "clip_low is 1.5; 0 to 1": {"loss": "clip", "clip_low": 1.5},
    "max_norm is -1": {"max_norm": -1},
    "3 epochs of reinforce": {"epochs": 3},
    "kl is 0.1, and there is no reference": {"kl": 0.1},
    "stale is 'maybe'": {"stale": "maybe"},
}


@pytest.mark.parametrize("sentence", BAD)
def test_an_option_out_of_range_is_refused(sentence):
    """By name, value and what it may be."""
    with pytest.raises(Refused, match=sentence.replace("(", r"\(")):
        update(Softmax(TABLE), rows(logprob=OLD), credit(), **{"lr": 0.1, **BAD[sentence]})


@pytest.mark.parametrize("poison", [math.inf, -math.inf])
def test_a_loss_that_is_no_number_names_its_traces_and_installs_nothing(poison):
    """One advantage that is infinite: the sentence names its trace, and no policy has changed."""
    one, other = Softmax({"s": TABLE["s"]}), Softmax({"t": TABLE["t"]})
    steps = rows(role=["one" if a == "s" else "other" for a in ROWS["anchor"]])
    values = np.where(np.arange(8) == 5, poison, EARNED)
    with pytest.raises(Refused, match=r"in epoch 0, from trace f; nothing was installed"):
        update({"one": one, "other": other}, steps, credit(values), lr=0.1)
    assert (one.logits, other.logits) == ({"s": TABLE["s"]}, {"t": TABLE["t"]})


def test_without_anything_to_learn_the_version_stays():
    """No gradient, no version: no row was credited, or every advantage is 0."""
    policy = Softmax(TABLE)
    before = policy.version
    assert update(policy, rows(), credit(np.full(8, np.nan)), lr=0.1)["rows"] == 0
    assert update(policy, rows(), credit(np.zeros(8)), lr=0.1)["gradient_norm"] == 0
    assert policy.version == before


def test_a_credit_of_another_unit_is_refused():
    """An update moves turns."""
    with pytest.raises(Refused, match="per decision"):
        update(Softmax(), rows(), Credit(EARNED, unit="decision"), lr=0.1)


# ---------------------------------------------------------------------------------------------
# Against the exact policy gradient

GAMES = {name: deal(name, seed=5, **dials) for name, dials in {
    "T2": {"agents": 3, "actions": 2}, "T5": {"agents": 2}, "T16": {"turns": 4},
}.items()}  # fmt: skip


def stepped(plays, advantage):
    """The step ÷ lr that `update` takes from plays of a game, (anchors, actions)."""
    game, menu = plays.game, tuple(map(str, range(plays.game.policy.shape[1])))
    logits = {
        str(o): dict(zip(menu, row, strict=True)) for o, row in enumerate(np.log(game.policy))
    }
    policy = Softmax(logits)
    held = plays.steps
    steps = Steps.from_columns(
        group=held.group, rollout=held.rollout, reward=held.reward, mask=held.mask,
        anchor=[str(o) for o in held.anchor], menu=[menu] * len(held), action=plays.action,
    )  # fmt: skip
    update(policy, steps, Credit(advantage, estimand="outcome"), lr=1.0)
    return np.array([[policy.logits[o][a] - row[a] for a in menu] for o, row in logits.items()])


@pytest.mark.parametrize("name", GAMES)
def test_the_step_is_the_exact_policy_gradient(name):
    """Over all plays that can happen, each by its chance, it is the gradient itself."""
    game = GAMES[name]
    plays, chance = every(game, 1)
    weight = chance[plays.steps.group] * len(chance)
    step = stepped(plays, plays.steps.outcome * weight)
    assert step == pytest.approx(policy_gradient(game), abs=1e-12)


@pytest.mark.parametrize("name", GAMES)
def test_the_mean_step_is_the_policy_gradient_within_its_error(name):
    """RLOO over 60 samples: within four standard errors in every component, and near in angle."""
    game = GAMES[name]
    steps = []
    for seed in range(60):
        plays = play(game, groups=40, rollouts=8, seed=seed)
        steps.append(stepped(plays, rloo(plays.steps).values) / 8)
    mean, error = np.mean(steps, 0), np.std(steps, 0, ddof=1) / np.sqrt(60)
    exact = policy_gradient(game)
    assert np.all(np.abs(mean - exact) < 4 * error + 1e-12)
    assert np.sum(mean * exact) / np.linalg.norm(mean) / np.linalg.norm(exact) > 0.99
