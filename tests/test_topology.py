import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from multimesh._src import topology
from multimesh._src.errors import MeshError


def mesh(types=None) -> Mesh:
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("stage", "data"), axis_types=types)


def ids(sliced: Mesh) -> list[int]:
    return [device.id for device in sliced.devices.flat]


@pytest.mark.parametrize(
    ("index", "shape", "devices"),
    [
        ({}, (2, 4), list(range(8))),
        ({"stage": 1}, (1, 4), [4, 5, 6, 7]),
        ({"stage": -1, "data": np.int64(2)}, (1, 1), [6]),
        ({"data": slice(1, 3)}, (2, 2), [1, 2, 5, 6]),
        ({"data": slice(None, None, 2)}, (2, 2), [0, 2, 4, 6]),
        ({"data": [3, 0]}, (2, 2), [3, 0, 7, 4]),
        ({"data": np.array([1])}, (2, 1), [1, 5]),
    ],
)
def test_slice_keeps_all_axis_names(index, shape, devices):
    sliced = topology.slice_mesh(mesh(), index)
    assert sliced.axis_names == ("stage", "data")
    assert sliced.devices.shape == shape
    assert ids(sliced) == devices


def test_slice_keeps_axis_types():
    types = (AxisType.Auto, AxisType.Explicit)
    assert topology.slice_mesh(mesh(types), {"stage": 0}).axis_types == types
    explicit = jax.make_mesh((2, 4), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    assert topology.slice_mesh(explicit, {"stage": 0}).are_all_axes_explicit


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"stag": 1}, "Unknown mesh axis `stag` in the slice `{'stag': 1}`"),
        ({"stage": 2}, "Index `2` is out of range for mesh axis `stage` of size `2`"),
        ({"stage": -3}, "Index `-3` is out of range"),
        ({"data": [1, 1]}, "Index `1` of mesh axis `data` is used twice"),
        ({"data": [0, -4]}, "Index `0` of mesh axis `data` is used twice"),
        ({"data": []}, "is empty"),
        ({"data": slice(4, 9)}, "is empty"),
        ({"data": "0"}, "use an integer, a slice or a list"),
        ({"data": 1.0}, "use an integer, a slice or a list"),
        ({"data": True}, "use an integer, a slice or a list"),
    ],
)
def test_slice_errors(index, text):
    with pytest.raises(MeshError) as caught:
        topology.slice_mesh(mesh(), index)
    assert text in str(caught.value)


def test_unknown_axis_lists_the_axes():
    with pytest.raises(MeshError, match="axes `stage`=2, `data`=4"):
        topology.slice_mesh(mesh(), {"stag": 1})


def test_labels():
    assert topology.slice_label({"stage": 1}) == "stage=1"
    assert topology.slice_label({"stage": np.int32(1), "data": slice(0, 2)}) == "stage=1,data=0:2"
    assert topology.slice_label({"data": slice(0, 4, 2)}) == "data=0:4:2"
    assert topology.slice_label({"data": [3, 0]}) == "data=[3, 0]"
    assert topology.slice_label({}) == "all devices"
    devices = jax.devices()
    assert topology.devices_label(devices[2:6]) == "devices 2-5"
    assert topology.devices_label([devices[5], devices[2]]) == "devices 5,2"
    assert topology.devices_label(devices[3:4]) == "device 3"


def test_make_mesh_is_auto_and_keeps_the_order_of_devices():
    made = topology.make_mesh((2, 2), ("a", "b"), jax.devices()[7:3:-1])
    assert ids(made) == [7, 6, 5, 4]
    assert made.axis_types == (AxisType.Auto, AxisType.Auto)


@pytest.mark.parametrize(
    ("sizes", "names", "num_devices", "text"),
    [
        ((2, 2), ("a", "b"), 8, "`8` devices do not fill the mesh with axes `a`=2, `b`=2"),
        ((2, 2), ("a",), 4, "differ in length"),
        ((2, 2), ("a", "a"), 4, "Axis name `a` is used twice"),
        ((4, 0), ("a", "b"), 0, "Axis `b`=0 of the mesh is smaller than 1"),
    ],
)
def test_make_mesh_errors(sizes, names, num_devices, text):
    with pytest.raises(MeshError) as caught:
        topology.make_mesh(sizes, names, jax.devices()[:num_devices])
    assert text in str(caught.value)


def test_device_used_twice():
    devices = jax.devices()
    with pytest.raises(MeshError, match=r"is used twice in the mesh"):
        topology.make_mesh((4,), ("a",), [devices[0], devices[1], devices[0], devices[2]])
