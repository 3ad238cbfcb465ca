"""Whether kernels are right on this machine: ``python -m benchmarks.check_gpu``.

``step`` and ``update`` by kernels against Nora in float64, over a grid of shapes, directions and
dtypes; twice, for the same bits; in place; and where there are several devices, on a mesh of them
against one device, with what they send. Exits with 1 where something is wrong. Without a GPU the
kernels are interpreted.
"""

import functools
import itertools
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import optax_nora
from benchmarks import measure
from benchmarks.collectives import collective_bytes

RATE = 0.02
SMALL = (  # ragged: no tile divides them
    ((5, 37), (1,)),
    ((37, 5), (0,)),
    ((3, 5, 61), (2,)),
    ((3, 70, 33), (1,)),
    ((130, 131), (0,)),
    ((3, 4, 5, 6), (1, 2)),
    ((3, 4, 5, 6), (2, 3)),
)
LARGE = (
    *(((2048, 5461), (axis,)) for axis in (0, 1)),
    *(((5461, 2048), (axis,)) for axis in (0, 1)),
    *(((4, 1376, 512), (axis,)) for axis in (1, 2)),
    ((512, 11008), (1,)),
    ((1024, 8, 128), (0,)),
    ((8, 128, 1024), (0, 1)),
)
# Of gradient, momentum and weight.
FLOAT32 = ("float32", "float32", "float32")
BFLOAT16 = ("bfloat16", "bfloat16", "bfloat16")
MIXED = (
    ("bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("float16", "float32", "bfloat16"),
)


@dataclass(frozen=True)
class Args:
    """Compare kernels with float64."""

    small: bool = False
    """Leave out the large shapes, as where kernels are interpreted."""


class Case(NamedTuple):
    shape: tuple[int, ...]
    reduction: tuple[int, ...]
    dtypes: tuple[str, str, str]
    rho: float  # share of the gradient that is not along the weight


COLUMNS = {
    "shape": "shape",
    "reduction": "row axes",
    "dtypes": "gradient, momentum, weight",
    "rho": "rho|.0e",
    "momentum": "momentum, eps|.2f",
    "update": "update, eps|.2f",
    "leak": "along the weight, eps|.2f",
    "step": "step - update, eps|.2f",
    "same_bits": "same bits",
    "in_place": "in place",
    "ok": "ok",
}
MESH_COLUMNS = {
    "axes": "axes",
    "spec": "sharding",
    "shape": "shape",
    "reduction": "row axes",
    "step": "step - alone, eps|.2f",
    "sent": "collectives, bytes",
    "ok": "ok",
}


@functools.cache  # as compiled programs are
def nora(
    ndim: int, reduction: tuple[int, ...], mu: Any, backend: str, block_rows: int | None = None
) -> optax_nora.StepTransformation:
    output = tuple(axis for axis in range(ndim) if axis not in reduction)
    if block_rows is not None and min(reduction) > 0:
        output = output[-1:] if max(reduction) < ndim - 1 else (min(reduction) - 1,)
    return optax_nora.nora(
        RATE,
        mu_dtype=mu,
        block_rows=block_rows,
        project=block_rows is None,
        row_scale="unit",
        weight_dimension_numbers=MuonDimensionNumbers(reduction, output),
        backend=backend,
    )


def arrays(case: Case) -> list[jax.Array]:
    """Gradient and weight, and a gradient for the step before, so that there is a momentum."""
    rng = np.random.default_rng(0)
    w, across, first = (rng.standard_normal(case.shape) for _ in range(3))
    g = w + case.rho * across if case.rho < 1 else across
    first = w + case.rho * first if case.rho < 1 else first
    return [
        jnp.asarray(g, case.dtypes[0]),
        jnp.asarray(first, case.dtypes[0]),
        jnp.asarray(w, case.dtypes[2]),
    ]


def pointers(tree: Any) -> set[int]:
    return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim}


def _is_ours(path: Any, _: Any) -> bool:
    return getattr(path[-1], "tuple_name", "") == "MomentumState"


def momentum(state: Any) -> jax.Array:
    return optax.tree.get(state, "mu", filtering=_is_ours)


