"""`step` against ``update`` and `optax.apply_updates`, by every backend; kernels interpreted."""

import copy
import functools
import subprocess
import sys
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from boxes import Box
from optax.contrib import MuonDimensionNumbers
from tolerance import of_steps, tolerance

import optax_nora
from optax_nora import _backend

every_backend = pytest.mark.parametrize("backend", ["xla", "pallas"])
# A matrix for either kernel, rows along the first and along the last axis, and AdamW's leaves.
ROWS = optax_nora.by_path({"out": MuonDimensionNumbers(1, 0)})
SHAPES = {
    "mlp": {"kernel": (8, 32), "bias": (32,)},
    "out": {"kernel": (5, 32)},
    "embed": {"embedding": (10, 8)},
}


def nora(learning_rate=0.1, **settings):
    return optax_nora.nora(learning_rate, **{"weight_dimension_numbers": ROWS} | settings)


def model(seed=0, dtype=jnp.float32):
    leaves, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    rng = np.random.default_rng(seed)
    return treedef.unflatten([jnp.asarray(rng.standard_normal(s), dtype) for s in leaves])


GRADS = [model(seed) for seed in (1, 2, 3)]


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def assert_same(ours, theirs, steps=3, mu_eps=0.0):
    """Equal types, and numbers that differ by rounding after steps of rows of up to 32.

    Entries are of up to 0.1 * 2. A momentum stored to ``mu_eps`` may round to either side each
    time, and turn the next step by as much.
    """
    assert types(ours) == types(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        rounding = {"rtol": steps * mu_eps, "atol": of_steps(32, 0.2, steps) + steps * mu_eps * 0.2}
        np.testing.assert_allclose(np.float64(a), np.float64(b), **rounding)


def by_update(tx, params, grads=GRADS):
    """Parameters and state after one step for each of the gradients."""
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def by_step(tx, params, grads=GRADS):
    state, step = tx.init(params), jax.jit(tx.step)
    for g in grads:
        params, state = step(g, state, params)
    return params, state


SETTINGS = {
    "defaults": {},
    "schedules": {"adam_learning_rate": 0.01, "learning_rate": optax.linear_schedule(0.1, 0, 4)},
    "decay": {"weight_decay": 0.5, "adam_weight_decay": 0.1, "row_scale": "rms"},
    "decay of some": {
        "weight_decay": 0.5,
        "weight_decay_mask": {"mlp": True, "out": False, "embed": False},
    },
    "mask by function": {
        "weight_decay": 0.5,
        "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.shape != (5, 32), p),
    },
    "look-ahead": {"beta": 0.8, "momentum": 1.0},
    "low momentum": {"mu_dtype": jnp.bfloat16},
    "routing": {"weight_dimension_numbers": optax_nora.by_path({"out": None})},
}


@functools.cache
def expected(name):
    return by_update(nora(**{"backend": "xla"} | SETTINGS[name]), model())


@every_backend
@pytest.mark.parametrize("name", SETTINGS)
def test_step_is_update_and_apply(name, backend):
    got = by_step(nora(**{"backend": backend} | SETTINGS[name]), model())
    assert_same(got, expected(name), mu_eps=2.0**-7 if name == "low momentum" else 0.0)


def test_updates_by_kernels():
    got = by_update(nora(backend="pallas", **SETTINGS["decay of some"]), model())
    assert_same(got, expected("decay of some"))


def test_kernels_are_what_pallas_runs():
    params = model()
    for backend, kernels in {"pallas": True, "auto": False, "xla": False}.items():  # no GPU here
        tx = nora(0.1, backend=backend)
        for fn in (lambda *args, tx=tx: tx.step(*args), tx.update):
            program = str(jax.make_jaxpr(fn)(GRADS[0], tx.init(params), params))
            assert ("pallas_call" in program) == kernels


@every_backend
def test_a_step_is_within_rounding_of_float64(backend):
    """Of weights near 0, so that none of the step's digits are lost in them."""
    params = jax.tree.map(lambda x: 1e-6 * x, model())
    after, _ = by_step(nora(backend=backend, row_scale="unit"), params, GRADS[:1])
    for name, axis in (("mlp", 0), ("out", 1)):
        w, g, end = (
            np.moveaxis(np.float64(x[name]["kernel"]), axis, -1) for x in (params, GRADS[0], after)
        )
        error = (end - w) / 0.1 + reference.direction(g, w)
        # The digits that the gradient has across the weight: docs/numerics.md.
        bound = tolerance(w.shape[-1], condition=1 / reference.rho(g, w))
        assert np.all(np.linalg.norm(error, axis=-1) <= bound)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@every_backend
def test_low_precision(dtype, backend):
    params, grads = model(0, dtype), [model(seed, dtype) for seed in (1, 2)]
    want = by_update(nora(0.1, backend="xla"), params, grads)
    got = by_step(nora(0.1, backend=backend), params, grads)
    # A sum near the middle of two numbers rounds to either side, and later steps start from there.
    eps = float(jnp.finfo(dtype).eps)
    assert types(got) == types(want)
    ours, theirs = (
        np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(params)])
        for params in (got[0], want[0])
    )
    np.testing.assert_allclose(ours, theirs, rtol=2 * eps, atol=0.1 * eps)
    # A float32 rounding or ten lie to both sides of a middle of float16 once in some thousand.
    assert np.mean(ours != theirs) < 0.02


