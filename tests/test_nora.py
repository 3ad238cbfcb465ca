"""The whole optimizer: its steps, its types, and its way through jax."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from tolerance import of_steps, tolerance

import optax_nora
from optax_nora import nora, scale_by_nora


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def model(dtype=jnp.float32, seed=0):
    shapes = {
        "mlp": {"kernel": (8, 32), "bias": (32,)},
        "out": {"kernel": (32, 4)},
        "embed": {"embedding": (10, 8)},
    }
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten(
        [jnp.asarray(normal(*s, seed=seed + i), dtype) for i, s in enumerate(leaves)]
    )


def run(tx, params, grads):
    """Parameters after each step, and the last state."""
    update, state, trajectory = jax.jit(tx.update), tx.init(params), []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        trajectory.append(params)
    return trajectory, state


def assert_same_steps(ours, theirs, steps):
    """By programs that may be fused otherwise: rows of up to 32, entries of up to 0.1 * 2."""
    check = functools.partial(np.testing.assert_allclose, rtol=0, atol=of_steps(32, 0.2, steps))
    jax.tree.map(check, ours, theirs)


def first_updates(tx, params, grads):
    return tx.update(grads, tx.init(params), params)[0]


def run_once(tx, params, grads):
    return jax.jit(functools.partial(first_updates, tx))(params, grads)


GRADS = [model(seed=10 * t) for t in range(1, 5)]


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


# Its steps


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"momentum": 1.0}, 2.0),
        ({"beta": 0.5, "momentum": 0.8}, 2.0),
        ({"weight_decay": 0.5}, 2.0),
        ({"row_scale": "unit"}, 1.0),
        ({"row_scale": "width", "base_fan_in": 2}, 0.5),
        ({"row_scale": "rms"}, 0.2 * 8**0.5),
    ],
)
def test_its_steps(settings, scale):
    ours, _ = run(nora(0.1, **settings), model(), GRADS)
    expected, _ = reference.steps(
        model()["mlp"]["kernel"].T,
        [g["mlp"]["kernel"].T for g in GRADS],
        lr=0.1,
        beta=settings.get("beta", 0.95),
        ahead=settings.get("momentum"),
        weight_decay=settings.get("weight_decay", 0.0),
        scale=scale,
    )
    got = np.stack([p["mlp"]["kernel"].T for p in ours])
    np.testing.assert_allclose(got, expected, rtol=0, atol=of_steps(8, 0.2, 4))


def test_the_rest_is_optaxs_adamw():
    settings = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.3}
    tx = nora(0.1, adam_learning_rate=0.01, **{f"adam_{k}": v for k, v in settings.items()})
    ours, _ = run(tx, model(), GRADS)
    theirs, _ = run(optax.adamw(0.01, **settings), model(), GRADS)
    for a, b in zip(ours, theirs, strict=True):
        # The same arithmetic, which the compiler may fuse otherwise; 1 - b2 = 0.1 takes a digit.
        rounding = {"rtol": 0, "atol": of_steps(1, 0.01, 4, condition=10)}
        np.testing.assert_allclose(a["mlp"]["bias"], b["mlp"]["bias"], **rounding)
        np.testing.assert_allclose(a["embed"]["embedding"], b["embed"]["embedding"], **rounding)


def test_the_rates():
    # A constant gradient: every entry of Adam's step is its rate, every row of Nora's too.
    params = {"kernel": jnp.asarray(normal(6, 1)), "bias": jnp.ones(1)}
    grads = [jax.tree.map(jnp.ones_like, params)] * 3

    def rates(tx):
        trajectory = [params, *run(tx, params, grads)[0]]
        steps = [np.diff([p[leaf] for p in trajectory], axis=0) for leaf in params]
        return [np.linalg.norm(step.reshape(3, -1), axis=-1) for step in steps]

    down = optax.linear_schedule(0.1, 0.0, 2)
    for tx, matrix, adam in [
        (nora(0.1), [0.1] * 3, [0.1] * 3),
        (nora(0.1, adam_learning_rate=0.02), [0.1] * 3, [0.02] * 3),
        (nora(down), [0.1, 0.05, 0], [0.1, 0.05, 0]),
        (nora(0.1, adam_learning_rate=down), [0.1] * 3, [0.1, 0.05, 0]),
        (nora(down, adam_learning_rate=0.02), [0.1, 0.05, 0], [0.02] * 3),
        (nora(jnp.asarray(0.1)), [0.1] * 3, [0.1] * 3),
        (nora(np.float32(0.1)), [0.1] * 3, [0.1] * 3),
    ]:
        # The norms of differences of six weights.
        np.testing.assert_allclose(rates(tx), [matrix, adam], rtol=0, atol=of_steps(6, 0.1, 1))


@pytest.mark.parametrize("form", ["tree", "prefix", "function"])
def test_weight_decay_mask_holds_for_both_branches(form):
    params = model()
    on = {"mlp": True, "out": False, "embed": True}
    tree = {k: jax.tree.map(lambda _, v=v: v, params[k]) for k, v in on.items()}
    mask = {"tree": tree, "prefix": on, "function": lambda p: {k: tree[k] for k in p}}[form]
    zeros = [jax.tree.map(jnp.zeros_like, params)]
    tx = nora(0.1, weight_decay=0.5, adam_weight_decay=0.3, weight_decay_mask=mask)
    ((after,), _) = run(tx, params, zeros)
    factors = {
        "mlp": {"kernel": 0.95, "bias": 0.97},
        "out": {"kernel": 1},
        "embed": {"embedding": 0.97},
    }
    jax.tree.map(
        lambda w, f, a: np.testing.assert_allclose(a, f * w, rtol=tolerance()),
        *(params, factors, after),
    )


def test_keep_row_norms_after_nora():
    tx = optax.chain(nora(0.1), optax_nora.keep_row_norms())
    trajectory, _ = run(tx, model(), GRADS)
    for p in trajectory:
        for name in ("mlp", "out"):
            norms = [np.linalg.norm(x[name]["kernel"], axis=0) for x in (p, model())]
            np.testing.assert_allclose(*norms, rtol=4 * tolerance(32))  # four steps
        assert np.all(p["mlp"]["bias"] != model()["mlp"]["bias"])


def test_it_learns_what_is_scale_invariant():
    # Directions: the loss sees the columns of the kernel normalised.
    x, target = normal(64, 8), normal(8, 5, seed=1)
    y = x @ (target / np.linalg.norm(target, axis=0))

    def loss(params):
        w = params["kernel"]
        return jnp.mean((x @ (w / jnp.linalg.norm(w, axis=0)) - y) ** 2)

    tx = nora(optax.linear_schedule(0.1, 0.0, 200))

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    params = {"kernel": jnp.asarray(normal(8, 5, seed=2))}
    _, losses = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, 200))(params)
    assert losses[0] > 0.5
    assert losses[-1] < 1e-4


# dtypes and trees

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("mu_dtype", [None, jnp.float32])
@pytest.mark.parametrize("params", DTYPES)
@pytest.mark.parametrize("grads", DTYPES)
def test_scan_keeps_every_type(params, grads, mu_dtype):
    w, g = model(params), model(grads)
    tx = nora(0.1, weight_decay=0.1, adam_weight_decay=0.1, mu_dtype=mu_dtype)

    def step(carry, _):
        w, state = carry
        updates, state = tx.update(g, state, w)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, w)
        return (optax.apply_updates(w, updates), state), None

    # lax.scan refuses a carry of which a type changes. Traced is enough: nothing is compiled.
    (after, state), _ = jax.eval_shape(lambda c: jax.lax.scan(step, c, None, 3), (w, tx.init(w)))
    assert types(after) == types(w)
    assert types(state) == types(tx.init(w))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_steps_are_float32_steps_rounded(dtype):
    # The rounded step, not a step made of rounded parts: scale, decay and rate are float32 too.
    w, g = model(dtype), model(dtype, seed=10)
    low, high = (
        run_once(nora(0.1, weight_decay=0.1, adam_weight_decay=0.1), *trees)
        for trees in ((w, g), jax.tree.map(jnp.float32, (w, g)))
    )
    for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True):
        assert a.dtype == dtype
        eps = float(jnp.finfo(dtype).eps)  # half of it at most, of a step that is off in float32
        np.testing.assert_allclose(np.float32(a), b, rtol=eps / 2, atol=tolerance(32, size=0.2))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_zero_gradients_move_nothing(dtype):
    # optax.adamw alone gives NaN in float16, where its eps of 1e-10 is 0.
    params = model(dtype)
    zeros = jax.tree.map(jnp.zeros_like, params)
    (after, *_), state = run(nora(0.1), params, [zeros] * 2)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves(state))


def test_small_gradients_in_float16_move_adams_leaves():
    # Their squares underflow in float16.
    params = {"kernel": jnp.ones((4, 4), jnp.float16), "bias": jnp.ones(4, jnp.float16)}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-5), params)
    updates = run_once(nora(0.01), params, grads)
    np.testing.assert_allclose(np.float32(updates["bias"]), -0.01, rtol=2.0**-10)  # its eps


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows(bad):
    params, grads = model(), model(seed=10)
    grads["mlp"]["kernel"] = grads["mlp"]["kernel"].at[2, 5].set(bad)
    grads["mlp"]["bias"] = grads["mlp"]["bias"].at[3].set(bad)
    (after, later), _ = run(nora(0.1), params, [grads, model(seed=20)])
    for p in (after, later):
        assert not np.isfinite(p["mlp"]["kernel"][:, 5]).all()
        assert not np.isfinite(p["mlp"]["bias"][3])
        assert np.isfinite(np.delete(p["mlp"]["kernel"], 5, axis=1)).all()
        assert np.isfinite(p["out"]["kernel"]).all()


def test_float64():
    with jax.enable_x64(True):
        w, grads = normal(8, 5, dtype=np.float64), normal(4, 8, 5, seed=1, dtype=np.float64)
        tx = nora(0.1, weight_decay=0.1)
        ours, state = run(
            tx, {"kernel": jnp.asarray(w)}, [{"kernel": jnp.asarray(g)} for g in grads]
        )
        assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float64")}
        got = np.stack([p["kernel"].T for p in ours])
    expected, _ = reference.steps(w.T, grads.swapaxes(1, 2), lr=0.1, weight_decay=0.1)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=0, atol=of_steps(8, 0.1, 4, eps=2.0**-52))


def test_complex_matrices_are_real_ones_of_twice_the_length():
    def complex_(seed):
        return jnp.asarray(normal(6, 5, seed=seed) + 1j * normal(6, 5, seed=seed + 50))

    def real(x):
        return jnp.concatenate([jnp.real(x), jnp.imag(x)])

    w, grads = complex_(0), [complex_(t) for t in range(1, 4)]
    # "unit", as the real matrix has twice the fan-in.
    ours, _ = run(nora(0.1, row_scale="unit"), {"w": w}, [{"w": g} for g in grads])
    theirs, _ = run(nora(0.1, row_scale="unit"), {"w": real(w)}, [{"w": real(g)} for g in grads])
    for a, b in zip(ours, theirs, strict=True):
        assert a["w"].dtype == jnp.complex64
        np.testing.assert_allclose(real(a["w"]), b["w"], rtol=0, atol=of_steps(12, 0.1, 3))


def test_a_python_float_is_a_parameter():
    params = {"kernel": jnp.ones((4, 4)), "temperature": 1.0}
    tx = nora(0.1)
    (after,), _ = run(tx, params, [{"kernel": jnp.ones((4, 4)), "temperature": 2.0}])
    # Adam's 1 - b2 = 0.05 takes a digit.
    assert after["temperature"] == pytest.approx(0.9, abs=of_steps(1, 0.1, 1, condition=20))


@pytest.mark.parametrize(
    "params",
    [
        (jnp.ones((4, 3)), [jnp.ones(3), {"w": jnp.ones((3, 2))}]),
        jnp.ones((4, 3)),
        {"kernel": jnp.ones((4, 3)), "nothing": None},
        {0: {"kernel": jnp.ones((4, 3))}},
    ],
    ids=["tuple", "array", "none", "int key"],
)
def test_trees(params):
    updates = run_once(nora(0.1), params, jax.tree.map(jnp.ones_like, params))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


# Errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"learning_rate": -0.1},
            r"learning_rate=-0.1 is out of range: it lies in \[0, 3.4e\+38\]",
        ),
        ({"weight_decay": -1}, "weight_decay=-1 is out of range"),
        ({"adam_learning_rate": -1}, "adam_learning_rate=-1 is out of range"),
        ({"adam_weight_decay": -1}, "adam_weight_decay=-1 is out of range"),
        ({"adam_b1": 1.0}, "adam_b1=1.0 is out of range"),
        ({"adam_b2": 1.5}, "adam_b2=1.5 is out of range"),
        ({"adam_eps": -1e-8}, "adam_eps=-1e-08 is out of range"),
        ({"row_scale": "fan"}, "row_scale='fan' is unknown; take one of fan_ratio, unit, width, "),
        ({"row_scale": "width"}, "row_scale='width' needs base_fan_in"),
        ({"base_fan_in": -1}, "base_fan_in=-1 is out of range"),
    ],
)
def test_arguments_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        nora(**{"learning_rate": 0.1, **settings})


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": -1.0}, {"learning_rate": None}, {"adam_learning_rate": jnp.float32(-1)}],
)
def test_a_rate_that_is_applied_elsewhere(settings):
    """The mend is held to what it does in tests/integration/test_wrappers.py."""
    with pytest.raises((TypeError, ValueError), match=r"chain optax.scale\(-1.0\) behind"):
        nora(**{"learning_rate": 0.1, **settings})


def test_params_are_needed():
    tx = nora(0.1)
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(model(), tx.init(model()))


def test_unexpected_extra_arguments_are_let_go():
    params, tx = model(), nora(0.1)
    updates, _ = tx.update(GRADS[0], tx.init(params), params, value=1.0, grad=None)
    plain, _ = tx.update(GRADS[0], tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, plain)


# Through jax


def test_nothing_is_compiled_twice():
    params = model()
    traced = []

    @jax.jit
    def step(params, state, grads, learning_rate):
        traced.append(1)
        updates, state = nora(learning_rate).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = nora(0.1).init(params)
    for t, g in enumerate(GRADS):
        params, state = step(params, state, g, 0.1 / (t + 1))
    assert len(traced) == 1


def test_weak_types_do_not_make_a_second_compilation():
    params, tx = model(), nora(optax.linear_schedule(0.1, 0, 10))
    first = tx.init(params)
    _, second = tx.update(GRADS[0], first, params)
    assert types(first) == types(second)


def test_donation():
    params, tx = model(), nora(0.1)
    expected, _ = run(tx, model(), GRADS)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of buffers that could not be donated
        for g, want in zip(GRADS, expected, strict=True):
            before = params, state
            params, state = step(params, state, g)
            assert all(x.is_deleted() for x in jax.tree.leaves(before))
            # Donated buffers may be fused otherwise.
            assert_same_steps(params, want, len(GRADS))


def test_abstract_init():
    shapes = jax.eval_shape(model)
    tx = nora(0.1)
    assert types(jax.eval_shape(tx.init, shapes)) == types(tx.init(model()))


def test_the_state_is_shaped_like_the_parameters_or_scalar():
    shapes = {x.shape for x in jax.tree.leaves(model())}
    state = nora(optax.linear_schedule(0.1, 0, 10)).init(model())
    assert {x.shape for x in jax.tree.leaves(state)} <= shapes | {()}
    # One buffer for a matrix, two for the others.
    sizes = {"matrix": 8 * 32 + 32 * 4, "adamw": 2 * (32 + 10 * 8)}
    for branch, size in sizes.items():
        assert sum(x.size for x in jax.tree.leaves(state.inner_states[branch]) if x.ndim) == size


def test_the_state_shares_no_buffer():
    params = model()
    state = scale_by_nora().init({"kernel": params["out"]["kernel"]})
    state.mu["kernel"].delete()
    assert not params["out"]["kernel"].is_deleted()


def test_vmap_over_update():
    tx = nora(0.1)
    models, grads = (
        jax.tree.map(lambda *x: jnp.stack(x), *(model(seed=s + i) for i in (0, 100)))
        for s in (0, 10)
    )
    # Of the arrays, that is: a vmapped function sees trees of single models.
    mapped = jax.jit(jax.vmap(functools.partial(first_updates, tx)))(models, grads)
    for i in range(2):
        one = run_once(tx, *jax.tree.map(lambda x, i=i: x[i], (models, grads)))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(
                a[i], b, rtol=0, atol=tolerance(32, size=0.2)
            ),
            *(mapped, one),
        )


@pytest.mark.parametrize("zero", ["no row", "gradient", "weight"])
def test_gradients_through_an_update_are_finite(zero):
    params, grads = model(), model(seed=10)
    if zero == "gradient":
        grads["mlp"]["kernel"] = grads["mlp"]["kernel"].at[:, 3].set(0)
    if zero == "weight":
        params["mlp"]["kernel"] = params["mlp"]["kernel"].at[:, 3].set(0)

    def total(params, grads, rate):
        updates = first_updates(nora(rate, weight_decay=0.1), params, grads)
        moved = optax.apply_updates(params, updates)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(moved))

    derivatives = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(params, grads, 0.1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(derivatives))
    assert derivatives[2] != 0


def test_built_inside_a_traced_function_it_leaks_nothing():
    params = model()

    def step(params, grads, rate):
        tx = nora(rate, beta=rate, weight_decay=rate)
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    with jax.checking_leaks():
        after = jax.jit(step)(params, GRADS[0], 0.1)
    plain = step(params, GRADS[0], 0.1)
    assert_same_steps(after, plain, 1)


def test_positional_arguments():
    # Positional arguments are positional for ever.
    kinds = {p.name: p.kind for p in inspect.signature(nora).parameters.values()}
    assert list(kinds)[:7] == [
        *("learning_rate", "beta", "momentum", "eps", "weight_decay", "weight_decay_mask"),
        "mu_dtype",
    ]
    assert set(list(kinds.values())[7:]) == {inspect.Parameter.KEYWORD_ONLY}


def test_one_rule_serves_nora_and_its_parts():
    params = {"q": jnp.asarray(normal(8, 2, 4))}
    numbers = MuonDimensionNumbers(0, (1, 2))
    whole = run_once(nora(1.0, weight_dimension_numbers=numbers), params, params)
    parts = run_once(
        optax.chain(
            scale_by_nora(weight_dimension_numbers=numbers),
            optax_nora.scale_by_row_shape(weight_dimension_numbers=numbers),
            optax.scale_by_learning_rate(1.0),
        ),
        params,
        params,
    )
    np.testing.assert_allclose(whole["q"], parts["q"], rtol=0, atol=tolerance(8))
