"""What became of a function: its tasks, reshards, arguments and loops, as data.

`make_report` reads a partitioned program; `report.explain` shows the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console, ConsoleOptions, RenderResult

from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.plan import Copy, Input, Plan
from multimesh._src.ir.program import EVERYWHERE, LoopNode, Program, TaskNode, all_loops
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.assign.cloned import cost_of
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.report import explain
from multimesh._src.report.labels import Units, find_units
from multimesh._src.report.opened import open_loops
from multimesh._src.report.traffic import Reshard, find_reshards, num_bytes, type_text
from multimesh._src.runtime.buffers import plan_buffers
from multimesh._src.schedule.simulate import Simulation
from multimesh._src.topology import devices_label

Moved: TypeAlias = Literal["never", "first call", "every call", "unused"]
"""When an argument is moved, if calls are made with arguments that lie as when it was traced."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task, or several that are fused into one program.

    Attributes:
        label: Its name, from the second task of that name on with `#2`, `#3`, ...
        name: Its name; those of fused tasks are joined by `+`.
        kind: `F`, `B`, `W`, `BW`, or `-` outside of loops; of fused tasks `F+BW`.
        stage: Its stage, -1 where it is no action of a pipeline.
        submesh: The label of its submesh.
        num_runs: How often a call runs it.
        executable: Number of its program; tasks with the same number share it.
        flops: Estimated operations of one run, on all devices together.
        num_inputs: Arrays that it reads.
        input_bytes: Their size, unsharded.
        num_outputs: Arrays that it makes.
        output_bytes: Their size, unsharded.
        parameters: The arguments of the function that it reads, by the user's names.
        parameter_bytes: Their size, unsharded.
        num_in_place: How many results are written over an input.
        origin: `file:line` of its first equation.
    """

    label: str
    name: str
    kind: str
    stage: int
    submesh: str
    num_runs: int
    executable: int
    flops: int
    num_inputs: int
    input_bytes: int
    num_outputs: int
    output_bytes: int
    parameters: tuple[str, ...]
    parameter_bytes: int
    num_in_place: int
    origin: str


@dataclass(frozen=True, slots=True)
class ArgumentReport:
    """One argument of the function.

    Attributes:
        name: The user's name, as `state['params'][0]`.
        type: Its type, as `float32[2,4]`.
        bytes: Its size, unsharded.
        home: The label of the submesh where it lives, or `everywhere`; empty if it is unused.
        layout: How it is sharded there, as `P('data', None)`, or `replicated`.
        moved: When it is moved to its home.
        microbatches: Into how many it is stored cut; 0 if it is not.
        donated: Whether results may take its buffer.
        returned_as: Results that are this very array.
        used_by: Labels of the tasks that read it.
    """

    name: str
    type: str
    bytes: int
    home: str
    layout: str
    moved: Moved
    microbatches: int
    donated: bool
    returned_as: tuple[str, ...]
    used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubmeshReport:
    """One submesh: its devices, sharding axes, arguments that live there and operations a call."""

    label: str
    devices: str
    axes: str
    argument_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop: its tasks, and for a microbatch loop the simulation of its schedule.

    The `length` of a `while` is 0: nobody knows it.

    `whole` names backward tasks that the schedule would run in halves, but that cannot be split.
    """

    length: int
    tasks: tuple[str, ...]
    simulation: Simulation | None
    whole: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ProgramReport:
    """What became of a function. Printed, it is a set of tables."""

    name: str
    submeshes: tuple[SubmeshReport, ...]
    tasks: tuple[TaskReport, ...]
    reshards: tuple[Reshard, ...]
    arguments: tuple[ArgumentReport, ...]
    loops: tuple[LoopReport, ...]
    num_executables: int
    num_copies: int

    def as_text(self) -> str:
        """The tables as plain text; the same program gives the same text."""
        return explain.as_text(self)

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from explain.as_rich(self, options.max_width)


def make_report(traced: TracedFunction, partitioned: Partitioned) -> ProgramReport:
    """Reports what partitioning made of a function."""
    program, plan = partitioned.program, open_loops(partitioned.plan)
    units = find_units(program.tasks, plan)
    tasks = _tasks(plan, units)
    arguments = _arguments(traced, program, plan, tasks)
    return ProgramReport(
        name=program.name,
        submeshes=_submeshes(program, tasks, arguments),
        tasks=tasks,
        reshards=find_reshards(plan, units, tuple(result.name for result in traced.results)),
        arguments=arguments,
        loops=tuple(
            LoopReport(
                length=loop.length,
                tasks=_names(loop),
                simulation=partitioned.schedules.get(loop.index),
                whole=partitioned.whole.get(loop.index, ()),
            )
            for loop in all_loops(program.steps)
        ),
        num_executables=len({unit.first.executable for unit in units.units}),
        num_copies=sum(isinstance(step, Copy) for step in plan.steps),
    )


def _names(loop: LoopNode) -> tuple[str, ...]:
    return tuple(task.name for task in loop.tasks if isinstance(task, TaskNode))


