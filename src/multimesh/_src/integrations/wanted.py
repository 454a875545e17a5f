"""What a checkpoint is restored into: one `Wanted` for every leaf of `like`.

    leaf of `like`                        comes back
    argument of a compiled step           where the step takes it; unused: on the host
    `jax.Array`                           where it lies; not committed: on the default device
    `jax.ShapeDtypeStruct(sharding=...)`  there
    `jax.ShapeDtypeStruct`, NumPy array   on the host, as a NumPy array
    `3`, `2.5`, `True`                    as a Python number

Weak types come back too, which Orbax does not store: with another type a step is traced again. A
typed key without a place comes back on the default device, since the host has no such type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh._src.errors import CheckpointError, TraceError, listed, message
from multimesh._src.jax_compat import copies
from multimesh._src.staging.mjit import MultiMeshFunction
from multimesh._src.staging.staged import Compiled, Lowered, Traced

NUMBERS = (bool, int, float)

_COMPILED = (Compiled, jax.stages.Compiled)
_NOT_COMPILED = (
    MultiMeshFunction,
    Traced,
    Lowered,
    jax.stages.Traced,
    jax.stages.Lowered,
    jax.stages.Wrapped,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One leaf to be restored.

    Attributes:
        name: Path of the leaf, as `['params'][0]`.
        shape: Its shape as stored: of a key that of its integers.
        dtype: Its dtype as stored.
        exact: Whether the stored dtype must be this one, or only of this kind.
        target: What Orbax is asked for.
        finish: Makes the leaf of what Orbax gives.
        final: Type of the finished leaf.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    exact: bool
    target: Any
    finish: Callable[[Any], Any]
    final: Any


def abstract_state(like: Any, *, argnum: int | str = 0) -> Any:
    """Returns types and places of a state, for Orbax's own functions.

    Args:
        like: A compiled step, ours or JAX's, which says where it takes its argument; or a state of
            arrays or `jax.ShapeDtypeStruct`s.
        argnum: Which argument of the compiled step is the state; a name for one passed by keyword.
            Static arguments do not count.

    Returns:
        A pytree of `jax.ShapeDtypeStruct`. The sharding is None for what has no place of its own:
        host values, uncommitted arrays, and arguments that the step does not use.

    Raises:
        CheckpointError: `like` is a step that is not compiled, or has leaves that are no arrays.
        TraceError: The compiled step has no such argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> step = jax.jit(lambda state: state + 1).lower(jnp.zeros(4)).compile()
        >>> abstract_state(step).shape
        (4,)
    """
    if isinstance(like, _COMPILED):
        types = _argument(like, like.in_avals, argnum)
        places = _argument(like, like.input_shardings, argnum)
        return jax.tree.map(_struct, types, places)
    if isinstance(like, _NOT_COMPILED):
        raise CheckpointError(
            message(
                f"`like` is `{_shown(like)}`, which is not compiled, so that it has no places yet.",
                ways=(
                    "compile it first, `step.lower(state, batch).compile()`; the state may be "
                    "abstract, `jax.eval_shape(init)`.",
                    "give a state.",
                ),
            )
        )
    _check_leaves(like)
    return jax.tree.map(_struct_of, like)


def wanted_leaves(like: Any, argnum: int | str) -> tuple[dict[tuple[str, ...], Wanted], Any]:
    """Returns what is wanted for each path of `like`, in order, and the tree of the result."""
    structs = abstract_state(like, argnum=argnum)
    leaves = structs if isinstance(like, _COMPILED) else like
    paths, tree = jax.tree.flatten_with_path(structs)
    pairs = zip(paths, jax.tree.leaves(leaves), strict=True)
    found = {names(path): _wanted(path, leaf, struct) for (path, struct), leaf in pairs}
    return found, tree


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a path as Orbax stores it: it tells neither lists from dicts nor `x.a` from `x["a"]`.

    `.opt_state[0].mu['w']` is `("opt_state", "0", "mu", "w")`.
    """
    found = []
    for key in path:
        attributes = ("key", "idx", "name")  # of dict, sequence and attribute keys
        inner = [getattr(key, name) for name in attributes if hasattr(key, name)]
        found.append(str(inner[0] if inner else key))
    return tuple(found)


def _argument(step: Any, tree: Any, argnum: int | str) -> Any:
    args, kwargs = tree
    try:
        return kwargs[argnum] if isinstance(argnum, str) else args[argnum]
    except (IndexError, KeyError):
        what = f"`argnum={argnum!r}` is no argument of the compiled step: it has {len(args)} "
        what += "positional arguments"
        what += f" and {', '.join(f'`{name}`' for name in kwargs)}." if kwargs else "."
        raise TraceError(message(what)) from None


def _shown(step: Any) -> str:
    name = getattr(step, "fun_name", None) or getattr(step, "__name__", None)
    return type(step).__name__ + (f" of {name}" if name else "")


def _check_leaves(like: Any) -> None:
    paths = jax.tree_util.tree_leaves_with_path(like)
    problems = [
        f"`{leaf_name(path)}` is a `{type(leaf).__name__}`."
        for path, leaf in paths
        if not (isinstance(leaf, NUMBERS) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype")))
    ]
    if problems:
        what = "`like` has leaves that are neither arrays nor numbers:\n" + listed(problems)
        raise CheckpointError(message(what, ways=("give a state, or a compiled step.",)))


def leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf for errors."""
    return jax.tree_util.keystr(path) or "the state itself"


def _struct(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def _struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, NUMBERS):
        weak = not isinstance(leaf, bool)
        return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=weak)
    placed = not isinstance(leaf, jax.Array) or leaf.committed
    return _struct(leaf, getattr(leaf, "sharding", None) if placed else None)


def _wanted(path: tuple[Any, ...], leaf: Any, struct: jax.ShapeDtypeStruct) -> Wanted:
    stored = struct
    if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
        stored = jax.eval_shape(jax.random.key_data, struct)
    target, finish = struct, _same
    if struct.sharding is None:
        # Orbax looks at the type of the array alone; this one takes no memory.
        target = np.broadcast_to(np.zeros((), stored.dtype), stored.shape)
        finish = _from_host(leaf, struct)
    elif struct.weak_type:
        finish = _weakly_typed
    return Wanted(
        name=leaf_name(path),
        shape=stored.shape,
        dtype=stored.dtype,
        exact=not isinstance(leaf, NUMBERS),
        target=target,
        finish=finish,
        final=struct.dtype,
    )


def _same(value: Any) -> Any:
    return value


def _from_host(leaf: Any, struct: jax.ShapeDtypeStruct) -> Callable[[Any], Any]:
    """Returns what makes a leaf like `leaf` of a NumPy array."""
    if isinstance(leaf, NUMBERS):
        kind = type(leaf)
        return lambda value: kind(value.item())
    if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
        wrap = copies.wrap_keys(struct.dtype)
        return lambda value: wrap(jnp.asarray(value))
    if isinstance(leaf, jax.Array):
        weak = struct.weak_type and not struct.shape
        return lambda value: jnp.asarray(value.item() if weak else value)
    return (lambda value: value[()]) if isinstance(leaf, np.generic) else _same


def _weakly_typed(value: jax.Array) -> jax.Array:
    assemble = copies.assembler(value.shape, value.dtype, True, value.sharding)
    return assemble(copies.shards(value))
