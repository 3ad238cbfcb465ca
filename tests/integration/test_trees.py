"""One model in every kind of tree: the same leaves get the same updates."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from tolerance import tolerance

import optax_nora

KERNEL, BIAS, HEAD = (
    jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 16), (16,), (16, 8)])
)
# What nora does with the three, each routed by hand: a matrix, a vector, an AdamW matrix.
BY_HAND = {"k": MuonDimensionNumbers(0, 1), "b": None, "h": None}


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    features: int = dataclasses.field(default=16, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    layers: list[Layer]
    lm_head: Any


@jax.tree_util.register_pytree_with_keys_class
class Attributes:
    """A module as of Equinox or Penzai: its leaves have attribute keys."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def tree_flatten_with_keys(self):
        names = sorted(self.__dict__)
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names], names

    @classmethod
    def tree_unflatten(cls, names, leaves):
        return cls(**dict(zip(names, leaves, strict=True)))


# Each builds a tree of a kernel, a bias and a head; the leaves come back in this order.
TREES = {
    "dict": lambda k, b, h: {"dense": {"kernel": k, "bias": b}, "lm_head": {"kernel": h}},
    "integer keys": lambda k, b, h: {0: {"kernel": k, "bias": b}, 1: {"embedding": h}},
    "lists": lambda k, b, h: {"layers": [[k, b]], "lm_head": [h]},
    "tuples": lambda k, b, h: ((k, (b,)), {"logits": h}),
    "named tuple": lambda k, b, h: (Pair(k, b), Pair({"embedding": h}, None)),
    "dataclass": lambda k, b, h: Model([Layer(k, b)], h),
    "attributes": lambda k, b, h: Attributes(up=Attributes(weight=k, bias=b), lm_head=h),
    "None leaves": lambda k, b, h: {"a": {"kernel": k, "bias": None}, "b": b, "head": h, "c": None},
}


def leaves(build, tree):
    """The leaves of a tree as a dict, in whatever order the tree has them."""
    names = jax.tree.leaves(build("k", "b", "h"))
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


def random_like(seed, tree):
    return optax.tree.random_like(jax.random.key(seed), tree)


