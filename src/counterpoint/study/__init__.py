"""Studies: a question, the figures that answer it, and a page to read them on.

A study gets a folder, which it may fill, and gives a page; `quick` takes fewer draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from counterpoint.report import Page
from counterpoint.save import folder
from counterpoint.spelling import Refused
from counterpoint.study import cad_page, diffusion, proof, reference, stopping, two_agent
from counterpoint.study.asked import Progress, silent


class Study(Protocol):
    """A question, asked with a folder that it may fill."""

    def __call__(self, out: Path, quick: bool = False, progress: Progress = silent) -> Page:
        """The page that answers it; `quick` takes fewer draws."""


STUDIES: dict[str, Study] = {
    "diffusion": diffusion.diffusion,
    "reference": reference.reference,
    "cad": cad_page.cad,
    "proof": proof.proof,
    "stopping": stopping.stopping,
    "two-agent": two_agent.two_agent,
}
"""Every study by name."""


def study(name: str, out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """Run a study by its name in `STUDIES`. Raises Refused if there is none."""
    if name not in STUDIES:
        raise Refused(f"there is no study {name!r}; the studies are {', '.join(STUDIES)}")
    folder(out)
    return STUDIES[name](out, quick, progress)
