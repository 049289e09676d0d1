"""One page about a set of runs: tables and figures as self-contained HTML, without a network.

Every text that came out of a trace is escaped; the page holds no script.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from counterpoint.credit import estimate
from counterpoint.groups import Floats
from counterpoint.lanes import summary
from counterpoint.ledger import Credit
from counterpoint.schema import Finding, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.validate import validate

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; text-align: left; }
th { border-bottom: 2px solid #8c959f; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #57606a; }
"""


RUNS_LISTED = 40
"""Runs that the page lists one by one."""


ROUNDING = 1e-12
"""A mean below this is the rounding of zero."""

SIGNALS: dict[str, dict[str, Any]] = {
    "reinforce": {"baseline": "leave_one_out"},
    "gae": {"values": "mc"},
    "grpo": {},
    "gigpo": {},
}
"""The four signals that are compared, and the options that differ from their defaults."""

JUDGED: dict[str, dict[str, Any]] = {"cad_grpo": {"gate": True}}
"""A page also says whether to believe a regression."""

MEANING = (
    "The estimand is the question that a number answers: “outcome” asks how good the whole run "
    "was, “anchor” how good the turn was among turns in the same state. The effective sample size "
    "counts what a method could learn from: runs in groups whose outcomes differ, or for “anchor” "
    "states that several runs came to. “Nonzero” counts the turns that earned something."
)


class Section(NamedTuple):
    """A part of the page: a heading, sentences, a table and a figure (an SVG), each optional."""

    heading: str
    text: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    svg: str = ""
    caption: str = ""


