"""Arguments that do not lie as the step takes them.

Programs and copies are prepared for the first argument of their kind and kept with the plan.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from multimesh._src.frontend.batches import MicrobatchedArray, to_microbatch_major
from multimesh._src.ir.plan import SlotInfo
from multimesh._src.jax_compat.avals import no_ambient_mesh
from multimesh._src.runtime.compile import lower_flat
from multimesh._src.runtime.counters import counters
from multimesh._src.runtime.reshard import CopyItem, prepare_copy


class Arrivals:
    """Moves and re-lays arguments, device to device."""

    def __init__(self) -> None:
        self._programs: dict[Any, Callable[..., Any]] = {}

    def copied(self, value: jax.Array, info: SlotInfo) -> jax.Array:
        """Returns a multi-device array in the sharding of a slot."""
        key = ("to slot", value.sharding, info.sharding, value.shape, value.dtype)
        if key not in self._programs:
            self._programs[key] = prepare_copy([CopyItem(info.aval, value.sharding, info.sharding)])
        return self._programs[key]([value])[0]

    def duplicate(self, value: jax.Array) -> jax.Array:
        """Returns a copy in place."""
        return self._run(lambda x: jax.numpy.copy(x), "copy", value, value.sharding)

    def microbatch_major(
        self, value: jax.Array, dim: int, size: int, wanted: NamedSharding
    ) -> jax.Array:
        """Cuts a batch on the devices it lies on; the result may still have to be moved."""
        stays = devices_of(value.sharding) == devices_of(wanted)
        counters.argument_moves += stays  # else counted where it is moved

        def cut(x: jax.Array) -> jax.Array:
            return to_microbatch_major(x, dim, size)

        return self._run(cut, f"cut_dim_{dim}_by_{size}", value, wanted if stays else None)

    def in_row_order(self, value: MicrobatchedArray) -> jax.Array:
        """Joins a batch that was cut otherwise than the step wants it."""

        def join(stored: jax.Array) -> jax.Array:
            return jax.numpy.moveaxis(stored, 0, value.dim).reshape(value.shape)

        return self._run(join, f"join_dim_{value.dim}", value.stored, None)

    def _run(
        self, function: Callable[..., Any], name: str, value: jax.Array, target: Any
    ) -> jax.Array:
        """Runs `function`, which `name` tells from others, compiled for arrays like `value`.

        `target` is the sharding of the result; None leaves it to XLA.
        """
        key = (name, value.sharding, target, value.shape, value.dtype)
        if key not in self._programs:
            with no_ambient_mesh():
                lowered = lower_flat(function, name, [value.aval], [value.sharding], target)
                self._programs[key] = lowered.compile()
            counters.compiles += 1
        return self._programs[key](value)


def in_row_major(value: jax.Array) -> jax.Array:
    """Returns an array whose dims lie in memory in row order, as programs take them."""
    layout = value.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    in_order = tuple(range(value.ndim))
    if layout is None or tuple(layout.major_to_minor) == in_order:
        return value
    return jax.device_put(value, Format(Layout(in_order), value.sharding))


def on_one_device(value: jax.Array) -> bool:
    """Whether an array is to be placed like one from the host."""
    return not value.committed or isinstance(value.sharding, SingleDeviceSharding)


def devices_of(sharding: Sharding) -> tuple[Any, ...]:
    """Returns the devices in the order of the sharding."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.asarray(sharding.mesh.devices).flat)
    return tuple(sharding.device_set) if len(sharding.device_set) == 1 else ()
