"""Names of things to load: `package.module:name` of ours, `file.py:name` of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from counterpoint.spelling import Refused


def load_target(target: str) -> Any:
    """Load what a target names. An error inside the user's own file is not caught: it is theirs.

    Raises:
        Refused: no such file or module, or it has no such name.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        raise Refused(f"{target!r} names nothing to load; say file.py:name")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise Refused(f"there is no file {place} to take {name} from")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise Refused(f"{place} cannot be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, name, None)
    if found is None:
        raise Refused(f"{place} has no function or class {name}")
    return found
