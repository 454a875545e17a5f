"""A plan made ready to run: programs compiled, copies prepared, constants placed, loops included.

plan                                       prepared
run  test  (s0) -> s1                      program `test`
loop while (s1 s0) -> s2 s3          ->    a loop on the host, of the prepared plan of its body
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from multimesh._src.ir.plan import Copy, HostLoop, Plan, Run
from multimesh._src.jax_compat.compiled import WatchedCall, watched_call
from multimesh._src.runtime.annotate import annotated, wants_profile
from multimesh._src.runtime.buffers import BufferedPlan, plan_buffers
from multimesh._src.runtime.compile import CompiledExecutable, compile_executables
from multimesh._src.runtime.executor import (
    Call,
    HeldInterrupt,
    PreparedStep,
    checked,
    needs_checks,
    prepare_steps,
    run_steps,
    step_name,
)
from multimesh._src.runtime.reshard import CopyItem, PreparedCopy, prepare_copy
from multimesh._src.runtime.timing import Stopwatch, timed_calls


class PreparedPlan:
    """A plan that is ready to run on slots.

    Attributes:
        buffered: The plan with the life of its buffers.
        executables: Per executable what was compiled; None for those that no step runs.
        loops: Its host loops, in order.
        steps: What the executor runs.
        is_profiled: Whether they have names in traces (`runtime.annotate`).
    """

    def __init__(self, plan: Plan, done: dict[Any, CompiledExecutable]) -> None:
        """Compiles a plan; `done` has what is compiled already, and grows."""
        copies = _prepare_copies(plan)
        shared = {step: copy.aliases for step, copy in copies.items()}
        self.buffered: BufferedPlan = plan_buffers(plan, shared)
        self.executables = compile_executables(self.buffered, done)
        self.loops: list[_PreparedLoop] = []
        self._calls: list[Call] = []
        self._orders: list[Sequence[int] | None] = []
        for step in self.buffered.plan.steps:
            if isinstance(step, Copy):
                self._add(copies[step].run)
            elif isinstance(step, HostLoop):
                self.loops.append(_PreparedLoop(step, PreparedPlan(step.plan, done)))
                self._add(self.loops[-1].run)
            else:
                executable = self.executables[step.executable]
                assert executable is not None, step  # all that are run are compiled
                self._add(executable.call, executable.order)
        self.is_profiled = wants_profile()
        self.steps = self._prepared(self._calls)
        self._checked_steps: tuple[PreparedStep, ...] = ()
        self._template = _constants(self.buffered.plan)

    def _add(self, call: Call, order: Sequence[int] | None = None) -> None:
        self._calls.append(call)
        self._orders.append(order)

    def new_slots(self) -> list[Any]:
        """Returns the slots as every call finds them: empty but for the constants."""
        return self._template.copy()

    @property
    def checked_steps(self) -> tuple[PreparedStep, ...]:
        """The steps with the checks of `jax_debug_nans` and `jax_debug_infs`."""
        if not self._checked_steps:
            self._checked_steps = self._prepared(self._checked(self._calls))
        return self._checked_steps

    def timed_steps(self, stopwatch: Stopwatch, *, alone: bool) -> tuple[PreparedStep, ...]:
        """The steps with a stopwatch that takes their times, and checks where they are asked for.

        Args:
            stopwatch: Takes the times.
            alone: Whether the host waits for each step before the next one.
        """
        calls = timed_calls(
            stopwatch, self.buffered, self._calls, self._orders, self._watched(), alone=alone
        )
        return self._prepared(self._checked(calls) if needs_checks() else calls)

    def _prepared(self, calls: Sequence[Call]) -> tuple[PreparedStep, ...]:
        if self.is_profiled:
            plan = self.buffered.plan
            named = zip(calls, plan.steps, strict=True)
            calls = [annotated(call, plan, step) for call, step in named]
        return prepare_steps(self.buffered, calls, self._orders)

    def _checked(self, calls: Sequence[Call]) -> list[Call]:
        steps = zip(self.buffered.plan.steps, calls, strict=True)
        return [checked(call, step_name(step)) for step, call in steps]

    def _watched(self) -> list[WatchedCall | None]:
        """Per step the call that says when it has run, where the runtime can say that."""
        found: list[WatchedCall | None] = []
        for executable in self.executables:
            dtypes = () if executable is None else executable.in_dtypes
            found.append(None if executable is None else watched_call(executable.compiled, dtypes))
        steps = self.buffered.plan.steps
        return [found[step.executable] if isinstance(step, Run) else None for step in steps]


class _PreparedLoop:
    """A loop that the host drives: it reads one value before each iteration."""

    def __init__(self, loop: HostLoop, body: PreparedPlan) -> None:
        self.body = body
        self._condition = loop.condition
        self._num_carried = len(loop.outputs)
        self._inputs = [entry.slots[0] for entry in loop.plan.inputs]
        self._outputs = body.buffered.plan.outputs

    def run(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs the loop on what it carries and what it reads; returns what it carried last."""
        carried, fixed = list(values[: self._num_carried]), values[self._num_carried :]
        steps = self.body.checked_steps if needs_checks() else self.body.steps
        while bool(carried[self._condition]):
            HeldInterrupt.let_through()
            slots = self.body.new_slots()
            for slot, value in zip(self._inputs, (*carried, *fixed), strict=True):
                slots[slot] = value
            carried.clear()
            run_steps(steps, slots)
            carried += [slots[slot] for slot in self._outputs]
        return carried


def _prepare_copies(plan: Plan) -> Mapping[Copy, PreparedCopy]:
    """Prepares every copy; those that are alike, as in all microbatches, once."""
    slots = plan.slots
    prepared: dict[tuple[CopyItem, ...], PreparedCopy] = {}
    copies: dict[Copy, PreparedCopy] = {}
    for step in plan.steps:
        if isinstance(step, Copy):
            pairs = zip(step.sources, step.targets, strict=True)
            items = tuple(
                CopyItem(slots[s].aval, slots[s].sharding, slots[t].sharding) for s, t in pairs
            )
            if items not in prepared:
                prepared[items] = prepare_copy(items)
            copies[step] = prepared[items]
    return copies


def _constants(plan: Plan) -> list[Any]:
    """Returns the slots as every call finds them: empty but for the constants, placed now."""
    slots: list[Any] = [None] * len(plan.slots)
    values = [constant.value for constant in plan.constants]
    shardings = [plan.slots[constant.slot].sharding for constant in plan.constants]
    placed = jax.device_put(values, shardings)
    for constant, array in zip(plan.constants, placed, strict=True):
        slots[constant.slot] = array
    return slots
