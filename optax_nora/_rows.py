"""Arithmetic of the rows of one array: project, normalise, scale, keep their norms.

A row is all the weights of one output. Nothing here reshapes, transposes or multiplies matrices:
rows are reduced over named axes with ``keepdims``, so any sharding works and nothing is
communicated unless a reduction axis is sharded.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_nora._axes import Rows
from optax_nora._checks import check_choice, check_range

Array = jax.Array

# A projection this small against its row, in units of rounding, is noise: see docs/numerics.md.
NOISE = 8.0
# Weights are times this before they are squared: rows of 1e-13 to 1e25 neither over- nor underflow.
SHRINK = 2.0**-20


def widen(x: Array) -> Array:
    """``x`` in float32 at the least: float64 and complex stay what they are."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), jnp.float32))


def product(a: Array, b: Array) -> Array:
    """The terms of the real inner product; for complex numbers that of (real, imaginary) pairs."""
    return jnp.real(a * jnp.conj(b)) if jnp.iscomplexobj(a) else a * b


def squares(rows: Rows, u: Array) -> tuple[Array, Array]:
    """|u|^2 times the square of a power of two, and that power: 1, unless |u|^2 overflows."""
    tiny = _tiny(u)
    uu, tiny_uu = rows.sums(product(u, u), product(tiny * u, tiny * u))
    long = ~jnp.isfinite(uu)
    return jnp.where(long, tiny_uu, uu), jnp.where(long, tiny, 1)


def _tiny(u: Array) -> float:
    return 2.0 ** (-5 * jnp.finfo(u.dtype).maxexp // 8)


def project_twice(rows: Rows, h: Array, w: Array) -> tuple[Array, Array, Array]:
    """Rows of h without their part along w, squared norms, 0 where only noise is left, and powers.

    Rows and squares are those times the power: see `squares`.
    One projection leaves a leak of about eps / rho of the result, rho = |u| / |h|; a second one
    removes it and costs no further pass over memory, as its norm follows from <u, w> and <u, u>.
    """
    short = SHRINK * w
    # The sum of absolute values is more than |h|, and overflows only where h does.
    length, hw, ww = rows.sums(jnp.abs(h), product(h, short), product(short, short))
    power = jnp.where(length < 2.0 ** (jnp.finfo(h.dtype).maxexp // 2 - 1), 1, _tiny(h))
    ww = jnp.where(ww > 0, ww, jnp.inf)  # nothing is along a row of 0
    # No product with 1 / ww: where that is computed again, it may round otherwise.
    along = SHRINK * hw / ww
    u = h - along * w
    u = jnp.where(power < 1, power * u, u)  # of a product alone XLA's passes may round otherwise
    uu, uw = rows.sums(product(u, u), product(u, short))
    leak = SHRINK * uw / ww
    square = uu - uw * (leak / SHRINK)
    # |h|^2 = |u|^2 + <h, w>^2 / |w|^2 needs no sum of its own. The square is scaled up, as small
    # ones scaled down underflow. NaN is no noise: it goes through.
    hh = uu + (power * hw) * (power * along / SHRINK)
    noise = square * (NOISE * jnp.finfo(square.dtype).eps) ** -2 <= hh
    return u - leak * w, jnp.where(noise, 0, square), power


def divide_by_norm(u: Array, square: Array, eps: Any) -> Array:
    """``u / max(|u|, eps)``, and 0 where the square is."""
    # Infinity in the place of 0, and before the root, whose derivative is then finite too.
    norm = jnp.sqrt(jnp.where(square == 0, jnp.inf, square))
    return u / jnp.maximum(norm, eps)


def project(rows: Rows, h: Array, w: Array) -> Array:
    """``u_i = h_i - <h_i, w_i> / |w_i|^2 w_i``, exactly 0 where that is rounding noise."""
    u, square, power = project_twice(rows, h, w)
    return jnp.where(square == 0, 0, u / power)


def normalize(rows: Rows, h: Array, eps: Any) -> Array:
    """``d_i = h_i / max(|h_i|, eps)``, with 0 / 0 = 0."""
    square, power = squares(rows, h)
    return divide_by_norm(power * h, square, power * eps)


def project_and_normalize(rows: Rows, h: Array, w: Array, eps: Any) -> Array:
    """`normalize` of `project` in three passes over memory: two to reduce, one to write."""
    u, square, power = project_twice(rows, h, w)
    return divide_by_norm(u, square, power * eps)


def restore_norms(rows: Rows, update: Array, w: Array) -> Array:
    """The update that ends where w + update points, at the norm that each row of w has now."""
    end = w + update
    ww, ee = rows.sums(*(product(SHRINK * x, SHRINK * x) for x in (w, end)))
    keep = (ww > 0) & (ee > 0)
    ratio = jnp.sqrt(jnp.where(keep, ww, 1)) / jnp.sqrt(jnp.where(keep, ee, 1))
    return jnp.where(keep, ratio * end - w, update)


ROW_SCALES = ("fan_ratio", "unit", "width", "rms")
RMS = 0.2  # of AdamW's updates, about: so its learning rates transfer


def row_scale_of(row_scale: str, fan_in: int, fan_out: int, base_fan_in: Any) -> Any:
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
            return RMS * math.sqrt(fan_in)
    raise AssertionError(row_scale)  # check_row_scale comes first


def check_row_scale(row_scale: str, base_fan_in: Any) -> None:
    """Raise for a scale that is unknown or lacks its width."""
    check_choice("row_scale", row_scale, ROW_SCALES)
    if row_scale == "width" and base_fan_in is None:
        raise ValueError(
            "row_scale='width' needs base_fan_in, the fan-in at which the learning rate was tuned"
        )
    check_range("base_fan_in", base_fan_in, 1, optional=True)
