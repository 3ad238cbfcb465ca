"""Blocks of rows in the optimizers: what `nora` does is what its parts do, on every backend."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from tolerance import BLOCK_KERNELS, of_steps

import optax_nora

P = PartitionSpec
every_backend = pytest.mark.parametrize("backend", ["xla", "pallas"])
RULE = optax_nora.by_path({"last": MuonDimensionNumbers(1, 0), "layers": optax_nora.stacked()})
SHAPES = {"kernel": (48, 40), "last": (40, 64), "layers": {"kernel": (3, 40, 32)}, "bias": (7,)}
# What kernels round leaves the next momentum as it is.
KERNEL = {"xla": 0.0, "pallas": BLOCK_KERNELS}


def tree(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


GRADS = [tree(seed) for seed in (1, 2)]


def run(tx, params, grads=GRADS):
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


def by_step(tx, params, grads=GRADS):
    state, step = tx.init(params), jax.jit(tx.step)
    for g in grads:
        params, state = step(g, state, params)
    return params


def close(got, want, atol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@every_backend
@pytest.mark.parametrize("project", [True, False])
def test_nora_is_its_parts(project, backend):
    settings = {"block_rows": 16, "project": project, "weight_dimension_numbers": RULE}
    tx = optax_nora.nora(0.1, weight_decay=0.5, backend=backend, **settings)
    parts = optax.chain(
        optax_nora.scale_by_nora(block_rows=16, project=project), optax_nora.scale_by_row_shape()
    )
    parts = optax_nora.with_adamw(parts, 0.1, 0.5, weight_dimension_numbers=RULE)
    bound = of_steps(64, 0.1, 2) + 2 * 0.1 * KERNEL[backend]
    close(run(tx, tree(0)), run(parts, tree(0)), bound)
    close(by_step(tx, tree(0)), run(parts, tree(0)), bound)


def test_which_steps_have_kernels():
    """Ragged blocks too; rows that are projected, and blocks on a GPU by default, are XLA's."""
    params = tree(0)

    def program(**settings):
        tx = optax_nora.nora(0.1, block_rows=7, weight_dimension_numbers=RULE, **settings)
        return str(jax.make_jaxpr(tx.step)(GRADS[0], tx.init(params), params))

    # The partitioner of jax 0.8 fails on them, so there they are for programs of one device.
    old = jax.__version_info__ < (0, 9)
    assert ("pallas_call" in program(project=False, backend="pallas")) != old
    assert "pallas_call" not in program(project=True, backend="pallas")
    assert "pallas_call" not in program(project=False)


@every_backend
def test_one_row_is_nora_and_many_are_one_block(backend):
    def nora(**settings):
        tx = optax_nora.nora(0.1, weight_dimension_numbers=RULE, backend=backend, **settings)
        return run(tx, tree(0))

    close(nora(block_rows=1), nora(), 0)
    # No block has more rows than its matrix, nor than a row has weights.
    close(nora(block_rows=10**6, project=False), nora(block_rows=48, project=False), 0)


@pytest.mark.parametrize("project", [True, False])
def test_a_row_moves_by_the_learning_rate(project):
    """The identity that the docs promise: exact for rows across their weights."""
    tx = optax_nora.nora(
        0.1, block_rows=16, project=project, row_scale="unit", weight_dimension_numbers=RULE
    )
    before = tree(0)
    after = run(tx, before, GRADS[:1])
    moved = np.linalg.norm(after["kernel"] - before["kernel"], axis=0)
    np.testing.assert_allclose(moved, 0.1, rtol=0, atol=of_steps(48, 0.1, 1))
    if project:
        length = [np.sum(np.square(np.float64(x["kernel"])), axis=0) for x in (before, after)]
        # Squares of rows of length 7: twice that times the error of a weight, for each of 48.
        np.testing.assert_allclose(length[1], length[0] + 0.01, rtol=0, atol=1e-4)


def test_whole_model_masters_and_low_precision():
    params = optax.tree.cast(tree(0), jnp.bfloat16)
    grads = [optax.tree.cast(g, jnp.bfloat16) for g in GRADS]
    plain = optax_nora.nora(0.1, block_rows=16, weight_dimension_numbers=RULE)
    tx = optax_nora.with_float32_master(plain)
    wide = run(plain, optax.tree.cast(params, jnp.float32), grads)
    # Masters are float32: what is seen of them is rounded once, to 2**-9 of weights of up to 4.
    close(optax.tree.cast(run(tx, params, grads), jnp.float32), wide, 4 * 2.0**-9 + 1e-6)


