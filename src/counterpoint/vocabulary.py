"""The words of the format: what a label, an edge, a unit, a decision, a check may be called.

The structs of `schema` are typed by them; the documentation prints them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Trust: TypeAlias = Literal["untrusted", "unknown", "human", "trusted"]
TRUST: tuple[str, ...] = get_args(Trust)
"""Trust labels from lowest to highest."""

EdgeKind: TypeAlias = Literal[
    "precedes",
    "authorizes",
    "spawns",
    "delegates",
    "delivers",
    "consumes",
    "answers",
    "returns",
    "aggregates",
    "derives",
    "guards",
    "rewards",
    "forks",
]
EDGES: dict[str, str] = {
    "precedes": "comes after in the same agent's life, or in the order of turns",
    "authorizes": "an act allows its effect: a call, a message, a write",
    "spawns": "a spawn brings an agent to life",
    "delegates": "a delegation asks for work",
    "delivers": "a message reaches a mailbox",
    "consumes": "an observation shows an earlier event to an agent",
    "answers": "a result answers its call",
    "returns": "a return answers its delegation",
    "aggregates": "an input goes into an aggregate",
    "derives": "content or state was computed from it",
    "guards": "a check bears on it",
    "rewards": "a reward depends on it",
    "forks": "an edited event stands on the intervention that put it there",
}
FAMILIES: dict[str, str] = {
    "R1": "shared team or outcome",
    "R2": "individual agent",
    "R3": "role",
    "R4": "process",
    "R5": "tool use",
    "R6": "debate or verifier",
    "R7": "orchestration and its costs",
    "R8": "hybrid",
}
UNITS: tuple[str, ...] = (
    "token",
    "turn",
    "message",
    "tool_call",
    "agent",
    "role",
    "decision",
    "team",
)
"""What can carry credit, from the densest to the sparsest."""

DECISIONS: tuple[str, ...] = ("spawn", "delegate", "message", "aggregate", "stop")
"""The five orchestration decisions; `no_spawn` … `no_stop` say that one was declined."""

Verb: TypeAlias = Literal[
    "spawn",
    "delegate",
    "message",
    "aggregate",
    "stop",
    "no_spawn",
    "no_delegate",
    "no_message",
    "no_aggregate",
    "no_stop",
    "call",
    "write",
    "return",
    "despawn",
    "none",
]
StopReason: TypeAlias = Literal[
    "answered",
    "finished",
    "verifier",
    "deadlock",
    "step_limit",
    "token_limit",
    "time_limit",
    "budget",
    "error",
    "cancelled",
    "intervened",
    "unknown",
]
Verifiable: TypeAlias = Literal[
    "executed", "checked_fact", "artefact_diff", "judge", "self_report", "count"
]
EXECUTED: tuple[Verifiable, ...] = ("executed", "checked_fact", "artefact_diff")
"""Checks that are carried out: a reward by one of them keeps its own label of trust."""

Status: TypeAlias = Literal["completed", "errored", "cancelled", "timed_out"]
Family: TypeAlias = Literal["R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8"]
Topology: TypeAlias = Literal[
    "centralized",
    "planner_executor_critic",
    "debate",
    "swarm",
    "hierarchical",
    "harness",
    "mixed",
    "unknown",
]

RESERVED: frozenset[str] = frozenset({"env", "human", "harness"})
"""Ids that name no agent."""
