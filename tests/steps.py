"""The numbers, rows and arrays of a step, for tests of kernels."""

import jax.numpy as jnp
import numpy as np

from optax_nora._axes import Rows
from optax_nora._step import Coefficients

NUMBERS = Coefficients(
    grad_scale=0.5,
    beta=0.9,
    one_minus_beta=1 - 0.9,
    ahead=0.8,
    one_minus_ahead=1 - 0.8,
    eps=1e-10,
    row_scale=1.3,
    weight_decay=0.1,
    learning_rate=0.02,
)
FIRST, LAST = Rows((0,), (1,)), Rows((1,), (0,))


def random(shape, dtypes, seed=0):
    """Gradient, momentum and weight."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for dtype in dtypes]
