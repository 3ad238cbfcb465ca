"""A whole model's step in one call: kernels for the leaves that have one, XLA for the rest."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._axes import Rows
from optax_nora._backend import by_kernel, has_kernel, uses_kernels
from optax_nora._checks import require_params
from optax_nora._default import Default
from optax_nora._leaves import Leaf, PyTree, map_leaves
from optax_nora._momentum import MomentumState
from optax_nora._routing import WeightDimensionNumbers, for_nora, resolve
from optax_nora._rows import Coefficients, widen

Array = jax.Array


class StepTransformation(optax.GradientTransformationExtraArgs):
    """An optimizer that can step the parameters itself: what `nora` returns.

    To optax it is a pair of ``init`` and ``update`` as all others. What wraps it, `optax.chain` for
    instance, has these two and no ``step``.
    """

    @property
    def step(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """``step(grads, state, params, grad_scale=None) -> (params, state)``.

        The parameters that `optax.apply_updates` makes of ``update``, from and to the same state;
        the two may alternate. Kernels read gradient, momentum and weight, and write momentum and
        weight: no updates are stored. Under `jax.jit` with parameters and state donated, in the
        order in which they are returned, both are changed in place. ``grad_scale`` multiplies all
        gradients on their way in: clipping by the global norm then costs no pass over memory.
        """
        return self.update.step  # pyright: ignore[reportAttributeAccessIssue]


class _Made:
    """What a kernel made of a leaf. No pytree, so that trees hold it in the place of an array."""

    def __init__(self, mu: Array, out: Array):
        self.mu, self.out = mu, out


class _Place(NamedTuple):
    """The matrices' part of the state, as `optax_nora._nora.matrices_and_adamw` nests it."""

    momentum: MomentumState
    count: Any  # of the learning rate's schedule; None where there is none

    @classmethod
    def of(cls, state: Any) -> "_Place":
        momentum, *_, rate = state.inner_states["matrix"].inner_state
        return cls(momentum, getattr(rate, "count", None))


def _with_mu(state: Any, mu: PyTree) -> Any:
    matrix = state.inner_states["matrix"]
    momentum, *others = matrix.inner_state
    matrix = matrix._replace(inner_state=(momentum._replace(mu=mu), *others))
    return state._replace(inner_states={**state.inner_states, "matrix": matrix})


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as functions are, for jax.jit
class Update:
    """``update`` of a `StepTransformation`, and its ``step``.

    Attributes:
      plain: the same optimizer in XLA alone.
      backend: as `optax_nora.nora` has it.
      coefficients: of a matrix, from its shape, its rows, whether it decays, and the step's number.
      weight_dimension_numbers: as `optax_nora.nora` has them.
      weight_decay_mask: as `optax_nora.nora` has it.
    """

    plain: optax.GradientTransformationExtraArgs
    backend: str
    coefficients: Callable[[tuple[int, ...], Rows, Any, Any], Coefficients]
    weight_dimension_numbers: WeightDimensionNumbers
    weight_decay_mask: Any

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        if not uses_kernels(self.backend):
            return self.plain.update(updates, state, params, **extra_args)
        require_params(params)
        made = self._by_kernels(updates, state, params, 1.0, write_weight=False)
        left, new_state = self._by_plain(made, updates, state, params, extra_args)
        return _merge(made, "out", updates, left), new_state

    def step(
        self, grads: PyTree, state: PyTree, params: PyTree, grad_scale: Any = None
    ) -> tuple[PyTree, PyTree]:
        require_params(params)
        scale = 1.0 if grad_scale is None else grad_scale
        made = self._by_kernels(grads, state, params, scale, write_weight=True)
        if grad_scale is not None:
            grads = map_leaves(lambda _, g: scale * widen(g), grads)
        updates, new_state = self._by_plain(made, grads, state, params, {})
        left = optax.apply_updates(_without(made, params), updates)
        return _merge(made, "out", params, left), new_state

    def _by_kernels(
        self, grads: PyTree, state: Any, params: PyTree, grad_scale: Any, *, write_weight: bool
    ) -> PyTree:
        """A tree of `_Made` for the leaves that have a kernel, and `optax.MaskedNode`."""
        rows_at = resolve(params, self.weight_dimension_numbers, Default())
        momentum, count = _Place.of(state)
        kernels = uses_kernels(self.backend)

        def one(leaf: Leaf, w: Array, g: Array, mu: Any, decays: Any) -> Any:
            rows = for_nora(leaf, rows_at[leaf.path])
            if not kernels or mu is None or rows is None or not has_kernel(rows, g, mu, w):
                return optax.MaskedNode()
            numbers = self.coefficients(leaf.shape, rows, decays, count)
            numbers = numbers._replace(grad_scale=grad_scale)
            vector = jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])
            kernel = by_kernel(rows, leaf.ndim, self.backend, write_weight=write_weight)
            return _Made(*kernel(vector, g, mu, w))

        return map_leaves(one, params, grads, momentum.mu, self._decays(params))

    def _decays(self, params: PyTree) -> PyTree:
        """A boolean for every leaf of ``params``."""
        mask = self.weight_decay_mask
        mask = True if mask is None else mask(params) if callable(mask) else mask
        return jax.tree.map(lambda yes, leaves: jax.tree.map(lambda _: yes, leaves), mask, params)

    def _by_plain(
        self, made: PyTree, grads: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """The updates of the leaves that no kernel made, and the state of all."""
        mu = _Place.of(state).momentum.mu
        updates, new_state = self.plain.update(
            _without(made, grads),
            _with_mu(state, _without(made, mu)),
            _without(made, params),
            **extra_args,
        )
        new_mu = _merge(made, "mu", mu, _Place.of(new_state).momentum.mu)
        return updates, _with_mu(new_state, new_mu)


def _without(made: PyTree, tree: PyTree) -> PyTree:
    return map_leaves(lambda _, x, done: x if done is None else optax.MaskedNode(), tree, made)


def _merge(made: PyTree, field: str, like: PyTree, left: PyTree) -> PyTree:
    """A tree like ``like`` of what kernels made, and of ``left`` for the other leaves."""
    return map_leaves(
        lambda _, old, new, done: new if done is None else getattr(done, field), like, left, made
    )
