"""The stage graph: what one microbatch of a program runs, where, and what needs what.

Nodes are the actions of the ranks without their microbatch (`Part`) and tasks on submeshes that
are no rank (`OutsideTask`, in a row of their own). Edges are the program's own dataflow: skips and
side towers are ordinary. `StageGraph.chain` is the textbook pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import Action, Entry, Kind, actions_of
from multimesh._src.schedule.placement import Placement, placement_named
from multimesh._src.schedule.schedule import Schedule, joined


@dataclass(frozen=True, slots=True)
class Part:
    """An action without its microbatch, as `2F`."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


@dataclass(frozen=True, slots=True)
class OutsideTask:
    """A task on a submesh that is no rank.

    Attributes:
        name: Its name, unique in the graph.
        row: The number of its row: `num_ranks` or more; tasks of one submesh share a row.
        occupies: Ranks and rows that share devices with its submesh: none of them runs anything
            while it runs.
    """

    name: str
    row: int
    occupies: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


Node: TypeAlias = Part | OutsideTask


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` of microbatch i needs `source` of microbatch i - `distance`.

    `crosses` says that the value moves to other devices, so that a latency applies.
    """

    source: Node
    target: Node
    crosses: bool = False
    distance: int = 0


@dataclass(frozen=True)
class StageGraph:
    """The nodes of one microbatch and the edges between them.

    Where the backward of a stage is split, its nodes are `B` and `W`; else one node `BW`. A
    schedule's `BW` runs both nodes of a split stage.

    Attributes:
        placement: The rank of every stage.
        nodes: All nodes, each once.
        edges: What needs what; acyclic within a microbatch.
        num_ranks: The number of ranks.
        labels: How errors and reports call the rows; `rank 0`, ..., `row 2`, ... by default.
        overlaps: Pairs of rows whose submeshes share devices (besides `OutsideTask.occupies`).
    """

    placement: Placement
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    num_ranks: int
    labels: tuple[str, ...] = ()
    overlaps: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def chain(
        num_ranks: int,
        num_chunks: int = 1,
        placement: str | Placement = "loop",
        kinds: Iterable[Kind | str] = (Kind.F, Kind.B, Kind.W),
    ) -> "StageGraph":
        """The textbook pipeline of equal stages: forward down the chain and backward up.

        F(s) needs F(s-1); B(s) needs F(s) and B(s+1); W(s) needs B(s); BW as B. A kind that is
        not in `kinds` is left out; `BW` beside `B` or `W` is dropped, because they cover it.
        """
        if isinstance(placement, str):
            placement = placement_named(placement, num_ranks, num_chunks)
        wanted = {Kind(kind) for kind in kinds}
        if wanted & {Kind.B, Kind.W}:
            wanted -= {Kind.BW}
        return StageGraph(placement, *_chain(placement, wanted), num_ranks)

    @cached_property
    def index(self) -> dict[Node, int]:
        """The position of every node in `nodes`."""
        return {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def outside(self) -> tuple[OutsideTask, ...]:
        """The tasks outside the ranks."""
        return tuple(node for node in self.nodes if isinstance(node, OutsideTask))

    @cached_property
    def num_rows(self) -> int:
        """Ranks and rows of outside tasks together."""
        return max((self.num_ranks, *(task.row + 1 for task in self.outside)))

    def label(self, row: int) -> str:
        """How to call a row."""
        if row < len(self.labels):
            return self.labels[row]
        return f"rank {row}" if row < self.num_ranks else f"row {row}"

    def covers(self, kind: Kind, stage: int) -> tuple[int, ...]:
        """The nodes that an action of this kind and stage runs, in order; none if it lacks them."""
        wanted = (kind,)
        if kind is Kind.BW and Part(Kind.BW, stage) not in self.index:
            wanted = (Kind.B, Kind.W)
        parts = (Part(k, stage) for k in wanted)
        return tuple(self.index[part] for part in parts if part in self.index)


def _chain(placement: Placement, kinds: set[Kind]) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
    last = len(placement) - 1
    backward = Kind.BW if Kind.BW in kinds else Kind.B
    nodes = [Part(kind, s) for kind in Kind for s in range(last + 1) if kind in kinds]
    wanted: list[tuple[Part, Part]] = []
    for s in range(last + 1):
        here = Part(backward, s)
        wanted.append((Part(Kind.F, s - 1), Part(Kind.F, s)))
        wanted.append((Part(Kind.F, s), here))
        wanted.append((Part(backward, s + 1), here))
        wanted.append((here if Kind.B in kinds else Part(Kind.F, s), Part(Kind.W, s)))
    known = set(nodes)
    edges = [
        Edge(a, b, crosses=placement[a.stage] != placement[b.stage])
        for a, b in wanted
        if a in known and b in known
    ]
    return tuple(nodes), tuple(edges)


def check_graph(graph: StageGraph) -> None:
    """Checks that a stage graph makes sense by itself.

    Raises:
        ScheduleError: A node twice, an edge to an unknown node, a stage or row out of range, a
            cycle within a microbatch, or an edge from a later microbatch.
    """
    problems = _node_problems(graph) + _edge_problems(graph)
    if not problems:
        cycle = _cycle(graph)
        path = " -> ".join(f"`{graph.nodes[n]}`" for n in cycle)
        problems = [f"The stage graph has a cycle: {path}."] if cycle else []
    if problems:
        raise ScheduleError(message(listed(problems)))


def _node_problems(graph: StageGraph) -> list[str]:
    problems: list[str] = []
    if len(graph.index) < len(graph.nodes):
        problems.append("A node stands twice in the stage graph.")
    for node in graph.nodes:
        if isinstance(node, OutsideTask):
            if node.row < graph.num_ranks:
                problems.append(
                    f"Task `{node}` has row `{node.row}`, which is a rank; "
                    f"rows of their own start at `{graph.num_ranks}`."
                )
        elif not 0 <= node.stage < len(graph.placement):
            problems.append(f"`{node}` is of no stage: there are `{len(graph.placement)}`.")
    outside = [rank for rank in graph.placement if not 0 <= rank < graph.num_ranks]
    problems += [f"A stage lies on rank `{r}` of `{graph.num_ranks}`." for r in outside]
    return problems


def _edge_problems(graph: StageGraph) -> list[str]:
    problems: list[str] = []
    for edge in graph.edges:
        text = f"The edge from `{edge.source}` to `{edge.target}`"
        if edge.source not in graph.index or edge.target not in graph.index:
            problems.append(f"{text} names a node that the stage graph does not have.")
        if edge.distance < 0:
            problems.append(f"{text} has the distance `{edge.distance}`; it is `0` or more.")
    return problems


def _cycle(graph: StageGraph) -> list[int]:
    """The nodes of one cycle within a microbatch, the first one again at the end; or none."""
    needs: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        if edge.distance == 0:
            needs[graph.index[edge.target]].append(graph.index[edge.source])
    left = {n: len(sources) for n, sources in enumerate(needs)}
    users: list[list[int]] = [[] for _ in graph.nodes]
    for target, sources in enumerate(needs):
        for source in sources:
            users[source].append(target)
    free = [n for n, count in left.items() if count == 0]
    while free:
        node = free.pop()
        del left[node]
        for user in users[node]:
            left[user] -= 1
            if left[user] == 0:
                free.append(user)
    if not left:
        return []
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(n for n in needs[path[-1]] if n in left))
    return path[path.index(path[-1]) :][::-1]


def fit(schedule: Schedule, graph: StageGraph) -> Schedule:
    """The schedule without the actions that the program does not have.

    A stage may lack F, B or W: frozen stages, forward-only loops. Where a stage's backward could
    not be split (its node is `BW`), its `B` becomes `BW` and its `W` goes.
    """
    changed: dict[tuple[Kind, int], Kind | None] = {}
    for stage in range(len(graph.placement)):
        for kind in Kind:
            if not graph.covers(kind, stage):
                whole = kind is Kind.B and bool(graph.covers(Kind.BW, stage))
                whole = whole and Part(Kind.BW, stage) in graph.index
                changed[kind, stage] = Kind.BW if whole else None
    if not changed:
        return schedule
    rows = tuple(
        tuple(e for e in (_fitted(entry, changed) for entry in row) if e is not None)
        for row in schedule.rows
    )
    return Schedule(schedule.name, rows, schedule.placement, schedule.num_microbatches)


def _fitted(entry: Entry, changed: dict[tuple[Kind, int], Kind | None]) -> Entry | None:
    kept: list[Action] = []
    for action in actions_of(entry):
        kind = changed.get((action.kind, action.stage), action.kind)
        if kind is action.kind:
            kept.append(action)
        elif kind is not None:
            kept.append(Action(kind, action.stage, action.microbatch))
    return entry if tuple(kept) == actions_of(entry) else joined(kept)
