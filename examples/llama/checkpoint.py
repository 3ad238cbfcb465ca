"""Checkpoints: parameters, optimizer state, place in the data, and the settings of the run."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from examples.llama.config import UserError


class Checkpoints:
    """Asynchronous, atomic checkpoints of a run, the last `keep` of them kept.

    Args:
        folder: where they are.
        keep: how many.
        identity: of the run; a checkpoint of another one is not resumed from.
    """

    def __init__(self, folder: Path, keep: int, identity: dict):
        self.folder, self.identity = folder, identity
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._writing():
            self.manager.wait_until_finished()
            self.manager.close()

    def save(self, step: int, state: Any, place: dict) -> None:
        """Starts to write, and returns before it is done; what is there already is left alone.

        Args:
            step: steps done.
            state: any tree of arrays.
            place: in the data, as JSON.
        """
        if step in self.manager.all_steps():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            place=ocp.args.JsonSave(place),
            identity=ocp.args.JsonSave(self.identity),
        )
        self.wait()
        with self._writing():
            self.manager.save(step, args=items)

    def wait(self) -> None:
        """Until all is written.

        Raises:
            UserError: it could not be written; the checkpoints before it are whole.
        """
        with self._writing():
            self.manager.wait_until_finished()

    @contextmanager
    def _writing(self):
        # What a save that goes on in the background meets, orbax raises from any later call.
        try:
            yield
            self.manager.check_for_errors()
        except (OSError, ValueError) as error:
            raise UserError(
                f"a checkpoint cannot be written to {self.folder}: {_line(error)}; the last good "
                f"one is step {self.manager.latest_step()}"
            ) from None

    def any(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return self.manager.latest_step() is not None

    def restore(self, like: Any) -> tuple[Any, dict]:
        """The state and the place in the data of the last checkpoint.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with the shardings wanted, any mesh's.

        Raises:
            UserError: it is broken, or of another run.
        """
        step = self.manager.latest_step()
        where = f"checkpoint {self.folder / str(step)}"
        then = self._read(where, step, identity=ocp.args.JsonRestore())["identity"]
        names = sorted(self.identity.keys() | then.keys())
        pairs = ((name, self.identity.get(name), then.get(name)) for name in names)
        if changed := [f"{name} is {now}, was {was}" for name, now, was in pairs if now != was]:
            raise UserError(f"{where} is of another run: {'; '.join(changed)}")
        items = {"state": ocp.args.StandardRestore(like), "place": ocp.args.JsonRestore()}
        restored = self._read(where, step, **items)
        return restored["state"], restored["place"]

    def _read(self, where: str, step: int | None, **items) -> Any:
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax and tensorstore raise many kinds for a broken file
            raise UserError(f"{where} cannot be read: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
