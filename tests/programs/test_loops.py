"""Loops written by hand: counters, stacks, nests, conditions."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

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


def two_layers(params, x):
    return mlp(params[:2], x)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_with_counter_and_stacks(reverse):
    def step(params, xs):
        def body(carry, x):
            count, total = carry
            y = two_layers(params, x) * count
            return (count + 1, total + y.sum()), (y, count)

        return lax.scan(body, (jnp.int32(3), jnp.float32(0)), xs, reverse=reverse)

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_fori_loop_with_dynamic_slices():
    def step(params, x):
        def body(i, carry):
            h, out = carry
            piece = lax.dynamic_slice_in_dim(x, 2 * i, 2)
            y = two_layers(params, piece)
            return h + y, lax.dynamic_update_slice_in_dim(out, y, 2 * i, 0)

        return lax.fori_loop(0, 4, body, (jnp.zeros((2, 4)), jnp.zeros((8, 4))))

    check(pipeline(2), step, weights(2), X)


@pytest.mark.parametrize("length", [0, 1])
def test_short_loops(length):
    def step(params, xs):
        def body(total, x):
            y = two_layers(params, x)
            return total + y, y

        return lax.scan(body, jnp.ones((2, 4)), xs)

    check(pipeline(2), step, weights(2), normal(length, 2, 4))


def test_loop_whose_results_are_unused_or_constant():
    def step(params, xs):
        def body(carry, x):
            y = two_layers(params, x)
            return (carry[0] + y, jnp.float32(7), x), (y, x, jnp.int32(4), jnp.ones(3))

        start = (jnp.ones((2, 4)), jnp.float32(0), xs[0])
        (_, seven, last), (_, same, fours, ones) = lax.scan(body, start, xs)
        return seven, last, same, fours, ones

    check(pipeline(2), step, weights(2), normal(3, 2, 4))


def test_nested_loops():
    def step(params, xs):
        def outer(h, x):
            def inner(h, i):
                return two_layers(params, h + x * i), h.sum()

            h, sums = lax.scan(inner, h, jnp.arange(3.0))
            with layer(1):
                h = h * 2
            return h, sums

        return lax.scan(outer, jnp.zeros((2, 4)), xs)

    check(pipeline(2), step, weights(2), normal(2, 2, 4))


def test_loop_over_layers_inside_a_microbatch_loop():
    def loss(params, batch):
        x, y = batch

        def body(h, i):
            return two_layers(params, h) + i, None

        h, _ = lax.scan(body, x, jnp.arange(2.0))
        return jnp.mean((h - y) ** 2)

    def step(params, batch):
        value, grads = microbatch(jax.value_and_grad(loss), 0, 4, argnum=1)(params, batch)
        return sgd(params, grads), value

    check_steps(pipeline(2), step, weights(2), (X, Y))


def test_several_steps_in_one_call():
    def step(params, batches):
        def body(params, batch):
            value, grads = microbatch(jax.value_and_grad(square_loss), 0, 4, argnum=1)(
                params, batch
            )
            return sgd(params, grads), value

        return lax.scan(body, params, batches)

    batches = (normal(3, 8, 4, seed=20), normal(3, 8, 4, seed=21))
    check_steps(pipeline(2), step, weights(2), batches, steps=2)


def test_two_microbatch_loops():
    def step(params, batch):
        value, grads = microbatch(jax.value_and_grad(square_loss), 0, 2, argnum=1)(params, batch)
        params = sgd(params, grads)
        after = microbatch(square_loss, 0, 4, argnum=1)(params, batch)
        return params, (value, after)

    check_steps(pipeline(2), step, weights(2), (X, Y))


def test_gradient_of_a_microbatch_loop():
    def step(params, batch):
        def total(params):
            return microbatch(square_loss, 0, 2, argnum=1, reduce="mean")(params, batch)

        value, grads = jax.value_and_grad(total)(params)
        return sgd(params, grads), value

    check_steps(pipeline(2), step, weights(2), (X, Y))


def test_stacked_weights_indexed_per_layer():
    def loss(stack, batch):
        x, y = batch
        for index in range(3):
            with layer(index):
                x = jnp.tanh(x @ stack[index])
        return jnp.mean((x - y) ** 2)

    def step(stack, batch):
        value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(stack, batch)
        return stack - 0.1 * grads, value

    check_steps(pipeline(3), step, normal(3, 4, 4), (X, Y))


def test_while_inside_one_stage_and_over_stages():
    def step(params, x):
        with layer(0):
            x = lax.while_loop(lambda h: h.sum() < 100, lambda h: h * 1.5 + 1, x @ params[0])
        x = lax.while_loop(lambda h: jnp.abs(h).sum() > 10, lambda h: mlp(params, h) / 2, x)
        with layer(1):
            return x @ params[1]

    check(pipeline(2), step, weights(2), X)


def test_cond_inside_one_stage_and_over_stages():
    def step(params, x, flag):
        with layer(0):
            x = lax.cond(flag, lambda h: h @ params[0], lambda h: h * 2, x)
        x = lax.cond(x.sum() > 0, lambda h: mlp(params, h), lambda h: h - 1, x)
        with layer(1):
            return lax.switch(jnp.int32(1), [jnp.sin, jnp.cos, jnp.tanh], x @ params[1])

    check(pipeline(2), step, weights(2), X, True)


def test_cond_in_a_microbatch_loop_with_gradient():
    def loss(params, batch):
        x, y = batch
        with layer(0):
            h = lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ params[0]), lambda h: h, x)
        with layer(1):
            return jnp.mean((h @ params[1] - y) ** 2)

    def step(params, batch):
        value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)
        return sgd(params, grads), value

    check_steps(pipeline(2), step, weights(2), (X, Y))


def test_decoding_with_a_cache():
    def step(params, table):
        def body(carry, _):
            cache, token, i = carry
            with layer(0):
                cache = lax.dynamic_update_slice(cache, table[token][None] @ params[0], (i, 0))
            with layer(1):
                logits = jnp.tanh(cache.mean(0) @ params[1])
                token = jnp.argmax(logits).astype(jnp.int32)
            return (cache, token, i + 1), token

        return lax.scan(body, (jnp.zeros((5, 4)), jnp.int32(1), 0), None, length=5)

    check(pipeline(2), step, weights(2), X)


@pytest.mark.parametrize("stages", [0, 2])
def test_gradient_through_a_scan_of_inner_steps(stages):
    """A loop of training steps goes over the stages again and again, given ones too."""

    def inner(params, x):
        return jnp.mean(jnp.square(two_layers(params, x)))

    def loss(params, x):
        def one(params, _):
            return sgd(params, jax.grad(inner)(params, x)), None

        return inner(lax.scan(one, params, None, length=3)[0], x)

    check(pipeline(2, give_stages=stages), jax.value_and_grad(loss), weights(2), X)


def test_weak_types_of_results_are_kept():
    """A rate that decays from a Python number, made strong or left weak."""

    def step(params, xs):
        def body(carry, x):
            strong, weak = carry
            return (strong * 0.5, weak * 0.5), (two_layers(params, x), weak)

        return lax.scan(body, (jnp.asarray(0.1, jnp.float32), 0.1), xs)

    check(pipeline(2), step, weights(2), normal(3, 2, 4))
    check(pipeline(2), step, weights(2), normal(1, 2, 4))


@pytest.mark.parametrize("value", [0, 0.0, 3, 1.5, True])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "stack"])
def test_a_number_of_python_is_reduced_too(value, reduce):
    def step(params, x):
        def loss(params, x):
            return two_layers(params, x).sum(), value

        return microbatch(loss, 0, 2, argnum=1, reduce=("sum", reduce))(params, x)

    check(pipeline(2), step, weights(2), X)