def page(title: str, sections: Sequence[Section]) -> str:
    """Lay sections out as one HTML document."""
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.rows:
        parts.append(_table(section.rows))
    if section.svg:
        caption = html.escape(section.caption)
        parts.append(f"<figure>{section.svg}<figcaption>{caption}</figcaption></figure>")
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = ["".join(_cell(value) for value in row.values()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return '<td class="n">–</td>'
    if isinstance(value, float):
        return f'<td class="n">{value:.4g}</td>'
    if isinstance(value, int):
        return f'<td class="n">{value}</td>'
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"<td>{html.escape(text)}</td>"


# ---------------------------------------------------------------------------------------------
# What there is to say


class Page(NamedTuple):
    """A finished page, and the rows of its table of methods."""

    html: str
    rows: list[dict[str, Any]]


def about_runs(
    traces: Sequence[Trace],
    methods: Sequence[str] | None = None,
    findings: Sequence[Finding] = (),
    first: Sequence[Section] = (),
) -> Page:
    """The page of `counterpoint report`: facts, findings, credit by several methods, a figure.

    What stands in `first` opens the page. The methods are by default the four `SIGNALS`; one that
    refuses these runs is listed with its reason. Raises Refused if no run has a turn.
    """
    steps = Steps.from_traces(traces)
    if not len(steps):
        raise Refused("none of these runs has a turn, so there is nothing to credit")
    results, refused = try_all(steps, methods or list(SIGNALS))
    checked = validate(traces, findings)
    rows = method_rows(results)
    counted = {"runs": checked.traces, "events": checked.events, **checked.counts}
    totals = Counter(finding.rule for finding in checked.findings)
    sections = [
        *first,
        Section("Credit", " ".join([MEANING, *refused]), rows),
        *(regression_of(name, credit) for name, credit in results.items() if _regressed(credit)),
        *_busiest_run(steps, results),
        Section("Counted", rows=[{"what": k, "number": n} for k, n in counted.items() if n]),
        Section("Findings by rule", rows=[{"rule": r, "findings": n} for r, n in totals.items()]),
        Section("Runs", _first(len(traces)), [_facts(trace) for trace in traces[:RUNS_LISTED]]),
    ]
    sections = [section for section in sections if section.rows or section.text or section.svg]
    return Page(page("Who earned the reward", sections), rows)


CURVE = ("step", "success", "outcome", "env_calls", "tokens", "dead_groups", "truncated",
         "gradient_norm", "entropy")  # fmt: skip
"""What a table says of a step of training."""

STEPS_LISTED = 20


def some_steps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """At most twenty rows of a curve, evenly spread, the last among them, for a table."""
    every = max(1, -(-len(rows) // STEPS_LISTED))
    kept = [row for number, row in enumerate(rows, 1) if (len(rows) - number) % every == 0]
    return [{name: row.get(name) for name in CURVE} for row in kept]


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Section:
    """How a training run went: success and outcome against what it had spent."""
    spent = np.cumsum([row["env_calls"] for row in rows])

    def draw(axes: Any) -> None:
        ax = axes[0, 0]
        for name in ("success", "outcome"):
            values = [np.nan if row.get(name) is None else row[name] for row in rows]
            ax.plot(spent, values, marker=".", label=name)
        ax.set_xlabel("calls of the environment so far, branches included")
        ax.legend(fontsize=8, frameon=False)

    text = (
        f"{len(rows)} steps. Success is what the team was paid, on average over the runs of a "
        "step, and outcome the same with costs taken off. What follows is about the last step."
    )
    caption = "Every point is a step."
    return Section("Training", text, some_steps(rows), figure(1, 1, draw, height=2.4), caption)


def _busiest_run(steps: Steps, results: Mapping[str, Credit]) -> list[Section]:
    """A picture of one run, unless nobody earned anything."""
    if not any(np.nan_to_num(credit.values).any() for credit in results.values()):
        return []
    rollout = busiest(steps, results)
    name = steps.names["rollout"][rollout]
    svg = turns_figure(steps, results, rollout)
    caption = f"Credit of every turn of trace {name}; colours are agents."
    return [Section("The run in which turns differ most", svg=svg, caption=caption)]


def _regressed(credit: Credit) -> bool:
    return bool(credit.diagnostics.get("coefficients"))


def regression_of(name: str, credit: Credit) -> Section:
    """What a regression on proxies says of each agent's quality, and what the gate says of it."""
    said = credit.diagnostics
    proxies = {str(proxy["player"]): proxy for proxy in said["proxies"]}
    rows = [
        {
            "player": player,
            "quality": proxies[player]["channel"],
            "checked": proxies[player]["check"],
            **numbers,
        }
        for player, numbers in said["coefficients"].items()
    ]
    text = (
        "β is how much the team's outcome rises with one unit of an agent's own quality, among "
        "runs of one task; the bar is its 95 % interval. A bar across zero says that this quality "
        f"may explain nothing here. {_gate_said(said.get('gate'))}"
    )
    return Section(f"{name}: what each quality is worth", text, rows, _bars(rows), "β by agent.")


def _gate_said(gate: Mapping[str, Any] | None) -> str:
    if gate is None:
        return ""
    if gate["accepted"]:
        return "The gate accepts it."
    return f"The gate refuses it: {'; '.join(gate['reasons'])}. Use {gate['recommended']}."


def _bars(rows: Sequence[Mapping[str, Any]]) -> str:
    known = [row for row in rows if math.isfinite(row["beta"])]
    if not known:
        return ""

    def draw(axes: Any) -> None:
        ax, place = axes[0, 0], range(len(known))
        beta = np.array([row["beta"] for row in known])
        reach = np.array([[b - r["low"], r["high"] - b] for b, r in zip(beta, known, strict=True)])
        ax.errorbar(beta, place, xerr=np.nan_to_num(np.abs(reach)).T, fmt="o", capsize=3)
        ax.axvline(0, color="#57606a", linewidth=0.6)
        ax.set_yticks(place, [row["player"] for row in known])
        ax.set_xlabel("β")

    return figure(1, 1, draw, height=0.5 + 0.3 * len(known))


def _first(runs: int) -> str:
    return f"The first {RUNS_LISTED} of {runs} runs." if runs > RUNS_LISTED else ""


def _facts(trace: Trace) -> dict[str, Any]:
    """The facts of a run that a page has room for; `show --summary` has them all."""
    facts = summary(trace)
    shown = ("trace", "task", "outcome", "roles", "events", "messages", "tool_calls", "finished")
    return {**{name: facts[name] for name in shown}, "trace": trace.trace_id[:12]}


def try_all(steps: Steps, methods: Sequence[str]) -> tuple[dict[str, Credit], list[str]]:
    """Run several methods on the same steps: the credits, and a sentence for each refusal."""
    results, refused = {}, []
    for name in methods:
        try:
            options = SIGNALS.get(name, {}) if steps.value is None else {}
            results[name] = estimate(name, steps, **options, **JUDGED.get(name, {}))
        except Refused as refusal:
            refused.append(f"{name}: {refusal}.")
    return results, refused


def method_rows(results: Mapping[str, Credit]) -> list[dict[str, Any]]:
    """One row per method: what its number means, and on how much it rests."""
    return [
        {
            "method": name,
            "estimand": credit.estimand,
            "identified": credit.identified,
            "turns": len(credit),
            "credited": int(credit.credited.sum()),
            "nonzero": int((np.nan_to_num(credit.values) != 0).sum()),
            "effective_sample_size": credit.diagnostics.get("effective_sample_size"),
            "groups_without_signal": credit.diagnostics.get("groups_without_signal"),
            "mean": _mean(credit.values),
        }
        for name, credit in results.items()
    ]


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    mean = math.fsum(known) / len(known) if len(known) else math.nan
    return 0.0 if abs(mean) < ROUNDING else mean


def busiest(steps: Steps, results: Mapping[str, Credit]) -> int:
    """Code of the rollout in which the methods differ most from turn to turn, for a picture."""
    spread = np.zeros(steps.n_rollouts)
    for credit in results.values():
        known = credit.credited
        values, of = credit.values[known], steps.rollout[known]
        if not len(values):
            continue
        scale = float(np.abs(values).max()) or 1.0
        high = np.full(steps.n_rollouts, -np.inf)
        low = np.full(steps.n_rollouts, np.inf)
        np.maximum.at(high, of, values / scale)
        np.minimum.at(low, of, values / scale)
        spread += np.where(np.isfinite(high), high - low, 0.0)
    return int(spread.argmax())


def turns_figure(steps: Steps, results: Mapping[str, Credit], rollout: int) -> str:
    """Credit of every turn of one rollout, one row of bars per method."""
    rows = np.flatnonzero(steps.rollout == rollout)
    rows = rows[np.argsort(steps.step[rows])]
    agents = [str(steps.label("agent", int(row))) for row in rows]
    colour = {agent: f"C{n}" for n, agent in enumerate(dict.fromkeys(agents))}

    def draw(axes: Any) -> None:
        for ax, (name, credit) in zip(axes[:, 0], results.items(), strict=True):
            values = np.nan_to_num(credit.values[rows])
            ax.bar(range(len(rows)), values, color=[colour[agent] for agent in agents])
            ax.axhline(0, color="#57606a", linewidth=0.6)
            ax.set_ylabel(name)
            ax.set_xlim(-0.6, len(rows) - 0.4)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.tick_params(labelbottom=ax is axes[-1, 0])
        axes[-1, 0].set_xlabel("turn")
        for agent, tint in list(colour.items())[:8]:
            axes[0, 0].bar(0, 0, color=tint, label=agent)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderaxespad": 0.2}
        axes[0, 0].legend(ncols=4, fontsize=8, frameon=False, **place)

    return figure(len(results), 1, draw, height=1.1)


def scatter_figure(panels: Sequence[Sequence[tuple[str, Floats, Floats]]]) -> str:
    """A grid of scatter plots: (title, truth, estimate) per panel."""

    def draw(axes: Any) -> None:
        for line, row in zip(axes, panels, strict=True):
            for ax, (title, exact, estimated) in zip(line, row, strict=True):
                ax.plot(exact, estimated, ".", markersize=2, alpha=0.4, rasterized=True)
                ax.axhline(0, color="#8c959f", linewidth=0.5)
                ax.axvline(0, color="#8c959f", linewidth=0.5)
                ax.set_title(title, fontsize=10)
        for ax in axes[-1]:
            ax.set_xlabel("exact", fontsize=8)
        for line in axes:
            line[0].set_ylabel("estimate", fontsize=8)

    return figure(len(panels), len(panels[0]), draw, height=2.0)


def figure(rows: int, columns: int, draw: Callable[[Any], None], height: float) -> str:
    """Draw on a grid of axes with Matplotlib and return the SVG; the same input, the same bytes.

    Raises:
        Refused: Matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("figures need Matplotlib: pip install 'counterpoint[plot]'") from None
    # names come from traces: without this a `$` in one would be read as a formula
    plain = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "counterpoint"}
    with mpl.rc_context({**plain, "axes.spines.top": False, "axes.spines.right": False}):
        drawn = Figure(figsize=(9, height * rows + 0.6), layout="constrained")
        axes = drawn.subplots(rows, columns, squeeze=False)
        draw(axes)
        for axis in (axis for ax in axes.flat for axis in (ax.xaxis, ax.yaxis)):
            if axis.get_scale() == "log":  # its own labels are formulas
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(lambda value, _: "")
        out = io.StringIO()
        drawn.savefig(out, format="svg", dpi=110, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]
