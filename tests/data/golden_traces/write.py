"""Write the golden traces of this format version: `python tests/data/golden_traces/write.py`.

A file that exists is left as it is; delete it first if the version was never released.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from counterpoint.envs import ENVS, make  # noqa: E402
from counterpoint.harness import rollout  # noqa: E402
from counterpoint.policies.tabular import Softmax  # noqa: E402
from counterpoint.recorder import Recorder  # noqa: E402
from counterpoint.schema import FORMAT  # noqa: E402
from little_envs import Doors, Fog, Office  # noqa: E402


def own_loop(path):
    """What a loop of one's own writes."""
    with Recorder(path) as rec, rec.trace(task_id="capital-of-peru") as t:
        t.act("planner", "ask the worker")
        t.message("planner", to="worker", content="the capital of Perú?")
        call = t.tool_call("worker", "search", {"q": "Perú"})
        t.tool_result(call, {"found": ["Lima", 1535, None, 0.5]})
        t.act("worker", "Lima", token_ids=[3, 5], logprobs=[-0.5, -0.25])
        t.stop("worker", answer="Lima")
        t.reward(1.0)


def played(env):
    """What the harness writes."""

    def write(path):
        with Recorder(path, sync="trace") as rec:
            rollout(env, Softmax(), groups=1, rollouts=2, seed=1, recorder=rec)

    return write


FILES = {
    "own-loop": own_loop,
    **{env.id: played(env) for env in (Doors(), Fog(), Office(), *map(make, ENVS))},
}

for name, write in FILES.items():
    if not (path := HERE / f"{FORMAT}-{name}.jsonl").exists():
        write(path)
