"""Updates of models: the gradient on stored tokens, against autograd, algebra and exact values."""

import numpy as np
import pytest
import torch

from counterpoint import Softmax, Steps, make, rloo, rollout, train, update
from counterpoint.harness import header_of
from counterpoint.ledger import Credit
from counterpoint.policies.torch_transformer import Transformer
from counterpoint.redrive import value_of
from counterpoint.schema import Trace
from counterpoint.spelling import Refused
from counterpoint.training import cast_for, read_curve
from little_envs import Doors

WORDS = (
    "scout",
    "leader",
    "message",
    " leader",
    "open",
    " door",
    "call",
    "0",
    "1",
    "2",
    " 0",
    " 1",
    " 2",
)


def small(seed=0, **sizes):
    """A transformer of a few numbers that are not what they were at birth, so that turns differ."""
    model = Transformer(WORDS, width=8, layers=1, heads=2, context=256, seed=seed, **sizes)
    draws = torch.Generator().manual_seed(seed)
    state = {name: 0.5 * torch.randn(p.shape, generator=draws, dtype=p.dtype)
             for name, p in model.state().items()}  # fmt: skip
    model.install(state)
    return model


def played(model, groups=2, rollouts=4, seed=1):
    traces = rollout(Doors(), model, groups=groups, rollouts=rollouts, seed=seed)
    return Steps.from_traces(traces)


def moved(model, before, lr):
    """The step ÷ lr, all numbers in one row."""
    return torch.cat([(p - before[n]).reshape(-1) / lr for n, p in model.state().items()])


def earned(steps, seed=2):
    return Credit(np.random.default_rng(seed).normal(size=len(steps)), estimand="outcome")


def by_autograd(model, steps, credit, loss):
    """Minus the gradient of `loss(log π of tokens, A, old, mask)` ÷ groups, written out here."""
    ids, mask, old = steps.tokens.padded()
    logp = model.logprobs_of(ids, mask)
    A = torch.from_numpy(credit.values)[:, None]
    total = loss(logp, A, torch.from_numpy(old), torch.from_numpy(mask)) / steps.n_groups
    gradients = torch.autograd.grad(total, model.parameters())
    return -torch.cat([g.reshape(-1) for g in gradients]), float(total.detach())


def surrogate(logp, A, old, mask):
    ratio = torch.exp(logp - old)
    return -torch.where(mask, torch.minimum(A * ratio, A * ratio.clamp(0.95, 1.1)), 0.0).sum()


