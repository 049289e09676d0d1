"""Runs side by side: one call answers all that wait for a policy, and no byte changes."""

import threading

import pytest

from counterpoint.harness import rollout
from counterpoint.harness.lockstep import TOGETHER
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.save import trace_lines
from counterpoint.schema import encode
from counterpoint.spelling import Refused
from little_envs import Doors, Fog, Office
from stages import room


class Many(Softmax):
    """A table that answers several runs at once, and counts how many."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked = []

    def many(self, observations, legals, draws):
        self.asked.append(len(observations))
        return [self(*each) for each in zip(observations, legals, draws, strict=True)]


def lines(traces):
    return [encode(line) for trace in traces for line in trace_lines(trace)]


@pytest.mark.parametrize("env", [Doors(), Fog(), Office()], ids=lambda env: env.id)
def test_side_by_side_gives_the_bytes_of_one_at_a_time(env):
    """Also with random tools, spawned agents, waits and runs of different lengths."""
    played = {"groups": 3, "rollouts": 5, "seed": 4}
    assert lines(rollout(env, Many(), **played)) == lines(rollout(env, Softmax(), **played))


def test_one_role_may_answer_many_and_another_one():
    """What does not answer many is asked by itself, in between."""
    mixed = {"scout": Softmax(), "leader": Many()}
    single = {"scout": Softmax(), "leader": Softmax()}
    played = {"groups": 2, "rollouts": 4}
    assert lines(rollout(Doors(), mixed, **played)) == lines(rollout(Doors(), single, **played))
    assert mixed["leader"].asked == [8]


def test_all_runs_that_wait_for_one_policy_are_one_call():
    """Two turns a run, by one policy: two calls for all runs at once, and more only beyond the most
    that are in progress together.
    """
    policy, size = Many(), TOGETHER + 3
    rollout(Doors(), policy, groups=1, rollouts=size)
    assert policy.asked == [TOGETHER, TOGETHER, 3, 3]


def test_the_recorded_file_has_the_bytes_of_one_at_a_time(tmp_path):
    """Traces are written as they end, in the order of their jobs."""
    for name, policy in (("many", Many()), ("one", Softmax())):
        with Recorder(tmp_path / name) as recorder:
            rollout(Fog(), policy, groups=2, rollouts=3, recorder=recorder)
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


def test_an_environment_that_cannot_be_copied_is_played_one_at_a_time():
    """A lock has no copy; nothing is refused for it, and nothing else is different."""
    locked = Doors()
    locked.lock = threading.Lock()
    policy = Many()
    assert lines(rollout(locked, policy, groups=1, rollouts=3)) == lines(
        rollout(Doors(), Softmax(), groups=1, rollouts=3)
    )
    assert policy.asked == []


def test_a_wrong_number_of_turns_is_refused():
    """It names the role and both numbers."""

    class Short(Many):
        def many(self, *asked):
            return super().many(*asked)[:-1]

    with pytest.raises(Refused, match=r"policy of scout gave 3 turns where 4 were asked for"):
        rollout(Doors(), Short(), groups=1, rollouts=4)


def test_what_goes_wrong_in_one_run_says_in_which():
    """An environment's own error comes through with event and rollout."""

    def fails(self, agent):
        if self.turn(agent) == 1:
            raise KeyError("no such door")
        return "go"

    env = room({"a": ["look"]}, observe=fails, legal={"x": "call look {}"})
    with pytest.raises(KeyError) as caught:
        rollout(env, Many(), groups=1, rollouts=2)
    assert "at event 4 of trace" in caught.value.__notes__[0]
    assert "rollout 0" in caught.value.__notes__[0]
