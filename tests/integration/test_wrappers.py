"""What wraps an optimizer in optax wraps ours, and changes nothing but what it should."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from peers import PEERS
from tolerance import NEWTON_SCHULZ, of_steps, tolerance

import optax_nora

# Powers of two: products with them round the same whether a trace or Python knows them.
RATES = {
    "learning_rate": 2.0**-6,
    "beta": 0.9375,
    "momentum": 0.875,
    "adam_b1": 0.875,
    "adam_b2": 0.9375,
}
NO_PARAMS = "params are missing"
# Four steps of rows of up to 16 weights, entries of up to 0.02 * 2 ** 0.5: for what is compiled, or
# put together, otherwise.
ROUNDING = of_steps(16, 0.03, 4)

OPTIMIZERS = {
    "nora": optax_nora.nora,
    **{name: PEERS[name] for name in ("rmnp", "mano", "muon")},
}
RULES = {
    "default": None,
    "tree": {
        "up": {"kernel": MuonDimensionNumbers(1, 0), "bias": None},
        "down": {"kernel": None, "bias": None},
    },
    "prefix": {"up": None, "down": {"kernel": MuonDimensionNumbers(0, 1), "bias": None}},
    "by_path": optax_nora.by_path({"down/kernel": MuonDimensionNumbers(1, 0)}),
    "stacked": optax_nora.by_path({"up": None, "kernel": optax_nora.stacked()}),
    "in_shard_map": optax_nora.in_shard_map(jax.sharding.PartitionSpec()),
}


@pytest.fixture
def params():
    sizes = {"up": {"kernel": (8, 16), "bias": (16,)}, "down": {"kernel": (16, 8), "bias": (8,)}}
    return random_like(0, jax.tree.map(jnp.ones, sizes, is_leaf=lambda x: isinstance(x, tuple)))


def random_like(seed, tree):
    return optax.tree.random_like(jax.random.key(seed), tree)


def gradients(params, steps=4):
    return [random_like(seed, params) for seed in range(1, steps + 1)]


def run(tx, params, grads, compiled=False, **extra_args):
    """The parameters after one step for each of the gradients, and the state.

    Op by op, unless compiled: what is the same arithmetic then gives the same bits.
    """

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    step = jax.jit(step) if compiled else step
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def assert_same_run(tx, other, params, grads=None):
    grads = gradients(params) if grads is None else grads
    chex.assert_trees_all_equal(run(tx, params, grads)[0], run(other, params, grads)[0])


class TestChain:
    def test_after_clipping(self, params):
        grads = gradients(params)
        clip = optax.clip_by_global_norm(0.5)
        clipped = [clip.update(g, clip.init(g))[0] for g in grads]
        chained, _ = run(optax.chain(clip, optax_nora.nora(0.02)), params, grads)
        by_hand, _ = run(optax_nora.nora(0.02), params, clipped)
        chex.assert_trees_all_close(chained, by_hand, rtol=0, atol=ROUNDING)

    def test_before_a_scale(self, params):
        tx = optax.chain(optax_nora.nora(2.0**-5), optax.scale(0.5))
        assert_same_run(tx, optax_nora.nora(2.0**-6), params)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_before_what_applies_rate_and_sign(self, params, name):
        """The whole model without them: rate 1, AdamW's as a multiple of it, the sign undone."""
        make = functools.partial(OPTIMIZERS[name], weight_decay=0.125, adam_weight_decay=0.5)
        rate, ratio = 2.0**-6, 0.25  # of two, so that each product rounds the same in any order
        alone = optax.chain(make(1.0, adam_learning_rate=ratio), optax.scale(-1.0))
        tx = optax.chain(alone, optax.scale_by_schedule(lambda count: rate), optax.scale(-1.0))
        assert_same_run(tx, make(rate, adam_learning_rate=ratio * rate), params)

    def test_before_keep_row_norms(self, params):
        everywhere = optax_nora.by_path({})
        keep = optax_nora.keep_row_norms(weight_dimension_numbers=everywhere)
        after, _ = run(optax.chain(optax_nora.nora(0.1), keep), params, gradients(params))
        for layer in params:
            norms = (jnp.linalg.norm(p[layer]["kernel"], axis=0) for p in (params, after))
            chex.assert_trees_all_close(*norms, rtol=4 * tolerance(16))  # four steps
            assert not jnp.allclose(after[layer]["kernel"], params[layer]["kernel"], atol=0.1)

    def test_the_parts_make_the_whole(self, params):
        matrices = {"up": params["up"]["kernel"], "down": params["down"]["kernel"]}
        parts = optax.chain(
            optax_nora.scale_by_nora(0.9),
            optax_nora.scale_by_row_shape(),
            optax.scale_by_learning_rate(2.0**-6),
        )
        assert_same_run(parts, optax_nora.nora(2.0**-6, beta=0.9), matrices)


