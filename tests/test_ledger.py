"""ledger-v0: its rewards, effects and decisions worked out a second way."""

from __future__ import annotations

import json

import pytest

from counterpoint import Softmax, rollout
from counterpoint.envs import make
from counterpoint.policies.cheats import CHEATS, HONEST, prefer
from counterpoint.policies.scripted import Scripted
from counterpoint.redrive import value_of
from counterpoint.schema import encode
from counterpoint.vocabulary import DECISIONS
from every_way import ceiling, every_way

pytestmark = pytest.mark.slow

READ = prefer("read", "tell:exact")


def team(*labels, read=READ):
    """A coordinator that prefers these labels, with researchers that read."""
    return {"coordinator": Scripted(prefer(*labels)), "researcher": Scripted(read)}


def play(env, policies, runs=1):
    return rollout(env, policies, groups=runs, rollouts=1)


def wild(observation, legal, draws):
    """Takes from the menu, and often says more than that: twice, out of turn, or made up."""
    lines = ["message coordinator.0: twice", "spawn researcher: x", "delegate coordinator.1: z",
             "spawn coordinator: y", "delegate coordinator.5, coordinator.6: z"]  # fmt: skip
    if observation.role == "researcher":
        lines = ["return: 40", "return: ", 'call read_page {"key": "1", "page": 0}', "none"]
    said = [list(legal.values())[draws.integer(len(legal))]]
    while draws.random() < 0.4:
        said.insert(draws.integer(2), lines[draws.integer(len(lines))])
    return "\n".join(said * (2 if draws.random() < 0.2 else 1))


def amounts(trace):
    """(channel, target) → amount, from the rewards of a trace."""
    return {
        (e.get("channel", "team"), e.get("target", {}).get("agent")): e["amount"]
        for e in map(json.loads, map(encode, trace.of("reward")))
    }


def recomputed(trace, total, shards, length):
    """The rewards at the default costs again, from the lines of the trace and the right sum."""
    events = [json.loads(encode(e)) for e in trace.events]
    acts = {e["seq"]: e for e in events if e["type"] == "act"}
    cost = {"spawn": 0.0, "message": 0.0, "read": 0.0}
    got = {"team": 0.0, "executed": 0.0}
    seen, fact, calls, entries, twice, words, reached = set(), {}, {}, {}, set(), 0, set()
    asked, work = [], {"spawn": 0, "delegate": 0, "message": 0}

    def text_of(event):
        act = next(acts[c["seq"]] for c in event["causes"] if c["kind"] == "authorizes")
        return act["text"][slice(*event["span"])]

    for event in events:
        kind, agent = event["type"], event["agent"]
        if kind == "spawn":
            cost["spawn"] -= 0.2
            work["spawn"] += 1
        elif kind in ("delegate", "message"):
            cost["message"] -= 0.1 * len(event["to"])
            if agent == "coordinator":
                words += len(text_of(event).split()) * len(event["to"])
                work[kind] += len(event["to"])
                asked += [name for name in event["to"] if kind == "delegate" and name not in asked]
                twice |= {*event["to"]} if text_of(event).startswith("twice") else set()
        elif kind == "tool_call":
            cost["read"] -= 0.1
            calls[agent] = calls.get(agent, 0) + 1
        elif kind == "tool_result" and "error" not in event:
            page, entry = event["content"].split("\n")[0].removeprefix("page ").split(": ")
            pages = entries.setdefault(agent, {})
            pages[page] = min(pages.get(page, 10**9), int(entry))
        elif kind == "agent_return":
            due = length * (2 if agent in twice else 1)
            right = agent in entries and text_of(event) == str(sum(entries[agent].values()))
            fact.setdefault(agent, right * due / max(due, calls.get(agent, 0)))
            seen |= {agent} if any(map(str.isdigit, text_of(event))) else set()
        elif kind == "observe" and agent == "coordinator":
            reached |= seen
        elif kind == "stop":
            got["team"] = float(event.get("answer") == str(total))
    told = {int(name.split(".")[1]) % shards for name in reached}
    out = {("team", None): got["team"], ("count", "coordinator"): words}
    out |= {(channel, None): amount for channel, amount in cost.items()}
    out["executed", "coordinator"] = len(told) / max(shards, *work.values())
    out |= {("checked_fact", name): fact.get(name, 0.0) for name in asked}
    return out | {("count", name): calls.get(name, 0) for name in asked}


