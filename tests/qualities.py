"""Steps with a quality for every act, for the tests of methods that need one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from counterpoint import groups
from counterpoint.quality import from_rows
from counterpoint.steps import Steps


def with_quality(steps: Steps, value, depends=None, verifiable="executed") -> Steps:
    """The steps with a q for every act; `depends` (agents, agents): whose acts move whose q."""
    agents = steps.names["agent"]
    behind = None
    if depends is not None:
        behind = [[agents[j] for j in np.flatnonzero(depends[a])] for a in steps.agent]
    quality = from_rows(
        np.asarray(value, dtype=np.float64),
        steps.rollout,
        steps.agent,
        agents,
        verifiable=[verifiable] * len(steps),
        depends=behind,
    )
    return replace(steps, quality=quality)


def earlier(agents: int):
    """Everybody saw all who acted before, so a q of one's own act depends on them too."""
    return np.tril(np.ones((agents, agents), dtype=bool))


def own_act(steps: Steps):
    """A q that is a function of what the agent saw and did, and else says nothing in particular;
    of an agent that acts several times, the sum.
    """
    assert steps.logprob is not None
    cell = groups.pair(steps.rollout, steps.agent)
    return np.bincount(cell, 3 * steps.logprob + np.cos(steps.agent))[cell]
