"""Claims about batches for trainers: rows come back, and each token gets its turn's credit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields

import msgspec
import numpy as np
import pytest
import torch

from counterpoint.credit import dr_mas, estimate, gigpo, grpo, reinforce, rloo
from counterpoint.formats import export, read
from counterpoint.games import deal, play
from counterpoint.losses import clipped_surrogate, reinforce_loss
from counterpoint.recorder import Recorder
from counterpoint.rows import ROWS, about_path, batch_of, difference, load_batch, save_batch
from counterpoint.rows.halves import halves, joined
from counterpoint.rows.verl import estimator, passed_through, register
from counterpoint.spelling import Refused
from counterpoint.steps import Steps
from counterpoint.tokens import tokens_of
from peers.message_game import VOCABULARY, of_responses, played, worth

SUFFIX = {"verl": ".npz", "trl": ".npz", "rllm": ".jsonl"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Two tasks of three runs: a planner of 2 + 1 tokens, a tool's words between a coder's, and a
    scripted user whose turn nobody trains.
    """
    path = tmp_path_factory.mktemp("rows") / "t.jsonl"
    draws = np.random.default_rng(0)
    with Recorder(path) as recorder:
        for number in range(6):
            with recorder.trace(task_id=f"q:{number % 2}", roles={"p": "planner"}) as run:
                ids = draws.integers(10, 99, 8).tolist()
                no, yes = False, True
                run.act("user", "go", token_ids=ids[:2], trainable=False, logprobs=(-0.1, -0.2))
                run.act("p", "a", anchor=f"s{number % 3}", token_ids=ids[:3], mask=(no, no, yes),
                        logprobs=(0, 0, -0.5), policy_version="7")  # fmt: skip
                said = (no, yes, yes, no, no, yes)[: 5 + number % 2]
                run.act("c", "b", token_ids=ids[2:][: len(said)], mask=said,
                        logprobs=[-0.25 * on for on in said])  # fmt: skip
                run.reward(float(draws.integers(0, 4)))
    return list(read(path))


@pytest.fixture(scope="module")
def steps(traces):
    return Steps.from_traces(traces)


def labels(steps: Steps) -> dict[str, list]:
    """Every column of numbers, flags and labels, the labels as texts."""
    out = {}
    for field in fields(steps):
        values = getattr(steps, field.name)
        if isinstance(values, np.ndarray) and values.ndim == 1:
            texts = steps.names.get(field.name)
            out[field.name] = [
                (None if v != v else v) if texts is None else None if v < 0 else texts[v]
                for v in values.tolist()
            ]
    return out


# ---------------------------------------------------------------------------------------------
# Cutting


def test_a_turn_is_cut_before_the_first_token_that_the_policy_wrote(steps):
    """By hand, on the first run: prompts end at the right, responses begin at the left, and what a
    tool put between a coder's words is response but not written.
    """
    cut = halves(steps.tokens)
    ids = [part.tolist() for part in np.split(steps.tokens.ids, steps.tokens.begin[1:4])]
    assert cut.prompt[:3].tolist() == [[0, 0], ids[1][:2], [0, ids[2][0]]]
    assert cut.prompt_there[:3].tolist() == [[False, False], [True, True], [False, True]]
    assert cut.response[:3].tolist() == [
        [*ids[0], 0, 0, 0], [ids[1][2], 0, 0, 0, 0], [*ids[2][1:], 0]
    ]  # fmt: skip
    assert cut.written[2].tolist() == [True, True, False, False, False]
    assert cut.response_there[2].tolist() == [True, True, True, True, False]
    assert cut.logprobs[1].tolist() == [-0.5, 0, 0, 0, 0]


def test_halves_join_to_what_was_cut(steps):
    """Ids, masks and log-probabilities are those of before, for every length of row."""
    for given, again in zip(steps.tokens, joined(halves(steps.tokens)), strict=True):
        assert np.array_equal(given, again)


@pytest.mark.parametrize("mask", [(False,) * 3, (True,) * 3], ids=["nothing", "everything"])
def test_a_turn_that_wrote_nothing_is_all_prompt(traces, mask):
    """And one that wrote everything is all response; a row without tokens is neither."""
    act = msgspec.structs.replace(traces[0].of("act")[0], token_ids=(5, 6, 7), mask=mask)
    act = msgspec.structs.replace(act, logprobs=None)
    bare = msgspec.structs.replace(act, token_ids=None, mask=None)
    cut = halves(tokens_of([act, bare]))
    wrote = any(mask)
    assert (cut.prompt.shape, cut.response.shape) == ((2, 3 * (not wrote)), (2, 3 * wrote))
    assert np.array_equal(joined(cut).ids, [5, 6, 7])
    assert joined(cut).begin.tolist() == [0, 3, 3]


