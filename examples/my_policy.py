"""A plain function as a policy: it reads what an agent sees and draws what chance it needs."""

from counterpoint import make, rollout


def curious(observation, legal, draws):
    """Mostly the first entry of the menu; one time in four any of them."""
    texts = list(legal.values())
    return texts[draws.integer(len(texts))] if draws.random() < 0.25 else texts[0]


if __name__ == "__main__":
    for trace in rollout(make("research-v0"), curious, groups=2, rollouts=4, seed=1):
        said = [act.text for act in trace.of("act")]
        print(f"{trace.outcome:+.2f} in {len(said)} turns, the last: {said[-1]!r}")
