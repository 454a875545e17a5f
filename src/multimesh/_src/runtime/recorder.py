"""An executor without devices: runs the prepared steps of a plan and writes down what happens.

    run  task `add`, iteration 0 %0! %1 -> %3 free %0 %1
    copy copy `stage=0 -> stage=1` %3 -> %4 free %3
    return %4

`!` marks donated arguments. The steps are those that the real executor runs, on names in place of
arrays; a step that reads a freed slot is noticed.
"""

from collections.abc import Sequence
from typing import Any

from multimesh._src.ir.plan import Copy, Plan, Run
from multimesh._src.runtime.buffers import BufferedPlan, plan_buffers, reads, writes
from multimesh._src.runtime.executor import Call, prepare_steps, run_steps, step_name


def record(plan: Plan) -> str:
    """Returns the text of one call of a plan, a line for each step.

    Slots that come after those of the plan are private copies (`runtime.buffers`).
    """
    buffered = plan_buffers(plan)
    lines: list[str] = []
    slots = _Slots(buffered.plan, lines)
    calls = [_recording(buffered, index, lines) for index in range(len(buffered.plan.steps))]
    run_steps(prepare_steps(buffered, calls, [None] * len(calls)), slots)
    lines.append(" ".join(("return", *(slots[slot] for slot in buffered.plan.outputs))))
    return "\n".join(lines)


def _recording(buffered: BufferedPlan, index: int, lines: list[str]) -> Call:
    step = buffered.plan.steps[index]
    is_run = isinstance(step, Run)
    donated = {argument for argument, _ in buffered.donations[step.executable]} if is_run else ()
    kind = "run " if is_run else "copy" if isinstance(step, Copy) else "loop"

    def call(args: Sequence[Any]) -> list[str]:
        missing = [s for s, arg in zip(reads(step), args, strict=True) if arg is None]
        assert not missing, f"{step_name(step)} reads the empty slots {missing}"
        given = (arg + "!" * (j in donated) for j, arg in enumerate(args))
        made = [_name(slot) for slot in writes(step)]
        lines.append(" ".join((kind, step_name(step), *given, "->", *made)))
        return made

    return call


class _Slots(list[Any]):
    """Slots that write down when they are freed."""

    def __init__(self, plan: Plan, lines: list[str]) -> None:
        super().__init__([None] * len(plan.slots))
        self._lines = lines
        filled = [slot for entry in plan.inputs for slot in entry.slots]
        for slot in (*filled, *(constant.slot for constant in plan.constants)):
            super().__setitem__(slot, _name(slot))

    def __setitem__(self, slot: Any, value: Any) -> None:
        if value is None:
            freed = "" if " free " in self._lines[-1] else " free"
            self._lines[-1] += f"{freed} {_name(slot)}"
        super().__setitem__(slot, value)


def _name(slot: int) -> str:
    return f"%{slot}"
