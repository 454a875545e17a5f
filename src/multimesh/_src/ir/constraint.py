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
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.jax_compat import constraints, jaxprs

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

Dim: TypeAlias = Any  # tuple[str, ...] or UNCONSTRAINED, whose type has no public name
Dims: TypeAlias = tuple[Dim, ...]
Kind: TypeAlias = Literal["logical", "mesh", "resolved"]

constraint_p = Primitive("multimesh_constraint")


def bind_constraint(
    x: Any, dims: Dims, kind: Kind, *, memory_kind: str | None = None, mesh: Mesh | None = None
) -> Any:
    """Constrains one array.

    Args:
        x: An array of rank `len(dims)`, typed keys included.
        dims: One dim per dimension of `x`.
        kind: What the names in `dims` are.
        memory_kind: As in `NamedSharding`; None keeps the default.
        mesh: The mesh of a value that is placed by hand.
    """
    return constraint_p.bind(x, dims=dims, kind=kind, memory_kind=memory_kind, mesh=mesh)


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
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


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


def with_mesh(jaxpr: ClosedJaxpr, mesh: Mesh) -> Callable[..., list[Any]]:
    """Returns a callable on the flat arguments that evaluates `jaxpr` on `mesh`.

    Resolved constraints, also those inside nested jaxprs, become
    `jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))`; everything else, name stacks
    and source lines included, stays as it was. `mesh` must have only axes of type Auto.
    """

    def name_mesh(eqn: JaxprEqn) -> Mapping[str, Any]:
        if eqn.params["kind"] != "resolved":
            return eqn.params
        return {**eqn.params, "mesh": mesh}

    placed = map_constraints(jaxpr, name_mesh)
    return lambda *args: jaxprs.evaluate(placed, *args)


# --- rules ---------------------------------------------------------------------------------------


def _apply(x: Any, *, dims: Dims, kind: Kind, memory_kind: str | None, mesh: Mesh | None) -> Any:
    if kind != "resolved" or mesh is None:
        return x
    return constraints.constrain(x, NamedSharding(mesh, spec_of(dims), memory_kind=memory_kind))


def _transpose(cotangent: Any, _: Any, **params: Any) -> tuple[Any]:
    return (constraint_p.bind(cotangent, **params),)


def _batch(
    axis: Any, args: tuple[Any], batch_dims: tuple[int | None], *, dims: Dims, **params: Any
) -> tuple[Any, int | None]:
    (x,), (at,) = args, batch_dims
    if at is None:
        return constraint_p.bind(x, dims=dims, **params), None
    # `vmap(..., spmd_axis_name=)` names the axes of the mapped dim; without it the dim is open.
    mapped = UNCONSTRAINED if axis.spmd_name is None else tuple(axis.spmd_name)
    return constraint_p.bind(x, dims=(*dims[:at], mapped, *dims[at:]), **params), at


constraint_p.def_impl(_apply)
constraint_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(constraint_p, _transpose)
batching.fancy_primitive_batchers[constraint_p] = _batch  # the plain one takes no `dims`
mlir.register_lowering(constraint_p, mlir.lower_fun(_apply, multiple_results=False))
