"""verl's own registry, advantage step and policy losses on a batch of ours.

Run where verl is installed: `python verl_step.py FOLDER`; prints what it measured as one JSON
object.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from message_game import VOCABULARY, of_responses, played, worth

from counterpoint.credit import estimate, grpo, reinforce, rloo
from counterpoint.losses import clipped_surrogate
from counterpoint.rows import batch_of, load_batch, save_batch
from counterpoint.rows.verl import register
from counterpoint.steps import Steps

warnings.simplefilter("ignore")  # verl warns of engines that are not installed
from verl import DataProto  # noqa: E402
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn  # noqa: E402
from verl.trainer.ppo.ray_trainer import compute_advantage  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

GROUPS, ROLLOUTS = 100, 8
AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
}
"""verl's loss_agg_mode → our aggregation."""


def proto(path: Path) -> DataProto:
    """A written batch as verl's."""
    columns = load_batch(path).columns
    tensors = {k: torch.as_tensor(v) for k, v in columns.items() if v.dtype.kind != "U"}
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={k: v.astype(object) for k, v in columns.items() if v.dtype.kind == "U"},
    )


def main(folder: Path) -> dict[str, float]:
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
    table.requires_grad_()

    def model(ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(table, -1)[ids]

    (exact,) = torch.autograd.grad(worth(model), table)
    traces = played(model, folder / "t.jsonl", groups=GROUPS, rollouts=ROLLOUTS, seed=1)
    steps = Steps.from_traces(traces)
    save_batch(folder / "b.npz", batch_of("verl", steps), rloo(steps))
    out: dict[str, float] = {"rows": len(steps)}

    # Through verl's registry and advantage step, finished credit arrives as it was.
    register(grpo, rloo)
    assert register(grpo, rloo) == ("counterpoint", "counterpoint_grpo", "counterpoint_rloo")
    data = proto(folder / "b.npz")
    given = data.batch.pop("advantages")
    data = compute_advantage(data, adv_estimator="counterpoint")
    arrived, mask = data.batch["advantages"], data.batch["response_mask"]
    out["carried_difference"] = float((arrived - given).abs().max())

    # Its policy loss on them has the gradient of ours, in every aggregation, on and off policy.
    ids, old = data.batch["input_ids"], data.batch["old_log_probs"]
    log = of_responses(model(ids), ids, mask.shape[1])
    moved = of_responses(torch.log_softmax(table + 0.7 * exact / exact.norm(), -1)[ids], ids,
                         mask.shape[1])  # fmt: skip
    vanilla = get_policy_loss_fn("vanilla")
    differences = []
    for now in (log, moved):
        for mode, aggregation in AGGREGATIONS.items():
            config = ActorConfig(
                strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=8, clip_ratio=0.2,
                clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, loss_agg_mode=mode,
            )  # fmt: skip
            theirs, _ = vanilla(old, now, arrived, mask, mode, config)
            ours = clipped_surrogate(
                torch.clamp(now, max=0), torch.clamp(old, max=0), arrived, mask, clip_low=0.2,
                clip_high=0.28, dual_clip=3.0, aggregation=aggregation,
            )  # fmt: skip
            (g,) = torch.autograd.grad(theirs, table, retain_graph=True)
            (h,) = torch.autograd.grad(ours.loss, table, retain_graph=True)
            differences.append(float((g - h).norm() / h.norm()))
    out["relative_difference"] = max(differences)
    clipped = clipped_surrogate(moved.detach(), old, arrived, mask, clip_high=0.28)
    out["clip_fraction_off_policy"] = clipped.clip_fraction

    # And on policy it is the game's exact policy gradient, within sampling error.
    along = []
    config = ActorConfig(
        strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=8, loss_agg_mode="token-mean"
    )
    for group in range(GROUPS):
        on = torch.as_tensor(steps.group == group)
        theirs, _ = vanilla(old[on], log[on], arrived[on], mask[on], "token-mean", config)
        (g,) = torch.autograd.grad(-theirs, table, retain_graph=True)
        along.append(float((g * int(mask[on].sum()) / ROLLOUTS * exact).sum() / exact.norm() ** 2))
    out["along_exact"] = float(np.mean(along))
    out["along_exact_error"] = float(np.std(along, ddof=1) / GROUPS**0.5)

    # Our estimators in its registry, on rewards of verl's own kind: one row is one rollout.
    singles = steps.step == 0
    rewards = torch.zeros(int(singles.sum()), 1)
    rewards[:, 0] = torch.as_tensor(steps.outcome[singles])
    few = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": torch.ones(len(rewards), 1)},
        non_tensors={"uid": steps.group[singles].astype(object)},
    )
    alone = Steps.from_columns(
        group=steps.group[singles], rollout=range(len(rewards)), reward=rewards[:, 0].numpy()
    )
    for name in ("grpo", "rloo"):
        told = compute_advantage(few, adv_estimator=f"counterpoint_{name}").batch["advantages"]
        want = torch.as_tensor(estimate(name, alone).values)
        out[f"{name}_difference"] = float((told[:, 0] - want).abs().max())
        own, _ = get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=few.batch["response_mask"],
            index=few.non_tensor_batch["uid"], config=None,
        )  # fmt: skip
        out[f"{name}_difference_from_verls"] = float((told - own).abs().max())
    assert reinforce(steps).credited.all()
    return out


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
