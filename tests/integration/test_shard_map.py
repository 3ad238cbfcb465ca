"""Inside `jax.shard_map`, where only the user knows which mesh axes split a row."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from peers import PEERS
from tolerance import of_steps

import optax_nora

P = PartitionSpec
# Of arrays (8, 16): reduced over axis 0, so that the fan ratio is 2 ** 0.5, whoever holds a part.
SPECS = {
    "reduction": {"kernel": P("x")},
    "output": {"kernel": P(None, "y")},
    "reduction and output": {"kernel": P("y", "x")},
    # Each device holds one weight of a row; the row is no row of one weight for that.
    "reduction by two mesh axes": {"kernel": P(("x", "y"))},
    "with a vector": {"kernel": P("y", "x"), "bias": P("x")},
}
SHAPES = {"kernel": (8, 16), "bias": (16,)}
# Two steps of rows of 8, whose parts are added in another order; entries of up to 0.05 * 2 ** 0.5.
ROUNDING = of_steps(8, 0.1, 2)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def random_tree(seed, names, shapes=SHAPES):
    keys = jax.random.split(jax.random.key(seed), len(names))
    pairs = zip(names, keys, strict=True)
    return {name: jax.random.normal(key, shapes[name]) for name, key in pairs}


def steps_of(tx):
    """One step for each of the gradients."""

    def steps(params, *grads):
        state = tx.init(params)
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return steps


def compare(mesh, specs, make, shapes=SHAPES, numbers=None):
    """Two steps where each device holds its part, against two steps on the whole."""
    trees = [random_tree(seed, specs, shapes) for seed in range(3)]
    want = jax.jit(steps_of(make(numbers)))(*trees)
    split = jax.shard_map(
        steps_of(make(optax_nora.in_shard_map(specs, numbers))),
        mesh=mesh,
        in_specs=(specs, specs, specs),
        out_specs=specs,
        check_vma=True,
    )
    got = jax.jit(split)(*trees)
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("name", SPECS)
def test_equals_unsharded(mesh, name):
    """The row scale too: of the whole matrix, not of a device's part of it."""
    compare(
        mesh,
        SPECS[name],
        lambda numbers: optax_nora.nora(0.05, weight_decay=0.1, weight_dimension_numbers=numbers),
    )


def test_row_scale_rms(mesh):
    compare(
        mesh,
        SPECS["reduction and output"],
        lambda numbers: optax_nora.nora(0.05, row_scale="rms", weight_dimension_numbers=numbers),
    )


@pytest.mark.parametrize("spec", [P(None, "x", "y"), P("x", "y"), P("y", None, "x")], ids=str)
def test_stacked_layers(mesh, spec):
    compare(
        mesh,
        {"layers": spec},
        lambda numbers: optax_nora.nora(0.05, weight_dimension_numbers=numbers),
        {"layers": (4, 8, 16)},
        optax_nora.stacked(),
    )


@pytest.mark.parametrize("name", ["rmnp", "mano"])
def test_baselines(mesh, name):
    def make(numbers):
        return PEERS[name](0.05, weight_dimension_numbers=numbers)

    compare(mesh, SPECS["reduction and output"], make)


def test_the_parts_alone(mesh):
    def make(numbers):
        return optax.chain(
            optax_nora.scale_by_nora(weight_dimension_numbers=numbers),
            optax_nora.scale_by_row_shape(weight_dimension_numbers=numbers),
            optax.scale(-0.05),
            optax_nora.keep_row_norms(weight_dimension_numbers=numbers),
        )

    compare(mesh, SPECS["reduction and output"], make, numbers=MuonDimensionNumbers(0, 1))


def test_unnamed_mesh_axes_give_other_steps(mesh):
    """Why the rule is there: without it each device normalises its part of a row for itself."""
    specs = {"kernel": P("x")}
    with pytest.raises(AssertionError, match="differ in leaves 'kernel'"):
        compare(mesh, specs, lambda _: optax_nora.nora(0.05))


def test_built_inside_leaks_nothing(mesh):
    """The optimizer, its rule and its learning rate are all made inside."""
    specs = {"kernel": P("x")}
    params, grads = (random_tree(seed, specs) for seed in (0, 1))

    def one(params, grads, learning_rate):
        rule = optax_nora.in_shard_map(specs)
        tx = optax_nora.nora(learning_rate, weight_dimension_numbers=rule)
        return tx.update(grads, tx.init(params), params)[0]

    with jax.checking_leaks():
        split = jax.shard_map(one, mesh=mesh, in_specs=(specs, specs, P()), out_specs=specs)
        got = jax.jit(split)(params, grads, 0.05)
    tx = optax_nora.nora(0.05)
    want, _ = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_close(jax.device_get(got), want, rtol=0, atol=ROUNDING)


def test_a_leaf_without_a_spec_is_named(mesh):
    rule = optax_nora.in_shard_map({"kernel": P("x")})
    with pytest.raises(ValueError, match=r"no PartitionSpec for the leaf other \(8, 16\)"):
        optax_nora.nora(0.05, weight_dimension_numbers=rule).init({"other": jnp.ones((8, 16))})
