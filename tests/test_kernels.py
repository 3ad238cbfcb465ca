"""The kernels of a step against float64, in interpret mode where there is no GPU."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from steps import random
from tolerance import tolerance

from optax_nora import _kernels
from optax_nora._axes import Rows
from optax_nora._rows import project_and_normalize
from optax_nora._step import Coefficients, by_xla

NUMBERS = {"beta": 0.9, "ahead": 0.8, "weight_decay": 0.1, "row_scale": 1.3, "grad_scale": 0.5}


@functools.cache
def compiled(rows, write_weights):
    interpret = jax.default_backend() != "gpu"
    step = functools.partial(
        _kernels.step, rows=rows, write_weights=write_weights, interpret=interpret
    )
    return jax.jit(step)


def run(g, mu, w, reduction, *, write_weights=True, **numbers):
    numbers = {"eps": 1e-10, "beta": 0.95, "ahead": 0.95, "learning_rate": 0.02} | numbers
    numbers = {"grad_scale": 1.0, "row_scale": 1.0, "weight_decay": 0.0} | numbers
    c = Coefficients(
        one_minus_beta=1 - numbers["beta"], one_minus_ahead=1 - numbers["ahead"], **numbers
    )
    return compiled(Rows(reduction, ()), write_weights)(jnp.float32(c), g, mu, w)


def exact(g, mu, w, reduction, *, beta, ahead, weight_decay, row_scale, grad_scale):
    """The momentum and the update in float64, at a learning rate of 0.02."""
    g, mu, w = (np.asarray(x, np.float64) for x in (g, mu, w))
    g = grad_scale * g
    mu = beta * mu + (1 - beta) * g
    h = ahead * mu + (1 - ahead) * g

    def sums(x):
        return np.sum(x, axis=reduction, keepdims=True)

    u = h - sums(h * w) / sums(w * w) * w
    return mu, -0.02 * (row_scale * u / np.sqrt(sums(u * u)) + weight_decay * w)


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


@hypothesis.settings(max_examples=8)  # each one compiles
@hypothesis.given(
    case=st.sampled_from(SHAPES),
    dtypes=st.tuples(*[st.sampled_from([jnp.float32, jnp.bfloat16])] * 3),
    write_weights=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_shape_direction_and_dtype_agrees_with_float64(case, dtypes, write_weights, seed):
    shape, reduction = case
    g, mu, w = random(shape, dtypes, seed)
    new_mu, out = run(g, mu, w, reduction, write_weights=write_weights, **NUMBERS)
    want_mu, want = exact(g, mu, w, reduction, **NUMBERS)
    assert new_mu.dtype == mu.dtype
    assert out.dtype == w.dtype
    # One rounding to the stored dtype, eps / 2, and a few in float32 before it, of numbers of up to
    # 4 and of steps of up to 0.04. Row sums are float64's. An update is rounded once more.
    eps_mu, eps_w = (float(jnp.finfo(x.dtype).eps) for x in (mu, w))
    np.testing.assert_allclose(np.float64(new_mu), want_mu, rtol=eps_mu, atol=tolerance(size=4))
    if write_weights:
        bound = 2 * eps_w * (np.abs(np.float64(w)) + np.abs(want)) + tolerance(size=0.04)
        assert np.all(np.abs(np.float64(out) - np.float64(w) - want) <= bound)
    else:
        np.testing.assert_allclose(np.float64(out), want, rtol=eps_w, atol=tolerance(size=0.04))


@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_a_row_along_its_weight_stays_where_it_is(reduction):
    _, mu, w = random((32, 32), [jnp.float32] * 3, 1)
    _, new = run(3 * w, 0 * mu, w, reduction)
    np.testing.assert_array_equal(new, w)


@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_rows_of_zeros(reduction):
    g, mu, w = random((6, 6), [jnp.float32] * 3, 2)
    row = (slice(None), 2) if reduction == (0,) else (2, slice(None))
    _, new = run(g, 0 * mu, w.at[row].set(0), reduction)
    # Nothing to project from: the whole gradient's row, normalised.
    np.testing.assert_allclose(
        new[row], -0.02 * g[row] / jnp.linalg.norm(g[row]), rtol=tolerance(6)
    )
    _, new = run(g.at[row].set(0), 0 * mu, w, reduction)
    np.testing.assert_array_equal(new[row], w[row])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_what_is_no_number_shows_in_its_row_alone(reduction, bad):
    g, mu, w = random((6, 6), [jnp.float32] * 3, 2)
    row = (slice(None), 2) if reduction == (0,) else (2, slice(None))
    _, new = run(g.at[2, 2].set(bad), mu, w, reduction)
    assert np.all(np.isnan(new[row]))
    assert np.all(np.isfinite(np.delete(new, 2, axis=1 - reduction[0])))


@pytest.mark.parametrize("reduction", [(0,), (1,)])
@pytest.mark.parametrize("rho", [1e-3, 1e-5])
def test_no_part_along_the_row_is_left(rho, reduction):
    """Of a gradient that has hardly anything but a part along its weight."""
    _, mu, w = random((64, 64), [jnp.float32] * 3, 3)
    across = random((64, 64), [jnp.float32] * 3, 4)[0]
    _, update = run(
        w + rho * across, 0 * mu, w, reduction, write_weights=False, beta=0.0, ahead=1.0
    )
    d, w = (np.float64(x) for x in (update, w))
    cosine = np.sum(d * w, reduction) / np.linalg.norm(w, axis=reduction) / 0.02
    # The rounding of a unit vector's entries. float32 without the second half of the coefficient,
    # or with two roundings, would leave 1.2e-7 / rho / sqrt(64).
    assert np.all(np.abs(cosine) <= tolerance())
    # |u|^2 is |h|^2 less almost as much, in float64 sums of 64 terms.
    length = np.linalg.norm(d, axis=reduction) / 0.02
    bound = tolerance() + tolerance(64, condition=1 / rho**2, eps=2.0**-52)
    assert np.all(np.abs(length - 1) <= bound)


def test_the_gradient_factor_is_a_factor():
    g, mu, w = random((16, 9), [jnp.float32] * 3, 5)
    for reduction in ((0,), (1,)):
        a = run(g, mu, w, reduction, grad_scale=0.25)
        b = run(0.25 * g, mu, w, reduction)
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_the_same_bits_every_time(reduction):
    arrays = random((130, 131), [jnp.float32] * 3, 7)
    first, second = run(*arrays, reduction), run(*arrays, reduction)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("shape", "reduction", "fits"),
    [
        ((3, 4, 5), (0, 1), True),
        ((3, 4, 5), (2, 1), True),
        ((3, 4, 5), (0, 2), False),  # no neighbours
        ((0, 4), (1,), False),
        ((4, 0), (1,), False),
        ((2, 16384), (1,), True),
        ((2, 16385), (1,), False),  # more than a program holds
        ((16385, 2), (0,), True),
        ((65536, 2, 2), (1,), False),  # more than a grid has
        ((2**16, 2**15), (0,), False),  # more than an index of 32 bits counts
    ],
)
def test_which_rows_have_a_kernel(shape, reduction, fits):
    assert _kernels.fits(Rows(reduction, ()), shape) == fits


@pytest.mark.parametrize("write_weights", [True, False])
@pytest.mark.parametrize("reduction", [(0,), (1,)])
def test_xla_has_the_same_numbers(reduction, write_weights):
    """The form that takes over where rows are split over devices."""
    arrays = random((70, 33), [jnp.float32, jnp.bfloat16, jnp.float32], 8)
    want = run(*arrays, reduction, write_weights=write_weights, **NUMBERS)
    c = Coefficients(
        one_minus_beta=1 - 0.9, one_minus_ahead=1 - 0.8, eps=1e-10, learning_rate=0.02, **NUMBERS
    )
    rows = Rows(reduction, ())
    got = by_xla(rows, project_and_normalize, c, *arrays, write_weights=write_weights)
    assert got[0].dtype == want[0].dtype
    # mu: one rounding to bfloat16 may fall to either side. Steps of up to 0.04, or weights of 4.
    step, sums = tolerance(70, size=0.04), tolerance(size=4)
    np.testing.assert_allclose(np.float32(got[0]), np.float32(want[0]), rtol=2**-7, atol=sums)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=step + write_weights * sums)
