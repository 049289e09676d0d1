"""The time machine: a run is replayed, gone on from, checked, and valued at any of its prefixes."""

from counterpoint.redrive.compare import Divergence, Replayed, replay
from counterpoint.redrive.follow import redrive

__all__ = ["Divergence", "Replayed", "redrive", "replay"]
