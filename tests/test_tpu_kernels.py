"""The kernels for TPUs: interpreted, against arithmetic of arrays; and what is lowered for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from steps import FIRST, LAST, NUMBERS, random
from tolerance import tolerance

import optax_nora
from optax_nora import _tpu_kernels
from optax_nora._axes import Rows
from optax_nora._blocks import Blocks
from optax_nora._rows import project_and_normalize
from optax_nora._step import by_xla

DIRECTIONS = {
    "nora": project_and_normalize,
    "blocks of 128": Blocks(128, False),
    "several blocks in a tile": Blocks(32, False),
    "projected": Blocks(64, True),
    "large blocks": Blocks(256, False),
}
CASES = {
    "first": ((768, 256), FIRST),
    "last": ((256, 768), LAST),
    "ragged": ((208, 768), LAST),
    "ragged large blocks": ((800, 384), FIRST),
    "few rows": ((48, 768), LAST),
    "batch": ((2, 768, 128), Rows((1,), (2,))),
    "heads out": ((2, 4, 32, 768), Rows((3,), (1, 2))),
    "heads in": ((2, 12, 64, 128), Rows((1, 2), (3,))),
}
# Blocks of random rows, at least three times as long as there are of them, have singular values
# within a factor of (1 + 3**-0.5) / (1 - 3**-0.5) < 4. An error of a Gram matrix is multiplied by
# half the cube of that in its inverse root, beside the root.
CONDITION = 4**3 / 2


@functools.partial(jax.jit, static_argnames=("rows", "direction", "write_weights"))
def by_kernel(g, mu, w, rows, direction, write_weights=False):
    numbers = jnp.stack([jnp.float32(x) for x in NUMBERS])
    return _tpu_kernels.step(
        numbers, g, mu, w, rows, direction, write_weights=write_weights, interpret=True
    )


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize(("shape", "rows"), CASES.values(), ids=CASES)
def test_a_step_is_that_of_arrays(shape, rows, direction):
    arrays = random(shape, [jnp.float32] * 3)
    new_mu, update = by_kernel(*arrays, rows, direction)
    want_mu, want = by_xla(rows, direction, NUMBERS, *arrays, write_weights=False)
    np.testing.assert_allclose(new_mu, want_mu, rtol=0, atol=tolerance(2, size=4))
    condition = 1 if direction is project_and_normalize else CONDITION
    bound = tolerance(rows.fan_in(shape), size=np.abs(want).max(), condition=condition)
    np.testing.assert_allclose(update, want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtypes", [["bfloat16"] * 3, ["float32", "bfloat16", "bfloat16"]])
def test_weights_are_written_in_their_own_dtype(dtypes):
    g, mu, w = random((256, 384), dtypes)
    got = by_kernel(g, mu, w, FIRST, Blocks(128, False), write_weights=True)
    want = by_xla(FIRST, Blocks(128, False), NUMBERS, g, mu, w, write_weights=True)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        # One may round the other way.
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2**-7, atol=2**-14)


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows_in_its_tile_alone(bad, direction):
    g, mu, w = random((208, 768), [jnp.float32] * 3)
    _, out = by_kernel(g.at[200, 3].set(bad), mu, w, LAST, direction)
    finite = np.all(np.isfinite(out), axis=1)
    assert not finite[200]
    if getattr(direction, "block_rows", 1) <= 128:
        assert finite[:128].all()


@pytest.mark.parametrize(
    ("shape", "rows", "direction", "fits"),
    [
        ((2048, 4096), FIRST, project_and_normalize, True),
        ((4096, 2048), LAST, Blocks(256, True), True),
        ((4096, 2048), LAST, Blocks(512, True), False),
        ((2048, 4096), LAST, Blocks(96, True), False),  # neither divides the other
        ((2048, 4000), FIRST, project_and_normalize, False),  # laid out the other way by XLA
        ((2040, 4096), FIRST, project_and_normalize, False),
        ((64, 4096), LAST, Blocks(128, True), True),  # all rows are one block
        ((32768, 4096), FIRST, project_and_normalize, False),  # too long for a core
        ((2048, 16, 128), Rows((0,), (1, 2)), project_and_normalize, False),
        ((16, 128, 2048), Rows((0, 1), (2,)), project_and_normalize, True),
        ((128, 2048, 256), Rows((0,), (1,)), project_and_normalize, False),
        ((16, 64, 2048), Rows((2,), (1, 0)), Blocks(128, False), False),  # rows count otherwise
        ((0, 4096), LAST, project_and_normalize, False),
        ((4096,), Rows((0,), ()), project_and_normalize, False),
    ],
)
def test_which_rows_have_a_kernel(shape, rows, direction, fits):
    assert _tpu_kernels.fits(rows, shape, direction) == fits


# Programs for TPUs: compiled nowhere in this suite, but lowered


def program(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
@pytest.mark.parametrize("rows", [FIRST, LAST])
def test_kernels_can_be_lowered(rows, direction):
    def step(*arrays):
        return _tpu_kernels.step(*arrays, rows, direction, write_weights=True)

    arrays = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 3
    assert program(step, jax.ShapeDtypeStruct((9,), "float32"), *arrays).count("tpu_custom") == 1


@pytest.mark.parametrize("method", ["step", "update"])
@pytest.mark.parametrize("backend", ["auto", "xla", "pallas"])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_programs_for_many_tpus(kind, block_rows, backend, method):
    """libtpu knows no custom_partitioning: a program with it does not compile there."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    params = {"kernel": jax.device_put(jnp.ones((256, 1024)), split), "bias": jnp.ones(8)}
    tx = optax_nora.nora(0.1, block_rows=block_rows, project=block_rows == 1, backend=backend)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        state = tx.init(params)
        text = program({"step": tx.step, "update": update}[method], params, state, params)
    assert "CustomSPMDPartitioning" not in text
    # Of Auto axes only the partitioner knows, and it cannot divide a kernel. The one of jax 0.8
    # cannot place those for blocks either.
    known = kind is AxisType.Explicit and (block_rows == 1 or jax.__version_info__ >= (0, 9))
    assert ("tpu_custom" in text) == (backend == "pallas" and known)


@pytest.mark.parametrize("block_rows", [1, 128])
def test_kernels_in_shard_map(block_rows):
    specs = {"kernel": PartitionSpec(None, "fsdp")}
    tx = optax_nora.nora(
        0.1,
        block_rows=block_rows,
        project=block_rows == 1,
        backend="pallas",
        weight_dimension_numbers=optax_nora.in_shard_map(specs),
    )

    def step(grads, params):
        return tx.step(grads, tx.init(params), params)[0]

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    params = {"kernel": jnp.ones((256, 1024))}
    text = program(sharded, params, params)
    assert "CustomSPMDPartitioning" not in text
    # Several devices are too many for the kernels of blocks and jax 0.8.
    assert text.count("tpu_custom") == (block_rows == 1 or jax.__version_info__ >= (0, 9))
