"""What the compiler for TPUs makes of one optimizer step: ``python -m benchmarks.tpu``.

Nothing runs, so no TPU is needed, but ``pip install libtpu`` is. For XLA's programs cycles are the
compiler's estimate of all that it fused. For kernels they are the instructions that it scheduled,
and do not count waiting: bytes move meanwhile.
"""

import math
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from benchmarks import ahead, measure
from benchmarks.sets import Llama, RowsAlong, StepName, matrices
from optax_nora._tpu_kernels import LANES

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")
_SHAPE = re.compile(r"= \(\w+\[(\d+),(\d+),(\d+)\]")  # of the first of several results


@dataclass(frozen=True)
class Args:
    """Compile one step of each optimizer on the matrices of a LLaMA, layers stacked."""

    topology: str = "v5e:2x2"
    """Of which TPUs, as `jax.experimental.topologies` has it; the first one is compiled for."""
    layers: int = 8
    """Of the model."""
    width: int = 2048
    """Of the model."""
    mlp_width: int = 5632
    """Of the model."""
    optimizers: tuple[StepName, ...] = ("adamw", "step-xla", "step-pallas", "muon-bfloat16")
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
    "xla_cycles": "XLA, Mcycles|.1f",
    "kernel_cycles": "kernels, Mcycles|.1f",
    "kernels": "kernels",
    "temporary_mib": "temporaries, MiB|,.0f",
    "compile_seconds": "compile, s|.1f",
}


def scheduled(folder: Path, rows: RowsAlong, block_rows: int) -> dict[tuple[int, ...], int]:
    """Instructions of the kernels that were compiled, by the shape of their array."""
    found: dict[tuple[int, ...], int] = {}
    for path in folder.glob("*schedule-analysis_final_bundles.txt"):
        text = path.read_text()
        shape, bundles = _SHAPE.search(text), _BUNDLES.search(text)
        if "tpu_custom_call" in text and shape and bundles:
            batch, lines, columns = map(int, shape.groups())
            tiles = -(-(columns if rows == "first" else lines) // max(LANES, block_rows))
            # The whole program, which is short, names a kernel too.
            total = max(int(bundles[1]) * batch * tiles, found.get((batch, lines, columns), 0))
            found[batch, lines, columns] = total
    return found


def compiled(case: ahead.Case, args: Args, folder: Path) -> dict[str, Any]:
    """One case, in a process of its own: libtpu reads what it is told when it is loaded."""
    kernels = case.optimizer == "step-pallas"
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true" if kernels else ""
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: so that it looks for none
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    jax.config.update("jax_platforms", "cpu")
    topology = ahead.topology(args.topology, "libtpu", args.topology, platform="tpu")
    program, seconds = ahead.compiled(topology, model(args), case)
    shapes = matrices(model(args), "stacked", case.rows)
    hlo, memory = program.as_text() or "", program.memory_analysis()
    found = scheduled(folder, case.rows, case.block_rows or 1)
    return {
        **case._asdict(),
        "xla_cycles": sum(map(int, _ESTIMATE.findall(hlo))) / 1e6,
        "kernel_cycles": sum(found.get(shape, 0) for shape in shapes.values()) / 1e6,
        "kernels": hlo.count('custom_call_target="tpu_custom_call"'),
        "temporary_mib": memory.temp_size_in_bytes / 2**20 if memory is not None else None,
        "compile_seconds": seconds,
    }


def model(args: Args) -> Llama:
    return Llama(args.layers, args.width, args.mlp_width)


def run(case: ahead.Case, args: Args) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn) as pool,
    ):
        return pool.submit(compiled, case, args, Path(folder)).result()


def main(args: Args) -> list[dict[str, Any]]:
    measure.check_counts(
        layers=args.layers,
        width=args.width,
        mlp_width=args.mlp_width,
        block_rows=args.block_rows,
    )
    cases = ahead.cases(args.rows, args.optimizers, args.block_rows)
    rows = measure.rows_with_progress("compiling", cases, lambda case: run(case, args))
    weights = sum(math.prod(s) for s in matrices(model(args), "stacked", "first").values())
    measure.show(f"one step of {weights / 1e6:.0f}M weights, {args.topology}", COLUMNS, rows)
    measure.write_json(args.out, {"machine": measure.machine(), "weights": weights, "steps": rows})
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
