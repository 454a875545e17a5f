"""mjit functions under eager transformations, with arguments on different submeshes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.errors import TraceError
from multimesh._src.jax_compat import jit_hook
from multimesh._src.runtime import counters
from multimesh.jax import MultiMesh, microbatch, mjit
from tests.staging import models

LAYERS = 2


@pytest.fixture(params=[False, True], ids=["auto", "explicit"])
def multi_mesh(request: pytest.FixtureRequest) -> MultiMesh:
    return models.make_multi_mesh(explicit=request.param, layers_per_stage=1)


def placed_params(multi_mesh: MultiMesh) -> Any:
    return [
        jax.device_put(layer, jax.sharding.NamedSharding(multi_mesh.slice(stage=i), jax.P()))
        for i, layer in enumerate(models.on_host(models.make_params(LAYERS)))
    ]


def check(ours: Any, plain: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def test_grad(multi_mesh: MultiMesh) -> None:
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]
    f = mjit(models.loss)
    with multi_mesh:
        value, grads = jax.value_and_grad(f)(params, x, y)
        before = counters.snapshot()
        jax.value_and_grad(f)(params, x, y)
    counts = counters.since(before)
    assert (counts.traces, counts.lowerings, counts.compiles) == (0, 0, 0)
    check((value, grads), jax.value_and_grad(models.loss)(models.on_host(params), x, y))
    for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert grad.sharding.is_equivalent_to(param.sharding, param.ndim)
        assert grad.sharding.mesh.axis_types == param.sharding.mesh.axis_types


TRANSFORMED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "vjp": lambda f, p, x, y: jax.vjp(f, p, x, y)[1](jnp.float32(2.0))[0],
    "jvp": lambda f, p, x, y: jax.jvp(lambda p: f(p, x, y), (p,), (p,)),
    "vmap": lambda f, p, x, y: jax.vmap(f, (None, 0, 0))(p, x[:, None], y[:, None]),
    "grad of vmap": lambda f, p, x, y: jax.grad(
        lambda p: jax.vmap(f, (None, 0, 0))(p, x[:, None], y[:, None]).sum()
    )(p),
}


def test_linearize() -> None:
    multi_mesh = models.make_multi_mesh(layers_per_stage=1)
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]

    def linearized(f: Any, p: Any) -> Any:
        return jax.linearize(lambda p: f(p, x, y), p)[1](p)

    with multi_mesh:
        ours = linearized(mjit(models.loss), params)
    check(ours, linearized(models.loss, models.on_host(params)))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name: str, multi_mesh: MultiMesh) -> None:
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]
    with multi_mesh:
        ours = TRANSFORMED[name](mjit(models.loss), params, x, y)
    check(ours, TRANSFORMED[name](models.loss, models.on_host(params), x, y))


def test_grad_of_microbatches(multi_mesh: MultiMesh) -> None:
    """The forward pass gives the cut batch to the backward one, as a result."""

    def loss(params: Any, batch: Any) -> jax.Array:
        mean = microbatch(lambda p, b: models.loss(p, *b), 0, 2, argnum=1, reduce="mean")
        return mean(params, batch)

    params, batch = placed_params(multi_mesh), models.make_batches(1)[0]
    with multi_mesh:
        ours = jax.grad(mjit(loss), argnums=(0, 1))(params, batch)
    check(ours, jax.grad(loss, argnums=(0, 1))(models.on_host(params), batch))


def test_second_order_and_checkpoint() -> None:
    multi_mesh = models.make_multi_mesh(layers_per_stage=1)
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]

    def curvature(f: Any, p: Any) -> Any:
        grad = jax.grad(lambda p: f(p, x, y))
        return jax.jvp(grad, (p,), (p,))[1]

    def checkpointed(f: Any, p: Any) -> Any:
        return jax.grad(jax.checkpoint(f))(p, x, y)

    host = models.on_host(params)
    with multi_mesh:
        f = mjit(models.loss)
        check(curvature(f, params), curvature(models.loss, host))
        check(checkpointed(f, params), checkpointed(models.loss, host))


def test_backward_runs_on_the_tasks_of_the_backward() -> None:
    seen = []
    multi_mesh = MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "data"))

    def layer(name: str, backprop: bool) -> Any:
        from multimesh.jax import Task

        seen.append((name, backprop))
        return Task(name=f"{name}{backprop}", mesh_slice={"stage": int(name[-1])})

    multi_mesh.register_task(r"layer\d+", callback=layer)
    x, y = models.make_batches(1)[0]
    with multi_mesh:
        jax.grad(mjit(models.loss))(placed_params(multi_mesh), x, y)
    assert ("layer0", True) in seen and ("layer1", True) in seen


def test_closed_over_tracer() -> None:
    multi_mesh = models.make_multi_mesh(layers_per_stage=1)
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]

    def outer(params: Any) -> Any:
        return mjit(lambda x: models.loss(params, x, y))(x)

    with multi_mesh:
        ours = jax.grad(outer)(params)
    check(ours, jax.grad(models.loss)(models.on_host(params), x, y))


def test_shardings_are_constraints_inside() -> None:
    multi_mesh = models.make_multi_mesh(layers_per_stage=1)
    params, (x, y) = placed_params(multi_mesh), models.make_batches(1)[0]
    with multi_mesh:
        f = mjit(models.loss, in_shardings=(None, jax.P("data"), None))
        ours = jax.grad(f)(params, x, y)
    check(ours, jax.grad(models.loss)(models.on_host(params), x, y))


def test_plain_functions_stay_plain() -> None:
    before = counters.snapshot()
    assert float(jax.grad(mjit(lambda x: x**2))(3.0)) == 6.0
    assert counters.since(before).compiles == 0


def test_unknown_jax_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_hook, "is_available", lambda: False)
    with pytest.raises(TraceError, match=r"`mjit\(jax.grad\(f\)\)`"):
        jax.grad(mjit(lambda x: x**2))(3.0)


def test_hook_goes_in_and_out() -> None:
    from jax._src.pjit import jit_p  # noqa: TID251 - the thing under test

    jit_hook.uninstall()
    original = jit_p.impl
    jit_hook.install()
    jit_hook.install()
    assert jit_p.impl is not original
    jit_hook.uninstall()
    assert jit_p.impl is original
