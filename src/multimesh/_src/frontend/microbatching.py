"""Microbatch loops: a batch cut into slices, a function run on each, the results reduced.

    grads = microbatch(jax.grad(loss), dim=0, size=2, argnum=1)(params, batch)     batch: [8, 3]

    under the scope multimesh:microbatch:<id>
        a:f32[4,2,3] = reshape[new_sizes=(4, 2, 3)] batch       cut dim -> (microbatches, size)
        g:f32[...]   = scan[length=4] params zeros a            (consts, accumulators, slices)

Behind the reshape stands a transpose if the cut dim is not the first: `[A, B, C]` cut along dim 1
becomes `[m, A, size, C]`. A microbatch is a contiguous run of rows. The function is traced once,
before the scan (the accumulators need its result types); the body of the scan replays that trace.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multimesh._src.errors import MicrobatchError, message
from multimesh._src.frontend import logical, reductions
from multimesh._src.frontend.arguments import check_callable
from multimesh._src.frontend.batches import check_dim, check_rows, to_microbatch_major
from multimesh._src.frontend.markers import MicrobatchMarker, microbatch_scope
from multimesh._src.jax_compat import jaxprs
from multimesh._src.schedule.make import check_name


def microbatch(
    fun: Callable[..., Any],
    dim: Any,
    size: int,
    argnum: int | Sequence[int] = 0,
    *,
    schedule: Any = None,
    custom_schedule: str | Sequence[Any] | None = None,
    reduce: Any = "sum",
    accum_dtype: Any = None,
    with_index: bool = False,
    arg_shardings: Any = None,
    interleave: int | None = None,
    num_stages: int | None = None,
    unrolling: int | None = None,
) -> Callable[..., Any]:
    """Runs `fun` on slices of a batch and reduces the results.

    Every leaf `[..., B, ...]` of the batch arguments is cut along `dim` into `m = B // size`
    microbatches of `size` rows. The slices run in ascending order, or as the schedule says.

    Args:
        fun: The function, for example `jax.value_and_grad(loss)`. Sums over microbatches equal the
            value on the whole batch only if `fun` is a sum over rows: a loss that averages over the
            batch wants `reduce="mean"`.
        dim: The cut dim, one for all leaves, or a pytree prefix of the batch argument; `None`
            leaves a leaf whole. With several batch arguments, a tuple with an entry for each.
        size: Rows of a microbatch.
        argnum: Position of the batch argument, or a tuple of positions.
        schedule: Pipeline schedule of the loop. Default: the one of the context.
        custom_schedule: A schedule by hand: text with one line of actions per submesh, or a
            sequence with one row per submesh, of actions, task names or (microbatch, task name).
            A name of forward and backward alike is followed by the kind: `layer0:F`, `layer0:BW`.
        reduce: `"sum"`, `"mean"`, `"max"` (elementwise), `"stack"` (new first dim of size m),
            `"concat"` (along `dim`), or a pytree prefix of the results with these.
        accum_dtype: Dtype in which floating results are accumulated by "sum" and "mean"; results
            are cast back at the end.
        with_index: `fun` gets the number of the microbatch, an int32 scalar, as a last positional
            argument.
        arg_shardings: Sharding constraints for the batch, as `with_sharding_constraint` takes them
            for the arguments before they are cut: one for all leaves or a pytree prefix. With
            several batch arguments, a tuple with an entry for each.
        interleave: Taken for compatibility; schedules know their own.
        num_stages: Delay of the `wavefront` schedule.
        unrolling: Taken for compatibility.

    Returns:
        A function with the arguments of `fun`; positional batch arguments.

    Raises:
        MicrobatchError: A size below 1 or that does not divide the batch, leaves with different
            numbers of rows, a position or reduction that does not exist, `schedule` together with
            `custom_schedule`.

    Example:
        >>> import jax.numpy as jnp
        >>> from multimesh.jax import microbatch
        >>> total = microbatch(lambda w, x: (w * x).sum(), dim=0, size=2, argnum=1)
        >>> float(total(2.0, jnp.arange(6.0)))
        30.0
    """
    check_callable(fun, "microbatch")
    if custom_schedule is None:
        check_name(schedule)
    options = _Options(
        size=_size(size),
        argnums=_argnums(argnum),
        dim=dim,
        several=isinstance(argnum, (tuple, list)),
        reduce=reduce,
        accum_dtype=reductions.check_accum_dtype(accum_dtype),
        with_index=with_index,
        arg_shardings=arg_shardings,
        schedule=schedule,
        custom_schedule=_rows(schedule, custom_schedule),
        interleave=interleave,
        num_stages=num_stages,
        unrolling=unrolling,
    )
    reductions.check_names(reduce)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _run(fun, options, args, kwargs)

    return wrapped


@dataclass(frozen=True, slots=True)
class _Options:
    """The checked arguments of `microbatch`. `several`: `argnum` was given as a tuple."""

    size: int
    argnums: tuple[int, ...]
    dim: Any
    several: bool
    reduce: Any
    accum_dtype: Any
    with_index: bool
    arg_shardings: Any
    schedule: Any
    custom_schedule: str | tuple[Any, ...] | None
    interleave: int | None
    num_stages: int | None
    unrolling: int | None

    def marker(self, num_microbatches: int) -> MicrobatchMarker:
        return MicrobatchMarker(
            num_microbatches=num_microbatches,
            size=self.size,
            schedule=self.schedule,
            custom_schedule=self.custom_schedule,
            num_stages=self.num_stages,
            interleave=self.interleave,
            unrolling=self.unrolling,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """The batch of one call, as the flat leaves of the tuple of batch arguments.

    `dims[i]` is the cut dim of leaf i, None where it is left whole.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    dims: tuple[int | None, ...]
    shardings: tuple[Any, ...]
    num_microbatches: int