class TestMasked:
    def test_leaves_the_rest_alone(self, params):
        tx = optax.masked(optax_nora.nora(0.02), {"up": True, "down": False})
        grads = gradients(params)
        state = tx.init(params)
        updates, _ = tx.update(grads[0], state, params)
        alone = optax_nora.nora(0.02)
        part, _ = alone.update(
            {"up": grads[0]["up"]}, alone.init({"up": params["up"]}), {"up": params["up"]}
        )
        chex.assert_trees_all_equal(updates, {**part, "down": grads[0]["down"]})

    @pytest.mark.parametrize("rule", ["default", "prefix", "by_path", "in_shard_map"])
    def test_a_rule_holds_under_a_mask(self, params, rule):
        numbers = RULES[rule]
        mask = {"up": {"kernel": False, "bias": True}, "down": True}
        masked = optax.masked(optax_nora.nora(0.02, weight_dimension_numbers=numbers), mask)
        whole = optax_nora.nora(0.02, weight_dimension_numbers=numbers)
        grads = gradients(params)[0]
        got, _ = masked.update(grads, masked.init(params), params)
        want, _ = whole.update(grads, whole.init(params), params)
        want["up"]["kernel"] = grads["up"]["kernel"]
        chex.assert_trees_all_equal(got, want)

    def test_nested(self, params):
        outer = {"up": True, "down": {"kernel": True, "bias": False}}

        def inner(tree):  # a function: it sees the tree that the outer mask has left
            return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "down", tree)

        tx = optax.masked(optax.masked(optax_nora.nora(0.02), inner), outer)
        grads = gradients(params)
        nora = optax_nora.nora(0.02)
        only = {"kernel": params["down"]["kernel"]}
        want, _ = nora.update({"kernel": grads[0]["down"]["kernel"]}, nora.init(only), only)
        got, _ = tx.update(grads[0], tx.init(params), params)
        chex.assert_trees_all_equal(got["down"]["kernel"], want["kernel"])
        del got["down"]["kernel"], grads[0]["down"]["kernel"]
        chex.assert_trees_all_equal(got, grads[0])
        run(tx, params, gradients(params))

    def test_matrix_mask_under_a_mask(self, params):
        parts = optax.masked(
            optax.chain(optax_nora.row_project(), optax_nora.row_normalize()),
            optax_nora.matrix_mask,
        )
        tx = optax.masked(parts, {"up": True, "down": False})
        grads = gradients(params)[0]
        updates, _ = tx.update(grads, tx.init(params), params)
        norms = jnp.linalg.norm(updates["up"]["kernel"], axis=0)
        chex.assert_trees_all_close(norms, jnp.ones(16), rtol=tolerance(8))
        del updates["up"]["kernel"], grads["up"]["kernel"]
        chex.assert_trees_all_equal(updates, grads)


class TestPartition:
    def test_each_part_as_if_alone(self, params):
        numbers = optax_nora.by_path({"up/kernel": MuonDimensionNumbers(1, 0)})
        nora = optax_nora.nora(0.02, weight_dimension_numbers=numbers)
        tx = optax.partition({"nora": nora, "sgd": optax.sgd(0.5)}, {"up": "nora", "down": "sgd"})
        grads = gradients(params)
        got, _ = run(tx, params, grads)
        for layer, alone in (("up", nora), ("down", optax.sgd(0.5))):
            want, _ = run(alone, {layer: params[layer]}, [{layer: g[layer]} for g in grads])
            chex.assert_trees_all_equal(got[layer], want[layer])

    def test_two_noras_with_their_own_rates(self, params):
        tx = optax.partition(
            {"fast": optax_nora.nora(0.25), "slow": optax_nora.nora(0.125)},
            lambda tree: {layer: "fast" if layer == "up" else "slow" for layer in tree},
        )
        updates, _ = tx.update(gradients(params)[0], tx.init(params), params)
        lengths = {layer: jnp.linalg.norm(updates[layer]["kernel"], axis=0) for layer in updates}
        want = {"up": jnp.full(16, 0.25 * 2**0.5), "down": jnp.full(8, 0.125)}  # the fan ratio
        chex.assert_trees_all_close(lengths, want, rtol=tolerance(16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_multi_steps(params, dtype):
    params = optax.tree.cast(params, dtype)
    grads = gradients(params)
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *grads[i : i + 2]) for i in (0, 2)]
    numbers = optax_nora.by_path({"up/kernel": MuonDimensionNumbers(1, 0)})
    nora = optax_nora.nora(0.02, weight_dimension_numbers=numbers)
    every_other = optax.MultiSteps(nora, every_k_schedule=2)
    got, state = run(every_other, params, grads, compiled=True)
    want, _ = run(nora, params, means)
    # In bfloat16, in each of two steps a weight under 4 may round to either side.
    rounding = ROUNDING if dtype == jnp.float32 else 2 * 2.0**-6
    chex.assert_trees_all_close(got, want, rtol=0, atol=rounding)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, every_other.init(params))


