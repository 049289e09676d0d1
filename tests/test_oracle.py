"""V(G≤t), Q and seqau by listing: against hand arithmetic, sampling, and their own identities."""

import math

import msgspec
import pytest

from counterpoint.envs import ENVS, Env, make, tool
from counterpoint.harness import header_of, rollout, team_of
from counterpoint.policies.scripted import Scripted
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import credit_of, exact, value_of, values_along
from counterpoint.schema import Act, Observe, ToolResult, Trace
from counterpoint.spelling import Refused
from little_envs import Doors, Fog, Office


def turns(n):
    return {"limits": {"turns": n}}


def played(env, policies=None, **options):
    given = {"groups": 1, "rollouts": 1, "seed": 3, **options}
    return rollout(env, policies or Softmax(), **given)


def start(env, policies, **options):
    """The empty prefix of a run, as its header describes it."""
    header = header_of(env, team_of(env, policies), group=0, rollout=0, seed=3, **options)
    return Trace(header, ())


# -- by hand --------------------------------------------------------------------------------------


def test_the_value_of_uniform_doors_is_a_third():
    """Nobody listens: whatever is said, one door of three is opened. Only the last act counts."""
    trace = played(Doors())[0]
    values = values_along(trace, Doors(), Softmax())
    opened = next(e.seq for e in trace.of("act") if e.agent == "leader")
    assert values[: opened + 1] == pytest.approx([1 / 3] * (opened + 1))
    assert values[opened + 1 :] == [trace.outcome] * (len(trace) - opened)
    scout, leader = credit_of(trace, Doors(), Softmax())
    assert (scout.agent, leader.agent) == ("scout", "leader")
    assert scout.seqau == pytest.approx(0)
    assert leader.seqau == pytest.approx(trace.outcome - 1 / 3)


def test_a_message_is_worth_what_the_receiver_makes_of_it():
    """The scout tells the truth with .5, either lie with .25. The leader opens the door it was told
    of with .8, either other with .1.

    V(h₀) = .5·.8 + .5·.1 = .45; after the truth Q = .8, after a lie Q = .1.
    """
    env = Doors()
    logits = {}
    prize = played(env)[0].of("observe")[0].content[-1]
    for trace in played(env, rollouts=30):
        first, second = trace.of("observe")
        told = trace.of("act")[0].text[-1]
        logits[first.anchor] = {prize: math.log(2)}
        logits[second.anchor] = {told: math.log(8)}
    table = Softmax(logits)
    for trace in played(env, table, rollouts=8):
        scout, leader = credit_of(trace, env, table)
        truth = trace.of("act")[0].text[-1] == prize
        assert scout.value == pytest.approx(0.45)
        assert scout.q == pytest.approx(0.8 if truth else 0.1)
        assert leader.value == pytest.approx(scout.q)
        assert leader.q == trace.outcome


def test_noise_of_a_tool_is_listed_with_its_probabilities():
    """Look, tell what was seen, open what was told: right with .8. Two calls cost .2.

    V = .8 − .2 before the look; after it, 1 − .2 or 0 − .2. Only the look moves it.
    """
    scout = Scripted(
        lambda seen, legal: next(
            (f"message leader: {t.text.splitlines()[1]}" for t in seen.turns if t.origin == "look"),
            "none" if any(t.role == "assistant" for t in seen.messages()[1:]) else "call look {}",
        )
    )
    leader = Scripted(
        lambda seen, legal: next(
            (
                f'call open {{"door": {t.text.splitlines()[1]}}}\nstop: done'
                for t in seen.turns
                if t.origin == "scout"
            ),
            "none",
        )
    )
    team = {"scout": scout, "leader": leader}
    looks = set()
    for trace in played(Fog(), team, rollouts=12):
        values = values_along(trace, Fog(), team)
        look = next(e.seq for e in trace.of("tool_result"))
        assert values[: look + 1] == pytest.approx([0.6] * (look + 1))
        assert values[look + 1 :] == pytest.approx([trace.outcome] * (len(trace) - look))
        assert trace.outcome == pytest.approx(0.8 if trace.outcome > 0 else -0.2)
        assert all(act.seqau == pytest.approx(0) for act in credit_of(trace, Fog(), team))
        looks.add(trace.outcome > 0)
    assert looks == {True, False}


