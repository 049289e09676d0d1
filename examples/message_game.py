"""(g) A game of messages: the planner sees one of eight targets and may say four words about it."""

from counterpoint import Env, check_env

TARGETS = ("anchor", "bell", "candle", "drum", "engine", "feather", "gate", "hammer")
SIGNS = ("ba", "du", "ki", "lo", "mi", "ne", "ra", "so")  # words that mean nothing yet


class Signal(Env):
    id = "signal-v0"
    roles = {"planner": ["message"], "executor": ["stop"]}

    def reset(self, task_seed):
        self.target = TARGETS[task_seed % len(TARGETS)]

    def agents(self):
        return ["planner", "executor"]

    def observe(self, agent):
        return self.target if agent == "planner" else None

    def legal(self, agent):
        return {t: f"stop: {t}" for t in TARGETS} if agent == "executor" else None

    def rewards(self, trace):
        return [(float(trace.of("stop")[0].answer == self.target), None)]


if __name__ == "__main__":
    print(check_env(Signal()))
