"""Flax NNX: real modules train under `nnx.Optimizer`, each leaf by the optimizer it belongs to."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers
from tolerance import of_steps, tolerance

import optax_nora

VOCAB, WIDTH, LAYERS = 11, 8, 3
TOKENS = jax.random.randint(jax.random.key(1), (4, 6), 0, VOCAB)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Model(nnx.Module):
    """A table of words, what `make_body` makes, and a head."""

    def __init__(self, make_body, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.body = make_body(rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(self.body(self.embed(tokens)))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(WIDTH, WIDTH, kernel_size=(3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        x = self.conv(x)
        return x + self.attention(x)


class Scanned(nnx.Module):
    """Blocks stacked along axis 0: made by `nnx.vmap`, applied by `nnx.scan`."""

    def __init__(self, rngs):
        make = nnx.vmap(Block, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x):
        def apply(x, block):
            return block(x)

        return nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Case:
    """A body, its rule, and where each matrix of it must go; everything else goes to AdamW."""

    def __init__(self, body, matrices, numbers=None):
        self.body, self.numbers = body, numbers
        self.matrices = {f"body/{path}": reduction for path, reduction in matrices.items()}


CASES = {
    "nnx.List": Case(
        Listed,
        {f"blocks/{i}/{name}/kernel": (0,) for i in range(2) for name in ("up", "down")},
    ),
    "attention and convolution": Case(
        Attention,
        {
            "conv/kernel": (0, 1),
            **{f"attention/{name}/kernel": (0,) for name in ("query", "key", "value")},
            "attention/out/kernel": (0, 1),
        },
        optax_nora.by_path(
            {
                "attention/out/kernel": MuonDimensionNumbers((0, 1), 2),
                "attention/*/kernel": MuonDimensionNumbers(0, (1, 2)),
                "conv/kernel": MuonDimensionNumbers((0, 1), 2),
            }
        ),
    ),
    "nnx.scan": Case(
        Scanned,
        {"layers/up/kernel": (1,), "layers/down/kernel": (1,)},
        optax_nora.by_path({"layers": optax_nora.stacked()}),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def cross_entropy(model):
    labels = TOKENS[:, ::-1]
    return optax.softmax_cross_entropy_with_integer_labels(model(TOKENS), labels).mean()


@nnx.jit
def train_step(model, optimizer):
    loss, grads = nnx.value_and_grad(cross_entropy)(model)
    optimizer.update(model, grads)
    return loss


def by_path(state):
    """The arrays in the Variables of a state by their paths, in slashes."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {"/".join(str(key.key) for key in path[:-1]): array for path, array in flat}


def momenta(opt_state):
    return by_path(opt_state.inner_states["matrix"].inner_state.mu)


def assert_routed(matrices, before, after, nora_step, adam_step):
    """By what the first step did: turned rows by one length, or moved entries by another."""
    for path, old in before.items():
        step = after[path] - old
        if path in matrices:
            norms = jnp.sqrt(jnp.sum(step**2, axis=matrices[path]))
            # A row without gradient stays: a relu may be dead.
            moved = norms[norms > 0]
            assert moved.size > 0.8 * norms.size, path
            # A difference of weights of up to 1, 24 a row: their rounding, by the step.
            want = jnp.full_like(moved, nora_step)
            chex.assert_trees_all_close(moved, want, rtol=tolerance(24, condition=1 / nora_step))
        else:
            # Adam's first step is the sign of the gradient, less where that is next to 0: a key's
            # bias has none but rounding.
            largest = float(jnp.abs(step).max())
            assert 0.8 * adam_step < largest < 1.001 * adam_step, path


