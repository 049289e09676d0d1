"""A task of an environment as a game: every run that can happen, with one decision left to learn.

The game has the environment's own values, so a rule for that decision has an exact value and an
exact best, and it is played a million times faster than the environment itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from counterpoint.envs import Env
from counterpoint.games import Game, values
from counterpoint.games.game import action_values, visits
from counterpoint.groups import Bools, Floats, Ints
from counterpoint.harness import header_of, team_of
from counterpoint.policies import Policy
from counterpoint.redrive.exact import Listed, all_listed, branches
from counterpoint.schema import Act, AnyEvent, Observe, Reward
from counterpoint.spelling import Refused

Takes = Callable[[str, str], bool]
"""(role, text of a turn) → whether the turn takes the decision."""


class Listing(NamedTuple):
    """A game in which the decision is to be learned, and the rest is chance.

    Attributes:
        game: act 0 declines, act 1 takes. Its first anchors are those of the decision.
        anchors: of the decision, by name.
        cost: (states, ways) what the run had cost where the way ends it; the reward has it taken
            off.
    """

    game: Game
    anchors: tuple[str, ...]
    cost: Floats


class _Node(NamedTuple):
    """A choice: what each way leads to, and its chance; `anchor` where it is to be learned."""

    anchor: str | None
    chance: tuple[float, ...]
    ways: tuple[_Node | _End, ...]


class _End(NamedTuple):
    """How a run ends: its outcome, and what of it was cost."""

    outcome: float
    cost: float


def listed(env: Env, policies: Policy | Mapping[str, Policy], takes: Takes, tasks: int) -> Listing:
    """List the tasks of an environment under a team, with one decision free.

    Where an agent's menu has turns that take the decision and others that do not, taking it is a
    choice to learn; which of these turns it then is stays with its policy, given that.

    Args:
        env: whose runs end within what `redrive.exact` lists.
        policies: of all roles; each gives probabilities or is deterministic.
        takes: what the decision is.
        tasks: how many, from seed 0; they are the contexts of the game and share their anchors.

    Raises:
        Refused: something that cannot be listed.
    """
    team = team_of(env, policies)
    roots = []
    for task in range(tasks):
        header = header_of(env, team, group=task, rollout=0, seed=0)
        env.reset(header.task_seed or 0)
        roots.append(_grown(Listed(header, env, all_listed(team), ()), takes))
    return _game([root for root in roots if isinstance(root, _Node)])


def _grown(run: Listed, takes: Takes) -> _Node | _End:
    """Everything that may follow where `run` stands, which is moved."""
    while run.world.stopped is None and len(ahead := branches(run)) == 1:
        run.emit(ahead[0].event)
    if run.world.stopped is not None:
        return _ended(run)
    here = run.env.snapshot()
    ways = []
    for _, event, state in ahead:
        run.env.restore(here if state is None else state)
        ways.append(_grown(run.after((*run.events, event)), takes))
    return _node(run, [b.probability for b in ahead], [b.event for b in ahead], ways, takes)


def _node(
    run: Listed,
    chance: Sequence[float],
    events: Sequence[AnyEvent],
    ways: Sequence[_Node | _End],
    takes: Takes,
) -> _Node:
    seen = run.world.control.observe
    if not isinstance(events[0], Act) or seen is None:
        return _Node(None, tuple(chance), tuple(ways))
    shown, role = run.events[seen], run.role(events[0].agent)
    taken = [isinstance(e, Act) and takes(role, e.text or "") for e in events]
    if all(taken) or not any(taken) or not isinstance(shown, Observe):
        return _Node(None, tuple(chance), tuple(ways))
    arms = []
    for arm in (False, True):
        own = [i for i, took in enumerate(taken) if took == arm]
        total = sum(chance[i] for i in own)
        arms.append(_Node(None, tuple(chance[i] / total for i in own), tuple(ways[i] for i in own)))
    return _Node(shown.anchor or "", (0.5, 0.5), tuple(arms))


def _ended(run: Listed) -> _End:
    """What a run that has stopped earned."""
    while ahead := branches(run):
        run.emit(ahead[0].event)
    trace = run.trace()
    if trace.outcome is None:
        raise Refused(f"a run of {run.env.id} ends unscored, so V has no value to expect")
    paid = [e for e in trace.events if isinstance(e, Reward) and e.family == "R7"]
    return _End(trace.outcome, -sum(e.amount or 0.0 for e in paid))


def _game(roots: Sequence[_Node]) -> Listing:
    """The trees side by side, as arrays."""
    nodes: list[_Node] = []
    begin, at = [], {}
    for root in roots:
        begin.append(len(nodes))
        stack = [root]
        while stack:
            node = stack.pop()
            at[id(node)] = len(nodes)
            nodes.append(node)
            stack += [way for way in node.ways if isinstance(way, _Node)]
    anchors = tuple(dict.fromkeys(node.anchor for node in nodes if node.anchor is not None))
    width = max(2, *(len(node.ways) for node in nodes))
    reward, cost = np.zeros((2, len(nodes), width))
    follows = np.full((len(nodes), width), -1)
    policy = [*([0.5, 0.5] + [0.0] * (width - 2) for _ in anchors)]
    seen = []
    for number, node in enumerate(nodes):
        for way, child in enumerate(node.ways):
            if isinstance(child, _End):
                reward[number, way], cost[number, way] = child.outcome, child.cost
            else:
                follows[number, way] = at[id(child)]
        seen.append(len(policy) if node.anchor is None else anchors.index(node.anchor))
        if node.anchor is None:
            policy.append([*node.chance, *[0.0] * (width - len(node.ways))])
    nature = np.array([n for n, node in enumerate(nodes) if node.anchor is None], dtype=np.int64)
    agent = np.zeros(len(nodes), dtype=np.int64)
    agent[nature] = 1
    game = Game(np.array(policy), np.array(seen), agent, reward, follows, np.array(begin),
                nature=nature)  # fmt: skip
    return Listing(game, anchors, cost)


# ---------------------------------------------------------------------------------------------
# Rules, valued exactly


def ruled(game: Game, rule: Floats) -> Game:
    """The game under another policy for its first anchors, (anchors, actions)."""
    policy = game.policy.copy()
    policy[: len(rule), : rule.shape[1]] = rule
    return replace(game, policy=policy)


def value(game: Game, rule: Floats) -> float:
    """V of a rule, exact: the mean over contexts of what a run earns."""
    return float(values(ruled(game, rule))[game.start].mean())


def best_rule(game: Game, allowed: Bools) -> Floats:
    """(anchors, actions) the best rule, by dynamic programming from the last choices back.

        at each anchor  argmax_a Σ over its states of P(state) Q(state, a)

    Exact where an anchor tells which choices of its own led to it (perfect recall): then how likely
    its states are, one against another, does not depend on them. Source: Koller and Megiddo (1992).

    Args:
        game: its first anchors are those to choose at.
        allowed: (anchors, actions) what may be chosen there.
    """
    rule: Floats = allowed / allowed.sum(axis=1, keepdims=True)
    depth = _depth(game)
    last = [depth[game.anchor == anchor].max(initial=-1) for anchor in range(len(rule))]
    for anchor in np.argsort(last)[::-1].tolist():
        now = ruled(game, rule)
        here = np.flatnonzero(game.anchor == anchor)
        gain = visits(now, 1.0)[here] @ action_values(now)[here, : rule.shape[1]]
        rule[anchor] = 0.0
        rule[anchor, int(np.where(allowed[anchor], gain, -np.inf).argmax())] = 1.0
    return rule


def _depth(game: Game) -> Ints:
    """(states,) how many choices lead to each, at most."""
    depth = np.full(len(game.reward), -1, dtype=np.int64)
    depth[game.start] = 0
    while True:
        after = depth.copy()
        goes = (game.next >= 0) & (depth >= 0)[:, None]
        source = np.broadcast_to(depth[:, None] + 1, game.next.shape)
        np.maximum.at(after, game.next[goes], source[goes])
        if np.array_equal(after, depth):
            return depth
        depth = after
