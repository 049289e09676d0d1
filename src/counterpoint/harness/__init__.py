"""The stage: play an environment under policies, one event at a time, and hand out traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from counterpoint.envs import Env
from counterpoint.harness.attached import Cast, attach, attached
from counterpoint.harness.contract import cast_of, check_policy, check_roles, settings_of
from counterpoint.harness.lockstep import TOGETHER, abreast, answers_many, copies, whereabouts
from counterpoint.harness.run import Human, Run
from counterpoint.harness.stage import next_event
from counterpoint.harness.workers import spread
from counterpoint.policies import Policy, described
from counterpoint.policies.grammar import VERSION as GRAMMAR
from counterpoint.recorder import Recorder
from counterpoint.schema import (
    FORMAT,
    AgentRef,
    AnyEvent,
    EnvRef,
    Header,
    PolicyRef,
    Seal,
    Trace,
    chain,
    encode,
    header_digest,
)
from counterpoint.spelling import CANONICAL, Refused, digest_of, freeze
from counterpoint.tools import rules_of

__all__ = [
    "Cast",
    "Human",
    "Run",
    "attach",
    "attached",
    "header_of",
    "next_event",
    "play",
    "reference",
    "rollout",
    "runs",
    "sealed",
    "team_of",
]

VERSION = 1
"""Version of the harness: a run is replayed by the harness that its header names."""

Config = Mapping[str, Any]
"""`limits`, `latency` and `permissions` that differ from the defaults."""


def rollout(
    env: Env,
    policies: Policy | Mapping[str, Policy],
    *,
    groups: int,
    rollouts: int,
    seed: int = 0,
    config: Config | None = None,
    recorder: Recorder | None = None,
    human: Human | None = None,
    workers: int = 1,
) -> list[Trace]:
    """Play `groups` tasks, `rollouts` times each.

    Args:
        env: the environment; it is reset for every run.
        policies: a policy per role, or one for all.
        groups: how many tasks.
        rollouts: how many runs of each.
        seed: of everything: the same seed gives the same traces, whatever ran before.
        config: limits, latencies and permissions that differ from the defaults.
        recorder: also write every event down as it happens (with workers, or a policy that has
            `many`, as each run ends).
        human: asked where a permission rule says `ask`; without one the answer is no.
        workers: processes that share the runs. Their number changes no trace, as long as policies
            and environment draw from their streams and keep nothing from run to run.

    Returns:
        The sealed traces, group by group.

    Raises:
        Refused: an environment or policy that breaks its contract, a setting that is none, or a
            worker that died. What their own code raises comes through with its traceback.
        OSError: the disk refused; what was recorded before is intact.
    """
    return list(
        runs(
            env,
            policies,
            groups=range(groups),
            rollouts=rollouts,
            seed=seed,
            config=config,
            recorder=recorder,
            human=human,
            workers=workers,
        )
    )


def runs(
    env: Env,
    policies: Policy | Mapping[str, Policy],
    *,
    groups: range,
    rollouts: int,
    seed: int = 0,
    config: Config | None = None,
    recorder: Recorder | None = None,
    human: Human | None = None,
    workers: int = 1,
) -> Iterator[Trace]:
    """The traces of `rollout`, one after another, for some of the groups.

    The policies stand in the headers as they are when the first run begins; do not change them
    before the last one has ended. Where a policy has `many`, up to 256 runs are played side by
    side, each in a copy of the environment; what it is asked for all of them it is asked at once.
    No trace is changed by that, and like those of workers they are recorded as they end.
    """
    if workers < 1 or (workers > 1 and human is not None):
        raise Refused(f"{workers} workers cannot play; one at least, and one if a human is asked")
    team = team_of(env, policies)
    blank = _blank(env, team, config)

    def played(job: tuple[int, int]) -> Trace:
        return play(env, team, _header(blank, *job, seed), None if apart else recorder, human)

    jobs = [(group, number) for group in groups for number in range(rollouts)]
    envs = copies(env) if workers == 1 and human is None and answers_many(team) else None
    apart = workers > 1 or envs is not None
    if envs is not None:
        traces = _side_by_side(envs, team, [_header(blank, *job, seed) for job in jobs])
    else:
        traces = spread(jobs, workers, played) if apart else map(played, jobs)
    for trace in traces:
        if apart and recorder is not None:
            _recorded(recorder, trace.header, partial(_emit_all, trace))
        yield attach(trace, Cast(env, team, human))


def _side_by_side(
    envs: Iterator[Env], team: Mapping[str, Policy], headers: Sequence[Header]
) -> Iterator[Trace]:
    for at in range(0, len(headers), TOGETHER):
        for run in abreast(envs, team, headers[at : at + TOGETHER]):
            yield sealed(run.trace())


def _emit_all(trace: Trace, emit: Emit) -> None:
    for event in trace.events:
        emit(event)


def team_of(env: Env, policies: Policy | Mapping[str, Policy]) -> dict[str, Policy]:
    """A policy for every role.

    Raises:
        Refused: one is missing or cannot be called, or the environment has no id or no roles.
    """
    check_roles(env)
    team = dict(policies) if isinstance(policies, Mapping) else dict.fromkeys(env.roles, policies)
    missing = [role for role in env.roles if role not in team]
    if missing:
        raise Refused(f"{env.id} has the roles {', '.join(env.roles)}; no policy for {missing}")
    for role, policy in team.items():
        check_policy(role, policy)
    return team


def play(
    env: Env,
    team: Mapping[str, Policy],
    header: Header,
    recorder: Recorder | None = None,
    human: Human | None = None,
) -> Trace:
    """Play one run from its header to its seal.

    An exception leaves what was recorded unsealed, and says where in the run it happened.
    """
    env.reset(header.task_seed or 0)
    run = Run(header, env, team, human=human)
    if recorder is None:
        _drive(run, run.emit)
        return sealed(run.trace())
    seal = _recorded(recorder, header, lambda emit: _drive(run, emit, run.emit))
    return _whole(run.trace(), seal)


Emit = Callable[[AnyEvent], AnyEvent]


def _recorded(recorder: Recorder, header: Header, emit_all: Callable[[Emit], None]) -> Seal:
    """Write one trace down and seal it; an exception leaves it unsealed."""
    written = recorder.open(header)
    try:
        emit_all(written.emit)
        return written.end()
    except BaseException as error:
        written.__exit__(type(error), error, error.__traceback__)
        raise


def _drive(run: Run, *takers: Emit) -> None:
    """One event after the other, each to all who take it in, until there is none."""
    with whereabouts(run):
        while (event := next_event(run)) is not None:
            for take in takers:
                take(event)


def sealed(trace: Trace) -> Trace:
    """The trace with its seal: how many events of which kinds, what they cost, the digest."""
    state = header_digest(trace.header)
    kinds: dict[str, int] = {}
    totals: dict[str, Any] = {}
    for event in trace.events:
        state = chain(state, encode(event))
        kinds[event.kind] = kinds.get(event.kind, 0) + 1
        if event.tokens_in or event.tokens_out or event.cost_usd:
            for name in ("tokens_in", "tokens_out", "cost_usd"):
                totals[name] = totals.get(name, 0) + (getattr(event, name) or 0)
    seal = Seal(
        trace_id=trace.trace_id,
        events=len(trace.events),
        kinds=kinds,
        digest=state.hex(),
        **{name: total for name, total in totals.items() if total},
    )
    return _whole(trace, seal)


def _whole(trace: Trace, seal: Seal) -> Trace:
    done = Trace(trace.header, trace.events, seal)
    vars(done)["digest"] = seal.digest  # the cached property, which would compute it again
    return done


# ---------------------------------------------------------------------------------------------
# Headers


def header_of(
    env: Env,
    team: Mapping[str, Policy],
    *,
    group: int,
    rollout: int,
    seed: int,
    config: Config | None = None,
) -> Header:
    """The header of one run: everything needed to play it again.

    The task's seed comes from (seed, group), the run's own from (seed, group, rollout), the trace's
    id from all of it.
    """
    return _header(_blank(env, team, config), group, rollout, seed)


def _blank(env: Env, team: Mapping[str, Policy], config: Config | None) -> Header:
    """What the headers of all runs share."""
    given = config or {}
    known = ("limits", "latency", "permissions")
    settings_read = settings_of(given)
    if odd := [name for name in given if name not in known]:
        raise Refused(f"there is no setting {odd[0]!r}; there are {', '.join(known)}")
    settings = {
        "harness": VERSION,
        "grammar": GRAMMAR,
        "options": env.options,
        **settings_read,
        "schedule": "round_robin",
        "permissions": [msgspec.to_builtins(rule) for rule in rules_of(given)],
    }
    return Header(
        trace_id="",
        writer="counterpoint",
        counterpoint=FORMAT,
        env=EnvRef(id=env.id, digest=env.digest()),
        config_raw=freeze(settings),
        tools={name: spec.digest for name, spec in env.tools().items()},
        policies={role: reference(policy) for role, policy in team.items()},
        topology="harness",
        agents=tuple(AgentRef(id=agent, role=role) for agent, role in cast_of(env).items()),
        delivery="explicit",
    )


def _header(blank: Header, group: int, rollout: int, seed: int) -> Header:
    task_seed = _seed("task", seed, group)
    task = f"{blank.env.id if blank.env else ''}/{task_seed}"
    under = digest_of(CANONICAL.encode([blank.policies, blank.env, blank.config_raw])).hex()
    header = msgspec.structs.replace(
        blank,
        task_id=task,
        group_id=f"{task}@{under[:8]}",
        rollout_id=str(rollout),
        task_seed=task_seed,
        seed=_seed("run", seed, group, rollout),
    )
    return msgspec.structs.replace(header, trace_id=header_digest(header).hex())


def reference(policy: Policy) -> PolicyRef:
    """What a header says of a policy."""
    return PolicyRef(
        target=described(policy, "target"),
        version=described(policy, "version"),
        params_digest=described(policy, "params_digest"),
        deterministic=bool(described(policy, "deterministic")),
    )


def _seed(*parts: Any) -> int:
    """63 bits from the names of what is seeded."""
    return int.from_bytes(digest_of("/".join(map(str, parts)).encode())[:8], "big") >> 1
