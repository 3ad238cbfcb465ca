"""What the rows of a model do: does Nora fit it, and where do its norms go?"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_nora._axes import Rows
from optax_nora._checks import check_range
from optax_nora._leaves import Leaf, PyTree, map_leaves
from optax_nora._routing import WeightDimensionNumbers, routes_of
from optax_nora._rows import product, project, widen

Array = jax.Array


class RowGeometry(NamedTuple):
    """The rows of one matrix; each field a float32 scalar.

    Attributes:
      radial_mean: mean over rows of the gradient's radial fraction, the absolute cosine of the
        angle between gradient and row: 0 where the loss does not depend on the row's length.
      radial_max: its maximum over rows.
      norm_min: least row norm.
      norm_mean: mean row norm.
      norm_max: greatest row norm.
      angle_mean: mean angle between a row before and after the step, in radians; None without
        updates.
      angle_max: its maximum over rows; None without updates.
      zeroed: share of rows that get no step, as the projection leaves only rounding noise, or that
        get a short one, as it is under eps.
    """

    radial_mean: Array
    radial_max: Array
    norm_min: Array
    norm_mean: Array
    norm_max: Array
    angle_mean: Array | None
    angle_max: Array | None
    zeroed: Array


def row_geometry(
    params: PyTree,
    grads: PyTree,
    updates: PyTree = None,
    *,
    eps: float = 1e-10,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> dict[str, RowGeometry]:
    r"""Measure the rows of every matrix that goes to Nora.

    Nora turns rows and cannot change their length on purpose. So it fits weights whose gradient
    has next to no radial part: `radial_mean` is about :math:`0.8 / \sqrt{n}` for rows of n weights
    and a random gradient. One half and more, past the first steps, says that the loss wants the
    rows longer or shorter, and Nora will not do it.

    Args:
      params: the parameters.
      grads: their gradients, or the momentum to be judged in their place.
      updates: what is added to the parameters, for the angles. None: no angles.
      eps: as for `nora`.
      weight_dimension_numbers: as for `nora`.

    Returns:
      A `RowGeometry` for each matrix by its path, such as ``'mlp/up/kernel'``. Can be returned from
      a jitted function.

    Raises:
      ValueError: if the dimension numbers do not fit, or the trees differ in their leaves.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> params = {'kernel': jnp.array([[3.0], [4.0]])}  # one row, (3, 4)
      >>> grads = {'kernel': jnp.array([[4.0], [-3.0]])}  # at a right angle to it
      >>> rows = optax_nora.row_geometry(params, grads)['kernel']
      >>> float(rows.radial_mean), float(rows.norm_mean)
      (0.0, 5.0)
    """
    check_range("eps", eps)
    routes = routes_of(params, weight_dimension_numbers, whole_model=True)
    found: dict[str, RowGeometry] = {}

    def measure(leaf: Leaf, *arrays: Array) -> Array:
        if (rows := routes[leaf.path]) is not None and leaf.size:
            # a/b is a, b or a/b
            name = str(leaf.path) if leaf.slashed in found else leaf.slashed
            found[name] = _measure(rows, eps, *map(widen, arrays))
        return arrays[0]

    map_leaves(measure, params, grads, *(() if updates is None else (updates,)))
    return found


def _measure(rows: Rows, eps: float, w: Array, g: Array, step: Array | None = None) -> RowGeometry:
    u = project(rows, g, w)
    ww, gg, gw, uu = rows.sums(product(w, w), product(g, g), product(g, w), product(u, u))
    norms = jnp.sqrt(ww)
    size = norms * jnp.sqrt(gg)
    radial = jnp.abs(gw) / jnp.where(size > 0, size, 1)
    angle = None if step is None else _angle(rows, w, step, norms)
    return RowGeometry(
        radial_mean=jnp.mean(radial),
        radial_max=jnp.max(radial),
        norm_min=jnp.min(norms),
        norm_mean=jnp.mean(norms),
        norm_max=jnp.max(norms),
        angle_mean=None if angle is None else jnp.mean(angle),
        angle_max=None if angle is None else jnp.max(angle),
        zeroed=jnp.mean(uu <= eps * eps),
    )


def _angle(rows: Rows, w: Array, step: Array, norms: Array) -> Array:
    across = project(rows, step, w)
    aa, along = rows.sums(product(across, across), product(step, w))
    length = jnp.where(norms > 0, norms, 1)
    return jnp.where(norms > 0, jnp.arctan2(jnp.sqrt(aa), length + along / length), 0)


def equilibrium_row_norm(learning_rate: Any, weight_decay: Any, row_scale: Any = 1.0) -> Any:
    r"""The row norm at which weight decay and Nora's steps balance.

    Each step multiplies :math:`|w_i|^2` by :math:`(1 - \eta\lambda)^2` and adds :math:`(\eta s)^2`,
    so that it ends at

    .. math::
      |w_i| = \sqrt{\frac{\eta s^2}{\lambda (2 - \eta\lambda)}}

    and a row then turns by about :math:`\sqrt{2 \eta \lambda}` radians a step.

    Args:
      learning_rate: :math:`\eta`, a number or an array.
      weight_decay: :math:`\lambda`.
      row_scale: the factor s of the matrix, as `summarize` prints it.

    Returns:
      The norm, of the arguments' shape.

    Raises:
      ValueError: if weight decay is not above 0, or its product with the rate not below 2.

    Examples:
      >>> import optax_nora
      >>> round(float(optax_nora.equilibrium_row_norm(0.02, 0.1)), 4)
      0.3164

    References:
      The identity :math:`|w'_i|^2 = (1 - \eta\lambda)^2 |w_i|^2 + (\eta s)^2`, which holds as the
      direction is a unit vector across :math:`w_i`.
    """
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
            raise TypeError(f"{name}={value!r} is not a number or an array")
    decay = weight_decay * (2 - learning_rate * weight_decay)
    traced = isinstance(decay, Tracer)
    if not traced and not (np.all(np.asarray(weight_decay) > 0) and np.all(np.asarray(decay) > 0)):
        raise ValueError(
            f"learning_rate={learning_rate} and weight_decay={weight_decay} balance at no norm: "
            "decay is to be above 0, and their product below 2"
        )
    return jnp.sqrt(learning_rate * row_scale**2 / decay)
