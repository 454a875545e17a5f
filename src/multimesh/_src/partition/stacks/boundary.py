"""What the caller's arguments and results become when stacks are split into blocks.

state['w']: float32[4,8,8] on the global mesh, P('stage', None, 'model')
->  state['w'][0:2] on stage=0, P(None, None, 'model')
    state['w'][2:4] on stage=1, P(None, None, 'model')
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.frontend.logical import same_mesh
from multimesh._src.frontend.tracing import Argument, Result
from multimesh._src.ir.plan import Block
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.stacks.blocks import Blocks


@dataclass(frozen=True, slots=True)
class Parts:
    """The positions of an argument's or result's parts, and how they make up the whole."""

    first: int
    blocks: Blocks | None  # None: it is not split

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the parts stand in the list of all parts."""
        count = 1 if self.blocks is None else len(self.blocks.submeshes)
        return tuple(range(self.first, self.first + count))


def number_parts(blocks: Sequence[Blocks | None]) -> tuple[Parts, ...]:
    """Numbers the parts of a list of arguments or results."""
    parts: list[Parts] = []
    for own in blocks:
        first = parts[-1].positions[-1] + 1 if parts else 0
        parts.append(Parts(first, own))
    return tuple(parts)


def plan_blocks(parts: Sequence[Parts]) -> tuple[Block | None, ...]:
    """What the plan says of each part."""
    found: list[Block | None] = []
    for index, part in enumerate(parts):
        blocks = part.blocks
        if blocks is None:
            found.append(None)
            continue
        assert blocks.mesh is not None
        count = len(blocks.submeshes)
        found += [Block(index, number, count, blocks.mesh, blocks.axis) for number in range(count)]
    return tuple(found)


def split_argument(
    argument: Argument, blocks: Blocks | None, submeshes: Sequence[Submesh]
) -> list[Argument]:
    """The arguments for the blocks of an argument."""
    if blocks is None:
        return [argument]
    placement = argument.placement
    spec = argument.spec if placement is None else placement.spec
    spec = blocks.spec_inside(spec)
    in_place = placement is not None and _lies_in_blocks(placement, blocks)
    parts: list[Argument] = []
    for number, start, stop in _ends(blocks):
        mesh = submeshes[blocks.submeshes[number]].mesh
        parts.append(
            replace(
                argument,
                name=f"{argument.name}[{start}:{stop}]",
                aval=_with_rows(argument.aval, stop - start),
                placement=NamedSharding(mesh, spec) if in_place and spec is not None else None,
                spec=spec,
            )
        )
    return parts


def _lies_in_blocks(placement: NamedSharding, blocks: Blocks) -> bool:
    mesh, spec = placement.mesh, placement.spec
    if not isinstance(mesh, Mesh) or blocks.mesh is None or not same_mesh(mesh, blocks.mesh):
        return False
    first = (spec[0],) if len(spec) and isinstance(spec[0], str) else spec[0] if len(spec) else ()
    return isinstance(first, tuple) and first[:1] == (blocks.axis,)


def split_result(result: Result, blocks: Blocks | None, arguments: Sequence[Parts]) -> list[Result]:
    """The results for the blocks of a result; each succeeds the same block of an argument."""
    succeeded = None if result.successor_of is None else arguments[result.successor_of]
    if blocks is None:
        alike = succeeded is not None and succeeded.blocks is None
        return [replace(result, successor_of=succeeded.first if succeeded and alike else None)]
    alike = succeeded is not None and succeeded.blocks == blocks
    sharding = result.sharding
    if sharding is not None:
        spec = blocks.spec_inside(sharding.spec) or PartitionSpec()
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return [
        replace(
            result,
            name=f"{result.name}[{start}:{stop}]",
            aval=_with_rows(result.aval, stop - start),
            sharding=sharding,
            successor_of=succeeded.first + number if succeeded and alike else None,
        )
        for number, start, stop in _ends(blocks)
    ]


def _ends(blocks: Blocks) -> list[tuple[int, int, int]]:
    ends = pairwise(blocks.bounds)
    return [(number, start, stop) for number, (start, stop) in enumerate(ends)]


def _with_rows(aval: jax.ShapeDtypeStruct, num_rows: int) -> jax.ShapeDtypeStruct:
    shape = (num_rows, *aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
