"""What every study is asked with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[Iterable[Any], str], Iterable[Any]]
"""Passes items on and shows that work is going on, under a label."""


def silent(items: Iterable[Any], label: str) -> Iterable[Any]:
    """Shows nothing."""
    return items
