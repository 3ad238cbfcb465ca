"""`step` by kernels on eight devices: on local shards where rows are whole, and never a gather."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from tolerance import of_steps

import optax_nora

P = PartitionSpec
SHAPE = (4, 16, 8)
# Rows along the middle axis, for one kernel, and along the last, for the other.
RULE = optax_nora.by_path({"middle": MuonDimensionNumbers(1, 2), "**": MuonDimensionNumbers(2, 1)})
# Two steps of rows of up to 16, entries of up to 0.05 * 2 ** 0.5. Split rows are summed in another
# order, and blocks may be vectorised otherwise than the whole.
ROUNDING = of_steps(16, 0.1, 2)
SPECS = {
    "replicated": P(),
    "layers": P("x"),
    "layers and middle": P("x", "y"),
    "layers and last": P("x", None, "y"),
    "middle by both": P(None, ("x", "y")),
    "middle and last": P(None, "y", "x"),
}
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"f32\[([\d,]*)\]")


def nora(**settings):
    return optax_nora.nora(0.05, weight_dimension_numbers=RULE, backend="pallas", **settings)


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(SHAPE, np.float32) for name in ("middle", "last")}


TREES = [random_tree(seed) for seed in range(3)]


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType[kind],) * 2)


def collective_bytes(program):
    """Bytes that each device gets from collectives, by their kind."""
    found = {}
    for match in COLLECTIVE.finditer(program):
        sizes = [[int(n) for n in dims.split(",") if n] for dims in ARRAY.findall(match["result"])]
        found[match["name"]] = found.get(match["name"], 0) + sum(4 * math.prod(s) for s in sizes)
    return found


@functools.cache
def on_one_device():
    params, *grads = jax.tree.map(jnp.asarray, TREES)
    tx = nora(weight_decay=0.1)
    step, state = jax.jit(tx.step), tx.init(params)
    for g in grads:
        params, state = step(g, state, params, 0.5)
    return jax.device_get((params, state))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", SPECS)
def test_equals_one_device_and_gathers_nothing(name, kind):
    mesh, spec, tx = mesh_of(kind), SPECS[name], nora(weight_decay=0.1)
    where = NamedSharding(mesh, spec)
    params, *grads = jax.device_put(TREES, where)
    state = tx.init(params)
    program = jax.jit(tx.step, donate_argnums=(1, 2)).lower(grads[0], state, params, 0.5).compile()
    split = [
        math.prod(mesh.shape[n] for n in names if n)
        for names in (e if isinstance(e, tuple) else (e,) for e in (*spec, None, None, None)[:3])
    ]
    # Two sums of float32 a row, twice, of each leaf whose rows are split; a device has its rows.
    layers, middle, last = (size // parts for size, parts in zip(SHAPE, split, strict=True))
    rows = layers * last * (split[1] > 1) + layers * middle * (split[2] > 1)
    assert collective_bytes(program.as_text()) == ({"all-reduce": 5 * 4 * rows} if rows else {})
    for g in grads:
        params, state = program(g, state, params, 0.5)
    assert all(x.sharding.is_equivalent_to(where, 3) for x in jax.tree.leaves(params))
    mu = optax.tree.get(state.inner_states["matrix"], "mu")
    assert all(x.sharding.is_equivalent_to(where, 3) for x in jax.tree.leaves(mu))
    got = jax.device_get((params, state))
    chex.assert_trees_all_close(got, on_one_device(), rtol=0, atol=ROUNDING)


def test_kernels_run_on_local_shards():
    """That it is kernels which agree above: of a whole leaf there is none in the program."""
    tx, params = nora(), TREES[0]
    mesh = mesh_of("Explicit")
    placed = jax.device_put(params, NamedSharding(mesh, P("x", None, "y")))
    program = str(jax.make_jaxpr(tx.step)(placed, tx.init(placed), placed))
    # Rows of "middle" are whole: a kernel under shard_map, of (2, 16, 2). "last" is split: XLA's.
    assert program.count("shard_map[") == 2
    assert "f32[2,16,2]" in program
    assert "pallas_call" in program


class TestInShardMap:
    # Where varying axes are checked, kernels run on a GPU alone: the interpreter knows none.
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("spec", [P("x"), P(None, None, "y")], ids=str)
    def test_the_leaf_is_local_already(self, spec, check_vma):
        tx, mesh = nora(row_scale="unit"), mesh_of("Auto")
        params, g = ({"middle": tree["middle"]} for tree in TREES[:2])

        def step(params, g):
            new, state = tx.step(g, tx.init(params), params)
            return new, optax.tree.get(state.inner_states["matrix"], "mu")

        split = jax.shard_map(
            step, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=check_vma
        )
        assert "pallas_call" in str(jax.make_jaxpr(split)(params, g))
        got, want = jax.device_get((jax.jit(split)(params, g), jax.jit(step)(params, g)))
        chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)

    def test_split_rows_are_xlas(self):
        mesh, specs = mesh_of("Auto"), {"middle": P(None, "x")}
        rule = optax_nora.in_shard_map(specs, MuonDimensionNumbers(1, 2))
        tx = optax_nora.nora(0.05, weight_dimension_numbers=rule, backend="pallas")
        whole = optax_nora.nora(0.05, weight_dimension_numbers=MuonDimensionNumbers(1, 2))
        params, g = ({"middle": tree["middle"]} for tree in TREES[:2])

        def step(tx, params, g):
            return tx.step(g, tx.init(params), params)[0]

        split = jax.shard_map(
            functools.partial(step, tx), mesh=mesh, in_specs=(specs, specs), out_specs=specs
        )
        assert "pallas_call" not in str(jax.make_jaxpr(split)(params, g))
        got, want = jax.device_get((jax.jit(split)(params, g), step(whole, params, g)))
        chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)

    def test_over_one_axis_of_two_it_is_xlas(self):
        """Inside, the other axis is the partitioner's."""
        tx, mesh = nora(row_scale="unit"), mesh_of("Auto")
        params, g, _ = TREES

        def step(params, g):
            return tx.step(g, tx.init(params), params)[0]

        split = jax.shard_map(
            step, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), axis_names={"x"}
        )
        where = NamedSharding(mesh, P("x", None, "y"))
        got = jax.jit(split)(*jax.device_put((params, g), where))
        want = jax.jit(step)(params, g)
        got, want = jax.device_get((got, want))
        chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_of_more_axes_than_a_leaf_and_a_mesh_in_context(kind):
    mesh, tx = mesh_of(kind), nora()
    where = NamedSharding(mesh, P(("x", "y")))
    params, g, _ = jax.tree.map(lambda x: np.concatenate([x, x]), TREES)
    with jax.set_mesh(mesh):
        placed = jax.device_put((g, params), where)
        got, _ = jax.jit(tx.step)(placed[0], tx.init(placed[1]), placed[1])
    want, _ = jax.jit(tx.step)(g, tx.init(params), params)
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)


