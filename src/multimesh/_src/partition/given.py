"""What the caller says of places: arguments that lie somewhere, results wanted somewhere.

step(w: on stage=0, batch: numpy)  out_shardings=(None, on stage=1)
->  placed {w: 0}   wanted {1: 1}   layouts {w: P('data')}
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.frontend.tracing import Argument, TracedFunction
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import FlatProgram, Var, all_equations
from multimesh._src.ir.memory import memory_kinds
from multimesh._src.ir.program import EVERYWHERE
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.batches import Batch
from multimesh._src.partition.layouts import Layouts, fit_spec, shape_of
from multimesh._src.partition.seeds import Seeds
from multimesh._src.topology import devices_label


def placed_arguments(flat: FlatProgram, traced: TracedFunction, seeds: Seeds) -> dict[Var, int]:
    """Arguments that lie on a submesh; those on the global mesh only give a layout."""
    placed: dict[Var, int] = {}
    for var, argument in zip(flat.arguments, traced.arguments, strict=True):
        mesh = _submesh_of(argument.placement, traced)
        if mesh is not None:
            placed[var] = seeds.number(mesh, _label(mesh))
    return placed


def wanted_submeshes(traced: TracedFunction, seeds: Seeds) -> dict[int, int]:
    """Submesh of each result, by position, that `out_shardings` puts on one."""
    meshes = (_submesh_of(result.sharding, traced) for result in traced.results)
    return {
        position: seeds.number(mesh, _label(mesh))
        for position, mesh in enumerate(meshes)
        if mesh is not None
    }


def succeeded_arguments(flat: FlatProgram, traced: TracedFunction) -> dict[int, Var]:
    """The argument that each result, by position, takes the place of (R8)."""
    return {
        position: flat.arguments[result.successor_of]
        for position, result in enumerate(traced.results)
        if result.successor_of is not None
    }


def _submesh_of(sharding: Any, traced: TracedFunction) -> Mesh | None:
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and not is_global(mesh, traced) else None


def default_submesh(traced: TracedFunction, seeds: Seeds) -> int:
    """Where equations go that nothing places: the first submesh, or all devices without tasks."""
    found = next((s.index for s in seeds.submeshes if not s.rotation), None)
    if found is not None:
        return found
    mesh = traced.global_mesh or Mesh(_devices(traced.devices), ("x",))
    return seeds.number(mesh, "all devices")


def everywhere(traced: TracedFunction, submeshes: tuple[Submesh, ...]) -> Mesh:
    """The mesh of values that live everywhere: the whole MultiMesh, or all submeshes together."""
    if traced.global_mesh is not None:
        return traced.global_mesh
    if len(submeshes) == 1:
        return submeshes[0].mesh
    devices = dict.fromkeys(d for submesh in submeshes for d in submesh.mesh.devices.flat)
    return Mesh(_devices(list(devices)), ("all",))


def is_global(mesh: Any, traced: TracedFunction) -> bool:
    """Whether a mesh has all devices of the program: it gives a layout but no place."""
    whole = traced.global_mesh
    devices = whole.devices.flat if whole is not None else traced.devices
    return set(mesh.devices.flat) == set(devices)


def _devices(devices: Any) -> Any:
    return np.array(devices, dtype=object)


def given_layouts(
    flat: FlatProgram,
    traced: TracedFunction,
    submeshes: tuple[Submesh, ...],
    homes: Mapping[Var, int],
    batches: Mapping[int, Batch],
) -> Layouts:
    """Layouts that arguments come with, on every shape of submesh.

    A batch that is stored microbatch-major has that of its rows.
    """
    shapes = {shape_of(submesh) for submesh in submeshes}
    fixed: Layouts = {}
    for position, (var, argument) in enumerate(zip(flat.arguments, traced.arguments, strict=True)):
        spec = _given_spec(argument)
        if spec is not None and position in batches:
            spec = PartitionSpec(None, *spec)
        if spec is not None and homes.get(var) != EVERYWHERE:
            for shape in shapes:
                fixed[var, shape] = fit_spec(spec, flat.avals[var].shape, dict(shape))
    return fixed


def find_memory(
    flat: FlatProgram, traced: TracedFunction, batches: Mapping[int, Batch]
) -> dict[Var, str]:
    """Memory kinds of the variables that do not live in the default memory.

    An argument keeps the memory that it comes in, unless it is a batch; any other variable lives
    where the program puts it.
    """
    memory: dict[Var, str] = {}
    for position, (var, argument) in enumerate(zip(flat.arguments, traced.arguments, strict=True)):
        if argument.memory_kind is not None and position not in batches:
            memory[var] = argument.memory_kind
    for equation in all_equations(flat.steps):
        if equation.eqn.primitive is constraint_p:
            kind = equation.eqn.params["memory_kind"]
            if kind is not None and kind != _default_memory(traced):
                memory[equation.outputs[0]] = kind
    return memory


def _default_memory(traced: TracedFunction) -> str:
    device = traced.devices[0] if traced.global_mesh is None else traced.global_mesh.devices.flat[0]
    return memory_kinds(device)[0]


def _given_spec(argument: Argument) -> PartitionSpec | None:
    if argument.spec is not None:
        return argument.spec
    return argument.placement.spec if isinstance(argument.placement, NamedSharding) else None


def _label(mesh: Mesh) -> str:
    return devices_label(list(mesh.devices.flat))
