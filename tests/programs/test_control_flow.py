"""Loops and maps of every kind around and inside tasks.

`test_branches` has conditionals over several submeshes, `test_while` loops without a trip count,
`test_derivatives` remat and derivatives.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.tasks import Task
from tests.programs.judged import judge, judge_steps, loss_of, train
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


# --- loops ---------------------------------------------------------------------------------------


def scanned(num_stages, num_layers):
    """`block_<i>` of a scan over layers runs on stage `i * num_stages // num_layers`."""
    multi = pipeline(num_stages)
    multi.register_task(
        "block",
        scanned=True,
        callback=lambda name, backprop: Task(
            name=name,
            mesh_slice={"stage": int(name.split("_")[1]) * num_stages // num_layers},
        ),
    )
    return multi


def scanned_model(params, x):
    def body(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), x.sum()

    x, sums = lax.scan(body, x, params)
    return x + 0.01 * sums.mean()


@pytest.mark.parametrize("size", [0, 2])
def test_scan_over_layers_through_the_stages(size):
    judge_steps(scanned(2, 4), train(loss_of(scanned_model), size), normal(4, 4, 4) / 2, (X, Y))


def test_rematerialized_scan_over_layers_through_the_stages():
    def model(params, x):
        @jax.checkpoint
        def body(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(body, x, params)[0]

    judge_steps(scanned(2, 4), train(loss_of(model)), normal(4, 4, 4) / 2, (X, Y), steps=2)


def test_scan_inside_a_stage_and_nested_scans():
    """Layers by scan in each stage, time by scan in each layer, with a state that is carried."""

    def model(params, x):
        def cell(state, x, w):
            state = jnp.tanh(state @ w + x)
            return state, state

        def block(xs, w):
            _, ys = lax.scan(functools.partial(cell, w=w), jnp.zeros_like(xs[0]), xs)
            return ys, ys.mean()

        xs = jnp.stack([x, x * 2, -x])
        for index, stack in enumerate(params):
            with layer(index):
                xs, means = lax.scan(block, xs, stack)
                xs += means.sum()
        return xs[-1]

    params = [normal(2, 4, 4, seed=1) / 2, normal(3, 4, 4, seed=2) / 2]
    judge_steps(pipeline(2), train(loss_of(model)), params, (X, Y))


def test_nested_scans_over_stages():
    """Both scans go through both stages; the inner one reads what the outer one carries."""

    def model(params, x):
        def outer(carry, scale):
            x, total = carry

            def inner(x, shift):
                return mlp(params, x) + shift, x.mean()

            x, means = lax.scan(inner, x * scale, jnp.arange(2.0))
            return (x, total + means.sum()), means

        (x, total), means = lax.scan(outer, (x, 0.0), jnp.array([1.0, 0.5]), reverse=True)
        return x + total + means[0, 1]

    for size in (0, 4):
        judge_steps(pipeline(2), train(loss_of(model), size), weights(2), (X, Y), steps=2)


@pytest.mark.parametrize("across", [False, True])
def test_fori_loop(across):
    def model(params, x):
        if across:
            return lax.fori_loop(0, 3, lambda i, x: mlp(params, x) * (i + 1), x)
        for index, w in enumerate(params):
            with layer(index):
                x = lax.fori_loop(0, 3, lambda i, x, w=w: jnp.tanh(x @ w) * (i + 1), x)
        return x

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y), steps=3)


def test_associative_scan():
    def model(params, x):
        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        for index, w in enumerate(params):
            with layer(index):
                gates = jax.nn.sigmoid(x @ w)
                _, x = lax.associative_scan(combine, (gates, x), axis=1)
        return lax.associative_scan(jnp.add, x, axis=1, reverse=True)

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_map_around_and_inside_tasks(batch_size):
    def model(params, x):
        def one(row):
            return mlp(params, row)

        with layer(1):
            x = lax.map(lambda row: jnp.tanh(row @ params[1]), x, batch_size=batch_size)
        return lax.map(one, x, batch_size=batch_size)

    judge_steps(pipeline(2), train(loss_of(model), 4), weights(2), (X, Y), steps=2)


def test_vmap_around_and_inside_tasks():
    """An ensemble by vmap of the whole loss, and rows by vmap inside a task."""

    def model(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = jax.vmap(lambda row, w=w: jnp.tanh(row @ w))(x)
        return x

    def step(params, batch):
        grad = jax.vmap(jax.value_and_grad(loss_of(model)), in_axes=(0, None))
        value, grads = microbatch(grad, 0, 2, argnum=1)(params, batch)
        return sgd(params, grads), value

    judge_steps(pipeline(2), step, [normal(3, 4, 4, seed=n) for n in (1, 2)], (X, Y))

    def outer(params, xs):
        return jax.vmap(jax.vmap(model, (None, 0)), (None, 1), 1)(params, xs)

    judge(pipeline(2), outer, weights(2), normal(2, 3, 8, 4))


def test_several_training_steps_by_scan_and_by_fori_loop():
    def step(params, batches):
        params, values = lax.scan(train(square_loss), params, batches)
        xs, ys = batches

        def body(i, params):
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, False), (xs, ys))
            return train(square_loss)(params, batch)[0]

        return lax.fori_loop(0, 2, body, params), values

    batches = normal(3, 8, 4, seed=5), normal(3, 8, 4, seed=6)
    judge_steps(pipeline(2), step, weights(2), batches, steps=2)
