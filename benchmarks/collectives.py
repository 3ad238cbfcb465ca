"""What one update sends between devices: ``python -m benchmarks.collectives``.

One update under FSDP is compiled for that many fake devices, and the collectives of the compiled
program are counted, once each: Muon's are in a loop of five, so its count is a lower bound. Nothing
runs, so any number of devices will do.
"""

import collections
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import measure
from benchmarks.sets import (
    SETS,
    OptimizerName,
    SetName,
    dimension_numbers,
    matrices,
    optimizer,
    row_axes,
)

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Args:
    """Count the bytes of the collectives in one compiled update."""

    set: SetName = "7B"
    """The model whose matrices are updated, layers stacked."""
    devices: tuple[int, ...] = (8, 64, 512)
    """Sizes of the mesh."""
    split: tuple[Literal["output", "reduction"], ...] = ("output", "reduction")
    """Split the axis that numbers the rows, or the axis that a row runs along."""
    optimizers: tuple[OptimizerName, ...] = ("adamw", "nora", "muon")
    block_rows: tuple[int, ...] = (1, 128)
    """Rows that Nora makes orthonormal together."""
    out: Path | None = None
    """JSON file to write. None given: the results are only shown."""


class Case(NamedTuple):
    devices: int
    split: Literal["output", "reduction"]
    optimizer: OptimizerName
    block_rows: int | None  # None: no Nora


COLUMNS = {
    "devices": "devices",
    "split": "split axis",
    "optimizer": "optimizer",
    "block_rows": "block rows",
    "bytes_a_row": "bytes a row|.1f",
    "all_reduce_mib": "all-reduce, MiB|,.1f",
    "all_gather_mib": "all-gather, MiB|,.1f",
    "other_mib": "other, MiB|,.1f",
    "count": "collectives",
}


def collective_bytes(hlo: str) -> collections.Counter[str]:
    """Bytes that come out of the collectives of a compiled program on one device, by kind."""
    found: collections.Counter[str] = collections.Counter()
    for shapes, kind in _COLLECTIVE.findall(hlo):
        for name, bits, dims in _ARRAY.findall(shapes):
            size = 1 if name == "pred" else int(bits) // 8
            found[kind] += size * math.prod(int(d) for d in dims.split(",") if d)
    return found


def run(case: Case, name: SetName) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[: case.devices]), ("fsdp",), axis_types=(AxisType.Auto,))
    numbers = dimension_numbers("stacked", "first")
    reduction, output = row_axes("stacked", "first")
    axis = output if case.split == "output" else reduction
    shapes = matrices(SETS[name], "stacked", "first")

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        # As trainers do: where the axis doesn't divide, the leaf is on every device whole.
        divides = len(shape) == 3 and shape[axis] % case.devices == 0
        spec = ["fsdp" if divides and i == axis else None for i in range(len(shape))]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def abstract(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape)), tree
        )

    tx = optimizer(case.optimizer, numbers, case.block_rows or 1)
    params = abstract({k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()})
    state = abstract(jax.eval_shape(tx.init, params))
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    compiled = jax.jit(tx.update, out_shardings=out).lower(params, state, params).compile()
    hlo = compiled.as_text() or ""
    found = collective_bytes(hlo)
    rows = sum(math.prod(s) // s[reduction] for s in shapes.values())
    return {
        **case._asdict(),
        **{f"{kind.replace('-', '_')}_mib": found[kind] / 2**20 for kind in KINDS},
        "other_mib": sum(found[kind] for kind in KINDS[2:]) / 2**20,
        "bytes_a_row": sum(found.values()) / rows,
        "count": len(_COLLECTIVE.findall(hlo)),
    }


def main(args: Args) -> list[dict[str, Any]]:
    measure.check_counts(devices=args.devices, block_rows=args.block_rows)
    cases = [
        Case(devices, split, chosen, block_rows)
        for devices in args.devices
        for split in args.split
        for chosen in args.optimizers
        for block_rows in (args.block_rows if chosen == "nora" else (None,))
    ]
    rows = measure.rows_with_progress("compiling", cases, lambda case: run(case, args.set))
    measure.show(f"one update of the {args.set} matrices, per device", COLUMNS, rows)
    measure.write_json(args.out, {"machine": measure.machine(), "set": args.set, "updates": rows})
    return rows


if __name__ == "__main__":
    parsed = tyro.cli(Args, description=__doc__)
    # Before the first use of jax: its CPU backend is made of as many devices as are asked for.
    flag = f"--xla_force_host_platform_device_count={max(parsed.devices)}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    jax.config.update("jax_platforms", "cpu")
    main(parsed)
