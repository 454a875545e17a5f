"""Copies of values between submeshes and layouts, device to device.

`prepare_copy` works out everything ahead of time; what is left for each call is one batched copy
for all values of an edge, and for the values that need it a view, a slice or a layout program
before or after. The ways, the first that fits is taken:

    same sharding                    the array itself
    no elements                      a new array
    same layout by position          batched copy; shards already in place are shared
    target shards lie in the source  views and copies of whole shards (replicated global mesh to
                                     submesh: a view; submesh to replicated global mesh: copies to
                                     the devices that miss it)
    as many devices                  a layout program on the source or the target devices, where
                                     fewer bytes cross, and a batched copy
    to replicated                    replicate on the source devices, then copy whole shards
    from replicated                  a replicated view on the target devices, then a local slice
    anything else                    `runtime.pieces`

The source is never donated and never read by the host.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from multimesh._src.jax_compat.copies import assembler, base_array, batched_copy, shards, wrap_keys
from multimesh._src.runtime.counters import counters
from multimesh._src.runtime.pieces import pieces_recipe
from multimesh._src.runtime.recipes import (
    ArrayType,
    Layout,
    Recipe,
    followed,
    fresh,
    keep,
    layout_of,
    on_devices_of,
    positional,
    preceded,
    relayout_program,
)


@dataclass(frozen=True, slots=True)
class CopyItem:
    """One value to copy: its type (shape, dtype, weak type), where it lies and where it goes."""

    aval: Any
    source: Sharding
    target: NamedSharding


@dataclass(frozen=True, slots=True)
class PreparedCopy:
    """Copies all values of an edge: takes the sources, returns the targets in the same order.

    Attributes:
        run: The copy itself.
        aliases: Per value: whether the result may share memory with its source, so that neither
            may be donated while the other is in use.
        num_moves: How many of the values go to another device, layout or memory.
        num_calls: How many runtime calls copy between devices: 1, or 0 where all are views.
    """

    run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    aliases: tuple[bool, ...]
    num_moves: int
    num_calls: int

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Copies; the arrays must have the sharding of the sources."""
        return self.run(arrays)


def prepare_copy(items: Sequence[CopyItem]) -> PreparedCopy:
    """Prepares the copy of all values of one edge, compiling what it needs.

    Args:
        items: One per value. Source and target may name other devices, other numbers of devices
            and other layouts. At each call the arrays must have the sources' shardings.
    """
    recipes = [_recipe(item) for item in items]
    num_moves = sum(recipe.moves for recipe in recipes)
    direct = all(recipe.before is None and recipe.after is None for recipe in recipes)
    places = [place for recipe in recipes for place in recipe.sends if place is not None]
    if direct and len(places) == len(recipes):
        run = _direct(places, num_moves)
    else:
        run = _general(recipes, num_moves)
    aliases = tuple(recipe.aliases for recipe in recipes)
    return PreparedCopy(run, aliases, num_moves, num_calls=int(bool(places)))


