"""Mano: project and normalise along the two sides of a matrix in turn."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range, require_params
from optax_nora._leaves import PyTree, map_leaves
from optax_nora._momentum import zero_momentum
from optax_nora._routing import WeightDimensionNumbers, map_rows
from optax_nora._rows import project_and_normalize, widen
from optax_nora.baselines._signature import check_momentum, like_nora

Array = jax.Array


class ManoState(NamedTuple):
    """State of `mano`.

    Attributes:
      count: steps taken, an int32 scalar.
      mu: heavy-ball momentum, shaped and sharded like the parameters.
    """

    count: jax.typing.ArrayLike
    mu: PyTree


@like_nora()
def mano(
    beta: Any,
    momentum: Any,
    eps: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    r"""Manifold-normalized momentum, along the two sides of a matrix in turn.

    .. math::
      \mu \leftarrow \beta \mu + g, \quad d = \mathrm{normalize}(\mathrm{project}_w(\mu))

    along the output axis on odd steps and along the input axis on even ones, counting from 1, as in
    the Nora authors' runs.

    Args, returns and raises are those of `nora`, but Mano looks not ahead: momentum is None or 1.

    References:
      The Mano baseline of the Nora authors' runs.
    """
    check_range("beta", beta, 0, 1, below=True)
    check_range("eps", eps, 0)
    check_momentum(momentum, "Mano has no look-ahead; leave momentum out")

    def init(params: PyTree) -> ManoState:
        mu = zero_momentum(params, mu_dtype, weight_dimension_numbers)
        return ManoState(count=jnp.zeros([], jnp.int32), mu=mu)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, ManoState]:
        require_params(params)
        odd = state.count % 2 == 0

        def step(rows: Rows, mu: Array, w: Array) -> Array:
            return jax.lax.cond(
                odd,
                lambda: project_and_normalize(mu, widen(w), rows.across, eps),
                lambda: project_and_normalize(mu, widen(w), rows, eps),
            ).astype(jnp.result_type(w))

        numbers = weight_dimension_numbers
        mu = map_rows(lambda rows, g, mu: widen(g) + beta * widen(mu), numbers, updates, state.mu)
        updates = map_rows(step, numbers, mu, params)
        stored = map_leaves(lambda _, old, new: new.astype(old.dtype), state.mu, mu)
        return updates, ManoState(count=optax.safe_increment(state.count), mu=stored)

    return optax.GradientTransformation(init, update)
