"""Transformations inside cut programs: jits, custom derivatives, remat, higher order, vmap."""

import functools

import jax
import jax.numpy as jnp
import pytest

from multimesh._src.frontend.microbatching import microbatch
from tests.programs.plainly import (
    check,
    check_steps,
    layer,
    mlp,
    normal,
    pipeline,
    sgd,
    square_loss,
    weights,
)

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


def train(loss, size=2, **options):
    def step(params, batch):
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, **options)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


@jax.custom_vjp
def clipped(x):
    return x * 1.5


clipped.defvjp(lambda x: (x * 1.5, x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * jnp.sign(x),))


@jax.custom_jvp
def squashed(x):
    return x / (1 + jnp.abs(x))


squashed.defjvp(lambda p, t: (squashed(*p), t[0] / (1 + jnp.abs(p[0])) ** 2))


@pytest.mark.parametrize("size", [0, 2])
def test_custom_derivatives_and_nested_jits(size):
    @jax.jit
    def dense(x, w):
        return clipped(squashed(jax.jit(jnp.dot)(x, w)))

    def loss(params, batch):
        x, y = batch
        for index, w in enumerate(params):
            with layer(index):
                x = dense(x, w)
        x = jax.jit(lambda x: jax.jit(squashed)(x) * 2)(x)
        return jnp.mean(jax.nn.relu(x - y) + jax.nn.softplus(x))

    check_steps(pipeline(2), train(loss, size), weights(2), (X, Y))


def test_custom_vjp_over_stages():
    @jax.custom_vjp
    def both(params, x):
        return mlp(params, x)

    def forward(params, x):
        y, pull = jax.vjp(mlp, params, x)
        return y, pull

    both.defvjp(forward, lambda pull, g: pull(g * 0.5))

    def loss(params, batch):
        return jnp.mean((both(params, batch[0]) - batch[1]) ** 2)

    check_steps(pipeline(2), train(loss), weights(2), (X, Y))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("size", [0, 2])
def test_remat_over_stages(policy, size):
    def loss(params, batch):
        x, y = batch
        x = jax.checkpoint(mlp, policy=policy)(params, x)
        return jnp.mean((x - y) ** 2)

    check_steps(pipeline(2), train(loss, size), weights(3), (X, Y))


def test_remat_of_pairs_of_layers_and_nested_remat():
    def pair(params, x, first):
        for index, w in enumerate(params):
            with layer(first + index):
                x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return x

    def loss(params, batch):
        x, y = batch
        x = jax.checkpoint(functools.partial(pair, first=0))(params[:2], x)
        x = jax.checkpoint(functools.partial(pair, first=2))(params[2:], x)
        return jnp.mean((x - y) ** 2)

    check_steps(pipeline(3), train(loss), weights(4), (X, Y))


def test_remat_of_scanned_layers_inside_a_stage():
    def loss(params, batch):
        x, y = batch
        for index in range(2):
            with layer(index):
                x, _ = jax.lax.scan(
                    jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, params[index]
                )
        return jnp.mean((x - y) ** 2)

    check_steps(pipeline(2), train(loss), [normal(3, 4, 4), normal(2, 4, 4)], (X, Y))


def test_gradient_of_gradient():
    def penalty(params, batch):
        value, grads = jax.value_and_grad(square_loss)(params, batch)
        return value + sum(jnp.sum(g**2) for g in grads)

    check_steps(pipeline(2), train(penalty), weights(2), (X, Y))
    check_steps(pipeline(2), train(penalty, 0), weights(2), (X, Y))


def test_jvp_and_hessian_vector_product():
    def step(params, batch):
        def grad(params):
            return jax.grad(square_loss)(params, batch)

        return jax.jvp(grad, (params,), (params,))

    check(pipeline(2), step, weights(2), (X, Y))


def test_per_example_gradients():
    def step(params, batch):
        grads = jax.vmap(jax.grad(square_loss), in_axes=(None, 0))(params, batch)
        return jax.tree.map(lambda g: jnp.linalg.norm(g, axis=(1, 2)).mean(), grads)

    check(pipeline(2), step, weights(2), (X, Y))


