"""rLLM's episodes: one JSON object a line, as `Episode.to_dict` spells it.

An episode is a rollout, with one trajectory for each agent in it, called by its role; a step is a
turn. `advantage` holds one number per token of `response_ids`, which rLLM takes as it is with
`use_precomputed_advantage`. A step has no mask: what others put between an agent's words gets 0.
What rLLM has no word for lies in the step's `info`, under verl's names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from counterpoint.rows import verl
from counterpoint.rows.halves import Halves, halves
from counterpoint.rows.named import OURS, Column, Columns
from counterpoint.spelling import Refused
from counterpoint.tokens import Tokens

ABOUT = "rLLM's episodes of trajectories, as JSON Lines"

TOKENS = (
    *("prompts", "responses", "input_ids", "attention_mask", "position_ids"),
    *("response_mask", "old_log_probs", "token_level_rewards", "advantages"),
)
"""verl's columns that become lists of tokens here."""


def lines(given: Columns) -> Iterator[bytes]:
    """A credited batch in verl's names as episodes, in the order of their first rows.

    Raises:
        Refused: the batch has no stored tokens.
    """
    cut = verl.take(given)
    if cut is None:
        raise Refused("rLLM's steps are lists of token ids, and the batch has none")
    plain = {name: values.tolist() for name, values in given.items() if name not in TOKENS}
    episodes: dict[tuple[Any, Any], list[int]] = {}
    for row, key in enumerate(zip(plain["uid"], plain["traj_uid"], strict=True)):
        episodes.setdefault(key, []).append(row)
    for (task, rollout), rows in episodes.items():
        yield json.dumps(
            {
                "id": f"{quote(str(task), safe='')}:{quote(str(rollout), safe='')}",
                "task": task,
                "is_correct": any(plain[f"{OURS}outcome"][row] > 0 for row in rows),
                "trajectories": list(_trajectories(rows, plain, cut, given["advantages"])),
                "metrics": {},
                "info": {},
            }
        ).encode()


def _trajectories(
    rows: list[int], plain: dict[str, list[Any]], cut: Halves, advantages: Column
) -> Iterator[dict[str, Any]]:
    agents: dict[Any, list[int]] = {}
    for row in sorted(rows, key=plain[f"{OURS}step"].__getitem__):
        agents.setdefault(plain["agent_id"][row], []).append(row)
    for agent, own in agents.items():
        outcome = plain[f"{OURS}outcome"][own[0]]
        yield {
            "uid": f"{plain['traj_uid'][own[0]]}/{agent}",
            "name": str(plain[f"{OURS}role"][own[0]]),
            "task": plain["uid"][own[0]],
            "steps": [_step(row, row == own[-1], plain, cut, advantages) for row in own],
            "reward": outcome if np.isfinite(outcome) else None,
            "info": {},
        }


def _step(
    row: int, last: bool, plain: dict[str, list[Any]], cut: Halves, advantages: Column
) -> dict[str, Any]:
    there, written = cut.response_there[row], cut.written[row]
    logprobs = cut.logprobs[row][there]
    info = {name: _finite(values[row]) for name, values in plain.items()}
    mask = written[there].tolist()
    return {
        "prompt_ids": cut.prompt[row][cut.prompt_there[row]].tolist(),
        "response_ids": cut.response[row][there].tolist(),
        "logprobs": [] if np.isnan(logprobs).any() else logprobs.tolist(),
        "chat_completions": [],
        "observation": None,
        "thought": "",
        "action": None,
        "model_response": "",
        "model_output": None,
        "info": {"row": row, **info} | ({} if all(mask) else {"response_mask": mask}),
        "reward": plain["rewards"][row],
        "done": last,
        "mc_return": info.get("step_rewards") or 0.0,
        "advantage": advantages[row][there].tolist(),
        "weight_version": None,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def columns(texts: Iterable[bytes]) -> dict[str, Column]:
    """The batch that `lines` wrote, in verl's names, its rows in their old order.

    Raises:
        Refused: a line that is none of its episodes, by its number.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for number, text in enumerate(texts, start=1):
        try:
            steps = [step for t in json.loads(text)["trajectories"] for step in t["steps"]]
            found += [(int(step["info"]["row"]), step) for step in steps]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(f"line {number} is no episode that was written here: {error!r}") from None
    try:
        return _columns([step for _, step in sorted(found, key=lambda pair: pair[0])])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"the episodes are none that were written here: {error!r}") from None


def _columns(steps: list[dict[str, Any]]) -> dict[str, Column]:
    names = [name for name in (steps[0]["info"] if steps else ()) if name not in ("row", *TOKENS)]
    out = {name: _column([step["info"][name] for step in steps]) for name in names}
    cut = halves(_tokens(steps))
    there = cut.response_there
    written, advantages = np.zeros_like(there), np.zeros(there.shape)
    said = [step["info"].get("response_mask") or [1] * len(step["response_ids"]) for step in steps]
    written[there] = [on for mask in said for on in mask]
    advantages[there] = [a for step in steps for a in step["advantage"]]
    cut = cut._replace(written=written, logprobs=np.where(written, cut.logprobs, 0.0))
    return out | verl.lay(cut, written) | verl.carried(advantages)


def _column(values: list[Any]) -> Column:
    """Numbers with NaN where there is none, or texts."""
    made: npt.NDArray[Any] = np.array(values)
    return made if made.dtype.kind != "O" else np.array(values, dtype=np.float64)


def _tokens(steps: list[dict[str, Any]]) -> Tokens:
    """Prompts and responses, the latter as if all of them were written."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    begin = [0]
    for step in steps:
        fed, said = step["prompt_ids"], step["response_ids"]
        ids += [*fed, *said]
        mask += [False] * len(fed) + [True] * len(said)
        logprobs += [0.0] * len(fed) + (step["logprobs"] or [float("nan")] * len(said))
        begin.append(len(ids))
    return Tokens(
        np.array(ids, np.int64), np.array(mask, bool), np.array(logprobs), np.array(begin)
    )
