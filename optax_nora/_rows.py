"""Rows: project, normalise, scale, and keep their norms.

A row is all the weights of one output. Nothing here reshapes, transposes or multiplies matrices:
rows are reduced over named axes with ``keepdims``, so any sharding works and nothing is
communicated unless a reduction axis is sharded.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range, require_params
from optax_nora._leaves import PyTree
from optax_nora._routing import WeightDimensionNumbers, as_rule, check, map_rows
from optax_nora._rules import DenseOnly as Kernels

Array = jax.Array

# A projection this small against its row, in units of rounding, is noise: see docs/numerics.md.
NOISE = 8.0


class Coefficients(NamedTuple):
    """The numbers of one matrix's step, for kernels in this order as one vector of float32."""

    grad_scale: Any
    beta: Any
    one_minus_beta: Any  # of its own, as in float32 the difference would lose digits
    ahead: Any  # weight of the momentum in the look-ahead
    one_minus_ahead: Any
    eps: Any
    row_scale: Any
    weight_decay: Any
    learning_rate: Any


def widen(x: Array) -> Array:
    """``x`` in float32 at the least: float64 and complex stay what they are."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), jnp.float32))


def product(a: Array, b: Array) -> Array:
    """The terms of the real inner product; for complex numbers that of (real, imaginary) pairs."""
    return jnp.real(a * jnp.conj(b)) if jnp.iscomplexobj(a) else a * b


def _divide(a: Array, b: Array) -> Array:
    # `where` twice, here and below, so that the gradient of the branch not taken is finite too.
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)


def split(h: Array, w: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Rows of h without their part along w, their squared norms, and the length of that part.

    The norms are 0 where only noise is left; the length is signed, ``<h_i, w_i> / |w_i|``.

    One projection leaves a leak of about eps / rho of the result, rho = |u| / |h|; a second one
    removes it and costs no further pass over memory, as its norm follows from <u, w> and <u, u>.
    """
    hw, ww = rows.sums(product(h, w), product(w, w))
    along = _divide(hw, ww)
    u = h - along * w
    uw, uu = rows.sums(product(u, w), product(u, u))
    leak = _divide(uw, ww)
    square = uu - uw * leak
    # |h|^2 = |u|^2 + <h, w>^2 / |w|^2 needs no sum of its own. NaN is no noise: it goes through.
    threshold = NOISE * jnp.finfo(square.dtype).eps * jnp.sqrt(uu + hw * along)
    noise = (square <= 0) | (jnp.sqrt(jnp.abs(square)) <= threshold)
    return u - leak * w, jnp.where(noise, 0, square), along * jnp.sqrt(jnp.where(ww > 0, ww, 1))


def unit(u: Array, square: Array, eps: Any) -> Array:
    norm = jnp.sqrt(jnp.where(square == 0, 1, square))
    return jnp.where(square == 0, 0, u / jnp.maximum(norm, eps))


def project(h: Array, w: Array, rows: Rows) -> Array:
    """``u_i = h_i - <h_i, w_i> / |w_i|^2 w_i``, exactly 0 where that is rounding noise."""
    u, square, _ = split(h, w, rows)
    return jnp.where(square == 0, 0, u)


def normalize(h: Array, rows: Rows, eps: Any) -> Array:
    """``d_i = h_i / max(|h_i|, eps)``, with 0 / 0 = 0."""
    (square,) = rows.sums(product(h, h))
    return unit(h, square, eps)


def project_and_normalize(h: Array, w: Array, rows: Rows, eps: Any) -> Array:
    """`normalize` of `project` in three passes over memory: two to reduce, one to write."""
    u, square, _ = split(h, w, rows)
    return unit(u, square, eps)


def restore_norms(update: Array, w: Array, rows: Rows) -> Array:
    """The update that ends where w + update points, at the norm that each row of w has now."""
    end = w + update
    ww, ee = rows.sums(product(w, w), product(end, end))
    keep = (ww > 0) & (ee > 0)
    ratio = jnp.sqrt(jnp.where(keep, ww, 1)) / jnp.sqrt(jnp.where(keep, ee, 1))
    return jnp.where(keep, ratio * end - w, update)


ROW_SCALES = ("fan_ratio", "unit", "width", "rms")


def row_scale_of(row_scale: str, fan_in: int, fan_out: int, base_fan_in: Any, rms: Any) -> Any:
    """The length s of a row's step: see `optax_nora.scale_by_row_shape`."""
    if fan_in == 0:
        return 1.0
    match row_scale:
        case "fan_ratio":
            return max(1.0, math.sqrt(fan_out / fan_in))
        case "unit":
            return 1.0
        case "width":
            return (base_fan_in / fan_in) ** 0.5
        case "rms":
            return rms * math.sqrt(fan_in)
    raise AssertionError(row_scale)  # check_row_scale comes first


def check_row_scale(row_scale: str, base_fan_in: Any, rms: Any) -> None:
    """Raise for a scale that is unknown or lacks its width."""
    if row_scale not in ROW_SCALES:
        raise ValueError(f"row_scale={row_scale!r} is unknown; take one of {', '.join(ROW_SCALES)}")
    if row_scale == "width" and base_fan_in is None:
        raise ValueError(
            "row_scale='width' needs base_fan_in, the fan-in at which the learning rate was tuned"
        )
    check_range("base_fan_in", base_fan_in, 0)
    check_range("rms", rms, 0)


