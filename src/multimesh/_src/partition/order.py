"""The order in which the tasks of a loop run.

A microbatch loop runs in the order of its schedule, which is made for the loop's own stage graph,
checked against it and simulated: what starts earlier is enqueued earlier, ties go to the lower
rank (P6). Any other loop runs iteration by iteration.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.ir.program import TaskNode
from multimesh._src.partition.events import Runs, ScheduledRun
from multimesh._src.partition.stages import Pipeline
from multimesh._src.schedule.actions import Action, Kind, Pair, TaskRun
from multimesh._src.schedule.check import check
from multimesh._src.schedule.costs import NO_MEMORY, Memory
from multimesh._src.schedule.graph import Node, Part
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.neighbours import adjacent_parts
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.simulate import Simulation, simulate


def wanted_schedule(marker: str, default: Any) -> Any:
    """The schedule that a loop's marker asks for, else the context's."""
    found = microbatch_marker(marker)
    if found is None:
        return default
    if found.custom_schedule is not None:
        return found.custom_schedule
    return default if found.schedule is None else found.schedule


def runs_halves(pipeline: Pipeline, num_microbatches: int, spec: Any) -> bool:
    """Whether the schedule runs the two halves of a backward apart (or a task asks for it)."""
    if any(any(task.suffixes) for task in pipeline.tasks):
        return True
    return Kind.W in _make(pipeline, num_microbatches, spec, whole=True).kinds


def schedule_loop(
    pipeline: Pipeline, num_microbatches: int, spec: Any, memory: Memory = NO_MEMORY
) -> Simulation:
    """Makes, checks and simulates the schedule of a microbatch loop.

    Args:
        pipeline: Stages and stage graph of the loop.
        num_microbatches: Iterations of the loop.
        spec: What the user asked for; None for the default.
        memory: Bytes of the residual sets.

    Raises:
        ScheduleError: No such schedule, or it does not fit the program.
    """
    schedule = _make(pipeline, num_microbatches, spec)
    check(schedule, pipeline.graph, num_microbatches)
    return simulate(schedule, pipeline.graph, memory=memory)


def _make(pipeline: Pipeline, num_microbatches: int, spec: Any, *, whole: bool = False) -> Schedule:
    """Makes the schedule; with `whole`, with all actions that it has on the textbook pipeline."""
    graph = pipeline.graph
    kinds = {node.kind for node in graph.nodes if isinstance(node, Part)}
    return make_schedule(
        spec,
        num_ranks=graph.num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=-(-len(graph.placement) // graph.num_ranks),
        placement=graph.placement,
        forward_only=not kinds - {Kind.F},
        names=task_parts(pipeline),
        graph=None if whole else graph,
    )


def task_parts(pipeline: Pipeline) -> Mapping[str, Part | None]:
    """The part that each task name stands for in rows by task names.

    Where forward and backward have one name, as `register_layers` gives, the kind is part of it:
    `layer0:F`, `layer0:BW`, and `layer0:B` and `layer0:W` for the halves.
    """
    found: dict[str, dict[Kind, Part | None]] = {}
    for task in pipeline.tasks:
        node = pipeline.node_of[task.index]
        part = node if isinstance(node, Part) else None
        kind = Kind.F if part is None else part.kind
        found.setdefault(task.name, {}).setdefault(kind, part)
    parts: dict[str, Part | None] = {}
    for name, of_kind in found.items():
        backward = next((p for kind, p in of_kind.items() if p and kind is not Kind.F), None)
        if len(of_kind) == 1:
            parts[name] = next(iter(of_kind.values()))
        elif backward is None or Kind.F not in of_kind:
            parts[name] = backward and Part(Kind.BW, backward.stage)
        else:
            parts[f"{name}:F"] = of_kind[Kind.F]
            for kind in (Kind.BW, Kind.B, Kind.W):
                parts[f"{name}:{kind}"] = Part(kind, backward.stage)
    return parts


def scheduled_runs(pipeline: Pipeline, simulation: Simulation) -> Runs:
    """Every task of the loop with its iteration, in the order of the simulated start times.

    The tasks of an overlapped pair are one group; so are, where a stage's backward always follows
    its forward at once, the last task of the one and the first of the other.
    """
    tasks_of: dict[Node, list[TaskNode]] = {}
    names: dict[str, Node] = {}
    for task in pipeline.tasks:
        node = pipeline.node_of[task.index]
        tasks_of.setdefault(node, []).append(task)
        names[str(node)] = node
    joined = _joined_stages(pipeline, simulation.schedule)
    runs: list[ScheduledRun] = []

    def act(action: Action) -> list[ScheduledRun]:
        covered = pipeline.graph.covers(action.kind, action.stage)
        nodes = [pipeline.graph.nodes[number] for number in covered]
        return [ScheduledRun(t, action.microbatch) for node in nodes for t in tasks_of[node]]

    for number, (_, event) in enumerate(simulation.order):
        if isinstance(event, TaskRun):
            runs += [ScheduledRun(t, event.microbatch) for t in tasks_of[names[event.name]]]
        elif isinstance(event, Pair):
            parts = [*act(event.first), *act(event.second)]
            runs += [run._replace(group=number) for run in parts]
        elif event.stage not in joined:
            runs += act(event)
        elif event.kind is Kind.F:
            first, second = act(event), act(replace(event, kind=joined[event.stage]))
            middle = (run._replace(group=number) for run in (first[-1], second[0]))
            runs += [*first[:-1], *middle, *second[1:]]
        elif event.kind is not joined[event.stage]:
            runs += act(event)
    _check_all_run(pipeline.tasks, runs, simulation)
    return tuple(runs)


def _joined_stages(pipeline: Pipeline, schedule: Schedule) -> dict[int, Kind]:
    """Stages whose backward follows their forward at once and waits for nothing else."""
    graph = pipeline.graph
    needs: dict[Node, set[Node]] = {}
    for edge in graph.edges:
        if edge.distance == 0:
            needs.setdefault(edge.target, set()).add(edge.source)
    joined: dict[int, Kind] = {}
    for first, second in adjacent_parts(schedule):
        if first.kind is not Kind.F or first.stage != second.stage or second.kind is Kind.W:
            continue
        backward = graph.covers(second.kind, second.stage)
        forward = graph.covers(first.kind, first.stage)
        if not backward or not forward:
            continue
        others = needs.get(graph.nodes[backward[0]], set()) - {first}
        if others <= needs.get(first, set()):
            joined[first.stage] = second.kind
    return joined


def _check_all_run(
    tasks: Sequence[TaskNode], runs: Sequence[ScheduledRun], simulation: Simulation
) -> None:
    counts = Counter(run.task.index for run in runs)
    length = simulation.schedule.num_microbatches
    wrong = [task.name for task in tasks if counts[task.index] != length]
    assert not wrong, f"`{simulation.schedule.name}` does not run `{wrong}` {length} times each"
