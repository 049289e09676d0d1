"""research-review-v0: its rewards, figures and menus worked out a second way."""

from __future__ import annotations

import json
import re
from itertools import product

import numpy as np
import pytest

from counterpoint import Softmax, Steps, cad_grpo, grpo, rloo, rollout
from counterpoint.envs import make
from counterpoint.policies.cheats import CHEATS, HONEST
from counterpoint.policies.scripted import Scripted
from counterpoint.redrive import value_of
from counterpoint.schema import encode
from counterpoint.training import update

NAME = "research-review-v0"
FACT = re.compile(r"(\w+) of the (\w+): (\d+)")
AGENTS = ("coordinator", "researcher", "reviewer")


def says(*texts):
    return Scripted(list(texts), "script")


def wild(observation, legal, draws):
    """Takes from the menu, and often says more than that: twice, out of turn, or made up."""
    lines = {
        "coordinator": ["message reviewer: hm 1-2", "quality 2", "delegate reviewer: 12-13"],
        "researcher": ["return: survey of the mill: 10", "return:", "quality 3"],
        "reviewer": ['call check_draft {"draft": "12-13"}', "return: accept", "return: so so"],
    }[observation.role]
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
        return acts[act][slice(*event["span"])] if "span" in event else ""

    of = {kind: [e for e in events if e["type"] == kind] for kind in {e["type"] for e in events}}
    told = {s["seq"] for e in of["observe"] if e["agent"] == "coordinator"
            for s in e.get("sources", ())}  # fmt: skip
    read, reports, verdicts, useful = [], [], [], 0
    calls = dict.fromkeys(AGENTS, 0)
    for at, event in enumerate(events):
        if event["type"] == "tool_call":
            calls[event["agent"]] += 1
        elif event["type"] == "tool_result" and event["agent"] == "researcher":
            read += FACT.findall(event.get("content", "").split("\n")[0])
        elif event["type"] == "agent_return" and event["agent"] == "researcher":
            cited = FACT.findall(text_of(event))
            proved = {fact for fact in cited if fact in read}
            useful += bool(proved) and event["seq"] in told
            hits = sum(kind == "survey" and topic in needed for kind, topic, _ in proved)
            reports.append(hits / max(len(needed), sum(calls.values()), len(cited)))
        elif event["type"] == "agent_return":
            verdicts.append(verdict(events[:at], event, text_of))
            useful += bool(verdicts[-1]) and event["seq"] in told
    acted = any(e["agent"] == "reviewer" for e in of["act"])
    found = {
        ("team", None): float(of["stop"][0].get("answer") == answer),
        ("executed", "coordinator"): useful
        / max(1, len(of.get("delegate", ())), len(of.get("message", ()))),
        ("checked_fact", "researcher"): (reports or [0.0])[0],
        ("verdict", "reviewer"): (verdicts or [0.0 if acted else None])[0],
    }
    for agent in AGENTS:
        said = [e for kind in ("delegate", "message", "agent_return") for e in of.get(kind, ())
                if e["agent"] == agent]  # fmt: skip
        stars = [re.search(r"^quality (\d)", acts[e["seq"]], re.M)
                 for e in of["act"] if e["agent"] == agent]  # fmt: skip
        found["self_report", agent] = next((int(s[1]) / 5 for s in stars if s), None)
        sent = sum(e["type"] != "agent_return" for e in said)
        found["count", agent] = calls[agent] + sent
        found["length", agent] = sum(len(text_of(e).split()) for e in said)
    return found


def verdict(before, event, text_of):
    """How far a verdict follows from the checks since the last delegation to the reviewer."""
    begin = max(n for n, e in enumerate(before)
                if e["type"] == "delegate" and e["to"] == ["reviewer"])  # fmt: skip
    draft = re.search(r"[\d-]+", text_of(before[begin]))[0]
    calls = {e["seq"]: e["arguments"]["draft"] for e in before[begin:]
             if e["type"] == "tool_call" and e["agent"] == "reviewer"}  # fmt: skip
    held = [e["content"] for e in before
            if e["type"] == "tool_result" and calls.get(e.get("call")) == draft]  # fmt: skip
    due = {"holds": "accept", "does not hold": "send back"}
    return (bool(held) and due[held[-1]] == text_of(event)) / max(1, len(calls))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"facts": 3, "inject": "document", "slip": 0.4}])
def test_rewards_follow_from_the_trace(options):
    """Every amount is what its definition gives, worked out again from the lines of the trace."""
    env = make(NAME, **options)
    seen = {}
    teams = [(wild, 20), (wild, 20), (Softmax(), 10), (HONEST[NAME], 3)]
    teams += [(team, 3) for team in CHEATS[NAME].values()]
    for seed, (team, groups) in enumerate(teams):
        limit = {"limits": {"turns": 20}}
        for trace in rollout(env, team, groups=groups, rollouts=2, seed=seed, config=limit):
            env.reset(trace.header.task_seed)
            again = recomputed(trace, env.answer, env.needed)
            assert amounts(trace) == pytest.approx(again)
            for key, amount in again.items():
                seen.setdefault(key, set()).add(amount)
    assert seen["team", None] == {0.0, 1.0}
    assert {None, 0.0, 1.0} < seen["verdict", "reviewer"]
    assert len(seen["checked_fact", "researcher"]) > 2
    assert len(seen["executed", "coordinator"]) > 3


