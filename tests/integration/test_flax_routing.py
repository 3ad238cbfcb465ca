"""Routing of the parameters that Flax's own layers make, by their names, shapes and axis names."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora
from optax_nora import by_path, from_logical_axes, infer_dimension_numbers, stacked


def numbers_of(params, rule=None):
    """Where each leaf goes, by its path."""
    tree = infer_dimension_numbers(params, rule)
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    )
    return {"/".join(str(key.key) for key in path): numbers for path, numbers in flat}


def linen_params(module, *shape):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.ones(shape))["params"]


# Linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(h))), None


def test_linen_layers_by_default():
    params = linen_params(Block(), 2, 8)
    dense = MuonDimensionNumbers((0,), (1,))
    assert numbers_of(params) == {
        **{"down/bias": None, "up/bias": None, "norm/bias": None, "norm/scale": None},
        **{"down/kernel": dense, "up/kernel": dense},
    }


@pytest.mark.parametrize("axis", [0, 1])
def test_linen_scan_along_either_axis(axis):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=3
            )
            return nn.Dense(4, name="last")(scan(name="layers")(x, None)[0])

    params = linen_params(Model(), 2, 8)
    kernel = MuonDimensionNumbers(*(((1,), (2,)) if axis == 0 else ((0,), (2,))))
    found = numbers_of(params, by_path({"layers": stacked(axis=axis)}))
    assert found == {
        **dict.fromkeys(["layers/down/bias", "layers/up/bias", "last/bias"]),
        **dict.fromkeys(["layers/norm/bias", "layers/norm/scale"]),
        **dict.fromkeys(["layers/down/kernel", "layers/up/kernel"], kernel),
        "last/kernel": MuonDimensionNumbers((0,), (1,)),
    }
    with pytest.raises(ValueError, match="layers/up/kernel"):
        infer_dimension_numbers(params)


def test_linen_attention_is_ambiguous_and_the_error_has_the_numbers():
    params = linen_params(nn.MultiHeadDotProductAttention(num_heads=2), 2, 5, 8)
    with pytest.raises(ValueError, match="nothing says which axes are a row") as error:
        infer_dimension_numbers(params)
    message = str(error.value)
    snippet = message[message.index("optax_nora.by_path({") : message.index("with `from optax")]
    rule = eval(snippet, {"optax_nora": optax_nora, "MuonDimensionNumbers": MuonDimensionNumbers})
    found = numbers_of(params, rule)
    assert found["query/kernel"] == found["key/kernel"] == MuonDimensionNumbers((0,), (1, 2))
    assert found["out/kernel"] == MuonDimensionNumbers((0, 1), (2,))
    assert found["query/bias"] is None


@pytest.mark.parametrize("with_names", [nn.with_partitioning, nn.with_logical_partitioning])
def test_linen_boxes_carry_their_axes(with_names):
    def dense(features, axis, names, name):
        init = with_names(nn.initializers.lecun_normal(), names)
        return nn.DenseGeneral(features, axis=axis, kernel_init=init, use_bias=False, name=name)

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = with_names(nn.initializers.normal(), ("vocab", "embed"))
            self.param("table", init, (32, 8))
            h = dense((2, 4), -1, ("embed", "heads", "kv"), "query")(x)
            return dense(8, (-2, -1), ("heads", "kv", "embed"), "out")(h)

    params = linen_params(Attention(), 2, 8)
    rule = from_logical_axes(params)
    expected = {
        "table": None,
        "query/kernel": MuonDimensionNumbers((0,), (1, 2)),
        "out/kernel": MuonDimensionNumbers((0, 1), (2,)),
    }
    assert numbers_of(params, rule) == expected
    # The rule holds for the plain arrays too, and the optimizer takes either.
    assert numbers_of(nn.meta.unbox(params), rule) == expected
    tx = optax_nora.nora(0.1, weight_dimension_numbers=rule)
    for tree in (params, nn.meta.unbox(params)):
        state = jax.eval_shape(tx.init, tree)
        updates, _ = jax.eval_shape(tx.update, tree, state, tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)


# NNX


def test_nnx_layers_by_default():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 8, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.lm_head = nnx.Linear(8, 32, use_bias=False, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    mask = optax_nora.matrix_mask(state)
    matrices = [
        jax.tree_util.keystr(path).removesuffix(".value")
        for path, matrix in jax.tree_util.tree_flatten_with_path(mask)[0]
        if matrix
    ]
    assert matrices == [f"['blocks'][{i}]['kernel']" for i in range(2)]


@pytest.mark.parametrize("layer", ["conv", "attention"])
def test_nnx_layers_that_need_numbers(layer):
    rngs = nnx.Rngs(0)
    model, rule = {
        "conv": (
            nnx.Conv(3, 8, (3, 3), rngs=rngs),
            by_path({"kernel": MuonDimensionNumbers((0, 1, 2), 3)}),
        ),
        "attention": (
            nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
            by_path(
                {
                    "out/kernel": MuonDimensionNumbers((0, 1), 2),
                    "kernel": MuonDimensionNumbers(0, (1, 2)),
                }
            ),
        ),
    }[layer]
    state = nnx.state(model, nnx.Param)
    with pytest.raises(ValueError, match="nothing says which axes are a row"):
        optax_nora.nora(0.1).init(state)
    tx = optax_nora.nora(0.1, weight_dimension_numbers=rule, row_scale="unit")
    ones = jax.tree.map(jnp.ones_like, state)
    updates, _ = jax.jit(tx.update)(ones, tx.init(state), state)
    kernel = updates["kernel"] if layer == "conv" else updates["out"]["kernel"]
    norms = jnp.sqrt(jnp.sum(kernel[...] ** 2, axis=tuple(range(kernel[...].ndim - 1))))
    assert jnp.allclose(norms, 0.1, rtol=tolerance(24))


@pytest.mark.parametrize("kind", ["linen boxes", "nnx state"])
def test_specs_made_by_tree_map(kind):
    """What optax's muon takes: specs in the places of the arrays, within whatever holds them."""
    if kind == "nnx state":
        params = nnx.state(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Param)
    else:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        params = linen_params(nn.Dense(16, kernel_init=init), 2, 8)
    specs = jax.tree.map(lambda p: MuonDimensionNumbers(0, 1) if p.ndim == 2 else None, params)
    assert optax_nora.matrix_mask(params, specs) == optax_nora.matrix_mask(params)
    assert sum(jax.tree.leaves(optax_nora.matrix_mask(params, specs))) == 1


