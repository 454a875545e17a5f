"""A plan, compiled: what a step call runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from multimesh._src.collector import paused_collector
from multimesh._src.ir.plan import Copy, Plan
from multimesh._src.jax_compat.compiled import WatchedCall, watched_call
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.runtime.annotate import annotated, annotated_call, wants_profile
from multimesh._src.runtime.buffers import BufferedPlan, plan_buffers
from multimesh._src.runtime.compile import CompiledExecutable, compile_executables
from multimesh._src.runtime.donation import runs_of
from multimesh._src.runtime.executor import (
    ENQUEUE_LOCK,
    Call,
    HeldInterrupt,
    PreparedStep,
    checked,
    needs_checks,
    prepare_steps,
    run_steps,
    step_name,
)
from multimesh._src.runtime.inputs import Inputs
from multimesh._src.runtime.reshard import CopyItem, PreparedCopy, prepare_copy
from multimesh._src.runtime.timing import Stopwatch, current_recorder, timed_calls


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """Bytes on one device, summed over the distinct executables of a plan (not over their runs)."""

    generated_code_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


def compile_plan(
    plan: Plan, *, name: str = "step", partitioned: Partitioned | None = None
) -> "CompiledPlan":
    """Compiles a plan: programs, copies, frees and donations; places its constants.

    Args:
        plan: The plan.
        name: The user's name of the step, for errors.
        partitioned: What the plan was made of, if it was not written by hand; for reports.

    Raises:
        ExecutionError: XLA cannot compile a task.
    """
    with paused_collector():
        copies = _prepare_copies(plan)
        buffered = plan_buffers(plan, {step: copy.aliases for step, copy in copies.items()})
    return CompiledPlan(buffered, compile_executables(buffered), copies, name, partitioned)


def _prepare_copies(plan: Plan) -> dict[Copy, PreparedCopy]:
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


class CompiledPlan:
    """Runs a plan. Calls may come from several threads; they take turns."""

    def __init__(
        self,
        buffered: BufferedPlan,
        executables: Sequence[CompiledExecutable | None],
        copies: Mapping[Copy, PreparedCopy],
        name: str,
        partitioned: Partitioned | None = None,
    ) -> None:
        self.buffered = buffered
        self.name = name
        self.partitioned = partitioned
        self._executables = tuple(executables)
        self._inputs = Inputs(buffered, name)
        self._outputs = buffered.plan.outputs
        self._template = _constants(buffered.plan)
        self._calls, self._orders = [], []
        for step in buffered.plan.steps:
            if isinstance(step, Copy):
                self._calls.append(copies[step].run)
                self._orders.append(None)
            else:
                executable = executables[step.executable]
                assert executable is not None, step  # all that are run are compiled
                self._calls.append(executable.call)
                self._orders.append(executable.order)
        self._is_profiled, self._num_calls = wants_profile(), 0
        self._steps = self._prepared(self._calls)
        self._checked_steps: tuple[PreparedStep, ...] = ()

    def _prepared(self, calls: Sequence[Call]) -> tuple[PreparedStep, ...]:
        if self._is_profiled:
            plan = self.buffered.plan
            named = zip(calls, plan.steps, strict=True)
            calls = [annotated(call, plan, step) for call, step in named]
        return prepare_steps(self.buffered, calls, self._orders)

    def call(self, arguments: Sequence[Any]) -> list[Any]:
        """Enqueues one step.

        Args:
            arguments: The flat arguments, of the types that the plan was made for; they may lie
                anywhere. Donated ones are deleted.

        Returns:
            The flat results.

        Raises:
            ExecutionError: An argument was donated before, or a task failed.
        """
        if current_recorder() is not None:
            return self._timed_call(arguments)
        return self._call(arguments, self._checked() if needs_checks() else self._steps)

    def _call(self, arguments: Sequence[Any], steps: Sequence[PreparedStep]) -> list[Any]:
        slots = self._template.copy()
        loaded = False
        with ENQUEUE_LOCK, annotated_call(self.name, self._num_calls, self._is_profiled):
            self._num_calls += 1
            try:
                with HeldInterrupt():
                    self._inputs.load(arguments, slots)
                    loaded = True
                    run_steps(steps, slots)
                    results = [slots[slot] for slot in self._outputs]
                    self._inputs.retire(arguments)
            except BaseException:
                slots.clear()
                if loaded:  # from here on donated arguments may be gone
                    self._inputs.abandon(arguments)
                raise
        return results

    def _checked(self) -> tuple[PreparedStep, ...]:
        if not self._checked_steps:
            self._checked_steps = self._prepared(_checked(self.buffered, self._calls))
        return self._checked_steps

    def _timed_call(self, arguments: Sequence[Any]) -> list[Any]:
        """Calls, waits for the end and gives the times to who records (`runtime.timing`)."""
        recorder, stopwatch = current_recorder(), Stopwatch()
        assert recorder is not None
        calls = timed_calls(
            stopwatch,
            self.buffered,
            self._calls,
            self._orders,
            self._watched(),
            alone=recorder.alone,
        )
        steps = self._prepared(_checked(self.buffered, calls) if needs_checks() else calls)
        stopwatch.start()
        try:
            results = self._call(arguments, steps)
        finally:
            times = stopwatch.stop()
        recorder.add(self, times)
        return results

    def _watched(self) -> list[WatchedCall | None]:
        """Per step the call that says when it has run, where the runtime can say that."""
        found: list[WatchedCall | None] = []
        for executable in self._executables:
            dtypes = () if executable is None else executable.in_dtypes
            found.append(None if executable is None else watched_call(executable.compiled, dtypes))
        steps = self.buffered.plan.steps
        return [None if isinstance(step, Copy) else found[step.executable] for step in steps]

    @property
    def input_shardings(self) -> tuple[Sharding | None, ...]:
        """Per flat argument where the step takes it without moving it; None if it is unused.

        An argument wanted in several places is listed with the first. For batches that the step
        stores microbatch-major it is the sharding of `[microbatches, size, ...]`.
        """
        plan = self.buffered.plan
        found = {entry.index: entry for entry in plan.inputs}
        return tuple(
            plan.slots[found[index].slots[0]].sharding
            if index in found and found[index].slots
            else None
            for index in range(max(found, default=-1) + 1)
        )

    @property
    def output_shardings(self) -> tuple[Sharding, ...]:
        """Per flat result where it lies."""
        plan = self.buffered.plan
        return tuple(plan.slots[slot].sharding for slot in plan.outputs)

    @property
    def executables(self) -> Mapping[str, jax.stages.Compiled]:
        """The distinct compiled programs by name; equal names are numbered."""
        found: dict[str, jax.stages.Compiled] = {}
        for executable in self._distinct():
            name, number = executable.name, 1
            while name in found:
                number += 1
                name = f"{executable.name}#{number}"
            found[name] = executable.compiled
        return found

    def _distinct(self) -> list[CompiledExecutable]:
        return list({id(e.compiled): e for e in self._executables if e is not None}.values())

    def cost_analysis(self) -> dict[str, float]:
        """Returns XLA's estimates for one device of each task, summed over all runs of one call."""
        costs = [_cost(executable) for executable in self._executables]
        total: dict[str, float] = {}
        for _, run in runs_of(self.buffered.plan):
            for key, value in costs[run.executable].items():
                total[key] = total.get(key, 0.0) + value
        return total

    def memory_analysis(self) -> MemoryAnalysis:
        """Returns XLA's sizes, summed over the distinct executables."""
        parts = [executable.compiled.memory_analysis() for executable in self._distinct()]
        names = MemoryAnalysis.__dataclass_fields__
        return MemoryAnalysis(
            **{name: sum(getattr(part, name) for part in parts if part) for name in names}
        )


def _cost(executable: CompiledExecutable | None) -> Mapping[str, float]:
    cost = None if executable is None else executable.compiled.cost_analysis()
    return cost or {}


def _constants(plan: Plan) -> list[Any]:
    """Returns the slots as every call finds them: empty but for the constants, placed now."""
    slots: list[Any] = [None] * len(plan.slots)
    values = [constant.value for constant in plan.constants]
    shardings = [plan.slots[constant.slot].sharding for constant in plan.constants]
    placed = jax.device_put(values, shardings)
    for constant, array in zip(plan.constants, placed, strict=True):
        slots[constant.slot] = array
    return slots


def _checked(buffered: BufferedPlan, calls: Sequence[Call]) -> list[Callable[..., Any]]:
    steps = zip(buffered.plan.steps, calls, strict=True)
    return [checked(call, step_name(step)) for step, call in steps]
