"""`init(fun, like=step)`: a state is made where a compiled step takes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from multimesh._src.errors import TraceError
from multimesh._src.runtime import counters
from multimesh.jax import MultiMesh, init, mjit
from tests.staging import models


@pytest.fixture(params=[False, True], ids=["auto", "explicit"])
def multi_mesh(request: pytest.FixtureRequest) -> MultiMesh:
    return models.make_multi_mesh(explicit=request.param)


def make_state(key: Any) -> Any:
    keys = jax.random.split(key, 4)
    params = [
        {"b": jnp.zeros(models.WIDTH), "w": jax.random.normal(k, (models.WIDTH, models.WIDTH)) / 4}
        for k in keys
    ]
    momentum = jax.tree.map(jnp.zeros_like, params)
    return {"count": jnp.int32(0), "momentum": momentum, "params": params}


@pytest.fixture
def compiled(multi_mesh: MultiMesh) -> Any:
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    with multi_mesh:
        return (
            mjit(models.step, donate_argnums=0).lower(shapes, models.make_batches(1)[0]).compile()
        )


def test_a_state_is_made_where_the_step_takes_it(multi_mesh: MultiMesh, compiled: Any) -> None:
    state = init(make_state, like=compiled)(jax.random.key(3))
    wanted = jax.jit(make_state)(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    where = compiled.input_shardings[0][0]
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, where)
    assert all(jax.tree.leaves(same))
    assert models.devices_of(state["params"][3]["w"]) == [(4, 5, 6, 7)]
    before = counters.snapshot()
    compiled(state, models.make_batches(1)[0])
    assert counters.since(before).argument_moves == 0


def test_a_part_of_the_state_is_found_by_its_tree(compiled: Any) -> None:
    again = init(lambda: models.make_batches(1)[0], like=compiled)()
    where = compiled.input_shardings[0][1]
    assert [x.sharding.mesh for x in again] == [s.mesh for s in where]
    given = init(make_state, like=compiled, argnum=0)(jax.random.key(0))
    assert models.devices_of(given["params"][0]["w"]) == [(0, 1, 2, 3)]


def test_like_a_tree_of_arrays_or_shardings(multi_mesh: MultiMesh) -> None:
    place = NamedSharding(multi_mesh.slice(stage=1), P("data"))
    like = {"x": place, "y": jax.device_put(jnp.ones(8), place)}
    made = init(lambda: {"x": jnp.arange(8.0), "y": jnp.arange(8.0)}, like=like)()
    assert models.devices_of(made) == [(4, 5, 6, 7)] * 2
    np.testing.assert_array_equal(made["x"], np.arange(8.0))


def test_errors_say_what_the_step_takes(compiled: Any) -> None:
    with pytest.raises(TraceError, match=r"no argument .* is: {'other': float32\[3\]}.\n"):
        init(lambda: {"other": jnp.ones(3)}, like=compiled)()
    with pytest.raises(TraceError, match="what not argument 1 of the"):
        init(make_state, like=compiled, argnum=1)(jax.random.key(0))
    with pytest.raises(TraceError, match="does not say where"):
        init(make_state, like=models.step)(jax.random.key(0))
    place = compiled.input_shardings[0][0]["params"][0]["w"]
    with pytest.raises(TraceError, match="but `like` is"):
        init(make_state, like=[place])(jax.random.key(0))
