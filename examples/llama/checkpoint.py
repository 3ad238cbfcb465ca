"""Checkpoints: parameters, optimizer state, place in the data, and the configuration of the run."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from examples.llama.config import UserError


class Checkpoints:
    """Asynchronous, atomic checkpoints of a run, the last `keep` of them kept."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self.folder = folder
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.close()  # waits for what is being written

    def save(self, step: int, state: Any, data: dict, config: dict) -> None:
        """Starts to write; returns before it is done."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(data),
            config=ocp.args.JsonSave(config),
        )
        self.manager.save(step, args=args)

    def restore(self, like: Any) -> tuple[Any, dict]:
        """The last checkpoint, as `like` (shapes, dtypes, shardings), and the place in the data."""
        step = self.manager.latest_step()
        if step is None:
            raise UserError(f"{self.folder} holds no checkpoint to resume from")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), data=ocp.args.JsonRestore())
        restored = self.manager.restore(step, args=args)
        return restored["state"], restored["data"]
