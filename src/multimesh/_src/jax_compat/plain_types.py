"""Takes meshes and memories out of the types of a jaxpr.

    b:f32[8@data,4] = dot_general[out_sharding=P('data')] a w       b:f32[8,4] = dot_general a w
    c:f32<host>[8] = device_put[devices=(Space.Host,)] b      ->    c:f32[8] = <what `rewrite` says>

Such types come from `out_sharding=`, from traces that JAX has cached and from remat policies that
offload. Types inside `shard_map`, whose meshes have manual axes, stay.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Private names: `jax._src.core.ShapedArray` with
`sharding` and `memory_space`; `jax._src.core.JaxprEqnContext` with `cur_abstract_mesh` and
`manager`. Without them types stay as they are.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from multimesh._src.jax_compat import jaxprs, private

core: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import core

_SHARDING_PARAMS = ("out_sharding", "sharding")
_MISSING_MESH = (
    "not under a mesh context",
    "Context mesh cannot be empty",
    "axis names that are of type Auto",
)
_JIT_MESH = "ctx_mesh"  # a param of jit
_NO_MESH = AbstractMesh((), (), axis_types=())


def asks_for_a_mesh(error: Exception) -> bool:
    """Whether JAX missed a mesh while it traced: shardings are stated in types (R17)."""
    text = str(error)
    return isinstance(error, ValueError) and any(part in text for part in _MISSING_MESH)


def is_about_types(error: Exception) -> bool:
    """Whether JAX found that shardings in types do not fit."""
    return "hard" in type(error).__name__ or "shard" in str(error) or "mesh" in str(error)


def stated_specs(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The specs that an operation states in the types of its results (`out_sharding=`), or None."""
    if not any(_on_abstract_mesh(eqn.params.get(name)) for name in _SHARDING_PARAMS):
        return ()
    found = (_type_sharding(var.aval) for var in eqn.outvars)
    return tuple(None if s is None or not any(s.spec) else s.spec for s in found)


def plain_type(aval: Any) -> Any:
    """Returns an aval without mesh and memory; itself where it has neither."""
    sharding = getattr(aval, "sharding", None)
    if core is None or sharding is None or not isinstance(aval, core.ShapedArray):
        return aval
    if getattr(sharding.mesh, "manual_axes", ()):
        return aval
    is_in_device_memory = getattr(aval.memory_space, "name", "Device") != "Host"
    if is_in_device_memory and _type_sharding(aval) is None:
        return aval
    return core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _type_sharding(aval: Any) -> Any:
    """The sharding in an aval on a mesh with Explicit axes, else None."""
    sharding = getattr(aval, "sharding", None)
    return sharding if getattr(getattr(sharding, "mesh", None), "explicit_axes", ()) else None


def _on_abstract_mesh(value: Any) -> bool:
    return (
        isinstance(value, NamedSharding)
        and isinstance(value.mesh, AbstractMesh)
        and not value.mesh.manual_axes
    )


def _is_outside_manual(value: Any) -> bool:
    on_devices = isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh)
    return on_devices or _on_abstract_mesh(value)


def _plain_equation(eqn: JaxprEqn) -> JaxprEqn:
    """Takes shardings and meshes out of the params of an operation and out of its context."""
    params = eqn.params
    stated = [name for name in _SHARDING_PARAMS if _is_outside_manual(params.get(name))]
    if stated and eqn.primitive.name not in ("sharding_constraint", "shard_map"):
        eqn = eqn.replace(params={**params, **dict.fromkeys(stated)})
    if _is_set(params.get(_JIT_MESH)):
        eqn = eqn.replace(params={**eqn.params, _JIT_MESH: _NO_MESH})
    if core is None or not _is_set(getattr(eqn.ctx, "cur_abstract_mesh", None)):
        return eqn
    with eqn.ctx.manager, use_abstract_mesh(_NO_MESH):
        return eqn.replace(ctx=core.JaxprEqnContext())


def _is_set(mesh: Any) -> bool:
    """Whether a mesh is that of a program that states shardings, and not one of `shard_map`."""
    return mesh is not None and not mesh.empty and not mesh.manual_axes


def plainly_typed(jaxpr: Any, rewrite: Callable[[JaxprEqn], Sequence[JaxprEqn]]) -> Any:
    """Returns a jaxpr with plain types, and the equations that `rewrite` gives for each of its own.

    Args:
        jaxpr: Open or closed; what does not change at any depth is the same object afterwards.
        rewrite: Gets each equation with its original types, inner ones first; may give several
            that together make the same variables.
    """
    done: dict[int, tuple[Any, Any]] = {}  # keeps the keys' objects alive

    def visit(inner: Any) -> Any:
        if id(inner) not in done:
            done[id(inner)] = (inner, _rebuild(inner, visit, rewrite))
        return done[id(inner)][1]

    return visit(jaxpr)


def _rebuild(
    closed: Any, visit: Callable[[Any], Any], rewrite: Callable[[JaxprEqn], Sequence[JaxprEqn]]
) -> Any:
    jaxpr = jaxprs.open_jaxpr(closed)
    plain = _renaming(jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        for new in rewrite(jaxprs.map_sub_jaxprs(eqn, visit)):
            new = _plain_equation(new)
            ins, outs = plain(new.invars), plain(new.outvars)
            if ins is not new.invars or outs is not new.outvars:
                new = jaxprs.replace_eqn(new, invars=ins, outvars=outs)
            eqns.append(new)
    ends = {name: getattr(jaxpr, name) for name in ("constvars", "invars", "outvars")}
    parts = {name: plain(atoms) for name, atoms in ends.items()}
    if not _differ(eqns, jaxpr.eqns) and all(parts[name] is ends[name] for name in ends):
        return closed
    effects = jaxprs.effects_of(parts["constvars"], parts["invars"], parts["outvars"], eqns)
    parts |= {"eqns": eqns, "effects": effects}
    if closed is jaxpr and jaxprs.consts_of(closed):  # one class from 0.11
        return jaxpr.replace(**parts, consts=list(jaxprs.consts_of(closed)))
    opened = jaxpr.replace(**parts)
    return opened if closed is jaxpr else jaxprs.close(opened, jaxprs.consts_of(closed))


def _renaming(jaxpr: Any) -> Callable[[Any], Any]:
    """Returns a function that gives lists of atoms plain types; the same list if all are plain."""
    made = (var for eqn in jaxpr.eqns for var in eqn.outvars)
    avals = {id(var.aval): var.aval for var in (*jaxpr.constvars, *jaxpr.invars, *made)}
    if all(plain_type(aval) is aval for aval in avals.values()):
        return lambda atoms: atoms
    env: dict[Any, Any] = {}

    def plain(atom: Any) -> Any:
        aval = plain_type(atom.aval)
        if jaxprs.is_literal(atom):
            return atom if aval is atom.aval else jaxprs.literal(atom.val, aval)
        if atom not in env:
            env[atom] = atom if aval is atom.aval else jaxprs.new_var(aval)
        return env[atom]

    return lambda atoms: [*map(plain, atoms)]


def _differ(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) != len(old) or any(a is not b for a, b in zip(new, old, strict=True))
