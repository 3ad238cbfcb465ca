"""Compares optimizers: `python -m examples.llama.sweep --grid GRID.yaml --out ROWS.jsonl`.

A grid is a list of tables of fields; where a field is a list, all combinations are run. A row is
written as each run ends, and a run whose row is there is skipped: a sweep can be stopped at any
time, and go on on another machine. Rates and seeds are arguments of the compiled step, so that all
runs that differ in them alone share one compile.
"""

import dataclasses
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
import yaml

from examples.llama import cli
from examples.llama.config import Config, UserError
from examples.llama.optimizers import recipe
from examples.llama.prepare import prepare
from examples.llama.train import Trainer

ARGUMENTS = ("learning_rate", "adam_learning_rate", "seed")  # of the compiled step


def read_grid(path: Path, base: list[str]) -> list[Config]:
    """The settings of every run, in the order of the file; `base` are flags for all of them."""
    try:
        tables = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"grid {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"grid {path} is not a list of tables of fields")
    configs = []
    for table in tables:
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        for values in itertools.product(*choices):
            own = cli.flags(dict(zip(table, values, strict=True)))
            configs.append(with_rates(cli.resolve(cli.parse([*base, *own]))))
    return configs


def with_rates(config: Config) -> Config:
    """With the recommended values written out, so that a row says what was run."""
    chosen = recipe(config)._asdict()
    return dataclasses.replace(config, **{k: v for k, v in chosen.items() if k != "make"})


def same_program(a: Config, b: Config) -> bool:
    """Whether two runs differ in arguments of the compiled step alone."""
    return dataclasses.replace(a, **{name: getattr(b, name) for name in ARGUMENTS}) == b


def run(trainer: Trainer) -> dict:
    """Trains once, and returns what came of it."""
    config = trainer.config
    trainer.start()
    training, held_out, seconds = [], [], 0.0
    while trainer.step < config.steps:
        clock = time.perf_counter()
        for _ in range(min(config.eval_every, config.steps - trainer.step)):
            metrics = trainer.advance()
            if trainer.step % config.log_every == 0:
                training.append((trainer.step, metrics["loss"]))
        jax.block_until_ready(trainer.state)
        seconds += time.perf_counter() - clock
        held_out.append((trainer.step, trainer.measure().loss, round(seconds, 2)))
        if int(trainer.state.bad) >= 0:  # a loss without end is a result as well
            held_out[-1] = (trainer.step, None, round(seconds, 2))
            break
    return {
        "held_out_loss": held_out[-1][1],
        "seconds": round(seconds, 2),
        "tokens_per_second": round(trainer.step * config.batch * config.model.context / seconds),
        "held_out": held_out,
        "training": [(step, loss.item()) for step, loss in training],
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
    }


def sweep(configs: list[Config], out: Path) -> None:
    """Runs what has no row yet, and appends a row as each run ends."""
    lines = out.read_text("utf-8").splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut off
    done = [row["run"] for row in rows]
    if len(rows) < len(lines):
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = None
    for number, config in enumerate(configs, 1):
        corpus = prepare(config.data, config.model.vocab_size)
        identity = cli.identity(config, corpus.identity)
        if identity in done:
            continue
        if trainer is None or not same_program(trainer.config, config):
            trainer = Trainer(config, corpus)
            trainer.start()
            trainer.advance()  # compiles, outside of what is timed
            trainer.measure()
        trainer = Trainer(config, corpus, trainer.program)
        row = {"run": identity} | run(trainer)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(identity)
        named = ", ".join(f"{name} {getattr(config, name)}" for name in ("optimizer", *ARGUMENTS))
        print(f"{number}/{len(configs)} {named}: held-out loss {row['held_out_loss']}", flush=True)


@dataclass(frozen=True)
class SweepConfig:
    """Run a grid; what follows `--` is for every run, as for train.py."""

    grid: Path
    """A YAML list of tables of fields; every combination of their lists is run, in this order."""
    out: Path
    """JSON lines, a row a run; appended to."""


def main(arguments: list[str]) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(SweepConfig, args=arguments[:split])
    configs = read_grid(options.grid, arguments[split + 1 :])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sweep(configs, options.out)


if __name__ == "__main__":
    cli.run_main(main)
