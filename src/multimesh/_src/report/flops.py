"""How many floating-point operations a jaxpr asks for, counted from its equations.

    x @ w                   f32[4,8] @ f32[8,16]       2 * 4 * 16 * 8
    tanh(x) ; sum(x)        f32[4,16]                  one for each element
    x[0] ; x.T ; x > 0      moves, and what makes no float of floats: none
    scan of 12 layers                                  12 times its body

A `while` counts as one turn, because nobody knows how many there will be; a `cond` as its costliest
branch; a kernel as its body times its grid; the body of a `shard_map` once for each device. These
are operations that the program asks for, of whole arrays: what XLA makes of them is its own affair.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp

from multimesh._src.jax_compat import jaxprs

HOW = (
    "FLOP: counted from the traced program, of whole arrays: 2mnk for a product of matrices (and "
    "so for a convolution), one per element of arithmetic and of what is reduced, times the length "
    "of scans; a `while` counts as one turn, a `cond` as its costliest branch. Moves count nothing."
)

_MOVES = frozenset(
    ("all_gather", "bitcast_convert_type", "broadcast_in_dim", "concatenate",
     "convert_element_type", "copy", "copy_p", "device_put", "dynamic_slice",
     "dynamic_update_slice", "expand_dims", "gather", "get", "imag", "iota",
     "multimesh_constraint", "optimization_barrier", "pad", "ppermute", "pvary", "real",
     "reduce_precision", "reshape", "reshard", "rev", "select_n", "sharding_constraint",
     "slice", "split", "squeeze", "stop_gradient", "swap", "transpose")
)  # fmt: skip


def flops_of(jaxpr: jaxprs.AnyJaxpr) -> int:
    """Returns the operations of one evaluation of a jaxpr."""
    return sum(map(_flops_of_eqn, jaxprs.open_jaxpr(jaxpr).eqns))


def _flops_of_eqn(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in _MOVES or not any(_is_float(var) for var in (*eqn.invars, *eqn.outvars)):
        inner = jaxprs.sub_jaxprs(eqn.params)
        return _nested(eqn, inner) if inner and name not in _MOVES else 0
    if name in _COUNTS:
        return _COUNTS[name](eqn)
    if name.startswith("scatter"):
        return 0 if name == "scatter" else eqn.invars[-1].aval.size
    if name.startswith("reduce_window"):
        return _num_elements(eqn.outvars) * prod(eqn.params["window_dimensions"])
    if name.startswith(("reduce", "cum")):
        return _num_elements(eqn.invars)
    inner = jaxprs.sub_jaxprs(eqn.params)
    if inner:
        return _nested(eqn, inner)
    return sum(var.aval.size for var in eqn.outvars if _is_float(var))


def _nested(eqn: Any, inner: Sequence[jaxprs.AnyJaxpr]) -> int:
    counts = [flops_of(jaxpr) for jaxpr in inner]
    match eqn.primitive.name:
        case "scan":
            return eqn.params["length"] * sum(counts)
        case "cond":
            return max(counts)
        case "pallas_call":
            grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
            return sum(counts) * prod(size for size in grid if isinstance(size, int))
        case "shard_map":
            sizes: Mapping[str, int] = dict(eqn.params["mesh"].shape)
            axes = eqn.params.get("manual_axes", sizes)
            return sum(counts) * prod(sizes[axis] for axis in axes)
        case _:
            return sum(counts)


def _is_float(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _num_elements(atoms: Sequence[Any]) -> int:
    return sum(atom.aval.size for atom in atoms)


def _dot_general(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _num_elements(eqn.outvars) * prod(shape[dim] for dim in contracted)


def _convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _num_elements(eqn.outvars) * kernel.size // max(1, features)


def _ragged_dot(eqn: Any) -> int:
    """Every row of the left operand meets the free dims of the right one once."""
    left, right = eqn.invars[0].aval, eqn.invars[1].aval
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * left.size * prod(n for dim, n in enumerate(right.shape) if dim not in taken)


_COUNTS: Mapping[str, Callable[[Any], int]] = {
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "sort": lambda eqn: 0,
}
