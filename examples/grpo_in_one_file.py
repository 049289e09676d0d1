"""GRPO from first principles: sample, compare, push. NumPy only; its last lines meet the package.

A bandit with three arms stands in for the language model. Every update samples groups of rollouts,
credits each rollout against its group, and moves the logits along the gradient of log π(a), which
is one-hot(a) − π, times the credit. Left out of the paper: the clipped ratio (one update a batch,
so it is 1) and the penalty for leaving the reference model.
"""

import numpy as np

PAYS = np.array([0.1, 0.5, 0.9])  # chance that each arm is rewarded


def advantages(reward, group):
    """(R − mean) / (σ + 1e-6) within each group; 0 for a group that does not spread."""
    out = np.zeros(len(reward))
    for own in (group == name for name in set(group.tolist())):
        sigma = reward[own].std(ddof=1)
        if sigma > 1e-6:
            out[own] = (reward[own] - reward[own].mean()) / (sigma + 1e-6)
    return out


def train(updates=60, groups=16, rollouts=8, lr=0.5, seed=0):
    rng, logits = np.random.default_rng(seed), np.zeros(len(PAYS))
    group = np.repeat(np.arange(groups), rollouts)
    for _ in range(updates):
        policy = np.exp(logits) / np.exp(logits).sum()
        arm = rng.choice(len(PAYS), size=len(group), p=policy)
        reward = (rng.random(len(arm)) < PAYS[arm]) * 1.0
        A = advantages(reward, group)
        logits += lr * (np.bincount(arm, A, len(PAYS)) - A.sum() * policy) / len(A)
    return policy, reward, group


if __name__ == "__main__":
    policy, reward, group = train()
    print("policy after training:", policy.round(3))

    from counterpoint import Steps, grpo

    steps = Steps.from_columns(group=group, rollout=np.arange(len(group)), reward=reward)
    assert np.allclose(grpo(steps).values, advantages(reward, group), atol=1e-12)
    print(f"the {len(reward)} advantages of the last batch are those of counterpoint.grpo")
