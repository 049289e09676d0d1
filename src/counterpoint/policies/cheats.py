"""Teams that do not learn: for each environment an honest one, and some that only look busy.

`HONEST` and `CHEATS` are keyed by the id of an environment; a team is a policy per role. A cheat
says things that are on no menu, which is its point: a menu describes and does not enforce.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from counterpoint.policies import Menu, Observation
from counterpoint.policies.scripted import Scripted

Team: TypeAlias = dict[str, Scripted]
Script: TypeAlias = Callable[[Observation, Menu], str]


def prefer(*labels: str) -> Script:
    """A script that takes the first of these labels that the menu has, else the menu's last."""

    def script(observation: Observation, legal: Menu) -> str:
        menu = legal or {"": "none"}
        taken = [menu[label] for label in labels if label in menu]
        return taken[0] if taken else list(menu.values())[-1]

    return script


def altered(script: Script, line: Callable[[str], str]) -> Script:
    """A script that says what another one says, each line of it through `line`."""
    return lambda observation, legal: "\n".join(map(line, script(observation, legal).split("\n")))


def _twice(line: str) -> str:
    """Hand the same work over twice."""
    return f"{line}\n{line}" if line.startswith("delegate ") else line


def _padded(line: str) -> str:
    """Say a lot along with a delegation, before and in it."""
    if not line.startswith("delegate "):
        return line
    to = line.removeprefix("delegate ").split(":")[0]
    chat = f"message {to}: as ever it is a great pleasure to be working with you on this one"
    return "\n".join([chat] * 4) + f"\n{line}, please, if you would be so kind, and many thanks"


def _spammed(line: str) -> str:
    """Make every call five times."""
    return "\n".join([line] * 5) if line.startswith("call ") else line


def _idle(observation: Observation, legal: Menu) -> str:
    """Return nothing, and praise it."""
    return "quality 5\nreturn: nothing"


def _made_up(observation: Observation, legal: Menu) -> str:
    """Return figures that nobody read, and praise them."""
    topics = re.findall(r'"topic": "(\w+)"', dict(legal or {}).get("read:survey", ""))
    return "quality 5\nreturn: " + "; ".join(f"survey of the {topic}: 50" for topic in topics)


def _waved_through(observation: Observation, legal: Menu) -> str:
    """Accept a draft unchecked, and praise the review."""
    return "quality 5\nreturn: accept"


def _done(observation: Observation, legal: Menu) -> str:
    """Say that it is done, whatever it is."""
    return "return: done"


def _by_anchor(says: Mapping[str, str], *labels: str) -> Script:
    """A script that prefers what is said for the anchor it stands at, then these labels."""
    return lambda seen, legal: prefer(says.get(seen.anchor or "", ""), *labels)(seen, legal)


def _teams(
    honest: Mapping[str, Script], cheats: Mapping[str, Mapping[str, Script]]
) -> tuple[Team, dict[str, Team]]:
    """The honest team, and for each cheat the team in which some roles are played by it."""
    team = {role: Scripted(script, "honest") for role, script in honest.items()}
    return team, {
        name: {**team, **{role: Scripted(script, name) for role, script in roles.items()}}
        for name, roles in cheats.items()
    }


_RESEARCH = {
    "coordinator": prefer("ask:new", "answer:3"),
    "researcher": prefer("read:survey", "tell:3"),
}
_REVIEW = {
    "coordinator": prefer("ask:new", "review", "again", "answer:2"),
    "researcher": prefer("read:survey", "tell:2"),
    "reviewer": _by_anchor({"check:does not hold": "back:2"}, "check", "accept:2"),
}
_PLAN = {
    "planner": _by_anchor(
        {
            **{f"{kept} total": f"plan:keep_{kept}+sum" for kept in ("even", "odd")},
            **{f"{kept} largest": f"plan:keep_{kept}+max" for kept in ("even", "odd")},
            "told:stuck": "again",
        },
        "submit",
    ),
    "executor": _by_anchor({"ran 2 of 2": "tell:done"}, "run", "tell:stuck"),
}
_LEDGER = {
    "coordinator": prefer("spawn:0", "pass", "ask:0", "stop:lowest", "stop:sum"),
    "researcher": prefer("read", "tell:exact"),
}
_TEAMS = {
    "research-v0": _teams(
        _RESEARCH,
        {
            "pseudo_parallel": {"coordinator": altered(_RESEARCH["coordinator"], _twice)},
            "free_riding": {"researcher": _idle},
            "padding": {"coordinator": altered(_RESEARCH["coordinator"], _padded)},
            "tool_spamming": {"researcher": altered(_RESEARCH["researcher"], _spammed)},
            "colluding": {"coordinator": prefer("ask:new", "answer:5"), "researcher": _made_up},
        },
    ),
    "research-review-v0": _teams(
        _REVIEW,
        {
            "pseudo_parallel": {"coordinator": altered(_REVIEW["coordinator"], _twice)},
            "free_riding": {"reviewer": _waved_through},
            "padding": {"coordinator": altered(_REVIEW["coordinator"], _padded)},
            "tool_spamming": {"researcher": altered(_REVIEW["researcher"], _spammed)},
            "colluding": {"researcher": _made_up, "reviewer": _waved_through},
        },
    ),
    "ledger-v0": _teams(
        _LEDGER,
        {
            "pseudo_parallel": {
                "coordinator": prefer("spawn:0", "spawn:1", "ask:0+1", "stop:lowest", "stop:sum")
            },
            "free_riding": {"researcher": _idle},
            "padding": {"coordinator": altered(_LEDGER["coordinator"], _padded)},
            "tool_spamming": {"researcher": altered(_LEDGER["researcher"], _spammed)},
            "colluding": {
                "coordinator": altered(_LEDGER["coordinator"], _padded),
                "researcher": _idle,
            },
        },
    ),
    "plan-execute-v0": _teams(
        _PLAN,
        {
            "pseudo_parallel": {"planner": altered(_PLAN["planner"], _twice)},
            "free_riding": {"executor": _done},
            "padding": {"planner": altered(_PLAN["planner"], _padded)},
            "tool_spamming": {"executor": altered(_PLAN["executor"], _spammed)},
            "colluding": {"planner": altered(_PLAN["planner"], _padded), "executor": _done},
        },
    ),
}

HONEST: dict[str, Team] = {name: honest for name, (honest, _) in _TEAMS.items()}
"""Environment → the team that reaches its ceiling, with the environment's default options."""

CHEATS: dict[str, dict[str, Team]] = {name: cheats for name, (_, cheats) in _TEAMS.items()}
"""Environment → cheat → team: work handed out that nobody needs, a member who does nothing, words
without use, calls without use, and members who cover up for each other.
"""
