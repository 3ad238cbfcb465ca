"""Checks of arguments, each with one clear error."""

import math
from typing import Any

from jax.core import Tracer

from optax_nora._leaves import PyTree


def check_range(
    name: str, value: Any, low: float, high: float = math.inf, *, below: bool = False
) -> None:
    """Raise for a coefficient out of [low, high], or [low, high), unless only a trace knows it."""
    if value is None or callable(value) or isinstance(value, Tracer):
        return
    if not low <= value <= high or (below and value == high):
        end = ")" if below or high == math.inf else "]"
        raise ValueError(f"{name}={value} is out of range: it lies in [{low:g}, {high:g}{end}")


def require_params(params: PyTree) -> None:
    """Raise where parameters are needed and missing."""
    if params is None:
        raise ValueError(
            "params are missing: the step depends on the weights; "
            "call tx.update(updates, state, params)"
        )
