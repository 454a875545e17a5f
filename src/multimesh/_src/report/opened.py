"""Writes the bodies of host loops into the plan, once each, for reports.

    while (s1 s0) -> s2                  run layer0  (s1 s0) -> s3
      run layer0 (s0 s1) -> s2     ->    run layer1  (s3 s0) -> s2
      run layer1 (s2 s1) -> s3

What a loop carries is named by its first value before the body, by its next one behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multimesh._src.ir.plan import Constant, Copy, Executable, HostLoop, Plan, Run, Slot, Step


def open_loops(plan: Plan) -> Plan:
    """Returns the plan with one iteration of every host loop in its place."""
    if not any(isinstance(step, HostLoop) for step in plan.steps):
        return plan
    opener = _Opener(list(plan.constants))
    opener.slots += plan.slots
    opener.write(plan, {slot: slot for slot in range(len(plan.slots))})
    return replace(
        plan,
        slots=tuple(opener.slots),
        constants=tuple(opener.constants),
        executables=tuple(opener.executables),
        steps=tuple(opener.steps),
        outputs=tuple(opener.renamed.get(slot, slot) for slot in plan.outputs),
    )


@dataclass(slots=True)
class _Opener:
    """The plan in the making."""

    constants: list[Constant]
    slots: list[Any] = field(default_factory=list)
    executables: list[Executable] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    renamed: dict[Slot, Slot] = field(default_factory=dict)

    def write(self, plan: Plan, names: dict[Slot, Slot]) -> None:
        """Appends the steps of a plan; `names` has the slots that stand for its own."""

        def all_of(slots: Sequence[Slot]) -> tuple[Slot, ...]:
            return tuple(names[slot] for slot in slots)

        first = len(self.executables)
        self.executables += [
            replace(executable, parts=tuple(first + part for part in executable.parts))
            for executable in plan.executables
        ]
        for step in plan.steps:
            match step:
                case Copy():
                    self.steps.append(
                        replace(step, sources=all_of(step.sources), targets=all_of(step.targets))
                    )
                case Run():
                    self.steps.append(
                        replace(
                            step,
                            executable=first + step.executable,
                            inputs=all_of(step.inputs),
                            outputs=all_of(step.outputs),
                        )
                    )
                case HostLoop():
                    outputs = self._write_body(step.plan, all_of(step.inputs))
                    names.update(zip(step.outputs, outputs, strict=True))
        self.renamed = names

    def _write_body(self, plan: Plan, inputs: tuple[Slot, ...]) -> tuple[Slot, ...]:
        names = {entry.slots[0]: slot for entry, slot in zip(plan.inputs, inputs, strict=True)}
        for slot, info in enumerate(plan.slots):
            if slot not in names:
                names[slot] = len(self.slots)
                self.slots.append(info)
        self.constants += [Constant(c.value, names[c.slot]) for c in plan.constants]
        self.write(plan, names)
        return tuple(names[slot] for slot in plan.outputs)
