"""Drops what nothing reads.

    a = sin x ; b = cos x ; return a      ->      a = sin x ; return a

Equations with effects stay. A loop loses the carries that neither its result nor its body reads:
so the residual stacks that autodiff saves for nobody are never built.
"""

from collections.abc import Iterable
from dataclasses import replace

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Operand, Step, Var, step_inputs


def prune(program: FlatProgram) -> FlatProgram:
    """Returns `program` without equations and carries that are never read."""
    steps, _ = _prune_steps(program.steps, program.results)
    return replace(program, steps=steps)


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
