"""Compares optimizers: `python -m examples.llama.sweep --grid GRID.yaml --out ROWS.jsonl`.

A grid is a list of tables of fields; where a field is a list, all combinations are run. `best` is
the value of that field in the best result of the same optimizer so far, `best*2` twice that. A
result is written as each run ends, and a run whose result is there is skipped: a sweep can be
stopped at any time, and go on on another machine. Rates, decay, steps and seeds are arguments of
the compiled step, so that all runs that differ in them alone share one compile.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import yaml

import optax_nora
from examples.llama import check, cli, records
from examples.llama.config import Config, UserError
from examples.llama.corpus import Corpus
from examples.llama.optimizers import recipe
from examples.llama.prepare import prepare
from examples.llama.step import Program
from examples.llama.terminal import line, run_main
from examples.llama.trainer import Trainer

ARGUMENTS = ("learning_rate", "adam_learning_rate", "weight_decay")  # the compiled step is told
ARGUMENTS += ("seed", "steps", "warmup", "eval_every")
SAME = dict.fromkeys(ARGUMENTS)  # no difference to what text and devices allow


def read_grid(path: Path, base: list[str], results: list[dict]) -> list[Config]:
    """The settings of every run, in the order of the file.

    Args:
        path: the grid.
        base: flags for all runs.
        results: where `best` is looked up.
    """
    try:
        tables = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"grid {path} cannot be read: {line(error)}") from None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"grid {path} is not a list of tables of fields")
    configs: list[Config] = []
    for table in tables:
        choices = [value if isinstance(value, list) else [value] for value in table.values()]
        for values in itertools.product(*choices):
            own = best_of(results, dict(zip(table, values, strict=True)))
            configs.append(with_rates(cli.resolve(cli.parse([*base, *cli.flags(own)]))))
    if not configs:
        raise UserError(f"grid {path} holds no run")
    return configs


def best_of(results: list[dict], fields: dict) -> dict:
    """`fields` with the value of the optimizer's best result in place of `best` and `best*2`."""
    wanted = {k: v for k, v in fields.items() if isinstance(v, str) and v.startswith("best")}
    if not wanted:
        return fields
    optimizer = fields.get("optimizer")
    own = [
        result
        for result in results
        if result["run"]["optimizer"] == optimizer and result["held_out_loss"]
    ]
    if not own:
        raise UserError(
            f"the grid asks for the best {', '.join(wanted)}: no result is of {optimizer}"
        )
    best = min(own, key=lambda result: result["held_out_loss"])["run"]
    factors = {k: _factor(v) for k, v in wanted.items()}
    return fields | {k: factor * best[k] for k, factor in factors.items()}


def _factor(text: str) -> float:
    """2 of `best*2`."""
    if text == "best":
        return 1
    try:
        return float(text.removeprefix("best*"))
    except ValueError:
        raise UserError(f"the grid has {text!r}: it must be best, or best*2") from None


def with_rates(config: Config) -> Config:
    """With the recommended values written out, so that a result says what was run."""
    chosen = recipe(config)
    return dataclasses.replace(
        config,
        learning_rate=chosen.learning_rate,
        weight_decay=chosen.weight_decay,
        adam_learning_rate=chosen.adam_learning_rate,
    )


def same_program(a: Config, b: Config) -> bool:
    """Whether two runs differ alone in what the compiled step is told."""
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
        "optax_nora": optax_nora.__version__,
    }


def part_of(configs: list[Config], part: str) -> list[Config]:
    """The third quarter of the runs for "3/4"."""
    try:
        number, parts = map(int, part.split("/"))
    except ValueError:
        number = parts = 0
    if not 1 <= number <= parts:
        raise UserError(f"part {part!r} is not of the form 1/4")
    return configs[len(configs) * (number - 1) // parts : len(configs) * number // parts]


def identity_of(result: dict) -> dict:
    """What was run, in today's fields: newer ones have their defaults, gone ones were unused."""
    defaults = cli.identity(Config(), "")
    return defaults | {k: v for k, v in result["run"].items() if k in defaults or v}


def left_to_run(configs: list[Config], out: Path) -> Iterator[tuple[str, Config, Corpus, dict]]:
    """What has no result yet: its place among all runs, its settings, its text, its identity."""
    done = [identity_of(result) for result in records.read(out)] if out.exists() else []
    for number, config in enumerate(configs, 1):
        corpus = prepare(config.data, config.model.vocab_size)
        identity = cli.identity(config, corpus.identity)
        if identity not in done:
            yield f"{number}/{len(configs)}", config, corpus, identity
            done.append(identity)


def sweep(configs: list[Config], out: Path) -> None:
    """Runs what has no result yet, and appends a result as each run ends."""
    for config in dict.fromkeys(dataclasses.replace(c, **SAME) for c in configs):
        check.run(config)
    compiled: list[tuple[Config, Program]] = []
    for place, config, corpus, identity in left_to_run(configs, out):
        program = next((p for known, p in compiled if same_program(known, config)), None)
        if program is None:
            trainer = Trainer(config, corpus)
            trainer.start()
            trainer.advance()  # compiles, outside of what is timed
            trainer.measure()
            program = trainer.program
            compiled.append((config, program))
        result = {"run": identity} | run(Trainer(config, corpus, program))
        records.append(out, result)
        named = ", ".join(f"{name} {getattr(config, name)}" for name in ("optimizer", *ARGUMENTS))
        print(f"{place} {named}: held-out loss {result['held_out_loss']}", flush=True)


@dataclass(frozen=True)
class SweepConfig:
    """Run a grid; what follows `--` is for every run, as for train.py."""

    grid: tuple[Path, ...]
    """YAML lists of tables of fields; every combination of their lists is run, in this order."""
    out: Path = Path("runs/sweep.jsonl")
    """JSON lines, a result a run; appended to."""
    best: tuple[Path, ...] = ()
    """Results in which `best` is looked up."""
    part: str = "1/1"
    """Which part of every grid, such as 1/4: one process for each GPU, all with the same `out`."""


def main(arguments: list[str]) -> None:
    own, every = cli.split(arguments)
    options = cli.read(SweepConfig, own, "llama.sweep")
    results = [result for path in options.best for result in records.read(path)]
    grids = [read_grid(path, every, results) for path in options.grid]
    configs = [config for grid in grids for config in part_of(grid, options.part)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sweep(configs, options.out)


if __name__ == "__main__":
    run_main(main)
