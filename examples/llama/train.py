"""Trains a LLaMA: `python -m examples.llama.train --help`."""

import signal
import sys
import time
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp

import optax_nora
from examples.llama import config as configs
from examples.llama import data, optimizers, plot, sharding
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import Config, UserError
from examples.llama.evaluate import HeldOut, evaluate, unigram_entropy
from examples.llama.prepare import prepare
from examples.llama.report import Report, console
from examples.llama.sample import complete
from examples.llama.step import accumulation, make_program


class Trainer:
    """One run: its corpus, its mesh, its compiled step, its state, its place in the data."""

    def __init__(self, config: Config):
        self.config = config
        self.rates = optimizers.peak_rates(config)
        self.corpus = prepare(config.data, config.model.vocab_size)
        if self.corpus.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size {config.model.vocab_size} is less than the "
                f"{self.corpus.vocab_size} words of the tokenizer"
            )
        self.shard = jax.process_index(), jax.process_count()
        source, self.held_out = (
            data.rows(self.corpus, split, config.model.context, config.data.packing)
            for split in ("train", "held_out")
        )
        self.mesh = sharding.make_mesh(config.mesh)
        self.program = make_program(config, self.mesh, self.corpus.end)
        self.batches = data.train_batches(source, config.batch, config.seed, self.shard)
        self.state = self.program.init(jax.random.key(config.seed))
        self.step = 0

    def restore(self, checkpoints: Checkpoints) -> None:
        """Goes on where the last checkpoint was made."""
        self.state, place = checkpoints.restore(self.state)
        self.batches.set_state(place)
        self.step = int(self.state.step)

    def fit(self, checkpoints: Checkpoints, report: Report) -> None:
        """Trains to the last step, or until SIGTERM, and saves.

        A step is sent off before the metrics of the one before it are looked at.

        Raises:
            UserError: a gradient was not finite; the state from before it is saved.
        """
        config = self.config
        terminated: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
        self.places = deque([(self.step, self.batches.get_state())], config.log_every + 2)
        waiting = None
        while self.step < config.steps and not terminated:
            tokens = sharding.put_batch(next(self.batches), self.mesh)
            if config.geometry_every and self.step % config.geometry_every == 0:
                with report.aside():
                    report.rows(self.step, self.program.geometry(self.state, tokens, self.rates))
            self.state, metrics = self.program.train(self.state, tokens, self.rates)
            self.step += 1
            self.places.append((self.step, self.batches.get_state()))
            if waiting:
                self._log(waiting, checkpoints, report)
            waiting = (self.step, metrics) if self._due(config.log_every) else None
            if any(map(self._due, (config.eval_every, config.save_every))):
                self._log((self.step, metrics), checkpoints, report)
                waiting = None
                with report.aside():
                    if self._due(config.eval_every):
                        report.held_out(self.step, self.measure())
                    if self._due(config.save_every):
                        self._save(checkpoints)
        if terminated and not self._due(config.save_every):
            self._save(checkpoints)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def measure(self) -> HeldOut:
        """The loss on held-out text."""
        config = self.config
        limit = max(1, config.data.eval_tokens // config.model.context)
        step, params = self.program.evaluate, self.state.params
        batch = config.batch // accumulation(config, self.mesh)
        return evaluate(step, params, self.held_out, batch, limit, self.mesh, self.shard)

    def _log(self, waiting: tuple[int, dict], checkpoints: Checkpoints, report: Report) -> None:
        step, metrics = waiting
        values = {name: value.item() for name, value in metrics.items()}
        bad = values.pop("bad")
        if bad >= 0:
            self.step = int(self.state.step)
            self.state = self.state._replace(bad=-jnp.ones_like(self.state.bad))
            self._save(checkpoints)
            raise UserError(
                f"step {self.step + 1}: the gradient of {self.program.leaf_names[bad]} is not "
                f"finite; the state before it is saved as step {self.step}"
            )
        report.training(step, values)

    def _save(self, checkpoints: Checkpoints) -> None:
        place = dict(self.places)[self.step]
        checkpoints.save(self.step, self.state, place, configs.to_dict(self.config))

    def show(self) -> None:
        """What is about to be trained, on what."""
        config, manifest = self.config, self.corpus.manifest
        for split in ("train", "held_out"):
            total = {
                k: sum(s[k] for s in manifest[split]) for k in ("bytes", "documents", "tokens")
            }
            counts = ", ".join(f"{n:,} {name}" for name, n in total.items())
            console.print(f"{split.replace('_', '-')} text: {counts}")
        numbers = optimizers.dimension_numbers(config)
        optax_nora.summarize(
            self.state.params,
            numbers,
            row_scale=config.row_scale or "fan_ratio",
            base_fan_in=config.base_fan_in,
        )
        devices = ", ".join(f"{name} {n}" for name, n in self.mesh.shape.items())
        rates = f"learning rate {self.rates.matrix:g}, AdamW's {self.rates.other:g}"
        console.print(f"{config.optimizer}, {rates}; mesh {devices}; {config.precision}")


def run_folder(config: Config) -> Path:
    """The folder of this run: a new one, or on --resume one that is there."""
    name = config.name or time.strftime(f"{config.optimizer}-%Y%m%d-%H%M%S")
    folder = config.out / name
    used = folder.exists() and any(folder.iterdir())
    if used and not config.resume:
        raise UserError(f"{folder} already holds a run: choose another --name, or --resume")
    if config.resume and not used:
        raise UserError(f"{folder} holds no run to resume")
    return folder


def run(config: Config) -> None:
    """A whole run, from text to picture."""
    folder = run_folder(config)
    trainer = Trainer(config)
    folder.mkdir(parents=True, exist_ok=True)
    configs.save(config, folder / "config.json")
    trainer.show()
    entropy = unigram_entropy(trainer.corpus.shards("held_out"))
    with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
        if config.resume:
            trainer.restore(checkpoints)
        tokens = config.batch * config.model.context
        with Report(folder, config.steps, trainer.step, tokens) as report:
            if trainer.step == 0:
                with report.aside():
                    report.held_out(0, trainer.measure(), unigram_entropy=entropy)
            trainer.fit(checkpoints, report)
    console.print(f"unigram entropy of the held-out text: {entropy:.4f} nats a token")
    text = complete(trainer.program.graph, trainer.state.params, trainer.corpus, config.prompt)
    console.print(f"sample: {text}", markup=False)
    plot.draw_run(folder, folder / "loss.png")
    console.print(f"written: {folder}/ with metrics.jsonl, loss.png, config.json, checkpoints/")


def main(arguments: list[str] | None = None) -> None:
    try:
        run(configs.parse(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
