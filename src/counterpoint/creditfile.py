"""The credit file: which unit of which trace received which advantage, from which method.

One line per unit, in a file beside the traces, which it names by digest; so that an update can be
recomputed from the two files alone, and two methods compared line by line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from counterpoint import groups
from counterpoint.groups import Ints
from counterpoint.ledger import Credit
from counterpoint.schema import Act, CreditEntry, Target, Trace
from counterpoint.spelling import Refused, freeze, thaw
from counterpoint.store import side_records
from counterpoint.units import Units


def entries(
    credit: Credit,
    units: Units,
    event: Ints,
    traces: Sequence[Trace],
    *,
    method: str,
    params: Mapping[str, Any],
) -> Iterator[CreditEntry]:
    """Spell a credit as lines of a credit file, one per unit.

    Args:
        credit: one value per unit.
        units: what they are, from `Steps.units`.
        event: (rows, 2) index into `traces` and `seq` of each turn's act, as in `Steps.event`.
        traces: the traces that the rows came from.
        method: its name, or file.py:function.
        params: the options it ran with.

    Raises:
        Refused: credit per token, which a line cannot name.
    """
    if units.kind == "token":
        raise Refused(
            "a credit file names no single token; write turns or decisions, "
            "and spread them with Credit.tokens"
        )
    params_raw = freeze(dict(params) or None)
    values, homes = credit.values.tolist(), event[units.row].tolist()
    for unit, (value, (number, seq)) in enumerate(zip(values, homes, strict=True)):
        trace = traces[number]
        act = trace[seq]
        shared = units.kind in ("role", "team")  # several agents, perhaps of several versions
        yield CreditEntry(
            trace_id=trace.trace_id,
            digest=trace.digest,
            method=method,
            params_raw=params_raw,
            estimand=credit.estimand,
            identified=credit.identified,
            unit=credit.unit,
            target=_target(units, unit),
            value=None if np.isnan(value) else value,
            policy_version=act.policy_version if isinstance(act, Act) and not shared else None,
        )


def _target(units: Units, unit: int) -> Target:
    """What a line is about: an event, a decision's item in it, an agent, a role; or the team."""
    if units.kind == "agent":
        return Target(agent=str(units.name("label", unit)))
    if units.kind == "role":
        return Target(role=str(units.name("label", unit)))
    seq, item = int(units.seq[unit]), int(units.item[unit])
    decided = units.kind == "decision" and item >= 0
    return Target(seq=seq if seq >= 0 else None, item=item if decided else None)


def read_entries(path: str | Path) -> list[CreditEntry]:
    """The credit lines of a file. Raises Refused if it holds none."""
    found = [value for value in side_records(path) if isinstance(value, CreditEntry)]
    if not found:
        raise Refused(f"{path} holds no line of credit; `counterpoint credit … -o` writes them")
    return found


def about_credit(lines: Sequence[CreditEntry]) -> dict[str, Any]:
    """What all lines of a credit file say alike: method, options, estimand, identification, unit.

    Raises:
        Refused: the file holds several methods.
    """
    first = lines[0]
    if any(line.method != first.method for line in lines):
        raise Refused(f"one method's credit goes out, not {sorted({x.method for x in lines})}")
    said = {"method": first.method, "params": thaw(first.params_raw), "unit": first.unit}
    said |= {"estimand": first.estimand, "identified": first.identified, "lines": len(lines)}
    return said | {"credited": sum(line.value is not None for line in lines)}


class Matched(NamedTuple):
    """Two credit files over the units that both hold.

    Attributes:
        one, other: the credit in either.
        run: (units,) code of the run of each.
        unmatched: how many units only one of them holds.
    """

    one: Credit
    other: Credit
    run: Ints
    unmatched: dict[str, int]


def matched(one: Iterable[CreditEntry], other: Iterable[CreditEntry]) -> Matched:
    """Lay two credit files side by side, unit by unit.

    Raises:
        Refused: a file holds several methods or one unit twice, or they have no unit in common.
    """
    first, second = _by_unit(one), _by_unit(other)
    common = [key for key in first if key in second]
    if not common:
        raise Refused("the two credit files have no unit of one trace (same digest) in common")
    unmatched = {
        "only_in_first": len(first) - len(common),
        "only_in_second": len(second) - len(common),
    }
    run, _ = groups.encode_labels([digest for digest, _, _ in common])
    ours, theirs = (_credit([lines[key] for key in common]) for lines in (first, second))
    return Matched(ours, theirs, run, unmatched)


def _by_unit(lines: Iterable[CreditEntry]) -> dict[tuple[str, Target, str], CreditEntry]:
    found: dict[tuple[str, Target, str], CreditEntry] = {}
    methods = set()
    for entry in lines:
        methods.add(entry.method)
        key = (entry.digest, entry.target, entry.unit)
        if key in found or len(methods) > 1:
            raise Refused(
                f"a credit file to be scored holds one value per unit, but {_named(entry)} "
                f"of trace {entry.trace_id} stands there twice"
                if key in found
                else f"a credit file to be scored holds one method, not {sorted(methods)}"
            )
        found[key] = entry
    return found


def _named(entry: CreditEntry) -> str:
    target = entry.target
    if target.seq is None:
        return f"{entry.unit} {target.agent or target.role or ''}".strip()
    return f"event {target.seq}" + ("" if target.item is None else f", item {target.item},")


def _credit(lines: Sequence[CreditEntry]) -> Credit:
    return Credit(
        np.array([np.nan if entry.value is None else entry.value for entry in lines]),
        unit=lines[0].unit,
        estimand=lines[0].estimand,
        identified=lines[0].identified,
    )
