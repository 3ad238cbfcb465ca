"""Which leaf is a matrix, and along which axes its rows run."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_nora
from optax_nora._default import Rule
from optax_nora._leaves import Leaf
from optax_nora._routing import routes_of
from optax_nora._rules import DenseOnly, Everywhere, matches, rows_of


def leaf(path, *shape, dtype=jnp.float32):
    return Leaf(tuple(path.split("/")), shape, jnp.dtype(dtype))


def numbers(rule, one):
    """Where a rule sends a leaf, which must not be unclear."""
    decision = rule.decide(one)
    assert not decision.ask, one
    return decision.numbers


DENSE = MuonDimensionNumbers(0, 1)


def test_dense_only_takes_two_axes_whatever_their_name():
    assert numbers(DenseOnly(), leaf("embed/bias", 4, 8)) == DENSE
    with pytest.raises(ValueError, match=r"kernel \(8,\) .*taken for a matrix \(in, out\).*1 axes"):
        DenseOnly().decide(leaf("kernel", 8))


def test_rules_are_frozen_and_no_functions():
    # optax.inject_hyperparams takes every callable for a schedule.
    rules = [
        optax_nora.by_path({"a": None}),
        optax_nora.stacked(),
        optax_nora.in_shard_map(P()),
        optax_nora.from_logical_axes({}),
        optax_nora.kernels(),
        Everywhere(DENSE),
    ]
    for rule in rules:
        assert isinstance(rule, Rule)
        assert not callable(rule)
        assert dataclasses.fields(rule)
        assert isinstance(hash(rule), int)  # to be static under jax.jit
        with pytest.raises(dataclasses.FrozenInstanceError):
            rule.anything = 1


# by_path


def by_path(pattern, path, *shape):
    """Whether the pattern matches: it sends a leaf to AdamW that is a matrix otherwise."""
    rule = optax_nora.by_path({pattern: None})
    return numbers(rule, leaf(path, *(shape or (4, 8)))) is None


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
    assert numbers(first, up) is None
    assert numbers(second, up) == MuonDimensionNumbers(1, 0)


def test_a_leaf_that_no_pattern_matches_takes_the_default():
    rule = optax_nora.by_path({"adapter": None})
    assert numbers(rule, leaf("mlp/kernel", 4, 8)) == DENSE
    assert numbers(rule, leaf("mlp/bias", 4, 8)) is None


def test_by_path_takes_rules():
    rule = optax_nora.by_path({"layers": optax_nora.stacked(), "head": MuonDimensionNumbers(0, 1)})
    assert numbers(rule, leaf("layers/mlp/kernel", 12, 4, 8)) == MuonDimensionNumbers((1,), (2,))
    assert numbers(rule, leaf("head/kernel", 4, 8)) == DENSE  # AdamW by default


def test_by_path_keeps_its_patterns_when_the_users_mapping_changes():
    patterns = {"mlp": None}
    rule = optax_nora.by_path(patterns)
    patterns.clear()
    assert numbers(rule, leaf("mlp/kernel", 4, 8)) is None


@pytest.mark.parametrize("pattern", ["", "/", "//mlp", "mlp/", "mlp//kernel"])
def test_by_path_refuses_an_empty_segment(pattern):
    with pytest.raises(ValueError, match="has an empty segment"):
        optax_nora.by_path({pattern: None})


@pytest.mark.parametrize("value", [(0, 1), "adamw", lambda leaf: None])
def test_by_path_refuses_other_values(value):
    with pytest.raises(ValueError, match=r"'mlp' maps to .*, or None for AdamW"):
        optax_nora.by_path({"mlp": value})


def test_a_leading_slash_is_the_start_of_the_path():
    assert matches("/mlp/kernel", leaf("mlp/kernel"))
    assert matches("/**/kernel", leaf("block/mlp/kernel"))
    assert not matches("/mlp/kernel", leaf("block/mlp/kernel"))
    assert matches("/**", leaf("kernel"))


@pytest.mark.parametrize("given", [[("mlp", None)], None, "mlp"])
def test_by_path_takes_a_dict(given):
    with pytest.raises(ValueError, match="by_path takes a dict"):
        optax_nora.by_path(given)


def test_rules_are_told_apart_by_what_they_say():
    patterns = {"a": None, "b": DENSE}
    backwards = dict(reversed(patterns.items()))
    assert optax_nora.by_path(patterns) == optax_nora.by_path(patterns)
    assert optax_nora.by_path(patterns) != optax_nora.by_path(backwards)  # the first match wins


# kernels


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("Dense_0/kernel", (4, 8), MuonDimensionNumbers((0,), 1)),
        ("Conv_0/kernel", (3, 3, 4, 8), MuonDimensionNumbers((0, 1, 2), 3)),
        ("Conv_0/bias", (8,), None),
        ("BatchNorm_0/scale", (8,), None),
        ("embed/embedding", (32, 8), None),
        ("head/kernel", (8, 32), None),
    ],
)
def test_kernels(path, shape, expected):
    assert numbers(optax_nora.kernels(), leaf(path, *shape)) == expected


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
    assert numbers(optax_nora.stacked(axis=axis), leaf("mlp/kernel", *shape)) == expected
    # The batch axis is what is left over.
    rows = rows_of(leaf("mlp/kernel", *shape), expected, P())
    assert rows.batch(3) == (axis % 3,)


def test_stacked_numbers_are_of_one_layer():
    rule = optax_nora.stacked(MuonDimensionNumbers((0, -2), -1))
    assert numbers(rule, leaf("out/kernel", 12, 4, 16, 64)) == MuonDimensionNumbers((1, 2), (3,))


def test_stacked_stacks():
    rule = optax_nora.stacked(optax_nora.stacked())
    assert numbers(rule, leaf("kernel", 2, 3, 4, 8)) == MuonDimensionNumbers((2,), (3,))


@pytest.mark.parametrize("name", ["bias", "scale"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_stacked_vector_goes_to_adamw(name, axis):
    assert numbers(optax_nora.stacked(axis=axis), leaf(f"norm/{name}", 12, 64)) is None


def test_an_unnamed_stacked_vector_goes_to_adamw():
    assert numbers(optax_nora.stacked(), leaf("norm/something", 12, 64)) is None


def test_a_stacked_leaf_may_still_be_ambiguous():
    decision = optax_nora.stacked().decide(leaf("query/kernel", 12, 64, 4, 16))
    assert decision.ask
    assert decision.numbers == MuonDimensionNumbers((1,), (2, 3))
    assert decision.note == "stacked along axis 0, (embed, heads, head_dim)"


@pytest.mark.parametrize("axis", [3, -4])
def test_stacked_along_an_axis_that_is_not_there(axis):
    with pytest.raises(ValueError, match=f"mlp/kernel .* has no axis {axis} to be stacked along"):
        optax_nora.stacked(axis=axis).decide(leaf("mlp/kernel", 12, 4, 8))


@pytest.mark.parametrize("name", ["kernel", "weight"])
def test_stacked_on_a_matrix_that_is_not_asks(name):
    assert optax_nora.stacked().decide(leaf(f"mlp/{name}", 4, 8)).ask
    # Where the rule of one layer says None, or the path is a norm's, there is nothing to ask.
    assert (
        numbers(optax_nora.stacked(optax_nora.by_path({"*": None})), leaf("a/weight", 4, 8)) is None
    )
    assert numbers(optax_nora.stacked(), leaf("norm/weight", 4, 8)) is None


@pytest.mark.parametrize("axis", ["x", None, 1.0, (0, 1)])
def test_the_axis_of_a_stack_is_one_int(axis):
    with pytest.raises((ValueError, TypeError), match="axis"):
        optax_nora.stacked(axis=axis)


@pytest.mark.parametrize("rule", [{"a": DENSE}, (0, 1), optax_nora.stacked])
def test_stacked_takes_numbers_or_a_rule(rule):
    with pytest.raises(ValueError, match=r"stacked: rule is .*stacked\(\), not stacked"):
        optax_nora.stacked(rule)


# in_shard_map


def mesh_axes(rule, one):
    rows = rows_of(one, numbers(rule, one), rule.partition_spec(one))
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


def test_in_shard_map_tells_the_inner_output_axes_apart():
    rule = optax_nora.in_shard_map(P("a", "b", "c"), MuonDimensionNumbers(0, (2, 1)))
    one = leaf("query/kernel", 64, 4, 16)
    rows = rows_of(one, numbers(rule, one), rule.partition_spec(one))
    assert (rows.output_mesh, rows.inner_mesh) == (("c", "b"), ("b",))


def test_in_shard_map_routes_as_its_rule_does():
    rule = optax_nora.in_shard_map(P("tp"), optax_nora.by_path({"mlp": None}))
    assert numbers(rule, leaf("mlp/kernel", 4, 8)) is None
    assert numbers(rule, leaf("other/kernel", 4, 8)) == DENSE
    assert rule.unmatched([leaf("other/kernel")]) == ["mlp"]


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
        rows = rows_of(one, numbers(rule, one), rule.partition_spec(one))
        fans.append((rows.fan_in(x.shape), rows.fan_out(x.shape)))
        return x

    specs = {"in_specs": P("tp", "data"), "out_specs": P("tp", "data")}
    jax.jit(jax.shard_map(see, mesh=mesh, **specs))(jnp.ones((8, 12)))
    assert fans[-1] == (8, 12)


def test_neighbours_are_compared_as_they_are_over_all_devices():
    # On each device the bias is as long as the kernel's first axis, in truth as its second.
    specs = {"kernel": P(), "bias": P("tp")}
    rule = optax_nora.in_shard_map(specs)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    seen = []

    def see(tree):
        seen.append(routes_of(tree, rule))
        return tree

    jax.jit(jax.shard_map(see, mesh=mesh, in_specs=(specs,), out_specs=specs))(params)
    assert seen[0] == routes_of(params, rule)
    assert seen[0]["kernel",] == ((0,), (1,), (), (), ())


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
    with pytest.raises(ValueError, match=r"table \(4, 8\) int32 is not floating.*give it None"):
        rows_of(leaf("table", 4, 8, dtype=jnp.int32), DENSE, P())
    with pytest.raises(ValueError, match=r"table \(4, 8\) int32 .*keep it out of the parameters"):
        optax_nora.nora(0.1).init({"table": jnp.ones((4, 8), jnp.int32)})
    tx = optax.masked(optax_nora.nora(0.1), {"table": False, "kernel": True})
    tx.init({"table": jnp.ones((4, 8), jnp.int32), "kernel": jnp.ones((4, 8))})
