"""What writes token by token: a policy over any model that turns ids into logits.

From a menu it writes under constraint: at every token only what goes on with some entry is
possible, so the log-probabilities of the written tokens add up to that of the entry, as they are
recorded, and each token that was a choice has a gradient of its own. (Normalising whole entries
over the menu would leave no such number for a token.) Without a menu it writes what its tokenizer
lets it, until it ends its turn or a limit does.

Chance comes from `draws` alone: one number a menu, one a token. Log-probabilities are rounded to
six decimals before anything is drawn by them. A batch adds up in another order than a prompt by
itself; in float64 that difference is lost in the rounding, but for one number in some 10⁹.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from pathlib import Path
from typing import Any, NamedTuple, cast
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.groups import Bools, Floats, Ints
from counterpoint.policies import Menu, Observation, Output
from counterpoint.policies.tokenizer import Branches, Ids, Tokenizer, branches
from counterpoint.save import whole_file
from counterpoint.schema import Act, Item, Trace
from counterpoint.spelling import CANONICAL, Refused, digest_of
from counterpoint.streams import Draws

State = Mapping[str, Tensor]
"""Name → the numbers that are trained."""

DIGITS = 6
_KEPT = 4096
_CELLS = 1 << 21


class Net(nn.Module):
    """Base class of the models: ids in, one vector a token out, logits from the vectors.

    Attributes:
        context: the most ids that fit.
        exact: whether it computes in float64, so that prompts may be answered together.
        settings: what it was built with, and what is not trained, by digest.
    """

    context: int
    exact: bool
    settings: Mapping[str, Any]

    def read(self, ids: Tensor, at: Tensor, seen: Tensor, past: Any) -> tuple[Tensor, Any]:
        """One vector for each of `ids`, and the memory that the next ones are read with.

        Args:
            ids: (rows, n) int64.
            at: (rows, n) int64, the place of each in its text.
            seen: (rows or 1, n, m + n) bool, which of the m remembered and n new ids each sees.
            past: memory of m ids, None for none.
        """
        raise NotImplementedError

    def logits(self, vectors: Tensor) -> Tensor:
        """(n, ids) float, from (n, width)."""
        raise NotImplementedError

    def pick(self, past: Any, rows: Tensor) -> Any:
        """The memory of some rows, each as often as it is named."""
        raise NotImplementedError


class _Weighed(NamedTuple):
    """A menu under one prompt: its turns, the log-probability of each of their tokens, of each turn
    its probability.
    """

    turns: tuple[Ids, ...]
    logprobs: tuple[tuple[float, ...], ...]
    p: list[float]


class Writer:
    """A policy that writes tokens, and learns.

    Its numbers change by `install` alone, which counts a new version. Every act stores all ids that
    were fed and written, `mask` True on what was written, with a log-probability for each.

    Args:
        net: the model.
        tokenizer: text to ids and back.
        limit: the most tokens of a turn without a menu.
        says: role → verb and names, such as ("message", "executor"): what a turn that this role
            writes freely is taken for, as a whole. Turns of other roles are read by the grammar.
        updates: how many times it was updated before.

    Attributes:
        target: how a header names it: by the file it was loaded from, else by its digest.
        version: number of updates, and the digest.
        params_digest: digest of the trained numbers and the settings.

    Raises:
        Refused: a limit under 1, or no room for a prompt beside it.
    """

    deterministic = True
    trainable = True
    kind = "writer"

    def __init__(
        self,
        net: Net,
        tokenizer: Tokenizer,
        *,
        limit: int = 16,
        says: Mapping[str, Sequence[str]] | None = None,
        updates: int = 0,
    ) -> None:
        if not 1 <= limit < net.context:
            raise Refused(f"limit is {limit}; 1 to {net.context - 1} tokens fit beside a prompt")
        self.net = net
        self.tokenizer = tokenizer
        self.limit = limit
        self.says = {role: tuple(names) for role, names in (says or {}).items()}
        self._free = np.array(tokenizer.free)
        self._trees: dict[Ids, Branches] = {}
        self._settle(updates)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, in JSON's types."""
        says = {role: list(names) for role, names in self.says.items()}
        return {**self.net.settings, "limit": self.limit, "says": says}

    def parameters(self) -> list[nn.Parameter]:
        """The trained numbers, for an optimiser; when they have moved, say `install`."""
        return [p for p in self.net.parameters() if p.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """A copy of the trained numbers."""
        return {name: p.detach().clone() for name, p in self._trained()}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.net.named_parameters() if p.requires_grad)

    def install(self, state: State | None = None) -> None:
        """Act by other numbers from now on: the next version.

        Args:
            state: as `state` gives it; None for those that an optimiser has put there.

        Raises:
            Refused: other names or shapes, or a number that is not finite; nothing has changed.
        """
        if state is not None:
            self._put(state)
        self._settle(self._updates + 1)

    def _put(self, state: State) -> None:
        held = dict(self._trained())
        if {n: p.shape for n, p in held.items()} != {n: t.shape for n, t in state.items()}:
            raise Refused(f"these are not the numbers of a {self.kind} of this size")
        _check_finite(state)
        with torch.no_grad():
            for name, p in held.items():
                p.copy_(state[name])

    def _settle(self, updates: int) -> None:
        state = {name: p.detach() for name, p in self._trained()}
        _check_finite(state)
        self._updates = updates
        self._weighed: dict[Ids, _Weighed] = {}
        parts = [CANONICAL.encode(self.settings)]
        for name in sorted(state):
            parts += [name.encode(), state[name].contiguous().numpy().tobytes()]
        self.params_digest = digest_of(b"\n".join(parts)).hex()
        self.version = f"{updates}-{self.params_digest[:8]}"
        self.target = f"{self.kind}:{self.params_digest}"

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write settings and trained numbers as .npz, whole or not at all.

        Raises:
            Refused: the file exists and `force` is not set, or it cannot be written.
        """
        settings = CANONICAL.encode({"version": self._updates, **self.settings})
        held = {name: values.numpy() for name, values in self.state().items()}
        with whole_file(path, force=force) as file:
            np.savez(file, settings=np.frombuffer(settings, np.uint8), **held)  # type: ignore[arg-type]

    def restore(self, path: str | Path) -> None:
        """Act as what was saved, by its version too.

        Raises:
            Refused: no such file, nothing of this kind in it, or one that was built otherwise.
        """
        updates, settings, state = saved(path, self.kind)
        if settings != self.settings:
            raise Refused(f"{path} holds a {self.kind} that was built otherwise than this one")
        self._put(state)
        self._settle(updates)

    # -- acting ----------------------------------------------------------------------------------

    def __call__(self, observation: Observation, legal: Menu, draws: Draws) -> Output:
        """One turn."""
        return self.many([observation], [legal], [draws])[0]

    def many(
        self, observations: Sequence[Observation], legals: Sequence[Menu], draws: Sequence[Draws]
    ) -> list[Output]:
        """Turns of several runs at once; each is what a call of its own would give."""
        prompts = [self._prompt(o, m) for o, m in zip(observations, legals, strict=True)]
        self._weigh([p for p, menu in zip(prompts, legals, strict=True) if menu])
        free = [row for row, menu in enumerate(legals) if not menu]
        written = self._write([prompts[row] for row in free], [draws[row] for row in free])
        freely = dict(zip(free, written, strict=True))
        return [
            self._spoken(prompts[row], observation.role, *freely[row])
            if row in freely
            else self._chosen(prompts[row], legals[row] or {}, draws[row])
            for row, observation in enumerate(observations)
        ]

    def probs(self, observation: Observation, legal: Menu) -> Floats:
        """(entries,) the probability of each entry of the menu. Raises Refused without a menu."""
        if not legal:
            raise Refused(f"{observation.agent} has no menu here whose entries have probabilities")
        prompt = self._prompt(observation, legal)
        self._weigh([prompt])
        return np.array(self._weighed[prompt].p)

    def _prompt(self, observation: Observation, legal: Menu) -> Ids:
        room = max(map(len, map(self.tokenizer.turn, (legal or {}).values())), default=self.limit)
        return self.tokenizer.prompt(observation, legal, self.net.context - room)

    def _chosen(self, prompt: Ids, legal: Mapping[str, str], draws: Draws) -> Output:
        weighed = self._weighed[prompt]
        entry = draws.choice(weighed.p)
        text = list(legal.values())[entry]
        return _output(text, prompt, weighed.turns[entry], weighed.logprobs[entry])

    def _spoken(self, prompt: Ids, role: str, ids: list[int], logprobs: list[float]) -> Output:
        text = self.tokenizer.decode(ids[:-1] if ids[-1] == self.tokenizer.marks.end else ids)
        output = _output(text, prompt, ids, logprobs)
        if role not in self.says:
            return output
        verb, *names = self.says[role]
        said = Item(verb=verb, name=tuple(names), body=(0, len(text)))  # type: ignore[arg-type]
        return output._replace(items=(said,))

    # -- the model -------------------------------------------------------------------------------

    def _tree(self, prompt: Ids) -> Branches:
        """The turns that a prompt's menu offers."""
        if len(self._trees) > _KEPT:
            self._trees.clear()
        if prompt not in self._trees:
            self._trees[prompt] = branches(self.tokenizer.menu(prompt))
        return self._trees[prompt]

    def _weigh(self, prompts: Iterable[Ids]) -> None:
        """Look the menus of some prompts up, those that were not yet, several at once."""
        if len(self._weighed) > _KEPT:
            self._weighed.clear()
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._weighed]
        for part in self._parts(new):
            trees = [self._tree(prompt) for prompt in part]
            self._weighed.update(zip(part, _weighed(self.net, part, trees), strict=True))

    def _parts(self, prompts: Sequence[Ids]) -> Iterator[Sequence[Ids]]:
        longest = max(map(len, prompts), default=1)
        step = max(1, _CELLS // longest**2) if self.net.exact else 1
        return (prompts[at : at + step] for at in range(0, len(prompts), step))

    def _write(
        self, prompts: Sequence[Ids], draws: Sequence[Draws]
    ) -> list[tuple[list[int], list[float]]]:
        """Write freely after each of some prompts: ids and log-probabilities."""
        out: list[tuple[list[int], list[float]]] = []
        for part in self._parts(prompts):
            chance = draws[len(out) : len(out) + len(part)]
            out += _written(self, part, chance)
        return out

    # -- learning --------------------------------------------------------------------------------

    def logprobs_of(self, ids: Ints, mask: Bools) -> Tensor:
        """Log-probability of every written token under the numbers as they are now.

        Args:
            ids: (rows, tokens) int, prompt and turn of an act each, filled up on the right.
            mask: (rows, tokens) bool, True where the policy wrote the token; one stretch a row.

        Returns:
            (rows, tokens) float with a gradient; 0 off the mask, and 0 where a menu left one token.

        Raises:
            Refused: other shapes, a written token without a prompt before it, or one that could not
                have been written there.
        """
        ids, mask = np.asarray(ids), np.asarray(mask, dtype=bool)
        if ids.shape != mask.shape or ids.ndim != 2:
            raise Refused(f"ids have shape {ids.shape} and the mask {mask.shape}: (rows, tokens)")
        width = int(np.flatnonzero(mask.any(0)).max(initial=0)) + 1
        rows, back = np.unique(
            np.where(mask, -1 - ids, ids)[:, :width], axis=0, return_inverse=True
        )
        once = self._logprobs(np.where(rows < 0, -1 - rows, rows), rows < 0)
        wide = nn.functional.pad(once, (0, ids.shape[1] - width))
        return wide[_tensor(back.reshape(-1))]

    def _logprobs(self, ids: Ints, mask: Bools) -> Tensor:
        at, allowed = self._choices(ids, mask)
        fed = _tensor(np.ascontiguousarray(ids))
        n = ids.shape[1]
        seen = torch.ones(1, n, n, dtype=torch.bool).tril()
        vectors, _ = self.net.read(fed, torch.arange(n).expand(len(ids), n), seen, None)
        row, place = _tensor(at).unbind(1)
        logits = self.net.logits(vectors[row, place - 1])
        logits = logits.masked_fill(~_tensor(allowed), -math.inf)
        chosen = torch.log_softmax(logits, -1).gather(1, fed[row, place][:, None])[:, 0]
        return torch.zeros(ids.shape, dtype=chosen.dtype).index_put((row, place), chosen)

    def _choices(self, ids: Ints, mask: Bools) -> tuple[Ints, Bools]:
        """(n, 2) row and place of the tokens that were a choice, (n, ids) what it was between."""
        places: list[tuple[int, int]] = []
        allowed: list[Ints] = []
        for row in range(len(ids)):
            where = np.flatnonzero(mask[row])
            if not len(where):
                continue
            first, line = int(where[0]), ids[row].tolist()
            tree = self._tree(tuple(line[:first])) if first else None
            for place in where.tolist():
                among = self._free[place == first :]  # a turn does not end before it began
                if tree is not None and tree.turns:
                    among = np.array(tree.choices.get(tuple(line[first:place]), [line[place]]))
                if not first or line[place] not in among:
                    raise Refused(f"row {row} holds a token at {place} that nobody could write")
                if len(among) > 1:
                    places.append((row, place))
                    allowed.append(among)
        open_to = np.zeros((len(places), self.tokenizer.size), dtype=bool)
        for line_, among in zip(open_to, allowed, strict=True):
            line_[among] = True
        return np.array(places, dtype=np.int64).reshape(-1, 2), open_to

    def drift(self, traces: Iterable[Trace]) -> int:
        """How many acts hold other ids than their text has now; those that were stored win."""
        acts = [cast(Act, act) for trace in traces for act in trace.of("act")]
        count = 0
        for act in acts:
            ids = tuple(compress(act.token_ids or (), act.mask or repeat(True)))
            turn = self.tokenizer.turn(act.text or "")
            count += bool(ids) and ids not in (turn, turn[:-1])
        return count


def saved(path: str | Path, kind: str) -> tuple[int, dict[str, Any], State]:
    """What `save` wrote: number of updates, settings, trained numbers. Nothing in it is run.

    Raises:
        Refused: no such file, or nothing of the kind in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        settings = msgspec.json.decode(held.pop("settings").tobytes(), type=dict[str, Any])
        return int(settings.pop("version")), settings, {n: _tensor(v) for n, v in held.items()}
    except (
        OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, msgspec.MsgspecError,
    ) as error:  # fmt: skip
        raise Refused(f"{path} holds no {kind}: {error}") from None


def _output(text: str, prompt: Ids, ids: Sequence[int], logprobs: Sequence[float]) -> Output:
    fed = len(prompt)
    return Output(
        text,
        token_ids=(*prompt, *ids),
        logprobs=(*[0.0] * fed, *logprobs),
        mask=(*[False] * fed, *[True] * len(ids)),
    )


_tensor = torch.from_numpy


def _check_finite(state: State) -> None:
    for name, values in state.items():
        if not bool(torch.isfinite(values).all()):
            raise Refused(f"{name} holds a number that is not finite; the last version stands")


def _rounded(logits: Floats) -> Floats:
    """(n, k) log-probabilities of the columns, to `DIGITS` decimals and never above 0."""
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    out: Floats = np.minimum(np.round(logp, DIGITS), 0.0)
    return out


@torch.no_grad()
def _weighed(net: Net, prompts: Sequence[Ids], trees: Sequence[Branches]) -> list[_Weighed]:
    """Every turn of every menu in one pass: a prompt is followed by the tree of its turns, in which
    a token sees the prompt and what it goes on from.
    """
    size = max(len(p) + len(t.nodes) for p, t in zip(prompts, trees, strict=True))
    ids = np.zeros((len(prompts), size), dtype=np.int64)
    at, seen = np.zeros_like(ids), np.tile(np.eye(size, dtype=bool), (len(prompts), 1, 1))
    asked: list[tuple[int, int]] = []
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        n = len(prompt)
        ids[row, :n], at[row, :n] = prompt, np.arange(n)
        seen[row, :n, :n] = np.tri(n, dtype=bool)
        place = {(): n - 1, **{node: n + k for k, node in enumerate(tree.nodes)}}
        for node in tree.nodes:
            here = place[node]
            ids[row, here], at[row, here] = node[-1], n - 1 + len(node)
            seen[row, here] |= seen[row, place[node[:-1]]]
        asked += [(row, place[begun]) for begun in tree.choices]
    vectors, _ = net.read(_tensor(ids), _tensor(at), _tensor(seen), None)
    rows, places = np.array(asked, dtype=np.int64).reshape(-1, 2).T
    logits = iter(net.logits(vectors[rows, places]).double().numpy())
    return [_turns(tree, logits) for tree in trees]


def _turns(tree: Branches, logits: Iterator[Floats]) -> _Weighed:
    """The log-probabilities of a menu's turns, from the logits at each of its choices."""
    held: dict[tuple[Ids, int], float] = {}
    for begun, tokens in tree.choices.items():
        logp = _rounded(next(logits)[None, list(tokens)])[0]
        held.update({(begun, t): p for t, p in zip(tokens, logp.tolist(), strict=True)})
    each = tuple(
        tuple(held.get((turn[:k], turn[k]), 0.0) for k in range(len(turn))) for turn in tree.turns
    )
    weight = [math.exp(math.fsum(logprobs)) for logprobs in each]
    total = math.fsum(weight)
    return _Weighed(tree.turns, each, [w / total for w in weight])


@torch.no_grad()
def _written(
    writer: Writer, prompts: Sequence[Ids], draws: Sequence[Draws]
) -> list[tuple[list[int], list[float]]]:
    """Write freely after prompts, one token of each at a time; each prompt is read once."""
    net, free, end = writer.net, writer._free, writer.tokenizer.marks.end
    once = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
    back = torch.tensor([once[prompt] for prompt in prompts])
    size = max(map(len, once))
    ids, at = np.zeros((len(once), size), dtype=np.int64), np.zeros((len(once), size), np.int64)
    there = np.zeros((len(once), size), dtype=bool)
    for prompt, row in once.items():  # on the right, so that all go on at one place
        ids[row, -len(prompt) :], at[row, -len(prompt) :] = prompt, np.arange(len(prompt))
        there[row, -len(prompt) :] = True
    seen = (np.tri(size, dtype=bool) & there[:, None]) | np.eye(size, dtype=bool)
    vectors, past = net.read(_tensor(ids), _tensor(at), _tensor(seen), None)
    vectors, past = vectors[back], net.pick(past, back)
    open_, place = _tensor(there)[back], _tensor(at)[back, -1]
    out: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    going = list(range(len(prompts)))
    while True:
        logits = net.logits(vectors[:, -1])[:, free].double().numpy()
        if not out[0][0]:
            logits[:, 0] = -math.inf  # a turn does not end before it began
        logp = _rounded(logits)
        edges = np.cumsum(np.exp(logp), 1)
        for row in going:
            column = int(np.searchsorted(edges[row], draws[row].random() * edges[row, -1], "right"))
            out[row][0].append(int(free[column]))
            out[row][1].append(float(logp[row, column]))
        going = [r for r in going if out[r][0][-1] != end and len(out[r][0]) < writer.limit]
        if not going:
            return out
        new = torch.tensor([[written[-1]] for written, _ in out])
        place, open_ = place + 1, torch.cat([open_, torch.ones(len(out), 1, dtype=torch.bool)], 1)
        vectors, past = net.read(new, place[:, None], open_[:, None], past)
