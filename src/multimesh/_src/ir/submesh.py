"""Submeshes: the devices of a task."""

from dataclasses import dataclass

from jax.sharding import AxisType, Mesh


@dataclass(frozen=True, slots=True)
class Submesh:
    """The devices of one task. Two submeshes are the same when their meshes are equal.

    `mesh` keeps all axis names of the global mesh (sliced axes have size 1) and the user's axis
    types; results are given out on it. Bodies are traced and compiled on `auto_mesh`.
    `label` is how users see it: `stage=1`, or device ids when it was given by hand.

    A *rotating* submesh stands for another one in every iteration of a loop: `rotation[i]` is the
    index of that of iteration i. All of them have the axes of `mesh`. Nothing lives on it.
    """

    index: int
    label: str
    mesh: Mesh
    rotation: tuple[int, ...] = ()

    def at(self, iteration: int) -> int:
        """The index of the submesh that this one stands for in an iteration."""
        return self.rotation[iteration] if self.rotation else self.index

    @property
    def auto_mesh(self) -> Mesh:
        """The same devices and axis names, all axes of type Auto."""
        return auto_mesh(self.mesh)


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns `mesh` with all axes of type Auto."""
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == auto else Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
