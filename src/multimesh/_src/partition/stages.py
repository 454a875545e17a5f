"""Stages, ranks and actions of a microbatch loop (S1 to S6).

    layer0_fwd  stage=0   ->  stage 0, rank 0, action 0F
    layer1_fwd  stage=1   ->  stage 1, rank 1, action 1F
    layer1_bwd  stage=1   ->                   action 1BW
    embed       all       ->  no rank: a row of its own

Stages that `Task.stage` gives exist from the start, and tasks on their submeshes that stand between
two tasks of one belong to it. Any other forward task joins the last stage of its submesh that keeps
the graph acyclic, else opens a new one. A backward task belongs to the
stage on its submesh whose forward makes, or where it recomputes them also reads, most of what it
reads. In a loop without forward tasks (the transpose of a loop) the backward tasks are numbered as
forward ones, given stages from the last to the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multimesh._src.errors import PartitionError, message
from multimesh._src.ir.flat import Var
from multimesh._src.ir.program import TaskNode
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.quotient import Quotient
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.graph import Edge, Node, OutsideTask, Part, StageGraph


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The pipeline of one microbatch loop.

    `tasks` carry their stages; `node_of` gives the schedule node of each task by its index;
    `ranks` the submesh of each rank; `whole` names the backward tasks that could not be split
    although the schedule wants it.
    """

    tasks: tuple[TaskNode, ...]
    ranks: tuple[int, ...]
    node_of: Mapping[int, Node]
    graph: StageGraph
    whole: tuple[str, ...] = ()


def find_stages(
    tasks: Sequence[TaskNode],
    given: Mapping[int, int | None],
    submeshes: Sequence[Submesh],
    ordered_carries: Sequence[tuple[int, int]] = (),
) -> Pipeline:
    """Finds the stages of a loop body's tasks.

    Args:
        tasks: The tasks in dataflow order.
        given: `Task.stage` of each task, by index.
        submeshes: The program's submeshes.
        ordered_carries: Pairs of task indices: the second, in one iteration, needs the first of
            the iteration before.

    Raises:
        PartitionError: Given stages form a cycle or one stage lies on two submeshes.
    """
    forward: Kind = Kind.F if any(task.kind == "F" for task in tasks) else Kind.BW
    producer = {var: task for task in tasks for var in task.outputs}
    needs = {
        task.index: tuple(
            dict.fromkeys(producer[var].index for var in task.inputs if var in producer)
        )
        for task in tasks
    }
    ranked = _rank_submeshes(tasks, submeshes)
    stage_of = _forward_stages(tasks, given, needs, ranked, forward)
    if forward is Kind.F:
        stage_of |= _backward_stages(tasks, given, needs, stage_of)
    stage_of = _renumber(tasks, given, needs, stage_of, forward)
    placed = {stage_of[task.index]: task.submesh for task in tasks if task.index in stage_of}
    ranks = tuple(dict.fromkeys(placed[stage] for stage in sorted(placed)))
    placement = tuple(ranks.index(placed[stage]) for stage in sorted(placed))
    node_of, others = _nodes(tasks, needs, stage_of, ranks, submeshes, forward)
    of_ranks = {submeshes[rank].label for rank in ranks}
    apart = [submeshes[other].label for other in others]
    graph = StageGraph(
        placement=placement,
        nodes=tuple(dict.fromkeys(node_of[task.index] for task in tasks)),
        edges=_edges(tasks, needs, node_of, ordered_carries),
        num_ranks=len(ranks),
        labels=(
            *(submeshes[rank].label for rank in ranks),
            *(f"{label}, apart" if label in of_ranks else label for label in apart),
        ),
    )
    named = tuple(replace(task, stage=stage_of.get(task.index, -1)) for task in tasks)
    return Pipeline(named, ranks, node_of, graph)


def _rank_submeshes(tasks: Sequence[TaskNode], submeshes: Sequence[Submesh]) -> set[int]:
    """Submeshes that may be ranks: disjoint ones that stay in place, the smaller first."""
    used = dict.fromkeys(t.submesh for t in tasks if not submeshes[t.submesh].rotation)
    accepted: set[int] = set()
    taken: set[int] = set()
    for index in sorted(used, key=lambda i: submeshes[i].mesh.size):
        devices = {device.id for device in submeshes[index].mesh.devices.flat}
        if not devices & taken:
            accepted.add(index)
            taken |= devices
    return accepted


