"""Axis names of boxed parameters; Flax's own are in tests/integration/test_flax_routing.py."""

import jax.numpy as jnp
import pytest
from boxes import Box
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_nora

SIZES = {"layers": 3, "expert": 2, "embed": 8, "heads": 2, "kv": 4, "mlp": 16, "vocab": 32}


def routed(names, name="kernel", **kwargs):
    shape = tuple(SIZES.get(axis, 5) for axis in names)
    params = {"block": {name: Box(jnp.ones(shape), tuple(names))}}
    rule = optax_nora.from_logical_axes(params, **kwargs)
    return optax_nora.infer_dimension_numbers(params, rule)["block"][name]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("embed", "mlp"), MuonDimensionNumbers((0,), (1,))),
        (("embed", "heads", "kv"), MuonDimensionNumbers((0,), (1, 2))),
        (("heads", "kv", "embed"), MuonDimensionNumbers((0, 1), (2,))),
        (("layers", "embed", "mlp"), MuonDimensionNumbers((1,), (2,))),
        (("embed", "layers", "mlp"), MuonDimensionNumbers((0,), (2,))),
        (("layers", "expert", "embed", "mlp"), MuonDimensionNumbers((2,), (3,))),
        (("height", "width", "in", "out"), MuonDimensionNumbers((0, 1, 2), (3,))),
        (("embed", None), MuonDimensionNumbers((0,), (1,))),
        (("vocab", "embed"), None),
        (("embed", "vocab"), None),
        (("mlp",), None),
        (("layers", "embed"), None),
        (("layers", "heads", "kv"), None),
    ],
)
def test_names_say_what_a_row_is(names, expected):
    assert routed(names) == expected


def test_a_vectors_name_counts_for_more_than_its_axes():
    assert routed(("heads", "embed"), name="bias") is None
    assert routed(("heads", "embed"), name="kernel") == MuonDimensionNumbers((0,), (1,))


def test_the_names_are_the_users():
    layers_embed_mlp = MuonDimensionNumbers((1,), (2,))
    assert routed(("repeat", "embed", "mlp"), batch_axes=["repeat"]) == layers_embed_mlp
    embed_heads_kv = MuonDimensionNumbers((0,), (1, 2))
    assert routed(("embed", "q", "d"), joint_axes=["q", "d"]) == embed_heads_kv
    assert routed(("embed", "mlp"), adamw_axes=["mlp"]) is None
    assert routed(("vocab", "embed"), adamw_axes=[]) == MuonDimensionNumbers((0,), (1,))


def test_specs_are_names_too():
    params = {"kernel": Box(jnp.ones((3, 8, 16)), P("layers", "embed", "mlp"))}
    rule = optax_nora.from_logical_axes(params)
    numbers = optax_nora.infer_dimension_numbers(params, rule)
    assert numbers["kernel"] == MuonDimensionNumbers((1,), (2,))


def test_a_leaf_without_names_takes_the_default():
    params = {
        "named": {"kernel": Box(jnp.ones((3, 8, 16)), ("layers", "embed", "mlp"))},
        "plain": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)},
    }
    rule = optax_nora.from_logical_axes(params)
    numbers = optax_nora.infer_dimension_numbers(params, rule)
    assert numbers["plain"] == {"kernel": MuonDimensionNumbers((0,), (1,)), "bias": None}


def test_the_names_outlive_the_boxes():
    # NNX shows plain arrays at update.
    params = {"kernel": Box(jnp.ones((8, 2, 4)), ("embed", "heads", "kv"))}
    tx = optax_nora.nora(
        0.1, weight_dimension_numbers=optax_nora.from_logical_axes(params), row_scale="unit"
    )
    state = tx.init(params)
    updates, _ = tx.update(
        {"kernel": jnp.eye(8).reshape(8, 2, 4)}, state, {"kernel": params["kernel"].value}
    )
    assert jnp.allclose(jnp.linalg.norm(updates["kernel"], axis=0), 0.1)


def test_as_many_names_as_axes():
    params = {"mlp": {"kernel": Box(jnp.ones((8, 16)), ("embed",))}}
    with pytest.raises(ValueError, match=r"mlp/kernel .* has 2 axes and the .*names \('embed',\)"):
        optax_nora.from_logical_axes(params)