def check(case: Case) -> dict[str, Any]:
    g, first, w = arrays(case)
    tx = nora(len(case.shape), case.reduction, case.dtypes[1], "pallas")
    _, state = jax.jit(tx.update)(first, tx.init(w), w)
    updates, after = jax.jit(tx.update)(g, state, w)
    step = jax.jit(tx.step, donate_argnums=(1, 2))
    runs = []
    for _ in range(2):
        given = jax.tree.map(jnp.copy, (state, w))
        before = pointers(given)
        new_w, new_state = step(g, *given)
        runs.append((new_w, momentum(new_state)))
    with jax.enable_x64(True):
        wide = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float64))
        exact = nora(len(case.shape), case.reduction, "float64", "xla")
        begin: Any = exact.init(wide(w))
        begin = optax.tree.set(begin, _is_ours, mu=wide(momentum(state)))
        want, want_state = jax.jit(exact.update)(wide(g), begin, wide(w))
        want, want_mu = np.asarray(want), np.asarray(momentum(want_state))

    def length(x: Any) -> Any:
        return np.sqrt(np.sum(np.square(x), axis=case.reduction, keepdims=True))

    u, v = np.float64(updates), np.float64(w)
    eps = [float(jnp.finfo(d).eps) for d in case.dtypes]
    row: dict[str, Any] = {
        "shape": " × ".join(map(str, case.shape)),
        "reduction": str(case.reduction),
        "dtypes": ", ".join(case.dtypes),
        "rho": case.rho,
        "momentum": np.max(np.abs(np.float64(momentum(after)) - want_mu) / (np.abs(want_mu) + 0.1))
        / eps[1],
        "update": np.max(length(u - want) / length(want)) / eps[2],
        "leak": np.max(np.abs(np.sum(u * v, axis=case.reduction, keepdims=True)) / length(v))
        / (RATE * eps[2]),
        "step": np.max(np.abs(np.float64(runs[0][0]) - v - u) / (np.abs(v) + np.abs(u))) / eps[2],
        "same_bits": all(np.array_equal(a, b) for a, b in zip(*runs, strict=True)),
        # Of a leaf alone: the interpreter's copies are not the kernels'.
        "in_place": pointers(runs[1]) == before or jax.default_backend() != "gpu",
    }
    # The direction has the digits that the gradient has across the weight: eps / rho, see
    # docs/numerics.md; a rounding to bfloat16 counts once.
    row["ok"] = (
        row["momentum"] <= 1
        and row["update"] <= 1.7 + 1.2e-7 / case.rho / eps[2]
        and row["leak"] <= 1
        and row["step"] <= 1
        and row["same_bits"]
        and row["in_place"]
    )
    return row


class BlockCase(NamedTuple):
    shape: tuple[int, ...]
    reduction: tuple[int, ...]
    dtypes: tuple[str, str, str]
    block_rows: int


BLOCK_COLUMNS = {
    "shape": "shape",
    "reduction": "row axes",
    "dtypes": "gradient, momentum, weight",
    "block_rows": "block rows",
    "update": "update, of itself|.1e",
    "length": "length of rows, of itself|.1e",
    "same_bits": "same bits",
    "in_place": "in place",
    "ok": "ok",
}


def check_blocks(case: BlockCase) -> dict[str, Any]:
    """A step with blocks by kernels against XLA's in float64."""
    g, _, w = arrays(Case(case.shape, case.reduction, case.dtypes, 1.0))
    tx = nora(len(case.shape), case.reduction, case.dtypes[1], "pallas", case.block_rows)
    updates, _ = jax.jit(tx.update)(g, tx.init(w), w)
    step = jax.jit(tx.step, donate_argnums=(1, 2))
    runs = []
    for _ in range(2):
        given = jax.tree.map(jnp.copy, (tx.init(w), w))
        before = pointers(given)
        new_w, new_state = step(g, *given)
        runs.append((new_w, momentum(new_state)))
    with jax.enable_x64(True):
        wide = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float64))
        exact = nora(len(case.shape), case.reduction, "float64", "xla", case.block_rows)
        want = np.asarray(jax.jit(exact.update)(wide(g), exact.init(wide(w)), wide(w))[0])

    def length(x: Any) -> Any:
        return np.sqrt(np.sum(np.square(x), axis=case.reduction, keepdims=True))

    u, eps = np.float64(updates), float(jnp.finfo(case.dtypes[2]).eps)
    row: dict[str, Any] = {
        **case._asdict(),
        "shape": " × ".join(map(str, case.shape)),
        "reduction": str(case.reduction),
        "dtypes": ", ".join(case.dtypes),
        "update": np.max(length(u - want) / length(want)),
        "length": np.max(np.abs(length(u) / RATE - 1)),
        "same_bits": all(np.array_equal(a, b) for a, b in zip(*runs, strict=True)),
        "in_place": pointers(runs[1]) == before or jax.default_backend() != "gpu",
    }
    # 2e-2: tests/tolerance.py. A momentum of bfloat16 is made orthonormal as it is stored:
    # half its eps, for each condition.
    stored = float(jnp.finfo(case.dtypes[1]).eps)
    row["ok"] = (
        row["update"] <= 2e-2 + eps + 30 * (stored if stored > 1e-6 else 0)
        and row["length"] <= 2e-6 + eps
        and row["same_bits"]
        and row["in_place"]
    )
    return row


