"""Times of steps: on a clock of the test's own, and of a real call whose results stay the same."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from multimesh._src.errors import ExecutionError
from multimesh._src.ir.plan import Copy, Run
from multimesh._src.runtime import timing
from multimesh._src.runtime.buffers import BufferedPlan, plan_buffers
from multimesh._src.runtime.compiled_plan import CompiledPlan, compile_plan
from multimesh._src.runtime.timing import (
    CallTimes,
    Stopwatch,
    current_recorder,
    recording,
    timed_calls,
)
from tests.runtime.plans import REPLICATED, PlanBuilder, submesh


def ticking() -> Callable[[], float]:
    """A clock that goes on by one at each look."""
    return map(float, itertools.count()).__next__


class Recorder:
    def __init__(self, alone: bool = False) -> None:
        self.alone = alone
        self.found: list[CallTimes] = []

    def add(self, compiled: Any, times: CallTimes) -> None:
        self.found.append(times)


def chain(donated: bool = True) -> BufferedPlan:
    """Adds 1 on one device, copies the sum to another and adds 1 there, in place each time."""
    builder = PlanBuilder()
    first, second = submesh(0, (0,)), submesh(1, (1,))
    x = builder.argument("x", (8,), first, donated=donated)
    add = builder.executable("add", lambda x: (x + 1,), first, [x], [REPLICATED])
    (y,) = builder.run(add, [x], iteration=0)
    z = builder.copy(y, second)
    other = builder.executable("add", lambda x: (x + 1,), second, [z], [REPLICATED])
    (out,) = builder.run(other, [z], iteration=0)
    return plan_buffers(builder.plan(out))


def argument(device: int = 0) -> jax.Array:
    return jax.device_put(np.arange(8, dtype=np.float32), jax.devices()[device])


# --- the stopwatch --------------------------------------------------------------------------------


def test_alone_every_step_is_waited_for() -> None:
    stopwatch, waited = Stopwatch(ticking()), []
    calls = [stopwatch.alone(i, lambda args: [*args, 8], waited.append) for i in range(2)]
    stopwatch.start()
    for call in calls:
        call([7])
    times = stopwatch.stop()
    assert waited == [[7, 8], [7, 8]]
    assert [(t.step, t.begin, t.enqueued, t.end, t.seen) for t in times.steps] == [
        (0, 1.0, 2.0, 3.0, True),
        (1, 4.0, 5.0, 6.0, True),
    ]
    assert (times.begin, times.end) == (0.0, 7.0)


def test_together_the_host_goes_on_and_lanes_end_in_order() -> None:
    stopwatch = Stopwatch(ticking())
    doors = [threading.Event() for _ in range(4)]
    calls = [
        stopwatch.together(i, lambda args, i=i: (args, doors[i].wait), lane="ab"[i % 2])
        for i in range(4)
    ]
    stopwatch.start()
    assert [call((i,)) for i, call in enumerate(calls)] == [(0,), (1,), (2,), (3,)]
    for i in (3, 1, 0, 2):
        doors[i].set()
    times = {t.step: t for t in stopwatch.stop().steps}
    assert [(times[i].begin, times[i].enqueued) for i in range(4)] == [
        (1.0 + 2 * i, 2.0 + 2 * i) for i in range(4)
    ]
    assert times[0].end < times[2].end and times[1].end < times[3].end
    assert all(t.end > times[3].enqueued for t in times.values())


def test_what_cannot_be_waited_for_is_not_seen() -> None:
    def fail() -> None:
        raise RuntimeError("Array has been deleted")

    stopwatch = Stopwatch(ticking())
    call = stopwatch.together(0, lambda args: (args, fail), lane="a")
    stopwatch.start()
    call(())
    (times,) = stopwatch.stop().steps
    assert not times.seen and times.end == times.enqueued


def test_without_tokens_results_that_stay_are_waited_for(monkeypatch: Any) -> None:
    buffered = chain()
    seen = []
    monkeypatch.setattr(timing.jax, "block_until_ready", seen.append)
    stopwatch = Stopwatch(ticking())
    calls = [lambda args, i=i: [f"result of {i}"] for i in range(3)]
    timed = timed_calls(stopwatch, buffered, calls, [None] * 3, [None] * 3, alone=False)
    assert [type(step) for step in buffered.plan.steps] == [Run, Copy, Run]
    stopwatch.start()
    for call in timed:
        call(())
    times = stopwatch.stop().steps
    # the last run takes over the copy's target, and nothing the first run's result
    assert sorted(seen) == [["result of 0"], ["result of 2"]]
    assert [t.seen for t in times] == [True, False, True]


# --- calls of a plan ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> CompiledPlan:
    return compile_plan(chain().plan)


@pytest.mark.core
@pytest.mark.parametrize("alone", [False, True])
def test_a_recorded_call_gives_the_same(compiled: CompiledPlan, alone: bool) -> None:
    recorder = Recorder(alone)
    with recording(recorder):
        (result,) = compiled.call([argument()])
    np.testing.assert_array_equal(result, np.arange(8) + 2)
    (times,) = recorder.found
    assert [t.step for t in times.steps] == list(range(len(compiled.buffered.plan.steps)))
    for t in times.steps:
        assert times.begin <= t.begin <= t.enqueued <= t.end <= times.end
    compiled.call([argument()])
    assert len(recorder.found) == 1, "recorded outside of the block"


def test_nothing_is_slower_when_off(compiled: CompiledPlan) -> None:
    before = compiled._steps
    with recording(Recorder()):
        compiled.call([argument()])
    assert compiled._steps is before and current_recorder() is None
    plain = {step.__qualname__.split(".")[0] for step, *_ in compiled._steps}
    assert plain.isdisjoint({"Stopwatch", "annotated", "_watching_results"})


def test_a_failed_call_leaves_no_thread_and_no_times(compiled: CompiledPlan) -> None:
    recorder = Recorder()
    gone = argument()
    gone.delete()
    with recording(recorder), pytest.raises(ExecutionError):
        compiled.call([gone])
    assert not recorder.found and current_recorder() is None
    assert not [t for t in threading.enumerate() if t.name == "multimesh-timing"]


def test_other_threads_are_not_recorded(compiled: CompiledPlan) -> None:
    recorder = Recorder()
    with recording(recorder):
        thread = threading.Thread(target=compiled.call, args=([argument()],))
        thread.start()
        thread.join()
    assert not recorder.found
