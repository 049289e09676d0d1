"""From what an agent reads to token ids and back: the prompt, its menu, words from a fixed list.

Everything that a turn depends on stands in its ids. A menu is part of the prompt, behind a mark
that no text can spell, so the ids alone say which turns could have been written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from counterpoint.policies import Menu, Observation, Shown
from counterpoint.schema import Act, Observe, Trace
from counterpoint.spelling import Refused

Ids: TypeAlias = tuple[int, ...]


class Marks(NamedTuple):
    """What stands around the parts of a prompt, as ids.

    Attributes:
        hear, heard: before and after another's turn.
        say, said: before and after a turn of the agent's own; `end` closes what it writes.
        menu, choose: before and after the menu; the last id of `menu` occurs nowhere else.
        either: one id between two entries of the menu.
    """

    hear: Ids
    heard: Ids
    say: Ids
    said: Ids
    menu: Ids
    choose: Ids
    either: int
    end: int


class Tokenizer:
    """Base class: how a prompt is put together. A subclass turns text into ids and back.

    Attributes:
        marks: what stands around the parts of a prompt.
        size: how many ids there are.
        free: the ids that may be written where no menu is given, the end of a turn among them.
    """

    marks: Marks
    size: int
    free: Ids

    def encode(self, text: str) -> Ids:
        """The ids of a text, none of them a mark."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of what was written."""
        raise NotImplementedError

    def begin(self, observation: Observation) -> Ids:
        """What a prompt begins with."""
        raise NotImplementedError

    def heard(self, turn: Shown) -> Ids:
        """Another's turn, between its marks."""
        return (*self.marks.hear, *self.encode(turn.text), *self.marks.heard)

    def turn(self, text: str) -> Ids:
        """A whole turn as it would be written, its end included."""
        return (*self.encode(text), self.marks.end)

    def prompt(self, observation: Observation, legal: Menu, most: int) -> Ids:
        """What the model is fed: role, all turns that the agent has before its eyes, the menu.

        Its own earlier turns stand there by the ids that were stored when it wrote them, whatever
        their text would encode to now. Of a prompt of more than `most` ids the last ones are fed.

        Raises:
            Refused: the menu alone has more than `most` ids.
        """
        ids = list(self.begin(observation))
        for turn in observation.messages():
            ids += self._own(turn) if turn.role == "assistant" else self.heard(turn)
        asked = self._asked(legal)
        if len(asked) > most:
            raise Refused(
                f"the menu of {observation.agent} takes {len(asked)} tokens, and {most} are the "
                "most that fit; let the policy have a larger context"
            )
        return (*ids, *asked)[-most:]

    def _own(self, turn: Shown) -> Ids:
        written = turn.tokens or self.turn(turn.text)
        closed = written if written[-1] == self.marks.end else (*written, self.marks.end)
        return (*self.marks.say, *closed, *self.marks.said)

    def _asked(self, legal: Menu) -> Ids:
        """The menu, if there is one, and the mark after which the agent writes."""
        if not legal:
            return self.marks.say
        ids = list(self.marks.menu)
        for number, text in enumerate(legal.values()):
            ids += [self.marks.either] if number else []
            ids += self.encode(text)
        return (*ids, *self.marks.choose, *self.marks.say)

    def menu(self, prompt: Ids) -> tuple[Ids, ...]:
        """The turns that the menu at the end of a prompt offers, read from the ids; () if none."""
        mark = self.marks.menu[-1]
        if mark not in prompt:
            return ()
        after = len(prompt) - prompt[::-1].index(mark)
        entries: list[list[int]] = [[]]
        for token in prompt[after : -len((*self.marks.choose, *self.marks.say))]:
            if token == self.marks.either:
                entries.append([])
            else:
                entries[-1].append(token)
        return tuple((*entry, self.marks.end) for entry in entries)


class Branches(NamedTuple):
    """Turns that share their beginnings, as a tree.

    Attributes:
        turns: the turns.
        choices: beginning → the tokens that may come next, where there is more than one.
        nodes: the beginnings that have to be read to know all choices, shorter ones first.
    """

    turns: tuple[Ids, ...]
    choices: dict[Ids, Ids]
    nodes: tuple[Ids, ...]


