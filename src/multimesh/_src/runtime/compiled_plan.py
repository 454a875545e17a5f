"""A plan, compiled: what a step call runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from multimesh._src.collector import paused_collector
from multimesh._src.ir.plan import Copy, Plan
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
from multimesh._src.runtime.stacks import results_of


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """Bytes on one device, summed over the distinct executables of a plan (not over their runs)."""

    generated_code_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


def compile_plan(plan: Plan, *, name: str = "step") -> "CompiledPlan":
    """Compiles a plan: programs, copies, frees and donations; places its constants.

    Args:
        plan: The plan.
        name: The user's name of the step, for errors.

    Raises:
        ExecutionError: XLA cannot compile a task.
    """
    with paused_collector():
        copies = _prepare_copies(plan)
        buffered = plan_buffers(plan, {step: copy.aliases for step, copy in copies.items()})
    return CompiledPlan(buffered, compile_executables(buffered), copies, name)


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
    ) -> None:
        self.buffered = buffered
        self.name = name
        self._executables = tuple(executables)
        self._inputs = Inputs(buffered, name)
        self._results = results_of(buffered.plan, self._inputs.stacks)
        self._template = [*_constants(buffered.plan), *[None] * len(self._inputs.stacks)]
        calls, orders = [], []
        for step in buffered.plan.steps:
            if isinstance(step, Copy):
                calls.append(copies[step].run)
                orders.append(None)
            else:
                executable = executables[step.executable]
                assert executable is not None, step  # all that are run are compiled
                calls.append(executable.call)
                orders.append(executable.order)
        self._steps = prepare_steps(buffered, calls, orders)
        self._checked_steps: tuple[PreparedStep, ...] = ()
        self._prepare_checked = lambda: prepare_steps(buffered, _checked(buffered, calls), orders)

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
        slots = self._template.copy()
        loaded = False
        with ENQUEUE_LOCK:
            try:
                with HeldInterrupt():
                    self._inputs.load(arguments, slots)
                    loaded = True
                    run_steps(self._checked() if needs_checks() else self._steps, slots)
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

    def _checked(self) -> tuple[PreparedStep, ...]:
        if not self._checked_steps:
            self._checked_steps = self._prepare_checked()
        return self._checked_steps

    @property
    def input_shardings(self) -> tuple[Sharding | None, ...]:
        """Per flat argument where the step takes it without moving it; None if it is unused.

        An argument wanted in several places is listed with the first. For batches that the step
        stores microbatch-major it is the sharding of `[microbatches, size, ...]`.
        """
        plan = self.buffered.plan
        found: dict[int, Sharding] = {}
        for entry in plan.inputs:
            if entry.slots:
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
