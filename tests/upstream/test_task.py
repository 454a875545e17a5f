"""The original's tests of explicit tasks, those that it skips included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from multimesh._src.runtime import counters
from multimesh.jax import mjit, task
from tests.upstream.harness import compare_with_plain, device_ids, on, sharded


def square() -> np.ndarray:
    return np.arange(16, dtype=np.float32).reshape(4, 4) / 8


@pytest.mark.parametrize("dtypes", [("f4",), ("i2", "f4"), ("i1", "f4", "i4")])
def test_add_sequence(dtypes: tuple[str, ...]) -> None:
    values = [np.arange(16).reshape(4, 4).astype(dtype) for dtype in dtypes]
    add = task(lambda xs: [x + x for x in xs], "add", mesh=on(3))
    results = compare_with_plain(lambda xs: add(add(add(xs))), values)
    assert all(device_ids(x) == {3} for x in results)


def test_add_sequence_of_x64() -> None:
    with jax.enable_x64(True):
        values = [np.arange(16).reshape(4, 4).astype(t) for t in ("i1", "f8", "i4")]
        add = task(lambda xs: [x + x for x in xs], "add", mesh=on(3))
        for ours, x in zip(mjit(lambda xs: add(add(xs)))(values), values, strict=True):
            assert ours.dtype == x.dtype
            np.testing.assert_array_equal(ours, x * 4)


def test_rematerialization() -> None:
    body = jax.checkpoint(lambda x: x * x, policy=jax.checkpoint_policies.nothing_saveable)
    first, second = task(body, "first", mesh=on(0)), task(body, "second", mesh=on(1))
    compare_with_plain(jax.value_and_grad(lambda x: second(first(x)).sum()), square())


def test_multiple_layer_rematerialization() -> None:
    def layer(x: Any, params: Any) -> Any:
        y, z = params
        return x * x + x * y + x * z

    def three(params: Any, x: Any) -> Any:
        for layer_params in params:
            x = jax.checkpoint(layer)(x, layer_params)
        return x

    first, second = task(three, "first", mesh=on(0)), task(three, "second", mesh=on(1))

    def loss(params: Any, x: Any) -> Any:
        return second(params[1], first(params[0], x)).sum()

    rng = np.random.default_rng(0)
    params = rng.normal(size=(2, 3, 2, 4, 4)).astype(np.float32) / 4
    nested = [[tuple(pair) for pair in layers] for layers in params]
    compare_with_plain(jax.value_and_grad(loss), nested, square() / 4)


def test_donation_single_argument() -> None:
    f = task(lambda x: x * x, "f", mesh=on(2))
    compare_with_plain(f, jnp.asarray(square()), donate=(0,))


def test_donation_multiple_arguments() -> None:
    """Two chained tasks with outputs that pass through, donating the first and the third."""
    f = task(lambda x, y: (x + y, y), "f", mesh=on(0))
    g = task(lambda x, z: (x * z, z), "g", mesh=on(1))

    def chained(x: Any, y: Any, z: Any) -> Any:
        x, y = f(x, y)
        x, z = g(x, z)
        return x, y, z

    first, third = jnp.asarray(square()), jnp.asarray(square() + 2)
    compare_with_plain(chained, first, jnp.asarray(square() + 1), third)
    step = mjit(chained, donate_argnums=(0, 2))
    y = jnp.asarray(square() + 1)
    got = step(first, y, third)
    np.testing.assert_allclose(got[0], (square() + square() + 1) * (square() + 2), rtol=1e-6)
    np.testing.assert_array_equal(got[1], y)
    np.testing.assert_array_equal(got[2], square() + 2)
    assert first.is_deleted() and not y.is_deleted()


def test_donation_sharded_arguments() -> None:
    mesh = on(0, (2, 1), ("a", "b"))
    f = task(lambda x, y: x + y, "f", mesh=mesh)
    g = task(lambda x, y: x * y, "g", mesh=mesh)
    x, y = sharded(square(), 2, P("a", "b")), sharded(square() + 1, 2, P("a", "b"))
    compare_with_plain(lambda x, y: (g(f(x, y), y), f(y, y)), x, y, donate=(0, 1), submesh=(2, 1))


def test_traced_tasks() -> None:
    """Loss, gradient and SGD update, three times, with donated sharded parameters."""
    mesh = on(0, (2, 1), ("a", "b"))
    loss = task(lambda params, x: 2 * jnp.sum(params * params) + 0 * x.sum(), "loss", mesh=mesh)
    update = task(lambda params, grads: params - 0.05 * grads, "update", mesh=mesh)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return update(params, grads), value

    ours, expected = mjit(step, donate_argnums=0), square()
    params = sharded(square(), 2, P("a", "b"))
    before = counters.snapshot()
    for _ in range(3):
        params, value = ours(params, np.ones(2, np.float32))
        np.testing.assert_allclose(value, 2 * np.sum(expected**2), rtol=1e-6)
        expected = expected - 0.2 * expected
        np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert counters.since(before).traces == 1


def test_task_gradients() -> None:
    f = task(lambda x, scale: x * x * scale, "f", mesh=on(0))
    g = task(lambda x, y: jnp.sum(jnp.cos(x) + y), "g", mesh=on(1))
    compare_with_plain(jax.value_and_grad(lambda x: g(f(x, 2.0), x)), square())
