"""(c) Add a credit method: a function from Steps to Credit.

`counterpoint credit examples/my_method.py:centred runs.jsonl` runs it without a row in any table.
"""

from counterpoint import Credit, check_credit_method


def centred(steps):
    """Outcome minus the mean of the rollout's group."""
    mean = steps.mean(steps.outcome)
    advantage = (steps.outcome - mean).copy()
    advantage[~steps.mask] = float("nan")
    sample = {"effective_sample_size": len(steps.head)}
    return Credit(advantage, estimand="outcome", parts={"mean": mean}, diagnostics=sample)


if __name__ == "__main__":
    check_credit_method(centred)
    print("centred keeps every promise of a credit method")
