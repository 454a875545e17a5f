"""Contexts: nesting, threads, settings, and what JAX's caches see of them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from multimesh._src import config
from multimesh._src.errors import ConfigError, MatchError, MeshError, ScheduleError
from multimesh._src.frontend import contexts
from multimesh._src.frontend.contexts import Context, active_contexts
from multimesh._src.frontend.multi_mesh import MultiMesh, slice_global_mesh
from multimesh._src.frontend.tasks import Task

WHOLE = Task(mesh_slice={})


@pytest.fixture(autouse=True)
def nothing_is_left():
    assert not active_contexts().has_contexts
    yield
    contexts.clear_tasks()
    assert not active_contexts().has_contexts
    assert config.state() == config.State()


def multi_mesh(**arguments) -> MultiMesh:
    return MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "data"), **arguments)


# --- MultiMesh -----------------------------------------------------------------------------------


def test_mirrors_the_attributes_of_mesh():
    explicit = jax.make_mesh((2, 4), ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)
    mirror = MultiMesh(global_mesh=explicit)
    names = (
        "axis_names axis_sizes shape shape_tuple size devices device_ids local_devices axis_types "
        "abstract_mesh is_multi_process empty auto_axes explicit_axes manual_axes"
    )
    for name in names.split():
        assert np.all(getattr(mirror, name) == getattr(explicit, name)), name
        assert name in dir(mirror)
    assert not isinstance(mirror, Mesh)
    assert repr(mirror).startswith("MultiMesh(Mesh(")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = mirror.no_such_thing
    with pytest.raises(AttributeError, match="_no_such_thing"):
        _ = mirror._no_such_thing


def test_made_of_sizes_names_and_devices():
    made = MultiMesh(axis_sizes=(2, 2), axis_names=("a", "b"), devices=jax.devices()[4:])
    assert made.device_ids.tolist() == [[4, 5], [6, 7]]
    assert made.axis_types == (AxisType.Auto, AxisType.Auto)
    shaped = MultiMesh(axis_names=("a", "b"), devices=np.array(jax.devices()).reshape(4, 2))
    assert shaped.axis_sizes == (4, 2)
    assert MultiMesh(global_mesh=made).global_mesh == made.global_mesh


def test_slices():
    mesh = multi_mesh()
    assert mesh.slice(stage=1).device_ids.tolist() == [[4, 5, 6, 7]]
    assert mesh.single_slice_ids(data=2) == (2, 6)
    assert [device.id for device in mesh.single_slice_devices(data=[1, 3])] == [1, 3, 5, 7]
    with pytest.raises(MeshError, match="Unknown mesh axis `model`"):
        mesh.slice(model=0)


def test_slice_global_mesh_counts_positions():
    reversed_mesh = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("stage", "data"))
    mesh = MultiMesh(global_mesh=reversed_mesh)
    with pytest.raises(MeshError, match="none is active"):
        slice_global_mesh(stage=1)
    with mesh:
        sliced = slice_global_mesh(stage=1)
    assert sliced.devices.tolist() == [[4, 5, 6, 7]]
    assert sliced.on(list(mesh.devices.flat)) == mesh.slice(stage=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "A `MultiMesh` needs a mesh"),
        ({"axis_sizes": (8,)}, "A `MultiMesh` needs a mesh"),
        ({"axis_sizes": (2, 2), "axis_names": ("a", "b")}, "`8` devices do not fill"),
        ({"global_mesh": 3}, "`global_mesh=3` is no `jax.sharding.Mesh`"),
    ],
)
def test_meshes_that_cannot_be_made(arguments, text):
    with pytest.raises(MeshError) as caught:
        MultiMesh(**arguments)
    assert text in str(caught.value)


def test_devices_used_twice():
    devices = [*jax.devices()[:3], jax.devices()[0]]
    with pytest.raises(MeshError, match="is used twice in the global mesh"):
        MultiMesh(global_mesh=Mesh(np.array(devices), ("x",)))
    with pytest.raises(MeshError, match="is used twice in the global mesh"):
        MultiMesh(axis_sizes=(4,), axis_names=("x",), devices=devices)
    with pytest.raises(MeshError, match="takes `global_mesh`, or"):
        MultiMesh(axis_sizes=(8,), global_mesh=Mesh(np.array(jax.devices()), ("x",)))


# --- entering ------------------------------------------------------------------------------------


def test_stack_is_innermost_first_with_the_default_context_at_the_bottom():
    outer, inner = multi_mesh(), Context()
    with outer, inner:
        active = active_contexts()
        assert active.contexts[:2] == (inner, outer)
        assert active.multi_mesh is outer
        assert active.global_mesh == outer.global_mesh
    assert len(active_contexts().contexts) == 1


def test_sets_no_jax_mesh():
    with multi_mesh():
        assert jax.sharding.get_abstract_mesh().empty
        assert (jnp.ones(3) + 1).devices() == {jax.devices()[0]}


def test_decorator_and_reentry():
    mesh = multi_mesh()

    @mesh
    def depth():
        return len(active_contexts().contexts) - 1

    assert depth() == 1
    with mesh:
        assert depth() == 2
        assert depth() == 2


def test_exceptions_leave_nothing_behind():
    with pytest.raises(KeyboardInterrupt), multi_mesh(), config.autoshard(), Context():
        raise KeyboardInterrupt


def test_left_out_of_order():
    outer, inner = Context(), Context()
    with outer, inner, pytest.raises(MatchError, match="is not the context entered last"):
        outer.__exit__(None, None, None)


def test_contexts_are_per_thread():
    seen = []
    with multi_mesh(), config.ignore_transforms():
        thread = threading.Thread(target=lambda: seen.append(active_contexts()))
        thread.start()
        thread.join()
    assert len(seen[0].contexts) == 1
    assert seen[0].settings == config.Settings()


def test_multi_mesh_turns_logical_constraints_on():
    assert not contexts.constraints_are_logical()
    with multi_mesh():
        assert contexts.constraints_are_logical()
        with config.ignore_transforms():
            assert not contexts.constraints_are_logical()
        with Context():
            assert contexts.constraints_are_logical()
    with Context():
        assert not contexts.constraints_are_logical()


def test_schedule_of_a_multi_mesh():
    with multi_mesh(schedule="gpipe"):
        assert config.current_settings().schedule == "gpipe"
        with config.context(schedule="1f1b"):
            assert config.current_settings().schedule == "1f1b"


@pytest.mark.parametrize("schedule", ["1fb1", 3])
def test_a_context_refuses_what_is_no_schedule(schedule):
    for make in (config.context, multi_mesh):
        with pytest.raises(ScheduleError, match=f"{schedule}`"):
            make(schedule=schedule)


def test_activate_brings_contexts_back():
    mesh = multi_mesh()
    with mesh, config.context(schedule="gpipe"):
        bound = active_contexts()
    with Context(), bound.activate():
        assert active_contexts() == bound
    assert bound.matcher().levels[0].mesh == mesh.global_mesh


# --- module-level registration -------------------------------------------------------------------


def test_register_task_goes_to_the_innermost_context():
    contexts.register_task("everywhere", task=WHOLE)
    with multi_mesh() as mesh:
        contexts.register_task("inside", task=WHOLE)
        assert active_contexts().matcher().matchers == ("inside", "everywhere")
    assert [r.matcher for r in mesh.registrations] == ["inside"]
    assert active_contexts().matcher().matchers == ("everywhere",)


def test_clear_tasks():
    contexts.register_task("everywhere", task=WHOLE)
    with multi_mesh() as mesh:
        mesh.register_task("inside", task=WHOLE)
        contexts.clear_tasks()
        assert active_contexts().matcher().matchers == ()


def test_tasks():
    class Model:
        def __call__(self):
            contexts.register_task("model", task=WHOLE)

    contexts.register_task("before", task=WHOLE)
    with contexts.tasks(Model):
        assert active_contexts().matcher().matchers == ("model",)
    assert active_contexts().matcher().matchers == ("before",)
    with pytest.raises(ZeroDivisionError), contexts.tasks(lambda: 1 / 0):
        pass
    assert active_contexts().matcher().matchers == ("before",)


# --- settings ------------------------------------------------------------------------------------


def test_settings_nest():
    with config.context(enable_fast_path=False, enable_task_fusion="never"):
        with config.enable_fast_path(), config.enable_task_fusion(True):
            settings = config.current_settings()
            assert (settings.enable_fast_path, settings.enable_task_fusion) == (True, "always")
        settings = config.current_settings()
        assert (settings.enable_fast_path, settings.enable_task_fusion) == (False, "never")


def test_each_setting_has_its_context():
    makers = {
        "autoshard": config.autoshard(True),
        "ignore_transforms": config.ignore_transforms(True),
        "enable_recomputation": config.enable_recomputation(False),
        "only_fuse_loop_tasks": config.only_fuse_loop_tasks(True),
        "hoist_loop_invariants": config.context(hoist_loop_invariants=False),
        "defer_grad_reduction": config.context(defer_grad_reduction=False),
    }
    for name, maker in makers.items():
        before = getattr(config.current_settings(), name)
        with maker:
            assert getattr(config.current_settings(), name) != before
        assert getattr(config.current_settings(), name) == before


def test_process_wide_settings():
    try:
        config.replicate_parameters_smaller_than_num_elements(0)
        config.recompute_from_arguments_if_cost_less_than(7)
        settings = config.current_settings()
        assert settings.replicate_parameters_smaller_than_num_elements == 0
        assert settings.recompute_from_arguments_if_cost_less_than == 7
    finally:
        config.replicate_parameters_smaller_than_num_elements()
        config.recompute_from_arguments_if_cost_less_than()
    assert config.current_settings() == config.Settings()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: config.autoshard("yes"), "`autoshard='yes'`"),
        (lambda: config.enable_task_fusion("some"), "`enable_task_fusion='some'`: it is one of"),
        (lambda: config.context(defer_grad_reduction="no"), "`defer_grad_reduction='no'`"),
        (
            lambda: config.replicate_parameters_smaller_than_num_elements(-1),
            "`replicate_parameters_smaller_than_num_elements(-1)`",
        ),
    ],
)
def test_values_that_a_setting_does_not_have(call, text):
    with pytest.raises(ConfigError) as caught:
        call()
    assert text in str(caught.value)


# --- what JAX's caches see -----------------------------------------------------------------------


class Counted:
    """A jitted function that counts its traces."""

    def __init__(self):
        self.traces = 0
        self.call = jax.jit(self._trace)

    def _trace(self, x):
        self.traces += 1
        return x + 1

    def retraced(self) -> bool:
        before = self.traces
        self.call(1.0)
        return self.traces > before


def test_jit_caches_are_separate_per_context_and_setting():
    counted = Counted()
    first, second = multi_mesh(), multi_mesh()
    assert counted.retraced()
    with first:
        assert counted.retraced()
        assert not counted.retraced()
        with config.context(schedule="gpipe"):
            assert counted.retraced()
        assert not counted.retraced()
        first.register_task("layer", task=WHOLE)
        assert counted.retraced()
        with second:
            assert counted.retraced()
        assert not counted.retraced()
    assert not counted.retraced()
    with first:
        assert not counted.retraced()


def test_registration_inside_nested_contexts_is_seen_after_leaving():
    counted = Counted()
    outer = multi_mesh()
    with outer:
        assert counted.retraced()
        with Context():
            outer.register_task("layer", task=WHOLE)
        assert counted.retraced()
        assert not counted.retraced()


def test_clearing_and_registering_again_is_a_change():
    mesh = multi_mesh()
    mesh.register_task("layer", task=WHOLE)
    counted = Counted()
    with mesh:
        assert counted.retraced()
        contexts.clear_tasks()
        mesh.register_task("other", task=WHOLE)
        assert counted.retraced()


def test_default_context_is_seen_by_every_thread():
    counted = Counted()
    assert counted.retraced()
    contexts.register_task("layer", task=WHOLE)
    assert counted.retraced()
    retraced = []
    thread = threading.Thread(target=lambda: retraced.append(counted.retraced()))
    thread.start()
    thread.join()
    assert retraced == [False]


def test_cache_key_of_active_contexts():
    mesh = multi_mesh()
    with mesh:
        key = active_contexts().cache_key
        assert hash(key) == hash(active_contexts().cache_key)
        mesh.register_task("layer", task=WHOLE)
        assert active_contexts().cache_key != key
    assert active_contexts().cache_key != key
