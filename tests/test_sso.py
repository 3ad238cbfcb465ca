"""SSO: on the sphere of the spectral norm, with steps tangent to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from peers import PEERS
from tolerance import of_steps

LR = 0.01
SHAPES = [(12, 30), (30, 12), (16, 16)]


def weight(shape, seed=0):
    """Of spectral norm R, with a gap behind the first singular value."""
    u, s, vt = np.linalg.svd(np.random.default_rng(seed).normal(size=shape), full_matrices=False)
    s = np.linspace(0.8, 0.1, len(s))
    s[0] = 1.0
    return np.float32((u * s * np.sqrt(shape[1] / shape[0])) @ vt)


def run(params, grads, steps=1, **settings):
    tx = PEERS["sso"](LR, **settings)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def gradient(shape, seed=1):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_step_is_tangent_and_of_spectral_norm_r(shape):
    w, radius = weight(shape), np.sqrt(shape[1] / shape[0])
    end = run({"kernel": w}, {"kernel": gradient(shape)})["kernel"]
    phi = (w - np.float64(end)) / (LR * radius)
    u, s, vt = np.linalg.svd(np.float64(w))
    # 1e-5 is what 20 bisections and power iteration with a gap of 0.8 leave; float32 over LR.
    assert abs(u[:, 0] @ phi @ vt[0]) < 1e-3
    # msign: every singular value is 1, to what ten Newton-Schulz steps leave of a small one.
    np.testing.assert_allclose(np.linalg.svd(phi)[1], 1, atol=2e-2)
    assert s[0] == pytest.approx(radius, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_descends_as_far_as_a_tangent_step_can(shape):
    # Against random tangent directions of spectral norm 1.
    w, g = weight(shape), gradient(shape)
    end = run({"kernel": w}, {"kernel": g})["kernel"]
    descent = np.sum((w - np.float64(end)) * g) / (LR * np.sqrt(shape[1] / shape[0]))
    u, _, vt = np.linalg.svd(np.float64(w))
    theta = np.outer(u[:, 0], vt[0])
    for seed in range(50):
        z = 0.5 * np.random.default_rng(seed).normal(size=shape) + g
        z -= np.sum(z * theta) * theta
        assert np.sum(z * g) / np.linalg.norm(z, 2) <= descent * (1 + 1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_return_to_the_sphere_from_any_scale(shape):
    radius = np.sqrt(shape[1] / shape[0])
    params = run({"kernel": 7 * weight(shape)}, {"kernel": gradient(shape)}, steps=5)
    # One step off the sphere, tangent to it: LR, and LR squared.
    assert np.linalg.norm(params["kernel"], 2) == pytest.approx(radius, rel=2 * LR)


def test_batch_axes_are_a_loop():
    w, g = (np.stack([make((12, 30), seed) for seed in (3, 4)]) for make in (weight, gradient))
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    both = run({"kernel": w}, {"kernel": g}, weight_dimension_numbers=numbers)["kernel"]
    for i in range(2):
        alone = run({"kernel": w[i]}, {"kernel": g[i]})["kernel"]
        # Products batched round otherwise; bisection stops at 2**-20, singular values are small.
        np.testing.assert_allclose(both[i], alone, rtol=0, atol=of_steps(30, LR, 1, condition=1000))


def test_zero_weights_and_gradients_give_no_nan():
    zero = {"kernel": jnp.zeros((4, 6)), "bias": jnp.zeros(6)}
    end = run(zero, zero, steps=2)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(end))


def test_only_matrices_are_retracted():
    params = {"embed": 5 * jnp.ones((6, 4)), "kernel": jnp.asarray(weight((12, 30)))}
    end = run(params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(end["embed"], params["embed"])
