"""The passes from a traced function to a plan, in order, on one page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.matching import Match
from multimesh._src.frontend.tracing import Argument, Result, TracedFunction
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import FlatProgram, Lit, Var, all_equations
from multimesh._src.ir.plan import Plan
from multimesh._src.ir.program import EVERYWHERE, LoopNode, Program, ProgramStep, all_tasks
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition import text
from multimesh._src.partition.assign.cloned import find_cloned
from multimesh._src.partition.assign.places import assign_places
from multimesh._src.partition.assign.sums import regroup_sums
from multimesh._src.partition.batches import Batch, store_microbatch_major
from multimesh._src.partition.dedupe import deduplicate
from multimesh._src.partition.emit import ArgumentInfo, Place, emit
from multimesh._src.partition.events import Instance, Item, walk
from multimesh._src.partition.homes import find_homes
from multimesh._src.partition.inline import inline
from multimesh._src.partition.layouts import Layouts, fit_spec, propagate_layouts, shape_of
from multimesh._src.partition.loops import simplify_loops
from multimesh._src.partition.order import schedule_loop, scheduled_runs
from multimesh._src.partition.pipelines import find_pipelines
from multimesh._src.partition.prune import prune
from multimesh._src.partition.seeds import Seeds
from multimesh._src.partition.split.regions import analyze_flow
from multimesh._src.partition.split.tasks import Splitter
from multimesh._src.schedule.simulate import Simulation

Observer = Callable[[str, str], None]
"""Gets the name of a pass and the text of what it made."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What partitioning gives: the program for reports, and the plan to compile.

    `schedules` has the simulation of each microbatch loop, by the index of its node.
    """

    program: Program
    plan: Plan
    schedules: Mapping[int, Simulation]


def _ignore(name: str, printed: str) -> None:
    """The observer of a run that nobody watches."""


def partition(traced: TracedFunction, observe: Observer = _ignore) -> Partitioned:
    """Cuts a traced function into tasks, places and orders them.

    Args:
        traced: The function and what is known of its arguments and results.
        observe: Called after every pass.

    Raises:
        MultiMeshError: A subclass that says what in the user's program cannot be done.
    """
    seeds = Seeds(traced.matcher)
    settings = traced.settings

    # Everything later works on numbered variables and whole scopes, so jits go first.
    flat = inline(traced, seeds)
    observe("inline", text.print_flat(flat))
    # While the batch is still cut by one visible reshape, take it as the form to store.
    flat, batches = store_microbatch_major(flat)
    # What nobody reads must not get a vote on placement.
    flat = prune(flat)
    # Counters and invariants leave the loops before placement, or they would tie stages together.
    flat = simplify_loops(flat, seeds, hoist=settings.hoist_loop_invariants)
    flat = prune(flat)
    observe("simplify_loops", text.print_flat(flat))

    # Places come before sums are regrouped: only then is it known which sums cross submeshes.
    match, seeded = _find_seeds(flat, seeds)
    default = _default_submesh(traced, seeds)
    placed = _placed_arguments(flat, traced, seeds)
    cloned = find_cloned(
        flat,
        fixed=frozenset(placed),
        max_cost=settings.recompute_from_arguments_if_cost_less_than,
        max_elements=settings.replicate_parameters_smaller_than_num_elements,
    )
    wanted = _wanted_submeshes(traced, seeds)
    place = assign_places(flat, cloned, seeded, placed, wanted, default)
    flat, place = regroup_sums(flat, place, seeded, cloned)
    observe("assign", text.print_flat(flat, place))

    # Tasks, then the stages and loops that they form.
    flow = analyze_flow(flat, cloned)
    submeshes = tuple(seeds.submeshes)
    splitter = Splitter(flat, flow, submeshes, place, match, _backward_names(seeds, flat, match))
    steps = splitter.split()
    steps, pipelines = find_pipelines(steps, flat, place, splitter.stages, submeshes)

    # Layouts need whole bodies; equal bodies are found after constraints are in axes of submeshes.
    steps = _deduplicated(steps)
    homes = find_homes(
        steps,
        (*flat.arguments, *flat.constants),
        flat.avals,
        placed,
        settings.replicate_parameters_smaller_than_num_elements,
    )
    layouts = _find_layouts(steps, flat, traced, submeshes, homes, batches)
    program = Program(
        name=flat.name,
        submeshes=submeshes,
        avals=flat.avals,
        arguments=flat.arguments,
        constants=flat.constants,
        steps=steps,
        results=flat.results,
        home=homes,
        specs=_on_submeshes(layouts, steps, submeshes, homes),
    )
    observe("split", text.print_program(program))

    # Last, time: schedules order the loops, and copies stand where the order needs them.
    schedules = {
        index: schedule_loop(pipeline, _length(steps, index), _schedule_of(steps, index, traced))
        for index, pipeline in pipelines.items()
    }

    def runs_of(loop: LoopNode) -> Any:
        if loop.index not in pipelines:
            return None
        return scheduled_runs(pipelines[loop.index], schedules[loop.index])

    events, results = walk(steps, flat.results, runs_of)
    everywhere = _everywhere(traced, submeshes)
    infos = _argument_infos(traced, flat, batches)
    plan = emit(program, events, _result_places(results, program, traced), infos, everywhere)
    observe("emit", text.print_plan(plan))
    return Partitioned(program, plan, schedules)


# --- seeds and places -----------------------------------------------------------------------------


def _find_seeds(
    flat: FlatProgram, seeds: Seeds
) -> tuple[dict[int, Match], dict[int, int]]:
    match: dict[int, Match] = {}
    seeded: dict[int, int] = {}
    for equation in all_equations(flat.steps):
        found = seeds.of_equation(equation)
        if found is not None:
            match[equation.serial] = found
            seeded[equation.serial] = seeds.submesh_of(found)
        if equation.eqn.primitive is constraint_p and equation.eqn.params["mesh"] is not None:
            mesh = equation.eqn.params["mesh"]
            seeded[equation.serial] = seeds.number(mesh, _device_label(mesh))
            match.pop(equation.serial, None)
    return match, seeded


def _device_label(mesh: Mesh) -> str:
    return "devices " + ",".join(str(device.id) for device in mesh.devices.flat)


def _default_submesh(traced: TracedFunction, seeds: Seeds) -> int:
    """Where equations go that nothing places: the first submesh, or all devices without tasks."""
    if seeds.submeshes:
        return 0
    mesh = traced.global_mesh or Mesh(_array(traced.devices), ("x",))
    return seeds.number(mesh, "all devices")


def _array(devices: Any) -> Any:
    return np.array(devices, dtype=object)


def _placed_arguments(
    flat: FlatProgram, traced: TracedFunction, seeds: Seeds
) -> dict[Var, int]:
    """Arguments that lie on a submesh; those on the global mesh only give a layout."""
    placed: dict[Var, int] = {}
    for var, argument in zip(flat.arguments, traced.arguments, strict=True):
        sharding = argument.placement
        if not isinstance(sharding, NamedSharding) or _is_global(sharding.mesh, traced):
            continue
        placed[var] = seeds.number(sharding.mesh, _device_label(sharding.mesh))
    return placed


def _wanted_submeshes(traced: TracedFunction, seeds: Seeds) -> dict[int, int]:
    return {
        position: seeds.number(result.sharding.mesh, _device_label(result.sharding.mesh))
        for position, result in enumerate(traced.results)
        if isinstance(result.sharding, NamedSharding)
        and not _is_global(result.sharding.mesh, traced)
    }


def _is_global(mesh: Any, traced: TracedFunction) -> bool:
    whole = traced.global_mesh
    devices = whole.devices.flat if whole is not None else traced.devices
    return set(mesh.devices.flat) == set(devices)


def _backward_names(
    seeds: Seeds, flat: FlatProgram, match: Mapping[int, Match]
) -> Callable[[str], str]:
    """The name that a task's backward has by its own matcher, else the name with a suffix."""
    scopes = {
        match[equation.serial].name: equation.scope
        for equation in all_equations(flat.steps)
        if equation.serial in match and not equation.scope.backprop
    }

    def name_of(name: str) -> str:
        scope = scopes.get(name)
        found = scope and seeds.of_scope(replace(scope, transposes=1))
        return found.name if found else name

    return name_of


