"""The passes from a traced function to a plan, in order, on one page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from multimesh._src.collector import paused_collector
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.plan import Plan
from multimesh._src.ir.program import LoopNode, Program, all_loops
from multimesh._src.partition import text
from multimesh._src.partition.assign.cloned import find_cloned
from multimesh._src.partition.assign.places import assign_places
from multimesh._src.partition.assign.saved import use_saved
from multimesh._src.partition.assign.sums import regroup_sums
from multimesh._src.partition.backward import Numbers
from multimesh._src.partition.batches import store_microbatch_major
from multimesh._src.partition.dedupe import deduplicate
from multimesh._src.partition.emit import emit
from multimesh._src.partition.events import Runs, walk
from multimesh._src.partition.fuse import fuse_runs
from multimesh._src.partition.given import (
    default_submesh,
    everywhere,
    given_layouts,
    placed_arguments,
    wanted_submeshes,
)
from multimesh._src.partition.homes import find_homes
from multimesh._src.partition.inline import inline
from multimesh._src.partition.layouts import propagate_layouts
from multimesh._src.partition.loops import simplify_loops
from multimesh._src.partition.order import (
    runs_halves,
    schedule_loop,
    scheduled_runs,
    wanted_schedule,
)
from multimesh._src.partition.pipelines import find_pipelines
from multimesh._src.partition.prune import prune
from multimesh._src.partition.residuals import residual_memory
from multimesh._src.partition.results import argument_infos, result_places
from multimesh._src.partition.seeds import Seeds, backward_names, find_seeds
from multimesh._src.partition.split.regions import analyze_flow
from multimesh._src.partition.split.tasks import Splitter
from multimesh._src.partition.ties import tie_layouts
from multimesh._src.partition.transposed import merge_transposes
from multimesh._src.schedule.simulate import Simulation

Observer: TypeAlias = Callable[[str, str], None]
"""Gets the name of a pass and the text of what it made."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What partitioning gives: the program for reports, and the plan to compile.

    `schedules` has the simulation of each microbatch loop, by the index of its node; `whole` the
    names of its backward tasks that could not be split although the schedule runs halves (S3).
    """

    program: Program
    plan: Plan
    schedules: Mapping[int, Simulation]
    whole: Mapping[int, tuple[str, ...]]


@paused_collector()
def partition(traced: TracedFunction, observe: Observer | None = None) -> Partitioned:
    """Cuts a traced function into tasks, places and orders them.

    Args:
        traced: The function and what is known of its arguments and results.
        observe: Called after every pass; without it nothing is printed.

    Raises:
        MultiMeshError: A subclass that says what in the user's program cannot be done.
    """
    seeds = Seeds(traced.matcher)
    settings = traced.settings

    def show(name: str, printer: Callable[..., str], *made: Any) -> None:
        if observe is not None:
            observe(name, printer(*made))

    # Everything later works on numbered variables and whole scopes, so jits go first.
    flat = inline(traced, seeds)
    show("inline", text.print_flat, flat)
    # While the batch is still cut by one visible reshape, take it as the form to store.
    flat, batches = store_microbatch_major(flat)
    # What nobody reads must not get a vote on placement.
    flat = prune(flat)
    # Counters and invariants leave the loops before placement, or they would tie stages together.
    flat = simplify_loops(flat, seeds, hoist=settings.hoist_loop_invariants)
    # Only loops without counters show that one is the transpose of another.
    flat = prune(merge_transposes(flat))
    show("simplify_loops", text.print_flat, flat)

    # Places come before sums are regrouped: only then is it known which sums cross submeshes.
    match, seeded = find_seeds(flat, seeds)
    default = default_submesh(traced, seeds)
    placed = placed_arguments(flat, traced, seeds)
    cloned = find_cloned(
        flat,
        fixed=frozenset(placed),
        max_cost=settings.recompute_from_arguments_if_cost_less_than,
        max_elements=settings.replicate_parameters_smaller_than_num_elements,
    )
    wanted = wanted_submeshes(traced, seeds)
    place = assign_places(flat, cloned, seeded, placed, wanted, default)
    # Only now is it known which remat regions span submeshes and what crosses inside them.
    flat = prune(use_saved(flat, place))
    flat, place = regroup_sums(flat, place, seeded, cloned)
    show("assign", text.print_flat, flat, place)

    # Tasks, then the stages and loops that they form.
    flow = analyze_flow(flat, cloned)
    submeshes = tuple(seeds.submeshes)
    splitter = Splitter(flat, flow, submeshes, place, match, backward_names(seeds, flat, match))
    steps = splitter.split()
    avals = dict(flat.avals)
    steps, pipelines = find_pipelines(
        steps,
        flat,
        place,
        splitter.stages,
        submeshes,
        lambda loop, found: runs_halves(
            found, loop.length, wanted_schedule(loop.marker, traced.schedule)
        ),
        Numbers(avals, splitter.num_nodes),
    )
    flat = replace(flat, avals=avals)

    # Layouts need whole bodies; equal bodies are found after constraints are in axes of submeshes.
    steps = deduplicate(steps)
    pipelines = {
        loop.index: replace(pipelines[loop.index], tasks=loop.tasks)
        for loop in all_loops(steps)
        if loop.index in pipelines
    }
    homes = find_homes(
        steps,
        (*flat.arguments, *flat.constants),
        flat.avals,
        submeshes,
        placed,
        settings.replicate_parameters_smaller_than_num_elements,
    )
    given = given_layouts(flat, traced, submeshes, homes, batches)
    layouts = propagate_layouts(steps, submeshes, flat.avals, given)
    program = Program(
        name=flat.name,
        submeshes=submeshes,
        avals=flat.avals,
        arguments=flat.arguments,
        constants=flat.constants,
        steps=steps,
        results=flat.results,
        home=homes,
        specs=tie_layouts(layouts, steps, flat, traced, submeshes, homes),
    )
    show("split", text.print_program, program)

    # Last, time: schedules order the loops, and copies stand where the order needs them.
    schedules = {
        loop.index: schedule_loop(
            pipelines[loop.index],
            loop.length,
            wanted_schedule(loop.marker, traced.schedule),
            residual_memory(pipelines[loop.index], loop, flat.avals),
        )
        for loop in all_loops(steps)
        if loop.index in pipelines
    }

    def runs_of(loop: LoopNode) -> Runs | None:
        if loop.index not in pipelines:
            return None
        return scheduled_runs(pipelines[loop.index], schedules[loop.index])

    events, results = walk(steps, flat.results, submeshes, runs_of)
    wanted_at = result_places(results, program, traced)
    infos = argument_infos(traced, batches)
    plan = emit(program, events, wanted_at, infos, everywhere(traced, submeshes))
    show("emit", text.print_plan, plan)
    # Fusing looks at whole steps, so it comes when the order and the copies are settled.
    if settings.enable_task_fusion != "never":
        plan = fuse_runs(plan)
        show("fuse", text.print_plan, plan)
    whole = {index: pipeline.whole for index, pipeline in pipelines.items() if pipeline.whole}
    return Partitioned(program, plan, schedules, whole)
