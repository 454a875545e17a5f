"""Traces the user's function once, on plain types, into a `TracedFunction`.

    step(state, batch)  with state on two submeshes of an Explicit mesh, batch a numpy array
    ->  jaxpr over f32[8,8], ...   no mesh, no layout in any type
        arguments  state['w']: placed on stage=0 as P('data'), donated;  batch: not placed
        results    [0]['w'] succeeds state['w'];  [1]

Where the arguments lie never enters the jaxpr: it is recorded beside it. While the function is
traced, no mesh of `jax.set_mesh` is seen (R18), arrays that the function closes over have plain
types too (R17), sharding constraints and placements are taken over (`logical`, `placing`), and a
`shard_map` gets the mesh of its scope (`shard_maps.lending`).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from multimesh._src.config import Settings
from multimesh._src.errors import TraceError, message
from multimesh._src.frontend import (
    arguments as arguments_lib,
    logical,
    placing,
    scopes,
    shard_maps,
    stated,
)
from multimesh._src.frontend.arguments import ArgumentSpec, NamedArgument, Statics
from multimesh._src.frontend.batches import MicrobatchedArray
from multimesh._src.frontend.matching import Matcher
from multimesh._src.frontend.shard_maps import Lessons
from multimesh._src.frontend.succession import ArgumentTree, siblings, successors
from multimesh._src.frontend.wanted import Wanted, wanted_leaves
from multimesh._src.ir.memory import special_memory
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import avals, jaxprs, jit_hook


@dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument.

    `index` is its position among the caller's flat arguments. `placement` is where a committed
    array lies. `spec` is the layout that is asked for: by in_shardings, or by an array that lies on
    the whole global mesh. `memory_kind` is the memory that it lies in, None for the default one.
    """

    index: int
    name: str
    aval: jax.ShapeDtypeStruct
    placement: NamedSharding | None
    spec: PartitionSpec | None
    donated: bool
    memory_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One flat result.

    `sharding` comes from out_shardings: on the global mesh it says the spec only, on another mesh
    the place too. `successor_of` is the argument leaf that the result succeeds (R8).
    """

    name: str
    aval: Any
    sharding: NamedSharding | None
    successor_of: int | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the contexts that are active for a call say, frozen."""

    matcher: Matcher
    settings: Settings
    global_mesh: Mesh | None
    devices: tuple[Any, ...]
    schedule: Any = None


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A traced function with everything that partitioning needs, and no arrays but its consts.

    `jaxpr` takes the flat arguments and has the closed-over arrays as consts.
    """

    name: str
    jaxpr: ClosedJaxpr
    ambient: Scope
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    out_tree: Any
    global_mesh: Mesh | None
    devices: tuple[Any, ...]
    matcher: Matcher
    settings: Settings
    schedule: Any


@dataclass(frozen=True, slots=True)
class PlainTrace:
    """What tracing alone gives: a jaxpr, its trees, and tracers that the function closes over.

    The jaxpr takes `closed_over` before the flat arguments.
    """

    name: str
    jaxpr: ClosedJaxpr
    out_tree: Any
    out_names: tuple[str, ...]
    closed_over: tuple[Any, ...]


@contextlib.contextmanager
def our_tracing(
    matcher: Matcher, lessons: Lessons, typed_on: AbstractMesh | None = None
) -> Iterator[None]:
    """Within it, in this thread, functions are traced for us; see the module.

    Args:
        matcher: What is registered: `shard_map` takes the mesh slice of its scope.
        lessons: What earlier traces taught of `shard_map`s.
        typed_on: The mesh whose axes a program may state in its types.
    """
    with (
        avals.clean_types(),
        avals.arrays_as_consts(),
        avals.no_ambient_mesh(),
        logical.redirect_constraints(),
        placing.redirect_placements(typed=typed_on is not None),
        contextlib.nullcontext() if typed_on is None else use_abstract_mesh(typed_on),
        shard_maps.lending(matcher, lessons),
    ):
        yield


def trace_plainly(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    statics: Statics,
    matcher: Matcher,
) -> PlainTrace:
    """Traces `fun` on the plain types of its dynamic arguments.

    It is traced again where a `shard_map` turns out to have been traced on the wrong mesh.

    Raises:
        TraceError: A leaf of the arguments is no array and not static.
        ShardingError: A constraint or a `shard_map` does not fit.
    """
    ambient, lessons = scopes.ambient_scope(), Lessons()
    while True:
        plain = _trace_once(fun, args, kwargs, statics, matcher, lessons)
        learnt = shard_maps.learn(plain.jaxpr, ambient, matcher, lessons)
        if learnt == lessons:
            return plain
        lessons = learnt


def _trace_once(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    statics: Statics,
    matcher: Matcher,
    lessons: Lessons,
) -> PlainTrace:
    name = arguments_lib.function_name(fun)

    # A new function each time: a trace that JAX cached for others must not be found.
    def traced(*args: Any, **kwargs: Any) -> Any:
        joined = arguments_lib.join_statics(args, statics)
        return fun(*joined, **kwargs, **dict(statics.kwargs))

    traced.__name__ = traced.__qualname__ = name
    # JAX's errors name the user's function, its file and line, and its arguments.
    traced.__wrapped__ = fun  # pyright: ignore[reportFunctionMemberAccess]
    if statics != arguments_lib.NO_STATICS:
        traced.__signature__ = inspect.signature(lambda *args, **kwargs: None)
    plain_args, plain_kwargs = jax.tree.map(plain_aval, (tuple(args), dict(kwargs)))

    def traced_on(mesh: AbstractMesh | None) -> tuple[Any, tuple[Any, ...]]:
        with our_tracing(matcher, lessons, mesh):
            result = jax.jit(traced).trace(*plain_args, **plain_kwargs)
            return result, jit_hook.closed_over_tracers(result)

    whole = matcher.global_mesh
    result, closed_over = stated.trace_typed(traced_on, name, whole)
    out_paths = jax.tree_util.tree_leaves_with_path(result.out_info)
    return PlainTrace(
        name=name,
        jaxpr=stated.absorb_placements(logical.absorb_constraints(result.jaxpr, whole), whole),
        out_tree=jax.tree.structure(result.out_info),
        out_names=tuple("result" + jax.tree_util.keystr(path) for path, _ in out_paths),
        closed_over=closed_over,
    )


def plain_aval(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an argument without mesh and layout.

    Raises:
        TypeError: `x` is no array.
    """
    if isinstance(x, MicrobatchedArray):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return without_mesh(jax.typeof(x))


