"""Turns events into the flat plan: slots, executables, and copies wherever places differ.

    run layer0_fwd -> y @ stage=0             run  layer0_fwd       (s0, s1) -> s2
    run layer1_fwd(y) @ stage=1        ->     copy stage=0 -> stage=1   s2 -> s3
                                              run  layer1_fwd       (s3, s4) -> s5

A value is copied once per distinct target, right after it is made; all values that one run sends to
one submesh go in one copy. Arguments are copied before their first use elsewhere.

The body of a `while` is a plan of its own. Everything that it reads from outside is an input of it,
at each place where it is wanted, so that it crosses once and not in every iteration.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.ir.flat import Lit, Var
from multimesh._src.ir.plan import (
    Block,
    Constant,
    Copy,
    Executable,
    HostLoop,
    Input,
    Plan,
    Run,
    Slot,
    SlotInfo,
    Step,
)
from multimesh._src.ir.program import EVERYWHERE, Program, all_tasks
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.events import (
    AnyEvent,
    Event,
    HostLoopEvent,
    Instance,
    Item,
    LoopIndex,
    Start,
)
from multimesh._src.partition.layouts import fit_spec

Place: TypeAlias = tuple[int, PartitionSpec, str | None]
"""A submesh (or `EVERYWHERE`), the layout on it, and the memory kind (None: the default)."""


@dataclass(frozen=True, slots=True)
class ArgumentInfo:
    """What the plan says of an argument, or of a block or form of the `argument`-th one."""

    argument: int
    name: str
    donated: bool
    batch: Batch | None
    block: Block | None


@dataclass(slots=True)
class _Outside:
    """Of the body of a loop: the values that are its own, and inputs for all others it reads."""

    own: set[Any]
    inputs: dict[tuple[Instance, Place], Slot] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of a `while`: its plan, where each carry lives, and what else it takes."""

    plan: Plan
    carried: tuple[Place, ...]
    outside: tuple[tuple[Instance, Place], ...]


