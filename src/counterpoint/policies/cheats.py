"""Teams that do not learn: for each environment an honest one, and some that only look busy.

`HONEST` and `CHEATS` are keyed by the id of an environment; a team is a policy per role. A cheat
says things that are on no menu, which is its point: a menu describes and does not enforce.
"""

from __future__ import annotations

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


def _teams(
    honest: Mapping[str, Script], cheats: Mapping[str, tuple[str, Script]]
) -> tuple[Team, dict[str, Team]]:
    """The honest team, and for each cheat the team in which one role is played by it."""
    team = {role: Scripted(script, "honest") for role, script in honest.items()}
    return team, {
        name: {**team, role: Scripted(script, name)} for name, (role, script) in cheats.items()
    }


_RESEARCH = {
    "coordinator": prefer("ask:new", "answer:3"),
    "researcher": prefer("read:survey", "tell:3"),
}
_LEDGER = {
    "coordinator": prefer("spawn:0", "pass", "ask:0", "stop:lowest", "stop:sum"),
    "researcher": prefer("read", "tell:exact"),
}
_TEAMS = {
    "research-v0": _teams(
        _RESEARCH,
        {
            "pseudo_parallel": ("coordinator", altered(_RESEARCH["coordinator"], _twice)),
            "free_riding": ("researcher", _idle),
            "padding": ("coordinator", altered(_RESEARCH["coordinator"], _padded)),
            "tool_spamming": ("researcher", altered(_RESEARCH["researcher"], _spammed)),
        },
    ),
    "ledger-v0": _teams(
        _LEDGER,
        {
            "pseudo_parallel": (
                "coordinator",
                prefer("spawn:0", "spawn:1", "ask:0+1", "stop:lowest", "stop:sum"),
            ),
            "free_riding": ("researcher", _idle),
            "padding": ("coordinator", altered(_LEDGER["coordinator"], _padded)),
            "tool_spamming": ("researcher", altered(_LEDGER["researcher"], _spammed)),
        },
    ),
}

HONEST: dict[str, Team] = {name: honest for name, (honest, _) in _TEAMS.items()}
"""Environment → the team that reaches its ceiling, with the environment's default options."""

CHEATS: dict[str, dict[str, Team]] = {name: cheats for name, (_, cheats) in _TEAMS.items()}
"""Environment → cheat → team: work handed out that nobody needs, a member who does nothing, words
without use, calls without use.
"""