LOSSES = {
    "reinforce": ({}, lambda logp, A, old, mask: -(A * logp).sum()),
    "clip": ({"loss": "clip", "clip_low": 0.05, "clip_high": 0.1}, surrogate),
    "entropy": ({"entropy": 0.3}, lambda logp, A, old, mask:
                -(A * logp).sum() + 0.15 * logp.sum(1).square().sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_down_the_gradient_of_the_loss_on_the_stored_tokens(name):
    """Of every loss, against autograd over the formula; the rows are of a version that is gone."""
    rule, formula = LOSSES[name]
    steps = played(small())
    model = small()
    if name == "clip":  # so that ratios differ from 1
        other = small(seed=4).state()
        model.install({n: 0.9 * p + 0.1 * other[n] for n, p in model.state().items()})
    credit, before = earned(steps), model.state()
    expected, total = by_autograd(model, steps, credit, formula)
    told = update(model, steps, credit, lr=0.01, **{"stale": "use", **rule})
    assert torch.allclose(moved(model, before, 0.01), expected, atol=1e-9)
    assert told["loss"] == pytest.approx(total, abs=1e-9)
    assert told["gradient_norm"] == pytest.approx(float(expected.norm()), rel=1e-9)
    if name == "clip":
        assert 0 < told["clip_fraction"] < 1


def test_kl_pulls_towards_the_reference():
    """Without advantages the step is half the squared gap's, and none where both are one."""
    steps, held = played(small()), small(seed=3)
    model, before = small(), small().state()
    ids, mask, _ = steps.tokens.padded()
    ref = held.logprobs_of(ids, mask).sum(1).detach()

    def formula(logp, A, old, mask):
        return 0.5 * 0.35 * (logp.sum(1) - ref).square().sum()

    nothing = Credit(np.zeros(len(steps)), estimand="outcome")
    expected, _ = by_autograd(model, steps, nothing, formula)
    told = update(model, steps, nothing, lr=0.01, reference=held, kl=0.35)
    assert torch.allclose(moved(model, before, 0.01), expected, atol=1e-9)
    turn = model_turn(small(), steps)
    assert told["kl"] == pytest.approx(float((turn - ref).mean()), abs=1e-9)
    same = small()
    update(same, steps, nothing, lr=0.01, reference=small(), kl=0.35)
    assert same.version == small().version


def model_turn(model, steps):
    ids, mask, _ = steps.tokens.padded()
    return model.logprobs_of(ids, mask).sum(1).detach()


def test_masked_tokens_and_uncredited_rows_move_nothing():
    """What the model was fed has no gradient of its own, and a row with NaN is not there."""
    steps = played(small())
    values = np.where(np.arange(len(steps)) % 2 == 0, 1.0, np.nan)
    credit = Credit(values, estimand="outcome")
    one, other = small(), small()
    update(one, steps, credit, lr=0.1)
    ids, mask, _ = steps.tokens.padded(np.flatnonzero(~np.isnan(values)))
    loss = -other.logprobs_of(ids, mask).sum() / steps.n_groups
    loss.backward()
    for (name, p), q in zip(one.state().items(), other.parameters(), strict=True):
        assert torch.allclose(p, q.detach() - 0.1 * q.grad, atol=1e-12), name


@pytest.mark.slow
def test_parts_add_up(monkeypatch):
    """A batch that goes through in pieces of one row gives the step of the whole."""
    steps = played(small())
    whole, parts = small(), small()
    update(whole, steps, earned(steps), lr=0.1, loss="clip")
    monkeypatch.setattr("counterpoint.training.torch_updates.MOST_TOKENS", 1)
    update(parts, steps, earned(steps), lr=0.1, loss="clip")
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)


@pytest.mark.slow
def test_adam_goes_the_way_of_torch_and_lr_is_put_into_it():
    """Two updates with one optimiser are two of its steps on the same gradients."""
    steps, model, own = played(small()), small(), small()
    credit = earned(steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=123.0)
    theirs = torch.optim.Adam(own.parameters(), lr=0.02)
    for _ in range(2):
        update(model, steps, credit, lr=0.02, stale="use", optimizer=optimizer)
        ids, mask, _ = steps.tokens.padded()
        theirs.zero_grad()
        A = torch.from_numpy(credit.values)[:, None]
        (-(A * own.logprobs_of(ids, mask)).sum() / steps.n_groups).backward()
        theirs.step()
    for p, q in zip(model.parameters(), own.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-12)
    assert model.version.startswith("3-")  # one of `small`, two of these


BROKEN = {
    "an infinite advantage": ({"lr": 0.01}, np.inf, "in epoch 0, from trace {}; nothing"),
    "a step out of all numbers": ({"lr": 1e300, "loss": "clip", "epochs": 2}, 1.0, "in epoch 1,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_loss_that_is_no_number_leaves_numbers_and_moments(name):
    """At once, or after a step: a sentence with the epoch, and model and Adam as before."""
    rule, value, sentence = BROKEN[name]
    steps, model = played(small()), small()
    optimizer = torch.optim.Adam(model.parameters())
    update(model, steps, earned(steps), lr=0.01, optimizer=optimizer)
    version, before = model.version, model.state()
    moments = {k: v["exp_avg"].clone() for k, v in optimizer.state_dict()["state"].items()}
    bad = Credit(np.where(np.arange(len(steps)) == 4, value, 1.0), estimand="outcome")
    with pytest.raises(Refused, match=sentence.format(steps.label("rollout", 4))):
        update(model, steps, bad, stale="use", optimizer=optimizer, **rule)
    assert model.version == version
    assert all(torch.equal(p, before[n]) for n, p in model.state().items())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[k]["exp_avg"], v) for k, v in moments.items())


def test_a_model_and_a_table_learn_beside_each_other():
    """One role each; their gradients have one length together."""
    team = {"scout": small(), "leader": Softmax()}
    steps = Steps.from_traces(rollout(Doors(), team, groups=3, rollouts=4, seed=1))
    told = update(team, steps, earned(steps), lr=0.1)
    alone = []
    for role in team:
        again = {"scout": small(), "leader": Softmax()}
        alone.append(update({role: again[role]}, steps, earned(steps), lr=0.1)["gradient_norm"])
    assert told["gradient_norm"] == pytest.approx(np.hypot(*alone))
    assert (team["scout"].version[0], team["leader"].version[0]) == ("2", "1")


@pytest.mark.slow
def test_the_mean_step_is_the_exact_policy_gradient_within_its_error():
    """RLOO over 20 batches of one task, against the slope of its exact value, which is listed
    run by run: in each of ten directions within four standard errors.
    """
    env, h, rng = Doors(), 1e-4, np.random.default_rng(0)
    start = small().state()
    directions = [
        {n: torch.from_numpy(rng.normal(size=p.shape)) for n, p in start.items()} for _ in range(10)
    ]

    def worth(shift, direction):
        model = small()
        model.install({n: p + shift * direction[n] for n, p in start.items()})
        team = dict.fromkeys(env.roles, model)
        header = header_of(env, team, group=0, rollout=0, seed=7)
        return value_of(Trace(header, ()), env, team)

    exact = np.array([(worth(h, d) - worth(-h, d)) / (2 * h) for d in directions])
    traces = rollout(env, small(), groups=1, rollouts=640, seed=7)
    found = []
    for batch in range(20):
        steps = Steps.from_traces(traces[batch * 32 : batch * 32 + 32])
        model = small()
        update(model, steps, rloo(steps), lr=1e-3)
        step = {n: (p - start[n]) / 1e-3 / 32 for n, p in model.state().items()}
        found.append([float(sum((step[n] * d[n]).sum() for n in step)) for d in directions])
    mean, error = np.mean(found, 0), np.std(found, 0, ddof=1) / np.sqrt(20)
    assert np.all(np.abs(mean - exact) < 4 * error)
    assert np.sum(mean * exact) / np.linalg.norm(mean) / np.linalg.norm(exact) > 0.9


# ---------------------------------------------------------------------------------------------
# The loop


@pytest.mark.slow
def test_a_run_of_models_goes_on_bit_for_bit(tmp_path):
    """Numbers, moments and curve, two steps and two more against four; apart, with Adam."""
    rule = {"groups": 2, "rollouts": 4, "lr": 0.01, "optimizer": "adam", "seed": 3}

    def run(folder, steps, **more):
        team = cast_for(Doors(), small(), shared=False)
        return train(Doors(), team, "rloo", steps=steps, out=folder, **rule, **more)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    assert run(tmp_path / "parts", 4, resume=True) == whole
    assert read_curve(tmp_path / "parts") == whole
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            twin = tmp_path / "parts" / path.relative_to(tmp_path / "whole")
            assert twin.read_bytes() == path.read_bytes()


def test_what_a_model_cannot_learn_from_is_refused():
    """Rows without tokens; a table as its reference; an optimiser for nobody."""
    steps = Steps.from_traces(rollout(Doors(), Softmax(), groups=1, rollouts=2))
    zero = Credit(np.zeros(len(steps)), estimand="outcome")
    with pytest.raises(Refused, match="the acts hold no token ids"):
        update(small(), steps, zero, lr=0.1, stale="use")
    with pytest.raises(Refused, match="held to a model, not to a Softmax"):
        update(small(), played(small()), earned(played(small())), lr=0.1, reference=Softmax(), kl=1)
    with pytest.raises(Refused, match="none of the policies that learn is a model"):
        train(make("ledger-v0"), Softmax(), "rloo", steps=1, lr=0.1, optimizer="adam")
