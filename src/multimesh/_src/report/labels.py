"""Names of tasks, and which task each run of a plan belongs to.

    tasks    main @ stage=0   layer0_fwd   main @ stage=1      ->   main   layer0_fwd   main#2

Labels are unique within a program, so that a reshard can say which task made a value.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh._src.ir.plan import Plan, Run
from multimesh._src.ir.program import TaskNode


@dataclass(frozen=True, slots=True)
class TaskRuns:
    """The tasks of a program and the steps of its plan, brought together.

    Attributes:
        tasks: The tasks in program order.
        labels: Per task its unique name.
        executables: Per task the number of its executable in the plan, -1 if it never runs.
        num_runs: Per task how often a call runs it.
        task_of: Per number of a step that is a run, the position of its task.
    """

    tasks: tuple[TaskNode, ...]
    labels: tuple[str, ...]
    executables: tuple[int, ...]
    num_runs: tuple[int, ...]
    task_of: Mapping[int, int]


def find_task_runs(tasks: Sequence[TaskNode], plan: Plan) -> TaskRuns:
    """Finds the task of every run.

    Tasks of one name that share an executable run in turn, in program order.
    """
    candidates: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for position, task in enumerate(tasks):
        candidates[task.name, id(task.body), task.submesh].append(position)
    executables, num_runs = [-1] * len(tasks), [0] * len(tasks)
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    task_of: dict[int, int] = {}
    for number, step in enumerate(plan.steps):
        if not isinstance(step, Run):
            continue
        executable = plan.executables[step.executable]
        key = (step.task, id(executable.body), executable.submesh.index)
        position = candidates[key][seen[key] % len(candidates[key])]
        seen[key] += 1
        task_of[number] = position
        executables[position] = step.executable
        num_runs[position] += 1
    labels = unique_labels([task.name for task in tasks])
    return TaskRuns(tuple(tasks), labels, tuple(executables), tuple(num_runs), task_of)


def unique_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names, from the second equal one on with `#2`, `#3`, ..."""
    counts: dict[str, int] = {}
    labels: list[str] = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        labels.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return tuple(labels)
