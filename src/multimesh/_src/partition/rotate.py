"""Ends the rotation of tasks outside of their loops, and gives each submesh its accumulator.

    embed_bwd rotates over stage=0, stage=1     ->    zeros @ stage=0
    loop: acc' = embed_bwd(dy, acc)                   loop: acc0' on even, acc1' on odd ones
    w' = w - acc                                      acc = acc0 + acc1 @ stage=1
                                                      w' = w - acc @ stage=1

One accumulator would travel with the task: a whole embedding table for every microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr

from multimesh._src.ir.flat import Carry, FlatProgram, Lit, Var, all_with_trip_counts
from multimesh._src.ir.program import LoopNode, ProgramStep, TaskNode
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.backward import Numbers


def end_rotations(
    flat: FlatProgram, place: Mapping[int, int], submeshes: Sequence[Submesh]
) -> dict[int, int]:
    """Returns the submesh of each equation, by serial, with rotating ones in their loops alone.

    What took its place from a rotating task and stands outside of that task's loop, in one of
    another trip count or in none, runs where the last iteration does.

    Args:
        flat: The flat program.
        place: The submesh of each equation.
        submeshes: All submeshes.
    """
    ended = dict(place)
    for equation, length in all_with_trip_counts(flat.steps):
        rotation = submeshes[place[equation.serial]].rotation
        if rotation and len(rotation) != length:
            ended[equation.serial] = rotation[-1]
    return ended


def spread_accumulators(
    loop: LoopNode, submeshes: Sequence[Submesh], numbers: Numbers
) -> tuple[ProgramStep, ...]:
    """Returns the loop with the tasks that make zeros before it and sums behind it.

    Args:
        loop: A microbatch loop.
        submeshes: All submeshes.
        numbers: Where new variables and task numbers come from.
    """
    if not any(submesh.rotation for submesh in submeshes):
        return (loop,)
    zeros: list[ProgramStep] = []
    totals: list[ProgramStep] = []
    carries: list[Carry] = []
    spread: dict[Var, tuple[Var, ...]] = {}
    for carry in loop.carries:
        writer = _only_user(carry, loop)
        if writer is None or not _is_summed(carry, writer):
            carries.append(carry)
            continue
        rotation = submeshes[writer.submesh].rotation
        if not rotation:
            carries.append(carry)
            continue
        places = tuple(dict.fromkeys(reversed(rotation)))  # the total is where the last one runs
        aval = numbers.avals[carry.inside]
        parts = [_part(carry, numbers) for _ in places]
        parts[0] = replace(parts[0], init=carry.init)
        carries += parts
        inside = {place: part.inside for place, part in zip(places, parts, strict=True)}
        spread[carry.inside] = tuple(inside[place] for place in rotation)
        zeros += [
            _task(f"{writer.name}_zeros", place, _zeros(aval), (), (part.init,), numbers)
            for place, part in zip(places[1:], parts[1:], strict=True)
            if not isinstance(part.init, Lit)
        ]
        results = tuple(part.result for part in parts)
        body = _total(aval, len(parts))
        name = f"{writer.name}_total"
        totals.append(_task(name, places[0], body, results, (carry.result,), numbers))
    changed = replace(loop, carries=tuple(carries), spread=spread)
    return (*zeros, changed, *totals)


def _only_user(carry: Carry, loop: LoopNode) -> TaskNode | None:
    """The one task that reads the carried value and makes the next one."""
    tasks = [step for step in loop.tasks if isinstance(step, TaskNode)]
    users = [t for t in tasks if carry.inside in t.inputs or carry.next in t.outputs]
    return users[0] if len(users) == 1 else None


def _is_summed(carry: Carry, writer: TaskNode) -> bool:
    """Whether the task only adds to the carried value."""
    if carry.inside not in writer.inputs or carry.next not in writer.outputs:
        return False
    var = writer.body.jaxpr.invars[writer.inputs.index(carry.inside)]
    end = writer.body.jaxpr.outvars[writer.outputs.index(carry.next)]
    while var is not end:
        readers = [eqn for eqn in writer.body.jaxpr.eqns if any(atom is var for atom in eqn.invars)]
        if len(readers) != 1 or readers[0].primitive.name not in ("add", "add_any"):
            return False
        (var,) = readers[0].outvars
    return True


def _part(carry: Carry, numbers: Numbers) -> Carry:
    aval = numbers.avals[carry.inside]
    init, inside, result = (numbers.var(aval) for _ in range(3))
    return Carry(init, inside, carry.next, result)


def _task(
    name: str,
    submesh: int,
    body: ClosedJaxpr,
    inputs: tuple[Var, ...],
    outputs: tuple[Var, ...],
    numbers: Numbers,
) -> TaskNode:
    return TaskNode(numbers.task(), name, "-", -1, submesh, body, inputs, outputs, origin="")


def _zeros(aval: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda: [lax.full(aval.shape, 0, aval.dtype)])()


def _total(aval: Any, count: int) -> ClosedJaxpr:
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.make_jaxpr(lambda *parts: [sum(parts[1:], parts[0])])(*[struct] * count)
