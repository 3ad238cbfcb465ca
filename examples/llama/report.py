"""What is seen of a run: lines on the terminal, a progress bar, metrics.jsonl."""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.llama.evaluate import HeldOut
from optax_nora import RowGeometry

console = Console(highlight=False)


def _until(done: int, path: Path) -> list[dict]:
    """Cuts off what came after step `done`, which is going to be done again."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line["step"] <= done and done]
    whole = path.with_suffix(".tmp")
    whole.write_text("".join(json.dumps(line) + "\n" for line in kept))
    whole.replace(path)
    return kept


class Report:
    """Writes metrics.jsonl and draws progress. Only the first process does either.

    Seconds count training alone: `aside` leaves out evaluations, checkpoints and the compile.
    """

    def __init__(self, folder: Path, steps: int, done: int, tokens_a_step: int):
        self.tokens_a_step = tokens_a_step
        path = folder / "metrics.jsonl" if jax.process_index() == 0 else Path(os.devnull)
        kept = _until(done, path)
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        self.file = path.open("a")
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=jax.process_index() > 0,
        )
        self.task = self.progress.add_task("", total=steps, completed=done, loss="-", speed="-")
        self.timed_step, self.clock = done, time.perf_counter()

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()
        self.file.close()

    def write(self, step: int, **values) -> None:
        line = {
            "step": step,
            "tokens": step * self.tokens_a_step,
            "seconds": round(self.seconds, 2),
        }
        self.file.write(json.dumps(line | values) + "\n")
        self.file.flush()

    def training(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """The metrics of a step, for which this waits."""
        values = {name: value.item() for name, value in metrics.items() if name != "bad"}
        passed = time.perf_counter() - self.clock
        speed = (step - self.timed_step) * self.tokens_a_step / passed
        self.seconds += passed
        self.timed_step, self.clock = step, time.perf_counter()
        self.write(step, **values, tokens_per_second=round(speed))
        shown = {"loss": f"{values['loss']:.3f}", "speed": f"{speed:,.0f}"}
        self.progress.update(self.task, completed=step, **shown)

    def held_out(self, step: int, result: HeldOut, **more) -> None:
        values = {"held_out_loss": result.loss, "held_out_perplexity": result.perplexity}
        self.write(step, **values, **more)
        text = f"{result.loss:.4f} nats a token, perplexity {result.perplexity:,.1f}"
        console.print(f"step {step:>6,}: held-out loss {text}")

    def rows(self, step: int, geometry: dict[str, RowGeometry]) -> None:
        """What the rows of every matrix do after a step."""
        values = {
            path: {name: x.item() for name, x in measured._asdict().items() if x is not None}
            for path, measured in geometry.items()
        }
        self.write(step, rows=values)

    @contextmanager
    def aside(self):
        """Time that is not training's."""
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start
