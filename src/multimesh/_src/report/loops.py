"""The loops of a program: which are pipelined, and why others run turn by turn.

loop i < 8: x' = layer1(layer0(x))              layer0 reads in a turn what layer1 made before
loop i < 8: m' = m + (grad(i) - m) / (i + 1)    no sum: the mean so far decides what is added
"""

from collections.abc import Iterator, Mapping

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.ir.flat import Lit, Var
from multimesh._src.ir.program import LoopNode, TaskNode, all_loops
from multimesh._src.jax_compat import jaxprs
from multimesh._src.jax_compat.name_stack import source_line
from multimesh._src.partition.backward import CONTRACTIONS
from multimesh._src.partition.carries import CarryKind, classify_all
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.report.program import CarryReport, LoopReport, WholeBackward
from multimesh._src.report.traffic import type_text


def report_loops(partitioned: Partitioned, labels: Mapping[int, str]) -> tuple[LoopReport, ...]:
    """Returns the loops at any depth; `labels` are those of the tasks, by index."""
    loops = list(all_loops(partitioned.program.steps))
    origins = partitioned.origins
    kinds = classify_all(origins.flat.steps, origins.place) if loops else {}
    return tuple(_loop(loop, partitioned, kinds, labels) for loop in loops)


def _loop(
    loop: LoopNode,
    partitioned: Partitioned,
    kinds: Mapping[Var, CarryKind],
    labels: Mapping[int, str],
) -> LoopReport:
    simulation = partitioned.schedules.get(loop.index)
    kept = partitioned.whole.get(loop.index, ())
    tasks = [task for task in loop.tasks if isinstance(task, TaskNode)]
    inner = [step for step in loop.tasks if isinstance(step, LoopNode)]
    whole = [hiding for task in tasks if task.name in kept for hiding in _hiding(task)]
    return LoopReport(
        length=loop.length,
        tasks=tuple(task.name for task in tasks),
        simulation=simulation,
        whole=tuple(dict.fromkeys(whole)),
        carried=None if simulation is not None else _carried(loop, partitioned, kinds, labels),
        is_microbatch=microbatch_marker(loop.marker) is not None,
        holds_loops=bool(inner),
        holds_while=any(step.condition is not None for step in inner),
    )


def _hiding(task: TaskNode) -> Iterator[WholeBackward]:
    """What a backward task's contractions stand inside of."""
    if task.kind != "BW":
        return
    for eqn in jaxprs.open_jaxpr(task.body).eqns:
        inner = (e for j in jaxprs.sub_jaxprs(eqn.params) for e in jaxprs.all_eqns(j))
        if any(e.primitive.name in CONTRACTIONS for e in inner):
            yield WholeBackward(task.name, eqn.primitive.name, source_line(eqn))


def _carried(
    loop: LoopNode,
    partitioned: Partitioned,
    kinds: Mapping[Var, CarryKind],
    labels: Mapping[int, str],
) -> CarryReport | None:
    """What an iteration of a sequential loop needs of the one before.

    That is a value that another task reads, else a state that a task keeps by itself: one that is
    in the way of a pipeline, as a forward task alone may keep a state. A task that is elsewhere in
    each iteration hands its state on, which is no obstacle.
    """
    program = partitioned.program
    tasks = [task for task in loop.tasks if isinstance(task, TaskNode)]
    kept: list[tuple[bool, CarryReport]] = []
    for carry in loop.carries:
        if isinstance(carry.next, Lit):
            continue
        writers = [task for task in tasks if carry.next in task.outputs]
        readers = [task for task in tasks if carry.inside in task.inputs]
        if not writers or not readers:
            continue
        writer, reader = writers[0], readers[0]
        names = labels.get(writer.index, ""), labels.get(reader.index, "")
        found = CarryReport(type_text(program.avals[carry.inside]), *names)
        if [t.index for t in writers] != [t.index for t in readers]:
            return found
        moves = program.submeshes[writer.submesh].rotation
        if kinds.get(carry.inside) == "state" and not moves and len(tasks) == len(loop.tasks):
            kept.append((writer.kind == "F", found))
    return min(kept, key=lambda entry: entry[0])[1] if kept else None
