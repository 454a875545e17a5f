"""Stacks at the boundary of a step: one array of the caller's is several blocks of the plan (R7).

    state['w']: f32[4,8] on devices 0-3, P('stage')      shards  a b c d
    blocks: f32[2,8] on stage=0 (devices 0, 1)           shards  a b
            f32[2,8] on stage=1 (devices 2, 3)           shards  c d

Both ways only shards change hands: no element is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from multimesh._src.ir.plan import Block, Input, Plan, Slot, SlotInfo
from multimesh._src.jax_compat.compiled import ArrayImpl, layout_getter
from multimesh._src.jax_compat.copies import Assemble, assembler, shards
from multimesh._src.runtime.arrivals import Arrivals, in_row_major, on_one_device
from multimesh._src.runtime.counters import counters

_layout_of = layout_getter()
_NOWHERE = object()  # no array has this as its sharding


@dataclass(frozen=True, slots=True)
class _Part:
    """One block: its slot, and which shards of the whole array it has."""

    slot: Slot
    positions: tuple[int, ...]
    assemble: Assemble


class StackInput:
    """Takes one argument apart, call after call.

    Attributes:
        argument: The position of the argument.
        name: The user's name of it.
        slots: The slots of its blocks.
        whole_slot: Where the array itself goes, behind the slots of the plan.
    """

    def __init__(self, plan: Plan, entries: Sequence[Input], whole_slot: Slot) -> None:
        used = [entry for entry in entries if entry.slots]
        first, block = used[0], _block_of(used[0])
        info = plan.slots[first.slots[0]]
        self.argument = first.argument
        self.name = first.name.rsplit("[", 1)[0]
        self.slots = tuple(entry.slots[0] for entry in used)
        self.whole_slot = whole_slot
        self._whole = whole_info(info, block)
        self._parts = [_part(plan, entry) for entry in used]
        self._sharding: Any = _NOWHERE
        self._layout: Any = _NOWHERE

    def load(self, value: Any, slots: list[Any], arrivals: Arrivals) -> None:
        """Puts `value` and its blocks into their slots."""
        in_place = (
            type(value) is ArrayImpl
            and value.sharding is self._sharding
            and _layout_of(value) is self._layout
        )
        whole = value if in_place else self._placed(value, arrivals)
        slots[self.whole_slot] = whole
        found = shards(whole)
        for part in self._parts:
            slots[part.slot] = part.assemble([found[i] for i in part.positions])

    def _placed(self, value: Any, arrivals: Arrivals) -> jax.Array:
        wanted, aval = self._whole.sharding, self._whole.aval
        if not isinstance(value, jax.Array):
            counters.argument_puts += 1
            return jax.device_put(np.asarray(value, dtype=aval.dtype), wanted)
        array = in_row_major(value) if type(value) is ArrayImpl else value
        same = array.sharding.is_equivalent_to(wanted, array.ndim)
        if same and array.sharding.memory_kind == wanted.memory_kind:
            if type(array) is ArrayImpl:
                self._sharding, self._layout = array.sharding, _layout_of(array)
            return array
        counters.argument_moves += 1
        if on_one_device(array):
            return jax.device_put(array, wanted)
        return arrivals.copied(array, self._whole)


class StackOutput:
    """Puts the blocks of one result together.

    Attributes:
        slots: The slots of the blocks.
    """

    def __init__(self, plan: Plan, slots: Sequence[Slot], block: Block) -> None:
        self.slots = tuple(slots)
        infos = [plan.slots[slot] for slot in slots]
        for number, info in enumerate(infos):
            _check_place(info, replace(block, number=number))
        whole = whole_info(infos[0], block)
        self.sharding = whole.sharding
        aval = whole.aval
        self._assemble = assembler(aval.shape, aval.dtype, aval.weak_type, whole.sharding)
        made = [(k, d) for k, info in enumerate(infos) for d in _devices(info.sharding.mesh)]
        at = {device: position for position, (_, device) in enumerate(made)}
        self._order = [at[device] for device in _devices(block.mesh)]

    def join(self, slots: Sequence[Any]) -> jax.Array:
        """Returns the whole array."""
        made = [shard for slot in self.slots for shard in shards(slots[slot])]
        return self._assemble([made[i] for i in self._order])


def stack_inputs(plan: Plan) -> list[StackInput]:
    """The arguments that are taken apart."""
    entries: dict[int, list[Input]] = {}
    for entry in plan.inputs:
        if entry.block is not None:
            entries.setdefault(entry.argument, []).append(entry)
    used = (own for own in entries.values() if any(entry.slots for entry in own))
    return [StackInput(plan, own, slot) for slot, own in enumerate(used, len(plan.slots))]


def results_of(plan: Plan, stacks: Sequence[StackInput]) -> list[Slot | StackOutput]:
    """Per flat result its slot, or the blocks that it is put together of.

    An argument that is returned as it is stays the caller's own array.
    """
    wholes = {stack.slots: stack.whole_slot for stack in stacks}
    blocks = plan.output_blocks or (None,) * len(plan.outputs)
    results: list[Slot | StackOutput] = []
    for position, block in enumerate(blocks):
        if block is None:
            results.append(plan.outputs[position])
        elif block.number == 0:
            slots = plan.outputs[position : position + block.count]
            results.append(wholes.get(slots) or StackOutput(plan, slots, block))
    return results


def whole_info(info: SlotInfo, block: Block) -> SlotInfo:
    """Type and sharding of the array of which a slot holds one block."""
    rows, *rest = info.aval.shape
    aval = info.aval.update(shape=(rows * block.count, *rest))
    return SlotInfo(aval, block.whole_sharding(info.sharding), info.label)


def _devices(mesh: Any) -> list[Any]:
    """The devices of a concrete mesh in order."""
    return list(mesh.devices.flat)


def _block_of(entry: Input) -> Block:
    assert entry.block is not None
    return entry.block


def _check_place(info: SlotInfo, block: Block) -> None:
    """A block elsewhere would have the shards of other rows."""
    assert frozenset(_devices(info.sharding.mesh)) == block.devices, info.label


def _part(plan: Plan, entry: Input) -> _Part:
    (slot,) = entry.slots
    info = plan.slots[slot]
    _check_place(info, _block_of(entry))
    at = {device: k for k, device in enumerate(_devices(_block_of(entry).mesh))}
    positions = tuple(at[device] for device in _devices(info.sharding.mesh))
    aval = info.aval
    assemble = assembler(aval.shape, aval.dtype, aval.weak_type, info.sharding)
    return _Part(slot, positions, assemble)