def _run(fun: Callable[..., Any], options: _Options, args: Any, kwargs: Any) -> Any:
    batch = _read_batch(options, args)
    m = batch.num_microbatches

    def on_slice(slices: Sequence[Any], index: Any) -> Any:
        pieces = iter(slices)
        leaves = [
            leaf if dim is None else next(pieces)
            for leaf, dim in zip(batch.leaves, batch.dims, strict=True)
        ]
        called = list(args)
        for argnum, value in zip(
            options.argnums, jax.tree.unflatten(batch.treedef, leaves), strict=True
        ):
            called[argnum] = value
        if options.with_index:
            called.append(index)
        return fun(*called, **kwargs)

    with microbatch_scope(options.marker(m)):
        xs = [
            _cut(leaf, dim, options.size, sharding)
            for leaf, dim, sharding in zip(batch.leaves, batch.dims, batch.shardings, strict=True)
            if dim is not None
        ]
        index = jnp.arange(m, dtype=jnp.int32) if options.with_index else None
        first = jax.eval_shape(lambda batch: jax.tree.map(lambda x: x[0], batch), (xs, index))
        body, shapes = jax.make_jaxpr(on_slice, return_shape=True)(*first)
        plan = reductions.plan_reduction(
            shapes,
            jaxprs.zero_results(body),
            options.reduce,
            options.accum_dtype,
            _concat_dim(batch.dims),
        )

        def step(carry: Any, x: Any) -> Any:
            return plan.accumulate(carry, jaxprs.evaluate(body, *jax.tree.leaves(x)))

        carry, stacked = jax.lax.scan(step, plan.initial(), (xs, index), length=m)
        return plan.finish(carry, stacked, m)


def _cut(leaf: Any, dim: int, size: int, sharding: Any) -> Any:
    """`[A, B, C] -> [m, A, size, C]` for dim 1; the constraint leaves the new first dim whole."""
    stored = to_microbatch_major(leaf, dim, size)
    if sharding is None:
        return stored
    spec = sharding if isinstance(sharding, jax.sharding.PartitionSpec) else sharding.spec
    shifted = jax.sharding.PartitionSpec(None, *spec)
    if isinstance(sharding, jax.sharding.NamedSharding):
        shifted = sharding.update(spec=shifted)
    elif not logical.constraints_are_logical() and jax.sharding.get_abstract_mesh().empty:
        return stored  # bare names mean nothing in plain JAX without a mesh
    return logical.with_sharding_constraint(stored, shifted)