def _deduplicated(steps: tuple[ProgramStep, ...]) -> tuple[ProgramStep, ...]:
    tasks = tuple(all_tasks(steps))
    bodies = dict(
        zip((t.index for t in tasks), deduplicate([t.body for t in tasks]), strict=True)
    )

    def rewrite(step: ProgramStep) -> ProgramStep:
        if isinstance(step, LoopNode):
            return replace(step, tasks=tuple(map(rewrite, step.tasks)))
        return replace(step, body=bodies[step.index])

    return tuple(map(rewrite, steps))


# --- layouts --------------------------------------------------------------------------------------


def _find_layouts(
    steps: tuple[ProgramStep, ...],
    flat: FlatProgram,
    traced: TracedFunction,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
    batches: Mapping[int, Batch],
) -> Layouts:
    shapes = {shape_of(submesh) for submesh in submeshes}
    fixed: Layouts = {}
    for position, (var, argument) in enumerate(
        zip(flat.arguments, traced.arguments, strict=True)
    ):
        spec = _given_spec(argument)
        if spec is not None and position not in batches and homes.get(var) != EVERYWHERE:
            for shape in shapes:
                fixed[var, shape] = fit_spec(spec, flat.avals[var].shape, dict(shape))
    layouts = propagate_layouts(steps, submeshes, flat.avals, fixed)
    _tie_carries(steps, layouts, shapes)
    _tie_results(steps, flat, traced, layouts, submeshes, homes)
    return layouts


def _given_spec(argument: Argument) -> PartitionSpec | None:
    if argument.spec is not None:
        return argument.spec
    return argument.placement.spec if isinstance(argument.placement, NamedSharding) else None


