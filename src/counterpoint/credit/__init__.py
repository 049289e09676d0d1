"""The scales: functions from Steps to Credit, the table of them, and what checks them."""

from counterpoint.credit.agreement import Agreement, score
from counterpoint.credit.anchored import gigpo
from counterpoint.credit.clipping import ppo_ratio
from counterpoint.credit.contract import check_credit_method
from counterpoint.credit.critic import gae
from counterpoint.credit.grouped import grpo
from counterpoint.credit.returns import reinforce
from counterpoint.credit.table import METHODS, Method, estimate, method, parameters

__all__ = [
    "METHODS",
    "Agreement",
    "Method",
    "check_credit_method",
    "estimate",
    "gae",
    "gigpo",
    "grpo",
    "method",
    "parameters",
    "ppo_ratio",
    "reinforce",
    "score",
]
