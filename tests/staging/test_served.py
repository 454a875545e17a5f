"""Plain `jax.jit` inside a context does what `mjit` does; what is plain JAX stays JAX's own."""

import functools
import gc
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.jax_compat import jit_calls
from multimesh._src.runtime import counters
from multimesh.jax import Context, MultiMesh, Task, ignore_transforms, microbatch
from tests.staging import models

pytestmark = pytest.mark.skipif(
    not jit_calls.is_available(), reason="this JAX is not known well enough"
)


@pytest.fixture(params=[False, True], ids=["auto", "explicit"])
def multi_mesh(request: pytest.FixtureRequest) -> MultiMesh:
    return models.make_multi_mesh(explicit=request.param)


def placed_params(multi_mesh: MultiMesh) -> Any:
    """Parameters where training leaves them: two layers on each stage."""
    params = models.make_params()
    return [
        jax.device_put(layer, NamedSharding(multi_mesh.slice(stage=i // 2), P()))
        for i, layer in enumerate(params)
    ]


def test_a_train_step_in_plain_jit_is_cut(multi_mesh: MultiMesh) -> None:
    batches = models.make_batches(5)
    step = jax.jit(models.step, donate_argnums=0)
    state, losses = models.make_state(), []
    before = counters.snapshot()
    with multi_mesh:
        for batch in batches:
            state, value = step(state, batch)
            losses.append(value)
    counts = counters.since(before)
    assert counts.traces == 1
    assert models.devices_of(state["params"][0]["w"]) == [(0, 1, 2, 3)]
    assert models.devices_of(state["params"][3]["w"]) == [(4, 5, 6, 7)]
    plain = models.repeated(models.step, 5)
    submesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    models.compare_once((state, losses), plain, submesh, models.make_state(), batches)


def test_a_function_made_before_the_mesh_and_called_outside_of_it(multi_mesh: MultiMesh) -> None:
    step = jax.jit(models.step)
    state, batch = models.make_state(), models.make_batches(1)[0]
    outside = step(state, batch)
    with multi_mesh:
        inside = step(state, batch)
    again = step(state, batch)
    assert len(set(models.devices_of(inside[0]["params"]))) == 2
    assert models.devices_of(outside) == models.devices_of(again)
    assert len(set(models.devices_of(outside))) == 1
    with multi_mesh, ignore_transforms():
        ignored = step(state, batch)
    assert len(set(models.devices_of(ignored))) == 1
    np.testing.assert_allclose(inside[1], outside[1], rtol=1e-6)


def test_what_has_no_scope_but_lies_on_several_submeshes(multi_mesh: MultiMesh) -> None:
    """R15: optimizer states, moving averages and norms made by ordinary jits."""
    params = placed_params(multi_mesh)
    optimizer = optax.adam(1e-3)
    with multi_mesh:
        norm = jax.jit(optax.tree.norm)(params)
        state = jax.jit(optimizer.init)(params)
        mean = jax.jit(lambda a, b: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, a, b))(
            params, params
        )
        sum_ = params[0]["w"] + params[3]["w"]  # single primitives too
    for tree in (state[0].mu, state[0].nu, mean):
        assert models.devices_of(tree) == models.devices_of(params)
    host = models.on_host(params)
    np.testing.assert_allclose(norm, optax.tree.norm(host), rtol=1e-6)
    np.testing.assert_allclose(sum_, host[0]["w"] + host[3]["w"], rtol=1e-6)


def test_plain_functions_stay_in_the_fast_cache_of_jax(multi_mesh: MultiMesh) -> None:
    """Each is looked at once, then JAX's C++ cache has it; nobody is warned of unmatched tasks."""
    calls = []
    jitted = jax.jit(lambda x: jnp.sin(x) * 2)
    x = jnp.arange(4.0)
    with multi_mesh, warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(x)
        infer, jit_calls.pjit._infer_params = jit_calls.pjit._infer_params, calls.append
        try:
            np.testing.assert_allclose(jitted(x), np.sin(x) * 2, rtol=1e-6)
        finally:
            jit_calls.pjit._infer_params = infer
    assert calls == []


def test_a_schedule_that_matches_nothing_warns() -> None:
    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi_mesh.register_task(r"blocks", task=Task(mesh_slice={"stage": 0}))
    step = jax.jit(microbatch(jax.grad(models.loss), 0, 2, argnum=(1, 2), schedule="1f1b"))
    batch = models.make_batches(1)[0]
    with multi_mesh, pytest.warns(UserWarning, match="no task matched"):
        step(models.make_params(), *batch)


def test_options_of_jit_hold(multi_mesh: MultiMesh) -> None:
    params = placed_params(multi_mesh)
    place = NamedSharding(multi_mesh.slice(stage=1), P())

    @functools.partial(jax.jit, static_argnames="power", donate_argnums=0, out_shardings=place)
    def powers(params: Any, power: int) -> Any:
        return jax.tree.map(lambda x: x**power, params)

    host = models.on_host(params)
    with multi_mesh:
        result = powers(params, power=2)
        assert set(models.devices_of(result)) == {(4, 5, 6, 7)}
        assert params[3]["w"].is_deleted()
        other = powers(result, power=3)
    np.testing.assert_allclose(other[0]["w"], host[0]["w"] ** 6, rtol=1e-5)


def test_methods_and_bare_specs(multi_mesh: MultiMesh) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step = jax.jit(self._step)

        def _step(self, params: Any, x: Any, y: Any) -> Any:
            x = jax.lax.with_sharding_constraint(x, P("data", None))
            return jax.value_and_grad(models.loss)(params, x, y)

    trainer, params, batch = Trainer(), models.make_params(), models.make_batches(1)[0]
    with multi_mesh:
        value, grads = trainer.step(params, *batch)
    wanted, wanted_grads = jax.value_and_grad(models.loss)(params, *batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads[0]["w"], wanted_grads[0]["w"], rtol=1e-4, atol=1e-6)


def test_eager_transformations(multi_mesh: MultiMesh) -> None:
    params, batch = placed_params(multi_mesh), models.make_batches(1)[0]
    host = models.on_host(params)
    loss = jax.jit(models.loss)
    with multi_mesh:
        value, grads = jax.value_and_grad(loss)(params, *batch)
    wanted, wanted_grads = jax.value_and_grad(models.loss)(host, *batch)
    assert models.devices_of(grads) == models.devices_of(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads[3]["w"], wanted_grads[3]["w"], rtol=1e-4, atol=1e-6)


def test_staged_forms(multi_mesh: MultiMesh) -> None:
    state, batch = models.make_state(), models.make_batches(1)[0]
    step = jax.jit(models.step)
    with multi_mesh:
        lowered = step.lower(state, batch)
        assert {task.submesh for task in lowered.program.tasks} >= {"stage=0", "stage=1"}
        compiled = lowered.compile()
        shapes = step.eval_shape(state, batch)
        plain = jax.jit(lambda x: x + 1).lower(1.0)
    assert isinstance(plain, jax.stages.Lowered)
    assert isinstance(step.lower(state, batch), jax.stages.Lowered)
    assert jax.tree.structure(shapes) == jax.tree.structure((state, batch[0]))
    value = compiled(state, batch)[1]
    np.testing.assert_allclose(value, models.step(state, batch)[1], rtol=1e-5)


def test_nested_in_a_trace_it_inlines(multi_mesh: MultiMesh) -> None:
    loss = jax.jit(models.loss)
    params, batch = models.make_params(), models.make_batches(1)[0]
    with multi_mesh:
        value, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
    assert len(set(models.devices_of(grads))) == 2
    np.testing.assert_allclose(value, models.loss(params, *batch), rtol=1e-5)


def test_nothing_keeps_a_served_function_alive(multi_mesh: MultiMesh) -> None:
    def step(state: Any, batch: Any) -> Any:
        return models.step(state, batch)

    jitted, alive = jax.jit(step), weakref.ref(step)
    with multi_mesh:
        jitted(models.make_state(), models.make_batches(1)[0])
    del step, jitted
    gc.collect()
    assert alive() is None


def test_an_error_leaves_jit_served_and_whole(multi_mesh: MultiMesh) -> None:
    def broken(x: Any) -> Any:
        with jax.named_scope("layer0"):
            raise ValueError("mine")

    jitted = jax.jit(broken)
    with multi_mesh, pytest.raises(ValueError, match="mine"):
        jitted(1.0)
    with pytest.raises(ValueError, match="mine"):
        jitted(1.0)
    test_a_function_made_before_the_mesh_and_called_outside_of_it(multi_mesh)


def test_contexts_without_a_mesh_and_other_threads(multi_mesh: MultiMesh) -> None:
    found = []
    step = jax.jit(models.step)
    state, batch = models.make_state(), models.make_batches(1)[0]

    def outside() -> None:
        found.append(models.devices_of(step(state, batch)[0]["params"]))

    context = Context()
    context.register_task(r"layer\d+", task=Task(mesh=Mesh(np.array(jax.devices()[2:3]), ("x",))))
    with context:
        inside = step(state, batch)
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
    assert set(models.devices_of(inside[0]["params"])) == {(2,)}
    assert set(found[0]) == {(0,)}


def test_jax_stages_what_it_needs_itself(multi_mesh: MultiMesh) -> None:
    state, batch = models.make_state(), models.make_batches(1)[0]
    step = jax.jit(models.step)
    with multi_mesh:
        jaxpr = jax.make_jaxpr(step)(state, batch)
        shapes = jax.eval_shape(step, state, batch)
        exported = jax.export.export(step)(state, batch)
    assert jaxpr.in_avals[1].shape == (models.WIDTH,)
    assert jax.tree.structure(shapes) == jax.tree.structure((state, batch[0]))
    assert exported.nr_devices == 1
