"""Where everything lives: the mesh and every PartitionSpec of the example.

Axes of the mesh: `data` (copies of the model), `fsdp` (parts of parameters and optimizer state),
`tensor` (parts of each matrix product). The batch is split over `data` and `fsdp`.

`fsdp` splits the output axis of a kernel where it can. A row, all the weights of one output, then
stays whole on one device, and a row-wise optimizer such as Nora needs no communication.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llama.config import MeshConfig, UserError

BATCH = P(("data", "fsdp"))
TENSOR_AXIS = {  # the axis of each matrix that `tensor` splits, counted from the end
    "embedding": -1,
    "query": -1,
    "key": -1,
    "value": -1,
    "out": -2,
    "gate": -1,
    "up": -1,
    "down": -2,
    "lm_head": -1,
}


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh over all devices, of any number of hosts."""
    devices = jax.devices() if devices is None else devices
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    if any(n < 1 and n != -1 for n in sizes.values()) or list(sizes.values()).count(-1) > 1:
        raise UserError(f"mesh {sizes}: sizes are positive, and one of them may be -1")
    known = math.prod(n for n in sizes.values() if n != -1)
    if len(devices) % known or (-1 not in sizes.values() and known != len(devices)):
        raise UserError(f"mesh {sizes} does not divide the {len(devices)} devices there are")
    shape = [len(devices) // known if n == -1 else n for n in sizes.values()]
    return jax.make_mesh(shape, tuple(sizes), (AxisType.Auto,) * 3, devices=devices)


def batch_parts(mesh: Mesh) -> int:
    """Parts that the batch is split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def name(path) -> str:
    """layers/0/mlp/up/kernel."""
    return "/".join(str(key.key) for key in path)


def param_shardings(params, mesh: Mesh):
    """A NamedSharding for each parameter, by the name of its layer and its shape."""

    def place(path, leaf) -> NamedSharding:
        names = name(path).split("/")
        tensor_axis = next((TENSOR_AXIS[n] for n in reversed(names) if n in TENSOR_AXIS), None)
        if tensor_axis is None:
            return NamedSharding(mesh, P())
        spec: dict[int, tuple[str, ...]] = {tensor_axis: ("tensor",)}
        if leaf.shape[tensor_axis] % mesh.shape["tensor"]:
            raise UserError(_uneven(name(path), leaf.shape, "tensor", mesh))
        for axis in (-1, -2):
            split = ("tensor", "fsdp") if axis == tensor_axis else ("fsdp",)
            if leaf.shape[axis] % math.prod(mesh.shape[name] for name in split) == 0:
                spec[axis] = split
                break
        else:
            raise UserError(_uneven(name(path), leaf.shape, "fsdp", mesh))
        return NamedSharding(mesh, P(*(spec.get(i - leaf.ndim) for i in range(leaf.ndim))))

    return jax.tree_util.tree_map_with_path(place, params)


def _uneven(leaf: str, shape: tuple[int, ...], axis: str, mesh: Mesh) -> str:
    return f"mesh.{axis}={mesh.shape[axis]} does not divide {leaf} of shape {shape}"


def like_params(tree, shardings, mesh: Mesh):
    """Shardings of an optimizer state: a leaf whose path ends as a parameter's lives with it."""
    place = dict(jax.tree_util.tree_flatten_with_path(shardings)[0])

    def find(path, leaf) -> NamedSharding:
        ends = (path[i:] for i in range(len(path)))
        return next((place[end] for end in ends if end in place), NamedSharding(mesh, P()))

    return jax.tree_util.tree_map_with_path(find, tree)


def put_batch(sequences: np.ndarray, mesh: Mesh) -> jax.Array:
    """The global batch, of which this process has `sequences`."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), sequences)
