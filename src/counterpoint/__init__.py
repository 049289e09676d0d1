"""Counterpoint: who earned the reward, in a run of a team of agents."""

from counterpoint.credit import (
    METHODS,
    cad_grpo,
    check_credit_method,
    check_replay,
    dr_mas,
    estimate,
    fold_grpo,
    gae,
    gigpo,
    grpo,
    grpo_process,
    hiper,
    m_grpo,
    magrpo,
    ppo_ratio,
    reinforce,
    reinforce_pp,
    rloo,
    score,
    stack,
)
from counterpoint.envs import Amount, Env, make, tool
from counterpoint.formats import read
from counterpoint.harness import rollout
from counterpoint.ledger import Credit
from counterpoint.policies import Output
from counterpoint.policies.tabular import Softmax
from counterpoint.recorder import Recorder
from counterpoint.redrive import check_env, replay
from counterpoint.schema import Trace
from counterpoint.steps import Steps
from counterpoint.training import update
from counterpoint.world import fold

__all__ = [
    "METHODS",
    "Amount",
    "Credit",
    "Env",
    "Output",
    "Recorder",
    "Softmax",
    "Steps",
    "Trace",
    "cad_grpo",
    "check_credit_method",
    "check_env",
    "check_replay",
    "dr_mas",
    "estimate",
    "fold",
    "fold_grpo",
    "gae",
    "gigpo",
    "grpo",
    "grpo_process",
    "hiper",
    "m_grpo",
    "magrpo",
    "make",
    "ppo_ratio",
    "read",
    "reinforce",
    "reinforce_pp",
    "replay",
    "rloo",
    "rollout",
    "score",
    "stack",
    "tool",
    "update",
]
