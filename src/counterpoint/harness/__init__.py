"""The stage: play an environment under policies, one event at a time, and hand out traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from counterpoint.envs import Env
from counterpoint.harness.run import LATENCY, LIMITS, Human, Run
from counterpoint.harness.stage import next_event
from counterpoint.policies import Policy, described
from counterpoint.policies.grammar import VERSION as GRAMMAR
from counterpoint.recorder import Recorder
from counterpoint.schema import FORMAT, AgentRef, EnvRef, Header, PolicyRef, Seal, Trace
from counterpoint.spelling import CANONICAL, Refused, digest_of, freeze

__all__ = ["Human", "Run", "header_of", "next_event", "play", "rollout", "team_of"]

VERSION = 1
"""Version of the harness: a run is replayed by the harness that its header names."""


def rollout(
    env: Env,
    policies: Policy | Mapping[str, Policy],
    *,
    groups: int,
    rollouts: int,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    recorder: Recorder | None = None,
    human: Human | None = None,
) -> list[Trace]:
    """Play `groups` tasks, `rollouts` times each.

    Args:
        env: the environment; it is reset for every run.
        policies: a policy per role, or one for all.
        groups: how many tasks.
        rollouts: how many runs of each.
        seed: of everything: the same seed gives the same traces, whatever ran before.
        config: limits, latencies and permissions that differ from the defaults.
        recorder: also write every event down as it happens.
        human: asked where a permission rule says `ask`.

    Returns:
        The sealed traces, group by group.

    Raises:
        Refused: an environment or policy that breaks its contract.
    """
    return list(runs(env, policies, groups=range(groups), rollouts=rollouts, seed=seed,
                     config=config, recorder=recorder, human=human))  # fmt: skip


def runs(
    env: Env,
    policies: Policy | Mapping[str, Policy],
    *,
    groups: range,
    rollouts: int,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    recorder: Recorder | None = None,
    human: Human | None = None,
) -> Iterator[Trace]:
    """The traces of `rollout`, one after another, for some of the groups."""
    team = team_of(env, policies)
    for group in groups:
        for number in range(rollouts):
            header = header_of(env, team, group=group, rollout=number, seed=seed, config=config)
            yield play(env, team, header, recorder, human)


def team_of(env: Env, policies: Policy | Mapping[str, Policy]) -> dict[str, Policy]:
    """A policy for every role. Raises Refused if one is missing."""
    if not isinstance(policies, Mapping):
        return dict.fromkeys(env.roles, policies)
    missing = [role for role in env.roles if role not in policies]
    if missing:
        raise Refused(f"{env.id} has the roles {', '.join(env.roles)}; no policy for {missing}")
    return dict(policies)


def play(
    env: Env,
    team: Mapping[str, Policy],
    header: Header,
    recorder: Recorder | None = None,
    human: Human | None = None,
) -> Trace:
    """Play one run from its header to its seal."""
    env.reset(header.task_seed or 0)
    run = Run(header, env, team, human=human)
    if recorder is None:
        while (event := next_event(run)) is not None:
            run.emit(event)
        return sealed(run.trace())
    with recorder.open(header) as written:
        while (event := next_event(run)) is not None:
            written.emit(event)
            run.emit(event)
    return sealed(run.trace())


def sealed(trace: Trace) -> Trace:
    """The trace with its seal: how many events of which kinds, what they cost, the digest."""
    totals: dict[str, Any] = {}
    for name in ("tokens_in", "tokens_out", "cost_usd"):
        figures = [v for v in (getattr(event, name) for event in trace.events) if v]
        if figures:
            totals[name] = sum(figures)
    kinds = dict(Counter(event.kind for event in trace.events))
    seal = Seal(
        trace_id=trace.trace_id,
        events=len(trace.events),
        kinds=kinds,
        digest=trace.digest,
        **totals,
    )
    return Trace(trace.header, trace.events, seal)


def header_of(
    env: Env,
    team: Mapping[str, Policy],
    *,
    group: int,
    rollout: int,
    seed: int,
    config: Mapping[str, Any] | None = None,
) -> Header:
    """The header of one run: everything needed to play it again.

    The task's seed comes from (seed, group), the run's own from (seed, group, rollout), the trace's
    id from all of it.
    """
    refs = {role: _ref(policy) for role, policy in team.items()}
    task_seed = _seed("task", seed, group)
    task = f"{env.id}/{task_seed}"
    names = CANONICAL.encode(refs)
    settings = {
        "harness": VERSION,
        "grammar": GRAMMAR,
        "options": env.options,
        "limits": {**LIMITS, **(config or {}).get("limits", {})},
        "latency": {**LATENCY, **(config or {}).get("latency", {})},
        "schedule": "round_robin",
        "permissions": (config or {}).get("permissions", []),
    }
    ref = EnvRef(id=env.id, digest=env.digest())
    identity = [ref.id, ref.digest, settings, task_seed, seed, group, rollout]
    return Header(
        trace_id=digest_of(CANONICAL.encode(identity) + names).hex(),
        writer="counterpoint",
        counterpoint=FORMAT,
        task_id=task,
        group_id=f"{task}@{digest_of(names).hex()[:8]}",
        rollout_id=str(rollout),
        env=ref,
        task_seed=task_seed,
        seed=_seed("run", seed, group, rollout),
        config_raw=freeze(settings),
        tools={name: spec.digest for name, spec in env.tools().items()},
        policies=refs,
        topology="harness",
        agents=tuple(AgentRef(id=agent, role=role) for agent, role in env.start().items()),
        delivery="explicit",
    )


def _ref(policy: Policy) -> PolicyRef:
    return PolicyRef(
        target=described(policy, "target"),
        version=described(policy, "version"),
        params_digest=described(policy, "params_digest"),
        deterministic=bool(described(policy, "deterministic")),
    )


def _seed(*parts: Any) -> int:
    """63 bits from the names of what is seeded."""
    return int.from_bytes(digest_of("/".join(map(str, parts)).encode())[:8], "big") >> 1
