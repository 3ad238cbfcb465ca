"""On eight devices: whatever axes are sharded, the state follows and the numbers stay."""

import functools

import chex
import jax
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from peers import NAMES, PEERS
from tolerance import NEWTON_SCHULZ, of_steps

import optax_nora

P = PartitionSpec
SHAPE = (8, 16, 8)
NUMBERS = {
    "stacked": MuonDimensionNumbers((1,), (2,)),  # (layers, in, out)
    "split": MuonDimensionNumbers((0,), (1, 2)),  # (embed, heads, head_dim)
    "joined": MuonDimensionNumbers((0, 1), (2,)),  # (heads, head_dim, embed)
}
RULE = optax_nora.by_path(NUMBERS)
# No axis sharded, each axis by all devices, each pair of axes.
SPECS = [
    *(P(), P(("x", "y")), P(None, ("x", "y")), P(None, None, ("x", "y"))),
    *(P("x", "y"), P("y", None, "x"), P(None, "x", "y")),
]
# Three steps of rows of up to 128 weights, "joined"; entries of up to 0.05 * 4, "split". What is
# sharded is summed in another order, and small blocks by other vector instructions.
ROUNDING = of_steps(128, 0.2, 3)
# One leaf for each way to lie in an array and each spec, vectors for AdamW: one program has all.
LAYOUTS = {f"{kind} {spec}": (kind, spec) for kind in NUMBERS for spec in SPECS}
LAYOUTS |= {f"bias {spec}": ("bias", spec) for spec in (P(), P("y"))}


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[request.param]
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)


def nested(leaves):
    """Under the name of their kind, which the rule goes by."""
    tree = {}
    for name, leaf in leaves.items():
        tree.setdefault(LAYOUTS[name][0], {})[name] = leaf
    return tree


def flat(tree):
    return {name: leaf for leaves in tree.values() for name, leaf in leaves.items()}


def random_tree(seed, names=LAYOUTS):
    """All leaves of one kind are equal, so that all of them are compared with the same."""
    key = jax.random.key(seed)
    shapes = {name: (8,) if LAYOUTS[name][0] == "bias" else SHAPE for name in names}
    return nested({name: jax.random.normal(key, shape) for name, shape in shapes.items()})


def shardings(mesh, names=LAYOUTS):
    return nested({name: NamedSharding(mesh, LAYOUTS[name][1]) for name in names})


def reduction_is_sharded(name):
    kind, spec = LAYOUTS[name]
    return kind != "bias" and any(
        axis < len(spec) and spec[axis] for axis in NUMBERS[kind].reduction_axis
    )


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(step, params, state, grads):
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def assert_state_follows(params, state):
    moments, _ = jax.tree_util.tree_flatten_with_path(state)
    for name, param in flat(params).items():
        found = [moment for path, moment in moments if str(path[-1]) == f"[{name!r}]"]
        assert len(found) == (2 if name.startswith("bias") else 1)
        for moment in found:
            assert moment.sharding.is_equivalent_to(param.sharding, param.ndim), name


def state_shardings(tx, params, mesh):
    """Where a state goes: its moments with their parameters, all else on every device."""
    return optax.tree.map_params(
        tx,
        lambda moment, param: moment if isinstance(moment, optax.MaskedNode) else param.sharding,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )


def nora(**kwargs):
    return optax_nora.nora(0.05, weight_dimension_numbers=RULE, **kwargs)


@functools.cache
def on_one_device():
    """What one leaf of each kind comes to in three steps."""
    some = {LAYOUTS[name][0]: name for name in LAYOUTS}.values()
    params, *grads = (random_tree(seed, some) for seed in range(4))
    tx = nora(weight_decay=0.1)
    params, _ = run(jax.jit(step_of(tx)), params, tx.init(params), grads)
    return {LAYOUTS[name][0]: jax.device_get(leaf) for name, leaf in flat(params).items()}


def test_every_axis_and_pair_of_axes(mesh):
    tx = nora(weight_decay=0.1)
    before, *grads = (jax.device_put(random_tree(seed), shardings(mesh)) for seed in range(4))
    with jax.set_mesh(mesh):
        state = tx.init(before)
        assert_state_follows(before, state)
        # One program for all steps: nothing about the state changes.
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(step_of(tx), n=1))
        params, state = run(step, before, state, grads)
    assert_state_follows(before, state)
    assert_state_follows(params, state)
    want = {name: on_one_device()[LAYOUTS[name][0]] for name in LAYOUTS}
    chex.assert_trees_all_close(flat(jax.device_get(params)), want, rtol=0, atol=ROUNDING)


