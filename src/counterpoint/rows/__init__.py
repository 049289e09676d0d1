"""A trainer's batch in, and finished advantages out: rows of turns, with or without their tokens.

A batch is a file of named columns, `.npz` or Parquet, with one row per turn; or JSON Lines for a
trainer whose batch is nested. Each module has one trainer's names; to add one, write those and add
a row to the table. What a batch has no place for lies beside it, in a file `.about.json`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from counterpoint.groups import Bools, Floats
from counterpoint.ledger import Credit
from counterpoint.rows import rllm, trl, verl
from counterpoint.rows.halves import Halves, halves
from counterpoint.rows.named import Column, Columns, left_out, named, need, unnamed
from counterpoint.save import whole_file
from counterpoint.spelling import Refused
from counterpoint.steps import Steps


class Rows(NamedTuple):
    """How one trainer calls and lays out the rows; see its module."""

    about: str
    columns: Mapping[str, str]
    needed: tuple[str, ...]
    lay: Callable[[Halves, Bools], dict[str, Column]]
    take: Callable[[Columns], Halves | None]
    trained: Callable[[Columns], Column | None]
    carried: Callable[[Floats], dict[str, Column]]
    suffixes: tuple[str, ...]


def _rows(module: Any, about: str, suffixes: tuple[str, ...]) -> Rows:
    functions = (module.lay, module.take, module.trained, module.carried)
    return Rows(about, module.COLUMNS, module.NEEDED, *functions, suffixes)


_FLAT = (".npz", ".parquet")

ROWS: dict[str, Rows] = {
    "verl": _rows(verl, verl.ABOUT, _FLAT),
    "trl": _rows(trl, trl.ABOUT, _FLAT),
    "rllm": _rows(verl, rllm.ABOUT, (".jsonl",)),
}
"""Trainer → its names, how tokens are laid out, and the files that hold them."""


class Batch(NamedTuple):
    """A batch in a trainer's names and order (`columns`), as Steps, and whose names they are."""

    columns: dict[str, Column]
    steps: Steps
    rows: str = "verl"


def batch_of(rows: str, steps: Steps) -> Batch:
    """Lay steps out as a trainer's batch, by their stored tokens.

    A turn's prompt is what its model was fed before the first token it wrote, its response the
    rest; trained are the tokens that it wrote on rows that are trainable.

    Args:
        rows: a name in `ROWS`.
        steps: from traces whose acts store `token_ids`, with `mask` where they hold the prompt.

    Raises:
        Refused: no such trainer; no stored tokens.
    """
    form = _form(rows)
    if steps.tokens is None:
        raise Refused(
            f"rows for {rows} are made of token ids, and these traces store none; record acts "
            "with token_ids=, mask= and logprobs="
        )
    cut = halves(steps.tokens)
    columns = named(steps, form.columns) | form.lay(cut, cut.written & steps.mask[:, None])
    return Batch(columns, steps, rows)


def load_batch(path: str | Path) -> Batch:
    """Read a batch: what `save_batch` wrote, or one of verl-agent (`rows.verl.COLUMNS`).

    Raises:
        Refused: no readable file, a pickled column, columns of different lengths, or what
            `Steps.from_columns` refuses.
    """
    path = Path(path)
    columns = _load(path)
    rows = "rllm" if path.suffix == ".jsonl" else "trl" if "completion_ids" in columns else "verl"
    form = ROWS[rows]
    need(columns, form.needed)
    try:
        cut, mask = form.take(columns), form.trained(columns)
    except (KeyError, IndexError, ValueError) as error:
        raise Refused(f"{path}: its tokens are no batch for {rows}: {error}") from None
    return Batch(columns, unnamed(columns, form.columns, cut, mask), rows)