def stateless(
    fn: Callable[[Rows, Array, Array], Array],
    weight_dimension_numbers: WeightDimensionNumbers,
    needs_params: bool,
) -> optax.GradientTransformation:
    """The transformation that is ``fn(rows, update, param)`` on every matrix."""

    def init(params: PyTree) -> optax.EmptyState:
        check(params, as_rule(weight_dimension_numbers, Kernels(), params))
        return optax.EmptyState()

    def one(rows: Rows, update: Array, param: Array) -> Array:
        return fn(rows, widen(update), widen(param)).astype(jnp.result_type(param))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        if needs_params:
            require_params(params)
        like = updates if params is None else params
        return map_rows(one, weight_dimension_numbers, updates, like), state

    return optax.GradientTransformation(init, update)


def row_project(
    *, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""Remove from each row of the updates its part along the weight's row.

    .. math::
      u_i = h_i - \frac{\langle h_i, w_i \rangle}{|w_i|^2} w_i

    It is done twice, which leaves :math:`\langle u_i, w_i \rangle` at rounding of :math:`u_i`. A
    row that is parallel to its weight, so that only rounding noise is left of it, becomes exactly
    0. Where :math:`w_i = 0` the row stays as it is.

    Args:
      weight_dimension_numbers: which axes are a row, as for `nora`; a leaf with None stays as it
        is. Nothing given: every leaf is a kernel ``(in, out)``.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype.

    Raises:
      ValueError: at ``init`` if the dimension numbers do not fit; at ``update`` without params.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_nora
      >>> w = {'kernel': jnp.array([[3.0], [4.0]])}  # one row, (3, 4)
      >>> tx = optax_nora.row_project()
      >>> updates, _ = tx.update({'kernel': jnp.array([[1.0], [0.0]])}, tx.init(w), w)
      >>> updates['kernel'].T.round(6)
      Array([[ 0.64, -0.48]], dtype=float32)

    References:
      Nora paper, section 4.2, row-wise perpendicular projection; Algorithm 1.
    """
    return stateless(
        lambda rows, h, w: project(h, w, rows), weight_dimension_numbers, needs_params=True
    )


def row_normalize(
    *, eps: Any = 1e-10, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""Divide each row of the updates by its norm.

    .. math::
      d_i = h_i / \max(|h_i|, \epsilon), \quad 0 / 0 = 0

    Args:
      eps: the norm under which a row is no longer made a unit vector.
      weight_dimension_numbers: as for `row_project`.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype, or of
      their own where ``update`` gets no params.

    Raises:
      ValueError: if eps is negative, or at ``init`` if the dimension numbers do not fit.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> grads = {'kernel': jnp.array([[3.0, 0.0], [4.0, 0.0]])}  # columns are rows
      >>> tx = optax_nora.row_normalize()
      >>> tx.update(grads, tx.init(grads))[0]['kernel'].T
      Array([[0.6, 0.8],
             [0. , 0. ]], dtype=float32)

    References:
      Nora paper, section 4.2, row-wise normalization; Algorithm 1.
    """
    check_range("eps", eps, 0)
    return stateless(
        lambda rows, h, _: normalize(h, rows, eps), weight_dimension_numbers, needs_params=False
    )


def scale_by_row_shape(
    row_scale: str = "fan_ratio",
    *,
    base_fan_in: Any = None,
    rms: Any = 0.2,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale updates of unit rows by a factor that depends on the matrix's shape.

    ============= ==================================== ==========================================
    ``row_scale`` s                                    from
    ============= ==================================== ==========================================
    `fan_ratio`   :math:`\max(1, \sqrt{out / in})`     the authors' code
    `unit`        1                                    the paper's Algorithm 1
    `width`       :math:`\sqrt{base\_fan\_in / in}`    the paper's Theorems 4.1 and 4.2
    `rms`         :math:`rms \sqrt{in}`                update RMS ``rms``, as of AdamW
    ============= ==================================== ==========================================

    Args:
      row_scale: one of the names above.
      base_fan_in: for ``"width"``, the fan-in at which the learning rate was tuned.
      rms: for ``"rms"``, the root mean square of an update's entries. With 0.2 a learning rate of
        AdamW transfers.
      weight_dimension_numbers: as for `row_project`.

    Returns:
      A stateless `optax.GradientTransformation`.

    Raises:
      ValueError: if row_scale is unknown, ``"width"`` lacks base_fan_in, or a value is negative.

    Examples:
      >>> import jax.numpy as jnp, optax_nora
      >>> tx = optax_nora.scale_by_row_shape()
      >>> ones = {'kernel': jnp.ones((1, 4))}  # fan-in 1, fan-out 4
      >>> tx.update(ones, tx.init(ones))[0]['kernel']
      Array([[2., 2., 2., 2.]], dtype=float32)
    """
    check_row_scale(row_scale, base_fan_in, rms)

    def scale(rows: Rows, update: Array, _: Array) -> Array:
        fans = rows.fan_in(update.shape), rows.fan_out(update.shape)
        return update * row_scale_of(row_scale, *fans, base_fan_in, rms)

    return stateless(scale, weight_dimension_numbers, needs_params=False)


def keep_row_norms(
    *, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""End each step at the norm that the row has now: rows turn and never stretch.

    .. math::
      w'_i = |w_i| \frac{w_i + u_i}{|w_i + u_i|}

    To be last in a chain, after the learning rate. It takes out weight decay too. A row of w that
    is 0 has no direction to keep and moves freely.

    Args:
      weight_dimension_numbers: as for `row_project`; for a whole model after `nora` give the same
        as `nora` has, and ``by_path({})`` where `nora` has none.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype.

    Raises:
      ValueError: at ``init`` if the dimension numbers do not fit; at ``update`` without params.

    Examples:
      >>> import optax, optax_nora
      >>> tx = optax.chain(
      ...     optax_nora.nora(0.01),
      ...     optax_nora.keep_row_norms(weight_dimension_numbers=optax_nora.by_path({})),
      ... )
    """
    return stateless(
        lambda rows, u, w: restore_norms(u, w, rows), weight_dimension_numbers, needs_params=True
    )
