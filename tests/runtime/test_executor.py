"""The loop over prepared steps, and interrupts."""

import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from multimesh._src.errors import ExecutionError
from multimesh._src.runtime.buffers import plan_buffers
from multimesh._src.runtime.executor import HeldInterrupt, prepare_steps, run_steps
from tests.runtime.plans import REPLICATED, PlanBuilder, submesh


class _Value:
    """Stands for an array."""


def _run_chain(length: int, call: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Runs x -> x + 1 -> ... with `call` in place of the program; returns the slots."""
    builder = PlanBuilder()
    place = submesh(0, (0,))
    slot = builder.argument("x", (8,), place, donated=True)
    number = builder.executable("next", lambda x: (x + 1,), place, [slot], [REPLICATED])
    for iteration in range(length):
        (slot,) = builder.run(number, [slot], iteration=iteration)
    buffered = plan_buffers(builder.plan(slot))
    slots: list[Any] = [_Value(), *[None] * length]
    run_steps(prepare_steps(buffered, [call] * length, [None] * length), slots)
    return slots


def test_at_most_two_values_live() -> None:
    alive: list[weakref.ref[_Value]] = []
    counts = []

    def call(args: Sequence[Any]) -> list[Any]:
        value = _Value()
        alive.append(weakref.ref(value))
        counts.append(sum(ref() is not None for ref in alive))
        return [value]

    slots = _run_chain(6, call)
    assert counts == [1, 2, 2, 2, 2, 2]
    assert [slot is not None for slot in slots] == [False] * 6 + [True]


def test_error_names_the_task_and_drops_all_values() -> None:
    alive: list[weakref.ref[_Value]] = []

    def call(args: Sequence[Any]) -> list[Any]:
        value = _Value()
        alive.append(weakref.ref(value))
        if len(alive) == 3:
            raise ZeroDivisionError("no")
        return [value]

    with pytest.raises(ExecutionError, match="task `next`, iteration 2 failed: no") as caught:
        _run_chain(4, call)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert [ref() for ref in alive] == [None] * 3


def test_interrupt_is_held() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012 - the interrupt comes at its end
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append("end")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_goes_through() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117, PT012
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append("first")
            signal.raise_signal(signal.SIGINT)
            reached.append("second")
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    def enter() -> None:
        with HeldInterrupt():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        enter()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
