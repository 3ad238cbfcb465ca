"""One optimizer step in float32, layers stacked, compiled for a device that is not here."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.sets import Llama, RowsAlong, StepName, dimension_numbers, matrices
from benchmarks.step import stepper


class Case(NamedTuple):
    rows: RowsAlong
    optimizer: StepName
    block_rows: int | None  # None: no Nora


def cases(
    rows: Sequence[RowsAlong], optimizers: Sequence[StepName], block_rows: Sequence[int]
) -> list[Case]:
    """All combinations: of blocks for Nora alone."""
    return [
        Case(along, name, size)
        for along in rows
        for name in optimizers
        for size in (block_rows if name.startswith(("nora", "step")) else (None,))
    ]


def topology(device: str, needs: str, *args: Any, **options: Any) -> Any:
    """As `jax.experimental.topologies.get_topology_desc`, or a line that says what it needs."""
    try:
        return topologies.get_topology_desc(*args, **options)
    except Exception as error:  # of several kinds
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"error: cannot compile for {device}: {reason}; is {needs} installed?"
        ) from None


def compiled(topology: Any, model: Llama, case: Case) -> tuple[Any, float]:
    """The program for the first device, and the seconds that it took to compile."""
    numbers = dimension_numbers("stacked", case.rows)
    init, step = stepper(case.optimizer, numbers, case.block_rows)
    place = NamedSharding(Mesh(topology.devices[:1], ("one",)), PartitionSpec())

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    shapes = matrices(model, "stacked", case.rows)
    params = placed({name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()})
    state = placed(jax.eval_shape(init, params))
    start = time.perf_counter()
    program = jax.jit(step, donate_argnums=0).lower((params, state), params).compile()
    return program, time.perf_counter() - start
