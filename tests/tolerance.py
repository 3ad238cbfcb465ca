"""How far rounding alone may carry two computations of the same numbers apart, on any CPU."""

import numpy as np

EPS = float(np.finfo(np.float32).eps)
# Five Newton-Schulz iterations, of slope 3.4445 at 0, stretch an error by about this at most.
NEWTON_SCHULZ = 3.4445**5
# Of a row of the direction by kernels for blocks. The last three quintics multiply by factors
# rounded to float16, whose entries of up to 4 are off by 2**-11, and whose least eigenvalue is 1/3.
# The rest is far less.
BLOCK_KERNELS = 3 * 4 * 2.0**-11 / (1 / 3)


def tolerance(terms: int = 1, *, size: float = 1.0, condition: float = 1.0, eps: float = EPS):
    """For numbers of at most ``size`` that are made of sums of ``terms`` products.

    In any order and however fused, such a sum is off by at most ``terms`` eps / 2 of the sizes of
    its terms, and what surrounds it (a quotient, a root, a scale, the last rounding) by four times
    eps / 2. Both computations may be off, in opposite ways: hence eps. ``condition`` is the factor
    by which what comes after stretches an error.
    """
    return (terms + 4) * condition * eps * size


def of_steps(terms: int, rate: float, steps: int, *, condition: float = 1.0, eps: float = EPS):
    """For weights of up to 4 after ``steps`` whose entries, of at most ``rate``, are such sums."""
    step = tolerance(terms, size=rate, condition=condition, eps=eps)
    return steps * (tolerance(size=4, eps=eps) + step)
