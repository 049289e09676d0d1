"""What a training run leaves in its folder, and how a killed one is taken up again.

    settings.json         what was run: environment, harness, tools and policies by digest
    traces/0007.jsonl     the runs of step 7
    credit/0007.jsonl     what each of their turns earned
    policies/0008/        the policies after step 7
    curve.jsonl           one line a step

The curve is written last and as a whole, so that it holds exactly the steps that were finished. A
run is taken up after its last line; whatever a broken step left is written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from counterpoint.creditfile import entries
from counterpoint.ledger import Credit
from counterpoint.save import folder, save, trace_lines, whole_file
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

LAYOUT = 1
"""Version of this layout."""

encode = msgspec.json.Encoder().encode

Row = dict[str, Any]
"""One line of the curve."""


def versions() -> dict[str, Any]:
    """What wrote the folder."""
    return {"layout": LAYOUT, "counterpoint": version("counterpoint"), "numpy": np.__version__}


class Kept:
    """A folder of a training run.

    Args:
        path: the folder; made where there is none.
        settings: of the run, as JSON has them.
        resume: whether to go on with a run that is there.

    Attributes:
        rows: lines of the curve, of the steps that were finished.

    Raises:
        Refused: there is a run and `resume` is not set; it was made by other settings or another
            version; it cannot be read.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], resume: bool) -> None:
        self.path = folder(path)
        self.rows: list[Row] = []
        given = msgspec.to_builtins({**versions(), **settings})
        where = self.path / "settings.json"
        if not where.exists():
            self._write("settings.json", [msgspec.json.format(encode(given), indent=2)])
            return
        if not resume:
            raise Refused(
                f"{where} is of a run; say --resume (resume=True) to go on with it, or take "
                "another folder"
            )
        held = _decoded(_bytes(where), where)
        for name in {**held, **given}:
            if held.get(name) != given.get(name):
                raise Refused(
                    f"{where} has {name} {held.get(name)!r:.80}, and this run has "
                    f"{given.get(name)!r:.80}; a run goes on as it began"
                )
        if (self.path / "curve.jsonl").exists():
            self.rows = read_curve(self.path)

    def put_back(self, policies: Sequence[Any], optimizer: Any) -> None:
        """Bring policies, and their optimiser, to where the last finished step left them."""
        if not self.rows:
            return
        for number, policy in enumerate(policies):
            path = self._place(len(self.rows), number)
            policy.restore(path)
            if policy.version != self.rows[-1]["versions"][number]:
                raise Refused(
                    f"{path} holds version {policy.version}, and the curve ends with version "
                    f"{self.rows[-1]['versions'][number]}"
                )
        if optimizer is not None:
            from counterpoint.training.torch_updates import load_moments

            load_moments(optimizer, self._place(len(self.rows), "optimizer"))

    def keep(
        self,
        row: Row,
        traces: Sequence[Trace],
        steps: Steps,
        credit: Credit,
        policies: Sequence[Any],
        optimizer: Any,
        **how: Any,
    ) -> None:
        """Write a finished step, its line of the curve last.

        Args:
            row: the line.
            traces: the runs.
            steps: their table.
            credit: one number a turn.
            policies: those that learn, as they are after the step.
            optimizer: of models, or None.
            **how: `method` and `params`, as in a credit file.
        """
        step = len(self.rows)
        name = f"{step:04}.jsonl"
        lines = (line for trace in traces for line in trace_lines(trace))
        save(folder(self.path / "traces") / name, lines, force=True)
        if steps.event is not None:
            earned = entries(credit, steps.units("turn"), steps.event, traces, **how)
            save(folder(self.path / "credit") / name, earned, force=True)
        for number, policy in enumerate(policies):
            policy.save(self._place(step + 1, number), force=True)
        if optimizer is not None:
            from counterpoint.training.torch_updates import save_moments

            save_moments(optimizer, self._place(step + 1, "optimizer"))
        self._write("curve.jsonl", [encode(each) for each in [*self.rows, row]])
        self.rows.append(row)

    def _place(self, step: int, name: int | str) -> Path:
        return folder(self.path / "policies" / f"{step:04}") / f"{name}"

    def _write(self, name: str, lines: Sequence[bytes]) -> None:
        with whole_file(self.path / name, force=True) as file:
            file.write(b"\n".join([*lines, b""]))


def read_curve(path: str | Path) -> list[Row]:
    """The curve of a folder, one row a step. Raises Refused if it holds none that can be read."""
    where = Path(path) / "curve.jsonl"
    if not where.exists():
        raise Refused(f"{path} holds no finished step of training")
    return [_decoded(line, where) for line in _bytes(where).splitlines()]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from None


def _decoded(data: bytes, path: Path) -> Row:
    try:
        return msgspec.json.decode(data, type=Row)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
