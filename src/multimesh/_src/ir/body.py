"""Bodies: the jaxprs of tasks, built from equations of the flat program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from multimesh._src.ir.flat import Equation, Lit, Operand, Var
from multimesh._src.jax_compat import jaxprs


def make_body(
    equations: Sequence[Equation],
    inputs: Sequence[Var],
    outputs: Sequence[Operand],
    avals: Mapping[Var, Any],
) -> ClosedJaxpr:
    """Builds the jaxpr of `equations` (in dataflow order) from `inputs` to `outputs`.

    Scopes do not enter the jaxpr twice: each equation keeps the name stack of its own trace.
    """
    names: dict[Var, Any] = {var: jaxprs.new_var(avals[var]) for var in inputs}

    def atom(operand: Operand) -> Any:
        if isinstance(operand, Lit):
            return jaxprs.literal(operand.value, operand.aval)
        return names[operand]

    eqns: list[Any] = []
    for equation in equations:
        invars = [atom(operand) for operand in equation.inputs]
        for var in equation.outputs:
            names[var] = jaxprs.new_var(avals[var])
        outvars = [names[var] for var in equation.outputs]
        eqns.append(jaxprs.replace_eqn(equation.eqn, invars=invars, outvars=outvars))
    return jaxprs.new_closed_jaxpr(
        [names[var] for var in inputs], [atom(operand) for operand in outputs], eqns
    )


def as_function(body: ClosedJaxpr) -> Callable[..., list[Any]]:
    """The body as a function of its flat arguments, for tracing it again."""
    return lambda *args: jaxprs.evaluate(body, *args)