def _forward_stages(
    tasks: Sequence[TaskNode],
    given: Mapping[int, int | None],
    needs: Mapping[int, tuple[int, ...]],
    ranked: set[int],
    forward: Kind,
) -> dict[int, int]:
    """Stage of each forward task; stages that are not given get numbers after the given ones."""
    quotient = Quotient()
    stages: dict[int, int] = {}  # stage -> node of the quotient
    of_submesh: dict[int, list[int]] = {}
    _given_stages(tasks, given, quotient, stages, of_submesh)
    movable = [task for task in tasks if task.kind == forward and task.submesh in ranked]
    stage_of = {t.index: s for t in movable if (s := given.get(t.index)) is not None}
    stage_of |= _enclosed(tasks, movable, needs, stage_of)
    node_of: dict[int, int] = {}  # task -> node of the quotient
    for task in tasks:
        known = stages.get(stage_of.get(task.index, -1))
        node_of[task.index] = quotient.add() if known is None else known
    _connect(tasks, needs, node_of, stage_of, quotient)

    def join(task: TaskNode) -> bool:
        """Puts a task in the last stage of its submesh that keeps the graph acyclic, if any."""
        for stage in reversed(of_submesh.get(task.submesh, ())):
            if quotient.may_merge(stages[stage], node_of[task.index]):
                quotient.merge(stages[stage], node_of[task.index])
                stage_of[task.index] = stage
                return True
        return False

    free = [task for task in movable if task.index not in stage_of]
    while free:
        # One whose way to a stage leads through another can join when that one has.
        left = [task for task in free if not join(task)]
        if len(left) == len(free):
            stage = max(stages, default=-1) + 1
            stages[stage] = node_of[left[0].index]
            stage_of[left[0].index] = stage
            of_submesh.setdefault(left[0].submesh, []).append(stage)
            left = left[1:]
        free = left
    return stage_of


def _enclosed(
    tasks: Sequence[TaskNode],
    movable: Sequence[TaskNode],
    needs: Mapping[int, tuple[int, ...]],
    stage_of: Mapping[int, int],
) -> dict[int, int]:
    """The stage of each task that needs a stage of its submesh and is needed by that stage."""
    behind: dict[int, set[int]] = {}  # task -> the stages that it is in or needs
    ahead: dict[int, set[int]] = {task.index: set() for task in tasks}  # ... or that need it
    for task in tasks:
        own = {stage_of[task.index]} if task.index in stage_of else set[int]()
        behind[task.index] = own.union(*(behind[index] for index in needs[task.index]))
    for task in reversed(tasks):
        if task.index in stage_of:
            ahead[task.index].add(stage_of[task.index])
        for index in needs[task.index]:
            ahead[index] |= ahead[task.index]
    place = {stage_of[t.index]: t.submesh for t in movable if t.index in stage_of}
    found: dict[int, int] = {}
    for task in movable:
        around = behind[task.index] & ahead[task.index]
        here = [stage for stage in around if place[stage] == task.submesh]
        if task.index not in stage_of and here:
            found[task.index] = max(here)
    return found


def _connect(
    tasks: Sequence[TaskNode],
    needs: Mapping[int, tuple[int, ...]],
    node_of: Mapping[int, int],
    stage_of: Mapping[int, int],
    quotient: Quotient,
) -> None:
    """Enters what runs before what, all of it before any task joins a stage."""
    for position, task in enumerate(tasks):
        for index in needs[task.index]:
            source = node_of[index]
            if quotient.reaches(node_of[task.index], source):
                so_far = {t.index: node_of[t.index] for t in tasks[: position + 1]}
                _raise_cycle(task, source, tasks, needs, so_far, stage_of)
            quotient.connect(source, node_of[task.index])


