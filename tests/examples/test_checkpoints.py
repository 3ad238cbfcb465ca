"""A checkpoint is what was saved, to the last bit, or it is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.llama import checksums
from examples.llama.checkpoint import Checkpoints
from examples.llama.config import UserError

RUN = {"seed": 1, "text": "abc"}


def state(step: int) -> dict:
    rows = np.random.default_rng(step).normal(size=(16, 24))
    return {
        "w": jnp.asarray(rows, jnp.float32),
        "b": jnp.asarray(rows[0], jnp.bfloat16),
        "n": jnp.int32(step),
    }


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 2 and 4."""
    with Checkpoints(tmp_path, 3, RUN) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state(step), {"next": step})
    return tmp_path


def restore(folder, identity=RUN):
    with Checkpoints(folder, 3, identity) as checkpoints:
        return checkpoints.restore(LIKE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_a_checksum_sees_every_bit_and_every_swap(dtype):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2 if dtype == "bool" else 200, (3, 5)).astype(jnp.dtype(dtype))
    ((known, _),) = checksums._of_leaves({"x": jnp.asarray(words)})
    raw = words.view(np.uint8).reshape(-1)
    for place in range(len(raw)):
        for bit in range(1 if dtype == "bool" else 8):
            raw[place] ^= 1 << bit
            ((other, _),) = checksums._of_leaves({"x": jnp.asarray(words.copy())})
            assert other != known
            raw[place] ^= 1 << bit
    flat = words.reshape(-1)
    i = next(i for i in range(1, flat.size) if flat[i] != flat[0])
    flat[[0, i]] = flat[[i, 0]]
    ((other, _),) = checksums._of_leaves({"x": jnp.asarray(words.copy())})
    assert other != known


def test_a_checksum_is_the_same_on_any_mesh():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    mesh = jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2)
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a", "b")))
    assert checksums.of_state({"x": spread}) == checksums.of_state({"x": x})


def test_flipped_bits_are_refused_and_the_checkpoint_before_is_offered(folder):
    files = sorted(p for p in (folder / "4").rglob("*") if p.is_file() and p.stat().st_size > 50)
    rng, expected = np.random.default_rng(0), state(4)
    refused = 0
    for path in [p for p in files if p.name not in ("_METADATA", "_CHECKPOINT_METADATA")]:
        whole = path.read_bytes()
        for place in rng.integers(0, len(whole), 6):
            broken = bytearray(whole)
            broken[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(broken)
            message = None
            try:
                found, at = restore(folder)
            except UserError as error:
                message = str(error)
            if message:
                refused += 1
                assert message.endswith("step 2 is whole: to go on from it, move 4 elsewhere")
            else:  # a byte that nothing reads
                jax.tree.map(np.testing.assert_array_equal, found, expected)
                assert at == {"next": 4}
        path.write_bytes(whole)
    assert refused > 10


def test_a_leaf_that_is_not_what_was_saved_is_named(folder, monkeypatch):
    of_state = checksums.of_state

    def other(tree):
        return of_state(tree | {"w": tree["w"].at[3, 5].add(1)} if tree["n"] == 4 else tree)

    monkeypatch.setattr(checksums, "of_state", other)
    with pytest.raises(UserError, match=r"4 cannot be used: w is not what was saved; step 2 is"):
        restore(folder)


def test_an_empty_folder_blocks_nothing(folder):
    (folder / "6").mkdir()
    with Checkpoints(folder, 3, RUN) as checkpoints:
        found, _ = checkpoints.restore(LIKE)
        assert found["n"] == 4
        checkpoints.save(6, state(6), {"next": 6})
    assert restore(folder)[0]["n"] == 6


def test_a_run_of_other_settings_is_told_what_to_do(folder):
    with pytest.raises(UserError, match=r"seed is 2, was 1; a run keeps its settings: leave the"):
        restore(folder, RUN | {"seed": 2})
    restore(folder, {"seed": 1})  # of any text, to sample from


def test_a_state_that_is_not_finite_is_not_saved(folder):
    with Checkpoints(folder, 3, RUN) as checkpoints:
        bad = state(6) | {"b": jnp.full(24, jnp.nan, jnp.bfloat16)}
        with pytest.raises(UserError, match="step 6: b is not finite, and is not saved; the last"):
            checkpoints.save(6, bad, {})
    assert restore(folder)[0]["n"] == 4
