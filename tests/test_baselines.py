"""Nora's peers behind Nora's signature: each against its own mathematics or optax's own code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from optax.contrib import MuonDimensionNumbers
from peers import PEERS
from tolerance import NEWTON_SCHULZ, of_steps

import optax_nora
from optax_nora import baselines

every_baseline = pytest.mark.parametrize("name", PEERS)
# By how much a direction stretches what rounding leaves. Adam's 1 - b2 = 0.001 is off by 500 eps
# of itself. SSO stops bisecting at 2**-20, 8 eps, and divides by singular values down to 0.01.
CONDITION = {"muon": NEWTON_SCHULZ, "sso": 1000, "adamp": 1000}


def rounding(name, steps=4):
    """Of rows and columns of up to 32, entries of up to 0.1 * 2."""
    return of_steps(32, 0.2, steps, condition=CONDITION.get(name, 1))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {
    "mlp": {"kernel": normal(8, 32), "bias": normal(32, seed=1)},
    "embed": {"embedding": normal(16, 8, seed=2)},
}
GRADS = [jax.tree.map(lambda x, t=t: normal(*x.shape, seed=t + x.size), PARAMS) for t in range(4)]


def run(tx, params=PARAMS, grads=GRADS):
    """Parameters after each step."""
    update, state, trajectory = jax.jit(tx.update), tx.init(params), []
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        trajectory.append(params)
    return trajectory


def kernels(trajectory):
    return np.stack([params["mlp"]["kernel"] for params in trajectory])


def test_the_peers_are_there():
    parts = {name for name in vars(baselines) if name.startswith("scale_by_")}
    assert parts == {f"scale_by_{name}" for name in PEERS}
    assert all(getattr(baselines, part).__doc__ for part in parts)


def test_a_part_takes_the_routing_around_it():
    """Given no dimension numbers, a part has those of `with_adamw`: here rows of 3 axes, turned."""
    numbers = optax_nora.by_path({"kernel": MuonDimensionNumbers((1, 2), 0)})
    params, g = {"kernel": normal(6, 2, 5)}, {"kernel": normal(6, 2, 5, seed=1)}
    around = optax_nora.with_adamw(baselines.scale_by_rmnp(), 0.1, weight_dimension_numbers=numbers)
    own = baselines.scale_by_rmnp(weight_dimension_numbers=numbers)
    outer = optax_nora.with_adamw(own, 0.1, weight_dimension_numbers=numbers)
    for a, b in zip(run(around, params, [g]), run(outer, params, [g]), strict=True):
        np.testing.assert_array_equal(a["kernel"], b["kernel"])
    # Outside, the part stands for itself again.
    with pytest.raises(ValueError, match="this one has 3 axes"):
        baselines.scale_by_rmnp().init(params)


def test_any_rule_of_optax_may_be_the_matrices():
    tx = optax_nora.with_adamw(optax.scale_by_sign(), 0.1, weight_decay=0.5)
    (after,) = run(tx, grads=GRADS[:1])
    w, g = PARAMS["mlp"]["kernel"], GRADS[0]["mlp"]["kernel"]
    # Three roundings of weights of up to 4.
    np.testing.assert_allclose(
        after["mlp"]["kernel"], w - 0.1 * (np.sign(g) + 0.5 * w), rtol=0, atol=3 * 4 * 1.2e-7
    )


@every_baseline
def test_step_is_update_and_apply(name):
    if name == "sso":  # its retraction stands after with_adamw, in a chain
        return
    tx = PEERS[name](0.1, weight_decay=0.1)
    want, state = run(tx), tx.init(PARAMS)
    params, step = PARAMS, jax.jit(tx.step)
    for g, expected in zip(GRADS, want, strict=True):
        params, state = step(jax.tree.map(lambda x: 2 * x, g), state, params, 0.5)
        # Powers of two lose nothing; two programs may contract products and sums differently.
        np.testing.assert_allclose(
            params["mlp"]["kernel"], expected["mlp"]["kernel"], rtol=0, atol=rounding(name)
        )


@every_baseline
def test_the_routing_is_noras(name):
    # What goes to AdamW makes the very steps that it makes under Nora; the kernel does not.
    settings = {"learning_rate": 0.1, "adam_learning_rate": 1e-2, "adam_weight_decay": 0.1}
    ours, nora = (run(make(**settings)) for make in (PEERS[name], optax_nora.nora))
    for a, b in zip(ours, nora, strict=True):
        # AdamW's 1 - b2 = 0.05 takes a digit.
        adamw = {"rtol": 0, "atol": of_steps(1, 0.01, 4, condition=20)}
        np.testing.assert_allclose(a["mlp"]["bias"], b["mlp"]["bias"], **adamw)
        np.testing.assert_allclose(a["embed"]["embedding"], b["embed"]["embedding"], **adamw)
    assert np.abs(kernels(ours) - kernels(nora)).max() > 1e-3


@every_baseline
def test_dimension_numbers_turn_it(name):
    def turned(tree):
        return jax.tree.map(lambda x: x.T, tree)

    rule = optax_nora.by_path({"kernel": MuonDimensionNumbers(1, 0)})
    tx = PEERS[name](0.1, weight_dimension_numbers=rule, weight_decay=0.1)
    ours = run(tx, turned(PARAMS), turned(GRADS))
    straight = run(PEERS[name](0.1, weight_decay=0.1))
    # The sums run in another order, which is all.
    back = kernels(ours).swapaxes(-1, -2)
    np.testing.assert_allclose(back, kernels(straight), rtol=0, atol=rounding(name))


@every_baseline
def test_a_batch_of_matrices_is_a_loop(name):
    rule = optax_nora.stacked(MuonDimensionNumbers(0, 1))
    stack = {"kernel": normal(3, 6, 10)}
    grads = [{"kernel": normal(3, 6, 10, seed=t)} for t in range(1, 5)]
    whole = run(PEERS[name](0.1, weight_dimension_numbers=rule), stack, grads)
    for i in range(3):
        one = run(
            PEERS[name](0.1),
            {"kernel": stack["kernel"][i]},
            [{"kernel": g["kernel"][i]} for g in grads],
        )
        for a, b in zip(whole, one, strict=True):
            np.testing.assert_allclose(a["kernel"][i], b["kernel"], rtol=0, atol=rounding(name))


# SSO's weights stay on a sphere; AdamP and SGDP decay by themselves: see their own tests.
@pytest.mark.parametrize("name", ["rmnp", "mano", "muon"])
def test_weight_decay_and_row_scale_come_after_the_direction(name):
    g = GRADS[:1]
    w0 = PARAMS["mlp"]["kernel"]
    make = PEERS[name]
    plain = kernels(run(make(0.1, row_scale="unit"), grads=g))[0] - w0
    decayed = kernels(run(make(0.1, row_scale="unit", weight_decay=0.5), grads=g))[0] - w0
    np.testing.assert_allclose(decayed, plain - 0.1 * 0.5 * w0, rtol=0, atol=rounding(name, 2))
    ratio = kernels(run(make(0.1), grads=g))[0] - w0
    np.testing.assert_allclose(ratio, 2 * plain, rtol=0, atol=rounding(name, 3))


@every_baseline
def test_the_state_keeps_its_types(name):
    for params, grads in [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]:
        w = {"kernel": jnp.ones((6, 4), params), "bias": jnp.ones(4, params)}
        g = jax.tree.map(lambda x, d=grads: jnp.full_like(x, 0.1, d), w)
        tx = PEERS[name](0.1)
        before = tx.init(w)
        updates, after = jax.eval_shape(tx.update, g, before, w)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
            lambda x: (x.shape, x.dtype), after
        )
        assert all(u.dtype == params for u in jax.tree.leaves(updates))


@every_baseline
def test_zero_gradients_are_no_trouble(name):
    params = {"kernel": jnp.asarray(normal(6, 4)), "bias": jnp.ones(4)}
    for dtype in (jnp.float32, jnp.float16):
        w = jax.tree.map(lambda x, d=dtype: x.astype(d), params)
        (after,) = run(PEERS[name](0.1), w, [jax.tree.map(jnp.zeros_like, w)])
        if name == "sso":  # goes to its sphere in any case
            assert np.isfinite(after.pop("kernel")).all()
        jax.tree.map(np.testing.assert_array_equal, after, {k: w[k] for k in after})


@every_baseline
def test_errors_are_noras(name):
    make = PEERS[name]
    with pytest.raises(ValueError, match="weight_decay=-1 is out of range"):
        make(0.1, weight_decay=-1)
    with pytest.raises(ValueError, match="nothing says which axes are a row"):
        make(0.1).init({"kernel": jnp.ones((2, 3, 4))})
    tx = make(0.1)
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(PARAMS, tx.init(PARAMS))


# RMNP


@pytest.mark.parametrize("momentum", [None, 1.0, 0.5])
def test_rmnp_is_nora_without_projection(momentum):
    ours = kernels(run(PEERS["rmnp"](0.1, momentum=momentum, weight_decay=0.1)))
    w, mu = np.float64(PARAMS["mlp"]["kernel"]), 0.0
    m = 0.95 if momentum is None else momentum
    for t, g in enumerate(GRADS):
        g = np.float64(g["mlp"]["kernel"])
        mu = 0.95 * mu + 0.05 * g
        d = reference.normalize((m * mu + (1 - m) * g).T).T
        w = w - 0.1 * (2 * d + 0.1 * w)
        np.testing.assert_allclose(ours[t], w, rtol=0, atol=rounding("rmnp"))


# Mano


def test_mano_alternates_its_sides():
    ours = kernels(run(PEERS["mano"](0.1)))
    w, mu = np.float64(PARAMS["mlp"]["kernel"]), 0.0
    for t, g in enumerate(GRADS):
        mu = 0.95 * mu + np.float64(g["mlp"]["kernel"])
        # Counted from 1, odd steps run along the output axis: the last of a kernel.
        d = reference.direction(mu, w) if t % 2 == 0 else reference.direction(mu.T, w.T).T
        w = w - 0.1 * 2 * d
        np.testing.assert_allclose(ours[t], w, rtol=0, atol=rounding("mano"))


# Muon


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_optaxs(nesterov):
    kernel, grads = PARAMS["mlp"]["kernel"], [g["mlp"]["kernel"] for g in GRADS]
    ours = run(
        PEERS["muon"](0.1, nesterov=nesterov, weight_decay=0.1, eps=1e-8),
        {"kernel": kernel},
        [{"kernel": g} for g in grads],
    )
    # optax's own scale for a kernel of 8 inputs and 32 outputs is the fan ratio, 2.
    theirs = run(
        optax.contrib.muon(0.1, weight_decay=0.1, nesterov=nesterov, eps=1e-8),
        {"kernel": kernel},
        [{"kernel": g} for g in grads],
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a["kernel"], b["kernel"], rtol=0, atol=rounding("muon"))


@pytest.mark.parametrize("name", ["muon", "sso"])
def test_split_matrices_are_refused(name):
    rule = optax_nora.in_shard_map({"kernel": jax.sharding.PartitionSpec(None, "x")})
    tx = PEERS[name](0.1, weight_dimension_numbers=rule)
    params = {"kernel": jnp.ones((4, 6))}
    with pytest.raises(ValueError, match=r"multiplies whole matrices.*splits one over x"):
        tx.update(params, tx.init(params), params)
