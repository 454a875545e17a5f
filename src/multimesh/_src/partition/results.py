"""Where results are wanted, and what the plan says of arguments (DESIGN R8)."""

from collections.abc import Mapping

from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.frontend.tracing import Result, TracedFunction
from multimesh._src.ir.program import EVERYWHERE, Program
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.emit import ArgumentInfo, Place
from multimesh._src.partition.events import Instance, Item
from multimesh._src.partition.given import is_global
from multimesh._src.partition.layouts import fit_spec


def argument_infos(traced: TracedFunction, batches: Mapping[int, Batch]) -> list[ArgumentInfo]:
    """Names, donation and form of the arguments."""
    return [
        ArgumentInfo(argument.name, argument.donated, batches.get(position))
        for position, argument in enumerate(traced.arguments)
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
    if not isinstance(item, Instance) or program.avals[item.var].ndim == 0:
        return EVERYWHERE, PartitionSpec()
    aval = program.avals[item.var]
    if result.successor_of is not None:
        argument = program.arguments[result.successor_of]
        home = program.home.get(argument)
        if home == EVERYWHERE:
            return EVERYWHERE, PartitionSpec()
        if home is not None and (argument, home) in program.specs:
            return home, program.specs[argument, home]
    home = program.home.get(item.var)
    if home is None or home == EVERYWHERE:
        return None
    if isinstance(result.sharding, NamedSharding):
        submesh = program.submeshes[home]
        if not is_global(result.sharding.mesh, traced):
            submesh = next(
                s
                for s in program.submeshes
                if list(s.mesh.devices.flat) == list(result.sharding.mesh.devices.flat)
                and s.mesh.axis_names == result.sharding.mesh.axis_names
            )
        sizes = dict(submesh.mesh.shape)
        return submesh.index, fit_spec(result.sharding.spec, aval.shape, sizes)
    return None
