"""What the library verifiers makes of an export of ours: the samples that it would train on.

Run where verifiers is installed: `python verifiers_step.py FOLDER`; writes an episode of two agents
with credit, loads it as verifiers does, and prints its branches as one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verifiers.v1.episode import WireEpisode

from counterpoint.credit import reinforce
from counterpoint.creditfile import entries
from counterpoint.formats import export, read
from counterpoint.recorder import Recorder
from counterpoint.steps import Steps


def main(folder: Path) -> dict[str, object]:
    with Recorder(folder / "t.jsonl") as recorder, recorder.trace(task_id="q") as run:
        first = run.act("p", "a", token_ids=(1, 2), mask=(False, True), logprobs=(0, -0.5))
        run.message("p", "c", "a", causes=[first])
        run.reward(1.0)
        run.act("c", "b", token_ids=(7, 8, 9), mask=(False, True, True), logprobs=(0, -1, -2))
        run.reward(1.0)
        run.act("p", "d", token_ids=(1, 2, 3, 4), mask=(False,) * 3 + (True,),
                logprobs=(0, 0, 0, -0.25))  # fmt: skip
        run.reward(2.0)
    traces = list(read(folder / "t.jsonl"))
    steps = Steps.from_traces(traces)
    credit = reinforce(steps)
    lines = entries(credit, steps.units("turn"), steps.event, traces, method="m", params={})
    (line,) = export("verifiers", traces, credit=lines)
    (trace,) = WireEpisode.model_validate_json(line).traces
    return {
        "credit": credit.values.tolist(),
        "reward": trace.reward,
        "links": [[[p.node, p.type] for p in node.semantic_parents] for node in trace.nodes],
        "branches": [
            [b.token_ids, b.sampled_mask, b.logprobs, b.advantages] for b in trace.branches
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
