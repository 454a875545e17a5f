"""Ordered effects keep the order of the program (R13).

    layer0:  print 1 ; print 2          both on stage=0: in this order in every iteration
    layer1:  print 3                    on stage=1: an error, for both stages run at once
    backward of layer0:  print 4        1f1b runs it between `layer0` of two microbatches: an error

An effect is never cloned, recomputed or hoisted: the passes that do such things leave equations
that call the host alone. Here their order is looked after: outside loops and within an iteration by
edges between equations (`split.regions`), over iterations by a check of the schedule.
"""

from collections.abc import Iterator, Sequence

from multimesh._src.errors import PartitionError, ScheduleError, message
from multimesh._src.ir.flat import Equation, Loop, Step
from multimesh._src.ir.program import LoopNode, ProgramStep, TaskNode, all_tasks
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat import effects, name_stack
from multimesh._src.partition.events import ScheduledRun

_WAYS = (
    "make the effects unordered: `ordered=False`",
    "open one scope, and so one task, around all of them",
)


def ordered_kinds(step: Step) -> tuple[str, ...]:
    """The kinds of ordered effects that a step has; each is an order of its own."""
    return tuple(dict.fromkeys(_kinds(step)))


def _kinds(step: Step) -> Iterator[str]:
    match step:
        case Equation():
            if step.eqn.effects:
                yield from (kind for kind, _ in effects.ordered_effects([step.eqn]))
        case Loop():
            for inner in step.body:
                yield from _kinds(inner)


def check_effects(steps: Sequence[ProgramStep], submeshes: Sequence[Submesh]) -> None:
    """Raises a PartitionError if ordered effects of one kind stand on several submeshes."""
    found: dict[str, list[tuple[TaskNode, str]]] = {}
    for task in all_tasks(tuple(steps)):
        for kind, line in _effects_of(task):
            found.setdefault(kind, []).append((task, line))
    for kind, uses in found.items():
        places = {task.submesh for task, _ in uses}
        if len(places) == 1 and not submeshes[uses[0][0].submesh].rotation:
            continue
        raise PartitionError(
            message(
                f"ordered effects of `{kind}` stand on several submeshes, which run at the same "
                "time.",
                window=_window(uses, submeshes),
                ways=_WAYS,
            )
        )


def check_effect_order(
    loop: LoopNode, runs: Sequence[ScheduledRun], schedule: str, submeshes: Sequence[Submesh]
) -> None:
    """Raises a ScheduleError if a schedule runs ordered effects in another order than the loop."""
    position = {task.index: at for at, task in enumerate(all_tasks(loop.tasks))}
    last: dict[str, ScheduledRun] = {}
    for run in runs:
        for kind in dict.fromkeys(kind for kind, _ in _effects_of(run.task)):
            before = last.get(kind, run)
            now = run.iteration, position[run.task.index]
            if now < (before.iteration, position[before.task.index]):
                uses = [(r.task, line) for r in (before, run) for _, line in _effects_of(r.task)]
                raise ScheduleError(
                    message(
                        f"the schedule `{schedule}` runs ordered effects of `{kind}` out of "
                        f"order: `{before.task.name}` of microbatch {before.iteration} comes "
                        f"before `{run.task.name}` of microbatch {run.iteration}.",
                        window=_window(uses, submeshes),
                        ways=_WAYS,
                    )
                )
            last[kind] = run


def _effects_of(task: TaskNode) -> tuple[tuple[str, str], ...]:
    """Kind and line of each ordered effect in a task's body."""
    found = effects.ordered_effects(task.body.eqns)
    return tuple((kind, name_stack.source_line(eqn)) for kind, eqn in found)


def _window(uses: Sequence[tuple[TaskNode, str]], submeshes: Sequence[Submesh]) -> str:
    lines = (
        f"task `{task.name}` on `{submeshes[task.submesh].label}`  {line}" for task, line in uses
    )
    return "\n".join(dict.fromkeys(lines))
