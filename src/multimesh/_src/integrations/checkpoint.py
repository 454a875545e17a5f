"""Checkpoints by Orbax: arrays on several submeshes are arrays like any other to it.

    step = mjit(train_step, donate_argnums=0)
    compiled = step.lower(jax.eval_shape(init), batch).compile()
    state = checkpoint.restore("run/100", compiled)  # each shard is read for its own device
    state, loss = compiled(state, batch)             # nothing is moved, nothing is traced
    checkpoint.save("run/101", state)

Orbax stores global arrays under the paths of their leaves and knows nothing of stages. So a
checkpoint fits any mesh, any number of stages and plain JAX, and the other way round. What is added
here: places from a compiled step, weak types, and a comparison of all leaves before anything is
read, where Orbax casts dtypes silently and reports shapes one at a time from several threads.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from multimesh._src.errors import (
    CheckpointError,
    MissingCheckpointError,
    MissingPackageError,
    listed,
    message,
)
from multimesh._src.integrations.wanted import (
    NUMBERS,
    Wanted,
    abstract_state as abstract_state,
    leaf_name,
    names,
    wanted_leaves,
)

_METADATA = "_METADATA"  # the file that Orbax writes for a pytree


def save(path: str | os.PathLike[str], state: Any, *, overwrite: bool = False) -> None:
    """Writes a state to a new directory and returns when it is there.

    For saving while training goes on, and for keeping the newest few, use Orbax's
    `CheckpointManager`; `restore` reads what it writes.

    Args:
        path: A directory that does not exist yet. It appears when everything is written.
        state: A pytree of arrays and numbers, anywhere.
        overwrite: Whether a checkpoint at `path` is deleted first.

    Raises:
        CheckpointError: There is something at `path`, or a leaf that cannot be stored.
        MissingPackageError: Orbax is not installed.
    """
    orbax = _orbax()
    _check_savable(state)
    directory = _absolute(path)
    if directory.exists() and not overwrite:
        raise CheckpointError(
            message(
                f"`{directory}` exists.",
                ways=("save to another directory.", "pass `overwrite=True`."),
            )
        )
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, state, force=overwrite)


def restore(path: str | os.PathLike[str], like: Any, *, argnum: int | str = 0) -> Any:
    """Reads a state, each shard straight to the device that owns it.

    Args:
        path: What `save` or Orbax wrote; a step of a `CheckpointManager` with one item, as
            `manager.directory / "100"`.
        like: A compiled step, ours or JAX's: the state comes back where the step takes it. Or a
            state: each leaf comes back as it is there (its arrays may be donated already); a
            `jax.ShapeDtypeStruct` without sharding becomes a NumPy array.
        argnum: Which argument of the compiled step is the state; a name for one passed by keyword.

    Returns:
        A pytree like `like`, or like the argument of the compiled step. Arguments that the step
        does not use are NumPy arrays.

    Raises:
        MissingCheckpointError: There is no checkpoint at `path`.
        CheckpointError: The tree, a shape or a dtype differs; `like` is not compiled.
        MissingPackageError: Orbax is not installed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> path = tempfile.mkdtemp() + "/state"
        >>> save(path, {"w": jnp.arange(3)})
        >>> restore(path, {"w": jnp.zeros(3, int)})["w"].tolist()
        [0, 1, 2]
    """
    orbax = _orbax()
    wanted, tree = wanted_leaves(like, argnum)
    checkpoint = _absolute(path)
    directory = _pytree_directory(checkpoint)
    _check_complete(checkpoint, orbax.utils.is_checkpoint_finalized)
    # Not a `Checkpointer`: that one warns about files that the items of a manager do not have.
    with contextlib.closing(orbax.StandardCheckpointHandler()) as handler:
        metadata = handler.metadata(directory).tree
        paths, stored_tree = jax.tree.flatten_with_path(metadata)
        stored = {names(path): (leaf_name(path), leaf) for path, leaf in paths}
        _check_same(directory, stored, wanted, orbax.metadata.ScalarMetadata)
        # In the stored tree nothing hangs on how Orbax writes empty nodes and attributes.
        targets = jax.tree.unflatten(stored_tree, [wanted[path].target for path in stored])
        restored = handler.restore(directory, args=orbax.args.StandardRestore(targets))
    pairs = zip(stored, jax.tree.leaves(restored), strict=True)
    leaves = {path: _finished(wanted[path], leaf) for path, leaf in pairs}
    return jax.tree.unflatten(tree, [leaves[path] for path in wanted])


def _orbax() -> Any:
    """Returns the module; it takes long to import, and may not be there."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingPackageError(
            message(
                "checkpoints need Orbax, which cannot be imported.",
                where=str(error),
                ways=("`pip install 'multimesh-jax[orbax]'`.",),
            )
        ) from error
    return orbax.checkpoint


