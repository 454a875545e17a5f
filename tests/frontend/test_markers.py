"""Explicit tasks and the tables of markers. Needs 8 CPU devices."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src import config
from multimesh._src.errors import MatchError
from multimesh._src.frontend import logical, markers
from multimesh._src.frontend.markers import MicrobatchMarker, microbatch_scope, task, task_marker
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.scopes import scope_of_equation
from multimesh._src.frontend.tasks import Task, TaskMesh
from multimesh._src.jax_compat import jaxprs

X = np.ones((4,), np.float32)


@pytest.fixture
def multi_mesh():
    with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data")) as entered:
        yield entered


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(markers, "_warned", set())


def tasks_of(fun, *args):
    """The explicit task of each equation, outermost first; a tuple of Tasks each."""
    found = []
    for eqn in jaxprs.all_eqns(jax.make_jaxpr(fun)(*args)):
        scope = scope_of_equation(eqn)
        found.append(tuple(task_marker(marker).task for marker in scope.markers))
    return found


def double(x):
    return x * 2


def test_equations_lie_in_the_task(multi_mesh):
    def f(x):
        return task(double, mesh_slice={"stage": 1})(x) + 1

    assert tasks_of(f, X) == [(Task("double", mesh_slice={"stage": 1}),), ()]


def test_path_does_not_show_the_marker(multi_mesh):
    def f(x):
        with jax.named_scope("layer0"):
            return task(double, mesh_slice={})(x)

    (eqn,) = jax.make_jaxpr(f)(X).eqns
    assert scope_of_equation(eqn).path == ("layer0",)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: task(double, mesh_slice={}), "double"),
        (lambda: task(double, "named", mesh_slice={}), "named"),
        (lambda: task(double, task=Task("of_task", mesh_slice={})), "of_task"),
        (lambda: task(double, "named", task=Task("of_task", mesh_slice={})), "named"),
        (lambda: task(functools.partial(double), mesh_slice={}), "double"),
    ],
)
def test_names(multi_mesh, made, name):
    assert tasks_of(made(), X)[0][0].name == name


def test_gradients_are_those_of_the_function(multi_mesh):
    inside = task(lambda x: jnp.sin(x).sum(), "t", mesh_slice={})
    np.testing.assert_array_equal(jax.grad(inside)(X), jnp.cos(X))
    found = tasks_of(jax.grad(inside), X)
    assert all(len(tasks) == 1 for tasks in found)
    # No recomputation: one sine and one cosine.
    names = [e.primitive.name for e in jax.make_jaxpr(jax.grad(inside))(X).eqns]
    assert names.count("cos") == 1 and names.count("sin") <= 1


def test_nested_tasks(multi_mesh):
    inner = task(double, "inner", mesh_slice={})
    outer = task(lambda x: inner(x), "outer", mesh_slice={})
    assert [t.name for t in tasks_of(outer, X)[0]] == ["outer", "inner"]


def test_it_acts_while_we_trace():
    with logical.redirect_constraints():
        assert len(tasks_of(task(double, mesh_slice={}), X)[0]) == 1


def test_elsewhere_it_warns_once():
    inert = task(double, mesh_slice={})
    with pytest.warns(UserWarning, match="Task `double` has no effect here"):
        np.testing.assert_array_equal(inert(X), X * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tasks_of(task(double, mesh_slice={}), X) == [()]


def test_ignore_transforms_is_silent(multi_mesh):
    with config.ignore_transforms():
        assert tasks_of(task(double, mesh_slice={}), X) == [()]


def test_keyword_arguments_and_name_of_the_function(multi_mesh):
    wrapped = task(lambda x, scale: x * scale, "t", mesh_slice={})
    np.testing.assert_array_equal(wrapped(X, scale=3), X * 3)
    assert task(double, mesh_slice={}).__name__ == "double"


def test_unknown_field():
    with pytest.raises(MatchError, match="`mesh_slices=`, which is no field") as error:
        task(double, mesh_slices={})
    assert "`loop_dependent_mesh_slice`" in str(error.value)


def test_task_and_fields():
    with pytest.raises(MatchError, match="both `task=") as error:
        task(double, task=Task(mesh_slice={}), stage=1)
    assert "give `task=` alone" in str(error.value)


def test_task_of_another_type():
    with pytest.raises(MatchError, match="which is no `Task`"):
        task(double, task={"stage": 0})


def component(made):
    (eqn,) = jax.make_jaxpr(made)(X).eqns
    return str(eqn.source_info.name_stack)


def test_equal_tasks_have_one_scope(multi_mesh):
    def axes():
        return {"batch": ("data",), "mlp": None}

    def mesh():
        return TaskMesh(devices=[0, 1], axis_sizes=(2,), axis_names=("data",))

    a = component(task(double, mesh=mesh(), logical_axes=axes()))
    b = component(task(double, mesh=mesh(), logical_axes=axes()))
    c = component(task(double, mesh=mesh(), logical_axes={"batch": "data"}))
    assert a == b != c


def test_a_callable_slice_is_told_by_identity(multi_mesh):
    def by_iteration(i):
        return {"stage": i}

    a = component(task(double, loop_dependent_mesh_slice=by_iteration))
    b = component(task(double, loop_dependent_mesh_slice=by_iteration))
    c = component(task(double, loop_dependent_mesh_slice=lambda i: {"stage": i}))
    assert a == b != c


def test_a_jit_cache_keeps_naming_its_task(multi_mesh):
    step = jax.jit(lambda x: task(double, mesh_slice={"stage": 2})(x))
    (first,) = jax.make_jaxpr(step)(X).eqns
    task(double, "another", mesh_slice={"stage": 3})
    (again,) = jax.make_jaxpr(step)(X).eqns
    assert again.params["jaxpr"] is first.params["jaxpr"]
    assert tasks_of(step, X)[-1] == (Task("double", mesh_slice={"stage": 2}),)


def test_components_that_are_no_markers():
    for text in ("layer0", "multimesh:task", "multimesh:task:x", "multimesh:task:999999", ""):
        assert task_marker(text) is None
    marker = MicrobatchMarker(num_microbatches=2, size=1)
    with jax.named_scope("outer"), microbatch_scope(marker):
        (eqn,) = jax.make_jaxpr(double)(X).eqns
    assert task_marker("multimesh:microbatch:0") is None
    assert eqn is not None


def test_microbatch_markers():
    marker = MicrobatchMarker(2, 3, "1f1b", (("a", "b"), ((0, "a"), (1, "b"))), 2, 1, 4)

    def f(x):
        with microbatch_scope(marker):
            return x * 2

    assert markers.microbatch_marker(component(f)) == marker
    with config.ignore_transforms():
        assert component(f) == ""
