"""What each step of a plan is: task, action, submesh, and which steps it waits for.

    3  run  layer1_fwd[0]         layer1_fwd  F   stage 1  microbatch 0  on stage=1   needs 2
    4  copy stage=1 -> stage=0    copy            of 3                   to stage=0   needs 3

A run belongs to *nodes* of the loop's stage graph: one, or several where tasks were fused. Its time
is divided among them by their estimated operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh._src.ir.plan import HostLoop, Plan, Run, Slot
from multimesh._src.ir.program import TaskNode, all_loops
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.assign.cloned import cost_of
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.report.labels import JOINT, Unit, find_units
from multimesh._src.runtime.buffers import reads, writes
from multimesh._src.schedule.actions import Pair
from multimesh._src.schedule.simulate import Simulation

COPY = "copy"
LOOP = "while"
HOST_LOOPS = "host"


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one step of a plan is.

    Attributes:
        label: The name of the task, from the second one of that name on with `#2`, ...; of a copy
            its edge, as `stage=0 -> stage=1`.
        kind: `F`, `B`, `W`, `BW`, of fused tasks `F+BW`; `-` if it is none of them; `copy`.
        stage: Its stage, -1 where it is no action of a pipeline.
        microbatch: The iteration of its loop, -1 outside of loops; of a copy, that of the run
            that makes what it copies.
        submesh: The label of its submesh; of a copy, where it goes.
        devices: The ids of its devices; of a copy none.
        needs: The steps that make what it reads.
        loop: The index of its pipelined loop, -1 if it is in none.
        nodes: The nodes of that loop's stage graph that it runs, and the share of its time that
            each takes.
        pair: The actions, as `[0F3|7BW1]`, where it runs two that overlap.
    """

    label: str
    kind: str
    stage: int
    microbatch: int
    submesh: str
    devices: tuple[int, ...]
    needs: tuple[int, ...]
    loop: int = -1
    nodes: tuple[tuple[str, float], ...] = ()
    pair: str = ""

    @property
    def action(self) -> str:
        """Its action, as `1F0`, `1F+BW0` or `[0F3|7BW1]`; outside of pipelines its label."""
        return self.pair or (f"{self.part}{self.microbatch}" if self.stage >= 0 else self.label)

    @property
    def part(self) -> str:
        """Its action without the microbatch; outside of pipelines its kind."""
        if self.pair:
            return "+".join(name for name, _ in self.nodes)
        return f"{self.stage}{self.kind}" if self.stage >= 0 else self.kind

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy, not a run of a task."""
        return self.kind == COPY


def describe_steps(plan: Plan, partitioned: Partitioned | None) -> tuple[StepInfo, ...]:
    """Returns what each step of a plan is.

    Args:
        plan: The plan, with private copies or without.
        partitioned: What it was made of; without it tasks have neither kinds nor loops.
    """
    tasks = () if partitioned is None else partitioned.program.tasks
    units = find_units(tasks, plan)
    loop_of = {} if partitioned is None else _loops_of_tasks(partitioned)
    schedules = {} if partitioned is None else partitioned.schedules
    found = [_describe_unit(unit, plan, loop_of, schedules) for unit in units.units]
    made_by: dict[Slot, int] = {}
    infos: list[StepInfo] = []
    for number, step in enumerate(plan.steps):
        needs = tuple(dict.fromkeys(made_by[s] for s in reads(step) if s in made_by))
        made_by.update(dict.fromkeys(writes(step), number))
        if isinstance(step, Run):
            unit = found[units.unit_of[number]]
            pair = _pair(step, schedules[unit.loop]) if unit.loop >= 0 else ""
            infos.append(replace(unit, needs=needs, microbatch=step.iteration, pair=pair))
        elif isinstance(step, HostLoop):  # what runs inside is not told apart
            infos.append(StepInfo(step.name, LOOP, -1, -1, HOST_LOOPS, (), needs))
        else:
            source = infos[needs[0]].microbatch if needs else -1
            goal = step.edge.rpartition(" -> ")[2]
            infos.append(StepInfo(step.edge, COPY, -1, source, goal, (), needs))
    return tuple(infos)


def _pair(run: Run, simulation: Simulation) -> str:
    """The pair of actions that a run is, empty if it is none."""
    event = simulation.order[run.group][1] if run.group >= 0 else None
    return str(event) if isinstance(event, Pair) and JOINT in run.task else ""


def _loops_of_tasks(partitioned: Partitioned) -> Mapping[int, int]:
    """The pipelined loop of each task in one, by its index."""
    return {
        task.index: loop.index
        for loop in all_loops(partitioned.program.steps)
        if loop.index in partitioned.schedules
        for task in loop.tasks
        if isinstance(task, TaskNode)
    }


def _describe_unit(
    unit: Unit,
    plan: Plan,
    loop_of: Mapping[int, int],
    schedules: Mapping[int, Simulation],
) -> StepInfo:
    submesh = plan.executables[unit.first.executable].submesh
    loop = next((loop_of[task.index] for task in unit.tasks if task.index in loop_of), -1)
    return StepInfo(
        label=unit.label,
        kind="+".join(dict.fromkeys(task.kind for task in unit.tasks)) or "-",
        stage=max((task.stage for task in unit.tasks), default=-1),
        microbatch=-1,
        submesh=submesh.label or _label_of(plan, submesh.mesh),
        devices=tuple(device.id for device in submesh.mesh.devices.flat),
        needs=(),
        loop=loop,
        nodes=_nodes(unit.tasks, schedules[loop]) if loop >= 0 else (),
    )


def _label_of(plan: Plan, mesh: Any) -> str:
    """The label of the submesh with these devices, for private copies, which have none."""
    submeshes = (executable.submesh for executable in plan.executables)
    devices = list(mesh.devices.flat)
    same = (s.label for s in submeshes if s.label and list(s.mesh.devices.flat) == devices)
    return next(same, "everywhere")


def _nodes(tasks: Sequence[TaskNode], simulation: Simulation) -> tuple[tuple[str, float], ...]:
    known = {str(node) for node in simulation.graph.nodes}
    costs: dict[str, float] = {}
    for task in tasks:
        # in a loop without a backward, what else would be one stands as F in the stage graph
        stage = task.stage
        names = (f"{stage}{task.kind}", f"{stage}F", f"{task.name}#{task.index}")
        name = next((name for name in names if name in known), "")
        if name:
            work = sum(map(cost_of, jaxprs.open_jaxpr(task.body).eqns))
            costs[name] = costs.get(name, 0.0) + work
    total = sum(costs.values())
    if not total:
        return tuple((name, 1 / len(costs)) for name in costs)
    return tuple((name, cost / total) for name, cost in costs.items())