def _given_stages(
    tasks: Sequence[TaskNode],
    given: Mapping[int, int | None],
    quotient: Quotient,
    stages: dict[int, int],
    of_submesh: dict[int, list[int]],
) -> None:
    owner: dict[int, TaskNode] = {}
    for task in tasks:
        stage = given.get(task.index)
        if stage is None:
            continue
        first = owner.setdefault(stage, task)
        if first.submesh != task.submesh:
            raise PartitionError(
                message(
                    f"stage `{stage}` lies on two submeshes: task `{first.name}` and task "
                    f"`{task.name}`.",
                    where=task.origin,
                    ways=("give the tasks different stages, or the same submesh",),
                )
            )
        if stage not in stages:
            stages[stage] = quotient.add()
            of_submesh.setdefault(task.submesh, []).append(stage)
    for numbers in of_submesh.values():
        numbers.sort()


def _raise_cycle(
    task: TaskNode,
    source: int,
    tasks: Sequence[TaskNode],
    needs: Mapping[int, tuple[int, ...]],
    node_of: Mapping[int, int],
    stage_of: Mapping[int, int],
) -> None:
    """Says which tasks lead from the task's stage, by way of node `source`, back to the task."""
    start = node_of[task.index]
    came: dict[int, int] = {start: start}  # node -> the node before it on a shortest path
    todo = [start]
    while todo and source not in came:
        node = todo.pop(0)
        for other in tasks:
            reads = (node_of[index] for index in needs[other.index] if index in node_of)
            after = node_of.get(other.index)
            if after is not None and after not in came and node in reads:
                came[after] = node
                todo.append(after)
    path = [source]
    while path[-1] != start:
        path.append(came[path[-1]])
    names = {node_of[t.index]: t for t in reversed(tasks) if t.index in node_of}
    lines = [_named(names[node], stage_of) for node in reversed(path)]
    raise PartitionError(
        message(
            f"the given stages form a cycle: task `{task.name}` of stage "
            f"`{stage_of.get(task.index)}` needs a stage that itself needs this stage.",
            where=task.origin,
            window=" -> ".join([*lines, f"{_named(task, stage_of)}  <-- here"]),
            ways=(
                "give the tasks of one stage consecutive places in the model",
                "leave `Task.stage` out and let the stages be found (`register_layers` gives "
                "stages too; a callback need not)",
            ),
        )
    )


def _named(task: TaskNode, stage_of: Mapping[int, int]) -> str:
    stage = stage_of.get(task.index)
    return task.name if stage is None else f"{task.name} (stage {stage})"


def _backward_stages(
    tasks: Sequence[TaskNode],
    given: Mapping[int, int | None],
    needs: Mapping[int, tuple[int, ...]],
    stage_of: Mapping[int, int],
) -> dict[int, int]:
    """Stage of each backward task that lies on the submesh of a stage."""
    by_index = {task.index: task for task in tasks}
    touched: dict[int, dict[int, set[Var]]] = {}  # submesh -> stage -> what its forward handles
    for index, stage in stage_of.items():
        stages = touched.setdefault(by_index[index].submesh, {})
        stages.setdefault(stage, set()).update(by_index[index].inputs, by_index[index].outputs)
    found: dict[int, int] = {}
    backward = [t for t in tasks if t.kind in ("BW", "B", "W") and t.submesh in touched]
    users: dict[int, list[int]] = {}
    for task in backward:
        for index in needs[task.index]:
            users.setdefault(index, []).append(task.index)
        stage = given.get(task.index)
        if stage is None:
            shared = {s: len(v & set(task.inputs)) for s, v in touched[task.submesh].items()}
            likely = [s for s, count in shared.items() if count == max(shared.values())]
            after = [
                found[index]
                for index in needs[task.index]
                if index in found and by_index[index].submesh == task.submesh
            ]
            stage = min(after) if after and min(after) in likely else max(likely)
        found[task.index] = stage
    for task in backward:
        # What begins a backward pass (random keys, for one) runs before all stages that read it.
        if given.get(task.index) is None and not any(index in found for index in needs[task.index]):
            readers = (i for i in users.get(task.index, ()) if by_index[i].submesh == task.submesh)
            found[task.index] = max(found[task.index], *(found[i] for i in readers), -1)
    return found


