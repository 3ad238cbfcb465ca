"""The fused step against float64 and against the package; interpreted where there is no GPU."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers

import optax_nora
from benchmarks import fused

COEFFICIENTS = {
    "learning_rate": 0.02,
    "beta": 0.9,
    "momentum": 0.8,
    "weight_decay": 0.1,
    "row_scale": 1.3,
    "grad_scale": 0.5,
}


def random(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    g, mu, w = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    return jnp.asarray(g, dtype[0]), jnp.asarray(mu, dtype[1]), jnp.asarray(w, dtype[2])


def run(g, mu, w, reduction, **coefficients):
    interpret = jax.default_backend() != "gpu"
    call = functools.partial(fused.step, reduction=reduction, interpret=interpret, **coefficients)
    return jax.jit(call)(g, mu, w)


def exact(g, mu, w, reduction, *, beta, momentum, grad_scale, **c):
    g, mu, w = (np.asarray(x, np.float64) for x in (g, mu, w))
    g = grad_scale * g
    mu = beta * mu + (1 - beta) * g
    h = momentum * mu + (1 - momentum) * g

    def sums(x):
        return np.sum(x, axis=tuple(reduction), keepdims=True)

    u = h - sums(h * w) / sums(w * w) * w
    unit = u / np.sqrt(sums(u * u))
    return mu, -c["learning_rate"] * (c["row_scale"] * unit + c["weight_decay"] * w)


SHAPES = [  # ragged everywhere: no tile divides these
    ((5, 37), (1,)),
    ((3, 5, 61), (2,)),
    ((37, 5), (0,)),
    ((130, 131), (0,)),
    ((2, 70, 33), (1,)),
    ((3, 4, 5, 6), (1, 2)),
    ((3, 4, 5, 6), (2, 3)),
    ((7, 2, 9), (0,)),
    ((4, 1), (0,)),
]


@hypothesis.settings(max_examples=6)  # each one compiles
@hypothesis.given(
    case=st.sampled_from(SHAPES),
    dtypes=st.tuples(*[st.sampled_from([jnp.float32, jnp.bfloat16])] * 3),
    seed=st.integers(0, 2**31),
)
def test_every_shape_direction_and_dtype_agrees_with_float64(case, dtypes, seed):
    shape, reduction = case
    g, mu, w = random(shape, dtypes, seed)
    new_mu, new_w = run(g, mu, w, reduction, **COEFFICIENTS)
    want_mu, want_step = exact(g, mu, w, reduction, **COEFFICIENTS)
    assert new_mu.dtype == mu.dtype
    assert new_w.dtype == w.dtype
    # One rounding to the stored dtype, and a few in float32 before it. An update is rounded once
    # more to the weight's dtype.
    eps_mu, eps_w = (float(jnp.finfo(x.dtype).eps) for x in (mu, w))
    np.testing.assert_allclose(np.float64(new_mu), want_mu, rtol=eps_mu, atol=4e-7)
    scale = np.abs(np.float64(w)) + np.abs(want_step)
    assert np.all(np.abs(np.float64(new_w) - np.float64(w) - want_step) <= 2 * eps_w * scale)


@pytest.mark.parametrize(("shape", "reduction"), [((40, 30), (0,)), ((30, 40), (1,))])
def test_steps_as_the_package_does(shape, reduction):
    numbers = MuonDimensionNumbers(reduction, (1 - reduction[0],))
    tx = optax_nora.nora(0.02, weight_decay=0.1, row_scale="unit", weight_dimension_numbers=numbers)
    g, mu, w = random(shape, [jnp.float32] * 3, 0)
    theirs, state, ours, momentum = w, tx.init(w), w, 0 * mu
    for _ in range(3):
        updates, state = tx.update(g, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        momentum, ours = run(g, momentum, ours, reduction, learning_rate=0.02, weight_decay=0.1)
    # Three steps of 0.02 a row, each off by a few float32 roundings of a weight of order 1.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_a_row_along_its_weight_stays_where_it_is(reduction):
    _, mu, w = random((32, 32), [jnp.float32] * 3, 1)
    _, new = run(3 * w, 0 * mu, w, reduction, learning_rate=0.1)
    np.testing.assert_array_equal(new, w)


@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_rows_of_zeros(reduction):
    g, mu, w = random((6, 6), [jnp.float32] * 3, 2)
    row = (slice(None), 2) if reduction == (0,) else (2, slice(None))
    _, new = run(g, 0 * mu, w.at[row].set(0), reduction, learning_rate=0.1)
    # Nothing to project from: the whole gradient's row, normalised.
    np.testing.assert_allclose(new[row], -0.1 * g[row] / jnp.linalg.norm(g[row]), rtol=1e-5)
    _, new = run(g.at[row].set(0), 0 * mu, w, reduction, learning_rate=0.1)
    np.testing.assert_array_equal(new[row], w[row])


def test_a_small_part_across_the_row_is_found():
    _, mu, w = random((8, 512), [jnp.float32] * 3, 3)
    across = random((8, 512), [jnp.float32] * 3, 4)[0]
    _, new = run(w + 1e-3 * across, 0 * mu, w, (1,), learning_rate=10.0, momentum=1.0, beta=0.0)
    change = np.float64(new) - np.float64(w)
    leak = np.sum(change * np.float64(w), axis=1) / np.linalg.norm(np.float64(w), axis=1)
    # eps |h| / |u| / sqrt(n) of a step of 10, at four standard deviations. Sums in float32 would
    # leave eps |h| / |u|, 20 times as much.
    assert np.all(np.abs(leak) <= 4 * 10 * 1.2e-7 * 1e3 / np.sqrt(512))


def test_the_gradient_factor_is_a_factor():
    g, mu, w = random((16, 9), [jnp.float32] * 3, 5)
    for reduction in ((0,), (1,)):
        a = run(g, mu, w, reduction, learning_rate=0.1, grad_scale=0.25)
        b = run(0.25 * g, mu, w, reduction, learning_rate=0.1)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_reduction_axes_that_are_no_neighbours():
    g, mu, w = random((2, 3, 4), [jnp.float32] * 3, 6)
    with pytest.raises(ValueError, match=r"\(0, 2\) are not neighbours"):
        run(g, mu, w, (0, 2), learning_rate=0.1)
