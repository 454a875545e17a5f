"""How the results of microbatches become one: accumulators carried by the scan, or stacks.

"sum", "mean" and "max" carry one accumulator per result and add slices in ascending order; "stack"
and "concat" are outputs of the scan. Accumulators have the dtype of the result, or `accum_dtype`;
sums of booleans count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multimesh._src.errors import MicrobatchError, message
from multimesh._src.jax_compat.manual import as_varying

REDUCTIONS = ("sum", "mean", "max", "stack", "concat")


def check_names(reduce: Any) -> None:
    """Checks that every leaf of `reduce` is a reduction.

    Raises:
        MicrobatchError: A leaf is not; the message lists them.
    """
    unknown = [leaf for leaf in jax.tree.leaves(reduce) if leaf not in REDUCTIONS]
    if unknown or reduce is None:
        raise MicrobatchError(
            message(
                f"There is no reduction `{unknown[0] if unknown else reduce}`.",
                ways=(f"use one of {', '.join(f'`{name}`' for name in REDUCTIONS)}.",),
            )
        )


def check_accum_dtype(dtype: Any) -> Any:
    """Returns `dtype` as a numpy dtype; None stays None.

    Raises:
        MicrobatchError: It is no floating dtype.
    """
    if dtype is None:
        return None
    try:
        floating = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise MicrobatchError(
            message(
                f"`accum_dtype={dtype}` is no floating dtype.",
                ways=("give `jnp.float32`: only floating results are accumulated in it.",),
            )
        )
    return jnp.dtype(dtype)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The reduction of one result.

    `value` is the type of one microbatch's value, `result` that of the result before "stack" and
    "concat" join the microbatches, `dtype` that of the accumulator. A sum of values that are `zero`
    has none: it would be state of the loop, and lie where the loop runs.
    """

    name: str
    kind: str
    value: jax.ShapeDtypeStruct
    result: jax.ShapeDtypeStruct
    dtype: Any
    zero: bool

    @property
    def is_carried(self) -> bool:
        return self.kind in ("sum", "mean", "max") and not self.zero

    @property
    def is_stacked(self) -> bool:
        return self.kind in ("stack", "concat")

    def initial(self) -> Any:
        start = _lowest(self.dtype) if self.kind == "max" else 0
        return as_varying(jnp.full(self.result.shape, start, self.dtype), self.value)

    def accumulate(self, accumulator: Any, value: Any) -> Any:
        add = jnp.maximum if self.kind == "max" else jnp.add
        return add(accumulator, jnp.asarray(value, self.dtype))

    def finish_carried(self, accumulator: Any, num_microbatches: int) -> Any:
        if self.kind != "mean":
            return accumulator.astype(self.result.dtype)
        mean = accumulator / num_microbatches
        is_inexact = jnp.issubdtype(self.result.dtype, jnp.inexact)
        return mean.astype(self.result.dtype) if is_inexact else mean

    def finish_stacked(self, stacked: Any, concat_dim: int | None) -> Any:
        if self.kind == "stack":
            return stacked
        assert concat_dim is not None  # `_check_leaf`
        joined = list(self.result.shape)
        joined[concat_dim] *= stacked.shape[0]
        return jnp.moveaxis(stacked, 0, concat_dim).reshape(joined)


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """The reduction of all results: (accumulators, values of a slice) -> (accumulators, stacks)."""

    leaves: tuple[_Leaf, ...]
    treedef: Any
    concat_dim: int | None

    def initial(self) -> tuple[Any, ...]:
        """Returns the accumulators before the first microbatch."""
        return tuple(leaf.initial() for leaf in self.leaves if leaf.is_carried)

    def accumulate(self, carry: Sequence[Any], values: Sequence[Any]) -> tuple[Any, Any]:
        """Adds the flat results of one microbatch; returns (accumulators, values to stack)."""
        pairs = list(zip(self.leaves, values, strict=True))
        carried = [pair for pair in pairs if pair[0].is_carried]
        added = tuple(
            leaf.accumulate(acc, value) for acc, (leaf, value) in zip(carry, carried, strict=True)
        )
        return added, tuple(value for leaf, value in pairs if leaf.is_stacked)

    def finish(self, carry: Sequence[Any], stacked: Sequence[Any], num_microbatches: int) -> Any:
        """Returns the pytree of results after the last microbatch."""
        carries, stacks = iter(carry), iter(stacked)
        results = [
            leaf.finish_stacked(next(stacks), self.concat_dim)
            if leaf.is_stacked
            else leaf.finish_carried(
                next(carries) if leaf.is_carried else leaf.initial(), num_microbatches
            )
            for leaf in self.leaves
        ]
        return jax.tree.unflatten(self.treedef, results)


def plan_reduction(
    shapes: Any, zeros: Sequence[bool], reduce: Any, accum_dtype: Any, concat_dim: int | None
) -> ReductionPlan:
    """Says how each result is reduced.

    Args:
        shapes: Pytree of the shapes and dtypes of one microbatch's results.
        zeros: Per result, whether it is zero whatever the microbatch.
        reduce: A reduction or a pytree prefix of reductions.
        accum_dtype: Dtype of the accumulators of floating results; None: that of the result.
        concat_dim: The dim along which "concat" joins; None: the batch has no single cut dim.

    Raises:
        MicrobatchError: The prefix does not fit, or a result cannot be reduced so.
    """
    try:
        kinds = jax.tree.leaves(jax.tree.broadcast(reduce, shapes))
    except ValueError as error:
        raise MicrobatchError(
            message(
                f"`reduce={reduce}` is no prefix of the results `{jax.tree.structure(shapes)}`.",
                ways=("give one reduction for all results, or one for each of their upper nodes.",),
            )
        ) from error
    paths, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    leaves = []
    for (path, value), kind, is_zero in zip(paths, kinds, zeros, strict=True):
        result, dtype = value, value.dtype
        if kind in ("sum", "mean") and dtype == jnp.bool_:
            dtype = jnp.dtype(jnp.int32)  # counts, as in `jnp.sum`
            result = jax.ShapeDtypeStruct(value.shape, dtype)
        elif kind in ("sum", "mean") and jnp.issubdtype(dtype, jnp.floating):
            dtype = accum_dtype or dtype
        zero = is_zero and kind in ("sum", "mean")
        leaf = _Leaf("result" + jax.tree_util.keystr(path), kind, value, result, dtype, zero)
        _check_leaf(leaf, concat_dim)
        leaves.append(leaf)
    return ReductionPlan(tuple(leaves), treedef, concat_dim)


def _check_leaf(leaf: _Leaf, concat_dim: int | None) -> None:
    result = leaf.result
    problem = ""
    if leaf.kind == "concat" and concat_dim is None:
        problem = "the arrays of the batch are cut along different dims"
    elif leaf.kind == "concat" and concat_dim is not None and concat_dim >= len(result.shape):
        problem = f"it has no dim `{concat_dim}`, along which the batch is cut"
    elif not leaf.is_stacked and not (
        jnp.issubdtype(result.dtype, jnp.number) or result.dtype == jnp.bool_
    ):
        problem = "its elements are no numbers"
    elif leaf.kind == "max" and jnp.issubdtype(result.dtype, jnp.complexfloating):
        problem = "complex numbers have no order"
    if problem:
        raise MicrobatchError(
            message(
                f"{leaf.name} of shape `{result.shape}` and dtype `{result.dtype}` cannot be "
                f"reduced by `{leaf.kind}`: {problem}.",
                ways=('reduce it by `"stack"`; `reduce` may be a pytree with an entry for each.',),
            )
        )


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min
