"""Which equations act on a stack `[L, ...]` row by row.

    m' = mul 0.9 m          rows        row i of the result needs row i of the operands
    n  = reduce_sum m       reduction   of each block, then of the blocks' results
    g  = concatenate a b    join        rows come from operands that lie where they were made
    z  = broadcast 0.0      fill        all rows are equal
    w2 = slice w [2:3]      read        some rows at fixed places

Everything else needs the stack as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import Equation, Lit, Operand, Var
from multimesh._src.jax_compat import jaxprs

Kind: TypeAlias = Literal["rows", "reduction", "join", "fill", "read", "whole"]

# fmt: off
_ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh",
        "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
        "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real",
        "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
        "sub", "tan", "tanh", "xor",
    )
)
# fmt: on
REDUCTIONS: Mapping[str, str] = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""Reductions, and the operation that combines two of their results."""


@dataclass(frozen=True, slots=True)
class Relation:
    """How an equation treats rows; those of `aligned` operands are those of the result."""

    kind: Kind
    aligned: tuple[int, ...] = ()


_WHOLE = Relation("whole")


def relation_of(equation: Equation, avals: Mapping[Var, Any]) -> Relation:
    """Says how an equation treats the rows of its operands and of its result."""
    if equation.eqn.effects or len(equation.outputs) != 1:
        return _WHOLE
    shapes = [shape_of(operand, avals) for operand in equation.inputs]
    out = avals[equation.outputs[0]].shape
    if equation.primitive in _ELEMENTWISE or equation.eqn.primitive is constraint_p:
        return _elementwise(shapes, out)
    if equation.primitive == "pad" and not is_zero(equation.inputs[1]):
        return _WHOLE
    rule = _RULES.get(equation.primitive)
    return _WHOLE if rule is None or not shapes else rule(equation.eqn.params, shapes, out)


def shape_of(operand: Operand, avals: Mapping[Var, Any]) -> tuple[int, ...]:
    """The shape of an operand."""
    return (operand.aval if isinstance(operand, Lit) else avals[operand]).shape


Shapes: TypeAlias = Sequence[tuple[int, ...]]


def _elementwise(shapes: Shapes, out: tuple[int, ...]) -> Relation:
    if not out or any(not _fits(shape, out) for shape in shapes if shape):
        return _WHOLE
    return Relation("rows", tuple(i for i, s in enumerate(shapes) if s and s[0] == out[0]))


def _fits(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Whether an operand has the shape of the result, but for dims of size 1."""
    same = len(shape) == len(out)
    return same and all(size in (1, whole) for size, whole in zip(shape, out, strict=True))


def _broadcast(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    dims = params["broadcast_dimensions"]
    if not out or len(shapes) > 1:
        return _WHOLE
    if 0 not in dims or shapes[0][dims.index(0)] != out[0]:
        return Relation("fill")
    return Relation("rows", (0,)) if dims[0] == 0 else _WHOLE


def _reduce(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    if len(shapes) != 1:
        return _WHOLE
    return Relation("reduction" if 0 in params["axes"] else "rows", (0,))


def _transpose(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    return Relation("rows", (0,)) if out and params["permutation"][0] == 0 else _WHOLE


def _reshape(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    keeps = bool(out) and bool(shapes[0]) and out[0] == shapes[0][0] and len(shapes) == 1
    return Relation("rows", (0,)) if keeps and params.get("dimensions") is None else _WHOLE


def _squeeze(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    return _WHOLE if not out or 0 in params["dimensions"] else Relation("rows", (0,))


def _dot(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    _, (left, right) = params["dimension_numbers"]
    is_batch = bool(left) and left[0] == 0 and right[0] == 0
    return Relation("rows", (0, 1)) if is_batch else _WHOLE


def _concatenate(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    if params["dimension"] == 0:
        return Relation("join")
    return Relation("rows", tuple(range(len(shapes))))


def _pad(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    first, *rest = params["padding_config"]
    if not any(first):
        return Relation("rows", (0,))
    appends = first[0] >= 0 and first[1] >= 0 and first[2] == 0
    return Relation("join") if appends and not any(map(any, rest)) else _WHOLE


def _slice(params: Mapping[str, Any], shapes: Shapes, out: tuple[int, ...]) -> Relation:
    strides = params["strides"]
    if strides is not None and strides[0] != 1:
        return _WHOLE
    return Relation("rows", (0,)) if out[0] == shapes[0][0] else Relation("read")


_RULES: Mapping[str, Any] = {
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(REDUCTIONS, _reduce),
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "concatenate": _concatenate,
    "pad": _pad,
    "slice": _slice,
}


def rows_of_join(equation: Equation, avals: Mapping[Var, Any]) -> list[tuple[int, int]]:
    """The rows `[start, stop)` that each array of a join gives."""
    shapes = [shape_of(operand, avals) for operand in equation.inputs]
    if equation.primitive == "pad":
        low = int(equation.eqn.params["padding_config"][0][0])
        return [(low, low + shapes[0][0])]
    found: list[tuple[int, int]] = []
    start = 0
    for shape in shapes:
        found.append((start, start + shape[0]))
        start += shape[0]
    return found


def rows_of_read(equation: Equation) -> range:
    """The rows that a read takes."""
    params = equation.eqn.params
    return range(params["start_indices"][0], params["limit_indices"][0])


def is_zero(operand: Operand) -> bool:
    """Whether an operand is the literal 0."""
    return isinstance(operand, Lit) and operand.value == 0


def with_rows(eqn: Any, num_rows: int, inputs: Sequence[Any], output: Any) -> Any:
    """Returns an equation of kind rows, reduction or fill for another number of rows.

    Args:
        eqn: The JAX equation on all rows.
        num_rows: The number of rows.
        inputs: The types of its operands.
        output: The type of its result.
    """
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "broadcast_in_dim":
        params["shape"] = output.shape
    elif name == "reshape":
        params["new_sizes"] = output.shape
    elif name == "slice":
        params["start_indices"] = (0, *params["start_indices"][1:])
        params["limit_indices"] = (num_rows, *params["limit_indices"][1:])
    invars = [jaxprs.new_var(aval) for aval in inputs]
    return jaxprs.replace_eqn(eqn, params=params, invars=invars, outvars=[jaxprs.new_var(output)])
