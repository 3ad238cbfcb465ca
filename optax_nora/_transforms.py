"""The parts of Nora that have no state, as optax transformations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._blocks import Blocks, check_block_rows
from optax_nora._checks import check_range, require_params
from optax_nora._leaves import PyTree, check_paired
from optax_nora._routing import WeightDimensionNumbers, map_rows, routes_of
from optax_nora._rows import check_row_scale, normalize, project, restore_norms, row_scale_of, widen

Array = jax.Array


def _stateless(
    fn: Callable[[Rows, Array, Array], Array],
    weight_dimension_numbers: WeightDimensionNumbers,
    needs_params: bool = True,
    whole_model: bool = False,
) -> optax.GradientTransformation:
    """The transformation that is ``fn(rows, update, param)`` on every matrix."""

    def init(params: PyTree) -> optax.EmptyState:
        routes_of(params, weight_dimension_numbers, whole_model)  # raises what is wrong with them
        return optax.EmptyState()

    def one(rows: Rows, update: Array, param: Array) -> Array:
        return fn(rows, widen(update), widen(param)).astype(jnp.result_type(param))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        if needs_params:
            require_params(params)
        like = updates if params is None else params
        check_paired(like, updates)
        routes = routes_of(like, weight_dimension_numbers, whole_model)
        return map_rows(one, routes, updates, like), state

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
    return _stateless(project, weight_dimension_numbers)


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
    check_range("eps", eps)
    return _stateless(
        lambda rows, h, _: normalize(rows, h, eps), weight_dimension_numbers, needs_params=False
    )


def row_orthonormalize(
    block_rows: int,
    *,
    eps: Any = 1e-10,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Make each block of consecutive rows orthonormal, and each row of length 1.

    A block is a matrix :math:`A` of b rows; what it becomes is its polar factor, nearly (singular
    values of at least a tenth of the greatest end within 6 % of 1), with each row made a unit
    vector before and after,

    .. math::
      d = \mathrm{normalize}((A A^\top)^{-1/2} A)

    One row is `row_normalize`; all rows of a matrix are Muon's step with rows of equal length.
    Blocks are counted in the order of the output axes, over all devices, so the mesh does not
    matter. A device that holds whole blocks of whole rows sends nothing. Of split rows it sums b
    numbers each with others; where blocks straddle devices it gets up to 2 (b - 1) rows of its
    neighbours.

    Args:
      block_rows: rows in a block, of which the last of a matrix may have fewer. A block has no more
        rows than its rows have weights.
      eps: the norm under which a row is no longer made a unit vector.
      weight_dimension_numbers: as for `row_project`.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype, or of
      their own where ``update`` gets no params.

    Raises:
      TypeError: if block_rows is not an int.
      ValueError: if block_rows is less than 1 or eps negative; at ``init`` if the dimension numbers
        do not fit; at ``update`` if `in_shard_map` splits another output axis than the first.

    Examples:
      >>> import jax, jax.numpy as jnp, optax_nora
      >>> grads = {'kernel': jax.random.normal(jax.random.key(0), (16, 8))}  # 8 rows
      >>> tx = optax_nora.row_orthonormalize(4)
      >>> d = tx.update(grads, tx.init(grads))[0]['kernel']
      >>> bool(jnp.allclose(d[:, :4].T @ d[:, :4], jnp.eye(4), atol=0.06))
      True
    """
    check_block_rows(block_rows)
    check_range("eps", eps)
    direction = Blocks(int(block_rows), project=False)
    return _stateless(
        lambda rows, h, w: direction(rows, h, w, eps), weight_dimension_numbers, needs_params=False
    )


def scale_by_row_shape(
    row_scale: str = "fan_ratio",
    *,
    base_fan_in: Any = None,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Scale updates of unit rows by a factor that depends on the matrix's shape.

    ============= ==================================== ==========================================
    ``row_scale`` s                                    from
    ============= ==================================== ==========================================
    `fan_ratio`   :math:`\max(1, \sqrt{out / in})`     the authors' code
    `unit`        1                                    the paper's Algorithm 1
    `width`       :math:`\sqrt{base\_fan\_in / in}`    the paper's Theorems 4.1 and 4.2
    `rms`         :math:`0.2 \sqrt{in}`                update RMS 0.2, about that of AdamW
    ============= ==================================== ==========================================

    Args:
      row_scale: one of the names above.
      base_fan_in: for ``"width"``, the fan-in at which the learning rate was tuned.
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
    check_row_scale(row_scale, base_fan_in)

    def scale(rows: Rows, update: Array, _: Array) -> Array:
        fans = rows.fan_in(update.shape), rows.fan_out(update.shape)
        return update * row_scale_of(row_scale, *fans, base_fan_in)

    return _stateless(scale, weight_dimension_numbers, needs_params=False)


def keep_row_norms(
    *, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""End each step at the norm that the row has now: rows turn and never stretch.

    .. math::
      w'_i = |w_i| \frac{w_i + u_i}{|w_i + u_i|}

    To be last in a chain, after the learning rate. It takes out weight decay too. A row of w that
    is 0 has no direction to keep and moves freely.

    Args:
      weight_dimension_numbers: the same as the optimizer before it has. Nothing given: the default
        routing of `nora`.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype.

    Raises:
      ValueError: at ``init`` if the dimension numbers do not fit; at ``update`` without params.

    Examples:
      >>> import optax, optax_nora
      >>> tx = optax.chain(optax_nora.nora(0.01), optax_nora.keep_row_norms())
    """
    return _stateless(restore_norms, weight_dimension_numbers, whole_model=True)