def test_apply_if_finite(params):
    grads = gradients(params)
    nan, inf = (
        jax.tree.map(lambda g, bad=bad: g.at[0].set(bad), grads[2]) for bad in (jnp.nan, jnp.inf)
    )
    tx = optax.apply_if_finite(optax_nora.nora(0.02), max_consecutive_errors=3)
    got, state = run(tx, params, [*grads[:2], nan, inf, *grads[2:]], compiled=True)
    want, clean = run(tx, params, grads, compiled=True)
    chex.assert_trees_all_equal((got, state.inner_state), (want, clean.inner_state))
    assert state.total_notfinite == 2
    plain, _ = run(optax_nora.nora(0.02), params, grads)
    chex.assert_trees_all_close(got, plain, rtol=0, atol=ROUNDING)


def injected(name):
    """A rate of 0.95 rounds to float32 before 1 - 0.95 is taken or after it: 20 times as much."""
    return of_steps(16, 0.03, 4, condition=NEWTON_SCHULZ if name == "muon" else 20)


class TestInjectHyperparams:
    @pytest.mark.parametrize("rule", RULES)
    def test_equals_the_plain_one(self, params, rule):
        if rule == "stacked":
            params = jax.tree.map(lambda p: jnp.stack([p, -p, p + 1]), params)
        rates = RATES | {"weight_dimension_numbers": RULES[rule]}
        tx = optax.inject_hyperparams(optax_nora.nora)(**rates)
        assert {*RATES} <= {*tx.init(params).hyperparams}
        assert_same_run(tx, optax_nora.nora(**rates), params)

    def test_one_spec_for_all_leaves(self, params):
        matrices = {"up": params["up"]["kernel"], "down": params["down"]["kernel"]}
        rates = RATES | {"weight_dimension_numbers": MuonDimensionNumbers(1, 0)}
        tx = optax.inject_hyperparams(optax_nora.nora)(**rates)
        assert_same_run(tx, optax_nora.nora(**rates), matrices)

    def test_a_function_as_a_static_argument(self, params):
        rates = RATES | {
            "weight_dimension_numbers": lambda tree: jax.tree.map(
                lambda p: MuonDimensionNumbers(1, 0) if p.ndim == 2 else None, tree
            )
        }
        inject = optax.inject_hyperparams(
            optax_nora.nora, static_args=("weight_dimension_numbers",)
        )
        assert_same_run(inject(**rates), optax_nora.nora(**rates), params)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_defaults_and_baselines(self, params, name):
        rates = {"learning_rate": 0.02, "weight_decay": 0.1, "adam_learning_rate": 1e-3}
        grads = gradients(params)

        def make(learning_rate, weight_decay, adam_learning_rate):
            return OPTIMIZERS[name](
                learning_rate, weight_decay=weight_decay, adam_learning_rate=adam_learning_rate
            )

        tx = optax.inject_hyperparams(make)(**rates)
        got, _ = run(tx, params, grads, compiled=True)
        want, _ = run(OPTIMIZERS[name](**rates), params, grads, compiled=True)
        chex.assert_trees_all_close(got, want, rtol=0, atol=injected(name))

    def test_the_number_of_a_row_scale(self, params):
        rates = RATES | {"row_scale": "width", "base_fan_in": 4.0}
        tx = optax.inject_hyperparams(optax_nora.nora)(**rates)
        got, _ = run(tx, params, gradients(params))
        want, _ = run(optax_nora.nora(**rates), params, gradients(params))
        chex.assert_trees_all_close(got, want, rtol=0, atol=ROUNDING)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_bfloat16_parameters(self, params, name):
        params = optax.tree.cast(params, jnp.bfloat16)
        tx = optax.inject_hyperparams(
            lambda learning_rate: OPTIMIZERS[name](learning_rate), hyperparam_dtype=jnp.float32
        )(learning_rate=0.02)
        state = tx.init(params)
        _, new = jax.eval_shape(tx.update, params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)

    def test_a_schedule(self, params):
        schedule = optax.linear_schedule(0.5, 0.0, 4)
        tx = optax.inject_hyperparams(optax_nora.nora)(schedule)
        plain = optax_nora.nora(schedule)
        grads = gradients(params)
        got, want = (run(of, params, grads)[0] for of in (tx, plain))
        chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(16, 0.5 * 2**0.5, 4))

    def test_a_rate_set_by_hand(self, params):
        tx = optax.inject_hyperparams(optax_nora.nora)(**RATES)
        state = tx.init(params)
        state = optax.tree.set(state, learning_rate=jnp.float32(0.5), beta=jnp.float32(0.0))
        state = optax.tree.set(state, momentum=jnp.float32(0.0))
        grads = gradients(params)[0]
        got, state = tx.update(grads, state, params)
        plain = optax_nora.nora(**RATES | {"learning_rate": 0.5, "beta": 0.0, "momentum": 0.0})
        want, _ = plain.update(grads, plain.init(params), params)
        chex.assert_trees_all_equal(got, want)
        assert optax.tree.get(state, "learning_rate") == 0.5


