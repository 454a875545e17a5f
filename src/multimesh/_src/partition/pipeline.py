"""The passes from a traced function to a plan, in order, on one page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from multimesh._src.collector import paused_collector
from multimesh._src.frontend.matching import Match
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.flat import FlatProgram, Var
from multimesh._src.ir.plan import Plan
from multimesh._src.ir.program import LoopNode, Program, ProgramStep, all_loops
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition import text
from multimesh._src.partition.assign.cloned import Cloned, find_cloned
from multimesh._src.partition.assign.glue import settle_glue
from multimesh._src.partition.assign.late import move_to_readers
from multimesh._src.partition.assign.places import assign_places
from multimesh._src.partition.assign.prepared import clone_preparations
from multimesh._src.partition.assign.saved import use_saved
from multimesh._src.partition.assign.shared import share_keys
from multimesh._src.partition.assign.sums import regroup_sums
from multimesh._src.partition.backward import Numbers
from multimesh._src.partition.batches import store_microbatch_major
from multimesh._src.partition.branches import join_branches
from multimesh._src.partition.carries import CarryKind, classify_all
from multimesh._src.partition.choices import read_own_options
from multimesh._src.partition.dedupe import deduplicate
from multimesh._src.partition.effects import check_effect_order, check_effects
from multimesh._src.partition.emit import emit
from multimesh._src.partition.events import Runs, walk
from multimesh._src.partition.fuse import fuse_runs
from multimesh._src.partition.given import (
    default_submesh,
    everywhere,
    find_memory,
    given_layouts,
    placed_arguments,
    succeeded_arguments,
    wanted_submeshes,
)
from multimesh._src.partition.homes import find_homes
from multimesh._src.partition.inline import inline, keep_weak_types
from multimesh._src.partition.layouts import propagate_layouts
from multimesh._src.partition.loops import simplify_loops
from multimesh._src.partition.order import (
    runs_halves,
    schedule_loop,
    scheduled_runs,
    wanted_schedule,
)
from multimesh._src.partition.pipelines import find_pipelines
from multimesh._src.partition.prune import prune, trim
from multimesh._src.partition.residuals import residual_memory
from multimesh._src.partition.results import argument_infos, result_places
from multimesh._src.partition.rotate import end_rotations
from multimesh._src.partition.seeds import Seeds, backward_names, find_seeds
from multimesh._src.partition.split.regions import analyze_flow
from multimesh._src.partition.split.tasks import Splitter
from multimesh._src.partition.stacks.facts import StackFacts
from multimesh._src.partition.stacks.stacks import Stacks, split_stacks
from multimesh._src.partition.stages import Pipeline
from multimesh._src.partition.ties import tie_blocks, tie_layouts
from multimesh._src.partition.transposed import merge_transposes
from multimesh._src.schedule.simulate import Simulation

Observer: TypeAlias = Callable[[str, str], None]
"""Gets the name of a pass and the text of what it made."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What partitioning gives: the program for reports, and the plan to compile.

    `traced` is the function with an argument and a result for each block of a stack, `stacks` says
    who keeps which rows of them.
    `schedules` has the simulation of each microbatch loop, by the index of its node; `whole` the
    names of its backward tasks that could not be split although the schedule runs halves (S3).
    `origins` says where all of it comes from.
    """

    traced: TracedFunction
    program: Program
    plan: Plan
    schedules: Mapping[int, Simulation]
    whole: Mapping[int, tuple[str, ...]]
    stacks: tuple[StackFacts, ...]
    origins: "Origins"


@dataclass(frozen=True, slots=True)
class Origins:
    """What of the flat program became what, by the serials of its equations, for reports.

    Attributes:
        flat: The flat program, after every equation got its place.
        place: The submesh of each equation.
        match: The match of each seed.
        task_of: The index of the task that an equation is in.
        clones: The indices of the tasks that clone an equation.
    """

    flat: FlatProgram
    place: Mapping[int, int]
    match: Mapping[int, Match]
    task_of: Mapping[int, int]
    clones: Mapping[int, Sequence[int]]


@paused_collector()
def partition(traced: TracedFunction, observe: Observer | None = None) -> Partitioned:
    """Cuts a traced function into tasks, places and orders them.

    Args:
        traced: The function and what is known of its arguments and results.
        observe: Called after every pass; without it nothing is printed.

    Raises:
        MultiMeshError: A subclass that says what in the user's program cannot be done.
    """
    driver = _Driver(traced, Seeds(traced.matcher), observe)
    stacks = _flatten(driver)
    driver = replace(driver, traced=stacks.traced)
    placed = _place(driver, stacks)
    cut = _cut(driver, placed)
    program = _lay_out(driver, placed, cut, stacks)
    return _order(driver, cut, program, stacks)


@dataclass(frozen=True, slots=True)
class _Driver:
    """What all passes share: the function, the submeshes found so far, and who watches."""

    traced: TracedFunction
    seeds: Seeds
    observe: Observer | None

    def show(self, name: str, printer: Callable[..., str], *made: Any) -> None:
        """Shows what a pass made."""
        if self.observe is not None:
            self.observe(name, printer(*made))

    def schedule_of(self, loop: LoopNode) -> Any:
        """What the user asks for a loop's schedule."""
        return wanted_schedule(loop.marker, self.traced.schedule)


