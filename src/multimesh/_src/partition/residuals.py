"""How many bytes a stage keeps for a microbatch until its backward (S3, R20).

    layer1_fwd(x, w) -> y, r        x comes from another submesh
    layer1_bwd(dy, x, r) -> dx, dz  B: x and r live from F until B
    layer1_bwd(dz, x, acc) -> acc'  W: x and dz wait from B until W

What a loop carries is no residual, nor is what every microbatch reads. An array that several stages
of one submesh keep counts for the first of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multimesh._src.ir.flat import Var
from multimesh._src.ir.program import LoopNode, TaskNode
from multimesh._src.partition.loops import num_bytes
from multimesh._src.partition.stages import Pipeline
from multimesh._src.schedule.costs import Memory


def residual_memory(pipeline: Pipeline, loop: LoopNode, avals: Mapping[Var, Any]) -> Memory:
    """Returns the bytes per stage and microbatch, of whole arrays."""
    made_on = {var: task.submesh for task in pipeline.tasks for var in task.outputs}
    carried = {carry.next for carry in loop.carries}
    counted: dict[int, set[Var]] = {}  # per submesh
    stages: dict[int, tuple[float, float]] = {}
    for stage, rank in enumerate(pipeline.graph.placement):
        seen = counted.setdefault(pipeline.ranks[rank], set())
        flow = _flow_of([task for task in pipeline.tasks if task.stage == stage], made_on)
        forward = flow.forward - carried - seen
        kept = forward & (flow.read_early | flow.read_late)
        waiting = (forward | flow.between - carried) & flow.read_late
        stages[stage] = num_bytes(kept, avals), num_bytes(waiting, avals)
        seen |= kept
    return Memory(stages=stages)


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a stage handles in one microbatch.

    `forward` is what F makes or gets from another submesh, `between` what B makes; `read_early` is
    what B or BW reads, `read_late` what W reads.
    """

    forward: set[Var]
    between: set[Var]
    read_early: set[Var]
    read_late: set[Var]


def _flow_of(tasks: Sequence[TaskNode], made_on: Mapping[Var, int]) -> _Flow:
    flow = _Flow(set(), set(), set(), set())
    for task in tasks:
        match task.kind:
            case "F":
                flow.forward.update(task.outputs)
                flow.forward.update(
                    v for v in task.inputs if made_on.get(v, task.submesh) != task.submesh
                )
            case "W":
                flow.read_late.update(task.inputs)
            case _:
                flow.read_early.update(task.inputs)
                flow.between.update(task.outputs if task.kind == "B" else ())
    return flow
