"""Where results are wanted, and what the plan says of arguments (R8)."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.frontend.logical import same_mesh
from multimesh._src.frontend.tracing import Result, TracedFunction
from multimesh._src.ir.memory import special_memory
from multimesh._src.ir.plan import Block
from multimesh._src.ir.program import EVERYWHERE, Program
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.emit import ArgumentInfo, Place
from multimesh._src.partition.events import Instance, Item
from multimesh._src.partition.given import is_global
from multimesh._src.partition.layouts import fit_spec


def argument_infos(
    traced: TracedFunction, batches: Mapping[int, Batch], blocks: Sequence[Block | None]
) -> list[ArgumentInfo]:
    """Names, donation and form of the arguments."""
    return [
        ArgumentInfo(argument.index, argument.name, argument.donated, batches.get(position), block)
        for position, (argument, block) in enumerate(zip(traced.arguments, blocks, strict=True))
    ]


def result_places(
    results: tuple[Item, ...], program: Program, traced: TracedFunction
) -> list[tuple[Item, Place | None]]:
    """Each result with the place where it is wanted; None leaves it where it is made."""
    return [
        (item, _result_place(item, result, program, traced))
        for item, result in zip(results, traced.results, strict=True)
    ]


def _result_place(
    item: Item, result: Result, program: Program, traced: TracedFunction
) -> Place | None:
    """`out_shardings` beats all, then come the scalars, then what the result succeeds."""
    wanted = result.sharding if isinstance(result.sharding, NamedSharding) else None
    mesh = None if wanted is None else wanted.mesh
    memory = special_memory(wanted)
    if isinstance(mesh, Mesh) and not is_global(mesh, traced):
        home = next(s.index for s in program.submeshes if same_mesh(mesh, s.mesh))
        return home, wanted.spec if wanted is not None else PartitionSpec(), memory
    if wanted is None and isinstance(item, Instance):
        memory = program.memory.get(item.var)
    if wanted is None and result.successor_of is not None:
        memory = program.memory.get(program.arguments[result.successor_of])
    if not isinstance(item, Instance) or program.avals[item.var].ndim == 0:
        return EVERYWHERE, PartitionSpec(), memory
    home = program.home.get(item.var)
    succeeded: PartitionSpec | None = None
    if result.successor_of is not None:
        argument = program.arguments[result.successor_of]
        home = program.home.get(argument, home)
        same = program.avals[argument].shape == program.avals[item.var].shape  # no stored batch
        succeeded = program.specs.get((argument, home)) if same and home is not None else None
    if home == EVERYWHERE and result.successor_of is not None:
        return EVERYWHERE, PartitionSpec(), memory
    if home is None or home == EVERYWHERE:
        return None
    if wanted is not None:
        sizes = dict(program.submeshes[home].mesh.shape)
        return home, fit_spec(wanted.spec, program.avals[item.var].shape, sizes), memory
    return None if succeeded is None else (home, succeeded, memory)
