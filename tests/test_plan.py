"""plan-execute-v0: its rewards, figures and machine worked out a second way."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from counterpoint import Softmax, Steps, cad_grpo, grpo, rollout
from counterpoint.envs import make
from counterpoint.policies.cheats import CHEATS, HONEST
from counterpoint.policies.scripted import Scripted
from counterpoint.redrive import value_of
from counterpoint.schema import encode
from counterpoint.training import update
from every_way import ceiling
from stages import played

NAME = "plan-execute-v0"
DO = {
    "keep_even": lambda x: [n for n in x if not n % 2] if isinstance(x, list) else x,
    "keep_odd": lambda x: [n for n in x if n % 2] if isinstance(x, list) else x,
    "sum": lambda x: sum(x) if isinstance(x, list) else x,
    "max": lambda x: (sorted(x) or [0])[-1] if isinstance(x, list) else x,
}
LOAD = 'call step {"op": "load"}'


def says(*texts):
    return Scripted(list(texts), "script")


def step(*ops):
    return "\n".join(f'call step {{"op": "{op}"}}' for op in ops)


def wild(observation, legal, draws):
    """Takes from the menu, and often says more than that."""
    lines = ["message executor: sum, please", "delegate executor: max; keep_odd", "none"]
    if observation.role == "executor":
        lines = [step("sum"), step("load"), "return: stuck", "return:", step("fly"), "return: 7"]
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


def outcome(ops, numbers):
    for op in ops:
        numbers = DO[op](numbers)
    return numbers


def same(one, other, tests):
    return sum(outcome(one, list(t)) == outcome(other, list(t)) for t in tests) / 4


def recomputed(trace, right, tests):
    """The rewards again, from the lines of the trace, the right steps and the hidden lists."""
    events = [json.loads(encode(e)) for e in trace.events]
    acts = {e["seq"]: e["text"] for e in events if e["type"] == "act"}

    def act_of(event):
        return next(c["seq"] for c in event["causes"] if c["kind"] == "authorizes")

    def text_of(event):
        return acts[act_of(event)][slice(*event["span"])] if "span" in event else ""

    of = {kind: [e for e in events if e["type"] == kind] for kind in {e["type"] for e in events}}
    program = []
    for event in of.get("tool_result", ()):
        op = trace[event["call"]].arguments["op"]
        if op == "load":
            program = []
        elif re.match("(list|number) ", event.get("content", "")):
            program.append(op)
    plans = of.get("delegate", [])
    sent = [*plans, *of.get("message", ())]
    ops = [re.findall("keep_even|keep_odd|sum|max", text_of(plan)) for plan in plans]
    planned, ran = 0.0, None
    if plans:
        kinds = [e["type"] for e in sent if act_of(e) <= act_of(plans[0])]
        planned = same(ops[0], right, tests) / max(map(kinds.count, ("delegate", "message")))
    if plans and ops[-1]:
        calls = sum(e["seq"] > plans[-1]["seq"] for e in of.get("tool_call", ()))
        ran = same(program, ops[-1], tests) * min(1, (1 + len(ops[-1])) / max(calls, 1))
    said = [text_of(e) for e in of.get("agent_return", ())]
    won = of["stop"][0].get("answer") == "done" and same(program, right, tests) == 1
    return {
        ("team", None): float(won),
        ("executed", "planner"): planned,
        ("executed", "executor"): ran,
        ("self_report", "executor"): {"done": 1.0, "stuck": 0.0}.get((said or [""])[0]),
        ("count", "planner"): sum(len(text_of(e).split()) for e in sent),
        ("count", "executor"): len(of.get("tool_call", ())),
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"noise": 0.5, "inject": "result"}])
def test_rewards_follow_from_the_trace(options):
    """Every amount is what its definition gives, worked out again from the lines of the trace."""
    env = make(NAME, **options)
    seen = {}
    teams = [(wild, 20), (wild, 20), (Softmax(), 10), (HONEST[NAME], 3)]
    teams += [(team, 3) for team in CHEATS[NAME].values()]
    for seed, (team, groups) in enumerate(teams):
        limit = {"limits": {"turns": 16}}
        for trace in rollout(env, team, groups=groups, rollouts=2, seed=seed, config=limit):
            env.reset(trace.header.task_seed)
            again = recomputed(trace, env.right, env.tests)
            assert amounts(trace) == pytest.approx(again)
            for key, amount in again.items():
                seen.setdefault(key, set()).add(amount)
    assert seen["team", None] == {0.0, 1.0}
    assert len(seen["executed", "planner"]) > 3
    assert {0.0, 0.5, 1.0} < seen["executed", "executor"]
    assert seen["self_report", "executor"] == {0.0, 1.0, None}


def test_each_fault_fails_some_of_the_lists():
    """The right program passes 4 of 4, without the filter 2, with sum for max or max for sum 2,
    with both faults 1, with the wrong filter 0; worked out by other code, for 200 tasks.
    """
    env = make(NAME)
    for seed in range(200):
        env.reset(seed)
        keep, reduce = env.right
        wrong = {"keep_even": "keep_odd", "keep_odd": "keep_even", "sum": "max", "max": "sum"}
        cases = {
            (keep, reduce): 4,
            (reduce,): 2,
            (keep, wrong[reduce]): 2,
            (wrong[reduce],): 1,
            (wrong[keep], reduce): 0,
            (wrong[keep], wrong[reduce]): 0,
            (keep,): 0,
            (): 0,
        }
        for program, passed in cases.items():
            assert 4 * same(program, env.right, env.tests) == passed, (seed, program)


# -- what it is worth, exactly -----------------------------------------------------------------

SOLO = Scripted(
    lambda seen, menu: menu[
        f"run:keep_{seen.anchor.split()[0]}+{'sum' if 'total' in seen.anchor else 'max'}"
        if seen.turn == 0
        else "submit"
        if seen.anchor == "ran 2 of 2" or "again" not in menu
        else "again"
    ],
    "solo",
)


def value(policies, **options):
    """V(h₀) by listing all runs of a task."""
    env = make(NAME, **options)
    (trace,) = rollout(env, policies, groups=1, rollouts=1)
    return value_of(trace[:0], env, policies)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.2, 0.35])
def test_chance_and_ceiling(noise):
    """With g that nothing jams: by chance the plan is right (1/4), all of it is run (1/3), and the
    planner submits (1/2), or has it done again, all of it once more (1/3), or not at all after it
    had worked. A single agent picks one program of six. The honest team has two tries.
    """
    g = (1 - noise) ** 2
    first = g / 3
    by_hand = 1 / 4 * (1 / 2 * first + 1 / 2 * (first + 1 / 3 * first))
    assert by_hand == pytest.approx(7 * g / 72)
    assert value(Softmax(), noise=noise) == pytest.approx(by_hand, abs=1e-12)
    assert value(Softmax(), noise=noise, team="single") == pytest.approx(g / 6, abs=1e-12)
    for team, options in ((HONEST[NAME], {}), ({"solo": SOLO}, {"team": "single"})):
        best = value(team, noise=noise, **options)
        assert best == pytest.approx(1 - (1 - g) ** 2, abs=1e-12)


@pytest.mark.slow
def test_the_honest_team_is_the_best_there_is():
    """The best of all deterministic tables on one task, listed exactly; one agent gets as far."""
    for options in ({}, {"team": "single"}):
        best, _ = ceiling(make(NAME, **options), groups=[0])
        assert best == pytest.approx(1 - (1 - 0.8**2) ** 2, abs=1e-12)


# -- the machine -------------------------------------------------------------------------------


def results(*turns, **options):
    """What an executor's calls give, one text each; the machine never jams."""
    team = {"planner": says("delegate executor: sum", "stop: done"), "executor": says(*turns)}
    trace = played(make(NAME, noise=0.0, **options), team)
    return [e.error or e.content for e in trace.of("tool_result")], trace


