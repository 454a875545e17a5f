"""`parallelize` in all its forms; the tutorial on MultiMesh contexts."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.errors import MeshError, TraceError
from multimesh._src.runtime import counters
from multimesh.jax import (
    MultiMesh,
    Task,
    TaskMesh,
    parallelize,
    task,
    with_sharding_constraint,
)
from tests.staging import models


def f(param: Any, x: Any) -> Any:
    return jnp.einsum("bm,mh->bh", x, param)


def model(params: Any, x: Any) -> Any:
    x = with_sharding_constraint(x, P("batch", None))
    param_1, param_2 = params
    param_1 = with_sharding_constraint(param_1, P("model", None))
    param_2 = with_sharding_constraint(param_2, P(None, "model"))
    with jax.named_scope("layer0"):
        x = f(param_1, x)
    with jax.named_scope("layer1"):
        x = f(param_2, x)
        return with_sharding_constraint(x, P("batch", None))


def get_input_batch() -> Any:
    return jnp.arange(64).reshape(8, 8)


def init_params() -> Any:
    return jnp.arange(64).reshape(8, 8), jnp.arange(64).reshape(8, 8)


def expected() -> Any:
    param_1, param_2 = init_params()
    return np.asarray(jax.jit(lambda a, b, x: x @ a @ b)(param_1, param_2, get_input_batch()))


def shards(array: Any) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per device the (start, stop) of each dim."""
    return {
        shard.device.id: tuple(
            s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)
        )
        for shard in array.addressable_shards
    }


ROWS = {0: ((0, 4), (0, 8)), 2: ((0, 4), (0, 8)), 1: ((4, 8), (0, 8)), 3: ((4, 8), (0, 8))}
COLUMNS = {4: ((0, 8), (0, 4)), 6: ((0, 8), (0, 4)), 5: ((0, 8), (4, 8)), 7: ((0, 8), (4, 8))}


def tutorial_mesh(explicit: bool) -> MultiMesh:
    names = ("stage", "batch", "model")
    if explicit:
        multi_mesh = MultiMesh(global_mesh=jax.make_mesh((2, 2, 2), names))
    else:
        multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()).reshape(2, 2, 2), names))

    def callback(name: str, backprop: bool) -> Task:
        layer = int(re.compile(r"layer(\d+)").search(name).groups()[0])
        suffix = "bwd" if backprop else "fwd"
        return Task(name=f"layer{layer}_{suffix}", mesh_slice={"stage": layer})

    multi_mesh.register_task(r"layer\d+", callback=callback)
    return multi_mesh


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_tutorial(explicit: bool) -> None:
    multi_mesh = tutorial_mesh(explicit)
    with multi_mesh:
        sharded_model, init_sharded_params, get_sharded_batch = parallelize(
            model, init_params=init_params, get_input_batch=get_input_batch
        )
    param_1, param_2 = init_sharded_params()
    assert shards(param_1) == ROWS
    assert shards(param_2) == COLUMNS
    assert param_1.sharding.mesh == multi_mesh.slice(stage=0)  # axis types included
    batch = get_sharded_batch()
    before = counters.snapshot()
    result = sharded_model((param_1, param_2), batch)
    np.testing.assert_array_equal(result, expected())
    np.testing.assert_array_equal(sharded_model((param_1, param_2), np.asarray(batch)), expected())
    counts = counters.since(before)
    assert counts.argument_moves == counts.traces == counts.compiles == 0


def test_no_device_holds_what_it_does_not_own() -> None:
    with tutorial_mesh(explicit=False):
        _, init, _ = parallelize(model, init_params=init_params, get_input_batch=get_input_batch)
        lowered = init.lower()
    assert [text.count("HloModule") for text in [lowered.compile().as_text()]] == [2]