def save_batch(
    path: str | Path,
    batch: Batch,
    credit: Credit,
    *,
    about: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the batch, rows and columns in their order, with `advantages`; both files or none.

    With tokens in the batch advantages have the shape of their mask, else (rows,); 0 where nothing
    was credited. What the credit means (estimand, identification, sample size) and what was left
    out go into `about_path(path)`.

    Args:
        path: .npz or .parquet, for rLLM .jsonl.
        batch: from `batch_of` or `load_batch`.
        credit: one value per row.
        about: what else is to be said of the credit: its method, its options.
        force: whether to replace what is there.

    Raises:
        Refused: another kind of file, credit of parts of turns, or what `whole_file` refuses.
    """
    path, form = Path(path), _form(batch.rows)
    if path.suffix not in form.suffixes:
        raise Refused(
            f"{path}: a batch for {batch.rows} is written as {' or '.join(form.suffixes)}"
        )
    if credit.unit != "turn":
        raise Refused(
            f"a trainer's row is a turn, and this credit is one of {credit.unit}s; name a method "
            "that credits turns"
        )
    columns = {**batch.columns, **_carried(batch, credit)}
    told = {**_told(batch, credit), **(about or {})}
    with ExitStack() as both:
        beside = both.enter_context(whole_file(about_path(path), force=force))
        file = both.enter_context(whole_file(path, force=force))
        beside.write(json.dumps(told, indent=2, default=str).encode() + b"\n")
        _WRITE[path.suffix](file, columns)


def about_path(path: str | Path) -> Path:
    """The file beside a batch that says what its advantages mean: batch.npz, batch.about.json."""
    return Path(path).with_suffix(".about.json")


def difference(batch: Batch, credit: Credit) -> float | None:
    """Largest absolute difference from the advantages that the batch came with; None without any.

    Advantages per token are compared on the tokens that are trained.
    """
    given = batch.columns.get("advantages")
    if given is None:
        return None
    mask = _form(batch.rows).trained(batch.columns)
    shapes = [(len(credit),)] if mask is None else [(len(credit),), mask.shape]
    if given.dtype.kind not in "fiub" or given.shape not in shapes:
        raise Refused(
            f"column advantages has shape {given.shape} and type {given.dtype} where numbers of "
            f"shape {' or '.join(map(str, shapes))} are needed"
        )
    if mask is not None and given.ndim == 2:
        ours, on = credit.tokens(mask), mask.astype(bool)
        return float(np.abs(ours - given)[on].max(initial=0.0))
    return float(np.abs(np.nan_to_num(credit.values) - given).max(initial=0.0))


def _form(rows: str) -> Rows:
    if rows not in ROWS:
        raise Refused(f"there are no rows for {rows!r}; there are {', '.join(ROWS)}")
    return ROWS[rows]


def _carried(batch: Batch, credit: Credit) -> dict[str, Column]:
    """The columns that hold the credit."""
    form = _form(batch.rows)
    mask = form.trained(batch.columns)
    if mask is None:
        return {"advantages": np.nan_to_num(credit.values)}
    per_token = credit.tokens(mask)
    bare = form.take(batch.columns) is None
    return {"advantages": per_token} if bare else form.carried(per_token)


def _told(batch: Batch, credit: Credit) -> dict[str, Any]:
    """What a batch has no place for."""
    return {
        "rows": batch.rows,
        "turns": len(credit),
        "credited": int(credit.credited.sum()),
        "unit": credit.unit,
        "estimand": credit.estimand,
        "identified": credit.identified,
        "diagnostics": dict(credit.diagnostics),
        "left_out": left_out(batch.steps),
    }


# ---------------------------------------------------------------------------------------------
# Files


def _write_npz(file: IO[bytes], columns: dict[str, Column]) -> None:
    np.savez(file, allow_pickle=False, **columns)


def _write_parquet(file: IO[bytes], columns: dict[str, Column]) -> None:
    arrow, parquet = _arrow()
    listed = {n: list(v) if v.ndim == 2 else v for n, v in columns.items()}
    parquet.write_table(arrow.table(listed), file)


def _write_episodes(file: IO[bytes], columns: dict[str, Column]) -> None:
    file.writelines(line + b"\n" for line in rllm.lines(columns))


_WRITE = {".npz": _write_npz, ".parquet": _write_parquet, ".jsonl": _write_episodes}


def _load(path: Path) -> dict[str, Column]:
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return rllm.columns(lines)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        _, parquet = _arrow()
        table = parquet.read_table(path)
        return {name: np.array(table[name].to_pylist()) for name in table.column_names}
    except FileNotFoundError:
        raise Refused(f"there is no file {path}") from None
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise Refused(f"{path} cannot be read as a batch: {error}") from None
    except Refused:
        raise
    except ValueError:
        raise Refused(
            f"{path} is no batch, or has a column of Python objects; save text columns as "
            "fixed-width strings"
        ) from None


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refused("Parquet needs PyArrow: pip install 'counterpoint[data]'") from None
    return pyarrow, pyarrow.parquet
