"""Exceptions, interrupts and threads leave nothing behind; dropped functions are gone (R21)."""

import gc
import logging
import os
import resource
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh._src.errors import ExecutionError
from multimesh.jax import MultiMesh, Task, mjit
from tests.core import pipelined
from tests.programs.plainly import assert_close

WIDTH = pipelined.WIDTH
X = np.ones((4, WIDTH), np.float32)


def model(params, x, between=lambda x: x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
            if i == 0:
                x = between(x)
    return x


def make(fun, **options):
    """Two stages of one device: XLA aborts when a callback fails in a program on several."""
    multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()[:2]), ("stage",)))
    multi_mesh.register_layers(r"layer\d+", num_layers=2, axis="stage")
    with multi_mesh:
        return mjit(fun, **options)


def on_host(between):
    """Runs `between` in the middle of the first task."""

    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda y: between(np.asarray(y)), shape, x)

    return call


def live_arrays():
    gc.collect()
    return len(jax.live_arrays())


class Switch:
    """A callback that fails while it is on."""

    def __init__(self):
        self.on = True

    def __call__(self, y):
        if self.on:
            raise ValueError("no more disk space")
        return y


def test_an_exception_in_a_host_callback():
    params = jax.device_put(pipelined.make_params(2))
    switch = Switch()
    step = make(lambda params, x: model(params, x, on_host(switch)))
    with pytest.raises(ExecutionError, match=r"(?s)task `layer0.*no more disk space"):
        jax.block_until_ready(step(params, X))
    switch.on = False
    assert_close(step(params, X), jax.jit(model)(params, X))


def test_an_exception_in_a_matcher_callback():
    def boom(name, backprop):
        raise RuntimeError(f"what is {name}?")

    multi_mesh = MultiMesh(global_mesh=pipelined.make_multi_mesh(2).global_mesh)
    multi_mesh.register_task(r"layer\d", callback=boom)
    with multi_mesh:
        step = mjit(model)
    params = pipelined.make_params(2)
    before = live_arrays()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="what is layer0"):
            step(params, X)
    assert live_arrays() == before
    assert jax.jit(model)(params, X).shape == X.shape, "plain JAX is untouched"


def test_an_exception_while_tracing():
    params, fail = pipelined.make_params(2), [True]

    def fun(params, x):
        y = model(params, x)
        if fail[0]:
            raise KeyError("no such feature")
        return y

    step = make(fun)
    with pytest.raises(KeyError, match="no such feature"):
        step(params, X)
    fail[0] = False
    assert_close(step(params, X), jax.jit(model)(params, X))


class Interrupting:
    """A callback that sends Ctrl-C to the process while a step is enqueued, when it is on."""

    def __init__(self):
        self.on = False

    def __call__(self, y):
        if self.on:
            self.on = False
            os.kill(os.getpid(), signal.SIGINT)
        return y


def call_and_wait(step, state):
    jax.block_until_ready(step(state, X))
    threading.Event().wait(5)  # the signal may come after the call


def test_ctrl_c_waits_until_the_step_is_enqueued():
    interrupting = Interrupting()

    def fun(ws, x):
        y = model(ws, x, on_host(interrupting))
        return [w * 0.5 for w in ws], y

    step = make(fun)
    params = jax.device_put(pipelined.make_params(2))
    expected = step(params, X)
    handler = signal.getsignal(signal.SIGINT)
    interrupting.on = True
    with pytest.raises(KeyboardInterrupt):
        call_and_wait(step, params)
    assert signal.getsignal(signal.SIGINT) is handler
    assert_close(step(params, X), expected)


def test_a_state_donated_to_an_interrupted_step_says_so():
    interrupting = Interrupting()

    def fun(ws, x):
        y = model(ws, x, on_host(interrupting))
        return [w * 0.5 for w in ws], y

    step = make(fun, donate_argnums=0)
    state, _ = step(pipelined.make_params(2), X)
    kept = jax.tree.map(np.asarray, state)
    interrupting.on = True
    with pytest.raises(KeyboardInterrupt):
        call_and_wait(step, state)
    with pytest.raises(ExecutionError) as caught:
        step(state, X)
    text = str(caught.value)
    assert "donated" in text and "ws[0]" in text
    assert "interrupted" in text and "checkpoint" in text, text
    state, _ = step(kept, X)
    for ours, w in zip(state, kept, strict=True):
        np.testing.assert_array_equal(ours, w * 0.5)


def test_an_undonated_state_survives_an_exception(monkeypatch):
    # what JAX logs would hold the frames of the failed calls
    monkeypatch.setattr(logging.getLogger("jax._src.callback"), "disabled", True)
    switch = Switch()
    step = make(lambda params, x: model(params, x, on_host(switch)))
    params = jax.device_put(pipelined.make_params(2))
    switch.on = False
    step(params, X)
    before, switch.on = live_arrays(), True
    for _ in range(3):
        with pytest.raises(Exception, match="no more disk space"):
            jax.block_until_ready(step(params, X))
    assert live_arrays() == before, "no buffer is left behind"
    assert all(not w.is_deleted() for w in params)


def test_one_step_from_several_threads():
    step = make(lambda params, x: model(params, x).sum(-1))
    params = pipelined.make_params(2)
    inputs = [np.full((4, WIDTH), number / 16, np.float32) for number in range(16)]
    expected = [jax.jit(lambda p, x: model(p, x).sum(-1))(params, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            results = list(pool.map(lambda x: step(params, x), inputs))
            assert_close(results, expected)


def test_contexts_are_per_thread():
    multi_mesh = pipelined.make_multi_mesh(2, layers_per_stage=1)
    params = pipelined.make_params(2)
    step = mjit(model)
    barrier = threading.Barrier(2, timeout=60)

    def within():
        with multi_mesh:
            barrier.wait()
            result = step(params, X)
            barrier.wait()
        return result

    def without():
        barrier.wait()
        result = step(params, X)
        barrier.wait()
        return result

    with ThreadPoolExecutor(2) as pool:
        staged, plain = pool.submit(within), pool.submit(without)
        assert len(staged.result().devices()) == 4
        assert len(plain.result().devices()) == 1


def test_a_dropped_function_goes_with_everything_it_compiled():
    params = pipelined.make_params(2)

    def make_and_call():
        table = jax.device_put(np.ones(WIDTH, np.float32))
        step = make(lambda params, x: model(params, x) * table)
        step(params, X)
        return weakref.ref(step), weakref.ref(table)

    gone = make_and_call()
    jax.clear_caches()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.slow
def test_a_thousand_functions_leave_memory_flat():
    params = pipelined.make_params(2)
    multi_mesh = MultiMesh(global_mesh=pipelined.make_multi_mesh(2).global_mesh)
    multi_mesh.register_task(
        r"layer(\d+)", callback=lambda name, _: Task(name=name, mesh_slice={"stage": int(name)})
    )

    def make_and_drop(count):
        for number in range(count):
            with multi_mesh:
                step = mjit(lambda params, x, n=number: model(params, x) * n)
            step.lower(params, X)
        jax.clear_caches()
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    make_and_drop(100)
    objects, peak = make_and_drop(100)
    later_objects, later_peak = make_and_drop(800)
    assert later_objects < objects * 1.02 + 1000
    assert later_peak < peak + 60_000, "kilobytes; what 800 functions leave"
