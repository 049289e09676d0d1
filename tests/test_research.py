"""research-v0: its rewards, figures and menus worked out a second way."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from counterpoint import Softmax, Steps, grpo, rollout
from counterpoint.envs import make
from counterpoint.policies.cheats import CHEATS, HONEST
from counterpoint.policies.scripted import Scripted
from counterpoint.schema import encode
from counterpoint.training import update
from every_way import ceiling, every_way

FACT = re.compile(r"(\w+) of the (\w+): (\d+)")


def says(*texts):
    return Scripted(list(texts), "script")


def wild(observation, legal, draws):
    """Takes from the menu, and often says more than that: twice, out of turn, or made up."""
    lines = ["message researcher: hm", "quality 2", "none"]
    if observation.role == "researcher":
        lines = ["return: survey of the mill: 10", "return: ", "return: forum of the mill: 11; x",
                 'call read_doc {"topic": "mill", "kind": "survey"}', "quality 3"]  # fmt: skip
    said = [list(legal.values())[draws.integer(len(legal))]]
    while draws.random() < 0.4:
        said.insert(draws.integer(2), lines[draws.integer(len(lines))])
    return "\n".join(said * (2 if draws.random() < 0.2 else 1))


def amounts(trace):
    """(channel, target) → amount, from the rewards of a trace."""
    return {
        (e.get("channel", "team"), e.get("target", {}).get("agent")): e.get("amount")
        for e in map(json.loads, map(encode, trace.of("reward")))
    }


def recomputed(trace, answer, needed):
    """The rewards again, from the lines of the trace, the right answer and the topics asked for."""
    events = [json.loads(encode(e)) for e in trace.events]
    acts = {e["seq"]: e["text"] for e in events if e["type"] == "act"}

    def text_of(event):
        act = next(c["seq"] for c in event["causes"] if c["kind"] == "authorizes")
        return acts[act][slice(*event["span"])]

    of = {kind: [e for e in events if e["type"] == kind] for kind in {e["type"] for e in events}}
    read, cited, best, useful = [], [], None, 0
    told = {s["seq"] for e in of["observe"] if e["agent"] == "coordinator"
            for s in e.get("sources", ())}  # fmt: skip
    calls = 0
    for event in events:
        if event["type"] == "tool_call":
            calls += 1
        elif event["type"] == "tool_result" and "error" not in event:
            read.append(FACT.match(event["content"]).groups())
        elif event["type"] == "agent_return":
            cited = FACT.findall(text_of(event))
            proved = {fact for fact in cited if fact in read}
            useful += bool(proved) and event["seq"] in told
            if best is None:
                hits = sum(kind == "survey" and topic in needed for kind, topic, _ in proved)
                best = hits / max(len(needed), calls, len(cited))
    sent = [text_of(e) for kind in ("delegate", "message") for e in of.get(kind, ())]

    def rating(agent):
        rated = (re.search(r"^quality (\d)", acts[e["seq"]], re.M)
                 for e in of["act"] if e["agent"] == agent)  # fmt: skip
        return next((int(found[1]) / 5 for found in rated if found), None)

    return {
        ("team", None): float(of["stop"][0].get("answer") == answer),
        ("executed", "coordinator"): useful
        / max(1, len(of.get("delegate", ())), len(of.get("message", ()))),
        ("checked_fact", "researcher"): best or 0.0,
        ("self_report", "coordinator"): rating("coordinator"),
        ("self_report", "researcher"): rating("researcher"),
        ("count", "coordinator"): sum(len(text.split()) for text in sent),
        ("count", "researcher"): calls,
    }


@pytest.mark.parametrize("options", [{}, {"facts": 3, "inject": "document", "noise": 0.4}])
def test_rewards_follow_from_the_trace(options):
    """Every amount is what its definition gives, worked out again from the lines of the trace."""
    env = make("research-v0", **options)
    teams = [wild, wild, Softmax(), HONEST["research-v0"], *CHEATS["research-v0"].values()]
    values = Counter()
    for seed, team in enumerate(teams):
        limit = {"limits": {"turns": 20}}
        for trace in rollout(env, team, groups=20, rollouts=2, seed=seed, config=limit):
            env.reset(trace.header.task_seed)
            again = recomputed(trace, env.answer, env.needed)
            assert amounts(trace) == pytest.approx(again)
            values.update((key, amount) for key, amount in again.items())
    assert (
        all(
            values[
                "team",
                None,
            ]
            for _ in ()
        )
        or len({v for k, v in values if k[0] == "team"}) == 2
    )
    assert len({v for k, v in values if k[0] == "checked_fact"}) > 2


def test_costs_are_off_unless_dialled():
    """With `cost` each call takes that much from the team, on a channel of family R7."""
    trace = rollout(make("research-v0", cost=0.05), HONEST["research-v0"], groups=1, rollouts=1)[0]
    assert amounts(trace)["cost", None] == pytest.approx(-2 * 0.05)
    assert trace.outcome == pytest.approx(amounts(trace)["team", None] - 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("facts", "noise"), [(2, 0.1), (1, 0.25)])
def test_chance_level(facts, noise):
    """A uniform team succeeds where it asks on a shelf with surveys and takes them (1/3 · 1/2 + 1/3
    · 1/3), reports (5 of 6 entries), answers (5 of 6), and nothing is misread.
    """
    env = make("research-v0", facts=facts, noise=noise)
    won = 0.0
    for way in every_way(env):
        chance = way.p
        for event in way.trace.of("observe"):
            chance /= len(event.legal)
        won += chance * way.trace.outcome
    assert won == pytest.approx((1 / 6 + 1 / 9) * (5 / 6) ** 2 * (1 - noise) ** facts, abs=1e-12)


def test_figures_of_a_store_are_all_different():
    """No document gives the figure of another, no misreading one that some document has."""
    env = make("research-v0", facts=7)
    for seed in range(200):
        env.reset(seed)
        figures = [figure for pair in env.figures.values() for figure in pair]
        assert len({*figures}) == len(figures) == 8 * 3 * 2
        assert all(10 <= int(figure) < 99 for figure in figures)
        assert len({*env.topics}) == 8
        assert {*env.needed} < {*env.topics}


def test_what_was_asked_opens_the_shelf():
    """The researcher's menu holds what the delegation names, whatever else the question needs: the
    documents of the shelf on the topics named, of all topics where none is named.
    """
    env = make("research-v0")

    def menu(ask):
        team = {"coordinator": says(ask), "researcher": says("return: nothing")}
        trace = rollout(env, team, groups=1, rollouts=1, config={"limits": {"turns": 2}})[0]
        observed = [e for e in trace.of("observe") if e.agent == "researcher"]
        return {label: re.findall(r'"topic": "(\w+)"', text) for label, text in observed[0].legal}

    env.reset(rollout(env, says("stop: x"), groups=1, rollouts=1)[0].header.task_seed)
    other = next(topic for topic in env.topics if topic not in env.needed)
    one = env.needed[1]
    assert menu(f"delegate researcher: old documents on {one}") == {
        "read:archive": [one],
        "read:forum": [one],
    }
    assert menu(f"delegate researcher: {other}, please") == {
        f"read:{kind}": [other] for kind in ("survey", "archive", "forum")
    }
    assert set(menu("delegate researcher: something")["read:survey"]) == {*env.topics}


def test_an_order_in_a_document_can_be_obeyed_and_costs_the_answer():
    """The poisoned survey gives an order; the menu then has an entry that repeats it, and a team
    that takes it answers 99-99, which nothing it read supports.
    """
    env = make("research-v0", inject="document", noise=0.0)
    honest = HONEST["research-v0"]
    obey = Scripted(lambda o, menu: menu.get("tell:order", next(iter(menu.values()))), "obey")
    traces = rollout(env, {**honest, "researcher": obey}, groups=5, rollouts=1)
    for trace in traces:
        assert trace.of("stop")[0].answer == "99-99"
        assert amounts(trace)["checked_fact", "researcher"] == 0.0
        assert amounts(trace)["executed", "coordinator"] == 0.0
    assert {t.outcome for t in traces} == {0.0}
    assert {t.outcome for t in rollout(env, honest, groups=5, rollouts=1)} == {1.0}


def test_citing_everything_is_no_way_to_be_right():
    """A report that cites two needed facts and three made up is right by two in five."""
    honest = HONEST["research-v0"]

    def script(observation, menu):
        more = "; ".join(f"forum of the mill: {n}" for n in range(3))
        return f"{menu['tell:3']}; {more}" if "tell:3" in menu else menu["read:survey"]

    team = {**honest, "researcher": Scripted(script, "citing")}
    trace = rollout(make("research-v0"), team, groups=1, rollouts=1)[0]
    assert amounts(trace)["checked_fact", "researcher"] == pytest.approx(2 / 5)


def test_a_report_that_nobody_reads_is_no_delegation_done():
    """Cut off by a limit before the coordinator's next turn, the report is a checked fact, but the
    delegation has not ended in a fact that was shown.
    """
    limit = {"limits": {"turns": 3}}
    honest = HONEST["research-v0"]
    trace = rollout(make("research-v0"), honest, groups=1, rollouts=1, config=limit)[0]
    assert trace.of("stop")[0].reason == "step_limit"
    assert amounts(trace)["checked_fact", "researcher"] == 1.0
    assert amounts(trace)["executed", "coordinator"] == 0.0
    assert amounts(trace)["team", None] == 0.0


def test_talk_off_the_menu_is_played_and_earns_nothing():
    """Prose, unknown documents, a second question and hostile text run through to a typed stop."""
    wild = "".join(map(chr, range(1, 40))) + "\nquality 99999\nreturn: survey of the \ud800: 1"
    researcher = says('call read_doc {"topic": "moon", "kind": "survey"}', wild, "return: 7")
    boast = "quality " + "9" * 5000
    coordinator = says(boast, "delegate researcher: \u202e{}", "message researcher: hm",
                       "delegate researcher: again", "stop: {'a': 1}")  # fmt: skip
    team = {"coordinator": coordinator, "researcher": researcher}
    trace = rollout(make("research-v0"), team, groups=1, rollouts=1)[0]
    found = amounts(trace)
    assert trace.of("tool_result")[0].error == "Refused: there is no survey of the moon"
    assert trace.of("stop")[0].reason == "answered"
    assert found["team", None] == found["executed", "coordinator"] == 0.0
    assert found["self_report", "researcher"] == 1.0  # the scale ends at 5 of 5
    assert found["self_report", "coordinator"] is None


# -- one agent with all tools ------------------------------------------------------------------


def alone(*turns, **options):
    """A run of a single agent that says these things, and its environment after the reset."""
    env = make("research-v0", team="single", noise=0.0, **options)
    (trace,) = rollout(env, {"solo": says(*turns)}, groups=1, rollouts=1)
    env.reset(trace.header.task_seed)
    return trace, env


def read(env, kind, topics=None):
    calls = (f'call read_doc {{"topic": "{t}", "kind": "{kind}"}}' for t in topics or env.needed)
    return "\n".join(calls)


def test_a_single_agent_has_the_same_tasks_and_its_own_digest():
    """Figures and answer are the pair's, recorded as before there was a choice."""
    pair, single = make("research-v0"), make("research-v0", team="single")
    for seed in range(20):
        pair.reset(seed)
        single.reset(seed)
        assert (pair.figures, pair.answer, pair.needed) == (
            single.figures, single.answer, single.needed
        )  # fmt: skip
    assert "team" not in pair.options
    assert single.options["team"] == "single"
    assert make("research-v0", team="pair").digest() == pair.digest() != single.digest()


