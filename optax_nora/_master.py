"""float32 copies of low-precision parameters, around any optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_nora._checks import check_transformation, require_params
from optax_nora._leaves import Leaf, PyTree, map_leaves
from optax_nora._states import StateError, explained

Array = jax.Array


class MasterState(NamedTuple):
    """State of `with_float32_master`.

    Attributes:
      master: float32 copies of the bfloat16 and float16 parameters; nothing for the others.
      inner_state: the state of the wrapped optimizer, made from the float32 parameters.
    """

    master: PyTree
    inner_state: PyTree


def _is_low(array: Any) -> bool:
    return jnp.result_type(array) in (jnp.bfloat16, jnp.float16)


def _rounded(master: Array, dtype: Any) -> Array:
    """What a master shows: no infinity, as an update could not lead back from there."""
    greatest = float(jnp.finfo(dtype).max)
    # The barrier keeps XLA from dropping the rounding as excess precision.
    return jax.lax.optimization_barrier(jnp.clip(master, -greatest, greatest).astype(dtype))


def _current(leaf: Leaf, param: Array, master: Array | None) -> Array:
    """The parameter as ``inner`` sees it: its master, unless it was changed from outside."""
    if master is None:
        return param
    if not _is_low(param):
        raise StateError(
            f"{leaf} has a float32 master, as it was of lower precision before: the updates are "
            "float32, add them by optax.apply_updates, which keeps the parameters' dtypes"
        )
    shown, seen = (
        jax.lax.bitcast_convert_type(x, jnp.int16) for x in (_rounded(master, param.dtype), param)
    )
    return jnp.where(shown == seen, master, param.astype(jnp.float32))


def with_float32_master(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Let ``inner`` optimize float32 copies of the low-precision parameters.

    A step smaller than half a unit in the last place of a bfloat16 weight is lost when it is added
    there; added to a float32 master it is not. Each parameter is its rounded master:

    .. math::
      M \leftarrow M + \mathrm{inner}(g, M), \quad w = \mathrm{round}(M)

    Where a parameter is not its rounded master, as it was loaded, averaged or merged in the
    meantime, the parameter counts and becomes the master.

    Args:
      inner: any optimizer; it sees float32 parameters and float32 gradients. What compares updates
        with gradients, such as `optax.apply_if_finite`, belongs in here, not around.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose updates are float32 and such that
      `optax.apply_updates` leaves each parameter equal to its rounded master, which is finite.

    Raises:
      ValueError: at ``update`` without params, or where a parameter with a master has become
        float32, as `equinox.apply_updates` would make it.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_nora
      >>> params = {'kernel': jnp.ones((2, 2), jnp.bfloat16)}
      >>> tx = optax_nora.with_float32_master(optax.sgd(1e-3))
      >>> state = tx.init(params)
      >>> for _ in range(4):  # bfloat16 has no number between 0.996 and 1
      ...     updates, state = tx.update({'kernel': jnp.ones((2, 2))}, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params['kernel'][0, 0]
      Array(0.996094, dtype=bfloat16)

    References:
      The authors' code keeps such copies for bfloat16 and float16 parameters.
    """
    check_transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> MasterState:
        def copy(_: Leaf, param: Array) -> Any:
            return param.astype(jnp.float32) if _is_low(param) else optax.MaskedNode()

        master = map_leaves(copy, params)
        return MasterState(master, inner.init(map_leaves(_current, params, master)))

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, MasterState]:
        require_params(params)
        with explained(init, params, state):
            full = map_leaves(_current, params, state.master)
            wide = map_leaves(
                lambda _, g, m: g if m is None else g.astype(jnp.float32), updates, state.master
            )
            steps, inner_state = inner.update(wide, state.inner_state, full, **extra_args)
        master = map_leaves(lambda _, m, w, u: w + u, state.master, full, steps)

        def visible(_: Leaf, step: Array, param: Array, moved: Array | None) -> Array:
            if moved is None:
                return step
            shown = _rounded(moved, param.dtype).astype(jnp.float32)
            return shown - param.astype(jnp.float32)

        return map_leaves(visible, steps, params, master), MasterState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
