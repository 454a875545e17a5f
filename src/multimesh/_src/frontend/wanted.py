"""The layouts that in_shardings and out_shardings ask for, leaf by leaf.

    out_shardings = (P("data"), None)   results ({"a": x, "b": y}, loss)
    ->  x: spec P("data"),  y: spec P("data"),  loss: nothing

On the global mesh a sharding gives the spec and the partitioner the submesh; on another mesh it
gives both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from multimesh._src.errors import ShardingError, message
from multimesh._src.ir.memory import special_memory


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for one leaf: nothing, a layout, or a place and a layout."""

    spec: PartitionSpec | None = None
    placement: NamedSharding | None = None
    memory_kind: str | None = None  # None: the default memory

    @property
    def is_given(self) -> bool:
        """Whether anything is asked for."""
        return self.spec is not None

    def named(self, global_mesh: Mesh | None) -> NamedSharding | None:
        """The sharding: on the asked-for mesh, else the spec on the global mesh."""
        if self.placement is not None or self.spec is None:
            return self.placement
        if global_mesh is None:
            return None
        return NamedSharding(global_mesh, self.spec, memory_kind=self.memory_kind)


def wanted_leaves(
    shardings: Any, tree: Any, global_mesh: Mesh | None, what: str
) -> tuple[Wanted, ...]:
    """Returns what a prefix pytree of shardings asks for each leaf of `tree`.

    Args:
        shardings: A prefix of `tree` with NamedSharding, PartitionSpec, a single-device sharding
            or None (anything will do) as leaves.
        tree: The arguments or results.
        global_mesh: The mesh whose axes a PartitionSpec names.
        what: `in_shardings` or `out_shardings`, for errors.

    Raises:
        ShardingError: No prefix, no sharding, or a PartitionSpec without a global mesh.
    """
    if shardings is None:
        return (Wanted(),) * len(jax.tree.leaves(tree))
    if isinstance(shardings, list) and isinstance(tree, tuple):
        shardings = tuple(shardings)
    flat: list[Wanted] = []

    def add(sharding: Any, subtree: Any) -> None:
        want = _wanted(sharding, global_mesh, what)
        for leaf in jax.tree.leaves(subtree):
            _check_rank(want, leaf, what)
            flat.append(want)

    try:
        jax.tree.map(add, shardings, tree, is_leaf=_is_leaf)
    except ShardingError:
        raise
    except ValueError as error:
        raise ShardingError(
            message(
                f"`{what}` is not a prefix of the tree that it belongs to: {error}",
                ways=("give one sharding for all, or a tree with the same outer structure",),
            )
        ) from None
    return tuple(flat)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, PartitionSpec))


def _wanted(sharding: Any, global_mesh: Mesh | None, what: str) -> Wanted:
    match sharding:
        case None:
            return Wanted()
        case PartitionSpec():
            _check_spec(sharding, global_mesh, what)
            return Wanted(sharding)
        case NamedSharding() if isinstance(sharding.mesh, Mesh):
            place = None if sharding.mesh == global_mesh else sharding
            return Wanted(sharding.spec, place, special_memory(sharding))
        case SingleDeviceSharding():
            (device,) = sharding.device_set
            mesh = Mesh(np.array([device]), ("device",))
            kind = special_memory(sharding)
            place = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
            return Wanted(PartitionSpec(), place, kind)
    raise ShardingError(
        message(
            f"`{what}` has a leaf of type `{type(sharding).__name__}`.",
            ways=("use a `NamedSharding`, a `PartitionSpec` or None",),
        )
    )


def _check_spec(spec: PartitionSpec, global_mesh: Mesh | None, what: str) -> None:
    if global_mesh is None:
        raise ShardingError(
            message(
                f"`{what}` names `{spec}`, but there is no global mesh whose axes it could mean.",
                ways=("use a `NamedSharding`", "call inside a `MultiMesh`", "give `mjit(mesh=)`"),
            )
        )
    unknown = [name for name in _names(spec) if name not in global_mesh.axis_names]
    if unknown:
        axes = ", ".join(f"`{name}`" for name in global_mesh.axis_names)
        raise ShardingError(
            message(f"`{what}` names axis `{unknown[0]}` in `{spec}`; the global mesh has {axes}.")
        )


def _names(spec: PartitionSpec) -> Iterator[str]:
    for entry in spec:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from entry


def _check_rank(want: Wanted, leaf: Any, what: str) -> None:
    rank = len(np.shape(leaf)) if not hasattr(leaf, "shape") else len(leaf.shape)
    if want.spec is not None and len(want.spec) > rank:
        raise ShardingError(
            message(
                f"`{what}` gives `{want.spec}` to an array of rank `{rank}`.",
                ways=("shorten the spec",),
            )
        )
