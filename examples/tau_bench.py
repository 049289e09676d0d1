"""(g) tau-bench: GRPO against GiGPO on runs that other people recorded."""

import sys
from pathlib import Path

from counterpoint import Steps, gigpo, grpo, read, score

RUNS = Path(__file__).parent.parent / "tests/data/tau_bench/gpt-4o-airline.json.gz"


def main(path=RUNS):
    steps = Steps.from_traces(read(path, format="openai_chat"))
    a, b = grpo(steps), gigpo(steps, gamma=0.95)
    print(a)
    print(b)
    print(score(b, a))
    print(b.why())


if __name__ == "__main__":
    main(*sys.argv[1:])