def test_trains_and_routes_alike_at_init_and_at_update(case):
    model = Model(case.body, nnx.Rngs(0))
    tx = optax_nora.nora(
        0.05, row_scale="unit", weight_dimension_numbers=case.numbers, adam_learning_rate=0.03
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert momenta(optimizer.opt_state).keys() == case.matrices.keys()
    before = by_path(nnx.state(model, nnx.Param))
    losses = [float(train_step(model, optimizer))]
    after = by_path(nnx.state(model, nnx.Param))
    assert_routed(case.matrices, before, after, nora_step=0.05, adam_step=0.03)
    losses += [float(train_step(model, optimizer)) for _ in range(7)]
    assert losses[-1] < 0.7 * losses[0], losses


def test_split_and_merge_is_the_same_run():
    """The plain `jax.jit` way, on `nnx.State`."""
    model = Model(Block, nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    tx = optax_nora.nora(0.05)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: cross_entropy(nnx.merge(graph, params)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        params, state = step(params, state)
        train_step(model, optimizer)
    got, want = by_path(params), by_path(nnx.state(model, nnx.Param))
    # Another program. A gradient's small entries are off by more of themselves than the large ones,
    # of which they are sums, and Adam brings all to one size.
    chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(16, 0.1, 3, condition=1000))


def test_low_precision_parameters():
    model = Model(Block, nnx.Rngs(0))
    nnx.update(model, optax.tree.cast(nnx.state(model, nnx.Param), jnp.bfloat16))
    tx = optax_nora.with_float32_master(optax_nora.nora(0.05))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = [float(train_step(model, optimizer)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0], losses
    master = by_path(optimizer.opt_state.master)
    params = by_path(nnx.state(model, nnx.Param))
    chex.assert_trees_all_equal(optax.tree.cast(master, jnp.bfloat16), params)


AXES = {  # logical to physical
    **{"vocab": None, "embed": "data", "heads": "model", "kv": None, "mlp": "model"},
    "layers": None,
}


class NamedAttention(nnx.Module):
    """Attention and stacked layers whose parameters carry logical axis names."""

    def __init__(self, rngs):
        normal = nnx.initializers.lecun_normal()

        def named(*names, init=normal):
            return nnx.with_partitioning(init, names, sharding_rules=tuple(AXES.items()))

        def layer(rngs):
            return nnx.Linear(
                WIDTH,
                WIDTH,
                kernel_init=named("embed", "mlp"),
                bias_init=named("mlp", init=nnx.initializers.zeros),
                rngs=rngs,
            )

        self.attention = nnx.MultiHeadAttention(
            4,
            WIDTH,
            decode=False,
            kernel_init=named("embed", "heads", "kv"),
            out_kernel_init=named("heads", "kv", "embed"),
            rngs=rngs,
        )
        stack = nnx.vmap(
            layer, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"}
        )
        self.layers = nnx.split_rngs(splits=LAYERS)(stack)(rngs)

    def __call__(self, x):
        def apply(x, layer):
            return layer(x)

        scan = nnx.scan(
            apply,
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        return scan(x + self.attention(x), self.layers)


def test_logical_axes():
    """Routed by the names that the parameters carry, on a mesh that the names map to."""
    matrices = {
        **{f"body/attention/{name}/kernel": (0,) for name in ("query", "key", "value")},
        "body/attention/out/kernel": (0, 1),
        "body/layers/kernel": (1,),
    }
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = Model(NamedAttention, nnx.Rngs(0))
        numbers = optax_nora.from_logical_axes(nnx.state(model, nnx.Param))
        tx = optax_nora.nora(
            0.05, row_scale="unit", weight_dimension_numbers=numbers, adam_learning_rate=0.03
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        assert momenta(optimizer.opt_state).keys() == matrices.keys()
        before = by_path(nnx.state(model, nnx.Param))
        losses = [float(train_step(model, optimizer))]
        after = by_path(nnx.state(model, nnx.Param))
        assert_routed(matrices, before, after, nora_step=0.05, adam_step=0.03)
        losses += [float(train_step(model, optimizer)) for _ in range(7)]
    assert losses[-1] < 0.7 * losses[0], losses
    for path, mu in momenta(optimizer.opt_state).items():
        assert not mu.sharding.is_fully_replicated, path
        assert mu.sharding.is_equivalent_to(before[path].sharding, mu.ndim), path
