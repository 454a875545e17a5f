"""Logical shardings: constraints whose names are mapped to mesh axes by the task that runs them.

    with_sharding_constraint(x, P("batch", "model"))     x: f32[8, 4]
    task: pairs (("batch", "data"), ("model", "tensor")), axis sizes {"data": 2, "tensor": 4}
    ->  dims (("data",), ("tensor",))

Resolution is a pure function of the dims, the shape, the pairs in priority order and the sizes of
the submesh's axes (`resolve_dims`); it runs once the partitioner knows the task of a constraint.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from multimesh._src import config
from multimesh._src.errors import ShardingError, listed, message
from multimesh._src.frontend import contexts
from multimesh._src.ir.constraint import (
    UNCONSTRAINED,
    Dims,
    bind_constraint,
    constraint_p,
    dims_of,
)
from multimesh._src.jax_compat import constraints, jaxprs

Pairs: TypeAlias = Sequence[tuple[str, str]]


# --- resolution ----------------------------------------------------------------------------------


def resolve_dims(
    dims: Dims,
    shape: Sequence[int],
    pairs: Pairs,
    axis_sizes: Mapping[str, int],
    *,
    where: str = "",
) -> Dims:
    """Maps logical names to mesh axes.

    The pairs are walked in order. A mesh axis is used at most once per tensor; a pair that would
    give a dim more shards than elements is skipped. A dim without names stays replicated; one
    whose names all stay unmapped becomes open. Within a dim the axes stand in the order of the
    names in the constraint, and for one name in the order of the pairs.

    Args:
        dims: Logical names of each dim.
        shape: Size of each dim.
        pairs: (logical name, mesh axis), highest priority first.
        axis_sizes: Size of each axis of the submesh.
        where: Task and source line, for errors.

    Raises:
        ShardingError: A pair names an axis that the submesh does not have, or a dim does not
            divide by its number of shards.
    """
    _check_axes_exist(pairs, axis_sizes, where)
    names = [() if dim is UNCONSTRAINED else dim for dim in dims]
    taken: list[list[tuple[int, str]]] = [[] for _ in dims]  # per dim: (place of name, axis)
    shards = [1] * len(dims)
    used = set()
    for logical, axis in pairs:
        size = axis_sizes[axis]
        fits = (i for i, n in enumerate(names) if logical in n and shards[i] * size <= shape[i])
        at = None if axis in used else next(fits, None)
        if at is not None:
            used.add(axis)
            shards[at] *= size
            taken[at].append((names[at].index(logical), axis))
    axes = [tuple(axis for _, axis in sorted(t, key=lambda pair: pair[0])) for t in taken]
    resolved = tuple(
        a or (() if dim == () else UNCONSTRAINED) for a, dim in zip(axes, dims, strict=True)
    )
    _check_divisible(resolved, dims, shape, axis_sizes, where)
    return resolved


def resolve_mesh_dims(
    dims: Dims, shape: Sequence[int], axis_sizes: Mapping[str, int], *, where: str = ""
) -> Dims:
    """Checks dims that name axes of the global mesh against the submesh, and returns them.

    Raises:
        ShardingError: The submesh lacks an axis, or a dim does not divide by its shards.
    """
    named = [(axis, axis) for dim in dims if dim is not UNCONSTRAINED for axis in dim]
    _check_axes_exist(named, axis_sizes, where)
    _check_divisible(dims, dims, shape, axis_sizes, where)
    return dims


def resolve_constraint(
    params: Mapping[str, Any],
    shape: Sequence[int],
    pairs: Pairs,
    axis_sizes: Mapping[str, int],
    *,
    where: str = "",
) -> dict[str, Any]:
    """Returns the params of a constraint equation resolved for a task (kind `"resolved"`).

    For the arguments see `resolve_dims`; dims of kind `"mesh"` are only checked.
    """
    dims = params["dims"]
    match params["kind"]:
        case "logical":
            dims = resolve_dims(dims, shape, pairs, axis_sizes, where=where)
        case "mesh":
            dims = resolve_mesh_dims(dims, shape, axis_sizes, where=where)
    return {**params, "dims": dims, "kind": "resolved", "mesh": None}


def _check_axes_exist(pairs: Pairs, axis_sizes: Mapping[str, int], where: str) -> None:
    unknown = [(logical, axis) for logical, axis in pairs if axis not in axis_sizes]
    if not unknown:
        return
    known = ", ".join(f"`{axis}`={size}" for axis, size in axis_sizes.items()) or "none"
    problems = [
        f"the submesh has no axis `{axis}`"
        + (f", to which logical axis `{logical}` is mapped" if logical != axis else "")
        for logical, axis in unknown
    ]
    raise ShardingError(
        message(
            f"{listed(problems)}; its axes are {known}.",
            where=where,
            ways=(
                "map the logical axis to an axis of the mesh (`Task(logical_axes=...)`)",
                "give the task a mesh that has the axis",
            ),
        )
    )


def _check_divisible(
    resolved: Dims, dims: Dims, shape: Sequence[int], axis_sizes: Mapping[str, int], where: str
) -> None:
    problems = []
    for i, (axes, names) in enumerate(zip(resolved, dims, strict=True)):
        if axes is UNCONSTRAINED:
            continue
        shards = math.prod(axis_sizes[axis] for axis in axes)
        if shape[i] % shards:
            over = " x ".join(f"`{axis}`={axis_sizes[axis]}" for axis in axes)
            logical = ", ".join(f"`{name}`" for name in names)
            problems.append(
                f"dim {i} ({logical}) of an array of shape `{tuple(shape)}` has `{shape[i]}` "
                f"elements, which do not divide by its `{shards}` shards ({over})."
            )
    if problems:
        raise ShardingError(
            message(
                listed(problems),
                where=where,
                ways=(
                    "make the dim a multiple of the number of shards",
                    "map its logical axis to fewer or smaller mesh axes, or leave it unmapped",
                ),
            )
        )


# --- constraints in programs ---------------------------------------------------------------------


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Constrains the layout of arrays.

    Inside a `MultiMesh`, or where `autoshard` is on, a PartitionSpec names *logical* axes, which
    each task maps to axes of its own submesh; `None` in it means replicated, a name that the task
    does not map means open. A NamedSharding on the global mesh gives mesh axes; on another mesh it
    places the value there. Elsewhere, and under `ignore_transforms`, this is
    `jax.lax.with_sharding_constraint`.

    Args:
        x: A pytree of arrays.
        axis_resources: A PartitionSpec, a NamedSharding, or None for replicated; or a prefix
            pytree of them.

    Returns:
        `x`, constrained.

    Raises:
        ShardingError: A spec is longer than the rank of its array, the tree is no prefix of `x`,
            or a leaf of it is something else.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from multimesh.jax import autoshard, with_sharding_constraint
        >>> with autoshard():
        ...     with_sharding_constraint(jnp.ones((4, 2)), P("batch", None)).shape
        (4, 2)
    """
    if not constraints_are_logical():
        return constraints.call_original(x, axis_resources)
    return bind_constraints(x, axis_resources, contexts.active_global_mesh())