NUMBERS = MuonDimensionNumbers(1, 2)
SENT = {  # blocks of 16 of 48 rows: what their parts on four or two devices send
    P(): set(),
    P("x"): set(),
    P(None, "x"): {"all-reduce"},
    P(None, None, "x"): {"collective-permute"},
    P("x", None, "y"): {"collective-permute"},
    P(None, "y", "x"): {"all-reduce", "collective-permute"},
}


def outputs(backend):
    """A function of g and w to what each optimizer with blocks makes of them."""
    numbers = {"weight_dimension_numbers": NUMBERS}
    settings = {"block_rows": 16, "project": False} | numbers
    nora = optax_nora.nora(0.1, backend=backend, **settings)
    parts = [optax_nora.scale_by_nora(**settings), optax_nora.row_orthonormalize(16, **numbers)]

    def function(g, w):
        updates = [tx.update(g, tx.init(w), w)[0] for tx in (nora, *parts)]
        return [nora.step(g, nora.init(w), w)[0], *updates]

    return jax.jit(function)


@every_backend
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", SENT)
def test_a_mesh_has_the_numbers_of_one_device_and_gathers_nothing(spec, kind, backend):
    """Whole blocks by kernels on each device, split rows and blocks by XLA."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[kind],) * 2)
    g, w = (tree(seed, {"w": (4, 32, 48)}) for seed in (0, 1))
    function, placed = outputs(backend), jax.device_put((g, w), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        got = function(*placed)
        program = function.lower(*placed).compile().as_text()
    stepped, update, *parts = zip(jax.device_get(got), function(g, w), strict=True)
    # Gaussian blocks of 16 rows of 32 have a condition of (1 + 0.5**0.5) / (1 - 0.5**0.5), and
    # their Gram matrices its square, which stretches errors.
    for pair in (stepped, update):
        close(*pair, of_steps(32, 0.1, 1, condition=34) + 0.1 * KERNEL[backend])
    for pair in parts:
        close(*pair, of_steps(32, 1, 1, condition=34))
    for x in jax.tree.leaves(got):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    assert set(re.findall(rf" ({kinds})(?:-start)?\(", program)) == SENT[spec]


@every_backend
def test_rows_that_do_not_follow_each_other_have_no_blocks(backend):
    """Inside a shard_map, where nothing can be moved for it."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    w = tree(0, {"w": (12, 8, 6)})
    numbers = MuonDimensionNumbers(0, (1, 2))

    def run(spec, block_rows):
        rule = optax_nora.in_shard_map(spec, numbers)
        tx = optax_nora.nora(
            0.1,
            block_rows=block_rows,
            project=False,
            weight_dimension_numbers=rule,
            backend=backend,
        )
        whole = optax_nora.nora(
            0.1, block_rows=block_rows, project=False, weight_dimension_numbers=numbers
        )
        function = jax.shard_map(
            lambda w: tx.step(w, tx.init(w), w)[0],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=backend == "xla",
        )
        close(
            function(w),
            whole.step(w, whole.init(w), w)[0],
            of_steps(12, 0.1, 1) + 0.1 * KERNEL[backend],
        )

    run(P(None, "x"), 4)
    run(P(None, None, "y"), 1)
    for spec in (P(None, None, "y"), P(None, "x", "y")):
        with pytest.raises(ValueError, match=r"block_rows=4: in_shard_map splits .* \('y',\)"):
            run(spec, 4)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"block_rows": 0}, ValueError, "block_rows=0 is out of range: it is at least 1"),
        ({"block_rows": 1.5}, TypeError, "block_rows=1.5 is not an int"),
        ({"block_rows": True}, TypeError, "block_rows=True is not an int"),
        ({"block_rows": jnp.int32(4)}, TypeError, "name it in static_args"),
        ({"project": 1}, TypeError, "project=1 is not a bool"),
    ],
)
def test_errors(settings, error, message):
    for make in (optax_nora.scale_by_nora, lambda **kw: optax_nora.nora(0.1, **kw)):
        with pytest.raises(error, match=message):
            make(**settings)
    if "block_rows" in settings:
        with pytest.raises(error, match=message):
            optax_nora.row_orthonormalize(**settings)
