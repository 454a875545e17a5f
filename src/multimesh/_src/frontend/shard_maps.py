"""`shard_map` on submeshes: the mesh that a call is traced on (R16, R18).

    global mesh (stage=2, data=2), in a scope whose task runs on the slice stage=1

    shard_map(f, out_specs=P("data"))                      the slice (stage=1, data=2)
    shard_map(f, mesh=global_mesh, ..., P("data"))         the slice: it means the same there
    shard_map(f, mesh=global_mesh, ..., P("stage"))        the global mesh
    shard_map(f, mesh=other_mesh, ...)                     that mesh

Without a mesh a `shard_map` takes what the scope around it gives. With the global mesh it means
what it means in plain JAX, so the slice will do only where no axis is used that the slice cuts: in
specs, in collectives or by `axis_index`. Outside of every task both take the global mesh. What
stands on the global mesh, or on another one, is a task on all of its devices.

The axes that a body uses are known only when it is traced, and JAX gives the trace of one function
to all scopes that call it. So all is traced as if slices would do and were alike; `learn` finds
where that was wrong, and tracing starts again with what was learnt.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh

from multimesh._src import config
from multimesh._src.errors import PartitionError, ShardingError, message
from multimesh._src.frontend import contexts
from multimesh._src.frontend.logical import same_mesh
from multimesh._src.frontend.matching import Match, Matcher
from multimesh._src.frontend.scopes import scope_of, scope_of_equation
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import constraints, jaxprs, name_stack, shard_maps
from multimesh._src.jax_compat.shard_maps import LentMesh, lent_mesh
from multimesh._src.topology import describe_axes, devices_label

ALL_DEVICES = "all devices"


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    mesh: "Mesh | AbstractMesh | contexts.Context | None" = None,
    out_specs: Any,
    **options: Any,
) -> Any:
    """Maps a function over the shards of its arguments, as `jax.shard_map`.

    In a function that MultiMesh cuts into tasks, a call without `mesh` takes the mesh slice of the
    scope around it, where every axis name of the global mesh still exists and the sliced ones have
    size 1; outside of every task it takes the global mesh. Elsewhere this is `jax.shard_map`, with
    the mesh of the active `MultiMesh` where there is one and `mesh` is not given.

    Args:
        f: The function of one shard.
        mesh: The mesh; a `MultiMesh` stands for its global mesh, which means what it means in plain
            JAX.
        out_specs: PartitionSpecs of the results, a prefix pytree.
        **options: `in_specs`, `axis_names` and `check_vma`, as in `jax.shard_map`.

    Raises:
        ShardingError: Specs that do not fit the mesh of the scope, or no mesh at all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from multimesh.jax import MultiMesh, shard_map
        >>> with MultiMesh(axis_sizes=(1,), axis_names=("data",), devices=jax.devices()[:1]):
        ...     double = shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data"))
        ...     double(jnp.ones(2)).shape
        (2,)
    """
    options = {**options, "out_specs": out_specs}
    mesh = mesh.global_mesh if isinstance(mesh, contexts.Context) else mesh
    if f is None:
        return functools.partial(shard_map, mesh=mesh, **options)
    if mesh is not None:
        return shard_maps.call_on(f, mesh, options)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        return shard_maps.call_on(f, _mesh_here(), options)(*args)

    return mapped


def _mesh_here() -> Mesh | None:
    """The mesh of a `shard_map` without one that is called here; None lets JAX say it, or us."""
    is_lent = constraints.is_redirected() and shard_maps.is_available()
    if is_lent or not jax.sharding.get_abstract_mesh().empty:
        return None
    return contexts.active_global_mesh()


# --- while we trace ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lessons:
    """What an earlier trace of the same function has taught.

    Attributes:
        off_slices: Lines of the user's program whose `shard_map`s take no slice of the global mesh.
        unlike: Whether one trace was shared by scopes whose submeshes have unlike axes.
    """

    off_slices: frozenset[str] = frozenset()
    unlike: bool = False


@contextlib.contextmanager
def lending(matcher: Matcher, lessons: Lessons) -> Iterator[None]:
    """While it is open, in this thread, `shard_map`s are traced on the meshes of their scopes."""

    def lend(given: Mesh | AbstractMesh | None, named: frozenset[str]) -> LentMesh:
        whole, line = matcher.global_mesh, name_stack.current_line()
        if isinstance(given, Mesh) and not same_mesh(given, whole):
            return lent_mesh(given, given, devices_label(list(given.devices.flat)), line)
        match = _match_here(matcher)
        if match is not None and (given is None or _same_axes(given, match.mesh)):
            return lent_mesh(match.mesh, given, match.label, line)
        if whole is None or (given is not None and not same_mesh(given, whole)):
            raise _no_mesh(given, match, whole, line)
        off_slice = line in lessons.off_slices
        if match is None or off_slice or named & _cut_axes(match.mesh, whole):
            return lent_mesh(whole, given, ALL_DEVICES, line)
        return lent_mesh(match.mesh, given, match.label, line)

    def own_traces() -> AbstractContextManager[Any]:
        match = _match_here(matcher)
        axes = None if match is None else tuple(match.mesh.shape.items())
        return config.separate_caches((lessons, axes))

    with (
        name_stack.remember_outer_stacks(own_traces if lessons.unlike else None),
        config.separate_caches(lessons),  # what is lent here must not be found by plain JAX
        shard_maps.lending(lend),
    ):
        yield


def _match_here(matcher: Matcher) -> Match | None:
    """The task of the scope that is open here, if need be in the first iteration of a loop."""
    scope = Scope()
    for stack in filter(None, name_stack.open_name_stacks()):
        scope = scope.join(scope_of(stack))
    return matcher.of_scope(scope) or matcher.of_scope(scope, 0)


def _cut_axes(mesh: Any, whole: Mesh) -> frozenset[str]:
    """The axes of the global mesh that a submesh has not, or of another size."""
    if tuple(mesh.axis_names) != tuple(whole.axis_names):
        return frozenset(whole.axis_names)
    return frozenset(name for name in whole.axis_names if whole.shape[name] != mesh.shape[name])


def _same_axes(mesh: Any, other: Any) -> bool:
    return tuple(mesh.shape.items()) == tuple(other.shape.items())


def _no_mesh(given: Any, match: Match | None, whole: Mesh | None, line: str) -> ShardingError:
    if given is None:
        return ShardingError(
            message(
                "a `shard_map` without a mesh stands in no task, and no `MultiMesh` is active.",
                where=line,
                ways=(
                    "open the scope of a task around it.",
                    "give `mesh=`.",
                ),
            )
        )
    around = [f"the global mesh {describe_axes(whole)}"] if whole is not None else []
    around += [f"the submesh {describe_axes(match.mesh)}"] if match is not None else []
    return ShardingError(
        message(
            f"a `shard_map` is given the mesh {describe_axes(given)}, which has no devices and is "
            f"not {' or '.join(around) or 'known'}.",
            where=line,
            ways=("give a `jax.sharding.Mesh`.", "leave out `mesh=`: the scope then says it."),
        )
    )


def learn(jaxpr: ClosedJaxpr, ambient: Scope, matcher: Matcher, known: Lessons) -> Lessons:
    """Returns what a trace teaches: where `shard_map`s were traced on wrong meshes.

    Args:
        jaxpr: What was traced.
        ambient: The scope around it.
        matcher: Says which task a scope belongs to.
        known: What was known when it was traced.
    """
    off_slices, unlike = set(known.off_slices), known.unlike
    for eqn, scope in _shard_maps(jaxpr, ambient, {}):
        mesh = eqn.params["mesh"]
        if not isinstance(mesh, LentMesh):
            continue
        if _needs_whole(eqn, mesh, scope, matcher.global_mesh):
            off_slices.add(mesh.line)
        match = matcher.of_scope(scope) or matcher.of_scope(scope, 0)
        unlike = unlike or not _can_stand(mesh, match, matcher.global_mesh)
    return Lessons(frozenset(off_slices), unlike)


def _needs_whole(eqn: Any, mesh: LentMesh, scope: Scope, whole: Mesh | None) -> bool:
    """Whether a `shard_map` on the global mesh, traced on a slice, uses an axis that it cuts.

    Backward passes do not count: there JAX itself sums over axes that no spec names, which on a
    slice comes to the same.
    """
    if whole is None or mesh.given is None or scope.backprop or not same_mesh(mesh.given, whole):
        return False
    return bool(shard_maps.collective_axes(eqn) & _cut_axes(mesh, whole))


def _can_stand(traced: Any, match: Match | None, whole: Mesh | None) -> bool:
    """Whether a `shard_map` can stand in its scope, or else on the global mesh or its own."""
    given = traced.given if isinstance(traced, LentMesh) else traced
    if match is None or (isinstance(given, Mesh) and not same_mesh(given, whole)):
        return True
    return _same_axes(traced, match.mesh) or (whole is not None and _same_axes(traced, whole))


def _shard_maps(
    jaxpr: Any, outer: Scope, known: dict[int, tuple[Any, bool]]
) -> Iterator[tuple[Any, Scope]]:
    """Every `shard_map` with its scope, those inside others left out."""
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        if not shard_maps.holds_shard_map(eqn, known):
            continue
        scope = outer.join(scope_of_equation(eqn))
        if shard_maps.is_shard_map(eqn):
            yield eqn, scope
            continue
        for inner in jaxprs.sub_jaxprs(eqn.params):
            yield from _shard_maps(inner, scope, known)


# --- placing -------------------------------------------------------------------------------------


def mesh_called_for(
    eqn: Any, match: Match | None, global_mesh: Mesh | None
) -> tuple[Mesh, str] | None:
    """The mesh that a `shard_map` has to stand on, with its label; None: that of its scope.

    Args:
        eqn: A `shard_map`.
        match: What its scope says.
        global_mesh: The global mesh, if there is one.

    Raises:
        PartitionError: It was traced on a slice of other axes than the one it stands on.
    """
    traced = eqn.params["mesh"]
    given = traced.given if isinstance(traced, LentMesh) else traced
    if not _can_stand(traced, match, global_mesh):
        raise _unlike(traced, match, name_stack.source_line(eqn))
    if isinstance(given, Mesh) and not same_mesh(given, global_mesh):
        return given, devices_label(list(given.devices.flat))
    if match is not None and _same_axes(traced, match.mesh):
        return None
    if match is None and isinstance(traced, LentMesh) and traced.home is not None:
        return traced.home, traced.label  # JAX moved it out of a loop, and it lost its scope
    assert global_mesh is not None
    return global_mesh, ALL_DEVICES


def _unlike(traced: Any, match: Any, line: str) -> PartitionError:
    return PartitionError(
        message(
            f"a `shard_map` was traced on the axes {describe_axes(traced)} and stands in "
            f"`{match.label}` ({describe_axes(match.mesh)}).",
            where=line,
            ways=(
                "do not share the function that holds it between scopes of unlike submeshes: call "
                "another `jax.jit` or `jax.checkpoint` of it in each.",
            ),
        )
    )
