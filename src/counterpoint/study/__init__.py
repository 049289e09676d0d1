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


def study(
    name: str,
    out: Path,
    quick: bool = False,
    progress: Progress = silent,
    own: str | None = None,
) -> Page:
    """Run a study by its name in `STUDIES`; `own`, a method of yours, takes part in `cad`.

    Raises:
        Refused: there is no such study, or it takes no method of yours.
    """
    if name not in STUDIES:
        raise Refused(f"there is no study {name!r}; the studies are {', '.join(STUDIES)}")
    folder(out)
    if own is None:
        return STUDIES[name](out, quick, progress)
    if name != "cad":
        raise Refused(f"the study {name} takes no method of yours; `cad` does")
    return cad_page.cad(out, quick, progress, own)
