"""What a trainer minimises: policy losses, KL estimates, value loss and entropy, on torch tensors.

Every function is pure and takes tensors of shape (rows, tokens) with one mask. What stands at a
masked position is replaced before any arithmetic, so NaN and infinity there are allowed, and the
gradient with respect to them is exactly 0. (A log-softmax that is NaN itself turns even a zero into
NaN on the way back; that one is the model's.) Arithmetic is in float32 at least, in float64 where
an argument is. The checks read the tensors, which makes a GPU wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.spelling import Refused

_BOUND = 20.0  # of a log-ratio, so that its exponential stays finite in float32
_MOST_KL = 10.0
_ROUNDING = 1e-4  # what float32 leaves of `logit − logsumexp` where a logit is about a thousand


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss to minimise, and what it rests on.

    Attributes:
        loss: scalar tensor with a gradient; 0, with gradient 0, where every token is masked.
        tokens: number of unmasked tokens.
        clip_fraction: share of unmasked tokens whose gradient the clip stops; NaN for a loss
            without a clip, and where every token is masked.
        approx_kl: mean over unmasked tokens of logprob_old − logprob, each within ±20, in nats: the
            k1 estimate of KL(old ‖ new). NaN as above.
    """

    loss: Tensor
    tokens: int
    clip_fraction: float = math.nan
    approx_kl: float = math.nan


# ---------------------------------------------------------------------------------------------
# Policy


def reinforce_loss(
    logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token-mean",
    divisor: float | None = None,
) -> Loss:
    """The loss whose negative gradient is the REINFORCE estimate: −A·log π(a), aggregated.

    Source: Williams 1992 (Machine Learning 8, §4).

    Args:
        logprob: (rows, tokens) float, log π of each token under the policy being updated, in nats.
        advantage: (rows, tokens) float, a constant: no gradient reaches it.
        mask: (rows, tokens) bool or 0 and 1; 1 where the token is trained.
        aggregation: how tokens become one number, as in `aggregate`.
        divisor: of aggregation "constant".

    Returns:
        The loss; all masked gives 0 with gradient 0.

    Raises:
        Refused: a shape that differs from the mask's, an unmasked NaN or infinity, a
            log-probability above 0 by more than rounding (1e-4), an unknown aggregation, a missing
            divisor.
    """
    on = _switch(mask)
    A = _numbers("advantage", advantage, on).detach()
    term = -A * _logprobs("logprob", logprob, on)
    return Loss(_aggregate(term, on, aggregation, divisor), int(on.sum()))