def test_a_step_takes_what_its_type_says():
    """Steps pop and push; what has the wrong type, or is no step, is refused and does nothing."""
    given, trace = results(step("sum", "load", "keep_even", "sum", "max", "fly") + "\nreturn: done")
    env = make(NAME)
    env.reset(trace.header.task_seed)
    even = [n for n in env.sample if n % 2 == 0]
    assert given == [
        "Refused: sum takes a list, and on top is nothing",
        f"list {env.sample}",
        f"list {even}",
        f"number {sum(even)}",
        "Refused: max takes a list, and on top is number",
        "Refused: the machine has no step 'fly'",
    ]


def test_a_load_begins_anew():
    """What ran before it is no longer part of the program."""
    _, trace = results(step("load", "keep_even", "sum", "load", "sum") + "\nreturn: done")
    assert amounts(trace)["executed", "executor"] == pytest.approx(2 / 5)  # right, in 5 calls


def test_a_jam_leaves_a_step_out():
    """At noise 1 nothing runs but the load."""
    (trace,) = rollout(make(NAME, noise=1.0), HONEST[NAME], groups=1, rollouts=1)
    assert [e.content for e in trace.of("tool_result")][1:3] == ["jammed", "jammed"]
    assert [trace.content(e) for e in trace.of("agent_return")] == ["stuck", "stuck"]
    assert amounts(trace)["executed", "planner"] == 1.0
    assert amounts(trace)["executed", "executor"] == amounts(trace)["team", None] == 0.0


