"""`make_report`: reads a partitioned program and reports what became of the function."""

from collections.abc import Sequence

from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.constraint import UNCONSTRAINED, constraint_p
from multimesh._src.ir.plan import Copy, Plan, Run
from multimesh._src.ir.program import LoopNode, Program, TaskNode
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.report.arguments import ArgumentReport, report_arguments
from multimesh._src.report.code import (
    find_unmapped,
    find_unmatched,
    find_whole,
    report_registrations,
)
from multimesh._src.report.flops import flops_of
from multimesh._src.report.labels import Units, find_units
from multimesh._src.report.loops import report_loops
from multimesh._src.report.memory import held_bytes
from multimesh._src.report.opened import open_loops
from multimesh._src.report.program import ProgramReport, SubmeshReport, TaskReport
from multimesh._src.report.sites import Sites
from multimesh._src.report.traffic import find_reshards, num_bytes
from multimesh._src.runtime.buffers import BufferedPlan, plan_buffers
from multimesh._src.topology import devices_label


def make_report(traced: TracedFunction, partitioned: Partitioned) -> ProgramReport:
    """Reports what partitioning made of a function."""
    program, origins = partitioned.program, partitioned.origins
    plan = open_loops(partitioned.plan)
    buffered = plan_buffers(plan)
    units = find_units(program.tasks, plan)
    labels = units.labels_of_tasks(program.tasks)
    tasks = _tasks(program, plan, units, buffered)
    reads = [(task.label, task.arguments) for task in tasks]
    arguments = report_arguments(traced, program, plan, reads)
    names = tuple(result.name for result in traced.results)
    sites = Sites(origins, program.submeshes)
    return ProgramReport(
        name=program.name,
        submeshes=_submeshes(partitioned, buffered, tasks, arguments),
        idle=_idle(traced, plan),
        unused_axes=_unused_axes(plan),
        tasks=tasks,
        reshards=find_reshards(plan, units, names, sites, program.submeshes),
        arguments=arguments,
        stacks=partitioned.stacks,
        everywhere=_everywhere(traced, program, plan, arguments),
        loops=report_loops(partitioned, labels),
        code=find_unmatched(program, origins, traced.matcher, labels),
        registrations=report_registrations(traced, origins.flat.steps),
        unmapped=find_unmapped(program, origins),
        whole=find_whole(program, origins, traced),
        num_executables=len({unit.first.executable for unit in units.units}),
        num_bodies=len({id(plan.executables[u.first.executable].body) for u in units.units}),
        num_copies=sum(isinstance(step, Copy) for step in plan.steps),
    )


# --- tasks ---------------------------------------------------------------------------------------


def _tasks(
    program: Program, plan: Plan, units: Units, buffered: BufferedPlan
) -> tuple[TaskReport, ...]:
    when = _when(program)
    arguments = _argument_slots(plan)
    cut = {entry.name for entry in plan.inputs if entry.microbatches}
    flops: dict[int, int] = {}
    reports: list[TaskReport] = []
    for unit in units.units:
        run = unit.first
        executable = plan.executables[run.executable]
        if run.executable not in flops:
            flops[run.executable] = flops_of(executable.body)
        read = [slot for slot in run.inputs if slot in arguments]
        parameters = [slot for slot in read if arguments[slot] not in cut]
        report = TaskReport(
            label=unit.label,
            name=unit.name,
            kind="+".join(dict.fromkeys(task.kind for task in unit.tasks)),
            stage=max((task.stage for task in unit.tasks), default=-1),
            when=next((when[task.index] for task in unit.tasks if task.index in when), ""),
            submesh=executable.submesh.label,
            num_runs=unit.num_runs,
            executable=run.executable,
            flops=flops[run.executable],
            num_inputs=len(run.inputs),
            input_bytes=_size(plan, run.inputs),
            num_outputs=len(run.outputs),
            output_bytes=_size(plan, run.outputs),
            arguments=tuple(arguments[slot] for slot in read),
            parameters=tuple(arguments[slot] for slot in parameters),
            parameter_bytes=_size(plan, parameters),
            num_in_place=len(buffered.donations[run.executable]),
            origin=unit.tasks[0].origin if unit.tasks else "",
        )
        reports.append(report)
    return tuple(reports)


def _when(program: Program) -> dict[int, str]:
    """When the tasks outside of loops run, by index; empty for a program without loops."""
    loops = [i for i, step in enumerate(program.steps) if isinstance(step, LoopNode)]
    return {
        step.index: "before" if i < loops[0] else "after" if i > loops[-1] else "between"
        for i, step in enumerate(program.steps)
        if loops and isinstance(step, TaskNode)
    }


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


