"""The state goes through orbax bit for bit, onto whatever mesh comes next."""

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from peers import PEERS
from tolerance import of_steps

import optax_nora

P = PartitionSpec
SPECS = {"up": {"kernel": P("x", "y"), "bias": P("y")}, "out": {"kernel": P("y", None, "x")}}
RULE = optax_nora.by_path({"out/kernel": MuonDimensionNumbers((0, 1), 2)})
OPTIMIZERS = {
    "nora": optax_nora.nora(0.05, weight_dimension_numbers=RULE),
    "with_float32_master": optax_nora.with_float32_master(
        optax_nora.nora(0.05, weight_dimension_numbers=RULE)
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax_nora.nora)(
        0.05, weight_dimension_numbers=RULE
    ),
    "mano": PEERS["mano"](0.05, weight_dimension_numbers=RULE),
}


def mesh_of(*shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def random_params(seed, dtype=jnp.float32):
    shapes = {"up": {"kernel": (8, 16), "bias": (16,)}, "out": {"kernel": (4, 8, 16)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return optax.tree.random_like(jax.random.key(seed), params, dtype=dtype)


def put(params, mesh):
    return jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, SPECS)


def abstract_state(tx, params, mesh):
    """The state's shapes, each moment where its parameter is and all else on every device."""

    def like(moment, param):
        if isinstance(moment, optax.MaskedNode):
            return moment
        return jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding)

    def everywhere(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))

    return optax.tree.map_params(
        tx,
        like,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=everywhere,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def run(tx, params, state, seeds):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in seeds:
        grads = jax.tree.map(
            lambda g, p: jax.device_put(g.astype(p.dtype), p.sharding), random_params(seed), params
        )
        params, state = step(params, state, grads)
    return params, state


def save_and_restore(path, state, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bit_for_bit_onto_another_mesh(name, tmp_path):
    tx = OPTIMIZERS[name]
    dtype = jnp.bfloat16 if name == "with_float32_master" else jnp.float32
    params = put(random_params(0, dtype), mesh_of(2, 4))
    params, state = run(tx, params, tx.init(params), [1])
    other = mesh_of(4, 1)
    target = abstract_state(tx, put(params, other), other)
    restored = save_and_restore(tmp_path / "state", state, target)
    chex.assert_trees_all_equal_structs(restored, state)
    chex.assert_trees_all_equal_dtypes(restored, state)
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(state))
    jax.tree.map(lambda got, want: chex.assert_equal(got.sharding, want.sharding), restored, target)


def test_the_run_goes_on(tmp_path):
    """On the same mesh as if nothing had happened; on another but for the order of additions."""
    tx = OPTIMIZERS["nora"]
    here, there = mesh_of(2, 4), mesh_of(1, 2)
    params = put(random_params(0), here)
    params, state = run(tx, params, tx.init(params), [1])
    uninterrupted, _ = run(tx, params, state, [2])
    for mesh in (here, there):
        params = put(params, mesh)
        target = abstract_state(tx, params, mesh)
        restored = save_and_restore(tmp_path / str(mesh.size), state, target)
        resumed, _ = run(tx, params, restored, [2])
        got, want = jax.device_get((resumed, uninterrupted))
        if mesh == here:
            chex.assert_trees_all_equal(got, want)
        else:
            # One step of rows of up to 32, entries of up to 0.05 * 2 ** 0.5.
            chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(32, 0.1, 1))
