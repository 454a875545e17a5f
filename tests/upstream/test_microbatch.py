"""The original's tests of microbatch loops, those that it skips or that are broken included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import Context, MultiMesh, Task, microbatch, mjit, task
from tests.upstream.harness import compare_with_plain, device_ids, on

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_simple_microbatch() -> None:
    f = task(lambda x: jnp.sum(x * x), "f", mesh=on(3))
    compare_with_plain(microbatch(f, 0, 2), np.arange(4, dtype=np.float32))


def test_microbatch_pre_post_task() -> None:
    loop = microbatch(lambda xs: jax.tree.map(lambda x: x.sum(0), xs), 0, 2)

    def f(xs: Any) -> Any:
        xs = jax.tree.map(lambda x: 2 * x, xs)
        return jax.tree.map(jnp.sum, loop(xs))

    compare_with_plain(f, (normal(4, 4), normal(4, 1), normal(4, 1)))


def two_layers(params: Any, x: Any) -> Any:
    for i, (first, second) in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.einsum("bm,mh->bh", x, first)
            x = jnp.einsum("bh,hm->bm", x, second)
    with jax.named_scope("final"):
        return jnp.sum(x * x)


def layer_params() -> Any:
    return [(normal(4, 8) / 2, normal(8, 4) / 2) for _ in range(2)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_microbatch_schedules(schedule: str, apart: bool) -> None:
    made = Context()
    for i in range(2):
        made.register_task(f"layer{i}", task=Task(mesh=on(2 * i * apart, (2,))))
    made.register_task("unused", task=Task(mesh=on(0, (2,))))
    loop = microbatch(jax.value_and_grad(two_layers), 0, 2, argnum=1, schedule=schedule)
    _, grads = compare_with_plain(loop, layer_params(), normal(8, 4), context=made, submesh=(2,))
    assert device_ids(grads[1][0]) == ({2, 3} if apart else {0, 1})


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_microbatch_zero_bubble(apart: bool) -> None:
    def layer(text: str, backprop: bool) -> Task:
        name = f"layer{text}_{'bwd' if backprop else 'fwd'}"
        halves = ("_activations", "_gradients") if backprop else None
        return Task(name, mesh=on(2 * int(text) * apart, (2,)), split_backprop=halves)

    made = Context()
    made.register_task(r"layer(\d+)", callback=layer)
    loop = microbatch(jax.value_and_grad(two_layers), 0, 2, argnum=1, schedule="zero-bubble-h2")
    compare_with_plain(loop, layer_params(), normal(8, 4), context=made, submesh=(2,))


def test_microbatch_with_loop_dependent_submesh() -> None:
    """An embedding that rotates over the stages, layers on their own."""
    multi_mesh = MultiMesh(
        axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4]
    )
    multi_mesh.register_task("emb", task=Task(loop_dependent_mesh_slice=lambda i: {"stage": i % 2}))
    multi_mesh.register_task(
        r"layer(\d+)", callback=lambda text, _: Task(f"l{text}", mesh_slice={"stage": int(text)})
    )

    def loss(params: Any, x: Any) -> Any:
        with jax.named_scope("emb"):
            x = jnp.sin(x @ params[0][0] @ params[0][1])
        return two_layers(params[1:], x)

    params = [(normal(4, 8) / 2, normal(8, 4) / 2) for _ in range(3)]
    loop = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1, schedule="1f1b")
    compare_with_plain(loop, params, normal(8, 4), context=multi_mesh, submesh=(2,))


def test_microbatch_implicit_pre_post_task() -> None:
    """Scopes used inside and outside the loop, and one jitted function in both."""
    made = Context()
    made.register_task("layer0", task=Task(mesh=on(0)))
    made.register_task("layer1", task=Task(mesh=on(1)))
    shared = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def body(w: Any, x: Any) -> Any:
        with jax.named_scope("layer0"):
            x = shared(x, w)
        with jax.named_scope("layer1"):
            return shared(x, w).sum(0)

    def f(w: Any, x: Any) -> Any:
        with jax.named_scope("layer0"):
            x = shared(x, w)
        y = microbatch(body, 0, 2, argnum=1)(w, x)
        with jax.named_scope("layer1"):
            return shared(y[None], w)

    compare_with_plain(f, normal(4, 4) / 2, normal(8, 4), context=made)
    with made:
        compare_with_plain(jax.grad(lambda w, x: f(w, x).sum()), normal(4, 4) / 2, normal(8, 4))


def test_microbatch_no_tasks() -> None:
    loop = microbatch(lambda xs: sum(jnp.sum(x * x) for x in xs), 0, 2)
    compare_with_plain(loop, (normal(4, 4), normal(4, 1), normal(4, 1)))


def test_multiple_microbatch_slices() -> None:
    f = task(lambda xs: [jnp.sum(x * x, axis=0) for x in xs], "f", mesh=on(5))
    compare_with_plain(microbatch(f, 0, 2), (normal(4, 4), normal(4, 1), normal(4, 2)))


def test_multiple_microbatch() -> None:
    f = task(lambda x: x * x, "f", mesh=on(0))
    g = task(lambda x: jnp.sum(x + 1), "g", mesh=on(1))
    compare_with_plain(microbatch(lambda x: g(f(x)), 0, 2), normal(8, 4))


def test_simple_microbatch_grad() -> None:
    f = task(lambda w, x: jnp.sum((x @ w) ** 2), "f", mesh=on(6))
    loop = microbatch(jax.value_and_grad(f), 0, 2, argnum=1)
    compare_with_plain(loop, normal(4, 4), normal(8, 4))


def test_multiple_microbatch_grad() -> None:
    f = task(lambda w, x: jnp.tanh(x @ w), "f", mesh=on(0))
    g = task(lambda w, x: jnp.sum((x @ w) ** 2), "g", mesh=on(1))

    def loss(params: Any, x: Any) -> Any:
        return g(params[1], f(params[0], x))

    loop = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)
    _, grads = compare_with_plain(loop, (normal(4, 4), normal(4, 4)), normal(8, 4))
    assert [device_ids(grad) for grad in grads] == [{0}, {1}]


def test_training_over_several_steps_is_plain_training() -> None:
    made = Context()
    for i in range(2):
        made.register_task(f"layer{i}", task=Task(mesh=on(2 * i, (2,))))
    loop = microbatch(jax.value_and_grad(two_layers), 0, 2, argnum=1, schedule="1f1b")

    def step(params: Any, x: Any) -> Any:
        value, grads = loop(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    x, params = normal(8, 4), layer_params()
    ours, plain = mjit(step, donate_argnums=0), jax.jit(step)
    a, b = jax.tree.map(jnp.asarray, params), params
    for _ in range(4):
        with made:
            a, value_a = ours(a, x)
        b, value_b = plain(b, x)
        np.testing.assert_allclose(value_a, value_b, rtol=1e-5)
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-6)
