"""Several processes that train one model: they meet, agree, and end together."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.llama.config import HostsConfig, UserError
from examples.llama.terminal import leave, line

T = TypeVar("T")
LOOK, GRACE = 1.0, 5.0  # seconds between looks for a failure, and from one to the end of the others
FAILED = ".failed"


def start(hosts: HostsConfig) -> None:
    """Meets the other processes, where there are any; jax must not have been used before."""
    if hosts.coordinator is None:
        return
    whom = "another process" if hosts.index == 0 else f"process 0 at {hosts.coordinator}"
    text = f"error: {whom} has not come within {hosts.timeout:g} s (--hosts.timeout)"
    # jax would end this process itself, with a page of C++: its own limit comes later.
    late = threading.Timer(hosts.timeout, lambda: leave(text, 1))
    late.daemon = True
    late.start()
    auto = hosts.coordinator == "auto"
    try:
        jax.distributed.initialize(
            None if auto else hosts.coordinator,
            hosts.count,
            hosts.index,
            initialization_timeout=int(10 * hosts.timeout) + 60,
            heartbeat_timeout_seconds=60,
            shutdown_timeout_seconds=30,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"hosts.coordinator {hosts.coordinator}: {line(error)}") from None
    finally:
        late.cancel()


def exchange(value: str) -> list[str]:
    """What each process gives."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(value.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(int(sizes.max()) + 1, np.uint8)
    padded[: len(data)] = data
    found = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(found, sizes, strict=True)]


def agree(values: dict[str, Any]) -> None:
    """Raises UserError, on all processes, unless all of them have these values."""
    first, *others = map(json.loads, exchange(json.dumps(values)))
    for i, other in enumerate(others, 1):
        if changed := [f"{k} is {other[k]}, not {first[k]}" for k in first if other[k] != first[k]]:
            raise UserError(f"process {i} was started otherwise than process 0: {changed[0]}")


def together(work: Callable[[], T]) -> T:
    """Does something on every process; what fails on one fails on all of them."""
    try:
        result = work()
    except BaseException as error:
        exchange(line(error))
        raise
    for i, text in enumerate(exchange("")):
        if text:
            raise UserError(f"process {i}: {text}")
    return result


def first(work: Callable[[], T]) -> T | None:
    """Does something on the first process, while the others wait."""
    return together(work if jax.process_index() == 0 else lambda: None)


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """What fails on one process here ends all of them; they see it in `folder`, which is shared."""
    if jax.process_count() == 1:
        yield
        return
    path, ended = folder / FAILED, threading.Event()
    first(lambda: path.unlink(missing_ok=True))

    def look() -> None:
        while not ended.wait(LOOK):
            # Most failures come to all processes, each of which then leaves by itself.
            if path.exists() and not ended.wait(GRACE):
                leave(f"error: {path.read_text() or 'another process failed'}", 1)

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            if not path.exists():
                path.write_text(f"process {jax.process_index()}: {line(error)}")
        raise
    finally:
        ended.set()
