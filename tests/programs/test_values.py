"""Values of every kind: trees, results that are arguments, keys, integers, empty arrays."""

import jax
import jax.numpy as jnp
import numpy as np
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


def test_empty_trees_and_unused_arguments():
    def step(params, none, empty, unused, x):
        return mlp(params, x), none, empty, {"a": (), "b": None}, [unused["y"]]

    check(pipeline(2), step, weights(2), None, {}, {"x": X, "y": Y}, X)


def test_results_twice_and_results_that_are_arguments():
    def step(params, x, number):
        y = mlp(params, x)
        return y, y, params[0], x, x, number, number + 1, y.T, jnp.float32(3), np.float32(2), 7

    check(pipeline(2), step, weights(2), X, 5)


def test_donated_arguments_that_are_results():
    def step(state, x):
        params, extra = state
        return (params, {"same": extra["same"], "new": mlp(params, x)}), extra["same"].sum()

    check_steps(pipeline(2), step, (weights(2), {"same": normal(5), "new": X}), X)


def test_donated_arguments_that_change_places():
    def step(state, x):
        a, b = state
        return (b, a), mlp(list(state), x)

    check_steps(pipeline(2), step, tuple(weights(2)), X)


def test_results_that_depend_on_no_task():
    def step(params, step, table):
        rate = jnp.where(step > 3, 0.1, 0.01) * jnp.sqrt(step + 1.0)
        return mlp(params, X), rate, step + 1, jnp.arange(5), table[::-1], jnp.zeros((3, 3))

    check(pipeline(2), step, weights(2), jnp.int32(4), normal(40, 3))


def test_integers_booleans_and_complex():
    def step(params, ids, mask, z):
        with layer(0):
            h = params[0][ids % 4] * mask[:, None]
            n = (ids * 2 - 1) >> 1
        with layer(1):
            out = jnp.where(mask[:, None], h @ params[1], 0)
            count = (mask & (n > 2)).sum()
            w = jnp.abs(z * 1j) + (z * z.conj()).real
        return out, n, count, ~mask, jnp.argmax(out), w, (ids[0] > 1)

    ids, mask = np.arange(8, dtype="uint8"), np.arange(8) % 3 == 0
    check(pipeline(2), step, weights(2), ids, mask, (X + 1j * Y).astype("complex64"))


def test_empty_and_scalar_arrays():
    def step(params, empty, scalar):
        with layer(0):
            a = (empty @ params[0]) * scalar
            s = params[0].sum() * scalar
        with layer(1):
            b = jnp.concatenate([a, jnp.ones((2, 4)) @ params[1]])
            t = s + b.sum()
        return a, b, t, empty, s

    check(pipeline(2), step, weights(2), np.zeros((0, 4), "f"), np.float32(1.5))


def test_tiny_batch_rows_and_uneven_widths():
    def step(params, x):
        with layer(0):
            h = x @ params[0]
        with layer(1):
            return h @ params[1]

    check(pipeline(2, 2), step, [normal(3, 5), normal(5, 7)], normal(1, 3))


def noisy_loss(params, batch, key):
    x, y = batch
    for index, w in enumerate(params):
        with layer(index):
            x = jnp.tanh(x @ w)
            keep = jax.random.bernoulli(jax.random.fold_in(key, index), 0.8, x.shape)
            x = jnp.where(keep, x, 0)
    noise = jax.random.normal(key, x.shape)
    return jnp.mean((x + noise - y) ** 2)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("size", [0, 2])
def test_keys(make, size):
    def step(state, batch):
        params, key = state
        key, now = jax.random.split(key)
        grad = jax.value_and_grad(noisy_loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1)
        value, grads = grad(params, batch, now)
        return (sgd(params, grads), key), (value, jax.random.bits(now, (3,)))

    check_steps(pipeline(2), step, (weights(2), make(3)), (X, Y))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_key_is_threaded_through_a_loop(make):
    def step(state, batch):
        params, key = state

        def body(carry, batch):
            key, total, grads = carry
            key, now = jax.random.split(key)
            value, new = jax.value_and_grad(noisy_loss)(params, batch, now)
            return (key, total + value, jax.tree.map(jnp.add, grads, new)), now

        zeros = jax.tree.map(jnp.zeros_like, params)
        batches = jax.tree.map(lambda a: a.reshape(4, 2, 4), batch)
        (key, value, grads), used = lax.scan(body, (key, jnp.float32(0), zeros), batches)
        return (sgd(params, grads), key), (value, used)

    check_steps(pipeline(2), step, (weights(2), make(3)), (X, Y))


def test_one_key_per_microbatch():
    def step(params, batch, key):
        keys = jax.random.split(key, 4)

        def body(total, inputs):
            x, key = inputs
            with layer(0):
                h = x @ params[0] + jax.random.normal(key, (2, 4))
            with layer(1):
                return total + (h @ params[1]).sum(), jax.random.uniform(key)

        return lax.scan(body, jnp.float32(0), (batch.reshape(4, 2, 4), keys))

    check(pipeline(2), step, weights(2), X, jax.random.key(1))


def test_result_of_a_loop_and_its_argument_are_the_same_tree():
    def step(state, batch):
        grad = microbatch(jax.value_and_grad(square_loss), 0, 2, argnum=1)
        value, grads = grad(state["params"], batch)
        sums = jax.tree.map(jnp.add, state["sums"], grads)
        big = jnp.maximum(state["best"], value)
        return {"params": state["params"], "sums": sums, "best": big, "n": state["n"] + 1}, value

    params = weights(2)
    zeros = [np.zeros_like(w) for w in params]
    state = {"params": params, "sums": zeros, "best": np.float32(0), "n": np.int32(0)}
    check_steps(pipeline(2), step, state, (X, Y))


def test_small_types():
    def step(params, x):
        with layer(0):
            h = (x.astype(jnp.bfloat16) @ params[0].astype(jnp.bfloat16)).astype(jnp.float16)
        with layer(1):
            q = jnp.round(h * 10).astype(jnp.int8)
            return q, (q.astype(jnp.float8_e4m3fn) * 1).astype(jnp.float32), h

    check(pipeline(2), step, weights(2), X)


def test_static_and_keyword_arguments():
    def step(params, x, *, scale, flip=False):
        y = mlp(params, x) * scale
        return y[::-1] if flip else y

    multi = pipeline(2)
    from tests.programs.plainly import assert_close, mjit

    with multi:
        staged = mjit(step, static_argnames="flip")
    plain = jax.jit(step, static_argnames="flip")
    for flip in (True, False):
        args = {"scale": 2.0, "flip": flip}
        assert_close(staged(weights(2), X, **args), plain(weights(2), X, **args))