@dataclass(slots=True)
class Emitter:
    """The plan in the making."""

    program: Program
    everywhere: Mesh
    labels: Mapping[Var, str]
    slots: list[SlotInfo] = field(default_factory=list)
    slot_of: dict[tuple[Any, Place], Slot] = field(default_factory=dict)
    places: dict[Any, list[Place]] = field(default_factory=dict)  # per item, the first made first
    constants: list[Constant] = field(default_factory=list)
    executables: list[Executable] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    input_slots: dict[Var, Slot] = field(default_factory=dict)
    shardings: dict[Place, NamedSharding] = field(default_factory=dict)
    outside: _Outside | None = None
    bodies: dict[int, _Body] = field(default_factory=dict)  # by the identity of their events

    # --- places ---------------------------------------------------------------------------------

    def place_on(self, var: Var, submesh: int) -> Place:
        """Where tasks on a submesh take and make a variable: arguments in the default memory."""
        memory = None if var in self.labels else self.program.memory.get(var)
        if submesh == EVERYWHERE:
            return EVERYWHERE, PartitionSpec(), memory
        spec = self.program.specs.get((var, submesh))
        if spec is None:
            home = self.program.home.get(var, EVERYWHERE)
            known = self.program.specs.get((var, home), PartitionSpec())
            sizes = dict(self.program.submeshes[submesh].mesh.shape)
            spec = fit_spec(known, self.program.avals[var].shape, sizes)
        return submesh, spec, memory

    def home(self, var: Var, submesh: int) -> Place:
        """Where an argument lies."""
        return (*self.place_on(var, submesh)[:2], self.program.memory.get(var))

    def anywhere(self, item: Item) -> Place:
        """Where a result is taken that no task makes or reads."""
        memory = self.program.memory.get(item.var) if isinstance(item, Instance) else None
        return EVERYWHERE, PartitionSpec(), memory

    def sharding(self, place: Place) -> NamedSharding:
        """One object for a place: the slots of a plan are compared by their shardings often."""
        if place not in self.shardings:
            submesh, spec, memory = place
            submeshes = self.program.submeshes
            mesh = self.everywhere if submesh == EVERYWHERE else submeshes[submesh].mesh
            self.shardings[place] = NamedSharding(mesh, spec, memory_kind=memory)
        return self.shardings[place]

    def label(self, submesh: int) -> str:
        return "everywhere" if submesh == EVERYWHERE else self.program.submeshes[submesh].label

    # --- slots ----------------------------------------------------------------------------------

    def new_slot(self, item: Any, aval: Any, place: Place, label: str) -> Slot:
        var = item.var if isinstance(item, Instance) else -1
        self.slots.append(SlotInfo(aval, self.sharding(place), label, var))
        slot = len(self.slots) - 1
        self.slot_of[item, place] = slot
        self.places.setdefault(item, []).append(place)
        return slot

    def provide(self, item: Item, place: Place, copies: dict[tuple[int, int], list[Any]]) -> Slot:
        """The slot of `item` at `place`; notes a copy when it is not there yet."""
        key = _key(item)
        if (key, place) in self.slot_of:
            return self.slot_of[key, place]
        if isinstance(item, LoopIndex):
            return self._constant(key, np.int32(item.value), place, f"index {item.value}")
        if isinstance(item, Lit):
            value = np.asarray(item.value, item.aval.dtype)
            if item.aval.weak_type:
                value = value.item()  # JAX gives weak types to Python scalars alone
            return self._constant(key, value, place, "literal")
        if self.outside is not None and item not in self.outside.own:
            label = self.labels.get(item.var, "read by a loop")
            slot = self.new_slot(item, self.program.avals[item.var], place, label)
            self.outside.inputs[item, place] = slot
            return slot
        if item.var in self.program.constants:
            return self._constant(key, self.program.constants[item.var], place, "constant")
        if key not in self.places:
            self._input(item, place)
            return self.provide(item, place, copies)
        source = self._nearest(key, place)
        aval = self.program.avals[item.var]
        target = self.new_slot(key, aval, place, self.labels.get(item.var, ""))
        copies.setdefault((source[0], place[0]), []).append((self.slot_of[key, source], target))
        return target

    def _nearest(self, key: Any, place: Place) -> Place:
        """Where to copy from: the same submesh if the value is there, else where it was first."""
        places = self.places[key]
        return next((known for known in places if known[0] == place[0]), places[0])

    def _constant(self, key: Any, value: Any, place: Place, label: str) -> Slot:
        slot = self.new_slot(key, jax.typeof(value), place, label)
        self.constants.append(Constant(value, slot))
        return slot

    def _input(self, item: Instance, place: Place) -> None:
        """Gives an argument its slot at home; without a home it lives where it is first wanted."""
        var = item.var
        home = self.program.home.get(var)
        place = place if home is None else self.home(var, home)
        slot = self.new_slot(item, self.program.avals[var], place, self.labels.get(var, ""))
        self.input_slots[var] = slot

    def flush(self, copies: dict[tuple[int, int], list[Any]]) -> None:
        """Appends the noted copies, one step per edge."""
        for (source, target), pairs in copies.items():
            edge = f"{self.label(source)} -> {self.label(target)}"
            sources, targets = zip(*pairs, strict=True)
            self.steps.append(Copy(sources, targets, edge))
        copies.clear()

    # --- steps ----------------------------------------------------------------------------------

    def fill(
        self, events: Sequence[AnyEvent], results: Sequence[tuple[Item, Place | None]]
    ) -> tuple[Slot, ...]:
        """Appends all runs and copies; returns the slots of the results."""
        targets = _targets(self, events, results)
        for event in events:
            if isinstance(event, HostLoopEvent):
                self.host_loop(event, targets)
            else:
                self.run(event, targets)
        copies: dict[tuple[int, int], list[Any]] = {}
        outputs: list[Slot] = []
        for item, place in results:
            if place is None:
                place = self.places.get(_key(item), [self.anywhere(item)])[0]
            outputs.append(self.provide(item, place, copies))
        self.flush(copies)
        return tuple(outputs)

    def host_loop(self, event: HostLoopEvent, targets: Mapping[Any, Sequence[Place]]) -> None:
        """Appends a `while`."""
        body = self.body_of(event)
        copies: dict[tuple[int, int], list[Any]] = {}
        reads = [*zip(event.inits, body.carried, strict=True), *body.outside]
        inputs = tuple(self.provide(item, place, copies) for item, place in reads)
        self.flush(copies)
        name = _name(event)
        outputs = tuple(
            self.new_slot(item, self.program.avals[item.var], place, f"{name} output {position}")
            for position, (item, place) in enumerate(zip(event.results, body.carried, strict=True))
        )
        condition = next(
            k for k, c in enumerate(event.loop.carries) if c.inside == event.loop.condition
        )
        self.steps.append(HostLoop(body.plan, condition, inputs, outputs, name))
        for item in event.results:
            for place in targets.get(item, ()):
                self.provide(item, place, copies)
        self.flush(copies)

    def body_of(self, event: HostLoopEvent) -> _Body:
        """The body of a `while`, made once."""
        if id(event) not in self.bodies:
            self.bodies[id(event)] = self._make_body(event)
        return self.bodies[id(event)]

    def _make_body(self, event: HostLoopEvent) -> _Body:
        made = {item for inner in event.events for item in _made_by(inner)}
        outside = _Outside({*event.insides, *made})
        inner = Emitter(self.program, self.everywhere, self.labels, outside=outside)
        carried = tuple(
            self._carry_place(item, next_, init, event)
            for item, next_, init in zip(event.insides, event.nexts, event.inits, strict=True)
        )
        starts = [
            inner.new_slot(item, self.program.avals[item.var], place, "carried by a loop")
            for item, place in zip(event.insides, carried, strict=True)
        ]
        outputs = inner.fill(event.events, list(zip(event.nexts, carried, strict=True)))
        # What an iteration makes, and gives on once, the next one may write over.
        donated = [
            item in made and outputs.count(slot) == 1
            for item, slot in zip(event.nexts, outputs, strict=True)
        ]
        slots = [*starts, *outside.inputs.values()]
        donated += [False] * len(outside.inputs)
        inputs = tuple(
            Input(position, position, inner.slots[slot].label, (slot,), given)
            for position, (slot, given) in enumerate(zip(slots, donated, strict=True))
        )
        return _Body(inner.finish(inputs, outputs), carried, tuple(outside.inputs))

    def _carry_place(
        self, inside: Instance, next_: Item, init: Item, event: HostLoopEvent
    ) -> Place:
        """A carry lives where its next value is made, else where it is read, else where it was."""
        homes = self.program.home
        home = homes.get(next_.var) if isinstance(next_, Instance) else None
        if home is None:
            readers = (e for e in event.events if isinstance(e, Event) and inside in e.inputs)
            home = next((e.submesh for e in readers), None)
        if home is None:
            home = homes.get(init.var) if isinstance(init, Instance) else None
        return self.place_on(inside.var, EVERYWHERE if home is None else home)

    def finish(
        self,
        inputs: tuple[Input, ...],
        outputs: tuple[Slot, ...],
        output_blocks: tuple[Block | None, ...] = (),
    ) -> Plan:
        """The plan of all that was appended."""
        return Plan(
            slots=tuple(self.slots),
            inputs=inputs,
            constants=tuple(self.constants),
            executables=tuple(self.executables),
            steps=tuple(self.steps),
            outputs=outputs,
            output_blocks=output_blocks,
        )

    def run(self, event: Event, targets: Mapping[Any, Sequence[Place]]) -> None:
        """Appends a run, with copies of what it reads before it and of what others read after."""
        task = event.task
        copies: dict[tuple[int, int], list[Any]] = {}
        in_places = [self.place_on(var, event.submesh) for var in task.inputs]
        out_places = [self.place_on(var, event.submesh) for var in task.outputs]
        inputs = tuple(
            self.provide(item, place, copies)
            for item, place in zip(event.inputs, in_places, strict=True)
        )
        self.flush(copies)
        outputs = tuple(
            self.new_slot(
                item, self.program.avals[item.var], place, f"{task.name} output {position}"
            )
            for position, (item, place) in enumerate(zip(event.outputs, out_places, strict=True))
        )
        executable = self._executable(event, in_places, out_places)
        self.steps.append(Run(executable, inputs, outputs, task.name, event.iteration, event.group))
        for item in event.outputs:
            for place in targets.get(item, ()):
                self.provide(item, place, copies)
        self.flush(copies)

    def _executable(
        self, event: Event, in_places: Sequence[Place], out_places: Sequence[Place]
    ) -> int:
        task = event.task
        in_specs = tuple(spec for _, spec, _ in in_places)
        out_specs = tuple(spec for _, spec, _ in out_places)
        memories = tuple(memory for _, _, memory in (*in_places, *out_places))
        key = (id(task.body), event.submesh, in_specs, out_specs, memories)
        if key not in self.numbers:
            self.numbers[key] = len(self.executables)
            submesh = self.program.submeshes[event.submesh]
            self.executables.append(Executable(task.name, task.body, submesh, in_specs, out_specs))
        return self.numbers[key]


