"""optax's Muon behind Nora's routing."""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from optax_nora._axes import Rows
from optax_nora._leaves import PyTree
from optax_nora._routing import WeightDimensionNumbers, map_rows
from optax_nora.baselines._signature import check_momentum, like_nora, require_whole


@like_nora()
def muon(
    beta: Any,
    momentum: Any,
    eps: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    r"""`optax.contrib.scale_by_muon` with Nora's routing, row scale and auxiliary AdamW.

    Args, returns and raises are those of `nora`, but optax's Muon looks ahead with beta or not at
    all: momentum is None, for look-ahead, or 1.

    References:
      `optax.contrib.muon`.
    """
    check_momentum(
        momentum,
        "optax's Muon looks ahead with beta (momentum=None) or not at all (momentum=1)",
    )

    def numbers(updates: PyTree) -> PyTree:
        def spec(rows: Rows, _: Any) -> MuonDimensionNumbers:
            require_whole(rows)
            return MuonDimensionNumbers(rows.reduction, rows.output)

        return map_rows(spec, weight_dimension_numbers, updates)

    inner = optax.contrib.scale_by_muon(
        beta=beta,
        eps=eps,
        mu_dtype=mu_dtype,
        nesterov=momentum is None,
        weight_dimension_numbers=numbers,
    )

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        step: Any = inner.update
        if jax.sharding.get_abstract_mesh().explicit_axes:
            # Such a mesh refuses the matrix products: in here jax chooses the shardings itself.
            specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (updates, state))
            step = jax.sharding.auto_axes(step, out_sharding=specs)
        updates, new = step(updates, state)
        # optax lets the dtype of the gradients into the state; `lax.scan` would refuse it.
        return updates, new._replace(mu=optax.tree.cast_like(new.mu, state.mu))

    return optax.GradientTransformation(inner.init, update)
