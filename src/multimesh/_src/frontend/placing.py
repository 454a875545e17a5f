"""Values placed by hand: `jax.device_put` and `jax.reshard` inside programs (R6).

    jax.device_put(x, NamedSharding(global_mesh, P("data")))    the spec; the task says where
    jax.device_put(x, NamedSharding(other_mesh, P("data")))     the place too: a seed
    jax.device_put(x, jax.devices()[3])                         the same on one device
    jax.device_put(x, jax.memory.Space.Host)                    only the memory

Each becomes one constraint equation (`ir.constraint`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from multimesh._src.errors import ShardingError, message
from multimesh._src.frontend import contexts
from multimesh._src.frontend.logical import constraint_params, constraints_are_logical
from multimesh._src.ir.constraint import UNCONSTRAINED, bind_constraint
from multimesh._src.jax_compat import placements


@contextlib.contextmanager
def redirect_placements(*, typed: bool = False) -> Iterator[None]:
    """While it is open, in this thread, `jax.device_put` and `jax.reshard` mean ours (for tracing).

    Args:
        typed: The program states shardings in its types: `reshard` has to change them.
    """
    with placements.redirect_placements(device_put, None if typed else reshard):
        yield


def device_put(
    x: Any, device: Any = None, *, src: Any = None, donate: Any = False, may_alias: Any = None
) -> Any:
    """Stands for `jax.device_put` in programs that are traced for us.

    `src`, `donate` and `may_alias` change no value; buffers are planned by the step.

    Args:
        x: A pytree of arrays.
        device: A sharding, device, memory space, spec on the global mesh or None (where it is);
            or a prefix pytree of them.
        src: As in JAX; not used.
        donate: As in JAX; not used.
        may_alias: As in JAX; not used.

    Raises:
        ShardingError: A target is none of these, or does not fit its array.
    """
    if device is None or not constraints_are_logical():
        options = {"src": src, "donate": donate, "may_alias": may_alias}
        return placements.call_device_put(x, device, **options)
    return _constrained(x, device, "device_put", put=True)


def reshard(xs: Any, out_shardings: Any) -> Any:
    """Stands for `jax.reshard` in programs that are traced for us.

    Raises:
        ShardingError: A sharding does not fit its array.
    """
    return _constrained(xs, out_shardings, "reshard", put=False)


def _constrained(x: Any, wanted: Any, what: str, *, put: bool) -> Any:
    mesh = contexts.active_global_mesh()
    leaves, treedef = jax.tree_util.tree_flatten_with_path(x)
    placed: list[Any] = []
    for (path, leaf), target in zip(leaves, _broadcast(wanted, x, what), strict=True):
        if target is None:
            placed.append(leaf if isinstance(leaf, jax.core.Tracer) else jnp.asarray(leaf))
            continue
        where = f"`{what}`{jax.tree_util.keystr(path)}"
        params = target_params(target, jnp.ndim(leaf), mesh, where)
        array = leaf if isinstance(leaf, jax.core.Tracer) else jnp.asarray(leaf)
        placed.append(bind_constraint(array, **params, put=put))
    return jax.tree.unflatten(treedef, placed)


def _broadcast(wanted: Any, tree: Any, what: str) -> list[Any]:
    try:
        shaped = jax.tree.broadcast(wanted, tree, is_leaf=_is_target)
    except ValueError as error:
        raise ShardingError(
            message(
                f"The targets `{jax.tree.structure(wanted, is_leaf=_is_target)}` of `{what}` are "
                f"no prefix of the arrays `{jax.tree.structure(tree)}`.",
                ways=("give one target for all arrays, or a tree of their upper nodes",),
            )
        ) from error
    return jax.tree.leaves(shaped, is_leaf=_is_target)


def _is_target(value: Any) -> bool:
    kinds = (Sharding, PartitionSpec, Format, jax.Device)
    return value is None or isinstance(value, kinds) or _is_space(value)


def _is_space(value: Any) -> bool:
    return placements.memory_kind_of_space(value) is not None


def target_params(target: Any, rank: int, global_mesh: Mesh | None, where: str) -> dict[str, Any]:
    """Returns the params of the constraint that a target of `device_put` asks for.

    Raises:
        ShardingError: It is no target, or does not fit an array of this rank.
    """
    if target is None:
        return {"dims": (UNCONSTRAINED,) * rank, "kind": "mesh"}
    if (kind := placements.memory_kind_of_space(target)) is not None:
        return {"dims": (UNCONSTRAINED,) * rank, "kind": "mesh", "memory_kind": kind}
    if isinstance(target, PartitionSpec):
        if global_mesh is None:
            raise ShardingError(
                message(
                    f"`{target}` names axes, but there is no global mesh whose axes it could mean.",
                    where=where,
                    ways=("call inside a `MultiMesh`, or give a `NamedSharding`",),
                )
            )
        target = NamedSharding(global_mesh, target)
    elif isinstance(target, jax.Device):
        target = SingleDeviceSharding(target)
    elif isinstance(target, Format):
        raise ShardingError(
            message(
                f"`{target}` asks for an order of dims in memory, which the compiler chooses for "
                "values inside a program.",
                where=where,
                ways=("give its sharding, `format.sharding`",),
            )
        )
    return constraint_params(target, rank, global_mesh, where)
