"""One spelling of every path, and boxes that come back as they went in."""

import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxes import Box

from optax_nora._leaves import (
    Leaf,
    array_of,
    describe,
    map_leaves,
    nodes_with_paths,
    path_of,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    bias: jax.Array


class Pair(NamedTuple):
    first: object
    second: object


def paths(tree):
    return ["/".join(path) for path, _ in nodes_with_paths(tree)[0]]


ONE = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": {"kernel": ONE}}, ["a/kernel"]),
        ({"a": [ONE, {"kernel": ONE}]}, ["a/0", "a/1/kernel"]),
        ((ONE, ONE), ["0", "1"]),
        ({0: {"kernel": ONE}, 1: {"kernel": ONE}}, ["0/kernel", "1/kernel"]),
        ({"mlp": Layer(kernel=ONE, bias=ONE)}, ["mlp/kernel", "mlp/bias"]),
        (Pair(ONE, {"w": ONE}), ["first", "second/w"]),
        ({"a": Box(ONE), "b": ONE}, ["a", "b"]),
        ({"a": None, "b": ONE}, ["b"]),
        (ONE, [""]),
        ({}, []),
        ({"a": optax.MaskedNode(), "b": ONE}, ["a", "b"]),
    ],
)
def test_paths(tree, expected):
    assert paths(tree) == expected


def test_a_key_of_an_unknown_kind_is_spelled_as_it_prints():
    assert path_of(("already", 3, jax.tree_util.FlattenedIndexKey(2))) == (
        "already",
        "3",
        "2",
    )


def test_the_name_of_a_leaf_is_its_last_word():
    assert Leaf(("mlp", "kernel"), (2, 3), jnp.float32).name == "kernel"
    assert Leaf(("kernels", "0", "1"), (2, 3), jnp.float32).name == "kernels"
    assert Leaf(("0",), (2, 3), jnp.float32).name == ""


def test_a_leaf_prints_where_and_what_it_is():
    assert str(Leaf(("mlp", "kernel"), (2, 3), jnp.dtype("bfloat16"))) == (
        "mlp/kernel (2, 3) bfloat16"
    )
    assert str(Leaf((), (), jnp.dtype("float32"))) == "(root) () float32"


@pytest.mark.parametrize(
    ("array", "shape", "dtype"),
    [
        (ONE, (2, 3), "float32"),
        (jax.ShapeDtypeStruct((4, 5), jnp.bfloat16), (4, 5), "bfloat16"),
        (np.ones((2,), np.float64), (2,), "float64"),
        (1.0, (), "float32"),
        (3, (), "int32"),
    ],
)
def test_describe(array, shape, dtype):
    leaf = describe(("x",), array)
    assert (leaf.shape, jnp.dtype(leaf.dtype).name) == (shape, dtype)


def test_describe_sees_a_tracer():
    seen = []
    jax.jit(lambda x: seen.append(describe(("x",), x)))(ONE)
    assert seen[0].shape == (2, 3)


def test_array_of():
    assert array_of(Box(ONE)) is ONE
    assert array_of(ONE) is ONE
    assert array_of(optax.MaskedNode()) is None
    with pytest.raises(ValueError, match="Box holds 2 arrays; a leaf holds one"):
        array_of(Box((ONE, ONE)))


def test_map_leaves_puts_each_array_back_in_its_box():
    tree = {"a": Box(ONE, ("embed", "mlp")), "b": [2 * ONE], "c": None}
    out = map_leaves(lambda leaf, x: len(leaf.path) * x, tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert out["a"].names == ("embed", "mlp")
    np.testing.assert_array_equal(out["a"].value, ONE)
    np.testing.assert_array_equal(out["b"][0], 4 * ONE)


def test_map_leaves_takes_trees_whose_boxes_differ():
    out = map_leaves(lambda _, x, y: x - y, {"a": Box(3 * ONE)}, {"a": ONE})
    assert isinstance(out["a"], Box)
    np.testing.assert_array_equal(out["a"].value, 2 * ONE)


def test_map_leaves_leaves_masked_leaves_out_and_may_take_out_more():
    tree = {"a": optax.MaskedNode(), "b": ONE, "c": ONE}
    seen = []

    def fn(leaf, x):
        seen.append(leaf.slashed)
        return optax.MaskedNode() if leaf.name == "c" else x

    out = map_leaves(fn, tree)
    assert seen == ["b", "c"]
    assert out == {"a": optax.MaskedNode(), "b": ONE, "c": optax.MaskedNode()}


def test_map_leaves_shows_a_masked_leaf_of_the_rest_as_none():
    out = map_leaves(lambda _, x, y: y is None, {"a": ONE}, {"a": optax.MaskedNode()})
    assert out == {"a": True}


@pytest.mark.parametrize("other", [{"a": ONE}, {"a": ONE, "c": ONE}, {"a": ONE, "b": {"c": ONE}}])
def test_trees_of_other_structure_are_refused(other):
    for trees in (({"a": ONE, "b": ONE}, other), (other, {"a": ONE, "b": ONE})):
        with pytest.raises(ValueError, match=r"leaf [bc](/c)? is in one tree and not in another"):
            map_leaves(lambda _, x, y: x, *trees)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (1, 3), (3, 2), (1, 2, 3)])
def test_arrays_of_another_shape_are_refused(shape):
    message = re.escape(f"mlp/kernel is (2, 3) in one tree and {shape} in another")
    with pytest.raises(ValueError, match=message):
        map_leaves(
            lambda _, x, y: x, {"mlp": {"kernel": ONE}}, {"mlp": {"kernel": jnp.ones(shape)}}
        )


def test_leaves_are_paired_by_path_whatever_the_order():
    pair = Pair(first=ONE, second=2 * ONE)
    backwards = {"second": 20 * ONE, "first": 10 * ONE}
    out = map_leaves(lambda _, x, y: y / x, pair, backwards)
    np.testing.assert_array_equal(out.first, 10 * ONE)
    np.testing.assert_array_equal(out.second, 10 * ONE)


def test_a_boolean_speaks_for_a_leaf_of_any_shape():
    for yes in (True, np.True_, jnp.array(True)):
        assert map_leaves(lambda _, x, y: bool(y), {"a": ONE}, {"a": yes}) == {"a": True}
