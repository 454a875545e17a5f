"""Effects run once per execution of their equation and keep their order (R13)."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from multimesh._src.errors import ExecutionError, PartitionError, ScheduleError
from multimesh._src.runtime.executor import run_steps
from multimesh.jax import mjit
from tests.programs.plainly import assert_close, layer, pipeline, weights
from tests.programs.stepped import X, Y, descent

W, BATCH = weights(2), (X, Y)


class Log:
    """What callbacks were called with."""

    def __init__(self):
        self.calls = []

    def note(self, tag):
        def callback(value):
            self.calls.append((tag, round(float(np.sum(value)), 2)))

        return callback

    def of(self, fun, *args):
        """The result of a call, and what was noted meanwhile."""
        self.calls.clear()
        result = jax.block_until_ready(fun(*args))
        jax.effects_barrier()
        return result, list(self.calls)


LOG = Log()


def debug(tag, x, ordered=False):
    jax.debug.callback(LOG.note(tag), x, ordered=ordered)
    return x


def io(tag, x, ordered=False):
    io_callback(LOG.note(tag), None, lax.stop_gradient(x), ordered=ordered)
    return x


def pure(tag, x, ordered=False):
    def callback(value):
        LOG.note(tag)(value)
        return np.zeros_like(value)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + jax.pure_callback(callback, shape, lax.stop_gradient(x))


CALLS = {"debug": debug, "io": io, "pure": pure}


def layers(between, count=2):
    """A loss of `count` layers, `between(number, x)` inside each."""

    def loss(params, batch):
        x, y = batch
        for number in range(count):
            with layer(number):
                x = between(number, jnp.tanh(x @ params[number % 2]))
        return jnp.mean((x - y) ** 2)

    return loss


def check(multi, fun, *args, in_order=False, calls=None):
    """Compares results and calls with plain JAX."""
    expected, wanted = LOG.of(jax.jit(fun), *args)
    with multi:
        staged = mjit(fun)
    ours, noted = LOG.of(staged, *args)
    assert_close(ours, expected)
    wanted = wanted if calls is None else calls
    assert noted == wanted if in_order else sorted(noted) == sorted(wanted)
    _, again = LOG.of(staged, *args)
    assert sorted(again) == sorted(noted)
    return noted


# --- once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("size", [0, 2])
def test_calls_inside_tasks(width, kind, size):
    loss = layers(lambda number, x: CALLS[kind](f"layer{number}", x))
    noted = check(pipeline(2, width), descent(loss, size), W, BATCH)
    assert len(noted) == 2 * (4 if size else 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_calls_under_schedules(schedule):
    loss = layers(lambda number, x: debug(f"layer{number}", x))
    check(pipeline(2), descent(loss, 2, schedule=schedule), W, BATCH)


def test_calls_outside_every_scope():
    def loss(params, batch):
        x, y = batch
        debug("start", jnp.float32(1))
        for number in range(2):
            with layer(number):
                x = jnp.tanh(x @ params[number])
            debug(f"after {number}", x)
        return debug("loss", jnp.mean((x - y) ** 2))

    check(pipeline(2), descent(loss), W, BATCH)
    assert len(check(pipeline(2), descent(loss, 2), W, BATCH)) == 16


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [0, 2])
def test_calls_in_remat(whole, size):
    def loss(params, batch):
        def block(number, x, w):
            with layer(number):
                return jnp.sin(debug(f"layer{number}", jnp.tanh(x @ w)))

        x, y = batch
        for number, w in enumerate(params):
            apply = block if whole else jax.checkpoint(block, static_argnums=0)
            x = apply(number, x, w)
        return jnp.mean((x - y) ** 2)

    step = descent(jax.checkpoint(loss) if whole else loss, size)
    noted = check(pipeline(2), step, W, BATCH)
    assert len(noted) == 4 * (4 if size else 1), "in the forward pass and when recomputed"


def test_calls_of_what_does_not_change_in_a_loop():
    def step(params, batch):
        def body(total, rows):
            debug("constant", jnp.float32(2))
            debug("weights", params[0].sum())
            with layer(0):
                x = rows @ params[0] + pure("pure", params[0])[0]
            with layer(1):
                return total + (x @ params[1]).sum(), None

        return lax.scan(body, jnp.float32(0), batch.reshape(4, 2, 4))[0]

    weight_sum = round(float(W[0].sum()), 2)
    calls = [("constant", 2.0), ("weights", weight_sum), ("pure", weight_sum)] * 4
    check(pipeline(2), step, W, X, calls=calls)


def test_calls_in_loops_over_tasks_and_inside_them():
    def step(params, x):
        def across(x, _):
            for number in range(2):
                with layer(number):
                    x = debug(f"layer{number}", jnp.tanh(x @ params[number]))
            return x, None

        def inside(x, _):
            return debug("inside", jnp.tanh(x @ params[0])), None

        def grow(state):
            number, x = state
            return number + 1, debug("while", jnp.tanh(x @ params[1]))

        x, _ = lax.scan(across, x, None, length=3)
        with layer(0):
            x, _ = lax.scan(inside, x, None, length=3)
        with layer(1):
            _, x = lax.while_loop(lambda state: state[0] < 2, grow, (0, x))
            return lax.cond(x.sum() < 1e9, lambda x: debug("taken", x), lambda x: x * 2, x)

    assert len(check(pipeline(2), step, W, X)) == 6 + 3 + 2 + 1


def test_calls_under_vmap():
    def step(params, x):
        with layer(0):
            x = jax.vmap(lambda row: debug("row", row) @ params[0])(x)
        with layer(1):
            return x @ params[1]

    assert len(check(pipeline(2), step, W, X)) == 8


# --- in order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", [debug, io])
def test_ordered_calls_on_one_submesh(width, kind):
    def between(number, x):
        return kind("second", kind("first", x, True) * 2, True) if number == 0 else x

    check(pipeline(2, width), layers(between), W, BATCH, in_order=True)
    step = descent(layers(between), 2)
    assert len(check(pipeline(2, width), step, W, BATCH, in_order=True)) == 8


def test_ordered_print_on_one_submesh(capfd):
    def between(number, x):
        if number == 1:
            jax.debug.print("rows {}", x.shape[0], ordered=True)
        return x

    with pipeline(2, 2):
        step = mjit(descent(layers(between), 2))
    step(W, BATCH)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["rows 2"] * 4


def test_ordered_calls_in_tasks_without_dataflow_between_them():
    def step(params, x):
        with layer(0):
            a = jnp.sin(x @ params[0])
        with layer(1):
            b = jnp.cos(a)
        with layer(0):
            c = debug("second", b, True) * 2
        with layer(2):
            return c, debug("third", jnp.tanh(x), True)

    noted = check(pipeline(2, 2), step, W, X, in_order=True)
    assert [tag for tag, _ in noted] == ["second", "third"]


def test_ordered_calls_forward_and_backward():
    assert len(check(pipeline(2), descent(both_ways()), W, BATCH, in_order=True)) == 2


def both_ways():
    @jax.custom_vjp
    def noted(x):
        return debug("forward", x, True)

    def backward(_, g):
        return (debug("backward", g, True),)

    noted.defvjp(lambda x: (noted(x), None), backward)
    return layers(lambda number, x: noted(x) if number == 0 else x)


def error_of(kind, multi, step):
    with multi, pytest.raises(kind) as caught:
        mjit(step)(W, BATCH)
    return str(caught.value)


@pytest.mark.parametrize("kind", [debug, io])
def test_ordered_calls_on_several_submeshes(kind):
    loss = layers(lambda number, x: kind(f"layer{number}", x, True))
    text = error_of(PartitionError, pipeline(2), descent(loss))
    assert ("jax.debug" if kind is debug else "io_callback") in text
    assert "`layer0_fwd` on `stage=0`" in text and "`layer1_fwd` on `stage=1`" in text
    assert text.count("test_effects.py:") == 2 and "ordered=False" in text


def test_ordered_calls_of_two_kinds_may_stand_apart():
    loss = layers(lambda number, x: (debug, io)[number](f"layer{number}", x, True))
    check(pipeline(2), loss, W, BATCH)


def test_ordered_calls_that_a_schedule_would_reorder():
    text = error_of(ScheduleError, pipeline(2), descent(both_ways(), 2, schedule="1f1b"))
    assert "the schedule `1f1b`" in text and "`jax.debug`" in text
    assert "`layer0_fwd` of microbatch 1 comes before `layer0_bwd` of microbatch 0" in text
    assert text.count("test_effects.py:") == 2

    loss = layers(lambda number, x: debug("x", x, True) if number % 2 == 0 else x, count=4)
    text = error_of(ScheduleError, pipeline(2), descent(loss, 2, schedule="interleaved-1f1b"))
    assert "`layer0_fwd`" in text and "`layer2_fwd`" in text


# --- failures ------------------------------------------------------------------------------------


FAILING = """
import sys
import jax
from tests import conftest
from tests.programs import test_effects as module
from multimesh.jax import mjit