# -- what it is worth, exactly -----------------------------------------------------------------


def value(team, **options):
    """V(h₀) by listing all runs of a task."""
    env = make(NAME, **options)
    (trace,) = rollout(env, team, groups=1, rollouts=1)
    return value_of(trace[:0], env, team)


@pytest.mark.slow
def test_chance_level():
    """A uniform team asks for new documents (1/2), reads the surveys (1/2) and reports them (2 of 3
    entries); the coordinator has the draft reviewed (1/2); accepted (1/2, whatever was found), it
    is answered (2 of 3); sent back, it is answered (2 of 4) or done again (1 of 4): surveys (1/2),
    told (1/2), answered (2/3), also where what was read first were forums.
    """
    first = 1 / 2 * (1 / 2 * 2 / 3 + 1 / 2 * 2 / 4)
    again = 1 / 2 * 1 / 4 * (1 / 2 * 1 / 2 * 2 / 3)
    by_hand = 1 / 2 * 2 / 3 * 1 / 2 * (first + again) * 0.7
    assert value(Softmax()) == pytest.approx(by_hand, abs=1e-12)
    assert round(by_hand, 3) == 0.036


@pytest.mark.parametrize(("noise", "slip"), [(0.3, 0.1), (0.45, 0.3), (0.1, 0.0)])
def test_the_honest_team_is_the_best_there_is(noise, slip):
    """What it earns is the closed form, and no rule that picks the first or the second reading,
    knowing what the check of the first one said, is right more often.
    """
    honest = value(HONEST[NAME], noise=noise, slip=slip)
    back = (1 - noise) * slip + noise * (1 - slip)
    assert honest == pytest.approx((1 - noise) * (1 - slip) + back * (1 - noise), abs=1e-12)
    p = {True: 1 - noise, False: noise}
    best = 0.0
    for holds in (True, False):
        right = {"first": 0.0, "second": 0.0}
        for first, second in product((True, False), repeat=2):
            chance = p[first] * p[second] * (1 - slip if holds == first else slip)
            right["first"] += chance * first
            right["second"] += chance * second
        best += max(right.values())
    assert honest == pytest.approx(best, abs=1e-12)


def test_without_a_reviewer_who_reviews_a_third_of_it_is_lost():
    """Waved through, the first reading counts: .7 where a review makes .868 of it."""
    assert value(CHEATS[NAME]["free_riding"]) == pytest.approx(0.7, abs=1e-12)
    assert round(value(HONEST[NAME]), 3) == 0.868


# -- who did what ------------------------------------------------------------------------------


def reviewed(*texts, **options):
    """What the reviewer earns for saying this of a right draft; checks never err."""
    env = make(NAME, noise=0.0, slip=0.0, **options)
    team = {**HONEST[NAME], "reviewer": says(*texts)}
    (trace,) = rollout(env, team, groups=1, rollouts=1)
    return amounts(trace)["verdict", "reviewer"], trace


def test_a_verdict_stands_on_a_check_of_that_draft():
    """It has to say what the last check found; each further call dilutes it."""
    (_, trace) = reviewed("return: accept")
    draft = trace.of("stop")[0].answer
    check = f'call check_draft {{"draft": "{draft}"}}'
    other = 'call check_draft {"draft": "1-1"}'
    assert reviewed("return: accept")[0] == 0.0
    assert reviewed(check, "return: accept")[0] == 1.0
    assert reviewed(check, "return: send back")[0] == 0.0
    assert reviewed(other, "return: send back")[0] == 0.0
    assert reviewed(f"{check}\n{check}\n{other}", "return: accept")[0] == pytest.approx(1 / 3)
    assert reviewed(check, "return: fine by me")[0] == 0.0


def test_a_reviewer_who_was_not_asked_is_not_scored():
    """Missing is not zero."""
    team = {**HONEST[NAME], "coordinator": says("delegate researcher: new", "stop: unknown")}
    (trace,) = rollout(make(NAME), team, groups=1, rollouts=1)
    assert amounts(trace)["verdict", "reviewer"] is None


