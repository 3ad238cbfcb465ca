"""Nora's signature around another direction for the matrices."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import optax
from jax.core import Tracer

from optax_nora._axes import Rows
from optax_nora._nora import matrices_and_adamw, nora

Direction = Callable[..., optax.GradientTransformation]
Optimizer = Callable[..., optax.GradientTransformationExtraArgs]


def like_nora(**defaults: Any) -> Callable[[Direction], Optimizer]:
    """Make a direction for matrices an optimizer that is called as `nora` is.

    The direction names the arguments of `nora` that it wants. If weight_decay is among them it
    decays by itself.

    Args:
      **defaults: in place of those of `nora`.
    """
    of_nora = inspect.signature(nora)
    signature = of_nora.replace(
        parameters=[
            p.replace(default=defaults.get(name, p.default))
            for name, p in of_nora.parameters.items()
            if name != "backend"  # kernels are Nora's
        ]
    )

    def decorate(direction: Direction) -> Optimizer:
        wanted = inspect.signature(direction).parameters

        @functools.wraps(direction)
        def optimizer(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            rest = dict(bound.arguments)
            tx = direction(**{name: rest[name] for name in wanted})
            if "weight_decay" in wanted:
                rest["weight_decay"] = 0.0
            for name in ("beta", "momentum", "eps"):
                del rest[name]
            return matrices_and_adamw(tx, **rest)

        # What `optax.inject_hyperparams` and help() read.
        setattr(optimizer, "__signature__", signature)  # noqa: B010
        return optimizer

    return decorate


def check_momentum(momentum: Any, reason: str) -> None:
    """Raise for a look-ahead of its own, unless only a trace knows it."""
    if momentum is None or isinstance(momentum, Tracer) or momentum == 1:
        return
    raise ValueError(f"momentum={momentum}: {reason}")


def require_whole(rows: Rows) -> None:
    """Raise where `jax.shard_map` splits a matrix whose products need it whole."""
    if rows.reduction_mesh or rows.output_mesh:
        raise ValueError(
            "this optimizer multiplies whole matrices, and in_shard_map splits one over "
            f"{', '.join(rows.reduction_mesh + rows.output_mesh)}; gather it, or take nora"
        )
