"""Cuts groups into the fewest tasks, latest first, so that no two tasks wait for each other.

    group A: a1, a2 ; group B: b1         a1 -> b1 -> a2        two tasks of A, one of B

Equations are taken from the end. Each joins the latest task of its group that no user of the
equation already waits for, so an equation that only the optimizer reads never runs in a forward
task.
"""

from collections.abc import Hashable, Mapping

from multimesh._src.ir.flat import Loop
from multimesh._src.partition.quotient import Quotient
from multimesh._src.partition.split.regions import Region


def split_acyclic(region: Region, groups: Mapping[int, Hashable]) -> tuple[tuple[int, ...], ...]:
    """Returns the tasks of a region in an order that respects dataflow.

    Each task is the tuple of its steps' positions, ascending. A loop is a task of its own.
    """
    quotient = Quotient()
    of_group: dict[Hashable, list[int]] = {}
    task_of: dict[int, int] = {}
    for position in reversed(range(len(region.steps))):
        users = [task_of[p] for p in (*region.users[position], *region.later[position])]
        if isinstance(region.steps[position], Loop):
            task = quotient.add()
        else:
            tasks = of_group.setdefault(groups[position], [])
            fitting = (
                task
                for task in tasks  # the latest first: they were made from the end
                if not any(user != task and quotient.reaches(user, task) for user in users)
            )
            task = next(fitting, -1)
            if task < 0:
                task = quotient.add()
                tasks.append(task)
        task_of[position] = task
        for user in users:
            quotient.connect(task, user)
    return _ordered(quotient, task_of)


def _ordered(quotient: Quotient, task_of: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    members: dict[int, list[int]] = {}
    for position in sorted(task_of):
        members.setdefault(task_of[position], []).append(position)
    waiting = {
        task: sum(other != task and quotient.reaches(other, task) for other in members)
        for task in members
    }
    ordered: list[tuple[int, ...]] = []
    ready = sorted((members[task][0], task) for task, count in waiting.items() if count == 0)
    while ready:
        _, task = ready.pop(0)
        ordered.append(tuple(members[task]))
        for other in members:
            if quotient.reaches(task, other):
                waiting[other] -= 1
                if waiting[other] == 0:
                    ready.append((members[other][0], other))
        ready.sort()
    return tuple(ordered)
