"""What docs/frameworks.md says, done with real modules: thirty steps to a lower loss."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_nora
from optax_nora import by_path, kernels, matrix_mask, nora, rules, stacked, summarize

KEYS = jax.random.split(jax.random.key(0), 4)
TOKENS = jax.random.randint(KEYS[0], (16, 6), 0, 24)
LABELS = jnp.sum(TOKENS, axis=1) % 4
IMAGES = jax.random.normal(KEYS[1], (16, 6, 6, 3)) + LABELS[:, None, None, None] / 4
RATES = {"learning_rate": 0.05, "adam_learning_rate": 0.01}
STEPS = 30


def cross_entropy(logits, labels=LABELS):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def train(tx, params, loss_fn):
    """The parameters after the steps, with the loss before and after them."""

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
        return optax.apply_updates(params, updates), state

    trained, state = params, tx.init(params)
    for _ in range(STEPS):
        trained, state = step(trained, state)
    return trained, loss_fn(params), loss_fn(trained)


def assert_learned(first, last):
    # All can learn 16 examples by heart: measured, 0.0001 to 0.2 of the loss is left.
    assert last < 0.5 * first


def assert_all_moved(before, after):
    """No leaf is left where it was. (A bias of keys would be: no loss depends on it.)"""
    moved = jax.tree.map(lambda a, b: not jnp.array_equal(a, b), before, after)
    assert all(jax.tree.leaves(moved)), moved


# Flax NNX


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs, block=Block):
        self.embed = nnx.Embed(24, 8, rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.block = block(rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens):
        x = self.conv(self.embed(tokens))
        return self.head(jnp.mean(self.block(x), axis=1))


def copy_of(model, wrt):
    return jax.tree.map(jnp.copy, nnx.state(model, wrt))  # a state sees what its model becomes


def train_nnx(model, tx, wrt):
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(
            lambda model: cross_entropy(model(TOKENS)), argnums=nnx.DiffState(0, wrt)
        )(model)
        optimizer.update(model, grads)
        return loss

    first = step(model, optimizer)
    for _ in range(STEPS):
        last = step(model, optimizer)
    return first, last


def test_nnx():
    model = Transformer(nnx.Rngs(0))
    before = copy_of(model, nnx.Param)
    assert sum(jax.tree.leaves(matrix_mask(before, rules.flax_nnx()))) == 7  # q, k, v, out; 3 more
    tx = nora(**RATES, weight_dimension_numbers=rules.flax_nnx())
    assert_learned(*train_nnx(model, tx, nnx.Param))
    assert_all_moved(before, nnx.state(model, nnx.Param))


def test_nnx_stack():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            make = nnx.split_rngs(splits=2)(nnx.vmap(Block, in_axes=0, out_axes=0))
            self.layers = make(rngs)

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    model = Transformer(nnx.Rngs(0), Stack)
    rule = by_path({"layers": stacked(rules.flax_nnx()), "**": rules.flax_nnx()})
    before = copy_of(model, nnx.Param)
    assert sum(jax.tree.leaves(matrix_mask(before, rule))) == 7
    assert_learned(*train_nnx(model, nora(**RATES, weight_dimension_numbers=rule), nnx.Param))
    assert_all_moved(before, nnx.state(model, nnx.Param))


def test_lora():
    class Adapted(Transformer):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.head = nnx.LoRA(8, 4, 4, base_module=self.head, rngs=rngs)
            self.block.up = nnx.LoRA(8, 4, 16, base_module=self.block.up, rngs=rngs)

    model = Adapted(nnx.Rngs(0))
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    adapters, base = copy_of(model, nnx.LoRAParam), copy_of(model, frozen)
    mask = matrix_mask(adapters)
    assert mask["block"]["up"]["lora_a"]
    assert not mask["block"]["up"]["lora_b"]
    tx = nora(0.05, adam_learning_rate=0.05)
    assert_learned(*train_nnx(model, tx, nnx.LoRAParam))
    assert_all_moved(adapters, nnx.state(model, nnx.LoRAParam))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, base, nnx.state(model, frozen)))


# Flax Linen


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x))), None


class LinenTransformer(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Conv(8, (3,))(nn.Embed(24, 8)(tokens))
        block = LinenBlock
        if self.scan:
            block = nn.scan(
                LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
        x, _ = block(name="layers")(x, None)
        return nn.Dense(4, name="head")(jnp.mean(x, axis=1))


@pytest.mark.parametrize("scan", [False, True])
def test_linen(scan):
    model = LinenTransformer(scan)
    params = model.init(KEYS[2], TOKENS)["params"]
    rule = rules.flax_nnx()
    if scan:
        rule = by_path({"layers": stacked(rule), "**": rule})
    assert sum(jax.tree.leaves(matrix_mask(params, rule))) == 7
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=nora(**RATES, weight_dimension_numbers=rule)
    )

    def loss_fn(params):
        return cross_entropy(model.apply({"params": params}, TOKENS))

    step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params)))
    for _ in range(STEPS):
        state = step(state)
    assert_learned(loss_fn(params), loss_fn(state.params))
    assert_all_moved(params, state.params)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(4, name="head")(jnp.mean(x, axis=(1, 2)))


def test_a_convolutional_net():
    model = ConvNet()
    params, stats = (model.init(KEYS[2], IMAGES)[name] for name in ("params", "batch_stats"))
    assert sum(jax.tree.leaves(matrix_mask(params, kernels()))) == 2

    def loss_fn(params):
        variables = {"params": params, "batch_stats": stats}
        return cross_entropy(model.apply(variables, IMAGES, mutable=["batch_stats"])[0])

    tx = nora(**RATES, weight_dimension_numbers=kernels())
    trained, first, last = train(tx, params, loss_fn)
    assert_learned(first, last)
    assert_all_moved(params, trained)


# Equinox


class Equinox(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    conv: eqx.nn.Conv1d
    norm: eqx.nn.LayerNorm
    cell: eqx.nn.GRUCell
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(24, 8, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.conv = eqx.nn.Conv1d(8, 8, 3, padding=1, key=keys[2])
        self.norm = eqx.nn.LayerNorm(8)
        self.cell = eqx.nn.GRUCell(8, 16, key=keys[3])
        self.mlp = eqx.nn.MLP(16, 4, 16, 1, key=keys[4])

    def __call__(self, tokens):
        x = jax.vmap(self.norm)(self.conv(jax.vmap(self.embed)(tokens).T).T)
        x = x + self.attention(x, x, x)
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(16), x)
        return self.mlp(hidden)


def test_equinox():
    model = Equinox(KEYS[3])
    params = eqx.filter(model, eqx.is_inexact_array)
    numbers = optax_nora.infer_dimension_numbers(params, rules.equinox())
    assert numbers.cell.weight_hh == optax.contrib.MuonDimensionNumbers((1,), (0,))
    assert numbers.conv.weight == optax.contrib.MuonDimensionNumbers((1, 2), (0,))
    assert numbers.embed.weight is numbers.conv.bias is None
    tx = nora(**RATES, weight_dimension_numbers=rules.equinox())

    def loss_fn(model):
        return cross_entropy(jax.vmap(model)(TOKENS))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss_fn)(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(model, updates), state

    trained, state = model, tx.init(params)
    for _ in range(STEPS):
        trained, state = step(trained, state)
    assert_learned(loss_fn(model), loss_fn(trained))
    assert_all_moved(params, eqx.filter(trained, eqx.is_inexact_array))


def test_equinox_model_itself_is_no_tree_of_parameters():
    """Its leaves are functions too; optax's own optimizers raise for them as well."""
    with pytest.raises(ValueError, match="keep it out of the parameters"):
        nora(0.1, weight_dimension_numbers=rules.equinox()).init(Equinox(KEYS[3]))


