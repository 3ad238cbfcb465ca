"""Rows along any axes: projected, normalised, scaled, and kept at their norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from tolerance import EPS, tolerance

import optax_nora
from optax_nora import keep_row_norms, row_normalize, row_project, scale_by_row_shape

# What each axis of each kernel is, for the layers of a Flax model.
KERNELS = {
    "dense (in, out)": ((12, 7), MuonDimensionNumbers((0,), (1,))),
    "torch (out, in)": ((7, 12), MuonDimensionNumbers((1,), (0,))),
    "query (embed, heads, head_dim)": ((12, 2, 3), MuonDimensionNumbers((0,), (1, 2))),
    "out (heads, head_dim, embed)": ((2, 6, 7), MuonDimensionNumbers((0, 1), (2,))),
    "conv (kh, kw, in, out)": ((2, 3, 4, 5), MuonDimensionNumbers((0, 1, 2), (3,))),
    "experts (expert, in, out)": ((3, 12, 7), MuonDimensionNumbers((1,), (2,))),
    "scanned (in, layer, out)": ((12, 3, 7), MuonDimensionNumbers((0,), (2,))),
    "axes from the end, in any order": ((3, 4, 5, 2), MuonDimensionNumbers((-1, -3), (0, 2))),
}
every_kernel = pytest.mark.parametrize(("shape", "numbers"), KERNELS.values(), ids=KERNELS)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def apply(tx, updates, params=None):
    state = tx.init(updates if params is None else params)
    return jax.jit(tx.update)(updates, state, params)[0]


def rows(x, numbers):
    axes = (tuple(a % x.ndim for a in side) for side in numbers)
    return np.asarray(reference.rows_last(x, *axes), np.float64)


@every_kernel
def test_row_project(shape, numbers):
    h, w = normal(*shape), normal(*shape, seed=1)
    u = apply(row_project(weight_dimension_numbers=numbers), h, w)
    expected = reference.project(rows(h, numbers), rows(w, numbers))
    fan_in = expected.shape[-1]
    np.testing.assert_allclose(rows(u, numbers), expected, rtol=0, atol=tolerance(fan_in, size=4))


@every_kernel
def test_row_normalize(shape, numbers):
    h = normal(*shape)
    d = apply(row_normalize(weight_dimension_numbers=numbers), h)
    expected = reference.normalize(rows(h, numbers))
    np.testing.assert_allclose(rows(d, numbers), expected, rtol=tolerance(expected.shape[-1]))


@every_kernel
def test_keep_row_norms(shape, numbers):
    w, update = normal(*shape), normal(*shape, seed=1)
    moved = w + apply(keep_row_norms(weight_dimension_numbers=numbers), update, w)
    expected = np.linalg.norm(rows(w, numbers), axis=-1, keepdims=True) * reference.normalize(
        rows(w + update, numbers)
    )
    rounding = tolerance(expected.shape[-1], size=4)
    np.testing.assert_allclose(rows(moved, numbers), expected, rtol=0, atol=rounding)


@every_kernel
def test_fan_ratio(shape, numbers):
    ones = np.ones(shape, np.float32)
    scaled = apply(scale_by_row_shape(weight_dimension_numbers=numbers), ones)
    *_, fan_out, fan_in = rows(ones, numbers).shape
    np.testing.assert_allclose(
        scaled, max(1, (fan_out / fan_in) ** 0.5), rtol=EPS
    )  # twice a rounding


@pytest.mark.parametrize(
    ("kwargs", "wide", "tall"),
    [
        ({}, 1, 2),
        ({"row_scale": "fan_ratio"}, 1, 2),
        ({"row_scale": "unit"}, 1, 1),
        ({"row_scale": "width", "base_fan_in": 9}, 0.75, 1.5),
        ({"row_scale": "rms"}, 0.8, 0.4),
    ],
)
def test_row_scales(kwargs, wide, tall):
    ones = {"wide": np.ones((16, 4), np.float32), "tall": np.ones((4, 16), np.float32)}
    scaled = apply(scale_by_row_shape(**kwargs), ones)
    # Rounded once, by EPS / 2 at most.
    np.testing.assert_allclose(scaled["wide"], wide, rtol=EPS)
    np.testing.assert_allclose(scaled["tall"], tall, rtol=EPS)


def test_rms_is_that_of_the_entries():
    tx = optax.chain(row_normalize(), scale_by_row_shape("rms"))
    updates = np.asarray(apply(tx, normal(64, 32)))
    assert np.sqrt(np.mean(updates**2)) == pytest.approx(0.2, rel=tolerance(64))


def test_rows_are_columns_of_a_flax_kernel():
    w = jnp.array([[3.0, 0.0], [4.0, 2.0]])
    h = jnp.array([[1.0, 1.0], [0.0, 5.0]])
    u = apply(row_project(), h, w)
    np.testing.assert_allclose(u, [[0.64, 1.0], [-0.48, 0.0]], rtol=0, atol=tolerance(2))


# Rows that are zero, small, parallel, or no numbers


def test_a_zero_row_of_the_weight_has_nothing_to_project():
    h, w = normal(6, 3), normal(6, 3, seed=1)
    w[:, 1] = 0
    u = apply(row_project(), h, w)
    np.testing.assert_array_equal(u[:, 1], h[:, 1])


def test_a_zero_row_stays_zero():
    h, w = normal(6, 3), normal(6, 3, seed=1)
    h[:, 1] = 0
    for tx in (row_project(), row_normalize()):
        assert not np.asarray(apply(tx, h, w))[:, 1].any()
        assert np.asarray(apply(tx, h, w))[:, [0, 2]].all()


@pytest.mark.parametrize("zero_weight", [False, True])
def test_a_zero_update_of_all(zero_weight):
    w = np.zeros((6, 3), np.float32) if zero_weight else normal(6, 3)
    for tx in (row_project(), row_normalize(), keep_row_norms()):
        updates = np.asarray(apply(tx, np.zeros((6, 3), np.float32), w))
        # keep_row_norms divides a row by its own norm and multiplies it again.
        np.testing.assert_allclose(updates, 0, atol=tolerance(6, size=4))


def test_rows_under_eps_shrink():
    h = np.ones((4, 3), np.float32) / 2 * np.float32([1, 1e-9, 1e-12])
    norms = np.linalg.norm(apply(row_normalize(eps=1e-10), h), axis=0)
    np.testing.assert_allclose(norms, [1, 1, 1e-2], rtol=tolerance(4))
    norms = np.linalg.norm(apply(row_normalize(eps=0.0), h), axis=0)
    np.testing.assert_allclose(norms, 1, rtol=tolerance(4))


def test_a_row_along_its_weight_becomes_exactly_zero():
    w = normal(100, 3)
    h = 0.3 * w
    h[:, 1] = normal(100, seed=1)
    u = np.asarray(apply(row_project(), h, w))
    assert not u[:, [0, 2]].any()
    assert u[:, 1].all()


@pytest.mark.parametrize("where", ["update", "weight"])
def test_what_is_no_number_shows_in_its_row_alone(where):
    h, w = normal(6, 5), normal(6, 5, seed=1)
    (h if where == "update" else w)[2, 1:4] = np.nan, np.inf, -np.inf
    parts = [row_project(), optax_nora.scale_by_nora()]
    if where == "update":
        parts += [row_normalize(), keep_row_norms()]
    for tx in parts:
        finite = np.isfinite(apply(tx, h, w)).all(axis=0)
        np.testing.assert_array_equal(finite, [True, False, False, False, True])


def test_keep_row_norms_lets_a_zero_row_move():
    w, update = normal(6, 3), normal(6, 3, seed=1)
    w[:, 1] = 0
    update[:, 2] = -w[:, 2]  # to 0, which has no direction
    kept = apply(keep_row_norms(), update, w)
    np.testing.assert_array_equal(kept[:, 1:], update[:, 1:])
    assert np.linalg.norm(w[:, 0] + kept[:, 0]) == pytest.approx(
        np.linalg.norm(w[:, 0]), rel=tolerance(6)
    )


def test_keep_row_norms_takes_out_weight_decay():
    w, g = normal(6, 3), normal(6, 3, seed=1)
    steps = []
    for weight_decay in (0.0, 0.5):
        tx = optax.chain(
            optax_nora.scale_by_nora(),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(1.0),
            keep_row_norms(),
        )
        steps.append(w + np.asarray(apply(tx, g, w)))
    norms = np.linalg.norm(w, axis=0)
    # What comes out is a difference, of which the weight is taken away and added again.
    rounding = tolerance(6, condition=2)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=1), [norms, norms], rtol=rounding)
    assert np.abs(steps[0] - steps[1]).max() > 0.1


# dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    h, w = (jnp.asarray(normal(12, 7, seed=s), dtype) for s in (0, 1))
    tx = optax.chain(row_project(), row_normalize())
    half = apply(optax_nora.scale_by_nora(beta=0.0), h, w)
    full = apply(tx, jnp.float32(h), jnp.float32(w))
    assert half.dtype == dtype
    # One rounding of the result, which may be off in float32.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.float32(half), full, rtol=eps / 2, atol=tolerance(12))


@pytest.mark.parametrize("params", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("grads", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_updates_have_the_parameters_dtype(params, grads):
    h, w = jnp.asarray(normal(12, 7), grads), jnp.asarray(normal(12, 7, seed=1), params)
    for tx in (row_project(), row_normalize(), scale_by_row_shape(), keep_row_norms()):
        updates, _ = jax.eval_shape(tx.update, h, tx.init(w), w)
        assert updates.dtype == params


def test_float64():
    h, w = (normal(40, 7, seed=s, dtype=np.float64) for s in (0, 1))
    with jax.enable_x64(True):
        u = apply(row_project(), jnp.asarray(h), jnp.asarray(w))
        assert u.dtype == jnp.float64
        d = apply(row_normalize(), u, jnp.asarray(w))
        parallel = apply(row_project(), 0.3 * jnp.asarray(w), jnp.asarray(w))
    rounding = tolerance(40, size=4, eps=2.0**-52)
    np.testing.assert_allclose(u.T, reference.project(h.T, w.T), rtol=0, atol=rounding)
    np.testing.assert_allclose(d.T, reference.direction(h.T, w.T), rtol=0, atol=rounding)
    assert not np.asarray(parallel).any()


def test_complex_rows_have_the_real_inner_product():
    # A complex row is a real one of twice the length: (real, imaginary).
    def real(x):
        return np.concatenate([np.real(x), np.imag(x)])

    h, w = (normal(12, 7, seed=s) + 1j * normal(12, 7, seed=s + 1) for s in (0, 2))
    for tx in (row_project(), row_normalize(), keep_row_norms(), optax_nora.scale_by_nora()):
        out = apply(tx, jnp.asarray(h), jnp.asarray(w))
        assert out.dtype == jnp.complex64
        expected = apply(tx, real(h), real(w))  # whose sums run in another order
        np.testing.assert_allclose(real(out), expected, rtol=0, atol=tolerance(24, size=4))


# Composition


def test_parts_in_a_chain_are_scale_by_nora():
    h, w = normal(24, 7), normal(24, 7, seed=1)
    one = np.asarray(apply(optax_nora.scale_by_nora(beta=0.0, momentum=0.0), h, w))
    two = np.asarray(apply(optax.chain(row_project(), row_normalize()), h, w))
    # |u|^2 is <u, u> - <u, w>^2 / |w|^2 in one, the sum of the squares of u in the other.
    np.testing.assert_allclose(one, two, rtol=0, atol=tolerance(24))


def disjoint(seed):
    """Gradients that vanish where the weight does not: the projection has nothing to do."""
    h, w = normal(24, 7, seed=seed), normal(24, 7, seed=99)
    h[:12], w[12:] = 0, 0
    return jnp.asarray(h), jnp.asarray(w)


@pytest.mark.parametrize(
    ("momentum", "nora"),
    [
        (optax.ema(0.9, debias=False), {"beta": 0.9, "momentum": 1.0}),
        (optax.trace(0.5), {"beta": 0.5, "momentum": 1.0}),
        # With decay 1/2 the trace is twice the average, to the last bit, also when it looks ahead.
        (optax.trace(0.5, nesterov=True), {"beta": 0.5}),
        (optax.identity(), {"beta": 0.9, "momentum": 0.0}),
    ],
    ids=["ema", "trace", "nesterov", "none"],
)
def test_any_momentum_before_the_parts_bit_for_bit(momentum, nora):
    parts = optax.chain(momentum, row_project(), row_normalize())
    whole = optax_nora.scale_by_nora(**nora)
    _, w = disjoint(0)
    states = [parts.init(w), whole.init(w)]
    for t in range(4):
        h, _ = disjoint(t)
        one, states[0] = parts.update(h, states[0], w)
        two, states[1] = whole.update(h, states[1], w)
        np.testing.assert_array_equal(one, two)
    assert np.asarray(one).any()


def test_masked_clipped_and_scheduled_bit_for_bit():
    h, w = disjoint(0)
    params, grads = {"kernel": w, "bias": jnp.ones(7)}, {"kernel": h, "bias": jnp.full(7, 0.5)}
    schedule = optax.linear_schedule(1.0, 0.0, 10)

    def chain(*rows):
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            *(optax.masked(tx, optax_nora.matrix_mask) for tx in rows),
            optax.scale_by_learning_rate(schedule),
        )

    one = chain(row_project(), row_normalize())
    two = chain(optax_nora.scale_by_nora(beta=0.0, momentum=0.0))
    states = [one.init(params), two.init(params)]
    for t in range(3):
        a, states[0] = one.update(grads, states[0], params)
        b, states[1] = two.update(grads, states[1], params)
        jax.tree.map(np.testing.assert_array_equal, a, b)
        np.testing.assert_allclose(
            np.linalg.norm(a["kernel"], axis=0), schedule(t), rtol=tolerance(24)
        )
        assert np.all(np.asarray(a["bias"]) < 0)


# Through jax


@pytest.mark.parametrize(
    "make", [row_project, row_normalize, keep_row_norms, optax_nora.scale_by_nora]
)
def test_gradients_through_the_rows_are_finite(make):
    h, w = normal(6, 5), normal(6, 5, seed=1)
    h[:, 1], w[:, 2] = 0, 0
    h[:, 3], w[:, 3] = 0, 0
    h[:, 4] = 2 * w[:, 4]

    def total(h, w):
        return jnp.sum(normal(6, 5, seed=2) * apply(make(), h, w))

    for derivative in jax.jit(jax.grad(total, argnums=(0, 1)))(h, w):
        assert np.isfinite(derivative).all()


def test_the_gradient_of_a_projection_is_the_projection():
    h, w, a = (normal(6, 3, seed=s) for s in range(3))
    derivative = jax.grad(lambda h: jnp.sum(a * apply(row_project(), h, w)))(h)
    np.testing.assert_allclose(derivative, apply(row_project(), a, w), atol=tolerance(6, size=4))


def test_vmap_is_a_loop():
    h, w = normal(3, 6, 4), normal(3, 6, 4, seed=1)
    for tx in (row_project(), row_normalize(), keep_row_norms()):
        mapped = jax.vmap(lambda h, w, tx=tx: apply(tx, h, w))(h, w)
        looped = np.stack([apply(tx, *pair) for pair in zip(h, w, strict=True)])
        np.testing.assert_allclose(mapped, looped, rtol=0, atol=tolerance(6, size=4))


# Leaves and errors


def test_a_leaf_with_none_stays_as_it_is():
    params = {"kernel": normal(6, 3), "bias": normal(3)}
    numbers = {"kernel": MuonDimensionNumbers(0, 1), "bias": None}
    for make in (row_project, row_normalize, scale_by_row_shape, keep_row_norms):
        grads = jax.tree.map(lambda x: 3 * x[::-1], params)
        updates = apply(make(weight_dimension_numbers=numbers), grads, params)
        np.testing.assert_array_equal(updates["bias"], grads["bias"])


def test_alone_they_take_every_leaf_for_a_kernel():
    message = r"bias \(3,\) .*1 axes; give weight_dimension_numbers, or wrap .*matrix_mask"
    for make in (row_project, row_normalize, scale_by_row_shape, optax_nora.scale_by_nora):
        with pytest.raises(ValueError, match=message):
            make().init({"bias": jnp.ones(3)})


def test_params_are_needed_where_they_are_used():
    g = normal(6, 3)
    for make in (row_project, keep_row_norms, optax_nora.scale_by_nora):
        with pytest.raises(ValueError, match="params are missing"):
            apply(make(), g)
    for make in (row_normalize, scale_by_row_shape):
        apply(make(), g)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scale_by_row_shape("fan"), "row_scale='fan' is unknown; take one of fan_ratio, "),
        (lambda: scale_by_row_shape("width"), "row_scale='width' needs base_fan_in"),
        (lambda: scale_by_row_shape("width", base_fan_in=-1), "base_fan_in=-1 is out of range"),
        (lambda: row_normalize(eps=-1e-3), "eps=-0.001 is out of range"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_noise_threshold_is_eight_roundings():
    # Exact in floating point: across w = (1, 0) stands only the second entry of h = (1, c eps).
    eps = np.finfo(np.float32).eps
    w = jnp.array([[1.0], [0.0]])
    for c, length in [(4, 0), (8, 0), (9, 1), (16, 1)]:
        h = jnp.array([[1.0], [c * eps]])
        tx = optax_nora.scale_by_nora(beta=0.0, momentum=0.0)
        updates, _ = tx.update(h, tx.init(w), w)
        np.testing.assert_array_equal(updates, [[0], [length]])
