"""Checkpoints: parameters, optimizer state, place in the data, and the settings of the run."""

import math
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from examples.llama import checksums
from examples.llama.config import UserError
from examples.llama.terminal import line, silence

READ = ocp.args.JsonRestore()
MEND = "a run keeps its settings: leave the flags out, or start anew with another --name"


class Checkpoints:
    """Asynchronous, atomic checkpoints of a run, the last `keep` of them kept.

    Args:
        folder: where they are.
        keep: how many.
        identity: of the run; a checkpoint of another one is not resumed from.
        timeout: seconds in which other processes must have written their part too.
    """

    def __init__(self, folder: Path, keep: int, identity: dict, timeout: float = 60):
        self.folder, self.identity, self.failed = folder, identity, False
        silence("absl", "asyncio")  # through which orbax speaks
        sys.unraisablehook = _without_echo
        for path in folder.glob("[0-9]*"):
            with suppress(OSError):
                path.rmdir()  # what is empty is no checkpoint
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, async_options=ocp.AsyncOptions(timeout_secs=math.ceil(timeout))
        )
        with self._writing():
            self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.failed:  # other processes may wait for this one, and this one would for them
            return
        with self._writing():
            self.manager.wait_until_finished()
            self.manager.close()

    def save(self, step: int, state: Any, place: dict) -> None:
        """Starts to write, and returns before it is done; what is there already is left alone.

        Args:
            step: steps done.
            state: any tree of arrays.
            place: in the data, as JSON.

        Raises:
            UserError: the state is not finite, or what was saved before could not be written.
        """
        if step in self.manager.all_steps():
            return
        leaves, bad = checksums.of_state(state)
        if bad:
            raise UserError(
                f"step {step}: {bad[0]} is not finite, and is not saved; {self._last()}"
            )
        parts = {"place": place, "identity": self.identity}
        sums = leaves | {part: checksums.of_json(value) for part, value in parts.items()}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            place=ocp.args.JsonSave(place),
            identity=ocp.args.JsonSave(self.identity),
            checksums=ocp.args.JsonSave(sums),
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

    def read_back(self, step: int) -> None:
        """Waits until all is written, and reads the small parts of a checkpoint.

        Raises:
            UserError: they are not what was written.
        """
        self.wait()
        self._parts(step, identity=READ, place=READ)

    @contextmanager
    def _writing(self):
        # What a save that goes on in the background meets, orbax raises from any later call.
        try:
            yield
            self.manager.check_for_errors()
        except (OSError, ValueError, RuntimeError) as error:
            self.failed = True
            while isinstance(error.__context__, Exception):
                error = error.__context__  # what began it
            raise UserError(
                f"a checkpoint cannot be written to {self.folder}: {line(error)}; {self._last()}"
            ) from None

    def _last(self) -> str:
        steps = self.steps() if hasattr(self, "manager") else []
        return f"the last good one is step {steps[-1]}" if steps else "there is none before it"

    def steps(self) -> list[int]:
        """Those that there are checkpoints of."""
        return sorted(self.manager.all_steps())

    def restore(self, like: Any) -> tuple[Any, dict]:
        """The state and the place in the data of the last checkpoint.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with the shardings wanted, any mesh's.

        Raises:
            UserError: it is broken, or of another run.
        """
        *before, step = self.steps()
        try:
            self._compare(step)
            return self._read(step, like)
        except _BrokenError as error:
            for other in reversed(before):
                with suppress(_BrokenError):
                    self._read(other, like)
                    offer = f"step {other} is whole: to go on from it, move {step} elsewhere"
                    raise UserError(f"{error}; {offer}") from error
            raise UserError(f"{error}; there is no other that is whole") from error

    def _compare(self, step: int) -> None:
        then = self._parts(step, identity=READ)["identity"]
        free = {"text"} - self.identity.keys()
        names = sorted((self.identity.keys() | then.keys()) - free)
        pairs = ((name, self.identity.get(name), then.get(name)) for name in names)
        if changed := [f"{name} is {now}, was {was}" for name, now, was in pairs if now != was]:
            where = f"checkpoint {self.folder / str(step)}"
            raise UserError(f"{where} is of another run: {'; '.join(changed)}; {MEND}")

    def _read(self, step: int, like: Any) -> tuple[Any, dict]:
        read = self._parts(step, place=READ, state=ocp.args.StandardRestore(like))
        now, _ = checksums.of_state(read["state"])
        self._match(step, read["checksums"], now)
        return read["state"], read["place"]

    def _parts(self, step: int, **items: Any) -> Any:
        """Items of a checkpoint, those that are JSON compared with their checksums."""
        try:
            args = ocp.args.Composite(checksums=READ, **items)
            read = self.manager.restore(step, args=args)
        except Exception as error:  # orbax and tensorstore raise many kinds for a broken file
            raise _BrokenError(f"{self._path(step)} cannot be read: {line(error)}") from error
        parts = [name for name, how in items.items() if how is READ]
        self._match(step, read["checksums"], {p: checksums.of_json(read[p]) for p in parts})
        return read

    def _match(self, step: int, saved: dict, now: dict) -> None:
        if changed := [name for name in now if saved.get(name) != now[name]]:
            more = f" and {len(changed) - 1} more" if changed[1:] else ""
            raise _BrokenError(
                f"{self._path(step)} cannot be used: {changed[0]}{more} is not what was saved"
            )

    def _path(self, step: int) -> str:
        return f"checkpoint {self.folder / str(step)}"


def _without_echo(unraisable: Any) -> None:
    """Of a write that failed, which we tell of, tensorstore tells a loop of orbax that is gone."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


class _BrokenError(UserError):
    """A checkpoint is not what was written."""
