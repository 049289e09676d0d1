"""(b) Advantages from the arrays of your trainer."""

import numpy as np

from counterpoint import Steps, grpo

uid = ["q1", "q1", "q1", "q1", "q2"]  # which prompt
traj = ["a", "a", "b", "c", "d"]  # which rollout of it
reward = [0.0, 1.0, 0.0, 1.0, 1.0]  # what each turn earned
response_mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])


def main():
    credit = grpo(Steps.from_columns(group=uid, rollout=traj, reward=reward))
    print(credit)
    print(credit.why())
    print(credit.tokens(response_mask))


if __name__ == "__main__":
    main()
