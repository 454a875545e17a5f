"""Watches the arrays that the executor receives: what lives when, by weak references."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from multimesh._src.ir.plan import Copy, Plan, Run, Slot
from multimesh._src.ir.program import TaskNode
from multimesh._src.report.labels import find_units
from multimesh._src.runtime.buffers import reads, writes
from multimesh._src.schedule.simulate import Simulation
from multimesh.jax import MultiMesh, Task, context, mjit
from tests.core.chain import Cut, make_multi_mesh

SetOf: TypeAlias = tuple[int, int]
"""Stage and microbatch of a residual set."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The slots of a residual set, by whether W still reads them.

    A set that lives only inside one program has none.
    """

    for_b: frozenset[Slot]
    for_w: frozenset[Slot]

    @property
    def all(self) -> frozenset[Slot]:
        return self.for_b | self.for_w


@dataclass(slots=True)
class Watched:
    """One call of a compiled step with one microbatch loop, and what was seen in it.

    Attributes:
        plan: Its plan.
        simulation: Its schedule.
        tasks: The tasks that each step runs, of those steps that belong to the loop.
        residuals: Per set its slots.
        until_b: Per rank the most sets at once, of arrays that only F and B read.
        until_w: Per rank the most sets at once, of all arrays.
        in_flight: Per edge the most values that were sent and not yet read.
        pointers: Where each slot lay.
    """

    plan: Plan
    simulation: Simulation
    tasks: dict[int, tuple[TaskNode, ...]]
    residuals: dict[SetOf, Residuals]
    until_b: Counter = field(default_factory=Counter)
    until_w: Counter = field(default_factory=Counter)
    in_flight: Counter = field(default_factory=Counter)
    pointers: dict[Slot, int] = field(default_factory=dict)
    _arrays: dict[Slot, weakref.ref] = field(default_factory=dict)
    _begun: list[SetOf] = field(default_factory=list)
    _sent: dict[Slot, str] = field(default_factory=dict)

    def wrap(self, number: int, call: Callable[..., Any], targets: tuple[Slot, ...]) -> Any:
        """The call of a step; notes what it makes and counts what lives then."""
        step = self.plan.steps[number]

        def watched(args: Sequence[Any]) -> Sequence[Any]:
            results = call(args)
            for slot, array in zip(targets, results, strict=True):
                self._arrays[slot] = weakref.ref(array)
                self.pointers[slot] = _pointer(array)
            self._note(number, step)
            return results

        return watched

    def _note(self, number: int, step: Run | Copy) -> None:
        if isinstance(step, Copy):
            self._sent.update(dict.fromkeys(step.targets, step.edge))
            waiting = Counter(self._sent.values())
            self.in_flight[step.edge] = max(self.in_flight[step.edge], waiting[step.edge])
            return
        for slot in step.inputs:
            self._sent.pop(slot, None)
        now = {(t.stage, step.iteration) for t in self.tasks.get(number, ()) if t.kind == "F"}
        self._begun += now
        self._most(self.until_b, now, lambda found: self.residuals[found].for_b)
        self._most(self.until_w, now, lambda found: self.residuals[found].all)

    def _most(
        self, peaks: Counter, now: set[SetOf], slots_of: Callable[[SetOf], Iterable[Slot]]
    ) -> None:
        """Counts the sets that begin with this run, and those of which an array still lives."""
        alive = {f for f in self._begun if any(self._arrays[s]() is not None for s in slots_of(f))}
        ranks = Counter(self.simulation.graph.placement[stage] for stage, _ in alive | now)
        for rank, count in ranks.items():
            peaks[rank] = max(peaks[rank], count)


def watch(cut: Cut, step: Callable[..., Any], *args: Any, fusion: str = "auto") -> Watched:
    """Runs a step with one microbatch loop on the stages of `cut` and watches it."""
    with named_multi_mesh(cut), context(enable_task_fusion=fusion):
        lowered = mjit(step).lower(*args)
        compiled = lowered.compile()
    runner, partitioned = compiled.backend.compiled, lowered._partitioned
    plan = runner.buffered.plan
    tasks = tasks_of_steps(plan, partitioned.program.tasks)
    (simulation,) = partitioned.schedules.values()
    watched = Watched(plan, simulation, tasks, find_residuals(plan, tasks))
    runner._steps = tuple(
        (watched.wrap(number, call, targets), fetch, targets, frees, name)
        for number, (call, fetch, targets, frees, name) in enumerate(runner._steps)
    )
    compiled(*args)
    return watched


def tasks_of_steps(plan: Plan, tasks: Sequence[TaskNode]) -> dict[int, tuple[TaskNode, ...]]:
    """The tasks that each step of a loop runs, by the number of the step."""
    units = find_units(tasks, plan)
    return {
        number: units.units[units.unit_of[number]].tasks
        for number, step in enumerate(plan.steps)
        if isinstance(step, Run) and step.iteration >= 0
    }


def find_residuals(plan: Plan, tasks: dict[int, tuple[TaskNode, ...]]) -> dict[SetOf, Residuals]:
    """What a stage's backward reads of what its forward, in the loop, made or got."""
    copied = _copied_in_loop(plan, tasks)
    forward: dict[SetOf, set[Slot]] = {}
    backward: dict[tuple[Slot, int], set[str]] = {}  # by whom a slot is read, per stage
    for number, parts in tasks.items():
        step = plan.steps[number]
        begun = {task.stage for task in parts if task.kind == "F"}
        for stage in begun:
            forward[stage, step.iteration] = {*writes(step), *(set(reads(step)) & copied)}
        for stage in {task.stage for task in parts} - begun:
            kinds = {task.kind for task in parts if task.stage == stage}
            for slot in reads(step):
                backward.setdefault((slot, stage), set()).add("W" if kinds == {"W"} else "B")
    found = {}
    for key, slots in forward.items():
        readers = {slot: backward.get((slot, key[0]), set()) for slot in slots}
        for_w = frozenset(slot for slot, kinds in readers.items() if "W" in kinds)
        kept = frozenset(slot for slot, kinds in readers.items() if kinds)
        found[key] = Residuals(kept - for_w, for_w)
    return found


def _copied_in_loop(plan: Plan, tasks: dict[int, tuple[TaskNode, ...]]) -> set[Slot]:
    made = {slot for number in tasks for slot in writes(plan.steps[number])}
    pairs = (
        pair
        for step in plan.steps
        if isinstance(step, Copy)
        for pair in zip(step.sources, step.targets, strict=True)
    )
    return {target for source, target in pairs if source in made}


def named_multi_mesh(cut: Cut) -> MultiMesh:
    """The stages of `cut`, with other names for forward and backward tasks."""
    multi_mesh = MultiMesh(global_mesh=make_multi_mesh(cut).global_mesh)

    def task(text: str, backprop: bool) -> Task:
        stage = int(text)
        rank = stage % cut.num_ranks
        if cut.placement == "v" and stage >= cut.num_ranks:
            rank = 2 * cut.num_ranks - 1 - stage
        name = f"layer{stage}_{'bwd' if backprop else 'fwd'}"
        return Task(name=name, mesh_slice={"stage": rank}, stage=stage)

    multi_mesh.register_task(r"layer(\d+)", callback=task)
    return multi_mesh


def _pointer(array: Any) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()
