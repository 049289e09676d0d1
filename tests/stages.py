"""A bare room for tests of the stage: an environment of any roles whose parts a test replaces."""

import re
from typing import ClassVar

from counterpoint.envs import Env, tool
from counterpoint.harness import header_of, next_event, rollout, team_of
from counterpoint.harness.run import Run
from counterpoint.policies.scripted import Scripted
from counterpoint.provenance import Labelled
from counterpoint.validate import validate


class Room(Env):
    """Nothing is hidden and nothing is paid; marks add up, a look and a throw change nothing."""

    id = "room-v0"
    roles: ClassVar = {}

    def reset(self, task_seed):
        self.marks = []

    @tool
    def mark(self, n: int = 0) -> list:
        self.marks.append(n)
        return self.marks

    @tool(pure=True)
    def look(self) -> str:
        return "a room"

    @tool(pure=True)
    def throw(self, draws) -> float:
        return draws.random()


def room(roles, **parts):
    """A room with these roles and these methods in place of its own."""
    methods = {name: _method(part) for name, part in parts.items()}
    return type("Room", (Room,), {"roles": roles, **methods})()


def _method(part):
    return part if callable(part) or hasattr(part, "__func__") else lambda self, *_: part


def team(**scripts):
    """A scripted policy per role: a list of texts, or a function of observation and menu."""
    return {role: Scripted(script, role) for role, script in scripts.items()}


def played(env, policies, *, seed=0, human=None, **config):
    """One run, which breaks no rule of the format and lacks no edge."""
    (trace,) = rollout(
        env, policies, groups=1, rollouts=1, seed=seed, config=config or None, human=human
    )
    return sound(trace)


def sound(trace):
    report = validate([trace])
    assert report.findings == []
    counts = report.counts
    assert (
        counts["required_edges_missing"] == counts["extra_roots"] == counts["dropped_events"] == 0
    )
    assert counts["unanswered_calls"] == 0 or trace.of("stop")[0].reason == "budget"
    return trace


def begun(env, policies, *, seed=0, human=None, **config):
    """A run that stands before its first event."""
    policies = team_of(env, policies)
    header = header_of(env, policies, group=0, rollout=0, seed=seed, config=config or None)
    env.reset(header.task_seed)
    return Run(header, env, policies, human=human)


def go(run, until=lambda event: False):
    """Play on, up to and including the first event for which `until` holds, or to the end."""
    while (event := next_event(run)) is not None:
        run.emit(event)
        if until(event):
            return event
    return None


def names(trace):
    return [f"{event.kind} {event.agent}" for event in trace.events]


def edges(trace, event):
    """The causes of an event, as "kind seq" and with the rule where one was inferred."""
    return {
        f"{c.kind} {c.seq}" + ("" if c.basis == "recorded" else f" {c.basis[9:]}")
        for c in event.causes
    }


HEAD = re.compile(r"<<from ([\w.:/@-]*), (untrusted|unknown|human|trusted), ([0-9a-f]{8})\n")


def blocks(prompt):
    """The blocks of a prompt as a reader finds them: from a head to the first end of its fence."""
    found, at = [], 0
    while opening := HEAD.search(prompt, at):
        origin, trust, fence = opening.groups()
        end = prompt.find(f"\n{fence}>>", opening.end())
        if end < 0:
            break
        found.append(Labelled(prompt[opening.end() : end], origin, trust))
        at = end + len(fence) + 3
    return found