def test_costs_belong_to_the_outcome_and_quality_does_not():
    """Fog, uniform, two turns: the scout looks with ¾ (cost .1), the leader opens with ¾ (cost .1)
    and is right in a third of these. V = ¼ − .075 − .075 = .1; the reward for looks is quality.
    """
    prefix = start(Fog(), Softmax(), config=turns(2))
    assert value_of(prefix, Fog(), Softmax()) == pytest.approx(0.1)


def test_two_draws_of_one_call_and_hidden_state_are_listed():
    """Two dice of two sides, both counted in hidden state: the sum is 2, 3, 3 or 4."""

    class Dice(Env):
        id = "dice-v0"
        roles = {"a": ["roll"]}  # noqa: RUF012

        def reset(self, task_seed):
            self.rolls = []

        def agents(self):
            return [] if len(self.rolls) == 2 else ["a"]

        def legal(self, agent):
            return {"roll": "call roll {}"}

        @tool
        def roll(self, draws) -> str:
            self.rolls.append(1 + draws.integer(2) + 1 + draws.choice([0.5, 0.5, 0.0]))
            return "rolled"

        def rewards(self, trace):
            return [(math.prod(self.rolls), None)]

    # two independent rolls, each (2 + 3 + 3 + 4)/4 = 3 on average
    assert value_of(start(Dice(), Softmax()), Dice(), Softmax()) == pytest.approx(9.0)


# -- two independent ways -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("env", "n"), [(Fog, 4), (Office, 5)])
def test_the_value_agrees_with_sampling(env, n):
    """The mean outcome of 800 sampled runs of the same task lies within four standard errors."""
    logits = {}
    for trace in played(env(), rollouts=20, config=turns(n)):
        for k, seen in enumerate(trace.of("observe")):
            if seen.legal:
                logits[seen.anchor] = {seen.legal[k % len(seen.legal)][0]: 1.5}
    table = Softmax(logits)
    outcomes = [t.outcome for t in played(env(), table, rollouts=800, config=turns(n))]
    mean = math.fsum(outcomes) / len(outcomes)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in outcomes) / (len(outcomes) - 1))
    exact_value = value_of(start(env(), table, config=turns(n)), env(), table)
    assert spread > 0
    assert abs(mean - exact_value) < 4 * spread / math.sqrt(len(outcomes))


@pytest.mark.parametrize(("env", "n"), [(Doors, 4), (Fog, 3), (Office, 3)])
def test_values_along_a_run_are_those_of_its_prefixes(env, n):
    """From the end backwards, and each prefix walked for itself: one and the same number."""
    for trace in played(env(), rollouts=2, config=turns(n)):
        values = values_along(trace, env(), Softmax())
        assert len(values) == len(trace) + 1
        for t in range(len(trace) + 1):
            assert value_of(trace[:t], env(), Softmax()) == pytest.approx(values[t], abs=1e-12)


def test_seqau_telescopes_to_the_outcome_minus_the_value_of_the_start():
    """Σ over acts of Q − V, and over results with chance of what they brought, is R − V(h₀)."""
    for trace in played(Fog(), rollouts=4, config=turns(3)):
        values = values_along(trace, Fog(), Softmax())
        acts = math.fsum(act.seqau for act in credit_of(trace, Fog(), Softmax()))
        results = [e.seq for e in trace.events if isinstance(e, ToolResult)]
        noise = math.fsum(values[s + 1] - values[s] for s in results)
        assert acts + noise == pytest.approx(trace.outcome - values[0], abs=1e-12)
        moved = {s for s in range(len(trace)) if values[s] != values[s + 1]}
        assert moved <= {e.seq for e in trace.events if isinstance(e, Act | ToolResult)}


def test_seqau_is_zero_on_average_at_every_decision():
    """Σ_a π(a|h)(Q(h,a) − V(h)) = 0, over the menu of each act of a run."""
    table = Softmax()
    trace = played(Doors(), table)[0]
    for act in trace.of("act"):
        seen = next(trace[c.seq] for c in act.causes if c.kind == "derives")
        assert isinstance(seen, Observe)
        before = value_of(trace[: act.seq], Doors(), table)
        after = []
        for _, text in seen.legal:
            said = msgspec.structs.replace(act, text_raw=msgspec.Raw(msgspec.json.encode(text)))
            events = (*trace.events[: act.seq], said)
            after.append(value_of(Trace(trace.header, events), Doors(), table))
        assert math.fsum(after) / 3 == pytest.approx(before)