def clipped_surrogate(
    logprob: Tensor,
    logprob_old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token-mean",
    divisor: float | None = None,
) -> Loss:
    """PPO's clipped surrogate, with two bounds and the dual clip.

        ρ = exp(clamp(logprob − logprob_old, ±20))
        term = max(−A·ρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high))
        with a dual clip, where A < 0:  min(term, −dual_clip·A)

    The gradient of a token is −A·ρ, and exactly 0 where A > 0 and ρ > 1 + clip_high, where A < 0
    and ρ < 1 − clip_low, where A < 0 and ρ > dual_clip, and where the clamp holds ρ; on a bound
    itself it is −A·ρ. `clip_fraction` counts the first two, strictly, as
    `counterpoint.credit.ppo_ratio` does: it is no share of ratios outside the band.

    Source: Schulman et al. 2017 (arXiv:1707.06347, eq. 7); two bounds: DAPO (arXiv:2503.14476,
    §3.1); dual clip: Ye et al. 2020 (arXiv:1912.09729).

    Args:
        logprob: (rows, tokens) float, log π of each token under the policy being updated, in nats.
        logprob_old: (rows, tokens) float, the same under the policy that sampled; a constant.
        advantage: (rows, tokens) float, a constant.
        mask: (rows, tokens) bool or 0 and 1; 1 where the token is trained.
        clip_low: how far ρ may fall below 1, 0 to 1.
        clip_high: how far ρ may rise above 1, 0 or more.
        dual_clip: the largest ρ that a negative advantage is weighed with, above 1 (3 in the
            paper); None for no dual clip.
        aggregation: how tokens become one number, as in `aggregate`.
        divisor: of aggregation "constant".

    Returns:
        The loss with `clip_fraction` (before the dual clip) and `approx_kl`; all masked gives loss
        0 with gradient 0, and NaN for these two.

    Raises:
        Refused: what `reinforce_loss` refuses; a clip out of range.
    """
    if not (0 <= clip_low <= 1 and 0 <= clip_high < math.inf):
        raise Refused(f"clip_low is {clip_low!r}, clip_high {clip_high!r}; 0 to 1, and 0 or more")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise Refused(f"dual_clip is {dual_clip!r}; it is above 1, or None for no dual clip")
    on = _switch(mask)
    A = _numbers("advantage", advantage, on).detach()
    old = _logprobs("logprob_old", logprob_old, on).detach()
    gap = torch.clamp(_logprobs("logprob", logprob, on) - old, -_BOUND, _BOUND)
    ratio = gap.exp()
    stopped = ((A > 0) & (ratio > 1 + clip_high)) | ((A < 0) & (ratio < 1 - clip_low))
    # Chosen by the region instead of by `maximum`, which would halve the gradient on a tie.
    nearest = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    term = -A * torch.where(stopped, nearest, ratio)
    if dual_clip is not None:
        term = torch.where((A < 0) & (ratio > dual_clip), -dual_clip * A, term)
    loss = _aggregate(term, on, aggregation, divisor)
    return Loss(loss, int(on.sum()), _mean(stopped, on), _mean(-gap, on))


def kl(logprob: Tensor, logprob_ref: Tensor, mask: Tensor, *, kind: str = "k3") -> Tensor:
    """Estimate KL(π ‖ reference) from the tokens that π sampled, one number each.

        Δ = logprob − logprob_ref
        k1 = Δ    abs = |Δ|    k2 = ½Δ²    k3 = min(exp(d) − d − 1, 10), d = clamp(−Δ, ±20)

    On average over π, k1 and k3 (but for the clamps) are the KL. As losses they are not alike: the
    mean gradient of k1 is 0, that of k2 is the gradient of KL(π ‖ reference), and that of k3 is the
    gradient of KL(reference ‖ π). k3 is never negative; where it stands at 10, for Δ below −2.61 or
    above 11, its gradient is 0, so it does not pull back a token that has gone that far.

    Source: Schulman 2020 (joschu.net/blog/kl-approx.html); k3 as a loss: DeepSeekMath
    (arXiv:2402.03300, eq. 4). verl calls them kl, abs, mse and low_var_kl.

    Args:
        logprob: (rows, tokens) float, log π of each token under the policy being updated, in nats.
        logprob_ref: (rows, tokens) float, the same under the reference; a constant.
        mask: (rows, tokens) bool or 0 and 1.
        kind: k1, abs, k2 or k3.

    Returns:
        (rows, tokens), in nats; 0 where masked. `aggregate` makes one number of it.

    Raises:
        Refused: what `reinforce_loss` refuses of log-probabilities; an unknown kind.
    """
    if kind not in _KL:
        raise Refused(f"kind is {kind!r}, not one of {', '.join(_KL)}")
    on = _switch(mask)
    ref = _logprobs("logprob_ref", logprob_ref, on).detach()
    return _KL[kind](_logprobs("logprob", logprob, on) - ref)


def _k3(gap: Tensor) -> Tensor:
    d = torch.clamp(-gap, -_BOUND, _BOUND)
    return torch.clamp(torch.expm1(d) - d, max=_MOST_KL)


_KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: gap,
    "abs": torch.abs,
    "k2": lambda gap: 0.5 * gap**2,
    "k3": _k3,
}


def entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Entropy of the policy at every token: H = −Σ_a π(a) log π(a), π = softmax(logits).

    Its gradient in logit a is −π(a)(log π(a) + H).

    Args:
        logits: (rows, tokens, actions) float. −inf is an action that cannot be taken: it adds 0,
            and its gradient is 0.
        mask: (rows, tokens) bool or 0 and 1.

    Returns:
        (rows, tokens), in nats; 0 where masked. `aggregate` makes one number of it.

    Raises:
        Refused: logits of another shape, an unmasked NaN or +inf, an unmasked token at which no
            action can be taken.
    """
    on = _switch(mask)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != on.shape:
        raise Refused(
            f"logits has {_shape(logits)} where a tensor of shape (rows, tokens, actions) is "
            f"needed, the first two as the mask's {tuple(on.shape)}"
        )
    if not logits.shape[2]:
        raise Refused("logits has no action in its last dimension")
    _check_kind("logits", logits, on)
    largest = logits.detach().amax(-1)
    _refuse(on & ~largest.isfinite(), "the largest logit", largest, "a finite number is needed")
    logp = torch.log_softmax(_widen(logits[on]), dim=-1)
    # 0·log 0 is 0; the zero has to stand inside, or its gradient would be 0·∞.
    each = -torch.sum(logp.exp() * torch.where(torch.isneginf(logp), 0.0, logp), dim=-1)
    return torch.zeros(on.shape, dtype=each.dtype, device=on.device).index_put((on,), each)


# ---------------------------------------------------------------------------------------------
# Critic


def value_loss(
    value: Tensor, value_old: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> Loss:
    """Half the mean squared error of a critic over the unmasked tokens, with PPO's value clip.

        term = ½(V − G)²
        with a clip:  ½ max((V − G)², (clip(V, V_old ± clip) − G)²)

    The gradient of a token is V − G; with a clip it is exactly 0 where V has left V_old ± clip and
    the end of that band is farther from G than V is: a critic is stopped on its way to the return,
    never on its way back.

    Source: Schulman et al. 2017 (arXiv:1707.06347, eq. 9); the clip is in the authors' code only,
    see Engstrom et al. 2020 (arXiv:2005.12729, §3).

    Args:
        value: (rows, tokens) float, V of the critic being updated.
        value_old: (rows, tokens) float, V when the rows were sampled; a constant.
        returns: (rows, tokens) float, G, what V should be; a constant.
        mask: (rows, tokens) bool or 0 and 1.
        clip: how far V may move from V_old, 0 or more; None for no clip.

    Returns:
        The loss with `clip_fraction`, the share of tokens with gradient 0; NaN without a clip. All
        masked gives loss 0 with gradient 0.

    Raises:
        Refused: a shape that differs from the mask's, an unmasked NaN or infinity, a negative clip.
    """
    if clip is not None and not 0 <= clip < math.inf:
        raise Refused(f"clip is {clip!r}; it is 0 or more, or None for no clip")
    on = _switch(mask)
    V = _numbers("value", value, on)
    old = _numbers("value_old", value_old, on).detach()
    G = _numbers("returns", returns, on).detach()
    term, stopped = (V - G) ** 2, math.nan
    if clip is not None:
        held = (torch.clamp(V.detach(), old - clip, old + clip) - G) ** 2
        stopped = _mean(held > term, on)
        term = torch.where(held > term, held, term)
    return Loss(0.5 * _aggregate(term, on, "token-mean", None), int(on.sum()), stopped)


# ---------------------------------------------------------------------------------------------
# From tokens to one number


def aggregate(
    x: Tensor, mask: Tensor, aggregation: str = "token-mean", divisor: float | None = None
) -> Tensor:
    """Make one number of a number per token; a row is a sequence.

        token-mean          Σ x ÷ unmasked tokens: long sequences weigh more
        seq-mean-token-sum  mean over sequences of their sum: long sequences weigh more
        seq-mean-token-mean mean over sequences of their mean: each token of a long one weighs less
        constant            Σ x ÷ divisor, e.g. rows × longest answer: no length weighs anything

    Sequences without an unmasked token are no part of a mean over sequences.

    Source: the first is DAPO's (arXiv:2503.14476, §3.3), the third GRPO's (arXiv:2402.03300,
    eq. 3), the last Dr.GRPO's (arXiv:2503.20783, §3).

    Args:
        x: (rows, tokens) float.
        mask: (rows, tokens) bool or 0 and 1.
        aggregation: one of the four names.
        divisor: above 0; with "constant", and only with it.

    Returns:
        A scalar tensor; all masked gives 0 with gradient 0.

    Raises:
        Refused: another shape than the mask's, an unmasked NaN or infinity, an unknown aggregation,
            a divisor that is missing, in vain or not above 0.
    """
    on = _switch(mask)
    return _aggregate(_numbers("x", x, on), on, aggregation, divisor)


_AGGREGATIONS: dict[str, Callable[[Tensor, float], Tensor | float]] = {
    "token-mean": lambda on, _: on.sum(),
    "seq-mean-token-sum": lambda on, _: on.any(1).sum(),
    "seq-mean-token-mean": lambda on, _: on.any(1).sum() * on.sum(1, keepdim=True),
    "constant": lambda _, divisor: divisor,
}
"""What the term of a token is divided by: a number, or (rows, 1). 0 only where nothing counts."""


def _aggregate(x: Tensor, on: Tensor, aggregation: str, divisor: float | None) -> Tensor:
    """`aggregate` of terms that are 0 where masked."""
    if aggregation not in _AGGREGATIONS:
        raise Refused(f"aggregation is {aggregation!r}, not one of {', '.join(_AGGREGATIONS)}")
    if aggregation == "constant" and divisor is None:
        raise Refused("aggregation 'constant' needs divisor=, such as rows × longest answer")
    if aggregation != "constant" and divisor is not None:
        raise Refused(f"divisor is {divisor!r}, and aggregation {aggregation!r} divides by none")
    if divisor is not None and not 0 < divisor < math.inf:
        raise Refused(f"divisor is {divisor!r}; it is a number above 0")
    per = _AGGREGATIONS[aggregation](on, divisor or 0.0)
    return torch.sum(x / (per if isinstance(per, float | int) else per.clamp(min=1)))


def _mean(x: Tensor, on: Tensor) -> float:
    """Mean over unmasked tokens, NaN if there are none."""
    return float(x.detach()[on].double().mean())


# ---------------------------------------------------------------------------------------------
# What goes in


def _switch(mask: Tensor) -> Tensor:
    """The mask as booleans."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise Refused(f"mask has {_shape(mask)} where a tensor of shape (rows, tokens) is needed")
    _refuse((mask != 0) & (mask != 1), "mask", mask, "it is 0 or 1")
    return mask.bool()


