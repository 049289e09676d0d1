"""Who learns: everybody, some roles, or the orchestrator alone; by one policy, or one for each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from counterpoint.envs import Env
from counterpoint.harness import team_of
from counterpoint.policies import Policy, described
from counterpoint.redrive.follow import Team
from counterpoint.spelling import Refused


def cast_for(
    env: Env, policies: Team, learners: Sequence[str] | None = None, shared: bool = True
) -> dict[str, Policy]:
    """A policy for every role: those that learn, and frozen copies for the rest.

    A frozen copy acts as its policy does now, and goes on so when that one has moved. Its acts are
    recorded as not trainable, so that nobody credits them; what others earn by them stays.

    Args:
        env: whose roles they are.
        policies: one policy for all roles, or one per role.
        learners: roles that learn; by default all.
        shared: whether roles that are given one policy go on sharing it. If not, each role that
            learns gets a copy of its own.

    Raises:
        Refused: a role that the environment does not have; nobody who learns can.
    """
    team = team_of(env, policies)
    chosen = tuple(env.roles) if learners is None else tuple(learners)
    if odd := [role for role in chosen if role not in team]:
        raise Refused(f"{env.id} has the roles {', '.join(team)}; {odd[0]!r} is none of them")
    if not any(described(team[role], "trainable") for role in chosen):
        raise Refused(f"none of {', '.join(chosen) or 'no role'} has a policy that can learn")
    kept: dict[int, Policy] = {}
    cast: dict[str, Policy] = {}
    for role, policy in team.items():
        if role not in chosen:
            cast[role] = kept.setdefault(id(policy), frozen(policy))
        elif shared or policy not in cast.values():
            cast[role] = policy
        else:
            cast[role] = copy.deepcopy(policy)
    return cast


def frozen(policy: Policy) -> Any:
    """A copy that acts alike and never learns; a policy that does not learn is its own."""
    if not described(policy, "trainable"):
        return policy
    held: Any = copy.deepcopy(policy)
    held.trainable = False
    return held
