"""The scales: functions from Steps to Credit, the table of them, and what checks them."""

from counterpoint.credit.grouped import grpo
from counterpoint.credit.table import METHODS, Method, estimate, method

__all__ = ["METHODS", "Method", "estimate", "grpo", "method"]
