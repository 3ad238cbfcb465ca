"""Every optimizer of the comparison: one signature, one routing, one auxiliary AdamW.

`Rates` are arguments of the compiled step, not constants in it: one compile serves a sweep.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

import optax_nora
from examples.llama.config import Config, UserError
from optax_nora import baselines


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
    options: tuple[str, ...] = ()  # settings of the run that it takes


def _peer(rule: Callable[..., optax.GradientTransformation]) -> Callable:
    """`rule` for the matrices and AdamW for the rest, routed as Nora is."""

    def make(learning_rate, weight_decay, adam_learning_rate, weight_dimension_numbers, **options):
        return optax_nora.with_adamw(
            rule(**options),
            learning_rate,
            weight_decay,
            adam_learning_rate=adam_learning_rate,
            weight_dimension_numbers=weight_dimension_numbers,
        )

    return make


def _shaped(part: Callable[..., optax.GradientTransformation]) -> Callable:
    """A part whose rows are about one long, and then Nora's row scale."""

    def rule(row_scale="fan_ratio", base_fan_in=None, **options):
        scale = optax_nora.scale_by_row_shape(row_scale, base_fan_in=base_fan_in)
        return optax.chain(part(**options), scale)

    return rule


def _decaying(part: Callable[..., optax.GradientTransformation]) -> Callable:
    """A part that decays the weights itself."""

    def make(learning_rate, weight_decay, adam_learning_rate, weight_dimension_numbers):
        rule = _peer(lambda: part(weight_decay=weight_decay))
        return rule(learning_rate, 0.0, adam_learning_rate, weight_dimension_numbers)

    return make


def _sso(learning_rate, weight_decay, adam_learning_rate, weight_dimension_numbers):
    rule = _peer(baselines.scale_by_sso)
    return optax.chain(
        rule(learning_rate, weight_decay, adam_learning_rate, weight_dimension_numbers),
        baselines.to_spectral_sphere(weight_dimension_numbers=weight_dimension_numbers),
    )


SCALE = ("row_scale", "base_fan_in")
NORA = ("momentum", "block_rows", "project", *SCALE)
RECIPES = {
    "nora": Recipe(optax_nora.nora, 0.005, 0.0, options=NORA),
    "rmnp": Recipe(_peer(_shaped(baselines.scale_by_rmnp)), 0.005, options=("momentum", *SCALE)),
    "mano": Recipe(_peer(_shaped(baselines.scale_by_mano)), 0.005, options=SCALE),
    "muon": Recipe(_peer(_shaped(baselines.scale_by_muon)), 0.01, options=SCALE),
    "sso": Recipe(_sso, 0.01),
    "adamw": Recipe(_peer(lambda: optax.scale_by_adam(b2=0.95)), 0.002),
    "adamp": Recipe(_decaying(baselines.scale_by_adamp), 0.002),
    "sgdp": Recipe(_decaying(baselines.scale_by_sgdp), 0.1),
    "sgd": Recipe(_peer(lambda: optax.trace(decay=0.9)), 0.3),
}


def recipe(config: Config) -> Recipe:
    """The recommended values of the optimizer, and in their place what the user gave."""
    if config.optimizer not in RECIPES:
        raise UserError(f"unknown optimizer {config.optimizer!r}: choose from {', '.join(RECIPES)}")
    default = RECIPES[config.optimizer]
    given = {name: getattr(config, name) for name in default._fields[1:4]}
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
    """Whether the optimizer's own `step` takes the steps: with no more than clipping around it."""
    bare = make_bare(config, peak_rates(config))
    alone = config.precision != "bfloat16_master"
    return config.fused and alone and isinstance(bare, optax_nora.StepTransformation)


def given(config: Config) -> dict[str, Any]:
    """The settings of an optimizer that are not the defaults."""
    names = dict.fromkeys(name for known in RECIPES.values() for name in known.options)
    return {name: x for name in names if (x := getattr(config, name)) != getattr(Config, name)}


def make_bare(config: Config, rates: Rates) -> Any:
    """The optimizer with nothing around it."""
    chosen, options = recipe(config), given(config)
    if unknown := set(options) - set(chosen.options):
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
