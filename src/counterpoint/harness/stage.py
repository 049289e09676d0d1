"""The state machine: from the world to the event that comes next.

stopped → what the environment pays; an open call → its result; an item left → its effect;
an observation → the agent's act; otherwise a delivery to whoever is next, its observation, a stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from counterpoint.envs import Amount, Env
from counterpoint.harness.effects import answer, effect
from counterpoint.harness.prompt import new_turns, observation_of
from counterpoint.harness.run import Run, environment, made
from counterpoint.policies import Output, described
from counterpoint.policies.grammar import parse
from counterpoint.schema import (
    DECISIONS,
    EXECUTED,
    Act,
    AnyEvent,
    Cause,
    Deliver,
    Item,
    Observe,
    Reward,
    Source,
    Spawn,
    Stop,
    Target,
    ToolCall,
    Verb,
)
from counterpoint.spelling import Refused, freeze
from counterpoint.world import World

_STOPS: tuple[tuple[str, str], ...] = (
    ("turns", "step_limit"),
    ("calls", "budget"),
    ("tokens", "token_limit"),
)


def next_event(run: Run) -> AnyEvent | None:
    """The event that comes next, not yet emitted; None when the run is over.

    Raises:
        Refused: an environment or a policy breaks its contract; the sentence names who and how.
    """
    run.env.bind(run.world, run.events)
    world = run.world
    if world.stopped is not None:
        return _pay(run)
    if world.open_calls:
        return answer(run, cast(ToolCall, run.events[next(iter(world.open_calls))]))
    item = world.control.next_item
    if item is not None:
        return effect(run, item)
    if world.control.observe is not None:
        return _act(run, cast(Observe, run.events[world.control.observe]))
    return _limit(run) or _turn(run)


# ---------------------------------------------------------------------------------------------
# Whose turn it is


def _limit(run: Run) -> AnyEvent | None:
    control = run.world.control
    for figure, reason in _STOPS:
        if getattr(control, figure) >= run.limits[figure]:
            return made(run, Stop, "harness", (), reason=reason, truncated=True)
    return None


def _turn(run: Run) -> AnyEvent:
    """A delivery to whoever is next, then its observation; a stop if nobody can go on."""
    world = run.world
    order = run.env.agents()
    if order is not None and not order:
        return made(run, Stop, "env", environment(run), reason="finished")
    waiting = {world.control.waits[s] for s in world.open_delegations if s in world.control.waits}
    waiting |= _off_duty(run)
    agent = _next_in(order if order is not None else list(world.agents), world, waiting)
    if agent is None:
        return made(run, Stop, "harness", (), reason="deadlock", truncated=True)
    for seq, receivers in world.in_flight.items():
        if agent in receivers:
            link = Cause(seq=seq, kind="delivers")
            return made(run, Deliver, agent, [link], message=seq)
    return _observation(run, agent, decided=order is not None)


def _off_duty(run: Run) -> set[str]:
    """Agents on call whom no open delegation calls."""
    if not run.env.on_call:
        return set()
    busy = set().union(*run.world.open_delegations.values())
    return {
        name
        for name, held in run.world.agents.items()
        if held.role in run.env.on_call and name not in busy
    }


def _next_in(order: Sequence[str], world: World, waiting: set[str]) -> str | None:
    """Round robin: the first after the one who acted last."""
    cursor = world.control.cursor
    after = order.index(cursor) + 1 if cursor in order else 0
    for agent in (*order[after:], *order[:after]):
        held = world.agents.get(agent)
        if held is None:
            raise Refused(f"env.agents() names {agent!r}, who was never born")
        if held.alive and agent not in waiting:
            return agent
    return None


def _observation(run: Run, agent: str, decided: bool) -> AnyEvent:
    env, held = run.env, run.world.agents[agent]
    content, legal = freeze(env.observe(agent)), _menu(env, agent)
    links = [Cause(seq=s, kind=_follows(run, s)) for s in held.last]
    links += [Cause(seq=s, kind="consumes") for s in held.inbox if s not in held.last]
    if content is not UNSET or legal is not None:
        links += environment(run)
    if decided and run.events and len(run.events) - 1 not in {link.seq for link in links}:
        links.append(Cause(seq=len(run.events) - 1, kind="precedes", basis="inferred:turn"))
    draft = made(
        run,
        Observe,
        agent,
        links,
        sources=tuple(Source(seq=s) for s in held.inbox),
        content_raw=content,
        legal=legal,
    )
    shown = "\n".join(turn.text for turn in new_turns(run, cast(Observe, draft)))
    return msgspec.structs.replace(draft, anchor=env.anchor(agent, shown))


def _follows(run: Run, seq: int) -> Any:
    return "spawns" if isinstance(run.events[seq], Spawn) else "precedes"


def _menu(env: Env, agent: str) -> tuple[tuple[str, str], ...] | None:
    menu = env.legal(agent)
    if menu is None:
        return None
    pairs = tuple(menu.items()) if isinstance(menu, Mapping) else tuple((t, t) for t in menu)
    if len({label for label, _ in pairs}) != len(pairs):
        raise Refused(f"{env.id}: the menu of {agent} has two entries with one label")
    return pairs


# ---------------------------------------------------------------------------------------------
# A policy acts


def _act(run: Run, seen: Observe) -> AnyEvent:
    role = run.role(seen.agent)
    policy = run.policies.get(role)
    if policy is None:
        raise Refused(f"there is no policy for role {role!r}; give one for each of the env's roles")
    menu = dict(seen.legal) if seen.legal is not None else None
    observation = observation_of(run, seen)
    draws = run.draws("policy", seen.agent, run.world.agents[seen.agent].acts, seen.seq)
    output = policy(observation, menu, draws)
    if isinstance(output, str):
        output = Output(output)
    if not isinstance(output, Output) or not isinstance(output.text, str):
        raise Refused(f"the policy of {role} returned {type(output).__name__}, not text or Output")
    text = output.text.encode("utf-8", "surrogatepass")[: run.limits["item_bytes"]]
    shown = text.decode("utf-8", "surrogatepass" if len(text) < 4 else "ignore")
    parsed = tuple(output.items) if output.items is not None else parse(shown)
    probs = getattr(policy, "probs", None)
    chances = None if probs is None or menu is None else list(probs(observation, menu))
    items = _with_no_ops(parsed, run.env.roles.get(role, ()), menu)
    return made(
        run,
        Act,
        seen.agent,
        [Cause(seq=seen.seq, kind="derives")],
        text_raw=freeze(shown),
        items=_with_logprobs(items, menu, chances),
        token_ids=_tuple(output.token_ids),
        logprobs=_tuple(output.logprobs),
        policy_version=described(policy, "version"),
        value=output.value,
        tokens_out=len(output.token_ids) if output.token_ids else len(shown.split()),
        trainable=bool(described(policy, "trainable")),
    )


def _tuple(values: Any) -> Any:
    if values is None:
        return None
    return tuple(values.tolist() if hasattr(values, "tolist") else values)


def _with_no_ops(
    items: tuple[Item, ...], allowed: Sequence[str], menu: Mapping[str, str] | None
) -> tuple[Item, ...]:
    """Drop what follows a stop, and add the no-op of each decision that was possible and not taken.

    Possible is what the role may do and, where there is a menu, what some entry of it would do.
    """
    verbs = [item.verb for item in items]
    if "stop" in verbs and "stop" in allowed:
        items = items[: verbs.index("stop") + 1]
    taken = {item.verb for item in items}
    offered = None if menu is None else {i.verb for text in menu.values() for i in parse(text)}
    declined = [
        Item(verb=cast(Verb, f"no_{verb}"))
        for verb in DECISIONS
        if verb in allowed and verb not in taken and (offered is None or verb in offered)
    ]
    return (*items, *declined)


def _with_logprobs(
    items: tuple[Item, ...], menu: Mapping[str, str] | None, chances: list[float] | None
) -> tuple[Item, ...]:
    """Write on each decision how likely it was to be taken, or declined, over the whole menu."""
    if menu is None or chances is None:
        return items
    taking = {
        verb: math.fsum(
            p
            for p, text in zip(chances, menu.values(), strict=True)
            if any(item.verb == verb for item in parse(text))
        )
        for verb in DECISIONS
    }
    out = []
    for item in items:
        verb = item.verb.removeprefix("no_")
        if verb in taking:
            p = taking[verb] if verb == item.verb else 1.0 - taking[verb]
            item = msgspec.structs.replace(item, logprob=min(0.0, math.log(p)) if p > 0 else None)
        out.append(item)
    return tuple(out)


# ---------------------------------------------------------------------------------------------
# The end


def _pay(run: Run) -> AnyEvent | None:
    amounts = run.amounts()
    number = run.world.control.paid
    return _reward(run, amounts[number]) if number < len(amounts) else None


def _reward(run: Run, paid: Amount) -> AnyEvent:
    if paid.causes is None:
        done = [event for event in run.events if not isinstance(event, Reward)]
        # what only an order leads on from is an end too: descent does not follow such edges
        links_on = (c for e in done for c in e.causes if c.basis != "inferred:order")
        used = {cause.seq for cause in links_on}
        ends = [event.seq for event in done if event.seq not in used]
        links = [Cause(seq=seq, kind="rewards", basis="inferred:run") for seq in ends]
    else:
        seqs = sorted({c if isinstance(c, int) else c.seq for c in paid.causes})
        links = [Cause(seq=seq, kind="rewards") for seq in seqs]
    checked: dict[str, Any] = {"trust": "trusted"} if paid.verifiable in EXECUTED else {}
    return made(
        run,
        Reward,
        "env",
        links,
        amount=None if paid.amount is None else float(paid.amount),
        family=paid.family,
        channel=paid.channel,
        target=Target(agent=paid.target) if isinstance(paid.target, str) else paid.target,
        source=run.env.id,
        verifiable=paid.verifiable,
        error_rate=paid.error_rate,
        **checked,
    )