def _absolute(path: str | os.PathLike[str]) -> Any:
    """Returns a path of `epath`, which knows cloud storage too."""
    from etils import epath  # comes with Orbax

    found = epath.Path(path).expanduser()
    return found if found.is_absolute() else found.absolute()


def _pytree_directory(directory: Any) -> Any:
    """Returns the directory of the pytree: this one, or the only item of a step.

    Raises:
        MissingCheckpointError: There is none.
        CheckpointError: There are several.
    """
    if (directory / _METADATA).exists():
        return directory
    children = sorted(child.name for child in directory.iterdir()) if directory.is_dir() else []
    steps = sorted((name for name in children if name.isdecimal()), key=int)
    items = [name for name in children if (directory / name / _METADATA).exists()]
    if steps:
        shown = " to ".join(f"`{name}`" for name in dict.fromkeys((steps[0], steps[-1])))
        what = f"there is no checkpoint at `{directory}`, but it holds checkpoints: {shown}."
        ways = (f"restore one, `{directory / steps[-1]}` for the latest.",)
        raise MissingCheckpointError(message(what, ways=ways))
    if not items:
        raise MissingCheckpointError(message(f"there is no checkpoint at `{directory}`."))
    if len(items) > 1:
        shown = ", ".join(f"`{name}`" for name in items)
        what = f"the checkpoint at `{directory}` has several items: {shown}."
        raise CheckpointError(message(what, ways=(f"restore one, `{directory / items[0]}`.",)))
    return directory / items[0]


def _check_complete(directory: Any, is_complete: Callable[[Any], bool]) -> None:
    if not is_complete(directory):
        what = f"the checkpoint at `{directory}` is not complete: its writer was interrupted"
        raise CheckpointError(message(what + " or is still at work."))


def _check_savable(state: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if not leaves or leaves[0][0] == ():
        what = "the state is a single array" if leaves else "the state has no arrays"
        raise CheckpointError(message(f"{what}.", ways=("save a dict of arrays.",)))
    problems = [
        f"`{leaf_name(path)}` {problem}"
        for path, leaf in leaves
        if (problem := _why_not_savable(leaf))
    ]
    if problems:
        raise CheckpointError(message("the state cannot be saved:\n" + listed(problems)))


def _why_not_savable(leaf: Any) -> str:
    if not isinstance(leaf, NUMBERS) and not hasattr(leaf, "__array__"):
        return f"is a `{type(leaf).__name__}`, neither an array nor a real number."
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "is deleted; if a step was given it as donated, save what the step returned."
    if 0 in (shape := np.shape(leaf)):
        return f"has no elements, `{list(shape)}`, which Orbax does not store."
    return ""


def _check_same(
    directory: Any,
    stored: Mapping[tuple[str, ...], tuple[str, Any]],
    wanted: Mapping[tuple[str, ...], Wanted],
    scalar: type,
) -> None:
    """Compares trees, then shapes and dtypes.

    Args:
        directory: For errors.
        stored: Name and metadata of every stored leaf, by path.
        wanted: What is wanted, by path.
        scalar: The class of Orbax that stands for a Python number, stored with 64 bits.
    """
    problems = [
        *(
            f"`{leaf.name}` is only in `like`."
            for path, leaf in wanted.items()
            if path not in stored
        ),
        *(f"`{name}` is only stored." for path, (name, _) in stored.items() if path not in wanted),
    ]
    ways = ["give a `like` with the leaves that were saved."]
    if not problems:
        problems = [
            f"`{leaf.name}` is stored as `{_type(found)}`, but is `{_type(leaf)}` in `like`."
            for path, leaf in wanted.items()
            if not _is_same(found := stored[path][1], leaf, isinstance(found, scalar))
        ]
        ways = ["restore with the types that were saved and convert afterwards."]
    if problems:
        what = f"the checkpoint at `{directory}` does not fit:\n" + listed(problems)
        raise CheckpointError(message(what, ways=ways))


def _is_same(found: Any, leaf: Wanted, is_number: bool) -> bool:
    if tuple(found.shape) != leaf.shape:
        return False
    if leaf.exact and not is_number:
        return found.dtype == leaf.dtype
    kinds = (np.bool_, np.integer, np.floating)
    return all(
        jax.dtypes.issubdtype(found.dtype, kind) == jax.dtypes.issubdtype(leaf.dtype, kind)
        for kind in kinds
    )


def _type(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _finished(wanted: Wanted, value: Any) -> Any:
    """Returns the leaf; a stored key is known from its integers only when it has been read."""
    if not isinstance(value, jax.Array) or value.dtype == wanted.final:
        return wanted.finish(value)
    raise CheckpointError(
        message(
            f"`{wanted.name}` is stored as `{value.dtype}`, but is `{wanted.final}` in `like`.",
            ways=(
                "restore with the type that was saved and convert afterwards, by "
                "`jax.random.key_data` or `jax.random.wrap_key_data`.",
            ),
        )
    )
