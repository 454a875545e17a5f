"""The sharding constraint: the only primitive of our own.

`constraint_p` takes one array and gives it back. Its params say how the array is to be laid out,
first in the user's words and, once its task is known, in the axes of the task's submesh:

    x:f32[8,4] = constraint[kind=logical  dims=(('batch',), ())] y      as written by the user
    x:f32[8,4] = constraint[kind=resolved dims=(('data',), ())] y       after its task is known

A *dim* is the tuple of axis names that shard it: `()` is replicated and closed, `UNCONSTRAINED` is
open. The kinds:

- `"logical"`: names are logical axes, mapped to mesh axes by the pairs of the task.
- `"mesh"`: names are mesh axes. With `mesh=None` they are those of the global mesh and the task
  says which devices; with a mesh the value is placed on exactly that mesh.
- `"resolved"`: names are axes of whatever submesh the body runs on. `with_mesh` names it, and only
  then does the equation lower to a sharding constraint. In every other case it lowers to nothing,
  so a program that leaks into a plain `jax.jit` still computes the same.

A *put* is what `jax.device_put` means in a program. It differs in its transpose only: a cotangent
goes back to where the operand came from, and is not put to where the result went.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.jax_compat import constraints, jaxprs, primitives

UNCONSTRAINED: Any = PartitionSpec.UNCONSTRAINED

Dim: TypeAlias = Any  # tuple[str, ...] or UNCONSTRAINED, whose type has no public name
Dims: TypeAlias = tuple[Dim, ...]
Kind: TypeAlias = Literal["logical", "mesh", "resolved"]


def _apply(
    x: Any, *, dims: Dims, kind: Kind, memory_kind: str | None, mesh: Mesh | None, put: bool
) -> Any:
    says_nothing = memory_kind is None and all(dim is UNCONSTRAINED for dim in dims)
    if kind != "resolved" or mesh is None or says_nothing:
        return x
    return constraints.constrain(x, NamedSharding(mesh, spec_of(dims), memory_kind=memory_kind))


def _batch_params(
    params: Mapping[str, Any], at: int, spmd_axes: tuple[str, ...] | None
) -> dict[str, Any]:
    """Leaves a mapped dim open, unless `vmap` names the axes that shard it."""
    mapped = UNCONSTRAINED if spmd_axes is None else spmd_axes
    dims = params["dims"]
    return {**params, "dims": (*dims[:at], mapped, *dims[at:])}


def _transpose_params(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if params["put"] else params


constraint_p: Any = primitives.identity_primitive(
    "multimesh_constraint", _apply, _batch_params, _transpose_params
)


def is_layout(eqn: JaxprEqn) -> bool:
    """Whether an equation says how a value is laid out and nothing else: no place, no memory."""
    params = eqn.params
    if eqn.primitive is not constraint_p or params["put"]:
        return False
    return params["mesh"] is None and params["memory_kind"] is None


def bind_constraint(
    x: Any,
    dims: Dims,
    kind: Kind,
    *,
    memory_kind: str | None = None,
    mesh: Mesh | None = None,
    put: bool = False,
) -> Any:
    """Constrains one array.

    Args:
        x: An array of rank `len(dims)`, typed keys included.
        dims: One dim per dimension of `x`.
        kind: What the names in `dims` are.
        memory_kind: As in `NamedSharding`; None keeps the default.
        mesh: The mesh of a value that is placed by hand.
        put: Whether this is `jax.device_put`; see the module.
    """
    params = {"dims": dims, "kind": kind, "memory_kind": memory_kind, "mesh": mesh, "put": put}
    return constraint_p.bind(x, **params)


def dims_of(spec: PartitionSpec, rank: int) -> Dims:
    """Returns the dims of `spec` for an array of `rank` dimensions; missing ones are replicated.

    `len(spec)` must be at most `rank`.
    """
    return tuple(_dim(entry) for entry in spec) + ((),) * (rank - len(spec))


def _dim(entry: Any) -> Dim:
    if entry is UNCONSTRAINED:
        return UNCONSTRAINED
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_of(dims: Dims) -> PartitionSpec:
    """Returns `dims` as a PartitionSpec of the same length."""
    return PartitionSpec(*(_entry(dim) for dim in dims))


def _entry(dim: Dim) -> Any:
    if dim is UNCONSTRAINED or len(dim) > 1:
        return dim
    return dim[0] if dim else None


def map_constraints(jaxpr: ClosedJaxpr, fn: Callable[[JaxprEqn], Mapping[str, Any]]) -> ClosedJaxpr:
    """Replaces the params of every constraint equation, at any depth, by `fn(equation)`.

    `fn` may return `eqn.params` itself to leave an equation as it is. Jaxprs without a change stay
    the same objects; a jaxpr shared by several equations is rewritten once.
    """

    def rewrite(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is not constraint_p:
            return eqn
        params = fn(eqn)
        return eqn if params is eqn.params else jaxprs.replace_eqn(eqn, params=params)

    return jaxprs.map_eqns(jaxpr, rewrite)


def with_mesh(
    jaxpr: ClosedJaxpr, mesh: Mesh, *, keep_memory: bool = True
) -> Callable[..., list[Any]]:
    """Returns a callable on the flat arguments that evaluates `jaxpr` on `mesh`.

    Resolved constraints, also those inside nested jaxprs, become
    `jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))`; everything else, name stacks
    and source lines included, stays as it was. `mesh` must have only axes of type Auto. When the
    callable is compiled, some argument or result must have a sharding on `mesh`: `jax.jit` does not
    take the devices of a program from these constraints. Without `keep_memory` every value stays
    in the default memory: layouts do not spread through moves between memories.
    """

    def name_mesh(eqn: JaxprEqn) -> Mapping[str, Any]:
        if eqn.params["kind"] != "resolved":
            return eqn.params
        named = {**eqn.params, "mesh": mesh}
        return named if keep_memory else {**named, "memory_kind": None}

    placed = map_constraints(jaxpr, name_mesh)
    return lambda *args: jaxprs.evaluate(placed, *args)
