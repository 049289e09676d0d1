"""Measured credit of a world of my own: restore a prefix, put an act in, go on to the end."""

from random import Random

from counterpoint import Steps, check_replay, estimate


class Coins:
    """Two agents show a coin each, heads (1) three times in five; two heads win."""

    def restore(self, run, event):  # what was shown before the act, and what will be
        return runs[run][:event], runs[run][event:]

    def put(self, state, action, seed):  # −1 draws the act anew, −2 keeps it, −3 is the default
        shown, rest = state
        act = {-1: coin(seed), -2: rest[0], -3: 0}.get(action)
        return None if act is None else ([*shown, act], len(rest) - 1)

    def go_on(self, state, seed):  # the outcome; environment calls, forward passes, tokens
        shown, left = state
        shown = shown + [coin(seed)] * left
        return float(shown == [1, 1]), (1 + left, left, 0)


def coin(seed):
    return int(Random(seed).random() < 0.6)


runs = [[coin(2 * run), coin(2 * run + 1)] for run in range(40)]
steps = Steps.from_columns(
    rollout=[run for run in range(40) for _ in "12"],
    agent=["first", "second"] * 40,
    outcome=[float(run == [1, 1]) for run in runs for _ in "12"],
)

if __name__ == "__main__":
    print(check_replay(Coins(), steps))
    print(estimate("c3", steps, replay=Coins(), alternatives=16))