@every_backend
def test_step_and_update_may_alternate(backend):
    tx = nora(optax.linear_schedule(0.1, 0, 4), backend=backend)
    params = model()
    state = tx.init(params)
    params, state = tx.step(GRADS[0], state, params)
    updates, state = tx.update(GRADS[1], state, params)
    params, state = tx.step(GRADS[2], state, optax.apply_updates(params, updates))
    want = by_update(nora(optax.linear_schedule(0.1, 0, 4), backend="xla"), model())
    assert_same((params, state), want)


@every_backend
def test_grad_scale_is_a_factor_on_every_gradient(backend):
    tx, params = nora(0.1, backend=backend), model()
    # 0.3 g is not rounded to bfloat16.
    low = jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADS[0])
    wide = jax.tree.map(lambda g: 0.3 * g.astype(jnp.float32), low)
    got = jax.jit(tx.step)(low, tx.init(params), params, jnp.float32(0.3))
    assert_same(got, by_update(nora(0.1, backend="xla"), params, [wide]), steps=1)


def test_clipping_by_the_global_norm_through_grad_scale():
    params, g = model(), GRADS[0]
    norm = optax.tree.norm(g)
    tx = nora(0.1, backend="pallas")
    got, _ = tx.step(g, tx.init(params), params, jnp.minimum(1.0, 1.0 / norm))
    chain = optax.chain(optax.clip_by_global_norm(1.0), nora(0.1, backend="xla"))
    want, _ = by_update(chain, params, [g])
    assert_same(got, want, steps=1)


@every_backend
def test_in_place(backend):
    tx, params = nora(0.1, backend=backend), model()
    want, _ = by_update(nora(0.1, backend="xla"), model())
    step, state = jax.jit(tx.step, donate_argnums=(1, 2)), tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of buffers that could not be donated
        for g in GRADS:
            before = params, state
            params, state = step(g, state, params)
            assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert_same(params, want)


def test_the_same_bits_from_run_to_run():
    tx = nora(0.1, backend="pallas")
    chex.assert_trees_all_equal(by_step(tx, model()), by_step(tx, model()))


def test_leaves_without_a_kernel_take_the_ordinary_road():
    params = {
        "apart": jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 5)), jnp.float32),
        "complex": jnp.ones((4, 3), jnp.complex64) * (1 + 2j),
        "empty": jnp.ones((4, 0)),
        "kernel": jnp.asarray(np.random.default_rng(1).standard_normal((4, 5)), jnp.float32),
        "temperature": 1.0,
        "nothing": None,
    }
    numbers = optax_nora.by_path({"apart": MuonDimensionNumbers((0, 2), 1)})
    grads = [jax.tree.map(lambda x: jnp.cos(x) + 0.1, params)] * 2
    make = functools.partial(nora, 0.1, weight_dimension_numbers=numbers)
    tx = make(backend="pallas")
    # numpy arrays and Python numbers are arrays too
    got = by_step(tx, jax.tree.map(np.asarray, params), grads)
    want = by_update(make(backend="xla"), params, grads)
    chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(15, 0.2, 2))


def test_float64():
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((8, 5)))
        g = jnp.cos(w)
        pallas, xla = (optax_nora.nora(0.1, backend=backend) for backend in ("pallas", "xla"))
        got, want = by_step(pallas, {"w": w}, [{"w": g}]), by_update(xla, {"w": w}, [{"w": g}])
    chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(8, 0.1, 1, eps=2.0**-52))


@every_backend
def test_boxes(backend):
    def boxed(tree):
        return jax.tree.map(lambda x: Box(x, ("names",)), tree)

    tx = nora(0.1, backend=backend)
    got = by_step(tx, boxed(model()), [boxed(g) for g in GRADS])
    want = by_update(nora(0.1, backend="xla"), boxed(model()), [boxed(g) for g in GRADS])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same(*map(jax.tree.leaves, (got, want)))


