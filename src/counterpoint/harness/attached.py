"""Who played a trace, remembered for the life of the process and never written anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from weakref import ref

from counterpoint.envs import Env
from counterpoint.harness.run import Human
from counterpoint.policies import Policy
from counterpoint.schema import Trace


class Cast(NamedTuple):
    """What a run can go on with: its environment, a policy per role, whoever answered for a human;
    of a fork also the run that it left.
    """

    env: Env | None = None
    team: Mapping[str, Policy] | None = None
    human: Human | None = None
    parent: Trace | None = None


_HELD: dict[int, tuple[ref[Trace], Cast]] = {}


def attach(trace: Trace, cast: Cast) -> Trace:
    """Remember who played this very object, until it is gone. Copies and prefixes do not know."""
    key = id(trace)
    _HELD[key] = ref(trace, lambda _: _HELD.pop(key, None)), cast
    return trace


def attached(trace: Trace) -> Cast:
    """Who played the trace; an empty cast if that is not known here."""
    return _HELD[id(trace)][1] if id(trace) in _HELD else Cast()
