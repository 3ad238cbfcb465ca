"""Rows that turn and stretch: each does its own step, and neither sees the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from test_rows import apply, every_kernel, normal, rows

import optax_nora
from optax_nora import nora, scale_by_nora, scale_by_row_radius

EPS = float(np.finfo(np.float32).eps)
IN_OUT = MuonDimensionNumbers((0,), (1,))


def change(h, w):
    """Relative change of the length of rows along the last axis, for a learning rate of 1."""
    lengths = [np.linalg.norm(x, axis=-1) for x in (h, w)]
    return (np.sum(h * w, axis=-1) / np.prod(lengths, axis=0))[..., None]


@every_kernel
def test_both_parts(shape, numbers):
    h, w = normal(*shape), normal(*shape, seed=1)
    step = apply(scale_by_row_radius(0.5, weight_dimension_numbers=numbers), h, w)
    h, w = rows(h, numbers), rows(w, numbers)
    expected = reference.direction(h, w) + 0.5 * change(h, w) * w
    # Entries of a few units, with a handful of roundings each.
    np.testing.assert_allclose(rows(step, numbers), expected, rtol=0, atol=16 * EPS)


@pytest.mark.parametrize("radial", [0.0, 0.3, 2.0])
def test_the_parts_are_separate(radial):
    h, w = normal(48, 7), normal(48, 7, seed=1)
    nora_alone = np.float64(apply(scale_by_nora(beta=0.0), h, w))
    step = np.float64(apply(scale_by_nora(beta=0.0, radial=radial), h, w))
    h, w = np.float64(h), np.float64(w)
    along = np.sum(step * w, axis=0) / np.sum(w * w, axis=0)
    # Entries of a few units, to a few roundings.
    np.testing.assert_allclose(step - along * w, nora_alone, rtol=0, atol=8 * EPS)
    np.testing.assert_allclose(along, radial * change(h.T, w.T)[:, 0], rtol=0, atol=8 * EPS)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_the_identity_of_lengths(weight_decay):
    h, w = normal(48, 7), normal(48, 7, seed=1)
    tx = nora(0.1, radial=0.5, row_scale="rms", weight_decay=weight_decay)
    after = w + apply(tx, {"kernel": h}, {"kernel": w})["kernel"]
    s = 0.2 * 48**0.5
    w, h = np.float64(w.T), np.float64(h.T)
    kept = 1 - 0.1 * s * 0.5 * change(h, w)[:, 0] - 0.1 * weight_decay
    expected = kept**2 * np.sum(w**2, axis=-1) + (0.1 * s) ** 2
    np.testing.assert_allclose(np.sum(np.float64(after) ** 2, axis=0), expected, rtol=16 * EPS)


def test_a_loss_that_ignores_lengths_gets_noras_steps():
    def loss(w):
        return jnp.sum((w / jnp.linalg.norm(w, axis=0)) * normal(48, 7))

    w = normal(48, 7, seed=1)
    g = jax.grad(loss)(w)
    plain, stretched = (apply(scale_by_nora(radial=radial), g, w) for radial in (None, 1.0))
    # The gradient is orthogonal to w to rounding.
    np.testing.assert_allclose(stretched, plain, rtol=0, atol=8 * EPS)


def test_longer_and_shorter():
    w = np.ones((4, 2), np.float32)
    h = np.float32([-2, 3]) * w
    after = w - 0.1 * np.asarray(apply(scale_by_row_radius(), h, w))
    # Parallel rows: only noise is left across, which is no step.
    np.testing.assert_allclose(after, [[1.1, 0.9]] * 4, rtol=2 * EPS)


def test_zero_rows_of_the_weight_and_of_the_update():
    h, w = normal(6, 3), normal(6, 3, seed=1)
    w[:, 0], h[:, 1] = 0, 0
    step = np.asarray(apply(scale_by_row_radius(), h, w))
    np.testing.assert_allclose(step[:, 0], h[:, 0] / np.linalg.norm(h[:, 0]), rtol=4 * EPS)
    assert not step[:, 1].any()
    assert not np.asarray(apply(scale_by_row_radius(), 0 * h, w)).any()


def test_rows_under_eps_make_shorter_steps_of_both_kinds():
    h, w = normal(6, 3), normal(6, 3, seed=1)
    h /= np.linalg.norm(h, axis=0)
    tiny = apply(scale_by_row_radius(eps=1e-10), np.float32(1e-12) * h, w)
    cosine = np.sum(h * w, axis=0) / np.linalg.norm(w, axis=0)
    expected = 1e-2 * reference.project(h.T, w.T).T + 1e-2 * cosine * w
    np.testing.assert_allclose(tiny, expected, rtol=0, atol=1e-2 * 16 * EPS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    h, w = (jnp.asarray(normal(12, 7, seed=s), dtype) for s in (0, 1))
    half, full = (apply(scale_by_row_radius(), *x) for x in ((h, w), map(jnp.float32, (h, w))))
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, full.astype(dtype))


def test_gradients_through_it_are_finite():
    h, w = normal(6, 5), normal(6, 5, seed=1)
    h[:, 1], w[:, 2] = 0, 0
    h[:, 3], w[:, 3] = 0, 0
    h[:, 4] = 2 * w[:, 4]

    def total(h, w):
        return jnp.sum(normal(6, 5, seed=2) * apply(scale_by_row_radius(), h, w))

    for derivative in jax.jit(jax.grad(total, argnums=(0, 1)))(h, w):
        assert np.isfinite(derivative).all()


def test_chain_and_option():
    h, w = normal(12, 7), normal(12, 7, seed=1)
    one = apply(scale_by_nora(radial=0.5), h, w)
    two = apply(optax.chain(optax.trace(0.95, nesterov=True), scale_by_row_radius(0.5)), h, w)
    np.testing.assert_allclose(one, two, rtol=0, atol=16 * EPS)


def test_it_can_be_injected_and_scheduled():
    params = {"kernel": jnp.asarray(normal(12, 7))}
    grads = {"kernel": jnp.asarray(normal(12, 7, seed=1))}
    tx = optax.inject_hyperparams(nora)(0.1, radial=optax.linear_schedule(1.0, 0.0, 2))
    state = tx.init(params)
    for radial in (1.0, 0.5, None):
        updates, state = tx.update(grads, state, params)
        plain = apply(nora(0.1, radial=radial), grads, params)
        np.testing.assert_allclose(updates["kernel"], plain["kernel"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [scale_by_row_radius, lambda x: nora(0.1, radial=x)])
def test_out_of_range(make):
    with pytest.raises(ValueError, match=r"radial=-0.5 is out of range: it lies in \[0, inf\)"):
        make(-0.5)


# What it is for: weights that must find their lengths


def final_loss(tx, w):
    """Linear regression of 32 inputs and 64 outputs, 500 steps."""
    x = jax.random.normal(jax.random.key(0), (1024, 32))
    target = jax.random.normal(jax.random.key(1), (32, 64)) / 4

    def loss(params):
        return jnp.mean(jnp.sum((x @ (params["kernel"] - target)) ** 2, axis=-1)) / 2

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = {"kernel": w}
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=500)
    return loss(params)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.02])
def test_linear_regression_from_zero_and_small(size):
    w = size * jax.random.normal(jax.random.key(2), (32, 64))
    rate = optax.linear_schedule(0.05, 0.0, 500)
    run = jax.jit(lambda w, radial: final_loss(optax_nora.nora(rate, radial=radial), w))
    assert run(w, 1.0) < 1e-3
    assert run(w, 0.0) > 1
