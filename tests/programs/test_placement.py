"""Where tasks lie: shared weights, skips, the full mesh, overlapping and unlike submeshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task, TaskMesh
from multimesh._src.staging.mjit import mjit
from tests.programs.plainly import (
    check,
    check_steps,
    layer,
    normal,
    pipeline,
    sgd,
    square_loss,
    weights,
)

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")


def train(loss, size=2, **options):
    def step(params, batch):
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, **options)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


def by_hand(meshes):
    """A MultiMesh whose `layer<i>` runs on `meshes[i]` = (device ids, sizes)."""
    multi = MultiMesh(global_mesh=Mesh(np.array(jax.devices()), ("all",)))
    built = [
        TaskMesh(devices=ids, axis_sizes=sizes, axis_names=("data", "model"))
        for ids, sizes in meshes
    ]

    def of_layer(name, backprop):
        return Task(name=name, mesh=built[int(name.removeprefix("layer"))])

    multi.register_task(r"layer\d+", callback=of_layer)
    return multi


@pytest.mark.parametrize("size", [0, 2])
def test_weights_of_three_stages(size):
    def loss(params, batch):
        x, y = batch
        for index in range(3):
            with layer(index):
                x = jnp.tanh(x @ params["shared"]) @ params["own"][index]
        with layer(0):
            x = x @ params["shared"].T
        return jnp.mean((x - y) ** 2)

    params = {"shared": normal(4, 4), "own": weights(3)}
    check_steps(pipeline(3), train(loss, size), params, (X, Y))


@pytest.mark.parametrize("size", [0, 2])
def test_skips_over_stages(size):
    def loss(params, batch):
        x, y = batch
        seen = [x]
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w + sum(seen[:-1]))
            seen.append(x)
        return jnp.mean((sum(seen) - y) ** 2)

    check_steps(pipeline(4), train(loss, size), weights(4), (X, Y))


@pytest.mark.parametrize("size", [0, 2])
def test_tasks_on_the_full_mesh_between_slices(size):
    def loss(params, batch):
        x, y = batch
        with layer(0):
            x = jnp.tanh(x @ params[0])
        with jax.named_scope("whole"):
            x = x + jnp.sin(x) @ params[1]
        with layer(1):
            x = jnp.tanh(x @ params[2])
        return jnp.mean((x - y) ** 2)

    check_steps(pipeline(2, 2), train(loss, size), weights(3), (X, Y))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_overlapping_submeshes(schedule):
    meshes = [((0, 1), (2, 1)), ((1, 2), (1, 2)), ((3, 0), (2, 1)), ((4,), (1, 1))]
    multi = by_hand(meshes)
    check_steps(multi, train(square_loss, schedule=schedule), weights(4), (X, Y))


@pytest.mark.parametrize("size", [0, 4])
def test_unlike_submeshes(size):
    meshes = [((5, 3, 1, 7), (2, 2)), ((0,), (1, 1)), ((4, 2), (1, 2))]
    check_steps(by_hand(meshes), train(square_loss, size), weights(3), (X, Y))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_more_stages_than_submeshes(schedule, size):
    multi = pipeline(2, give_stages=4)
    check_steps(multi, train(square_loss, size, schedule=schedule), weights(4), (X, Y), steps=2)


def test_more_stages_than_submeshes_found_by_themselves():
    check_steps(pipeline(2), train(square_loss), weights(4), (X, Y))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [1, 3, 5, 8])
def test_numbers_of_microbatches(schedule, m):
    batch = normal(m, 4, seed=3), normal(m, 4, seed=4)
    step = train(square_loss, 1, schedule=schedule)
    check_steps(pipeline(3), step, weights(3), batch, steps=2)


@pytest.mark.parametrize("size", [0, 2])
def test_layers_without_scopes_and_branches(size):
    def loss(params, batch):
        x, y = batch
        with layer(0):
            a = jnp.tanh(x @ params[0])
        side = jnp.sin(a) @ params[1]
        with layer(1):
            b = jnp.tanh(a @ params[2])
        both = jnp.concatenate([b, side], 1)
        with layer(2):
            c = both @ params[3]
        return jnp.mean((c - y) ** 2) + 0.1 * jnp.mean(side**2)

    params = [*weights(3), normal(8, 4)]
    check_steps(pipeline(3), train(loss, size), params, (X, Y))


@pytest.mark.parametrize("size", [0, 2])
def test_frozen_and_unused_weights(size):
    def step(params, batch):
        def loss(trained):
            x, y = batch_
            for index, w in enumerate([params[0], *trained]):
                with layer(index):
                    x = jnp.tanh(x @ w)
            return jnp.mean((x - y) ** 2)

        def grad(trained, batch):
            nonlocal batch_
            batch_ = batch
            return jax.value_and_grad(loss)(trained)

        batch_ = batch
        grad = microbatch(grad, 0, size, argnum=1) if size else grad
        value, grads = grad(params[1:3], batch)
        return [params[0], *sgd(params[1:3], grads), params[3]], value

    check_steps(pipeline(3), step, weights(4), (X, Y))


@pytest.mark.parametrize("size", [0, 2])
def test_clipped_adam(size):
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def step(state, batch):
        params, opt = state
        grad = jax.value_and_grad(square_loss)
        grad = microbatch(grad, 0, size, argnum=1, reduce="mean") if size else grad
        value, grads = grad(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = weights(3)
    check_steps(pipeline(3), step, (params, optimizer.init(params)), (X, Y))


def test_large_constant_is_closed_over():
    table = jnp.asarray(normal(64, 4))
    host = normal(4, 4, seed=9)

    def step(params, ids):
        with layer(0):
            x = table[ids] @ params[0]
        with layer(1):
            return x @ host + table[:8] @ params[1]

    check(pipeline(2), step, weights(2), np.arange(8))


def test_mixture_of_everything_in_two_towers():
    def loss(params, batch):
        x, y = batch
        with layer(0):
            a = jnp.tanh(x @ params[0])
        with layer(1):
            b = jnp.tanh(y @ params[1])
        with layer(2):
            logits = a @ b.T
        return jnp.mean(logits**2) + jnp.mean(a) - jnp.max(b)

    check_steps(pipeline(3), train(loss), weights(3), (X, Y))


def test_a_result_on_the_devices_of_a_stage_under_other_axes():
    def step(params, x):
        for number, w in enumerate(params):
            with layer(number):
                x = x @ w
        return x

    multi = pipeline(2, 2)
    devices = multi.slice(stage=1).devices
    wanted = NamedSharding(Mesh(devices, ("a", "b")), P("b"))
    with multi:
        result = mjit(step, out_shardings=wanted)(weights(2), X)
    assert result.sharding == wanted
    np.testing.assert_allclose(result, step(weights(2), X), rtol=1e-5)


def deep_supervision(hidden, last):
    return sum(((h @ last) ** 2).mean() for h in hidden)


def activation_penalty(hidden, last):
    return (hidden[-1] ** 2).mean()


def largest_means(hidden, last):
    return jax.nn.logsumexp(jnp.stack([h.mean() for h in hidden]))


def means_of_some(hidden, last):
    return jnp.stack([h.mean() for h in hidden[:3]]).sum()


def balance(hidden, last):
    shares = jnp.stack([h.mean(0) for h in hidden])
    return (shares.mean(0) * jax.nn.softmax(shares, -1).mean(0)).sum()


@pytest.mark.parametrize(
    "auxiliary", [deep_supervision, activation_penalty, largest_means, means_of_some, balance]
)
@pytest.mark.parametrize("head", ["joins", "given", "unregistered"])
def test_auxiliary_losses_open_no_stage(auxiliary, head):
    """Code outside of scopes that reads layers and the head runs on the last stage."""
    devices = np.array(jax.devices()[:2]).reshape(2, 1)
    multi = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    multi.register_layers(r"layer\d+", num_layers=4)
    if head != "unregistered":
        stage = 1 if head == "given" else None
        multi.register_task("head", task=Task(mesh_slice={"stage": 1}, stage=stage))

    def loss(params, batch):
        x, y = batch
        hidden = []
        for index in range(4):
            with layer(index):
                x = jnp.tanh(x @ params[index])
            hidden.append(x)
        with jax.named_scope("head"):
            value = jnp.mean((x @ params[4] - y) ** 2)
        return value + 0.1 * auxiliary(hidden, params[4])

    step = train(loss, schedule="1f1b")
    check_steps(multi, step, weights(5), (X, Y))
    with multi:
        (loop,) = mjit(step).lower(weights(5), (X, Y)).explain().loops
    assert loop.simulation.graph.placement == (0, 1)
    assert loop.simulation.makespan == 15
