"""Makes arrays where a compiled step takes them: no device ever holds what it does not own.

    compiled = step.lower(shapes_of_state, batch).compile()
    state = init(make_state, like=compiled)(key)     # each array on its submesh, in its layout

Nothing is moved when the step is then called. The function is cut backwards from its results
(`staging.initial`); random bits are those of the un-cut function.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from multimesh._src.errors import TraceError, message
from multimesh._src.frontend.arguments import (
    NO_STATICS,
    argument_spec,
    check_callable,
    function_name,
)
from multimesh._src.frontend.contexts import active_contexts
from multimesh._src.frontend.tracing import plain_aval, trace_plainly, without_mesh
from multimesh._src.staging.binding import make_binding
from multimesh._src.staging.maker import Maker
from multimesh._src.staging.mjit import MultiMeshFunction
from multimesh._src.staging.staged import Compiled

MAX_TREE = 400  # characters of a tree in an error


def init(fun: Callable[..., Any], *, like: Any, argnum: int | None = None) -> Callable[..., Any]:
    """Returns `fun` with results that lie where a compiled step takes them.

    Args:
        fun: Makes arrays: parameters, or a whole training state.
        like: A compiled step, `mjit(step).lower(...).compile()`; or a pytree like the results of
            `fun`, of arrays, `jax.ShapeDtypeStruct` or shardings, which says where each lies.
        argnum: Which argument of the compiled step the results are. Default: the first that has
            their tree, shapes and dtypes.

    Returns:
        A function of the arguments of `fun`.

    Raises:
        TraceError: `like` says nothing of places, or no argument of the step is like the results.
    """
    check_callable(fun, "init")
    name, made = function_name(fun), {}

    @functools.wraps(fun)
    def make(*args: Any, **kwargs: Any) -> Any:
        shapes = shapes_of(fun, args, kwargs)
        leaves, tree = jax.tree.flatten(shapes)
        key: Hashable = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in made:
            places = (
                _places_of_argument(like, shapes, argnum, name)
                if isinstance(like, Compiled)
                else _places_of_tree(like, tree, name)
            )
            made[key] = in_place(fun, shapes, places)
        return made[key](*args, **kwargs)

    return make


def shapes_of(fun: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    """Returns shapes and dtypes of the results of `fun`, as a pytree; nothing runs."""
    matcher = active_contexts().matcher()
    plain = trace_plainly(fun, args, kwargs or {}, NO_STATICS, matcher)
    return jax.tree.unflatten(plain.out_tree, map(without_mesh, plain.jaxpr.out_avals))


def in_place(make: Callable[..., Any], shapes: Any, places: Any) -> MultiMeshFunction:
    """Returns `make` with results at `places`, a pytree of shardings.

    None stands for what a step does not use: it is made, replicated, where something else is.
    """
    flat = jax.tree.leaves(places, is_leaf=lambda place: place is None)
    found = [place.mesh for place in flat if place is not None]
    mesh = found[0] if found else Mesh(np.array(jax.devices()[:1]), ("x",))
    unused = NamedSharding(mesh, PartitionSpec())
    chosen = [unused if place is None else place for place in flat]
    out_shardings = jax.tree.unflatten(jax.tree.structure(shapes), chosen)
    return MultiMeshFunction(maker(make, out_shardings=out_shardings, by_results=True))


def maker(
    fun: Callable[..., Any],
    *,
    devices: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
    **fields: Any,
) -> Maker:
    """Returns the maker of a function without static or donated arguments, bound to here."""
    binding = make_binding(function_name(fun), mesh, devices)
    values = {"options": {}, "in_shardings": None, "out_shardings": None, **fields}
    return Maker(fun=fun, spec=argument_spec(fun), binding=binding, **values)


def _places_of_argument(like: Compiled, shapes: Any, argnum: int | None, name: str) -> Any:
    """The shardings of the argument of a compiled step that is like the results of `name`."""
    tree = jax.tree.structure(shapes)
    wanted = _kinds(shapes)
    arguments = like.in_avals[0]
    chosen = range(len(arguments)) if argnum is None else (argnum,)
    for position in chosen:
        found = arguments[position] if position < len(arguments) else None
        if jax.tree.structure(found) == tree and _kinds(found) == wanted:
            return like.input_shardings[0][position]
    where = "no argument" if argnum is None else f"not argument {argnum}"
    known = "\n".join(f"{i}: {_described(shape)}" for i, shape in enumerate(arguments))
    raise TraceError(
        message(
            f"`{name}` makes what {where} of the compiled step is: {_described(shapes)}.",
            window=f"arguments of the step:\n{known}",
            ways=(
                f"let `{name}` return exactly one argument of the step, of the same types.",
                "compile the step for what it returns.",
            ),
        )
    )


def _described(shapes: Any) -> str:
    """A pytree with types in place of arrays, cut short."""
    text = str(jax.tree.map(lambda aval: _Type(f"{aval.dtype}{list(aval.shape)}"), shapes))
    return text if len(text) <= MAX_TREE else text[:MAX_TREE] + "..."


class _Type(str):
    """A text without quotes in the text of a tree."""

    __slots__ = ()
    __repr__ = str.__str__


def _places_of_tree(like: Any, tree: Any, name: str) -> Sequence[Sharding]:
    """The shardings of a pytree of arrays, shapes or shardings."""
    leaves = jax.tree.leaves(like)
    places = [leaf if isinstance(leaf, Sharding) else _sharding_of(leaf) for leaf in leaves]
    if not all(isinstance(place, NamedSharding) for place in places) or not places:
        raise TraceError(
            message(
                f"`init({name}, like=...)` got a `{type(like).__name__}` that does not say where "
                "the arrays lie.",
                ways=(
                    "give a compiled step: `like=mjit(step).lower(state, batch).compile()`.",
                    "give a pytree of arrays or shapes with NamedShardings.",
                ),
            )
        )
    if jax.tree.structure(like) != tree:
        raise TraceError(
            message(
                f"`{name}` makes `{tree}`, but `like` is `{jax.tree.structure(like)}`.",
                ways=("give `like=` the tree of the results.",),
            )
        )
    return places


def _sharding_of(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None)


def _kinds(tree: Any) -> list[Any]:
    return [(aval.shape, aval.dtype) for aval in map(plain_aval, jax.tree.leaves(tree))]
