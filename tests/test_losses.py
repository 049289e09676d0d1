"""Losses: values by hand and by public code, gradients by algebra and by the exact games."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from counterpoint.credit import estimate, ppo_ratio
from counterpoint.games import deal, every, gradient, play, policy_gradient, truth
from counterpoint.ledger import Credit
from counterpoint.losses import (
    aggregate,
    clipped_surrogate,
    entropy,
    kl,
    reinforce_loss,
    value_loss,
)
from counterpoint.steps import Steps

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "losses.json").read_text())
NAN, INF = math.nan, math.inf


def f64(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def leaf(values) -> torch.Tensor:
    return f64(values).clone().requires_grad_()


def slope(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x)[0]


# ---------------------------------------------------------------------------------------------
# Public code


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in GOLDEN["clip"]])
def test_clipped_surrogate_is_verls(case):
    """Loss, clip fraction and approximate KL are verl's, in three aggregations with dual clip.

    The file's random log-probabilities go above 0, which is refused here. Only differences count,
    so both policies are lowered by 1.
    """
    new, old = f64(case["logprob"]) - 1, f64(case["logprob_old"]) - 1
    found = clipped_surrogate(new, old, f64(case["advantage"]), f64(case["mask"]), **case["params"])
    assert found.loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert found.clip_fraction == pytest.approx(case["clip_fraction"], abs=1e-6)
    assert found.approx_kl == pytest.approx(case["approx_kl_k1"], abs=1e-6)
    assert found.tokens == np.sum(case["mask"])


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in GOLDEN["kl"]])
def test_kl_is_verls(case):
    """All four estimates are verl's, under its names kl, abs, mse and low_var_kl."""
    kind = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}[case["name"]]
    new, ref = f64(case["logprob"]), f64(case["ref_logprob"])
    got = kl(new, ref, torch.ones_like(new), kind=kind)
    np.testing.assert_allclose(got, case["kl"], atol=1e-6)


# ---------------------------------------------------------------------------------------------
# The clipped surrogate


def at(ratio: list[float], advantage: list[float], **options):
    """Loss and its gradient for one sequence with these ratios; the sum of the tokens' terms."""
    gap = np.log(ratio)
    new = leaf([np.minimum(gap, 0.0)])
    found = clipped_surrogate(
        new,
        f64([np.minimum(-gap, 0.0)]),
        f64([advantage]),
        torch.ones(1, len(ratio)),
        aggregation="seq-mean-token-sum",
        **options,
    )
    return found, slope(found.loss, new)[0].tolist()


def test_four_corners_by_hand():
    """ρ = 1.5, 1.5, .5, .5 and A = 2, −2, 2, −2: the terms are −2.4, 3, −1 and 1.6.

    Only the first and the last are stopped: half, though every ratio is outside the band.
    """
    found, push = at([1.5, 1.5, 0.5, 0.5], [2, -2, 2, -2])
    assert found.loss.item() == pytest.approx(-2.4 + 3 - 1 + 1.6)
    assert found.clip_fraction == 0.5
    assert push == pytest.approx([0, 3, -1, 0])
    assert push[0] == 0
    assert push[3] == 0
    assert found.approx_kl == pytest.approx(-math.log(0.75) / 2)  # −(2 ln 1.5 + 2 ln .5)/4


def test_the_bounds_are_two():
    """ρ 1.25 is inside 1 + .28 and outside 1 + .2; ρ .75 is outside 1 − .2 and inside 1 − .3."""
    found, push = at([1.25, 0.75], [1, -1], clip_high=0.28)
    assert (found.clip_fraction, push) == (0.5, pytest.approx([-1.25, 0]))
    found, push = at([1.25, 0.75], [1, -1], clip_low=0.3)
    assert (found.clip_fraction, push) == (0.5, pytest.approx([0, 0.75]))


def test_dual_clip_by_hand():
    """ρ = 4, 2, 4 and A = −2, −2, 2 with c = 3: terms 6 instead of 8, 4, and −2.4.

    The first is silenced by the dual clip, which `clip_fraction` does not count.
    """
    found, push = at([4, 2, 4], [-2, -2, 2], dual_clip=3.0)
    assert found.loss.item() == pytest.approx(6 + 4 - 2.4)
    assert push == [0, pytest.approx(4), 0]
    assert found.clip_fraction == pytest.approx(1 / 3)
    plain, push = at([4, 2, 4], [-2, -2, 2])
    assert plain.loss.item() == pytest.approx(8 + 4 - 2.4)
    assert push[0] == pytest.approx(8)


