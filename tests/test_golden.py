"""Step by step along what PyTorch made of the authors' optimizers: see tests/golden/README.md."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from peers import PEERS

import optax_nora

GOLDEN = pathlib.Path(__file__).parent / "golden"
LR = 0.01
MATRICES = ("wide", "tall", "square", "mlp")
# PyTorch has (out, in), Flax (in, out): dimension numbers as they are stored, defaults transposed.
LAYOUTS = {"torch": MuonDimensionNumbers(1, 0), "flax": None}
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def load(file, layout):
    """The fields of an archive, in the layout."""
    with np.load(GOLDEN / f"{file}.npz") as archive:
        golden = {key: archive[key] for key in archive}
    if layout == "flax":
        golden = {key: np.swapaxes(value, -1, -2) for key, value in golden.items()}
    return golden


def field(golden, name, dtype=jnp.float32):
    return {x: jnp.asarray(golden[f"{x}/{name}"], dtype) for x in MATRICES}


# Compiled once for all archives of an optimizer: weight decay is an argument.
@functools.cache
def compiled(optimizer, layout):
    @jax.jit
    def run(weight_decay, params, grads):
        tx = optimizer(weight_decay=weight_decay, weight_dimension_numbers=LAYOUTS[layout])

        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), weights = jax.lax.scan(step, (params, tx.init(params)), grads)
        return weights, state

    return run


def distance(ours, golden, name):
    """The greatest difference of a tree of ours from a golden field, over all matrices."""
    theirs = field(golden, name)
    return max(np.max(np.abs(np.float32(ours[x]) - theirs[x])) for x in MATRICES)


def momentum_of(state):
    return optax.tree.get(state.inner_states["matrix"], "mu")


nora = functools.partial(optax_nora.nora, LR)
rmnp = functools.partial(PEERS["rmnp"], LR, eps=1e-12)
mano = functools.partial(PEERS["mano"], LR)

# What we measure is 2e-8: weights and steps are below 0.1, and each of the eight steps rounds them
# by 4e-9 at most, a few times. 5e-7 leaves room for other compilers, and is a 20,000th of a step.
F32 = 5e-7
# An average of gradients below 0.11, hence below 0.04 after eight steps, each of which rounds it by
# 2e-9 at most, three times. A heavy ball sums them instead: 1 / (1 - beta) times as much.
AVERAGE, HEAVY_BALL = 5e-8, 1e-6


RUNS = {
    "nora_f32_wd0": (nora, 0.0, AVERAGE),
    "nora_f32_wd0.1": (nora, 0.1, AVERAGE),
    "nora_f32_edge": (nora, 0.0, AVERAGE),
    "rmnp_f32_wd0": (rmnp, 0.0, AVERAGE),
    "rmnp_f32_wd0.1": (rmnp, 0.1, AVERAGE),
    "mano_f32_wd0": (mano, 0.0, HEAVY_BALL),
    "mano_f32_wd0.1": (mano, 0.1, HEAVY_BALL),
}


@both_layouts
@pytest.mark.parametrize("file", RUNS)
def test_float32(file, layout):
    optimizer, weight_decay, tolerance = RUNS[file]
    golden = load(file, layout)
    weights, state = compiled(optimizer, layout)(
        weight_decay, field(golden, "w0"), field(golden, "grads")
    )
    assert distance(weights, golden, "w") <= F32
    assert distance(momentum_of(state), golden, "momentum") <= tolerance


@functools.cache
def by_kernels(layout):
    @jax.jit
    def run(weight_decay, params, grads):
        numbers = LAYOUTS[layout]
        tx = nora(weight_decay=weight_decay, weight_dimension_numbers=numbers, backend="pallas")

        def step(carry, g):
            params, state = tx.step(g, carry[1], carry[0])
            return (params, state), params

        (_, state), weights = jax.lax.scan(step, (params, tx.init(params)), grads)
        return weights, state

    return run


@both_layouts
@pytest.mark.parametrize("file", [file for file in RUNS if file.startswith("nora")])
def test_steps_by_kernels(file, layout):
    _, weight_decay, tolerance = RUNS[file]
    golden = load(file, layout)
    weights, state = by_kernels(layout)(weight_decay, field(golden, "w0"), field(golden, "grads"))
    assert distance(weights, golden, "w") <= F32
    assert distance(momentum_of(state), golden, "momentum") <= tolerance


def test_the_edge_archive_holds_the_edges():
    golden = load("nora_f32_edge", "torch")
    for x in MATRICES:
        w0, grads = golden[f"{x}/w0"], golden[f"{x}/grads"]
        assert not w0[0].any()
        assert not grads[:, 1].any()
        assert not grads[:6, 2].any()
        assert grads[6:, 2].any()
        assert np.abs(grads[:, 3]).max() < 1e-11 * np.abs(grads[:, 4:]).max()


def master(**settings):
    return optax_nora.with_float32_master(nora(**settings))


def in_order(x):
    """bfloat16 numbers as integers in the same order, neighbours one apart."""
    bits = np.int32(np.asarray(x).view(np.int16))
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@both_layouts
@pytest.mark.parametrize(
    ("file", "weight_decay"), [("nora_bf16_wd0", 0.0), ("nora_bf16_wd0.1", 0.1)]
)
def test_bfloat16_with_masters(file, weight_decay, layout):
    golden = load(file, layout)
    weights, state = compiled(master, layout)(
        weight_decay, field(golden, "w0", jnp.bfloat16), field(golden, "grads", jnp.bfloat16)
    )
    assert distance(state.master, golden, "master") <= F32
    assert distance(momentum_of(state.inner_state), golden, "momentum") <= AVERAGE
    theirs = field(golden, "w", jnp.bfloat16)
    units = np.concatenate(
        [np.abs(in_order(weights[x]) - in_order(theirs[x])).ravel() for x in MATRICES]
    )
    # Where the masters lie to either side of the middle of two numbers they round apart.
    assert units.max() <= 1
    assert units.sum() <= units.size / 1000


@both_layouts
def test_auxiliary_adam(layout):
    golden = load("aux_adam_f32_wd0", layout)

    def all_to_adamw(**_):
        none = dict.fromkeys(MATRICES)
        return nora(adam_learning_rate=1e-3, weight_dimension_numbers=none)

    with pytest.warns(UserWarning, match="no leaf goes to the matrix optimizer"):
        weights, _ = compiled(all_to_adamw, layout)(
            0.0, field(golden, "w0"), field(golden, "grads")
        )
    # Theirs adds eps = 1e-10 before it corrects the bias, which moves a step of 1e-3 by less than
    # 5e-13 / |g|; the rest is rounding. With weight decay the two would differ by more.
    assert distance(weights, golden, "w") <= 1e-6


def test_muon_from_the_same_momentum():
    # optax corrects the momentum's bias, which changes the look-ahead of all steps after the first:
    # so it is given the momentum of the reference, and shall make the same step of it.
    golden = load("muon_f32_wd0", "torch")
    tx = PEERS["muon"](LR, beta=0.0, nesterov=False, weight_dimension_numbers=LAYOUTS["torch"])
    weights = {x: [w0, *golden[f"{x}/w"]] for x, w0 in field(golden, "w0").items()}
    mu = jax.tree.map(jnp.zeros_like, field(golden, "w0"))
    update = jax.jit(lambda h, params: tx.update(h, tx.init(params), params)[0])
    for t in range(8):
        g = {x: golden[f"{x}/grads"][t] for x in MATRICES}
        mu = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, mu, g)
        ahead = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, mu, g)
        updates = update(ahead, {x: jnp.asarray(weights[x][t]) for x in MATRICES})
        for x in MATRICES:
            step = weights[x][t + 1] - weights[x][t]
            error = np.linalg.norm(updates[x] - step) / np.linalg.norm(step)
            # Theirs iterates in bfloat16: roundings of 2**-9, which the five iterations (3.44 x
            # near 0) blow up to the 5e-2 that we measure; a wrong scale would show as 0.15 or more.
            assert error <= 6e-2
    assert all(np.allclose(mu[x], golden[f"{x}/momentum"], rtol=0, atol=AVERAGE) for x in MATRICES)
