"""Device meshes and their slices.

A slice keeps every axis name of the mesh it comes from: an axis sliced by an integer has size 1.
Shardings, `shard_map` and logical rules written for the global mesh therefore mean the same on all
of its slices. Axis types are the user's.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import AxisType, Mesh

from multimesh._src.errors import MeshError, listed, message

Index: TypeAlias = int | slice | Sequence[int]


def slice_mesh(mesh: Mesh, index: Mapping[str, Index]) -> Mesh:
    """Returns the part of `mesh` that `index` selects, with all axis names and their types.

    Args:
        mesh: The mesh to cut.
        index: For each sliced axis an integer, a slice or a list of integers. Negative integers
            count from the end of the axis. Axes that are not named are kept whole.

    Raises:
        MeshError: An axis that `mesh` does not have, an index out of range, an index given twice,
            or a slice that selects nothing.
    """
    chosen = mesh_positions(mesh, index)
    devices = mesh.devices[np.ix_(*chosen)] if chosen else mesh.devices
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def mesh_positions(mesh: Mesh, index: Mapping[str, Index]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each axis of `mesh`, the positions along it that `index` selects."""
    unknown = [name for name in index if name not in mesh.axis_names]
    if unknown:
        raise MeshError(
            message(
                f"Unknown mesh axis `{unknown[0]}` in the slice `{dict(index)}`.",
                where=f"a mesh with axes {describe_axes(mesh)}",
                ways=("slice along one of the axes above.",),
            )
        )
    return tuple(
        _positions(name, size, index[name]) if name in index else tuple(range(size))
        for name, size in mesh.shape.items()
    )


def _positions(axis: str, size: int, index: Any) -> tuple[int, ...]:
    if isinstance(index, slice):
        positions = tuple(range(size))[index]
    elif _is_integer(index):
        positions = (operator.index(index),)
    else:
        positions = _listed_positions(axis, index)
    outside = [i for i in positions if not -size <= i < size]
    if outside:
        raise MeshError(
            message(
                f"Index `{outside[0]}` is out of range for mesh axis `{axis}` of size `{size}`.",
                ways=(f"use an index from `0` to `{size - 1}`.",),
            )
        )
    positions = tuple(i % size for i in positions)
    twice = sorted({i for i in positions if positions.count(i) > 1})
    if twice:
        raise MeshError(f"Index `{twice[0]}` of mesh axis `{axis}` is used twice in `{index}`.")
    if not positions:
        raise MeshError(f"The slice `{index}` of mesh axis `{axis}` (size `{size}`) is empty.")
    return positions


def _listed_positions(axis: str, index: Any) -> tuple[int, ...]:
    entries = tuple(index) if isinstance(index, Sequence | np.ndarray) else None
    if entries is None or isinstance(index, str) or not all(map(_is_integer, entries)):
        raise MeshError(
            f"Mesh axis `{axis}` is sliced by `{index!r}`: use an integer, a slice or a list of "
            "integers."
        )
    return tuple(operator.index(entry) for entry in entries)


def _is_integer(index: Any) -> bool:
    return isinstance(index, int | np.integer) and not isinstance(index, bool)


def slice_label(index: Mapping[str, Index]) -> str:
    """Returns how users see a slice: `stage=1`, `stage=0:2,data=[0, 2]`, `all devices`."""
    if not index:
        return "all devices"
    return ",".join(f"{axis}={_index_text(value)}" for axis, value in index.items())


def _index_text(index: Any) -> str:
    if isinstance(index, slice):
        ends = ["" if end is None else str(end) for end in (index.start, index.stop, index.step)]
        return ":".join(ends if ends[2] else ends[:2])
    return str(operator.index(index)) if _is_integer(index) else str([int(i) for i in index])


def devices_label(devices: Sequence[Any]) -> str:
    """Returns how users see a device list: `devices 0-3`, `devices 5,2,0`, `device 7`."""
    ids = [device.id for device in devices]
    if len(ids) == 1:
        return f"device {ids[0]}"
    ascending = ids == list(range(ids[0], ids[0] + len(ids)))
    return "devices " + (f"{ids[0]}-{ids[-1]}" if ascending else ",".join(map(str, ids)))


def describe_axes(mesh: Any) -> str:
    """Returns the axes of a mesh as text: `stage=2, data=4`."""
    return ", ".join(f"`{name}`={size}" for name, size in mesh.shape.items()) or "none"


def check_unique(devices: Sequence[Any], what: str) -> None:
    """Checks that no device (or device number) stands twice in a list.

    Raises:
        MeshError: Some device stands twice; `what` names the list.
    """
    seen: set[Any] = set()
    twice = [device for device in devices if device in seen or seen.add(device)]
    if twice:
        problems = [f"Device `{device}` is used twice in {what}." for device in twice]
        raise MeshError(message(listed(problems), ways=("list each device once.",)))


def make_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    devices: Sequence[Any] | np.ndarray,
    *,
    axis_types: Sequence[AxisType] | None = None,
    what: str = "the mesh",
) -> Mesh:
    """Makes a mesh of exactly the given devices; all axes are Auto unless said otherwise.

    Raises:
        MeshError: Sizes and names differ in number, an axis is named twice, the devices do not fill
            the axes, or a device is used twice.
    """
    sizes, names = tuple(axis_sizes), tuple(axis_names)
    check_axes(sizes, names, what)
    flat = list(np.asarray(devices, dtype=object).flat)
    check_unique(flat, what)
    if len(flat) != int(np.prod(sizes, dtype=np.int64)):
        shape = ", ".join(f"`{n}`={s}" for n, s in zip(names, sizes, strict=True))
        raise MeshError(
            message(
                f"`{len(flat)}` devices do not fill {what} with axes {shape}.",
                ways=(
                    f"give `{int(np.prod(sizes))}` devices.",
                    f"choose axis sizes whose product is `{len(flat)}`.",
                ),
            )
        )
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    types = tuple(axis_types) if axis_types is not None else (AxisType.Auto,) * len(names)
    return Mesh(array.reshape(sizes), names, axis_types=types)


def check_axes(sizes: Sequence[int], names: Sequence[str], what: str) -> None:
    """Checks that axis sizes and names belong together.

    Raises:
        MeshError: They differ in number, a name stands twice, or a size is below 1.
    """
    if len(sizes) != len(names):
        raise MeshError(
            f"`axis_sizes={tuple(sizes)}` and `axis_names={tuple(names)}` of {what} differ in "
            "length."
        )
    check_unique_names(names, what)
    small = [f"`{n}`={s}" for n, s in zip(names, sizes, strict=True) if s < 1]
    if small:
        raise MeshError(f"Axis {small[0]} of {what} is smaller than 1.")


def check_unique_names(names: Sequence[str], what: str) -> None:
    """Checks that no axis name stands twice.

    Raises:
        MeshError: One does.
    """
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise MeshError(f"Axis name `{twice[0]}` is used twice in {what}.")
