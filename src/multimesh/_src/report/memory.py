"""What the devices of each submesh hold, at rest and at most, by the order of the plan.

    plan                        held by a device of stage=1
    (arguments w: 64 kB)        64 kB        <- state
    copy x0 => stage=1          80 kB
    run  f(w, x0) -> y0         96 kB
    ...                         144 kB       <- peak
    (y0 freed) ...              64 kB

Buffers alone: what XLA needs inside a program comes on top. Every shard of a layout has the same
size, so all devices of a submesh hold the same. A view of an array that lies there counts nothing,
nor does a result that is written over an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, final

from jax.sharding import Mesh

from multimesh._src.ir.plan import Copy, Plan, Run, Slot
from multimesh._src.report.traffic import missing_bytes
from multimesh._src.runtime.buffers import BufferedPlan


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one device holds: `state` in arguments and constants, `peak` at most."""

    state: int
    peak: int


def held_bytes(buffered: BufferedPlan, meshes: Sequence[Mesh]) -> tuple[Held, ...]:
    """Returns the bytes that a device of each mesh holds in one call.

    Args:
        buffered: A plan with its frees and donations.
        meshes: Whose devices to look at; of several that differ, the one that holds most.
    """
    plan = buffered.plan
    ledger = _Ledger(plan)
    arguments = [entry.slots[0] for entry in plan.inputs if entry.slots]
    ledger.add(arguments)
    ledger.add(constant.slot for constant in plan.constants)
    ledger.at_rest = dict(ledger.now)
    kept = {entry.slots[0] for entry in plan.inputs if entry.slots and not entry.donated}
    for step, frees in zip(plan.steps, buffered.frees, strict=True):
        over: set[Slot] = set()
        match step:
            case Run():
                pairs = buffered.donations[step.executable]
                over = {step.inputs[argument] for argument, _ in pairs}
                taken = {step.outputs[result] for _, result in pairs}
                ledger.move(over, taken)
                ledger.add(slot for slot in step.outputs if slot not in taken)
            case Copy():
                for source, target in zip(step.sources, step.targets, strict=True):
                    ledger.add_copy(source, target)
        ledger.remove(slot for slot in frees if slot not in over and slot not in kept)
    return tuple(
        Held(*(max(of.get(device, 0) for device in mesh.devices.flat) for of in ledger.both()))
        for mesh in meshes
    )


@final
@dataclass(slots=True)
class _Ledger:
    """Bytes per device, now and at most."""

    plan: Plan
    now: dict[Any, int] = field(default_factory=dict)
    most: dict[Any, int] = field(default_factory=dict)
    at_rest: Mapping[Any, int] = field(default_factory=dict)
    _sizes: dict[Slot, int] = field(default_factory=dict)
    _views: dict[Any, bool] = field(default_factory=dict)

    def both(self) -> tuple[Mapping[Any, int], Mapping[Any, int]]:
        return self.at_rest, self.most

    def add(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            info = self.plan.slots[slot]
            shard = prod(info.sharding.shard_shape(info.aval.shape)) * info.aval.dtype.itemsize
            self._put(slot, shard)

    def add_copy(self, source: Slot, target: Slot) -> None:
        """A copy; where its devices hold all of it already, it is a view."""
        before, after = self.plan.slots[source], self.plan.slots[target]
        key = (before.aval.shape, before.aval.dtype, before.sharding, after.sharding)
        if key not in self._views:
            self._views[key] = not missing_bytes(before.aval, before.sharding, after.sharding)
        if self._views[key]:
            self._put(target, 0)
        else:
            self.add([target])

    def move(self, sources: Iterable[Slot], targets: Iterable[Slot]) -> None:
        """Results that are written over arguments: of one type and layout, so of one size."""
        self.remove(sources)
        self.add(targets)

    def remove(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            size = self._sizes.pop(slot, 0)
            for device in self.plan.slots[slot].sharding.device_set if size else ():
                self.now[device] -= size

    def _put(self, slot: Slot, size: int) -> None:
        self._sizes[slot] = size
        for device in self.plan.slots[slot].sharding.device_set if size else ():
            self.now[device] = self.now.get(device, 0) + size
            self.most[device] = max(self.most.get(device, 0), self.now[device])
