"""What one update of `nora` says over the wire, counted in the compiled program."""

import math
import re

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from peers import PEERS

import optax_nora

P = PartitionSpec
COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"(?P<dtype>[a-z]+\d+)\[(?P<shape>[\d,]*)\]")
SUMS = 5  # <h, w>, <w, w>; then <u, w>, <u, u>, and that of a tiny u, lest it overflow
FLOAT = 4  # bytes


def collectives(tx, params):
    """The collectives of one compiled update by name: bytes that each device gets from them."""
    # The gradients lie as the parameters do.
    program = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    found = {}
    for match in COLLECTIVE.finditer(program.as_text()):
        for array in ARRAY.finditer(match["result"]):
            assert array["dtype"] == "f32", match[0]
            size = math.prod(int(n) for n in array["shape"].split(",") if n)
            found[match["name"]] = found.get(match["name"], 0) + FLOAT * size
    return found


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    axis_type = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[request.param]
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)


def place(mesh, leaves):
    """Arrays of random numbers from ``{path: (shape, spec)}``, a tree of their paths."""
    tree = {}
    for seed, (path, (shape, spec)) in enumerate(leaves.items()):
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        array = jax.random.normal(jax.random.key(seed), shape)
        node[name] = jax.device_put(array, NamedSharding(mesh, spec))
    return tree


# Of a kernel (in, out) = (16, 32): its PartitionSpec, and how many rows a device must sum.
KERNELS = {
    "replicated": (P(), 0),
    "out by data": (P(None, "data"), 0),
    "out by model": (P(None, "model"), 0),
    "out by both": (P(None, ("data", "model")), 0),
    "in by data": (P("data"), 32),
    "in by model": (P("model"), 32),
    "in by both": (P(("data", "model")), 32),
    "in by data, out by model": (P("data", "model"), 8),
    "in by model, out by data": (P("model", "data"), 16),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec, rows = KERNELS[name]
    params = place(mesh, {"kernel": ((16, 32), spec)})
    expected = {"all-reduce": SUMS * rows * FLOAT} if rows else {}
    assert collectives(optax_nora.nora(0.02, weight_decay=0.1), params) == expected


# Layers (4, 16, 32) stacked along axis 0: rows a device sums.
STACKS = {
    "layers by model": (P("model"), 0),
    "layers by model, out by data": (P("model", None, "data"), 0),
    "layers by model, in by data": (P("model", "data"), 32),
    "in by data, out by model": (P(None, "data", "model"), 4 * 8),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_layers(mesh, name):
    spec, rows = STACKS[name]
    params = place(mesh, {"layers/kernel": ((4, 16, 32), spec), "layers/bias": ((4, 32), P())})
    numbers = optax_nora.by_path({"layers": optax_nora.stacked()})
    expected = {"all-reduce": SUMS * rows * FLOAT} if rows else {}
    assert collectives(optax_nora.nora(0.02, weight_dimension_numbers=numbers), params) == expected


MODEL = {
    "embedding": (64, 16),
    "query/kernel": (16, 4, 8),
    "out/kernel": (4, 8, 16),
    "up/kernel": (16, 32),
    "down/kernel": (32, 16),
    "scale": (16,),
}
HEADS = optax_nora.by_path(
    {
        "query/kernel": MuonDimensionNumbers(0, (1, 2)),
        "out/kernel": MuonDimensionNumbers((0, 1), 2),
    }
)
# As Megatron splits a block: first the outputs, then the inputs of what they feed.
TENSOR_PARALLEL = {
    "embedding": P(None, "model"),
    "query/kernel": P(None, "model"),
    "out/kernel": P("model"),
    "up/kernel": P(None, "model"),
    "down/kernel": P("model"),
    "scale": P(),
}
LAYOUTS = {
    # Rows to sum: the 4 * 8 of query, the 16 of out, the 32 of up, the 16 of down.
    "fsdp": (dict.fromkeys(MODEL, P("data")), 32 + 16 + 32 + 16),
    "fsdp on the outputs": (
        {path: P(*[None] * (len(shape) - 1), "data") for path, shape in MODEL.items()},
        0,
    ),
    "tensor parallel": (TENSOR_PARALLEL, 16 + 16),
    "tensor parallel and fsdp": (
        TENSOR_PARALLEL
        | {
            "query/kernel": P("data", "model"),
            "out/kernel": P("model", None, "data"),
            "up/kernel": P("data", "model"),
            "down/kernel": P("model", "data"),
        },
        8 + 8 + 8 + 8,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_model(mesh, name):
    specs, rows = LAYOUTS[name]
    params = place(mesh, {path: (shape, specs[path]) for path, shape in MODEL.items()})
    expected = {"all-reduce": SUMS * rows * FLOAT} if rows else {}
    assert collectives(optax_nora.nora(0.02, weight_dimension_numbers=HEADS), params) == expected


def test_the_count_sees_others():
    """Muon multiplies whole matrices: the same count finds what that moves."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = place(mesh, {"kernel": ((16, 32), P("data", "model"))})
    assert collectives(PEERS["rmnp"](0.02), params) == {"all-reduce": 2 * 8 * FLOAT}
    found = collectives(PEERS["muon"](0.02), params)
    assert sum(found.values()) > 20 * SUMS * 8 * FLOAT
    assert {"all-gather", "all-reduce"} <= found.keys()
