"""From the arguments of a call to the slots of the plan.

    argument                                    what happens
    lies as the slot says                       taken as it is: the slot shares the caller's array
    lies on several devices otherwise           copied device to device (`runtime.reshard`)
    on one device, or not committed             `jax.device_put`
    NumPy array, Python scalar                  `jax.device_put`, all of one call together
    a stack that is kept in blocks              its shards become the blocks (`runtime.stacks`)
    batch wanted microbatch-major               host arrays are reshaped on the host, at no cost;
                                                a `MicrobatchedArray` is so already; an array on
                                                devices goes through a layout program

Whether an argument lies in place is decided by identity where possible: each slot remembers the
sharding and layout last accepted, so that a state that stays in place costs a few comparisons an
array. Donated arguments are deleted after the step, used by XLA or not, except those that a result
shares.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from multimesh._src.errors import ExecutionError, message
from multimesh._src.frontend.batches import MicrobatchedArray, to_microbatch_major
from multimesh._src.ir.plan import Input, Slot, SlotInfo
from multimesh._src.jax_compat.compiled import ArrayImpl, layout_getter
from multimesh._src.runtime.arrivals import Arrivals, in_row_major, on_one_device
from multimesh._src.runtime.buffers import BufferedPlan
from multimesh._src.runtime.counters import counters
from multimesh._src.runtime.stacks import stack_inputs

_layout_of = layout_getter()
_NOWHERE = object()  # no array has this as its sharding

_donors: "weakref.WeakSet[Inputs]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class _Place:
    """One slot filled by an argument."""

    entry: Input
    slot: Slot
    info: SlotInfo


class Inputs:
    """Fills the slots of one plan from arguments, call after call."""

    def __init__(self, buffered: BufferedPlan, step_name: str) -> None:
        plan = buffered.plan
        self._step_name = step_name
        self._arrivals = Arrivals()
        self.stacks = stack_inputs(plan)
        self._places = [
            _Place(entry, slot, plan.slots[slot])
            for entry in plan.inputs
            for slot in entry.slots
            if entry.block is None
        ]
        self._indices = [place.entry.argument for place in self._places]
        self._slots = [place.slot for place in self._places]
        # what was accepted last, per place; replaced one by one, so safe between threads
        self._shardings: list[Any] = [_NOWHERE] * len(self._places)
        self._layouts: list[Any] = [_NOWHERE] * len(self._places)
        self._donated = {
            entry.argument: entry.name if entry.block is None else entry.name.rsplit("[", 1)[0]
            for entry in plan.inputs
            if entry.donated
        }
        kept = {plan.inputs[position].argument for position in buffered.kept_inputs}
        self._deleted = [index for index in self._donated if index not in kept]
        self._last_donated: tuple[int, ...] = ()  # ids of the arguments of the last call
        self._interrupted = False
        if self._donated:
            _donors.add(self)

    def load(self, arguments: Sequence[Any], slots: list[Any]) -> None:
        """Puts the arguments of a call into their slots.

        Args:
            arguments: The flat arguments, of the types that the plan was made for.
            slots: The slots of the call.

        Raises:
            ExecutionError: An argument was donated to an earlier call or deleted, or is donated
                to this one and also passed undonated.
        """
        if self._donated and len(set(map(id, arguments))) < len(arguments):
            arguments = self._without_duplicates(arguments)
        others = []
        lists = zip(self._indices, self._slots, self._shardings, self._layouts, strict=True)
        for number, (index, slot, sharding, layout) in enumerate(lists):
            value = arguments[index]
            if (
                type(value) is ArrayImpl
                and value.sharding is sharding
                and not value.is_deleted()
                and _layout_of(value) is layout
            ):
                slots[slot] = value
            else:
                others.append(number)
        if others:
            self._load_others(arguments, slots, others)
        for stack in self.stacks:
            value = arguments[stack.argument]
            if isinstance(value, jax.Array) and value.is_deleted():
                raise ExecutionError(self._deleted_message(value, value, stack.name))
            stack.load(value, slots, self._arrivals)

    def _load_others(self, arguments: Sequence[Any], slots: list[Any], numbers: list[int]) -> None:
        values, shardings, targets = [], [], []
        for number in numbers:
            place = self._places[number]
            value = self._as_stored(arguments[place.entry.argument], place)
            is_array = isinstance(value, jax.Array)
            if is_array and self._in_place(value, number):
                slots[place.slot] = value
            elif is_array and not on_one_device(value):
                counters.argument_moves += 1
                slots[place.slot] = self._arrivals.copied(value, place.info)
            else:
                counters.argument_moves += is_array
                counters.argument_puts += not is_array
                values.append(value)
                shardings.append(place.info.sharding)
                targets.append(place.slot)
        if targets:
            for slot, array in zip(targets, jax.device_put(values, shardings), strict=True):
                slots[slot] = array

    def _as_stored(self, value: Any, place: _Place) -> Any:
        """Returns the argument in the shape that the slot stores, on the host or on devices."""
        entry = place.entry
        array = value.stored if isinstance(value, MicrobatchedArray) else value
        if not isinstance(array, jax.Array):
            aval = place.info.aval
            if aval.weak_type and type(value) in (int, float, complex):
                return aval.dtype.type(value).item()  # JAX gives weak types to these alone
            array = np.asarray(value, dtype=aval.dtype)
            if not entry.microbatches:
                return array
            return to_microbatch_major(array, entry.dim, _rows(array, entry))
        if array.is_deleted():
            raise ExecutionError(self._deleted_message(value, array, entry.name))
        if type(array) is ArrayImpl:
            array = in_row_major(array)
        if isinstance(value, MicrobatchedArray):
            if (value.num_microbatches, value.dim) == (entry.microbatches, entry.dim):
                return array
            array = self._arrivals.in_row_order(value)
        if not entry.microbatches:
            return array
        size = _rows(array, entry)
        return self._arrivals.microbatch_major(array, entry.dim, size, place.info.sharding)

    def _in_place(self, value: jax.Array, number: int) -> bool:
        place = self._places[number]
        sharding, wanted = value.sharding, place.info.sharding
        if sharding != wanted and not _same_layout(sharding, wanted, value.ndim):
            return False
        if type(value) is ArrayImpl and not place.entry.microbatches:
            self._shardings[number] = sharding
            self._layouts[number] = _layout_of(value)
        return True

    # --- donation --------------------------------------------------------------------------------

    def retire(self, arguments: Sequence[Any]) -> None:
        """Deletes the donated arguments of a finished call and remembers which they were."""
        self._remember(arguments, interrupted=False)
        for index in self._deleted:
            value = arguments[index]
            if isinstance(value, MicrobatchedArray):
                value = value.stored
            is_array = type(value) is ArrayImpl or isinstance(value, jax.Array)
            if is_array and not value.is_deleted():
                value.delete()

    def abandon(self, arguments: Sequence[Any]) -> None:
        """Remembers the donated arguments of a call that did not come to its end."""
        self._remember(arguments, interrupted=True)

    def _remember(self, arguments: Sequence[Any], *, interrupted: bool) -> None:
        self._last_donated = tuple([id(arguments[index]) for index in self._donated])
        self._interrupted = interrupted

    def _without_duplicates(self, arguments: Sequence[Any]) -> list[Any]:
        """Gives every donated argument an array of its own."""
        arguments = list(arguments)
        uses = Counter(id(value) for value in arguments if isinstance(value, jax.Array))
        for number, value in enumerate(arguments):
            if number in self._donated and uses[id(value)] > 1:
                same = [i for i, other in enumerate(arguments) if other is value]
                if not all(i in self._donated for i in same):
                    raise ExecutionError(self._twice_message(self._donated[number]))
                uses[id(value)] -= 1
                arguments[number] = self._arrivals.duplicate(value)
        return arguments

    def _twice_message(self, name: str) -> str:
        what = f"`{name}` is donated to `{self._step_name}` and also passed to it undonated."
        return message(what, ways=("donate both arguments.", "pass a copy, `jnp.copy(x)`."))

    def _deleted_message(self, value: Any, array: jax.Array, name: str) -> str:
        donor = next((d for d in list(_donors) if id(value) in d._last_donated), None)
        what = f"The argument `{name}` of `{self._step_name}`, `{array.aval.str_short()}`, "
        if donor is None:
            what += "is deleted: it was donated to an earlier call or deleted by hand."
        else:
            what += f"is deleted: it was donated to a call of `{donor._step_name}`"
            what += " that was interrupted." if donor._interrupted else "."
        if donor is not None and donor._interrupted:
            ways = ("go back to a checkpoint.", "keep a copy of the state beside the donated one.")
        else:
            ways = (
                "use what the call returned, as in `state = step(state, batch)`.",
                "keep a copy, `jax.tree.map(jnp.copy, state)`.",
                "do not donate the argument.",
            )
        return message(what, ways=ways)


def _rows(batch: Any, entry: Input) -> int:
    """Returns the rows of one microbatch."""
    return batch.shape[entry.dim] // entry.microbatches


def _same_layout(given: Sharding, wanted: Sharding, rank: int) -> bool:
    return given.memory_kind == wanted.memory_kind and given.is_equivalent_to(wanted, rank)
