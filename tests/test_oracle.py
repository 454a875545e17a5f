"""The yardstick is checked against numpy in float64 and against arrays that are off on purpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from tests.oracle import (
    IllConditionedError,
    Oracle,
    bitwise_equal,
    compare,
    error_ulps,
    reference_a,
    reference_b,
    ulp,
)


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_matmul_chain_is_exact_to_float64():
    x, w = normal(0, (4, 16)), normal(1, (16, 16))

    def fun(x, w):
        return jax.nn.softmax(jnp.tanh(x @ w) @ w)

    def numpy_fun(x, w):
        z = np.exp(np.tanh(x @ w) @ w)
        return z / z.sum(-1, keepdims=True)

    got = Oracle(fun, x, w)(x, w)
    want = numpy_fun(x.astype(np.float64), w.astype(np.float64))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_bfloat16_is_widened_without_rounding_between():
    x = jnp.asarray(normal(0, (64,)), jnp.bfloat16)
    got = Oracle(lambda x: (x * x + x).sum(dtype=jnp.float32), x)(x)
    wide = np.asarray(x).astype(np.float64)
    np.testing.assert_allclose(got, (wide * wide + wide).sum(), rtol=1e-14)


def test_random_bits_are_those_of_the_trace():
    def fun(key, rate):
        new_key, sub = jax.random.split(key)
        mask = jax.random.bernoulli(sub, rate, (32,))
        bits = jax.random.bits(sub, (8,))
        draw = jax.random.randint(sub, (8,), 0, 100)
        return new_key, mask, bits, draw, jax.random.normal(sub, (32,))

    key = jax.random.key(7)
    rate = np.float32(0.3)
    oracle = Oracle(fun, key, rate)(key, rate)
    ref = reference_a(fun, key, rate)
    for got, want in zip(oracle[:4], ref[:4], strict=True):
        assert bitwise_equal(got, want)
    assert oracle[4].dtype == np.float64
    assert error_ulps(ref[4], oracle[4]) < 32


def test_gradients_through_scan_cond_while_remat_and_custom_rules():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))

    def layer(x, w):
        y = jax.nn.relu(jnp.sin(x @ w)) + square(x)
        return jax.lax.cond(y.sum() > 0, jnp.cos, jnp.sin, y), y.mean()

    def loss(ws, x):
        x, means = jax.lax.scan(jax.checkpoint(layer), x, ws)
        x = jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, x)
        x = jax.lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, jax.lax.stop_gradient(x)) + x
        return x.mean() + means.sum()

    ws, x = 0.1 * normal(0, (3, 8, 8)), normal(1, (4, 8))
    fun = jax.value_and_grad(loss)
    with jax.enable_x64(True):
        want = jax.jit(fun)(ws.astype(np.float64), x.astype(np.float64))
    for got, exact in zip(Oracle(fun, ws, x)(ws, x), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-6)  # literals are rounded to float32
    ref = reference_a(fun, ws, x)
    compare(ref, ref, ref, Oracle(fun, ws, x)(ws, x)).check()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scatter_gather_sort_and_segment_sums(dtype):
    table = jnp.asarray(normal(0, (10, 4)), dtype)
    ids = jnp.array([3, 3, 1, 9])

    def fun(table, ids):
        def loss(table):
            rows = table[ids]
            return (jnp.sort(rows, axis=0) * rows.cumsum(0)).sum() + rows.max()

        return jax.grad(loss)(table), jnp.argmax(table), table[ids] > 0

    ref = reference_a(fun, table, ids)
    comparison = compare(ref, ref, ref, Oracle(fun, table, ids)(table, ids))
    comparison.check()
    assert comparison.num_bitwise == len(comparison.leaves) == 3


CASES = {
    "convolution": lambda x, k: jax.grad(
        lambda w: jax.lax.conv_general_dilated(x[None, None], w, (1, 1), "SAME").sum()
    )(jnp.ones((2, 1, 3, 3))),
    "pooling": lambda x, k: jax.grad(
        lambda x: (jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")).sum()
    )(x),
    "linear solve": lambda x, k: jnp.linalg.inv(x @ x.T + 4 * jnp.eye(4)),
    "cholesky": lambda x, k: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)),
    "fft": lambda x, k: jnp.fft.fft(x),
    "generic reduction": lambda x, k: jax.lax.reduce(x, jnp.float32(0), lambda p, q: p + q, (0,)),
    "scatter": lambda x, k: x.at[jnp.array([1, 1])].mul(2.0).at[0].min(0.0),
    "segment maximum": lambda x, k: jax.ops.segment_max(x, jnp.array([0, 1, 1, 0]), 2),
    "categorical": lambda x, k: jax.random.categorical(k, x),
    "gamma": lambda x, k: jax.random.gamma(k, 2.0, (5,)),
    "batched keys": lambda x, k: jax.vmap(jax.random.normal)(jax.random.split(k, 4)),
    "hessian": lambda x, k: jax.hessian(lambda x: jnp.tanh(x).sum())(x[0]),
    "switch": lambda x, k: jax.lax.switch(1, [jnp.sin, jnp.cos], x),
    "effect": lambda x, k: (jax.debug.callback(lambda x: None, x), 2 * x)[1],
    "mixed precision": lambda x, k: jnp.dot(
        x.astype(jnp.bfloat16), x.T.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds_of_equations(name):
    x, key = normal(0, (4, 8)), jax.random.key(0)
    ref = reference_a(CASES[name], x, key)
    compare(ref, ref, ref, Oracle(CASES[name], x, key)(x, key)).check()


def test_state_is_carried_in_float64_over_steps():
    def step(state, x):
        w, count = state
        return (w - jnp.float32(0.125) * x, count + 1), (w * x).sum()

    state, x = (np.ones(3, np.float32), np.int32(0)), np.full(3, 2.0**-30, np.float32)
    oracle = Oracle(step, state, x)
    wide = state
    for _ in range(5):
        wide, _ = oracle(wide, x)
    assert wide[1] == 5 and wide[1].dtype == np.int32
    np.testing.assert_array_equal(wide[0], 1 - 5 * 2.0**-33)  # float32 would have kept 1


def test_closed_over_arrays_and_python_scalars():
    table = jnp.asarray(normal(0, (4,)))
    got = Oracle(lambda s: table * s * 0.1, 2.0)(2.0)
    want = np.asarray(table, np.float64) * 2.0 * np.float64(np.float32(0.1))
    np.testing.assert_allclose(got, want, rtol=1e-15)


def test_ulps():
    assert ulp(jnp.float32, 1.0) == 2.0**-23
    assert ulp(jnp.float32, 3.0) == 2.0**-22
    assert ulp(jnp.bfloat16, 1.0) == 2.0**-7
    assert error_ulps(np.float32([1, 4 + 2**-20]), np.float64([1, 4])) == 2.0
    assert error_ulps(np.float32([np.nan, 1]), np.float64([np.nan, 1])) == 0.0
    assert error_ulps(np.float32([np.nan, 1]), np.float64([0, 1])) == float("inf")
    assert error_ulps(np.float32([1, 1]), np.float64([1])) == float("inf")
    assert error_ulps(np.zeros((0,), np.float32), np.zeros((0,))) == 0.0


def test_bound_is_four_times_the_larger_reference_error_plus_eight():
    exact = np.float64([1.0])

    def off(ulps):
        return np.float32([1.0 + ulps * 2.0**-23])

    compare(off(24), off(4), off(2), exact).check()
    compare(off(24), off(2), off(4), exact).check()
    with pytest.raises(AssertionError, match=r"ours 25.00 ulp, bound 24.00"):
        compare(off(25), off(4), off(2), exact).check()


def test_ill_conditioned_references_are_told_apart():
    exact, good = np.float64([1.0]), np.float32([1.0])
    bad = np.float32([1.0 + 2000 * 2.0**-23])
    for a, b in ((bad, good), (good, bad)):
        with pytest.raises(IllConditionedError):
            compare(good, a, b, exact).check()


def test_integers_that_follow_from_rounding_errors_are_ill_conditioned():
    ints = np.int32([1, 2])
    for a, b in ((ints, ints + 1), (ints + 1, ints)):
        with pytest.raises(IllConditionedError):
            compare(ints, a, b, ints).check()


def test_exact_types_must_be_equal():
    ints, key = np.int32([1, 2]), jax.random.key(0)
    compare((ints, key), (ints, key), (ints, key), (ints, key)).check()
    with pytest.raises(AssertionError, match="ours inf"):
        compare((ints + 1, key), (ints, key), (ints, key), (ints, key)).check()
    with pytest.raises(AssertionError, match="ours inf"):
        compare((ints, jax.random.key(1)), (ints, key), (ints, key), (ints, key)).check()
    with pytest.raises(AssertionError, match="dtype `int16`"):
        compare(np.int16([1]), np.int32([1]), np.int32([1]), np.int32([1]))
    with pytest.raises(AssertionError, match="structure"):
        compare((ints,), ints, ints, ints)


def test_reference_b_runs_on_its_mesh():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    x, w = normal(0, (8, 16)), normal(1, (16, 4))
    y = reference_b(jnp.dot, mesh, (x, w), (P("data"), P("model")))
    assert len(y.sharding.device_set) == 4
    ref = reference_a(jnp.dot, x, w)
    assert len(ref.sharding.device_set) == 1
    compare(y, ref, y, Oracle(jnp.dot, x, w)(x, w)).check()
