"""Loops written by hand: what they carry, index, stack and nest."""

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


def test_value_of_the_iteration_before_is_carried_and_read_after():
    def step(params, xs):
        def body(carry, x):
            now, _before = carry
            y = two_layers(params, x)
            return (y, now), y.sum()

        return lax.scan(body, (jnp.zeros((2, 4)), jnp.ones((2, 4))), xs)

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_value_of_the_iteration_before_is_read_inside():
    def step(params, xs):
        def body(carry, x):
            now, before = carry
            y = two_layers(params, x + before)
            return (y, now), y.sum()

        return lax.scan(body, (jnp.zeros((2, 4)), jnp.ones((2, 4))), xs)

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_carries_that_change_places():
    def step(params, x):
        def body(carry, _):
            a, b = carry
            with layer(0):
                a2 = jnp.tanh(b @ params[0])
            with layer(1):
                b2 = jnp.tanh(a @ params[1])
            return (b2, a2), None

        return lax.scan(body, (x, x + 1), None, length=3)[0]

    check(pipeline(2), step, weights(2), X)


def test_carries_that_only_change_places():
    def step(params, x):
        def body(carry, _):
            a, b, total = carry
            return (b, a, total + two_layers(params, x).sum() * a), None

        start = (jnp.float32(1), jnp.float32(2), jnp.float32(0))
        return lax.scan(body, start, None, length=3)[0]

    check(pipeline(2), step, weights(2), X)


def test_fixed_carries_of_two_loops_in_a_row():
    def step(params, x):
        def body(carry, _):
            fixed, total = carry
            return (fixed, total + two_layers(params, fixed)), None

        zero = jnp.zeros_like(x)
        (fixed, first), _ = lax.scan(body, (x, zero), None, length=2)
        (fixed, second), _ = lax.scan(body, (fixed, zero), None, length=3)
        return fixed, first, second

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


