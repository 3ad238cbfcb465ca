"""Trains a LLaMA: `python -m examples.llama.train --help`."""

import dataclasses
import itertools
import shutil
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from examples.llama import check, cli, hosts, plot, records
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import Config, UserError
from examples.llama.corpus import Corpus
from examples.llama.evaluate import unigram_entropy
from examples.llama.folder import claimed, write_json
from examples.llama.prepare import prepare
from examples.llama.report import METRICS, Report
from examples.llama.sample import complete, encode
from examples.llama.terminal import console, run_main, say
from examples.llama.trainer import Trainer


def name_of(config: Config) -> str:
    """The name of this run: what was given, or the optimizer and the time of day."""
    if config.name is not None:
        return config.name
    base = time.strftime(f"{config.optimizer}-%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}-{number}"
        try:
            (config.out / name).mkdir(parents=True)
            return name
        except FileExistsError:  # of a run of the same second
            continue
    raise AssertionError


@contextmanager
def signals() -> Iterator[Callable[[int], bool]]:
    """Tells whether to stop before a step, on all hosts before the same one.

    SIGTERM and Ctrl-C ask for it; a second Ctrl-C quits at once.
    """
    many = jax.process_count() > 1
    came: list[int] = []

    def note(number: int, _) -> None:
        if number == signal.SIGINT and came:
            raise KeyboardInterrupt
        came.append(number)
        if many:
            signal.raise_signal(signal.SIGTERM)  # which jax tells the other hosts of

    ours = [signal.SIGINT] if many else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, note) for number in ours}
    try:
        yield multihost_utils.reached_preemption_sync_point if many else lambda step: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_text(config: Config) -> Corpus:
    """The tokens of the run, which the first process prepares for all."""

    def read() -> Corpus:
        return prepare(config.data, config.model.vocab_size)

    hosts.first(read)
    return hosts.together(read)


def begin(trainer: Trainer, checkpoints: Checkpoints, folder: Path) -> None:
    """Goes on from the last checkpoint, or draws parameters and saves them.

    So a folder that cannot be written to is found now, and a run that has taken a step has a
    checkpoint.
    """
    if checkpoints.steps():
        trainer.resume(checkpoints)
        return
    path = folder / METRICS
    if path.exists() and any(record["step"] for record in records.read(path)):
        raise UserError(
            f"{checkpoints.folder} holds no checkpoint any more, and {path} steps that were taken: "
            "start anew with another --name"
        )
    trainer.start()
    trainer.save(checkpoints)
    checkpoints.read_back(0)


def train(config: Config, stopped: Callable[[int], bool] = lambda step: False) -> None:
    """A whole run, from text to picture; all that it makes is in its folder.

    Args:
        config: of the run.
        stopped: told a step, says whether to save and stop before it.

    Raises:
        UserError: what the user can mend.
    """
    start = time.perf_counter()
    console.quiet = jax.process_index() > 0
    config = cli.resolve(config)
    hosts.agree(cli.shared(config))
    hosts.together(lambda: check.run(config))
    name = hosts.exchange(hosts.first(lambda: name_of(config)) or "")[0]
    config = dataclasses.replace(config, name=name)
    folder = config.out / name
    with ExitStack() as held:
        hosts.first(lambda: held.enter_context(claimed(folder, config.resume)))
        corpus = read_text(config)
        trainer = hosts.together(lambda: Trainer(config, corpus))
        encode(corpus.tokenizer(), config.prompt, config.model.context)
        identity = cli.identity(config, corpus.identity)
        hosts.agree(identity)
        trainer.show()
        hosts.first(lambda: describe(folder, config, corpus))
        with hosts.watched(folder):
            run(trainer, folder, identity, stopped)
    say(f"{timedelta(seconds=round(time.perf_counter() - start))} in all")


def describe(folder: Path, config: Config, corpus: Corpus) -> None:
    """What makes a folder the one of a run: its tokenizer and, last, its settings."""
    if (folder / "config.json").exists():
        return
    shutil.copyfile(corpus.folder / "tokenizer.json", folder / "tokenizer.json")
    write_json(folder / "config.json", cli.shared(config))


def run(trainer: Trainer, folder: Path, identity: dict, stopped: Callable[[int], bool]) -> None:
    """Trains, and draws and writes what came of it."""
    config = trainer.config
    kept = config.keep, identity, config.hosts.timeout
    with Checkpoints(folder / "checkpoints", *kept) as checkpoints:
        begin(trainer, checkpoints, folder)
        with Report(folder, config, trainer.step) as report, signals() as signalled:
            if trainer.step == 0:
                with report.aside(trainer.state):
                    entropy = unigram_entropy(trainer.corpus.shards("held_out"))
                    baseline = "a model that knows only word frequencies"
                    say(f"{baseline}: held-out loss {entropy:.4f} nats a token")
                    report.held_out(0, trainer.measure(), unigram_entropy=entropy)
            trainer.fit(checkpoints, report, lambda step: stopped(step) or signalled(step))
            if trainer.step == config.steps:
                report.optimizer(trainer.step, trainer.optimizer_seconds())
        checkpoints.read_back(trainer.step)
    if trainer.step < config.steps:
        say(f"stopped at step {trainer.step}; go on with --resume --name {folder.name}")
        return
    if jax.process_index() == 0:
        plot.draw_run(folder, folder / "loss.png", f"{trainer.model}\n{trainer.optimizer}")
    if jax.process_count() == 1:
        params = trainer.state.params
        text = complete(trainer.program.graph, params, trainer.corpus.tokenizer(), config.prompt)
        say("sample:\n" + textwrap.indent(text, "  | ", lambda line: True))
    say(f"written: {folder}/ with metrics.jsonl, loss.png, config.json, checkpoints/")


def main(arguments: list[str]) -> None:
    config = cli.parse(arguments)
    hosts.start(config.hosts)
    train(config)


if __name__ == "__main__":
    run_main(main)
