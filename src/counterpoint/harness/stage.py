"""The state machine: from the world to the event that comes next.

stopped → what the environment pays; an open call → its result; an item left → its effect;
an observation → the agent's act; otherwise a delivery to whoever is next, its observation, a stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import UNSET

from counterpoint.envs import Amount
from counterpoint.harness.contract import (
    TOO_LONG,
    anchor_of,
    menu_of,
    order_of,
    over,
    told,
    turn_of,
)
from counterpoint.harness.effects import answer, blocked, effect
from counterpoint.harness.prompt import new_turns, observation_of
from counterpoint.harness.run import Run, environment, made, turn_edge
from counterpoint.policies import Menu, Observation, Output, Policy, described, sizes
from counterpoint.policies.grammar import parse
from counterpoint.schema import (
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
)
from counterpoint.spelling import Refused, freeze
from counterpoint.streams import Draws
from counterpoint.vocabulary import DECISIONS, EXECUTED, Verb
from counterpoint.world import World

Legal = tuple[tuple[str, str], ...]
Offers = tuple[frozenset[str], ...]


class Asked(NamedTuple):
    """A turn that waits for its policy, with all that the policy is asked with."""

    policy: Policy
    observation: Observation
    legal: Menu
    draws: Draws


def asked(run: Run) -> Asked | None:
    """What a policy is to be asked for the next event; None if something else comes next."""
    world = run.world
    busy = world.stopped is not None or world.open_calls or world.control.next_item is not None
    seen = None if busy else world.control.observe
    return None if seen is None else _asked(run, cast(Observe, run.events[seen]))


def next_event(run: Run, says: str | Output | None = None) -> AnyEvent | None:
    """The event that comes next, not yet emitted; None when the run is over.

    `says` is the turn of the policy, where it was `asked` before; otherwise it is asked here.

    Raises:
        Refused: an environment or a policy breaks its contract; the sentence names who and how.
            What their own code raises is not caught.
    """
    world = run.world
    run.env.bind(world, run.events)
    if world.stopped is not None:
        return _pay(run)
    if world.open_calls:
        return answer(run, cast(ToolCall, run.events[next(iter(world.open_calls))]))
    control = world.control
    item = control.next_item
    if item is not None:
        return effect(run, item)
    if control.observe is not None:
        return _act(run, cast(Observe, run.events[control.observe]), says)
    if control.act is not None and control.act == len(run.events) - 1 and not control.items:
        act = cast(Act, run.events[control.act])
        if over(act.text or "", run.limits["item_bytes"]):
            return blocked(run, act, TOO_LONG)
    return _turn(run)


# ---------------------------------------------------------------------------------------------
# Whose turn it is


def _turn(run: Run) -> AnyEvent:
    """A delivery to whoever is next, then its observation; a stop if nobody can go on.

    That the environment has ended the run, or that everybody waits, comes before a limit: a limit
    truncates only what would have gone on.
    """
    world = run.world
    order = order_of(run.env, world)
    if order is not None and not order:
        links = environment(run)
        return made(run, Stop, "env", [*links, *turn_edge(run, links)], reason="finished")
    waiting = {world.control.waits[s] for s in world.open_delegations if s in world.control.waits}
    waiting |= _off_duty(run)
    agent = _next_in(order if order is not None else list(world.agents), world, waiting)
    if agent is None:
        return made(run, Stop, "harness", (), reason="deadlock", truncated=True)
    if reason := _exhausted(run):
        return made(run, Stop, "harness", (), reason=reason, truncated=True)
    for seq in world.agents[agent].mail:
        return made(run, Deliver, agent, [Cause(seq=seq, kind="delivers")], message=seq)
    return _observation(run, agent, decided=order is not None)


def _exhausted(run: Run) -> str | None:
    """How the run stops because no turn may begin any more."""
    if run.world.control.turns >= run.limits["turns"]:
        return "step_limit"
    return "token_limit" if run.world.control.tokens >= run.limits["tokens"] else None


def _off_duty(run: Run) -> set[str]:
    """Agents on call whom no open delegation calls."""
    if not run.env.on_call:
        return set()
    world = run.world
    busy = {name for owing in world.open_delegations.values() for name in owing}
    held = world.agents.items()
    return {name for name, a in held if a.role in run.env.on_call and name not in busy}


def _next_in(order: Sequence[str], world: World, waiting: set[str]) -> str | None:
    """Round robin: the first after the one who acted last."""
    cursor = world.control.cursor
    after = order.index(cursor) + 1 if cursor in order else 0
    for agent in (*order[after:], *order[:after]):
        if world.agents[agent].alive and agent not in waiting:
            return agent
    return None


def _observation(run: Run, agent: str, decided: bool) -> AnyEvent:
    env, held = run.env, run.world.agents[agent]
    content, legal = told(env, agent, run.limits["item_bytes"]), menu_of(env, agent)
    links = [Cause(seq=seq, kind=_follows(run, seq)) for seq in held.last]
    links += [Cause(seq=seq, kind="consumes") for seq in held.inbox]
    if content is not UNSET or legal is not None:
        links += environment(run)
    if decided:
        links += turn_edge(run, links)
    sources = tuple(Source(seq=seq) for seq in held.inbox)
    turns = new_turns(run, agent, sources, content)
    event = made(
        run,
        Observe,
        agent,
        links,
        sources=sources,
        content_raw=content,
        anchor=anchor_of(env, agent, "\n".join(turn.text for turn in turns)),
        legal=legal,
    )
    run.shown = (cast(Observe, event), turns)
    return event


def _follows(run: Run, seq: int) -> Any:
    return "spawns" if isinstance(run.events[seq], Spawn) else "precedes"


# ---------------------------------------------------------------------------------------------
# A policy acts


def _asked(run: Run, seen: Observe) -> Asked:
    role = run.role(seen.agent)
    policy = run.policies.get(role)
    if policy is None:
        raise Refused(f"there is no policy for role {role!r}; give one for each of the env's roles")
    menu = dict(seen.legal) if seen.legal is not None else None
    draws = run.draws("policy", seen.agent, run.world.agents[seen.agent].acts, seen.seq)
    return Asked(policy, observation_of(run, seen), menu, draws)


def _act(run: Run, seen: Observe, says: str | Output | None) -> AnyEvent:
    policy, observation, menu, draws = _asked(run, seen)
    if says is None:
        says = policy(observation, menu, draws)
    output = turn_of(observation.role, says, run.limits["item_bytes"])
    tokens_out, tokens_in = sizes(output)
    event = made(
        run,
        Act,
        seen.agent,
        [Cause(seq=seen.seq, kind="derives")],
        text_raw=freeze(output.text),
        items=_items(run, policy, observation, seen, output),
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        mask=output.mask,
        policy_version=described(policy, "version"),
        value=output.value,
        tokens_out=tokens_out,
        tokens_in=tokens_in,
        trainable=bool(described(policy, "trainable")),
    )
    run.said = (cast(Act, event), output.text)
    return event


def _items(
    run: Run, policy: Policy, observation: Observation, seen: Observe, output: Output
) -> tuple[Item, ...]:
    """What a turn does, in order, and each decision that was possible and not taken as its no-op.

    What follows a stop is dropped. A turn that is too long does nothing at all.
    """
    if over(output.text, run.limits["item_bytes"]):
        return ()
    may = run.decisions(observation.role, seen.trust)
    given = parse(output.text) if output.items is None else tuple(output.items)
    items = _until_stop(given) if "stop" in may else given
    if not may:
        return items
    if seen.legal is None:
        possible, taking = may, None
    else:
        possible, offers = _choices(seen.legal, may)
        taking = _propensities(policy, observation, seen.legal, offers) if possible else None
    taken = {item.verb for item in items}
    items += tuple(_DECLINED[verb] for verb in possible if verb not in taken)
    return items if taking is None else tuple(_with_logprob(item, *taking) for item in items)


_DECLINED: dict[str, Item] = {verb: Item(verb=cast(Verb, f"no_{verb}")) for verb in DECISIONS}


def _until_stop(items: tuple[Item, ...]) -> tuple[Item, ...]:
    for index, item in enumerate(items):
        if item.verb == "stop":
            return items[: index + 1]
    return items


@lru_cache(maxsize=4096)
def _choices(legal: Legal, may: tuple[str, ...]) -> tuple[tuple[str, ...], Offers]:
    """Which of the decisions some entry of a menu would take, and all that each entry would do."""
    turns = [parse(text) for _, text in legal]
    if "stop" in may:
        turns = [_until_stop(turn) for turn in turns]
    offers = tuple(frozenset(item.verb for item in turn) for turn in turns)
    return tuple(verb for verb in may if any(verb in offer for offer in offers)), offers


def _propensities(
    policy: Policy, observation: Observation, legal: Legal, offers: Offers
) -> tuple[list[float], Offers] | None:
    """The probability of each entry of the menu, and what each would do; None if nobody says."""
    probs = described(policy, "probs")
    if probs is None:
        return None
    chances = [float(p) for p in probs(observation, dict(legal))]
    if len(chances) != len(legal) or not abs(math.fsum(chances) - 1.0) < 1e-6:
        raise Refused(
            f"probs of the policy of {observation.role} gives {len(chances)} numbers of sum "
            f"{math.fsum(chances):g} for a menu of {len(legal)}; one probability an entry is due"
        )
    return chances, offers


def _with_logprob(item: Item, chances: list[float], offers: Offers) -> Item:
    """A decision with the log-probability that it is taken, or declined, over the whole menu."""
    declined = item.verb.startswith("no_")
    verb = item.verb.removeprefix("no_")
    if verb not in _DECLINED:
        return item
    p = math.fsum(c for c, offer in zip(chances, offers, strict=True) if (verb in offer) ^ declined)
    logprob = min(0.0, math.log(p)) if p > 0 else None
    return msgspec.structs.replace(item, logprob=logprob)


# ---------------------------------------------------------------------------------------------
# The end


def _pay(run: Run) -> AnyEvent | None:
    amounts = run.amounts()
    number = run.world.control.paid
    return _reward(run, amounts[number]) if number < len(amounts) else None


def _reward(run: Run, paid: Amount) -> AnyEvent:
    if paid.causes is None:
        links = [Cause(seq=seq, kind="rewards", basis="inferred:run") for seq in run.ends()]
    else:
        seqs = sorted({c if isinstance(c, int) else c.seq for c in paid.causes})
        links = [Cause(seq=seq, kind="rewards") for seq in seqs]
    executed: dict[str, Any] = {"trust": "trusted"} if paid.verifiable in EXECUTED else {}
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
        **executed,
    )
