"""One step of one matrix, by XLA: what kernels do is this."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_nora._axes import Rows
from optax_nora._rows import widen

Array = jax.Array
# Of the rows, the look-ahead momentum h, the weight w and eps: the rows of the step before scaling.
Direction = Callable[[Rows, Array, Array, Any], Array]


class Coefficients(NamedTuple):
    """The numbers of one matrix's step, for kernels in this order as one vector of float32."""

    grad_scale: Any
    beta: Any
    one_minus_beta: Any  # of its own, as in float32 the difference would lose digits
    ahead: Any  # weight of the momentum in the look-ahead
    one_minus_ahead: Any
    eps: Any
    row_scale: Any = 1.0
    weight_decay: Any = 0.0
    learning_rate: Any = 1.0


def read(coefficients: Any) -> Coefficients:
    """Within a kernel, the numbers of the vector that it is given."""
    return Coefficients(*(coefficients[k] for k in range(len(Coefficients._fields))))


def one_minus(rate: Any) -> Any:
    """``1 - rate``: an injected rate comes in the parameters' dtype, where that loses digits."""
    return 1 - (rate if isinstance(rate, float | int) else widen(rate))


def look_ahead(
    rows: Rows, direction: Direction, c: Coefficients, g: Array, mu: Array, w: Array
) -> tuple[Array, Array]:
    """The new momentum, and the direction of the look-ahead, in float32 at the least.

    mu <- beta mu + (1 - beta) g, and h = ahead mu + (1 - ahead) g.
    """
    g = c.grad_scale * widen(g)
    mu = c.one_minus_beta * g + c.beta * widen(mu)
    h = c.one_minus_ahead * g + c.ahead * mu
    return mu, direction(rows, h, widen(w), c.eps)


def by_xla(
    rows: Rows,
    direction: Direction,
    c: Coefficients,
    g: Array,
    mu: Array,
    w: Array,
    *,
    write_weights: bool,
) -> tuple[Array, Array]:
    """The momentum after one step, and the weight or its update, each in its own dtype.

    An update is rounded to the weight's dtype before it is added, as in `optax.apply_updates`.
    """
    new_mu, d = look_ahead(rows, direction, c, g, mu, w)
    update = -c.learning_rate * (c.row_scale * d + c.weight_decay * widen(w))
    update = update.astype(w.dtype)
    return new_mu.astype(mu.dtype), (w + update).astype(w.dtype) if write_weights else update
