"""Takes the times of every run and copy of a call, on an unchanged runtime.

    host       enqueue F0 F1 F2 ...                       begin, enqueued: the host's own clock
    stage=0    [F0][F1][F2]                               end: a thread for each submesh waits for
    stage=1        [F0][F1][F2]                           its runs in order and looks at the clock

Runtimes say when something has run, but not when it began. A device works through its queue in
order, so a run can have begun no earlier than its predecessors ended, its inputs arrived and the
host enqueued it; `report.timeline` takes the latest of these as its start. Two ways to run:

- *together*: as always. For each submesh, and each pair of submeshes with copies, a thread waits;
  it costs the host some 10 us a run and its wake-up delays what it sees, by 0.05 ms on an idle
  machine, more where devices and threads share few cores.
- *alone*: the host waits for each run and copy before it enqueues the next one. Nothing overlaps,
  and times are those of the run by itself, dispatch included.

How a run is waited for: by a token of the runtime (`jax_compat.compiled.watched_call`), else by
those of its results that nobody takes over; a run without such a result is waited for at once, in
the host's thread. Copies whose targets are all taken over by programs are not seen to end.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax

from multimesh._src.ir.plan import Copy, Run, Slot, Step
from multimesh._src.jax_compat.compiled import Wait, WatchedCall
from multimesh._src.runtime.buffers import BufferedPlan, writes
from multimesh._src.runtime.executor import Call

Clock: TypeAlias = Callable[[], float]

_SWITCH_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step of a plan, in seconds of the clock.

    Attributes:
        step: Its position in the plan.
        begin: When the host began to enqueue it.
        enqueued: When the host was done with that.
        end: When it was seen to have ended; `enqueued` where it was not seen.
        seen: Whether it was seen to end.
    """

    step: int
    begin: float
    enqueued: float
    end: float
    seen: bool = True


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The times of one call: from its beginning until everything has run."""

    begin: float
    end: float
    steps: tuple[StepTimes, ...]


class AbstractRecorder(Protocol):
    """Who gets the times of the calls made while it records."""

    alone: bool

    def add(self, compiled: Any, times: CallTimes) -> None:
        """Takes the times of one call of a `CompiledPlan`."""
        ...


class _Thread(threading.local):
    recorder: AbstractRecorder | None = None


_thread = _Thread()


def current_recorder() -> AbstractRecorder | None:
    """Returns who records the calls of this thread."""
    return _thread.recorder


@contextmanager
def recording(recorder: AbstractRecorder) -> Iterator[None]:
    """Gives the times of all calls made in this thread to `recorder`, in place of an outer one."""
    before, switch = _thread.recorder, sys.getswitchinterval()
    _thread.recorder = recorder
    sys.setswitchinterval(min(switch, _SWITCH_SECONDS))  # the waiting threads come to the clock
    try:
        yield
    finally:
        sys.setswitchinterval(switch)
        _thread.recorder = before


class Stopwatch:
    """Takes the times of one call. Its threads run from `start` to `stop`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._lanes: dict[Any, queue.SimpleQueue[Any]] = {}
        self._threads: list[threading.Thread] = []
        self._times: dict[int, StepTimes] = {}
        self._begin = 0.0

    def start(self) -> None:
        """Starts the clock and the threads."""
        for lane in self._lanes.values():
            thread = threading.Thread(target=self._watch, args=(lane,), name="multimesh-timing")
            thread.start()
            self._threads.append(thread)
        self._begin = self._clock()

    def stop(self) -> CallTimes:
        """Waits for everything that was enqueued."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()
        times = tuple(self._times[step] for step in sorted(self._times))
        return CallTimes(self._begin, self._clock(), times)

    def together(self, step: int, call: WatchedCall, lane: Any) -> Call:
        """Returns a call whose end is seen by the thread of a lane."""
        clock, waiting = self._clock, self._lanes.setdefault(lane, queue.SimpleQueue())

        def timed(args: Sequence[Any]) -> Sequence[Any]:
            begin = clock()
            results, wait = call(args)
            waiting.put((step, begin, clock(), wait))
            return results

        return timed

    def alone(self, step: int, call: Call, wait: Callable[[Any], object]) -> Call:
        """Returns a call that waits for its results."""

        def timed(args: Sequence[Any]) -> Sequence[Any]:
            begin = self._clock()
            results = call(args)
            enqueued = self._clock()
            wait(results)
            self._times[step] = StepTimes(step, begin, enqueued, self._clock())
            return results

        return timed

    def _watch(self, lane: "queue.SimpleQueue[Any]") -> None:
        while (entry := lane.get()) is not None:
            step, begin, enqueued, wait = entry
            seen = wait is not _UNSEEN
            try:
                wait()
            except Exception:  # what failed is told to the caller by the results themselves
                seen = False
            end = self._clock() if seen else enqueued
            self._times[step] = StepTimes(step, begin, enqueued, end, seen)
            del entry, wait  # they may hold arrays


def _UNSEEN() -> None:  # noqa: N802 - a constant
    """Waits for nothing: stands where an end cannot be seen."""


def timed_calls(
    stopwatch: Stopwatch,
    buffered: BufferedPlan,
    calls: Sequence[Call],
    orders: Sequence[Sequence[int] | None],
    watched: Sequence[WatchedCall | None],
    *,
    alone: bool,
) -> list[Call]:
    """Returns the calls of a plan's steps, timed.

    Args:
        stopwatch: Takes the times.
        buffered: The plan.
        calls: Per step what to call.
        orders: Per step the order in which the call gives its results; None is the plan's own.
        watched: Per step the call that says when it has run, where there is one.
        alone: Whether the host waits for each step before the next one.
    """
    if alone:
        return [stopwatch.alone(i, call, jax.block_until_ready) for i, call in enumerate(calls)]
    taken = _taken_over(buffered)
    found = []
    for i, step in enumerate(buffered.plan.steps):
        watch = watched[i]
        if watch is None:
            watch = _watching_results(calls[i], _kept(buffered, step, orders[i], taken), step)
        found.append(stopwatch.together(i, watch, lane_of(buffered, step)))
    return found


def lane_of(buffered: BufferedPlan, step: Step) -> Any:
    """What ends in the order of enqueueing: the runs of a submesh, the copies along an edge."""
    if isinstance(step, Run):
        return buffered.plan.executables[step.executable].submesh.mesh
    return step.edge if isinstance(step, Copy) else "loops of the host"


def _taken_over(buffered: BufferedPlan) -> frozenset[Slot]:
    """The slots whose buffers a program takes over; their arrays cannot be waited for then."""
    return frozenset(
        step.inputs[argument]
        for step in buffered.plan.steps
        if isinstance(step, Run)
        for argument, _ in buffered.donations[step.executable]
    )


def _kept(
    buffered: BufferedPlan, step: Step, order: Sequence[int] | None, taken: frozenset[Slot]
) -> tuple[int, ...]:
    """Which results of a call can be waited for; of a run, the smallest one is enough."""
    targets = writes(step)
    if order is not None:
        targets = tuple(targets[k] for k in order)
    kept = [k for k, slot in enumerate(targets) if slot not in taken]
    if isinstance(step, Run) and kept:
        kept = [min(kept, key=lambda k: buffered.plan.slots[targets[k]].aval.size)]
    return tuple(kept)


def _watching_results(call: Call, kept: tuple[int, ...], step: Step) -> WatchedCall:
    """Waits for results that stay; a run without any is waited for at once."""

    def watch(args: Sequence[Any]) -> tuple[Sequence[Any], Wait]:
        results = call(args)
        if kept:
            arrays = [results[k] for k in kept]
            return results, lambda: jax.block_until_ready(arrays)
        if isinstance(step, Run):
            jax.block_until_ready(results)
            return results, lambda: None
        return results, _UNSEEN

    return watch