def test_alone_where_no_reduction_axis_is_sharded():
    """There each device does with its block what it would do alone.

    Alone is inside `jax.shard_map`, where a device knows of no other.
    """
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    names = [name for name in LAYOUTS if not reduction_is_sharded(name)]
    assert {LAYOUTS[name][0] for name in names} == {*NUMBERS, "bias"}
    tx = nora(row_scale="unit")
    params, *grads = (
        jax.device_put(random_tree(seed, names), shardings(mesh, names)) for seed in range(4)
    )
    where = (shardings(mesh, names), state_shardings(tx, params, mesh))
    specs = jax.tree.map(lambda sharding: sharding.spec, where)
    state = jax.device_put(tx.init(params), where[1])
    alone = jax.shard_map(step_of(tx), mesh=mesh, in_specs=(*specs, specs[0]), out_specs=specs)
    got, _ = run(jax.jit(step_of(tx)), params, state, grads)
    want, _ = run(jax.jit(alone), params, state, grads)
    chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)


class TestInit:
    def test_under_jit_with_shardings(self, mesh):
        """Auto meshes need them; they come of `optax.tree.map_params`."""
        params = jax.device_put(random_tree(0), shardings(mesh))
        tx = nora()
        where = state_shardings(tx, params, mesh)
        state = jax.jit(tx.init, out_shardings=where)(params)
        assert_state_follows(params, state)
        chex.assert_trees_all_equal(state, tx.init(params))

    def test_under_jit_on_an_explicit_mesh(self):
        mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
        params = jax.device_put(random_tree(0), shardings(mesh))
        with jax.set_mesh(mesh):
            assert_state_follows(params, jax.jit(nora().init)(params))

    def test_without_a_mesh_in_context(self, mesh):
        names = [f"{kind} {P('x', 'y')}" for kind in NUMBERS] + [f"bias {P('y')}"]
        where = shardings(mesh, names)
        before, *grads = (jax.device_put(random_tree(seed, names), where) for seed in range(3))
        tx = nora()
        state = tx.init(before)
        assert_state_follows(before, state)
        params, state = run(jax.jit(step_of(tx)), before, state, grads)
        assert_state_follows(params, state)
        assert_state_follows(before, state)


class TestZeRO1:
    """The state is split over the replicas of its parameter."""

    @pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
    @pytest.mark.parametrize("extra", [P("x", "y"), P(None, "y", "x")], ids=str)
    def test_state_split_further_than_the_parameter(self, mesh, numbers, extra):
        """Parameter: split by y. State: by x too, along another axis."""
        tx = optax_nora.nora(0.05, weight_dimension_numbers=numbers)
        params, *grads = (
            {"kernel": jax.random.normal(jax.random.key(seed), SHAPE)} for seed in range(3)
        )
        want, _ = run(jax.jit(step_of(tx)), params, tx.init(params), grads)
        whole = {"kernel": NamedSharding(mesh, P(None, "y"))}
        split = {"kernel": NamedSharding(mesh, extra)}
        params, *grads = (jax.device_put(tree, whole) for tree in (params, *grads))
        where = state_shardings(tx, jax.device_put(params, split), mesh)
        state = jax.device_put(tx.init(params), where)
        step = jax.jit(step_of(tx), out_shardings=(whole, where))
        got, state = run(step, params, state, grads)
        pair = jax.device_get((got, want))
        chex.assert_trees_all_close(*pair, rtol=0, atol=ROUNDING)
        assert got["kernel"].sharding.is_equivalent_to(whole["kernel"], 3)
        mu = optax.tree.get(state.inner_states["matrix"], "mu")["kernel"]
        assert mu.sharding.is_equivalent_to(split["kernel"], 3)


KERNEL_SPECS = [P(), P("y"), P(None, "y"), P("x", "y")]


# SSO's five quintics of slope 1.875 at 0 follow five like Muon's.
STRETCH = {"muon": NEWTON_SCHULZ, "sso": NEWTON_SCHULZ * 1.875**5}


@pytest.mark.parametrize("name", NAMES)
def test_baselines(mesh, name):
    tx = PEERS[name](0.05)
    params, *grads = (
        {str(spec): jax.random.normal(jax.random.key(seed), (8, 16)) for spec in KERNEL_SPECS}
        for seed in range(4)
    )
    want, _ = run(jax.jit(step_of(tx)), params, tx.init(params), grads)
    where = {str(spec): NamedSharding(mesh, spec) for spec in KERNEL_SPECS}
    params, *grads = (jax.device_put(tree, where) for tree in (params, *grads))
    with jax.set_mesh(mesh):
        got, state = run(jax.jit(step_of(tx)), params, tx.init(params), grads)
    # Rows of 8, and Muon's products of up to 16 terms; entries of up to 0.05 times the fan ratio.
    rounding = of_steps(16, 0.1, 3, condition=STRETCH.get(name, 1))
    got, want = jax.device_get((got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=rounding)
    for spec, sharding in where.items():
        leaves = jax.tree.leaves_with_path(state)
        moments = [leaf for path, leaf in leaves if jax.tree_util.DictKey(spec) in path]
        assert moments
        assert all(leaf.sharding.is_equivalent_to(sharding, 2) for leaf in moments), spec
