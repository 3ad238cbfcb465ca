"""Rows that may change their length: what the projection throws away, put to use."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import split, stateless, unit

Array = jax.Array


def turn_and_stretch(h: Array, w: Array, rows: Rows, eps: Any, radial: Any) -> Array:
    """`optax_nora._rows.project_and_normalize`, and radial times the relative change of length."""
    u, square, along = split(h, w, rows)
    norm = jnp.sqrt(jnp.where(along == 0, 1, square + along**2))
    return unit(u, square, eps) + radial * along / jnp.maximum(norm, eps) * w


def scale_by_row_radius(
    radial: Any = 1.0,
    *,
    eps: Any = 1e-10,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Turn and stretch rows: `row_project` and `row_normalize`, and a step of each row's length.

    The part of the update along the weight, which the projection throws away, says whether the loss
    wants the row longer or shorter. The cosine of their angle sets a relative change:

    .. math::
      c_i = \frac{\langle h_i, w_i \rangle}{|h_i| \, |w_i|}, \quad
      h_i \leftarrow d_i + \kappa c_i w_i

    with :math:`d_i` Nora's unit row across :math:`w_i`. After the learning rate :math:`\eta` and
    the row scale s, a row turns as under Nora and its length changes by
    :math:`\eta s \kappa c_i` of itself:

    .. math::
      |w'_i|^2 = (1 - \eta s \kappa c_i)^2 |w_i|^2 + (\eta s)^2

    Where the loss ignores a row's length :math:`c_i` is 0, and the step is Nora's. The sums are
    those that the projection needs, so it costs no further pass over memory.

    Args:
      radial: :math:`\kappa`, the greatest relative change of a row's length for a learning rate and
        a row scale of 1.
      eps: the norm under which a row makes shorter steps.
      weight_dimension_numbers: as for `row_project`.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype.

    Raises:
      ValueError: if a value is negative; at ``init`` if the dimension numbers do not fit; at
        ``update`` without params.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_nora
      >>> w = {'kernel': jnp.array([[2.0], [0.0]])}  # one row, (2, 0)
      >>> tx = optax.chain(optax_nora.scale_by_row_radius(), optax.scale_by_learning_rate(0.1))
      >>> updates, _ = tx.update({'kernel': jnp.array([[-4.0], [-3.0]])}, tx.init(w), w)
      >>> longer, across = updates['kernel'].T[0]  # by 0.8 of a tenth, and by a tenth
      >>> round(float(longer), 6), round(float(across), 6)
      (0.16, 0.1)
    """
    check_range("radial", radial, 0)
    check_range("eps", eps, 0)
    return stateless(
        lambda rows, h, w: turn_and_stretch(h, w, rows, eps, radial),
        weight_dimension_numbers,
        needs_params=True,
    )