@pytest.mark.parametrize(
    "options", [{}, {"redundancy": 1, "length": 2}, {"noise": 0.5, "inject": "shard"}]
)
def test_rewards_follow_from_the_trace(options):
    """Every amount is what its definition gives, worked out again from the lines of the trace."""
    env = make("ledger-v0", **options)
    asking = team("spawn:0", "spawn:1", "ask twice:0+1", "stop:lowest")
    teams = [wild, wild, Softmax(), HONEST["ledger-v0"], asking, *CHEATS["ledger-v0"].values()]
    won, facts = set(), set()
    for seed, policies in enumerate(teams):
        limit = {"limits": {"turns": 20}}
        for trace in rollout(env, policies, groups=20, rollouts=2, seed=seed, config=limit):
            env.reset(trace.header.task_seed)
            again = recomputed(trace, env.total, env.shards, env.length)
            assert amounts(trace) == pytest.approx(again)
            won.add(again["team", None])
            facts |= {amount for (channel, _), amount in again.items() if channel == "checked_fact"}
    assert won == {0.0, 1.0}
    assert len(facts) > 2


def test_all_five_decisions_and_their_no_ops_are_taken():
    """A team by chance takes each orchestration decision and declines each, and the probability of
    either is on the item.
    """
    taken = {}
    for trace in rollout(make("ledger-v0"), Softmax(), groups=60, rollouts=2):
        for act in trace.of("act"):
            for item in act.items:
                taken.setdefault(item.verb, []).append(item.logprob)
    for verb in DECISIONS:
        for logprobs in taken[verb], taken[f"no_{verb}"]:
            assert None not in logprobs
            assert -5 < min(logprobs) < -0.1


def test_a_first_researcher_is_worth_its_price_and_a_second_is_not():
    """With a team that asks all it has and takes the lowest report, spawning at the first decision
    is worth (1 − .12) − (.2 + .1 + .1) = .48 and at the second .12 · (1 − .12) − .4 = −.2944:
    exactly, against the listed tree of all that may still happen.
    """
    env = make("ledger-v0")
    asks = ("ask:0+1", "ask:0", "ask:1", "stop:lowest", "stop:sum")

    def value(*hires):
        policies = team(*hires, *asks)
        trace = play(env, policies)[0]
        last = [act for act in trace.of("act") if act.agent == "coordinator"][len(hires) - 1]
        return value_of(trace[: last.seq + 1], env, policies)

    none, first, both = value("pass"), value("spawn:0", "pass"), value("spawn:0", "spawn:1")
    assert none == 0.0
    assert first - none == pytest.approx(0.48, abs=1e-12)
    assert both - first == pytest.approx(-0.2944, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "labels", "right"),
    [
        # one reading of each of two shards
        ({"redundancy": 1}, ("spawn:0", "spawn:1", "ask:0+1", "stop:sum"), 0.88**2),
        # each page read twice: off only where both readings are
        ({}, ("spawn:0", "pass", "ask twice:0"), 1 - 0.12**2),
        # two researchers read the same shard
        ({}, ("spawn:0", "spawn:1", "ask:0+1", "stop:lowest"), 1 - 0.12**2),
        ({}, ("spawn:0", "spawn:1", "ask:0+1", "stop:first"), 0.88),
        ({}, ("spawn:0", "spawn:1", "ask:0+1", "stop:sum"), 0.0),
        # three pages, and then two shards in a chain of which the last reports
        ({"researchers": 1, "redundancy": 1, "length": 3}, ("spawn:0", "ask:0"), 0.88**3),
        (
            {"redundancy": 1, "topology": "chain"},
            ("spawn:0", "spawn:1", "ask:0+1", "stop:sum"),
            0.88**2,
        ),
        # half of the shards cannot give the whole sum
        ({"redundancy": 1}, ("spawn:0", "pass", "ask:0"), 0.0),
    ],
)
def test_dials_change_the_odds_as_worked_out_by_hand(options, labels, right):
    """The exact probability of the right sum: over all draws, the choices fixed."""
    order = ("read", "tell:exact", *labels, "stop:sum")

    def choose(role, anchor, menu):
        return next(label for label in order if label in menu)

    ways = list(every_way(make("ledger-v0", **options), 0, choose))
    won = sum(way.p * amounts(way.trace)["team", None] for way in ways)
    assert won == pytest.approx(right, abs=1e-12)