# --- reading the batch ---------------------------------------------------------------------------


def _read_batch(options: _Options, args: Sequence[Any]) -> _Batch:
    argnums = tuple(_position(argnum, len(args)) for argnum in options.argnums)
    arguments = tuple(args[argnum] for argnum in argnums)
    paths, treedef = jax.tree_util.tree_flatten_with_path(arguments)
    names = [_name(argnums[path[0].idx], path[1:]) for path, _ in paths]
    leaves = tuple(jnp.asarray(leaf) for _, leaf in paths)
    dims = tuple(
        None if dim is None else check_dim(dim, leaf.shape, name)
        for dim, leaf, name in zip(
            _spread(options.dim, arguments, options.several, "dim"), leaves, names, strict=True
        )
    )
    m = check_rows(leaves, dims, names, options.size)
    shardings = _spread(options.arg_shardings, arguments, options.several, "arg_shardings")
    for name, leaf, sharding in zip(names, leaves, shardings, strict=True):
        logical.check_spec(sharding, leaf.ndim, name)
    return _Batch(leaves, treedef, dims, tuple(shardings), m)


def _name(argnum: int, path: Any) -> str:
    return f"argument {argnum}{jax.tree_util.keystr(path)}"


def _spread(prefix: Any, arguments: tuple[Any, ...], several: bool, what: str) -> list[Any]:
    """Returns one entry of `prefix` for each leaf of `arguments`."""

    def is_leaf(value: Any) -> bool:
        return value is None or isinstance(
            value, (int, jax.sharding.PartitionSpec, jax.sharding.Sharding)
        )

    tree = prefix if is_leaf(prefix) or several else (prefix,)
    try:
        spread = jax.tree.broadcast(tree, arguments, is_leaf=is_leaf)
    except ValueError as error:
        raise MicrobatchError(
            message(
                f"`{what}={prefix}` is no prefix of the batch `{jax.tree.structure(arguments)}`.",
                ways=(
                    f"give one `{what}` for all arrays of the batch.",
                    "give a tree whose nodes are the upper nodes of the batch; for a tuple "
                    "`argnum`, a tuple with one entry for each.",
                ),
            )
        ) from error
    # A None in the batch is no leaf of it, but one in the prefix stands for leaves.
    return jax.tree.structure(arguments).flatten_up_to(spread)


def _position(argnum: int, num_args: int) -> int:
    if -num_args <= argnum < num_args:
        return argnum % num_args
    raise MicrobatchError(
        message(
            f"`argnum={argnum}`, but the function was called with `{num_args}` positional "
            "arguments.",
            ways=("give the position of the batch, counted from 0, and pass it by position.",),
        )
    )


def _concat_dim(dims: Sequence[int | None]) -> int | None:
    """Returns the dim along which "concat" joins: the cut one, if it is one for all leaves."""
    distinct = {dim for dim in dims if dim is not None}
    return distinct.pop() if len(distinct) == 1 else None


def _size(size: Any) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1:
        raise MicrobatchError(
            message(
                f"A microbatch of `size={size!r}` rows: the size is an integer of at least 1.",
                ways=(
                    "give the number of rows of one microbatch, not the number of microbatches.",
                ),
            )
        )
    return number


def _argnums(argnum: Any) -> tuple[int, ...]:
    argnums = tuple(argnum) if isinstance(argnum, (tuple, list)) else (operator.index(argnum),)
    if not argnums or len(set(argnums)) < len(argnums):
        raise MicrobatchError(f"`argnum={argnum}`: give one position, or different ones.")
    return argnums


def _rows(schedule: Any, rows: Any) -> str | tuple[Any, ...] | None:
    if rows is None:
        return None
    if schedule not in (None, "custom"):
        raise MicrobatchError(
            message(
                f"Both `schedule={schedule!r}` and `custom_schedule` are given.",
                ways=("leave `schedule` out.", "leave `custom_schedule` out."),
            )
        )
    return rows if isinstance(rows, str) else tuple(map(_row, rows))


def _row(row: Any) -> Any:
    """A row as a value that can be compared; text stays text."""
    if isinstance(row, str):
        return row
    return tuple(tuple(item) if isinstance(item, list) else item for item in row)
