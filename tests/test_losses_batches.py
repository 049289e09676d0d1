"""Losses on random batches: what masks, padding, order and precision must not change; refusals."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.losses import (
    aggregate,
    clipped_surrogate,
    entropy,
    kl,
    reinforce_loss,
    value_loss,
)
from counterpoint.spelling import Refused

NAN, INF = math.nan, math.inf
AGGREGATIONS = {
    "token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "constant": {"divisor": 7.0},
}
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 5)


def batch(seed: int, rows: int, tokens: int, masked: float = 0.3) -> dict[str, torch.Tensor]:
    """A random batch: log-probabilities of three policies, logits, values, and a mask."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(rows, tokens, *shape))

    new = -np.abs(normal()) - 0.1
    moved = {k: np.minimum(new + normal(), 0) for k in ("logprob_old", "logprob_ref")}
    plain = {k: normal() for k in ("advantage", "value", "value_old", "returns")}
    arrays = {"logprob": new, "logits": normal(3), **moved, **plain}
    arrays["mask"] = rng.random((rows, tokens)) >= masked
    return {k: torch.as_tensor(v, dtype=torch.float64) for k, v in arrays.items()}


# ---------------------------------------------------------------------------------------------
# What must not move

LOSSES = {
    "reinforce": ("logprob", lambda b, **how: reinforce_loss(
        b["logprob"], b["advantage"], b["mask"], **how).loss),
    "clipped": ("logprob", lambda b, **how: clipped_surrogate(
        b["logprob"], b["logprob_old"], b["advantage"], b["mask"],
        **{"dual_clip": 2.0} | how).loss),
    "entropy": ("logits", lambda b, **how: aggregate(
        entropy(b["logits"], b["mask"]), b["mask"], **how)),
} | {
    kind: ("logprob", lambda b, kind=kind, **how: aggregate(
        kl(b["logprob"], b["logprob_ref"], b["mask"], kind=kind), b["mask"], **how))
    for kind in ("k1", "abs", "k2", "k3")
}  # fmt: skip
WAYS = {
    f"{name}, {how}": (moved, partial(loss, aggregation=how, **more))
    for name, (moved, loss) in LOSSES.items()
    for how, more in AGGREGATIONS.items()
} | {
    f"value, clip {clip}": ("value", lambda b, clip=clip: value_loss(
        b["value"], b["value_old"], b["returns"], b["mask"], clip=clip).loss)
    for clip in (None, 0.2)
}  # fmt: skip
each_way = pytest.mark.parametrize(("moved", "loss"), WAYS.values(), ids=WAYS.keys())


def solve(loss, moved: str, b):
    """The loss and its gradient in the tensor that is learnt."""
    b = b | {moved: b[moved].clone().requires_grad_()}
    found = loss(b)
    return found.item(), torch.autograd.grad(found, b[moved])[0]


@each_way
def test_nothing_unmasked_is_a_loss_of_zero(moved, loss):
    """All masked, no rows or no tokens: loss 0 and gradient 0, not NaN."""
    for rows, tokens in ((2, 3), (0, 3), (2, 0)):
        value, push = solve(loss, moved, batch(0, rows, tokens, masked=1.1))
        assert value == 0
        assert torch.count_nonzero(push) == 0


def test_nothing_unmasked_is_counted():
    """The count is 0, and shares of nothing are NaN."""
    b = batch(0, 2, 3, masked=1.1)
    args = b["logprob"], b["logprob_old"], b["advantage"], b["mask"]
    found = clipped_surrogate(*args)
    assert found.tokens == 0
    assert math.isnan(found.clip_fraction)
    assert math.isnan(found.approx_kl)


@each_way
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3.0])
def test_masked_positions_move_nothing(moved, loss, junk):
    """Whatever stands where the mask is 0, in any argument: the same loss, and exactly no gradient.

    A whole row is masked, and single tokens.
    """
    b = batch(4, 5, 4)
    b["mask"][2] = 0
    off = b["mask"] == 0
    clean, want = solve(loss, moved, b)
    dirty = {k: v.masked_fill(off[..., None] if v.ndim == 3 else off, junk) for k, v in b.items()}
    value, push = solve(loss, moved, dirty | {"mask": b["mask"]})
    assert value == clean
    assert torch.equal(push, want)
    assert torch.count_nonzero(push[off]) == 0
    assert torch.count_nonzero(push[~off]) > 0


