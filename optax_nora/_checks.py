"""Checks of arguments, each with one clear error."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

PyTree = Any


def check_range(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    below: bool = False,
    optional: bool = False,
    schedule: bool = False,
) -> None:
    """Raise for what is no finite number in [low, high], or in [low, high) where ``below``.

    None is ``optional``, a function of the step is a ``schedule``. Of a traced number only the
    shape is known.
    """
    if (optional and value is None) or (schedule and callable(value)):
        return
    kinds = "a number" + " or a schedule" * schedule + " or None" * optional
    if value is None or isinstance(value, str) or np.shape(value) != () or not _is_real(value):
        hint = "; a schedule works for learning rates, beta, momentum and weight_decay alone"
        raise TypeError(f"{name}={value!r} is not {kinds}{hint if callable(value) else ''}")
    if isinstance(value, Tracer):
        return
    if not low <= value <= high or math.isinf(value) or (below and value == high):
        end = ")" if below or high == math.inf else "]"
        raise ValueError(f"{name}={value} is out of range: it lies in [{low:g}, {high:g}{end}")


def check_learning_rate(name: str, value: Any) -> None:
    """Raise for what is no rate; None, or a sign, is asked for where others apply the rate."""
    try:
        check_range(name, value, schedule=True)
    except (TypeError, ValueError) as error:
        if value is None or (isinstance(error, ValueError) and value < 0):
            raise type(error)(
                f"{error}; where something else applies rate and sign, take learning_rate=1.0, "
                "for adam_learning_rate AdamW's rate divided by the other, and chain "
                "optax.scale(-1.0) behind"
            ) from None
        raise


def _is_real(value: Any) -> bool:
    try:
        dtype = jnp.result_type(value)
    except TypeError:
        return False
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def check_moment_dtype(mu_dtype: Any) -> None:
    """Raise for a dtype that no moment can be stored in."""
    if mu_dtype is None:
        return
    try:
        dtype = jnp.dtype(mu_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 2:
        raise ValueError(
            f"mu_dtype={mu_dtype!r} cannot hold a momentum; take float32, bfloat16, float16 or "
            "None, for the parameter's"
        )


def require_params(params: PyTree) -> None:
    """Raise where parameters are needed and missing."""
    if params is None:
        raise ValueError(
            "params are missing: the step depends on the weights; "
            "call tx.update(updates, state, params)"
        )
