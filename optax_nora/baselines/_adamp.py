"""AdamP and SGDP: Adam and SGD that lose their radial part where the loss ignores lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_moment_dtype, check_range, require_params
from optax_nora._leaves import PyTree
from optax_nora._masks import decay_mask
from optax_nora._routing import WeightDimensionNumbers, map_rows, routes_of
from optax_nora._rows import product, project, widen

Array = jax.Array

# Of AdamP's authors: how near to orthogonal counts as invariant, and what decay is then times.
DELTA = 0.1
DECAY_RATIO = 0.1


def scale_by_adamp(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Adam whose update is projected off the weight where the gradient is nearly orthogonal to it.

    If for all rows :math:`|\cos(g_i, w_i)| < 0.1 / \sqrt{in}` each row of the update loses its part
    along :math:`w_i`; else if :math:`|\cos(g, w)| < 0.1 / \sqrt{in \cdot out}` the update loses its
    part along the whole matrix. Weight decay, which it adds itself, is then times 0.1.

    Args:
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment.
      weight_decay: of the weights, before the learning rate.
      weight_decay_mask: as for `nora`.
      mu_dtype: dtype of the first moment. None: the parameter's.
      weight_dimension_numbers: which axes are a row, as for `scale_by_nora`.

    Returns:
      An `optax.GradientTransformation`.

    References:
      Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant
      Weights, 2021, algorithm 2.
    """
    check_range("b1", b1, high=1, below=True)
    check_range("b2", b2, high=1, below=True)
    check_range("eps", eps)
    check_moment_dtype(mu_dtype)
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)
    return _without_radial_part(adam, weight_decay, weight_decay_mask, weight_dimension_numbers)


def scale_by_sgdp(
    beta: Any = 0.9,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""SGD with heavy-ball momentum, projected as `scale_by_adamp` is.

    .. math::
      \mu \leftarrow \beta \mu + g

    Weight decay is divided by :math:`1 - \beta`, as its authors' is: so it balances the momentum,
    which is that much longer than a gradient.

    Args:
      beta: decay of the momentum, in [0, 1).
      weight_decay: of the weights, before the learning rate.
      weight_decay_mask: as for `nora`.
      mu_dtype: dtype of the momentum. None: the parameter's.
      nesterov: whether to look ahead, to :math:`g + \beta \mu`.
      weight_dimension_numbers: which axes are a row, as for `scale_by_nora`.

    Returns:
      An `optax.GradientTransformation`.

    References:
      Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant
      Weights, 2021, algorithm 1.
    """
    check_range("beta", beta, high=1, below=True)
    check_range("weight_decay", weight_decay)
    check_moment_dtype(mu_dtype)
    sgd = optax.trace(beta, nesterov=nesterov, accumulator_dtype=mu_dtype)
    decay = weight_decay / (1 - beta)
    return _without_radial_part(sgd, decay, weight_decay_mask, weight_dimension_numbers)


def _cosine(rows: Rows, g: Array, w: Array) -> Array:
    gw, gg, ww = rows.sums(product(g, w), product(g, g), product(w, w))
    length = jnp.sqrt(gg) * jnp.sqrt(ww)
    return jnp.abs(gw) / jnp.where(length > 0, length, 1)


def _lose_radial_part(rows: Rows, g: Array, step: Array, w: Array, decay: Array) -> Array:
    g, step, w = map(widen, (g, step, w))
    matrix = Rows(rows.reduction + rows.output, (), rows.reduction_mesh + rows.output_mesh)
    worst = jnp.max(_cosine(rows, g, w), axis=rows.output, keepdims=True)
    if rows.output_mesh:
        worst = jax.lax.pmax(worst, rows.output_mesh)
    by_rows = worst < DELTA / rows.fan_in(w.shape) ** 0.5
    whole = _cosine(matrix, g, w) < DELTA / matrix.fan_in(w.shape) ** 0.5
    kept = jnp.where(whole, project(matrix, step, w), step)
    kept = jnp.where(by_rows, project(rows, step, w), kept)
    return kept + jnp.where(by_rows | whole, DECAY_RATIO, 1) * decay


def _without_radial_part(
    inner: optax.GradientTransformation,
    weight_decay: Any,
    weight_decay_mask: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    check_range("weight_decay", weight_decay)
    decayed = optax.add_decayed_weights(weight_decay, decay_mask(weight_decay_mask))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        require_params(params)
        steps, new = inner.update(updates, state, params)
        nothing = optax.tree.zeros_like(updates)
        decay, _ = decayed.update(nothing, decayed.init(params), params)
        routes = routes_of(params, weight_dimension_numbers)
        steps = map_rows(_lose_radial_part, routes, updates, steps, params, decay)
        return steps, optax.tree.cast_like(new, state)

    def init(params: PyTree) -> Any:
        routes_of(params, weight_dimension_numbers)  # raises what is wrong with them
        return inner.init(params)

    return optax.GradientTransformation(init, update)