class TestStateTools:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("rule", RULES)
    def test_map_params(self, params, name, rule):
        """What is shaped as the parameters is found, as for a tree of shardings."""
        if rule == "stacked":
            params = jax.tree.map(lambda p: jnp.stack([p, p]), params)
        tx = OPTIMIZERS[name](0.02, weight_dimension_numbers=RULES[rule])
        state = tx.init(params)
        paths = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
        seen = []

        def note(moment, path):
            if not isinstance(moment, optax.MaskedNode):
                seen.append((path, moment.shape))
            return moment

        mapped = optax.tree.map_params(
            tx,
            note,
            state,
            paths,
            transform_non_params=lambda x: x,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        chex.assert_trees_all_equal(mapped, state)
        goes = jax.tree.leaves(optax_nora.matrix_mask(params, RULES[rule]))
        want = []
        for matrix, path, param in zip(
            goes, jax.tree.leaves(paths), jax.tree.leaves(params), strict=True
        ):
            want += [(path, param.shape)] * (1 if matrix else 2)  # Adam has two moments
        assert sorted(seen) == sorted(want)

    def test_get(self, params):
        _, state = run(optax_nora.nora(0.02), params, gradients(params, 2))
        mu = optax.tree.get(
            state, "mu", filtering=lambda path, _: path[-1].tuple_name == "MomentumState"
        )
        g1, g2 = (g["up"]["kernel"] for g in gradients(params, 2))
        want = 0.95 * 0.05 * g1 + 0.05 * g2
        chex.assert_trees_all_close(mu["up"]["kernel"], want, rtol=0, atol=tolerance(size=0.4))
        assert isinstance(mu["up"]["bias"], optax.MaskedNode)
        assert [*optax.tree.get(state, "nu")["up"]] == ["bias", "kernel"]
        assert optax.tree.get_all_with_path(state, "mu")[0][1].keys() == params.keys()

    def test_set(self, params):
        tx = optax_nora.scale_by_nora()
        matrices = {"kernel": params["up"]["kernel"]}
        ones = {"kernel": jnp.ones((8, 16))}
        assert optax.tree.get(optax.tree.set(tx.init(matrices), mu=ones), "mu") is ones


class TestAveraging:
    def test_schedule_free(self, params):
        """Its three sequences, by hand: z takes our steps, x averages z, y lies between."""
        tx = optax.contrib.schedule_free(optax_nora.nora(0.02, beta=0.0), 0.02, b1=0.9)
        grads = gradients(params)
        got, state = run(tx, params, grads)
        inner = optax_nora.nora(0.02, beta=0.0)
        inner_state = inner.init(params)
        x = y = z = params
        for t, g in enumerate(grads, 1):
            updates, inner_state = inner.update(g, inner_state, y)
            z = optax.apply_updates(z, updates)
            x = jax.tree.map(lambda x, z, t=t: (1 - 1 / t) * x + z / t, x, z)
            y = jax.tree.map(lambda x, z: 0.9 * x + 0.1 * z, x, z)
        evaluated = optax.contrib.schedule_free_eval_params(state, got)
        # x is made anew of y and z, which takes a tenth more.
        chex.assert_trees_all_close((got, evaluated), (y, x), rtol=0, atol=2 * ROUNDING)

    def test_ema_of_parameters(self, params):
        tx, ema = optax_nora.nora(0.02), optax.ema(0.5, debias=False)
        state, average = tx.init(params), ema.init(params)
        want = jax.tree.map(jnp.zeros_like, params)
        for g in gradients(params):
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            averaged, average = ema.update(params, average)
            want = jax.tree.map(lambda a, p: (a + p) / 2, want, params)
        chex.assert_trees_all_close(averaged, want, rtol=0, atol=ROUNDING)

    def test_ema_as_the_momentum(self, params):
        matrices = {"up": params["up"]["kernel"]}
        tx = optax.chain(optax.ema(0.9, debias=False), optax_nora.scale_by_nora(0.0))
        want, _ = run(optax_nora.scale_by_nora(0.9, momentum=1.0), matrices, gradients(matrices))
        got, _ = run(tx, matrices, gradients(matrices))
        chex.assert_trees_all_close(got, want, rtol=0, atol=of_steps(8, 1.0, 4))

    def test_ema_of_updates(self, params):
        tx = optax.chain(optax_nora.nora(0.02), optax.ema(0.0))
        assert_same_run(tx, optax_nora.nora(0.02), params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_a_name(params, name):
    """As kauldron does it: `jax.named_call` wants of a function what functions have."""
    tx = OPTIMIZERS[name](0.02)
    named = optax.GradientTransformation(jax.named_call(tx.init), jax.named_call(tx.update))
    assert_same_run(named, tx, params)


class TestUpdateArguments:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_unexpected_extra_arguments(self, params, name):
        tx = OPTIMIZERS[name](0.02)
        grads = gradients(params, 1)
        extra = {"value": jnp.ones([]), "value_fn": lambda _: 1.0, "nonsense": None}
        got, _ = run(tx, params, grads, **extra)
        chex.assert_trees_all_equal(got, run(tx, params, grads)[0])

    def test_extra_arguments_reach_a_neighbour(self, params):
        """In one chain, and under a wrapper, with a transformation that wants the loss."""
        plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
        tx = optax_nora.with_float32_master(optax.chain(optax_nora.nora(0.02), plateau))
        _, state = run(tx, params, gradients(params), value=jnp.ones([]))
        assert optax.tree.get(state, "scale") < 1

    @pytest.mark.parametrize(
        "tx",
        [
            *(make(0.02) for make in OPTIMIZERS.values()),
            optax_nora.scale_by_nora(),
            optax_nora.row_project(),
            optax_nora.keep_row_norms(),
            optax_nora.with_float32_master(optax.sgd(0.1)),
            optax.chain(optax.clip(1.0), optax_nora.nora(0.02)),
        ],
        ids=[*OPTIMIZERS, "scale_by_nora", "row_project", "keep_row_norms", "master", "chain"],
    )
    def test_no_params(self, params, tx):
        matrices = {"up": params["up"]["kernel"]}
        state = tx.init(matrices)
        with pytest.raises(ValueError, match=NO_PARAMS):
            tx.update(matrices, state)
        with pytest.raises(ValueError, match=NO_PARAMS):
            tx.update(matrices, state, None)

    @pytest.mark.parametrize("tx", [optax_nora.row_normalize(), optax_nora.scale_by_row_shape()])
    def test_what_needs_no_params(self, params, tx):
        matrices = {"up": params["up"]["kernel"]}
        got, _ = tx.update(matrices, tx.init(matrices))
        chex.assert_trees_all_equal(got, tx.update(matrices, tx.init(matrices), matrices)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_built_inside_a_traced_function_leaks_nothing(params, name):
    grads = gradients(params)[0]

    @jax.jit
    def one(params, learning_rate, beta):
        tx = OPTIMIZERS[name](learning_rate, beta)
        updates, state = tx.update(grads, tx.init(params), params)
        return tx.update(updates, state, params)

    with jax.checking_leaks():
        got, _ = one(params, 0.02, 0.9)
    tx = OPTIMIZERS[name](0.02, 0.9)
    updates, state = tx.update(grads, tx.init(params), params)
    want, _ = tx.update(updates, state, params)
    # XLA may fuse what runs in two steps here.
    chex.assert_trees_all_close(got, want, rtol=0, atol=injected(name))
