"""Mano: project and normalise along the two sides of a matrix in turn."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range
from optax_nora._leaves import Leaf, PyTree
from optax_nora._momentum import LeafStep, with_momentum
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import project_and_normalize, widen

Array = jax.Array


def scale_by_mano(
    beta: Any = 0.95,
    eps: Any = 1e-10,
    mu_dtype: Any = None,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Manifold-normalized momentum, along the two sides of a matrix in turn.

    .. math::
      \mu \leftarrow \beta \mu + g, \quad d = \mathrm{normalize}(\mathrm{project}_w(\mu))

    along the output axis on odd steps and along the input axis on even ones, counting from 1, as in
    the Nora authors' runs. There is no look-ahead.

    Args, returns and raises are those of `scale_by_nora`.

    References:
      The Mano baseline of the Nora authors' runs.
    """
    check_range("beta", beta, high=1, below=True)
    check_range("eps", eps)

    def make_step(count: Any, params: PyTree) -> LeafStep:
        def step(leaf: Leaf, rows: Rows, g: Array, mu: Array, w: Array) -> tuple[Array, Array]:
            mu = widen(g) + beta * widen(mu)

            def along(rows: Rows) -> Array:
                return project_and_normalize(rows, mu, widen(w), eps)

            d = jax.lax.cond(count % 2 == 0, lambda: along(rows.across), lambda: along(rows))
            return mu, d.astype(jnp.result_type(w))

        return step

    tx = with_momentum(make_step, mu_dtype, weight_dimension_numbers, counted=True)
    return optax.GradientTransformation(tx.init, tx.update)
