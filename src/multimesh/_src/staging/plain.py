"""Plain JAX: what runs when nothing says where (R15), under `ignore_transforms` and `disable_jit`.

Plain JAX refuses arguments on several device sets. After a step of ours the state lies so; it is
first put on the whole global mesh, each array by its own spec with the sliced axes replicated:

    w: P("data") on stage=1 (2 of 4 devices)  ->  P("data") on (stage, data) = all 4 devices
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from multimesh._src.staging.variants import device_sets, dims_on


def together(tree: Any, global_mesh: Mesh | None) -> Any:
    """Returns a pytree whose committed arrays lie on one device set.

    Arrays are moved only if they lie on several: to the global mesh, without one to the first
    device.
    """
    if len(device_sets(jax.tree.leaves(tree))) <= 1:
        return tree
    return jax.tree.map(lambda leaf: _put(leaf, global_mesh), tree)


def _put(leaf: Any, global_mesh: Mesh | None) -> Any:
    if not getattr(leaf, "committed", False):
        return leaf
    if global_mesh is None:
        return jax.device_put(leaf, jax.devices()[0])
    target = NamedSharding(global_mesh, PartitionSpec())
    if isinstance(leaf.sharding, NamedSharding):
        target = NamedSharding(global_mesh, spread_spec(leaf.sharding, global_mesh))
    # Between unlike device sets JAX copies only whole arrays safely.
    if leaf.sharding.num_devices > 1 and leaf.sharding.device_set != target.device_set:
        return jax.device_put(_on_host(leaf), target)
    return jax.device_put(leaf, target)


def _on_host(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data: Any = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return np.asarray(leaf)


def spread_spec(sharding: NamedSharding, global_mesh: Mesh) -> PartitionSpec:
    """Returns a spec on the global mesh: axes that its mesh slices or lacks are replicated."""
    dims = dims_on(sharding.spec, sharding.mesh)
    same = [
        tuple(n for n in dim if global_mesh.shape.get(n) == sharding.mesh.shape[n]) for dim in dims
    ]
    return PartitionSpec(*(dim or None for dim in same))


def jit_shardings(shardings: Any, global_mesh: Mesh | None) -> Any:
    """Returns in_shardings or out_shardings with every PartitionSpec on the global mesh."""

    def named(sharding: Any) -> Any:
        if isinstance(sharding, PartitionSpec) and global_mesh is not None:
            return NamedSharding(global_mesh, sharding)
        return sharding

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, (Sharding, PartitionSpec, SingleDeviceSharding))

    return jax.tree.map(named, shardings, is_leaf=is_leaf)


def plain_jit(
    fun: Callable[..., Any],
    options: Mapping[str, Any],
    in_shardings: Any,
    out_shardings: Any,
    global_mesh: Mesh | None,
) -> Any:
    """Returns `jax.jit(fun)` with the options of an `mjit` call."""
    extra = {}
    if in_shardings is not None:
        extra["in_shardings"] = jit_shardings(in_shardings, global_mesh)
    if out_shardings is not None:
        extra["out_shardings"] = jit_shardings(out_shardings, global_mesh)
    return jax.jit(fun, **options, **extra)


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Returns flat arguments of an equation as arrays of JAX or numpy."""
    return [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
