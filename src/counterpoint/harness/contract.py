"""What environments, policies and settings promise, checked where it is used: a broken clause is
a sentence that names it, and an exception from somebody's own code stays theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, TypeVar, get_args

from msgspec import UNSET, UnsetType

from counterpoint.envs import Amount, Env
from counterpoint.policies import Output, described
from counterpoint.policies.grammar import NAMED, arguments_of
from counterpoint.schema import AnyEvent, Event, Item, Target, Trace
from counterpoint.spelling import Payload, Refused, freeze
from counterpoint.tools import cut
from counterpoint.vocabulary import RESERVED, Family, Verb, Verifiable
from counterpoint.world import INERT, World

T = TypeVar("T")

_VERBS: frozenset[str] = frozenset(get_args(Verb)) - INERT - {"call"}

LIMITS: dict[str, int] = {
    "turns": 200,
    "agents": 32,
    "calls": 500,
    "tokens": 1_000_000,
    "item_bytes": 65_536,
}
"""What a run may use unless its config says otherwise; `agents` are those alive at once, and
`item_bytes` bounds one text: of a turn, a result, an observation."""

MOST_ITEM_BYTES = (1 << 20) // 6
"""Largest `item_bytes`: spelled at its longest (six bytes for one), such a text still stands in its
event and goes to no side file."""

LATENCY: dict[str, float] = {"act": 1.0, "tool_result": 0.5}
"""Seconds that the virtual clock gives an event of a kind; others take none."""

TOO_LONG = "limit of item bytes"
"""Rule under which a turn that is too long does nothing."""


# ---------------------------------------------------------------------------------------------
# Settings


def settings_of(config: Any) -> dict[str, Any]:
    """Limits and latencies of a run's config, with the defaults filled in.

    Raises:
        Refused: a name that is no setting, or a value that is none.
    """
    given = {} if config is None else config
    if not isinstance(given, Mapping):
        raise Refused(f"the config of a run is a mapping, not {type(given).__name__}")
    limits = {**LIMITS, **_named(given, "limits", LIMITS)}
    latency = {**LATENCY, **_named(given, "latency", None)}
    for name, value in limits.items():
        most = MOST_ITEM_BYTES if name == "item_bytes" else 1 << 62
        if type(value) is not int or not 1 <= value <= most:
            raise Refused(f"the limit of {name} is a whole number of 1 to {most}, not {value!r}")
    for name, value in latency.items():
        if not _is_number(value) or value < 0:
            raise Refused(f"the latency of {name} is a number of seconds, not {value!r}")
    return {"limits": limits, "latency": {name: float(v) for name, v in latency.items()}}


def _named(config: Mapping[str, Any], part: str, known: Mapping[str, Any] | None) -> dict[str, Any]:
    given = config.get(part, {})
    if not isinstance(given, Mapping):
        raise Refused(f"the {part} of a run are a mapping, not {type(given).__name__}")
    if known is not None and (odd := [name for name in given if name not in known]):
        raise Refused(f"there is no limit {odd[0]!r}; there are {', '.join(known)}")
    return dict(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


# ---------------------------------------------------------------------------------------------
# Environments


def check_roles(env: Env) -> None:
    """`id`, `roles`, `on_call`, `options`: what they name exists and can be written down."""
    if not isinstance(getattr(env, "id", None), str) or not env.id:
        raise Refused(f"{type(env).__name__} has no id; give it one with a version, like doors-v0")
    roles = getattr(env, "roles", None)
    if not isinstance(roles, Mapping) or not roles:
        raise Refused(f"{env.id}: roles maps each role to its verbs and tools, not {roles!r:.80}")
    if odd := [role for role in env.on_call if role not in roles]:
        raise Refused(f"{env.id}: on_call names {odd[0]!r}, which is not among its roles")
    tools = env.tools()
    if odd := [name for name in tools if name in get_args(Verb)]:
        raise Refused(f"{env.id}: tool {odd[0]!r} bears the name of a verb; give it another")
    known = {"none", *_VERBS, "read", *tools}
    try:
        freeze(env.options)
    except Refused as refusal:
        raise Refused(f"{env.id}: its options cannot be recorded: {refusal}") from None
    for role, names in roles.items():
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise Refused(f"{env.id}: role {role!r} has {names!r:.80} where a list of names is due")
        if odd := [name for name in names if name not in known]:
            raise Refused(
                f"{env.id}: role {role!r} lists {odd[0]!r}, which is no tool of it and no verb; "
                f"there are {', '.join(sorted(known))}"
            )


def cast_of(env: Env) -> dict[str, str]:
    """`start()`: who is alive at the start, with roles that exist and ids that name an agent."""
    cast = env.start()
    if not isinstance(cast, Mapping):
        raise Refused(f"{env.id}: start() is a mapping of agents to roles, not {cast!r:.80}")
    for agent, role in cast.items():
        parent, _, number = str(agent).rpartition(".")
        if not isinstance(agent, str) or not agent or not _spelled(agent) or agent in RESERVED:
            raise Refused(f"{env.id}: start() names {agent!r}, which cannot be the id of an agent")
        if number.isdigit() and parent in cast:
            raise Refused(f"{env.id}: start() names {agent!r}, the id of a child of {parent!r}")
        if role not in env.roles:
            raise Refused(
                f"{env.id}: start() gives {agent!r} the role {role!r}, which is not there"
            )
    return dict(cast)


def order_of(env: Env, world: World) -> Sequence[str] | None:
    """`agents()`: None, or ids of agents that were born, in the order of their turns."""
    order = env.agents()
    if order is None:
        return None
    if not isinstance(order, list | tuple | Sequence) or isinstance(order, str):
        raise Refused(f"{env.id}: agents() is a list of ids or None, not {order!r:.80}")
    for agent in order:
        if agent not in world.agents:
            raise Refused(f"{env.id}: agents() names {agent!r}, who was never born")
    return order


def told(env: Env, agent: str, most_bytes: int) -> Payload:
    """`observe(agent)`: None, or something that has a JSON form and is not too long."""
    try:
        content = freeze(env.observe(agent))
    except Refused as refusal:
        raise Refused(f"{env.id}: observe({agent!r}) cannot be recorded: {refusal}") from None
    if content is not UNSET and len(bytes(content)) > most_bytes:
        raise Refused(
            f"{env.id}: observe({agent!r}) gives {len(bytes(content))} bytes, over the limit of "
            f"{most_bytes}; shorten it, or raise limits.item_bytes"
        )
    return content


def menu_of(env: Env, agent: str) -> tuple[tuple[str, str], ...] | None:
    """`legal(agent)`: None, or entries with labels that differ and texts of whole turns."""
    menu = env.legal(agent)
    if menu is None:
        return None
    if isinstance(menu, dict | Mapping):
        pairs = tuple(menu.items())
    elif isinstance(menu, Sequence) and not isinstance(menu, str):
        pairs = tuple((text, text) for text in menu)
    else:
        raise Refused(f"{env.id}: legal({agent!r}) is a mapping, a list or None, not {menu!r:.80}")
    if not pairs:
        raise Refused(f"{env.id}: legal({agent!r}) is empty; None says that nothing is prescribed")
    try:
        fault = _menu_fault(pairs)
    except TypeError:  # what cannot be hashed
        fault = "has an entry which is no text"
    if fault:
        raise Refused(f"{env.id}: legal({agent!r}) {fault}")
    return pairs


@lru_cache(maxsize=4096)
def _menu_fault(pairs: tuple[tuple[str, str], ...]) -> str | None:
    for pair in pairs:
        if not all(isinstance(text, str) and _spelled(text) for text in pair):
            return f"has an entry {pair!r:.80}, which is no text"
    if len({label for label, _ in pairs}) != len(pairs):
        return (
            "has two entries with one label; a label says what its choice means, so give "
            "{label: text}"
        )
    return None


def anchor_of(env: Env, agent: str, shown: str) -> str:
    """`anchor(agent, shown)`: a text."""
    anchor = env.anchor(agent, shown)
    if not isinstance(anchor, str) or not _spelled(anchor):
        raise Refused(f"{env.id}: anchor({agent!r}) is a text, not {anchor!r:.80}")
    return anchor


def _spelled(text: str) -> bool:
    """Whether UTF-8 can spell it."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


