import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from multimesh._src.errors import MeshError
from multimesh._src.frontend.tasks import TaskMesh


def ids(mesh) -> list[list[int]]:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_numbers_index_the_given_devices():
    given = TaskMesh(devices=[0, 1, 2, 3], axis_sizes=(2, 2), axis_names=("a", "b"))
    assert ids(given.on(jax.devices())) == [[0, 1], [2, 3]]
    assert ids(given.on(jax.devices()[::-1])) == [[7, 6], [5, 4]]
    assert ids(given.place([5, 1, 7, 3]).on(jax.devices())) == [[5, 1], [7, 3]]


def test_axes():
    given = TaskMesh(devices=np.arange(6).reshape(2, 3), axis_names=("a", "b"))
    assert (given.axis_names, given.axis_sizes) == (("a", "b"), (2, 3))
    assert given.mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert TaskMesh(devices=[4, 5]).axis_names == ("x",)


def test_abstract_mesh_keeps_axis_types():
    types = (AxisType.Explicit, AxisType.Auto)
    given = TaskMesh(devices=range(4), abstract=AbstractMesh((2, 2), ("a", "b"), axis_types=types))
    assert given.on(jax.devices()).axis_types == types


def test_takes_devices_as_they_are():
    given = TaskMesh(devices=jax.devices()[6:])
    assert ids(given.on(jax.devices()[:2])) == [6, 7]


def test_equality_and_text():
    first = TaskMesh(devices=[4, 5], axis_sizes=(2,), axis_names=("x",))
    assert first == TaskMesh(devices=(4, 5))
    assert hash(first) == hash(TaskMesh(devices=(4, 5)))
    assert first != TaskMesh(devices=(5, 4))
    assert repr(first) == "TaskMesh(devices=[4, 5], x=2)"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices": [0, 1, 0]}, "Device `0` is used twice"),
        ({"devices": [0, -1]}, "`-1` is no device number"),
        ({"devices": [0, 1.5]}, "`1.5` is no device number"),
        ({"devices": [0, 1, 2], "axis_sizes": (2,)}, "`3` devices do not fill"),
        ({"devices": [0, 1], "axis_sizes": (1, 2)}, "needs `axis_names`"),
        ({"devices": [0, 1], "axis_names": ("a", "b")}, "differ in length"),
        (
            {
                "devices": [0],
                "axis_names": ("a",),
                "abstract": AbstractMesh((1,), ("a",), axis_types=(AxisType.Auto,)),
            },
            "takes `abstract` or",
        ),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(MeshError) as caught:
        TaskMesh(**arguments)
    assert text in str(caught.value)


def test_number_out_of_range():
    with pytest.raises(MeshError, match=r"Device number `9` of .* there are `8` devices"):
        TaskMesh(devices=[9]).on(jax.devices())