def branches(turns: tuple[Ids, ...]) -> Branches:
    """The tree of some turns; one that is there twice counts once."""
    following: dict[Ids, dict[int, None]] = {}
    for turn in turns:
        for place, token in enumerate(turn):
            following.setdefault(turn[:place], {})[token] = None
    choices = {begun: tuple(sorted(next_)) for begun, next_ in following.items() if len(next_) > 1}
    read = {begun[:length] for begun in choices for length in range(1, len(begun) + 1)}
    return Branches(turns, choices, tuple(sorted(read, key=lambda begun: (len(begun), begun))))


# ---------------------------------------------------------------------------------------------
# Words

_WORD = re.compile(r" ?\w+| ?[^\w\s]|\s")
"""A word or a sign, with the blank before it; every text is a sequence of these."""

_BLOCK = re.compile(r"<<from ([^,\n]*, \w+), ([0-9a-f]{8})\n(.*)\n\2>>", re.DOTALL)
_HEAR, _FROM, _SAY, _MENU, _EITHER, _END, FIRST_BYTE = range(1, 8)
_FIRST_WORD = FIRST_BYTE + 256


class Words(Tokenizer):
    """Whole words, each with the blank before it; a word that is not on the list is its bytes.

    Bytes are read, and written only where a menu asks for them: what is written freely is words.
    A block of another's words needs no fence here, since no text spells a mark.

    Args:
        words: the list, such as `words_in` gives; the order decides the ids.
        writes: the words that may be written freely; None for the whole list.

    Raises:
        Refused: a word that is there twice or would be read as several; a word to write that is
            not on the list.
    """

    marks = Marks((_HEAR,), (), (_SAY,), (), (_MENU,), (), _EITHER, _END)

    def __init__(self, words: Sequence[str], writes: Sequence[str] | None = None) -> None:
        for word in words:
            if _WORD.fullmatch(word) is None:
                raise Refused(f"{word!r:.40} is no word: one, with at most one blank before it")
        self.words = tuple(words)
        self.writes = None if writes is None else tuple(writes)
        self._ids = {word: _FIRST_WORD + place for place, word in enumerate(words)}
        if len(self._ids) != len(self.words):
            twice = next(word for word, n in Counter(words).items() if n > 1)
            raise Refused(f"{twice!r:.40} is twice among the words")
        self.size = _FIRST_WORD + len(self.words)
        chosen = self.words if self.writes is None else self.writes
        if odd := [word for word in chosen if word not in self._ids]:
            raise Refused(f"{odd[0]!r:.40} is to be written and is not among the words")
        self.free = (_END, *(self._ids[word] for word in chosen))
        self.encode = lru_cache(maxsize=4096)(self._encoded)  # type: ignore[method-assign]

    def _encoded(self, text: str) -> Ids:
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = self._ids.get(word)
            if known is not None:
                ids.append(known)
            else:
                ids += [FIRST_BYTE + byte for byte in word.encode("utf-8", "surrogatepass")]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The words, joined."""
        return "".join(self.words[i - _FIRST_WORD] for i in ids if i >= _FIRST_WORD)

    def begin(self, observation: Observation) -> Ids:
        """The role, so that one model can play several."""
        return self.encode(observation.role)

    def heard(self, turn: Shown) -> Ids:
        """Another's turn: its source and trust between marks, then its words."""
        block = _BLOCK.fullmatch(turn.text)
        if block is None:
            return super().heard(turn)
        return (_FROM, *self.encode(block[1]), _HEAR, *self.encode(block[3]))


def words_in(traces: Iterable[Trace], most: int = 2000) -> tuple[str, ...]:
    """The words of what agents were told, could say and said, the most frequent `most` of them.

    The same traces give the same list, the more frequent first, equals in alphabetical order.
    """
    counts: Counter[str] = Counter()
    for trace in traces:
        for text in _texts(trace):
            counts.update(_WORD.findall(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(sorted(ranked[:most]))


def _texts(trace: Trace) -> Iterator[str]:
    for name, role in ((agent.id, agent.role) for agent in trace.header.agents):
        yield from (f"{name},", role or "")
    for event in trace.events:
        if isinstance(event, Act):
            yield event.text or ""
        elif isinstance(event, Observe):
            yield event.content if isinstance(event.content, str) else ""
            yield from (text for _, text in event.legal or ())
