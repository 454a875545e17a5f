"""What users say of a task: `Task`, and `TaskMesh` for device lists written by hand."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from multimesh._src.errors import MeshError, message
from multimesh._src.topology import Index, check_axes, check_unique, make_mesh

# (logical axis, device axis) pairs in priority order. A mapping and several device axes for one
# logical axis are taken as well: `{"batch": ("data", "fsdp"), "mlp": None}`.
LogicalAxes: TypeAlias = Sequence[tuple[str, Any]] | Mapping[str, Any]


@final
class TaskMesh:
    """A submesh given by device numbers.

    The numbers index the flattened devices of the active `MultiMesh`; without one, those of
    `mjit(devices=)`; without them, `jax.devices()`.

    Args:
        devices: Device numbers in the order of the mesh; an array may already have its shape.
            `jax.Device` objects are taken as they are.
        axis_sizes: Sizes of the axes. Default: the shape of an array `devices`.
        axis_names: Names of the axes. Default, for one axis only: `("x",)`.
        abstract: An `AbstractMesh` with sizes, names and axis types, instead of the two above.

    Raises:
        MeshError: The devices do not fill the axes, a device stands twice, or a number is negative.

    Example:
        >>> TaskMesh(devices=[4, 5, 6, 7], axis_sizes=(2, 2), axis_names=("data", "model"))
        TaskMesh(devices=[4, 5, 6, 7], data=2, model=2)
    """

    __slots__ = ("abstract_mesh", "devices")

    devices: np.ndarray
    abstract_mesh: AbstractMesh

    def __init__(
        self,
        *,
        devices: Sequence[Any] | np.ndarray,
        axis_sizes: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        abstract: AbstractMesh | None = None,
    ):
        entries = np.asarray(devices, dtype=object)
        flat = [_device_number(entry) for entry in entries.flat]
        check_unique(flat, "a `TaskMesh`")
        self.abstract_mesh = _abstract(entries.shape, axis_sizes, axis_names, abstract)
        if self.abstract_mesh.size != len(flat):
            raise MeshError(
                message(
                    f"`{len(flat)}` devices do not fill a `TaskMesh` with axes "
                    f"`{dict(self.abstract_mesh.shape)}`.",
                    ways=(f"give `{self.abstract_mesh.size}` devices.",),
                )
            )
        array = np.empty(len(flat), dtype=object)
        array[:] = flat
        self.devices = array.reshape(self.abstract_mesh.axis_sizes)

    @property
    def mesh(self) -> AbstractMesh:
        """The axes of the submesh, without devices."""
        return self.abstract_mesh

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.abstract_mesh.axis_names)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.abstract_mesh.axis_sizes)

    def place(self, devices: Sequence[Any] | np.ndarray) -> "TaskMesh":
        """Returns the same axes on other devices."""
        flat = list(np.asarray(devices, dtype=object).flat)
        return TaskMesh(devices=flat, abstract=self.abstract_mesh)

    def on(self, devices: Sequence[Any]) -> Mesh:
        """Returns the mesh of real devices; numbers index `devices`.

        Raises:
            MeshError: A number is out of range.
        """
        flat = list(self.devices.flat)
        outside = [n for n in flat if isinstance(n, int) and n >= len(devices)]
        if outside:
            raise MeshError(
                message(
                    f"Device number `{outside[0]}` of {self!r} is out of range: there are "
                    f"`{len(devices)}` devices.",
                    ways=(f"use numbers from `0` to `{len(devices) - 1}`.",),
                )
            )
        return make_mesh(
            self.axis_sizes,
            self.axis_names,
            [devices[entry] if isinstance(entry, int) else entry for entry in flat],
            axis_types=self.abstract_mesh.axis_types,
            what=repr(self),
        )

    def _identity(self) -> tuple[Any, ...]:
        mesh = self.abstract_mesh
        return (tuple(self.devices.flat), self.axis_sizes, self.axis_names, mesh.axis_types)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskMesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.abstract_mesh.shape.items())
        numbers = [entry if isinstance(entry, int) else entry.id for entry in self.devices.flat]
        return f"TaskMesh(devices={numbers}, {axes})"


def _device_number(entry: Any) -> Any:
    if isinstance(entry, jax.Device):
        return entry
    try:
        number = operator.index(entry)
    except TypeError:
        number = -1
    if number < 0 or isinstance(entry, bool):
        raise MeshError(
            f"`{entry!r}` is no device number: a `TaskMesh` takes integers from 0 or JAX devices."
        )
    return number


def _abstract(
    shape: tuple[int, ...],
    axis_sizes: Sequence[int] | None,
    axis_names: Sequence[str] | None,
    abstract: AbstractMesh | None,
) -> AbstractMesh:
    if abstract is not None:
        if axis_sizes is not None or axis_names is not None:
            raise MeshError("A `TaskMesh` takes `abstract` or `axis_sizes` and `axis_names`.")
        return abstract
    sizes = tuple(shape if axis_sizes is None else axis_sizes)
    if axis_names is None and len(sizes) != 1:
        raise MeshError(
            f"A `TaskMesh` with axes of sizes `{sizes}` needs `axis_names`, one name an axis."
        )
    names = ("x",) if axis_names is None else tuple(axis_names)
    check_axes(sizes, names, "a `TaskMesh`")
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@dataclass(frozen=True, slots=True)
class Task:
    """Where and how the code of a scope runs. Checked when a scope matches.

    Attributes:
        name: Name of the task group. Default: the matched text. One name means one submesh.
        mesh: The submesh, as a `TaskMesh` or a `jax.sharding.Mesh`. Excludes `mesh_slice`.
        logical_axes: (logical axis, device axis) pairs in priority order. Default: each mesh axis
            maps to itself.
        mesh_slice: The submesh as a slice of the active `MultiMesh`: axis name to integer, slice or
            list. `{}` is the whole mesh.
        extra_axes: Pairs appended to `logical_axes`, with the lowest priority.
        split_backprop: Suffixes of the names of the two halves of the backward pass (activation
            gradients, weight gradients) where the schedule splits it.
        loop_dependent_mesh_slice: A function from the iteration of the loop to `mesh_slice`.
        stage: The pipeline stage, counted from 0. Default: derived from the dataflow.
    """

    name: str | None = None
    mesh: TaskMesh | Mesh | None = None
    logical_axes: LogicalAxes | None = None
    mesh_slice: Mapping[str, Index] | None = None
    extra_axes: LogicalAxes | None = None
    split_backprop: tuple[str, str] | None = None
    loop_dependent_mesh_slice: Callable[[int], Mapping[str, Index]] | None = None
    stage: int | None = None
