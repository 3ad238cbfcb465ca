"""float32 masters of low-precision parameters, around any optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tolerance import EPS, of_steps

import optax_nora
from optax_nora import with_float32_master

LOW = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(steps, dtype):
    return {
        "kernel": normal(steps, 6, 4, seed=1, dtype=dtype),
        "bias": normal(steps, 4, seed=2, dtype=dtype),
    }


def scan(tx, params, grads):
    """Parameters and state after each step."""

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, state)

    return jax.jit(lambda p, g: jax.lax.scan(step, (p, tx.init(p)), g)[1])(params, grads)


INNER = {
    "nora": lambda: optax_nora.nora(1e-3),
    "adam": lambda: optax.adam(1e-3),
    "sgd": lambda: optax.sgd(1e-3),
}


@LOW
@pytest.mark.parametrize("inner", INNER)
def test_each_parameter_is_its_rounded_master(inner, dtype):
    params = {"kernel": normal(6, 4, dtype=dtype), "bias": normal(4, seed=3, dtype=dtype)}
    weights, state = scan(with_float32_master(INNER[inner]()), params, gradients(30, dtype))
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert state.master[name].dtype == jnp.float32
        np.testing.assert_array_equal(weight, state.master[name].astype(dtype))


@LOW
@pytest.mark.parametrize("inner", INNER)
def test_the_masters_are_the_inner_optimizers_own_run(inner, dtype):
    params = {"kernel": normal(6, 4, dtype=dtype), "bias": normal(4, seed=3, dtype=dtype)}
    grads = gradients(30, dtype)
    _, state = scan(with_float32_master(INNER[inner]()), params, grads)
    wide = jax.tree.map(jnp.float32, (params, grads))
    weights, _ = scan(INNER[inner](), *wide)
    for name in params:
        # The same arithmetic, which the compiler may fuse otherwise; Adam's 1 - b2 is 0.001.
        rounding = of_steps(6, 1e-3, 30, condition=1000)
        np.testing.assert_allclose(state.master[name], weights[name], rtol=0, atol=rounding)


def test_steps_too_small_for_bfloat16_add_up():
    # A step of 1e-4 is lost on a weight of 1, whose neighbours are 2**-8 below and 2**-7 above.
    params, grads = jnp.ones((2, 2), jnp.bfloat16), jnp.ones((100, 2, 2), jnp.bfloat16)
    plain, _ = scan(optax.sgd(1e-4), params, grads)
    master, _ = scan(with_float32_master(optax.sgd(1e-4)), params, grads)
    np.testing.assert_array_equal(plain[-1], params)
    np.testing.assert_array_equal(master[-1], jnp.asarray(0.99, jnp.bfloat16))


def test_the_norm_identity_holds_for_the_masters():
    # |w'|^2 = |w|^2 + lr^2 a step.
    lr, steps = 1e-2, 200
    params = {"kernel": normal(64, 16, dtype=jnp.bfloat16)}
    grads = {"kernel": normal(steps, 64, 16, seed=1, dtype=jnp.bfloat16)}
    nora = optax_nora.nora(lr, row_scale="unit")

    def growth(kernel):
        squares = [np.sum(np.float64(x) ** 2, axis=0) for x in (params["kernel"], kernel)]
        return squares[1] - squares[0]

    _, state = scan(with_float32_master(nora), params, grads)
    # A step rounds each weight by EPS / 2 of itself at most, and its square by EPS.
    rounding = steps * EPS * np.sum(np.float64(params["kernel"]) ** 2, axis=0).max()
    np.testing.assert_allclose(growth(state.master["kernel"][-1]), steps * lr**2, atol=rounding)
    # Without masters most of the steps are lost or blown up.
    weights, _ = scan(nora, params, grads)
    assert np.abs(growth(weights["kernel"][-1]) - steps * lr**2).max() > 0.5 * steps * lr**2


def test_leaves_of_full_precision_have_no_copy():
    params = {"kernel": normal(6, 4, dtype=jnp.bfloat16), "bias": normal(4), "none": None}
    tx = with_float32_master(optax.adam(1e-2))
    state = tx.init(params)
    assert isinstance(state.master["bias"], optax.MaskedNode)
    assert state.master["kernel"].dtype == jnp.float32
    grads = {"kernel": params["kernel"], "bias": params["bias"], "none": None}
    updates, state = tx.update(grads, state, params)
    plain = optax.adam(1e-2)
    expected, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_array_equal(updates["bias"], expected["bias"])
    assert updates["bias"].dtype == updates["kernel"].dtype == jnp.float32


def test_a_tree_of_full_precision_alone():
    params = {"kernel": normal(6, 4)}
    tx, plain = with_float32_master(optax.adam(1e-2)), optax.adam(1e-2)
    updates, _ = tx.update(params, tx.init(params), params)
    expected, _ = plain.update(params, plain.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], expected["kernel"])


def test_the_inner_optimizer_sees_float32_alone():
    seen = []

    def update(updates, state, params=None):
        seen.extend(x.dtype for x in jax.tree.leaves((updates, params)))
        return updates, state

    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    params = {"a": normal(6, 4, dtype=jnp.bfloat16), "b": normal(4, dtype=jnp.float16)}
    tx = with_float32_master(inner)
    state = tx.init(params)
    tx.update(params, state, params)
    assert seen == [jnp.float32] * 4
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32")}


def test_a_parameter_that_shrinks_at_once_arrives_one_step_later():
    # 1 - 1e-7 has no float32 between: the update of the first step can but say -1.
    params, start = jnp.ones((1, 1), jnp.bfloat16), jnp.asarray(1e-7, jnp.float32)
    to_start = optax.stateless(lambda u, p: jax.tree.map(lambda x: start - x, p))
    weights, state = scan(with_float32_master(to_start), params, jnp.zeros((2, 1, 1)))
    np.testing.assert_array_equal(state.master[-1], start)
    np.testing.assert_array_equal(weights[-1], start.astype(jnp.bfloat16))


def test_what_is_no_number_goes_through():
    params = jnp.ones((2, 2), jnp.bfloat16)
    weights, _ = scan(with_float32_master(optax.sgd(0.1)), params, jnp.full((1, 2, 2), jnp.nan))
    assert np.isnan(np.float32(weights)).all()


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: value * u, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    params = jnp.ones((2, 2), jnp.bfloat16)
    tx = with_float32_master(inner)
    updates, _ = tx.update(params, tx.init(params), params, value=2.0)
    np.testing.assert_array_equal(updates, jnp.full((2, 2), 2.0))


def test_params_are_needed():
    tx = with_float32_master(optax.sgd(0.1))
    params = jnp.ones((2, 2), jnp.bfloat16)
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(params, tx.init(params))


def test_abstract_init():
    params = {"kernel": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
    state = jax.eval_shape(with_float32_master(optax_nora.nora(0.1)).init, params)
    assert state.master["kernel"].dtype == jnp.float32
    assert state.master["kernel"].shape == (6, 4)


@LOW
@pytest.mark.parametrize("whole", [True, False])
def test_a_parameter_changed_from_outside_counts(whole, dtype):
    """As `TrainState.replace(params=loaded)` does: the step starts there, not at the old master."""
    tx, params = with_float32_master(optax.sgd(2.0**-12)), {"kernel": jnp.ones((6, 4), dtype)}
    g = {"kernel": jnp.ones((6, 4), dtype)}
    updates, state = tx.update(g, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    changed = params["kernel"].at[slice(None) if whole else 2].set(5.0)
    _, state = tx.update(g, state, {"kernel": changed})
    # Powers of two: exact. Entries that nobody touched go on from their masters.
    want = np.where(changed == 5.0, 5.0 - 2.0**-12, 1.0 - 2 * 2.0**-12)
    np.testing.assert_array_equal(state.master["kernel"], want)


def test_what_averages_around_it_is_heard():
    params = optax.LookaheadParams.init_synced({"kernel": normal(6, 4, dtype=jnp.bfloat16)})
    tx = optax.lookahead(with_float32_master(optax_nora.nora(0.05)), 3, 0.5)
    state = tx.init(params)
    for k in range(1, 7):
        g = {"kernel": normal(6, 4, seed=k, dtype=jnp.bfloat16)}
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        together = np.array_equal(params.fast["kernel"], params.slow["kernel"])
        assert together == (k % 3 == 0)


def test_a_parameter_that_overflows_comes_back():
    params = {"kernel": jnp.full((2, 2), 60_000, jnp.float16)}
    tx = with_float32_master(optax.sgd(1.0))
    state, seen = tx.init(params), []
    for g in (-10_000.0, 0.0, 20_000.0):
        updates, state = tx.update({"kernel": jnp.full((2, 2), g)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params["kernel"][0, 0]))
    assert seen == [65_504.0, 65_504.0, float(np.float16(50_000.0))]


def test_parameters_that_were_added_to_without_a_cast_are_refused():
    params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    tx = with_float32_master(optax.sgd(1.0))
    updates, state = tx.update(params, tx.init(params), params)
    wide = jax.tree.map(lambda p, u: p + u, params, updates)  # as equinox.apply_updates
    with pytest.raises(ValueError, match=r"kernel \(2, 2\) float32 has a float32 master.*optax\.a"):
        tx.update(params, state, wide)


def test_apply_if_finite_belongs_inside():
    params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    tx = with_float32_master(optax.apply_if_finite(optax.sgd(1.0), 3))
    g = {"kernel": jnp.full((2, 2), jnp.nan, jnp.bfloat16)}
    updates, state = tx.update(g, tx.init(params), params)
    assert not updates["kernel"].any()
    assert state.inner_state.total_notfinite == 1
