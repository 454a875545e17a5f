"""Layouts that must agree: of a carried value over iterations, of a result and what it succeeds.

    loop acc = zeros: acc' = acc + g      layout of zeros and acc := layout of acc'
    state' = step(state)                  layout of state' := layout of state

Without this an accumulator could not be updated in place, and a state would be laid out anew in
every step.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.flat import FlatProgram, Lit, Var
from multimesh._src.ir.program import LoopNode, ProgramStep, all_tasks
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.layouts import Layouts, fit_spec, shape_of
from multimesh._src.partition.stacks.stacks import Stacks


def tie_layouts(
    layouts: Layouts,
    steps: tuple[ProgramStep, ...],
    flat: FlatProgram,
    traced: TracedFunction,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
) -> dict[tuple[Var, int], PartitionSpec]:
    """Returns the spec of every variable on every submesh, with carries and results tied."""
    tied = dict(layouts)
    _tie_carries(steps, tied, {shape_of(submesh) for submesh in submeshes})
    _tie_results(steps, flat, traced, tied, submeshes, homes)
    return {
        (var, submesh.index): spec
        for submesh in submeshes
        for (var, shape), spec in tied.items()
        if shape == shape_of(submesh)
    }


def tie_blocks(
    layouts: Layouts,
    flat: FlatProgram,
    stacks: Stacks,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
) -> None:
    """The blocks of one array have one layout: that of the first block that is sharded at all."""
    for operands, blocks in ((flat.arguments, stacks.arguments), (flat.results, stacks.results)):
        keys: dict[int, list[tuple[Var, Any]]] = {}
        for operand, block in zip(operands, blocks, strict=True):
            home = -1 if isinstance(operand, Lit) else homes.get(operand, -1)
            if block is not None and not isinstance(operand, Lit) and home >= 0:
                keys.setdefault(block.index, []).append((operand, shape_of(submeshes[home])))
        for alike in keys.values():
            known = [layouts[key] for key in alike if key in layouts]
            spec = next((spec for spec in known if any(spec)), PartitionSpec())
            layouts.update(dict.fromkeys(alike, spec))


def _tie_carries(steps: tuple[ProgramStep, ...], layouts: Layouts, shapes: set[Any]) -> None:
    """A carry keeps the layout of its next value, and so does the value it starts from."""
    made = {var for task in all_tasks(steps) for var in task.outputs}
    for step in steps:
        if not isinstance(step, LoopNode):
            continue
        _tie_carries(step.tasks, layouts, shapes)
        for carry in step.carries:
            for shape in shapes:
                if isinstance(carry.next, Lit) or (carry.next, shape) not in layouts:
                    continue
                spec = layouts[carry.next, shape]
                layouts[carry.inside, shape] = layouts[carry.result, shape] = spec
                if not isinstance(carry.init, Lit) and carry.init in made:
                    layouts[carry.init, shape] = spec


def _tie_results(
    steps: tuple[ProgramStep, ...],
    flat: FlatProgram,
    traced: TracedFunction,
    layouts: Layouts,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
) -> None:
    """A result takes the layout that `out_shardings` or the argument it succeeds has."""
    made = {var for step in steps if not isinstance(step, LoopNode) for var in step.outputs}
    for operand, result in zip(flat.results, traced.results, strict=True):
        if isinstance(operand, Lit) or operand not in made or homes.get(operand, -1) < 0:
            continue
        shape = shape_of(submeshes[homes[operand]])
        rank = flat.avals[operand].shape
        if isinstance(result.sharding, NamedSharding):
            layouts[operand, shape] = fit_spec(result.sharding.spec, rank, dict(shape))
        elif result.successor_of is not None:
            argument = flat.arguments[result.successor_of]
            same = flat.avals[argument].shape == rank  # a batch may be stored in another form
            if same and homes.get(argument) == homes[operand] and (argument, shape) in layouts:
                layouts[operand, shape] = layouts[argument, shape]
