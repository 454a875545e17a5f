"""NNX models: scopes by attribute path, and training through the pipeline by NNX's own tools."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from multimesh.jax import MultiMesh, microbatch
from multimesh.jax.nnx import scopes

WIDTH = 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, num_layers: int = 4):
        self.first = nnx.Linear(3, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(num_layers)])
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def scopes_of(fun: Any, *args: Any) -> list[str]:
    jaxpr = jax.make_jaxpr(lambda *args: fun(*args))(*args)
    stacks = (str(eqn.source_info.name_stack) for eqn in jaxpr.eqns)
    return list(dict.fromkeys(stack for stack in stacks if stack))


def test_a_scope_is_where_a_module_stands() -> None:
    model = Model(nnx.Rngs(0), num_layers=2)
    x = np.ones((2, 3), np.float32)
    with scopes():
        found = scopes_of(model, x)
    assert found == [
        "Model/first",
        *("Model/layers_0/up", "Model/layers_0", "Model/layers_0/down"),
        *("Model/layers_1/up", "Model/layers_1", "Model/layers_1/down"),
        "Model/last",
    ]
    assert scopes_of(model, x) == []


def test_only_this_thread_and_only_for_a_time() -> None:
    model, found = Model(nnx.Rngs(0), num_layers=1), []
    x = np.ones((2, 3), np.float32)
    before = Model.__call__
    with scopes():
        thread = threading.Thread(target=lambda: found.append(scopes_of(model, x)))
        thread.start()
        thread.join()
        with scopes():
            pass
        assert scopes_of(model, x)
    assert found == [[]]
    assert Model.__call__ is before
    with pytest.raises(ZeroDivisionError), scopes():
        raise ZeroDivisionError
    assert Model.__call__ is before


def test_modules_put_together_anew_have_the_name_of_their_class() -> None:
    class Rematted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.block = Block(rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.remat(lambda block, x: block(x))(self.block, x)

    with scopes():
        jaxpr = jax.make_jaxpr(lambda x: Rematted(nnx.Rngs(0))(x))(np.ones((2, WIDTH), np.float32))
    text = jaxpr.pretty_print(name_stack=True)
    assert "Block/up" in text and "Rematted" in text


@scopes()
def train(multi_mesh: MultiMesh | None, num_steps: int = 3) -> tuple[Any, list[float]]:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    losses = []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        graph, params = nnx.split(model)

        def loss_of(params: Any, x: Any, y: Any) -> Any:
            return jnp.square(nnx.merge(graph, params)(x) - y).mean()

        gradient = microbatch(jax.value_and_grad(loss_of), 0, 2, argnum=(1, 2), reduce="mean")
        loss, grads = gradient(params, x, y)
        optimizer.update(model, grads)
        return loss

    for _ in range(num_steps):
        x, y = draw.normal(size=(8, 3)), draw.normal(size=(8, 1))
        batch = x.astype(np.float32), y.astype(np.float32)
        if multi_mesh is None:
            losses.append(float(step(model, optimizer, *batch)))
            continue
        with multi_mesh:
            losses.append(float(step(model, optimizer, *batch)))
    return nnx.state(model), losses


def test_nnx_trains_through_the_pipeline_by_its_own_jit() -> None:
    multi_mesh = MultiMesh(
        axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4]
    )
    multi_mesh.register_layers(r"layers_\d+", num_layers=4, axis="stage")
    state, losses = train(multi_mesh)
    plain_state, plain_losses = train(None)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for ours, plain in zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)
    where = state["layers"][3]["up"]["kernel"].get_value().sharding.device_set
    assert {device.id for device in where} == {2, 3}
