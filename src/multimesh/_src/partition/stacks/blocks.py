"""Which submesh keeps which rows of a family of stacks (R7).

    8 layers, rows used on stage=0 0 0 0 1 1 1 1    rows 0-3 on stage=0, rows 4-7 on stage=1
    8 layers, interleaved  0 0 1 1 0 0 1 1          the same; rows 2-5 move once a step
    6 layers on 4 stages                            all rows on one of them

A stack is one array of the user's whose first dim is sharded over the axis of which the submeshes
are slices, so all blocks have the same number of rows and lie in the order of the axis. Where that
cannot be, the submesh that uses most rows keeps all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from multimesh._src.ir.flat import Var
from multimesh._src.jax_compat.name_stack import source_line
from multimesh._src.partition.seeds import Seeds
from multimesh._src.partition.stacks.find import Family
from multimesh._src.partition.stacks.rows import rows_of_join


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive rows that lie together.

    Attributes:
        submeshes: The submesh of each block; empty for one block that may lie anywhere.
        bounds: Where blocks begin, and where the last one ends.
        mesh: The devices of all blocks, with axis `axis` over the blocks; None for one block.
        axis: The axis that shards the first dim; empty for one block.
        why: Why there is one block, for users.
    """

    submeshes: tuple[int, ...]
    bounds: tuple[int, ...]
    mesh: Mesh | None
    axis: str
    why: str = ""

    @property
    def are_several(self) -> bool:
        """Whether there is more than one block."""
        return len(self.submeshes) > 1

    def owner(self, number: int) -> int | None:
        """The submesh of a block, if it has one."""
        return self.submeshes[number] if self.submeshes else None

    def spec_inside(self, spec: PartitionSpec | None) -> PartitionSpec | None:
        """The layout of a block of an array that is laid out by `spec`."""
        if spec is None or not len(spec):
            return spec
        first = (spec[0],) if isinstance(spec[0], str) else spec[0]
        inside = first[1:] if isinstance(first, tuple) and first[:1] == (self.axis,) else None
        return PartitionSpec(inside or None, *spec[1:])


def choose_blocks(family: Family, seeds: Seeds, whole: Mesh | None, axis: str) -> Blocks | None:
    """Chooses the blocks of a family; None where it can be left as it is.

    A family without arguments that comes together inside of a loop has one block that may lie
    anywhere: the loop then keeps its pieces.

    Args:
        family: The family.
        seeds: Numbers the submeshes.
        whole: The global mesh.
        axis: The axis over which the caller has sharded an argument of the family, or "".
    """
    users = [seeds.submeshes[number] for number in family.submeshes]
    found = [slice_of(user.mesh, whole) for user in users if not user.rotation]
    slices = [place for place in found if place is not None]
    axes = {name for name, _ in slices} | ({axis} if axis else set())
    positions = sorted({position for _, position in slices})
    if whole is not None and axis:
        positions = list(range(whole.shape[axis]))
    even = len(positions) > 1 and family.num_rows > 0 and family.num_rows % len(positions) == 0
    if family.whole is not None:
        line = source_line(family.whole.eqn)
        where = f" at {line}" if line else ""
        return _one_block(family, f"`{family.whole.primitive}`{where} needs all rows together")
    if whole is None or len(axes) != 1:
        why = "the submeshes that use its rows are not the slices of one axis of a MultiMesh"
        return _one_block(family, why)
    if not even or not family.arguments:
        why = f"{family.num_rows} rows do not divide over {len(positions)} submeshes"
        return _one_block(family, why)
    (name,) = axes
    size = family.num_rows // len(positions)
    return Blocks(
        submeshes=tuple(
            seeds.number(_part(whole, name, [position]), f"{name}={position}")
            for position in positions
        ),
        bounds=tuple(range(0, family.num_rows + 1, size)),
        mesh=_part(whole, name, positions),
        axis=name,
    )


def _one_block(family: Family, why: str) -> Blocks | None:
    users = family.submeshes
    if len(users) > 1 and family.arguments:
        return Blocks(users[:1], (0, family.num_rows), None, "", why)
    if family.in_pieces and not (users and family.arguments):
        return Blocks((), (0, family.num_rows), None, "")
    return None


def _part(whole: Mesh, axis: str, positions: Sequence[int]) -> Mesh:
    if len(positions) == whole.shape[axis]:
        return whole
    at = whole.axis_names.index(axis)
    devices = np.take(whole.devices, positions, axis=at)
    return Mesh(devices, whole.axis_names, axis_types=whole.axis_types)


def slice_of(mesh: Mesh, whole: Mesh | None) -> tuple[str, int] | None:
    """The axis and the position at which `whole` is sliced to give `mesh`; None if it is not."""
    if whole is None or mesh.axis_names != whole.axis_names:
        return None
    differing = [name for name in whole.axis_names if mesh.shape[name] != whole.shape[name]]
    if len(differing) != 1 or mesh.shape[differing[0]] != 1:
        return None
    (axis,) = differing
    at = whole.axis_names.index(axis)
    for position in range(whole.shape[axis]):
        if np.array_equal(np.take(whole.devices, [position], axis=at), mesh.devices):
            return axis, position
    return None


def fine_bounds(family: Family, blocks: Blocks, avals: Mapping[Var, Any]) -> tuple[int, ...]:
    """Where the pieces begin of which gradients are joined: never inside of one."""
    bounds = set(blocks.bounds)
    inside: set[int] = set()
    for equation in family.joins:
        for start, stop in rows_of_join(equation, avals):
            bounds |= {start, stop}
            inside.update(range(start + 1, stop))
    return tuple(sorted((bounds - inside) | set(blocks.bounds)))