def _made_by(event: AnyEvent) -> tuple[Instance, ...]:
    return event.results if isinstance(event, HostLoopEvent) else event.outputs


def _name(event: HostLoopEvent) -> str:
    """How reports and errors call a `while`: by its first and last task that has a scope."""
    tasks = list(all_tasks(event.loop.tasks))
    names = list(dict.fromkeys(t.name for t in tasks if t.name != "main")) or ["main"]
    return f"while `{names[0]}` .. `{names[-1]}`" if len(names) > 1 else f"while `{names[0]}`"


def _key(item: Item) -> Any:
    if isinstance(item, Lit):
        value = np.asarray(item.value)
        aval = item.aval
        carry = item.carry if isinstance(item, Start) else -1
        return ("literal", value.tobytes(), str(aval.dtype), aval.weak_type, aval.shape, carry)
    return item


def emit(
    program: Program,
    events: Sequence[AnyEvent],
    results: Sequence[tuple[Item, Place | None]],
    arguments: Sequence[ArgumentInfo],
    output_blocks: tuple[Block | None, ...],
    everywhere: Mesh,
) -> Plan:
    """Returns the plan of a program.

    Args:
        program: Tasks, homes and layouts.
        events: All runs in order.
        results: What each result is, and the place it is wanted at (None: where it is made).
        arguments: What to say of each argument.
        output_blocks: For each result which block it is; empty where none is.
        everywhere: The mesh of values that live everywhere.
    """
    names = [info.name for info in arguments]
    emitter = Emitter(program, everywhere, dict(zip(program.arguments, names, strict=True)))
    outputs = emitter.fill(events, results)
    inputs = tuple(_inputs(arguments, emitter))
    return emitter.finish(inputs, outputs, output_blocks)


