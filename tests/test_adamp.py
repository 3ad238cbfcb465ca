"""AdamP and SGDP: orthogonal where they say so, plain where they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import pytest
from tolerance import EPS, tolerance

LR, DECAY = 0.01, 0.1
PEERS = [peers.PEERS["adamp"], peers.PEERS["sgdp"]]
# In float32 Adam's 1 - b2 = 0.001 is off by 500 eps of itself, in two places.
BIAS = 1000 * EPS


def matrices(seed=0, shape=(24, 40)):
    return np.float32(np.random.default_rng(seed).normal(size=(2, *shape)))


def step(make, g, w, **settings):
    """The step alone, without the learning rate and its sign."""
    tx = make(LR, **settings)
    updates, _ = jax.jit(tx.update)({"kernel": g}, tx.init({"kernel": w}), {"kernel": w})
    return -np.float64(updates["kernel"]) / LR


def plain(make, g):
    """What Adam's first step and Nesterov's first step are."""
    return g / (np.abs(g) + 1e-8) if make is PEERS[0] else 1.9 * g


def across_rows(g, w):
    return g - np.sum(g * w, axis=0) / np.sum(w * w, axis=0) * w


@pytest.mark.parametrize("make", PEERS)
def test_rows_lose_their_radial_part_where_every_row_is_invariant(make):
    g, w = matrices()
    g = across_rows(g, w)
    d = step(make, g, w)
    cosines = np.sum(d * w, axis=0) / np.linalg.norm(d, axis=0) / np.linalg.norm(w, axis=0)
    assert np.abs(cosines).max() < tolerance(24)
    expected = across_rows(np.float64(plain(make, g)), np.float64(w))
    np.testing.assert_allclose(d, expected, rtol=0, atol=BIAS * np.abs(expected).max())


@pytest.mark.parametrize("make", PEERS)
def test_the_matrix_loses_its_radial_part_where_only_the_whole_is_invariant(make):
    g, w = matrices()
    g = g - np.sum(g * w) / np.sum(w * w) * w
    cosines = np.sum(g * w, axis=0) / np.linalg.norm(g, axis=0) / np.linalg.norm(w, axis=0)
    assert np.abs(cosines).max() > 0.1 / np.sqrt(len(w))  # some row is far from invariant
    d = step(make, g, w)
    assert abs(np.sum(d * w)) < tolerance(d.size) * np.linalg.norm(d) * np.linalg.norm(w)
    assert np.abs(np.sum(d * w, axis=0)).max() > 0.1


@pytest.mark.parametrize("make", PEERS)
@pytest.mark.parametrize(("radial", "ratio"), [(0.0, 0.1), (1.0, 1.0)])
def test_decay_is_a_tenth_where_the_step_was_projected(make, radial, ratio):
    g, w = matrices()
    g = across_rows(g, w) + radial * w
    decay = step(make, g, w, weight_decay=DECAY) - step(make, g, w)
    # A difference of two steps of up to 8; SGDP divides its decay by 1 - beta.
    ratio *= 10 if make is PEERS[1] else 1
    expected = ratio * DECAY * np.float64(w)
    np.testing.assert_allclose(decay, expected, rtol=0, atol=tolerance(24, size=8))


@pytest.mark.parametrize("make", PEERS)
def test_a_radial_gradient_gives_the_plain_optimizer(make):
    g, w = matrices()
    g = g + w
    np.testing.assert_allclose(step(make, g, w), plain(make, g), rtol=BIAS)


@pytest.mark.parametrize("make", PEERS)
def test_batch_axes_are_judged_one_by_one(make):
    (g, w), (h, v) = matrices(0), matrices(1)
    g, h = across_rows(g, w), h + v  # one is invariant, the other is not
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    both = step(make, np.stack([g, h]), np.stack([w, v]), weight_dimension_numbers=numbers)
    alone = [step(make, g, w), step(make, h, v)]
    np.testing.assert_allclose(both, alone, rtol=0, atol=tolerance(24, size=8))


@pytest.mark.parametrize("make", PEERS)
def test_the_decay_mask_holds(make):
    g, w = matrices()
    masked = step(make, g, w, weight_decay=DECAY, weight_decay_mask={"kernel": False})
    np.testing.assert_allclose(masked, step(make, g, w), rtol=0, atol=tolerance(24, size=8))


@pytest.mark.parametrize("make", PEERS)
def test_state_keeps_its_dtypes(make):
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16)}
    tx = make(LR, mu_dtype=jnp.bfloat16)
    state = tx.init(params)
    _, after = tx.update({"kernel": jnp.ones((4, 6))}, state, params)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)
