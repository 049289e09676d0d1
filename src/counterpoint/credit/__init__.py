"""The scales: functions from Steps to Credit, the table of them, and what checks them."""

from counterpoint.credit.agreement import Agreement, score
from counterpoint.credit.anchored import gigpo
from counterpoint.credit.clipping import ppo_ratio
from counterpoint.credit.contract import check_credit_method
from counterpoint.credit.critic import gae
from counterpoint.credit.folded import fold_grpo
from counterpoint.credit.grouped import grpo, rloo
from counterpoint.credit.hierarchy import hiper
from counterpoint.credit.returns import reinforce, reinforce_pp
from counterpoint.credit.stacking import stack
from counterpoint.credit.table import METHODS, Method, estimate, method, parameters
from counterpoint.credit.teams import dr_mas, m_grpo
from counterpoint.credit.turnwise import grpo_process, magrpo

__all__ = [
    "METHODS",
    "Agreement",
    "Method",
    "check_credit_method",
    "dr_mas",
    "estimate",
    "fold_grpo",
    "gae",
    "gigpo",
    "grpo",
    "grpo_process",
    "hiper",
    "m_grpo",
    "magrpo",
    "method",
    "parameters",
    "ppo_ratio",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "score",
    "stack",
]
