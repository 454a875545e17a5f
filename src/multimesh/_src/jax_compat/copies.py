"""Copies between devices, and arrays put together from shards that exist already.

- `batched_copy` binds jaxlib's batched array copy: 3 us for one array between one-device
  shardings, where `jax.device_put` takes 25 and for some layouts goes through the host. The copy
  is positional and unchecked (shard i of the source becomes shard i of the target, whatever the
  layouts say): callers compare layouts first. Shards that lie on their target device already are
  shared, not copied. Donating the source is never asked for: it crashes the process.
- `shards` and `assemble` take an array apart and put one together without copying.
- `base_array` and `wrap_keys` go between typed PRNG keys and the integers below them.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Every private name has a public fallback, used where the
name is missing or `private.ALLOWED` is off: `jax.device_put` (which may go through the host),
`Array.addressable_shards`, `jax.make_array_from_single_device_arrays`, `jax.random.key_data` and
`jax.random.wrap_key_data`.

Private names: `batched_copy_array_to_devices_with_sharding` and `ArrayCopySemantics` of jaxlib;
`ArrayImpl` with `_arrays`; `core.ShapedArray` and `core.update_aval_with_sharding`;
`Sharding._internal_device_list`; `PRNGKeyArray` with `_base_array`; `_impl` of key dtypes.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding

from multimesh._src.jax_compat import private

_array: Any = None
_core: Any = None
_jaxlib: Any = None
_prng: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import array as _array, core as _core
    with contextlib.suppress(ImportError):
        from jax._src.lib import _jax as _jaxlib
    with contextlib.suppress(ImportError):
        from jax._src.random import prng as _prng

_copy_arrays = getattr(_jaxlib, "batched_copy_array_to_devices_with_sharding", None)
_update_aval = getattr(_core, "update_aval_with_sharding", None)
_ArrayImpl = getattr(_array, "ArrayImpl", None)
_KeyArray = getattr(_prng, "PRNGKeyArray", None)

BatchedCopy: TypeAlias = Callable[[Sequence[jax.Array]], list[jax.Array]]
Assemble: TypeAlias = Callable[[Sequence[jax.Array]], jax.Array]


def batched_copy(shardings: Sequence[Sharding]) -> BatchedCopy:
    """Returns a function that copies one array to each of `shardings`, in one runtime call.

    The layouts of the i-th array and of `shardings[i]` must be the same by position.
    """
    if _copy_arrays is None or not all(hasattr(s, "_internal_device_list") for s in shardings):
        return public_batched_copy(shardings)
    copy_arrays, targets = _copy_arrays, list(shardings)
    devices: list[Any] = [sharding._internal_device_list for sharding in targets]
    semantics = [_jaxlib.ArrayCopySemantics.REUSE_INPUT] * len(targets)  # share or copy

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return copy_arrays(arrays, devices, targets, semantics)

    return copy


def public_batched_copy(shardings: Sequence[Sharding]) -> BatchedCopy:
    """`batched_copy` through JAX's public interface."""
    targets = list(shardings)

    def copy(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return jax.device_put(list(arrays), targets)

    return copy


def shards(array: jax.Array) -> Sequence[jax.Array]:
    """Returns the one-device arrays of an addressable array, in its sharding's device order."""
    found = getattr(array, "_arrays", None) if private.ALLOWED else None
    return public_shards(array) if found is None else found


def public_shards(array: jax.Array) -> Sequence[jax.Array]:
    """`shards` through JAX's public interface."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in array.sharding.devices_indices_map(array.shape)]


def assembler(shape: Sequence[int], dtype: Any, weak_type: bool, sharding: Sharding) -> Assemble:
    """Returns a function that makes an array of one-device arrays in the sharding's device order.

    The arrays must be committed to these devices and have the shard shape; this isn't checked.
    """
    if _ArrayImpl is None or _update_aval is None:
        return public_assembler(shape, sharding)
    array_impl = _ArrayImpl
    aval = _core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)
    aval = _update_aval(aval, sharding)

    def assemble(parts: Sequence[jax.Array]) -> jax.Array:
        return array_impl(aval, sharding, parts, committed=True, _skip_checks=True)

    return assemble


def public_assembler(shape: Sequence[int], sharding: Sharding) -> Assemble:
    """`assembler` through JAX's public interface; weak types are lost."""

    def assemble(parts: Sequence[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))

    return assemble


def base_array(keys: jax.Array) -> jax.Array:
    """Returns the integers of an array of typed PRNG keys, without copying where possible."""
    found = getattr(keys, "_base_array", None) if private.ALLOWED else None
    return jax.random.key_data(keys) if found is None else found


def wrap_keys(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that makes typed PRNG keys of type `dtype` of their integers."""
    implementation = getattr(dtype, "_impl", None)
    if _KeyArray is None or implementation is None:
        return public_wrap_keys(dtype)
    key_array = _KeyArray
    return lambda data: key_array(implementation, data)


def public_wrap_keys(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """`wrap_keys` through JAX's public interface."""
    found: list[Any] = []

    def look(keys: jax.Array) -> None:
        found.append(jax.random.key_impl(keys))

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return lambda data: jax.random.wrap_key_data(data, impl=found[0])
