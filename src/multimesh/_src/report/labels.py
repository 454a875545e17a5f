"""What a plan runs, under unique names.

    run main      run layer0_fwd[0]      run layer1_fwd+layer1_bwd[0]      run main (another one)
    ->  main      layer0_fwd             layer1_fwd+layer1_bwd             main#2

One *unit* is one task of the program, or several that were fused: all runs of one name and one
executable.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from multimesh._src.ir.plan import Plan, Run
from multimesh._src.ir.program import TaskNode

JOINT = "+"
"""Stands between the names of fused tasks."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What runs under one name, and the tasks that it is made of.

    `first` is its first run; a run of every call is like it.
    """

    label: str
    name: str
    tasks: tuple[TaskNode, ...]
    num_runs: int
    first: Run


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a plan in the order of their first runs.

    `unit_of` gives, by the number of a step that is a run, the position of its unit.
    """

    units: tuple[Unit, ...]
    unit_of: Mapping[int, int]

    def label_of(self, step: int) -> str:
        """The label of the unit that a step runs."""
        return self.units[self.unit_of[step]].label

    def labels_of_tasks(self, tasks: Iterable[TaskNode]) -> dict[int, str]:
        """The label of the unit that a task is part of, by the index of the task."""

        def key(task: TaskNode) -> tuple[str, int, int]:
            return task.name, id(task.body), task.submesh

        labels = {key(task): unit.label for unit in self.units for task in unit.tasks}
        return {task.index: labels[key(task)] for task in tasks if key(task) in labels}


def find_units(tasks: Sequence[TaskNode], plan: Plan) -> Units:
    """Finds what a plan runs."""
    positions: dict[tuple[str, int], int] = {}
    firsts: list[Run] = []
    num_runs: list[int] = []
    unit_of: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            continue
        position = positions.setdefault((step.task, step.executable), len(firsts))
        if position == len(firsts):
            firsts.append(step)
            num_runs.append(0)
        num_runs[position] += 1
        unit_of[number] = position
    labels = unique_labels([run.task for run in firsts])
    units = tuple(
        Unit(label, run.task, _tasks_of(run, plan, tasks), count, run)
        for label, run, count in zip(labels, firsts, num_runs, strict=True)
    )
    return Units(units, unit_of)


def _tasks_of(run: Run, plan: Plan, tasks: Sequence[TaskNode]) -> tuple[TaskNode, ...]:
    parts = plan.executables[run.executable].parts or (run.executable,)
    names = run.task.split(JOINT)
    found: list[TaskNode] = []
    for part in (plan.executables[number] for number in parts):
        same = [task for task in tasks if task.body is part.body and task.name in names]
        # a rotating task is on no submesh of its own
        same.sort(key=lambda task: task.submesh != part.submesh.index)
        found += same[:1]
    return tuple(found)


def unique_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names, from the second equal one on with `#2`, `#3`, ..."""
    counts: dict[str, int] = {}
    labels: list[str] = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        labels.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return tuple(labels)
