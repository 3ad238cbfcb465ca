"""Routing by the logical axis names that Flax parameters carry."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

import jax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from optax_nora._default import Decision, Default, Rule, by_name
from optax_nora._leaves import Leaf, Path, PyTree, array_of, nodes_with_paths
from optax_nora._names import words
from optax_nora._rules import Frozen

# The last of these words in an axis' name says what it is, `no` and what follows apart.
KINDS = {
    "batch": "layers layer stage stages repeat repeats stack scan",
    "experts": "exp expert experts",
    "joint": "heads head kv qkv q k v",
    "window": "height width depth time spatial window conv",
    "adamw": "vocab vocabulary classes norm",
    "feature": "embed embedding mlp hidden in out input output features feature channels ffn ff "
    "lora rank",
}
_KIND_OF = {word: kind for kind, known in KINDS.items() for word in known.split()}


def _axis_names(node: Any) -> tuple[Any, ...] | None:
    # Linen boxes hold `names`; NNX Variables have metadata, whose key was `sharding_names` before.
    # Their attributes of these names would warn, or give the sharding of the array.
    if hasattr(node, "get_metadata"):
        metadata = node.get_metadata()
        names = metadata.get("out_sharding", metadata.get("sharding_names"))
    else:
        names = getattr(node, "names", None)
    return tuple(names) if isinstance(names, tuple | PartitionSpec) else None


def _mesh_axes(array: Any) -> frozenset[str]:
    """The axes of the mesh in context and of the array's own: no logical names."""
    own = getattr(getattr(getattr(array, "sharding", None), "mesh", None), "axis_names", ())
    return frozenset(jax.sharding.get_abstract_mesh().axis_names) | frozenset(own)


@dataclasses.dataclass(frozen=True)
class LogicalAxes(Rule):
    names: Mapping[Path, tuple[str | None, ...]]
    kinds: Mapping[str, str]

    def decide(self, leaf: Leaf) -> Decision:
        known = by_name(leaf)
        names = self.names.get(leaf.path)
        if names is None or len(names) > leaf.ndim or (known and known.numbers is None):
            return Default().decide(leaf)
        kinds = [self._kind(name) for name in names] + [None] * (leaf.ndim - len(names))
        if "adamw" in kinds:
            return Decision(None)
        if None in kinds:
            return Default().decide(leaf)
        if kinds[-1] == "experts":
            kinds[-1] = "feature"  # of a router, (embed, experts)
        axes = [axis for axis, kind in enumerate(kinds) if kind not in ("batch", "experts")]
        together = groupby(axes, lambda axis: "joint" if kinds[axis] == "joint" else axis)
        sides = [tuple(side) for _, side in together]
        if len(sides) < 2:
            return Decision(None)
        window = [kinds[side[0]] == "window" for side in sides]
        if window[-1] or window.count(False) != 2:
            return Default().decide(leaf)
        reduction = tuple(axis for axis in axes if axis not in sides[-1])
        return Decision(MuonDimensionNumbers(reduction, sides[-1]))

    def _kind(self, name: str | None) -> str | None:
        if name is None or name in self.kinds:
            return self.kinds.get(name or "")
        told = takewhile(lambda word: word != "no", words(name))
        return ([_KIND_OF[word] for word in told if word in _KIND_OF] or [None])[-1]


def from_logical_axes(
    params: PyTree,
    *,
    batch_axes: Sequence[str] = (),
    joint_axes: Sequence[str] = (),
    feature_axes: Sequence[str] = (),
    adamw_axes: Sequence[str] = (),
) -> Rule:
    """Route by the logical axis names that Flax parameters carry.

    Of the axes that are no batch axes, the last is the output and the other is reduced over;
    neighbouring axes of heads count as one, and those of a convolution's window are reduced over.
    So ``(embed, heads, kv)`` is reduced over axis 0, ``(heads, kv, embed)`` over axes 0 and 1,
    ``(layers, embed, mlp)`` over axis 1. Names are known by their words: ``moe_layers`` is a batch
    axis, ``q_heads`` one of heads, and what has a ``vocab`` axis goes to AdamW.

    Args:
      params: boxed Linen parameters (`nn.with_partitioning`, `nn.with_logical_partitioning`) or an
        NNX state whose Variables carry names; arrays or their shapes. The names are read here, as
        NNX no longer shows them at update.
      batch_axes: more names of axes along which layers or experts are stacked.
      joint_axes: more names of axes that are one side of a matrix together.
      feature_axes: more names of axes that are one side of a matrix alone.
      adamw_axes: more names that send a leaf to AdamW.

    Warns:
      UserWarning: if no leaf carries names.

    Returns:
      A rule. A leaf takes the default routing where its own name is that of a vector, an embedding
      or an output head, and where an axis has no name, one that is not known, or one of the mesh.

    Raises:
      TypeError: if names of axes are given as one string.

    Examples:
      >>> import flax.linen as nn, jax, optax_nora
      >>> init = nn.with_partitioning(nn.initializers.lecun_normal(), ('embed', 'heads', 'kv'))
      >>> params = {'query': init(jax.random.key(0), (64, 4, 16))}
      >>> optax_nora.infer_dimension_numbers(params, optax_nora.from_logical_axes(params))
      {'query': MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1, 2))}
    """
    found: dict[Path, tuple[str | None, ...]] = {}
    for path, node in nodes_with_paths(params)[0]:
        if (names := _axis_names(node)) is not None:
            physical = _mesh_axes(array_of(node))
            found[path] = tuple(
                name if isinstance(name, str) and name not in physical else None for name in names
            )
    if not found and jax.tree.leaves(params):
        warnings.warn("no leaf carries logical axis names: all take the default", stacklevel=2)
    given = {"batch": batch_axes, "joint": joint_axes, "feature": feature_axes, "adamw": adamw_axes}
    if strings := [names for names in given.values() if isinstance(names, str)]:
        raise TypeError(f"from_logical_axes: {strings[0]!r} is a string; give a tuple of names")
    kinds = {name: kind for kind, names in given.items() for name in names}
    return LogicalAxes(Frozen(found), Frozen(kinds))
