"""Loops whose iterations need each other (R11): decoding, several training steps in one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.runtime import counters
from multimesh.jax import microbatch, mjit
from tests.core import pipelined
from tests.programs.plainly import assert_close

pytestmark = pytest.mark.core

LENGTH, WIDTH = 6, pipelined.WIDTH


def decode(params, caches, x, num_steps, loop):
    """Every layer keeps what it saw at each place, and looks at the mean of that."""

    def append(place, x, caches):
        new = []
        for i, (w, cache) in enumerate(zip(params, caches, strict=True)):
            with jax.named_scope(f"layer{i}"):
                cache = jax.lax.dynamic_update_slice_in_dim(cache, x[:, None], place, axis=1)
                x = jnp.tanh((x + cache.mean(1)) @ w)
                new.append(cache)
        return x, new

    if loop == "scan":

        def body(carry, place):
            x, caches = append(place, *carry)
            return (x, caches), x

        (x, caches), xs = jax.lax.scan(body, (x, caches), jnp.arange(num_steps))
        return caches, x, xs
    x, caches = jax.lax.fori_loop(0, num_steps, lambda i, carry: append(i, *carry), (x, caches))
    return caches, x, None


def make_caches(num_layers=2):
    return [np.zeros((4, LENGTH, WIDTH), np.float32) for _ in range(num_layers)]


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_decoding_over_stages(loop):
    params, x = pipelined.make_params(2), np.ones((4, WIDTH), np.float32)

    def fun(params, caches, x):
        return decode(params, caches, x, LENGTH, loop)

    with pipelined.make_multi_mesh(2, layers_per_stage=1):
        ours = mjit(fun, donate_argnums=1)
    lowered = ours.lower(params, make_caches(), x)
    assert lowered.schedule is None, "iterations are not independent"
    crossing = {r.edge: r.copies for r in lowered.program.reshards if r.type == "float32[4,32]"}
    assert crossing["stage=0 -> stage=1"] == LENGTH
    assert crossing["stage=1 -> stage=0"] in (LENGTH - 1, LENGTH), "the last result may go there"
    assert not any(r.type == "float32[4,6,32]" for r in lowered.program.reshards)
    expected = jax.jit(fun)(params, make_caches(), x)
    caches = make_caches()
    for _ in range(2):
        old = caches
        caches, last, xs = ours(params, caches, x)
        assert_close((caches, last, xs), expected)
        expected = jax.jit(fun)(params, expected[0], x)
    assert all(cache.is_deleted() for cache in old), "caches are written in place"
    assert [len(cache.devices()) for cache in caches] == [4, 4]
    assert not caches[0].devices() & caches[1].devices()


def test_programs_are_shared_by_iterations():
    params, x = pipelined.make_params(2), np.ones((4, WIDTH), np.float32)
    compiles = []
    for length in (4, LENGTH):
        with pipelined.make_multi_mesh(2, layers_per_stage=1):
            ours = mjit(lambda *args, n=length: decode(*args, n, "scan"))
        before = counters.snapshot()
        ours(params, make_caches(), x)
        compiles.append(counters.since(before).compiles)
    assert compiles[0] == compiles[1]


@pytest.mark.parametrize("micro", [False, True])
def test_several_training_steps_in_one_call(micro):
    def steps(state, batches):
        def one(state, batch):
            gradient = jax.value_and_grad(pipelined.loss)
            if micro:
                gradient = microbatch(gradient, 0, 4, argnum=1, reduce="mean")
            value, grads = gradient(state[0], batch)
            updates, opt_state = pipelined.optimizer.update(grads, state[1], state[0])
            return (jax.tree.map(jnp.add, state[0], updates), opt_state), value

        return jax.lax.scan(one, state, batches)

    draw = np.random.default_rng(0)
    batches = tuple(draw.normal(size=(3, 8, WIDTH)).astype(np.float32) for _ in range(2))
    with pipelined.make_multi_mesh():
        ours = mjit(steps, donate_argnums=0)
    state = jax.tree.map(np.asarray, pipelined.make_state())
    expected = jax.jit(steps)(state, batches)
    result = ours(state, batches)
    assert_close(result, expected)
    again = ours(result[0], batches)
    assert_close(again, jax.jit(steps)(expected[0], batches))
    places = jax.tree.map(lambda a, b: a.sharding == b.sharding, result[0], again[0])
    assert jax.tree.all(places), "the state comes back where it lies"
    schedule = ours.lower(result[0], batches).schedule
    assert (schedule is not None) == micro, "the inner loop alone is pipelined"


def test_iterations_that_overlap_nothing_keep_their_order():
    """A loop of loops: the outer one carries what the inner one, over stages, makes of it."""
    params = pipelined.make_params(2)

    def fun(params, x):
        def layers(x):
            for i, w in enumerate(params):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.tanh(x @ w)
            return x

        def outer(carry, scale):
            inner, _ = jax.lax.scan(lambda c, _: (layers(c) * scale, None), carry, None, length=2)
            return inner + carry, inner.sum()

        return jax.lax.scan(outer, x, jnp.arange(1.0, 4.0))

    x = np.ones((4, WIDTH), np.float32)
    with pipelined.make_multi_mesh(2, layers_per_stage=1):
        ours = mjit(fun)(params, x)
    assert_close(ours, jax.jit(fun)(params, x))
