"""What is compiled: the initial state, one optimizer step, one evaluation step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llama import data, sharding
from examples.llama.config import Config, UserError
from examples.llama.loss import cross_entropy
from examples.llama.model import Llama
from examples.llama.optimizers import (
    Rates,
    dimension_numbers,
    is_fused,
    make_bare,
    make_optimizer,
    peak_rates,
    rates_at,
)
from optax_nora import RowGeometry, row_geometry


class State(NamedTuple):
    """All that a step changes. Once a gradient is not finite, nothing changes any more."""

    params: Any
    opt_state: Any
    step: Any  # optimizer steps done
    bad: Any  # the first leaf whose gradient was not finite, -1 for none


class Program(NamedTuple):
    """The compiled functions of a run; none of them holds a number of `Rates`, or a seed."""

    graph: Any
    leaf_names: list[str]
    state: State  # shapes, dtypes and shardings
    init: Callable[[Array], State]
    train: Callable[[State, Array, Rates], tuple[State, dict[str, Array]]]
    optimize: Callable[[State, Any, Rates], tuple[Any, Any]]  # a part of `train`, to be timed
    geometry: Callable[[State, Array, Rates], dict[str, RowGeometry]]
    evaluate: Callable[[Any, Array], tuple[Array, Array]]


def accumulation(config: Config, mesh: Mesh) -> int:
    """Micro-batches of a step."""
    parts = sharding.batch_parts(mesh)
    if config.batch % parts:
        raise UserError(f"batch {config.batch} does not divide over mesh data * fsdp = {parts}")
    local = config.batch // parts
    micro = config.micro_batch or local
    if local % micro:
        raise UserError(f"micro_batch {micro} does not divide the {local} sequences of a device")
    return local // micro


def make_model(config: Config, key: Array, activations: NamedSharding | None = None) -> Llama:
    return Llama(
        config.model,
        key,
        dtype=jnp.float32 if config.precision == "float32" else jnp.bfloat16,
        scan_layers=config.scan_layers,
        remat=config.remat,
        activations=activations,
    )


def check_fit(config: Config, mesh: Mesh) -> None:
    """Raises UserError where the mesh does not divide the batch or a parameter."""
    accumulation(config, mesh)
    model = nnx.eval_shape(lambda: make_model(config, jax.random.key(0)))
    sharding.param_shardings(nnx.to_pure_dict(nnx.state(model, nnx.Param)), mesh)


OptimizerFactory = Callable[[Rates], optax.GradientTransformation]


def make_program(
    config: Config, mesh: Mesh, end: int, optimizer: OptimizerFactory | None = None
) -> Program:
    """Compiles nothing yet; raises what is wrong with the mesh, the batch or the optimizer.

    Args:
        config: of the run.
        mesh: where it runs.
        end: the word that ends a document.
        optimizer: makes the whole of it from the rates of a step. None: that of `config`.
    """
    micro_batches = accumulation(config, mesh)
    fused = optimizer is None and is_fused(config)
    make = optimizer or functools.partial(make_optimizer, config)
    chunk = _chunk(config, mesh, micro_batches)
    batch_spec = NamedSharding(mesh, sharding.BATCH)
    everywhere = NamedSharding(mesh, P())

    def init(key: Array) -> State:
        params = nnx.to_pure_dict(nnx.state(make_model(config, key), nnx.Param))
        if config.precision.startswith("bfloat16"):
            params = optax.tree.cast(params, jnp.bfloat16)
        opt_state = make(peak_rates(config)).init(params)
        return State(params, opt_state, jnp.int32(0), jnp.int32(-1))

    def loss(params, tokens: Array, scale: float | Array) -> Array:
        """`scale` times the sum over the targets that count."""
        model = nnx.merge(graph, params)
        hidden, _ = model(tokens[:, :-1])
        weights = scale * data.weights(tokens, end).astype(jnp.float32)
        head = jax.lax.with_sharding_constraint(
            model.lm_head.kernel[...], NamedSharding(mesh, P(None, "tensor"))
        )
        return cross_entropy(hidden, head, tokens[:, 1:], weights, chunk)

    def mean_loss(params, tokens: Array):
        """The mean over the targets that count, and its gradient."""
        scale = 1 / jnp.maximum(1, jnp.sum(data.weights(tokens, end)))  # of a batch of ends alone
        if micro_batches == 1:
            return jax.value_and_grad(loss)(params, tokens, scale)

        def add(total, part):
            part = jax.lax.with_sharding_constraint(part, batch_spec)
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part, scale)), None

        # Sequences of a device stay on it: (devices * micro_batches * micro, T) -> one part a turn.
        parts = tokens.reshape(-1, micro_batches, tokens.shape[1]).swapaxes(0, 1)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
        (total, grads), _ = jax.lax.scan(add, (jnp.float32(0), zeros), parts)
        return total, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    def update(state: State, grads, rates: Rates):
        now = rates_at(state.step, rates, config.final_fraction)
        return make(now).update(grads, state.opt_state, state.params)

    def step_itself(state: State, grads, norm: Array, rates: Rates):
        now = rates_at(state.step, rates, config.final_fraction)
        clipping, opt_state = state.opt_state
        scale = jnp.where(norm < config.clip, 1.0, config.clip / norm)
        params, opt_state = make_bare(config, now).step(grads, opt_state, state.params, scale)
        return params, (clipping, opt_state)

    def optimize(state: State, grads, rates: Rates):
        if fused:
            return step_itself(state, grads, optax.tree.norm(grads), rates)
        updates, opt_state = update(state, grads, rates)
        return optax.apply_updates(state.params, updates), opt_state

    def train(state: State, tokens: Array, rates: Rates) -> tuple[State, dict[str, Array]]:
        value, grads = mean_loss(state.params, tokens)
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
        finite = jnp.isfinite(jnp.stack([*squares, value]))
        bad = jnp.where(finite.all(), -1, jnp.argmin(finite))
        bad = jnp.where(state.bad >= 0, state.bad, bad).astype(jnp.int32)
        norm, now = jnp.sqrt(sum(squares)), rates_at(state.step, rates, config.final_fraction)

        def step(optimized) -> State:
            params, opt_state = optimized
            return State(params, opt_state, state.step + 1, bad)

        if fused:  # it writes in place: afterwards there is no old state to choose
            kept = jax.lax.cond(
                bad < 0, lambda: step(step_itself(state, grads, norm, rates)), lambda: state
            )
        else:
            new = step(optimize(state, grads, rates))
            kept = jax.tree.map(lambda new, old: jnp.where(bad < 0, new, old), new, state)
        metrics = {"loss": value, "grad_norm": norm, "bad": bad}
        metrics |= {"learning_rate": now.matrix, "adam_learning_rate": now.other}
        return kept._replace(bad=bad), metrics

    def geometry(state: State, tokens: Array, rates: Rates) -> dict[str, RowGeometry]:
        _, grads = mean_loss(state.params, tokens)
        updates, _ = update(state, grads, rates)
        numbers = dimension_numbers(config)
        return row_geometry(state.params, grads, updates, weight_dimension_numbers=numbers)

    def evaluate(params, tokens: Array) -> tuple[Array, Array]:
        return loss(params, tokens, 1.0), jnp.sum(data.weights(tokens, end))

    shapes = jax.eval_shape(init, jax.random.key(0))
    graph, _ = nnx.split(nnx.eval_shape(lambda: make_model(config, jax.random.key(0), batch_spec)))
    params = sharding.param_shardings(shapes.params, mesh)
    opt_state = sharding.like_params(shapes.opt_state, params, mesh)
    shardings = State(params, opt_state, everywhere, everywhere)
    names = [sharding.name(path) for path, _ in jax.tree.leaves_with_path(shapes.params)]
    return Program(
        graph,
        [*names, "loss"],
        jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            shardings,
        ),
        jax.jit(init, out_shardings=shardings),
        jax.jit(train, donate_argnums=0, out_shardings=(shardings, everywhere)),
        jax.jit(optimize, out_shardings=(params, opt_state)),
        jax.jit(geometry, out_shardings=everywhere),
        jax.jit(evaluate, out_shardings=everywhere),
    )


def _chunk(config: Config, mesh: Mesh, micro_batches: int) -> int:
    """Positions whose logits are made at once: the most that `loss_chunk` tokens allow."""
    sequences = config.batch // sharding.batch_parts(mesh) // micro_batches
    context = config.model.context
    fits = (
        n for n in range(context, 0, -1) if context % n == 0 and n * sequences <= config.loss_chunk
    )
    return next(fits, 1)