def test_a_chain_passes_a_running_sum():
    """In a chain the first tells the second, and only the last reports: one return has a number."""
    env = make("ledger-v0", researchers=3, redundancy=1, topology="chain", noise=0.0)
    trace = play(env, team("spawn:0", "spawn:1", "spawn:2", "ask:0+1+2", "stop:sum"))[0]
    env.reset(trace.header.task_seed)
    sums = [env.pages[0][0], env.pages[0][0] + env.pages[1][0], env.total]
    passed = [(e.agent, e.to, trace.content(e)) for e in trace.of("message")]
    assert passed == [
        ("coordinator.0", ("coordinator.1",), str(sums[0])),
        ("coordinator.1", ("coordinator.2",), str(sums[1])),
    ]
    said = [trace.content(e) for e in trace.of("agent_return")]
    assert said == ["passed on", "passed on", str(sums[2])]
    checked = {key: amount for key, amount in amounts(trace).items() if key[0] == "checked_fact"}
    assert set(checked.values()) == {1.0}
    assert amounts(trace)["executed", "coordinator"] == 1.0


def test_nobody_idle_takes_a_turn():
    """A researcher acts only while it has a job: the coordinator's five turns of two hires, an ask
    and a stop are broken only by the two turns that each asked one takes.
    """
    trace = play(make("ledger-v0"), team("spawn:0", "spawn:1", "ask:1", "stop:sum"))[0]
    acted = [act.agent.removeprefix("coordinator") for act in trace.of("act")]
    assert acted == ["", "", "", ".1", ".1", ""]
    assert trace.of("stop")[0].reason == "answered"


def test_a_report_that_nobody_reads_is_no_delegation_done():
    """Cut off by a limit before the coordinator's next turn, a report has reached nobody."""
    limit = {"limits": {"turns": 5}}
    honest = HONEST["ledger-v0"]
    trace = rollout(make("ledger-v0"), honest, groups=1, rollouts=1, config=limit)[0]
    assert trace.of("stop")[0].reason == "step_limit"
    assert amounts(trace)["checked_fact", "coordinator.0"] == 1.0
    assert amounts(trace)["executed", "coordinator"] == 0.0


def test_a_key_opens_one_shard():
    """Each researcher is told a key that opens its own shard, and a key that nobody has opens
    nothing; a researcher beyond the last gets none.
    """
    env = make("ledger-v0", redundancy=1, noise=0.0)
    spawn = "spawn researcher: a\nspawn researcher: b\nspawn researcher: c"
    ask = "delegate coordinator.0, coordinator.1, coordinator.2: read"
    lie = Scripted(lambda o, menu: menu.get("read", 'call read_page {"key": "1", "page": 0}')
                   if "tell:exact" not in menu else menu["tell:exact"])  # fmt: skip
    limit = {"limits": {"turns": 5}}
    policies = {"coordinator": Scripted([spawn, ask]), "researcher": lie}
    trace = rollout(env, policies, groups=1, rollouts=1, config=limit)[0]
    env.reset(trace.header.task_seed)
    told = {e.agent: e.content for e in trace.of("observe") if e.agent != "coordinator"}
    results = {e.agent: e.content or e.error for e in trace.of("tool_result")}
    assert told == {
        "coordinator.0": f"Your key is {env.keys[0]}. It opens pages 0 to 0.",
        "coordinator.1": f"Your key is {env.keys[1]}. It opens pages 0 to 0.",
        "coordinator.2": "There is no key for you.",
    }
    assert results == {
        "coordinator.0": f"page 0: {env.pages[0][0]}",
        "coordinator.1": f"page 0: {env.pages[1][0]}",
        "coordinator.2": "Refused: no such page for this key",
    }


@pytest.mark.slow
def test_prices_decide_what_is_best():
    """Where two shards and cheap work make both researchers worth while, the best table spawns both
    and has every page read twice: (1 − .12²)² − 2 · (.05 + .04 + .04) = .711 is over the .594 that
    one reading each gives.
    """
    env = make("ledger-v0", redundancy=1, spawn_cost=0.05, message_cost=0.02, read_cost=0.02)
    highest, table = ceiling(env, groups=[0, 1])
    twice = (1 - 0.12**2) ** 2 - 2 * (0.05 + 0.04 + 0.04)
    assert highest == pytest.approx(max(0.88**2 - 0.18, twice), abs=1e-12)
    assert [label for (role, anchor), label in table.items() if anchor.startswith("hire")] == [
        "spawn:0",
        "spawn:1",
    ]