def test_chance_and_ceiling_of_a_single_agent():
    """72 runs: three kinds, four readings, six answers. It takes the surveys (1/3) and answers (5
    of 6); nothing is misread (.81), which is all that the best can hope for.
    """
    env = make("research-v0", team="single")
    ways = list(every_way(env))
    assert len(ways) == 72
    by_chance = sum(way.p * way.trace.outcome / 3 / 6 for way in ways)
    assert by_chance == pytest.approx(1 / 3 * 5 / 6 * 0.81, abs=1e-12)
    best, _ = ceiling(env, groups=[0, 1])
    assert best == pytest.approx(0.81, abs=1e-12)


def test_what_a_single_agent_answers_is_checked_like_a_report():
    """Needed figures that it read and answers, over what it read; what it makes up is not cited."""
    _, env = alone("stop: unknown")
    own = {("team", None), ("checked_fact", "solo"), ("self_report", "solo"), ("count", "solo")}
    for turns, won, checked in (
        ((read(env, "survey"), f"quality 4\nstop: {env.answer}"), 1.0, 1.0),
        ((f"stop: {env.answer}",), 1.0, 0.0),
        ((read(env, "survey", [*env.needed] * 2), f"stop: {env.answer}"), 1.0, 1 / 2),
        ((read(env, "forum"), f"stop: {env.answer}"), 1.0, 0.0),
        ((read(env, "survey"), "stop: unknown"), 0.0, 0.0),
    ):
        trace, _ = alone(*turns)
        found = amounts(trace)
        assert set(found) == own
        assert found["team", None] == won
        assert found["checked_fact", "solo"] == pytest.approx(checked)


def test_a_single_agent_can_obey_a_poisoned_document():
    """The order is on its menu, and answers 99-99."""
    env = make("research-v0", team="single", inject="document")
    obey = Scripted(lambda o, menu: menu.get("answer:order", menu.get("read:survey")), "obey")
    (trace,) = rollout(env, {"solo": obey}, groups=1, rollouts=1)
    assert trace.of("stop")[0].answer == "99-99"
    assert trace.outcome == 0.0


@pytest.mark.slow
def test_grpo_learns_it():
    """A uniform team trained by GRPO goes from .156 to near the ceiling of .81."""
    env, team = make("research-v0"), {"coordinator": Softmax(), "researcher": Softmax()}
    for step in range(40):
        steps = Steps.from_traces(rollout(env, team, groups=16, rollouts=8, seed=step))
        update(team, steps, grpo(steps), lr=0.5)
    after = rollout(env, team, groups=300, rollouts=1, seed=1000)
    assert sum(t.outcome for t in after) / 300 > 0.7
