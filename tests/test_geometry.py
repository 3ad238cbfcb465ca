"""What the rows do, measured; and where weight decay leaves their norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora
from optax_nora import equilibrium_row_norm, row_geometry


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_every_field_against_numpy():
    w, g, step = normal(12, 7), normal(12, 7, seed=1), 0.1 * normal(12, 7, seed=2)
    found = jax.jit(row_geometry)({"kernel": w}, {"kernel": g}, {"kernel": step})["kernel"]
    w, g, step = (np.float64(x) for x in (w, g, step))  # as arccos of what is near 1 takes digits
    norms = np.linalg.norm(w, axis=0)
    cosines = np.abs(np.sum(w * g, axis=0)) / (norms * np.linalg.norm(g, axis=0))
    ends = w + step
    angles = np.arccos(np.sum(w * ends, axis=0) / (norms * np.linalg.norm(ends, axis=0)))
    expected = optax_nora.RowGeometry(
        *(cosines.mean(), cosines.max(), norms.min(), norms.mean(), norms.max()),
        *(angles.mean(), angles.max(), 0.0),
    )
    # Cosines and angles from 0.1 up, of rows of 12 at length 1.
    np.testing.assert_allclose(found, expected, rtol=tolerance(12, condition=10))
    assert all(x.dtype == jnp.float32 and x.shape == () for x in found)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        ((7, 12), MuonDimensionNumbers(1, 0)),
        ((2, 6, 7), MuonDimensionNumbers((0, 1), 2)),
        ((3, 12, 7), MuonDimensionNumbers(1, 2)),
    ],
)
def test_rows_along_any_axes(shape, numbers):
    w, g = normal(*shape), normal(*shape, seed=1)
    found = row_geometry({"x": w}, {"x": g}, weight_dimension_numbers=numbers)["x"]
    axes = [(side,) if isinstance(side, int) else side for side in numbers]
    rows = [reference.rows_last(x, *axes).reshape(-1, 12) for x in (w, g)]
    kernels = [jnp.asarray(x.T) for x in rows]
    expected = row_geometry({"x": kernels[0]}, {"x": kernels[1]})["x"]
    np.testing.assert_allclose(found[:5], expected[:5], rtol=tolerance(12, condition=10))


def test_the_matrices_alone_by_their_paths():
    params = {
        "mlp": [{"kernel": normal(4, 8), "bias": normal(8)}],
        "embed": {"embedding": normal(9, 4)},
        "one": {"kernel": normal(1, 4)},
    }
    assert list(row_geometry(params, params)) == ["mlp/0/kernel"]
    given = row_geometry(
        params,
        params,
        weight_dimension_numbers=optax_nora.by_path({"embedding": MuonDimensionNumbers(1, 0)}),
    )
    assert sorted(given) == ["embed/embedding", "mlp/0/kernel"]
    assert given["mlp/0/kernel"].angle_mean is None


def test_a_scale_invariant_weight_has_no_radial_gradient():
    w, x, y = normal(12, 7), normal(5, 12, seed=1), normal(5, 7, seed=2)

    def loss(params, normed):
        kernel = params["kernel"]
        if normed:
            kernel = kernel / jnp.linalg.norm(kernel, axis=0)
        return jnp.sum((x @ kernel - y) ** 2)

    for normed in (True, False):
        grads = jax.grad(loss)({"kernel": w}, normed)
        found = row_geometry({"kernel": w}, grads)["kernel"]
        # Rounding is all that is left of it, in gradients that are sums of 5 and of 12.
        assert (found.radial_max < tolerance(5 + 12, condition=10)) == normed
        assert (found.radial_mean > 0.1) == (not normed)


def test_zeroed_counts_noise_zeros_and_what_is_under_eps():
    w, g = normal(12, 8), normal(12, 8, seed=1)
    g[:, 0] = 2 * w[:, 0]  # along the weight
    g[:, 1] = 0
    g[:, 2] *= 1e-12
    found = row_geometry({"kernel": w}, {"kernel": g})["kernel"]
    assert found.zeroed == 3 / 8
    assert row_geometry({"kernel": w}, {"kernel": g}, eps=1e-14)["kernel"].zeroed == 2 / 8


def test_zero_rows_are_no_trouble():
    w, g, step = normal(6, 3), normal(6, 3, seed=1), normal(6, 3, seed=2)
    w[:, 0], g[:, 1], step[:, 2] = 0, 0, 0
    found = row_geometry({"kernel": w}, {"kernel": g}, {"kernel": step})["kernel"]
    assert np.isfinite(found).all()
    assert found.norm_min == 0


@pytest.mark.parametrize("angle", [1e-4, 0.1, 1.0, 3.0])
def test_angles_small_and_large(angle):
    w = np.float32([[3.0], [0.0]])
    end = 5 * np.float32([[np.cos(angle)], [np.sin(angle)]])
    found = row_geometry({"w": w}, {"w": w}, {"w": end - w})["w"]
    # The step is rounded, of up to 8, and seen from 5.
    assert found.angle_max == pytest.approx(angle, rel=0, abs=tolerance(2, size=8 / 5))


def test_noras_own_angle():
    w, lr = normal(12, 7), 0.1
    tx = optax_nora.nora(lr, row_scale="unit")
    params, grads = {"kernel": w}, {"kernel": normal(12, 7, seed=1)}
    updates, _ = tx.update(grads, tx.init(params), params)
    found = row_geometry(params, grads, updates)["kernel"]
    angles = np.arctan(lr / np.linalg.norm(w, axis=0))
    assert found.angle_mean == pytest.approx(angles.mean(), rel=tolerance(12))


def test_bfloat16_is_measured_in_float32():
    w, g = (jnp.asarray(normal(12, 7, seed=s), jnp.bfloat16) for s in (0, 1))
    low = row_geometry({"w": w}, {"w": g})["w"]
    full = row_geometry({"w": jnp.float32(w)}, {"w": jnp.float32(g)})["w"]
    assert all(x == y for x, y in zip(low[:5], full[:5], strict=True))


def test_trees_that_differ():
    with pytest.raises(ValueError, match="as trees of one structure"):
        row_geometry({"kernel": normal(4, 8)}, {})


def test_paths_that_read_alike_have_entries_of_their_own():
    tree = {"a": {"b/kernel": normal(4, 8)}, "a/b": {"kernel": normal(4, 8)}}
    assert list(row_geometry(tree, tree)) == ["a/b/kernel", "('a/b', 'kernel')"]


# Equilibrium


def test_equilibrium_in_numbers():
    # sqrt(0.02 * 4 / (0.1 * (2 - 0.002)))
    assert equilibrium_row_norm(0.02, 0.1, 2.0) == pytest.approx(0.63277, abs=5e-6)  # its digits
    norms = equilibrium_row_norm(jnp.array([0.01, 0.02]), 0.1)
    np.testing.assert_allclose(norms, np.sqrt([0.1 / 1.999, 0.2 / 1.998]), rtol=tolerance())


@pytest.mark.parametrize(("lr", "weight_decay"), [(0.05, 0.5), (0.02, 1.0)])
@pytest.mark.parametrize("start", [0.01, 10.0])
def test_rows_end_at_the_equilibrium(lr, weight_decay, start):
    # Of 16 inputs and 64 outputs: s = 2. The gradients are noise.
    tx = optax_nora.nora(lr, weight_decay=weight_decay)
    steps = int(20 / (lr * weight_decay))  # what differs at the start has decayed by exp(-20)

    def step(carry, key):
        params, state = carry
        grads = {"kernel": jax.random.normal(key, (16, 64))}
        updates, state = tx.update(grads, state, params)
        turned = row_geometry(params, grads, updates)["kernel"].angle_mean
        return (optax.apply_updates(params, updates), state), turned

    params = {"kernel": start * jnp.asarray(normal(16, 64))}
    keys = jax.random.split(jax.random.key(0), steps)
    (params, _), angles = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys))(params)
    norms = np.linalg.norm(params["kernel"], axis=0)
    # Nothing here is random but the rounding: of each step, over about 1 / (lr wd) steps.
    rounding = tolerance(16, condition=1 / (lr * weight_decay))
    np.testing.assert_allclose(norms, equilibrium_row_norm(lr, weight_decay, 2.0), rtol=rounding)
    # What decay takes from a row the step across it gives back: it turns by arccos(1 - lr wd).
    turn = np.arccos(1 - lr * weight_decay)
    assert np.mean(angles[-100:]) == pytest.approx(turn, rel=rounding)
