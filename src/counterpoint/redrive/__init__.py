"""The time machine: a run is replayed, gone on from, checked, and valued at any of its prefixes."""

from counterpoint.redrive.compare import Divergence, Replayed, replay
from counterpoint.redrive.contract import Checked, check_env
from counterpoint.redrive.edits import depends
from counterpoint.redrive.exact import ActValue, credit_of, value_of, values_along
from counterpoint.redrive.follow import redrive
from counterpoint.redrive.tree import credits_of

__all__ = [
    "ActValue",
    "Checked",
    "Divergence",
    "Replayed",
    "check_env",
    "credit_of",
    "credits_of",
    "depends",
    "redrive",
    "replay",
    "value_of",
    "values_along",
]
