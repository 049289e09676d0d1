"""Helpers of the tests of forks: runs to fork, and branches seen with their history."""

import msgspec

from counterpoint.harness import rollout
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import fork
from counterpoint.redrive.standing import history
from counterpoint.schema import Trace, encode
from counterpoint.validate import validate
from little_envs import Doors
from stages import played, team

SHORT = {"limits": {"turns": 16}}


def recorded(env, policies=None, **options):
    given = {"groups": 2, "rollouts": 2, "seed": 3, "config": SHORT, **options}
    return rollout(env, policies or Softmax(), **given)


def bare(event):
    """The line of an event without whose trace it is in."""
    return encode(msgspec.structs.replace(event, trace_id=""))


def suffix(branches):
    (branch,) = branches.traces
    return [bare(event) for event in branch.events]


def one(trace, at, do, **options):
    """The one branch of a fork, which breaks no rule beside its parent."""
    (branch,) = fork(trace, at, do, n=1, **options).traces
    assert validate([trace, branch]).findings == []
    return branch


def whole(branch):
    """A branch with its parent's events before its own."""
    header = msgspec.structs.replace(branch.header, fork=None)
    return Trace(header, history(branch))


def untouched(trace):
    """At every event of one run; and at every event of a fork, a fork of the fork."""
    for event in trace.events:
        forked = fork(trace, event, "resample", n=1, streams="parent")
        begin = forked.traces[0].first
        assert suffix(forked) == [bare(e) for e in trace.events[begin - trace.first :]]
    return len(trace)


def scouted(act, **options):
    """A scout says where the prize is, a leader opens; both by script."""
    scripts = {"scout": ["message leader: one\nmessage leader: two"], "leader": [act]}
    return played(Doors(), team(**scripts), **options)


def scouted_simply():
    scripts = {"scout": ["message leader: one"], "leader": ['call open {"door": 0}']}
    return played(Doors(), team(**scripts))
