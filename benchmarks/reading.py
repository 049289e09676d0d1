"""Reading JSON Lines events of about 500 bytes with their types checked, against pydantic v2.

Ours streams a file with line numbers and a check of every payload's spelling; pydantic validates
each line of the same file into models with the same fields and bounds, made from our structs and
told apart by `type`. `validate` reads the same file and applies every rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct
from msgspec.structs import fields
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from counterpoint.recorder import Recorder
from counterpoint.schema import KINDS
from counterpoint.store import read_file, records
from counterpoint.validate import validate

EVENTS = 20_000
REPEATS = 9
TEXT = "The capital of Peru is Lima. " * 10


def _model(struct: type[Struct]) -> type[BaseModel]:
    """The pydantic model with the fields, bounds and defaults of one of our structs."""
    if struct not in MODELS:
        own: dict[str, Any] = {}
        if struct in KINDS.values():
            own["type"] = (Literal[struct.__struct_config__.tag], ...)
        hints = get_type_hints(struct, include_extras=True)
        for field in fields(struct):
            kind = Any if field.name.endswith("_raw") else _translated(hints[field.name])
            default = None if field.default is UNSET else field.default
            own[field.encode_name] = (kind, ... if field.required else default)
        config = ConfigDict(extra="forbid", frozen=True)
        MODELS[struct] = create_model(struct.__name__, __config__=config, **own)
    return MODELS[struct]


def _translated(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
    if origin in (tuple, Union, UnionType):
        parts = tuple(part if part is ... else _translated(part) for part in arguments)
        return tuple[parts] if origin is tuple else reduce(or_, parts)
    return _model(kind) if isinstance(kind, type) and issubclass(kind, Struct) else kind


MODELS: dict[type[Struct], type[BaseModel]] = {}
EVENT = Annotated[reduce(or_, map(_model, KINDS.values())), Field(discriminator="type")]


def rows() -> list[dict[str, Any]]:
    """One row per job: {job, ours, peer, peer_name, ratio, goal}, seconds an event."""
    with TemporaryDirectory() as name:
        path = Path(name) / "runs.jsonl"
        n = _recorded(path)
        ours, theirs, traced, checked = _medians(
            lambda: sum(1 for _ in records(path)),
            lambda: sum(1 for _ in _pydantic(path)),
            lambda: sum(len(trace) for trace in read_file(path)),
            lambda: validate(read_file(path)).events,
        )
    job = "read and check an event of 500 bytes"
    return [
        _row(f"{job} (goal 2 µs)", ours / n, theirs / n, "pydantic v2", 5.0),
        _row(f"{job}, gathered into traces", traced / n, theirs / n, "pydantic v2", None),
        _row("validate an event, all rules (goal 5 µs)", checked / n),
    ]


def _recorded(path: Path) -> int:
    """A file of many traces; how many events it holds."""
    with Recorder(path, sync="trace") as recorder:
        for _ in range(EVENTS // 50):
            with recorder.trace("t") as trace:
                for _ in range(10):
                    trace.message("a", "b", TEXT)
                    trace.act("b", TEXT)
                    trace.tool_result(trace.tool_call("b", "search", {"q": TEXT}), {"hits": [TEXT]})
    events = sum(len(trace) for trace in read_file(path))
    assert 350 < path.stat().st_size / events < 650
    return events


def _pydantic(path: Path) -> Iterator[Any]:
    check = TypeAdapter(EVENT).validate_json
    with path.open("rb") as file:
        for line in file:
            if not line.startswith((b'{"type":"header"', b'{"type":"seal"')):
                yield check(line)


def _medians(*sides: Callable[[], int]) -> list[float]:
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(REPEATS):
        for taken, run in zip(times, sides, strict=True):
            began = time.process_time()
            run()
            taken.append(time.process_time() - began)
    return [median(taken) for taken in times]


def _row(
    job: str, ours: float, peer: float | None = None, name: str = "", goal: float | None = None
) -> dict[str, Any]:
    ratio = None if peer is None else peer / ours
    return {
        "job": job,
        "ours": ours,
        "peer": peer,
        "peer_name": name,
        "ratio": ratio,
        "goal": goal,
    }