def _numbers(name: str, x: Tensor, on: Tensor) -> Tensor:
    """The tensor as it counts: finite where the mask is set, 0 elsewhere, float32 or wider."""
    if not isinstance(x, Tensor) or x.shape != on.shape:
        raise Refused(
            f"{name} has {_shape(x)} where a tensor of the mask's shape {tuple(on.shape)} is "
            "needed; nothing is broadcast"
        )
    _check_kind(name, x, on)
    _refuse(on & ~torch.isfinite(x), name, x, "a finite number is needed, or a 0 in the mask")
    return torch.where(on, _widen(x), 0.0)


def _logprobs(name: str, x: Tensor, on: Tensor) -> Tensor:
    """`_numbers` that are log-probabilities."""
    counted = _numbers(name, x, on)
    _refuse(counted > _ROUNDING, name, x, "a log-probability is at most 0")
    return counted


def _check_kind(name: str, x: Tensor, on: Tensor) -> None:
    if not x.is_floating_point():
        raise Refused(f"{name} has dtype {x.dtype} where a floating-point tensor is needed")
    if x.device != on.device:
        raise Refused(f"{name} lies on {x.device} and the mask on {on.device}; bring them together")


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _refuse(bad: Tensor, name: str, x: Tensor, rule: str) -> None:
    """Refuse the first token that breaks a rule."""
    if bool(bad.any()):
        row, token = bad.nonzero()[0].tolist()
        raise Refused(f"{name} is {float(x[row, token]):g} at row {row}, token {token}; {rule}")


def _shape(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