def _flatten(driver: _Driver) -> Stacks:
    """From a jaxpr to one list of equations, on arguments as they are stored."""
    # Everything later works on numbered variables and whole scopes, so jits go first.
    flat = inline(driver.traced, driver.seeds)
    driver.show("inline", text.print_flat, flat)
    # While the batch is still cut by one visible reshape, take it as the form to store.
    flat, traced, batches = store_microbatch_major(flat, driver.traced)
    # What nobody reads must not get a vote on placement.
    flat = prune(trim(flat))
    # Counters and invariants leave the loops before placement, or they would tie stages together.
    hoist = driver.traced.settings.hoist_loop_invariants
    flat = simplify_loops(flat, driver.seeds, hoist=hoist)
    # Only loops without counters show that one is the transpose of another.
    flat = merge_transposes(flat)
    # In one loop a backward branch reads what its forward one made, whatever autodiff joined.
    flat = prune(read_own_options(flat))
    flat = keep_weak_types(flat, traced, driver.seeds)
    driver.show("simplify_loops", text.print_flat, flat)
    # Stacks are split before anything is placed: a stack has no place, its blocks have.
    stacks = split_stacks(flat, traced, driver.seeds, batches)
    driver.show("split_stacks", text.print_flat, stacks.program)
    return stacks


@dataclass(frozen=True, slots=True)
class _Placed:
    """A flat program whose equations have submeshes.

    `place` has the submesh of each equation and `match` the match of each seed, by serial;
    `arguments` the submeshes on which callers placed arguments; `carries` says what loops do with
    what they carry.
    """

    flat: FlatProgram
    place: Mapping[int, int]
    match: Mapping[int, Match]
    cloned: Cloned
    arguments: Mapping[Var, int]
    carries: Mapping[Var, CarryKind]


