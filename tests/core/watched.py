"""Watches the arrays that the executor receives: what lives when, by weak references."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from multimesh._src.ir.plan import Copy, Plan, Run, Slot
from multimesh._src.ir.program import TaskNode
from multimesh._src.report.labels import find_units
from multimesh._src.runtime.buffers import reads, writes
from multimesh._src.schedule.simulate import Simulation
from multimesh.jax import MultiMesh, Task, TaskMesh, context, mjit
from tests.core.chain import Cut

Set: TypeAlias = tuple[int, int]
"""Stage and microbatch of a residual set."""


@dataclass(slots=True)
class Watched:
    """A compiled step of one microbatch loop, with what happens in a call.

    `residuals` has the slots of every set, by whether W reads them; sets of a stage whose forward
    and backward are one program have none.
    """

    plan: Plan
    simulation: Simulation
    donations: Sequence[Any]
    tasks: dict[int, tuple[TaskNode, ...]]  # of every step that is a run of the loop
    residuals: dict[tuple[Set, bool], set[Slot]]
    alive: dict[Slot, weakref.ref]
    peaks_until_b: Counter = field(default_factory=Counter)
    peaks_until_w: Counter = field(default_factory=Counter)
    in_flight: Counter = field(default_factory=Counter)  # the most, per edge
    _waiting: Counter = field(default_factory=Counter)
    _edge_of: dict[Slot, str] = field(default_factory=dict)
    pointers: dict[Slot, int] = field(default_factory=dict)

    def wrap(self, number: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a step, which notes what it makes and counts what lives then."""
        step = self.plan.steps[number]

        def watched(args: Sequence[Any]) -> Sequence[Any]:
            results = call(args)
            for slot, array in zip(self.targets[number], results, strict=True):
                self.alive[slot] = weakref.ref(array)
                if isinstance(array, jax.Array) and array.is_fully_addressable:
                    self.pointers[slot] = array.addressable_shards[0].data.unsafe_buffer_pointer()
            if isinstance(step, Copy):
                self._send(step)
            else:
                self._receive(step)
            self._count(number)
            return results

        return watched

    targets: list[tuple[Slot, ...]] = field(default_factory=list)

    def _send(self, step: Copy) -> None:
        for slot in step.targets:
            self._edge_of[slot] = step.edge
            self._waiting[step.edge] += 1
        self.in_flight[step.edge] = max(self.in_flight[step.edge], self._waiting[step.edge])

    def _receive(self, step: Run) -> None:
        for slot in step.inputs:
            if slot in self._edge_of:
                self._waiting[self._edge_of.pop(slot)] -= 1

    def _count(self, number: int) -> None:
        until_b: dict[int, set[Set]] = {}
        until_w: dict[int, set[Set]] = {}
        placement = self.simulation.graph.placement
        for task in self.tasks.get(number, ()):  # those that live only inside this run
            found = (task.stage, self.plan.steps[number].iteration)
            if task.kind == "F":
                until_b.setdefault(placement[task.stage], set()).add(found)
                until_w.setdefault(placement[task.stage], set()).add(found)
        for (found, for_w), slots in self.residuals.items():
            if found not in self.begun and found not in until_w.get(placement[found[0]], ()):
                continue
            if any(slot in self.alive and self.alive[slot]() is not None for slot in slots):
                (until_w if for_w else until_b).setdefault(placement[found[0]], set()).add(found)
                until_w.setdefault(placement[found[0]], set()).add(found)
        self.begun |= {s for sets in until_w.values() for s in sets}
        for counts, sets in ((self.peaks_until_b, until_b), (self.peaks_until_w, until_w)):
            for rank, live in sets.items():
                counts[rank] = max(counts[rank], len(live))

    begun: set[Set] = field(default_factory=set)


def watch(cut: Cut, step: Callable[..., Any], *args: Any, fusion: str = "auto") -> Watched:
    """Runs a step with one microbatch loop on the stages of `cut` and watches it."""
    with make_multi_mesh(cut), context(enable_task_fusion=fusion):
        compiled = mjit(step).lower(*args).compile()
    runner, lowered = compiled.backend.compiled, compiled.lowered
    plan = runner.buffered.plan
    units = find_units(lowered.partitioned.program.tasks, plan)
    tasks = {
        number: units.units[units.unit_of[number]].tasks
        for number, step in enumerate(plan.steps)
        if isinstance(step, Run) and step.iteration >= 0
    }
    (simulation,) = lowered.partitioned.schedules.values()
    watched = Watched(plan, simulation, runner.buffered.donations, tasks, {}, {})
    watched.residuals = _residuals(plan, tasks)
    watched.targets = [targets for _, _, targets, _, _ in runner._steps]
    runner._steps = tuple(
        (watched.wrap(number, call), fetch, targets, frees, name)
        for number, (call, fetch, targets, frees, name) in enumerate(runner._steps)
    )
    compiled(*args)
    return watched


def _residuals(plan: Plan, tasks: dict[int, tuple[TaskNode, ...]]) -> dict:
    """What the backward of a stage reads, in one microbatch, of what its forward made or read."""
    readers: dict[Slot, set[tuple[str, int, int]]] = {}
    forward: dict[Set, set[Slot]] = {}
    sent = {slot for step in plan.steps if isinstance(step, Copy) for slot in step.targets}
    for number, parts in tasks.items():
        step = plan.steps[number]
        for task in parts:
            for slot in reads(step):
                readers.setdefault(slot, set()).add((task.kind, task.stage, step.iteration))
        if len(parts) == 1 and parts[0].kind == "F":
            own = {*writes(step), *(set(reads(step)) & sent)}
            forward[parts[0].stage, step.iteration] = own
    found: dict[tuple[Set, bool], set[Slot]] = {}
    for (stage, iteration), slots in forward.items():
        for slot in slots:
            kinds = {k for k, s, i in readers.get(slot, ()) if (s, i) == (stage, iteration)} - {"F"}
            others = {i for _, s, i in readers.get(slot, ()) if s == stage} - {iteration}
            if kinds and not others:
                found.setdefault(((stage, iteration), bool(kinds & {"W"})), set()).add(slot)
    return found


def make_multi_mesh(cut: Cut) -> MultiMesh:
    """One device a rank; forward and backward tasks have names of their own."""
    from tests.core import chain

    plain = chain.make_multi_mesh(cut)
    multi_mesh = MultiMesh(global_mesh=plain.global_mesh)

    def task(text: str, backprop: bool) -> Task:
        stage = int(text)
        rank = stage % cut.num_ranks
        if cut.placement == "v" and stage >= cut.num_ranks:
            rank = 2 * cut.num_ranks - 1 - stage
        name = f"layer{stage}_{'bwd' if backprop else 'fwd'}"
        return Task(name=name, mesh_slice={"stage": rank}, stage=stage)

    multi_mesh.register_task(r"layer(\d+)", callback=task)
    return multi_mesh
