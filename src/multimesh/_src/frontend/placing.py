"""Values placed by hand: `jax.device_put` and `jax.reshard` inside programs (R6).

    jax.device_put(x, NamedSharding(global_mesh, P("data")))    the spec; the task says where
    jax.device_put(x, NamedSharding(other_mesh, P("data")))     the place too: a seed
    jax.device_put(x, jax.devices()[3])                         the same on one device
    jax.device_put(x, jax.memory.Space.Host)                    only the memory

Each becomes one constraint equation (`ir.constraint`). What programs state in their types
(`out_sharding=`, R17) becomes the same: such a program is traced on the axes of the global mesh,
and its types are plain again before anything else looks at them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from multimesh._src.errors import MultiMeshError, ShardingError, message
from multimesh._src.frontend import contexts
from multimesh._src.frontend.logical import constraint_params, constraints_are_logical
from multimesh._src.ir.constraint import UNCONSTRAINED, bind_constraint, constraint_p
from multimesh._src.jax_compat import effects, jaxprs, name_stack, placements, plain_types


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
        params = _params(target, jnp.ndim(leaf), mesh, where)
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


def _params(target: Any, rank: int, global_mesh: Mesh | None, where: str) -> dict[str, Any]:
    """Returns the params of the constraint that a target of `device_put` asks for."""
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


# --- programs that state shardings in their types -------------------------------------------------

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
        params = _params(target, aval.ndim, global_mesh, where) if params is None else params
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
