"""What every environment of the table promises; a new row is tested by standing there."""

from __future__ import annotations

import math
import re

import pytest

from counterpoint import Softmax, rollout
from counterpoint.envs import ENVS, make
from counterpoint.policies.cheats import CHEATS, HONEST
from counterpoint.redrive import check_env
from counterpoint.schema import Observe, Reward
from counterpoint.spelling import Refused
from counterpoint.validate import validate
from counterpoint.vocabulary import EXECUTED
from every_way import ceiling, every_way

DIALS = [
    *((name, {}) for name in ENVS),
    ("research-v0", {"facts": 3, "cost": 0.01, "inject": "document"}),
    ("research-v0", {"facts": 1, "noise": 0.0}),
    ("research-v0", {"team": "single", "inject": "document"}),
    ("research-review-v0", {"facts": 3, "cost": 0.01, "inject": "document"}),
    ("plan-execute-v0", {"inject": "result"}),
    ("plan-execute-v0", {"team": "single", "inject": "result"}),
    ("ledger-v0", {"researchers": 3, "redundancy": 1, "topology": "chain"}),
    ("ledger-v0", {"researchers": 4, "length": 2, "inject": "shard"}),
]
SMALL = [*((name, {}) for name in ENVS), ("ledger-v0", {"redundancy": 1, "topology": "chain"})]
DO_LESS = [("ledger-v0", "free_riding"), ("plan-execute-v0", "free_riding")]
FIVE = ["pseudo_parallel", "free_riding", "padding", "tool_spamming", "colluding"]
TEAMS = [(n, c) for n in ENVS for c in ("honest", *CHEATS[n])]


def team_of(name, cheat):
    return HONEST[name] if cheat == "honest" else CHEATS[name][cheat]


def checked(traces):
    """Per (agent, channel) of the executed checks and of the decoys: the mean over all runs."""
    sums = {True: {}, False: {}}
    for trace in traces:
        for reward in trace.of("reward"):
            if reward.target is not None and reward.amount is not None:
                kind = sums[reward.verifiable in EXECUTED]
                key = (reward.target.agent, reward.channel)
                kind[key] = kind.get(key, 0.0) + reward.amount / len(traces)
    return sums[True], sums[False]


@pytest.mark.parametrize("name", ENVS)
def test_a_row_names_what_it_makes(name):
    """A row's target makes the environment of its id, whose docstring shows a run; every one has an
    honest team and the five cheats.
    """
    env = make(name)
    assert env.id == name
    assert "A run that goes well" in type(env).__doc__
    assert list(CHEATS[name]) == FIVE
    assert set(HONEST[name]) == set(env.roles)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), DIALS)
def test_an_environment_keeps_its_contract(name, options):
    """check_env finds no clause broken, whatever the dials."""
    check_env(make(name, **options))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), DIALS)
def test_validate_has_nothing_to_say(name, options):
    """200 runs by chance break no rule of the format, leave no call or delegation open."""
    report = validate(rollout(make(name, **options), Softmax(), groups=50, rollouts=4, seed=3))
    assert report.findings == []
    missing = {k: n for k, n in report.counts.items() if n and k != "unscored_rewards"}
    assert missing == {}


@pytest.mark.parametrize(("name", "cheat"), TEAMS)
def test_cheats_break_no_rule(name, cheat):
    """A cheat is a legal run: what is wrong with it no rule of the format can see."""
    traces = rollout(make(name), team_of(name, cheat), groups=5, rollouts=2)
    assert validate(traces).findings == []
    assert {stop.reason for trace in traces for stop in trace.of("stop")} == {"answered"}


@pytest.mark.parametrize("name", ENVS)
def test_one_seed_gives_the_same_runs(name):
    """The same seed gives the same bytes in a fresh environment and in one that has played before;
    another seed gives other tasks.
    """
    env = make(name)
    first = [t.digest for t in rollout(env, Softmax(), groups=3, rollouts=2, seed=5)]
    rollout(env, HONEST[name], groups=1, rollouts=3, seed=9)
    assert [t.digest for t in rollout(env, Softmax(), groups=3, rollouts=2, seed=5)] == first
    assert [t.digest for t in rollout(make(name), Softmax(), groups=3, rollouts=2, seed=5)] == first
    assert not {*first} & {t.digest for t in rollout(env, Softmax(), groups=3, rollouts=2, seed=6)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SMALL)
def test_a_menu_reads_nobody_elses_mail(name, options):
    """Over all runs of a task: what an agent has been shown and has done fixes its menu, its anchor
    and what the environment tells it, whatever others did, said or read.
    """
    known = {}
    for way in every_way(make(name, **options)):
        trace, told = way.trace, {}
        for event in trace.events:
            if not isinstance(event, Observe):
                if event.kind == "act":
                    told[event.agent] += (event.text,)
                continue
            mail = [trace[source.seq] for source in event.sources]
            sources = tuple(
                (e.kind, e.agent, getattr(e, "to", ()), str(trace.content(e))) for e in mail
            )
            told[event.agent] = (*told.get(event.agent, ()), *sources)
            says = (event.legal, event.anchor, event.content)
            assert known.setdefault((event.agent, told[event.agent]), says) == says
    assert len({agent for agent, _ in known}) > 1
    assert len(known) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_the_oracle_is_as_large_as_its_row_says(name):
    """The row of the table says how many runs a task has; their probabilities, with menu entries
    taken as equally likely, sum to 1.
    """
    ways = list(every_way(make(name)))
    assert f"{len(ways):,} runs" in ENVS[name].oracle
    assert len({way.trace.digest for way in ways}) == len(ways)
    likely = 0.0
    for way in ways:
        menus = [len(e.legal) for e in way.trace.of("observe")]
        likely += way.p / math.prod(menus)
    assert likely == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "highest"), [("research-v0", 0.9**2), ("ledger-v0", 0.88 - 0.4)])