def without_mesh(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an aval without mesh and layout."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def check_arguments(arguments: Sequence[NamedArgument]) -> None:
    """Raises a TraceError that names the first leaf that is no array."""
    for argument in arguments:
        names = arguments_lib.leaf_names(argument)
        for name, leaf in zip(names, jax.tree.leaves(argument.value), strict=True):
            try:
                plain_aval(leaf)
            except TypeError:
                static = "in `static_argnums` or `static_argnames`"
                way = f"name it {static}"
                if name != argument.name:
                    way = (
                        f"take it out of `{argument.name}`: an argument of its own, named {static}"
                    )
                raise TraceError(
                    message(
                        f"argument `{name}` of type `{type(leaf).__name__}` is not an array.",
                        ways=("pass an array", way),
                    )
                ) from None


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    spec: ArgumentSpec,
    statics: Statics = arguments_lib.NO_STATICS,
    in_shardings: Any = None,
    out_shardings: Any = None,
    surroundings: Surroundings,
) -> TracedFunction:
    """Traces `fun(*args, **kwargs)`.

    Args:
        fun: The user's function.
        args: Dynamic positional arguments: arrays, scalars or `jax.ShapeDtypeStruct`s, whose
            `sharding`, if any, counts as a placement.
        kwargs: Dynamic keyword arguments.
        spec: Names and donation of the arguments.
        statics: The static arguments.
        in_shardings: None or a prefix pytree of `args`: NamedSharding, PartitionSpec or None.
        out_shardings: The same for the results.
        surroundings: The active contexts.

    Raises:
        TraceError: An argument is no array.
        ShardingError: in_shardings or out_shardings do not fit.
    """
    named = arguments_lib.named_arguments(spec, args, kwargs, statics)
    check_arguments(named)
    ambient = scopes.ambient_scope()
    mesh = surroundings.global_mesh
    plain = trace_plainly(fun, args, kwargs, statics, surroundings.matcher)
    if plain.closed_over:
        raise TraceError(
            message(
                f"`{plain.name}` closes over a value of an enclosing transformation.",
                ways=("pass the value as an argument",),
            )
        )
    ins = wanted_leaves(in_shardings, tuple(args), mesh, "in_shardings")
    ins += (Wanted(),) * (len(jax.tree.leaves((args, kwargs))) - len(ins))
    out_info = jax.tree.unflatten(plain.out_tree, plain.jaxpr.out_avals)
    outs = wanted_leaves(out_shardings, out_info, mesh, "out_shardings")
    arguments = flat_arguments(named, ins, mesh)
    results = _results(plain, _trees(named), arguments, outs, mesh)
    return traced_function(plain, ambient, arguments, results, surroundings)


