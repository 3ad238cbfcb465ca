"""Bytes that one step moves, as XLA compiles it for an H200: ``python -m benchmarks.passes``.

Nothing runs, so no GPU is needed, but ``pip install 'jax[cuda12]'`` is. Counted is what each
instruction of the compiled program reads and writes; caches and arithmetic are not.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import ahead, measure
from benchmarks.sets import SETS, RowsAlong, SetName, StepName, matrices
from optax_nora import _blocks

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""
# What moves nothing.
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", re.MULTILINE
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+))\[([\d,]*)\]")


@dataclass(frozen=True)
class Args:
    """Compile one step of each optimizer on the matrices of a LLaMA, float32, layers stacked."""

    set: SetName = "1B"
    """The model whose matrices are stepped."""
    optimizers: tuple[StepName, ...] = ("adamw", "step-xla", "muon-bfloat16")
    """As for `benchmarks.step`."""
    rows: tuple[RowsAlong, ...] = ("first", "last")
    """Rows along the first axis, as in a Flax kernel (in, out), or along the last."""
    block_rows: tuple[int, ...] = (1, 128)
    """Rows that Nora makes orthonormal together."""
    out: Path | None = None
    """JSON file to write. None given: the results are only shown."""


COLUMNS = {
    "rows": "rows along",
    "optimizer": "optimizer",
    "block_rows": "block rows",
    "bytes": "bytes a weight|.1f",
    "temporary": "temporaries, bytes a weight|.1f",
    "compile_seconds": "compile, s|.1f",
}


def size_of(types: str) -> int:
    """Bytes of an array, or of a tuple of some, as HLO writes their types."""
    return sum(
        math.prod(int(n) for n in shape.split(",") if n) * int(bits or 8) // 8
        for _, bits, shape in _ARRAY.findall(types)
    )


def moved(hlo: str) -> dict[str, int]:
    """Bytes that each instruction of a compiled program reads and writes, by its name."""
    entry = hlo[hlo.index("\nENTRY ") :]
    sizes, found = {}, {}
    for name, types, kind, operands in _INSTRUCTION.findall(entry[: entry.index("\n}")]):
        sizes[name] = size_of(types)
        if kind not in FREE:
            read = set(re.findall(r"%([\w.-]+)", operands))
            found[name] = sizes[name] + sum(sizes[operand] for operand in read)
    return found


def run(case: ahead.Case, args: Args, topology: Any) -> dict[str, Any]:
    model = SETS[args.set]
    program, seconds = ahead.compiled(topology, model, case)
    weights = sum(map(math.prod, matrices(model, "stacked", case.rows).values()))
    memory = program.memory_analysis()
    return {
        **case._asdict(),
        "bytes": sum(moved(program.as_text()).values()) / weights,
        "temporary": memory.temp_size_in_bytes / weights if memory is not None else None,
        "compile_seconds": seconds,
    }


def gpu() -> Any:
    """An H200, which need not be here."""
    # Without a driver the plugin would refuse to start.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    options = {"platform": "cuda", "target_config": H200, "topology": "1x1x1"}
    return ahead.topology("a GPU", "jax[cuda12]", **options)


def main(args: Args) -> list[dict[str, Any]]:
    measure.check_counts(block_rows=args.block_rows)
    cases = ahead.cases(args.rows, args.optimizers, args.block_rows)
    topology = gpu()
    _blocks._have_tensor_cores = lambda: True  # it asks the devices that are here
    rows = measure.rows_with_progress("compiling", cases, lambda case: run(case, args, topology))
    measure.show(f"one step of the {args.set} matrices, H200", COLUMNS, rows)
    measure.write_json(args.out, {"machine": measure.machine(), "steps": rows})
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
