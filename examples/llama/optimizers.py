"""Every optimizer of the comparison: one signature, one routing, one auxiliary AdamW.

`Rates` are arguments of the compiled step, not constants in it: one compile serves a sweep.
"""

import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import optax_nora
from examples.llama.config import Config, UserError


class Rates(NamedTuple):
    """Numbers of a run that its compiled step is told: what a sweep varies."""

    matrix: float | Array  # learning rate of the matrices, at its peak
    other: float | Array  # learning rate of everything else, at its peak
    weight_decay: float | Array  # of the matrices
    warmup: float | Array  # steps
    steps: float | Array


class Recipe(NamedTuple):
    """How an optimizer is made, and what is recommended for it."""

    make: Callable[..., optax.GradientTransformation]
    learning_rate: float
    weight_decay: float = 0.1
    adam_learning_rate: float = 5e-3


def plain(matrix_rule: Callable[..., optax.GradientTransformation]) -> Callable:
    """`matrix_rule` for the matrices and AdamW for the rest, routed as Nora is."""

    def make(learning_rate, weight_decay, adam_learning_rate, weight_dimension_numbers):
        def label(params):
            mask = optax_nora.matrix_mask(params, weight_dimension_numbers)
            return jax.tree.map(lambda matrix: "matrix" if matrix else "other", mask)

        rules: dict[Hashable, optax.GradientTransformation] = {
            "matrix": matrix_rule(learning_rate, weight_decay),
            "other": optax.adamw(adam_learning_rate, b2=0.95, eps=1e-10, weight_decay=0.0),
        }
        return optax.partition(rules, label)

    return make


def _adamw(learning_rate, weight_decay):
    return optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay)


def _sgd(learning_rate, weight_decay):
    return optax.chain(
        optax.trace(decay=0.9),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


RECIPES = {
    "nora": Recipe(optax_nora.nora, 0.005, weight_decay=0.0),
    "rmnp": Recipe(optax_nora.baselines.rmnp, 0.005),
    "mano": Recipe(optax_nora.baselines.mano, 0.005),
    "muon": Recipe(optax_nora.baselines.muon, 0.01),
    "sso": Recipe(optax_nora.baselines.sso, 0.01),
    "adamw": Recipe(plain(_adamw), 0.002),
    "adamp": Recipe(optax_nora.baselines.adamp, 0.002),
    "sgdp": Recipe(optax_nora.baselines.sgdp, 0.1),
    "sgd": Recipe(plain(_sgd), 0.3),
}


def recipe(config: Config) -> Recipe:
    """The recommended values of the optimizer, and in their place what the user gave."""
    if config.optimizer not in RECIPES:
        raise UserError(f"unknown optimizer {config.optimizer!r}: choose from {', '.join(RECIPES)}")
    default = RECIPES[config.optimizer]
    given = {name: getattr(config, name) for name in default._fields[1:]}
    return default._replace(**{name: x for name, x in given.items() if x is not None})


def peak_rates(config: Config) -> Rates:
    """The arguments of the compiled step, with the learning rates at their peak."""
    chosen = recipe(config)
    numbers = chosen.learning_rate, chosen.adam_learning_rate, chosen.weight_decay
    return Rates(*map(jnp.float32, (*numbers, config.warmup, config.steps)))


def rates_at(step: Array, peak: Rates, final_fraction: float) -> Rates:
    """The learning rates of a step: linear warm-up, then cosine to `final_fraction` of the peak."""
    warmup = jnp.maximum(peak.warmup, 1)
    progress = (step - peak.warmup) / jnp.maximum(peak.steps - peak.warmup, 1)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
    decayed = final_fraction + (1 - final_fraction) * cosine
    fraction = jnp.where(step < peak.warmup, (step + 1) / warmup, decayed)
    return peak._replace(matrix=fraction * peak.matrix, other=fraction * peak.other)


def dimension_numbers(config: Config):
    """Which axes are rows: the library's defaults, one axis later where blocks are stacked."""
    return optax_nora.by_path({"layers": optax_nora.stacked()}) if config.scan_layers else None


def is_fused(config: Config) -> bool:
    """Whether `nora(...).step` takes the steps: it can with no more than clipping around it."""
    return config.fused and config.optimizer == "nora" and config.precision != "bfloat16_master"


def make_bare(config: Config, rates: Rates) -> Any:
    """The optimizer with nothing around it."""
    chosen = recipe(config)
    names = ("momentum", "row_scale", "base_fan_in")
    given = {name: getattr(config, name) for name in names}
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if unknown := set(options) - set(inspect.signature(chosen.make).parameters):
        raise UserError(f"optimizer {config.optimizer!r} takes no {', '.join(sorted(unknown))}")
    return chosen.make(
        rates.matrix,
        weight_decay=rates.weight_decay,
        adam_learning_rate=rates.other,
        weight_dimension_numbers=dimension_numbers(config),
        **options,
    )


def make_optimizer(config: Config, rates: Rates) -> optax.GradientTransformation:
    """Clipping, the optimizer, float32 copies where the precision asks for them."""
    optimizer = make_bare(config, rates)
    if config.precision == "bfloat16_master":
        optimizer = optax_nora.with_float32_master(optimizer)
    return optax.chain(optax.clip_by_global_norm(config.clip), optimizer)
