"""Mistakes in calling the transforms: each error names what is wrong and what to do."""

from typing import Any

import jax
import numpy as np
import pytest

from multimesh._src.errors import ScheduleError, TraceError
from multimesh.jax import MultiMesh, microbatch, mjit, parallelize, task
from tests.staging import models


@pytest.mark.parametrize("transform", [mjit, task, lambda f: microbatch(f, 0, 2)])
def test_what_is_no_function_is_refused_at_once(transform: Any) -> None:
    with pytest.raises(TraceError, match="takes a function, but got a `int`"):
        transform(3)


def test_parallelize_takes_functions_that_make_arrays() -> None:
    make = lambda: np.ones(3)  # noqa: E731
    for arguments in (
        {"init_params": np.ones(3), "get_input_batch": make},
        {"init_params": make, "get_input_batch": np.ones(3)},
    ):
        with pytest.raises(TraceError, match=r"_\w+=\)` takes a function, but got a `ndarray`"):
            parallelize(np.dot, **arguments)
    with pytest.raises(TraceError, match="`parallelize` takes a function"):
        parallelize(np.ones(3), init_params=make, get_input_batch=make)


@pytest.mark.parametrize(
    ("option", "value", "other"),
    [
        ("donate_argnums", "x", "donate_argnames"),
        ("donate_argnums", True, "donate_argnames"),
        ("static_argnums", (0, "x"), "static_argnames"),
        ("static_argnames", 0, "static_argnums"),
        ("donate_argnames", ["x", 1], "donate_argnums"),
    ],
)
def test_positions_and_names_are_told_apart(option: str, value: Any, other: str) -> None:
    with pytest.raises(TraceError, match=rf"`{option}=.*`: .* is no .*\n.*use `{other}=`"):
        mjit(lambda x, y: x, **{option: value})


def test_an_unknown_schedule_is_refused_where_it_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule `1fb1`.\n(.*\n)*.*`1f1b`"):
        microbatch(models.loss, 0, 2, schedule="1fb1")
    with pytest.raises(ScheduleError, match="no schedule `1fb1`"):
        MultiMesh(axis_sizes=(2,), axis_names=("x",), devices=jax.devices()[:2], schedule="1fb1")


def test_a_leaf_that_is_no_array_is_named() -> None:
    with pytest.raises(TraceError, match=r"argument `batch\[1\]` of type `str` is not an array"):
        mjit(lambda state, batch: state)({"a": 1.0}, (1.0, "two"))
    with pytest.raises(TraceError, match="take it out of `batch`: an argument of its own"):
        mjit(lambda state, batch: state)({"a": 1.0}, {"name": "two"})
    with pytest.raises(TraceError, match="name it in `static_argnums`"):
        mjit(lambda state, mode: state)({"a": 1.0}, "train")


def test_errors_of_jax_name_the_function_and_its_argument() -> None:
    limit = 3

    def clipped(x: Any, y: Any) -> Any:
        return x if y > limit else y

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        mjit(clipped)(1.0, 2.0)
    text = str(caught.value)
    assert "clipped at" in text and "test_mistakes.py" in text and "argument y" in text

    with (
        models.make_multi_mesh(),
        pytest.raises(jax.errors.TracerBoolConversionError) as caught,
    ):
        jax.jit(clipped)(1.0, 2.0)
    assert "clipped at" in str(caught.value) and "test_mistakes.py" in str(caught.value)


def test_an_exception_of_a_callback_says_which_scope_asked() -> None:
    multi_mesh = models.make_multi_mesh()

    def broken(name: str, backprop: bool) -> Any:
        raise KeyError(name)

    multi_mesh.register_task(r"loss", callback=broken)

    def f(x: Any) -> Any:
        with jax.named_scope("loss"):
            return x * 2

    with multi_mesh, pytest.raises(KeyError) as caught:
        mjit(f)(1.0)
    (note,) = caught.value.__notes__
    assert "matcher `loss`" in note and "test_mistakes.py" in note
