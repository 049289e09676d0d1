"""(f) Train a two-agent team from scratch: play, credit, update."""

from counterpoint import Softmax, Steps, grpo, make, rollout, update


def main(updates=12, lr=0.5):
    env, team = make("research-v0"), Softmax()
    for step in range(updates):
        traces = rollout(env, team, groups=16, rollouts=8, seed=step)
        steps = Steps.from_traces(traces)
        update(team, steps, grpo(steps), lr=lr)
        solved = sum(trace.outcome for trace in traces) / len(traces)
        print(f"update {step:2}: {solved:.2f} of the runs solved")


if __name__ == "__main__":
    main()
