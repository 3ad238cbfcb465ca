"""optax's Muon behind Nora's routing."""

from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows
from optax_nora._checks import check_moment_dtype, check_range
from optax_nora._leaves import PyTree
from optax_nora._routing import WeightDimensionNumbers, map_rows, routes_of
from optax_nora.baselines._whole import require_whole, sharded_by_jax


def scale_by_muon(
    beta: Any = 0.95,
    eps: Any = 1e-10,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""`optax.contrib.scale_by_muon` with Nora's routing, on any mesh.

    Its steps are not scaled by the matrix's shape: `scale_by_row_shape` after it gives the scale of
    `optax.contrib.muon`.

    Args:
      beta: decay of the momentum, in [0, 1).
      eps: added to the norm before the iterations.
      mu_dtype: dtype that the momentum is stored in. None: the parameter's.
      nesterov: whether to look ahead, with weight beta.
      weight_dimension_numbers: which axes are a row, as for `scale_by_nora`.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: at ``update`` if `in_shard_map` says that a matrix is split.

    References:
      `optax.contrib.scale_by_muon`.
    """
    check_range("beta", beta, high=1, below=True)
    check_range("eps", eps)
    check_moment_dtype(mu_dtype)

    def numbers(tree: PyTree) -> PyTree:
        def spec(rows: Rows, _: Any) -> MuonDimensionNumbers:
            require_whole(rows)
            return MuonDimensionNumbers(rows.reduction, rows.output)

        return map_rows(spec, routes_of(tree, weight_dimension_numbers), tree)

    inner = optax.contrib.scale_by_muon(
        beta=beta, eps=eps, mu_dtype=mu_dtype, nesterov=nesterov, weight_dimension_numbers=numbers
    )

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        updates, new = sharded_by_jax(inner.update, (updates, state))(updates, state)
        # optax lets the dtype of the gradients into the state; `lax.scan` would refuse it.
        return updates, new._replace(mu=optax.tree.cast_like(new.mu, state.mu))

    def init(params: PyTree) -> Any:
        routes_of(params, weight_dimension_numbers)  # raises what is wrong with them
        return inner.init(params)

    return optax.GradientTransformation(init, update)
