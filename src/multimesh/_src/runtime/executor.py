"""The executor: one loop over prepared steps.

A prepared step knows by number which slots it reads, fills and frees. There are no trees, names or
jaxprs left to look at. A recorder runs the same list without devices (`runtime.recorder`).

All steps of one call are enqueued under one lock, because programs with collectives that reach two
devices in different orders hang.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from traceback import clear_frames
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from multimesh._src.errors import ExecutionError, MultiMeshError, NonFiniteError, message
from multimesh._src.ir.plan import Copy, HostLoop, Slot, Step
from multimesh._src.runtime.buffers import BufferedPlan, reads, writes

ENQUEUE_LOCK = threading.RLock()  # a callback inside a task may call another step

Call: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
Fetch: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
# what to call, how to take its arguments out of the slots, where results go, what dies, the name
PreparedStep: TypeAlias = tuple[Call, Fetch, tuple[Slot, ...], tuple[Slot, ...], str]


def prepare_steps(
    buffered: BufferedPlan, calls: Sequence[Call], orders: Sequence[Sequence[int] | None]
) -> tuple[PreparedStep, ...]:
    """Prepares the steps of a plan.

    Args:
        buffered: The plan.
        calls: Per step what to call.
        orders: Per step the order in which the call gives its results; None is the plan's own.
    """
    steps = []
    lists = zip(buffered.plan.steps, calls, orders, buffered.frees, strict=True)
    for step, call, order, frees in lists:
        targets = writes(step)
        if order is not None:
            targets = tuple(targets[k] for k in order)
        steps.append((call, _fetch(reads(step)), targets, frees, step_name(step)))
    return tuple(steps)


def step_name(step: Step) -> str:
    """Returns how errors and texts call a step."""
    if isinstance(step, Copy):
        return f"copy `{step.edge}`"
    if isinstance(step, HostLoop):
        return f"loop {step.name}"
    return f"task `{step.task}`" + (f", iteration {step.iteration}" if step.iteration >= 0 else "")


def _fetch(slots: tuple[Slot, ...]) -> Fetch:
    if len(slots) > 1:
        return itemgetter(*slots)
    if not slots:
        return lambda _: ()
    slot = slots[0]
    return lambda values: (values[slot],)


def run_steps(steps: Sequence[PreparedStep], slots: list[Any]) -> None:
    """Runs the steps on the slots.

    Raises:
        ExecutionError: A step failed; names the task, the cause is chained. All slots are dropped.
    """
    name = ""
    try:
        for call, fetch, targets, frees, name in steps:  # noqa: B007 - read below
            results = call(fetch(slots))
            for slot, result in zip(targets, results, strict=True):
                slots[slot] = result
            for slot in frees:
                slots[slot] = None
    except BaseException as error:
        # an exception keeps the variables of its frames alive, and with them the arrays
        results = result = None
        slots.clear()
        clear_frames(error.__traceback__)
        if isinstance(error, MultiMeshError) or not isinstance(error, Exception):
            raise
        raise ExecutionError(_failure(name, str(error))) from error


def _failure(name: str, text: str) -> str:
    """What is said of a failed step; a Python callback in it has said so itself, among frames."""
    _, own, said = text.rpartition(f"{ExecutionError.__name__}: ")
    return said.strip() if own else message(f"The {name} failed: {text}")


def checked(call: Call, name: str) -> Call:
    """Returns `call` followed by the checks of `jax_debug_nans` and `jax_debug_infs`."""

    def call_and_check(args: Sequence[Any]) -> Sequence[Any]:
        results = call(args)
        for number, result in enumerate(results):
            _check_finite(result, number, name)
        return results

    return call_and_check


def needs_checks() -> bool:
    """Whether the user wants every task checked for NaNs or infinities."""
    return _wants("jax_debug_nans") or _wants("jax_debug_infs")


def _wants(flag: str) -> bool:
    return getattr(jax.config, flag)  # the values of this thread


def _check_finite(result: jax.Array, number: int, name: str) -> None:
    if not jax.numpy.issubdtype(result.dtype, jax.numpy.inexact):
        return
    for shard in result.addressable_shards:
        data = np.asarray(shard.data)
        if _wants("jax_debug_nans") and np.isnan(data).any():
            found = "a NaN"
        elif _wants("jax_debug_infs") and np.isinf(data).any():
            found = "an infinity"
        else:
            continue
        what = f"The {name} made {found} in its result {number}, `{result.aval.str_short()}`."
        raise NonFiniteError(message(what, ways=(_FINITE_WAY,)))


_FINITE_WAY = "run the function under `jax.disable_jit()` to see the operation that made it."


class HeldInterrupt:
    """A context that holds Ctrl-C until it ends; the second Ctrl-C goes through at once.

    Does nothing outside the main thread, where Python delivers no signals.
    """

    __slots__ = ("_frame", "_outer", "_pending", "_previous")
    _active: "ClassVar[HeldInterrupt | None]" = None

    def __init__(self) -> None:
        self._previous: Any = None
        self._outer: HeldInterrupt | None = None
        self._pending = False
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # leave alone what is ignored or was not installed from Python
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                self._outer, HeldInterrupt._active = HeldInterrupt._active, self
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._pending = False
            self._previous(number, frame)
        else:
            self._pending, self._frame = True, frame

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        HeldInterrupt._active = self._outer
        self._deliver()

    def _deliver(self) -> None:
        if self._pending:
            self._pending = False
            frame, self._frame = self._frame, None
            self._previous(signal.SIGINT, frame)

    @staticmethod
    def let_through() -> None:
        """Delivers what is held: between the iterations of a loop that may never end."""
        held = HeldInterrupt._active
        if held is not None and threading.current_thread() is threading.main_thread():
            held._deliver()
