"""What a command says on the terminal, and how it ends."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.llama.config import UserError

console = Console(highlight=False)
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # as shells have it


def say(text: str) -> None:
    """Prints a line as it is, above the progress bar where there is one."""
    console.print(text, markup=False, soft_wrap=True)


def silence(*libraries: str) -> None:
    """What they meet, we say."""
    for library in libraries:
        logging.getLogger(library).setLevel(logging.CRITICAL)


def line(error: BaseException) -> str:
    """What an error of another library says, on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def training_bar(**options: Any) -> Progress:
    """A bar for steps, with their loss and their speed."""
    return Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        **options,
    )


def counter(what: str) -> Progress:
    """Counts documents and bytes of text, of which nobody knows beforehand how many there are."""
    columns = (
        TextColumn(what),
        TextColumn("{task.completed:,} documents"),
        TextColumn("{task.fields[size]}"),
    )
    return Progress(*columns, console=console)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs a command: what the user can mend is one line on stderr, and exit status 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # cleans up on its way out
    try:
        main(sys.argv[1:])
    except UserError as error:
        if jax.distributed.is_initialized():
            leave(f"error: {error}", 1)
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        leave("error: interrupted", INTERRUPTED)


def leave(text: str, status: int) -> None:
    """Ends this process with a line on stderr, and waits for no thread and no other process."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
