"""Memories: where on its devices a value lies.

    NamedSharding(mesh, P("data"), memory_kind="pinned_host")   ->  "pinned_host"
    NamedSharding(mesh, P("data"))                              ->  None: the default memory

A memory is part of a value's place and never of its type: computations take their operands from
the default memory, into which a value is moved like into another layout.
"""

from typing import Any

from jax.sharding import AbstractMesh


def special_memory(sharding: Any) -> str | None:
    """The memory kind of a sharding; None for the default memory, and for no sharding."""
    kind: str | None = getattr(sharding, "memory_kind", None)
    if kind is None:
        return None
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return None if kind == "device" else kind
    device: Any = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind


def memory_kinds(device: Any) -> tuple[str, ...]:
    """The kinds of memory that programs on a device can use, the default first."""
    default = device.default_memory().kind
    others = sorted({memory.kind for memory in device.addressable_memories()} - {default})
    return (default, *others)
