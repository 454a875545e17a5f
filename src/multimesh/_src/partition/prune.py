"""Drops what nothing reads.

    a = sin x ; b = cos x ; return a      ->      a = sin x ; return a

Equations with effects stay. A loop loses the carries that neither its result nor its body reads:
so the residual stacks that autodiff saves for nobody are never built. Of a scan or a conditional
that is one equation, `trim` takes off what is in it for nobody, and with it what it is given in
vain.
"""

from collections.abc import Iterable
from dataclasses import replace

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Operand, Step, Var, step_inputs
from multimesh._src.jax_compat import jaxprs


def prune(program: FlatProgram) -> FlatProgram:
    """Returns `program` without equations and carries that are never read."""
    steps, _ = _prune_steps(program.steps, program.results)
    return replace(program, steps=steps)


def trim(program: FlatProgram) -> FlatProgram:
    """Returns `program` with control flow that makes and reads only what is needed."""
    live = {operand for operand in program.results if not isinstance(operand, Lit)}
    return replace(program, steps=_trim_steps(program.steps, live))


def _trim_steps(steps: tuple[Step, ...], live: set[Var]) -> tuple[Step, ...]:
    trimmed: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Loop):
            ends = {c.next for c in step.carries if not isinstance(c.next, Lit)}
            trimmed.append(replace(step, body=_trim_steps(step.body, ends)))
        else:
            trimmed.append(_trimmed(step, live) if jaxprs.sub_jaxprs(step.eqn.params) else step)
        live.update(v for v in step_inputs(trimmed[-1]) if not isinstance(v, Lit))
    return tuple(reversed(trimmed))


def _trimmed(equation: Equation, live: set[Var]) -> Equation:
    wanted = [k for k, var in enumerate(equation.outputs) if var in live]
    if has_effect(equation) or not wanted:
        return equation
    part = jaxprs.part_for(equation.eqn, wanted)
    if part is None or len(part.operands) == len(equation.inputs) or -1 in part.outputs:
        return equation
    return replace(
        equation,
        eqn=part.eqn,
        inputs=tuple(equation.inputs[position] for position in part.operands),
        outputs=tuple(equation.outputs[position] for position in part.outputs),
    )


def _prune_steps(
    steps: tuple[Step, ...], results: Iterable[Operand]
) -> tuple[tuple[Step, ...], set[Var]]:
    live = {operand for operand in results if not isinstance(operand, Lit)}
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Loop):
            pruned = _prune_loop(step, live)
        else:
            pruned = step if _is_needed(step, live) else None
        if pruned is not None:
            kept.append(pruned)
            live.update(v for v in step_inputs(pruned) if not isinstance(v, Lit))
    return tuple(reversed(kept)), live


def _is_needed(equation: Equation, live: set[Var]) -> bool:
    return bool(equation.eqn.effects) or any(var in live for var in equation.outputs)


def _prune_loop(loop: Loop, live: set[Var]) -> Loop | None:
    wanted = {carry.inside for carry in loop.carries if carry.result in live}
    if loop.condition is not None:
        if not wanted and not has_effect(loop):
            return None
        wanted.add(loop.condition)
    while True:
        carries = tuple(carry for carry in loop.carries if carry.inside in wanted)
        body, read = _prune_steps(loop.body, [carry.next for carry in carries])
        more = {carry.inside for carry in loop.carries if carry.inside in read} - wanted
        if not more:
            break
        wanted |= more
    if not carries and not any(has_effect(step) for step in body):
        return None
    return replace(loop, carries=carries, body=body)


def has_effect(step: Step) -> bool:
    """Whether a step has a side effect."""
    if isinstance(step, Loop):
        return any(has_effect(inner) for inner in step.body)
    return bool(step.eqn.effects)