def _tie_carries(steps: tuple[ProgramStep, ...], layouts: Layouts, shapes: set[Any]) -> None:
    """A carry keeps the layout of its next value, and so does the value it starts from."""
    made = {var for task in all_tasks(steps) for var in task.outputs}
    for step in steps:
        if not isinstance(step, LoopNode):
            continue
        _tie_carries(step.tasks, layouts, shapes)
        for carry in step.carries:
            for shape in shapes:
                if isinstance(carry.next, Lit) or (carry.next, shape) not in layouts:
                    continue
                spec = layouts[carry.next, shape]
                layouts[carry.inside, shape] = layouts[carry.result, shape] = spec
                if not isinstance(carry.init, Lit) and carry.init in made:
                    layouts[carry.init, shape] = spec


def _tie_results(
    steps: tuple[ProgramStep, ...],
    flat: FlatProgram,
    traced: TracedFunction,
    layouts: Layouts,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
) -> None:
    """A result takes the layout that `out_shardings` or the argument it succeeds has."""
    made = {var for step in steps if not isinstance(step, LoopNode) for var in step.outputs}
    for operand, result in zip(flat.results, traced.results, strict=True):
        if isinstance(operand, Lit) or operand not in made or homes.get(operand, -1) < 0:
            continue
        shape = shape_of(submeshes[homes[operand]])
        rank = flat.avals[operand].shape
        if isinstance(result.sharding, NamedSharding):
            layouts[operand, shape] = fit_spec(result.sharding.spec, rank, dict(shape))
        elif result.successor_of is not None:
            argument = flat.arguments[result.successor_of]
            if homes.get(argument) == homes[operand] and (argument, shape) in layouts:
                layouts[operand, shape] = layouts[argument, shape]


def _on_submeshes(
    layouts: Layouts,
    steps: tuple[ProgramStep, ...],
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
) -> dict[tuple[Var, int], PartitionSpec]:
    specs: dict[tuple[Var, int], PartitionSpec] = {}
    by_shape: dict[Any, list[int]] = {}
    for submesh in submeshes:
        by_shape.setdefault(shape_of(submesh), []).append(submesh.index)
    for (var, shape), spec in layouts.items():
        for index in by_shape.get(shape, ()):
            specs[var, index] = spec
    return specs


# --- schedules, arguments, results ----------------------------------------------------------------


def _loop_named(steps: tuple[ProgramStep, ...], index: int) -> LoopNode:
    for step in steps:
        if isinstance(step, LoopNode):
            if step.index == index:
                return step
            inner = [s for s in step.tasks if isinstance(s, LoopNode)]
            if inner:
                return _loop_named(tuple(inner), index)
    raise KeyError(index)


def _length(steps: tuple[ProgramStep, ...], index: int) -> int:
    return _loop_named(steps, index).length


def _schedule_of(steps: tuple[ProgramStep, ...], index: int, traced: TracedFunction) -> Any:
    marker = microbatch_marker(_loop_named(steps, index).marker)
    if marker is not None and marker.custom_schedule is not None:
        return marker.custom_schedule
    if marker is not None and marker.schedule is not None:
        return marker.schedule
    return traced.schedule


def _everywhere(traced: TracedFunction, submeshes: tuple[Submesh, ...]) -> Mesh:
    if traced.global_mesh is not None:
        return traced.global_mesh
    if len(submeshes) == 1:
        return submeshes[0].mesh
    devices = dict.fromkeys(d for submesh in submeshes for d in submesh.mesh.devices.flat)
    return Mesh(_array(list(devices)), ("all",))


def _argument_infos(
    traced: TracedFunction, flat: FlatProgram, batches: Mapping[int, Batch]
) -> list[ArgumentInfo]:
    return [
        ArgumentInfo(argument.name, argument.donated, batches.get(position))
        for position, argument in enumerate(traced.arguments)
    ]


def _result_places(
    results: tuple[Item, ...], program: Program, traced: TracedFunction
) -> list[tuple[Item, Place | None]]:
    return [
        (item, _result_place(item, result, program, traced))
        for item, result in zip(results, traced.results, strict=True)
    ]


def _result_place(
    item: Item, result: Result, program: Program, traced: TracedFunction
) -> Place | None:
    if not isinstance(item, Instance) or program.avals[item.var].ndim == 0:
        return EVERYWHERE, PartitionSpec()
    aval = program.avals[item.var]
    if result.successor_of is not None:
        argument = program.arguments[result.successor_of]
        home = program.home.get(argument)
        if home == EVERYWHERE:
            return EVERYWHERE, PartitionSpec()
        if home is not None and (argument, home) in program.specs:
            return home, program.specs[argument, home]
    home = program.home.get(item.var)
    if home is None or home == EVERYWHERE:
        return None
    if isinstance(result.sharding, NamedSharding):
        submesh = program.submeshes[home]
        if not _is_global(result.sharding.mesh, traced):
            submesh = next(
                s
                for s in program.submeshes
                if list(s.mesh.devices.flat) == list(result.sharding.mesh.devices.flat)
                and s.mesh.axis_names == result.sharding.mesh.axis_names
            )
        sizes = dict(submesh.mesh.shape)
        return submesh.index, fit_spec(result.sharding.spec, aval.shape, sizes)
    return None
