"""Which leaf is a matrix, and along which axes its rows run."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_nora
from optax_nora._leaves import Leaf
from optax_nora._rules import AmbiguousAxesError, Default, Everywhere, Kernels, Rule, rows_of


def leaf(path, *shape, dtype=jnp.float32):
    return Leaf(tuple(path.split("/")), shape, jnp.dtype(dtype))


def default(path, *shape, **kwargs):
    return Default().numbers(leaf(path, *shape, **kwargs))


DENSE = MuonDimensionNumbers(0, 1)


@pytest.mark.parametrize(
    "path",
    [
        "kernel",
        "mlp/up/kernel",
        "attention/q_proj/weight",
        "w",
        "layers/0/lora_a",
        "0/1",
        # Words are whole: none of these names an embedding or a head.
        "embedded_mlp/kernel",
        "reembed/kernel",
        "headroom/kernel",
        "heads/kernel",
        "multi_head_attention/kernel",
        "biases/kernel",
        "scaled",
        "my_bias_free/kernel",
        "vocabulary/kernel",
        "MultiHead/kernel",
    ],
)
def test_two_axes_are_a_matrix(path):
    assert default(path, 4, 8) == DENSE


@pytest.mark.parametrize("name", ["bias", "b", "scale", "gamma", "beta", "offset"])
def test_a_stacked_vector_is_no_matrix(name):
    assert default(f"layers/norm/{name}", 12, 64) is None


@pytest.mark.parametrize(
    "path",
    [
        "embed/kernel",
        "embedding",
        "token_embedding/weight",
        "Embed_0/embedding",
        "embedder/input",
        "embed_tokens/weight",
        "wte/weight",
        "transformer/wpe/weight",
        "lm_head/kernel",
        "LMHead/kernel",
        "lmHead/kernel",
        "tokenEmbedding/kernel",
        "TokenEmbed/kernel",
        "unembed/kernel",
        "logits/kernel",
        "logits_dense/kernel",
        "output_head/kernel",
        "outputHead/kernel",
        "output-head/kernel",
        "head/kernel",
        "Head/kernel",
        "decoder.logits/kernel",
    ],
)
def test_embeddings_and_output_heads_go_to_adamw(path):
    assert default(path, 32, 64) is None
    assert default(path, 2, 32, 64) is None


def test_other_leaves_go_to_adamw():
    assert default("kernel", 8) is None
    assert default("kernel") is None
    assert default("table", 4, 8, dtype=jnp.int32) is None
    assert default("mask", 4, 8, dtype=jnp.bool_) is None
    assert default("positions", 2, 4, 8) is None  # not named as a matrix


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64, jnp.complex64])
def test_every_floating_dtype_makes_a_matrix(dtype):
    assert default("kernel", 4, 8, dtype=dtype) == DENSE


@pytest.mark.parametrize(
    ("path", "shape", "guess", "meaning"),
    [
        ("query/kernel", (64, 4, 16), MuonDimensionNumbers(0, (1, 2)), "(embed, heads, head_dim)"),
        ("out/kernel", (4, 16, 64), MuonDimensionNumbers((0, 1), 2), "(heads, head_dim, embed)"),
        ("o_proj/w", (4, 16, 64), MuonDimensionNumbers((0, 1), 2), "(heads, head_dim, embed)"),
        (
            "conv/kernel",
            (3, 3, 8, 16),
            MuonDimensionNumbers((0, 1, 2), 3),
            "convolution (..., in, out)",
        ),
    ],
)
def test_a_matrix_of_three_axes_or_more_is_ambiguous(path, shape, guess, meaning):
    with pytest.raises(AmbiguousAxesError, match="nothing says which are a row") as error:
        default(path, *shape)
    assert (error.value.guess, error.value.meaning) == (guess, meaning)


def test_kernels_takes_two_axes_whatever_their_name():
    assert Kernels().numbers(leaf("embed/bias", 4, 8)) == DENSE
    with pytest.raises(ValueError, match=r"kernel \(8,\) .*taken for a kernel \(in, out\).*1 axes"):
        Kernels().numbers(leaf("kernel", 8))


def test_rules_are_frozen_and_no_functions():
    # optax.inject_hyperparams takes every callable for a schedule.
    rules = [
        optax_nora.by_path({"a": None}),
        optax_nora.stacked(),
        optax_nora.in_shard_map(P()),
        optax_nora.from_logical_axes({}),
        Everywhere(DENSE),
    ]
    for rule in rules:
        assert isinstance(rule, Rule)
        assert not callable(rule)
        assert dataclasses.fields(rule)
        with pytest.raises(dataclasses.FrozenInstanceError):
            rule.anything = 1


# by_path


def by_path(pattern, path, *shape):
    """Whether the pattern matches: it sends a leaf to AdamW that is a matrix otherwise."""
    rule = optax_nora.by_path({pattern: None})
    return rule.numbers(leaf(path, *(shape or (4, 8)))) is None


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("mlp", "layers/0/mlp/up/kernel"),
        ("mlp/up", "layers/0/mlp/up/kernel"),
        ("up/kernel", "layers/0/mlp/up/kernel"),
        ("kernel", "kernel"),
        ("*", "kernel"),
        ("**", "a/kernel"),
        ("layers/*/mlp", "layers/0/mlp/kernel"),
        ("layers/**/kernel", "layers/0/mlp/up/kernel"),
        ("layers/**/kernel", "layers/kernel"),
        ("**/kernel", "kernel"),
        ("layer_*", "model/layer_12/kernel"),
        ("layer_?", "layer_1/kernel"),
        ("[ab]", "b/kernel"),
        ("0", "layers/0/kernel"),
        ("layers/*", "layers/0/kernel"),
    ],
)
def test_by_path_matches(pattern, path):
    assert by_path(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("ml", "mlp/kernel"),
        ("lp", "mlp/kernel"),
        ("mlp/kernel", "mlp/up/kernel"),
        ("layers/*/kernel", "layers/0/mlp/kernel"),
        ("layers/*/kernel", "layers/kernel"),
        ("layer_?", "layer_12/kernel"),
        ("MLP", "mlp/kernel"),
        ("kernel/*", "mlp/kernel"),
        ("up/mlp", "mlp/up/kernel"),
    ],
)
def test_by_path_does_not_match(pattern, path):
    assert not by_path(pattern, path)


def test_the_first_pattern_that_matches_wins():
    first = optax_nora.by_path({"up": None, "mlp": MuonDimensionNumbers(1, 0)})
    second = optax_nora.by_path({"mlp": MuonDimensionNumbers(1, 0), "up": None})
    up = leaf("mlp/up/kernel", 4, 8)
    assert first.numbers(up) is None
    assert second.numbers(up) == MuonDimensionNumbers(1, 0)


def test_a_leaf_that_no_pattern_matches_takes_the_default():
    rule = optax_nora.by_path({"adapter": None})
    assert rule.numbers(leaf("mlp/kernel", 4, 8)) == DENSE
    assert rule.numbers(leaf("mlp/bias", 4, 8)) is None


def test_by_path_takes_rules():
    rule = optax_nora.by_path({"layers": optax_nora.stacked(), "head": MuonDimensionNumbers(0, 1)})
    assert rule.numbers(leaf("layers/mlp/kernel", 12, 4, 8)) == MuonDimensionNumbers((1,), (2,))
    assert rule.numbers(leaf("head/kernel", 4, 8)) == DENSE  # AdamW by default


def test_by_path_keeps_its_patterns_when_the_users_mapping_changes():
    patterns = {"mlp": None}
    rule = optax_nora.by_path(patterns)
    patterns.clear()
    assert rule.numbers(leaf("mlp/kernel", 4, 8)) is None


@pytest.mark.parametrize("pattern", ["", "/mlp", "mlp/", "mlp//kernel"])
def test_by_path_refuses_an_empty_segment(pattern):
    with pytest.raises(ValueError, match="has an empty segment"):
        optax_nora.by_path({pattern: None})


@pytest.mark.parametrize("value", [(0, 1), "adamw", lambda leaf: None])
def test_by_path_refuses_other_values(value):
    with pytest.raises(ValueError, match=r"'mlp' maps to .*, or None for AdamW"):
        optax_nora.by_path({"mlp": value})


# stacked


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (0, (12, 4, 8), MuonDimensionNumbers((1,), (2,))),
        (1, (4, 12, 8), MuonDimensionNumbers((0,), (2,))),
        (2, (4, 8, 12), MuonDimensionNumbers((0,), (1,))),
        (-1, (4, 8, 12), MuonDimensionNumbers((0,), (1,))),
        (-3, (12, 4, 8), MuonDimensionNumbers((1,), (2,))),
    ],
)
def test_stacked_makes_a_batch_axis(axis, shape, expected):
    assert optax_nora.stacked(axis=axis).numbers(leaf("mlp/kernel", *shape)) == expected
    # The batch axis is what is left over.
    rows = rows_of(leaf("mlp/kernel", *shape), expected, P())
    assert rows.batch(3) == (axis % 3,)


def test_stacked_numbers_are_of_one_layer():
    rule = optax_nora.stacked(MuonDimensionNumbers((0, -2), -1))
    assert rule.numbers(leaf("out/kernel", 12, 4, 16, 64)) == MuonDimensionNumbers((1, 2), (3,))


def test_stacked_stacks():
    rule = optax_nora.stacked(optax_nora.stacked())
    assert rule.numbers(leaf("kernel", 2, 3, 4, 8)) == MuonDimensionNumbers((2,), (3,))


@pytest.mark.parametrize("name", ["bias", "scale"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_stacked_vector_goes_to_adamw(name, axis):
    assert optax_nora.stacked(axis=axis).numbers(leaf(f"norm/{name}", 12, 64)) is None


def test_an_unnamed_stacked_vector_goes_to_adamw():
    assert optax_nora.stacked().numbers(leaf("norm/something", 12, 64)) is None


def test_a_stacked_leaf_may_still_be_ambiguous():
    with pytest.raises(AmbiguousAxesError) as error:
        optax_nora.stacked().numbers(leaf("query/kernel", 12, 64, 4, 16))
    assert error.value.leaf.shape == (12, 64, 4, 16)
    assert error.value.guess == MuonDimensionNumbers((1,), (2, 3))
    assert error.value.meaning == "stacked (embed, heads, head_dim)"


@pytest.mark.parametrize("axis", [3, -4])
def test_stacked_along_an_axis_that_is_not_there(axis):
    with pytest.raises(ValueError, match=f"mlp/kernel .* has no axis {axis} to be stacked along"):
        optax_nora.stacked(axis=axis).numbers(leaf("mlp/kernel", 12, 4, 8))


def test_stacked_on_a_kernel_that_is_not():
    with pytest.raises(ValueError, match=r"mlp/kernel \(4, 8\) .*leaves it one axis.*by_path"):
        optax_nora.stacked().numbers(leaf("mlp/kernel", 4, 8))


# in_shard_map


def mesh_axes(rule, one):
    rows = rows_of(one, rule.numbers(one), rule.partition_spec(one))
    return rows.reduction_mesh, rows.output_mesh


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), ((), ())),
        (P("tp"), (("tp",), ())),
        (P("tp", None), (("tp",), ())),
        (P(None, "tp"), ((), ("tp",))),
        (P(("data", "tp"), "seq"), (("data", "tp"), ("seq",))),
    ],
)
def test_in_shard_map_reads_the_specs(spec, expected):
    kernel = leaf("mlp/kernel", 4, 8)
    assert mesh_axes(optax_nora.in_shard_map({"mlp": {"kernel": spec}}), kernel) == expected
    assert mesh_axes(optax_nora.in_shard_map({"mlp": spec}), kernel) == expected  # a prefix
    assert mesh_axes(optax_nora.in_shard_map(spec), kernel) == expected  # one for all


def test_in_shard_map_joins_the_mesh_axes_of_all_reduction_axes():
    rule = optax_nora.in_shard_map(P("a", "b", "c"), MuonDimensionNumbers((0, 1), 2))
    assert mesh_axes(rule, leaf("out/kernel", 4, 16, 64)) == (("a", "b"), ("c",))


def test_in_shard_map_routes_as_its_rule_does():
    rule = optax_nora.in_shard_map(P("tp"), optax_nora.by_path({"mlp": None}))
    assert rule.numbers(leaf("mlp/kernel", 4, 8)) is None
    assert rule.numbers(leaf("other/kernel", 4, 8)) == DENSE
    assert rule.unmatched([("other", "kernel")]) == ["mlp"]


def test_in_shard_map_wants_a_spec_for_each_leaf():
    rule = optax_nora.in_shard_map({"mlp": P("tp")})
    with pytest.raises(ValueError, match="no PartitionSpec for the leaf other/kernel"):
        rule.partition_spec(leaf("other/kernel", 4, 8))


def test_fans_are_those_of_the_whole_matrix():
    rule = optax_nora.in_shard_map(P("tp", "data"))
    mesh = jax.make_mesh((2, 2), ("tp", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    fans = []

    def see(x):
        one = leaf("kernel", *x.shape)
        rows = rows_of(one, rule.numbers(one), rule.partition_spec(one))
        fans.append((rows.fan_in(x.shape), rows.fan_out(x.shape)))
        return x

    specs = {"in_specs": P("tp", "data"), "out_specs": P("tp", "data")}
    jax.jit(jax.shard_map(see, mesh=mesh, **specs))(jnp.ones((8, 12)))
    assert fans[-1] == (8, 12)


# rows_of: dimension numbers against a leaf


def test_axes_count_from_the_front():
    rows = rows_of(leaf("kernel", 2, 3, 4), MuonDimensionNumbers(-2, (-1,)), P())
    assert (rows.reduction, rows.output, rows.batch(3)) == ((1,), (2,), (0,))


def test_an_empty_output_is_one_row_a_matrix():
    rows = rows_of(leaf("kernel", 2, 3), MuonDimensionNumbers(1, ()), P())
    assert (rows.fan_in((2, 3)), rows.fan_out((2, 3)), rows.batch(2)) == (3, 1, (0,))


@pytest.mark.parametrize(
    ("numbers", "shape", "message"),
    [
        (
            MuonDimensionNumbers(2, 1),
            (4, 8),
            r"mlp/kernel \(4, 8\) float32: reduction_axis=2 is out of range; its axes are 0 to 1",
        ),
        (MuonDimensionNumbers(0, -3), (4, 8), r"output_axis=-3 is out of range"),
        (
            MuonDimensionNumbers((0, 0), 1),
            (4, 8),
            r"mlp/kernel .* reduction_axis=\(0, 0\) repeats an axis; name each axis once",
        ),
        (MuonDimensionNumbers((0, -3), 1), (4, 8, 2), r"\(0, -3\) repeats an axis"),
        (MuonDimensionNumbers(0, (1, -1)), (4, 8), r"output_axis=\(1, -1\) repeats an axis"),
        (
            MuonDimensionNumbers(0, (0, 1)),
            (4, 8),
            r"mlp/kernel .* reduction_axis=0 and output_axis=\(0, 1\) overlap in \[0\]",
        ),
        (MuonDimensionNumbers(1, -1), (4, 8), r"overlap in \[1\]"),
        (MuonDimensionNumbers((), 1), (4, 8), r"reduction_axis is empty"),
        (
            MuonDimensionNumbers(0, 1),
            (4,),
            r"mlp/kernel \(4,\) .*fewer than 2 axes; give this leaf None, for AdamW",
        ),
        (MuonDimensionNumbers(0, 1), (), r"mlp/kernel \(\) .*fewer than 2 axes"),
    ],
)
def test_numbers_that_do_not_fit(numbers, shape, message):
    with pytest.raises(ValueError, match=message):
        rows_of(leaf("mlp/kernel", *shape), numbers, P())
    # They are raised when the optimizer sees the parameters, before any step.
    tx = optax_nora.nora(0.1, weight_dimension_numbers=numbers)
    with pytest.raises(ValueError, match=message):
        tx.init({"mlp": {"kernel": jnp.ones(shape)}})


def test_integer_leaves_are_refused():
    with pytest.raises(ValueError, match=r"table \(4, 8\) int32 is no floating leaf.*give it None"):
        rows_of(leaf("table", 4, 8, dtype=jnp.int32), DENSE, P())
    with pytest.raises(ValueError, match=r"table \(4, 8\) int32 .*keep it out of the parameters"):
        optax_nora.nora(0.1).init({"table": jnp.ones((4, 8), jnp.int32)})
    tx = optax.masked(optax_nora.nora(0.1), {"table": False, "kernel": True})
    tx.init({"table": jnp.ones((4, 8), jnp.int32), "kernel": jnp.ones((4, 8))})
