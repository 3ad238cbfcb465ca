"""The model does what a LLaMA should, however it is computed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import EPS, tolerance

from examples.llama.config import PRESETS, ModelConfig
from examples.llama.loss import cross_entropy
from examples.llama.model import Llama, rotate
from examples.llama.sample import generate

TINY = ModelConfig(
    vocab_size=40, context=12, layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, init_std=0.3
)


@nnx.jit
def logits(model: Llama, tokens) -> jax.Array:
    return model.lm_head(model(tokens)[0])


def assert_same(a, b, terms=48):
    """The same sums in another order, of up to ``terms`` terms, through some ten products."""
    rounding = tolerance(terms, condition=10, size=float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=rounding)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, TINY.context), 0, TINY.vocab_size)


def test_a_token_changes_nothing_before_it(tokens):
    model = Llama(TINY, jax.random.key(0))
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % TINY.vocab_size)
    before, after = logits(model, tokens), logits(model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (jnp.abs(before - after)[:, 7:].max(axis=(0, 2)) > 1e-3).all()


def test_at_another_width_blocks_and_logits_are_scaled_as_mup_asks(tokens):
    wide = dataclasses.replace(TINY, width=128, heads=16, kv_heads=8, mlp_width=192, base_width=32)
    model = Llama(wide, jax.random.key(0))
    block = model.layers[0]
    scaled = [block.attention.query, block.attention.out, block.mlp.gate, block.mlp.down]
    for kernel in (layer.kernel for layer in scaled):  # of 16,384 samples or more: sigma 0.6 %
        np.testing.assert_allclose(jnp.std(kernel[...]), 0.3 / 2, rtol=0.04)
    for kernel in (model.embed.embedding, model.lm_head.kernel):  # of 5,120: sigma 1 %
        np.testing.assert_allclose(jnp.std(kernel[...]), 0.3, rtol=0.05)
    hidden, _ = model(tokens)
    np.testing.assert_allclose(jnp.mean(hidden**2, -1), 1 / 16, rtol=1e-4)


@pytest.mark.parametrize("base_width", [None, TINY.width])
def test_at_the_base_width_nothing_is_scaled(tokens, base_width):
    config = dataclasses.replace(TINY, base_width=base_width)
    assert config.shrink == 1
    kernel = Llama(config, jax.random.key(0)).layers[0].mlp.up.kernel[...]
    np.testing.assert_array_equal(kernel, Llama(TINY, jax.random.key(0)).layers[0].mlp.up.kernel)


def test_rotation_keeps_lengths_and_sees_only_distances():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(i: int, j: int) -> float:
        at = jnp.array([i]), jnp.array([j])
        return float(jnp.sum(rotate(q, at[0], 1e4) * rotate(k, at[1], 1e4)))

    turned = rotate(q, jnp.array([5]), 1e4)
    np.testing.assert_allclose(jnp.linalg.norm(turned), jnp.linalg.norm(q), rtol=tolerance(8))
    # float32 sines of angles up to 100 are off by 100 EPS / 2 radians, of each of two factors
    rounding = 100 * EPS * float(jnp.linalg.norm(q) * jnp.linalg.norm(k))
    np.testing.assert_allclose(score(3, 1), score(100, 98), rtol=0, atol=2 * rounding)
    assert abs(score(3, 1) - score(3, 2)) > 1e-2
    np.testing.assert_array_equal(rotate(q, jnp.array([0]), 1e4), q)


def test_rotation_by_hand():
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)  # pairs (0, 2) and (1, 3)
    slow = 3 * 100**-0.5
    expected = [np.cos(3), -2 * np.sin(slow), np.sin(3), 2 * np.cos(slow)]
    turned = rotate(x, jnp.array([3]), 100.0)
    # Sines of an angle of up to 3, whose rounding counts as much.
    np.testing.assert_allclose(turned[0, 0, 0], expected, rtol=0, atol=tolerance(2, size=3))


def test_scanned_layers_equal_the_loop(tokens):
    loop = Llama(TINY, jax.random.key(0))
    scan = Llama(TINY, jax.random.key(0), scan_layers=True)
    for i, layer in enumerate(loop.layers):
        one = nnx.to_pure_dict(nnx.state(layer))
        stacked = jax.tree.map(lambda x, i=i: x[i], nnx.to_pure_dict(nnx.state(scan.layers)))
        jax.tree.map(np.testing.assert_array_equal, one, stacked)
    assert_same(logits(loop, tokens), logits(scan, tokens))


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_memory_and_nothing_else(tokens, scan_layers, remat):
    def gradient(remat: str):
        model = Llama(TINY, jax.random.key(0), scan_layers=scan_layers, remat=remat)
        graph, params = nnx.split(model)
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(logits(nnx.merge(graph, p), tokens)))))(
            params
        )

    plain, again = gradient("none"), gradient(remat)
    # A gradient sums over the 960 logits.
    jax.tree.map(lambda a, b: assert_same(a, b, terms=960), plain, again)
    recomputed = str(
        jax.make_jaxpr(
            lambda x: Llama(TINY, jax.random.key(0), scan_layers=scan_layers, remat=remat)(x)[0]
        )(tokens)
    )
    assert "remat" in recomputed or "checkpoint" in recomputed


def test_grouped_heads_equal_repeated_heads(tokens):
    grouped = Llama(TINY, jax.random.key(0))
    full = Llama(dataclasses.replace(TINY, kv_heads=None), jax.random.key(0))
    nnx.update(full, nnx.state(grouped, lambda path, _: not {"key", "value"} & set(path)))
    for one, other in zip(grouped.layers, full.layers, strict=True):
        for name in ("key", "value"):
            kernel = getattr(one.attention, name).kernel[...]
            heads = kernel.reshape(TINY.width, TINY.key_heads, TINY.head_dim)
            repeated = jnp.repeat(heads, TINY.heads // TINY.key_heads, axis=1)
            getattr(other.attention, name).kernel[...] = repeated.reshape(TINY.width, -1)
    assert_same(logits(grouped, tokens), logits(full, tokens))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_generation_with_the_cache_equals_generation_without(scan_layers):
    model = Llama(TINY, jax.random.key(0), scan_layers=scan_layers)
    prompt = jax.random.randint(jax.random.key(2), (2, 4), 0, TINY.vocab_size)
    seen = jnp.zeros((2, TINY.context), jnp.int32).at[:, :4].set(prompt)
    for i in range(4, TINY.context):
        seen = seen.at[:, i].set(jnp.argmax(logits(model, seen)[:, i - 1], axis=-1))
    graph, params = nnx.split(model)
    made = generate(graph, params, prompt, TINY.context - 4, jax.random.key(0), 0.0)
    np.testing.assert_array_equal(made, seen[:, 4:])
    assert len(np.unique(made)) > 2  # it does not just repeat one word


@pytest.mark.parametrize(
    ("preset", "millions"), [("60m", 58.1), ("135m", 134.1), ("350m", 271.1), ("1b", 1339.1)]
)
def test_presets_have_the_parameters_of_their_shapes(preset, millions):
    """By hand: layers * (4 width^2 + 3 width * mlp_width + 2 width) + (2 * 32,000 + 1) width."""
    shapes = nnx.eval_shape(lambda: Llama(PRESETS[preset].model, jax.random.key(0)))
    total = sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
    assert total == pytest.approx(millions * 1e6, abs=0.05e6)


def test_initial_weights_have_the_std_of_the_settings():
    config = dataclasses.replace(TINY, width=128, mlp_width=256, init_std=0.02)
    for path, leaf in nnx.to_flat_state(nnx.state(Llama(config, jax.random.key(0)))):
        if path[-1] == "scale":
            np.testing.assert_array_equal(leaf[...], 1)
        else:  # 5 standard errors of a std over n draws: 5 / sqrt(2 n)
            assert jnp.std(leaf[...]) == pytest.approx(0.02, rel=5 / (2 * leaf[...].size) ** 0.5)


def test_gradients_in_bfloat16_are_those_in_float32():
    """For every leaf, with words as common as in text: thousands of terms in a sum."""
    config = dataclasses.replace(TINY, vocab_size=32, context=128)
    tokens = jnp.asarray(np.random.default_rng(0).zipf(1.5, (64, 129)).clip(1, 31), jnp.int32)
    weights = jnp.full((64, 128), 1 / (64 * 128))

    def gradients(dtype):
        graph, state = nnx.split(Llama(config, jax.random.key(0), dtype=dtype))

        def loss(state):
            model = nnx.merge(graph, state)
            hidden, _ = model(tokens[:, :-1])
            return cross_entropy(hidden, model.lm_head.kernel[...], tokens[:, 1:], weights, 32)

        return jax.jit(jax.grad(loss))(state)

    low, full = gradients(jnp.bfloat16), gradients(jnp.float32)
    for (path, x), y in zip(jax.tree.leaves_with_path(low), jax.tree.leaves(full), strict=True):
        error = jnp.linalg.norm(x - y) / jnp.linalg.norm(y)
        assert error < 0.03, jax.tree_util.keystr(path)  # bfloat16 rounds by 0.004; some add up