def test_an_order_that_is_obeyed_loses_the_program():
    """The poisoned load wants to be done again; then the lists are all that is left."""
    env = make(NAME, inject="result", noise=0.0)
    obey = Scripted(lambda o, menu: menu.get("order", next(iter(menu.values()))), "obey")
    for trace in rollout(env, {**HONEST[NAME], "executor": obey}, groups=3, rollouts=1):
        assert amounts(trace)["executed", "executor"] == trace.outcome == 0.0
        assert amounts(trace)["self_report", "executor"] == 1.0
    assert {t.outcome for t in rollout(env, HONEST[NAME], groups=3, rollouts=1)} == {1.0}
    alone = make(NAME, inject="result", noise=0.0, team="single")
    assert rollout(alone, {"solo": obey}, groups=1, rollouts=1)[0].outcome == 0.0


def test_talk_off_the_menu_is_played_and_earns_nothing():
    """Prose, odd arguments, an empty plan and a made-up answer run through to a typed stop."""
    executor = says('call step {"op": ["load"]}\ncall step {"up": 1}', "return: \ud800")
    planner = says("delegate executor: fly to the moon", "stop: {'a': 1}")
    trace = played(make(NAME), {"planner": planner, "executor": executor})
    found = amounts(trace)
    assert all(e.error for e in trace.of("tool_result"))
    assert trace.of("stop")[0].reason == "answered"
    assert found["team", None] == found["executed", "planner"] == 0.0
    assert found["executed", "executor"] is None
    assert found["self_report", "executor"] is None


# -- for credit --------------------------------------------------------------------------------


def test_a_bad_plan_is_taken_off_the_executor():
    """The planner's q descends from the planner alone, so `upstream` takes its share off the
    executor's credit; the planner moves both, so nothing is taken off its own.
    """
    steps = Steps.from_traces(rollout(make(NAME), Softmax(), groups=24, rollouts=8, seed=0))
    credit = cad_grpo(steps)
    executor = steps.agent == steps.names["agent"].index("executor")
    assert set(credit.parts["depends"][executor]) == {0.0}
    assert set(credit.parts["depends"][~executor]) == {1.0}
    assert np.abs(credit.parts["others"][~executor]).max() == 0.0
    taken = credit.parts["others"][executor]
    share = dict(zip(steps.rollout[~executor], credit.parts["share"][~executor], strict=True))
    np.testing.assert_allclose(taken, [share[r] for r in steps.rollout[executor]], atol=1e-12)
    assert np.abs(taken).max() > 0.05


@pytest.mark.slow
def test_grpo_learns_it():
    """A uniform team trained by GRPO goes from .062 to near the ceiling of .870."""
    env, team = make(NAME), {"planner": Softmax(), "executor": Softmax()}
    for step in range(12):
        steps = Steps.from_traces(rollout(env, team, groups=16, rollouts=8, seed=step))
        update(team, steps, grpo(steps), lr=2.0)
    (trace,) = rollout(env, team, groups=1, rollouts=1, seed=1000)
    assert value_of(trace[:0], env, team) > 0.75
