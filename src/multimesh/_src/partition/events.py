"""Runs the program on paper: which task runs when, on which values.

    loop i < 2, acc = zeros: acc' = bwd(x, acc, i)   ->   bwd(x, zeros, 0) -> acc'0
    return acc'                                           bwd(x, acc'0, 1) -> acc'1  ; acc'1

An *instance* is one value of a variable: variables made inside loops have one per iteration. What
a loop carries is resolved to the instance that it stands for at that moment: accumulators chain in
the order in which their tasks run, all else goes from iteration to iteration.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from multimesh._src.ir.flat import Carry, Lit, Operand, Var
from multimesh._src.ir.program import LoopNode, ProgramStep, TaskNode, all_loops
from multimesh._src.ir.submesh import Submesh


@dataclass(frozen=True, slots=True)
class Instance:
    """A variable in given iterations of the loops that make it."""

    var: Var
    iterations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoopIndex:
    """The value of a loop index."""

    value: int


@dataclass(frozen=True, slots=True)
class Start(Lit):
    """The literal that a loop starts from: a value of its own for each carry.

    Were two accumulators one value in the first iteration, it would need a program of its own.
    """

    carry: Var


Item: TypeAlias = Instance | LoopIndex | Lit


@dataclass(frozen=True, slots=True)
class Event:
    """One run of a task on a submesh. `iteration` is that of the innermost loop, -1 outside."""

    task: TaskNode
    submesh: int
    inputs: tuple[Item, ...]
    outputs: tuple[Instance, ...]
    iteration: int
    group: int = -1  # see `ir.plan.Run`


@dataclass(frozen=True, slots=True)
class HostLoopEvent:
    """One run of a `while`: `events` are those of an iteration, on the values `insides`.

    Inits, insides, nexts and results are in the order of the loop's carries.
    """

    loop: LoopNode
    inits: tuple[Item, ...]
    insides: tuple[Instance, ...]
    nexts: tuple[Item, ...]
    results: tuple[Instance, ...]
    events: tuple["AnyEvent", ...]


AnyEvent: TypeAlias = Event | HostLoopEvent


class ScheduledRun(NamedTuple):
    """A task in one iteration of a scheduled loop."""

    task: TaskNode
    iteration: int
    group: int = -1


Runs: TypeAlias = tuple[ScheduledRun, ...]


@dataclass(slots=True)
class _Walk:
    """The state of the walk: what loop variables stand for, and how deep variables are made."""

    runs_of: Mapping[int, Runs]
    submeshes: Sequence[Submesh]
    events: list[AnyEvent] = field(default_factory=list)
    current: dict[Var, Item] = field(default_factory=dict)
    depth: dict[Var, int] = field(default_factory=dict)

    def look(self, operand: Operand, iterations: tuple[int, ...]) -> Item:
        if isinstance(operand, Lit):
            return operand
        if operand in self.current:
            return self.current[operand]
        return Instance(operand, iterations[: self.depth.get(operand, 0)])

    def run(self, task: TaskNode, iterations: tuple[int, ...], group: int = -1) -> None:
        inputs = tuple(self.look(var, iterations) for var in task.inputs)
        self.depth.update(dict.fromkeys(task.outputs, len(iterations)))
        outputs = tuple(Instance(var, iterations) for var in task.outputs)
        iteration = iterations[-1] if iterations else -1
        submesh = self.submeshes[task.submesh].at(iteration)
        self.events.append(Event(task, submesh, inputs, outputs, iteration, group))

    def steps(self, steps: tuple[ProgramStep, ...], iterations: tuple[int, ...]) -> None:
        for step in steps:
            if isinstance(step, TaskNode):
                self.run(step, iterations)
            else:
                self.loop(step, iterations)

    def host_loop(self, loop: LoopNode, iterations: tuple[int, ...]) -> None:
        inits = tuple(self.look(carry.init, iterations) for carry in loop.carries)
        self.depth.update((carry.inside, len(iterations)) for carry in loop.carries)
        insides = tuple(Instance(carry.inside, iterations) for carry in loop.carries)
        outer, self.events = self.events, []
        self.steps(loop.tasks, iterations)
        events, self.events = tuple(self.events), outer
        nexts = tuple(self.look(carry.next, iterations) for carry in loop.carries)
        self.depth.update((carry.result, len(iterations)) for carry in loop.carries)
        results = tuple(Instance(carry.result, iterations) for carry in loop.carries)
        self.events.append(HostLoopEvent(loop, inits, insides, nexts, results, events))

    def loop(self, loop: LoopNode, iterations: tuple[int, ...]) -> None:
        if loop.condition is not None:
            self.host_loop(loop, iterations)
            return
        for carry in loop.carries:
            init = self.look(carry.init, iterations)
            own = Start(init.value, init.aval, carry.inside) if isinstance(init, Lit) else init
            self.current[carry.inside] = own
        runs = self.runs_of.get(loop.index)
        ends = (
            self._in_order(loop, iterations)
            if runs is None
            else self._scheduled(loop, runs, iterations)
        )
        for carry in loop.carries:
            self.current.pop(carry.inside)
            self.current[carry.result] = ends[carry.inside]

    def _in_order(self, loop: LoopNode, iterations: tuple[int, ...]) -> dict[Var, Item]:
        for iteration in range(loop.length):
            self.current[loop.loop_index] = LoopIndex(iteration)
            inner = (*iterations, iteration)
            self.steps(loop.tasks, inner)
            nexts = {carry.inside: self.look(carry.next, inner) for carry in loop.carries}
            self.current.update(nexts)
        return {carry.inside: self.current[carry.inside] for carry in loop.carries}

    def _scheduled(
        self, loop: LoopNode, runs: Runs, iterations: tuple[int, ...]
    ) -> dict[Var, Item]:
        inits = {carry.inside: self.current[carry.inside] for carry in loop.carries}
        chained = _chained(loop)
        by_inside = {carry.inside: carry for carry in loop.carries}
        whole_of = {part: whole for whole, parts in loop.spread.items() for part in parts}
        spread = {c.next: whole_of[c.inside] for c in loop.carries if c.inside in whole_of}
        others = tuple(
            carry
            for carry in loop.carries
            if carry.next not in chained and carry.next not in spread
        )

        def value(carry: Carry, iteration: int) -> Item:
            """What is carried into an iteration, whenever that runs."""
            while iteration > 0:
                iteration -= 1
                if carry.next == loop.loop_index:
                    return LoopIndex(iteration)
                if isinstance(carry.next, Lit) or carry.next not in by_inside:
                    return self.look(carry.next, (*iterations, iteration))
                carry = by_inside[carry.next]
            return inits[carry.inside]

        for task, iteration, group in runs:
            self.current[loop.loop_index] = LoopIndex(iteration)
            for carry in others:
                if carry.inside in task.inputs:
                    self.current[carry.inside] = value(carry, iteration)
            for inside, by_iteration in loop.spread.items():
                self.current[inside] = self.current[by_iteration[iteration]]
            inner = (*iterations, iteration)
            self.run(task, inner, group)
            for var in task.outputs:
                if var in spread:
                    part = loop.spread[spread[var]][iteration]
                    self.current[part] = Instance(var, inner)
            made = (var for var in task.outputs if var in chained)
            self.current.update({chained[var]: Instance(var, inner) for var in made})
        ends = {carry.inside: value(carry, loop.length) for carry in others}
        return {carry.inside: self.current[carry.inside] for carry in loop.carries} | ends


def _chained(loop: LoopNode) -> dict[Var, Var]:
    """Carries, from next value to value inside, that may be passed on in any order of iterations.

    Only the task that makes the next value reads the one before.
    """
    readers: dict[Var, list[int]] = {}
    writers: dict[Var, list[int]] = {}
    for task in loop.tasks:
        if isinstance(task, TaskNode):
            for var in task.inputs:
                readers.setdefault(var, []).append(task.index)
            for var in task.outputs:
                writers.setdefault(var, []).append(task.index)
    nexts = Counter(carry.next for carry in loop.carries if not isinstance(carry.next, Lit))
    return {
        carry.next: carry.inside
        for carry in loop.carries
        if not isinstance(carry.next, Lit)
        and nexts[carry.next] == 1
        and nexts[carry.inside] == 0
        and writers.get(carry.next, []) == readers.get(carry.inside)
    }


def walk(
    steps: tuple[ProgramStep, ...],
    results: tuple[Operand, ...],
    submeshes: Sequence[Submesh],
    runs_of: Callable[[LoopNode], Runs | None],
) -> tuple[tuple[AnyEvent, ...], tuple[Item, ...]]:
    """Returns all runs of all tasks in order, and what each result is.

    Args:
        steps: The program.
        results: Its results.
        submeshes: All submeshes; a rotating one stands for another one in every iteration.
        runs_of: The scheduled order of a microbatch loop, None for a sequential one.
    """
    runs = {step.index: found for step in all_loops(steps) if (found := runs_of(step))}
    state = _Walk(runs, submeshes)
    state.steps(steps, ())
    return tuple(state.events), tuple(state.look(operand, ()) for operand in results)