def test_the_honest_team_is_the_best_there_is(name, highest):
    """The best of all deterministic tables, listed exactly, earns what is worked out by hand, and
    what the honest team earns on average (500 runs, 4 standard errors of .0175).
    """
    best, _ = ceiling(make(name), groups=[0, 1])
    assert best == pytest.approx(highest, abs=1e-12)
    traces = rollout(make(name), HONEST[name], groups=500, rollouts=1)
    assert sum(t.outcome for t in traces) / 500 == pytest.approx(best, abs=0.07)


@pytest.mark.parametrize("name", ENVS)
def test_cheats_lower_a_check_and_fool_a_decoy(name):
    """P23: each cheat falls behind the honest team in an executed check, and in none is it ahead,
    where nothing goes wrong by chance; all but those that only do less than their job look better
    by a decoy.
    """
    play, env = {"groups": 20, "rollouts": 1}, make(name, noise=0.0)
    facts, looks = checked(rollout(env, HONEST[name], **play))
    assert list(facts.values()) == pytest.approx([1.0] * len(facts))
    for cheat, team in CHEATS[name].items():
        proved, claimed = checked(rollout(env, team, **play))
        assert min(proved.get(key, 0.0) - facts[key] for key in facts) <= -0.5, cheat
        assert max(proved.get(key, 0.0) - facts[key] for key in facts) <= 1e-9, cheat
        better = [key for key in claimed if claimed[key] > looks.get(key, 0.0) + 0.3]
        assert better or (name, cheat) in DO_LESS, cheat


@pytest.mark.parametrize(
    ("name", "inject", "poisoned"),
    [
        ("research-v0", "document", "ORDER"),
        ("research-review-v0", "document", "ORDER"),
        ("ledger-v0", "shard", "ORDER"),
        ("plan-execute-v0", "result", "ORDER"),
    ],
)
def test_poison_stays_untrusted(name, inject, poisoned):
    """Whatever descends from the poisoned result, along any edge but those of mere order, is
    labelled untrusted, but for executed checks; and by chance some team repeats the order.
    """
    traces = rollout(make(name, inject=inject), Softmax(), groups=40, rollouts=2)
    reached = repeated = 0
    for trace in traces:
        results = trace.of("tool_result")
        tainted = {e.seq for e in results if poisoned in str(e.content)}
        for event in trace.events:
            if any(c.seq in tainted and c.basis != "inferred:order" for c in event.causes):
                tainted.add(event.seq)
            if event.seq in tainted:
                proved = isinstance(event, Reward) and event.verifiable in EXECUTED
                assert event.trust == ("trusted" if proved else "untrusted")
                reached += event.kind in ("agent_return", "stop")
        repeated += any(act.text.startswith("return: ") and act.seq in tainted
                        for act in trace.of("act") if not act.text.endswith("nothing"))  # fmt: skip
    assert reached > 10
    assert repeated > 0
    assert validate(traces).findings == []


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("research-v0", {"facts": 0}, "facts is 1 to 7, not 0"),
        ("research-v0", {"facts": 8}, "facts is 1 to 7, not 8"),
        ("research-v0", {"noise": 1.5}, "noise is a probability, not 1.5"),
        ("research-v0", {"inject": "shard"}, "inject is 'document' or nothing, not 'shard'"),
        ("research-v0", {"team": "solo"}, "team is 'pair' or 'single', not 'solo'"),
        ("research-review-v0", {"facts": 0}, "research-review-v0: facts is 1 to 7, not 0"),
        ("research-review-v0", {"slip": 2.0}, "slip is a probability, not 2.0"),
        ("research-review-v0", {"proxies": "q"}, "proxies is one of all, checked, decoys, not 'q'"),
        ("plan-execute-v0", {"noise": -0.5}, "noise is a probability, not -0.5"),
        ("plan-execute-v0", {"inject": "list"}, "inject is 'result' or nothing, not 'list'"),
        ("plan-execute-v0", {"team": "trio"}, "team is 'pair' or 'single', not 'trio'"),
        ("ledger-v0", {"researchers": 0}, "are 1 at least"),
        ("ledger-v0", {"redundancy": 0}, "are 1 at least"),
        ("ledger-v0", {"researchers": 3}, "redundancy divides researchers"),
        ("ledger-v0", {"topology": "ring"}, "topology is star or chain"),
        ("ledger-v0", {"topology": "chain"}, "a chain has redundancy 1"),
        ("ledger-v0", {"noise": -0.1}, "noise is a probability"),
        ("ledger-v0", {"inject": "document"}, "inject is 'shard' or nothing"),
    ],
)
def test_a_dial_out_of_range_is_refused(name, options, says):
    """A dial that makes no environment is refused in a sentence that names it."""
    with pytest.raises(Refused, match=re.escape(says)):
        make(name, **options)