def _renumber(
    tasks: Sequence[TaskNode],
    given: Mapping[int, int | None],
    needs: Mapping[int, tuple[int, ...]],
    stage_of: Mapping[int, int],
    forward: Kind,
) -> dict[int, int]:
    """Numbers stages by longest path in changes of submesh, ties in program order.

    Given stages keep their order before all others; gaps in their numbers are closed.
    """
    depth: dict[int, int] = {}
    first: dict[int, int] = {}
    task_depth: dict[int, int] = {}
    by_index = {task.index: task for task in tasks}
    for position, task in enumerate(tasks):
        hops = [
            task_depth[index] + (by_index[index].submesh != task.submesh)
            for index in needs[task.index]
            if index in task_depth
        ]
        task_depth[task.index] = max(hops, default=0)
        stage = stage_of.get(task.index)
        if stage is not None and task.kind == forward:
            depth[stage] = max(depth.get(stage, 0), task_depth[task.index])
            first.setdefault(stage, position)
    fixed = {s for i, s in given.items() if s is not None and i in stage_of}

    order = 1 if forward == "F" else -1  # the last stage is the first to go backward

    def key(stage: int) -> tuple[int, int, int]:
        if stage in fixed:
            return (0, order * stage, 0)
        return (1, depth.get(stage, 0), first.get(stage, 0))

    numbers = {stage: n for n, stage in enumerate(sorted(set(stage_of.values()), key=key))}
    return {index: numbers[stage] for index, stage in stage_of.items()}


def _nodes(
    tasks: Sequence[TaskNode],
    needs: Mapping[int, tuple[int, ...]],
    stage_of: Mapping[int, int],
    ranks: tuple[int, ...],
    submeshes: Sequence[Submesh],
    forward: Kind,
) -> tuple[dict[int, Node], tuple[int, ...]]:
    """The schedule node of each task, and the submeshes of the rows that are no ranks.

    A task that would close a cycle in its action stands alone.
    """
    quotient = Quotient()
    numbers: dict[Node, int] = {}
    node_of: dict[int, Node] = {}
    rows: dict[int, int] = {}
    for task in tasks:
        sources = [numbers[node_of[index]] for index in needs[task.index]]
        node: Node | None = None
        if task.index in stage_of:
            kind = Kind.F if task.kind == forward else Kind(task.kind)
            node = Part(kind, stage_of[task.index])
            at = numbers.get(node)
            if at is not None and any(s != at and quotient.reaches(at, s) for s in sources):
                node = None
        if node is None:
            row = rows.setdefault(task.submesh, len(ranks) + len(rows))
            occupied = _overlapping(task.submesh, ranks, rows, submeshes)
            node = OutsideTask(f"{task.name}#{task.index}", row, occupied)
        if node not in numbers:
            numbers[node] = quotient.add()
        node_of[task.index] = node
        for source in sources:
            quotient.connect(source, numbers[node])
    return node_of, tuple(rows)


def _overlapping(
    submesh: int, ranks: tuple[int, ...], rows: Mapping[int, int], submeshes: Sequence[Submesh]
) -> tuple[int, ...]:
    if submeshes[submesh].rotation:
        return ()  # elsewhere in every iteration: it waits only for its values

    def devices(index: int) -> set[int]:
        return {device.id for device in submeshes[index].mesh.devices.flat}

    mine = devices(submesh)
    places = [*enumerate(ranks), *((row, index) for index, row in rows.items())]
    return tuple(
        row
        for row, index in places
        if (index != submesh or row < len(ranks)) and devices(index) & mine
    )


def _edges(
    tasks: Sequence[TaskNode],
    needs: Mapping[int, tuple[int, ...]],
    node_of: Mapping[int, Node],
    ordered_carries: Sequence[tuple[int, int]],
) -> tuple[Edge, ...]:
    by_index = {task.index: task for task in tasks}
    edges: dict[Edge, None] = {}
    for task in tasks:
        for index in needs[task.index]:
            source, target = node_of[index], node_of[task.index]
            if source != target:
                crosses = by_index[index].submesh != task.submesh
                edges[Edge(source, target, crosses)] = None
    for writer, reader in ordered_carries:
        crosses = by_index[writer].submesh != by_index[reader].submesh
        edges[Edge(node_of[writer], node_of[reader], crosses, distance=1)] = None
    return tuple(edges)