class MeshCase(NamedTuple):
    axes: str
    spec: Any
    shape: tuple[int, ...]
    reduction: tuple[int, ...]


def check_mesh(case: MeshCase) -> dict[str, Any]:
    """The step on all devices against the step on one."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType[case.axes],))
    g, _, w = arrays(Case(case.shape, case.reduction, FLOAT32, 1.0))
    tx = nora(len(case.shape), case.reduction, None, "pallas")
    want, _ = jax.jit(tx.step)(g, tx.init(w), w)
    g, placed = jax.device_put((g, w), NamedSharding(mesh, case.spec))
    program = jax.jit(tx.step).lower(g, tx.init(placed), placed).compile()
    got, _ = program(g, tx.init(placed), placed)
    sent = collective_bytes(program.as_text() or "")
    split = any(axis < len(case.spec) and case.spec[axis] for axis in case.reduction)
    error = np.abs(np.float64(got) - np.float64(want))
    worst = np.max(error / (np.abs(np.float64(w)) + RATE)) / float(jnp.finfo(jnp.float32).eps)
    same_place = got.sharding.is_equivalent_to(placed.sharding, placed.ndim)
    return {
        "axes": case.axes,
        "spec": str(tuple(case.spec)),
        "shape": " × ".join(map(str, case.shape)),
        "reduction": str(case.reduction),
        "step": worst,
        "sent": dict(sent),
        "ok": worst <= 1 and same_place and set(sent) <= ({"all-reduce"} if split else set()),
    }


def main(args: Args) -> bool:
    shapes = SMALL if args.small else SMALL + LARGE
    cases = [Case(*shape, dtypes, 1.0) for shape in shapes for dtypes in (FLOAT32, BFLOAT16)]
    cases += [Case(*shape, FLOAT32, 1e-3) for shape in shapes]
    cases += [Case(*shape, dtypes, 1.0) for shape in SMALL for dtypes in MIXED]
    rows = measure.rows_with_progress("cases", cases, check, None)
    measure.show(f"kernels against float64, {measure.machine()['device']}", COLUMNS, rows)
    blocks = (16, 32) if args.small else (32, 64, 128, 256)
    block_cases = [
        BlockCase(*shape, dtypes, b)
        for shape in (SMALL[:5] if args.small else LARGE[:6])
        for dtypes in (FLOAT32, BFLOAT16, MIXED[0])
        for b in blocks
    ]
    block_rows = measure.rows_with_progress("blocks", block_cases, check_blocks, None)
    measure.show("blocks against float64", BLOCK_COLUMNS, block_rows)
    rows += block_rows
    count = len(jax.devices())
    if count > 1:
        n = 8 * count if args.small else 512 * count
        specs = (P(), P("x"), P(None, "x"), P(None, None, "x"))
        mesh_cases = [
            MeshCase(axes, spec, (count, n, n + count), (axis,))
            for axes, spec, axis in itertools.product(("Auto", "Explicit"), specs, (1, 2))
        ]
        mesh_rows = measure.rows_with_progress("meshes", mesh_cases, check_mesh)
        measure.show(f"{count} devices against one", MESH_COLUMNS, mesh_rows)
        rows += mesh_rows
    wrong = sum(not row.get("ok") for row in rows)
    measure.console.print(f"{len(rows)} cases, {wrong} wrong")
    return wrong == 0


if __name__ == "__main__":
    sys.exit(not main(tyro.cli(Args, description=__doc__)))
