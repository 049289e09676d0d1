"""What is lost when every decision of a run gets the run's own number, exactly, on games; and how
many units of credit a run has, against how much of its outcome they show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from counterpoint import groups
from counterpoint.envs import Env, make
from counterpoint.games import Plays, deal, every, gradient, truth
from counterpoint.groups import Floats, Ints
from counterpoint.harness import header_of, team_of
from counterpoint.policies.tabular import Softmax
from counterpoint.redrive.exact import Listed, all_listed, branches
from counterpoint.report import Page, Section, figure, page
from counterpoint.schema import Act, ToolCall, Trace
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.study.asked import Progress, silent
from counterpoint.units import Units
from counterpoint.vocabulary import UNITS

TURNS: tuple[int, ...] = (1, 4, 16)
"""Turns that each agent takes, in the closed form."""
AGENTS: tuple[int, ...] = (1, 2, 4, 8, 16)
"""Team sizes, in the closed form."""
CHANCE = 0.3
"""How often a decision of the closed form pays its 1."""
LISTED: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
"""Team sizes whose plays are listed one by one."""
GROUP = 8
"""Rollouts in a group, whose other members are the baseline."""
TEAMS: tuple[str, ...] = ("research-v0", "ledger-v0")
"""Environments whose runs are listed one by one."""
MOST_RUNS = 20_000
"""Runs of a task that are listed before it is refused."""


# ---------------------------------------------------------------------------------------------
# The signal in a number that everybody gets


def additive_ratio(part: Floats, policy: Floats, scope: Ints, rollouts: int | None) -> float:
    """Signal to noise of the gradient of single decisions, in closed form.

        |E g|² ÷ tr Var g, summed over decisions, with g_t = A ∇log π_t(a_t),  A = Σ x_s over the
        decisions s that share t's number,  x_s = f_s(a_s) − E f_s

    The team is additive, R = Σ f_t(a_t), and nobody reacts. The other decisions of the scope are
    noise to this one: their variance adds to E[A² |∇log π|²] and nothing to E g. With a group of n
    the baseline is the mean of the n − 1 others, which adds Var A ÷ (n − 1) to the noise.

    Args:
        part: (decisions, actions) f.
        policy: (decisions, actions) π, rows sum to 1.
        scope: (decisions,) which decisions get one number: all equal for the team's outcome, all
            different for each decision's own exact credit.
        rollouts: size of the group; None for the exact mean.

    Returns:
        The ratio; infinite where a decision's own part is all the noise there is and has none.
    """
    x = part - np.sum(policy * part, axis=1, keepdims=True)
    score = np.eye(part.shape[1])[None] - policy[:, None, :]  # (decision, taken, logit)
    length = np.sum(score**2, axis=2)
    mean = np.einsum("ta,ta,tak->tk", policy, x, score)
    own, spread = np.sum(policy * x**2 * length, axis=1), np.sum(policy * x**2, axis=1)
    together = groups.total(scope, spread, int(scope.max()) + 1)[scope]
    noise = together - spread + (0.0 if rollouts is None else together / (rollouts - 1))
    signal = float(np.sum(mean**2))
    second = float(np.sum(own + noise * np.sum(policy * length, axis=1)))
    return signal / (second - signal) if second > signal else np.inf


def listed_ratio(plays: Plays, chance: Floats, advantage: Floats) -> float:
    """The same ratio for any game and credit, by listing every play.

    Args:
        plays: all plays, from `every`, in groups of one size.
        chance: (groups,) their probabilities.
        advantage: (rows,) the credit.
    """
    weight = chance[plays.steps.group] / (plays.steps.n_rollouts / len(chance))
    policy = plays.game.policy[plays.game.anchor[plays.state]]
    taken = policy[np.arange(len(policy)), plays.action]
    length = 1.0 - 2.0 * taken + np.sum(policy**2, axis=1)
    signal = float(np.sum(gradient(plays, advantage * weight * plays.steps.n_rollouts) ** 2))
    second = float(np.sum(weight * advantage**2 * length))
    return signal / (second - signal) if second > signal else np.inf


def listed_correlation(plays: Plays, chance: Floats, advantage: Floats) -> float:
    """Correlation of a credit with seqau over the decisions of every play."""
    weight = chance[plays.steps.group]
    exact = truth(plays, "seqau").values
    both = np.cov(np.stack([advantage, exact]), aweights=weight, ddof=0)
    return float(both[0, 1] / np.sqrt(both[0, 0] * both[1, 1]))


def closed() -> list[dict[str, Any]]:
    """Signal to noise by team size and turns per agent, where all decisions are alike: each pays 1
    with probability `CHANCE`, else nothing.
    """
    rows = []
    for turns in TURNS:
        for agents in AGENTS:
            each = np.arange(agents * turns)
            part = np.tile([0.0, 1.0], (len(each), 1))
            policy = np.tile([1 - CHANCE, CHANCE], (len(each), 1))
            rows.append(
                {
                    "agents": agents,
                    "turns_each": turns,
                    "decisions": len(each),
                    "outcome": additive_ratio(part, policy, each * 0, GROUP),
                    "agent": additive_ratio(part, policy, each // turns, None),
                    "decision": additive_ratio(part, policy, each, None),
                }
            )
    return rows


def _mean(name: str, values: Floats) -> list[tuple[str, float]]:
    """A mean over draws and half the width of its 95 % interval."""
    half = 1.96 * float(values.std(ddof=1)) / np.sqrt(len(values))
    return [(name, float(values.mean())), (f"{name}_±", float(half))]


def listed(seeds: int) -> list[dict[str, Any]]:
    """Correlation of the outcome with seqau, and signal to noise, by listing the plays of teams in
    which nobody reacts (T1) and in which later agents do (T2).
    """
    rows = []
    for agents in LISTED:
        row: dict[str, Any] = {"agents": agents, "1/√agents": agents**-0.5}
        for name in ("T1", "T2"):
            found = np.array([_listed(name, agents, seed) for seed in range(seeds)])
            row[f"{name}_correlation"] = float(found[:, 0].mean())
            row |= dict(_mean(f"{name}_ratio", found[:, 1]))
        rows.append(row)
    return rows


def _listed(name: str, agents: int, seed: int) -> tuple[float, float]:
    plays, chance = every(deal(name, agents=agents, actions=2, seed=seed), 1)
    steps = plays.steps
    uniform = steps.outcome - float(chance @ steps.outcome[steps.step == 0])
    return listed_correlation(plays, chance, uniform), listed_ratio(plays, chance, uniform)


# ---------------------------------------------------------------------------------------------
# How many units there are, and what one of them shows


def all_runs(env: Env, task: int = 0, seed: int = 0) -> Iterator[tuple[Trace, float]]:
    """Every run of a task under policies that choose evenly, and its chance.

    Args:
        env: where.
        task: which one: that of this group of `rollout`.
        seed: of that rollout.

    Raises:
        Refused: over `MOST_RUNS` runs, or what cannot be listed.
    """
    team = team_of(env, Softmax())
    header = header_of(env, team, group=task, rollout=0, seed=seed)
    env.reset(cast(int, header.task_seed))
    start = Listed(header, env, all_listed(team), ())
    left: list[tuple[float, tuple[Any, ...], Any]] = [(1.0, (), env.snapshot())]
    found = 0
    while left:
        weight, events, state = left.pop()
        env.restore(state)
        run = start.after(events)
        while len(ahead := branches(run)) == 1:
            run.emit(ahead[0].event)
        here = env.snapshot()
        for chance, event, after in ahead:
            left.append((weight * chance, (*run.events, event), here if after is None else after))
        if not ahead:
            found += 1
            if found > MOST_RUNS:
                raise Refused(f"{env.id} has over {MOST_RUNS} runs of a task, too many to list")
            named = msgspec.structs.replace(header, trace_id=f"{env.id}/{found}")
            yield Trace(named, tuple(run.events)), weight


def density(env: Env) -> list[dict[str, Any]]:
    """For each kind of unit, exactly: how many a run has, and how much of the outcome one shows.

    A unit is known by its place, the nth of its kind by its role, and by what it says. `shows` is
    the share of the variance of the outcome that knowing one of them explains,
    Var E[R | what it says] ÷ Var R, averaged over the places; `most` is the largest.
    """
    runs = list(all_runs(env))
    chance = np.array([p for _, p in runs])
    traces = [trace for trace, _ in runs]
    outcome = np.array([trace.outcome for trace in traces])
    steps = Steps.from_traces(traces)
    spread = float(chance @ (outcome - chance @ outcome) ** 2)
    rows = []
    for kind in UNITS:
        units = steps.units(kind)
        places = _said(traces, steps, units)
        shown = [_explained(said, chance, outcome) / spread for said in places]
        rows.append(
            {
                "runs of": env.id,
                "unit": kind,
                "listed": len(runs),
                "per_run": float(np.sum(chance[steps.rollout[units.row]])),
                "places": len(places),
                "shows": float(np.mean(shown)) if shown else np.nan,
                "most": max(shown, default=np.nan),
            }
        )
    return rows


def _said(traces: Sequence[Trace], steps: Steps, units: Units) -> list[dict[int, Any]]:
    """For each place, what the unit there says in each run that has one."""
    places: dict[tuple[str, int], dict[int, Any]] = {}
    met: dict[tuple[int, str], int] = {}
    members: dict[int, list[int]] = {}
    for row, unit in enumerate([] if units.of is None else units.of.tolist()):
        members.setdefault(unit, []).append(row)
    for unit, row in enumerate(units.row.tolist()):
        run = int(steps.rollout[row])
        role = "" if units.kind == "team" else str(steps.label("role", row))
        number = met.get((run, role), 0)
        met[run, role] = number + 1
        rows = members.get(unit, [row])
        says = tuple(_text(traces[steps.event[r, 0]], steps, units, unit, r) for r in rows)  # type: ignore[index]
        places.setdefault((role, number), {})[run] = says
    return list(places.values())


def _text(trace: Trace, steps: Steps, units: Units, unit: int, row: int) -> Any:
    """What a unit says: a call its tool and arguments, a message its content, a decision its verb
    and words, a token itself; turns and what they make up, their text.
    """
    act = cast(Act, trace[int(cast(Ints, steps.event)[row, 1])])
    text = act.text or ""
    if units.kind == "token":
        return text.split()[int(units.start[unit])]
    if units.kind == "decision" and units.item[unit] >= 0:
        item = act.items[int(units.item[unit])]
        return item.verb, item.name, text[slice(*item.body)] if item.body else str(item.content)
    event = trace[int(units.seq[unit])] if units.of is None else act
    if isinstance(event, ToolCall):
        return event.tool, bytes(event.arguments_raw or b"")
    return text if event is act else (units.name("receiver", unit), str(trace.content(event)))


def _explained(said: dict[int, Any], chance: Floats, outcome: Floats) -> float:
    """Var E[R | what is said], where a run in which nobody says it is a value of its own."""
    code, texts = groups.encode_labels([said.get(run) for run in range(len(chance))])
    p = groups.total(code, chance, len(texts))
    mean = groups.total(code, chance * outcome, len(texts)) / p
    return float(p @ (mean - chance @ outcome) ** 2)


# ---------------------------------------------------------------------------------------------
# The page


def diffusion(out: Path, quick: bool = False, progress: Progress = silent) -> Page:
    """Signal to noise of uniform credit, and density against visibility of the eight units."""
    seeds = 8 if quick else 64
    lines, small = closed(), listed(seeds)
    teams = progress(TEAMS[: 1 if quick else None], "environments")
    units = [row for name in teams for row in density(make(name))]
    sections = [
        Section(
            "How much of a run's outcome is about one decision",
            "Signal to noise |E g|² ÷ tr Var g of the gradient of a single decision, exact. Every "
            f"decision pays 1 with probability {CHANCE}, else nothing, and the outcome is their "
            "sum. `outcome`: each decision gets the run's outcome against the "
            f"{GROUP - 1} others of its group. `agent`: it gets what its agent's decisions were "
            "worth, exactly. `decision`: what it was worth itself. The outcome's signal falls with "
            "the number of decisions, whoever takes them; the agent's with its own turns alone.",
            lines,
            _ratio_figure(lines),
            "Signal to noise by team size. With one turn each, the agent's is the decision's own.",
        ),
        Section(
            "The outcome against exact credit",
            f"Correlation of R − V(h₀) with seqau, and signal to noise, over every play of {seeds} "
            "random teams whose agents act once each, listed one by one; ± is half a 95 % "
            "interval. T1: nobody reacts. T2: later agents do. seqau are the steps of a "
            "martingale whose sum is R − V(h₀), so over all decisions the correlation is 1/√K.",
            small,
            _listed_figure(small),
            "Signal to noise of the outcome as everybody's credit, by team size.",
        ),
        Section(
            "How many units a run has, and what one of them shows",
            "All runs of one task under policies that choose evenly, listed with their chances, so "
            "exact. `shows`: share of the variance of the outcome that knowing what one unit says "
            "explains, on average over the places that such units have; `most`: at the best place.",
            units,
            _density_figure(units),
            "Units per run across, share of the outcome that one shows up to the best of them.",
        ),
    ]
    return Page(page("Credit diffusion", sections), [*lines, *small, *units])


def _ratio_figure(rows: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        ax = axes[0, 0]
        for colour, turns in enumerate(TURNS):
            held = [row for row in rows if row["turns_each"] == turns]
            for name, style in (("outcome", "-"), ("agent", "--")):
                look = {"linestyle": style, "color": f"C{colour}"}
                label = f"{name}, turns each: {turns}"
                ax.plot([r["agents"] for r in held], [r[name] for r in held], label=label, **look)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xlabel("agents")
        ax.set_ylabel("signal ÷ noise")
        ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return figure(1, 1, draw, height=3.6)


def _listed_figure(rows: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        ax = axes[0, 0]
        agents = [row["agents"] for row in rows]
        for name in ("T1", "T2"):
            values = [row[f"{name}_ratio"] for row in rows]
            ax.errorbar(agents, values, [row[f"{name}_ratio_±"] for row in rows], label=name)
        ax.set_yscale("log")
        ax.set_xlabel("agents")
        ax.set_ylabel("signal ÷ noise")
        ax.legend(fontsize=8, frameon=False)

    return figure(1, 1, draw, height=3.0)


def _density_figure(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["runs of"] for row in rows))

    def draw(axes: Any) -> None:
        for ax, name in zip(axes[0], names, strict=True):
            held = [row for row in rows if row["runs of"] == name and row["per_run"] > 0]
            x, y = [row["per_run"] for row in held], [row["shows"] for row in held]
            reach = [[0.0] * len(held), [row["most"] - row["shows"] for row in held]]
            ax.errorbar(x, y, reach, fmt="o", markersize=4, elinewidth=0.7)
            named: dict[tuple[float, float], list[str]] = {}
            for row in held:
                named.setdefault((row["per_run"], row["shows"]), []).append(row["unit"])
            for place, kinds in named.items():
                ax.annotate(f" {', '.join(kinds)}", place, fontsize=7)
            ax.set_xscale("log")
            ax.set_title(name, fontsize=9)
            ax.set_xlabel("units per run")
        axes[0, 0].set_ylabel("share of the outcome shown")

    return figure(1, len(names), draw, height=3.6)
