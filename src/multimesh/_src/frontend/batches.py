"""Batches and how they are stored: microbatch-major.

A batch `[B, ...]` cut along a dim into m microbatches is stored as `[m, B / m, ...]` (for another
dim d: the new first dim m, and `B / m` at its place d inside the slice), with the rows of one
microbatch sharded and m not. Then each microbatch is a local slice on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.errors import MicrobatchError, message


@final
@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchedArray:
    """A batch that is stored microbatch-major already. `prepare_batch` makes it.

    Compiled steps take it in place of the batch `[..., B, ...]`, at no cost. Attributes are those
    of the batch; `np.asarray` gives it in row order. Plain JAX does not take it.

    Attributes:
        stored: The array as stored, `[m, ..., B / m, ...]`.
        dim: The dim of the batch that is cut.
    """

    stored: jax.Array
    dim: int

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches m."""
        return self.stored.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the batch."""
        sizes = list(self.stored.shape[1:])
        sizes[self.dim] *= self.num_microbatches
        return tuple(sizes)

    @property
    def dtype(self) -> Any:
        """Dtype of the batch."""
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        """Number of dims of the batch."""
        return self.stored.ndim - 1

    @property
    def nbytes(self) -> int:
        """Size of the batch in bytes."""
        return self.stored.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # row order always is a copy
        rows = np.moveaxis(np.asarray(self.stored), 0, self.dim).reshape(self.shape)
        return rows if dtype is None else rows.astype(dtype)

    @property
    def __jax_array__(self) -> Any:
        # JAX asks every foreign object for this attribute, and passes on what is raised.
        raise MicrobatchError(
            message(
                f"{self!r} is stored microbatch by microbatch, so plain JAX cannot take it.",
                ways=(
                    "pass it to a step that is compiled by `mjit` or inside a `MultiMesh`.",
                    "use `numpy.asarray(batch)`, which gives the rows in order.",
                ),
            )
        )

    def __repr__(self) -> str:
        return (
            f"MicrobatchedArray(shape={self.shape}, dtype={self.dtype}, "
            f"num_microbatches={self.num_microbatches}, dim={self.dim})"
        )


def prepare_batch(batch: Any, dim: int, size: int, *, sharding: Any = None) -> Any:
    """Puts a batch on the devices in the form that microbatch loops want.

    Args:
        batch: A pytree of arrays `[..., B, ...]`, best of numpy: an array on devices is laid out
            anew.
        dim: The dim that is cut.
        size: Rows of a microbatch.
        sharding: NamedSharding of the batch, or a pytree prefix of them; along `dim` it shards the
            rows of each microbatch. Default: the default device.

    Returns:
        `batch` with a `MicrobatchedArray` at each leaf.

    Raises:
        MicrobatchError: `size` does not divide the rows, they differ between arrays, or an array
            has no dim `dim`.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(batch)
    names = ["batch" + jax.tree_util.keystr(path) for path, _ in paths]
    leaves = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in paths]
    dims = [check_dim(dim, leaf.shape, name) for leaf, name in zip(leaves, names, strict=True)]
    check_rows(leaves, dims, names, size)
    is_leaf = lambda value: value is None or isinstance(value, jax.sharding.Sharding)  # noqa: E731
    shardings = jax.tree.leaves(
        jax.tree.broadcast(sharding, batch, is_leaf=is_leaf), is_leaf=is_leaf
    )
    prepared = [
        MicrobatchedArray(jax.device_put(to_microbatch_major(leaf, d, size), stored_sharding(s)), d)
        for leaf, d, s in zip(leaves, dims, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, prepared)


def stored_sharding(sharding: Any) -> Any:
    """Returns the sharding of the stored array for the sharding of a batch: m is not sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(None, *sharding.spec))


def to_microbatch_major(array: Any, dim: int, size: int) -> Any:
    """Returns `array` with `dim` cut into (m, size) and m moved to the front.

    numpy arrays stay numpy arrays (a view for dim 0). In a trace this is one reshape, and one
    transpose if `dim` is not 0.
    """
    shape = array.shape
    cut = array.reshape((*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :]))
    if dim == 0:
        return cut
    order = (dim, *range(dim), *range(dim + 1, cut.ndim))
    return cut.transpose(order) if isinstance(cut, np.ndarray) else jnp.transpose(cut, order)


def check_dim(dim: Any, shape: Sequence[int], name: str) -> int:
    """Returns `dim` counted from the front.

    Raises:
        MicrobatchError: The array has no such dim.
    """
    if isinstance(dim, int) and -len(shape) <= dim < len(shape):
        return dim % len(shape)
    raise MicrobatchError(
        message(
            f"`dim={dim}` does not exist in {name} of shape `{tuple(shape)}`.",
            ways=("cut another dim.", "give `None` as its `dim` to leave the array whole."),
        )
    )


def check_rows(
    leaves: Sequence[Any], dims: Sequence[int | None], names: Sequence[str], size: int
) -> int:
    """Returns the number of microbatches of the arrays that are cut (`dims[i]` is not None).

    Raises:
        MicrobatchError: There are none, they have different numbers of rows, or the number of rows
            is no multiple of `size`.
    """
    rows = [
        (leaf.shape[dim], name)
        for leaf, dim, name in zip(leaves, dims, names, strict=True)
        if dim is not None
    ]
    if not rows:
        raise MicrobatchError(
            message(
                "The batch has no array that could be cut into microbatches.",
                ways=("let `argnum` name the argument that holds the batch.",),
            )
        )
    num_rows, first = rows[0]
    other = next((row for row in rows if row[0] != num_rows), None)
    if other is not None:
        raise MicrobatchError(
            message(
                f"{first} has `{num_rows}` rows but {other[1]} has `{other[0]}`: the arrays of a "
                "batch are cut together.",
                ways=(
                    "give a `dim` for each array, as a pytree.",
                    "give `None` as the `dim` of arrays that are no part of the batch.",
                ),
            )
        )
    if num_rows % size or not num_rows:
        raise MicrobatchError(
            message(
                f"{first} has `{num_rows}` rows, which do not divide into microbatches of "
                f"`{size}`.",
                ways=_near_sizes(num_rows, size),
            )
        )
    return num_rows // size


def _near_sizes(num_rows: int, size: int) -> tuple[str, ...]:
    padded = -(-max(num_rows, 1) // size) * size
    divisors = [d for d in range(1, num_rows + 1) if num_rows % d == 0]
    pad = f"pad the batch to `{padded}` rows."
    if not divisors:
        return (pad,)
    nearest = min(divisors, key=lambda d: (abs(d - size), d))
    return (f"use `size={nearest}`.", pad)