def test_gradient_accumulated_over_two_losses_and_metrics():
    def step(params, batch):
        def loss(params, batch):
            h = mlp(params, batch[0])
            metrics = {"mean": h.mean(), "none": None, "ok": (h > 0).any(), "rows": h[:, 0]}
            return jnp.mean((h - batch[1]) ** 2), metrics

        grad = jax.value_and_grad(loss, has_aux=True)
        reduce = (("mean", {"mean": "mean", "none": None, "ok": "max", "rows": "concat"}), "sum")
        (value, metrics), grads = microbatch(grad, 0, 2, argnum=1, reduce=reduce)(params, batch)
        return sgd(params, grads), (value, metrics)

    check_steps(pipeline(2), step, weights(2), (X, Y))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "stack", "concat"])
def test_reductions(reduce):
    def step(params, batch):
        def forward(params, batch):
            h = mlp(params, batch[0])
            return h, h.sum(1)

        return microbatch(forward, 0, 2, argnum=1, reduce=reduce)(params, batch)

    check(pipeline(2), step, weights(2), (X, Y))


def test_bfloat16_with_float32_accumulation():
    def step(params, batch):
        grad = microbatch(jax.value_and_grad(square_loss), 0, 2, argnum=1, accum_dtype=jnp.float32)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    params = [w.astype(jnp.bfloat16) for w in weights(2)]
    check_steps(
        pipeline(2), step, params, (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)), steps=1
    )


def test_index_of_the_microbatch():
    def step(params, batch):
        def forward(params, batch, index):
            with layer(0):
                h = jnp.tanh(batch[0] @ params[0]) * index
            with layer(1):
                return h @ params[1] + index

        return microbatch(forward, 0, 2, argnum=1, with_index=True, reduce="stack")(params, batch)

    check(pipeline(2), step, weights(2), (X, Y))


@pytest.mark.parametrize("schedule", [None, "zb-h1"])
def test_remat_with_halved_backward(schedule):
    """A recomputed stage's backward belongs to that stage, not to the last of its submesh."""

    def loss(params, batch):
        x, y = batch
        x = jax.checkpoint(mlp)(params, x)
        return jnp.mean((x - y) ** 2)

    num_layers = 3 if schedule is None else 2
    step = train(loss, schedule=schedule)
    check_steps(pipeline(2, halves=True), step, weights(num_layers), (X, Y))


def test_nested_remat_over_stages():
    """The inner regions recompute what the forward sent: crossing values are not made again."""

    def inner(x, w):
        return jnp.tanh(x @ w) @ w.T

    def outer(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = jax.checkpoint(inner)(x, w) + x
        return x

    def loss(params, batch):
        x, y = batch
        return jnp.mean((jax.checkpoint(outer)(params, x) - y) ** 2)

    step = train(loss, schedule="looped-bfs")
    check_steps(pipeline(2, give_stages=4), step, weights(4), (X, Y))


def test_two_losses_in_one_loop():
    def step(state, batch):
        makers, judges = state

        def both(makers, judges, batch):
            def judge(judges):
                fake = mlp(judges, mlp(makers, batch[0]))
                return jnp.mean(fake**2) - jnp.mean(mlp(judges, batch[1]))

            def make(makers):
                return -jnp.mean(mlp(judges, mlp(makers, batch[0])))

            return jax.value_and_grad(judge)(judges), jax.value_and_grad(make)(makers)

        found = microbatch(both, 0, 2, argnum=2)(makers, judges, batch)
        (first, grads), (second, others) = found
        return (sgd(makers, others), sgd(judges, grads)), (first, second)

    check_steps(pipeline(2), step, (weights(2), weights(2)), (X, Y))


@pytest.mark.parametrize("size", [0, 2])
def test_step_inside_the_loss(size):
    def loss(params, batch):
        return square_loss(sgd(params, jax.grad(square_loss)(params, batch)), batch)

    check_steps(pipeline(2), train(loss, size), weights(2), (X, Y))
