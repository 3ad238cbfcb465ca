"""Checksums of a run's state: the same on any mesh, and other ones when a single bit is."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def _words(leaf: Array) -> Array:
    """The bits of a leaf as uint32."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _checksum(leaf: Array) -> Array:
    """The sum over i of word_i * odd_i modulo 2^32, in which the order of terms is the same.

    An odd factor makes no difference of one word 0, and factors that differ see words that swap.
    """
    words = _words(leaf)
    index = jnp.uint32(0)
    for axis, size in enumerate(words.shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(words * (index * jnp.uint32(0x9E3779B1) << 1 | 1), dtype=jnp.uint32)


@jax.jit
def _of_leaves(state: Any) -> list[tuple[Array, Array]]:
    """The checksum of each leaf, and whether all of it is finite."""
    return [(_checksum(leaf), jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state)]


def name(path: Any) -> str:
    """params/layers/0/mlp/up/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def of_state(state: Any) -> tuple[dict[str, int], list[str]]:
    """The checksum of each leaf by its name, and the leaves that are not finite."""
    names = [name(path) for path, _ in jax.tree.leaves_with_path(state)]
    found = dict(zip(names, jax.device_get(_of_leaves(state)), strict=True))
    return (
        {leaf: int(checksum) for leaf, (checksum, _) in found.items()},
        [leaf for leaf, (_, finite) in found.items() if not finite],
    )


def of_json(value: Any) -> str:
    """That of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