def beside(bound: float) -> tuple[float, float]:
    """Neighbouring log-ratios, the last with exp ≤ bound and the first with exp > bound."""
    gap = math.log(bound)
    while float(f64(gap).exp()) > bound:
        gap = math.nextafter(gap, -INF)
    while float(f64(math.nextafter(gap, INF)).exp()) <= bound:
        gap = math.nextafter(gap, INF)
    return gap, math.nextafter(gap, INF)


def push_at(gap: float, advantage: float, **options) -> float:
    """Gradient of one token whose log-ratio is exactly `gap`: one of the two policies gives 0."""
    new = leaf([[min(gap, 0.0)]])
    old = f64([[min(-gap, 0.0)]])
    return slope(
        clipped_surrogate(new, old, f64([[advantage]]), torch.ones(1, 1), **options).loss, new
    ).item()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 1e-300, -1e300])
def test_the_zero_gradient_regions_are_exact(advantage):
    """On neighbouring floats: −A·ρ on one side of 1 ± ε and of c, and exactly 0 on the other."""
    options = {"clip_low": 0.3, "clip_high": 0.2, "dual_clip": 3.0}
    for bound in (0.7, 1.2, 3.0):
        for gap in beside(bound):
            ratio = float(f64(gap).exp())
            over, under = ratio > 1.2, ratio < 1 - 0.3
            zero = over if advantage > 0 else under or ratio > 3
            got = push_at(gap, advantage, **options)
            assert (got == 0) == zero
            assert zero or got == pytest.approx(-advantage * ratio, rel=1e-15)


def test_on_the_bound_itself_the_gradient_is_whole():
    """ρ equal to 1 + ε_high, to 1 − ε_low or to c is not beyond it: −A·ρ, no half, none counted."""
    top = float(f64(0.25).exp())
    assert 1 + (top - 1) == top
    assert push_at(0.25, 1.0, clip_high=top - 1) == -top
    low = float(f64(-0.25).exp())
    assert 1 - (1 - low) == low
    assert push_at(-0.25, -1.0, clip_low=1 - low) == low
    third = float(f64(1.5).exp())
    assert push_at(1.5, -1.0, dual_clip=third) == third
    new = leaf([[-1.0, -1.0]])
    found = clipped_surrogate(
        new, new.detach(), f64([[1, -1]]), torch.ones(1, 2), clip_low=0.0, clip_high=0.0
    )
    assert found.clip_fraction == 0
    assert slope(found.loss, new).tolist() == [[-0.5, 0.5]]


def test_the_clamp_of_the_log_ratio_stops_the_gradient_too():
    """Beyond 20 nats ρ stands at e²⁰: the term is finite, and moves nothing."""
    assert push_at(20.0, -1.0) == pytest.approx(math.exp(20))
    assert push_at(math.nextafter(20.0, INF), -1.0) == 0
    assert push_at(-20.0, 1.0) == pytest.approx(-math.exp(-20))
    assert push_at(math.nextafter(-20.0, -INF), 1.0) == 0
    args = f64([[0.0]]), f64([[-500.0]]), f64([[-1.0]]), torch.ones(1, 1)
    found = clipped_surrogate(*args)
    assert found.loss.item() == pytest.approx(math.exp(20))
    assert found.approx_kl == -20


def test_no_advantage_is_never_clipped():
    """A = 0 far outside the band: no gradient, and not counted as clipped."""
    found, push = at([5, 0.1], [0, 0], dual_clip=3.0)
    assert push == [0, 0]
    assert found.clip_fraction == 0


