"""What loops carry: sums, slots, states, and values that are only passed on."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.programs.plainly import (
    assert_close,
    check,
    check_steps,
    layer,
    mjit,
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


CONSTANT = jnp.asarray(normal(2, 4, seed=5))


def test_accumulators_that_start_from_arguments_and_constants():
    """They are not written in place: three calls on the same arrays give the same."""

    def step(params, start, xs):
        def body(carry, x):
            y = two_layers(params, x)
            return tuple(c * y if n == 3 else c + y for n, c in enumerate(carry)), None

        return lax.scan(body, (start, start, CONSTANT, CONSTANT), xs)[0], start

    multi, args = pipeline(2), (weights(2), jnp.asarray(X[:2]), normal(4, 2, 4))
    with multi:
        staged = mjit(step)
    expected = jax.jit(step)(*args)
    for _ in range(3):
        assert_close(staged(*args), expected)


def test_memory_of_one_slot_an_iteration():
    def step(params, memory, xs):
        def body(memory, inputs):
            i, x = inputs
            with layer(0):
                h = jnp.tanh(x @ params[0]) + memory[i]
                memory = memory.at[i].set(h)
            with layer(1):
                return memory, (h @ params[1]).sum()

        return lax.scan(body, memory, (jnp.arange(4), xs))

    check(pipeline(2), step, weights(2), normal(4, 2, 4, seed=3), normal(4, 2, 4))


def test_parameters_are_updated_inside_the_loop():
    def step(params, xs):
        def body(params, x):
            value, grads = jax.value_and_grad(square_loss)(params, (x, x))
            return sgd(params, grads), value

        return lax.scan(body, params, xs)

    check_steps(pipeline(2), step, weights(2), normal(4, 2, 4))
