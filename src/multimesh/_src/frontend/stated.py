"""Shardings that programs state in the types of their values (R17), and JAX's own placements.

    jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data"))
    ->  y:f32[8@data,4] = dot_general[...] x w         traced on the axes of the global mesh
    ->  t:f32[8,4] = dot_general[...] x w              before anything else looks at it
        y:f32[8,4] = constraint[kind=mesh dims=(('data',), ())] t

The same is done to placements that stand in traces that JAX has cached, and to those that JAX makes
itself, as a remat policy that offloads does.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from multimesh._src.errors import MultiMeshError, ShardingError, message
from multimesh._src.frontend.placing import target_params
from multimesh._src.ir.constraint import UNCONSTRAINED, constraint_p
from multimesh._src.jax_compat import effects, jaxprs, name_stack, placements, plain_types

_Traced = TypeVar("_Traced")


def trace_typed(
    trace_on: Callable[[AbstractMesh | None], _Traced], name: str, global_mesh: Mesh | None
) -> _Traced:
    """Traces without a mesh, and if the program asks for one, on the axes of the global mesh.

    Submeshes have these axes too, so a spec means the same on all of them; whether its axes divide
    its array is checked on the submesh of each task.

    Args:
        trace_on: Traces the function on a mesh.
        name: The function's name, for errors.
        global_mesh: The mesh whose axes the program names.

    Raises:
        ShardingError: There is no such mesh, or what the types say does not fit.
    """
    try:
        return trace_on(None)
    except Exception as error:
        if not plain_types.asks_for_a_mesh(error):
            raise
        where = name_stack.line_of_error(error)
        if global_mesh is None:
            raise ShardingError(
                message(
                    f"`{name}` names axes in the types of its values (`out_sharding=`, "
                    "`explicit_axes`), but there is no global mesh whose axes they could be.",
                    where=where,
                    ways=(
                        "call it inside a `MultiMesh`",
                        "give `mjit(mesh=)`",
                        "use `with_sharding_constraint` instead",
                    ),
                )
            ) from error
    explicit = (AxisType.Explicit,) * len(global_mesh.axis_names)
    mesh = AbstractMesh(global_mesh.axis_sizes, global_mesh.axis_names, axis_types=explicit)
    try:
        return trace_on(mesh)
    except MultiMeshError:
        raise
    except Exception as error:
        if not plain_types.is_about_types(error):
            raise
        axes = ", ".join(f"`{axis}`={size}" for axis, size in mesh.shape.items())
        raise ShardingError(
            message(
                f"the shardings that `{name}` states in the types of its values do not fit "
                f"together; the axes are {axes}. The error above says what JAX found.",
                where=name_stack.line_of_error(error),
                ways=(
                    "state `out_sharding=` where operands have unlike shardings",
                    "use `with_sharding_constraint` instead, and let shardings spread",
                ),
            )
        ) from error


# --- equations that are JAX's own, and types ------------------------------------------------------


def absorb_placements(jaxpr: ClosedJaxpr, global_mesh: Mesh | None) -> ClosedJaxpr:
    """Turns JAX's own placements into constraints, and makes all types plain.

    They stand in traces that JAX has cached, in what it makes itself (remat policies that offload)
    and in programs that state shardings in their types.
    """

    def rewrite(eqn: JaxprEqn) -> Sequence[JaxprEqn]:
        eqn = effects.on_any_devices(eqn)
        found = placements.targets(eqn)
        if found is not None:
            return _as_constraints(eqn, found, global_mesh)
        specs = plain_types.stated_specs(eqn)
        return [eqn] if not any(specs) else _with_constraints(eqn, specs)

    return plain_types.plainly_typed(jaxpr, rewrite)


def _as_constraints(
    eqn: JaxprEqn, found: Sequence[Any], global_mesh: Mesh | None
) -> list[JaxprEqn]:
    where = name_stack.source_line(eqn)
    equations: list[JaxprEqn] = []
    for invar, outvar, target in zip(eqn.invars, eqn.outvars, found, strict=True):
        aval: Any = outvar.aval
        params = _typed_params(target, aval.ndim)
        params = target_params(target, aval.ndim, global_mesh, where) if params is None else params
        full = {"memory_kind": None, "mesh": None, "put": True} | params
        equations.append(_constraint_equation(eqn, invar, outvar, full))
    return equations


def _typed_params(target: Any, rank: int) -> dict[str, Any] | None:
    """The params for a sharding of a type, which names axes of an abstract mesh."""
    if not isinstance(target, NamedSharding) or not isinstance(target.mesh, AbstractMesh):
        return None
    # On axes that are not Explicit a type says nothing: None is not "replicated" there.
    is_explicit = set(target.mesh.axis_types) == {AxisType.Explicit}
    open_or_closed = () if is_explicit else UNCONSTRAINED
    entries = (*target.spec, *(None,) * (rank - len(target.spec)))
    return {"dims": tuple(_dim(entry, open_or_closed) for entry in entries), "kind": "mesh"}


def _dim(entry: Any, empty: Any) -> Any:
    if entry is None:
        return empty
    return (entry,) if isinstance(entry, str) else entry


def _with_constraints(eqn: JaxprEqn, specs: Sequence[Any]) -> list[JaxprEqn]:
    """The operation, and a constraint for each result whose layout it states."""
    results = [
        var if spec is None else jaxprs.new_var(var.aval)
        for var, spec in zip(eqn.outvars, specs, strict=True)
    ]
    equations = [jaxprs.replace_eqn(eqn, outvars=results)]
    for made, var, spec in zip(results, eqn.outvars, specs, strict=True):
        if spec is not None:
            aval: Any = var.aval
            entries = (*spec, *(None,) * (aval.ndim - len(spec)))
            dims = tuple(_dim(entry, ()) for entry in entries)
            params = {"dims": dims, "kind": "mesh", "memory_kind": None, "mesh": None, "put": True}
            equations.append(_constraint_equation(eqn, made, var, params))
    return equations


def _constraint_equation(eqn: JaxprEqn, invar: Any, outvar: Any, params: Any) -> JaxprEqn:
    placed = eqn.replace(primitive=constraint_p, params=params, effects=set())
    return placed.replace(invars=[invar], outvars=[outvar])
