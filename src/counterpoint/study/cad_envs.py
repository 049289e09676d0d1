"""The study of CAD-GRPO where a harness runs text worlds, whose exact credit is listed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from counterpoint.credit import Account, c3, cad_grpo, coma, grpo, rloo, score
from counterpoint.envs import make
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive import Branching, credits_of
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps

ENVS = ("research-v0", "research-review-v0", "ledger-v0")
"""What is played, by tables that choose evenly."""

BATCHES = {False: 4, True: 2}
GROUPS = {False: 8, True: 4}
ROLLOUTS = 8

_Measure: TypeAlias = Callable[[Steps, Account], Credit]


def _observed(
    steps: Steps, replay: Account, *, method: Callable[..., Credit], **own: Any
) -> Credit:
    return method(steps, **own)


def _measured(
    steps: Steps, replay: Account, *, method: Callable[..., Credit], **own: Any
) -> Credit:
    return method(steps, replay=replay, **own)


MEASURES: dict[str, _Measure] = {
    "grpo": partial(_observed, method=grpo, normalize_std=False),
    "rloo": partial(_observed, method=rloo),
    **{
        f"cad_{form}": partial(_observed, method=cad_grpo, advantage=form)
        for form in ("upstream", "shared", "equal", "drop")
    },
    "cad_upstream_gated": partial(_observed, method=cad_grpo, gate=True),
    "c3_4": partial(_measured, method=c3),
    "coma": partial(_measured, method=coma),
}
"""Name in the table → the method with its options."""


def environments(quick: bool) -> list[dict[str, Any]]:
    """One row for each environment and method, over independent batches."""
    rows = []
    for name in ENVS[: 1 if quick else None]:
        found: dict[str, list[tuple[float, float, float]]] = {}
        for batch in range(BATCHES[quick]):
            for method, figures in _batch(name, GROUPS[quick], batch).items():
                found.setdefault(method, []).append(figures)
        rows += [_row(name, method, np.array(seen)) for method, seen in found.items()]
    return rows


def _batch(name: str, groups: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Method → (Pearson correlation, mean squared error, calls of the environment) in one batch."""
    traces = rollout(make(name), Softmax(), groups=groups, rollouts=ROLLOUTS, seed=seed)
    steps, exact = Steps.from_traces(traces), _exact(traces)
    calls = sum(len(trace.of("tool_result")) for trace in traces)
    out: dict[str, tuple[float, float, float]] = {}
    for method, measure in MEASURES.items():
        account = Account(Branching(traces), steps)
        try:
            credit = measure(steps, account)
        except Refused:
            continue
        off = np.nan_to_num(credit.values) - exact.values
        square = float(np.mean(off[steps.mask] ** 2))
        out[method] = (score(credit, exact).pearson, square, calls + account.spent.env_calls)
    return out


def _exact(traces: list[Trace]) -> Credit:
    values = [act.seqau for acts in credits_of(traces) for act in acts]
    return Credit(np.array(values), estimand="seqau")


def _row(env: str, method: str, seen: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"env": env, "method": method, "batches": len(seen)}
    for at, name in enumerate(("pearson", "mse", "tool_calls")):
        known = seen[:, at][np.isfinite(seen[:, at])]
        row[name] = float(known.mean()) if len(known) else float("nan")
        spread = known.std(ddof=1) / np.sqrt(len(known)) if len(known) > 1 else np.nan
        row[f"{name} ±"] = float(1.96 * spread)
    return row
