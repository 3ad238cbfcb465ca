"""Device time of a computation, the bandwidth it is held against, and how results are shown."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

# Tables that go to a file are as wide as they need be.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


class Timing(NamedTuple):
    seconds: float  # of one step, the median over the repeats
    temporary_bytes: int
    compile_seconds: float


def time_steps(
    step: Callable[[Any, Any], Any], carry: Any, constants: Any, *, seconds: float, repeats: int
) -> Timing:
    """The time of ``carry = step(carry, constants)`` on the device.

    Short steps run many to a jit, so that neither launches nor the host's clock count. Long ones
    are dispatched ahead of the device, as a loop may copy what it carries. ``seconds`` is how long
    one repeat lasts, about; ``carry`` is donated, and lost.
    """
    start = time.perf_counter()
    one = jax.jit(step, donate_argnums=0).lower(carry, constants).compile()
    compile_seconds = time.perf_counter() - start
    carry = jax.block_until_ready(one(carry, constants))
    start = time.perf_counter()
    carry = jax.block_until_ready(one(carry, constants))
    took = time.perf_counter() - start
    steps = min(max(int(seconds / took), 1), 500)
    if took < 5e-3:

        def loop(carry: Any, constants: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda _, c: step(c, constants), carry)

        run, calls = jax.jit(loop, donate_argnums=0).lower(carry, constants).compile(), 1
    else:
        run, calls = one, steps
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(calls):
            carry = run(carry, constants)
        jax.block_until_ready(carry)
        if repeat > 0:  # the first one warms up
            times.append((time.perf_counter() - start) / steps)
    memory = one.memory_analysis()
    temporary = memory.temp_size_in_bytes if memory is not None else 0
    return Timing(statistics.median(times), temporary, compile_seconds)


def check_counts(**counts: int | Sequence[int]) -> None:
    """End with one line where a number of something is under 1, or there is none."""
    for name, given in counts.items():
        values = [given] if isinstance(given, int) else given
        if not values or min(values) < 1:
            raise SystemExit(f"error: {name.replace('_', '-')} is {given}: give at least 1")


def copy_bandwidth() -> float:
    """Bytes read and written a second by a pass over memory much larger than any cache."""
    size = 1 << (28 if jax.default_backend() == "gpu" else 24)
    x = jnp.linspace(0.5, 1.5, size, dtype=jnp.float32)
    timing = time_steps(lambda x, _: x * 0.999 + 1e-3, x, None, seconds=0.05, repeats=5)
    return 2 * 4 * size / timing.seconds


def machine() -> dict[str, Any]:
    """Where and with what the numbers were made."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def rows_with_progress(
    title: str,
    tasks: Sequence[Any],
    run: Callable[[Any], dict[str, Any]],
    threads: int | None = 1,
) -> list[dict[str, Any]]:
    """``run`` of every task, with a bar; a task that fails becomes a row that says why.

    With several threads, None for one a core, programs compile at the same time: not for timing.
    """

    def row(task: Any) -> dict[str, Any]:
        try:
            return run(task)
        except jax.errors.JaxRuntimeError as error:  # most often: out of memory
            return {**task._asdict(), "error": str(error).splitlines()[0]}

    rows = []
    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(threads) as pool:
        bar = progress.add_task(title, total=len(tasks))
        for found in pool.map(row, tasks):
            rows.append(found)
            progress.advance(bar)
    return rows


def show(title: str, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """A table; ``columns`` gives the heading and the format of each key, as ``heading|format``."""
    table = Table(title=title)
    for column in columns.values():
        table.add_column(column.partition("|")[0], justify="right")
    for row in rows:
        cells = [
            format(row[key], column.partition("|")[2]) if row.get(key) is not None else "-"
            for key, column in columns.items()
        ]
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(row)


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {path}")
