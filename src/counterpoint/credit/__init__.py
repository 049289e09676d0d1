"""The scales: functions from Steps to Credit, the table of them, and what checks them."""

from counterpoint.credit.account import Account, price
from counterpoint.credit.agreement import Agreement, score
from counterpoint.credit.anchored import gigpo
from counterpoint.credit.blame import blame
from counterpoint.credit.cad import cad_grpo
from counterpoint.credit.clipping import ppo_ratio
from counterpoint.credit.contract import check_credit_method
from counterpoint.credit.cosac import cosac
from counterpoint.credit.critic import gae
from counterpoint.credit.folded import fold_grpo
from counterpoint.credit.fusion import fusion
from counterpoint.credit.grouped import grpo, rloo
from counterpoint.credit.hierarchy import hiper
from counterpoint.credit.hindsight import hcapo
from counterpoint.credit.identify import Unidentified, identify
from counterpoint.credit.orchestration import aggregate, communicate, delegate, spawn, stop
from counterpoint.credit.replayed import at_grpo, c3, coma, loo, treemem
from counterpoint.credit.replayed_contract import check_replay
from counterpoint.credit.replayed_shapley import shapley
from counterpoint.credit.replayed_teams import ccpo, sharp
from counterpoint.credit.returns import reinforce, reinforce_pp
from counterpoint.credit.stacking import stack
from counterpoint.credit.table import METHODS, Method, estimate, method, parameters
from counterpoint.credit.teams import dr_mas, m_grpo
from counterpoint.credit.turnwise import grpo_process, magrpo

__all__ = [
    "METHODS",
    "Account",
    "Agreement",
    "Method",
    "Unidentified",
    "aggregate",
    "at_grpo",
    "blame",
    "c3",
    "cad_grpo",
    "ccpo",
    "check_credit_method",
    "check_replay",
    "coma",
    "communicate",
    "cosac",
    "delegate",
    "dr_mas",
    "estimate",
    "fold_grpo",
    "fusion",
    "gae",
    "gigpo",
    "grpo",
    "grpo_process",
    "hcapo",
    "hiper",
    "identify",
    "loo",
    "m_grpo",
    "magrpo",
    "method",
    "parameters",
    "ppo_ratio",
    "price",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "score",
    "shapley",
    "sharp",
    "spawn",
    "stack",
    "stop",
    "treemem",
]
