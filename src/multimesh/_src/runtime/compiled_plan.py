"""A plan, compiled: what a step call runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from multimesh._src.collector import paused_collector
from multimesh._src.ir.plan import Plan
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.runtime.annotate import annotated_call
from multimesh._src.runtime.compile import CompiledExecutable
from multimesh._src.runtime.donation import runs_of
from multimesh._src.runtime.executor import (
    ENQUEUE_LOCK,
    HeldInterrupt,
    PreparedStep,
    needs_checks,
    run_steps,
)
from multimesh._src.runtime.inputs import Inputs
from multimesh._src.runtime.prepared import PreparedPlan
from multimesh._src.runtime.stacks import results_of
from multimesh._src.runtime.timing import Stopwatch, current_recorder


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
        prepared = PreparedPlan(plan, {})
    return CompiledPlan(prepared, name, partitioned)


class CompiledPlan:
    """Runs a plan. Calls may come from several threads; they take turns."""

    def __init__(
        self, prepared: PreparedPlan, name: str, partitioned: Partitioned | None = None
    ) -> None:
        self.buffered = prepared.buffered
        self.name = name
        self.partitioned = partitioned
        self._prepared = prepared
        self._inputs = Inputs(self.buffered, name)
        self._results = results_of(self.buffered.plan, self._inputs.stacks)
        self._steps = prepared.steps
        self._num_calls = 0

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
        return self._call(
            arguments, self._prepared.checked_steps if needs_checks() else self._steps
        )

    def _call(self, arguments: Sequence[Any], steps: Sequence[PreparedStep]) -> list[Any]:
        slots = self._prepared.new_slots()
        slots += [None] * len(self._inputs.stacks)
        loaded = False
        with ENQUEUE_LOCK, annotated_call(self.name, self._num_calls, self._prepared.is_profiled):
            self._num_calls += 1
            try:
                with HeldInterrupt():
                    self._inputs.load(arguments, slots)
                    loaded = True
                    run_steps(steps, slots)
                    results = [
                        slots[r] if isinstance(r, int) else r.join(slots) for r in self._results
                    ]
                    self._inputs.retire(arguments)
            except BaseException:
                slots.clear()
                if loaded:  # from here on donated arguments may be gone
                    self._inputs.abandon(arguments)
                raise
        return results

    def _timed_call(self, arguments: Sequence[Any]) -> list[Any]:
        """Calls, waits for the end and gives the times to who records (`runtime.timing`)."""
        recorder, stopwatch = current_recorder(), Stopwatch()
        assert recorder is not None
        steps = self._prepared.timed_steps(stopwatch, alone=recorder.alone)
        stopwatch.start()
        try:
            results = self._call(arguments, steps)
        finally:
            times = stopwatch.stop()
        recorder.add(self, times)
        return results

    @property
    def input_shardings(self) -> tuple[Sharding | None, ...]:
        """Per flat argument where the step takes it without moving it; None if it is unused.

        An argument wanted in several places or forms is listed with the first. For batches that the
        step stores microbatch-major it is the sharding of `[microbatches, size, ...]`.
        """
        plan = self.buffered.plan
        found: dict[int, Sharding] = {}
        for entry in plan.inputs:
            if entry.slots and entry.argument not in found:
                sharding = plan.slots[entry.slots[0]].sharding
                block = entry.block
                found[entry.argument] = (
                    sharding if block is None else block.whole_sharding(sharding)
                )
        return tuple(map(found.get, range(max((e.argument for e in plan.inputs), default=-1) + 1)))

    @property
    def output_shardings(self) -> tuple[Sharding, ...]:
        """Per flat result where it lies."""
        plan = self.buffered.plan
        wholes = results_of(plan, ())
        return tuple(plan.slots[r].sharding if isinstance(r, int) else r.sharding for r in wholes)

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
        found = {
            id(executable.compiled): executable
            for plan in _with_loops(self._prepared)
            for executable in plan.executables
            if executable is not None
        }
        return list(found.values())

    def cost_analysis(self) -> dict[str, float]:
        """Returns XLA's estimates for one device of each task, summed over all runs of one call.

        A loop whose trip count is not known counts once.
        """
        total: dict[str, float] = {}
        for plan in _with_loops(self._prepared):
            costs = [_cost(executable) for executable in plan.executables]
            for _, run in runs_of(plan.buffered.plan):
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


def _with_loops(plan: PreparedPlan) -> Iterator[PreparedPlan]:
    """A plan and those of its loops, at any depth."""
    yield plan
    for loop in plan.loops:
        yield from _with_loops(loop.body)
