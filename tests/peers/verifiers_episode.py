"""What tests/data/verifiers/episode.json is: an episode that the library verifiers wrote itself.

Two agents, one of them with a sub-agent on a branch, a tool, typed links, advantages. Run where
verifiers 0.4.0 is installed: `python verifiers_episode.py > episode.json`.
"""

from __future__ import annotations

import json

from verifiers.v1.episode import GroupInfo, WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.semantic import ParentLink
from verifiers.v1.trace import Reward, WireTrace
from verifiers.v1.types import (
    AssistantMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)


def said(text: str, parent: int | None, ids: list[int], written: int, **more) -> MessageNode:
    """A turn that wrote the last `written` of its tokens."""
    mask = [False] * (len(ids) - written) + [True] * written
    message = AssistantMessage(content=text, tool_calls=more.pop("tool_calls", None))
    return MessageNode(
        parent=parent,
        message=message,
        sampled=True,
        token_ids=ids,
        mask=mask,
        timestamp=0.0,
        **more,
    )


def fed(message, parent: int | None, ids: list[int]) -> MessageNode:
    mask = [False] * len(ids)
    return MessageNode(parent=parent, message=message, token_ids=ids, mask=mask, timestamp=0.0)


def main() -> None:
    call = ToolCall(id="c1", name="search", arguments='{"q": "it"}')
    called = [ParentLink(node=2, type="subagent_call")]
    returned = [ParentLink(node=4, type=kind) for kind in ("subagent_return", "vendor:review")]
    nodes = [
        fed(SystemMessage(content="You plan."), None, [1, 2]),
        fed(UserMessage(content="Who wrote it?"), 0, [3]),
        said("Ask the reader.", 1, [4, 5, 6], 2, tool_calls=[call], logprobs=[-0.5, -0.25],
             advantages=[1.0, 1.0]),
        fed(UserMessage(content="Read page 3."), None, [7, 8]),
        said("It was Ada.", 3, [9, 10], 1, logprobs=[-1.0], advantages=[-0.5],
             semantic_parents=called),
        fed(ToolMessage(tool_call_id="c1", content="Ada, page 3", name="search"), 2, [11, 12]),
        said("Ada.", 5, [13, 14], 1, logprobs=[-0.125], advantages=[2.0],
             semantic_parents=returned),
    ]  # fmt: skip
    task = {
        "type": "TaskData", "data": {"id": "q1", "prompt": "Who wrote it?"}, "key": "q1"
    }  # fmt: skip
    common = {"task": task, "is_completed": True, "ok": True, "timing": {"start": 0.0}}
    solver = WireTrace(
        id="t0",
        agent={"config": {}, "name": "solver"},
        nodes=nodes,
        rewards={"correct": Reward(score=1.0, weight=0.5), "format": Reward(score=0.25)},
        metrics={"pages": 3.0, "speed": None},
        stop_condition="agent_completed",
        **common,
    )
    judge = WireTrace(
        id="t1",
        agent={"config": {}, "name": "judge", "trainable": False},
        nodes=[fed(UserMessage(content="Is it right?"), None, []), said("yes", 0, [], 0)],
        **common,
    )
    episode = WireEpisode(
        id="r0", task=task, group=GroupInfo(id="g1"), traces=[solver, judge], ok=True
    )
    print(json.dumps(episode.to_record(float_decimals=None), indent=1))


if __name__ == "__main__":
    main()
