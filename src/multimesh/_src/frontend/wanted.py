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

    _check_prefix(shardings, tree, what)
    jax.tree.map(add, shardings, tree, is_leaf=_is_leaf)
    return tuple(flat)


def _check_prefix(shardings: Any, tree: Any, what: str) -> None:
    """Raises a ShardingError if `shardings` is no prefix of the arguments or results `tree`."""
    arguments = what == "in_shardings"
    if isinstance(shardings, tuple) and isinstance(tree, tuple) and len(shardings) != len(tree):
        told = "positional arguments that are not static" if arguments else "results"
        ways = [f"give one sharding for all, or one for each of the {told}"]
        if arguments:
            ways.append(
                "pass the arguments by position: those by keyword have no `in_shardings`, as in "
                "`jax.jit`"
            )
        text = f"`{what}` has `{len(shardings)}` entries, but there are `{len(tree)}` {told}."
        raise ShardingError(message(text, ways=ways))
    found = _first_difference(shardings, tree)
    if found:
        path, ours, theirs = found
        belongs = "arguments" if arguments else "results"
        raise ShardingError(
            message(
                f"`{what}` is not a prefix of the {belongs}: `{what}{path}` is {ours}, but there "
                f"the {belongs} have {theirs}.",
                ways=("give one sharding for all, or a tree with the same outer structure",),
            )
        )


def _first_difference(shardings: Any, tree: Any) -> tuple[str, str, str] | None:
    """Where a tree of shardings is no prefix of `tree`: the path, and what stands there in both."""
    todo = [("", shardings, tree)]
    while todo:
        path, ours, theirs = todo.pop()
        (mine, mine_def), (other, other_def) = _children(ours), _children(theirs)
        if _is_leaf(ours) or _is_alone(ours, mine):
            continue  # a leaf that is no sharding is another mistake
        if mine_def != other_def:
            return path, _described(ours, mine), _described(theirs, other)
        pairs = zip(mine, other, strict=True)
        todo += reversed([(path + jax.tree_util.keystr(key), a, b) for (key, a), (_, b) in pairs])
    return None


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _is_alone(node: Any, children: list[tuple[Any, Any]]) -> bool:
    return len(children) == 1 and children[0][1] is node


def _described(node: Any, children: list[tuple[Any, Any]]) -> str:
    if _is_alone(node, children):
        return "an array"
    if isinstance(node, dict):
        return f"a `dict` with the keys {', '.join(f'`{key!r}`' for key in node) or '(none)'}"
    return f"a `{type(node).__name__}` of `{len(children)}`"


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