# ---------------------------------------------------------------------------------------------
# Rewards


def amounts_of(env: Env, trace: Trace, world: World) -> list[Amount]:
    """`rewards(trace)`: amounts that are finite numbers or None, for targets that exist."""
    paid = env.rewards(trace)
    if isinstance(paid, str) or not isinstance(paid, Iterable):
        raise Refused(f"{env.id}: rewards() yields (amount, target), not {paid!r:.80}")
    return [_amount(env, given, trace, world) for given in paid]


def _amount(env: Env, given: Any, trace: Trace, world: World) -> Amount:
    if not isinstance(given, tuple) or not 1 <= len(given) <= len(Amount._fields):
        raise Refused(f"{env.id}: rewards() yields {given!r:.80}, not (amount, target) or Amount")
    amount = given if isinstance(given, Amount) else Amount(*given)
    for clause, holds in _AMOUNT.items():
        if not holds(amount):
            raise Refused(f"{env.id}: rewards() yields {amount!r:.120}: {clause}")
    if not _exists(amount.target, trace, world):
        raise Refused(f"{env.id}: rewards() pays {amount.target!r:.80}, who is not in this run")
    if amount.causes is not None:
        seqs = [c.seq if isinstance(c, Event) else c for c in amount.causes]
        if any(type(seq) is not int or not 0 <= seq < len(trace) for seq in seqs):
            raise Refused(
                f"{env.id}: the causes of a reward are events of the run, not {seqs!r:.80}"
            )
    return amount