def test_the_surrogate_is_the_published_maximum():
    """Value and gradient are those of min(max(−Aρ, −A·clip ρ), −cA), token by token."""
    rng = np.random.default_rng(5)
    gap, A = rng.normal(size=(2, 40, 50))
    new = leaf(np.minimum(gap, 0))
    args = f64(np.minimum(-gap, 0)), f64(A), torch.ones(gap.shape)
    found = clipped_surrogate(new, *args, clip_high=0.3, dual_clip=1.7)
    push = slope(found.loss, new) * new.numel()
    ratio = np.exp(gap)
    plain, held = -A * ratio, -A * np.clip(ratio, 0.8, 1.3)
    term = np.maximum(plain, held)
    term = np.where(A < 0, np.minimum(term, -1.7 * A), term)
    np.testing.assert_allclose(found.loss.item(), term.mean(), rtol=1e-12)
    np.testing.assert_allclose(push, np.where(term == plain, plain, 0), rtol=1e-12)
    assert found.clip_fraction == pytest.approx(np.mean(held > plain))


def test_one_ratio_in_numpy_and_torch():
    """`credit.ppo_ratio` and the loss agree row by row: on ρ, on what is clipped, on its share."""
    rng = np.random.default_rng(1)
    old = -rng.exponential(2, size=3000)
    new = np.minimum(old + rng.normal(scale=0.4, size=3000), 0)
    new[:2], old[:2] = (-30, 0), (0, -30)  # beyond the clamp
    A = rng.normal(size=3000)
    A[::7] = NAN
    columns = {"logprob": old, "logprob_new": new, "reward": np.zeros(3000)}
    steps = Steps.from_columns(rollout=range(3000), **columns)
    credit = ppo_ratio(steps, Credit(A), clip_high=0.28)
    logprob, mask = leaf(new[:, None]), f64(~np.isnan(A))[:, None]
    found = clipped_surrogate(logprob, f64(old[:, None]), f64(A[:, None]), mask, clip_high=0.28)
    push = slope(found.loss, logprob)[:, 0].numpy() * found.tokens
    known = credit.credited & (np.abs(new - old) <= 20)
    clipped = credit.parts["clipped"][known] == 1
    assert found.clip_fraction == pytest.approx(credit.diagnostics["clip_fraction"], abs=1e-12)
    np.testing.assert_array_equal(push[known] == 0, clipped)
    want = -A[known] * credit.parts["ratio"][known]
    np.testing.assert_allclose(push[known][~clipped], want[~clipped], rtol=1e-12)
    assert 100 < clipped.sum() < len(clipped) - 100


# ---------------------------------------------------------------------------------------------
# REINFORCE, and the exact games


def test_reinforce_by_hand():
    """Terms 2·1, −1·.5 and a masked one: mean (2 − .5)/2; the gradient is −A over two tokens."""
    logprob = leaf([[-1.0, -0.5, -3.0]])
    found = reinforce_loss(logprob, f64([[2, -1, 9]]), torch.tensor([[1, 1, 0]]))
    assert found.loss.item() == 0.75
    assert found.tokens == 2
    assert math.isnan(found.clip_fraction)
    assert slope(found.loss, logprob).tolist() == [[-1.0, 0.5, 0.0]]


def as_tokens(plays, advantage):
    """Logits of the game's policy, and (rollouts, turns) of log π, advantage and mask from them."""
    steps = plays.steps
    logits = leaf(np.log(plays.game.policy))
    shape = (steps.n_rollouts, int(steps.step.max()) + 1)
    where = (torch.as_tensor(steps.rollout), torch.as_tensor(steps.step))
    taken = torch.log_softmax(logits, -1)[plays.game.anchor[plays.state], plays.action]
    logprob = torch.full(shape, NAN, dtype=torch.float64).index_put(where, taken)
    A = torch.full(shape, NAN, dtype=torch.float64).index_put(where, f64(advantage))
    return logits, logprob, A, ~torch.isnan(A)


POLICY_LOSSES = {
    "reinforce": reinforce_loss,
    "clipped": lambda logprob, A, mask, **how: clipped_surrogate(
        logprob, logprob.detach(), A, mask, dual_clip=3.0, **how
    ),
}
policy_loss = pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES.keys())


@policy_loss
@pytest.mark.parametrize(
    ("name", "size"), [("T0", {}), ("T1", {"agents": 2}), ("T2", {"agents": 2}), ("T16", {})]
)
def test_the_exact_policy_gradient(name, size, loss):
    """Over all plays, weighed by their probability, −∇loss is the exact gradient of the game.

    So is that of the clipped surrogate before the first step, when both policies are one.
    """
    game = deal(name, seed=3, **size)
    plays, chance = every(game, 1)
    worth = truth(plays).values * chance[plays.steps.group] * len(chance)
    logits, *args = as_tokens(plays, worth)
    found = loss(*args, aggregation="constant", divisor=plays.steps.n_rollouts)
    np.testing.assert_allclose(-slope(found.loss, logits), policy_gradient(game), atol=1e-13)


