"""Finds which loops are microbatch loops, and their pipelines.

loop i < 8: y = layer0(x[i]) ; z = layer1(y) ; acc' = acc + z       a microbatch loop, 2 stages
loop i < 8: x' = layer0(x) ; x'' = layer1(x')                       sequential: x is a state
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from multimesh._src.ir.flat import Lit, Var
from multimesh._src.ir.program import LoopNode, ProgramStep, TaskNode
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.backward import Numbers, split_backward
from multimesh._src.partition.carries import CarryKind
from multimesh._src.partition.rotate import spread_accumulators
from multimesh._src.partition.stages import Pipeline, find_stages


def find_pipelines(
    steps: tuple[ProgramStep, ...],
    kinds: Mapping[Var, CarryKind],
    given: Mapping[int, int | None],
    submeshes: Sequence[Submesh],
    splits: Callable[[LoopNode, Pipeline], bool],
    numbers: Numbers,
) -> tuple[tuple[ProgramStep, ...], dict[int, Pipeline]]:
    """Returns the steps with the tasks of microbatch loops staged, and the pipelines by loop.

    Backward tasks are split where the loop's schedule runs their halves apart.

    Args:
        steps: Tasks and loops of the program.
        kinds: What the program's loops do with each value that they carry.
        given: `Task.stage` of each task, by index.
        submeshes: All submeshes.
        splits: Whether the schedule of a loop has W actions.
        numbers: Where new variables and task numbers come from.
    """
    pipelines: dict[int, Pipeline] = {}

    def visit(step: ProgramStep) -> tuple[ProgramStep, ...]:
        if isinstance(step, TaskNode):
            return (step,)
        tasks = [inner for inner in step.tasks if isinstance(inner, TaskNode)]
        # no loop inside touches several submeshes itself, and the number of iterations is known
        whole = len(tasks) == len(step.tasks) and step.condition is None
        pipeline = _pipeline_of(step, tasks, kinds, given, submeshes) if whole else None
        if pipeline is None:
            inner = (found for task in step.tasks for found in visit(task))
            return (replace(step, tasks=tuple(inner)),)
        if splits(step, pipeline):
            split = split_backward(pipeline.tasks, numbers)
            stages = {task.index: task.stage for task in split.tasks if task.stage >= 0}
            halves = _pipeline_of(step, split.tasks, kinds, stages, submeshes)
            assert halves is not None
            pipeline = replace(halves, whole=split.whole)
        pipelines[step.index] = pipeline
        staged = replace(step, tasks=pipeline.tasks, microbatch=True)
        return spread_accumulators(staged, submeshes, numbers)

    return tuple(found for step in steps for found in visit(step)), pipelines


def _pipeline_of(
    loop: LoopNode,
    tasks: Sequence[TaskNode],
    kinds: Mapping[Var, CarryKind],
    given: Mapping[int, int | None],
    submeshes: Sequence[Submesh],
) -> Pipeline | None:
    writers_of: dict[Var, list[TaskNode]] = {}
    readers_of: dict[Var, list[TaskNode]] = {}
    for task in tasks:
        for var in task.outputs:
            writers_of.setdefault(var, []).append(task)
        for var in task.inputs:
            readers_of.setdefault(var, []).append(task)
    states: list[tuple[list[TaskNode], list[TaskNode]]] = []
    for carry in loop.carries:
        writers = [] if isinstance(carry.next, Lit) else writers_of.get(carry.next, [])
        readers = readers_of.get(carry.inside, [])
        # an accumulation over several tasks has to end before the next may begin
        if kinds[carry.inside] == "last" or (kinds[carry.inside] != "state" and readers == writers):
            continue
        if len(writers) != 1 or any(task.kind != "F" for task in (*writers, *readers)):
            return None
        states.append((writers, readers))
    # Only now: the stages of a loop that is none of microbatches may well form a cycle.
    pipeline = find_stages(tasks, given, submeshes)
    if not pipeline.ranks:
        return None  # every task is elsewhere in each iteration
    stage_of = {task.index: task.stage for task in pipeline.tasks}
    ordered: list[tuple[int, int]] = []
    for writers, readers in states:
        stages = {stage_of[task.index] for task in (*writers, *readers)}
        if len(stages) != 1 or stages == {-1}:
            return None
        ordered += [(writers[0].index, reader.index) for reader in readers]
    if not ordered:
        return pipeline
    return find_stages(tasks, given, submeshes, ordered)
