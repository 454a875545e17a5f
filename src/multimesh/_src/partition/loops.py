"""Takes out of loops what need not be in them.

    loop i < 4, n = 0, k = key:                ns, ks = scan(...)          # small and unplaced
      b = split k ; y = task0(x, b[0])    ->   w' = cast w                 # no larger than `w`
      w' = cast w ; z = task1(w', y)           loop i < 4:
      n', k' = n + 1, b[1]                       y = task0(x, split(slice ks i)[0]) ; ...

Counters and key chains are carried through every iteration although each stage needs only their
i-th value: left in the loop, the first stage's forward would need a value of a later stage. They
become a small scan before the loop, cloned to every submesh that uses it. Equations that depend on
loop constants alone move before the loop when their results are no larger than their operands;
larger ones stay, and are cloned into each task that uses them instead of being saved. So is a
sharding constraint on such a value, unless something that moves reads it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from jax import lax

from multimesh._src.ir import body as bodies
from multimesh._src.ir.constraint import is_layout
from multimesh._src.ir.flat import (
    Carry,
    Equation,
    FlatProgram,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    producers,
    step_inputs,
    substitute,
)
from multimesh._src.jax_compat.effects import calls_host
from multimesh._src.partition.inline import Builder, last_serial, read_slot
from multimesh._src.partition.seeds import Seeds


def simplify_loops(program: FlatProgram, seeds: Seeds, *, hoist: bool = True) -> FlatProgram:
    """Returns `program` with fixed carries, counters and loop-invariant equations taken out.

    Args:
        program: The flat program.
        seeds: Matched equations are never part of a counter chain.
        hoist: Whether loop-invariant equations may move out.
    """
    builder = Builder(
        seeds,
        avals=dict(program.avals),
        constants=dict(program.constants),
        num_steps=last_serial(program.steps) + 1,
    )
    renamed: dict[Var, Operand] = {}
    _simplify_steps(program.steps, builder, renamed, hoist)
    results = tuple(v if isinstance(v, Lit) else renamed.get(v, v) for v in program.results)
    return replace(
        program,
        avals=builder.avals,
        constants=builder.constants,
        steps=tuple(builder.steps),
        results=results,
    )


def _simplify_steps(
    steps: tuple[Step, ...], builder: Builder, renamed: dict[Var, Operand], hoist: bool
) -> None:
    for old in steps:
        (step,) = substitute((old,), renamed)  # at once: what replaces a value may be replaced next
        if not isinstance(step, Loop):
            builder.steps.append(step)
            continue
        loop = _drop_fixed_carries(step, renamed)
        outer, builder.steps = builder.steps, []
        _simplify_steps(loop.body, builder, renamed, hoist)
        (loop,) = substitute((replace(loop, body=tuple(builder.steps)),), renamed)
        assert isinstance(loop, Loop)
        builder.steps = outer
        if loop.condition is None:
            loop = _extract_counters(loop, builder, renamed)
        if hoist:
            loop = _hoist_invariants(loop, builder)
        builder.steps.append(loop)


def _drop_fixed_carries(loop: Loop, renamed: dict[Var, Operand]) -> Loop:
    fixed = [carry for carry in loop.carries if carry.next == carry.inside]
    inside = {carry.inside: carry.init for carry in fixed}
    renamed |= {carry.result: carry.init for carry in fixed}
    carries = tuple(carry for carry in loop.carries if carry not in fixed)
    loop = replace(loop, carries=carries)
    (substituted,) = substitute((loop,), inside)
    assert isinstance(substituted, Loop)
    return substituted


# --- counters ------------------------------------------------------------------------------------


def _extract_counters(loop: Loop, builder: Builder, renamed: dict[Var, Operand]) -> Loop:
    chain = _counter_chain(loop, builder)
    if not chain:
        return loop
    carries, equations, outside = chain
    inputs = [carry.init for carry in carries]
    builder.guards = loop.guards
    stacks = _emit_counter_scan(loop, carries, equations, outside, inputs, builder)
    finals, stacked = stacks[: len(carries)], stacks[len(carries) :]
    renamed |= {carry.result: final for carry, final in zip(carries, finals, strict=True)}

    outer, builder.steps = builder.steps, []
    slices = {
        carry.inside: builder.emit(read_slot, [stack, loop.index], loop.scope)[0]
        for carry, stack in zip(carries, stacked, strict=True)
    }
    reads, builder.steps, builder.guards = tuple(builder.steps), outer, ()
    rest = tuple(carry for carry in loop.carries if carry not in carries)
    (sliced,) = substitute((replace(loop, carries=rest),), slices)
    assert isinstance(sliced, Loop)
    return replace(sliced, body=(*reads, *sliced.body))


def _counter_chain(
    loop: Loop, builder: Builder
) -> tuple[tuple[Carry, ...], tuple[Equation, ...], tuple[Var, ...]] | None:
    """Carries computed from small unplaced values alone, their equations and outside operands."""
    made_by = producers(loop.body)
    candidates = {
        carry.inside: carry for carry in loop.carries if _is_small(builder.aval(carry.inside))
    }
    slices: dict[Var, list[Equation] | None] = {}
    while candidates:
        slices = {
            inside: _chain_of(carry.next, loop, made_by, set(candidates), builder)
            for inside, carry in candidates.items()
        }
        bad = [inside for inside, found in slices.items() if found is None]
        if not bad:
            break
        for inside in bad:
            del candidates[inside]
    if not candidates:
        return None
    serials = {eq.serial for found in slices.values() if found for eq in found}
    equations = tuple(s for s in loop.body if isinstance(s, Equation) and s.serial in serials)
    made = {loop.index, *candidates, *(var for eq in equations for var in eq.outputs)}
    reads = [v for eq in equations for v in eq.inputs if not isinstance(v, Lit) and v not in made]
    reads += [
        c.next for c in candidates.values() if not isinstance(c.next, Lit) and c.next not in made
    ]
    return tuple(candidates.values()), equations, tuple(dict.fromkeys(reads))


def _is_small(aval: Any) -> bool:
    return aval.size <= 16


def _chain_of(
    operand: Operand,
    loop: Loop,
    made_by: Mapping[Var, Step],
    candidates: set[Var],
    builder: Builder,
) -> list[Equation] | None:
    """The equations behind `operand`, or None when they are no counter chain."""
    carried = {carry.inside for carry in loop.carries}
    found: dict[int, Equation] = {}
    todo = [operand]
    while todo:
        var = todo.pop()
        if isinstance(var, Lit) or var == loop.index or var in candidates:
            continue
        if var in carried or not _is_small(builder.aval(var)):
            return None
        step = made_by.get(var)
        if step is None or step.serial in found:
            continue  # a small value from outside the loop
        if isinstance(step, Loop) or calls_host(step.eqn) or builder.seeds.of_equation(step):
            return None
        if step.guards != loop.guards or step.chooses:
            return None
        found[step.serial] = step
        todo += step.inputs
    return list(found.values())


def _emit_counter_scan(
    loop: Loop,
    carries: tuple[Carry, ...],
    equations: tuple[Equation, ...],
    outside: tuple[Var, ...],
    inits: list[Operand],
    builder: Builder,
) -> list[Operand]:
    # (inits, outside) -> (final carries, stacked carries before each iteration)
    inputs = [*(carry.inside for carry in carries), loop.index, *outside]
    closed = bodies.make_body(equations, inputs, [carry.next for carry in carries], builder.avals)
    step = bodies.as_function(closed)
    size = len(carries)

    def function(*args: Any) -> list[Any]:
        initial, constants = args[:size], args[size:]

        def body(carry: tuple[Any, ...], index: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            return tuple(step(*carry, index, *constants)), carry

        indices = lax.iota("int32", loop.length)
        final, stacked = lax.scan(body, tuple(initial), indices)
        return [*final, *stacked]

    return builder.emit(function, [*inits, *outside], loop.scope)


# --- invariants ----------------------------------------------------------------------------------


def _hoist_invariants(loop: Loop, builder: Builder) -> Loop:
    varying = {loop.index, *(carry.inside for carry in loop.carries)}
    kept: dict[int, Step] = {}
    layouts: dict[Var, Equation] = {}  # constraints on invariants: alone they are not worth a copy
    for step in loop.body:
        if _is_layout(step) and varying.isdisjoint(step.inputs):
            layouts.update(dict.fromkeys(step.outputs, step))
            kept[step.serial] = step
        elif _is_hoistable(step, varying, builder):
            _hoist(step, layouts, kept, builder)
        else:
            kept[step.serial] = step
            varying.update(step.outputs)
    return replace(loop, body=tuple(kept.values()))


def _hoist(
    step: Step, layouts: dict[Var, Equation], kept: dict[int, Step], builder: Builder
) -> None:
    """Moves a step before the loop, and first the constraints that it reads."""
    for var in step_inputs(step):
        if not isinstance(var, Lit) and var in layouts:
            constraint = layouts.pop(var)
            del kept[constraint.serial]
            _hoist(constraint, layouts, kept, builder)
    builder.steps.append(step)


def _is_layout(step: Step) -> TypeGuard[Equation]:
    """Whether a step says how a value is laid out, and nothing of where."""
    return (
        isinstance(step, Equation) and is_layout(step.eqn) and not isinstance(step.inputs[0], Lit)
    )


def _is_hoistable(step: Step, varying: set[Var], builder: Builder) -> bool:
    if isinstance(step, Loop) or calls_host(step.eqn):
        return False
    reads = [v for v in step_inputs(step) if not isinstance(v, Lit)]
    if not reads or any(var in varying for var in reads):
        return False
    return num_bytes(step.outputs, builder.avals) <= num_bytes(dict.fromkeys(reads), builder.avals)


def num_bytes(variables: Any, avals: Mapping[Var, Any]) -> int:
    """Bytes of some variables together."""
    return sum(avals[var].size * avals[var].dtype.itemsize for var in variables)
