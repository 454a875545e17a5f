"""What actions cost and what they keep alive: the inputs of a simulation beside the schedule."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.graph import Edge, Node, OutsideTask, Part, StageGraph

_KEY = re.compile(r"\d*(?:BW|F|B|W)|\[\d+(?:BW|F|B|W)\|\d+(?:BW|F|B|W)\]")

UNIT: Mapping[str, float] = {"F": 1.0, "B": 1.0, "W": 1.0}


@dataclass(frozen=True, slots=True)
class Costs:
    """Run times in any one unit; the default is unit cost.

    Attributes:
        table: From a kind (`"F"`), a node (`"2F"`, `"tower"`) or an overlapped pair of nodes
            (`"[0F|7BW]"`) to its run time. A node beats its kind. A `BW` without an entry costs
            its `B` and `W`; a pair without an entry both parts; a task outside the ranks `1`.

    >>> Costs({"F": 1.0, "B": 1.5, "W": 0.5}).of(Part(Kind.BW, 3))
    2.0
    """

    table: Mapping[str, float] = field(default_factory=lambda: UNIT)

    def __hash__(self) -> int:
        return hash(frozenset(self.table.items()))

    def of(self, node: Node) -> float:
        """The run time of one run of a node."""
        if str(node) in self.table:
            return self.table[str(node)]
        if isinstance(node, OutsideTask):
            return 1.0
        if node.kind is Kind.BW and Kind.BW not in self.table:
            return self.of(Part(Kind.B, node.stage)) + self.of(Part(Kind.W, node.stage))
        return self.table.get(node.kind, UNIT.get(node.kind, 1.0))

    def of_pair(self, first: Part, second: Part, apart: float) -> float:
        """The run time of an overlapped pair whose parts take `apart` one after the other."""
        return self.table.get(f"[{first}|{second}]", apart)


def costs_of(costs: Costs | Mapping[str, float], graph: StageGraph | None = None) -> Costs:
    """Takes costs as an object or as their table, and checks them.

    Raises:
        ScheduleError: A cost is negative, or, if the graph is given, of nothing.
    """
    if not isinstance(costs, Costs):
        costs = Costs(costs)
    problems = [
        f"The cost of `{key}` is `{cost}`; it is `0` or more."
        for key, cost in costs.table.items()
        if not cost >= 0
    ]
    names = {task.name for task in graph.outside} if graph else set[str]()
    unknown = [key for key in costs.table if key not in names and not _KEY.fullmatch(key)]
    if graph is not None:
        problems += [f"The cost of `{key}` is of no kind, node, task or pair." for key in unknown]
    if problems:
        way = 'name costs as `"F"`, `"2F"`, `"[0F|7BW]"` or by the name of an outside task'
        raise ScheduleError(message(listed(problems), ways=[way]))
    return costs


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one stage keeps for one microbatch.

    Under rematerialisation the set that lives from forward to backward and the one that waits for
    the weight gradient differ much, so they are told apart.

    Attributes:
        residual: Bytes that live from F until B (or BW).
        waiting: Bytes that live from B until W, where the backward is split.
        stages: Per stage `(residual, waiting)` where it differs.
        fixed: Bytes that a rank holds throughout: its parameters and optimizer state.
    """

    residual: float = 0.0
    waiting: float = 0.0
    stages: Mapping[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )
    fixed: float = 0.0

    def __hash__(self) -> int:
        return hash((self.residual, self.waiting, frozenset(self.stages.items()), self.fixed))

    def of(self, stage: int) -> tuple[float, float]:
        """`(residual, waiting)` of a stage, in bytes."""
        return self.stages.get(stage, (self.residual, self.waiting))


NO_MEMORY = Memory()  # every set counts, none has bytes

Latency: TypeAlias = float | Mapping[tuple[str, str], float]


def latency_of(latency: Latency, edge: Edge) -> float:
    """How long after the end of its source an edge's value is there.

    A number applies to every edge that crosses; a map is from (source, target), as
    `("0F", "1F")`, to the latency of that edge.
    """
    if not edge.crosses:
        return 0.0
    if isinstance(latency, Mapping):
        return latency.get((str(edge.source), str(edge.target)), 0.0)
    return latency


def check_latency(latency: Latency) -> None:
    """Checks latencies.

    Raises:
        ScheduleError: A latency is negative.
    """
    table = latency if isinstance(latency, Mapping) else {("", ""): latency}
    for (source, target), wait in table.items():
        if not wait >= 0:
            of = f" from `{source}` to `{target}`" if source else ""
            raise ScheduleError(f"The latency{of} is `{wait}`; it is `0` or more.")
