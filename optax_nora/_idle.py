"""Rows without a gradient, kept still."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._leaves import PyTree
from optax_nora._routing import WeightDimensionNumbers, as_rule, check, map_rows
from optax_nora._rows import widen
from optax_nora._rules import DenseOnly as Kernels

Array = jax.Array


def rest_idle_rows(
    inner: optax.GradientTransformation,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    """Give rows whose gradient is exactly 0 no update, and `inner` all it needs.

    Rows of an expert that no token went to, or of a dead unit, would go on along old momentum at
    full speed, as a unit row does not say how old it is. Here they wait, and do not decay; their
    momentum does.

    Args:
      inner: the optimizer, such as `nora`; with `optax.MultiSteps` around all.
      weight_dimension_numbers: as for `row_project`; for a whole model give the same as `nora` has,
        and ``by_path({})`` where `nora` has none. Leaves with None are as `inner` has them.

    Returns:
      An `optax.GradientTransformationExtraArgs` with the state of `inner`.

    Raises:
      ValueError: at ``init`` if the dimension numbers do not fit.

    Examples:
      >>> import optax_nora
      >>> tx = optax_nora.rest_idle_rows(
      ...     optax_nora.nora(0.01), weight_dimension_numbers=optax_nora.by_path({})
      ... )
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> PyTree:
        check(params, as_rule(weight_dimension_numbers, Kernels(), params))
        return inner.init(params)

    def rest(rows: Rows, update: Array, gradient: Array) -> Array:
        (size,) = rows.sums(jnp.abs(widen(gradient)))
        return jnp.where(size == 0, 0, update)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        steps, state = inner.update(updates, state, params, **extra_args)
        return map_rows(rest, weight_dimension_numbers, steps, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
