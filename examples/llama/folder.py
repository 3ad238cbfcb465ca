"""Folders that appear whole, and that one process at a time may write to."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from examples.llama.config import UserError

LOCK = ".lock"
BEGUN = {LOCK, "tokenizer.json", "config.json.partial"}  # what a run has before its settings


def _lock(folder: Path) -> IO | None:
    """Locks a folder for as long as the file is open: a killed process holds nothing."""
    file = (folder / LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
            return file
    except OSError:  # another process has it, or has just removed the folder
        pass
    file.close()
    return None


def _check_new(folder: Path, resume: bool) -> None:
    if not resume and {path.name for path in folder.iterdir()} - BEGUN:
        raise UserError(f"{folder} already holds a run: choose another --name, or --resume")


@contextmanager
def claimed(folder: Path, resume: bool) -> Iterator[None]:
    """The folder of a run is this process's alone; a new one that stays without settings goes.

    Args:
        folder: of the run.
        resume: whether it must be there already, or must not.

    Raises:
        UserError: it is in use, or it holds what may not be overwritten.
    """
    if resume and not (folder / "config.json").exists():
        raise UserError(f"{folder} holds no run to resume")
    folder.mkdir(parents=True, exist_ok=True)
    _check_new(folder, resume)  # before anything is written to it
    held = _lock(folder)
    if held is None:
        raise UserError(f"{folder} is in use by a run that goes on: choose another --name")
    with held:
        _check_new(folder, resume)
        try:
            yield
        finally:
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is done, unless another was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for stale in folder.parent.glob(f"{folder.name}.partial-*"):  # of processes that were killed
        if held := _lock(stale):
            shutil.rmtree(stale, ignore_errors=True)
            held.close()
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    held = _lock(partial)
    try:
        yield partial
        (partial / LOCK).unlink()
        partial.chmod(0o755)  # temporary folders are their maker's alone
        if not folder.exists():
            partial.rename(folder)
    finally:
        if held:
            held.close()
        shutil.rmtree(partial, ignore_errors=True)