def _tasks(plan: Plan, units: Units) -> tuple[TaskReport, ...]:
    donations = plan_buffers(plan).donations
    arguments = _argument_slots(plan)
    flops: dict[int, int] = {}
    reports = []
    for unit in units.units:
        run = unit.first
        executable = plan.executables[run.executable]
        if run.executable not in flops:
            eqns = jaxprs.open_jaxpr(executable.body).eqns
            flops[run.executable] = sum(map(cost_of, eqns))
        parameters = [slot for slot in run.inputs if slot in arguments]
        report = TaskReport(
            label=unit.label,
            name=unit.name,
            kind="+".join(dict.fromkeys(task.kind for task in unit.tasks)),
            stage=max((task.stage for task in unit.tasks), default=-1),
            submesh=executable.submesh.label,
            num_runs=unit.num_runs,
            executable=run.executable,
            flops=flops[run.executable],
            num_inputs=len(run.inputs),
            input_bytes=_size(plan, run.inputs),
            num_outputs=len(run.outputs),
            output_bytes=_size(plan, run.outputs),
            parameters=tuple(arguments[slot] for slot in parameters),
            parameter_bytes=_size(plan, parameters),
            num_in_place=len(donations[run.executable]),
            origin=unit.tasks[0].origin if unit.tasks else "",
        )
        reports.append(report)
    return tuple(reports)


def _argument_slots(plan: Plan) -> dict[int, str]:
    """The user's names of the arguments that slots hold, copies included."""
    names = {slot: entry.name for entry in plan.inputs for slot in entry.slots}
    for step in plan.steps:
        if isinstance(step, Copy):
            pairs = zip(step.sources, step.targets, strict=True)
            names.update((target, names[source]) for source, target in pairs if source in names)
    return names


def _size(plan: Plan, slots: Sequence[int]) -> int:
    return sum(num_bytes(plan.slots[slot].aval) for slot in slots)


# --- arguments -----------------------------------------------------------------------------------


def _arguments(
    traced: TracedFunction, program: Program, plan: Plan, tasks: Sequence[TaskReport]
) -> tuple[ArgumentReport, ...]:
    result_names: dict[int, list[str]] = {}
    for slot, result in zip(plan.outputs, traced.results, strict=True):
        result_names.setdefault(slot, []).append(result.name)
    used_by: dict[str, list[str]] = {}
    for task in tasks:
        for name in task.parameters:
            used_by.setdefault(name, []).append(task.label)
    return tuple(
        ArgumentReport(
            name=entry.name,
            type=type_text(traced.arguments[entry.index].aval),
            bytes=num_bytes(traced.arguments[entry.index].aval),
            home=_home(program, plan, entry),
            layout=_layout(plan.slots[entry.slots[0]].sharding.spec) if entry.slots else "",
            moved=_moved(traced, plan, entry),
            microbatches=entry.microbatches,
            donated=entry.donated,
            returned_as=tuple(n for slot in entry.slots for n in result_names.get(slot, ())),
            used_by=tuple(used_by.get(entry.name, ())),
        )
        for entry in plan.inputs
    )


def _home(program: Program, plan: Plan, entry: Input) -> str:
    if not entry.slots:
        return ""
    home = program.home.get(program.arguments[entry.index])
    if home == EVERYWHERE:
        return "everywhere"
    if home is not None:
        return program.submeshes[home].label
    mesh = plan.slots[entry.slots[0]].sharding.mesh
    labels = (submesh.label for submesh in program.submeshes if submesh.mesh == mesh)
    return next(labels, "everywhere")


def _layout(spec: PartitionSpec) -> str:
    if not any(spec):
        return "replicated"
    return f"P({', '.join('None' if dim is None else repr(dim) for dim in spec)})"


def _moved(traced: TracedFunction, plan: Plan, entry: Input) -> Moved:
    if not entry.slots:
        return "unused"
    info = plan.slots[entry.slots[0]]
    placement = traced.arguments[entry.index].placement
    rank = len(info.aval.shape)
    same = placement is not None and placement.is_equivalent_to(info.sharding, rank)
    if same and not entry.microbatches:
        return "never"
    for slot, result in zip(plan.outputs, traced.results, strict=True):
        if result.successor_of == entry.index:
            returned: NamedSharding = plan.slots[slot].sharding
            return "first call" if returned.is_equivalent_to(info.sharding, rank) else "every call"
    return "every call"


# --- submeshes -----------------------------------------------------------------------------------


def _submeshes(
    program: Program, tasks: Sequence[TaskReport], arguments: Sequence[ArgumentReport]
) -> tuple[SubmeshReport, ...]:
    def report(label: str, mesh: Any) -> SubmeshReport:
        axes = (f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
        return SubmeshReport(
            label=label,
            devices=devices_label(list(mesh.devices.flat)),
            axes=", ".join(axes),
            argument_bytes=sum(a.bytes for a in arguments if a.home == label),
            flops=sum(task.flops * task.num_runs for task in tasks if task.submesh == label),
        )

    return tuple(report(submesh.label, submesh.mesh) for submesh in program.submeshes)
