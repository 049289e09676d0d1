"""Tokens: what a model was fed and wrote, stored with its turn and never encoded again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from counterpoint import Output, Steps, replay, rollout
from counterpoint.harness import rollout as play
from counterpoint.spelling import Refused
from counterpoint.tokens import tokens_of
from little_envs import Doors

FED, SAID = (7, 8, 9), (3, 4)


def speaks(observation, legal, draws):
    """Writes two tokens after a prompt of three, and says the first entry of the menu or opens."""
    text = next(iter(legal.values())) if legal else "open 0"
    fed = [False] * len(FED) + [True] * len(SAID)
    return Output(text, None, FED + SAID, (0.0,) * 3 + (-0.5, -0.25), mask=fed)


def test_the_prompt_is_stored_and_only_what_was_written_counts():
    """An act keeps prompt and answer with a mask: of five stored tokens two are the turn's, whose
    log-probability is that of the two.
    """
    trace = play(Doors(), speaks, groups=1, rollouts=1)[0]
    act = trace.of("act")[0]
    assert (act.token_ids, act.mask) == (FED + SAID, (False,) * 3 + (True,) * 2)
    assert (act.tokens_in, act.tokens_out) == (3, 2)
    steps = Steps.from_traces([trace])
    assert set(steps.n_tokens.tolist()) == {2}
    assert np.allclose(steps.logprob, -0.75)


def test_steps_hold_the_tokens_of_every_row_as_stored():
    """`Steps.tokens` gives each row's ids back, padded on the right where rows differ in length."""
    traces = rollout(Doors(), speaks, groups=1, rollouts=2)
    steps = Steps.from_traces(traces)
    ids, mask, logprobs = steps.tokens.padded()
    assert ids.shape == (len(steps), 5)
    assert (ids == FED + SAID).all()
    assert mask.sum(axis=1).tolist() == [2] * len(steps)
    assert np.allclose(logprobs.sum(axis=1), -0.75)
    one, _, _ = steps.tokens.padded(np.array([1]), pad=-1)
    assert one.tolist() == [list(FED + SAID)]


def test_rows_of_different_length_are_filled_up():
    """Rows of 5, 0 and 2 tokens become a 3 × 5 array whose mask is false off the tokens."""
    base = play(Doors(), speaks, groups=1, rollouts=1)[0].of("act")[0]
    bare = msgspec.structs.replace(base, token_ids=None, logprobs=None, mask=None)
    short = msgspec.structs.replace(base, token_ids=(5, 6), logprobs=None, mask=None)
    tokens = tokens_of([base, bare, short])
    ids, mask, logprobs = tokens.padded(pad=0)
    assert ids.tolist() == [[7, 8, 9, 3, 4], [0] * 5, [5, 6, 0, 0, 0]]
    assert mask.tolist() == [[False] * 3 + [True] * 2, [False] * 5, [True] * 2 + [False] * 3]
    assert np.isnan(logprobs[2, :2]).all()
    assert tokens_of([bare]) is None


def test_a_run_with_stored_prompts_replays_byte_for_byte():
    """The recorded policy gives the mask back, so the re-driven act is the stored one."""
    traces = rollout(Doors(), speaks, groups=2, rollouts=2)
    assert not replay(traces, env=Doors()).diverged


def test_a_mask_of_another_length_is_refused():
    """A mask that does not fit the tokens is named with both lengths."""

    def broken(observation, legal, draws):
        return speaks(observation, legal, draws)._replace(mask=(True,))

    with pytest.raises(Refused, match="5 tokens and 1 entries of a mask"):
        play(Doors(), broken, groups=1, rollouts=1)
