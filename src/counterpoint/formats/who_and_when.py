"""Who&When: failed multi-agent runs, with the agent and the step that people blamed.

A run is an object with a `history` of entries, each one turn. Its agent stands in `name`, or in the
other half of the data in `role`, where `Orchestrator (thought)` and `Orchestrator (-> WebSurfer)`
are one agent: the first an act that nobody else sees, the second an act and a message to the one
named. Every entry is one act (but for a human's, which is a message), so that a labelled step *k*
is the act with `source_id` k; an entry without an addressee is a message to all others.

A terminal's output is an act too, since people label it as a step, but untrusted and not trainable:
no policy wrote it. The labels and everything else about the run are kept in the header's `meta`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from counterpoint.formats import intake as take
from counterpoint.formats.chat import Chat, Said, agent_id, anchors, roles_of
from counterpoint.formats.intake import Intake, Rejected, Tally
from counterpoint.schema import Item, Trace
from counterpoint.spelling import Payload, thaw

ABOUT = "Who&When's failed multi-agent runs, with the blamed agent and step"

HUMAN = "human"
EXECUTORS = frozenset({"Computer_terminal", "ComputerTerminal"})
"""Speakers that run code and write nothing of their own."""

_OUTCOMES = ("is_correct", "is_corrected")


class Entry(NamedTuple):
    """One turn: who took it, what it says, and to whom (None: all others; empty: nobody)."""

    agent: str
    content: Payload
    to: tuple[str, ...] | None


def _entry(raw: Any, place: str, tally: Tally) -> Entry:
    given = take.object_at(raw, place)
    name = take.name_at(given.get("name"), f"{place}.name")
    role = take.name_at(given.get("role"), f"{place}.role")
    content = given.get("content")
    if not isinstance(content, str | None):
        raise Rejected(f"{place}.content", f"is {take.kind_of(content)}, not a text")
    if name is None and role is None:
        raise Rejected(place, "names nobody who could have spoken, in `name` or in `role`")
    to = None
    if name is None:
        name, to = _speaker(role or "")
    else:
        tally.dropped.update(["role"] if role is not None else [])
    tally.dropped.update(take.clean(key) for key in given.keys() - {"name", "role", "content"})
    return Entry(_agent(name), take.payload_at(content, f"{place}.content"), to)


def _agent(name: str) -> str:
    return name if name == HUMAN else agent_id(name)


def _speaker(role: str) -> tuple[str, tuple[str, ...] | None]:
    """Split `Orchestrator (-> WebSurfer)` into the agent and whom it addresses."""
    name, found, rest = role.partition(" (")
    if not found or not name or not rest.endswith(")"):
        return role, None
    arrow, _, receiver = rest[:-1].partition("-> ")
    return name, () if arrow or not receiver else (_agent(receiver),)


def to_trace(run: Any, intake: Intake) -> Trace:
    """Turn one run into a trace. Raises Rejected if it has no history."""
    about = take.object_at(run, "run")
    if "history" not in about:
        raise Rejected("run", "has no `history`")
    history = take.list_at(about["history"], "history")
    intake.tally.records += len(history)
    entries = intake.kept(history, "history", _entry)
    named = [name for _, e in entries for name in (e.agent, *(e.to or ()))]
    participants = {name: name for name in named}
    chat = Chat(intake, tuple(participants))
    keys = anchors(intake.anchor, [Said("turn", e.agent, e.content) for _, e in entries])
    prompts = _prompts(about)
    acts = {}
    for (i, entry), key in zip(entries, keys, strict=True):
        if entry.agent == HUMAN:
            chat.speak(HUMAN, chat.others(HUMAN), entry.content)
        else:
            prompt = take.payload_at(prompts.pop(entry.agent, None), "system_prompt")
            acts[i] = _turn(chat, entry, str(i), chat.observe(entry.agent, key, prompt))
    _check_label(about, [(i, e.agent) for i, e in entries], acts, intake)
    _score(about, chat, intake)
    rest = {k: v for k, v in about.items() if k not in ("history", *_OUTCOMES)}
    if isinstance(rest.get("system_prompt"), dict):
        rest["system_prompt"] = prompts or None
    task = intake.optional(take.name_at, about, "question_ID")
    return take.finish(
        chat.events, intake, roles_of(participants), meta=intake.notes(rest), task_id=task
    )


def _prompts(about: dict[str, Any]) -> dict[str, Any]:
    """System prompts by agent; each is what its agent's first observation says."""
    prompts = about.get("system_prompt")
    return dict(prompts) if isinstance(prompts, dict) else {}


def _turn(chat: Chat, entry: Entry, step: str, observed: int) -> int:
    """One act, and its message unless it is a thought; returns the act's seq."""
    executed = entry.agent in EXECUTORS
    to = chat.others(entry.agent) if entry.to is None else entry.to
    span = (0, len(thaw(entry.content) or ""))
    item = Item(verb="message", name=to, span=span) if to else Item(verb="none")
    act = chat.act(
        entry.agent,
        observed,
        entry.content,
        [item],
        source_id=step,
        trainable=not executed,
        trust="untrusted" if executed else "unknown",
    )
    if to:
        chat.send(act, 0, to, span, "untrusted" if executed else "unknown")
    return act


def _score(about: dict[str, Any], chat: Chat, intake: Intake) -> None:
    """The outcome, 1 or 0, if the run says whether its answer was right."""
    for key in _OUTCOMES:
        if isinstance(correct := about.get(key), bool):
            causes, checked = take.everything(chat.events), {"verifiable": "checked_fact"}
            take.score(chat.events, intake, causes, float(correct), source=key, **checked)
            return
        if correct is not None:
            intake.report("V02", f"{key} is {take.kind_of(correct)}, not true or false", key)


def _check_label(
    about: dict[str, Any], speakers: list[tuple[int, str]], acts: dict[int, int], intake: Intake
) -> None:
    """W02: people blamed an agent for a step that it did not take."""
    agent, step = about.get("mistake_agent"), str(about.get("mistake_step", "")).strip()
    if not isinstance(agent, str) or not step:
        return
    at = int(step) if step.isascii() and step.isdigit() and len(step) < 10 else -1
    speaker = dict(speakers).get(at)
    if speaker == _agent(take.clean(agent)):
        return
    found = "which the history does not have" if speaker is None else f"where {speaker} speaks"
    message = f"the label blames {agent} at step {step[:40]}, {found}"
    intake.report("W02", message, "mistake_agent", acts.get(at))