# What frameworks put around an optimizer


def mlp_loss(params):
    hidden = jnp.tanh(IMAGES.reshape(16, -1) @ params["up"]["kernel"] + params["up"]["bias"])
    return cross_entropy(hidden @ params["down"]["kernel"])


MLP = {
    "up": {"kernel": jax.random.normal(KEYS[2], (108, 16)) / 10, "bias": jnp.zeros(16)},
    "down": {"kernel": jax.random.normal(KEYS[3], (16, 4)) / 4},
}


def big_vision(tx):
    """Rate, decay and sign by the framework; the model's own tx has none."""
    return optax.chain(
        optax.masked(tx, jax.tree.map(lambda _: True, MLP)),
        optax.scale(0.05),
        optax.add_decayed_weights(1e-4, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 2 * STEPS)),
        optax.scale(-1.0),
    )


WRAPPED = {
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(1.0), nora(**RATES)),
    "accumulation": lambda: optax.MultiSteps(nora(**RATES), 2),
    "finite": lambda: optax.apply_if_finite(nora(**RATES), 5),
    "hyperparameters": lambda: optax.inject_hyperparams(nora)(**RATES),
    "a frozen part": lambda: optax.partition(
        {"trained": nora(**RATES), "frozen": optax.set_to_zero()},
        {"up": "trained", "down": "frozen"},
    ),
    "a name": lambda: optax.GradientTransformation(*map(jax.named_call, nora(**RATES)[:2])),
    "masters": lambda: optax_nora.with_float32_master(nora(**RATES)),
    "big_vision": lambda: big_vision(
        optax.chain(nora(1.0, adam_learning_rate=0.2), optax.scale(-1.0))
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrapped(wrapper):
    _, first, last = train(WRAPPED[wrapper](), MLP, mlp_loss)
    assert_learned(first, last)


def test_a_loop_without_params_is_told_what_to_add():
    """Brax's, and that of many an agent."""
    tx = nora(**RATES)
    with pytest.raises(ValueError, match=r"call tx.update\(updates, state, params\)"):
        tx.update(jax.grad(mlp_loss)(MLP), tx.init(MLP))


def test_summarize_of_each(capsys):
    summarize(nnx.state(Transformer(nnx.Rngs(0)), nnx.Param), rules.flax_nnx())
    summarize(eqx.filter(Equinox(KEYS[3]), eqx.is_inexact_array), rules.equinox())
    assert "?" not in capsys.readouterr().out