def test_an_act_off_the_menu_has_a_value_too():
    """It has no chance under the policy, but what follows it can be listed."""
    blunt = Scripted(['call open {"door": 7}'])
    team = {"scout": Softmax(), "leader": blunt}
    trace = played(Doors(), team)[0]
    mixed = {"scout": Softmax(), "leader": Softmax()}
    header = header_of(Doors(), mixed, group=0, rollout=0, seed=3)
    header = msgspec.structs.replace(header, trace_id=trace.trace_id)
    scout, leader = credit_of(Trace(header, trace.events[:6]), Doors(), mixed)
    assert leader.q == 0
    assert leader.value == pytest.approx(1 / 3)
    assert scout.seqau == pytest.approx(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVS)
def test_every_environment_of_the_table_can_be_valued(name):
    """What the table calls exact is: the values of a run end at its outcome and begin at V(h₀)."""
    trace = played(make(name))[0]
    values = values_along(trace)
    assert values[-1] == trace.outcome
    assert values[0] == pytest.approx(value_of(trace[:0]))


# -- refused: it needs fork -----------------------------------------------------------------------


def refused(match, env, policies, **options):
    prefix = start(env, policies, **options)
    with pytest.raises(Refused, match=match):
        value_of(prefix, env, policies)


def test_a_policy_without_probabilities_needs_fork():
    """A callable gives turns, no distribution."""
    team = {"scout": lambda seen, legal, draws: "none", "leader": Softmax()}
    refused("needs fork: the policy of scout has no probs", Doors(), team)


def test_a_free_turn_needs_fork():
    """There is nothing to list where nothing is prescribed."""

    class Free(Doors):
        id = "free-v0"

        def legal(self, agent):
            return None

    class Talker(Softmax):
        """Speaks freely, by chance."""

        deterministic = False

    refused("needs fork: the policy of scout has no menu for scout", Free(), Talker())


def test_a_tool_that_draws_from_a_continuum_needs_fork():
    """draws.random() has no list of outcomes; it is seen though tools may catch anything."""

    class Smooth(Fog):
        id = "smooth-v0"

        @tool(pure=True)
        def look(self, draws) -> int:
            try:
                return int(3 * draws.random())
            except BaseException:
                return 0

    refused(r"needs fork: look draws by draws.random\(\)", Smooth(), Softmax(), config=turns(2))


def test_a_question_to_a_human_needs_fork():
    """A person's answer is no distribution either."""
    ask = {"permissions": [{"effect": "ask", "name": "open"}], **turns(2)}
    refused("needs fork: a permission rule asks a human", Doors(), Softmax(), config=ask)


@pytest.mark.parametrize(("limit", "n"), [(50, 6), (4000, 2000)])
def test_too_many_prefixes_need_fork(monkeypatch, limit, n):
    """The sentence gives the limit, also where the runs are longer than Python's stack is deep."""
    monkeypatch.setattr(exact, "PREFIXES", limit)
    refused(f"needs fork: more than {limit} prefixes follow", Fog(), Softmax(), config=turns(n))


def test_a_run_that_nobody_scored_has_no_value():
    """Missing is not zero."""

    class Unscored(Doors):
        id = "unscored-v0"

        def rewards(self, trace):
            return [(None, None)] if self.opened == 0 else [(1.0, None)]

    refused("ends unscored", Unscored(), Softmax())


def test_probabilities_that_do_not_fit_the_menu_are_refused():
    """One for each entry, and they sum to one."""

    class Short(Softmax):
        def probs(self, observation, legal):
            return super().probs(observation, legal)[:2]

    class Heavy(Softmax):
        def probs(self, observation, legal):
            return super().probs(observation, legal) * 2

    refused("scout gives 2 probabilities for a menu of 3", Doors(), Short())
    refused("probabilities that sum to 1", Doors(), Heavy())


def test_the_value_belongs_to_the_policies_that_the_header_names():
    """Other logits have another V, and a prefix of theirs."""
    trace = played(Doors())[0]
    with pytest.raises(Refused, match="give the policies that played"):
        value_of(trace[:0], Doors(), Softmax({"x": {"0": 1.0}}))
