"""The page of the two-agent experiment, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from counterpoint.branches import Spent
from counterpoint.groups import Floats
from counterpoint.report import Section, figure
from counterpoint.study.two_agent_run import HEADLINE
from counterpoint.study.two_agent_stats import (
    Budget,
    Runs,
    against_exact,
    collapse,
    finals,
    improvement,
    interval,
    of,
    outcomes,
    qualities,
    regressions,
)
from counterpoint.study.two_agent_watch import Row

FORMS = ("cad_upstream", "cad_equal")
"""Forms of CAD-GRPO in the headline; the control of each has the same name and `_permuted`."""


def verdict(runs: Runs, env: str, most: Spent) -> list[str]:
    """What may be said of credit here, by a rule that was fixed before the first run.

    An arm is better where the whole interval of the probability of improvement lies above ½. A form
    of CAD-GRPO owes its gain to credit if it is better than naive GRPO and than its control.
    """

    def compared(x: str, y: str) -> int:
        own, other = (finals(runs, env, name, "env_calls", most) for name in (x, y))
        _, low, high = improvement(own, other)
        return (low > 0.5) - (high < 0.5)

    said = []
    for form in FORMS:
        gain, over = compared(form, "naive_grpo"), compared(form, f"{form}_permuted")
        words = {
            1: "ends higher than naive GRPO"
            + ("; so it does than its control: credit's gain" if over > 0 else
               ", but not than its control: not credit's gain"),
            0: "is not told apart from naive GRPO: a null result",
            -1: "ends lower than naive GRPO"
            + ("; its control ends higher than it does: q does harm" if over < 0 else
               ", but not than its control: not q's doing"),
        }  # fmt: skip
        said.append(f"{env}: {form} {words[gain]}.")
    words = {1: "ends higher than", 0: "is not told apart from", -1: "ends lower than"}
    return [*said, f"{env}: a single agent {words[compared('single_agent', 'naive_grpo')]} the "
            "pair under naive GRPO."]  # fmt: skip


def curves(runs: Runs, methods: Sequence[str], budget: Budget) -> str:
    """Success against calls, mean over seeds with the 95 % interval, a panel for each place."""
    places = list(dict.fromkeys(cell.env for cell in runs))

    def draw(axes: Any) -> None:
        for ax, env in zip(axes[0], places, strict=True):
            most = budget(env).env_calls
            grid = np.linspace(0, most, 25)
            for at, method in enumerate(methods):
                held = of(runs, env, method)
                if held:
                    lines = np.array([_read_off(rows, grid) for rows in held])
                    band = np.array([interval(column) for column in lines.T.tolist()])
                    look = {"color": f"C{at}", "linestyle": "-:"["permuted" in method]}
                    ax.plot(grid, band[:, 0], label=method, **look)
                    ax.fill_between(grid, band[:, 1], band[:, 2], color=f"C{at}", alpha=0.15)
            ax.set_title(env, fontsize=10)
            ax.set_xlabel("calls of the environment")
        axes[0, 0].set_ylabel("success")
        axes[0, -1].legend(fontsize=7, frameon=False)

    return figure(1, len(places), draw, height=3.4)


def _read_off(rows: Sequence[Row], grid: Floats) -> Floats:
    calls = np.array([row["env_calls"] for row in rows])
    at = np.searchsorted(calls, grid, side="right") - 1
    return np.array([row["success"] for row in rows])[at]


def sections(runs: Runs, tuned: Runs, budget: Budget) -> list[Section]:
    """The whole page: verdict, headline, appendix, credit, β, q and collapse."""
    places = list(dict.fromkeys(cell.env for cell in runs))
    table = [row for env in places for row in outcomes(runs, env, budget(env))]
    best = [row for env in places for row in outcomes(tuned, env, budget(env))]
    paths = {(cell.env, cell.method): cell.path for cell in tuned}
    best = [{**row, "step length": paths[row["env"], row["method"]]} for row in best]

    def every(rows: Callable[[Runs, str], list[Row]]) -> list[Row]:
        return [row for env in places for row in rows(runs, env)]

    others = [row for row in table if row["method"] not in HEADLINE]
    said = [line for env in places for line in verdict(runs, env, budget(env))]
    return [
        Section("Verdict", " ".join(said)),
        Section(
            "At one budget and one pace",
            _HOW + " " + " ".join(_spent(env, budget(env)) for env in places),
            [row for row in table if row["method"] in HEADLINE],
            curves(runs, list(HEADLINE), budget),
            "Mean over seeds, and its 95 % interval; controls are dotted.",
        ),
        *([Section("Each at the step length that suits it", _TUNED, best)] if best else []),
        *([Section("Appendix: other methods", _OTHERS, others)] if others else []),
        Section("Credit beside the exact credit", _EXACT, every(against_exact)),
        Section("β, residual and gate", _BETA, every(regressions)),
        Section("What each quality is worth", _QUALITY, every(qualities)),
        Section("Do agents of one model fail together?", _TOGETHER, every(collapse)),
    ]  # fmt: skip


def _spent(env: str, most: Spent) -> str:
    return f"{env}: {most.env_calls} calls, {most.tokens} tokens."


_HOW = (
    "Success is exact: what a policy that draws its acts can expect on tasks that nobody trained "
    "on, by listing all their runs. Everybody has the same harness, prompts, tools and settings "
    "(digests are compared, and others refused) and goes on until calls and tokens are both spent; "
    "branches are paid out of the same purse. `final` is read where the calls are spent, `final at "
    "equal tokens` where the tokens are; `over the budget` is the mean while calls are spent. Each "
    "update moves the table of logits by one length, the share of the budget that it spent: arms "
    "differ in direction, not in pace. In brackets 95 % intervals by bootstrap over seeds. A "
    "permuted arm is a control: each q is dealt anew among the runs of its task. CAD-GRPO is a "
    "reconstruction. Where every q descends from both agents, `upstream` may take nothing off, "
    "and is RLOO."
)
_TUNED = (
    "The same for the arms above, each at the step length with the most success over the budget on "
    "seeds of its own; all arms chose among the same lengths, with equally many runs. Where the "
    "longest suits everybody, one batch tells a table what to do, and credit has nothing to add."
)
_OTHERS = (
    "COSAC is left out: it asks what policies would choose after acts whose results it has not "
    "seen, and a table of logits that acts by anchors cannot say that without the environment. "
    "Methods that pay for branches play fewer runs."
)
_EXACT = (
    "Against seqau, Q(h, a) − V(h), listed run by run, for the first runs of three batches: what "
    "the policies were when credit was given. Coverage and false alarms go with sign accuracy: how "
    "often there was a sign, and how often credit was given where none was due."
)
_BETA = (
    "β of each batch, over all updates and seeds. `gate accepts` is the share of folds in which β "
    "was used, the residual share what nobody's q explains of what was handed out."
)
_QUALITY = (
    "Correlation within tasks of each quality with the exact credit of its agent, summed over its "
    "acts, in the runs of naive GRPO; apart from success, which no q is paid for."
)
_TOGETHER = (
    "An agent fails where what was checked of its work is below 1; `failing_together` is the "
    "correlation of that over runs. Entropy (nats) is that of the policies in the states they "
    "came to; `distinct` the share of a batch's runs that differ in what was chosen. One table of "
    "logits is for both roles, but they meet no state in common, so nothing that one learns moves "
    "the other: what rises here comes from the task, where one waits for the other. Whether "
    "weights in common make failures common, tables cannot show."
)
