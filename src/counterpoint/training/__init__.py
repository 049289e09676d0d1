"""The workshop: credit becomes an update of the policies that earned it.

`update` takes one step, `train` the loop around it. `cast_for` says who learns, `credited` gives a
method what it needs of runs just played: what `train` does, a loop of yours can do with these.
"""

from counterpoint.training.climb import update
from counterpoint.training.kept import read_curve
from counterpoint.training.learners import cast_for, frozen
from counterpoint.training.loop import by_turn, credited, train

__all__ = ["by_turn", "cast_for", "credited", "frozen", "read_curve", "train", "update"]