@each_way
@settings(max_examples=15, deadline=None)
@given(seed=seeds, rows=sizes, tokens=sizes, extra=st.integers(0, 3))
def test_padding_and_order_change_nothing(moved, loss, seed, rows, tokens, extra):
    """Masked columns and rows around a batch, and its rows in another order: the same gradient."""
    b = batch(seed, rows, tokens)
    value, push = solve(loss, moved, b)
    wide = {}
    for key, x in b.items():
        shape = (rows + extra, tokens + extra, *x.shape[2:])
        wide[key] = torch.full(shape, 0.0 if key == "mask" else NAN, dtype=x.dtype)
        wide[key][:rows, extra:] = x
    padded, pushed = solve(loss, moved, wide)
    assert padded == pytest.approx(value, abs=1e-13)
    np.testing.assert_allclose(pushed[:rows, extra:], push, atol=1e-15)
    order = np.random.default_rng(seed).permutation(rows)
    turned, moved_push = solve(loss, moved, {k: x[order] for k, x in b.items()})
    assert turned == pytest.approx(value, abs=1e-13)
    np.testing.assert_allclose(moved_push, push[order], atol=1e-15)


@each_way
def test_only_the_policy_being_updated_moves(moved, loss):
    """No gradient reaches the sampling policy, the reference, the advantage or the return."""
    b = {k: v.requires_grad_(k != "mask") for k, v in batch(1, 3, 4).items()}
    loss(b).backward()
    assert [k for k, v in b.items() if v.grad is not None] == [moved]


@each_way
def test_precision(moved, loss):
    """Computed in float64 or float32, half precision in float32; the loss agrees with float64's."""
    b = batch(2, 4, 5)
    exact, _ = solve(loss, moved, b)
    for dtype, wide, close in (
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 0.1),
        (torch.float16, torch.float32, 0.02),
    ):
        cast = {k: v.to(dtype) for k, v in b.items()}
        cast[moved].requires_grad_()
        found = loss(cast)
        push = torch.autograd.grad(found, cast[moved])[0]
        assert (found.dtype, push.dtype) == (wide, dtype)
        assert found.item() == pytest.approx(exact, abs=close)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_a_mask_is_bool_or_zero_and_one(dtype):
    """Every dtype of the same mask gives the same loss."""
    b = batch(3, 4, 4)
    args = b["logprob"], b["advantage"]
    want = reinforce_loss(*args, b["mask"]).loss
    assert reinforce_loss(*args, b["mask"].to(dtype)).loss == want


def test_rounding_above_zero_is_no_error():
    """A certain token's log-probability may come out of float32 as 6e-5; .001 is refused."""
    one = torch.ones(1, 1)
    assert reinforce_loss(one * 6e-5, one, one).loss.item() == pytest.approx(-6e-5)
    with pytest.raises(Refused, match="at most 0"):
        reinforce_loss(one * 1e-3, one, one)


# ---------------------------------------------------------------------------------------------
# Refused


def spoiled(loss, **changes):
    """A call of a loss on a good batch in which some tensors are replaced."""
    return lambda: loss(batch(0, 3, 4, masked=0.0) | changes)


def with_one(name: str, value: float):
    x = batch(0, 3, 4, masked=0.0)[name].clone()
    x[1, 2] = value
    return x


def options(**how):
    return lambda: LOSSES["clipped"][1](batch(0, 3, 4), **how)