def _targets(
    emitter: Emitter,
    events: Sequence[AnyEvent],
    results: Sequence[tuple[Item, Place | None]],
) -> dict[Any, list[Place]]:
    """Where each made value is wanted besides where it is made, in order of first use."""
    made: dict[Item, Place] = {}
    reads: list[tuple[Item, Place | None]] = []
    for event in events:
        if isinstance(event, HostLoopEvent):
            body = emitter.body_of(event)
            made |= zip(event.results, body.carried, strict=True)
            reads += [*zip(event.inits, body.carried, strict=True), *body.outside]
            continue
        made |= {item: emitter.place_on(item.var, event.submesh) for item in event.outputs}
        places = (emitter.place_on(var, event.submesh) for var in event.task.inputs)
        reads += zip(event.inputs, places, strict=True)
    targets: dict[Any, list[Place]] = {}

    def want(item: Item, place: Place | None) -> None:
        if isinstance(item, Instance) and item in made and place not in (None, made[item]):
            places = targets.setdefault(item, [])
            if place not in places:
                places.append(place)

    for item, place in (*reads, *results):
        want(item, place)
    return targets


def _inputs(arguments: Sequence[ArgumentInfo], emitter: Emitter) -> Iterator[Input]:
    for index, (var, info) in enumerate(zip(emitter.program.arguments, arguments, strict=True)):
        slots = (emitter.input_slots[var],) if var in emitter.input_slots else ()
        cut = (0, 0) if info.batch is None else (info.batch.microbatches, info.batch.dim)
        yield Input(index, info.argument, info.name, slots, info.donated, *cut, info.block)
