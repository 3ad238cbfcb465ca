"""Checks of arguments, each with one clear error."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

PyTree = Any

LARGEST = float(np.finfo(np.float32).max)  # a coefficient is no more: kernels have float32


def check_range(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = LARGEST,
    *,
    below: bool = False,
    optional: bool = False,
    schedule: bool = False,
) -> None:
    """Raise for what is no real number in [low, high], or in [low, high) where ``below``.

    None is ``optional``, a function of the step is a ``schedule``. Of a traced number only the
    shape is known.
    """
    if (optional and value is None) or (schedule and callable(value)):
        return
    if not _is_real(value):
        kinds = "a number" + " or a schedule" * schedule + " or None" * optional
        hint = "; a schedule works for learning rates, beta, momentum and weight decay alone"
        raise TypeError(f"{name}={value!r} is not {kinds}{hint if callable(value) else ''}")
    if isinstance(value, Tracer):
        return
    if not low <= value <= high or (below and value == high):
        end = ")" if below else "]"
        raise ValueError(f"{name}={value} is out of range: it lies in [{low:g}, {high:.2g}{end}")


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
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or np.shape(value):
        return False
    dtype = getattr(value, "dtype", bool if isinstance(value, bool) else float)
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer))


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise for what is none of these names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; take one of {', '.join(choices)}")


def check_moment_dtype(mu_dtype: Any, name: str = "mu_dtype") -> None:
    """Raise for a dtype that no moment can be stored in."""
    if mu_dtype is None:
        return
    try:
        hash(mu_dtype)  # an array is none, although it has one
        dtype = jnp.dtype(mu_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 2:
        raise ValueError(
            f"{name}={mu_dtype!r} cannot hold a momentum; take float32, bfloat16, float16 or "
            "None, for the parameter's"
        )


def check_holds(mu_dtype: Any, leaf: Any, array: Any) -> Any:
    """Raise where a moment of ``mu_dtype`` would lose a complex leaf's imaginary part."""
    complex_leaf = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    if complex_leaf and not jnp.issubdtype(mu_dtype or leaf.dtype, jnp.complexfloating):
        raise ValueError(
            f"{leaf}: mu_dtype={mu_dtype!r} would lose the imaginary part of its momentum; "
            "leave mu_dtype out, or give a complex one"
        )
    return array


def check_transformation(name: str, value: Any) -> None:
    """Raise for what is no optax transformation."""
    if not isinstance(value, optax.GradientTransformation):
        hint = "; call it" if callable(value) else ""
        raise TypeError(f"{name}={value!r} is not an optax.GradientTransformation{hint}")


def require_params(params: PyTree) -> None:
    """Raise where parameters are needed and missing."""
    if params is None:
        raise ValueError(
            "params are missing: the step depends on the weights; "
            "call tx.update(updates, state, params)"
        )
