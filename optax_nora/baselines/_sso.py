"""SSO: steepest descent on the sphere of the spectral norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._checks import require_params
from optax_nora._leaves import PyTree
from optax_nora._momentum import scale_by_momentum
from optax_nora._routing import WeightDimensionNumbers, map_rows, routes_of
from optax_nora._rows import widen
from optax_nora.baselines._whole import require_whole, sharded_by_jax

Array = jax.Array

POWER_STEPS = 64  # for the top singular pair of the weight
BISECTIONS = 20  # for lambda, from twice the nuclear norm down to a millionth of that
# Quintic Newton-Schulz: five steps that raise small singular values, five that converge to 1.
QUINTICS = 5 * ((3.4445, -4.7750, 2.0315),) + 5 * ((1.875, -1.25, 0.375),)


def _as_matrices(fn: Callable[..., Array], rows: Rows, *arrays: Array) -> Array:
    """``fn`` on matrices (in, out), for every matrix along the batch axes."""
    require_whole(rows)
    shape = arrays[0].shape
    batch = rows.batch(len(shape))
    order = batch + rows.reduction + rows.output
    sizes = (-1, rows.fan_in(shape), rows.fan_out(shape))

    def of_all(*arrays: Array) -> Array:
        flat = (a.transpose(order).reshape(sizes) for a in arrays)
        out = jax.vmap(fn)(*flat).reshape([shape[axis] for axis in order])
        return out.transpose([order.index(axis) for axis in range(len(shape))])

    return sharded_by_jax(of_all, arrays[0])(*arrays)


def _unit(x: Array) -> Array:
    norm = jnp.linalg.norm(x)
    return x / jnp.where(norm > 0, norm, 1)


def _msign(x: Array) -> Array:
    """The polar factor U V^T of x = U S V^T."""
    if x.shape[0] > x.shape[1]:
        return _msign(x.T).T

    def quintic(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = x @ x.T
        return a * x + (b * gram + c * gram @ gram) @ x, None

    return jax.lax.scan(quintic, _unit(x), jnp.asarray(QUINTICS, x.dtype))[0]


def _top_pair(w: Array) -> tuple[Array, Array, Array]:
    """The largest singular value of w and its vectors, by power iteration from a fixed start."""
    start = _unit(jax.random.normal(jax.random.key(0), (w.shape[1],), w.dtype))
    v = jax.lax.fori_loop(0, POWER_STEPS, lambda _, v: _unit(w.T @ (w @ v)), start)
    return jnp.linalg.norm(w @ v), _unit(w @ v), v


def _radius(w: Array) -> float:
    return (w.shape[1] / w.shape[0]) ** 0.5


def _steepest(m: Array, w: Array) -> Array:
    """R msign(M + lambda Theta), with lambda such that it is orthogonal to Theta."""
    _, u, v = _top_pair(w)
    theta = jnp.outer(u, v)
    norm, m = jnp.linalg.norm(m), _unit(m)
    # The inner product grows with lambda, and changes its sign within twice the nuclear norm.
    bound = 2 * min(m.shape) ** 0.5

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        below = jnp.vdot(theta, _msign(m + middle * theta)) < 0
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    ends = (jnp.full((), -bound, m.dtype), jnp.full((), bound, m.dtype))
    low, high = jax.lax.fori_loop(0, BISECTIONS, halve, ends)
    return jnp.where(norm > 0, _radius(w) * _msign(m + (low + high) / 2 * theta), 0)


def _retraction(w: Array) -> Array:
    """What brings w to the spectral norm R; nothing for a zero matrix."""
    sigma, *_ = _top_pair(w)
    return jnp.where(sigma > 0, (_radius(w) / jnp.where(sigma > 0, sigma, 1) - 1) * w, 0)


def scale_by_sso(
    beta: Any = 0.9,
    momentum: Any = None,
    mu_dtype: Any = None,
    *,
    weight_dimension_numbers: WeightDimensionNumbers = None,
) -> optax.GradientTransformation:
    r"""Spectral sphere optimizer: steps of spectral norm R, tangent to the sphere of that norm.

    With :math:`R = \sqrt{out / in}`, the top singular vectors u, v of the weight and
    :math:`\Theta = u v^\top`, find :math:`\lambda` by bisection and step by R times

    .. math::
      \Phi = \mathrm{msign}(M + \lambda \Theta), \quad \langle \Theta, \Phi \rangle = 0

    `to_spectral_sphere`, last in the chain, brings the weights back to the sphere. For comparisons
    alone: a step makes 630 products of whole matrices.

    Args, returns and raises are those of `scale_by_nora`.

    References:
      Spectral sphere optimizer, as the Nora paper compares with it.
    """
    return scale_by_momentum(
        lambda rows, h, w, _: _as_matrices(_steepest, rows, h, w),
        beta,
        momentum,
        mu_dtype,
        weight_dimension_numbers,
    )


def to_spectral_sphere(
    *, weight_dimension_numbers: WeightDimensionNumbers = None
) -> optax.GradientTransformation:
    r"""Bring matrices to the spectral norm :math:`R = \sqrt{out / in}` before they are stepped.

    .. math::
      w \leftarrow \frac{R}{\sigma(w)} w + \mathrm{update}

    To be last in a chain, after the learning rate.

    Args:
      weight_dimension_numbers: the same as the optimizer before it has. Nothing given: the default
        routing of `nora`.

    Returns:
      A stateless `optax.GradientTransformation`.

    Examples:
      >>> import optax
      >>> from optax_nora import baselines, with_adamw
      >>> tx = optax.chain(
      ...     with_adamw(baselines.scale_by_sso(), 0.01), baselines.to_spectral_sphere()
      ... )
    """

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        require_params(params)

        def add(rows: Rows, step: Array, w: Array) -> Array:
            return step + _as_matrices(_retraction, rows, widen(w)).astype(step.dtype)

        routes = routes_of(params, weight_dimension_numbers, whole_model=True)
        return map_rows(add, routes, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)
