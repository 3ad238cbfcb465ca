"""Nora's signature around another direction for the matrices."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_nora._nora import matrices_and_adamw, nora


def like_nora(
    direction: Callable[..., optax.GradientTransformation],
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """An optimizer called as `nora` is, with ``direction`` for its matrices.

    ``direction`` takes beta, momentum, eps, mu_dtype and weight_dimension_numbers as `nora` does.
    """
    signature = inspect.signature(nora)

    @functools.wraps(direction)
    def optimizer(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = bound.arguments
        own = {name: rest.pop(name) for name in ("beta", "momentum", "eps")}
        shared = {name: rest[name] for name in ("mu_dtype", "weight_dimension_numbers")}
        return matrices_and_adamw(direction(**own, **shared), **rest)

    # What `optax.inject_hyperparams` and help() read.
    setattr(optimizer, "__signature__", signature)  # noqa: B010
    return optimizer


def check_momentum(momentum: Any, reason: str) -> None:
    """Raise for a look-ahead of its own, unless only a trace knows it."""
    if momentum is None or isinstance(momentum, jax.core.Tracer) or momentum == 1:
        return
    raise ValueError(f"momentum={momentum}: {reason}")
