"""One update: rows and what they earned move the policies that played them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from counterpoint.ledger import Credit
from counterpoint.policies import described
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive.follow import Team
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.training.step import (
    Learner,
    Loss,
    Rows,
    Rule,
    Stale,
    actors,
    checked,
    fresh,
    sound,
    summed,
)
from counterpoint.training.tables import Moving


def update(
    policies: Team,
    steps: Steps,
    credit: Credit,
    *,
    lr: float,
    loss: Loss = "reinforce",
    epochs: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference: Team | None = None,
    kl: float = 0.0,
    entropy: float = 0.0,
    max_norm: float | None = None,
    stale: Stale = "refuse",
    optimizer: Any = None,
) -> dict[str, float]:
    """Move policies along the gradient of a loss; each one that moved gets a new version.

        θ ← θ − lr · ∇ Σ over rows of (loss − entropy·H + kl·KL) ÷ number of groups

        reinforce    −A · log π(a | o)
        clip         max(−A·ρ, −A·clip(ρ, 1 − clip_low, 1 + clip_high))    ρ = π / π_old of (a | o)

    H is the entropy of the policy in the row's state, KL that from the policy to its reference. For
    tables of logits both are exact. For models π is a token's, Σ runs over the tokens that were
    written, as they were stored, and H and KL are those of a whole turn, by the turns that there
    are: half the square of log π, and of log π − log π_ref, whose mean gradients are those of −H
    and of KL.

    Rows are used by the version of the policy that played them, which every act names. `reinforce`
    takes rows that the policy played as it is now; of others it knows nothing, so they are refused,
    or left out (stale="skip"), or taken as if they were its own ("use"). `clip` takes all of them,
    and weighs each by its ratio to the log-probability that was stored when it was sampled.

    Source: Williams 1992; Schulman et al. 2017 (arXiv:1707.06347, eq. 7).

    Args:
        policies: one policy for all roles, or one per role; a role without one, or whose policy is
            not `trainable`, is left alone.
        steps: rows with `anchor`, `menu` and `action`, as traces of a played environment give; for
            a model, with `tokens`.
        credit: one advantage per row; rows that are NaN, masked, or chose nothing move nothing.
        lr: step size, per group and turn.
        loss: "reinforce" or "clip".
        epochs: steps over the same rows; several need "clip".
        clip_low: how far ρ may fall below 1 before a negative advantage pushes no more.
        clip_high: how far ρ may rise above 1 before a positive advantage pushes no more.
        reference: what `kl` holds the policies to: one policy, or one per role.
        kl: weight of the KL.
        entropy: weight of the entropy.
        max_norm: longest gradient, all policies together; a longer one is scaled down to it.
        stale: what reinforce does with rows of another version: "refuse", "skip" or "use".
        optimizer: of models, a `torch.optim.Optimizer` over their `parameters`, such as Adam; lr is
            put into it. None goes straight down the gradient, as tables always do.

    Returns:
        Numbers of the last epoch, before its step: rows (that were used), stale (left out), loss,
        gradient_norm (Euclidean length, before it is scaled down), entropy (nats, mean over rows);
        with a reference kl (nats); of "clip" clip_fraction (share of rows whose gradient is 0) and
        approx_kl (mean of log π_old − log π). Nothing to learn gives a gradient of length 0 and no
        new version.

    Raises:
        Refused: credit of another length or unit, a missing column, an option out of range, stale
            rows, a policy that cannot be updated; or a loss or gradient that is no finite number,
            with epoch and traces. Then no policy has changed.
    """
    rule = Rule(lr, loss, epochs, clip_low, clip_high, kl, entropy, max_norm, stale)
    checked(rule, steps, credit)
    if kl and reference is None:
        raise Refused(f"kl is {kl}, and there is no reference to be near to; give reference=")
    used = credit.credited & steps.mask
    learners: list[Learner] = []
    rows, left = [], 0
    for policy, roles in actors(policies, steps):
        own = np.flatnonzero(used & np.isin(steps.role, roles))
        kept = fresh(policy, steps, own, rule)
        left += len(own) - len(kept)
        held = _reference(reference, steps, roles)
        learners.append(_learner(policy, Rows(steps, kept, credit.values[kept], held), optimizer))
        rows.append(kept)
    told: dict[str, float] = {"rows": sum(map(len, rows)), "stale": left}
    if not learners:
        return told | {"loss": 0.0, "gradient_norm": 0.0}
    try:
        for epoch in range(epochs):
            slopes = [learner.slope(rule) for learner in learners]
            length = sound(steps, slopes, rows, epoch)
            scale = 1.0 if max_norm is None or length <= max_norm else max_norm / length
            for learner in learners:
                learner.move(lr, scale)
        for learner in learners:
            learner.install()
    except BaseException:
        for learner in learners:
            learner.give_up()
        raise
    return told | summed(slopes) | {"gradient_norm": length}


def _reference(reference: Team | None, steps: Steps, roles: list[int]) -> Any:
    """What the policy of these roles is held to."""
    if not isinstance(reference, Mapping):
        return reference
    return next((reference[n] for c in roles if (n := steps.names["role"][c]) in reference), None)


def _learner(policy: Any, rows: Rows, optimizer: Any) -> Learner:
    if isinstance(policy, Softmax):
        return Moving(policy, rows)
    if described(policy, "logprobs_of"):
        from counterpoint.training.torch_updates import Descending

        return Descending(policy, rows, optimizer)
    raise Refused(
        f"the policy is a {type(policy).__name__}, which has no `logprobs_of` and is no table, so "
        "that `update` cannot move it"
    )
