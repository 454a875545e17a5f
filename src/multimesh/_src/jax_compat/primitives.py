"""Making a primitive of our own.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. All names are public (`jax.extend.core.Primitive`,
`jax.interpreters`), but none of them is promised to stay.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def identity_primitive(
    name: str,
    apply: Callable[..., Any],
    batch_params: Callable[[Mapping[str, Any], int, tuple[str, ...] | None], dict[str, Any]],
    transpose_params: Callable[[Mapping[str, Any]], Mapping[str, Any] | None],
) -> Primitive:
    """Returns a primitive that takes one array and gives it back.

    It is linear: tangents go through the same equation with the same params.

    Args:
        name: Its name in jaxprs.
        apply: `apply(x, **params)`: what it does when run or lowered.
        batch_params: `batch_params(params, at, spmd_axes)`: its params for an array with one more
            dim at `at`; `spmd_axes` is what `vmap(..., spmd_axis_name=)` says, None if nothing.
        transpose_params: Its params for cotangents; None lets them pass untouched.
    """
    primitive = Primitive(name)

    def transpose(cotangent: Any, _: Any, **params: Any) -> tuple[Any]:
        transposed = transpose_params(params)
        return (cotangent if transposed is None else primitive.bind(cotangent, **transposed),)

    # The batchers of `primitive_batchers` cannot have a param called `dims`; these can.
    def batch(axis: Any, args: Any, at: Any, **params: Any) -> tuple[Any, int | None]:
        if at[0] is None:
            return primitive.bind(args[0], **params), None
        spmd_axes = None if axis.spmd_name is None else tuple(axis.spmd_name)
        return primitive.bind(args[0], **batch_params(params, at[0], spmd_axes)), at[0]

    primitive.def_impl(apply)
    primitive.def_abstract_eval(lambda x, **_: x)
    ad.deflinear2(primitive, transpose)
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(apply, multiple_results=False))
    return primitive
