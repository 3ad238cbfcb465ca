"""What the rows of a matrix share, and the rows without it.

Row by row nothing can be seen of it: these are the sums over the outputs that Nora does without.
They are vectors, found by power steps; no matrix is multiplied, gathered or decomposed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import check_range
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import NOISE, normalize, product, stateless, unit

Array = jax.Array

POWER_STEPS = 3


def check_rank(name: str, rank: Any) -> None:
    """Raise for a number of directions that a trace or a schedule would have to know."""
    if not isinstance(rank, int):
        raise ValueError(
            f"{name}={rank!r} is no Python int; under optax.inject_hyperparams name it in "
            f"static_args={name!r}"
        )
    check_range(name, rank, 0)


def deflated(h: Array, rows: Rows, rank: int, steps: int = POWER_STEPS) -> Array:
    """Rows of h without their part in the ``rank`` directions that they share most.

    Exactly 0 where that leaves rounding noise; all of h where the matrix has no more than ``rank``
    rows or columns.
    """
    if rank == 0 or rank >= min(rows.fan_in(h.shape), rows.fan_out(h.shape)):
        return h
    (square,) = rows.sums(product(h, h))
    r = unit(h, square, 0.0)  # in what is shared, each row has one vote
    for _ in range(rank):
        r = _without_leading(r, rows, steps)
    (left,) = rows.sums(product(r, r))
    # A direction is a sum over the rows, each of which may round.
    roundings = NOISE + rows.fan_out(h.shape)
    noise = left <= (roundings * jnp.finfo(left.dtype).eps) ** 2
    return jnp.where(noise, 0, jnp.sqrt(jnp.where(noise, 1, square)) * r)


def _without_leading(r: Array, rows: Rows, steps: int) -> Array:
    """``r_i - <r_i, q> q``, q the leading direction: p is a number a row, q one a column."""
    # From the column that the rows have most in: it is seldom far from q, as a fixed start may be.
    (size,) = rows.across.sums(product(r, r))
    (p,) = rows.sums(jnp.real(jnp.where(size == rows.greatest(size), r, 0)))
    for _ in range(steps):
        (q,) = rows.across.sums(r * p)
        q = normalize(q, rows, 0.0)
        (p,) = rows.sums(product(r, q))
    return r - p * q


def deflate_rows(
    rank: int = 1,
    *,
    steps: int = POWER_STEPS,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Remove from each row of the updates its part in the directions that the rows share.

    Where :math:`r_i = h_i / |h_i|` are the rows at length 1, the direction q that they share is the
    unit vector of the greatest :math:`\sum_i \langle r_i, q \rangle^2`: the leading singular vector
    of R on its input side.

    .. math::
      h_i \leftarrow h_i - \langle h_i, q \rangle q

    It goes before `row_project` and `row_normalize`, which look at one row at a time: what all rows
    have in common is in each of their steps, and the steps add up to a matrix of a large spectral
    norm. ``nora(..., deflate=1)`` has it in its place, after the momentum.

    q comes of power steps, :math:`q \propto \sum_i p_i r_i` and then
    :math:`p_i = \langle r_i, q \rangle`, from :math:`p_i = r_{ij}` with the j of the greatest
    :math:`\sum_i r_{ij}^2`. Each direction costs 2 steps + 2 passes over the updates to reduce.
    Where axes are sharded, vectors as long as a row or a column are summed over the devices, and
    nothing is gathered.

    Args:
      rank: directions to remove, one after another. A matrix of no more rows or columns than that
        stays as it is.
      steps: power steps for each direction.
      weight_dimension_numbers: as for `row_project`. Batch axes are matrices of their own.

    Returns:
      A stateless `optax.GradientTransformation`; its updates are of the parameter's dtype, or of
      their own where ``update`` gets no params. A row of which only rounding noise is left becomes
      0.

    Raises:
      ValueError: if rank is no int or negative, steps are fewer than 1, or at ``init`` if the
        dimension numbers do not fit.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_nora
      >>> tx = optax.chain(
      ...     optax.trace(0.95, nesterov=True),
      ...     optax_nora.deflate_rows(),
      ...     optax_nora.row_project(),
      ...     optax_nora.row_normalize(),
      ... )
      >>> rows = {'kernel': jnp.array([[5.0, -5.0, 5.0], [1.0, 0.0, -1.0]])}  # columns are rows
      >>> tx = optax_nora.deflate_rows()
      >>> tx.update(rows, tx.init(rows))[0]['kernel'].round(2) + 0.0
      Array([[ 0.,  0.,  0.],
             [ 1.,  0., -1.]], dtype=float32)
    """
    check_rank("rank", rank)
    check_range("steps", steps, 1)
    return stateless(
        lambda rows, h, _: deflated(h, rows, rank, steps),
        weight_dimension_numbers,
        needs_params=False,
    )