_AMOUNT: dict[str, Callable[[Amount], bool]] = {
    "an amount is a finite number, or None for not scored": lambda a: (
        a.amount is None or _is_number(a.amount)
    ),
    "a channel is a text": lambda a: isinstance(a.channel, str) and _spelled(a.channel),
    "a family is R1 to R8": lambda a: a.family in get_args(Family),
    "verifiable says how it was checked": lambda a: (
        a.verifiable is None or a.verifiable in get_args(Verifiable)
    ),
    "an error rate lies between 0 and 1": lambda a: (
        a.error_rate is None or (_is_number(a.error_rate) and 0 <= a.error_rate <= 1)
    ),
}


def _exists(target: Any, trace: Trace, world: World) -> bool:
    if target is None:
        return True
    if isinstance(target, str):
        return target in world.agents
    if not isinstance(target, Target):
        return False
    event: AnyEvent | None = None
    if target.seq is not None:
        if not 0 <= target.seq < len(trace):
            return False
        event = trace[target.seq]
    roles = {held.role for held in world.agents.values()}
    return (
        (target.item is None or 0 <= target.item < len(getattr(event, "items", ())))
        and (target.agent is None or target.agent in world.agents)
        and (target.role is None or target.role in roles)
    )


# ---------------------------------------------------------------------------------------------
# Policies


def check_policy(role: str, policy: Any) -> None:
    """A policy can be called, and what it says of itself is text."""
    if not callable(policy):
        raise Refused(f"the policy of {role} is a {type(policy).__name__}, which is no callable")
    for name in ("target", "version", "params_digest"):
        said = described(policy, name)
        if not isinstance(said, str | None):
            raise Refused(f"the {name} of the policy of {role} is {said!r:.80}, not a text")


def turn_of(role: str, given: Any, most_bytes: int) -> Output:
    """A policy's output with plain numbers and checked items.

    Of a turn that is too long the text is kept up to the first character over the limit, so that
    its event shows what it was, and no item.
    """
    output = Output(given) if isinstance(given, str) else given
    if not isinstance(output, Output) or not isinstance(output.text, str):
        raise Refused(f"the policy of {role} returned {given!r:.80}, not a text or an Output")
    items = None if output.items is None else _items(role, output)
    said = output.text
    for text in (said, *_texts(items)) if items else (said,):
        if over(text, most_bytes):
            items, said = (), text[: len(cut(text, most_bytes)) + 1]
            break
    ids = _plain(role, "token_ids", output.token_ids, int)
    logprobs = _plain(role, "logprobs", output.logprobs, float)
    mask = _plain(role, "mask", output.mask, bool)
    for what, given in (("logprobs", logprobs), ("entries of a mask", mask)):
        if ids is not None and given is not None and len(ids) != len(given):
            raise Refused(f"the policy of {role} gives {len(ids)} tokens and {len(given)} {what}")
    if any(not -math.inf < logprob <= 0 for logprob in logprobs or ()):
        raise Refused(f"the policy of {role} gives a logprob that is no finite number up to 0")
    if output.value is not None and not _is_number(output.value):
        raise Refused(f"the policy of {role} gives the value {output.value!r:.80}, no number")
    value = None if output.value is None else float(output.value)
    return Output(said, items, ids, logprobs, value, mask)


def over(text: str, most_bytes: int) -> bool:
    """Whether a text takes more than so many bytes of UTF-8."""
    if len(text) > most_bytes or text.isascii():
        return len(text) > most_bytes
    return len(text.encode("utf-8", "surrogatepass")) > most_bytes


def _texts(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        yield from item.name
        if not isinstance(item.content_raw, UnsetType):
            yield bytes(item.content_raw).decode()


def _plain(role: str, what: str, values: Any, kind: Callable[[Any], T]) -> tuple[T, ...] | None:
    if values is None:
        return None
    try:
        return tuple(kind(value) for value in values)
    except (TypeError, ValueError):
        raise Refused(f"the policy of {role} gives {what} that are no numbers") from None


def _items(role: str, output: Output) -> tuple[Item, ...]:
    if isinstance(output.items, str) or not isinstance(output.items, Sequence):
        raise Refused(f"the policy of {role} gives {output.items!r:.80} for a list of items")
    items = tuple(output.items)
    for number, item in enumerate(items):
        if fault := _fault(item, output.text):
            raise Refused(f"item {number} of the turn of {role} {fault}")
    return items


def _fault(item: Any, text: str) -> str | None:
    """What is wrong with an item that a policy gave; None if nothing."""
    if not isinstance(item, Item):
        return f"is a {type(item).__name__}, not an Item"
    if item.verb not in {"none", "call", *_VERBS}:
        return f"has the verb {item.verb!r:.80}, which is none of a policy's"
    if not all(isinstance(name, str) and name and _spelled(name) for name in item.name):
        return "has a name that is no text"
    if item.verb in NAMED and not item.name:
        return f"is a {item.verb} without a name"
    if item.body is not None and not 0 <= item.body[0] <= item.body[1] <= len(text):
        return "has a body outside of the text"
    if item.verb == "call" and not _is_call(item, text):
        return "is a call whose arguments are no JSON object"
    return None


def _is_call(item: Item, text: str) -> bool:
    if item.body is not None:
        return arguments_of(text[item.body[0] : item.body[1]]) is not None
    return item.content is None or isinstance(item.content, dict)
