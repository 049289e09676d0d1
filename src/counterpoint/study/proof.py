"""Does what we print hold? Faults planted in runs, two causes at once, runs in which nobody did any
harm, and intervals against exact values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.games import Game, chain, every, truth
from counterpoint.report import Page, Section, page
from counterpoint.study.asked import Progress, silent
from counterpoint.study.coverage import coverage
from counterpoint.study.faults import control, detected, relayed

ERRS = 0.3
"""How often each of the three agents errs, of whom one is enough to fail."""

CAUSES: dict[str, tuple[int, ...]] = {
    "the first alone": (1, 0, 0),
    "the second alone": (0, 1, 0),
    "the first and the second": (1, 1, 0),
}
"""Who erred → the acts: 1 is an error."""

ESTIMANDS: dict[str, str] = {
    "seqau": "blame, c3",
    "coma": "coma",
    "removal:frozen": "loo",
    "shapley:frozen": "shapley",
    "first_error": "first error",
}
"""Exact credit → who estimates it."""


def fragile() -> Game:
    """Three agents act in turn, 0 is right and 1 an error; R = 1 if nobody errs, else 0."""
    right = np.indices((2, 2, 2)).sum(axis=0) == 0
    return chain(right.astype(np.float64), np.tile(np.log([1 - ERRS, ERRS]), (3, 1)))


def competing() -> list[dict[str, Any]]:
    """What every kind of credit gives the three agents, exactly, where one erred or two did."""
    plays, _ = every(fragile(), 1)
    acts = plays.action.reshape(-1, 3).tolist()
    exact = {name: truth(plays, name).values.reshape(-1, 3) for name in ESTIMANDS}
    return [
        {
            "who erred": label,
            "credit": name,
            "estimated by": ESTIMANDS[name],
            **dict(zip(("first", "second", "third"), (own := found[play]).tolist(), strict=True)),
            "sum": float(own.sum()),
        }
        for label, play in ((label, acts.index(list(did))) for label, did in CAUSES.items())
        for name, found in exact.items()
    ]


def proof(out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """Planted faults, competing causes, an enforced control, and the coverage of our intervals.

    Raises:
        Refused: the control failed: somebody was blamed where nobody did any harm.
    """
    few = {"control": 1, "runs": 1, "plays": 400, "simulations": 4}
    many = {"control": 2, "runs": 10, "plays": 4000, "simulations": 150}
    size = few if quick else many
    parts = progress(
        (
            lambda: control(size["control"]),
            lambda: detected(size["runs"]),
            lambda: relayed(size["plays"]),
            competing,
            lambda: coverage(size["simulations"]),
        ),
        "proving",
    )
    nobody, found, relay, causes, held = (part() for part in parts)
    sections = [
        Section(
            "Who made the planted fault",
            "A team does the right thing but for one turn, at which it slips with a chance of ½. "
            "Shown are runs in which it slipped. `worth`: exact seqau of the slip, by listing. "
            "The rest is the share of runs in which the credit is lowest on the slip; ties count "
            "as a guess. `exact` is below 1 where the run was lost anyway, by a misreading before. "
            "grpo gives all acts one number, so it guesses; `first act` and `last act` name one "
            "blindly. blame has 8 branches an act, c3 four siblings and four continuations of the "
            "act on the same draws, loo two branches without the act. A slip that is worth little "
            "is lost in the noise of 8 branches, not in draws that are shared. loo asks what the "
            "run lost by the act: where doing nothing is as bad, it has nothing to say.",
            found,
        ),
        Section(
            "An error that others may repair",
            "T12: the first of several agents breaks the work, and each later one may repair it. "
            "Where nobody did, the lowest exact credit is often not the error but the last chance "
            "to repair it that was missed: the first error and the largest loss are two questions. "
            "Doing nothing is passing on, so loo compares with exactly that, and finds the error.",
            relay,
        ),
        Section(
            "Two causes, either sufficient",
            f"Three agents, each errs with a chance of {ERRS}, and one error fails the run. Exact "
            "credit. When two erred, taking either error out changes nothing, so removal and coma "
            "blame nobody; Shapley halves it; seqau blames the first, since after it nothing was "
            "left to lose; and there is no first error that, changed alone, makes it succeed.",
            causes,
        ),
        Section(
            "Nobody to be found",
            "Runs in which nothing was planted, and one in which what was planted has no effect; "
            "readings are without chance. The lowest credit of any act, by each method. Had one "
            "been below 0, this page would not exist: the study fails instead.",
            nobody,
        ),
        Section("Our own intervals", _verdict(held), held),
    ]
    rows = [*found, *relay, *causes, *nobody, *held]
    return Page(page("Proof", sections), rows)


def _verdict(held: Sequence[dict[str, Any]]) -> str:
    narrow = [row["interval"] for row in held if row["verdict"] != "as it says"]
    return (
        "95 % intervals, simulated where the exact value is known by listing: the share that holds "
        "it, with half a 95 % interval of that share. More than three standard errors off 95 %: "
        f"{', '.join(narrow) or 'none'}. Eight pairs of branches whose outcomes are a few numbers "
        "often all agree, and then say nothing of what they have not met."
    )
