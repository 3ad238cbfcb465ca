"""Flax Linen: real modules train under `TrainState`, boxed and not, each leaf where it belongs."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import freeze
from flax.linen.spmd import logical_to_mesh_sharding
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora

VOCAB, WIDTH, LAYERS = 11, 8, 3
TOKENS = jax.random.randint(jax.random.key(1), (4, 6), 0, VOCAB)
NUMBERS = optax_nora.by_path(
    {
        "attention/out/kernel": MuonDimensionNumbers((0, 1), 2),
        "attention/*/kernel": MuonDimensionNumbers(0, (1, 2)),
        "layers": optax_nora.stacked(),
    }
)
# Where each matrix goes, by its reduction axes; all else goes to AdamW, the stacked biases too.
MATRICES = {
    **{("attention", name, "kernel"): (0,) for name in ("query", "key", "value")},
    ("attention", "out", "kernel"): (0, 1),
    ("layers", "up", "kernel"): (1,),
    ("layers", "down", "kernel"): (1,),
}


def plain(init, names):
    return init


def unboxed(params):
    return flatten_dict(nn.unbox(params))


class Block(nn.Module):
    named: object

    @nn.compact
    def __call__(self, x, _):
        def dense(features, name, axes):
            return nn.Dense(
                features,
                name=name,
                kernel_init=self.named(nn.initializers.lecun_normal(), axes),
                bias_init=self.named(nn.initializers.zeros, axes[-1:]),
            )

        hidden = nn.relu(dense(16, "up", ("embed", "mlp"))(x))
        return x + dense(WIDTH, "down", ("mlp", "embed"))(hidden), None


class Model(nn.Module):
    """Attention, then layers stacked by `nn.scan`; ``named`` boxes what an initializer gives."""

    named: object = plain

    @nn.compact
    def __call__(self, tokens):
        normal = nn.initializers.normal(1.0)
        embed = nn.Embed(
            VOCAB, WIDTH, embedding_init=self.named(normal, ("vocab", "embed")), name="embed"
        )
        attention = nn.MultiHeadDotProductAttention(
            num_heads=4,
            kernel_init=self.named(nn.initializers.lecun_normal(), ("embed", "heads", "kv")),
            out_kernel_init=self.named(nn.initializers.lecun_normal(), ("heads", "kv", "embed")),
            name="attention",
        )
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x = embed(tokens)
        x = nn.LayerNorm(name="norm")(x + attention(x))
        x, _ = layers(self.named, name="layers")(x, None)
        head = self.named(nn.initializers.lecun_normal(), ("embed", "vocab"))
        return nn.Dense(VOCAB, use_bias=False, kernel_init=head, name="lm_head")(x)


def cross_entropy(params, apply):
    logits = apply({"params": params}, TOKENS)
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, ::-1]).mean()


@jax.jit
def train_step(state):
    loss, grads = jax.value_and_grad(cross_entropy)(state.params, state.apply_fn)
    return state.apply_gradients(grads=grads), loss


def start(named, numbers):
    """A new model, and its parameters under our optimizer."""
    model = Model(named)

    def create(key):
        params = model.init(key, TOKENS)["params"]
        rule = numbers(params) if callable(numbers) else numbers
        tx = optax_nora.nora(
            0.05, row_scale="unit", weight_dimension_numbers=rule, adam_learning_rate=0.03
        )
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


def momenta(state):
    flat = unboxed(state.opt_state.inner_states["matrix"].inner_state.mu)
    return {path: mu for path, mu in flat.items() if not isinstance(mu, optax.MaskedNode)}


def assert_routed(before, after):
    """By what the first step did: turned rows by one length, or moved entries by another."""
    for path, old in before.items():
        step = after[path] - old
        if path in MATRICES:
            norms = jnp.sqrt(jnp.sum(step**2, axis=MATRICES[path]))
            moved = norms[norms > 0]  # a relu may be dead
            assert moved.size > 0.8 * norms.size, path
            # A difference of weights of up to 1, 24 a row: their rounding, by the step.
            want = jnp.full_like(moved, 0.05)
            chex.assert_trees_all_close(moved, want, rtol=tolerance(24, condition=20))
        else:
            # The sign of the gradient, less where that is next to 0: as for a key's bias.
            assert 0.8 * 0.03 < float(jnp.abs(step).max()) < 1.001 * 0.03, path


def train(state):
    """Eight steps, the first of which shows where each leaf goes."""
    before, losses = unboxed(state.params), []
    for _ in range(8):
        state, loss = train_step(state)
        losses.append(float(loss))
        if len(losses) == 1:
            assert_routed(before, unboxed(state.params))
    assert losses[-1] < 0.7 * losses[0], losses
    return state


@pytest.mark.parametrize(
    ("named", "numbers"),
    [(plain, NUMBERS), (nn.with_partitioning, optax_nora.from_logical_axes)],
    ids=["plain", "partitioned, by their names"],
)
def test_trains_and_routes_alike_at_init_and_at_update(named, numbers):
    first = jax.jit(start(named, numbers))(jax.random.key(0))
    assert momenta(first).keys() == MATRICES.keys()
    state = train(first)
    # Boxes stay around parameters and moments, and the state keeps its kind.
    chex.assert_trees_all_equal_structs(state, first)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, first)


EXPECTED = {
    **{("attention", name, "kernel"): ("data", "model") for name in ("query", "key", "value")},
    ("attention", "out", "kernel"): ("model", None, "data"),
    ("layers", "up", "kernel"): (None, "data", "model"),
    ("layers", "down", "kernel"): (None, "model", "data"),
}


def test_logical_names_on_a_mesh():
    """The usual way of Linen: names to a mesh's axes, and all of the state made where it lies."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    axes = {"embed": "data", "heads": "model", "mlp": "model", "kv": None, "vocab": None}
    create = start(nn.with_logical_partitioning, optax_nora.from_logical_axes)
    specs = nn.get_partition_spec(jax.eval_shape(create, jax.random.key(0)))
    where = logical_to_mesh_sharding(specs, mesh, [*axes.items(), ("layers", None)])
    state = jax.jit(create, out_shardings=where)(jax.random.key(0))
    after = train(state)
    for path, mu in momenta(after).items():
        want = NamedSharding(mesh, PartitionSpec(*EXPECTED[path]))
        for array in (unboxed(state.params)[path], momenta(state)[path], mu):
            assert array.sharding.is_equivalent_to(want, array.ndim), path


