"""Counterpoint: who earned the reward, in a run of a team of agents."""

from counterpoint.recorder import Recorder

__all__ = ["Recorder"]
