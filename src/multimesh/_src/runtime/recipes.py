"""Recipes: how one array gets from one sharding to another, worked out ahead of time.

A recipe has three parts, so that the middle parts of many recipes become one runtime call:

    before(x) -> pieces          takes the source apart: views, slices, or a relayout program
    send                         each piece goes to its sharding in `sends`, or stays where it is
    after(pieces) -> y           puts the target together: views, concatenations, relayout program

The recipes of this file are those made of one step; `runtime.pieces` has the general one.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from multimesh._src.ir.submesh import auto_mesh
from multimesh._src.runtime.counters import counters

Index: TypeAlias = tuple[tuple[int, int], ...]  # per dim: start and stop
Device: TypeAlias = Any  # jax.Device, a class that type checkers can't see
Program: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Shape, dtype and weak type: hashable, without sharding."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False

    def struct(self) -> jax.ShapeDtypeStruct:
        """The type as JAX's lowering takes it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of an array lies on which device, in the sharding's device order."""

    devices: tuple[Device, ...]
    indices: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module. `before` or `after` of None stands for the array itself.

    `aliases` says that the result may share memory with the source, `moves` that something is
    copied to another device, layout or memory.
    """

    before: Callable[[jax.Array], Sequence[jax.Array]] | None
    sends: tuple[Sharding | None, ...]
    after: Callable[[Sequence[jax.Array]], jax.Array] | None
    aliases: bool
    moves: bool


def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """Returns the layout of an array of `shape`."""
    index_map = sharding.devices_indices_map(shape)
    return Layout(
        tuple(index_map),
        tuple(
            tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            for index in index_map.values()
        ),
    )


def keep() -> Recipe:
    """The source is the target."""
    return Recipe(None, (None,), None, aliases=True, moves=False)


def positional(source: Layout, target: Layout, sharding: Sharding, same_memory: bool) -> Recipe:
    """Shard i of the source becomes shard i of the target; the layouts are equal."""
    pairs = zip(source.devices, target.devices, strict=True)
    stays = [a == b and same_memory for a, b in pairs]
    return Recipe(None, (sharding,), None, aliases=any(stays), moves=not all(stays))


def preceded(recipe: Recipe, step: Program) -> Recipe:
    """Applies `step` to the source, then the recipe to its result."""
    before = recipe.before
    if before is None:
        return replace(recipe, before=lambda x: (step(x),))
    return replace(recipe, before=lambda x: before(step(x)))


def followed(recipe: Recipe, step: Program) -> Recipe:
    """Applies the recipe, then `step` to its result."""
    after = recipe.after
    if after is None:
        return replace(recipe, after=lambda pieces: step(pieces[0]))
    return replace(recipe, after=lambda pieces: step(after(pieces)))


def fresh(recipe: Recipe) -> Recipe:
    """The same recipe where one of its steps makes a new array of all it gets."""
    return replace(recipe, aliases=False, moves=True)


def no_mesh() -> AbstractContextManager[Any]:
    """Traces without the mesh that the user may have set."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@functools.lru_cache(maxsize=4096)
def relayout_program(array_type: ArrayType, source: Sharding, target: Sharding) -> Program:
    """Compiles a change of layout; both shardings have the same devices in the same order."""
    with no_mesh():
        jitted = jax.jit(lambda x: x, in_shardings=_auto(source), out_shardings=target)
        lowered = jitted.lower(array_type.struct())
    counters.lowerings += 1
    counters.compiles += 1
    return lowered.compile()


def on_devices_of(sharding: NamedSharding, devices: Sequence[Device]) -> NamedSharding:
    """Returns the same layout on other devices, as many of them, by position."""
    grid = mesh_of(sharding).devices.copy()
    grid.flat[:] = devices
    return NamedSharding(auto_mesh(Mesh(grid, sharding.mesh.axis_names)), sharding.spec)


def mesh_of(sharding: NamedSharding) -> Mesh:
    """Returns the mesh of a sharding of real arrays, which is never abstract."""
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _auto(sharding: Sharding) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(
        auto_mesh(mesh_of(sharding)), sharding.spec, memory_kind=sharding.memory_kind
    )
