"""What is seen of a run: lines on the terminal, a progress bar, metrics.jsonl."""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from examples.llama import records
from examples.llama.cli import flatten
from examples.llama.config import Config, ModelConfig
from examples.llama.evaluate import HeldOut
from examples.llama.terminal import say, training_bar
from optax_nora import RowGeometry

METRICS = "metrics.jsonl"

# bfloat16 FLOP/s of one device, dense, from the vendors' data sheets
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops() -> float | None:
    """Of all devices together, where it is known."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return peak and peak * jax.device_count()


def _until(done: int, path: Path) -> list[dict]:
    """Cuts off what came after step `done`, which is going to be done again."""
    if not path.is_file():
        return []
    kept = [line for line in records.read(path) if line["step"] <= done and done]
    whole = path.with_suffix(".tmp")
    whole.write_text("".join(json.dumps(line) + "\n" for line in kept))
    whole.replace(path)
    return kept


def open_board(folder: Path, done: int):
    """A writer of TensorBoard's event files; what they hold of later steps is hidden."""
    from tensorboardX import SummaryWriter  # an extra

    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)


def flops_a_token(model: ModelConfig) -> float:
    """Of forward and backward pass: 6 a weight, and 6 a channel and position of causal attention.

    That is 2 a weight forward and 4 backward. A token attends to half of the context on average:
    scores and mixing are 2 * 2 * context / 2 * width forward. Rematerialization does not count.
    """
    attention = 2 * model.width * (model.heads + model.key_heads) * model.head_dim
    block = attention + 3 * model.width * model.mlp_width
    products = model.layers * block + model.vocab_size * model.width
    return 6 * products + 6 * model.layers * model.context * model.width


class Report:
    """Writes metrics.jsonl and draws progress. Only the first process does either.

    Seconds count training alone: `aside` leaves out evaluations and checkpoints.
    """

    def __init__(self, folder: Path, config: Config, done: int):
        self.tokens_a_step = config.batch * config.model.context
        peak = peak_flops()
        self.peak_speed = peak and peak / flops_a_token(config.model)
        path = folder / METRICS if jax.process_index() == 0 else Path(os.devnull)
        kept = _until(done, path)
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        self.timed_steps, self.timed_seconds = 0, 0.0  # of this process, the first step left out
        self.file = path.open("a")
        on = config.tensorboard and jax.process_index() == 0
        self.board = open_board(folder / "tensorboard", done) if on else None
        self.progress = training_bar(disable=jax.process_index() > 0)
        self.task = self.progress.add_task(
            "", total=config.steps, completed=done, loss="-", speed="-"
        )
        self.restart_clock(done)

    def restart_clock(self, step: int) -> None:
        """What passed since the last line, such as a compile, does not count."""
        self.timed_step, self.clock = step, time.perf_counter()

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()
        self.file.close()
        if self.board:
            self.board.close()

    def write(self, step: int, **values) -> None:
        line = {
            "step": step,
            "tokens": step * self.tokens_a_step,
            "seconds": round(self.seconds, 2),
        }
        self.file.write(json.dumps(line | values) + "\n")
        self.file.flush()
        if self.board:
            for name, value in flatten(values):
                self.board.add_scalar(name.replace(".", "/"), value, step)

    def training(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """The metrics of a step, for which this waits."""
        values = {name: value.item() for name, value in metrics.items() if name != "bad"}
        passed, steps = time.perf_counter() - self.clock, step - self.timed_step
        speed = steps * self.tokens_a_step / passed
        self.seconds += passed
        self.timed_seconds += passed
        self.timed_steps += steps
        self.restart_clock(step)
        values["tokens_per_second"] = round(speed)
        shown = f"{speed:,.0f} tokens/s"
        if self.peak_speed:
            values["mfu"] = round(speed / self.peak_speed, 4)
            shown += f", {speed / self.peak_speed:.0%} MFU"
        self.write(step, **values)
        loss = f"{values['loss']:.3f}"
        self.progress.update(self.task, completed=step, loss=loss, speed=shown)

    def held_out(self, step: int, result: HeldOut, **more) -> None:
        values = {"held_out_loss": result.loss, "held_out_perplexity": result.perplexity}
        if memory := jax.local_devices()[0].memory_stats():  # CPUs do not tell
            values["peak_bytes"] = memory["peak_bytes_in_use"]
        self.write(step, **values, **more)
        text = f"{result.loss:.4f} nats a token, perplexity {result.perplexity:,.1f}"
        say(f"step {step:>6,}: held-out loss {text}")

    def optimizer(self, step: int, seconds: float) -> None:
        """The optimizer's part of a step, where one was timed."""
        if not self.timed_steps:
            return
        whole = self.timed_seconds / self.timed_steps
        self.write(step, optimizer_seconds=seconds, optimizer_share=round(seconds / whole, 4))
        say(f"a step takes {whole:.3g} s, {100 * seconds / whole:.1f} % of it the optimizer")

    def rows(self, step: int, geometry: dict[str, RowGeometry]) -> None:
        """What the rows of every matrix do after a step."""
        values = {
            path: {name: x.item() for name, x in measured._asdict().items() if x is not None}
            for path, measured in geometry.items()
        }
        self.write(step, rows=values)

    @contextmanager
    def aside(self, state: Any):
        """Time that is not training's, from when the steps that lead to `state` have ended."""
        jax.block_until_ready(state)
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start
