"""One run in memory: its steps, its checks, its place in the data."""

import time
from collections import deque
from collections.abc import Callable

import jax
import jax.numpy as jnp

import optax_nora
from examples.llama import data, optimizers, sharding
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import Config, UserError
from examples.llama.corpus import Corpus
from examples.llama.evaluate import HeldOut, evaluate
from examples.llama.report import Report
from examples.llama.step import OptimizerFactory, Program, accumulation, make_program
from examples.llama.terminal import say


class Trainer:
    """One run: its text, its mesh, its compiled step, its state, its place in the data."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        program: Program | None = None,
        make_optimizer: OptimizerFactory | None = None,
    ):
        """Starts nothing yet.

        Args:
            config: of the run.
            corpus: its text.
            program: of a run that differs in rates and seed alone. None: make one.
            make_optimizer: any optimizer of one's own, made from the `Rates` of a step. None: that
                of `config`.
        """
        if corpus.vocab_size > config.model.vocab_size:
            raise UserError(
                f"model.vocab_size {config.model.vocab_size} is less than the "
                f"{corpus.vocab_size} words of the tokenizer"
            )
        self.config, self.corpus = config, corpus
        self.rates = optimizers.peak_rates(config)
        self.shard = jax.process_index(), jax.process_count()
        source, self.held_out = (
            data.sequences(corpus, split, config.model.context, config.data.packing)
            for split in ("train", "held_out")
        )
        self.mesh = sharding.make_mesh(config.mesh)
        self.program = program or make_program(config, self.mesh, corpus.end, make_optimizer)
        self.batches = data.train_batches(source, config.batch, config.seed, self.shard)
        self.places = deque([(0, self.batches.get_state())], config.log_every + 2)
        self.step = 0

    def start(self) -> None:
        """Draws the initial parameters."""
        self.state = self.program.init(jax.random.key(self.config.seed))

    def resume(self, checkpoints: Checkpoints) -> None:
        """Goes on where the last checkpoint was made."""
        self.state, place = checkpoints.restore(self.program.state)
        self.batches.set_state(place)
        self.step = int(self.state.step)
        self.places.append((self.step, place))

    def advance(self) -> dict[str, jax.Array]:
        """One step; returns its metrics without waiting for them."""
        self.tokens = sharding.put_batch(next(self.batches), self.mesh)
        self.state, metrics = self.program.train(self.state, self.tokens, self.rates)
        self.step += 1
        return metrics

    def fit(self, checkpoints: Checkpoints, report: Report, stopped: Callable[[int], bool]) -> None:
        """Trains to the last step, or until `stopped(step)`, and saves.

        A step is sent off before the metrics of the one before it are looked at.

        Raises:
            UserError: a gradient was not finite; the state from before it is saved.
        """
        config = self.config
        waiting, first = [], self.step
        while self.step < config.steps and not stopped(self.step):
            metrics = self.advance()
            if self.step == first + 1:
                jax.block_until_ready(metrics)  # compiled by now: the clock starts here
                report.restart_clock(self.step)
            self.places.append((self.step, self.batches.get_state()))
            self._log(waiting, checkpoints, report)
            if self._due(config.log_every):
                waiting.append((self.step, metrics))
            measured = config.geometry_every and self.step % config.geometry_every == 0
            evaluated, saved = self._due(config.eval_every), self._due(config.save_every)
            if not (measured or evaluated or saved):
                continue
            self._check(metrics, checkpoints)  # after it, this step is one that was taken
            self._log(waiting, checkpoints, report)
            with report.aside(self.state):
                if measured:
                    rows = self.program.geometry(self.state, self.tokens, self.rates)
                    report.rows(self.step, rows)
                if evaluated:
                    report.held_out(self.step, self.measure())
                if saved:
                    self.save(checkpoints)
        self._log(waiting, checkpoints, report)
        self.save(checkpoints)

    def _log(self, waiting: list, checkpoints: Checkpoints, report: Report) -> None:
        """Writes the metrics that wait to be looked at."""
        while waiting:
            step, metrics = waiting.pop(0)
            self._check(metrics, checkpoints)
            report.training(step, metrics)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def measure(self) -> HeldOut:
        """The loss on held-out text."""
        config = self.config
        limit = max(1, config.data.eval_tokens // config.model.context)
        step, params = self.program.evaluate, self.state.params
        batch = config.batch // accumulation(config, self.mesh)
        return evaluate(step, params, self.held_out, batch, limit, self.mesh, self.shard)

    def save(self, checkpoints: Checkpoints) -> None:
        """Saves the state: where a gradient was not finite, it is the one from before that."""
        step = int(self.state.step)
        good = self.state._replace(bad=-jnp.ones_like(self.state.bad))
        checkpoints.save(step, good, dict(self.places)[step])

    def _check(self, metrics: dict[str, jax.Array], checkpoints: Checkpoints) -> None:
        if (bad := int(metrics["bad"])) < 0:
            return
        step = int(self.state.step)
        text = f"step {step + 1}: the gradient of {self.program.leaf_names[bad]} is not finite"
        try:
            self.save(checkpoints)
        except UserError as error:
            raise UserError(f"{text}; {error}") from None
        raise UserError(f"{text}; the state before it is saved as step {step}")

    def optimizer_seconds(self, repeats: int = 10) -> float:
        """Time of the part of a step that is the optimizer's: clipping, update, new parameters."""
        grads = self.state.params  # of the shapes of gradients, which is all that times depend on
        for count in (1, repeats):  # the first call compiles
            start = time.perf_counter()
            for _ in range(count):
                result = self.program.optimize(self.state, grads, self.rates)
            jax.block_until_ready(result)
        return (time.perf_counter() - start) / repeats

    @property
    def model(self) -> str:
        """The model and its steps, in words."""
        config, shape = self.config, self.config.model
        size = sum(leaf.size for leaf in jax.tree.leaves(self.program.state.params))
        steps = f"{config.steps:,} steps of {config.batch * shape.context:,} tokens"
        return f"LLaMA, {shape.layers} layers of width {shape.width}, {size:,} parameters; {steps}"

    @property
    def optimizer(self) -> str:
        """The learning rates, and what else of the optimizer was chosen, in words."""
        name, rates = self.config.optimizer, self.rates
        text = f"learning rates: {name} {rates.matrix:g}, adamw {rates.other:g}"
        text += f"; weight decay {rates.weight_decay:g}"
        return "".join([text, *(f", {k} {v}" for k, v in optimizers.given(self.config).items())])

    def show(self) -> None:
        """What is about to be trained, on what."""
        config = self.config
        for text in (*self.corpus.describe(), self.model):
            say(text)
        params, numbers = self.program.state.params, optimizers.dimension_numbers(config)
        if config.optimizer != "nora":
            mask = optax_nora.matrix_mask(params, numbers)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(mask), strict=True)
            matrices = sum(leaf.size for leaf, matrix in pairs if matrix)
            others = sum(leaf.size for leaf in jax.tree.leaves(params)) - matrices
            say(f"{config.optimizer}: {matrices:,} parameters of matrices; adamw: {others:,}")
        elif jax.process_index() == 0:
            optax_nora.summarize(
                params,
                numbers,
                row_scale=config.row_scale or "fan_ratio",
                base_fan_in=config.base_fan_in,
                block_rows=config.block_rows if config.block_rows > 1 else None,
            )
        axes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        say(f"{self.optimizer}; mesh: {axes}; {config.precision}")