@every_backend
def test_masked_trees(backend):
    """`optax.masked` and `optax.partition` take leaves out, and nora does not see them."""
    tx = nora(0.1, backend=backend)
    params = model() | {"out": {"kernel": optax.MaskedNode()}}
    grads = [g | {"out": {"kernel": optax.MaskedNode()}} for g in GRADS]
    got = by_step(tx, params, grads)
    want = by_update(nora(0.1, backend="xla"), params, grads)
    assert_same(got, want)


# All of optax on the same object


def test_optax_takes_it_for_one_of_its_own():
    tx = nora(0.1, backend="pallas")
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx, optax_nora.StepTransformation)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    assert len(tx) == 2
    for wrapped in (
        optax.chain(optax.clip_by_global_norm(1e9), tx),
        optax.inject_hyperparams(optax_nora.nora)(
            0.1, weight_dimension_numbers=ROWS, backend="pallas"
        ),
        optax_nora.with_float32_master(tx),
    ):
        assert_same(by_update(wrapped, model())[0], expected("defaults")[0])
        assert not hasattr(wrapped, "step")


def test_step_survives_what_takes_it_apart():
    tx, params = nora(0.1), model()
    want = jax.eval_shape(tx.step, GRADS[0], tx.init(params), params)
    for again in (
        copy.copy(tx),
        copy.deepcopy(tx),
        tx._replace(init=tx.init),
        jax.tree.map(lambda f: f, tx),
        optax_nora.StepTransformation(*tx),
    ):
        assert jax.eval_shape(again.step, GRADS[0], tx.init(params), params) == want


def test_built_inside_a_traced_function_it_leaks_nothing():
    params = model()

    def step(params, grads, rate):
        tx = nora(rate, beta=rate, weight_decay=rate, backend="pallas")
        return tx.step(grads, tx.init(params), params)[0]

    with jax.checking_leaks():
        after = jax.jit(step)(params, GRADS[0], 0.1)
    want, _ = by_update(nora(0.1, beta=0.1, weight_decay=0.1, backend="xla"), params, GRADS[:1])
    assert_same(after, want, steps=1)


def test_nothing_is_compiled_twice():
    tx, params = nora(optax.linear_schedule(0.1, 0, 10), backend="pallas"), model()
    step = jax.jit(chex.assert_max_traces(tx.step, n=1))
    state = tx.init(params)
    for g in GRADS:
        params, state = step(g, state, params)


def test_vmap_is_by_xla():
    tx = nora(0.1, backend="pallas")
    models, grads = (
        jax.tree.map(lambda *x: jnp.stack(x), model(seed), model(seed + 1)) for seed in (0, 10)
    )

    def step(grads, params):
        return tx.step(grads, tx.init(params), params)[0]

    mapped = jax.jit(jax.vmap(step))(grads, models)
    for i in range(2):
        one = step(*jax.tree.map(lambda x, i=i: x[i], (grads, models)))
        assert_same(jax.tree.map(lambda x, i=i: x[i], mapped), one, steps=1)


def test_derivatives_are_xlas():
    def total(tx, params, grads, rate):
        moved, _ = tx(rate).step(grads, tx(rate).init(params), params)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(moved))

    ours, theirs = (
        jax.jit(
            jax.grad(functools.partial(total, functools.partial(nora, backend=backend)), (0, 2))
        )(model(), GRADS[0], 0.1)
        for backend in ("pallas", "xla")
    )
    # That of the rate is a sum over all 528 weights.
    chex.assert_trees_all_close(ours, theirs, rtol=tolerance(528), atol=tolerance(528))


# Errors, and what is not there


def test_an_unknown_backend():
    with pytest.raises(
        ValueError, match="backend='cuda' is unknown; take one of auto, xla, pallas"
    ):
        nora(0.1, backend="cuda")


def test_a_jax_without_the_kernels_backend(monkeypatch):
    monkeypatch.setattr(_backend, "_triton", lambda: None)
    with pytest.raises(
        ValueError, match=r"backend='pallas' needs the Triton backend of Pallas, and"
    ):
        nora(0.1, backend="pallas")
    assert_same(by_step(nora(0.1), model()), expected("defaults"))


@every_backend
def test_params_are_needed(backend):
    tx = nora(0.1, backend=backend)
    for call in (tx.update, tx.step):
        with pytest.raises(ValueError, match="params are missing"):
            call(GRADS[0], tx.init(model()), None)


def test_gradients_of_another_structure_are_refused():
    tx = nora(0.1, backend="pallas")
    with pytest.raises(ValueError, match="as trees of one structure"):
        tx.step({"mlp": GRADS[0]["mlp"]}, tx.init(model()), model())


def test_import_is_light_and_quiet():
    code = "import sys, optax_nora; print([m for m in sys.modules if 'pallas' in m])"
    out = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:optax_nora", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "[]"