def constraints_are_logical() -> bool:
    """Whether names in constraints are logical axes here: in our contexts and our tracing."""
    if constraints.is_redirected():
        return not config.current_settings().ignore_transforms
    return contexts.constraints_are_logical()


def bind_constraints(x: Any, axis_resources: Any, global_mesh: Mesh | None) -> Any:
    """Binds our constraint on every leaf of `x`; see `with_sharding_constraint`."""
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(x)
    constrained = [
        _constrain_leaf(leaf, sharding, global_mesh, jax.tree_util.keystr(path))
        for (path, leaf), sharding in zip(
            paths_and_leaves, broadcast_specs(axis_resources, x), strict=True
        )
    ]
    return jax.tree.unflatten(treedef, constrained)


def broadcast_specs(axis_resources: Any, tree: Any) -> list[Any]:
    """Returns one spec or sharding for each leaf of `tree`.

    Raises:
        ShardingError: `axis_resources` is no prefix of `tree`.
    """
    try:
        shaped = jax.tree.broadcast(axis_resources, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ShardingError(
            message(
                f"The shardings `{jax.tree.structure(axis_resources, is_leaf=_is_spec)}` are no "
                f"prefix of the arrays `{jax.tree.structure(tree)}`.",
                ways=(
                    "give one sharding for all arrays",
                    "give a tree whose nodes are the upper nodes of the tree of arrays",
                ),
            )
        ) from error
    # A None in `tree` is no leaf of it, but one among the specs is.
    return jax.tree.structure(tree).flatten_up_to(shaped)


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, (PartitionSpec, jax.sharding.Sharding))


