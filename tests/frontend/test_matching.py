"""Matching by R2, and what a `Task` resolves to (R4, R6)."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from multimesh._src.errors import MatchError, MeshError
from multimesh._src.frontend import contexts, markers
from multimesh._src.frontend.contexts import Context
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task, TaskMesh
from multimesh._src.ir.scope import Scope


@pytest.fixture
def multi_mesh() -> MultiMesh:
    return MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data"))


def matcher(context: Context, devices=None):
    with context:
        return contexts.active_contexts().matcher(devices)


def texts(context: Context, *paths: str) -> list[str | None]:
    frozen = matcher(context)
    found = [frozen.find(tuple(path.split("/")), backprop=False) for path in paths]
    return [match and match.text for match in found]


WHOLE = Task(mesh_slice={})


def ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


# --- which text matches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regex", "path", "text"),
    [
        ("layer1", "layer1", "layer1"),
        ("layer1", "model/layer1/attention/query", "layer1"),
        ("layer1", "layer10", None),
        ("layer1", "model/layer10/layer1", "layer1"),
        (r"layer\d", "layer10", None),
        (r"layer\d+", "layer10", "layer10"),
        ("0", "layer10", None),
        ("10", "layer10", "10"),
        (r"layer(\d+)", "layer10", "10"),
        (r"(layer)s?(\d)?", "layers", "layer"),
        (r"(a)|b", "b", "b"),
        ("x*", "layer", None),
        (r"layer\d+/attention", "layer1/attention/query", "layer1/attention"),
        (r"layer\d+/attention", "layer1/mlp", None),
        ("LAYER", "layer1", None),
    ],
)
def test_text(multi_mesh, regex, path, text):
    multi_mesh.register_task(regex, task=WHOLE)
    assert texts(multi_mesh, path) == [text]


def test_longest_prefix_wins_over_order_of_registration(multi_mesh):
    multi_mesh.register_task("encoder", task=WHOLE)
    multi_mesh.register_task("attention", task=WHOLE)
    paths = ("encoder/attention/q", "encoder/mlp", "attention/encoder")
    assert texts(multi_mesh, *paths) == ["attention", "encoder", "encoder"]


def test_order_of_registration_decides_at_one_prefix(multi_mesh):
    multi_mesh.register_task(r"lay", task=Task(name="first", mesh_slice={}))
    multi_mesh.register_task(r"layer\d+", task=Task(name="second", mesh_slice={}))
    assert texts(multi_mesh, "layer1") == ["lay"]


def test_innermost_context_is_asked_first(multi_mesh):
    multi_mesh.register_task("layer1/attention", task=WHOLE)
    inner = Context()
    inner.register_task("layer1", task=Task(name="inner", mesh_slice={"stage": 2}))
    with multi_mesh:
        found = matcher(inner).find(("layer1", "attention"), backprop=False)
        outside = contexts.active_contexts().matcher().find(("layer1", "attention"), False)
    assert (found.name, found.label) == ("inner", "stage=2")
    assert outside.text == "layer1/attention"


def test_none_from_the_callback_goes_on(multi_mesh):
    multi_mesh.register_task(r"attention", callback=lambda text, backprop: None)
    multi_mesh.register_task(r"layer\d+", task=WHOLE)
    assert texts(multi_mesh, "layer1/attention") == ["layer1"]


def test_callback_is_called_once_per_text_and_direction(multi_mesh):
    calls = []

    def callback(text, backprop):
        calls.append((text, backprop))
        return Task(mesh_slice={"stage": 0})

    multi_mesh.register_task(r"layer\d+", callback=callback)
    for _ in range(2):
        frozen = matcher(multi_mesh)
        for path in [("layer1",), ("layer1", "a"), ("m", "layer1"), ("layer2",)]:
            for backprop in (False, True):
                frozen.find(path, backprop)
    assert calls == [("layer1", False), ("layer1", True), ("layer2", False), ("layer2", True)]


def test_nothing_matches(multi_mesh):
    multi_mesh.register_task("layer", task=WHOLE)
    frozen = matcher(multi_mesh)
    assert frozen.find(("model", "head"), False) is None
    assert frozen.find((), False) is None
    assert frozen.scopes_seen == ("model/head",)
    assert frozen.matchers == ("layer",)


def test_a_matcher_is_frozen(multi_mesh):
    frozen = matcher(multi_mesh)
    multi_mesh.register_task("layer", task=WHOLE)
    assert frozen.find(("layer",), False) is None


# --- where a task is placed ----------------------------------------------------------------------


def test_slice_of_the_mesh(multi_mesh):
    task = Task(mesh_slice={"stage": 1}, stage=3)
    multi_mesh.register_task("layer", task=task)
    match = matcher(multi_mesh).find(("layer",), False)
    assert (match.name, match.text, match.label, match.stage) == ("layer", "layer", "stage=1", 3)
    assert match.mesh.axis_names == ("stage", "data")
    assert match.mesh.devices.shape == (1, 2)
    assert ids(match.mesh) == [2, 3]
    assert match.pairs == (("stage", "stage"), ("data", "data"))
    assert match.task is task
    assert hash(match) == hash(matcher(multi_mesh).find(("layer",), False))


def test_axis_types_of_the_user_are_kept():
    explicit = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    context = MultiMesh(global_mesh=explicit)
    context.register_task("layer", task=Task(mesh_slice={"stage": 1}))
    match = matcher(context).find(("layer",), False)
    assert match.mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_task_mesh_indexes_the_devices_of_the_multi_mesh():
    devices = np.array(jax.devices()[::-1]).reshape(4, 2)
    context = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    context.register_task("layer", task=Task(mesh=TaskMesh(devices=[0, 1, 2])))
    match = matcher(context).find(("layer",), False)
    assert ids(match.mesh) == [7, 6, 5]
    assert match.label == "devices 7,6,5"


def test_task_mesh_without_multi_mesh():
    context = Context()
    context.register_task("layer", task=Task(mesh=TaskMesh(devices=[0, 1])))
    given = matcher(context, devices=jax.devices()[4:]).find(("layer",), False)
    assert (ids(given.mesh), given.label) == ([4, 5], "devices 4-5")
    assert ids(matcher(context).find(("layer",), False).mesh) == [0, 1]


def test_real_mesh_as_task_mesh(multi_mesh):
    mesh = Mesh(np.array(jax.devices()[6:]), ("data",))
    multi_mesh.register_task("layer", task=Task(mesh=mesh))
    assert matcher(multi_mesh).find(("layer",), False).mesh == mesh


def test_context_slices_the_multi_mesh_around_it(multi_mesh):
    context = Context()
    context.register_task("layer", task=Task(mesh_slice={"stage": 3}))
    with multi_mesh:
        assert ids(matcher(context).find(("layer",), False).mesh) == [6, 7]
    with pytest.raises(MatchError, match=r"slices the active `MultiMesh`, but none is active"):
        matcher(context).find(("layer",), False)


def test_logical_axes(multi_mesh):
    multi_mesh.register_task(
        "layer",
        task=Task(
            mesh_slice={"stage": 0},
            logical_axes={"batch": ("data", "stage"), "heads": None},
            extra_axes=[("mlp", "data")],
        ),
    )
    pairs = matcher(multi_mesh).find(("layer",), False).pairs
    assert pairs == (("batch", "data"), ("batch", "stage"), ("mlp", "data"))


def test_extra_axes_follow_the_default_pairs(multi_mesh):
    extra = [("sequence", "data")]
    multi_mesh.register_task("layer", task=Task(mesh_slice={"stage": 0}, extra_axes=extra))
    pairs = matcher(multi_mesh).find(("layer",), False).pairs
    assert pairs == (("stage", "stage"), ("data", "data"), ("sequence", "data"))
    assert extra == [("sequence", "data")]


def test_explicit_task_wins_over_matchers(multi_mesh):
    multi_mesh.register_task("layer", task=Task(mesh_slice={"stage": 0}))
    explicit = markers.ExplicitTask(Task(name="head", mesh_slice={"stage": 2}))
    component = markers._tasks.intern(explicit, "test_explicit_task_wins_over_matchers")
    frozen = matcher(multi_mesh)
    scope = Scope(("layer",), 0, ("multimesh:microbatch:0", component))
    assert frozen.of_scope(scope).name == "head"
    assert frozen.of_scope(Scope(("layer",))).name == "layer"


# --- loops ---------------------------------------------------------------------------------------


def test_scanned_layers_are_numbered_by_iteration(multi_mesh):
    calls = []

    def callback(text, backprop):
        calls.append((text, backprop))
        return Task(mesh_slice={"stage": int(text.split("_")[1])})

    multi_mesh.register_task("layers", callback=callback, scanned=True)
    frozen = matcher(multi_mesh)
    assert frozen.needs_iteration(("layers", "mlp"), False)
    assert not frozen.needs_iteration(("head",), False)
    match = frozen.find(("layers", "mlp"), True, iteration=2)
    assert (match.name, match.label, match.scanned) == ("layers_2", "stage=2", True)
    assert frozen.find(("layers",), False) is None
    assert calls == [("layers_0", False), ("layers_2", True)]


def test_loop_dependent_mesh_slice(multi_mesh):
    task = Task(name="embed", loop_dependent_mesh_slice=lambda i: {"stage": i % 4})
    multi_mesh.register_task("embed", task=task)
    frozen = matcher(multi_mesh)
    assert frozen.needs_iteration(("embed",), False)
    assert [ids(frozen.find(("embed",), False, i).mesh) for i in (0, 5)] == [[0, 1], [2, 3]]
    assert frozen.find(("embed",), False) is None


# --- register_layers -----------------------------------------------------------------------------


def test_register_layers(multi_mesh):
    multi_mesh.register_layers(r"layer_\d+", num_layers=8, layers_per_stage=(1, 2, 2, 3))
    frozen = matcher(multi_mesh)
    found = [frozen.find(("model", f"layer_{i}", "mlp"), False) for i in range(8)]
    assert [match.stage for match in found] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert [match.label for match in found[:3]] == ["stage=0", "stage=1", "stage=1"]
    assert [match.name for match in found[:2]] == ["layer_0", "layer_1"]


def test_register_layers_interleaved(multi_mesh):
    multi_mesh.register_layers(r"h(\d+)", num_layers=8, interleave=2)
    frozen = matcher(multi_mesh)
    found = [frozen.find((f"h{i}",), True) for i in range(8)]
    assert [match.stage for match in found] == list(range(8))
    assert [match.label for match in found] == [f"stage={i % 4}" for i in range(8)]


def test_register_layers_scanned(multi_mesh):
    multi_mesh.register_layers("layers", num_layers=4, scanned=True)
    match = matcher(multi_mesh).find(("layers",), False, iteration=3)
    assert (match.name, match.stage, match.label) == ("layers_3", 3, "stage=3")


def test_register_layers_errors(multi_mesh):
    with pytest.raises(MeshError, match=r"unknown mesh axis `pipe`"):
        multi_mesh.register_layers("layer", num_layers=4, axis="pipe")
    with pytest.raises(MeshError, match=r"but there is no mesh"):
        Context().register_layers("layer", num_layers=4)
    multi_mesh.register_layers(r"layer(?:s|\d+)", num_layers=4)
    frozen = matcher(multi_mesh)
    with pytest.raises(MatchError, match=r"The text `layers` .* has no layer number"):
        frozen.find(("layers",), False)
    with pytest.raises(MatchError, match=r"Layer `4` is not among the `4` registered layers"):
        frozen.find(("layer4",), False)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task(), "has neither `mesh` nor `mesh_slice`"),
        (
            Task(name="t", mesh=TaskMesh(devices=[0]), mesh_slice={}),
            "`Task(name='t')` has both `mesh` and `mesh_slice`",
        ),
        (Task(mesh_slice={}, split_backprop="_bwd"), "`split_backprop='_bwd'` is no pair"),
        (Task(mesh_slice={}, stage=-1), "`stage=-1`: a stage is an integer of at least 0"),
        (Task(mesh_slice={}, name=""), "`''` is no name of a task"),
        (Task(mesh=[0, 1]), "`mesh=[0, 1]` is no mesh"),
        (
            Task(mesh_slice={}, logical_axes=[("batch", "dat")]),
            "Logical axis `batch` maps to the unknown mesh axis `dat`",
        ),
        (Task(mesh_slice={}, extra_axes=["batch"]), "`extra_axes` has the entry `'batch'`"),
    ],
)
def test_tasks_that_cannot_be_used(multi_mesh, task, text):
    multi_mesh.register_task("layer", task=task)
    with pytest.raises(MatchError) as caught:
        matcher(multi_mesh).find(("layer",), False)
    assert text in str(caught.value)
    assert "`layer` registered at" in str(caught.value)
    assert "test_matching.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task(mesh_slice={"stag": 0}), "Unknown mesh axis `stag`"),
        (Task(mesh_slice={"stage": 4}), "Index `4` is out of range"),
        (Task(mesh=TaskMesh(devices=[8])), "Device number `8`"),
    ],
)
def test_meshes_that_do_not_exist(multi_mesh, task, text):
    multi_mesh.register_task("layer", task=task)
    with pytest.raises(MeshError) as caught:
        matcher(multi_mesh).find(("layer",), False)
    assert text in str(caught.value)
    assert "test_matching.py:" in caught.value.__notes__[0]


def test_callback_returns_something_else(multi_mesh):
    multi_mesh.register_task("layer", callback=lambda text, backprop: "stage0")
    with pytest.raises(MatchError) as caught:
        matcher(multi_mesh).find(("layer",), True)
    assert "returned `'stage0'` for `layer` (backprop=`True`)" in str(caught.value)


@pytest.mark.parametrize(
    ("callback", "problem"),
    [
        (lambda text: WHOLE, "takes `(text)`, but is called as `callback(text, backprop)`: too"),
        (lambda text, backprop, *, mesh: WHOLE, "missing a required"),
    ],
)
def test_callback_with_other_arguments(multi_mesh, callback, problem):
    with pytest.raises(MatchError) as caught:
        multi_mesh.register_task(r"layer\d+", callback=callback)
    assert str(caught.value).startswith(r"The callback of matcher `layer\d+` takes `(text")
    assert problem in str(caught.value)
    assert "test_matching.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Task(mesh_slice=0), "`mesh_slice=0` is no mapping from mesh axes to indices"),
        (
            Task(loop_dependent_mesh_slice=lambda i: i % 2),
            "`loop_dependent_mesh_slice(3)=1` is no mapping",
        ),
    ],
)
def test_a_slice_that_names_no_axis(multi_mesh, task, problem):
    multi_mesh.register_task("layer", task=task)
    with pytest.raises(MatchError) as caught:
        matcher(multi_mesh).find(("layer",), False, iteration=3)
    assert problem in str(caught.value)
    assert "test_matching.py:" in str(caught.value)


def test_what_a_loop_dependent_slice_raises_says_where_it_stands(multi_mesh):
    places = ({"stage": 0}, {"stage": 1})
    multi_mesh.register_task("layer", task=Task(loop_dependent_mesh_slice=places.__getitem__))
    with pytest.raises(IndexError) as caught:
        matcher(multi_mesh).find(("layer",), False, iteration=2)
    assert "raised this for `2` at `layer` registered at" in caught.value.__notes__[0]


def test_layers_that_are_counted_from_one(multi_mesh):
    multi_mesh.register_layers(r"layer\d+", num_layers=4)
    with pytest.raises(MatchError) as caught:
        matcher(multi_mesh).find(("layer4",), False)
    text = str(caught.value)
    assert "they are counted from `0` to `3`.\n  at `layer4`, found by `layer\\d+` regis" in text
    assert "test_matching.py:" in text
    assert "1. name the layers of the model from 0 on." in text
    assert not hasattr(caught.value, "__notes__")


def test_one_name_on_two_device_sets(multi_mesh):
    multi_mesh.register_task("encoder", task=Task(name="t", mesh_slice={"stage": 0}))
    multi_mesh.register_task("decoder", task=Task(name="t", mesh_slice={"stage": 1}))
    frozen = matcher(multi_mesh)
    frozen.find(("encoder",), False)
    with pytest.raises(MatchError) as caught:
        frozen.find(("decoder",), False)
    text = str(caught.value)
    assert "Task name `t` stands for two device sets: `stage=0` (devices 0-1) and `stage=1`" in text
    assert "stage=0: `encoder` registered at" in text
    assert "stage=1: `decoder` registered at" in text


def test_one_name_may_have_two_shapes_of_one_device_set(multi_mesh):
    multi_mesh.register_task("encoder", task=Task(name="t", mesh_slice={"stage": 0}))
    multi_mesh.register_task("decoder", task=Task(name="t", mesh=TaskMesh(devices=[1, 0])))
    assert texts(multi_mesh, "encoder", "decoder") == ["encoder", "decoder"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"matcher": "layer"}, "has neither of `callback` and `task`"),
        ({"matcher": "a", "task": WHOLE, "callback": print}, "has both of `callback` and `task`"),
        ({"matcher": "a", "task": "b"}, "`task='b'`, which is no `Task`"),
        ({"matcher": "a", "callback": 3}, "`callback=3`, which is no function"),
        ({"matcher": "layer(", "task": WHOLE}, "`layer(` is no regular expression"),
        ({"matcher": "", "task": WHOLE}, "is a regular expression, not `''`"),
    ],
)
def test_registrations_that_cannot_be_used(arguments, text):
    with pytest.raises(MatchError) as caught:
        Context().register_task(arguments.pop("matcher"), **arguments)
    assert text in str(caught.value)
