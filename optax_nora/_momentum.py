"""Momentum with look-ahead for the matrices, and the direction that is made of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range, require_params
from optax_nora._leaves import Leaf, PyTree, map_leaves
from optax_nora._routing import WeightDimensionNumbers, map_rows, resolve
from optax_nora._rows import widen
from optax_nora._rules import DenseOnly as Kernels

Array = jax.Array


class MomentumState(NamedTuple):
    """The one buffer of `scale_by_nora` and of its peers.

    Attributes:
      mu: the momentum, shaped and sharded like the parameters.
    """

    mu: PyTree


def zero_momentum(
    params: PyTree, mu_dtype: Any, weight_dimension_numbers: WeightDimensionNumbers
) -> PyTree:
    """A zero for each matrix, shaped and sharded like it; nothing for the other leaves."""
    rows_at = resolve(params, weight_dimension_numbers, Kernels())

    def zeros(leaf: Leaf, param: Array) -> Any:
        matrix = rows_at[leaf.path] is not None
        return jnp.zeros_like(param, dtype=mu_dtype) if matrix else optax.MaskedNode()

    return map_leaves(zeros, params)


def one_minus(rate: Any) -> Any:
    """``1 - rate``: an injected rate comes in the parameters' dtype, where that loses digits."""
    return 1 - (rate if isinstance(rate, float | int) else widen(rate))


def scale_by_momentum(
    direction: Callable[[Array, Array, Rows], Array],
    beta: Any,
    momentum: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    """``direction(h, w, rows)`` of the look-ahead momentum h, in float32 at the least.

    mu <- beta mu + (1 - beta) g, and h = momentum mu + (1 - momentum) g.
    """
    check_range("beta", beta, 0, 1, below=True)
    check_range("momentum", momentum, 0, 1)

    def init(params: PyTree) -> MomentumState:
        return MomentumState(mu=zero_momentum(params, mu_dtype, weight_dimension_numbers))

    def blend(rate: Any, a: Array, b: Array) -> Array:
        return one_minus(rate) * widen(a) + rate * widen(b)

    def step(rows: Rows, g: Array, mu: Array, w: Array) -> Array:
        ahead = beta if momentum is None else momentum
        return direction(blend(ahead, g, mu), widen(w), rows).astype(jnp.result_type(w))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MomentumState]:
        require_params(params)
        numbers = weight_dimension_numbers
        mu = map_rows(lambda rows, g, mu: blend(beta, g, mu), numbers, updates, state.mu)
        updates = map_rows(step, numbers, updates, mu, params)
        stored = map_leaves(lambda _, old, new: new.astype(old.dtype), state.mu, mu)
        return updates, MomentumState(mu=stored)

    return optax.GradientTransformation(init, update)