def test_a_state_split_further_than_its_parameter():
    """ZeRO-1: the momentum says how the work is divided; it is gathered from nowhere."""
    mesh, tx = mesh_of("Auto"), nora(row_scale="unit")
    whole, split = NamedSharding(mesh, P(None, None, "y")), NamedSharding(mesh, P("x", None, "y"))
    params, g = ({"middle": tree["middle"]} for tree in TREES[:2])
    want, _ = jax.jit(tx.step)(g, tx.init(params), params)
    placed, g = jax.device_put((params, g), whole)
    state = tx.init(jax.device_put(params, split))
    places = jax.tree.map(lambda x: x.sharding if x.ndim else NamedSharding(mesh, P()), state)
    state = jax.device_put(state, places)
    step = jax.jit(tx.step, out_shardings=({"middle": whole}, places))
    sent = collective_bytes(step.lower(g, state, placed).compile().as_text())
    # The new weights, and nothing else: a device's 4 × 16 × 2 of them.
    assert sent == {"all-gather": 4 * math.prod((4, 16, 2))}
    got, state = step(g, state, placed)
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)


def test_eager_on_a_mesh():
    tx, (params, g, _) = nora(), TREES
    placed, g_placed = jax.device_put((params, g), NamedSharding(mesh_of("Auto"), P("x")))
    got, _ = tx.step(g_placed, tx.init(placed), placed)
    want, _ = tx.step(g, tx.init(params), params)
    np.testing.assert_allclose(got["middle"], want["middle"], rtol=0, atol=ROUNDING)
    assert got["middle"].sharding.is_equivalent_to(placed["middle"].sharding, 3)
