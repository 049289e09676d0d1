"""Counterpoint: who earned the reward, in a run of a team of agents."""
