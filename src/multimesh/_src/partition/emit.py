"""Turns events into the flat plan: slots, executables, and copies wherever places differ.

    run layer0_fwd -> y @ stage=0             run  layer0_fwd       (s0, s1) -> s2
    run layer1_fwd(y) @ stage=1        ->     copy stage=0 -> stage=1   s2 -> s3
                                              run  layer1_fwd       (s3, s4) -> s5

A value is copied once per distinct target, right after it is made; all values that one run sends to
one submesh go in one copy. Arguments are copied before their first use elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.ir.flat import Lit, Var
from multimesh._src.ir.plan import (
    Constant,
    Copy,
    Executable,
    Input,
    Plan,
    Run,
    Slot,
    SlotInfo,
    Step,
)
from multimesh._src.ir.program import EVERYWHERE, Program
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.events import Event, Instance, Item, LoopIndex
from multimesh._src.partition.layouts import fit_spec

Place: TypeAlias = tuple[int, PartitionSpec, str | None]
"""A submesh (or `EVERYWHERE`), the layout on it, and the memory kind (None: the default)."""


@dataclass(frozen=True, slots=True)
class ArgumentInfo:
    """What the plan says of an argument."""

    name: str
    donated: bool
    batch: Batch | None


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
        self.slots.append(SlotInfo(aval, self.sharding(place), label))
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


def _key(item: Item) -> Any:
    if isinstance(item, Lit):
        value = np.asarray(item.value)
        aval = item.aval
        return ("literal", value.tobytes(), str(aval.dtype), aval.weak_type, aval.shape)
    return item


def emit(
    program: Program,
    events: Sequence[Event],
    results: Sequence[tuple[Item, Place | None]],
    arguments: Sequence[ArgumentInfo],
    everywhere: Mesh,
) -> Plan:
    """Returns the plan of a program.

    Args:
        program: Tasks, homes and layouts.
        events: All runs in order.
        results: What each result is, and the place it is wanted at (None: where it is made).
        arguments: What to say of each argument.
        everywhere: The mesh of values that live everywhere.
    """
    names = [info.name for info in arguments]
    emitter = Emitter(program, everywhere, dict(zip(program.arguments, names, strict=True)))
    targets = _targets(emitter, events, results)
    for event in events:
        emitter.run(event, targets)
    copies: dict[tuple[int, int], list[Any]] = {}
    outputs: list[Slot] = []
    for item, place in results:
        if place is None:
            place = emitter.places.get(_key(item), [emitter.anywhere(item)])[0]
        outputs.append(emitter.provide(item, place, copies))
    emitter.flush(copies)
    inputs = tuple(
        _input_of(position, var, info, emitter)
        for position, (var, info) in enumerate(zip(program.arguments, arguments, strict=True))
    )
    return Plan(
        slots=tuple(emitter.slots),
        inputs=inputs,
        constants=tuple(emitter.constants),
        executables=tuple(emitter.executables),
        steps=tuple(emitter.steps),
        outputs=tuple(outputs),
    )


def _targets(
    emitter: Emitter,
    events: Sequence[Event],
    results: Sequence[tuple[Item, Place | None]],
) -> dict[Any, list[Place]]:
    """Where each made value is wanted besides where it is made, in order of first use."""
    made = {
        item: emitter.place_on(item.var, event.submesh)
        for event in events
        for item in event.outputs
    }
    targets: dict[Any, list[Place]] = {}

    def want(item: Item, place: Place | None) -> None:
        if isinstance(item, Instance) and item in made and place not in (None, made[item]):
            places = targets.setdefault(item, [])
            if place not in places:
                places.append(place)

    for event in events:
        for item, var in zip(event.inputs, event.task.inputs, strict=True):
            want(item, emitter.place_on(var, event.submesh))
    for item, place in results:
        want(item, place)
    return targets


def _input_of(position: int, var: Var, info: ArgumentInfo, emitter: Emitter) -> Input:
    slots = (emitter.input_slots[var],) if var in emitter.input_slots else ()
    if info.batch is None:
        return Input(position, info.name, slots, info.donated)
    return Input(position, info.name, slots, info.donated, info.batch.microbatches, info.batch.dim)