def _place(driver: _Driver, stacks: Stacks) -> _Placed:
    """Finds the submesh of every equation."""
    traced, seeds, settings = driver.traced, driver.seeds, driver.traced.settings
    flat = stacks.program
    match, seeded = find_seeds(flat, seeds)
    seeded |= stacks.pinned
    default = default_submesh(traced, seeds)
    arguments = {**placed_arguments(flat, traced, seeds), **stacks.placed}
    limit = settings.recompute_from_arguments_if_cost_less_than
    limit = limit if settings.enable_recomputation else 0
    cloned = find_cloned(
        flat,
        fixed=frozenset(arguments),
        max_cost=limit,
        max_elements=settings.replicate_parameters_smaller_than_num_elements,
    )
    cloned = replace(cloned, light=cloned.light | stacks.light)
    wanted = wanted_submeshes(traced, seeds)
    succeeded = succeeded_arguments(flat, traced)
    place = assign_places(flat, cloned, seeded, arguments, wanted, succeeded, default)
    # One by one, equations cannot see what a whole group of them would save elsewhere.
    flow = analyze_flow(flat, cloned)
    place = settle_glue(flat, flow, seeded, place, arguments, wanted)
    # Where what is made of a microbatch would cross, one stage would wait for another in vain.
    cloned = clone_preparations(flat, flow, seeded, place, limit)
    # Only now is it known which remat regions span submeshes and what crosses inside them.
    flat = prune(use_saved(flat, place, match))
    # Places come before sums are regrouped: only then is it known which sums cross submeshes.
    flat, place = regroup_sums(flat, place, seeded, cloned)
    # Only when all readers and sums are settled is it known what had better grow behind a copy.
    place = move_to_readers(flat, place, seeded, cloned, seeds.submeshes)
    place = end_rotations(flat, place, seeds.submeshes)
    driver.show("assign", text.print_flat, flat, place)
    carries = classify_all(flat.steps, place)
    # Each submesh has its conditional once places are final; later passes see no guards.
    flat = join_branches(flat, place, match, cloned, seeds)
    # What is cloned into equal layers must not make their programs unlike.
    small = settings.replicate_parameters_smaller_than_num_elements
    flat, place, cloned = share_keys(flat, place, match, cloned, seeds.submeshes, small)
    return _Placed(flat, place, match, cloned, arguments, carries)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tasks and loops, and the pipelines of the microbatch loops by the index of their nodes."""

    flat: FlatProgram
    submeshes: tuple[Submesh, ...]
    steps: tuple[ProgramStep, ...]
    pipelines: Mapping[int, Pipeline]
    origins: Origins


def _cut(driver: _Driver, placed: _Placed) -> _Cut:
    """Cuts the equations into tasks, and finds the stages that they form."""
    flat, place, match = placed.flat, placed.place, placed.match
    submeshes = tuple(driver.seeds.submeshes)
    flow = analyze_flow(flat, placed.cloned)
    names = backward_names(driver.seeds, flat, match)
    splitter = Splitter(flat, flow, submeshes, place, match, names)
    steps = splitter.split()
    # Halves of backwards are made of whole ones, so stages come first.
    avals = dict(flat.avals)
    numbers = Numbers(avals, splitter.num_nodes)
    steps, pipelines = find_pipelines(
        steps,
        placed.carries,
        splitter.stages,
        submeshes,
        lambda loop, found: runs_halves(found, loop.length, driver.schedule_of(loop)),
        numbers,
    )
    # Once it is known where effects run: several submeshes cannot keep them in order.
    check_effects(steps, submeshes)
    # Equal bodies are found when constraints are in axes of submeshes and bodies are final.
    steps = deduplicate(steps)
    pipelines = {
        loop.index: replace(pipelines[loop.index], tasks=loop.tasks)
        for loop in all_loops(steps)
        if loop.index in pipelines
    }
    origins = Origins(flat, place, match, splitter.task_of, splitter.clones)
    return _Cut(replace(flat, avals=avals), submeshes, steps, pipelines, origins)


def _lay_out(driver: _Driver, placed: _Placed, cut: _Cut, stacks: Stacks) -> Program:
    """Finds where every value lives and how it is laid out there."""
    traced, flat, steps, submeshes = driver.traced, cut.flat, cut.steps, cut.submeshes
    small = traced.settings.replicate_parameters_smaller_than_num_elements
    outside = (*flat.arguments, *flat.constants)
    blocks = {
        var: stacks.placed[var]
        for var, block in zip(flat.arguments, stacks.arguments, strict=True)
        if block is not None
    }
    homes = find_homes(steps, outside, flat.avals, submeshes, placed.arguments, blocks, small)
    given = given_layouts(flat, traced, submeshes, homes, stacks.batches)
    layouts = propagate_layouts(steps, submeshes, flat.avals, given)
    tie_blocks(layouts, flat, stacks, submeshes, homes)
    program = Program(
        name=flat.name,
        submeshes=submeshes,
        avals=flat.avals,
        arguments=flat.arguments,
        constants=flat.constants,
        steps=steps,
        results=flat.results,
        home=homes,
        # Layouts of carries and successors are tied when all others are known.
        specs=tie_layouts(layouts, steps, flat, traced, submeshes, homes),
        memory=find_memory(flat, traced, stacks.batches),
    )
    driver.show("split", text.print_program, program)
    return program


def _order(driver: _Driver, cut: _Cut, program: Program, stacks: Stacks) -> Partitioned:
    """Orders the loops by their schedules, and writes the plan."""
    traced, pipelines = driver.traced, cut.pipelines
    schedules = {
        loop.index: schedule_loop(
            pipelines[loop.index],
            loop.length,
            driver.schedule_of(loop),
            residual_memory(pipelines[loop.index], loop, cut.flat.avals),
        )
        for loop in all_loops(cut.steps)
        if loop.index in pipelines
    }

    def runs_of(loop: LoopNode) -> Runs | None:
        if loop.index not in pipelines:
            return None
        simulation = schedules[loop.index]
        runs = scheduled_runs(pipelines[loop.index], simulation)
        check_effect_order(loop, runs, simulation.schedule.name, cut.submeshes)
        return runs

    events, results = walk(cut.steps, program.results, cut.submeshes, runs_of)
    # Copies stand where the order needs them, so the plan is written last.
    wanted_at = result_places(results, program, traced)
    infos = argument_infos(traced, stacks.batches, stacks.arguments)
    whole_mesh = everywhere(traced, cut.submeshes)
    plan = emit(program, events, wanted_at, infos, stacks.results, whole_mesh)
    driver.show("emit", text.print_plan, plan)
    # Fusing looks at whole steps, so it comes when the order and the copies are settled.
    if traced.settings.enable_task_fusion != "never":
        plan = fuse_runs(plan)
        driver.show("fuse", text.print_plan, plan)
    whole = {index: pipeline.whole for index, pipeline in pipelines.items() if pipeline.whole}
    return Partitioned(traced, program, plan, schedules, whole, stacks.facts, cut.origins)
