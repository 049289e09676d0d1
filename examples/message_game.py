"""(g) A game of messages: a planner sees one of eight targets and may say four words about it, an
executor names a target. There are no menus, and the words mean nothing until a team agrees.
"""

from counterpoint import Env, rollout

TARGETS = ("anchor", "bell", "candle", "drum", "engine", "feather", "gate", "hammer")
SIGNS = ("ba", "du", "ki", "lo", "mi", "ne", "ra", "so")


class Signal(Env):
    id = "signal-v0"
    roles = {"planner": ["message"], "executor": ["stop"]}

    def reset(self, task_seed):
        self.target = TARGETS[task_seed % len(TARGETS)]

    def agents(self):
        return ["planner", "executor"]  # the executor's answer ends the run

    def observe(self, agent):
        return self.target if agent == "planner" else None

    def rewards(self, trace):
        return [(float(trace.of("stop")[0].answer == self.target), None)]


def babble(observation, legal, draws):
    said, words = {"planner": ("message executor", SIGNS), "executor": ("stop", TARGETS)}[
        observation.role
    ]
    return f"{said}: {words[draws.integer(8)]}"


if __name__ == "__main__":
    traces = rollout(Signal(), babble, groups=8, rollouts=32)
    print(f"chance: {sum(trace.outcome for trace in traces) / len(traces):.3f}")