def fail(value):
    raise OSError("disk full")

module.LOG.note = lambda tag: fail
call = module.CALLS[sys.argv[1]]
loss = module.layers(lambda number, x: call("x", x, bool(sys.argv[2])) if number == 1 else x)
with module.pipeline(2):
    step = mjit(loss)
try:
    jax.block_until_ready(step(module.W, module.BATCH))
    jax.effects_barrier()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("kind", "ordered"), [("debug", ""), ("io", "1"), ("pure", "")])
def test_a_call_that_fails_names_its_task(kind, ordered):
    # in a process of its own: JAX remembers failed effects until it ends
    command = [sys.executable, "-c", FAILING, kind, ordered]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = "The task `layer1_fwd` failed: a Python callback inside it raised `OSError: disk full`."
    assert said in done.stdout, done.stderr


def test_a_failed_call_is_named_by_the_step_that_meets_it():
    error = RuntimeError("INTERNAL: error calling callback: x.py\nE.ExecutionError: The task `a`")
    with pytest.raises(ExecutionError, match=r"^The task `a`$"):
        run_steps([(failing_with(error), lambda slots: slots, (), (), "task `b`")], [])
    with pytest.raises(ExecutionError, match=r"^The task `b` failed: out of memory$"):
        run_steps([(failing_with(RuntimeError("out of memory")), list, (), (), "task `b`")], [])


def failing_with(error):
    def call(args):
        raise error

    return call