def run(tx, params, grads):
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("kind", TREES)
def test_every_kind_of_tree(kind):
    build = TREES[kind]
    flat = {"k": KERNEL, "b": BIAS, "h": HEAD}
    grads = [random_like(seed, flat) for seed in range(3)]
    want, _ = run(optax_nora.nora(0.02, weight_dimension_numbers=BY_HAND), flat, grads)
    params = build(**flat)
    got, state = run(optax_nora.nora(0.02), params, [build(**g) for g in grads])
    assert jax.tree.structure(got) == jax.tree.structure(params)
    chex.assert_trees_all_equal(leaves(build, got), want)
    # One compiled step takes the state that init made and gives one of the same kind.
    tx = optax_nora.nora(0.02)
    _, abstract = jax.eval_shape(tx.update, params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_of_specs(kind):
    """Specs in a tree of the same kind; None for AdamW."""
    build = TREES[kind]
    flat = {"k": KERNEL, "b": BIAS, "h": HEAD}
    specs = BY_HAND | {"h": MuonDimensionNumbers(1, 0)}
    tx = optax_nora.nora(0.02, weight_dimension_numbers=build(**specs))
    by_hand = optax_nora.nora(0.02, weight_dimension_numbers=specs)
    grads = random_like(3, flat)
    got, _ = run(tx, build(**flat), [build(**grads)])
    chex.assert_trees_all_equal(leaves(build, got), run(by_hand, flat, [grads])[0])


PATTERNS = {
    "dict": "dense/kernel",
    "integer keys": "0/kernel",
    "lists": "layers/0/0",
    "tuples": "0/0",
    "named tuple": "0/kernel",
    "dataclass": "layers/*/kernel",
    "attributes": "up/weight",
    "None leaves": "a/kernel",
}


@pytest.mark.parametrize("kind", TREES)
def test_patterns_of_paths(kind):
    """The kernel to AdamW by its path, whatever kinds of key the path has."""
    build = TREES[kind]
    params = build(k=KERNEL, b=BIAS, h=HEAD)
    default = leaves(build, optax_nora.matrix_mask(params))
    rule = optax_nora.by_path({PATTERNS[kind]: None})
    routed = leaves(build, optax_nora.matrix_mask(params, rule))
    assert default == {"k": True, "b": False, "h": False}
    assert routed == {"k": False, "b": False, "h": False}


def test_the_root_may_be_an_array():
    grads = random_like(1, KERNEL)
    got, _ = run(optax_nora.nora(0.02), KERNEL, [grads])
    want, _ = run(optax_nora.nora(0.02), {"kernel": KERNEL}, [{"kernel": grads}])
    chex.assert_trees_all_equal(got, want["kernel"])


def test_numpy_leaves():
    params, grads = {"kernel": np.asarray(KERNEL)}, {"kernel": np.asarray(random_like(1, KERNEL))}
    got, _ = run(optax_nora.nora(0.02), params, [grads])
    want, _ = run(optax_nora.nora(0.02), *jax.tree.map(jnp.asarray, (params, [grads])))
    chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("empty", [{}, (), [], {"a": {}, "b": (None, [])}], ids=repr)
@pytest.mark.parametrize(
    "tx",
    [optax_nora.nora(0.02), optax_nora.scale_by_nora(), optax_nora.keep_row_norms()],
    ids=["nora", "scale_by_nora", "keep_row_norms"],
)
def test_empty_trees(empty, tx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is missing where there is nothing
        state = tx.init(empty)
    assert jax.tree.structure(tx.update(empty, state, empty)[0]) == jax.tree.structure(empty)


def test_only_vectors():
    """AdamW for all of them, after a warning."""
    params = {"scale": BIAS, "dense": {"bias": -BIAS}}
    grads = [random_like(seed, params) for seed in range(3)]
    with pytest.warns(UserWarning, match="all go to AdamW"):
        got, state = run(optax_nora.nora(0.02), params, grads)
    want, _ = run(optax.adamw(0.02, b1=0.9, b2=0.95, eps=1e-10, weight_decay=0.0), params, grads)
    chex.assert_trees_all_equal(got, want)
    assert not jax.tree.leaves(optax.tree.get(state.inner_states["matrix"], "mu"))


def test_only_matrices():
    """No Adam moments, and every row a step of one length."""
    params = {"up": {"kernel": KERNEL}, "down": {"kernel": HEAD}}
    tx = optax_nora.nora(0.125, row_scale="unit")
    state = tx.init(params)
    updates, state = tx.update(random_like(1, params), state, params)
    assert not jax.tree.leaves(optax.tree.get(state, "nu"))
    for step in jax.tree.leaves(updates):
        chex.assert_trees_all_close(jnp.linalg.norm(step, axis=0), 0.125, rtol=tolerance(8))


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax_nora.nora(0.02), "the leaf bias is in one tree and not in another"),
        (optax_nora.row_project(weight_dimension_numbers=BY_HAND), "as trees of one structure"),
    ],
    ids=["nora", "row_project"],
)
def test_gradients_of_another_structure_are_refused(tx, message):
    params = {"k": KERNEL, "bias": BIAS}
    with pytest.raises(ValueError, match=message):
        tx.update({"k": KERNEL}, optax_nora.nora(0.02).init(params), params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """A module that can be called, as of Equinox; a tree of specs in it is no function."""

    kernel: Any
    bias: Any

    def __call__(self, x):
        return x @ self.kernel + self.bias


def test_a_module_that_can_be_called():
    params = Net(KERNEL, BIAS)
    specs, decays = Net(MuonDimensionNumbers(0, 1), None), Net(True, False)
    tx = optax_nora.nora(
        0.02, weight_decay=0.1, weight_decay_mask=decays, weight_dimension_numbers=specs
    )
    state = tx.init(params)
    updates, _ = tx.update(params, state, params)
    stepped, _ = tx.step(params, state, params)
    chex.assert_trees_all_close(stepped, optax.apply_updates(params, updates), rtol=1e-6)
    by_hand = optax_nora.nora(0.02, weight_decay=0.1, weight_decay_mask=vars(decays))
    flat, _ = by_hand.update(vars(params), by_hand.init(vars(params)), vars(params))
    chex.assert_trees_all_equal(vars(updates), flat)


def test_init_warns_of_rows_that_turning_does_not_lengthen():
    params = {"up": {"kernel": KERNEL}, "policy": {"kernel": 0.01 * HEAD}}
    with pytest.warns(UserWarning, match="policy/kernel has rows far shorter than those of"):
        optax_nora.nora(0.02).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(optax_nora.nora(0.02).init, params)  # a trace has no values
