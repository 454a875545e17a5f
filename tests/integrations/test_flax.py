"""Flax Linen: explicit tasks, named kernels, and `parallelize_step`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from multimesh._src.errors import MatchError, TraceError
from multimesh._src.runtime import counters
from multimesh.jax import MultiMesh, Task, TaskMesh, clear_tasks, mjit, register_task
from multimesh.jax.flax import parallelize_step, shard_axes, task, with_sharding_constraint

AXES = [("data", "x"), ("batch", "x")]


def submesh(index: int) -> TaskMesh:
    return TaskMesh(
        devices=range(4 * index, 4 * index + 4), axis_sizes=(4, 1), axis_names=("x", "y")
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4, kernel_init=shard_axes("data", "model"))(x)
        return with_sharding_constraint(nn.relu(x), P("batch"))


class Pipeline(nn.Module):
    """The model of the original's tutorial; returns its loss."""

    explicit: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index in range(2):
            block = Block(name=f"layer_{index}")
            if self.explicit:
                block = task(block, mesh=submesh(index), logical_axes=AXES)
            x = block(x)
        return jnp.square(x).sum()


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(8, 1), ("x", "y"))


@pytest.fixture(params=["explicit", "implicit"])
def model(request: pytest.FixtureRequest) -> Any:
    """The same model with tasks where modules are made, and by a matcher."""
    if request.param == "implicit":

        def callback(name: str, backprop: bool) -> Task:
            return Task(mesh=submesh(int(name[-1])), logical_axes=AXES)

        register_task(r"layer_\d+", callback=callback)
    yield Pipeline(request.param == "explicit")
    clear_tasks()


def devices_of(x: Any) -> list[int]:
    return sorted(device.id for device in x.sharding.device_set)


def shards(x: Any) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in x.addressable_shards}


X = np.broadcast_to(np.arange(16, dtype=np.float32), (16, 16))


def test_the_tutorial_of_the_original(model: Any, mesh: Mesh) -> None:
    step, state, _, prepare = parallelize_step(model, optax.sgd(1e-4), mesh, local_batch=X)
    params = state.params
    for index, rows in ((0, 4), (1, 1)):
        dense = params[f"layer_{index}"]["Dense_0"]
        where = list(range(4 * index, 4 * index + 4))
        assert devices_of(dense["bias"]) == devices_of(dense["kernel"].value) == where
        assert shards(dense["kernel"].value) == {(rows, 4)} and shards(dense["bias"]) == {(4,)}
    assert devices_of(state.step) == list(range(8))

    batch = prepare(X)
    loss, state = step(state, batch)
    losses = [loss]
    before = counters.snapshot()
    for _ in range(2):
        loss, state = step(state, batch)
        losses.append(loss)
    counts = counters.since(before)
    assert (counts.traces, counts.compiles) == (0, 0)
    assert devices_of(state.params["layer_1"]["Dense_0"]["kernel"].value) == [4, 5, 6, 7]

    clear_tasks()  # the same by plain JAX
    with MultiMesh(global_mesh=mesh):
        wanted = nn.unbox(model.init(jax.random.key(42), jnp.zeros((16, 16))))["params"]
    for loss in losses:
        value, grads = jax.value_and_grad(plain_loss)(wanted, X)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
        wanted = jax.tree.map(lambda p, g: p - 1e-4 * g, wanted, grads)


def plain_loss(params: Any, x: Any) -> Any:
    for index in range(2):
        dense = params[f"layer_{index}"]["Dense_0"]
        x = jax.nn.relu(x @ dense["kernel"] + dense["bias"])
    return jnp.square(x).sum()


def test_microbatches_and_replicated_batches(model: Any, mesh: Mesh) -> None:
    step, state, _ = parallelize_step(
        model, optax.sgd(0.0), mesh, X, num_microbatches=4, schedule="1f1b"
    )
    assert step.schedule is not None
    whole = parallelize_step(model, optax.sgd(0.0), mesh, X, replicate_inputs=False)
    # The loss of the model is a sum, so the mean over four parts is a quarter of it.
    loss, _ = step(state, X)
    np.testing.assert_allclose(4 * loss, whole[0](whole[1], X)[0], rtol=1e-5)


def test_other_variables_come_back_in_the_state(mesh: Mesh) -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            with jax.named_scope("layer_0"):
                x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
            return jnp.square(x).mean()

    register_task(r"layer_0", task=Task(mesh=submesh(0)))
    try:
        step, state, _ = parallelize_step(Normed(), optax.sgd(0.1), mesh, X)
        before = jax.tree.map(np.asarray, state.extra)
        _, state = step(state, X)
        changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, state.extra)
        assert all(jax.tree.leaves(changed))
        with pytest.raises(TraceError, match="every call may change"):
            parallelize_step(Normed(), optax.sgd(0.1), mesh, X, num_microbatches=2)
    finally:
        clear_tasks()


def test_a_task_of_a_model_has_its_variables_under_mod(mesh: Mesh) -> None:
    model = task(Block(), mesh_slice={"x": [2]})
    assert type(model).__name__ == "Task[Block]"
    with MultiMesh(global_mesh=mesh):
        variables = nn.unbox(model.init(jax.random.key(0), X))
        y = mjit(model.apply)(variables, X)
    assert set(variables["params"]) == {"mod"}
    dense = variables["params"]["mod"]["Dense_0"]
    np.testing.assert_allclose(y, jax.nn.relu(X @ dense["kernel"] + dense["bias"]), rtol=1e-5)
    assert devices_of(y) == [2]


def test_errors(mesh: Mesh) -> None:
    with pytest.raises(TraceError, match="got neither of `global_batch` and `local_batch`"):
        parallelize_step(Pipeline(False), optax.sgd(0.1), mesh)
    with pytest.raises(TraceError, match="got both"):
        parallelize_step(Pipeline(False), optax.sgd(0.1), mesh, X, X)
    with pytest.raises(TraceError, match=r"`16` rows .* `num_microbatches=3`"):
        parallelize_step(Pipeline(True), optax.sgd(0.1), mesh, X, num_microbatches=3)
    with MultiMesh(global_mesh=mesh), pytest.raises(MatchError, match="no field of `Task`"):
        task(Block(), mesh_slices={"x": 1}).init(jax.random.key(0), X)
