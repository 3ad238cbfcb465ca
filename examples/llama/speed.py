"""How fast a run would be, with train.py's flags: `python -m examples.llama.speed --preset 60m`.

Prints a line of JSON: the time of a step whose batch is read from text, of one whose batch is there
already, and of the optimizer alone. The first two differ by what a step waits for data.
"""

import json
import statistics
import time
from collections.abc import Callable

import jax

from examples.llama import check, cli
from examples.llama.prepare import prepare
from examples.llama.report import flops_a_token, peak_flops
from examples.llama.terminal import run_main
from examples.llama.trainer import Trainer

STEPS, REPEATS = 10, 5


def seconds_a_step(step: Callable[[], dict]) -> float:
    """The median over repeats of many steps each, sent off without waiting for one another."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(STEPS):
            metrics = step()
        jax.block_until_ready(metrics)
        times.append((time.perf_counter() - start) / STEPS)
    return statistics.median(times)


def measure(trainer: Trainer) -> dict:
    """The speed of `trainer`, which this starts and takes some steps with."""
    config = trainer.config
    tokens = config.batch * config.model.context

    def same_batch() -> dict:
        trainer.state, metrics = trainer.program.train(trainer.state, trainer.tokens, trainer.rates)
        return metrics

    trainer.start()
    start = time.perf_counter()
    jax.block_until_ready(trainer.advance())
    compiled = time.perf_counter() - start
    text, batch = seconds_a_step(trainer.advance), seconds_a_step(same_batch)
    memory = jax.local_devices()[0].memory_stats() or {}  # CPUs do not tell
    peak = peak_flops()
    return {
        "tokens_per_second": round(tokens / text),
        "mfu": peak and round(tokens / text * flops_a_token(config.model) / peak, 4),
        "step_seconds": text,
        "step_seconds_same_batch": batch,
        "optimizer_seconds": trainer.optimizer_seconds(),
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "compile_seconds": round(compiled, 1),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
    }


def main(arguments: list[str]) -> None:
    config = cli.resolve(cli.parse(arguments))
    check.run(config)
    corpus = prepare(config.data, config.model.vocab_size)
    print(json.dumps({"flags": " ".join(arguments)} | measure(Trainer(config, corpus))))


if __name__ == "__main__":
    run_main(main)
