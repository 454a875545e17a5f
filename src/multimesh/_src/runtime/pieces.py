"""The general reshard: cut source shards, send the pieces, join them on the target devices.

Example, 4 elements from 2 devices to 3 (dim of 6):

    source   a: 0 1 2        b: 3 4 5
    target   c: 0 1     d: 2 3     e: 4 5
    cut      a -> [0 1] [2]        b -> [3] [4 5]
    send     [0 1] -> c,  [2] [3] -> d,  [4 5] -> e
    join     d: [2] [3] -> [2 3]

Whole shards are not cut, and a target shard that is one piece isn't joined: what is whole and in
place already is re-used without copying. Devices that do the same share one program.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from multimesh._src.jax_compat.copies import assembler, shards
from multimesh._src.runtime.counters import counters
from multimesh._src.runtime.recipes import (
    ArrayType,
    Device,
    Index,
    Layout,
    Program,
    Recipe,
    no_mesh,
)

Devices: TypeAlias = tuple[Device, ...]
Shape: TypeAlias = tuple[int, ...]
Bounds: TypeAlias = tuple[Shape, Shape]  # starts and stops within a shard


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the array, taken from the source shard at a position."""

    position: int
    index: Index


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that run one program: what it takes and gives, as positions in a pool of arrays.

    `takes[k]` are the pool positions of the k-th operand, one per device. The results are appended
    to the pool: per result, one array per device.
    """

    program: Program
    assemblers: tuple[Any, ...]  # one per operand
    takes: tuple[tuple[int, ...], ...]


def pieces_recipe(
    array_type: ArrayType, source: Layout, target: Layout, sharding: NamedSharding
) -> Recipe:
    """Returns the recipe between any two layouts of one array.

    Args:
        array_type: Of the whole array; no typed keys.
        source: The layout of the source.
        target: The layout of the target.
        sharding: The target's sharding.
    """
    wanted = _wanted_pieces(source, target)
    cuts, picks = _plan_cuts(array_type, source, wanted)
    joins, finals = _plan_joins(array_type, target, wanted)
    sends = tuple(
        None if source.devices[piece.position] == device else SingleDeviceSharding(device)
        for device, pieces in zip(target.devices, wanted, strict=True)
        for piece in pieces
    )
    finish = assembler(array_type.shape, array_type.dtype, array_type.weak_type, sharding)

    def before(array: jax.Array) -> list[jax.Array]:
        pool = _with_results(shards(array), cuts)
        return [pool[i] for i in picks]

    def after(pieces: Sequence[jax.Array]) -> jax.Array:
        pool = _with_results(pieces, joins)
        return finish([pool[i] for i in finals])

    num_shards = len(source.devices)
    kept = [place is None and i < num_shards for place, i in zip(sends, picks, strict=True)]
    aliases = any(kept[i] for i in finals if i < len(kept))
    return Recipe(before, sends, after, aliases=aliases, moves=bool(joins) or not all(kept))


def _with_results(pool: Sequence[jax.Array], groups: Sequence[Group]) -> Sequence[jax.Array]:
    if not groups:
        return pool
    results = list(pool)
    for group in groups:
        operands = [
            assemble([pool[i] for i in takes])
            for assemble, takes in zip(group.assemblers, group.takes, strict=True)
        ]
        for result in group.program(*operands):
            results.extend(shards(result))
    return results


# Which pieces


def _wanted_pieces(source: Layout, target: Layout) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of each target shard in row-major order.

    A piece comes from the target's own device if it lies there, else from the device that sends
    least so far.
    """
    holders: dict[Index, list[int]] = defaultdict(list)
    for position, index in enumerate(source.indices):
        holders[index].append(position)
    sent = [0] * len(source.devices)
    wanted = []
    for device, index in zip(target.devices, target.indices, strict=True):
        pieces = []
        for block in sorted(holders):
            common = _common(block, index)
            if common is None:
                continue
            position = _holder(holders[block], source.devices, device, sent)
            if source.devices[position] != device:
                sent[position] += math.prod(_shape(common))
            pieces.append(Piece(position, common))
        wanted.append(tuple(pieces))
    return tuple(wanted)


def _holder(positions: Sequence[int], devices: Devices, wanted: Device, sent: Sequence[int]) -> int:
    local = [position for position in positions if devices[position] == wanted]
    return local[0] if local else min(positions, key=lambda position: (sent[position], position))