# ---------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("rows", ROWS)
def test_a_written_batch_comes_back(steps, tmp_path, rows):
    """Steps with every column and token, and advantages to float32, are read back as written."""
    path = tmp_path / f"batch{SUFFIX[rows]}"
    credit = rloo(steps)
    save_batch(path, batch_of(rows, steps), credit)
    again = load_batch(path)
    assert labels(again.steps) == labels(steps)
    trained = halves(steps.tokens).written & steps.mask[:, None]
    assert difference(again, credit) == pytest.approx(0.0, abs=1e-6)
    assert np.allclose(again.columns["advantages"], credit.tokens(trained), atol=1e-6)
    assert np.array_equal(again.steps.tokens.ids, steps.tokens.ids)
    assert np.array_equal(again.steps.tokens.begin, steps.tokens.begin)
    on = steps.mask[np.repeat(np.arange(len(steps)), np.diff(steps.tokens.begin))]
    assert np.array_equal(again.steps.tokens.mask, steps.tokens.mask & on)
    assert np.allclose(again.steps.tokens.logprobs[on], steps.tokens.logprobs[on])
    for method in (gigpo, dr_mas):
        assert np.allclose(method(again.steps).values, method(steps).values, equal_nan=True)


def test_parquet_holds_the_same_batch(steps, tmp_path):
    """The same columns come back from Parquet as from .npz, types and shapes included."""
    batch = batch_of("verl", steps)
    for suffix in ("npz", "parquet"):
        save_batch(tmp_path / f"b-{suffix}.{suffix}", batch, grpo(steps))
    one, other = (load_batch(tmp_path / f"b-{s}.{s}").columns for s in ("npz", "parquet"))
    assert list(one) == list(other)
    for name in one:
        assert np.array_equal(one[name], other[name]) or np.allclose(one[name], other[name])


def test_credit_goes_to_the_written_tokens_of_trainable_rows(steps):
    """Where a tool spoke, where a row is filled up and where nobody is trained stands exactly 0;
    elsewhere the row's own number, which differs from row to row.
    """
    credit = reinforce(steps)
    for rows in ROWS:
        form = ROWS[rows]
        batch = batch_of(rows, steps)
        mask = form.trained(batch.columns)
        held = form.carried(credit.tokens(mask))["advantages"]
        assert (held[mask == 0] == 0).all()
        assert not mask[~steps.mask].any()
        for row in np.flatnonzero(steps.mask):
            assert set(held[row][mask[row] == 1].tolist()) == {np.float32(credit.values[row])}


def test_what_a_batch_has_no_place_for_lies_beside_it(steps, tmp_path):
    """Method, estimand, identification, sample size and the columns left out, as JSON."""
    path = tmp_path / "batch.npz"
    about = {"method": "grpo", "params": {"eps": 0.1}}
    save_batch(path, batch_of("trl", steps), credit := grpo(steps, eps=0.1), about=about)
    told = json.loads(about_path(path).read_text())
    assert told["estimand"] == credit.estimand
    assert told["identified"] == credit.identified
    assert told["diagnostics"]["effective_sample_size"] == 6
    assert (told["method"], told["params"], told["left_out"]) == ("grpo", {"eps": 0.1}, ["event"])
    with pytest.raises(Refused, match="exists"):
        save_batch(path, batch_of("trl", steps), credit)


def test_rllm_episodes_have_the_keys_of_its_classes(steps, tmp_path):
    """One episode for a rollout, one trajectory for an agent under its role, one advantage for
    every token of a response; the id names task and rollout although a task's name has a colon.
    """
    path = tmp_path / "e.jsonl"
    save_batch(path, batch_of("rllm", steps), credit := reinforce(steps))
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(episodes) == steps.n_rollouts
    first = episodes[0]
    assert first["id"].split(":") == ["q%3A0", steps.label("rollout", 0)]
    assert [t["name"] for t in first["trajectories"]] == ["user", "planner", "c"]
    assert all(t["reward"] == steps.outcome[0] for t in first["trajectories"])
    coder = first["trajectories"][2]["steps"][0]
    value = np.float32(credit.values[2])
    assert coder["advantage"] == [value, value, 0.0, 0.0]
    assert coder["info"]["response_mask"] == [True, True, False, False]
    assert len(coder["logprobs"]) == len(coder["response_ids"]) == 4


def test_rllm_rows_keep_their_order_where_agents_alternate(tmp_path):
    """Turns a, b, a are two trajectories there, and three rows in their old order when read."""
    with Recorder(tmp_path / "t.jsonl") as recorder, recorder.trace() as run:
        for agent, token in (("a", 1), ("b", 2), ("a", 3)):
            run.act(agent, token_ids=[0, token], mask=[False, True])
        run.reward(1.0)
    steps = Steps.from_traces(read(tmp_path / "t.jsonl"))
    save_batch(tmp_path / "e.jsonl", batch_of("rllm", steps), reinforce(steps))
    again = load_batch(tmp_path / "e.jsonl").steps
    assert again.tokens.ids.tolist() == [0, 1, 0, 2, 0, 3]
    assert [again.label("agent", row) for row in range(3)] == ["a", "b", "a"]


