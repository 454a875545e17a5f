"""`jax.device_put` and `jax.reshard` in programs: taking them over, and reading their equations.

While we trace, both must mean ours: JAX's own put a mesh or a memory into the type of their result,
and types of several meshes do not mix. They are taken over as `constraints` does it; only equations
in traces that JAX has cached, and those that JAX makes itself (a remat policy that offloads), are
left to be read.

    b:f32<host>[8] = device_put[devices=(MemorySpace.Host,)] a     ->  targets  (MemorySpace.Host,)
    b:f32[8@data] = reshard[dst_sharding=...] a                    ->  targets  (the sharding,)

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. All names are public; the params of the two equations
(`devices`; `dst_sharding`, `concrete_mesh`) are not promised to stay.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

_ACTIVE = threading.local()  # .device_put, .reshard: set in threads that trace for us

_MEMORY_KINDS = {"Host": "pinned_host", "Device": "device"}


@contextlib.contextmanager
def redirect_placements(
    device_put: Callable[..., Any] | None, reshard: Callable[[Any, Any], Any] | None
) -> Iterator[None]:
    """Within it, in this thread, `jax.device_put` and `jax.reshard` are these functions.

    None leaves one as it is. Acts only inside `constraints.redirect_constraints`.
    """
    before = _current("device_put"), _current("reshard")
    _ACTIVE.device_put, _ACTIVE.reshard = device_put, reshard
    try:
        yield
    finally:
        _ACTIVE.device_put, _ACTIVE.reshard = before


def _current(name: str) -> Callable[..., Any] | None:
    return getattr(_ACTIVE, name, None)


def call_device_put(x: Any, device: Any = None, **options: Any) -> Any:
    """Calls `jax.device_put` as JAX means it, whether taken over or not."""
    with redirect_placements(None, _current("reshard")):
        return jax.device_put(x, device, **options)


def device_put_dispatcher(original: FunctionType) -> Callable[..., Any]:
    """What stands in the place of `jax.device_put`."""

    def device_put(x: Any, device: Any = None, **options: Any) -> Any:
        replacement = _current("device_put")
        return (original if replacement is None else replacement)(x, device, **options)

    return device_put


def reshard_dispatcher(original: FunctionType) -> Callable[..., Any]:
    """What stands in the place of `jax.reshard`."""

    def reshard(xs: Any, out_shardings: Any) -> Any:
        replacement = _current("reshard")
        return (original if replacement is None else replacement)(xs, out_shardings)

    return reshard


def targets(eqn: JaxprEqn) -> tuple[Any, ...] | None:
    """Where an equation puts each of its operands; None for equations that put nothing."""
    match eqn.primitive.name:
        case "device_put":
            return tuple(eqn.params["devices"])
        case "reshard":
            sharding, mesh = eqn.params["dst_sharding"], eqn.params["concrete_mesh"]
            return (sharding if mesh is None else NamedSharding(mesh, sharding.spec),)
    return None


def memory_kind_of_space(target: Any) -> str | None:
    """The memory kind of a `jax.memory.Space`; None for anything else."""
    space = getattr(getattr(jax, "memory", None), "Space", None)
    if space is None or not isinstance(target, space):
        return None
    return _MEMORY_KINDS.get(target.name)