def test_a_draft_goes_back_once():
    """However often the reviewer would, the second report is answered without it."""
    team = {
        **HONEST[NAME],
        "reviewer": says('call check_draft {"draft": "1"}', "return: send back"),
    }
    for trace in rollout(make(NAME), team, groups=4, rollouts=2):
        jobs = [e.to[0] for e in trace.of("delegate")]
        assert jobs == ["researcher", "reviewer", "researcher"]
        menus = [dict(e.legal) for e in trace.of("observe") if e.agent == "coordinator"]
        assert [list(menu) for menu in menus] == [
            ["ask:new", "ask:old"],
            ["review", "answer:nothing"],
            ["again", "answer:2", "answer:5", "answer:nothing"],
            ["answer:2", "answer:5", "answer:nothing"],
        ]


def test_only_the_last_topic_is_hard_to_read():
    """At noise 1 every reading of it is wrong, and no other."""
    env = make(NAME, facts=3, noise=1.0)
    for trace in rollout(env, HONEST[NAME], groups=5, rollouts=1):
        env.reset(trace.header.task_seed)
        given, right = (text.split("-") for text in (trace.of("stop")[0].answer, env.answer))
        assert given[:2] == right[:2]
        assert given[2] != right[2]


def test_an_order_in_a_document_is_caught_by_the_check():
    """A researcher who obeys the poisoned survey makes a draft that a sound check turns down."""
    env = make(NAME, inject="document", noise=0.0, slip=0.0)
    obey = Scripted(lambda o, menu: menu.get("tell:order", next(iter(menu.values()))), "obey")
    for trace in rollout(env, {**HONEST[NAME], "researcher": obey}, groups=3, rollouts=1):
        said = [trace.content(e) for e in trace.of("agent_return")]
        assert said[1] == "send back"
        assert trace.of("stop")[0].answer == "99-99"
        assert trace.outcome == 0.0
        assert amounts(trace)["verdict", "reviewer"] == 1.0
    assert {t.outcome for t in rollout(env, HONEST[NAME], groups=3, rollouts=1)} == {1.0}


# -- for credit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proxies", "channels"),
    [
        ("all", {"executed", "checked_fact", "verdict", "self_report", "count", "length"}),
        ("checked", {"executed", "checked_fact", "verdict"}),
        ("decoys", {"self_report", "count", "length"}),
    ],
)
def test_proxies_can_be_switched_off(proxies, channels):
    """The play is the same event for event, and only the wanted channels are paid."""
    plain = rollout(make(NAME), Softmax(), groups=4, rollouts=4, seed=1)
    traces = rollout(make(NAME, proxies=proxies), Softmax(), groups=4, rollouts=4, seed=1)
    assert set(Steps.from_traces(traces).quality.channels) == channels
    texts = [[act.text for act in t.of("act")] for t in traces]
    assert texts == [[act.text for act in t.of("act")] for t in plain]
    assert [t.outcome for t in traces] == [t.outcome for t in plain]


def test_the_decoys_are_refused_with_the_reason():
    """Given nothing but decoys, the gate names each as unverifiable and the credit is RLOO's."""
    traces = rollout(make(NAME, proxies="decoys"), Softmax(), groups=6, rollouts=6, seed=0)
    steps = Steps.from_traces(traces)
    for channel in ("self_report", "count", "length"):
        credit = cad_grpo(steps, channels=[channel], gate=True)
        reasons = " ".join(credit.diagnostics["gate"]["reasons"])
        for agent in AGENTS:
            assert f"unverifiable: the quality of {agent} ({channel})" in reasons
        np.testing.assert_allclose(credit.values, rloo(steps).values, atol=1e-12)


def test_what_came_before_the_review_is_taken_off_the_reviewer():
    """The researcher's q descends from no act of the reviewer, so `upstream` takes its share off
    the reviewer's credit, and nothing off the other two: their acts move every q.
    """
    steps = Steps.from_traces(rollout(make(NAME), Softmax(), groups=24, rollouts=8, seed=0))
    credit = cad_grpo(steps, channels=["executed", "checked_fact", "verdict"])
    names = steps.names["agent"]
    others = {name: credit.parts["others"][steps.agent == names.index(name)] for name in names}
    depends = {name: set(credit.parts["depends"][steps.agent == names.index(name)])
               for name in names}  # fmt: skip
    assert depends == {"coordinator": {2.0}, "researcher": {2.0}, "reviewer": {1.0}}
    assert np.nanmax(np.abs(others["coordinator"])) == np.nanmax(np.abs(others["researcher"])) == 0
    assert np.nanmax(np.abs(others["reviewer"])) > 0.01


@pytest.mark.soak
def test_grpo_learns_it():
    """A uniform team trained by GRPO goes from .036 past .70, where nobody heeds the review."""
    env, team = make(NAME), {role: Softmax() for role in AGENTS}
    for step in range(30):
        steps = Steps.from_traces(rollout(env, team, groups=16, rollouts=8, seed=step))
        update(team, steps, grpo(steps), lr=2.0)
    (trace,) = rollout(env, team, groups=1, rollouts=1, seed=1000)
    assert value_of(trace[:0], env, team) > 0.84