# --- submeshes -----------------------------------------------------------------------------------


def _submeshes(
    partitioned: Partitioned,
    buffered: BufferedPlan,
    tasks: Sequence[TaskReport],
    arguments: Sequence[ArgumentReport],
) -> tuple[SubmeshReport, ...]:
    fixed = [s for s in partitioned.program.submeshes if not s.rotation]
    held = held_bytes(buffered, [submesh.mesh for submesh in fixed])
    residuals = _residuals(partitioned)
    return tuple(
        SubmeshReport(
            label=submesh.label,
            devices=devices_label(list(submesh.mesh.devices.flat)),
            axes=", ".join(f"{axis}={n}" for axis, n in submesh.mesh.shape.items() if n > 1),
            argument_bytes=sum(a.bytes for a in arguments if a.home == submesh.label),
            state_bytes=bytes_.state,
            peak_bytes=bytes_.peak,
            residual_sets=residuals.get(submesh.label, (0, 0))[0],
            residual_bytes=residuals.get(submesh.label, (0, 0))[1],
            flops=sum(t.flops * t.num_runs for t in tasks if t.submesh == submesh.label),
        )
        for submesh, bytes_ in zip(fixed, held, strict=True)
    )


def _residuals(partitioned: Partitioned) -> dict[str, tuple[int, int]]:
    """Sets and bytes per label of a submesh, of the loop that keeps most bytes there."""
    found: dict[str, tuple[int, int]] = {}
    for simulation in partitioned.schedules.values():
        peaks = simulation.peaks
        columns = zip(peaks.until_w, peaks.num_bytes, strict=True)
        for rank, (sets, size) in enumerate(columns):
            label = simulation.graph.label(rank)
            found[label] = max(found.get(label, (0, 0)), (sets, int(size)), key=lambda x: x[::-1])
    return found


def _idle(traced: TracedFunction, plan: Plan) -> tuple[str, ...]:
    """Slices of the global mesh on which nothing runs; whole ones along an axis, else devices."""
    mesh = traced.global_mesh
    if mesh is None:
        return ()
    runs = (step for step in plan.steps if isinstance(step, Run))
    used = {d for run in runs for d in plan.executables[run.executable].submesh.mesh.devices.flat}
    idle = [device for device in mesh.devices.flat if device not in used]
    found: list[str] = []
    for axis, name in enumerate(mesh.axis_names):
        if not idle or mesh.devices.shape[axis] == 1:
            continue
        for index in range(mesh.devices.shape[axis]):
            there = list(mesh.devices.take([index], axis).flat)
            if set(there) <= set(idle):
                found.append(f"{name}={index} ({devices_label(there)})")
                idle = [device for device in idle if device not in there]
    return (*found, devices_label(idle)) if idle else tuple(found)


def _unused_axes(plan: Plan) -> tuple[str, ...]:
    """Mesh axes of several devices that shard no value of any task."""
    sizes: dict[str, int] = {}
    used: set[str] = set()
    for number in sorted({step.executable for step in plan.steps if isinstance(step, Run)}):
        executable = plan.executables[number]
        sizes.update({axis: n for axis, n in executable.submesh.mesh.shape.items() if n > 1})
        entries = [e for spec in (*executable.in_specs, *executable.out_specs) for e in spec]
        entries += [
            dim
            for eqn in jaxprs.all_eqns(jaxprs.open_jaxpr(executable.body))
            if eqn.primitive is constraint_p
            for dim in eqn.params["dims"]
            if dim is not UNCONSTRAINED
        ]
        for entry in entries:
            used.update((entry,) if isinstance(entry, str) else entry or ())
    return tuple(f"{axis}={size}" for axis, size in sizes.items() if axis not in used)


def _everywhere(
    traced: TracedFunction, program: Program, plan: Plan, arguments: Sequence[ArgumentReport]
) -> tuple[str, ...]:
    """Arguments and results that are replicated over all submeshes."""
    found = [argument.name for argument in arguments if argument.home == "everywhere"]
    if len(program.submeshes) == 1:
        return tuple(found)
    largest = max(len(submesh.mesh.devices.flat) for submesh in program.submeshes)
    for slot, result in zip(plan.outputs, traced.results, strict=True):
        if plan.slots[slot].sharding.num_devices > largest:
            found.append(result.name)
    return tuple(found)