clipped, vloss, spread = LOSSES["clipped"][1], WAYS["value, clip 0.2"][1], LOSSES["entropy"][1]
k3 = LOSSES["k3"][1]
row, b0 = torch.zeros(3), batch(0, 3, 4, masked=0.0)
REFUSALS = {
    "one value per row": (spoiled(clipped, advantage=row), r"advantage has shape \(3,\).*\(3, 4\)"),
    "broadcast": (spoiled(clipped, advantage=row[:, None]), r"advantage has shape \(3, 1\)"),
    "an array": (spoiled(clipped, logprob=np.zeros((3, 4))), "logprob has type ndarray"),
    "flat mask": (spoiled(clipped, mask=row), r"mask has shape \(3,\)"),
    "no mask": (spoiled(clipped, mask=None), "mask has type NoneType"),
    "weights": (spoiled(clipped, mask=with_one("mask", 0.5)), r"mask is 0.5 at row 1, token 2"),
    "NaN mask": (spoiled(clipped, mask=with_one("mask", NAN)), r"mask is nan at row 1, token 2"),
    "integers": (spoiled(clipped, logprob=torch.zeros(3, 4).long()), "logprob has dtype.*int64"),
    "device": (spoiled(clipped, logprob=torch.zeros(3, 4, device="meta")), "logprob lies on meta"),
    "NaN credit": (spoiled(clipped, advantage=with_one("advantage", NAN)), "advantage is nan at r"),
    "impossible": (spoiled(clipped, logprob=with_one("logprob", -INF)), "logprob is -inf at"),
    "above 0": (spoiled(clipped, logprob=with_one("logprob", 0.2)), "logprob is 0.2 at row 1, t"),
    "old above 0": (spoiled(clipped, logprob_old=with_one("logprob", 0.2)), "logprob_old is 0.2"),
    "ref above 0": (spoiled(k3, logprob_ref=with_one("logprob", 0.2)), "logprob_ref is 0.2"),
    "returns": (spoiled(vloss, returns=with_one("returns", INF)), "returns is inf at row 1, t"),
    "value_old": (spoiled(vloss, value_old=row), r"value_old has shape \(3,\)"),
    "value": (spoiled(vloss, value=with_one("value", NAN)), "value is nan at row 1, token 2"),
    "flat logits": (spoiled(spread, logits=torch.zeros(3, 4)), r"logits has shape \(3, 4\)"),
    "other logits": (spoiled(spread, logits=torch.zeros(3, 5, 2)), r"logits has shape \(3, 5"),
    "no actions": (spoiled(spread, logits=torch.zeros(3, 4, 0)), "no action"),
    "NaN logits": (spoiled(spread, logits=with_one("logits", NAN)), "largest logit is nan at"),
    "no way": (spoiled(spread, logits=with_one("logits", -INF)), "largest logit is -inf at row 1"),
    "infinite logit": (spoiled(spread, logits=with_one("logits", INF)), "largest logit is inf"),
    "integer logits": (spoiled(spread, logits=torch.zeros(3, 4, 2).long()), "logits has dtype"),
    "x": (lambda: aggregate(with_one("value", NAN), b0["mask"]), "x is nan at row 1, token 2"),
    "aggregation": (options(aggregation="mean"), "aggregation is 'mean', not one of token-mean"),
    "no divisor": (options(aggregation="constant"), "needs divisor="),
    "idle divisor": (options(divisor=8), "divisor is 8, and aggregation 'token-mean'"),
    "zero divisor": (options(aggregation="constant", divisor=0), "divisor is 0"),
    "NaN divisor": (options(aggregation="constant", divisor=NAN), "divisor is nan"),
    "clip_low": (options(clip_low=1.1), "clip_low is 1.1"),
    "clip_high": (options(clip_high=-0.1), "clip_high -0.1"),
    "dual_clip": (options(dual_clip=1.0), "dual_clip is 1.0; it is above 1"),
    "kind": (lambda: kl(b0["logprob"], b0["logprob"], b0["mask"], kind="k4"), "kind is 'k4'"),
    "clip": (lambda: value_loss(*[b0["value"]] * 3, b0["mask"], clip=-1.0), "clip is -1.0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(call, sentence):
    """Each is a sentence that names the argument, and the first place where it is wrong."""
    with pytest.raises(Refused, match=sentence):
        call()