def _common(a: Index, b: Index) -> Index | None:
    """Returns the intersection, None if it is empty."""
    common = tuple(
        (max(start, other), min(stop, end))
        for (start, stop), (other, end) in zip(a, b, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def _shape(index: Index) -> Shape:
    return tuple(stop - start for start, stop in index)


# Cuts on the source devices


def _plan_cuts(
    array_type: ArrayType, source: Layout, wanted: Sequence[Sequence[Piece]]
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """Returns the cut groups, and of each wanted piece its position in the pool.

    The pool starts with the source shards; results of the cuts follow.
    """
    cuts: dict[int, dict[Bounds, Piece]] = defaultdict(dict)  # per source position
    for piece in (piece for pieces in wanted for piece in pieces):
        block = source.indices[piece.position]
        if piece.index != block:
            cuts[piece.position][_bounds(piece.index, block)] = piece
    alike: dict[tuple[Bounds, ...], list[int]] = defaultdict(list)
    for position, bounds in sorted(cuts.items()):
        alike[tuple(sorted(bounds))].append(position)

    places = {Piece(i, index): i for i, index in enumerate(source.indices)}
    free = len(source.indices)
    groups = []
    for bounds, positions in alike.items():
        devices = tuple(source.devices[position] for position in positions)
        shape = _shape(source.indices[positions[0]])
        program = cut_program(array_type.dtype, shape, bounds, devices)
        groups.append(Group(program, (_stack(array_type, shape, devices),), (tuple(positions),)))
        for each in bounds:
            for position in positions:
                places[cuts[position][each]] = free
                free += 1
    return tuple(groups), tuple(places[piece] for pieces in wanted for piece in pieces)


def _bounds(index: Index, block: Index) -> Bounds:
    starts = tuple(start - first for (start, _), (first, _) in zip(index, block, strict=True))
    stops = tuple(stop - first for (_, stop), (first, _) in zip(index, block, strict=True))
    return starts, stops


# Joins on the target devices


def _plan_joins(
    array_type: ArrayType, target: Layout, wanted: Sequence[Sequence[Piece]]
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """Returns the join groups, and of each target shard its position in the pool.

    The pool starts with the pieces in the order of `wanted`; results of the joins follow.
    """
    starts = np.cumsum([0, *map(len, wanted)]).tolist()
    finals = {t: starts[t] for t, pieces in enumerate(wanted) if len(pieces) == 1}
    alike: dict[tuple[tuple[Shape, ...], Shape], list[int]] = defaultdict(list)
    for t, pieces in enumerate(wanted):
        if len(pieces) > 1:
            shapes = tuple(_shape(piece.index) for piece in pieces)
            alike[shapes, _grid(pieces)].append(t)

    free = starts[-1]
    groups = []
    for (shapes, grid), positions in alike.items():
        devices = tuple(target.devices[t] for t in positions)
        program = join_program(array_type.dtype, shapes, grid, devices)
        stacks = tuple(_stack(array_type, shape, devices) for shape in shapes)
        takes = tuple(tuple(starts[t] + k for t in positions) for k in range(len(shapes)))
        groups.append(Group(program, stacks, takes))
        for t in positions:
            finals[t] = free
            free += 1
    return tuple(groups), tuple(finals[t] for t in range(len(wanted)))


def _grid(pieces: Sequence[Piece]) -> Shape:
    """Returns how many pieces stand along each dim."""
    per_dim = zip(*(piece.index for piece in pieces), strict=True)
    return tuple(len(set(intervals)) for intervals in per_dim)


# Programs that every device of a group runs on its own shard


def _stacked(devices: Devices) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("shards",)), PartitionSpec("shards"))


def _stack(array_type: ArrayType, shape: Shape, devices: Devices) -> Any:
    """Returns the assembler of one array of all shards, one after another along dim 0."""
    stacked = (shape[0] * len(devices), *shape[1:])
    return assembler(stacked, array_type.dtype, False, _stacked(devices))


@functools.lru_cache(maxsize=4096)
def cut_program(dtype: Any, shape: Shape, bounds: tuple[Bounds, ...], devices: Devices) -> Program:
    """Compiles the cut of one shard of `shape` per device into the pieces within `bounds`."""

    def cut(shard: jax.Array) -> list[jax.Array]:
        return [jax.lax.slice(shard, start, stop) for start, stop in bounds]

    return _compile(cut, dtype, (shape,), len(bounds), devices)


@functools.lru_cache(maxsize=4096)
def join_program(dtype: Any, shapes: tuple[Shape, ...], grid: Shape, devices: Devices) -> Program:
    """Compiles the join of a row-major grid of pieces on each device."""

    def join(*pieces: jax.Array) -> list[jax.Array]:
        row = list(pieces)
        for dim in reversed(range(len(grid))):
            count = grid[dim]
            row = [
                jax.lax.concatenate(row[i : i + count], dim) if count > 1 else row[i]
                for i in range(0, len(row), count)
            ]
        return row

    return _compile(join, dtype, shapes, 1, devices)


def _compile(
    function: Program, dtype: Any, shapes: Sequence[Shape], num_results: int, devices: Devices
) -> Program:
    stacked = _stacked(devices)
    mapped = jax.shard_map(
        function,
        mesh=stacked.mesh,
        in_specs=stacked.spec,
        out_specs=[stacked.spec] * num_results,
        check_vma=False,
    )
    structs = [
        jax.ShapeDtypeStruct((shape[0] * len(devices), *shape[1:]), dtype, sharding=stacked)
        for shape in shapes
    ]
    counters.lowerings += 1
    counters.compiles += 1
    with no_mesh():
        return jax.jit(mapped).lower(*structs).compile()
