"""A schedule and a stage graph as plain integers, for the checker and the simulator.

Instance n * m + i is node n of microbatch i. A `Unit` is what one action runs: one node, or the
two of a BW whose stage is split. A `Step` is an entry of a row: one unit with its microbatch, or
the two of an overlapped pair.
"""

from dataclasses import dataclass, field

from multimesh._src.schedule.actions import Action, Entry, Kind
from multimesh._src.schedule.graph import Edge, StageGraph
from multimesh._src.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Unit:
    """What one action, or one task outside the ranks, runs.

    Attributes:
        nodes: The nodes that it runs.
        edges: The edges that it waits for; edges between its own nodes of one microbatch are not.
    """

    nodes: tuple[int, ...]
    edges: tuple[Edge, ...]


@dataclass(slots=True)
class ExpandedRow:
    """One rank's row. Entry k runs unit `units[k]` for microbatch `microbatches[k]`.

    `seconds[k]` is the (unit, microbatch) of the second part where entry k is a pair.
    """

    units: list[int] = field(default_factory=list[int])
    microbatches: list[int] = field(default_factory=list[int])
    seconds: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])


@dataclass(frozen=True, slots=True)
class Expanded:
    """All rows of a schedule on a stage graph.

    Attributes:
        units: The units, first those of actions, then one of every task outside the ranks.
        rows: The rows of the ranks.
        outside: The units of the tasks outside the ranks, in the order of `graph.outside`.
        blocked: Per row, ranks first, the rows that share devices with it.
    """

    schedule: Schedule
    graph: StageGraph
    num_microbatches: int
    units: tuple[Unit, ...]
    rows: tuple[ExpandedRow, ...]
    outside: tuple[int, ...]
    blocked: tuple[tuple[int, ...], ...]


def expand(schedule: Schedule, graph: StageGraph, num_microbatches: int) -> Expanded:
    """Writes a schedule as integers; every action must exist in the graph."""
    edges: list[list[Edge]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        edges[graph.index[edge.target]].append(edge)
    units: list[Unit] = []
    numbers: dict[Kind, list[int]] = {}
    for kind in Kind:
        numbers[kind] = []
        for stage in range(len(graph.placement)):
            numbers[kind].append(len(units))
            units.append(_unit(graph.covers(kind, stage), edges, graph))
    rows = tuple(_expand_row(row, numbers) for row in schedule.rows)
    outside = tuple(range(len(units), len(units) + len(graph.outside)))
    units += [_unit((graph.index[task],), edges, graph) for task in graph.outside]
    return Expanded(schedule, graph, num_microbatches, tuple(units), rows, outside, _blocked(graph))


def _unit(nodes: tuple[int, ...], edges: list[list[Edge]], graph: StageGraph) -> Unit:
    own = set(nodes)
    wanted = [
        edge
        for node in nodes
        for edge in edges[node]
        if edge.distance > 0 or graph.index[edge.source] not in own
    ]
    return Unit(nodes, tuple(wanted))


def _expand_row(row: tuple[Entry, ...], numbers: dict[Kind, list[int]]) -> ExpandedRow:
    expanded = ExpandedRow()
    add_unit, add_microbatch = expanded.units.append, expanded.microbatches.append
    for position, entry in enumerate(row):
        if isinstance(entry, Action):
            action = entry
        else:
            action, second = entry.first, entry.second
            expanded.seconds[position] = numbers[second.kind][second.stage], second.microbatch
        add_unit(numbers[action.kind][action.stage])
        add_microbatch(action.microbatch)
    return expanded


def _blocked(graph: StageGraph) -> tuple[tuple[int, ...], ...]:
    blocked: list[set[int]] = [set() for _ in range(graph.num_rows)]
    shared = [(task.row, row) for task in graph.outside for row in task.occupies]
    # Two outside rows that occupy the same rank are in each other's way, too.
    shared += [(a, b) for a, r in shared for b, s in shared if r == s and a < b]
    for a, b in (*graph.overlaps, *shared):
        blocked[a].add(b)
        blocked[b].add(a)
    return tuple(tuple(sorted(rows)) for rows in blocked)