def test_random_parameters_have_the_bits_of_the_uncut_init() -> None:
    def init() -> Any:
        keys = jax.random.split(jax.random.key(7), 2)
        return tuple(jax.random.uniform(key, (8, 8)) for key in keys)

    with tutorial_mesh(explicit=False):
        _, sharded_init, _ = parallelize(
            model, init_params=init, get_input_batch=lambda: jnp.ones((8, 8))
        )
    for ours, plain in zip(sharded_init(), jax.jit(init)(), strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_initial_batch_keeps_its_sharding() -> None:
    multi_mesh = tutorial_mesh(explicit=False)
    whole = NamedSharding(multi_mesh.global_mesh, P(("stage", "batch", "model")))
    batch = jax.device_put(np.arange(64).reshape(8, 8), whole)
    with multi_mesh:
        made = parallelize(model, init_params=init_params, initial_batch=batch)
    assert len(made) == 2
    compiled, init = made
    np.testing.assert_array_equal(compiled(init(), batch), expected())
    assert not batch.is_deleted()


def test_explicit_tasks_without_a_multi_mesh() -> None:
    """Row blocks on 0-3, column blocks on 4-7; a batch over all devices is moved."""
    mesh = TaskMesh(devices=range(4), axis_names=("x", "y"), axis_sizes=(4, 1))
    axes = (("batch", "x"), ("model", "x"))
    layer1 = task(f, "layer1", mesh=mesh, logical_axes=axes)
    layer2 = task(f, "layer2", mesh=mesh.place(range(4, 8)), logical_axes=axes)

    def two_tasks(params: Any, x: Any) -> Any:
        param_1, param_2 = params
        param_1 = with_sharding_constraint(param_1, P("model", None))
        param_2 = with_sharding_constraint(param_2, P(None, "model"))
        x = layer1(param_1, with_sharding_constraint(x, P("batch", None)))
        return with_sharding_constraint(layer2(param_2, x), P("batch", None))

    compiled, init, get_batch = parallelize(
        two_tasks, init_params=init_params, get_input_batch=get_input_batch
    )
    param_1, param_2 = init()
    assert shards(param_1) == {i: ((2 * i, 2 * i + 2), (0, 8)) for i in range(4)}
    assert shards(param_2) == {i + 4: ((0, 8), (2 * i, 2 * i + 2)) for i in range(4)}
    assert set(shards(get_batch())) == {0, 1, 2, 3}
    whole = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    for batch in (get_batch(), jax.device_put(get_input_batch(), whole)):
        np.testing.assert_array_equal(compiled((param_1, param_2), batch), expected())


def test_devices_renumber_task_meshes() -> None:
    mesh = TaskMesh(devices=[0, 1], axis_names=("x",), axis_sizes=(2,))
    layer = task(f, "layer", mesh=mesh)
    compiled, init, _ = parallelize(
        lambda params, x: layer(params[1], layer(params[0], x)),
        init_params=init_params,
        get_input_batch=get_input_batch,
        devices=jax.devices()[4:],
    )
    assert models.devices_of(init()) == [(4, 5)] * 2
    np.testing.assert_array_equal(compiled(init(), get_input_batch()), expected())


def test_without_tasks_everything_is_replicated() -> None:
    compiled, init, get_batch = parallelize(
        model, init_params=init_params, get_input_batch=get_input_batch
    )
    arrays = (*init(), get_batch())
    assert models.devices_of(arrays) == [tuple(range(8))] * 3
    assert all(array.is_fully_replicated for array in arrays)
    np.testing.assert_array_equal(compiled(arrays[:2], arrays[2]), expected())


def test_one_task_on_all_devices() -> None:
    whole = task(
        model,
        mesh=TaskMesh(devices=range(8), axis_names=("x",), axis_sizes=(8,)),
        logical_axes=(("batch", "x"), ("model", "x")),
    )
    compiled, init, get_batch = parallelize(
        whole, init_params=init_params, get_input_batch=get_input_batch
    )
    param_1, param_2 = init()
    assert param_1.sharding.spec == P("x", None) and param_2.sharding.spec == P(None, "x")
    np.testing.assert_array_equal(compiled((param_1, param_2), get_batch()), expected())


def test_unused_parameters() -> None:
    with tutorial_mesh(explicit=False):
        compiled, init, get_batch = parallelize(
            lambda params, x: model(params[:2], x),
            init_params=lambda: (*init_params(), jnp.ones(3)),
            get_input_batch=get_input_batch,
        )
    np.testing.assert_array_equal(compiled(init(), get_batch()), expected())


def test_model_is_bound() -> None:
    with tutorial_mesh(explicit=False):
        _compiled, init, _get_batch = parallelize(
            model, init_params=init_params, get_input_batch=get_input_batch
        )
    with tutorial_mesh(explicit=False), pytest.raises(MeshError, match="called inside"):
        init()


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        ({}, "needs `init_params`"),
        ({"init_params": init_params}, "neither of `get_input_batch` and `initial_batch`"),
        (
            {
                "init_params": init_params,
                "get_input_batch": get_input_batch,
                "initial_batch": np.ones((8, 8)),
            },
            "both of `get_input_batch` and `initial_batch`",
        ),
    ],
)
def test_wrong_sources(sources: dict[str, Any], text: str) -> None:
    with pytest.raises(TraceError, match=text):
        parallelize(model, **sources)


def test_warning_when_nothing_matches() -> None:
    multi_mesh = MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "batch"))
    multi_mesh.register_task(r"block\d+", task=Task(mesh_slice={"stage": 0}))
    with multi_mesh, pytest.warns(UserWarning, match=r"(?s)`layer0/.*`layer1`.*`block"):
        parallelize(model, init_params=init_params, get_input_batch=get_input_batch)