# ---------------------------------------------------------------------------------------------
# Refusals


def test_rows_without_tokens_are_refused(tmp_path):
    """A game's plays have no tokens, and no trainer can be given rows without them."""
    with pytest.raises(Refused, match="token_ids="):
        batch_of("verl", play(deal("T1"), groups=2, rollouts=2).steps)
    with pytest.raises(Refused, match="there are verl, trl, rllm"):
        batch_of("tlr", play(deal("T1"), groups=2, rollouts=2).steps)


@pytest.mark.parametrize(("rows", "name"), [("verl", "b.jsonl"), ("rllm", "b.npz")])
def test_a_file_of_another_kind_is_refused(steps, tmp_path, rows, name):
    """Nothing is written, not even the file beside it."""
    with pytest.raises(Refused, match="is written as"):
        save_batch(tmp_path / name, batch_of(rows, steps), grpo(steps))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"trajectories": [{"steps": [{"info": {}}]}]}', '{"trajectories": 3}',
     '{"trajectories": [{"steps": [{"info": {"row": 0}}]}]}'],
)  # fmt: skip
def test_hostile_episodes_are_one_sentence(tmp_path, text):
    """A file that nobody here wrote is refused, and says so."""
    (tmp_path / "e.jsonl").write_text(text + "\n")
    with pytest.raises(Refused, match=r"written here|no column"):
        load_batch(tmp_path / "e.jsonl")


def test_a_batch_that_lost_half_of_its_tokens_is_refused(steps, tmp_path):
    """A batch with responses but without their attention is no batch."""
    columns = batch_of("verl", steps).columns
    del columns["attention_mask"]
    np.savez(tmp_path / "b.npz", **columns)
    with pytest.raises(Refused, match="no batch for verl"):
        load_batch(tmp_path / "b.npz")


def test_missing_log_probabilities_leave_their_column_out(traces, tmp_path):
    """Old log-probabilities are given for all tokens or for none: a made-up 0 would be a ratio."""
    bare = [
        msgspec.structs.replace(act, logprobs=None) if act.agent == "c" else act
        for act in traces[0].of("act")
    ]
    cut = halves(tokens_of(bare))
    for rows in ROWS:
        laid = ROWS[rows].lay(cut, cut.written)
        assert not {"old_log_probs", "old_per_token_logps"} & set(laid)
    assert np.isnan(ROWS["verl"].take(laid).logprobs).sum() == cut.written.sum()


def test_tokens_and_mask_of_other_lengths_are_one_sentence(traces):
    """A trace whose act holds three tokens and a mask of one is named with its event."""
    act = msgspec.structs.replace(traces[0].of("act")[1], mask=(True,))
    with pytest.raises(Refused, match=rf"event {act.seq}: 3 token_ids stand beside a mask of 1"):
        tokens_of([act])


# ---------------------------------------------------------------------------------------------
# verl's registry, as verl calls it


def test_verl_estimators_give_our_credit(steps):
    """Called with tensors and group labels as verl does, GRPO gives what `grpo` gives for rollouts
    of one row; and finished credit passes through, but for what is masked.
    """
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
    rewards = torch.zeros(5, 3)
    rewards[torch.arange(5), [1, 0, 2, 1, 0]] = torch.tensor([1.0, 0.0, 0.5, 0.0, 9.0])
    index = np.array(["a", "a", "b", "b", "b"], dtype=object)
    given = {"token_level_rewards": rewards, "response_mask": mask, "index": index}
    advantages, returns = estimator(grpo)(**given, config=None)
    want = estimate("grpo", Steps.from_columns(group=["a", "a", "b", "b"], rollout=range(4),
                                               reward=[1, 0, 0.5, 0]))  # fmt: skip
    assert np.allclose(advantages[:4].numpy(), want.values[:, None] * mask[:4].numpy(), atol=1e-6)
    assert not advantages[4].any()
    assert advantages.dtype == torch.float32
    assert returns is advantages
    through, _ = passed_through(**given, config=None)
    assert torch.equal(through, rewards * mask)


def test_registering_without_verl_says_what_to_install():
    """The name of the library, and where it is needed."""
    with pytest.raises(Refused, match="install verl"):
        register(grpo)


