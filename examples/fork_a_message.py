"""(e) Fork at a message: what if it had not arrived? Two arms, paired by branch number."""

import re

from my_env import Doors

from counterpoint import fork, rollout


def scout(observation, legal, draws):
    """Tell the leader what it sees."""
    return legal[observation.text[-1]]


def leader(observation, legal, draws):
    """Open the door it was told, else any."""
    told = re.findall(r"^\d$", observation.text, re.MULTILINE)
    return legal[told[-1] if told else str(draws.integer(3))]


if __name__ == "__main__":
    team = {"scout": scout, "leader": leader}
    trace = rollout(Doors(), team, groups=1, rollouts=1)[0]
    message = trace.of("message")[0]
    muted = fork(trace, at=message, do="mute", n=64)
    kept = fork(trace, at=message, do="keep", n=64)
    print(muted)
    print(muted.counts(), muted.mean, muted.stderr, muted.spent)
    worth, stderr = kept.minus(muted)
    print(f"worth of the message: {worth:.2f} ± {stderr:.2f}")
