"""What must hold of Nora's rows whatever the numbers, and what its paper proves.

Tolerances: with rho = |u| / |h|, the share of a row that the projection leaves, rounding moves the
direction by about 0.3 eps / rho. We allow 16 eps / rho where nothing else is said: 50 times that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from optax.contrib import MuonDimensionNumbers
from tolerance import EPS, tolerance

import optax_nora

OUT_IN = MuonDimensionNumbers(1, 0)  # here rows are rows
seeds = st.integers(0, 2**32 - 1)
# A few shapes (rows, fan-in), as each compiles anew.
shapes = st.sampled_from([(5, 2), (4, 3), (3, 8), (6, 33), (2, 1000)])


def once(tx):
    return jax.jit(lambda h, w: tx.update(h, tx.init(w), w)[0])


# With these rates the momentum looked ahead is the gradient itself.
direction = once(optax_nora.scale_by_nora(beta=0.0, momentum=0.0, weight_dimension_numbers=OUT_IN))
_by_kernels = once(
    optax_nora.nora(
        1.0,
        beta=0.0,
        momentum=0.0,
        row_scale="unit",
        weight_dimension_numbers=OUT_IN,
        backend="pallas",
    )
)


def by_kernels(h, w):
    return -np.asarray(_by_kernels(h, w))


every_backend = pytest.mark.parametrize("direction", [direction, by_kernels], ids=["xla", "pallas"])
project = once(optax_nora.row_project(weight_dimension_numbers=OUT_IN))


@st.composite
def pairs(draw, low=-6.0):
    """h and w in float32, rows of every length, at rho from 10**low to 1."""
    (m, n), rng = draw(shapes), np.random.default_rng(draw(seeds))

    def magnitudes(lowest, highest):
        return 10 ** rng.uniform(lowest, highest, size=(m, 1))

    unit = reference.normalize(rng.normal(size=(m, n)))
    across = reference.direction(rng.normal(size=(m, n)), unit)
    rho = magnitudes(low, 0)
    h = rho * across + np.sqrt(1 - rho**2) * rng.choice([-1, 1], size=(m, 1)) * unit
    # |u| stays above eps = 1e-10, under which rows shrink.
    return np.float32(magnitudes(-3, 6) * h), np.float32(magnitudes(-6, 6) * unit)


def rho_of(h, w):
    """Of the rounded rows, as they are."""
    return reference.rho(np.float64(h), np.float64(w))


def assert_close(a, b, *rhos):
    """Rows apart by no more than 16 eps / rho."""
    distance = np.linalg.norm(np.float64(a) - np.float64(b), axis=-1)
    assert np.all(distance <= 16 * EPS / np.minimum.reduce(rhos))


# The direction


@every_backend
@given(pair=pairs())
def test_the_direction_is_that_of_the_mathematics(pair, direction):
    expected = reference.direction(*map(np.float64, pair))
    assert_close(direction(*pair), expected, rho_of(*pair))


@every_backend
@given(pair=pairs())
def test_each_row_is_orthogonal_to_its_weight(pair, direction):
    d, w = np.float64(direction(*pair)), np.float64(pair[1])
    cosine = np.abs(np.sum(d * w, axis=-1)) / np.linalg.norm(w, axis=-1)
    # The rounding of d alone, by a factor, a quotient and a scale: up to eps / 2 each. One
    # projection would leave eps / rho.
    assert np.all(cosine[rho_of(*pair) >= 1e-6] <= tolerance())


@every_backend
@given(pair=pairs())
def test_each_row_has_length_one(pair, direction):
    norms, rho = np.linalg.norm(np.float64(direction(*pair)), axis=-1), rho_of(*pair)
    # |u| comes from the numbers that it divides, so rho does not matter: a sum, a root, a quotient.
    # Kernels have |u|^2 from |h|^2 in float64, less almost as much.
    n = pair[0].shape[1]
    slack = tolerance(n)
    if direction is by_kernels:
        slack = tolerance() + tolerance(n, condition=1 / rho**2, eps=2.0**-52)
    # Noise is under 8 eps, measured to about 1 eps.
    assert np.all((np.abs(norms - 1) <= slack) | ((norms == 0) & (rho < 10 * EPS)))


@given(pairs())
def test_projection_twice_is_projection_once(pair):
    h, w = pair
    u = np.asarray(project(h, w))
    moved = np.linalg.norm(project(u, w) - u, axis=-1)
    # It finds rows that are orthogonal to rounding, and moves them by as much.
    assert np.all(moved <= tolerance(h.shape[1]) * np.linalg.norm(u, axis=-1))


@given(pairs())
def test_projection_makes_no_row_longer(pair):
    norms = [np.linalg.norm(np.float64(x), axis=-1) for x in (project(*pair), pair[0])]
    assert np.all(norms[0] <= norms[1] * (1 + tolerance(pair[0].shape[1])))


@given(pairs(low=-3), st.data())
def test_scaling_a_gradients_row_by_a_power_of_two_changes_no_bit(pair, data):
    h, w = pair
    powers = data.draw(st.lists(st.integers(-8, 20), min_size=len(h), max_size=len(h)))
    scaled = h * np.float32(2) ** np.float32(powers)[:, None]
    np.testing.assert_array_equal(direction(scaled, w), direction(h, w))


@given(pairs(), st.floats(1e-3, 1e3))
def test_scaling_a_weights_row_changes_nothing(pair, factor):
    h, w = pair
    scaled = np.float32(factor) * w
    # The scaled weights round anew, hence the direction by eps / rho.
    assert_close(direction(h, scaled), direction(h, w), rho_of(h, w), rho_of(h, scaled))


@given(pairs(low=-3), st.floats(-2, 2))
def test_adding_a_multiple_of_the_weight_changes_nothing(pair, factor):
    h, w = pair
    ratio = np.linalg.norm(h, axis=-1, keepdims=True) / np.linalg.norm(w, axis=-1, keepdims=True)
    shifted = h + np.float32(factor * ratio) * w
    assert_close(direction(shifted, w), direction(h, w), rho_of(h, w), rho_of(shifted, w) / 3)


@every_backend
@given(pair=pairs())
def test_odd_in_the_gradient_and_even_in_the_weight(pair, direction):
    h, w = pair
    np.testing.assert_array_equal(direction(-h, w), -direction(h, w))
    np.testing.assert_array_equal(direction(h, -w), direction(h, w))


@given(pairs(), seeds)
def test_permuting_the_rows_permutes_the_steps(pair, seed):
    order = np.random.default_rng(seed).permutation(len(pair[0]))
    h, w = (x[order] for x in pair)
    np.testing.assert_array_equal(direction(h, w), np.asarray(direction(*pair))[order])


def orthogonal(n, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


@given(pairs(), seeds)
def test_turning_the_inputs_turns_the_steps(pair, seed):
    q = orthogonal(pair[0].shape[1], seed)
    h, w = (np.float32(np.float64(x) @ q) for x in pair)
    expected = np.float64(direction(*pair)) @ q
    assert_close(direction(h, w), expected, rho_of(*pair), rho_of(h, w))


@given(seeds)
def test_turning_the_outputs_does_not(seed):
    # Nora knows rows. Muon, which knows none, would turn the steps.
    h, w = np.float32(np.random.default_rng(seed).normal(size=(2, 6, 33)))
    q = np.float32(orthogonal(6, seed + 1))
    assert np.abs(direction(q @ h, q @ w) - q @ direction(h, w)).max() > 1e-2


_nora_step = once(optax_nora.nora(1.0, row_scale="unit", weight_dimension_numbers=OUT_IN))


@given(pairs())
def test_rows_in_separate_matrices_are_rows_in_one(pair):
    together = _nora_step({"all": pair[0]}, {"all": pair[1]})["all"]
    h, w = ({f"{i}": row[None] for i, row in enumerate(x)} for x in pair)
    updates = _nora_step(h, w)
    apart = np.concatenate([updates[i] for i in h])
    # Vectorised otherwise, the sums round otherwise.
    assert_close(apart, together, rho_of(*pair))


@given(seeds, st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 0), (2, 1)]))
def test_batch_axes_are_a_loop(seed, axes):
    reduction, output = axes
    (batch,) = {0, 1, 2} - {reduction, output}
    h, w = np.float32(np.random.default_rng(seed).normal(size=(2, 3, 4, 5)))
    numbers = MuonDimensionNumbers(reduction, output)
    whole = np.asarray(_batched(numbers)(h, w))
    for i in range(h.shape[batch]):
        rows = [reference.rows_last(x.take([i], batch), (reduction,), (output,))[0] for x in (h, w)]
        got = reference.rows_last(whole.take([i], batch), (reduction,), (output,))[0]
        assert_close(got, reference.direction(*map(np.float64, rows)), rho_of(*rows))


@functools.cache
def _batched(numbers):
    return once(optax_nora.scale_by_nora(beta=0.0, momentum=0.0, weight_dimension_numbers=numbers))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 4096, 32768])
@pytest.mark.parametrize("numbers", [OUT_IN, MuonDimensionNumbers(0, 1)], ids=["rows", "columns"])
def test_rows_along_their_weight_get_exactly_nothing(n, numbers):
    rng = np.random.default_rng(n)
    w = rng.normal(size=(max(4, 2**17 // n), n))
    w = np.float32(w * 10 ** rng.uniform(-3, 3, size=(len(w), 1)))
    h = w * np.float32(rng.normal(size=(len(w), 1)))  # rounds each entry
    if numbers != OUT_IN:
        h, w = h.T.copy(), w.T.copy()
    for tx in (
        optax_nora.scale_by_nora(beta=0.0, momentum=0.0, weight_dimension_numbers=numbers),
        optax_nora.row_project(weight_dimension_numbers=numbers),
    ):
        assert not np.asarray(once(tx)(h, w)).any()


@pytest.mark.parametrize("n", [2, 1000])
@pytest.mark.parametrize("numbers", [OUT_IN, MuonDimensionNumbers(0, 1)], ids=["rows", "columns"])
def test_rows_along_their_weight_get_exactly_nothing_by_kernels(n, numbers):
    rng = np.random.default_rng(n)
    w = np.float32(rng.normal(size=(200, n)) * 10 ** rng.uniform(-3, 3, size=(200, 1)))
    h = w * np.float32(rng.normal(size=(200, 1)))  # rounds each entry
    if numbers != OUT_IN:
        h, w = h.T.copy(), w.T.copy()
    tx = optax_nora.nora(
        1.0, beta=0.0, momentum=0.0, weight_dimension_numbers=numbers, backend="pallas"
    )
    assert not np.asarray(once(tx)(h, w)).any()


@given(pairs(low=-3), seeds)
def test_no_tangent_rows_of_length_one_descend_faster(pair, seed):
    h, w = map(np.float64, pair)
    d = np.float64(direction(*pair))
    rng = np.random.default_rng(seed)
    z = reference.direction(rng.normal(size=h.shape), w) * rng.uniform(size=(len(h), 1))
    # And near the best there is, where a worse d would lose.
    near = reference.direction(reference.direction(h, w) + 0.1 * rng.normal(size=h.shape), w)
    # What d is off itself, at 16 eps / rho of |u| = rho |h|.
    slack = 16 * EPS * np.linalg.norm(h, axis=-1)
    for other in (z, near):
        assert np.all(np.sum(h * other, axis=-1) <= np.sum(h * d, axis=-1) + slack)


# The norms


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("weight_decay", "tolerance"), [(0.0, 5e-6), (0.1, 1e-4)])
@pytest.mark.parametrize("kind", ["noise", "drift", "loss"])
def test_the_norm_identity_over_5000_steps(kind, weight_decay, tolerance):
    # |w'|^2 = (1 - lr wd)^2 |w|^2 + (lr s)^2, whatever the gradient; s = 2 for 64 in, 256 out.
    lr, s, steps = 0.01, 2.0, 5000
    tx = optax_nora.nora(lr, weight_decay=weight_decay)
    start, target = np.random.default_rng(0).normal(size=(2, 64, 256)).astype(np.float32)

    def gradient(w, key):
        noise = jax.random.normal(key, w.shape)
        return {"noise": noise, "drift": target + 0.1 * noise, "loss": w - target}[kind]

    def step(carry, key):
        params, state = carry
        w = params["kernel"]
        updates, state = tx.update({"kernel": gradient(w, key)}, state, params)
        # A row that decays alone had a gradient along its weight, and no step.
        tangent = jnp.linalg.norm(updates["kernel"] + lr * weight_decay * w, axis=0) > lr * s / 2
        return (optax.apply_updates(params, updates), state), tangent

    @jax.jit
    def run(params):
        keys = jax.random.split(jax.random.key(0, impl="rbg"), steps)  # the fastest on a CPU
        (params, _), moved = jax.lax.scan(step, (params, tx.init(params)), keys)
        return params["kernel"], moved

    end, moved = run({"kernel": jnp.asarray(start)})
    square = np.sum(np.float64(start) ** 2, axis=0)
    for tangent in np.asarray(moved):
        square = (1 - lr * weight_decay) ** 2 * square + (lr * s) ** 2 * tangent
    # Rows that swing about their target hit it to 8 eps now and then.
    assert np.mean(moved) == 1 if kind != "loss" else np.mean(moved) > 0.999
    # A step rounds the weights by 6e-8 at most, the norm of 64 of them by 7e-9, at random: 5e-7 in
    # 5,000 steps, and we allow ten times that for the worst of 256 rows. Decay may round them all
    # one way, over a memory of 1 / (lr wd) = 1,000 steps: 6e-5.
    norms = np.linalg.norm(np.float64(end), axis=0)
    np.testing.assert_allclose(norms, np.sqrt(square), rtol=tolerance)


# The paper's theorems


@given(seeds, shapes)
def test_theorem_4_2_at_any_width(seed, shape):
    # <d_i, x> = sgn(delta_i) |x| sin(angle of x and w_i), for g_i = delta_i x.
    rng = np.random.default_rng(seed)
    (m, n), x = shape, rng.normal(size=shape[1])
    w, delta = np.float32(rng.normal(size=shape)), rng.normal(size=m)
    g = np.float32(delta[:, None] * x)
    sine = rho_of(g, w)
    d = np.float64(direction(g, w))
    # g is rounded to float32, and d is off by 16 eps / rho.
    expected = np.sign(delta) * np.linalg.norm(x) * sine
    error = np.abs(d @ x - expected)
    assert np.all(error <= np.linalg.norm(x) * 16 * EPS / sine)
    assert n >= 2


@pytest.mark.parametrize("n", [64, 512, 4096, 32768])
def test_theorem_4_2_in_the_limit_of_width(n):
    # <d_i, x> -> sgn(delta_i) sigma_x sqrt(n).
    rng = np.random.default_rng(n)
    sigma, m = 1.7, 16
    x, delta = sigma * rng.normal(size=n), rng.normal(size=m)
    w = np.float32(rng.normal(size=(m, n)) / np.sqrt(n))
    d = np.float64(direction(np.float32(delta[:, None] * x), w))
    ratio = np.sign(delta) * (d @ x) / (sigma * np.sqrt(n))
    # |x| is off by 1 / sqrt(2 n), the sine by the square of a cosine of 1 / sqrt(n): at 4 sigma.
    np.testing.assert_allclose(ratio, 1, rtol=0, atol=4 / np.sqrt(2 * n) + 16 / (2 * n))


def test_row_scale_width_moves_activations_alike_at_every_width():
    # What Theorem 4.2 is for: |lr s <d_i, x>| = lr sqrt(base_fan_in) sigma_x whatever n.
    for n in (256, 4096):
        rng = np.random.default_rng(n)
        x, w = rng.normal(size=n), np.float32(rng.normal(size=(n, 8)) / np.sqrt(n))
        tx = optax_nora.nora(0.1, row_scale="width", base_fan_in=64)
        updates = once(tx)({"kernel": np.float32(np.outer(x, np.ones(8)))}, {"kernel": w})
        moved = np.abs(x @ np.float64(updates["kernel"]))
        # As in the limit of width.
        np.testing.assert_allclose(moved, 0.1 * 8, rtol=4 / np.sqrt(2 * n) + 8 / n)


@functools.cache
def _descend(m, n, steps):
    @jax.jit
    def run(w, a, beta, lr):
        tx = optax_nora.nora(
            lr, beta, momentum=1.0, row_scale="unit", weight_dimension_numbers=OUT_IN
        )

        def loss(params):
            w = params["w"]
            return -jnp.sum(a * w / jnp.linalg.norm(w, axis=1, keepdims=True))

        def step(carry, _):
            params, state = carry
            grads = jax.grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            size = jnp.sum(jnp.linalg.norm(grads["w"], axis=1))  # its rows are tangent already
            return (optax.apply_updates(params, updates), state), size

        params = {"w": w}
        return loss(params), jax.lax.scan(step, (params, tx.init(params)), None, steps)[1]

    return run


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("lr", [1e-3, 1e-2, 1e-1])
def test_theorem_4_7_bounds_the_mean_gradient(beta, lr):
    # On f(w) = -sum_i <a_i, w_i / |w_i|>, without noise. Its rows' Hessians are of norm at most
    # 2 / sqrt(3) |a_i| / |w_i|^2, where the cosine is 1 / sqrt(3); and norms only grow.
    m, n, steps = 5, 8, 1000
    rng = np.random.default_rng(0)
    a, w = rng.normal(size=(m, n)), rng.normal(size=(m, n))
    f0, sizes = _descend(m, n, steps)(np.float32(w), np.float32(a), beta, lr)
    lengths = np.linalg.norm(a, axis=1)
    smooth = np.sum(2 / np.sqrt(3) * lengths / np.sum(w * w, axis=1))
    gap = float(f0) + np.sum(lengths)
    t = np.arange(1, steps + 1)
    bound = gap / (t * lr) + 2 * (1 - 1 / t) * smooth * lr * beta / (1 - beta) + smooth * lr / 2
    # The proof starts the momentum at the first gradient, the algorithm at 0.
    bound = bound + 2 * beta * float(sizes[0]) / ((1 - beta) * t)
    mean = np.cumsum(np.float64(sizes)) / t
    assert np.all(mean <= bound)
    if (beta, lr) == (0.0, 1e-2):  # where it says something: rows that stood still would break it
        assert bound[-1] < 0.5 * sizes[0]