def _results(
    plain: PlainTrace,
    trees: Sequence[ArgumentTree],
    arguments: Sequence[Argument],
    wanted: Sequence[Wanted],
    global_mesh: Mesh | None,
) -> tuple[Result, ...]:
    """The flat results: what each succeeds, and where it is wanted."""
    avals, out_avals = [a.aval for a in arguments], plain.jaxpr.out_avals
    succeeded = successors(trees, avals, plain.out_tree, out_avals)
    unsaid = jaxprs.independent_results(plain.jaxpr)
    free = [
        alone and successor is None and not want.is_given
        for alone, successor, want in zip(unsaid, succeeded, wanted, strict=True)
    ]
    beside = siblings(trees, avals, plain.out_tree, out_avals, free)
    shardings = [
        want.named(global_mesh) if sibling is None else arguments[sibling].placement
        for want, sibling in zip(wanted, beside, strict=True)
    ]
    return tuple(
        # a layout alone leaves the place to what the result succeeds
        Result(name, without_mesh(aval), sharding, None if want.placement else successor)
        for name, aval, sharding, want, successor in zip(
            plain.out_names, out_avals, shardings, wanted, succeeded, strict=True
        )
    )


def traced_function(
    plain: PlainTrace,
    ambient: Scope,
    arguments: tuple[Argument, ...],
    results: tuple[Result, ...],
    surroundings: Surroundings,
) -> TracedFunction:
    """Puts a `TracedFunction` together."""
    return TracedFunction(
        name=plain.name,
        jaxpr=plain.jaxpr,
        ambient=ambient,
        arguments=arguments,
        results=results,
        out_tree=plain.out_tree,
        global_mesh=surroundings.global_mesh,
        devices=surroundings.devices,
        matcher=surroundings.matcher,
        settings=surroundings.settings,
        schedule=surroundings.schedule,
    )


def flat_arguments(
    named: Sequence[NamedArgument], wanted: Sequence[Wanted], global_mesh: Mesh | None
) -> tuple[Argument, ...]:
    """Returns the flat arguments with names, types, placements and wanted layouts."""
    flat = [
        (name, leaf, argument.donated)
        for argument in named
        for name, leaf in zip(
            arguments_lib.leaf_names(argument), jax.tree.leaves(argument.value), strict=True
        )
    ]
    return tuple(
        argument(index, name, leaf, donated, want, global_mesh)
        for index, ((name, leaf, donated), want) in enumerate(zip(flat, wanted, strict=True))
    )


def argument(
    index: int, name: str, leaf: Any, donated: bool, want: Wanted, global_mesh: Mesh | None
) -> Argument:
    """Returns one flat argument; what `want` asks for beats where the array lies."""
    placement, spec, memory_kind = want.placement, want.spec, want.memory_kind
    if not want.is_given:
        placement, memory_kind = placement_of(leaf), memory_of(leaf)
    if placement is not None and placement.mesh == global_mesh:
        placement, spec = (None if want.is_given else placement), placement.spec
    return Argument(index, name, plain_aval(leaf), placement, spec, donated, memory_kind)


def placement_of(leaf: Any) -> NamedSharding | None:
    """Returns where an argument lies, if that says anything: a committed array on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        committed = getattr(leaf, "committed", True)
        return sharding if committed or sharding.num_devices > 1 else None
    return None


def memory_of(leaf: Any) -> str | None:
    """Returns the memory kind of an array, None where it is the default one or not committed."""
    is_committed = getattr(leaf, "committed", True)
    return special_memory(getattr(leaf, "sharding", None)) if is_committed else None


def _trees(named: Sequence[NamedArgument]) -> list[ArgumentTree]:
    trees, first = [], 0
    for argument in named:
        tree = jax.tree.structure(argument.value)
        trees.append(ArgumentTree(tree, first, argument.donated))
        first += tree.num_leaves
    return trees