def _direct(
    places: Sequence[Sharding], num_moves: int
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Every value is one array of the batched copy."""
    copy = batched_copy(places)

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        counters.moves += num_moves
        counters.copies += 1
        return copy(arrays)

    return run


def _general(
    recipes: Sequence[Recipe], num_moves: int
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Takes apart all values, sends all pieces at once, puts all values together."""
    places = [place for recipe in recipes for place in recipe.sends]
    sent = [i for i, place in enumerate(places) if place is not None]
    copy = batched_copy([place for place in places if place is not None])
    befores = tuple(recipe.before for recipe in recipes)
    ends = tuple((recipe.after, len(recipe.sends)) for recipe in recipes)

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        pieces: list[jax.Array] = []
        for before, array in zip(befores, arrays, strict=True):
            if before is None:
                pieces.append(array)
            else:
                pieces.extend(before(array))
        counters.moves += num_moves
        if sent:
            counters.copies += 1
            for i, piece in zip(sent, copy([pieces[i] for i in sent]), strict=True):
                pieces[i] = piece
        results, start = [], 0
        for after, count in ends:
            results.append(pieces[start] if after is None else after(pieces[start : start + count]))
            start += count
        return results

    return run


def _recipe(item: CopyItem) -> Recipe:
    if item.source == item.target:
        return keep()
    if not jax.dtypes.issubdtype(item.aval.dtype, jax.dtypes.prng_key):
        weak_type = bool(getattr(item.aval, "weak_type", False))
        array_type = ArrayType(tuple(item.aval.shape), item.aval.dtype, weak_type)
        return _placed_recipe(array_type, item.source, item.target)
    # typed keys have no buffers of their own: their integers travel
    base = jax.eval_shape(
        jax.random.key_data, jax.ShapeDtypeStruct(item.aval.shape, item.aval.dtype)
    )
    recipe = _placed_recipe(
        ArrayType(base.shape, base.dtype),
        _key_data_sharding(item.source, item.aval.ndim, base.ndim),
        _key_data_sharding(item.target, item.aval.ndim, base.ndim),
    )
    return followed(preceded(recipe, base_array), wrap_keys(item.aval.dtype))


def _key_data_sharding(sharding: Any, rank: int, base_rank: int) -> Any:
    """Returns the sharding of the integers of keys: their trailing dims are never sharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    entries = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    return sharding.update(spec=PartitionSpec(*entries, *(None,) * (base_rank - rank)))


def _placed_recipe(array_type: ArrayType, source: Sharding, target: NamedSharding) -> Recipe:
    """Chooses the way, in default memory; other memories are entered and left by plain copies."""
    if 0 in array_type.shape:
        return _empty(array_type, target)
    have, want = layout_of(source, array_type.shape), layout_of(target, array_type.shape)
    if have.indices == want.indices:
        return positional(have, want, target, source.memory_kind == target.memory_kind)
    near, far = _in_default_memory(source), _in_default_memory(target)
    recipe = _device_recipe(array_type, near, far, have, want)
    if near.memory_kind != source.memory_kind:
        recipe = fresh(preceded(recipe, _copy_one(near)))
    if far.memory_kind != target.memory_kind:
        recipe = fresh(followed(recipe, _copy_one(target)))
    return recipe


def _empty(array_type: ArrayType, target: NamedSharding) -> Recipe:
    """Makes a new array: programs that give empty arrays may return shards of a wrong shape."""
    nothing = np.zeros(array_type.shape, array_type.dtype)
    assemble = assembler(array_type.shape, array_type.dtype, array_type.weak_type, target)

    def after(_: Sequence[jax.Array]) -> jax.Array:
        return assemble(shards(jax.device_put(nothing, target)))

    return Recipe(lambda _: (), (), after, aliases=False, moves=True)


def _device_recipe(
    array_type: ArrayType, source: Sharding, target: NamedSharding, have: Layout, want: Layout
) -> Recipe:
    if set(want.indices) <= set(have.indices):
        return pieces_recipe(array_type, have, want, target)
    if len(have.devices) == len(want.devices):
        return _relaid(array_type, source, target, have, want)
    if target.is_fully_replicated and isinstance(source, NamedSharding):
        replicated = NamedSharding(source.mesh, PartitionSpec())
        program = relayout_program(array_type, source, replicated)
        whole = layout_of(replicated, array_type.shape)
        return fresh(preceded(pieces_recipe(array_type, whole, want, target), program))
    if source.is_fully_replicated and set(want.devices) <= set(have.devices):
        replicated = NamedSharding(target.mesh, PartitionSpec())
        program = relayout_program(array_type, replicated, target)
        whole = layout_of(replicated, array_type.shape)
        return fresh(followed(pieces_recipe(array_type, have, whole, replicated), program))
    return pieces_recipe(array_type, have, want, target)


def _relaid(
    array_type: ArrayType, source: Sharding, target: NamedSharding, have: Layout, want: Layout
) -> Recipe:
    """As many devices: a layout program, and a copy by position if the devices differ."""
    if have.devices == want.devices:
        return fresh(followed(keep(), relayout_program(array_type, source, target)))
    crosses = [a != b for a, b in zip(have.devices, want.devices, strict=True)]
    if isinstance(source, NamedSharding) and _size(have, crosses) < _size(want, crosses):
        arrived = on_devices_of(source, want.devices)
        program = relayout_program(array_type, arrived, target)
        return fresh(followed(positional(have, want, arrived, True), program))
    relaid = on_devices_of(target, have.devices)
    program = relayout_program(array_type, source, relaid)
    return fresh(preceded(positional(have, want, target, True), program))


def _size(layout: Layout, crosses: Sequence[bool]) -> int:
    """Returns how many elements cross if the shards of `layout` are copied by position."""
    return sum(
        math.prod(stop - start for start, stop in index)
        for index, cross in zip(layout.indices, crosses, strict=True)
        if cross
    )


def _in_default_memory(sharding: Any) -> Any:
    device = next(iter(sharding.device_set))
    kind = device.default_memory().kind
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)


def _copy_one(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    copy = batched_copy([target])
    return lambda array: copy([array])[0]
