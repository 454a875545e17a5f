"""Decides where arguments, constants and results live (R7, R8).

    embed(table) on stage=0, logits(table) on stage=1, 8 microbatches   ->   table: stage=0
    step: i32[]                                                         ->   everywhere

An argument has one owner: where the caller put it if that submesh uses it, else the submesh that
uses it most, else the first. Scalars live everywhere, and so do small arrays that several
submeshes use.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from multimesh._src.ir.flat import Var
from multimesh._src.ir.program import EVERYWHERE, LoopNode, ProgramStep
from multimesh._src.ir.submesh import Submesh


def find_homes(
    steps: tuple[ProgramStep, ...],
    outside: tuple[Var, ...],
    avals: Mapping[Var, Any],
    submeshes: Sequence[Submesh],
    placed: Mapping[Var, int],
    blocks: Mapping[Var, int],
    max_elements: int,
) -> dict[Var, int]:
    """Returns the home of every variable that a task makes, and of every argument that is used.

    Args:
        steps: Tasks and loops.
        outside: Arguments and constants.
        avals: Types of the variables.
        submeshes: All submeshes; what a rotating one reads and makes counts on those behind it.
        placed: Submeshes on which callers placed arguments; where only others read one, it moves.
        blocks: Submeshes of the blocks of stacks: those stay, whoever reads them.
        max_elements: Arrays up to this size are replicated where several submeshes use them.
    """
    uses: dict[Var, dict[int, int]] = {}
    homes: dict[Var, int] = {}
    _count(steps, 1, submeshes, uses, homes)
    for var in outside:
        executions = uses.get(var, {})
        if var in blocks:
            homes[var] = blocks[var]
        elif avals[var].ndim == 0 or (avals[var].size <= max_elements and len(executions) > 1):
            homes[var] = EVERYWHERE
        elif placed.get(var) in executions:
            homes[var] = placed[var]
        elif executions:
            homes[var] = max(executions, key=lambda submesh: executions[submesh])
        elif var in placed:
            homes[var] = placed[var]
    return homes


def _count(
    steps: tuple[ProgramStep, ...],
    executions: int,
    submeshes: Sequence[Submesh],
    uses: dict[Var, dict[int, int]],
    homes: dict[Var, int],
) -> None:
    """Counts executions that read a variable, per submesh.

    What a loop carries at first counts once, where the tasks of the loop read it; where none does,
    it is only passed on, and counts where its next value is made. Nobody knows how often a `while`
    runs: once is as good as any guess.
    """
    for step in steps:
        if isinstance(step, LoopNode):
            _count(step.tasks, executions * max(step.length, 1), submeshes, uses, homes)
            for carry in step.carries:
                if isinstance(carry.init, int):
                    made = homes.get(carry.next, -2) if isinstance(carry.next, int) else -2
                    if made >= 0 and step.condition is not None:
                        homes[carry.result] = made
                    counts = uses.setdefault(carry.init, {})
                    for place in uses.get(carry.inside, {made: 1}):
                        if place >= 0:
                            counts[place] = counts.get(place, 0) + 1
            continue
        places = submeshes[step.submesh].rotation or (step.submesh,)
        homes.update(dict.fromkeys(step.outputs, places[0]))
        for var in step.inputs:
            counts = uses.setdefault(var, {})
            for place in places:
                counts[place] = counts.get(place, 0) + executions // len(places)
