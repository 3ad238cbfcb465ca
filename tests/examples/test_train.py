"""A run: it learns, it goes on exactly where it stopped, and the mesh changes nothing but speed."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import logs
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

from examples.llama import check, cli, optimizers, sharding, speed
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import Config, UserError
from examples.llama.data import Contexts
from examples.llama.evaluate import evaluate, unigram_entropy
from examples.llama.optimizers import is_fused
from examples.llama.step import make_program
from examples.llama.train import train
from examples.llama.trainer import Trainer


def metrics(config) -> list[dict]:
    return logs.metrics(config.out / config.name)


def losses(config, corpus, steps: int) -> np.ndarray:
    """The losses of the first steps, without a folder."""
    run = dataclasses.replace(config, out=Path()), steps
    if run not in FOUND:  # several tests compare with the same run
        trainer = Trainer(config, corpus)
        trainer.start()
        found = []
        for _ in range(steps):
            tokens = sharding.put_batch(next(trainer.batches), trainer.mesh)
            trainer.state, values = trainer.program.train(trainer.state, tokens, trainer.rates)
            found.append(float(values["loss"]))
        FOUND[run] = np.array(found)
    return FOUND[run]


FOUND: dict[tuple[Config, int], np.ndarray] = {}


def saved(config, corpus) -> dict[str, np.ndarray]:
    """The bits of the last checkpoint."""
    identity = cli.identity(config, corpus.identity)
    with Checkpoints(config.out / config.name / "checkpoints", 1, identity) as checkpoints:
        state, _ = checkpoints.restore(make_program(config, _mesh(config), corpus.end).state)
    return {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(state)}


def _mesh(config):
    shape = config.mesh.data * config.mesh.fsdp * config.mesh.tensor
    return sharding.make_mesh(config.mesh, jax.devices()[:shape])


@pytest.fixture(autouse=True)
def devices_of_the_mesh(monkeypatch):
    """A mesh of fewer than the eight devices that the tests have takes the first of them."""
    make = sharding.make_mesh
    monkeypatch.setattr(
        sharding,
        "make_mesh",
        lambda config, devices=None: make(
            config, devices or jax.devices()[: config.data * config.fsdp * config.tensor]
        ),
    )


def test_it_learns(small, replaced, corpus):
    config = replaced(small, steps=60, learning_rate=0.02, warmup=5, save_every=60)
    train(config)
    held_out = [line["held_out_loss"] for line in metrics(config) if "held_out_loss" in line]
    # Each word is followed by one of two, one three times likelier: about 0.56 nats a word
    assert held_out[-1] < 0.5 * unigram_entropy(corpus.shards("held_out")) < held_out[0]


def test_a_stopped_run_goes_on_to_the_same_bits(small, replaced, corpus):
    whole = replaced(small, name="whole", geometry_every=3)
    train(whole)
    parts = replaced(whole, name="parts")
    train(parts, stopped=lambda step: step == 5)
    assert metrics(parts)[-1]["step"] == 5
    train(replaced(parts, resume=True))
    assert metrics(parts) == metrics(whole)
    a, b = saved(whole, corpus), saved(parts, corpus)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_what_was_done_after_the_last_checkpoint_is_done_again(small, replaced):
    whole = replaced(small, name="whole")
    train(whole)
    parts = replaced(small, name="parts", save_every=2)

    class Killed(Exception):
        pass

    def kill(step: int) -> bool:
        if step == 7:
            raise Killed
        return False

    with pytest.raises(Killed):
        train(parts, stopped=kill)
    train(replaced(parts, resume=True))
    assert metrics(parts) == metrics(whole)


def test_a_run_goes_on_upon_another_mesh(small, replaced):
    whole = replaced(small, name="whole")
    train(whole)
    parts = replaced(small, name="parts", mesh={"data": 2, "fsdp": 4})
    train(parts, stopped=lambda step: step == 4)
    train(replaced(parts, resume=True, mesh={"data": 1, "fsdp": 2, "tensor": 2}))
    for a, b in zip(metrics(whole), metrics(parts), strict=True):
        for name in {"loss", "held_out_loss"} & a.keys():
            # Losses of 6 are written to 5e-7. Sums in another order differ by a few times that, and
            # 8 steps carry it on; a step that is missed, or made twice, changes them by 1e-2.
            assert a[name] == pytest.approx(b[name], abs=1e-4)


@pytest.mark.parametrize(
    ("mesh", "scan_layers"),
    [((8, 1, 1), False), ((1, 8, 1), False), ((1, 1, 4), False), ((2, 2, 2), True)],
    ids=["data", "fsdp", "tensor", "mixed"],
)
def test_meshes_give_the_losses_of_one_device(small, replaced, corpus, mesh, scan_layers):
    layers = 2 if scan_layers else 1  # all of them have the same leaves
    model = {"kv_heads": 4, "layers": layers}
    one = replaced(small, model=model, steps=20, scan_layers=scan_layers)
    many = replaced(one, mesh=dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)))
    # Sums in another order, amplified by 20 steps; what we see is 2e-6, and 1e-2 from step to step.
    np.testing.assert_allclose(losses(many, corpus, 20), losses(one, corpus, 20), atol=1e-4)


@pytest.mark.parametrize("optimizer", optimizers.RECIPES)
def test_state_lives_with_its_parameters(small, replaced, corpus, optimizer):
    config = replaced(small, optimizer=optimizer, mesh={"data": 2, "fsdp": 2, "tensor": 2})
    state = make_program(config, _mesh(config), corpus.end).state
    places = {
        sharding.name(path): x.sharding for path, x in jax.tree.leaves_with_path(state.params)
    }
    matrices = [(path, x) for path, x in jax.tree.leaves_with_path(state.opt_state) if x.ndim == 2]
    assert len(matrices) >= len([x for x in jax.tree.leaves(state.params) if x.ndim == 2])
    for path, leaf in matrices:
        name = next(n for n in places if jax.tree_util.keystr(path).endswith(_key(n)))
        assert leaf.sharding == places[name]
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size / 4  # of fsdp * tensor


def _key(name: str) -> str:
    """layers/0/kernel as jax writes it: ['layers'][0]['kernel']."""
    return "".join(f"[{part}]" if part.isdigit() else f"['{part}']" for part in name.split("/"))


def test_the_parameters_are_never_whole_on_one_device(small, replaced, corpus):
    config = replaced(small, mesh={"fsdp": 8})
    program = make_program(config, _mesh(config), corpus.end)
    memory = program.init.lower(jax.random.key(0)).compile().memory_analysis()
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.state))
    assert memory.output_size_in_bytes < whole / 6
    assert memory.temp_size_in_bytes < whole / 2


@pytest.mark.parametrize(("micro_batch", "fsdp"), [(2, 1), (1, 2)])
def test_accumulation_equals_one_large_batch(small, replaced, corpus, micro_batch, fsdp):
    one = replaced(small, mesh={"fsdp": fsdp})
    parts = replaced(one, micro_batch=micro_batch)
    # Sums in another order, as above.
    np.testing.assert_allclose(losses(parts, corpus, 8), losses(one, corpus, 8), atol=1e-4)


def test_one_compile_serves_a_sweep(small, replaced, corpus):
    program = make_program(small, _mesh(small), corpus.end)
    tokens = jnp.ones((small.batch, small.model.context + 1), jnp.int32)
    for seed, rate in enumerate((0.1, 0.01)):
        state = program.init(jax.random.key(seed))
        config = replaced(
            small, learning_rate=rate, weight_decay=rate, seed=seed, steps=9 + seed, warmup=seed
        )
        program.train(state, tokens, optimizers.peak_rates(config))
    assert program.train._cache_size() == program.init._cache_size() == 1


def test_the_schedule_warms_up_and_ends_at_its_fraction(small, replaced):
    config = replaced(small, warmup=4, steps=12, learning_rate=2.0, adam_learning_rate=3.0)
    peak = optimizers.peak_rates(config)
    rates = [optimizers.rates_at(jnp.int32(i), peak, 0.1) for i in range(13)]
    np.testing.assert_allclose([r.matrix for r in rates[:5]], [0.5, 1, 1.5, 2, 2])
    np.testing.assert_allclose([rates[8].matrix, rates[12].matrix], [1.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose([rates[0].other, rates[12].other], [0.75, 0.3], rtol=1e-6)
    assert all(r.weight_decay == peak.weight_decay for r in rates)


def test_without_warmup_the_first_step_is_at_the_peak(small, replaced):
    peak = optimizers.peak_rates(replaced(small, warmup=0))
    assert optimizers.rates_at(jnp.int32(0), peak, 0.1) == peak


def test_evaluation_weighs_tokens_not_batches(corpus):
    """By hand: losses 1, 2, ..., by the input token, over two batches of unequal content."""
    source = Contexts([np.array([1, 2, 3, 4, 5, 0, 6, 0], np.uint16)], 3, 0)

    def step(_, tokens):
        inputs = tokens[:, :-1]
        return jnp.sum(inputs), jnp.sum(inputs != 0)

    mesh = sharding.make_mesh(type("Mesh", (), {"data": 1, "fsdp": 1, "tensor": 1}))
    result = evaluate(step, None, source, 2, 99, mesh, (0, 1))
    # inputs 1 2 3 | 4 5 end | 6: the end and the padding do not count
    assert result.tokens == 6
    assert result.loss == pytest.approx((1 + 2 + 3 + 4 + 5 + 6) / 6)
    assert result.perplexity == pytest.approx(np.exp(3.5))
    limited = evaluate(step, None, source, 2, 1, mesh, (0, 1))
    assert limited == (2.0, 3)


def test_unigram_entropy_by_hand():
    tokens = [np.array([1, 1, 2], np.uint16), np.array([3], np.uint16)]
    expected = -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25))
    assert unigram_entropy(tokens) == pytest.approx(expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("value", "last"), [(3e38, 5), (jnp.inf, 4)], ids=["finite", "infinite"])
def test_a_gradient_that_is_not_finite_stops_the_run(
    small, replaced, corpus, monkeypatch, fused, value, last
):
    """The first bad leaf is named, and the checkpoint is the last one that is finite."""
    start = Trainer.start
    reached = {}

    def poison(step: int) -> bool:
        trainer = reached["trainer"]
        if step == 5:
            reached["before"] = jax.tree.map(np.asarray, trainer.state.opt_state)
            head = trainer.state.params["lm_head"]
            head["kernel"] = head["kernel"].at[0, 0].set(value)
        return False

    monkeypatch.setattr(Trainer, "start", lambda self: (reached.update(trainer=self), start(self)))
    config = replaced(small, log_every=4, fused=fused)
    with pytest.raises(UserError, match=r"step 6: the gradient of embed/embedding is not finite"):
        train(config, stopped=poison)
    bits = saved(config, corpus)
    assert bits[".step"] == last
    if last < 5:
        return
    for path, leaf in jax.tree.leaves_with_path(reached["before"]):
        name = ".opt_state" + jax.tree_util.keystr(path)
        np.testing.assert_array_equal(bits[name], leaf, err_msg=name)


@pytest.mark.parametrize("precision", ["mixed", "bfloat16_master", "bfloat16"])
def test_precisions(small, replaced, corpus, precision):
    config = replaced(small, precision=precision, micro_batch=4)
    trainer = Trainer(config, corpus)
    low = jnp.float32 if precision == "mixed" else jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(trainer.program.state.params)} == {jnp.dtype(low)}
    state = jax.tree.leaves_with_path(trainer.program.state.opt_state)
    kept = {x.dtype for path, x in state if "'query'" in jax.tree_util.keystr(path)}
    assert (jnp.dtype(jnp.float32) in kept) == (precision != "bfloat16")
    # bfloat16 keeps 8 bits: losses of size 5.7 are off by 5.7 / 256 or so
    expected = losses(replaced(small, precision="float32"), corpus, 8)
    np.testing.assert_allclose(losses(config, corpus, 8), expected, atol=0.05)


@pytest.mark.parametrize("optimizer", optimizers.RECIPES)
def test_every_optimizer_learns(small, replaced, corpus, optimizer):
    config = replaced(small, optimizer=optimizer, steps=12, model={"layers": 1})
    found = losses(config, corpus, 12)
    assert found[-1] < found[0] - 0.2


@pytest.mark.parametrize("optimizer", ["nora", "muon"])
def test_scanned_layers_train_as_the_loop(small, replaced, corpus, optimizer):
    loop = replaced(small, optimizer=optimizer)
    scan = replaced(loop, scan_layers=True)
    # float32 sums in another order, over 8 steps; Muon's iteration amplifies them
    np.testing.assert_allclose(losses(loop, corpus, 8), losses(scan, corpus, 8), atol=1e-4)


def test_the_rows_of_every_matrix_are_logged(small, replaced):
    config = replaced(small, steps=4, geometry_every=2)
    train(config)
    lines = [line for line in metrics(config) if "rows" in line]
    assert [line["step"] for line in lines] == [2, 4]
    rows = lines[0]["rows"]
    assert len(rows) == 2 * 7  # of two blocks: query, key, value, out, gate, up, down
    assert rows["layers/0/mlp/up/kernel"]["norm_mean"] == pytest.approx(0.02 * 32**0.5, rel=0.1)
    assert all(0 < row["angle_mean"] < 1 for row in rows.values())


def test_tensorboard_holds_the_metrics(small, replaced):
    config = replaced(small, tensorboard=True, geometry_every=4)
    train(config)
    (events,) = (config.out / config.name / "tensorboard").iterdir()
    written, data = {}, events.read_bytes()
    while data:  # records of length, checksum, event, checksum
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        written |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
        data = data[16 + size :]
    logged = {
        (line["step"], name.replace(".", "/")): value
        for line in metrics(config)
        for name, value in cli.flatten(line)
    }
    for key, value in logged.items():
        if key[1] not in ("step", "tokens"):
            assert written[key] == pytest.approx(value, rel=1e-6), key  # stored in float32
    assert (4, "rows/layers/0/mlp/up/kernel/norm_mean") in written


def test_tensorboard_without_its_package(small, replaced, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match="needs the package tensorboardX: pip install"):
        check.settings(replaced(small, tensorboard=True))


def test_speed_reports_what_it_measures(small, corpus, monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 2)
    monkeypatch.setattr(speed, "REPEATS", 1)
    trainer = Trainer(small, corpus)
    found = speed.measure(trainer)
    tokens = small.batch * small.model.context
    assert found["tokens_per_second"] == round(tokens / found["step_seconds"])
    assert min(found["optimizer_seconds"], found["step_seconds_same_batch"]) > 0
    assert trainer.step == 3  # with text: one to compile, two to measure
    assert int(trainer.state.step) == 5


def test_the_optimizer_is_timed(small, replaced):
    config = replaced(small, steps=4)
    train(config)
    path = config.out / config.name / "metrics.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["optimizer_seconds"] > 0
    assert last["optimizer_share"] > 0


def test_one_step_alone_is_compiled_and_not_timed(small, replaced):
    config = replaced(small, steps=1)
    train(config)
    path = config.out / config.name / "metrics.jsonl"
    assert "optimizer_share" not in path.read_text()


def test_blocks_are_in_the_table_of_what_is_trained(small, corpus, replaced, capsys):
    Trainer(replaced(small, block_rows=16), corpus).show()
    assert re.search(r" \d+ x 16, [\d,]+ ops", capsys.readouterr().out)


def test_nora_steps_the_parameters_itself_as_optax_would(small, replaced, corpus):
    fused, plain = (losses(replaced(small, fused=fused), corpus, 8) for fused in (True, False))
    # Another program: gradients are scaled before or after they are rounded.
    np.testing.assert_allclose(fused, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, True),
        ({"fused": False}, False),
        ({"optimizer": "rmnp"}, True),
        ({"optimizer": "sso"}, False),
        ({"precision": "bfloat16_master"}, False),
        ({"precision": "bfloat16"}, True),
    ],
)
def test_what_changes_the_updates_is_not_left_out(small, replaced, fields, fused):
    assert is_fused(replaced(small, **fields)) == fused


def test_an_optimizer_of_ones_own_is_told_the_rates(small, replaced, corpus):
    config = replaced(small, learning_rate=0.5, warmup=2)
    trainer = Trainer(config, corpus, make_optimizer=lambda rates: optax.sign_sgd(rates.matrix))
    trainer.start()
    before = jax.tree.map(np.asarray, trainer.state.params["lm_head"])
    trainer.advance()
    moved = np.abs(trainer.state.params["lm_head"]["kernel"] - before["kernel"])
    # Half of the peak in the first of two steps of warm-up; weights below 1 round by 6e-8.
    np.testing.assert_allclose(moved, 0.25, atol=1e-7)
