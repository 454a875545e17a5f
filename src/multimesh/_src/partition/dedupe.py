"""Finds equal bodies, so that equal layers are one executable.

    layer0_fwd { y = dot x w ; z = tanh y }       one body for both, however
    layer1_fwd { b = dot a v ; c = tanh b }       their variables are called

Two bodies are equal when their equations are: same primitives, same params, same wiring, same
types. Source lines and scopes do not count.
"""

import dataclasses
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from multimesh._src.ir.program import LoopNode, ProgramStep
from multimesh._src.jax_compat import jaxprs


def deduplicate(steps: tuple[ProgramStep, ...]) -> tuple[ProgramStep, ...]:
    """Returns the steps with equal bodies made one object."""
    first: dict[Hashable, ClosedJaxpr] = {}

    def rewrite(step: ProgramStep) -> ProgramStep:
        if isinstance(step, LoopNode):
            return replace(step, tasks=tuple(map(rewrite, step.tasks)))
        return replace(step, body=first.setdefault(signature(step.body), step.body))

    return tuple(map(rewrite, steps))


def signature(jaxpr: Any) -> Hashable:
    """A hashable value that equal jaxprs share."""
    opened = jaxprs.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def name(var: Any) -> int:
        return numbers.setdefault(var, len(numbers))

    def atom(operand: Any) -> Hashable:
        if jaxprs.is_literal(operand):
            return ("literal", hashable(operand.val), _type(operand.aval))
        return name(operand)

    inputs = tuple((name(var), _type(var.aval)) for var in (*opened.constvars, *opened.invars))
    equations = tuple(
        (
            eqn.primitive,
            tuple((key, hashable(value)) for key, value in sorted(eqn.params.items())),
            tuple(atom(operand) for operand in eqn.invars),
            tuple((name(var), _type(var.aval)) for var in eqn.outvars),
        )
        for eqn in opened.eqns
    )
    consts = tuple(id(const) for const in jaxprs.consts_of(jaxpr))
    return inputs, equations, tuple(atom(var) for var in opened.outvars), consts


def _type(aval: Any) -> Hashable:
    if not hasattr(aval, "shape"):
        return aval
    return (aval.shape, aval.dtype, aval.weak_type, getattr(aval, "memory_space", None))


def _counts_by_fields(value: Any) -> bool:
    """Whether objects of a dataclass are equal when their fields are, as the grids of Pallas."""
    return not isinstance(value, type) and value.__dataclass_params__.eq


def hashable(value: Any) -> Hashable:
    """A value that equal params share; objects without a hash count by identity."""
    if jaxprs.is_jaxpr(value):
        return signature(value)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(hashable, value)))
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", value.hex())
    if dataclasses.is_dataclass(value) and _counts_by_fields(value):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)
        return (type(value), tuple(map(hashable, parts)))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value), value)