def _constrain_leaf(x: Any, sharding: Any, global_mesh: Mesh | None, name: str) -> Any:
    is_array = not isinstance(x, jax.core.Tracer)
    if is_array and isinstance(sharding, jax.sharding.Sharding) and not constraints.is_redirected():
        return constraints.call_original(x, sharding)  # eager: really moves the array
    params = constraint_params(sharding, jnp.ndim(x), global_mesh, name)
    return bind_constraint(jnp.asarray(x) if is_array else x, **params)


def constraint_params(
    sharding: Any, rank: int, global_mesh: Mesh | None, name: str
) -> dict[str, Any]:
    """Returns the params of the constraint that a spec or sharding asks for.

    Raises:
        ShardingError: It is none, or does not fit an array of this rank.
    """
    if sharding is None:
        sharding = PartitionSpec()
    if isinstance(sharding, SingleDeviceSharding):
        mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    if isinstance(sharding, PartitionSpec):
        return {"dims": _checked_dims(sharding, rank, name), "kind": "logical"}
    if not isinstance(sharding, NamedSharding):
        raise ShardingError(
            message(
                f"`{sharding!r}` of type `{type(sharding).__name__}` cannot constrain an array.",
                where=name,
                ways=("give a `PartitionSpec` or a `NamedSharding`.",),
            )
        )
    dims = _checked_dims(sharding.spec, rank, name)
    params = {"dims": dims, "kind": "mesh", "memory_kind": sharding.memory_kind}
    if same_mesh(sharding.mesh, global_mesh):
        return params
    if isinstance(sharding.mesh, AbstractMesh):  # JAX's form of a bare spec under a mesh
        return {**params, "kind": "logical"}
    return {**params, "mesh": sharding.mesh}


def same_mesh(mesh: Mesh | AbstractMesh, other: Mesh | None) -> bool:
    """Whether two meshes have the same axes and devices; axis types do not count.

    An AbstractMesh has no devices: only its axes are compared.
    """
    if other is None or tuple(mesh.shape.items()) != tuple(other.shape.items()):
        return False
    return isinstance(mesh, AbstractMesh) or np.array_equal(mesh.devices, other.devices)


def check_spec(sharding: Any, rank: int, name: str) -> None:
    """Checks that a spec, a sharding or None can constrain an array of `rank` dims.

    Raises:
        ShardingError: It cannot.
    """
    constraint_params(sharding, rank, None, name)


def _checked_dims(spec: PartitionSpec, rank: int, name: str) -> Dims:
    if spec.unreduced or spec.reduced:
        raise ShardingError(
            f"`{spec}` is unreduced or reduced over an axis: constraints of arrays cannot say that."
        )
    if len(spec) > rank:
        raise ShardingError(
            message(
                f"`{spec}` has `{len(spec)}` entries but the array has `{rank}` dims.",
                where=name,
                ways=("give at most one entry a dim; missing ones mean replicated.",),
            )
        )
    return dims_of(spec, rank)


@contextlib.contextmanager
def redirect_constraints() -> Iterator[None]:
    """While it is open, in this thread, JAX's and Flax's constraints mean ours (for tracing)."""
    with constraints.redirect_constraints(with_sharding_constraint):
        yield


def absorb_constraints(jaxpr: ClosedJaxpr, global_mesh: Mesh | None) -> ClosedJaxpr:
    """Turns JAX's own constraint equations, at any depth, into ours.

    They stand in what was traced before `redirect_constraints` could see it: an inner `jax.jit`
    whose trace is cached.
    """

    def absorb(eqn: JaxprEqn) -> JaxprEqn:
        sharding = constraints.sharding_of_constraint(eqn)
        if sharding is None:
            return eqn
        params = {"memory_kind": None, "mesh": None, "put": False}
        aval: Any = eqn.invars[0].aval
        params |= constraint_params(sharding, aval.ndim, global_mesh, "")
        return jaxprs.replace_eqn(eqn.replace(primitive=constraint_p), params=params)

    return jaxprs.map_eqns(jaxpr, absorb)