# ---------------------------------------------------------------------------------------------
# The gradient that a trainer takes on these rows


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["verl", "trl"])
def test_the_gradient_on_the_rows_is_the_exact_policy_gradient(tmp_path, rows):
    """−∇ of the loss on a written batch, ÷ rollouts, is ∇ of the expected reward of the message
    game within sampling error: 200 groups of 8, leave-one-out baseline, each group's gradient one
    sample; no coordinate further than 4 standard errors, and half of them within 1.
    """
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
    table.requires_grad_()

    def model(ids):
        return torch.log_softmax(table, -1)[ids]

    (exact,) = torch.autograd.grad(worth(model), table)
    traces = played(model, tmp_path / "t.jsonl", groups=200, rollouts=8, seed=1)
    steps = Steps.from_traces(traces)
    save_batch(tmp_path / "b.npz", batch_of(rows, steps), rloo(steps))
    given = {k: torch.as_tensor(v) for k, v in load_batch(tmp_path / "b.npz").columns.items()
             if v.dtype.kind != "U"}  # fmt: skip
    if rows == "verl":
        ids, mask, old = given["input_ids"], given["response_mask"], given["old_log_probs"]
    else:
        ids = torch.hstack([given["prompt_ids"], given["completion_ids"]])
        mask, old = given["tool_mask"], given["old_per_token_logps"]
    log = of_responses(model(ids), ids, mask.shape[1])
    assert torch.allclose(log[mask == 1], old[mask == 1], atol=1e-5)
    group = torch.as_tensor(steps.group)
    each = []
    for g in range(steps.n_groups):
        on = group == g
        loss = clipped_surrogate(
            log[on], old[on], given["advantages"][on], mask[on], aggregation="constant", divisor=8
        )
        (slope,) = torch.autograd.grad(-loss.loss, table, retain_graph=True)
        each.append(slope)
    mean, error = torch.stack(each).mean(0), torch.stack(each).std(0) / len(each) ** 0.5
    used = error > 1e-9
    z = ((mean - exact)[used] / error[used]).abs()
    assert z.max() < 4
    assert (z < 1).double().mean() > 0.5
    assert torch.nn.functional.cosine_similarity(mean.ravel(), exact.ravel(), dim=0) > 0.98


def test_flipping_one_agents_credit_flips_only_its_tokens(tmp_path, steps):
    """The gradient in each token's log-probability: of one agent's tokens it changes its sign, of
    all others it stays, and off the mask it is exactly 0.
    """
    credit = reinforce(steps)
    coder = np.array([steps.label("agent", row) == "c" for row in range(len(steps))])
    slopes = []
    for sign in (1.0, -1.0):
        values = np.where(coder, sign * credit.values, credit.values)
        batch = batch_of("trl", steps)
        mask = torch.as_tensor(batch.columns["tool_mask"])
        log = torch.full(mask.shape, -1.0, dtype=torch.float64).requires_grad_()
        A = torch.as_tensor(values)[:, None] * mask
        reinforce_loss(log, A, mask).loss.backward()
        slopes.append(log.grad)
    own = torch.as_tensor(coder)[:, None] & (mask == 1)
    assert torch.equal(slopes[0][own], -slopes[1][own])
    assert slopes[0][own].any()
    assert torch.equal(slopes[0][~own], slopes[1][~own])
    assert not slopes[0][mask == 0].any()


# ---------------------------------------------------------------------------------------------
# The commands


def said(*arguments: object) -> tuple[int, str]:
    """How a command ended, and what it said to people."""
    done = subprocess.run(
        [sys.executable, "-m", "counterpoint.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_the_commands_write_batches_and_episodes(traces, steps, tmp_path):
    """`credit --rows` writes what `save_batch` does, `export --credit` what `export` does, each
    with a file beside it; two methods and an existing file are one sentence each.
    """
    runs, batch, held = (tmp_path / n for n in ("t.jsonl", "b.npz", "c.jsonl"))
    runs.write_bytes(b"".join(export("counterpoint", traces)))
    assert said("credit", "rloo", runs, "--rows", "trl", "-o", batch)[0] == 0
    assert difference(load_batch(batch), rloo(steps)) == pytest.approx(0, abs=1e-6)
    assert json.loads(about_path(batch).read_text())["method"] == "rloo"
    for wrong in (["rloo,grpo", "-o", tmp_path / "x.npz"], ["rloo", "-o", batch]):
        method, *rest = wrong
        code, told = said("credit", method, runs, "--rows", "trl", *rest)
        assert (code, told.count("\n"), "Traceback" in told) == (1, 1, False)
    assert said("credit", "rloo", runs, "-o", held)[0] == 0
    episodes = tmp_path / "e.jsonl"
    assert said("export", "verifiers", runs, "--credit", held, "-o", episodes)[0] == 0
    assert json.loads(about_path(episodes).read_text())["estimand"] == rloo(steps).estimand
    first = json.loads(episodes.read_text().splitlines()[0])["traces"][0]
    given = [node.get("advantages") for node in first["nodes"] if node["sampled"]]
    value = rloo(steps).values
    assert given == [None, [value[1]], [value[2]] * 2]
