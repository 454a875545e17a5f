"""`simulate`: start times, bubbles, memory and the global order of a schedule on a stage graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from multimesh._src.schedule.actions import Entry, TaskRun
from multimesh._src.schedule.check import check, prepare
from multimesh._src.schedule.costs import (
    NO_MEMORY,
    UNIT,
    Costs,
    Latency,
    Memory,
    check_latency,
    costs_of,
    latency_of,
)
from multimesh._src.schedule.engine import Trace, run
from multimesh._src.schedule.expand import Expanded
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.peaks import Peaks, peaks_of
from multimesh._src.schedule.schedule import Schedule

Event: TypeAlias = tuple[int, Entry | TaskRun]


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """What a schedule does with given costs. Times are in the unit of the costs.

    Attributes:
        schedule: The schedule, without actions that the program lacks.
        graph: The stage graph that it ran on.
        latency: The latency of transfers.
        peaks: Live residual sets and bytes per rank.
        starts: The start time of every event of `order`.
        ends: The end time of every event of `order`.
        makespan: The end of the last event.
        busy: Per row the time that it runs.
        spans: Per row (start of the first event, end of the last).
    """

    schedule: Schedule
    graph: StageGraph
    latency: Latency
    peaks: Peaks
    starts: Sequence[float]
    ends: Sequence[float]
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[tuple[float, float], ...]
    _expanded: Expanded
    _trace: Trace

    @cached_property
    def order(self) -> tuple[Event, ...]:
        """Everything that runs as (row, action, pair or task run).

        By start time, ties by lower row, and legal for the dataflow. Rows from `num_ranks` on
        belong to tasks outside the ranks.
        """
        return _order(self._expanded, self._trace)

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Positions in `order` of a chain of events up to the last end.

        Each starts as soon as the one before it allows.
        """
        return _critical_path(self._expanded, self._trace, self.latency)

    def __repr__(self) -> str:
        name, makespan = self.schedule.name, self.makespan
        return f"Simulation({name}, makespan={makespan:g}, bubble_share={self.bubble_share:.3f})"

    @cached_property
    def span_bubbles(self) -> tuple[float, ...]:
        """Per rank the idle time between its first start and its last end."""
        return tuple(
            end - start - busy for (start, end), busy in zip(self.spans, self.busy, strict=True)
        )[: self.graph.num_ranks]

    @cached_property
    def makespan_bubbles(self) -> tuple[float, ...]:
        """Per rank the idle time within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)[: self.graph.num_ranks]

    @property
    def span_bubble(self) -> float:
        """The largest span bubble of a rank."""
        return max(self.span_bubbles)

    @property
    def makespan_bubble(self) -> float:
        """The largest makespan bubble of a rank."""
        return max(self.makespan_bubbles)

    @property
    def bubble_share(self) -> float:
        """The idle share of all ranks within the makespan, from 0 to 1."""
        whole = self.makespan * self.graph.num_ranks
        return sum(self.makespan_bubbles) / whole if whole else 0.0


def simulate(
    schedule: Schedule,
    graph: StageGraph | None = None,
    *,
    costs: Costs | Mapping[str, float] = UNIT,
    latency: Latency = 0.0,
    memory: Memory = NO_MEMORY,
) -> Simulation:
    """Runs a schedule against a clock.

    Args:
        schedule: The schedule; actions that the graph lacks are left out.
        graph: The program's stage graph; the textbook chain by default.
        costs: Run time per kind, node or overlapped pair (see `Costs`); unit cost by default.
        latency: Time from the end of an action to its value's arrival on other devices: one
            number, or a map from (source node, target node).
        memory: Bytes per residual set (see `Memory`).

    Raises:
        ScheduleError: The schedule does not run to its end on this graph, or a cost or latency
            makes no sense.

    >>> found = simulate(make_schedule("1f1b", num_ranks=4, num_microbatches=8), latency=0.5)
    >>> found.makespan, found.peaks.until_b
    (41.0, (4, 3, 2, 1))
    """
    schedule, graph, expanded = prepare(schedule, graph)
    costs = costs_of(costs, graph)
    check_latency(latency)
    trace = run(expanded, costs, latency)
    if min(trace.ran, default=0) < 0:
        check(schedule, graph)
    busy, spans = _busy(trace, graph.num_rows)
    return Simulation(
        schedule=schedule,
        graph=graph,
        latency=latency,
        peaks=peaks_of(expanded, memory),
        starts=trace.starts,
        ends=trace.ends,
        makespan=max(trace.ends, default=0.0),
        busy=busy,
        spans=spans,
        _expanded=expanded,
        _trace=trace,
    )


def _order(expanded: Expanded, trace: Trace) -> tuple[Event, ...]:
    rows, num_ranks, m = expanded.schedule.rows, len(expanded.rows), expanded.num_microbatches
    if not expanded.outside:
        return tuple((r, rows[r][k]) for r, k in zip(trace.rows, trace.positions, strict=True))
    names = [task.name for task in expanded.graph.outside]
    return tuple(
        (r, rows[r][k] if r < num_ranks else TaskRun(names[k // m], k % m))
        for r, k in zip(trace.rows, trace.positions, strict=True)
    )


def _busy(trace: Trace, num_rows: int) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """Per row the time that it runs, and (first start, last end)."""
    busy, first, last = ([0.0] * num_rows for _ in range(3))
    for row, start, end in zip(trace.rows, trace.starts, trace.ends, strict=True):
        if end > last[row] == 0.0:
            first[row] = start
        busy[row] += end - start
        last[row] = end
    return tuple(busy), tuple(zip(first, last, strict=True))


def _critical_path(expanded: Expanded, trace: Trace, latency: Latency) -> tuple[int, ...]:
    """Walks back from the last end over what each event waited for; the own row wins ties."""
    if not trace.ends:
        return ()
    before = _events_before(expanded, trace)
    event = max(range(len(trace.ends)), key=trace.ends.__getitem__)
    path = [event]
    while trace.starts[event] > 0.0:
        cause = _cause(expanded, trace, latency, event, before[event])
        if cause < 0:
            break
        event = cause
        path.append(event)
    return tuple(reversed(path))


def _events_before(expanded: Expanded, trace: Trace) -> list[int]:
    """Per event the one that last used its devices before, or -1."""
    last = [-1] * expanded.graph.num_rows
    before: list[int] = []
    for event, row in enumerate(trace.rows):
        found = last[row]
        for other in expanded.blocked[row]:
            if last[other] >= 0 and (found < 0 or trace.ends[last[other]] > trace.ends[found]):
                found = last[other]
        before.append(found)
        last[row] = event
    return before


def _cause(expanded: Expanded, trace: Trace, latency: Latency, event: int, before: int) -> int:
    """The earlier event whose end the start of this one waited for, or -1."""
    start = trace.starts[event]
    if before >= 0 and trace.ends[before] == start:
        return before
    m, index = expanded.num_microbatches, expanded.graph.index
    for unit, microbatch in _units_of(expanded, trace, event):
        for edge in expanded.units[unit].edges:
            i = microbatch - edge.distance
            source = trace.ran[index[edge.source] * m + i] if i >= 0 else -1
            if source >= 0 and trace.ends[source] + latency_of(latency, edge) == start:
                return source
    return -1


def _units_of(expanded: Expanded, trace: Trace, event: int) -> list[tuple[int, int]]:
    row, position = trace.rows[event], trace.positions[event]
    if row >= len(expanded.rows):
        task, microbatch = divmod(position, expanded.num_microbatches)
        return [(expanded.outside[task], microbatch)]
    todo = expanded.rows[row]
    found = [(todo.units[position], todo.microbatches[position])]
    if position in todo.seconds:
        found.append(todo.seconds[position])
    return found
