"""A trainer's batch in, the same rows with advantages out; no events are invented.

A batch is an `.npz` or Parquet file of named columns with one row per turn. `verl_agent.COLUMNS`
maps its columns to those of Steps.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.ledger import Credit
from counterpoint.rows import verl_agent
from counterpoint.save import whole_file
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

Column = npt.NDArray[Any]


class Batch(NamedTuple):
    """A batch as it was read (`columns`, in its own order and names) and as Steps."""

    columns: dict[str, Column]
    steps: Steps


def load_batch(path: str | Path) -> Batch:
    """Read a batch of verl-agent's columns (`rows.verl_agent.COLUMNS`).

    Raises:
        Refused: no readable file, a pickled column, columns of different lengths, or what
            `Steps.from_columns` refuses.
    """
    columns = _load(Path(path))
    return Batch(columns, verl_agent.to_steps(columns))


def save_batch(path: str | Path, batch: Batch, credit: Credit, *, force: bool = False) -> None:
    """Write the batch again, rows and columns in their order, with `advantages`.

    With a `response_mask` in the batch advantages have its shape (rows, tokens), else (rows,);
    0 where nothing was credited. Raises Refused as `whole_file`.
    """
    mask = batch.columns.get("response_mask")
    advantages = np.nan_to_num(credit.values) if mask is None else credit.tokens(mask)
    columns = {**batch.columns, "advantages": advantages}
    path = Path(path)
    if path.suffix not in (".npz", ".parquet"):
        raise Refused(f"{path}: a batch is written as .npz or .parquet")
    if path.suffix == ".npz":
        with whole_file(path, force=force) as file:
            np.savez(file, allow_pickle=False, **columns)
        return
    arrow, parquet = _arrow()
    table = arrow.table({name: _listed(values) for name, values in columns.items()})
    with whole_file(path, force=force) as file:
        parquet.write_table(table, file)


def difference(batch: Batch, credit: Credit) -> float | None:
    """Largest absolute difference from the advantages that the batch came with; None without any.

    Advantages per token are compared on the tokens of `response_mask`.
    """
    given = batch.columns.get("advantages")
    if given is None:
        return None
    mask = batch.columns.get("response_mask")
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


def _load(path: Path) -> dict[str, Column]:
    try:
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
    except ValueError:
        raise Refused(
            f"{path} is no batch, or has a column of Python objects; save text columns as "
            "fixed-width strings"
        ) from None


def _listed(values: Column) -> Any:
    return list(values) if values.ndim == 2 else values


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise Refused("Parquet needs PyArrow: pip install 'counterpoint[data]'") from None
    return pyarrow, pyarrow.parquet