@policy_loss
@pytest.mark.parametrize("name", ["T1", "T16"])
def test_the_gradient_of_sampled_plays(name, loss):
    """−∇loss is the step that the games take for the same credit; what has none is masked.

    Every rollout keeps a turn, so the mean over sequences divides by the rollouts.
    """
    plays = play(deal(name, seed=2), groups=20, rollouts=4)
    A = estimate("grpo", plays.steps).values.copy()
    A[(plays.steps.step > 0) & (np.arange(len(A)) % 3 == 0)] = NAN
    logits, *args = as_tokens(plays, A)
    found = loss(*args, aggregation="seq-mean-token-sum")
    assert found.tokens == np.sum(~np.isnan(A)) < len(A)
    np.testing.assert_allclose(-slope(found.loss, logits), gradient(plays, A), atol=1e-13)


# ---------------------------------------------------------------------------------------------
# KL and entropy


@pytest.fixture
def two_policies():
    """Logits of π over four actions, log π, π, and a reference."""
    logits = leaf([0.3, -0.8, 1.1, 0.0])
    logp = torch.log_softmax(logits, -1)
    return logits, logp, logp.detach().exp(), f64([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_is_unbiased(two_policies, kind):
    """Averaged over π, k1 and k3 are Σ π log(π/ref)."""
    _, logp, p, ref = two_policies
    each = kl(logp[None], ref.log()[None], torch.ones(1, 4), kind=kind)[0]
    want = np.sum(p.numpy() * np.log(p.numpy() / ref.numpy()))
    assert (p @ each).item() == pytest.approx(want, abs=1e-14)


def test_gradients_of_the_kl_estimates(two_policies):
    """Averaged over π, in the logits: 0 for k1, π(Δ − KL) for k2, π − ref for k3.

    The second is the gradient of KL(π ‖ ref), the third that of KL(ref ‖ π).
    """
    logits, logp, p, ref = two_policies
    gap = logp.detach() - ref.log()
    want = {"k1": 0 * p, "k2": p * (gap - p @ gap), "k3": p - ref}
    for kind, expected in want.items():
        each = kl(logp[None], ref.log()[None], torch.ones(1, 4), kind=kind)[0]
        got = torch.autograd.grad(p @ each, logits, retain_graph=True)[0]
        np.testing.assert_allclose(got, expected, atol=1e-14)


def test_k3_stands_still_at_ten():
    """Below Δ = −2.61 and above 11 nats k3 is 10 with gradient 0; inside it is 1 − exp(−Δ)."""
    gap = np.array([-500, -20.1, -2.62, -2.6, 0, 2, 10.9, 11.1, 500])
    new = leaf([np.minimum(gap, 0)])
    each = kl(new, f64([np.minimum(-gap, 0)]), torch.ones(1, 9), kind="k3")
    held = np.array([1, 1, 1, 0, 0, 0, 0, 1, 1], dtype=bool)
    inside = gap[~held]
    np.testing.assert_array_equal(each.detach().numpy()[0, held], 10)
    np.testing.assert_allclose(
        each.detach().numpy()[0, ~held], np.exp(-inside) + inside - 1, atol=1e-14
    )
    push = slope(each.sum(), new).numpy()[0]
    np.testing.assert_array_equal(push[held], 0)
    np.testing.assert_allclose(push[~held], 1 - np.exp(-inside), atol=1e-14)


def test_k3_keeps_small_differences():
    """At Δ = 1e-9 it is ½Δ², 5e-19, which exp(d) − d − 1 would lose in float64."""
    each = kl(f64([[0.0]]), f64([[-1e-9]]), torch.ones(1, 1), kind="k3")
    assert each.item() == pytest.approx(5e-19, rel=1e-6, abs=0)


def test_entropy_by_algebra():
    """Log 4 for four equal logits, 0 for one action; the gradient is −π(log π + H)."""
    logits = leaf([[[7, 7, 7, 7], [0.3, -0.8, 1.1, 0], [0, -INF, -INF, -INF], [NAN] * 4]])
    found = entropy(logits, torch.tensor([[1, 1, 1, 0]]))
    p = torch.softmax(f64([0.3, -0.8, 1.1, 0]), -1)
    H = -(p * p.log()).sum().item()
    assert found[0].tolist() == [pytest.approx(math.log(4)), pytest.approx(H), 0, 0]
    push = slope(found.sum(), logits)[0]
    np.testing.assert_allclose(push[1], -p * (p.log() + H), atol=1e-15)
    assert push[2:].tolist() == [[0] * 4] * 2


def test_an_impossible_action_is_no_action():
    """Logits with −inf between them have the entropy and gradient of the logits without it."""
    whole, part = leaf([[[0.5, -INF, -1.0]]]), leaf([[[0.5, -1.0]]])
    one = torch.ones(1, 1)
    a, b = entropy(whole, one), entropy(part, one)
    assert a.item() == pytest.approx(b.item(), abs=1e-15)
    got, want = slope(a.sum(), whole)[0, 0], slope(b.sum(), part)[0, 0]
    np.testing.assert_allclose(got[[0, 2]], want, atol=1e-15)
    assert got[1] == 0


# ---------------------------------------------------------------------------------------------
# Critic


def test_value_loss_by_hand():
    """V = 1, 3 and a masked one, G = 2, 0: ½(1 + 9)/2; the gradient is (V − G)/2."""
    value = leaf([[1.0, 3.0, 8.0]])
    found = value_loss(value, f64([[0, 0, 0]]), f64([[2, 0, 0]]), torch.tensor([[1, 1, 0]]))
    assert found.loss.item() == 2.5
    assert math.isnan(found.clip_fraction)
    assert slope(found.loss, value).tolist() == [[-0.5, 1.5, 0]]


def test_value_clip_stops_a_critic_on_its_way_only():
    """V_old 0 ± 1, G 5 or −5. V = 2 is out of the band: nearer to 5 than its end, so stopped.

    V = 2 towards −5 is worse than the end of the band, and V = .5 is inside: both learn.
    Terms ½·{(1 − 5)², (2 + 5)², (.5 − 5)²} = 8, 24.5, 10.125.
    """
    value = leaf([[2.0, 2.0, 0.5]])
    zero = torch.zeros(1, 3, dtype=torch.float64)
    found = value_loss(value, zero, f64([[5, -5, 5]]), torch.ones(1, 3), clip=1.0)
    assert found.loss.item() == pytest.approx((8 + 24.5 + 10.125) / 3)
    assert slope(found.loss, value)[0].tolist() == [0, pytest.approx(7 / 3), pytest.approx(-1.5)]
    assert found.clip_fraction == pytest.approx(1 / 3)


def test_value_clip_is_strict():
    """On the end of the band, and inside where V_old + (V − V_old) rounds, V − G is whole."""
    old, value = f64([[0.0, 0.7]]), leaf([[1.0, 0.19]])
    assert 0.7 + (0.19 - 0.7) < 0.19
    found = value_loss(value, old, f64([[5, 5]]), torch.ones(1, 2), clip=1.0)
    assert found.clip_fraction == 0
    np.testing.assert_allclose(slope(found.loss, value)[0], [-4 / 2, -4.81 / 2])


# ---------------------------------------------------------------------------------------------
# Aggregation


def test_aggregations_by_hand():
    """[1, 2, 3], [4] and a masked sequence: 10/4, (6 + 4)/2, (2 + 4)/2, 10/20, and their slopes.

    The masked sequence is in no mean.
    """
    x = leaf([[1, 2, 3], [4, 50, 50], [50, 50, 50]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    want = {
        "token-mean": (2.5, [[1 / 4] * 3, [1 / 4, 0, 0], [0] * 3]),
        "seq-mean-token-sum": (5, [[1 / 2] * 3, [1 / 2, 0, 0], [0] * 3]),
        "seq-mean-token-mean": (3, [[1 / 6] * 3, [1 / 2, 0, 0], [0] * 3]),
        "constant": (0.5, [[1 / 20] * 3, [1 / 20, 0, 0], [0] * 3]),
    }
    for name, (value, push) in want.items():
        found = aggregate(x, mask, name, 20 if name == "constant" else None)
        assert found.item() == pytest.approx(value, abs=1e-15)
        np.testing.assert_allclose(slope(found, x), push, atol=1e-15)
