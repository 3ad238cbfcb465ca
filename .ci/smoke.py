"""What a user of the wheel has: jax, optax and `optax_nora`, nothing else. Optimise something."""

import importlib.resources
import importlib.util

import jax
import jax.numpy as jnp
import optax

import optax_nora

assert "site-packages" in optax_nora.__file__, f"not the wheel: {optax_nora.__file__}"
assert importlib.resources.files("optax_nora").joinpath("py.typed").is_file(), "py.typed is missing"
for extra in ("flax", "orbax", "pytest"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is here: this environment isn't empty"

key_w, key_a = jax.random.split(jax.random.key(0))
params = {"kernel": jax.random.normal(key_w, (64, 32)), "bias": jnp.ones(32)}
aim = jax.random.normal(key_a, (64, 32))


def loss_fn(params):
    """Turn each column of the kernel to that of `aim`, whatever its length; shrink the bias."""
    cosines = jnp.sum(params["kernel"] * aim, axis=0) / (
        jnp.linalg.norm(params["kernel"], axis=0) * jnp.linalg.norm(aim, axis=0)
    )
    return jnp.mean(1 - cosines) + jnp.mean(params["bias"] ** 2)


tx = optax_nora.nora(optax.cosine_decay_schedule(0.5, 200), adam_learning_rate=0.02)
state = tx.init(params)


@jax.jit
def step(params, state):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


first = last = loss_fn(params)
for _ in range(200):
    params, state, last = step(params, state)
print(f"loss {first:.4f} -> {last:.4f} with jax {jax.__version__}, optax {optax.__version__}")
assert last < 0.01 * first, "Nora from the wheel does not optimise"