class Everything(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, normalize_qk=True, rngs=rngs)
        self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(8, 16, rngs=rngs)
        self.lora = nnx.LoRALinear(8, 16, lora_rank=4, rngs=rngs)
        self.head = nnx.Linear(8, 32, rngs=rngs)


def test_the_rule_for_flax_takes_all_layers_of_nnx():
    state = nnx.state(Everything(nnx.Rngs(0)), (nnx.Param, nnx.LoRAParam))
    tree = infer_dimension_numbers(state, optax_nora.rules.flax_nnx())
    dense = MuonDimensionNumbers((0,), (1,))
    qkv = MuonDimensionNumbers((0,), (1, 2))
    routed, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
    )
    keys = {jax.tree_util.keystr(p, simple=True, separator="/"): numbers for p, numbers in routed}
    assert {path.removesuffix("/value"): numbers for path, numbers in keys.items()} == {
        **{f"attention/{name}/kernel": qkv for name in ("query", "key", "value")},
        "attention/out/kernel": MuonDimensionNumbers((0, 1), (2,)),
        "conv1/kernel": MuonDimensionNumbers((0, 1, 2), (3,)),
        **{"cell/dense_i/kernel": dense, "cell/dense_h/kernel": dense},
        **{"lora/kernel": dense, "lora/lora/lora_a": dense},
    }


def test_the_rule_for_flax_takes_linens_attention():
    params = linen_params(nn.MultiHeadDotProductAttention(num_heads=2), 2, 5, 8)
    found = numbers_of(params, optax_nora.rules.flax_nnx())
    assert found["query/kernel"] == MuonDimensionNumbers((0,), (1, 2))
    assert found["out/kernel"] == MuonDimensionNumbers((0, 1), (2,))