def boxed_by(box):
    """A tree with every leaf in a box, under names that mean nothing."""

    def put(tree):
        return jax.tree.map(lambda leaf: box(leaf, ("name",) * leaf.ndim), tree)

    return put


WRAPPERS = {
    "FrozenDict": freeze,
    "Partitioned": boxed_by(nn.Partitioned),
    "LogicallyPartitioned": boxed_by(nn.LogicallyPartitioned),
    "frozen boxes": lambda tree: freeze(boxed_by(nn.Partitioned)(tree)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_boxes_and_frozen_dicts_change_nothing(kind):
    wrap = WRAPPERS[kind]
    normal = jax.random.normal(jax.random.key(0), (LAYERS, 8, 16))
    params = {"layers": {"kernel": normal, "bias": jnp.ones((LAYERS, 16))}}
    grads = optax.tree.random_like(jax.random.key(1), params)
    numbers = optax_nora.by_path({"layers": optax_nora.stacked()})
    tx = optax_nora.with_float32_master(optax_nora.nora(0.05, weight_dimension_numbers=numbers))
    want, _ = tx.update(grads, tx.init(params), params)
    state = tx.init(wrap(params))
    got, new = tx.update(wrap(grads), state, wrap(params))
    chex.assert_trees_all_equal(got, wrap(want))
    chex.assert_trees_all_equal_structs(new, state)
