"""The global mesh as a context: `MultiMesh` and slices of the active one."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh._src.errors import MeshError, message
from multimesh._src.frontend.contexts import Context, active_global_mesh
from multimesh._src.frontend.tasks import TaskMesh
from multimesh._src.schedule.make import check_name
from multimesh._src.topology import Index, check_unique, make_mesh, mesh_positions, slice_mesh


class MultiMesh(Context):
    """The global mesh, sliced into submeshes by the tasks registered with it.

    Give a mesh, or the sizes and names of its axes. Public attributes of `jax.sharding.Mesh`
    (`shape`, `axis_names`, `devices`, `axis_types`, ...) are those of the global mesh.

    Args:
        axis_sizes: Sizes of the axes of a new mesh.
        axis_names: Names of the axes of a new mesh.
        devices: Devices of a new mesh. Default: `jax.devices()`.
        global_mesh: A mesh with Auto or Explicit axes, instead of the three above.
        schedule: The schedule of microbatch loops that name none.

    Raises:
        MeshError: Arguments that exclude each other or do not fit.

    Example:
        >>> mesh = MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "data"))
        >>> dict(mesh.slice(stage=1).shape)
        {'stage': 1, 'data': 4}
    """

    def __init__(
        self,
        *,
        axis_sizes: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        devices: Sequence[Any] | np.ndarray | None = None,
        global_mesh: "Mesh | MultiMesh | None" = None,
        schedule: Any = None,
    ):
        super().__init__()
        self._mesh = _global_mesh(axis_sizes, axis_names, devices, global_mesh)
        check_name(schedule)
        self._schedule = schedule

    @property
    def global_mesh(self) -> Mesh:
        """The mesh of all devices."""
        return self._mesh

    @property
    def schedule(self) -> Any:
        """The schedule of microbatch loops that name none, or None."""
        return self._schedule

    def slice(self, **index: Index) -> Mesh:
        """Returns a part of the mesh; all axis names are kept.

        Args:
            **index: For each sliced axis an integer (the axis keeps size 1), a slice or a list.

        Raises:
            MeshError: An unknown axis, an index out of range, an index used twice.
        """
        return slice_mesh(self._mesh, index)

    def single_slice_ids(self, **index: Index) -> tuple[int, ...]:
        """Returns where the devices of a slice stand in the flattened mesh."""
        return _slice_numbers(self._mesh, index)

    def single_slice_devices(self, **index: Index) -> tuple[Any, ...]:
        """Returns the devices of a slice, flattened."""
        return tuple(self.slice(**index).devices.flat)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")
        return getattr(self._mesh, name)

    def __dir__(self) -> list[str]:
        mesh = [name for name in dir(self._mesh) if not name.startswith("_")]
        return sorted({*super().__dir__(), *mesh})

    def __repr__(self) -> str:
        return f"MultiMesh({self._mesh!r})"


def _global_mesh(
    axis_sizes: Sequence[int] | None,
    axis_names: Sequence[str] | None,
    devices: Sequence[Any] | np.ndarray | None,
    global_mesh: "Mesh | MultiMesh | None",
) -> Mesh:
    given = [axis_sizes is not None, axis_names is not None, devices is not None]
    if global_mesh is not None:
        if any(given):
            raise MeshError("A `MultiMesh` takes `global_mesh`, or sizes, names and devices.")
        mesh = global_mesh.global_mesh if isinstance(global_mesh, MultiMesh) else global_mesh
        if not isinstance(mesh, Mesh):
            raise MeshError(f"`global_mesh={mesh!r}` is no `jax.sharding.Mesh`.")
        check_unique(list(mesh.devices.flat), "the global mesh")
        return mesh
    if axis_names is None or (axis_sizes is None and devices is None):
        raise MeshError(
            message(
                "A `MultiMesh` needs a mesh.",
                ways=(
                    "give `global_mesh=`.",
                    'give `axis_sizes=` and `axis_names=`, as `(2, 4)` and `("stage", "data")`.',
                ),
            )
        )
    sizes = np.shape(np.asarray(devices, dtype=object)) if axis_sizes is None else axis_sizes
    chosen = jax.devices() if devices is None else devices
    return make_mesh(sizes, axis_names, chosen, what="the global mesh")


def slice_global_mesh(**index: Index) -> TaskMesh:
    """Returns a slice of the active `MultiMesh` by the positions of its devices.

    Raises:
        MeshError: No `MultiMesh` is active, or the slice does not exist.
    """
    mesh = active_global_mesh()
    if mesh is None:
        raise MeshError(
            message(
                "`slice_global_mesh` slices the active `MultiMesh`, but none is active.",
                ways=("call it inside `with multi_mesh:`.",),
            )
        )
    abstract = slice_mesh(mesh, index).abstract_mesh
    return TaskMesh(devices=_slice_numbers(mesh, index), abstract=abstract)


def _slice_numbers(mesh: Mesh, index: Mapping[str, Index]) -> tuple[int, ...]:
    """Returns where the devices of a slice stand in the flattened mesh."""
    chosen = mesh_positions(mesh, index)
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    return tuple(int(number) for number in numbers[np.ix_(*chosen)].flat)
