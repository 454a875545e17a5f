"""Gives every variable that crosses a task boundary its layout, by Shardy's own propagation.

    task0(x) -> y   constrains y to P("data")     ->    x: P("data")   y: P("data")   z: P("data")
    task1(y) -> z                                       on every submesh of the same axes

Submeshes of equal axes form a class. All tasks of a class are lowered once, in order and with loop
bodies once, as one function on one submesh of the class; so a layout spreads over task boundaries
as it would in the un-cut program. Layouts of values that come from another class are taken over by
axis name, the producer deciding, until nothing changes (at most three rounds).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from multimesh._src.ir.constraint import with_mesh
from multimesh._src.ir.flat import Lit, Operand, Var
from multimesh._src.ir.program import LoopNode, ProgramStep, TaskNode, all_tasks
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat.shardy import propagate_shardings

Shape: TypeAlias = tuple[tuple[str, int], ...]
Layouts: TypeAlias = dict[tuple[Var, Shape], PartitionSpec]

_MAX_ROUNDS = 3


def shape_of(submesh: Submesh) -> Shape:
    """Axis names and sizes: submeshes of one shape share layouts."""
    return tuple(submesh.mesh.shape.items())


def propagate_layouts(
    steps: tuple[ProgramStep, ...],
    submeshes: Sequence[Submesh],
    avals: Mapping[Var, Any],
    fixed: Mapping[tuple[Var, Shape], PartitionSpec],
) -> Layouts:
    """Returns the spec of every input and output of every task, on the shape of its submesh.

    Args:
        steps: The program's tasks and loops.
        submeshes: All submeshes.
        avals: Types of the variables.
        fixed: Layouts that the caller gives: of arguments and results.
    """
    tasks = tuple(all_tasks(steps))
    shapes = {shape_of(submeshes[task.submesh]): task.submesh for task in reversed(tasks)}
    layouts: Layouts = dict(fixed)
    made_in = {var: shape_of(submeshes[task.submesh]) for task in tasks for var in task.outputs}
    for _ in range(_MAX_ROUNDS):
        before = dict(layouts)
        for shape in reversed(shapes):
            mesh = submeshes[shapes[shape]].auto_mesh
            given = dict(fixed) | _from_other_shapes(layouts, made_in, shape, avals)
            layouts |= _propagate_class(steps, submeshes, avals, shape, mesh, given)
        if len(shapes) == 1 or layouts == before:
            break
    return layouts


def _from_other_shapes(
    layouts: Layouts, made_in: Mapping[Var, Shape], shape: Shape, avals: Mapping[Var, Any]
) -> Layouts:
    return {
        (var, shape): fit_spec(spec, avals[var].shape, dict(shape))
        for (var, other), spec in layouts.items()
        if other != shape and made_in.get(var) == other
    }


def fit_spec(
    spec: PartitionSpec, dims: Sequence[int], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """Returns `spec` without the axes that a submesh lacks, or that do not divide their dim."""
    entries: list[Any] = []
    for entry, size in zip((*spec, *(None,) * (len(dims) - len(spec))), dims, strict=True):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        kept: list[str] = []
        shards = 1
        for axis in axes:
            if axis_sizes.get(axis, 1) > 1 and size % (shards * axis_sizes[axis]) == 0:
                shards *= axis_sizes[axis]
                kept.append(axis)
        entries.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


@dataclass(slots=True)
class _Chain:
    """The tasks of one class in order, and which variable stands for which."""

    tasks: list[TaskNode] = field(default_factory=list)
    alias: dict[Var, Operand] = field(default_factory=dict)

    def look(self, operand: Operand) -> Operand:
        while not isinstance(operand, Lit) and operand in self.alias:
            operand = self.alias[operand]
        return operand

    def add(
        self, steps: tuple[ProgramStep, ...], submeshes: Sequence[Submesh], shape: Shape
    ) -> None:
        for step in steps:
            if isinstance(step, LoopNode):
                self.alias |= {carry.inside: carry.init for carry in step.carries}
                self.add(step.tasks, submeshes, shape)
                self.alias |= {carry.result: carry.next for carry in step.carries}
            elif shape_of(submeshes[step.submesh]) == shape:
                self.tasks.append(step)


def _propagate_class(
    steps: tuple[ProgramStep, ...],
    submeshes: Sequence[Submesh],
    avals: Mapping[Var, Any],
    shape: Shape,
    mesh: Mesh,
    given: Mapping[tuple[Var, Shape], PartitionSpec],
) -> Layouts:
    chain = _Chain()
    chain.add(steps, submeshes, shape)
    made = {var for task in chain.tasks for var in task.outputs}
    reads = [chain.look(var) for task in chain.tasks for var in task.inputs]
    inputs = list(dict.fromkeys(v for v in reads if not isinstance(v, Lit) and v not in made))
    outputs = [var for task in chain.tasks for var in task.outputs]
    # Equal bodies are traced once. They are inlined: Shardy is ten times slower over calls.
    functions = {
        id(task.body): jax.jit(with_mesh(task.body, mesh, keep_memory=False), inline=True)
        for task in chain.tasks
    }

    def function(*args: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(inputs, args, strict=True))

        def read(var: Var) -> Any:
            operand = chain.look(var)
            if isinstance(operand, Lit):
                return np.asarray(operand.value, operand.aval.dtype)
            return env[operand]

        for task in chain.tasks:
            results = functions[id(task.body)](*map(read, task.inputs))
            env.update(zip(task.outputs, results, strict=True))
        return [env[var] for var in outputs]

    in_specs, out_specs = propagate_shardings(
        function,
        [avals[var] for var in inputs],
        mesh,
        [given.get((var, shape)) for var in inputs],
        [given.get((var, shape)) for var in outputs],
    )
    layouts: Layouts = {(v, shape): s for v, s in zip(inputs, in_specs, strict=True)}
    layouts |= {(v, shape): s for v, s in zip(outputs, out_specs, strict=True)}
    for task in chain.tasks:  # aliases take the layout of what they stand for
        for var in task.inputs:
            operand = chain.look(var)
            if not isinstance(operand, Lit) and (operand, shape) in layouts:
                layouts.setdefault((var, shape), layouts[operand, shape])
    return layouts
