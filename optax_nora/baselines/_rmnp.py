"""RMNP: Nora without its projection."""

from typing import Any

import optax

from optax_nora._momentum import scale_by_momentum
from optax_nora._routing import WeightDimensionNumbers
from optax_nora._rows import normalize


def scale_by_rmnp(
    beta: Any = 0.95,
    momentum: Any = None,
    eps: Any = 1e-10,
    mu_dtype: Any = None,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Row-momentum normalized preconditioning: `scale_by_nora` without the projection.

    .. math::
      d_i = h_i / \max(|h_i|, \epsilon)

    Args, returns and raises are those of `scale_by_nora`. Its authors take a weight decay of 0.1.

    References:
      The RMNP baseline of the Nora authors' runs.
    """
    return scale_by_momentum(
        lambda rows, h, _, eps: normalize(rows, h, eps),
        beta,
        momentum,
        mu_dtype,
        weight_dimension_numbers,
        eps,
    )
