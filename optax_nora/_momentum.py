"""Momentum with look-ahead for the matrices: one buffer of state, and what is made of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_holds, check_moment_dtype, check_range, require_params
from optax_nora._leaves import Leaf, Path, PyTree, map_leaves
from optax_nora._routing import WeightDimensionNumbers, routes_of
from optax_nora._states import StateError, explained
from optax_nora._step import Coefficients, Direction, look_ahead, one_minus

Array = jax.Array
# Of a leaf, its rows, gradient, momentum and weight: the new momentum, and what is sent on.
LeafStep = Callable[[Leaf, Rows, Array, Array, Array], tuple[Array, Array]]


class MomentumState(NamedTuple):
    """The one buffer of Nora and of its peers.

    Attributes:
      mu: the momentum, shaped and sharded like the parameters; nothing where a leaf is no matrix.
      count: steps taken, an int32 scalar; None where no schedule may ask for it.
    """

    mu: PyTree
    count: Any = None


def with_momentum(
    make_step: Callable[..., LeafStep],
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
    counted: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The transformation that makes a step of every matrix, by ``make_step(count, params)``."""
    check_moment_dtype(mu_dtype)

    def init(params: PyTree) -> MomentumState:
        routes = routes_of(params, weight_dimension_numbers)

        def zeros(leaf: Leaf, param: Array) -> Any:
            if routes[leaf.path] is None:
                return optax.MaskedNode()
            check_holds(mu_dtype, leaf, param)
            return jnp.zeros_like(param, dtype=mu_dtype or jnp.result_type(param))

        count = jnp.zeros([], jnp.int32) if counted else None
        return MomentumState(map_leaves(zeros, params), count)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **told: Any
    ) -> tuple[PyTree, MomentumState]:
        require_params(params)
        with explained(init, params, state):
            routes = routes_of(params, weight_dimension_numbers)
            step = make_step(state.count, params, **told)
            moved: dict[Path, Array] = {}

            def one(leaf: Leaf, g: Array, mu: Array | None, w: Array) -> Array:
                rows = routes[leaf.path]
                if (rows is None) != (mu is None):
                    raise StateError(
                        f"{leaf} {'has' if rows is None else 'has no'} momentum in this state, "
                        "which was made under another routing; make it anew with init"
                    )
                if rows is None or mu is None:
                    return g
                moved[leaf.path], out = step(leaf, rows, g, mu, w)
                return out

            updates = map_leaves(one, updates, state.mu, params)
            mu = map_leaves(lambda leaf, old: moved[leaf.path].astype(old.dtype), state.mu)
            count = optax.safe_increment(state.count) if counted else None
        return updates, MomentumState(mu, count)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_momentum(
    direction: Direction,
    beta: Any,
    momentum: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
    eps: Any = 0.0,
) -> optax.GradientTransformation:
    """``direction(rows, h, w, eps)`` of the look-ahead momentum h, in float32 at the least."""
    check_range("beta", beta, high=1, below=True)
    check_range("momentum", momentum, high=1, optional=True)
    check_range("eps", eps)
    ahead = beta if momentum is None else momentum
    c = Coefficients(1.0, beta, one_minus(beta), ahead, one_minus(ahead), eps)

    def make_step(count: Any, params: PyTree) -> LeafStep:
        def step(leaf: Leaf, rows: Rows, g: Array, mu: Array, w: Array) -> tuple[Array, Array]:
            mu, d = look_ahead(rows, direction, c, g, mu, w)
            return mu, d.astype(jnp.result_type(w))

        return step

    # Told nothing: extra arguments are for others of a chain.
    tx = with_momentum(make_step, mu_dtype, weight_dimension_numbers)
    return optax.GradientTransformation(tx.init, tx.update)
