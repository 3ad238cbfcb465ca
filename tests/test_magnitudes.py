"""Numbers of any size that float32 holds: rows whose squares overflow are turned as all others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from tolerance import tolerance

import optax_nora
from optax_nora import _kernels
from optax_nora._axes import Rows
from optax_nora._rows import project, project_and_normalize, restore_norms
from optax_nora._step import Coefficients

ROWS = Rows((1,), (0,))
# Of entries, whose squares overflow past 1.8e19, within what docs/numerics.md promises.
H_SIZES = (1e-15, 1.0, 1e15, 1.7e19, 1e25, 1e36)
W_SIZES = (1e-10, 1.0, 1e10, 1e17, 1e20, 1e23)


def normal(size, seed):
    return (size * np.random.default_rng(seed).standard_normal((6, 40))).astype(np.float32)


@functools.cache
def compiled(axis):
    interpret = jax.default_backend() != "gpu"
    step = functools.partial(_kernels.step, write_weights=False, interpret=interpret)
    return jax.jit(functools.partial(step, rows=Rows((axis,), (1 - axis,))))


def by_kernel(h, w, axis):
    c = Coefficients(1.0, 0.0, 1.0, 0.0, 1.0, eps=1e-20, learning_rate=-1.0)
    h, w = (jnp.asarray(x if axis else x.T) for x in (h, w))
    _, d = compiled(axis)(jnp.float32(c), h, jnp.zeros_like(h), w)
    return d if axis else d.T


@pytest.mark.parametrize(
    ("h_size", "w_size"),
    [(h, w) for h in H_SIZES for w in W_SIZES if h * w < 1e41 and abs(math.log10(h / w)) < 36],
)
def test_the_direction_of_any_size(h_size, w_size):
    h, w = normal(h_size, 0), normal(w_size, 1)
    expected = reference.direction(h.astype(np.float64), w.astype(np.float64))
    close = functools.partial(np.testing.assert_allclose, desired=expected, rtol=0)
    close(project_and_normalize(ROWS, jnp.asarray(h), jnp.asarray(w), 1e-20), atol=tolerance(40))
    for axis in (0, 1):
        close(by_kernel(h, w, axis), atol=tolerance(40))


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_a_long_row_changes_no_bit_of_its_neighbours(size):
    h, w = normal(1, 0), normal(1, 1)
    run = jax.jit(lambda h, w: project_and_normalize(ROWS, h, w, 1e-10))
    plain = run(h, w)
    h[0] *= size
    w[1] *= size
    np.testing.assert_array_equal(run(h, w)[2:], plain[2:])


def test_projection_keeps_the_length_of_long_rows():
    h, w = normal(1e30, 0), normal(1e10, 1)
    expected = reference.project(h.astype(np.float64), w.astype(np.float64))
    got = project(ROWS, jnp.asarray(h), jnp.asarray(w))
    np.testing.assert_allclose(got / 1e30, expected / 1e30, rtol=0, atol=tolerance(40, size=4))


def test_norms_of_long_rows_are_kept():
    w = normal(1e23, 0)
    step = restore_norms(ROWS, jnp.asarray(normal(1e22, 1)), jnp.asarray(w))
    norms = [np.linalg.norm(x.astype(np.float64), axis=1) for x in (w + np.asarray(step), w)]
    np.testing.assert_allclose(norms[0] / norms[1], 1, rtol=tolerance(40))


@pytest.mark.parametrize("parallel", [0.0, 100.0])
def test_no_row_is_lost_where_squares_begin_to_overflow(parallel):
    h, w = normal(1, 0), normal(1, 1)
    lengths = 2.0 ** np.linspace(50, 68, 40)
    run = jax.jit(jax.vmap(lambda x: project_and_normalize(ROWS, x * (h + parallel * w), w, 1e-10)))
    d = run(jnp.asarray(lengths, jnp.float32))
    np.testing.assert_allclose(jnp.linalg.norm(d, axis=-1), 1, rtol=tolerance(40))


def test_a_row_under_eps_shrinks_by_the_same_factor_beside_a_long_weight():
    h, w = normal(1e-12, 0), normal(1e22, 1)
    short = project_and_normalize(ROWS, jnp.asarray(h), jnp.asarray(w), 1e-10)
    exact = reference.project(h.astype(np.float64), w.astype(np.float64)) / 1e-10
    np.testing.assert_allclose(short, exact, rtol=0, atol=tolerance(40, size=0.1))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("shape", [(16, 4), (4, 16)])
def test_one_huge_gradient_stops_no_row(backend, shape):
    w, g = (jax.random.normal(jax.random.key(k), shape) for k in (0, 1))
    params = {"kernel": w}
    tx = optax_nora.nora(1.0, row_scale="unit", backend=backend)
    tx = optax.apply_if_finite(tx, max_consecutive_errors=3)
    update, state = jax.jit(tx.update), tx.init(params)
    for t in range(6):
        updates, state = update({"kernel": g * (1e25 if t == 1 else 1)}, state, params)
        lengths = jnp.linalg.norm(updates["kernel"], axis=0)
        np.testing.assert_allclose(lengths, 1, rtol=tolerance(shape[0]))
    assert state.total_notfinite == 0


def test_apply_if_finite_looks_at_gradients():
    params = {"kernel": jnp.ones((3, 2)).at[0, 1].set(2.0)}
    tx = optax.apply_if_finite(optax_nora.nora(0.1), max_consecutive_errors=3)
    bad = {"kernel": jnp.full((3, 2), jnp.nan)}
    updates, state = tx.update(bad, tx.init(params), params)
    assert not state.last_finite
    np.testing.assert_array_equal(updates["kernel"], 0)
