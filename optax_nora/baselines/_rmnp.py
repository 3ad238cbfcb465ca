"""RMNP: Nora without its projection."""

from typing import Any

import optax

from optax_nora._checks import check_range
from optax_nora._momentum import scale_by_momentum
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import normalize
from optax_nora.baselines._signature import like_nora


@like_nora()
def rmnp(
    beta: Any,
    momentum: Any,
    eps: Any,
    mu_dtype: Any,
    weight_dimension_numbers: WeightDimensionNumbers,
) -> optax.GradientTransformation:
    r"""Row-momentum normalized preconditioning: `nora` without the projection.

    .. math::
      d_i = h_i / \max(|h_i|, \epsilon)

    Args, returns and raises are those of `nora`; its authors take a weight decay of 0.1.

    References:
      The RMNP baseline of the Nora authors' runs.
    """
    check_range("eps", eps, 0)
    return scale_by_momentum(
        lambda h, w, rows: normalize(h, rows, eps),
        beta,
        momentum,
        mu_dtype,
        weight_dimension_numbers,
    )
