"""AdamP and SGDP: Adam and SGD that lose their radial part where the loss ignores lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range, require_params
from optax_nora._leaves import PyTree
from optax_nora._routing import WeightDimensionNumbers, map_rows
from optax_nora._rows import product, project, widen
from optax_nora.baselines._signature import check_momentum, like_nora

Array = jax.Array

# Of AdamP's authors: how near to orthogonal counts as invariant, and what decay is then times.
DELTA = 0.1
DECAY_RATIO = 0.1


@like_nora(beta=0.9, eps=1e-8, row_scale="unit")
def adamp(
    beta: Any,
    momentum: Any,
    eps: Any,
    weight_decay: Any,
    weight_decay_mask: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    r"""Adam whose update is projected off the weight where the gradient is nearly orthogonal to it.

    If for all rows :math:`|\cos(g_i, w_i)| < 0.1 / \sqrt{in}` each row of the update loses its part
    along :math:`w_i`; else if :math:`|\cos(g, w)| < 0.1 / \sqrt{in \cdot out}` the update loses its
    part along the whole matrix. Weight decay is then times 0.1.

    Args, returns and raises are those of `nora`, but beta is Adam's b1 (b2 is 0.999) and there is
    no look-ahead: momentum is None or 1. A row_scale other than ``"unit"`` scales the decay too.

    References:
      Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant
      Weights, 2021, algorithm 2.
    """
    check_momentum(momentum, "AdamP has no look-ahead here; leave momentum out")
    check_range("beta", beta, 0, 1, below=True)
    check_range("eps", eps, 0)
    adam = optax.scale_by_adam(b1=beta, b2=0.999, eps=eps, mu_dtype=mu_dtype)
    return _without_radial_part(adam, weight_decay, weight_decay_mask, weight_dimension_numbers)


@like_nora(beta=0.9, row_scale="unit")
def sgdp(
    beta: Any,
    momentum: Any,
    weight_decay: Any,
    weight_decay_mask: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    r"""SGD with heavy-ball momentum, projected as `adamp` is.

    .. math::
      \mu \leftarrow \beta \mu + g

    Args, returns and raises are those of `nora`, but momentum is None, for Nesterov's look-ahead
    :math:`g + \beta \mu`, or 1 for none. A row_scale other than ``"unit"`` scales the decay too.

    References:
      Heo et al., AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant
      Weights, 2021, algorithm 1.
    """
    check_momentum(momentum, "SGDP looks ahead with beta (momentum=None) or not at all (1)")
    check_range("beta", beta, 0, 1, below=True)
    sgd = optax.trace(beta, nesterov=momentum is None, accumulator_dtype=mu_dtype)
    return _without_radial_part(sgd, weight_decay, weight_decay_mask, weight_dimension_numbers)


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
    kept = jnp.where(whole, project(step, w, matrix), step)
    kept = jnp.where(by_rows, project(step, w, rows), kept)
    return kept + jnp.where(by_rows | whole, DECAY_RATIO, 1) * decay


def _without_radial_part(
    inner: optax.GradientTransformation,
    weight_decay: Any,
    weight_decay_mask: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    check_range("weight_decay", weight_decay, 0)
    decayed = optax.add_decayed_weights(weight_decay, weight_decay_mask)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        require_params(params)
        steps, new = inner.update(updates, state, params)
        nothing = optax.tree.zeros_like(updates)
        decay, _ = decayed.update(nothing, decayed.init(params), params)
        numbers = weight_dimension_numbers
        steps = map_rows(_lose_radial_part, numbers, updates, steps, params, decay)
        return steps, optax.tree.cast_like(new, state)

    return optax.GradientTransformation(inner.init, update)
