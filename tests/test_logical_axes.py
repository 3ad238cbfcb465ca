"""Axis names of boxed parameters; Flax's own are in tests/integration/test_flax_routing.py."""

import jax
import jax.numpy as jnp
import pytest
from boxes import Box
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_nora
from optax_nora._routing import survey

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
    assert routed(("vocab", "embed"), feature_axes=["vocab"]) == MuonDimensionNumbers((0,), (1,))


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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # MaxText's
        (("exp", "layers", "embed", "mlp"), ((2,), (3,))),
        (("embed", "dense_layers", "mlp"), ((0,), (2,))),
        (("embed", "moe_layers", "mlp"), ((0,), (2,))),
        (("embed_no_exp", "mlp_no_fsdp"), ((0,), (1,))),
        (("embed", "qkv", "heads", "kv"), ((0,), (1, 2, 3))),
        (("embed", "layers", "q_heads", "head_dim"), ((0,), (2, 3))),
        (("kv_lora", "kv_heads", "kv_head_dim"), ((0,), (1, 2))),
        # a router's experts are its outputs
        (("embed", "expert"), ((0,), (1,))),
        (("embed", "layers", "experts"), ((0,), (2,))),
    ],
)
def test_names_match_by_their_words(names, expected):
    assert routed(names) == MuonDimensionNumbers(*expected)


def ask(params, **kwargs):
    """Whether the user is asked about the one leaf."""
    rule = optax_nora.from_logical_axes(params, **kwargs)
    (one,) = survey(params, rule)
    return one.decision.ask


@pytest.mark.parametrize(
    "names",
    [
        ("data", None, None),
        (None, None, "model"),
        (("fsdp", "expert"), None, "tensor"),
        ("embed", "heads"),  # padded with None, as a PartitionSpec
        ("embed", "speakers", "mlp"),
        ("qkv", "embed", "heads"),  # three sides
    ],
)
def test_names_that_are_not_known_ask_the_default(names):
    shape = (8, 2, 4)
    assert ask({"q": {"kernel": Box(jnp.ones(shape), names)}})
    embedding = {"embed": {"embedding": Box(jnp.ones((8, 4)), names[:2])}}
    rule = optax_nora.from_logical_axes(embedding)
    assert optax_nora.infer_dimension_numbers(embedding, rule)["embed"]["embedding"] is None


def test_names_of_the_mesh_are_no_logical_names():
    params = {"q": {"kernel": Box(jnp.ones((8, 2, 4)), ("embed", "heads", "kv"))}}
    assert not ask(params)
    mesh = jax.make_mesh((1, 1), ("embed", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert ask(params)
    sharding = jax.sharding.NamedSharding(mesh, P("embed"))
    placed = {"q": {"kernel": Box(jax.device_put(jnp.ones((8, 2, 4)), sharding), ("embed",) * 3)}}
    assert ask(placed)


def test_by_path_overrides_names_that_are_wrong():
    params = {
        "up": {"kernel": Box(jnp.ones((8, 16)), ("embed", "mlp", "too", "many"))},
        "q": {"kernel": Box(jnp.ones((8, 2, 4)), ())},
        "norm": {"scale": Box(jnp.ones(8), ())},
    }
    q = MuonDimensionNumbers(0, (1, 2))
    rule = optax_nora.by_path({"q": q, "**": optax_nora.from_logical_axes(params)})
    assert optax_nora.infer_dimension_numbers(params, rule) == {
        "up": {"kernel": MuonDimensionNumbers((0,), (1,))},
        "q": {"kernel": MuonDimensionNumbers((0,), (1, 2))},
        "norm": {"scale": None},
    }


@pytest.mark.parametrize(
    ("path", "names", "shape"),
    [
        ("pos_embedding", ("length", "embed"), (16, 8)),
        ("head/kernel", ("embed", "mlp"), (8, 10)),
        ("relpos_bias/rel_embedding", ("heads", "embed"), (4, 32)),
        ("moe/wi_0_bias", ("exp", "layers", "mlp"), (4, 3, 32)),
        ("norm/weight", ("layers", "embed"), (3, 8)),
    ],
)
def test_names_of_embeddings_heads_and_vectors_count(path, names, shape):
    params = {path: Box(jnp.ones(shape), names)}
    rule = optax_nora.from_logical_axes(params)
    assert optax_nora.infer_dimension_numbers(params, rule) == {path: None}


def test_a_tree_without_names_is_told():
    with pytest.warns(UserWarning, match="no leaf carries logical axis names"):
        optax_nora.from_logical_axes({"up": {"kernel": jnp.ones((8, 16))}})
