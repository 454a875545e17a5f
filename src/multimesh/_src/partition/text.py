"""Prints the program after each pass, in lines that do not depend on the version of JAX."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from multimesh._src.ir.flat import FlatProgram, Lit, Loop, Operand, Step
from multimesh._src.ir.plan import Copy, HostLoop, Plan
from multimesh._src.ir.program import EVERYWHERE, LoopNode, Program, ProgramStep


def print_flat(program: FlatProgram, place: Mapping[int, int] | None = None) -> str:
    """The equations, one a line; with `place`, the submesh of each behind `@`."""
    arguments = ", ".join(_typed(var, program.avals) for var in program.arguments)
    constants = ", ".join(_typed(var, program.avals) for var in program.constants)
    results = ", ".join(map(_operand, program.results))
    head = [f"{program.name}({arguments}) constants ({constants})"]
    return "\n".join(
        [*head, *_flat_lines(program.steps, program.avals, place, "  "), f"return {results}"]
    )


def _flat_lines(
    steps: tuple[Step, ...],
    avals: Mapping[int, Any],
    place: Mapping[int, int] | None,
    indent: str,
) -> Iterator[str]:
    for step in steps:
        if isinstance(step, Loop):
            carries = ", ".join(f"%{c.inside} = {_operand(c.init)}" for c in step.carries)
            yield f"{indent}loop {_until(step.index, step.length, step.condition)}: {carries}"
            yield from _flat_lines(step.body, avals, place, indent + "  ")
            nexts = ", ".join(f"%{c.result} <- {_operand(c.next)}" for c in step.carries)
            yield f"{indent}end {nexts}"
            continue
        outputs = ", ".join(_typed(var, avals) for var in step.outputs)
        inputs = " ".join(map(_operand, step.inputs))
        transposed = "^T" * step.scope.transposes
        scope = f"  [{step.scope}{transposed}]" if step.scope.path or transposed else ""
        where = (
            "" if place is None else f" @{place[step.serial]}" if step.serial in place else " @-"
        )
        guards = "".join(f" if {_operand(g.index)} == {g.branch}" for g in step.guards)
        yield f"{indent}{outputs} = {step.primitive} {inputs}{where}{scope}{guards}"


def print_program(program: Program) -> str:
    """Submeshes, then tasks and loops in order."""
    lines = [f"program {program.name}"]
    for submesh in program.submeshes:
        shape = ", ".join(f"{axis}={size}" for axis, size in submesh.mesh.shape.items())
        lines.append(f"  submesh {submesh.index}: {submesh.label} ({shape})")
    for var in program.arguments:
        home = program.home.get(var)
        lines.append(f"  argument {_placed(var, program, EVERYWHERE if home is None else home)}")
    lines += _program_lines(program.steps, program, "  ")
    lines.append(f"  return {', '.join(map(_operand, program.results))}")
    return "\n".join(lines)


def _program_lines(steps: tuple[ProgramStep, ...], program: Program, indent: str) -> Iterator[str]:
    for step in steps:
        if isinstance(step, LoopNode):
            kind = " microbatches" if step.microbatch else "" if step.condition else " iterations"
            carries = ", ".join(f"%{c.inside} = {_operand(c.init)}" for c in step.carries)
            head = _until(step.loop_index, step.length, step.condition)
            yield f"{indent}loop {head}{kind}: {carries}"
            yield from _program_lines(step.tasks, program, indent + "  ")
            nexts = ", ".join(f"%{c.result} <- {_operand(c.next)}" for c in step.carries)
            yield f"{indent}end {nexts}"
            continue
        inputs = ", ".join(_placed(var, program, step.submesh) for var in step.inputs)
        outputs = ", ".join(_placed(var, program, step.submesh) for var in step.outputs)
        stage = f" stage {step.stage}" if step.stage >= 0 else ""
        label = program.submeshes[step.submesh].label
        yield f"{indent}task {step.name} {step.kind}{stage} @ {label}"
        yield f"{indent}  ({inputs}) -> ({outputs})"


def _placed(var: int, program: Program, submesh: int) -> str:
    spec = program.specs.get((var, submesh))
    layout = "" if spec is None or not any(spec) else f" {_spec(spec)}"
    if var in program.memory and var not in program.arguments:  # tasks take arguments elsewhere
        layout += f" in {program.memory[var]}"
    return _typed(var, program.avals) + layout


def _spec(spec: Any) -> str:
    return "P(" + ", ".join("None" if e is None else repr(e) for e in spec) + ")"


def print_plan(plan: Plan) -> str:
    """The slots' layouts, and the steps."""
    lines = []
    for source in plan.inputs:
        stored = f" as {source.microbatches} microbatches" if source.microbatches else ""
        lines.append(f"input {source.name} -> {_slots(source.slots)}{stored}")
    for constant in plan.constants:
        lines.append(f"constant {plan.slots[constant.slot].label} -> {_slots((constant.slot,))}")
    for step in plan.steps:
        if isinstance(step, Copy):
            lines.append(f"copy {step.edge}: {_slots(step.sources)} => {_slots(step.targets)}")
        elif isinstance(step, HostLoop):
            lines.append(f"{step.name}: {_slots(step.inputs)} -> {_slots(step.outputs)}")
            lines += [f"  {line}" for line in print_plan(step.plan).splitlines()]
        else:
            name = step.task if step.iteration < 0 else f"{step.task}[{step.iteration}]"
            lines.append(f"run {name}: {_slots(step.inputs)} -> {_slots(step.outputs)}")
    lines.append(f"return {_slots(plan.outputs)}")
    return "\n".join(lines)


def _until(index: int, length: int, condition: int | None) -> str:
    return f"%{index} < {length}" if condition is None else f"while %{condition}"


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join(f"s{slot}" for slot in slots)


def _typed(var: int, avals: Mapping[int, Any]) -> str:
    aval = avals[var]
    dims = ",".join(map(str, aval.shape))
    return f"%{var}:{aval.dtype}[{dims}]"


def _operand(operand: Operand) -> str:
    if isinstance(operand, Lit):
        return f"{np.asarray(operand.value).item()!r}"
    return f"%{operand}"
