"""Lets a branch read what the same branch of an earlier conditional made (R12).

    if p: r = sin x                if p: r = sin x
    s = choose p r 0        ->
    if p: d = s * g                if p: d = r * g

Autodiff gives a conditional in the backward pass that reads results of the one in the forward pass,
and it lets unlike branches share a result where the types agree. Read so, each branch has its own
residuals again: they stay on their submesh, and what nobody reads any more is never chosen.
"""

from collections.abc import Mapping
from dataclasses import replace

from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Guard,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    all_equations,
)


def read_own_options(program: FlatProgram) -> FlatProgram:
    """Returns `program` with choices seen through where the branch is known."""
    choices = {
        equation.outputs[0]: equation
        for equation in all_equations(program.steps)
        if equation.chooses is not None
    }
    return replace(program, steps=_steps(program.steps, choices)) if choices else program


def _steps(steps: tuple[Step, ...], choices: Mapping[Var, Equation]) -> tuple[Step, ...]:
    return tuple(
        _loop(step, choices)
        if isinstance(step, Loop)
        else replace(step, inputs=_seen(step.inputs, step.guards, choices))
        for step in steps
    )


def _loop(loop: Loop, choices: Mapping[Var, Equation]) -> Loop:
    inits = _seen(tuple(carry.init for carry in loop.carries), loop.guards, choices)
    carries = tuple(
        replace(carry, init=init) for carry, init in zip(loop.carries, inits, strict=True)
    )
    return replace(loop, carries=carries, body=_steps(loop.body, choices))


def _seen(
    operands: tuple[Operand, ...], guards: tuple[Guard, ...], choices: Mapping[Var, Equation]
) -> tuple[Operand, ...]:
    taken = {guard.index: guard.branch for guard in guards if not isinstance(guard.index, Lit)}
    if not taken:
        return operands

    def look(operand: Operand) -> Operand:
        while not isinstance(operand, Lit) and operand in choices:
            index, *options = choices[operand].inputs
            if isinstance(index, Lit) or index not in taken:
                break
            operand = options[taken[index]]
        return operand

    return tuple(map(look, operands))