@pytest.mark.parametrize("m", [1, 3])
def test_running_statistics_of_one_stage(m):
    def step(state, batch):
        params, mean = state

        def body(carry, x):
            mean, total, grads = carry

            def loss(params, mean):
                with layer(0):
                    h = jnp.tanh(x @ params[0])
                    mean = 0.9 * mean + 0.1 * h.mean(0)
                    h = h - mean
                with layer(1):
                    return jnp.mean((h @ params[1]) ** 2), mean

            (value, mean), new = jax.value_and_grad(loss, has_aux=True)(params, mean)
            return (lax.stop_gradient(mean), total + value, jax.tree.map(jnp.add, grads, new)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (mean, total, grads), _ = lax.scan(body, (mean, jnp.float32(0), zeros), batch)
        return (sgd(params, grads), mean), total

    check_steps(pipeline(2), step, (weights(2), normal(4)), normal(m, 2, 4))


def test_running_statistics_that_cross_stages():
    def step(params, xs):
        def body(mean, x):
            with layer(0):
                h = jnp.tanh((x - mean) @ params[0])
            with layer(1):
                mean = 0.9 * mean + 0.1 * (h @ params[1]).mean(0)
            return mean, h.sum()

        return lax.scan(body, jnp.zeros(4), xs)

    check(pipeline(2), step, weights(2), normal(3, 2, 4))


def test_maximum_and_product_are_accumulated():
    def step(params, xs):
        def body(carry, x):
            high, product, low, any_ = carry
            with layer(0):
                h = x @ params[0]
                high = jnp.maximum(high, h)
            with layer(1):
                z = h @ params[1]
                return (high, product * z, jnp.minimum(low, z), any_ | (z > 0)), None

        like = jnp.zeros((2, 4))
        start = (like - 9, like + 1, like + 9, like > 0)
        return lax.scan(body, start, xs)[0]

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_maximum_over_stages():
    def step(params, xs):
        def body(high, x):
            with layer(0):
                h = x @ params[0]
            with layer(1):
                z = h @ params[1]
            return jnp.maximum(jnp.maximum(high, h), z), None

        return lax.scan(body, jnp.full((2, 4), -9.0), xs)[0]

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_slots_written_in_another_order():
    def step(params, xs):
        def body(carry, x):
            i, out = carry
            y = two_layers(params, x)
            return (i + 1, out.at[(3 * i) % 4].set(y)), None

        start = (jnp.int32(0), jnp.zeros((4, 2, 4)))
        return lax.scan(body, start, xs)[0]

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_one_slot_written_by_every_iteration():
    def step(params, xs):
        def body(carry, x):
            i, out = carry
            return (i + 1, out.at[i // 2].set(two_layers(params, x))), None

        start = (jnp.int32(0), jnp.zeros((4, 2, 4)))
        return lax.scan(body, start, xs)[0]

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_accumulator_is_read_inside():
    def step(params, xs):
        def body(total, x):
            y = two_layers(params, x)
            return total + y, total * 2

        return lax.scan(body, jnp.zeros((2, 4)), xs)

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


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


@pytest.mark.parametrize("combine", [jnp.add, jnp.maximum])
def test_forward_and_backward_accumulate_into_one(combine):
    def step(params, xs):
        def body(carry, x):
            total, grads = carry

            def loss(params):
                with layer(0):
                    h = jnp.tanh(x @ params[0])
                with layer(1):
                    return jnp.mean((h @ params[1]) ** 2), h.sum(0)

            (_, stats), new = jax.value_and_grad(loss, has_aux=True)(params)
            total = combine(combine(total, stats), new[0].sum(0))
            return (total, jax.tree.map(jnp.add, grads, new)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(body, (jnp.zeros(4), zeros), xs)[0]

    check(pipeline(2), step, weights(2), normal(4, 2, 4))


def test_literals_in_a_sum_over_stages():
    def step(params, x):
        with layer(0):
            a = x @ params[0]
        with layer(1):
            b = a @ params[1]
        return 1.0 + (a + b + 2.0)

    check(pipeline(2), step, weights(2), X)


def test_loop_index_is_carried():
    def step(params, x):
        def body(i, carry):
            total, before = carry
            return total + two_layers(params, x) * before, i

        return lax.fori_loop(0, 4, body, (jnp.zeros((8, 4)), jnp.int32(9)))

    check(pipeline(2), step, weights(2), X)


def test_whole_batch_is_carried_around():
    def step(params, x):
        def body(carry, _):
            a, b, c = carry
            total = c + two_layers(params, a)
            return (b, a, total), None

        return lax.scan(body, (x, x + 1, jnp.zeros_like(x)), None, length=3)[0]

    check(pipeline(2), step, weights(2), X)


def test_carries_go_around_in_a_loop_inside_a_loop():
    """What replaces a loop's result may be replaced itself by the loop around it."""

    def step(params, xs):
        def outer(h, x):
            def inner(carry, y):
                a, b, c = carry
                return (c, a, b), two_layers(params, y + a).sum()

            carry, sums = lax.scan(inner, (h, h + 1, h + 2), x)
            return carry[0] * 0.5, (sums, mlp(params[:2], carry[-1]))

        return lax.scan(outer, jnp.ones((2, 4)), xs)

    check(pipeline(2), step, weights(2), normal(2, 3, 2, 4))


def test_fixed_and_counted_carries_of_nested_loops():
    def step(params, x):
        def outer(i, carry):
            h, count, fixed = carry

            def inner(j, carry):
                h, count, fixed = carry
                return two_layers(params, h) + count + fixed.sum() * j, count, fixed

            h, same, fixed = lax.fori_loop(0, 2, inner, (h, count, fixed))
            return h, same + 1, fixed

        h, count, fixed = lax.fori_loop(0, 3, outer, (x, jnp.float32(0), jnp.ones((40,))))
        return two_layers(params, h + count), count, fixed

    check(pipeline(2), step, weights(2), X)
