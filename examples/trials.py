"""A rule for matrices on a small LLaMA, for `examples.radial`, `.ideas` and `.deflation`."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optax

import optax_nora
from examples.llama import optimizers, sweep
from examples.llama.config import PRESETS, Config, DataConfig, ModelConfig
from examples.llama.data import Corpus
from examples.llama.train import Trainer

# Of the learning rate and the weight decay.
MatrixRule = Callable[[Any, Any], optax.GradientTransformation]

SMALL = dataclasses.replace(
    PRESETS["tiny"],
    model=ModelConfig(vocab_size=512, context=64, layers=2, width=64, heads=2, mlp_width=172),
    data=DataConfig(eval_tokens=60_000),
    precision="float32",
    batch=32,
)


def with_momentum(
    direction: optax.GradientTransformation,
    decay: Callable[[Any], optax.GradientTransformation] = optax.add_decayed_weights,
) -> MatrixRule:
    """`direction` of a momentum with look-ahead; its steps are as long as Nora's."""
    return lambda learning_rate, weight_decay: optax.chain(
        optax.trace(0.95, nesterov=True),
        direction,
        optax_nora.scale_by_row_shape(),
        decay(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def held_out_losses(
    base: Config,
    corpus: Corpus,
    name: str,
    rule: MatrixRule,
    rates: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    weight_decay: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """The loss that `base` ends with under `rule`, at every rate and from every seed."""
    optimizers.RECIPES[name] = optimizers.Recipe(optimizers.plain(rule), rates[0])
    program = None
    for rate in rates:
        for seed in seeds:
            config = dataclasses.replace(
                base,
                **{"optimizer": name, "learning_rate": rate, "seed": seed},
                **{"steps": steps, "warmup": steps // 10, "weight_decay": weight_decay},
            )
            trainer = Trainer(config, corpus, program)
            program = trainer.program
            yield {"rate": rate, "seed": seed, "loss": sweep.run(trainer)["held_out_loss"]}
