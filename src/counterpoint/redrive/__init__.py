"""The time machine: a run is replayed, gone on from, checked, and valued at any of its prefixes."""

from counterpoint.graph import depends
from counterpoint.redrive.arms import fork
from counterpoint.redrive.branches import Branches, Contrast
from counterpoint.redrive.compare import Divergence, Replayed, replay
from counterpoint.redrive.continuations import Difference, at_of, diff
from counterpoint.redrive.contract import Checked, check_env
from counterpoint.redrive.exact import ActValue, credit_of, value_of, values_along
from counterpoint.redrive.follow import redrive
from counterpoint.redrive.measure import Branching, Value, value_by_branches
from counterpoint.redrive.tree import credits_of

__all__ = [
    "ActValue",
    "Branches",
    "Branching",
    "Checked",
    "Contrast",
    "Difference",
    "Divergence",
    "Replayed",
    "Value",
    "at_of",
    "check_env",
    "credit_of",
    "credits_of",
    "depends",
    "diff",
    "fork",
    "redrive",
    "replay",
    "value_by_branches",
    "value_of",
    "values_along",
]
