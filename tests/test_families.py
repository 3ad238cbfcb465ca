"""The ready rules beyond what tests/trees holds of them."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers
from test_default import ASK, routing, tree_of

import optax_nora
from optax_nora import rules

FAMILIES = ["flax_nnx", "gemma", "maxtext", "equinox", "torch", "huggingface_flax"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_nothing_of_what_it_does_not_know(family):
    rule = getattr(rules, family)()
    assert hash(rule) == hash(getattr(rules, family)())
    shapes = {"strange/kernel": (3, 4, 8), "strange/bias": (3, 4), "up/kernel": (4, 8)}
    assert routing(shapes, rule) == {
        "strange/kernel": ASK,
        "strange/bias": None,
        "up/kernel": ((0,), (1,)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of patterns that match nothing
        optax_nora.infer_dimension_numbers(tree_of({"up/kernel": (4, 8)}), rule)


STACK = {
    "layers/query/kernel": (3, 8, 8),
    "layers/conv/kernel": (3, 5, 8, 16),
    "layers/norm/scale": (3, 8),
}


def test_stacks_are_not_taken_for_layers():
    routed = routing(STACK, rules.flax_nnx())
    assert routed["layers/query/kernel"] == routed["layers/conv/kernel"] == ASK
    stacked = routing(STACK, optax_nora.by_path({"layers": optax_nora.stacked(rules.flax_nnx())}))
    assert stacked == {
        "layers/query/kernel": ((1,), (2,)),
        "layers/conv/kernel": ((1, 2), (3,)),
        "layers/norm/scale": None,
    }
    assert routing({"layers/weight": (3, 16, 8), "layers/bias": (3, 16)}, rules.equinox()) == {
        "layers/weight": ASK,
        "layers/bias": None,
    }


def test_as_many_heads_as_a_head_is_wide():
    """So a bias (4, 4) has an axis of its kernel's second axis, as if layers were stacked there."""
    shapes = {"attention/query/kernel": (16, 4, 4), "attention/query/bias": (4, 4)}
    assert routing(shapes, rules.flax_nnx()) == {
        "attention/query/kernel": ((0,), (1, 2)),
        "attention/query/bias": None,
    }
    named = {f"layers/{path}": shape for path, shape in shapes.items()}
    assert routing(named, rules.flax_nnx())["layers/attention/query/kernel"] == ASK


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A module with static fields, as of Haliax."""

    def __init__(self, static=None, **arrays):
        self.static, self.arrays = static or {}, arrays
        self.__dict__.update(self.static, **arrays)

    def tree_flatten_with_keys(self):
        keys = tuple(self.arrays)
        return [(jax.tree_util.GetAttrKey(k), self.arrays[k]) for k in keys], (keys, self.static)

    @classmethod
    def tree_unflatten(cls, aux, leaves):
        return cls(aux[1], **dict(zip(aux[0], leaves, strict=True)))


def named(*axes: Axis) -> Any:
    return Module({"axes": axes}, array=jnp.ones([axis.size for axis in axes]))


def linear(weight, ins, outs):
    return Module({"In": ins, "Out": outs}, weight=weight, bias=None)


def test_haliax():
    E, H, D, L, V = (
        Axis(n, s) for n, s in (("e", 8), ("h", 2), ("d", 4), ("layers", 3), ("v", 99))
    )
    model = {
        "q": linear(named(E, H, D), E, (H, D)),
        "o": linear(named(E, H, D), (H, D), E),  # out first
        "layers": linear(named(L, H, E), E, H),
        "wte_like": Module({"Vocab": V, "Embed": E}, weight=named(V, E)),
        "ln": Module(weight=named(E), bias=named(E)),
        "lm_head": linear(named(V, E), E, V),
        "lora_B": linear(named(H, D), D, H),
    }
    found = optax_nora.infer_dimension_numbers(model, rules.haliax(model))
    assert found["q"].weight.array == MuonDimensionNumbers((0,), (1, 2))
    assert found["o"].weight.array == MuonDimensionNumbers((1, 2), (0,))
    assert found["layers"].weight.array == MuonDimensionNumbers((2,), (1,))
    assert found["wte_like"].weight.array is found["ln"].weight.array is None
    assert found["lm_head"].weight.array is found["lora_B"].weight.array is None
    # As a function it asks the parameters each time.
    assert optax_nora.matrix_mask(model, rules.haliax)["o"].weight.array
    optax_nora.nora(0.1, weight_dimension_numbers=rules.haliax).init(model)
    # The rule is made once; arrays alone are what update sees.
    plain = {"q": {"weight": {"array": jnp.ones((8, 2, 4))}}}
    assert optax_nora.matrix_mask(plain, rules.haliax(model)) == {"q": {"weight": {"array": True}}}


def test_default_routing_as_a_rule():
    shapes = {"up/kernel": (4, 8), "embed/embedding": (100, 4), "conv/kernel": (3, 4, 8)}
    assert routing(shapes, optax_nora.default_routing()) == routing(shapes)
